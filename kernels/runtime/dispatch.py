"""Choice of the implementation, Triton or torch: made per call from the tensors, never silently.

    impl=None      Triton on CUDA (and ROCm) tensors, torch on every other device; a product with an
                   epilogue uses torch and then Triton where `fusion` lists that as faster
    impl="torch"   plain torch, anywhere
    impl="triton"  the Triton kernel: on CUDA tensors, or on CPU tensors when Triton interprets
                   (TRITON_INTERPRET=1 in the environment before anything imports a kernel)

An implementation that cannot run raises `ValueError` with the reason. Nothing here queries a GPU or
starts a driver.

Kernel files import Triton from here (``from …runtime.dispatch import choose, tl, triton``), so that
they can be imported, and their torch paths used, where Triton does not exist (macOS, Windows). A
launcher wraps its launch in ``with torch.cuda.device_of(x):`` (free on CPU tensors), because Triton
launches on the current device, not on the device of its arguments.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

HAS_TRITON: bool = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    import triton
    import triton.language as tl

    INTERPRET: bool = bool(triton.knobs.runtime.interpret)
    """True if kernels run in Triton's interpreter; fixed when Triton is imported."""
else:
    INTERPRET = False

    class _NoTriton:
        """Placeholder for `triton` and `tl`: decorators and annotations work, launches do not."""

        def __getattr__(self, name: str) -> _NoTriton:
            return self

        def __call__(self, fn=None, *_args, **_options):
            return fn if callable(fn) and not isinstance(fn, _NoTriton) else self

    triton = tl = _NoTriton()


RUNTIME = (
    *("seed", "site", "sample", "head0", "window", "rank", "signature"),
    *("q_start0", "q_start1", "k_start0", "k_start1"),
)
"""Arguments that change from one call to the next (a layer, a step, a ring hop) or between ranks.

``@triton.jit(do_not_specialize=RUNTIME)`` avoids a separate compilation for each value. They must
be plain arguments: Triton always specializes the elements of a tuple."""


def check_impl(impl: str | None) -> str | None:
    """Return `impl`, or raise ValueError if it is not a known name; layers call it in __init__."""
    if impl not in (None, "triton", "torch"):
        raise ValueError(f'impl must be None, "triton" or "torch", got {impl!r}')
    return impl


def choose(impl: str | None, *tensors: torch.Tensor | None) -> str:
    """Return "triton" or "torch" for a call on `tensors`, of which None is skipped.

    Raises ValueError if `impl` is not a known name, an argument is not a tensor, the tensors are on
    more than one device, or the Triton kernel was requested (or is the default) and cannot run.
    """
    check_impl(impl)
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if not hasattr(tensor, "device"):
            raise ValueError(f"expected a tensor, got {type(tensor).__name__} {tensor!r}")
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ValueError(f"all tensors must be on one device, got {device} and {tensor.device}")
    if device is None:
        raise ValueError("expected at least one tensor, got none")
    if impl == "torch" or (impl is None and device.type != "cuda"):
        return "torch"
    if not HAS_TRITON:
        raise ValueError(
            f'Triton is not installed, so tensors on {device} need impl="torch"; got impl={impl!r}'
        )
    if device.type == "cuda" or (device.type == "cpu" and INTERPRET):
        return "triton"
    if device.type == "cpu":
        raise ValueError(
            'impl="triton" on CPU tensors needs Triton\'s interpreter; set TRITON_INTERPRET=1 '
            'before importing warpweave, or pass impl="torch"'
        )
    raise ValueError(
        f'impl="triton" needs CUDA tensors (or CPU tensors with TRITON_INTERPRET=1), got {device}'
    )


def wants_gradient(*given: object) -> bool:
    """Return True if autograd records and one of the given tensors requires a gradient."""
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in given
    )


