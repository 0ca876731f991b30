"""AdamW over flat buffers, one pass over memory: what an optimizer does to one shard.

For gradient g = grad * grad_scale and step number t (Loshchilov and Hutter 2019, arXiv:1711.05101):

    m <- beta1 m + (1 - beta1) g            v <- beta2 v + (1 - beta2) g^2
    w <- w - lr weight_decay w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

`adamw_step` reads and writes the master weights w and both moments once, reads the gradient once
and can write the low precision copy that the next forward uses in the same pass: 28 bytes per
element for fp32, 30 with a bf16 copy. `sum_of_squares` is the shard's share of the gradient's norm.
The norm, the clipping factor (grad_scale) and the decision to skip all stay on the device: the host
never waits.

The moments and the arithmetic have the dtype of the master weights, fp32 or fp64; grad and the copy
may have any float dtype. Master weights may also be bf16, the parameters themselves (22 bytes per
element with a bf16 gradient): then the moments are fp32 and the rounding must be stochastic.

Stochastic rounding to bf16 goes up with the probability of the part that is cut off, so the mean of
many small updates is right where rounding to nearest would lose each of them. The bits are
philox4x32-10 of (global index // 4 lo, hi, step number, a constant) by the seed, word index % 4: a
function of seed, step and global element index, the same for any sharding and implementation
(Gupta et al. 2015, arXiv:1502.02551; Zamirai et al. 2020, arXiv:2010.06192).

Weight decay is one number per call. Where biases and norms, which do not decay, lie between the
matrices of a buffer, a bool per element says what does (one byte more to read); or each range of
the buffer is stepped by a call of its own.

Bias corrections are computed in fp64: 1 - 0.999 in fp32 has four digits. The update is elementwise,
so Triton gives the same bits for any partition into shards (on a CPU, torch may round the last few
elements of a buffer otherwise). `sum_of_squares` adds in a fixed order, without atomics. On a GPU,
buffers of a multiple of 16 elements are the fast ones: they are read 128 bits at a time (4 times
fewer instructions, seen in the compiled code); with stochastic rounding, `start` too must be one.
"""

from __future__ import annotations

import math

import torch

from warpweave.kernels import dropout as keyed
from warpweave.kernels import reference
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import choose, no_graph, tl, triton
from warpweave.kernels.runtime.numeric import to_dtype, upcast

_BLOCK = 1024  # elements of a program in the update
_CHUNK = 2**19  # elements at a time on a CPU, where the gradient must be scaled or cast
_STRIDE, _TILES = 4096, 16  # a program of sum_of_squares adds 16 tiles of 4096: no matter which GPU
_ROW = 1024  # elements that torch adds in one row of sum_of_squares
_ROUNDING_CHUNK = 2**16  # elements at a time where torch draws bits: its words stay in cache
_SITE = 0x41646D57  # last counter word: no site of dropout, which may share the seed


# ---------------------------------------------------------------- AdamW


@triton.jit
def _stochastic(x, word):
    """x cast to float32 and rounded to one of its two bfloat16 neighbours by 16 bits of `word`."""
    x = x.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    up_or_down = (bits + (word & 0xFFFF).to(tl.int32)) & -65536
    finite = (bits & 0x7F800000) != 0x7F800000  # the carry would make a number of NaN
    return tl.where(finite, up_or_down.to(tl.float32, bitcast=True), x)


