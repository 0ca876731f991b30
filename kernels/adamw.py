"""AdamW on a flat buffer, such as one ZeRO shard, in one pass over memory.

For gradient g = grad * grad_scale and step number t (Loshchilov and Hutter 2019, arXiv:1711.05101):

    m <- beta1 m + (1 - beta1) g            v <- beta2 v + (1 - beta2) g^2
    w <- w - lr weight_decay w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

`adamw_step` reads and writes the master weights w and both moments once, and reads the gradient
once. In the same pass it can write the low-precision copy that the next forward uses: 28 bytes per
element for fp32, 30 with a bf16 copy. `sum_of_squares` is the shard's term of the gradient norm.
The norm, the clipping factor (grad_scale) and the decision to skip stay on the device, without a
host sync.

The moments and the arithmetic have the dtype of the master weights, fp32 or fp64. grad and the copy
may have any float dtype.

Weight decay is one number per call. If a buffer holds parameters that decay and others that do not
(biases, norms), step it range by range.

Bias corrections are computed in fp64: 1 - 0.999 in fp32 has four digits. The update is elementwise,
so Triton gives the same bits for any partition into shards. (On a CPU, torch may round the last few
elements of a buffer differently.) `sum_of_squares` adds in a fixed order, without atomics. On a
GPU, make buffers a multiple of 16 elements: they are then read 128 bits at a time (4 times fewer
instructions, as seen in the compiled code).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float
from typing import NamedTuple

import torch

from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import choose, no_graph, tl, triton
from warpweave.kernels.runtime.dtypes import to_dtype, upcast
from warpweave.kernels.runtime.op import operator

# Elements and warps of an update program. With four elements per thread, values of every dtype have
# the same thread layout. With eight, they would pass through shared memory before each store.
_BLOCK, _WARPS = 1024, 8
_CHUNK = 2**19  # elements at a time on a CPU, when the gradient must be scaled or cast
_STRIDE, _TILES = 4096, 16  # a program of sum_of_squares adds 16 tiles of 4096 on every GPU
_ROW = 1024  # elements that torch adds in one row of sum_of_squares


# ---------------------------------------------------------------- AdamW


class AdamWStep(NamedTuple):
    """The numbers that all updates of one step share: the rates, and on a GPU the bias corrections.
    `begin_adamw` returns it; it is valid for that step only."""

    lr: float | torch.Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scalars: torch.Tensor  # Triton: fp64[3] of `_adamw_scalars_kernel`; torch: the number, fp32


@triton.jit
def _adamw_scalars_kernel(
    step_ptr,
    scalars_ptr,
    lr_ptr,
    lr,
    lr_rest,
    WEIGHT_DECAY: tl.constexpr,
    LOG2_BETA1: tl.constexpr,
    LOG2_BETA2: tl.constexpr,
):
    # The rate is the sum of two fp32 numbers, exact enough for fp64. A first step that is skipped
    # leaves step 0, whose corrections would be 0; nothing reads its numbers.
    step = tl.maximum(tl.load(step_ptr).to(tl.float64), 1.0)
    correction1 = 1.0 - tl.exp2(step * LOG2_BETA1)
    correction2 = 1.0 - tl.exp2(step * LOG2_BETA2)
    if lr_ptr is None:
        rate = tl.full((), 0.0, tl.float64) + lr + lr_rest
    else:
        rate = tl.load(lr_ptr)
    tl.store(scalars_ptr, rate / correction1)
    tl.store(scalars_ptr + 1, tl.sqrt(correction2))
    tl.store(scalars_ptr + 2, 1.0 - rate * WEIGHT_DECAY)


@triton.jit
def _adamw_kernel(
    master_ptr,
    grad_ptr,
    m_ptr,
    v_ptr,
    param_ptr,
    scalars_ptr,
    grad_scale_ptr,
    skip_ptr,
    n,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. A skipped step writes nothing.
    if skip_ptr is not None:  # noqa: SIM102 (decided at compile time; `and` would load None)
        if tl.load(skip_ptr) != 0:
            return

    # 2. Load everything before the first store, so that the loads overlap.
    dtype: tl.constexpr = m_ptr.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    w = tl.load(master_ptr + at, mask, 0.0)
    g = tl.load(grad_ptr + at, mask, 0.0).to(dtype)
    m = tl.load(m_ptr + at, mask, 0.0)
    v = tl.load(v_ptr + at, mask, 0.0)
    step_size, root = tl.load(scalars_ptr).to(dtype), tl.load(scalars_ptr + 1).to(dtype)
    shrink = tl.load(scalars_ptr + 2).to(dtype) if DECAY else 1.0
    if grad_scale_ptr is not None:
        g *= tl.load(grad_scale_ptr).to(dtype)

    # 3. The moments, the weights, and their copy.
    m = BETA1 * m + (1.0 - BETA1) * g
    v = BETA2 * v + (1.0 - BETA2) * g * g
    w = w * shrink - step_size * (m / (tl.sqrt(v) / root + EPS))
    tl.store(m_ptr + at, m, mask)
    tl.store(v_ptr + at, v, mask)
    tl.store(master_ptr + at, w, mask)
    if param_ptr is not None:
        tl.store(param_ptr + at, to_dtype(w, param_ptr.dtype.element_ty), mask)


def _adamw_torch(master, grad, m, v, param, step: AdamWStep, grad_scale, skip, decay) -> None:
    """torch's fused AdamW, without its grad_scale, which divides and overwrites the gradient."""
    n, found_inf, lr = master.numel(), None, step.lr
    if skip is not None and skip.device.type == "cpu":
        if skip.item() != 0:  # no sync on a CPU
            return
    elif skip is not None:
        found_inf = (skip != 0).float()
    if isinstance(lr, torch.Tensor) and lr.is_cuda:  # torch reads fp32 there
        lr = lr.float()
    plain = grad_scale is None and grad.dtype == m.dtype and param is None
    chunk = n if plain or master.device.type != "cpu" else _CHUNK
    for a in range(0, n, max(1, chunk)):
        at = slice(a, a + chunk)
        w, g = master[at], grad[at].to(m.dtype)
        if grad_scale is not None:
            g = g * grad_scale.to(m.dtype)
        torch._fused_adamw_(
            [w],
            [g],
            [m[at]],
            [v[at]],
            [],
            [step.scalars],
            lr=lr,
            beta1=step.beta1,
            beta2=step.beta2,
            eps=step.eps,
            weight_decay=step.weight_decay if decay else 0.0,
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )
        if param is None:
            continue
        if found_inf is not None:
            w = torch.where(found_inf != 0, param[at], w.to(param.dtype))
        param[at].copy_(w)


