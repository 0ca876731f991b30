"""Comparison of two forwards on a probe; a forward is replaced only if they agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from warpweave.hf.patch import ours_always
from warpweave.layers.modes import in_mode

WIDE = (torch.float64, torch.float32)
EXACT = 1e-5  # relative to the largest: norms of transformers round to float32 for any dtype
HALF = 2e-2  # for 16-bit dtypes: the two sides round in different places


def agree(a: torch.Tensor, b: torch.Tensor, *, rounded: torch.dtype | None = None) -> bool:
    """Return True if two results have the same dtype and shape and differ only by rounding.
    `rounded` is the narrowest intermediate dtype, by default that of the results."""
    if a.shape != b.shape or a.dtype != b.dtype or not torch.isfinite(a).all():
        return False
    limit = EXACT if a.dtype in WIDE and rounded in (None, *WIDE) else HALF
    scale = a.abs().max().item()
    return scale > 0 and (a - b).abs().max().item() <= limit * scale


def noise(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Standard normal noise with the dtype and device of `like`, without a global generator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


@contextmanager
def quietly(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Disable gradients and set one mode; restore the random state and all modes afterwards."""
    parameters = list(model.parameters())
    devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    with torch.no_grad(), ours_always(), torch.random.fork_rng(devices):
        # torch.manual_seed would record and keep a stack trace for every kind of device not in use,
        # in each of a model's hundreds of probes.
        torch.default_generator.manual_seed(0)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(0)
        with in_mode(model, training=training):
            yield


def takes_more(module: nn.Module) -> str | None:
    """The reason not to replace a module whose forward has more inputs than hidden states. A probe
    without such an input (a gate, for example) would not see its effect. None if the forward has no
    other input."""
    _, _, *more = inspect.signature(type(module).forward).parameters
    return f"its forward also accepts {', '.join(more)}" if more else None


def kind_of(module: nn.Module) -> tuple:
    """A key that is equal for modules of the same form. It consists of class, parts, shapes, plain
    numbers and functions."""
    parts = [(n, type(c)) for n, c in module.named_modules()]
    parameters = [(n, p.shape, p.dtype, p.device) for n, p in module.named_parameters()]
    held = [(n, k, v) for n, c in module.named_modules() for k, v in vars(c).items()]
    numbers = [x for x in held if isinstance(x[2], (int, float, str, bool)) and x[1] != "layer_idx"]
    hidden = ("forward", "_old_forward")
    functions = [(n, k, id(v)) for n, k, v in held if callable(v) and k not in hidden]
    return (type(module), *parts, *parameters, *numbers, *functions)


def tried(run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> torch.Tensor | None:
    """The result of `run` on x, or None if it raises or does not return a tensor."""
    try:
        found = run(x)
    except Exception:  # an unknown forward may raise anything; we do not replace it
        return None
    return found if isinstance(found, torch.Tensor) else None