@triton.jit(do_not_specialize=("seed",))
def _adamw_kernel(
    master_ptr,
    grad_ptr,
    m_ptr,
    v_ptr,
    param_ptr,
    step_ptr,
    grad_scale_ptr,
    skip_ptr,
    decay_mask_ptr,
    n,
    lr,
    lr_rest,
    seed,
    first_group,
    shift,
    WEIGHT_DECAY: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG2_BETA1: tl.constexpr,
    LOG2_BETA2: tl.constexpr,
    EPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. A skipped step writes nothing.
    if skip_ptr is not None:  # noqa: SIM102 (decided at compile time; `and` would load None)
        if tl.load(skip_ptr) != 0:
            return

    # 2. Bias corrections; the rate comes as the sum of two fp32 numbers, exact enough for fp64.
    dtype: tl.constexpr = m_ptr.dtype.element_ty
    step = tl.load(step_ptr).to(tl.float64)
    correction1 = 1.0 - tl.exp2(step * LOG2_BETA1)
    correction2 = 1.0 - tl.exp2(step * LOG2_BETA2)
    rate = tl.full((), 0.0, tl.float64) + lr + lr_rest
    step_size = (rate / correction1).to(dtype)
    root = tl.sqrt(correction2).to(dtype)
    keep = (1.0 - rate * WEIGHT_DECAY).to(dtype)

    # 3. The moments. Blocks begin with a whole group of four random words: `shift` elements early.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    if STOCHASTIC:
        at -= shift
        live = (at >= 0) & (at < n)
    g = tl.load(grad_ptr + at, live, 0.0).to(dtype)
    if grad_scale_ptr is not None:
        g *= tl.load(grad_scale_ptr).to(dtype)
    m = BETA1 * tl.load(m_ptr + at, live, 0.0) + (1.0 - BETA1) * g
    v = BETA2 * tl.load(v_ptr + at, live, 0.0) + (1.0 - BETA2) * g * g
    tl.store(m_ptr + at, m, live)
    tl.store(v_ptr + at, v, live)

    # 4. The weights, and their copy; what is bfloat16 of the two is rounded.
    w = upcast(tl.load(master_ptr + at, live, 0.0))
    if decay_mask_ptr is not None:
        keep = tl.where(tl.load(decay_mask_ptr + at, live, False), keep, 1.0)
    w = w * keep - step_size * (m / (tl.sqrt(v) / root + EPS))
    rounded = w
    if STOCHASTIC:
        group = tl.arange(0, BLOCK // 4).to(tl.int64) + first_group
        group += tl.program_id(0).to(tl.int64) * (BLOCK // 4)
        word = keyed.words(seed, group[None, :], step.to(tl.int64), SITE, 1, BLOCK // 4)
        rounded = _stochastic(w, word.reshape(BLOCK))
    if master_ptr.dtype.element_ty == tl.bfloat16:
        w = rounded
    tl.store(master_ptr + at, to_dtype(w, master_ptr.dtype.element_ty), live)
    if param_ptr is not None:
        tl.store(param_ptr + at, to_dtype(rounded, param_ptr.dtype.element_ty), live)


def _words(seed: int, first: int, n: int, step: torch.Tensor) -> torch.Tensor:
    """int64[n]: the words of the elements with the global indices from `first` on."""
    low = 0xFFFFFFFF
    group = torch.arange(first // 4, (first + n + 3) // 4, device=step.device)
    counter = (group & low, (group >> 32) & low, step.to(torch.int64), _SITE)
    found = reference.philox(counter, (seed & low, seed >> 32))
    return torch.stack(found, 1).flatten()[first % 4 :][:n]


def _stochastic_torch(x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """`_stochastic` in torch, as bfloat16."""
    x = x.to(torch.float32)
    bits = x.view(torch.int32)
    up_or_down = (bits + (word & 0xFFFF).to(torch.int32)) & -65536
    return torch.where(x.isfinite(), up_or_down.view(torch.float32), x).to(torch.bfloat16)


def _adamw_torch(
    master, grad, m, v, param, step, grad_scale, skip, lr, beta1, beta2, eps, weight_decay,
    rounding=None, decay_mask=None,
) -> None:  # fmt: skip
    """torch's fused AdamW; its own grad_scale divides, and overwrites the gradient, so not used.

    It knows one decay per buffer: with a mask the weights decay before it, which is the same.
    """
    n, found_inf = master.numel(), None
    if skip is not None and skip.device.type == "cpu":
        if skip.item() != 0:  # on a CPU there is nobody to wait for
            return
    elif skip is not None:
        found_inf = (skip != 0).float()
    plain = grad_scale is None and grad.dtype == m.dtype and param is None and decay_mask is None
    chunk = n if plain or master.device.type != "cpu" else _CHUNK
    if rounding is not None:
        chunk = _ROUNDING_CHUNK
    low = param if master.dtype == m.dtype else master
    for a in range(0, n, max(1, chunk)):
        at = slice(a, a + chunk)
        g = grad[at].to(m.dtype)
        if grad_scale is not None:
            g = g * grad_scale.to(m.dtype)
        w = master[at].to(m.dtype)
        if decay_mask is not None:
            decays = decay_mask[at] if found_inf is None else decay_mask[at] & (found_inf == 0)
            w.mul_(torch.ones_like(w).masked_fill_(decays, 1 - lr * weight_decay))
        torch._fused_adamw_(
            [w],
            [g],
            [m[at]],
            [v[at]],
            [],
            [step.float()],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay if decay_mask is None else 0.0,
            eps=eps,
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )
        if low is None:
            continue
        rounded = w
        if rounding is not None:
            seed, start = rounding
            rounded = _stochastic_torch(w, _words(seed, start + a, len(w), step))
        if found_inf is not None:
            rounded = torch.where(found_inf != 0, low[at], rounded.to(low.dtype))
        low[at].copy_(rounded)


def _adamw_triton(
    master, grad, m, v, param, step, grad_scale, skip, lr, beta1, beta2, eps, weight_decay,
    rounding=None, decay_mask=None,
) -> None:  # fmt: skip
    lr_high = torch.tensor(lr, dtype=torch.float32).item()
    seed, start = (0, 0) if rounding is None else rounding
    with torch.cuda.device_of(master):
        _adamw_kernel[(triton.cdiv(master.numel() + start % 4, _BLOCK),)](
            master,
            grad,
            m,
            v,
            param,
            step,
            grad_scale,
            skip,
            decay_mask,
            master.numel(),
            lr_high,
            lr - lr_high,
            seed,
            start // 4,
            start % 4,
            weight_decay,
            beta1,
            beta2,
            math.log2(max(beta1, 1e-300)),
            math.log2(max(beta2, 1e-300)),
            eps,
            rounding is not None,
            _SITE,
            _BLOCK,
        )


def _adamw_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    step: torch.Tensor,
    param: torch.Tensor | None,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    decay_mask: torch.Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    stochastic_rounding: int,
    seed: int,
    start: int,
    impl: str,
) -> None:
    # Counted before the kernel reads it: a program that wrote it would race with the others.
    step.add_(1 if skip is None else (skip == 0).to(step.dtype))
    if master.numel() == 0:
        return
    half = _adamw_torch if impl == "torch" else _adamw_triton
    half(
        master, grad, m, v, param, step, grad_scale, skip, lr, beta1, beta2, eps, weight_decay,
        (seed, start) if stochastic_rounding else None, decay_mask,
    )  # fmt: skip


_adamw_step_op = torch.library.custom_op(
    "warpweave::adamw_step", mutates_args=("master", "m", "v", "step", "param")
)(_adamw_step)


@torch.no_grad()
def adamw_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: torch.Tensor,
    grad_scale: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    decay_mask: torch.Tensor | None = None,
    param: torch.Tensor | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    start: int = 0,
    impl: str | None = None,
) -> None:
    """One AdamW step in place on flat shards master[n], m[n], v[n] (fp32 or fp64), from grad[n].

    step: 0-dim fp32 or fp64, the number of steps done so far; this call counts it up, so every
    shard has one of its own. grad_scale: 0-dim tensor that multiplies the gradient. skip: 0-dim
    tensor; if it is not zero nothing changes, step included. decay_mask[n]: bool, the elements that
    decay; None: all of them. param[n]: gets master, cast to its dtype. grad is only read.

    stochastic_rounding: the bf16 param, or the bf16 master of a run without fp32 ones (then m and v
    are fp32 and param is None), is rounded at random, by bits that are a function of `seed`, the
    step's number and the global index, which is `start` for element 0: give every element of the
    model an index, or every buffer a seed, of its own.

    Raises ValueError for other shapes, dtypes, strides, rates or seeds.
    """
    impl = choose(impl, master, grad, m, v, step, grad_scale, skip, decay_mask, param)
    pure = master.dtype == torch.bfloat16 and stochastic_rounding
    if master.dtype not in (torch.float32, torch.float64) and not pure:
        raise ValueError(
            "master must be float32 or float64, or bfloat16 with stochastic rounding, got "
            f"{master.dtype}"
        )
    if stochastic_rounding and not pure and (param is None or param.dtype != torch.bfloat16):
        raise ValueError(
            "stochastic rounding needs a bfloat16 param or master, got param "
            f"{None if param is None else param.dtype}"
        )
    if pure and param is not None:
        raise ValueError("a bfloat16 master is the parameter itself: param must be None")
    if not (0 <= seed < 2**63 and 0 <= start < 2**63 - master.numel()):
        raise ValueError(f"need 0 <= seed, start < 2**63, got {seed} and {start}")
    moments = torch.float32 if pure else master.dtype
    for name, x in (("master", master), ("grad", grad), ("m", m), ("v", v), ("param", param)):
        if x is None:
            continue
        if x.ndim != 1 or x.shape != master.shape or not x.is_contiguous():
            raise ValueError(
                f"{name} must be flat and contiguous like master[{master.numel()}], got "
                f"{[*x.shape]} with strides {x.stride()}"
            )
        if not x.dtype.is_floating_point or (name in ("m", "v") and x.dtype != moments):
            raise ValueError(f"{name} has dtype {x.dtype}, which does not go with {master.dtype}")
    if decay_mask is not None and (
        decay_mask.dtype != torch.bool
        or decay_mask.shape != master.shape
        or not decay_mask.is_contiguous()
    ):
        raise ValueError(
            f"decay_mask must be bool and contiguous like master[{master.numel()}], got "
            f"{decay_mask.dtype} {[*decay_mask.shape]} with strides {decay_mask.stride()}"
        )
    for name, x in (("step", step), ("grad_scale", grad_scale), ("skip", skip)):
        if x is not None and x.ndim != 0:
            raise ValueError(f"{name} must be a 0-dim tensor, got {[*x.shape]}")
    if step.dtype not in (torch.float32, torch.float64):  # 16 bits stop counting at 256 or 2048
        raise ValueError(f"step must be float32 or float64, got {step.dtype}")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and lr >= 0 and eps >= 0 and weight_decay >= 0):
        raise ValueError(
            f"need 0 <= beta < 1 and lr, eps, weight_decay >= 0, got betas {beta1}, {beta2}, "
            f"lr {lr}, eps {eps}, weight_decay {weight_decay}"
        )
    # torch's own operators need no wrapper, whose call costs more than ten thousand weights do.
    direct = impl == "torch" and not torch.compiler.is_compiling()
    update = _adamw_step if direct else _adamw_step_op
    update(
        master, grad, m, v, step, param, grad_scale, skip, decay_mask, lr, beta1, beta2, eps,
        weight_decay, stochastic_rounding, seed, start, impl,
    )  # fmt: skip


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


def _sum_of_squares_triton(flat: torch.Tensor) -> torch.Tensor:
    n, dtype = flat.numel(), compute_dtype(flat)
    partial = flat.new_empty(triton.cdiv(n, _STRIDE * _TILES), dtype=dtype)
    if n:
        with torch.cuda.device_of(flat):
            _sum_of_squares_kernel[(partial.numel(),)](
                flat, partial, n, _TILES, _STRIDE, num_warps=8
            )
    return partial.sum()


def _sum_of_squares(flat: torch.Tensor, impl: str) -> torch.Tensor:
    n, dtype = flat.numel(), compute_dtype(flat)
    if impl == "torch":
        # Short rows first: one long fp32 sum is off by 1e-3 at 10^7 elements.
        whole = n // _ROW * _ROW
        norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
        total = norms.double().square().sum()
        if whole < n:
            rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
            total += rest.double().square()
        return total.to(dtype)
    return _sum_of_squares_triton(flat)


_sum_of_squares_op = torch.library.custom_op("warpweave::sum_of_squares", mutates_args=())(
    _sum_of_squares
)


@_sum_of_squares_op.register_fake
def _(flat, impl):
    return flat.new_empty((), dtype=compute_dtype(flat))


@no_graph
@torch.no_grad()
def sum_of_squares(flat: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """The sum of the squares of flat[n], 0-dim, fp32 (fp64 for fp64), the same bits every time.

    Of a shard it is the shard's share: sum over the ranks, then take the root. Overflow gives inf
    and NaN stays NaN, so the result also tells whether every gradient is finite.
    """
    impl = choose(impl, flat)
    if flat.ndim != 1 or not flat.is_contiguous() or not flat.dtype.is_floating_point:
        raise ValueError(
            f"need a flat contiguous float tensor, got {[*flat.shape]} {flat.dtype} with strides "
            f"{flat.stride()}"
        )
    direct = impl == "torch" and not torch.compiler.is_compiling()
    return (_sum_of_squares if direct else _sum_of_squares_op)(flat, impl)