def _adamw_triton(master, grad, m, v, param, step: AdamWStep, grad_scale, skip, decay) -> None:
    if master.numel() == 0:
        return
    with torch.cuda.device_of(master):
        _adamw_kernel[(triton.cdiv(master.numel(), _BLOCK),)](
            master,
            grad,
            m,
            v,
            param,
            step.scalars,
            grad_scale,
            skip,
            master.numel(),
            step.beta1,
            step.beta2,
            step.eps,
            decay,
            _BLOCK,
            num_warps=_WARPS,
        )


@operator(
    "adamw_update", lambda *_: None, records=(AdamWStep,), writes=("master", "m", "v", "param")
)
def _adamw_update(
    master: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    param: torch.Tensor | None,
    step: AdamWStep,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    decay: bool,
    impl: str,
) -> None:
    half = _adamw_torch if impl == "torch" else _adamw_triton
    half(master, grad, m, v, param, step, grad_scale, skip, decay)


def _adamw_scalars_fake(step, rate, lr, beta1, beta2, weight_decay, impl):
    return step.new_empty(
        () if impl == "torch" else 3, dtype=torch.float32 if impl == "torch" else torch.float64
    )


@operator("adamw_scalars", _adamw_scalars_fake)
def _adamw_scalars(
    step: torch.Tensor,
    rate: torch.Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    impl: str,
) -> torch.Tensor:
    if impl == "torch":
        return step.to(torch.float32, copy=True)
    scalars = step.new_empty(3, dtype=torch.float64)
    lr_high = c_float(lr).value
    with torch.cuda.device_of(step):
        _adamw_scalars_kernel[(1,)](
            step,
            scalars,
            rate,
            lr_high,
            lr - lr_high,
            weight_decay,
            math.log2(max(beta1, 1e-300)),
            math.log2(max(beta2, 1e-300)),
            num_warps=1,
        )
    return scalars


