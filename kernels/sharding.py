"""Sharding rules of our operators for torch's DTensor, and for checkers that ask DTensor.

``register_shardings()`` tells torch which shards of an operator's inputs give which shard of its
outputs, one mesh axis at a time. For every letter of the op's einsum (see `runtime.op`), inputs and
outputs can be sharded along its dims. An input without the letter is replicated, and an output
without it is a partial sum. "..." are all leading dims; "_" is a dim that must not be sharded;
"whole" is a replicated output. Operators without such a rule refuse DTensors. For any other
placement, DTensor gathers first. If heads or pairs are sharded over an axis, their number must be
divisible by its size.

Nothing else imports this file: DTensor takes seconds to import, and plain tensors do not need it.
The ops' torch paths consist of torch operators, which already have rules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from warpweave.kernels.activation import activation_bwd_op, activation_op
from warpweave.kernels.attention.function import attention_bwd_op, attention_op
from warpweave.kernels.cross_entropy.backward import cross_entropy_bwd_op
from warpweave.kernels.cross_entropy.forward import cross_entropy_fwd_op
from warpweave.kernels.dropout import dropout_op, dropped
from warpweave.kernels.norm.function import norm_bwd_op, norm_op
from warpweave.kernels.rope.rotation import rope_op, rope_qk_op
from warpweave.kernels.runtime.op import Op

_Rules = list[tuple[list, list]]


def _letters(term: str, dims: int) -> str:
    """One letter for each dim, with digits for those of "..."."""
    return term.replace("...", "".join(map(str, range(dims))))


def _rules(op: Op) -> Callable[..., _Rules]:
    """Rules for `register_sharding`: a choice is (placements of outputs, of arguments)."""

    def rules(*args: Any) -> _Rules:
        einsum = op.sharding if isinstance(op.sharding, str) else op.sharding(*op.nested(args))
        inputs, outputs = (side.split(", ") for side in einsum.split(" -> "))
        arguments = op.operator._opoverload._schema.arguments
        at = [i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)]
        terms = dict(zip(at, inputs, strict=True))
        first = next(i for i in at if args[i] is not None)
        dims = len(args[first].shape) - len(terms[first].replace("...", ""))
        inputs = [
            _letters(terms[i], dims) if hasattr(arg, "placements") else None
            for i, arg in enumerate(args)
        ]
        outputs = [term if term == "whole" else _letters(term, dims) for term in outputs]
        cut = {c for term in inputs if term is not None for c in term} - {"_"}
        return [
            (
                [_place(term, c, Partial()) for term in outputs],
                [None if term is None else _place(term, c, Replicate()) for term in inputs],
            )
            for c in (None, *sorted(cut))
        ]

    return rules


def _place(term: str, letter: str | None, without: Any) -> Any:
    """The placement of a tensor if the dims of `letter` are sharded; None shards no dims."""
    if letter is None or term == "whole":
        return Replicate()
    return Shard(term.index(letter)) if letter in term else without


@cache
def register_shardings() -> None:
    """Make the operators of ``warpweave.kernels`` accept DTensors; once per process is enough."""
    for op in (
        *(attention_op, attention_bwd_op, norm_op, norm_bwd_op, rope_op, rope_qk_op),
        *(activation_op, activation_bwd_op, dropout_op, dropped),
        *(cross_entropy_fwd_op, cross_entropy_bwd_op),
    ):
        register_sharding(op.operator._opoverload)(_rules(op))