def refuse_tangents(name: str, *given: object) -> None:
    """Raise RuntimeError if one of the given tensors carries a tangent.

    torch drops tangents that enter our operators or are read by a half, so `torch.func.jvp` would
    silently return 0. Tangents are invisible while a compiler traces, so then any forward mode is
    refused.
    """
    if forward_ad._current_level < 0:  # no forward mode
        return
    tensors = (x for x in given if isinstance(x, torch.Tensor))
    if torch.compiler.is_compiling() or any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise RuntimeError(
            f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors); "
            "compute the gradient in reverse mode"
        )


def refuse_graph(name: str, *given: object) -> None:
    """Refuse derivatives through `name`, which is not differentiable.

    Raises ValueError if one of the given tensors requires a gradient, and RuntimeError if one
    carries a tangent.
    """
    refuse_tangents(name, *given)
    if wants_gradient(*given):
        shapes = [[*x.shape] for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        raise ValueError(
            f"{name} is not differentiable, but an argument of shape {shapes[0]} requires grad; "
            "call it under torch.no_grad(), or use a differentiable op instead"
        )


def no_graph(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a half of an autograd Function: it raises ValueError, instead of returning a result
    without a gradient, if called where a gradient through it is required."""

    @wraps(function)
    def checked(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        refuse_graph(function.__name__, *args, *options.values())
        return function(*args, **options)

    return checked


class _Final(torch.autograd.Function):
    """Pass gradients on; differentiating them with respect to any of the `sources` raises."""

    @staticmethod
    def forward(ctx, name, gradients, *sources):
        ctx.name = name
        return gradients

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"{ctx.name} does not support second derivatives, but the gradients that it returned "
            "under create_graph=True were differentiated"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd Function that has no second derivative.

    Requiring one raises RuntimeError, even if another path leads to the same input.

    torch's decorator of this name raises only if the incoming gradient requires one, and only at a
    node without inputs. ``autograd.grad`` skips that node and silently drops its terms. With this
    decorator, the gradients depend on the incoming ones and on the saved tensors, and so on every
    input of the Function. An input that is neither a leaf nor reached from a saved tensor is
    refused at once.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: torch.Tensor | None) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # no create_graph
            return found
        name = type(ctx).__name__.removesuffix("Backward")
        given = (*grads, *ctx.saved_tensors)
        sources = [x for x in given if x is not None and x.requires_grad]
        reached = {get_gradient_edge(x).node for x in sources}
        if ctx not in reached:  # a saved output leads to all inputs
            for node in {node for node, _ in ctx.next_functions if node is not None} - reached:
                if not hasattr(node, "variable"):
                    raise RuntimeError(
                        f"{name} does not support second derivatives, and an input of {name} "
                        f"was computed by {node.name()}; do not pass create_graph=True"
                    )
                sources.append(node.variable)
        return _Final.apply(name, found, *sources)

    return checked


def check_written(name: str, x: torch.Tensor) -> None:
    """Raise ValueError if elements of x, which is written to, share memory (an expanded view)."""
    if any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride())):
        raise ValueError(
            f"{name} is written to, so its elements must not share memory; got {[*x.shape]} with "
            f"strides {x.stride()}"
        )


@cache
def capability(device: torch.device) -> int:
    """The compute capability of a CUDA device as major * 10 + minor (80, 90, 100); 0 elsewhere.

    Launchers choose tiles by it.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@cache
def processors(device: torch.device) -> int:
    """The number of programs that run at once: the multiprocessors of a GPU; 4 elsewhere.

    The interpreter runs programs one after another, so few and large ones are fast. Kernels that
    leave one partial result per program launch a small multiple of this number.
    """
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def all_registers(warps: int) -> dict[str, int]:
    """Triton's options for a launch of `warps` warps whose threads may use all registers.

    These are 65,536 per multiprocessor, at most 255 per thread, on every NVIDIA GPU since 2012.
    Without these options, ptxas also tries to fit one more program into a multiprocessor, and
    sometimes spills a few registers for that.
    """
    options = {"num_warps": warps}
    if torch.version.hip is None:
        options["maxnreg"] = min(255, 2048 // warps)
    return options