@torch.no_grad()
def begin_adamw(
    step: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    impl: str | None = None,
) -> AdamWStep:
    """Prepare step number `step` for calls of `adamw_update` on any number of shards.

    step: 0-dim fp32 or fp64, 1 for the first update; it is only read, and may be 0 if the updates
    are skipped. lr: a number, or for a CUDA graph, whose replays repeat the numbers of the capture,
    a 0-dim fp64 tensor next to `step`; the tensor's value is not checked. One launch on a GPU.

    Raises ValueError for other dtypes or rates.

    Examples:
        >>> w, m, v = torch.ones(8), torch.zeros(8), torch.zeros(8)
        >>> rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
        >>> step = begin_adamw(torch.tensor(1.0), **rates)
        >>> adamw_update(w, torch.ones(8), m, v, step)
        >>> round(w[0].item(), 4)
        0.9
    """
    rate = lr if isinstance(lr, torch.Tensor) else None
    impl = choose(impl, step, rate)
    _check_step(step, lr, beta1, beta2, eps, weight_decay)
    # Torch operators need no wrapper: its call costs more than updating ten thousand weights.
    direct = not torch.compiler.is_compiling()
    scalars = _adamw_scalars.run if direct else _adamw_scalars
    number = 0.0 if rate is not None else lr
    of_step = scalars(step, rate, number, beta1, beta2, weight_decay, impl)
    return AdamWStep(lr, beta1, beta2, eps, weight_decay, of_step)


@torch.no_grad()
def adamw_update(
    master: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    step: AdamWStep,
    *,
    decay: bool = True,
    grad_scale: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    param: torch.Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Do the step `step` in place on flat shards, as `adamw_step`; without `decay`, no weight
    decay applies."""
    impl = choose(impl, master, grad, m, v, step.scalars, grad_scale, skip, param)
    _check_shards(master, grad, m, v, param, grad_scale, skip)
    # A mode, such as a recording, sees the whole operator: on a CPU its torch path reads `skip`.
    seen = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    direct = impl == "torch" and not seen
    update = _adamw_update.run if direct else _adamw_update
    update(master, grad, m, v, param, step, grad_scale, skip, decay, impl)


@torch.no_grad()
def adamw_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: torch.Tensor,
    grad_scale: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    param: torch.Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Do one AdamW step in place on flat shards master[n], m[n], v[n] (fp32 or fp64), from grad[n].

    step: 0-dim fp32 or fp64, the number of steps done so far. This call increments it, so every
    shard needs its own; `begin_adamw` and `adamw_update` step many shards with one count.
    grad_scale: 0-dim tensor that multiplies the gradient. skip: 0-dim tensor; if it is not zero,
    nothing changes, not even step. param[n]: receives master, cast to its dtype. grad is only read.

    Raises ValueError for other shapes, dtypes, strides or rates.

    Examples:
        >>> w, m, v, step = torch.ones(8), torch.zeros(8), torch.zeros(8), torch.tensor(0.0)
        >>> rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
        >>> adamw_step(w, torch.ones(8), m, v, step=step, **rates)
        >>> step.item(), round(w[0].item(), 4)
        (1.0, 0.9)
    """
    impl = choose(impl, master, grad, m, v, step, grad_scale, skip, param)
    _check_shards(master, grad, m, v, param, grad_scale, skip)
    _check_step(step, lr, beta1, beta2, eps, weight_decay)
    step.add_(1 if skip is None else skip == 0)
    rates = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    begun = begin_adamw(step, **rates, impl=impl)
    adamw_update(
        master, grad, m, v, begun, grad_scale=grad_scale, skip=skip, param=param, impl=impl
    )


def _check_step(step, lr, beta1, beta2, eps, weight_decay) -> None:
    if step.ndim != 0:
        raise ValueError(f"step must be a 0-dim tensor, got {[*step.shape]}")
    if step.dtype not in (torch.float32, torch.float64):  # 16-bit floats stop at 256 or 2048
        raise ValueError(f"step must be float32 or float64, got {step.dtype}")
    if isinstance(lr, torch.Tensor):
        if lr.ndim != 0 or lr.dtype != torch.float64:
            raise ValueError(
                f"lr must be a number or a 0-dim float64 tensor, got {lr.dtype} {[*lr.shape]}"
            )
        lr = 0.0  # its value stays on the device, unchecked
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and lr >= 0 and eps >= 0 and weight_decay >= 0):
        raise ValueError(
            f"need 0 <= beta < 1 and lr, eps, weight_decay >= 0, got betas {beta1}, {beta2}, "
            f"lr {lr}, eps {eps}, weight_decay {weight_decay}"
        )


