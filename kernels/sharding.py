"""Sharding rules of our operators for torch's DTensor, and so for checkers that ask DTensor.

``register_shardings()`` tells torch which shards of an operator's inputs give which shard of its
outputs, one mesh axis at a time. Without it an operator refuses DTensors. Nothing else imports this
file: DTensor takes seconds to import, and plain tensors need none of it. The ops' torch paths are
made of torch's own operators, which have rules already.

    attention       batch, heads                norm        every dim but the last; dw, db partial
    rope            batch, sequence, heads      dropout     tokens
    gelu            every dim                   swiglu      every dim, the last in whole pairs
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
import warpweave.kernels.attention
import warpweave.kernels.cross_entropy
import warpweave.kernels.dropout
import warpweave.kernels.norm
import warpweave.kernels.rope  # noqa: F401

_WHOLE = Replicate()


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


def _attention(q, k, v, *options):
    return _rules(
        (q, k, v, *options), *(([Shard(d), Shard(l)], [Shard(d)] * 3) for d, l in ((0, 0), (2, 1)))
    )


def _attention_backward(do, dlse, *rest):
    def choice(d, l):
        with_lse = [] if dlse is None else [Shard(l)]
        return [Shard(d)] * 3, [Shard(d), *with_lse, *[Shard(d)] * 4, Shard(l)]

    return _rules((do, dlse, *rest), choice(0, 0), choice(2, 1))


def _norm_fwd(x, weight, bias, residual, eps, layer):
    def choice(d):  # an output that is absent is an empty tensor
        out = [d, _WHOLE if residual is None else d, d if layer else _WHOLE, d]
        weights = [_WHOLE] if bias is None else [_WHOLE] * 2
        return out, [d, *weights, *([] if residual is None else [d])]

    return _rules(
        (x, weight, bias, residual, eps, layer),
        *(choice(Shard(i)) for i in range(len(x.shape) - 1)),
    )


def _norm_bwd(dy, ds, s, weight, mean, rstd, bias):
    def choice(d):
        out = [d, Partial(), Partial() if bias else _WHOLE]
        return out, [d, *([] if ds is None else [d]), d, _WHOLE, *([] if mean is None else [d]), d]

    return _rules(
        (dy, ds, s, weight, mean, rstd, bias), *(choice(Shard(i)) for i in range(len(s.shape) - 1))
    )


def _rope(x, cos, sin, conjugate):
    return _rules(
        (x, cos, sin, conjugate),
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
        (ops.gelu_fwd, _elementwise),
        (ops.gelu_bwd, _elementwise),
        (ops.swiglu_fwd, _elementwise),
        (ops.swiglu_bwd, _elementwise),
        (ops.dropout, _dropout),
        (ops.dropped, _dropout),
        (ops.cross_entropy_fwd, _cross_entropy_fwd),
        (ops.cross_entropy_bwd, _cross_entropy_bwd),
    ):
        register_sharding(op.default)(rule)
