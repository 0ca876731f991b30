"""Ring attention of packed documents: your own q, k, and v, sharded over two ranks.

torchrun --standalone --nproc-per-node 2 examples/ring_documents.py
"""

import torch

from warpweave import Mesh, join
from warpweave.kernels.attention import attention
from warpweave.parallel.context import context_attention
from warpweave.parallel.layout import SequenceLayout


def main() -> float:
    """Compare ring attention with attention on one device; return the largest difference."""
    with join(Mesh(cp=2), backend="gloo") as session:
        mesh = Mesh(cp=2).connect()
        layout = SequenceLayout(96, 2)  # each rank holds a chunk of the head and one of the tail
        documents = torch.tensor([0, 10, 61, 96])  # boundaries; no token sees another document
        torch.manual_seed(0)
        sizes = (8, 2, 2)  # heads of q, k, and v: grouped queries
        whole = [torch.randn(1, 96, n, 16, dtype=torch.float64, requires_grad=True) for n in sizes]
        own = [layout.shard(x.detach(), session.rank, dim=1).requires_grad_() for x in whole]

        y = context_attention(
            *own, layout=layout, group=mesh.context, documents=documents, strategy="ring"
        )
        y.square().sum().backward()
        wanted = attention(*whole, documents=documents)
        wanted.square().sum().backward()

        pairs = [(y, layout.shard(wanted, session.rank, dim=1))]
        pairs += [(x.grad, layout.shard(w.grad, session.rank, dim=1)) for x, w in zip(own, whole)]
        difference = max((found - right).abs().max().item() for found, right in pairs)
        print(f"rank {session.rank}: output and gradients differ by at most {difference:.0e}")
    return difference


if __name__ == "__main__":
    main()
