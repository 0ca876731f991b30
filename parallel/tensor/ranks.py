"""Tensor ranks: what moves around the first and the last product of a layer cut over a group.

    column-parallel   x: whole, or gathered from shards of tokens    dx: all-reduce, reduce-scatter
    row-parallel      y: all-reduce, or reduce-scatter               dy: whole, or gathered

Types and conventions are those of the room's ``__init__``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.gemm import gemm
from warpweave.kernels.gemm.gradients import weight_gradient
from warpweave.kernels.gemm.local import Local
from warpweave.kernels.runtime.wgrad import bias_gradient, rows
from warpweave.parallel.collectives import (
    Pending,
    group_rank,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
    sum_dtype,
)

Made = TypeVar("Made")
Gradient = torch.Tensor | None


@dataclass(frozen=True)
class TensorRanks(Local):
    """The R ranks of `group`: features are cut over them, and dim 0 of x and y, the tokens, too
    with `sequence_parallel`.

    In the backward with `bulk` the gather of dy runs under the bias gradient, that of x under the
    GEMM of dx and the sum of dx under that of dW: whole collectives under whole products. Without,
    each collective is waited for at once, with equal results.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool
    bulk: bool = True

    def name(self, op: str) -> str:
        return f"parallel_{op} on rank {group_rank(self.group)}"

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens of x[T/R, ...], or x itself where tokens are not cut."""
        return start_all_gather(x, self.group).wait() if self.sequence_parallel else x

    def start_sum(self, terms: torch.Tensor) -> Pending:
        """The sum over ranks of terms[T, ...], or this rank's tokens of it, on its way."""
        return (start_reduce_scatter if self.sequence_parallel else start_all_reduce_)(
            terms, self.group
        )

    def _launched(self, pending: Pending) -> Pending:
        """The blocking twin waits before anything else is launched."""
        if not self.bulk:
            pending.wait()
        return pending

    def column_product(self, x: torch.Tensor, multiply: Callable[[Any, int], Made]) -> Made:
        return multiply(self.gather(x), 0)

    def column_gradients(
        self,
        dz: torch.Tensor,
        x: torch.Tensor | None,
        weight: torch.Tensor,
        leaves: tuple[torch.Tensor, torch.Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[Gradient, Gradient, Gradient]:
        leaf, bias = leaves

        def start_input_gradient() -> Pending:
            terms = gemm(rows(dz), weight, out_dtype=sum_dtype(dz.dtype))
            return self._launched(self.start_sum(terms.view(*dz.shape[:-1], weight.shape[1])))

        # Popped when it runs: a weight gradient that is deferred then keeps no dx alive.
        todo = [start_input_gradient] if needs[0] else []
        pending: list[Pending] = []

        def operands() -> tuple[torch.Tensor, torch.Tensor]:
            if not self.sequence_parallel:
                gathering = None
            else:
                gathering = self._launched(start_all_gather(x, self.group))
            if todo:
                pending.append(todo.pop()())  # the GEMM of dx hides the gather of x,
            return dz, x if gathering is None else gathering.wait()  # that of dW the sum of dx

        dw = weight_gradient(leaf, operands) if needs[1] else None
        if todo:
            pending.append(todo.pop()())
        db = bias_gradient(bias, dz) if needs[2] else None
        return pending.pop().wait() if pending else None, dw, db

    def sum_product(
        self, h: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The sum over ranks of ``multiply(h)`` of all tokens h[T, ...], or this rank's tokens of
        it; `multiply` gives a new tensor."""
        return self.start_sum(multiply(h)).wait()

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
        def multiply(h: torch.Tensor) -> torch.Tensor:
            terms = gemm(rows(h), weight.t(), out_dtype=sum_dtype(h.dtype))
            return terms.view(*h.shape[:-1], len(weight))

        y = self.sum_product(h, multiply)
        if bias is not None:
            y += bias  # after the sum: once, not once per rank
        y = y.to(h.dtype)
        if drop is not None:
            y = dropout(y, drop, impl=impl)
        return y if residual is None else residual + y

    def row_gradients(
        self,
        dy: torch.Tensor,
        bias: torch.Tensor | None,
        multiply: Callable[[Any, int], Made],
    ) -> tuple[Made, torch.Tensor, Gradient]:
        gathering = None
        if self.sequence_parallel:
            gathering = self._launched(start_all_gather(dy, self.group))
        # of this rank's own tokens, while the others' arrive
        db = None if bias is None else bias_gradient(bias, dy)
        whole = dy if gathering is None else gathering.wait()
        return multiply(whole, 0), whole, db

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

        # Without a gradient, what is replicated is invariant.
        return tokens if self.sequence_parallel else rules.convert(tokens, self.group, src=R, dst=I)
