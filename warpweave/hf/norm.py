"""RMSNorm and LayerNorm modules, recognized by the results of their forward.

A candidate is a module without children that has at most one weight vector, perhaps a bias, and a
small number that may be its eps. Its forward must agree with one of the forms below, including the
dtype, also in bfloat16 and under autocast. The probes have rows of very different magnitude, which
reveals a wrong eps, and random weights, which reveal 1 + w.

    norm(x) * w        norm(x) * (1 + w)        norm(x)            (norm(x) * w + b for LayerNorm)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from warpweave.hf.patch import few, original, ours_always
from warpweave.hf.probe import WIDE, agree, noise, takes_more, tried
from warpweave.hf.seen import Fields, noted, owns_numbers
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dtypes import is_autocast


class NormForm(NamedTuple):
    """One form of a norm."""

    layer: bool  # True for LayerNorm, False for RMSNorm
    offset: int  # is added to the weight
    eps: str | float  # the name of the attribute that holds eps, or eps itself
    out: str  # the output dtype: "x" the input's, "weight" the weight's, "wider" the wider of both
    autocast: bool  # True if the output is float32 under autocast, as for torch's own norms
    fields: Fields = ()  # the fields of the configuration that it read
    across: Callable | None = None  # replaces `rms_norm` if features are sharded over ranks

    @property
    def live(self) -> tuple[str, ...]:
        return (self.eps,) if isinstance(self.eps, str) else ()

    @property
    def forward(self) -> Callable:
        return partial(_norm_forward, self)

    def __str__(self) -> str:
        return ("layer_norm" if self.layer else "rms_norm") + (" of 1 + w" if self.offset else "")


def is_norm_candidate(module: nn.Module) -> bool:
    """Return True if a module has the parts of a norm."""
    parameters = dict(module.named_parameters(recurse=False))
    if next(module.children(), None) is not None or parameters.keys() - {"weight", "bias"}:
        return False
    vectors = all(p.ndim == 1 for p in parameters.values())
    named = "norm" in type(module).__name__.lower()
    whole = vectors and not owns_numbers(module, parameters)
    return whole and bool(_eps_names(module)) and (named or "weight" in parameters)


def find_norm_form(module: nn.Module) -> NormForm | str:
    """The form that agrees with the module's forward, or the reason why there is none."""
    more, width = takes_more(module), _width(module)
    if more is not None:
        return more
    if width is None:
        return "it has no weight that shows its width"
    if any(not p.is_floating_point() for p in module.parameters()):
        return "quantized weights"
    own = copy.deepcopy(module)
    with torch.no_grad():
        for seed, p in enumerate(own.parameters(), 1):
            p.copy_(noise(*p.shape, like=p, seed=seed))
    bias = getattr(own, "bias", None) is not None
    layers = (True,) if bias or isinstance(module, nn.LayerNorm) else (False, True)
    offsets = (0, 1) if getattr(own, "weight", None) is not None else (0,)
    with noted(own) as fields:
        wanted = _answers(own, width, own.forward)
    forms = product(layers, offsets, _eps_names(module), ("x", "wider", "weight"), (True, False))
    for form in (NormForm(*each, tuple(fields.items())) for each in forms):
        found = _answers(own, width, partial(form.forward, own), wanted)
        if wanted and len(wanted) == len(found):
            return form
    return "its forward does not match any RMSNorm or LayerNorm of warpweave"


def _norm_forward(form: NormForm, module: Any, hidden_states: torch.Tensor) -> Any:
    """The new forward of a module whose norm has this form."""
    if form.across is None and few(hidden_states):
        return _of_few(form, module, hidden_states)
    x, weight = hidden_states, getattr(module, "weight", None)
    dtype = x.dtype
    if form.autocast and is_autocast(x):
        dtype = torch.promote_types(dtype, torch.float32)
    elif weight is not None and form.out != "x":
        wider = torch.promote_types(dtype, weight.dtype)
        dtype = weight.dtype if form.out == "weight" else wider
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    elif form.offset:
        weight = weight.to(compute_dtype(weight)) + form.offset
    eps = form.eps if isinstance(form.eps, float) else getattr(module, form.eps)
    if form.layer:
        return layer_norm(x, weight, getattr(module, "bias", None), eps, out_dtype=dtype)
    return (form.across or rms_norm)(x, weight, eps, out_dtype=dtype)


def _of_few(form: NormForm, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute a norm of a `few` elements in few operators; use the original if dtypes round.
    RMSNorm is LayerNorm of [x, -x], whose mean is 0. For one row, that takes two thirds of the time
    of `torch.rms_norm`, which calls seven operators."""
    weight: torch.Tensor | None = module._parameters.get("weight")
    if weight is None or weight.dtype != x.dtype or x.dtype not in WIDE:
        return original(module)(x)
    eps = form.eps if isinstance(form.eps, float) else getattr(module, form.eps)
    if form.offset:
        weight = weight + form.offset
    if form.layer:
        bias = module._parameters.get("bias")
        return torch.layer_norm(x, weight.shape, weight, bias, eps)
    both = torch.cat((x, -x), -1)
    return torch.layer_norm(both, both.shape[-1:], eps=eps)[..., : len(weight)] * weight


def _eps_names(module: nn.Module) -> list[str | float]:
    """The attributes of the module that may be its eps."""
    floats = {n: v for n, v in vars(module).items() if isinstance(v, float)}
    names: list[str | float] = [n for n, v in floats.items() if 0 <= v < 0.1]
    # An eps that is hard-coded in the forward, as in OLMo's norm.
    return names if names or not hasattr(module, "normalized_shape") else [1e-5]


def _width(module: nn.Module) -> int | None:
    weight, shape = getattr(module, "weight", None), getattr(module, "normalized_shape", None)
    shape = weight.shape[:1] if weight is not None else shape
    return shape[0] if isinstance(shape, (tuple, list)) and len(shape) == 1 else None


def _answers(
    module: nn.Module, width: int, forward: Callable, wanted: dict | None = None
) -> dict[tuple, torch.Tensor]:
    """The results of a forward on the probes, by (dtype, autocast). If `wanted` is given, return an
    empty dict unless all results agree with it."""
    weight = getattr(module, "weight", None)
    like = torch.empty(0) if weight is None else weight
    x = noise(6, width, like=torch.empty(0, device=like.device)) + 0.5
    x *= torch.tensor([0.0, 1e-3, 1e-2, 1.0, 3.0, 30.0], device=x.device)[:, None]
    found: dict[tuple, torch.Tensor] = {}
    dtypes = dict.fromkeys((torch.float32, like.dtype, torch.bfloat16))
    for dtype, cast in product(dtypes, (False, True)):
        if wanted is not None and (dtype, cast) not in wanted:
            continue
        autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=cast)
        with torch.no_grad(), ours_always(), autocast:
            y = tried(forward, x.to(dtype)[None])
        if wanted and (y is None or not _rows_agree(wanted[dtype, cast], y, dtype)):
            return {}
        if y is not None:
            found[dtype, cast] = y
    return found


def _rows_agree(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if all rows agree, relative to their own magnitude; ignore the zero first row."""
    if a.shape != b.shape:
        return False
    return all(agree(*rows, rounded=dtype) for rows in zip(a[0, 1:], b[0, 1:]))
