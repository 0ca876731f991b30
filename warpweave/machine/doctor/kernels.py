"""Checks of each kernel family against `kernels.reference`, at odd shapes (`kernels.cases`).

The truth is the reference in float64; the reference in the same dtype sets the limit (`check`).
Gradients are also compared if an op has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from warpweave.kernels.cases import Case, cases
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.machine.doctor.check import Check, Measured, within_budget, worst


def family_checks(
    device: torch.device, dtypes: tuple[str, ...], impl: str = "triton"
) -> Iterator[Check]:
    """Checks of every family in each of `dtypes` on `device`; on a CPU the shapes are tiny."""
    tokens = 515 if device.type == "cuda" else 21
    for dtype in dtypes:
        for case in cases(device, tokens):
            run = partial(_measure, case, NAMED_DTYPES[dtype], device, impl)
            yield Check(f"{case.name}, {dtype}", "kernels/reference.py in fp64", run)


def _measure(case: Case, dtype: torch.dtype, device: torch.device, impl: str) -> Measured:
    """Measure the worst of a case's outputs and gradients."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...] | torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / 2

    inputs = [draw(shape).to(device, dtype) for shape in case.shapes]
    cotangents: list[Tensor] = []

    def outputs(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(case.differentiable) for x in tensors]
        found = function(*leaves)
        found = list(found) if isinstance(found, tuple) else [found]
        if not case.differentiable:
            return found
        if not cotangents:
            cotangents.extend(draw(x.shape).to(device) for x in found)
        given = [dy.to(x.dtype) for x, dy in zip(found, cotangents, strict=True)]
        return [x.detach() for x in found] + list(torch.autograd.grad(found, leaves, given))

    truth = outputs(case.truth, [x.double() for x in inputs])
    plain, ours = outputs(case.truth, inputs), outputs(partial(case.ours, impl=impl), inputs)
    count = len(truth) - (len(inputs) if case.differentiable else 0)
    names = [f"output {i + 1}" for i in range(count)]
    names += [f"gradient {i + 1}" for i in range(len(truth) - count)]
    found = zip(ours, plain, truth, strict=True)
    terms = max((max(shape) for shape in case.shapes if len(shape) > 1), default=1)
    return worst({name: within_budget(*of, terms) for name, of in zip(names, found, strict=True)})