def _check_shards(master, grad, m, v, param, grad_scale, skip) -> None:
    if master.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"master must be float32 or float64, got {master.dtype}")
    for name, x in (("master", master), ("grad", grad), ("m", m), ("v", v), ("param", param)):
        if x is None:
            continue
        if x.ndim != 1 or x.shape != master.shape or not x.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous with shape [{master.numel()}], got {[*x.shape]} with "
                f"strides {x.stride()}"
            )
        if not x.dtype.is_floating_point or (name in ("m", "v") and x.dtype != master.dtype):
            raise ValueError(
                f"{name} must have a float dtype, and m and v must have the dtype of master "
                f"({master.dtype}), got {x.dtype}"
            )
    for name, x in (("grad_scale", grad_scale), ("skip", skip)):
        if x is not None and x.ndim != 0:
            raise ValueError(f"{name} must be a 0-dim tensor, got {[*x.shape]}")


# ---------------------------------------------------------------- sum of squares


@triton.jit
def _sum_of_squares_kernel(x_ptr, partial_ptr, n, TILES: tl.constexpr, STRIDE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (TILES * STRIDE) + tl.arange(0, STRIDE)
    total = tl.zeros((STRIDE,), partial_ptr.dtype.element_ty)
    for tile in range(TILES):
        at = start + tile * STRIDE
        x = upcast(tl.load(x_ptr + at, at < n, 0.0))
        total += x * x
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, 0))


def _widest(flats: Sequence[torch.Tensor]) -> torch.dtype:
    return max((compute_dtype(flat) for flat in flats), key=lambda dtype: dtype.itemsize)


def _sum_of_squares_triton(flats: list[torch.Tensor]) -> torch.Tensor:
    programs = [triton.cdiv(flat.numel(), _STRIDE * _TILES) for flat in flats]
    partial = flats[0].new_empty(sum(programs), dtype=_widest(flats))
    with torch.cuda.device_of(partial):
        for flat, part in zip(flats, partial.split(programs), strict=True):
            if len(part):
                _sum_of_squares_kernel[(len(part),)](
                    flat, part, flat.numel(), _TILES, _STRIDE, num_warps=8
                )
    return partial.sum()


def _sum_of_squares_torch(flat: torch.Tensor) -> torch.Tensor:
    # Sum short rows first: one running fp32 sum of n terms may be off by n / 2 units.
    n, dtype = flat.numel(), compute_dtype(flat)
    whole = n // _ROW * _ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    total = norms.double().square().sum()
    if whole < n:
        rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
        total += rest.double().square()
    return total.to(dtype)


def _sum_of_squares_fake(flats, impl):
    return flats[0].new_empty((), dtype=_widest(flats))


@operator("sum_of_squares", _sum_of_squares_fake, direct=True)
def _sum_of_squares(flats: list[torch.Tensor], impl: str) -> torch.Tensor:
    if impl != "torch":
        return _sum_of_squares_triton(flats)
    totals = [_sum_of_squares_torch(flat) for flat in flats]
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum()


@no_graph
@torch.no_grad()
def sum_of_squares(
    flats: torch.Tensor | Sequence[torch.Tensor], *, impl: str | None = None
) -> torch.Tensor:
    """The sum of squares of one or more flat[n]: 0-dim, fp32 (fp64 if one is fp64), the same bits
    every time.

    The norm over shards is the square root of the sum over ranks. Overflow gives inf and NaN stays
    NaN, so the result also tells you if every gradient is finite.

    Raises ValueError for other shapes, dtypes or strides.
    """
    flats = [flats] if isinstance(flats, torch.Tensor) else [*flats]
    impl = choose(impl, *flats)
    for flat in flats:
        if flat.ndim != 1 or not flat.is_contiguous() or not flat.dtype.is_floating_point:
            raise ValueError(
                f"need flat contiguous float tensors, got {[*flat.shape]} {flat.dtype} with "
                f"strides {flat.stride()}"
            )
    return _sum_of_squares(flats, impl)
