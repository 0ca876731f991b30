"""Shard your own module's weights over two ranks, with the same numbers as on one device.

torchrun --nproc-per-node 2 examples/parallel_mlp.py
"""

import torch
from torch import Tensor, nn

from warpweave import ColumnParallelLinear, RowParallelLinear, join
from warpweave.parallel.mesh import ConnectedMesh, Mesh


class MLP(nn.Module):
    """Two linear layers: nn.Linear on one device, half of each weight on each of two ranks."""

    def __init__(self, width: int, hidden: int, mesh: ConnectedMesh | None = None) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(width, hidden, mesh=mesh)
        self.down = RowParallelLinear(hidden, width, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., width] -> y[..., width], replicated on every rank."""
        return self.down(nn.functional.gelu(self.up(x)))


def main() -> None:
    """Compare one device with two ranks, forward and backward."""
    sizes = Mesh(tp=2)
    with join(sizes, backend="gloo") as session:
        mesh = sizes.connect()

        torch.manual_seed(0)
        whole = MLP(64, 256)
        torch.manual_seed(0)  # the same seed on every rank gives each its slice of the same weights
        cut = MLP(64, 256, mesh)

        x = torch.randn(8, 64)
        expected, y = whole(x), cut(x)
        torch.testing.assert_close(y, expected)
        expected.square().sum().backward()
        y.square().sum().backward()
        rows = slice(session.rank * 128, (session.rank + 1) * 128)
        torch.testing.assert_close(cut.up.weight.grad, whole.up.weight.grad[rows])
        shapes = tuple(cut.up.weight.shape), tuple(whole.up.weight.shape)
        print(f"rank {session.rank}: {shapes[0]} of {shapes[1]}, ok")


if __name__ == "__main__":
    main()
