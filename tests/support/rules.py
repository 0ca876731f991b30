"""``rulecheck`` for our Functions: compare the typing rule with what forward computes, rank by
rank.

spmd_types 0.3.1 draws the random terms of a Partial with torch's stateless generator, which torch
2.13 has for CUDA only; here they come from an ordinary seeded generator.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any
from unittest import mock

import spmd_types.rulecheck
import torch

from warpweave.parallel.tensor.ranks import TensorRanks


def _noise(like: torch.Tensor, *key: object) -> torch.Tensor:
    if not like.is_floating_point():
        raise spmd_types.rulecheck.RuleCheckError("an integer tensor has no Partial terms")
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def over_group(function: type) -> type:
    """Wrap `function`, whose forward ends with `ranks`, to accept (group, sequence_parallel)
    instead: a value that names a group must be an argument."""
    forward, rule = (inspect.signature(f) for f in (function.forward, function.spmd_typecheck))
    *given, ranks = forward.parameters.values()
    last = [ranks.replace(name=name) for name in ("group", "sequence_parallel")]
    assert ranks.name == "ranks"

    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            *args, group, sequence_parallel = args
            return function.forward(ctx, *args, TensorRanks(group, sequence_parallel))

        @staticmethod
        def spmd_typecheck(**named):
            ranks = TensorRanks(named.pop("group"), named.pop("sequence_parallel"))
            return function.spmd_typecheck(**named, ranks=ranks)

    Grouped.forward.__signature__ = forward.replace(parameters=[*given, *last])
    named = [p for p in rule.parameters.values() if p.name != "ranks"]
    last = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in last]
    Grouped.spmd_typecheck.__signature__ = rule.replace(parameters=[*named, *last])
    return Grouped


def rulecheck(
    function: type,
    args: Sequence[Any],
    placements: Any = None,
    *,
    mesh: Any = None,
    rtol: float = 1e-12,
) -> spmd_types.rulecheck.RuleCheckReport | None:
    """Check ``function.spmd_typecheck`` against ``function.forward`` on simulated ranks, without
    processes.

    `args` are global tensors (float64, so `rtol` can be sharp). A string that names a mesh axis
    means its group. Without `placements` all placements are tried and the report lists those
    accepted. Without `mesh` the axis has two ranks.
    """
    with mock.patch.object(spmd_types.rulecheck, "_seeded_noise", _noise):
        return spmd_types.rulecheck.rulecheck(
            function, args, placements, mesh=mesh, rtol=rtol, atol=rtol, local_tensor_mode=True
        )
