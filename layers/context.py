"""What the layers must know about the tokens they process, beyond the activations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from warpweave.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class TokenContext:
    """Where the rows of an activation x[T, E] come from.

    Attributes:
        batch: number of samples B; after gathering over the tensor axis, T = B * S/cp.
        layout: which positions each rank of the context axis holds; None is the whole sequence.
        rope: (cos, sin), each [S/cp, D/2], of this rank's positions; None without rotary embedding.
        seed: dropout key of this step.
        token_ids: int64, one per row of the residual stream (T, or T/tp with sequence
            parallelism): the token's number in the whole global batch, by which dropout is keyed.
        documents: int32 or int64 [n + 1] or [B, n + 1], boundaries of packed documents in positions
            of the whole sequence, across which attention does not look; None is one document.

    Two packed documents, of 10 and 6 tokens, whose rotations start anew::

        positions = torch.cat((torch.arange(10), torch.arange(6)))
        context = TokenContext(
            batch=1, rope=rope_table(positions, head_dim), documents=torch.tensor([0, 10, 16])
        )
        y = block(x, context)  # x[16, E]
    """

    batch: int
    layout: SequenceLayout | None = None
    rope: tuple[Tensor, Tensor] | None = None
    seed: int = 0
    token_ids: Tensor | None = None
    documents: Tensor | None = None
