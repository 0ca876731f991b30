"""The collectives of column- and row-parallel products, and their overlap with the products.

    product           without sequence parallelism             with it
    column-parallel   forward  x replicated, no collective     all-gather of x[T/R, K]
                      backward all-reduce of dx                reduce-scatter of dx (all-gather of x
                                                               for dW)
    row-parallel      forward  all-reduce of y                 reduce-scatter of y
                      backward dy replicated, no collective    all-gather of dy[T/R, N]

`TensorRanks` is one record of the group and of `overlap`, the way in which collectives overlap with
the products next to them:

    none      blocking: each collective is waited for before anything else is launched
    bulk      the default: blocking, but in the backward of a column-parallel product the all-gather
              of x is hidden behind the GEMM of dx, and the reduction of dx behind the GEMM of dW
    chunked   a product in chunks of tokens, each hiding the messages of another chunk (`chunked`)
    fused     within the product's kernels, tile by tile, over symmetric memory (`kernels.overlap`)

    time of a row-parallel product and its reduction

    none, bulk   compute  |--------- GEMM ---------|
                 network                           |--- reduce-scatter ---|
    chunked      compute  |- 1 -|- 2 -|- 3 -|- 0 -|add
                 network        |- 1 -|- 2 -|- 3 -|
    fused        compute  |--- GEMM, tiles sent as they finish ---|add

The results are equal, up to rounding where sums are associated differently. In "chunked" and
"fused", the backward of a column-parallel product is that of "bulk". If dW is deferred or not
needed, however, "fused" fuses its GEMM with the reduce-scatter. ``benchmarks/overlap.py`` prints
the fastest choice on the ranks that it runs on.

Types and conventions are those of ``tensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_args

import torch
import torch.distributed as dist

from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.gemm.fused import gemm
from warpweave.kernels.gemm.local import LOCAL, Chunks, Local, weight_gradient
from warpweave.kernels.overlap.gathering import Gathering, check_fusing, sum_of_products
from warpweave.kernels.runtime.dispatch import choose
from warpweave.kernels.runtime.wgrad import bias_gradient, rows, waits
from warpweave.parallel.collectives import (
    Pending,
    group_rank,
    group_size,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
    sum_dtype,
)
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor import chunked
from warpweave.parallel.words import Overlap

Made = TypeVar("Made")
Gradient = torch.Tensor | None


@dataclass(frozen=True)
class TensorRanks(Local):
    """The R ranks of a tensor-parallel group, as used by a layer's Function.

    Attributes:
        group: the ranks, over which features are sharded.
        sequence_parallel: dim 0 of x and y, the tokens, is also sharded over them.
        overlap: the way in which collectives and products overlap, with equal results; see above.
        workspace: the group's symmetric memory, for "fused". All ranks must then have the same
            number of tokens and need the same gradients, because both determine their sequence of
            operations, which must be the same.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool
    overlap: Overlap = "bulk"
    workspace: Workspace | None = None

    def name(self, op: str) -> str:
        return f"parallel_{op} on rank {group_rank(self.group)}"

    # ---------------------------------------------------------------- whole collectives

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All-gather x[T, ...] from x[T/R, ...]; return x itself without sequence parallelism."""
        return start_all_gather(x, self.group).wait() if self.sequence_parallel else x

    def start_sum(self, terms: torch.Tensor) -> Pending:
        """Start the sum over ranks of terms[T, ...]: a reduce-scatter along the tokens, or an
        all-reduce without sequence parallelism."""
        start = start_reduce_scatter if self.sequence_parallel else start_all_reduce_
        return start(terms, self.group)

    def sum(self, terms: torch.Tensor) -> torch.Tensor:
        """Return the result of `start_sum`."""
        return self.start_sum(terms).wait()

    def term_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return sum_dtype(dtype)

    def _launched(self, pending: Pending) -> Pending:
        """Return `pending`. With overlap "none", wait for it first, before any other launch."""
        if self.overlap == "none":
            pending.wait()
        return pending

    # ---------------------------------------------------------------- column-parallel

    def column_product(self, x: torch.Tensor, multiply: Callable[[Any, int], Made]) -> Made:
        if self.sequence_parallel and self.overlap == "chunked":
            return chunked.gather_product(x, multiply, self.group)[0]
        if self.sequence_parallel and self.overlap == "fused":
            return multiply(Gathering(x, self.workspace), 0)
        return multiply(self.gather(x), 0)

    def column_gradients(
        self,
        dz: torch.Tensor,
        x: torch.Tensor | None,
        weight: torch.Tensor,
        leaves: tuple[torch.Tensor, torch.Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[Gradient, Gradient, Gradient]:
        """Return dx = sum over ranks of dz W, dW = dz^T x and db, by whole collectives and whole
        products.

        Unless overlap is "none", the all-gather of x is hidden behind the GEMM of dx, and the
        reduction of dx behind the GEMM of dW. If dW is deferred or not needed, there is only one
        GEMM, and "fused" reduces dx within it.
        """
        leaf, bias = leaves

        def start_input_gradient() -> Pending:
            terms = gemm(rows(dz), weight, out_dtype=sum_dtype(dz.dtype))
            return self._launched(self.start_sum(terms.view(*dz.shape[:-1], weight.shape[1])))

        # Popped when it runs, so a deferred weight gradient does not keep dx alive.
        todo = [start_input_gradient] if needs[0] else []
        pending: list[Pending] = []
        dx = None
        if todo and self.overlap == "fused" and not (needs[1] and not waits(leaf)):
            dx = sum_of_products(dz, weight, self.workspace, self.sequence_parallel)
            todo.clear()

        def operands() -> tuple[torch.Tensor, torch.Tensor]:
            if not self.sequence_parallel:
                gathering = None
            else:
                gathering = self._launched(start_all_gather(x, self.group))
            if todo:
                pending.append(todo.pop()())  # GEMM of dx while x is gathered, then GEMM of dW
            return dz, x if gathering is None else gathering.wait()  # while dx is reduced

        dw = weight_gradient(leaf, operands) if needs[1] else None
        if todo:
            pending.append(todo.pop()())
        db = bias_gradient(bias, dz) if needs[2] else None
        return pending.pop().wait() if pending else dx, dw, db

    # ---------------------------------------------------------------- row-parallel

    def row_product(
        self,
        h: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        drop: Drop | None = None,
        residual: torch.Tensor | None = None,
        precision: str | None = None,
        impl: str | None = None,
    ) -> torch.Tensor:
        if self.overlap == "fused":
            options = {"bias": bias, "drop": drop, "residual": residual, "precision": precision}
            where = self.workspace, self.sequence_parallel
            return sum_of_products(h, weight.t(), *where, **options)

        def multiply(h: torch.Tensor) -> torch.Tensor:
            terms = gemm(rows(h), weight.t(), out_dtype=sum_dtype(h.dtype))
            return terms.view(*h.shape[:-1], len(weight))

        y = self.sum_product(h, multiply)
        if bias is not None:
            y += bias  # after the sum, so it is added once and not once per rank
        y = y.to(h.dtype)
        if drop is not None:
            y = dropout(y, drop, impl=impl)
        return y if residual is None else residual + y

    def sum_product(
        self, h: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return `sum` of ``multiply(h)`` for all tokens h[T, ...]; `multiply` must return a new
        tensor."""
        if self.overlap != "chunked":
            return self.sum(multiply(h))
        if self.sequence_parallel:
            return chunked.product_scatter(h, multiply, self.group)
        return chunked.product_reduce(h, multiply, self.group)

    def row_gradients(
        self, dy: torch.Tensor, bias: torch.Tensor | None, multiply: Callable[[Any, int], Made]
    ) -> tuple[Made, torch.Tensor, Gradient]:
        """Like `Local.row_gradients`, with db of own tokens computed during the all-gather."""

        def of_own() -> Gradient:
            return None if bias is None else bias_gradient(bias, dy)

        if self.sequence_parallel and self.overlap == "chunked":
            return *chunked.gather_product(dy, multiply, self.group), of_own()
        if self.sequence_parallel and self.overlap == "fused":
            db, arriving = of_own(), Gathering(dy, self.workspace)
            made = multiply(arriving, 0)
            return made, self.gather(dy) if arriving.whole is None else arriving.whole, db
        group = self.group if self.sequence_parallel else None
        gathering = self._launched(start_all_gather(dy, group))
        db, whole = of_own(), gathering.wait()
        return multiply(whole, 0), whole, db

    # ---------------------------------------------------------------- sharded vocabulary

    def first_column(self, width: int) -> int:
        return group_rank(self.group) * width

    def merge(self, stats: torch.Tensor) -> torch.Tensor:
        """All-gather the `stats` of all ranks at once; every rank merges them in the same order."""
        every = start_all_gather(stats.unsqueeze(0), self.group).wait()
        return torch.cat((every[:, 0].logsumexp(0)[None], every[:, 1:].sum(0)))

    @property
    def chunks(self) -> Chunks | None:
        """The chunks of every rank's tokens for head and loss, for "chunked" and "fused".

        "chunked" has at least R chunks, so one is gathered while another is multiplied. "fused"
        gathers a chunk within the product with the first block of the vocabulary.
        """
        if self.overlap not in ("chunked", "fused"):
            return None
        ranks = group_size(self.group)

        def gather(x: torch.Tensor) -> Callable[[], Any]:
            if not self.sequence_parallel:
                return lambda: x
            if self.overlap == "fused":
                return lambda: Gathering(x, self.workspace)
            return start_all_gather(x, self.group).wait

        return Chunks(
            parts=ranks if self.sequence_parallel else 1,
            fewest=ranks if self.overlap == "chunked" else 1,
            start_gather=gather,
            start_sum=lambda terms: self.start_sum(terms).wait,
        )

    # ---------------------------------------------------------------- typing rules

    def column_input_type(self, x: Any) -> Any:
        from spmd_types import I, R, S, rules

        if self.sequence_parallel:
            return rules.all_gather(x, self.group, src=S(0), dst=R)
        return rules.convert(x, self.group, src=I, dst=R)

    def row_output_type(self, y: Any) -> Any:
        from spmd_types import I, P, S, rules

        if self.sequence_parallel:
            return rules.reduce_scatter(y, self.group, src=P, dst=S(0))
        return rules.all_reduce(y, self.group, src=P, dst=I)

    def row_tokens_type(self, tokens: Any) -> Any:
        from spmd_types import I, R, rules

        # Without a gradient, a replicated tensor is invariant.
        return tokens if self.sequence_parallel else rules.convert(tokens, self.group, src=R, dst=I)

    def loss_type(self, equation: str, *operands: Any) -> Any:
        from spmd_types import I, P, rules

        # exp-sum, target logit and sum of logits are each a sum over v
        return rules.all_reduce(rules.einsum(equation, *operands), self.group, src=P, dst=I)


# ---------------------------------------------------------------- the record for a group


def check_overlap(overlap: str) -> Overlap:
    """Return `overlap`. Raise ValueError if it is not one of the known values."""
    if overlap not in get_args(Overlap):
        raise ValueError(f"overlap must be one of {', '.join(get_args(Overlap))}, got {overlap!r}")
    return cast(Overlap, overlap)


def tensor_ranks(
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    overlap: str = "bulk",
    workspace: Workspace | None = None,
    *,
    x: torch.Tensor | None = None,
    impl: str | None = "triton",
) -> Local:
    """Return the ranks of `group` as used by a layer's Function; None means one device.

    For "fused", `x` and `impl` are the input of the product and the implementation that computes
    it. Raises ``ValueError`` if `overlap` is not one of the values, or "fused" cannot run.
    """
    word = check_overlap(overlap)
    if group is None:
        return LOCAL
    if word == "fused":
        if workspace is None:
            raise ValueError(
                "overlap='fused' needs `workspace`, got None; pass a Workspace of the "
                "tensor-parallel group"
            )
        if x is not None:
            check_fusing(choose(impl, x))
    return TensorRanks(group, sequence_parallel, word, workspace if word == "fused" else None)
