"""Whether two forwards compute the same: what is not seen to agree is never replaced."""

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
EXACT = 1e-5  # of the largest: norms of transformers round to float32 inside, whatever the dtype
HALF = 2e-2  # of 16-bit dtypes: each side rounds in places of its own


def agree(a: torch.Tensor, b: torch.Tensor, *, rounded: torch.dtype | None = None) -> bool:
    """Whether two results have one dtype and shape and differ by rounding only; `rounded` is the
    narrowest dtype on the way, by default theirs."""
    if a.shape != b.shape or a.dtype != b.dtype or not torch.isfinite(a).all():
        return False
    scale, limit = a.abs().max().item(), HALF
    if a.dtype in WIDE and rounded in (None, *WIDE):
        limit = EXACT
    return scale > 0 and (a - b).abs().max().item() <= limit * scale


def noise(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Standard normal, of the dtype and on the device of `like`; no global generator is asked."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


@contextmanager
def quietly(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Without gradients, in one mode, and with the random state and all modes as before after."""
    parameters = list(model.parameters())
    devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    with torch.no_grad(), ours_always(), torch.random.fork_rng(devices):
        # torch.manual_seed would record and keep a stack trace for every kind of device that is not
        # in use, in each of the hundreds of probes of a model.
        torch.default_generator.manual_seed(0)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(0)
        with in_mode(model, training=training):
            yield


def takes_more(module: nn.Module) -> str | None:
    """What a module's forward takes besides hidden states, as a gate that a probe without it would
    not see; None if nothing."""
    _, _, *more = inspect.signature(type(module).forward).parameters
    return f"its forward also takes {', '.join(more)}" if more else None


def kind_of(module: nn.Module) -> tuple:
    """What decides whether a module's form is another's: class, parts, shapes, plain numbers and
    functions."""
    parts = [(n, type(c)) for n, c in module.named_modules()]
    parameters = [(n, p.shape, p.dtype, p.device) for n, p in module.named_parameters()]
    numbers = [
        (n, k, v)
        for n, c in module.named_modules()
        for k, v in vars(c).items()
        if isinstance(v, (int, float, str, bool)) and k != "layer_idx"
    ]
    functions = [
        (n, k, id(v))
        for n, c in module.named_modules()
        for k, v in vars(c).items()
        if callable(v) and k not in ("forward", "_old_forward")
    ]
    return (type(module), *parts, *parameters, *numbers, *functions)


def tried(run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> torch.Tensor | None:
    """What `run` makes of x, or None where it raises or makes no tensor."""
    try:
        found = run(x)
    except Exception:  # another module's forward: whatever it says, it is not what we replace
        return None
    return found if isinstance(found, torch.Tensor) else None
