"""Which implementation runs: Triton or torch, decided per call from the tensors, never silently.

    impl=None      Triton on CUDA (and ROCm) tensors, torch on every other device; a product with an
                   epilogue by torch and then Triton, where `fusion` has that for faster
    impl="torch"   plain torch, anywhere
    impl="triton"  the Triton kernel: on CUDA tensors, or on CPU tensors when Triton interprets
                   (TRITON_INTERPRET=1 in the environment before anything imports a kernel)

What cannot run raises `ValueError` and says why. Nothing here looks at a GPU or starts a driver.

Kernel files take Triton from here (``from …runtime.dispatch import choose, tl, triton``), so that
they can be imported, and their torch paths used, where Triton does not exist (macOS,
Windows). A launcher wraps its launch in ``with torch.cuda.device_of(x):`` (free on CPU tensors),
because Triton launches on the current device whatever the device of its arguments.
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
        """Stands in for `triton` and `tl`: decorators and annotations pass, nothing can be
        launched."""

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
``@triton.jit(do_not_specialize=RUNTIME)`` keeps each value from compiling a kernel of its own; they
must be plain arguments: of a tuple Triton specialises the elements whatever one says."""


def check_impl(impl: str | None) -> str | None:
    """`impl` itself; ValueError if it is not a known name. Layers call it when constructed."""
    if impl not in (None, "triton", "torch"):
        raise ValueError(f'impl must be None, "triton" or "torch", got {impl!r}')
    return impl


def choose(impl: str | None, *tensors: torch.Tensor | None) -> str:
    """Return "triton" or "torch" for a call on `tensors` (None among them is skipped).

    Raises ValueError if `impl` is not a known name, an argument is not a tensor, the tensors are on
    more than one device, or the Triton kernel was requested (or is the default) and cannot run.
    """
    check_impl(impl)
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if not hasattr(tensor, "device"):
            raise ValueError(f"a tensor is wanted, got {type(tensor).__name__} {tensor!r}")
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ValueError(f"all tensors must be on one device, got {device} and {tensor.device}")
    if device is None:
        raise ValueError("choose needs at least one tensor")
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
            'impl="triton" on CPU tensors needs Triton\'s interpreter: set TRITON_INTERPRET=1 '
            'before importing warpweave, or pass impl="torch"'
        )
    raise ValueError(
        f'impl="triton" needs CUDA tensors (or CPU under TRITON_INTERPRET=1), got {device}'
    )


def wants_gradient(*given: object) -> bool:
    """Whether autograd records, and a tensor among those given requires a gradient."""
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in given
    )


def refuse_tangents(name: str, *given: object) -> None:
    """Raise RuntimeError if a tensor among those given carries a tangent: torch drops those that
    enter an operator of ours or are read by a half, and `torch.func.jvp` would be a silent 0.

    While a compiler traces, tangents cannot be seen: any forward mode is then refused.
    """
    if forward_ad._current_level < 0:  # no forward mode
        return
    tensors = (x for x in given if isinstance(x, torch.Tensor))
    if torch.compiler.is_compiling() or any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise RuntimeError(
            f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors): "
            "take the gradient in reverse mode"
        )


def refuse_graph(name: str, *given: object) -> None:
    """For `name`, which is not differentiable: ValueError if a gradient is required through it to
    one of the tensors, RuntimeError if one carries a tangent."""
    refuse_tangents(name, *given)
    if wants_gradient(*given):
        shapes = [[*x.shape] for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        raise ValueError(
            f"{name} has no gradient and was given {shapes[0]} that requires one: call it under "
            "torch.no_grad(), or take the differentiable function"
        )


def no_graph(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator for a half of an autograd Function: if called where a gradient through it is
    required, it raises ValueError instead of returning a result without one."""

    @wraps(function)
    def checked(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        refuse_graph(function.__name__, *args, *options.values())
        return function(*args, **options)

    return checked


class _Final(torch.autograd.Function):
    """Hands gradients on; differentiating them towards any of the `sources` raises."""

    @staticmethod
    def forward(ctx, name, gradients, *sources):
        ctx.name = name
        return gradients

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"{ctx.name} has no second derivative: the gradients that it returned under "
            "create_graph=True were differentiated"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for the backward of an autograd Function without second derivatives: requiring one
    raises RuntimeError, even if another path leads to the same input.

    torch's decorator of this name raises only if the incoming gradient requires one, at a node
    without inputs, which ``autograd.grad`` skips, silently dropping its terms. With this one the
    gradients depend on the incoming ones and on the saved tensors, and so on every input of the
    Function; an input that is neither a leaf nor reached from a saved tensor is refused at once.
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
                        f"{name} has no second derivative and saved too little to say so later: "
                        f"create_graph=True cannot be had through its input from {node.name()}"
                    )
                sources.append(node.variable)
        return _Final.apply(name, found, *sources)

    return checked


def check_written(name: str, x: torch.Tensor) -> None:
    """Raise ValueError if elements of x, which is written to, share memory (an expanded view)."""
    if any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride())):
        raise ValueError(
            f"{name} is written and needs every element once, got {[*x.shape]} of strides "
            f"{x.stride()}"
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
    """How many programs run at once: the multiprocessors of a GPU; 4 elsewhere (the interpreter
    runs programs one after another, so few and large ones are fast).

    Kernels that leave one partial result per program launch a small multiple of it.
    """
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def all_registers(warps: int) -> dict[str, int]:
    """Triton's options for a launch of `warps` warps whose threads may take all the registers that
    there are: 65,536 per multiprocessor, at most 255 each, on every NVIDIA GPU since 2012.

    Without it ptxas also tries to fit one more program into a multiprocessor, and sometimes spills
    a few registers for that.
    """
    options = {"num_warps": warps}
    if torch.version.hip is None:
        options["maxnreg"] = min(255, 2048 // warps)
    return options
