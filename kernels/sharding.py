"""Sharding rules of our operators for torch's DTensor, and so for checkers that ask DTensor.

``register_shardings()`` tells torch which shards of an operator's inputs give which shard of its
outputs, one mesh axis at a time. Without it an operator refuses DTensors. Nothing else imports this
file: DTensor takes seconds to import, and plain tensors need none of it. The ops' torch paths are
made of torch's own operators, which have rules already.

    attention       batch, heads (no dropout)   norm        every dim but the last; sums partial
    rope            batch, sequence, heads      dropout     tokens
    activation      every dim, the last in whole pairs where it is gated
    cross_entropy   rows

All other dims must be whole on every rank; DTensor gathers them by itself. An axis that cuts heads
or pairs must divide their number.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

# Importing a kernel defines its operators.
import warpweave.kernels.activation
import warpweave.kernels.attention.function
import warpweave.kernels.cross_entropy
import warpweave.kernels.dropout
import warpweave.kernels.norm.function
import warpweave.kernels.rope  # noqa: F401

_WHOLE = Replicate()


def _whole(args, outputs):
    """The one rule of an operator whose inputs and outputs must all be whole."""
    tensors = [hasattr(a, "placements") for a in args]
    return [([_WHOLE] * outputs, [_WHOLE if tensor else None for tensor in tensors])]


def _rules(args, *choices):
    """`choices` (outputs, tensor inputs in order), plus the one where everything is whole.

    `args` are the operator's; whatever among them is no tensor has no placement.
    """
    outputs = len(choices[0][0])
    tensors = [hasattr(a, "placements") for a in args]
    choices = (([_WHOLE] * outputs, [_WHOLE] * sum(tensors)), *choices)
    rules = []
    for out, inputs in choices:
        left = iter(inputs)
        rules.append((list(out), [next(left) if tensor else None for tensor in tensors]))
    return rules


def _attention_inputs(documents, sinks, d):
    """Placements of documents and sinks, as far as there are any, where q is cut in dim d."""
    found = []
    if documents is not None:  # [n + 1], or of samples
        found.append(Shard(0) if d == 0 and len(documents.shape) > 1 else _WHOLE)
    if sinks is not None:
        found.append(_WHOLE if d == 0 else Shard(0))
    return found


def _attention(q, k, v, documents, sinks, seed, integers, reals):
    def choice(d, l):
        return [Shard(d), Shard(l)], [Shard(d)] * 3 + _attention_inputs(documents, sinks, d)

    args = (q, k, v, documents, sinks, seed, integers, reals)
    if reals[2]:  # dropout: draws by the numbers of samples and heads, which a shard does not know
        return _whole(args, 2)
    return _rules(args, choice(0, 0), choice(2, 1))


def _attention_backward(do, dlse, q, k, v, documents, sinks, o, lse, seed, integers, reals):
    def choice(d, l):
        with_lse = [] if dlse is None else [Shard(l)]
        more = _attention_inputs(documents, sinks, d)
        dsinks = _WHOLE if sinks is None else Partial() if d == 0 else Shard(0)
        inputs = [Shard(d), *with_lse, *[Shard(d)] * 3, *more, Shard(d), Shard(l)]
        return [*[Shard(d)] * 3, dsinks], inputs

    args = (do, dlse, q, k, v, documents, sinks, o, lse, seed, integers, reals)
    if reals[2]:  # dropout
        return _whole(args, 4)
    return _rules(args, choice(0, 0), choice(2, 1))


def _norm_fwd(x, weight, bias, residual, x_bias, tokens, eps, layer, *draw):
    def choice(d):  # an output that is absent is an empty tensor
        changed = not (residual is None and x_bias is None and tokens is None)
        out = [d, d if changed else _WHOLE, d if layer else _WHOLE, d]
        given = (x, d), (weight, _WHOLE), (bias, _WHOLE), (residual, d), (x_bias, _WHOLE)
        return out, [place for t, place in (*given, (tokens, d)) if t is not None]

    return _rules(
        (x, weight, bias, residual, x_bias, tokens, eps, layer, *draw),
        *(choice(Shard(i)) for i in range(len(x.shape) - 1)),
    )


def _norm_bwd(dy, ds, s, weight, mean, rstd, tokens, bias, x_bias, *rest):
    x_dtype, residual_dtype = rest[-2:]
    apart = residual_dtype >= 0 and (tokens is not None or residual_dtype != x_dtype)

    def choice(d):
        given = (dy, d), (ds, d), (s, d), (weight, _WHOLE), (mean, d), (rstd, d), (tokens, d)
        sums = [Partial() if wanted else _WHOLE for wanted in (x_bias, True, bias)]
        return [d, d if apart else _WHOLE, *sums], [p for t, p in given if t is not None]

    return _rules(
        (dy, ds, s, weight, mean, rstd, tokens, bias, x_bias, *rest),
        *(choice(Shard(i)) for i in range(len(s.shape) - 1)),
    )


def _rope_qk(q, k, cos, sin, *flags):
    return _rules(
        (q, k, cos, sin, *flags),
        ([Shard(0)] * 2, [Shard(0)] * 2 + [_WHOLE] * 2),
        ([Shard(1)] * 2, [Shard(1)] * 2 + [Shard(0)] * 2),
        ([Shard(2)] * 2, [Shard(2)] * 2 + [_WHOLE] * 2),
    )


def _rope(x, cos, sin, *flags):
    return _rules(
        (x, cos, sin, *flags),
        ([Shard(0)], [Shard(0), _WHOLE, _WHOLE]),
        ([Shard(1)], [Shard(1), Shard(0), Shard(0)]),
        ([Shard(2)], [Shard(2), _WHOLE, _WHOLE]),
    )


def _elementwise(*args):
    tensors = [a for a in args if hasattr(a, "placements")]
    dims = range(len(tensors[0].shape))
    return _rules(args, *(([Shard(d)], [Shard(d)] * len(tensors)) for d in dims))


def _dropout(*args):
    tensors = sum(hasattr(a, "placements") for a in args)  # x and tokens, or tokens alone
    return _rules(args, ([Shard(0)], [Shard(0)] * tensors))


def _cross_entropy_fwd(*args):
    total = Shard(0) if args[5] else _WHOLE  # want_sum
    return _rules(args, ([Shard(0), Shard(0), total], [Shard(0)] * 2))


def _cross_entropy_bwd(*args):
    return _rules(args, ([Shard(0)], [Shard(0)] * 4))


@cache
def register_shardings() -> None:
    """Make the operators of ``warpweave.kernels`` take DTensors; once per process is enough."""
    ops = torch.ops.warpweave
    for op, rule in (
        (ops.attention, _attention),
        (ops.attention_backward, _attention_backward),
        (ops.norm_fwd, _norm_fwd),
        (ops.norm_bwd, _norm_bwd),
        (ops.rope, _rope),
        (ops.rope_qk, _rope_qk),
        (ops.activation_fwd, _elementwise),
        (ops.activation_bwd, _elementwise),
        (ops.dropout, _dropout),
        (ops.dropped, _dropout),
        (ops.cross_entropy_fwd, _cross_entropy_fwd),
        (ops.cross_entropy_bwd, _cross_entropy_bwd),
    ):
        register_sharding(op.default)(rule)
