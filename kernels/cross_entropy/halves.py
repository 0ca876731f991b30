"""The raw halves of cross entropy, on whole logits or on one shard of the vocabulary.

For a row z of logits with label t, over the vocabulary of V columns, and with label smoothing s and
z-loss c:

    lse = log(sum_j exp(z_j))        loss = lse - (1 - s) * z_t - (s / V) * sum_j z_j + c * lse^2
    dz_j = dloss * (exp(z_j - lse) * (1 + 2 c lse) - (1 - s) * [j = t] - s / V)

The z-loss keeps the softmax's normaliser near 1, so that logits in low precision do not drift
(Chowdhery et al. 2022, arXiv:2204.02311, with c = 1e-4).

The raw halves work on one shard logits[N, Vs], which starts at column vocab_start of the whole:
`cross_entropy_fwd` returns what has to be combined over the shards (logsumexp of lse, sums of the
rest), `token_losses` makes losses of the combined values, `cross_entropy_bwd` needs only the
combined lse. Columns from `vocab_size` on are padding: outside softmax and smoothing, gradient 0.

Saved for backward: the logits, which exist anyway, and lse[N]; the softmax is recomputed from them.
Forward reads the logits once (running maximum and sum, Milakov and Gimelshein 2018,
arXiv:1805.02867), backward reads them once and writes dlogits once, in their place if it may; the
kernels do not read ignored rows at all. Computed in float32 (float64 for float64); dlogits have the
dtype of the logits.

A label that is neither in [0, vocab_size) nor `ignore_index` raises ValueError on CPU tensors. On a
GPU looking would make the host wait: there that row's loss and gradient are NaN, never just wrong.
"""

from __future__ import annotations

import torch

from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import check_written, choose, no_graph, tl, triton
from warpweave.kernels.runtime.numeric import to_dtype, upcast

_CHUNK = 2**18  # elements the CPU path works on at a time: its passes then hit the cache


# ---------------------------------------------------------------- checks


def check_options(reduction: str, label_smoothing: float, z_loss: float) -> None:
    """Raise ValueError for an option that means nothing."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss must be finite and not negative, got {z_loss}")


# ---------------------------------------------------------------- forward


@triton.jit
def _cross_entropy_fwd_kernel(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    target_ptr,
    sum_ptr,
    rows,
    columns,
    vocab_start,
    vocab_size,
    ignore_index,
    stride_row,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # 1. The rows of this program; ignored ones load nothing below.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    label = tl.load(labels_ptr + row, inside, ignore_index)
    used = label != ignore_index
    start = logits_ptr + row * stride_row

    # 2. Running maximum, sum of exponentials relative to it, and plain sum, block by block.
    dtype: tl.constexpr = lse_ptr.dtype.element_ty
    peak = tl.full((ROWS,), float("-inf"), dtype)
    exps = tl.zeros((ROWS,), dtype)
    total = tl.zeros((ROWS,), dtype)
    for first in range(0, columns, BLOCK_V):
        col = first + tl.arange(0, BLOCK_V)
        live = used[:, None] & (col < columns)[None, :]
        z = upcast(tl.load(start[:, None] + col[None, :], live, float("-inf")))
        new_peak = tl.maximum(peak, tl.max(z, 1))
        pivot = tl.where(
            new_peak == float("-inf"), 0.0, new_peak
        )  # only -inf so far: no -inf - -inf
        exps = exps * tl.exp(peak - pivot) + tl.sum(tl.exp(z - pivot[:, None]), 1)
        peak = new_peak
        if sum_ptr is not None:
            total += tl.sum(tl.where(live, z, 0.0), 1)

    # 3. The label's logit where this shard holds it; NaN for a label that does not exist.
    here = used & (label >= vocab_start) & (label < vocab_start + columns)
    target = upcast(tl.load(start + (label - vocab_start), here, 0.0))
    target = tl.where(used & ((label < 0) | (label >= vocab_size)), float("nan"), target)
    lse = peak + tl.log(tl.where(peak == float("-inf"), 1.0, exps))
    tl.store(lse_ptr + row, tl.where(used, lse, 0.0), inside)
    tl.store(target_ptr + row, target, inside)
    if sum_ptr is not None:
        tl.store(sum_ptr + row, total, inside)


def _tile(rows: int, columns: int) -> tuple[int, int, int]:
    """ROWS, BLOCK_V and num_warps: 16 elements per thread; short rows share a program."""
    block = min(4096, max(16, triton.next_power_of_2(columns)))
    many = min(4096 // block, triton.next_power_of_2(rows))
    return many, block, min(8, max(1, many * block // 512))


def check_logits(logits, labels, vocab_start: int, vocab_size: int | None) -> int:
    """The vocabulary's size; raises ValueError where shapes, dtypes or sizes do not fit."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"need logits[N, V] and labels[N], got {[*logits.shape]} and {[*labels.shape]}"
        )
    if labels.dtype != torch.int64 or not logits.dtype.is_floating_point:
        raise ValueError(
            f"labels must be int64 and logits floating, got {labels.dtype} and {logits.dtype}"
        )
    size = vocab_start + logits.shape[1] if vocab_size is None else vocab_size
    if vocab_start < 0 or size < 1:
        raise ValueError(f"need vocab_start >= 0, vocab_size >= 1, got {vocab_start}, {size}")
    return size


def outside_vocabulary(labels: torch.Tensor, vocab_size: int, ignore_index: int) -> torch.Tensor:
    """bool[N]: the labels that name no column and are not ignored; on CPU tensors they raise."""
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= vocab_size))
    if wrong.device.type == "cpu" and wrong.any():
        first = labels[wrong][0].item()
        raise ValueError(f"labels must be in [0, {vocab_size}) or {ignore_index}, got {first}")
    return wrong


def _local(labels, vocab_start: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each label's column in this shard, int64[N, 1], and which have one (the others get any)."""
    local = labels - vocab_start
    here = (local >= 0) & (local < columns)
    return local.clamp_(0, columns - 1).unsqueeze(1), here


def _chunks(logits: torch.Tensor) -> list[slice]:
    """Slices of rows that fit a CPU's cache; one slice of all rows elsewhere."""
    rows, columns = logits.shape
    step = max(1, _CHUNK // columns) if logits.device.type == "cpu" else max(1, rows)
    return [slice(a, min(a + step, rows)) for a in range(0, rows, step)]


def _fwd_torch(
    logits,
    labels,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    want_sum: bool,
    keep_softmax: bool = False,
):
    """With `keep_softmax` the logits, in the dtype to compute in, are overwritten by theirs."""
    columns = max(0, min(logits.shape[1], vocab_size - vocab_start))
    logits, dtype = logits[:, :columns], compute_dtype(logits)
    ignored, wrong = labels == ignore_index, outside_vocabulary(labels, vocab_size, ignore_index)
    lse = logits.new_full(labels.shape, -float("inf"), dtype=dtype)
    target = torch.zeros_like(lse)
    total = torch.zeros_like(lse) if want_sum else lse.new_empty(0)
    if logits.numel():
        local, here = _local(labels, vocab_start, columns)
        target = torch.where(here & ~ignored, logits.gather(1, local).squeeze(1), target)
        # torch's fastest log-sum-exp on a CPU is inside log_softmax: max(z) - max(log_softmax(z)).
        buffer = None
        for at in _chunks(logits):
            z = logits[at]
            peak = z.amax(1).to(dtype)
            if want_sum:
                total[at] = z.sum(1, dtype=dtype)
            if keep_softmax:
                log_peak = torch.softmax(z, 1, out=z).amax(1).log()
            else:
                buffer = torch.empty_like(z, dtype=dtype) if buffer is None else buffer[: len(z)]
                log_peak = torch.log_softmax(z, 1, dtype=dtype, out=buffer).amax(1)
            lse[at] = torch.where(peak == -float("inf"), peak, peak - log_peak)
    target.masked_fill_(wrong, float("nan"))
    lse.masked_fill_(ignored, 0.0)
    return lse, target, total.masked_fill_(ignored, 0.0) if want_sum else total


def _fwd_triton(logits, labels, vocab_start: int, vocab_size: int, ignore_index: int, want_sum):
    rows, columns = len(logits), max(0, min(logits.shape[1], vocab_size - vocab_start))
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    lse = logits.new_empty(rows, dtype=compute_dtype(logits))
    target, total = torch.empty_like(lse), lse.new_empty(rows if want_sum else 0)
    if rows:
        many, block, warps = _tile(rows, columns)
        with torch.cuda.device_of(logits):
            _cross_entropy_fwd_kernel[(triton.cdiv(rows, many),)](
                logits,
                labels.contiguous(),
                lse,
                target,
                total if want_sum else None,
                rows,
                columns,
                vocab_start,
                vocab_size,
                ignore_index,
                logits.stride(0),
                many,
                block,
                num_warps=warps,
            )
    return lse, target, total


@torch.library.custom_op("warpweave::cross_entropy_fwd", mutates_args=())
def _cross_entropy_fwd_op(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    want_sum: bool,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if impl == "torch":
        return _fwd_torch(logits, labels, vocab_start, vocab_size, ignore_index, want_sum)
    if labels.device.type == "cpu":
        outside_vocabulary(labels, vocab_size, ignore_index)
    return _fwd_triton(logits, labels, vocab_start, vocab_size, ignore_index, want_sum)


@_cross_entropy_fwd_op.register_fake
def _(logits, labels, vocab_start, vocab_size, ignore_index, want_sum, impl):
    lse = logits.new_empty(labels.shape, dtype=compute_dtype(logits))
    return lse, torch.empty_like(lse), torch.empty_like(lse) if want_sum else lse.new_empty(0)


@no_graph
def cross_entropy_fwd(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    want_sum: bool = True,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(lse[N], target[N], logit_sum[N]) of one vocabulary shard logits[N, V/tp], labels int64[N].

    lse: log-sum-exp over this shard's columns, -inf if all are padding; target: the label's logit
    if this shard holds it, else 0; logit_sum: over this shard's columns, None without `want_sum`
    (only smoothing needs it). All are fp32 (fp64 for fp64 logits) and 0 in ignored rows. Over the
    shards: logsumexp of lse, sums of the others. `vocab_size` is global; its default ends here.
    """
    impl = choose(impl, logits, labels)
    size = check_logits(logits, labels, vocab_start, vocab_size)
    lse, target, total = _cross_entropy_fwd_op(
        logits, labels, vocab_start, size, ignore_index, want_sum, impl
    )
    return lse, target, total if want_sum else None


def token_losses(
    lse: torch.Tensor,
    target: torch.Tensor,
    logit_sum: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """losses[N] from lse[N], target[N], logit_sum[N] of the whole vocabulary; 0 in ignored rows."""
    losses = lse - (1.0 - label_smoothing) * target
    if label_smoothing != 0.0:
        losses = losses - (label_smoothing / vocab_size) * logit_sum
    if z_loss != 0.0:
        losses = losses + z_loss * lse.square()
    return losses.masked_fill_(labels == ignore_index, 0.0)


# ---------------------------------------------------------------- backward


@triton.jit
def _cross_entropy_bwd_kernel(
    dloss_ptr,
    logits_ptr,
    labels_ptr,
    lse_ptr,
    dlogits_ptr,
    rows,
    width,
    columns,
    vocab_start,
    vocab_size,
    ignore_index,
    stride_row,
    stride_out,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # 1. A tile of rows and columns; ignored rows and padding are written as 0 and not read.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    label = tl.load(labels_ptr + row, row < rows, ignore_index)
    used = label != ignore_index
    live = used[:, None] & (col < columns)[None, :]
    lse = tl.load(lse_ptr + row, used, 0.0)
    dloss = upcast(tl.load(dloss_ptr + row, used, 0.0))
    dloss = tl.where(used & ((label < 0) | (label >= vocab_size)), float("nan"), dloss)

    # 2. Softmax minus the target distribution.
    z = upcast(tl.load(logits_ptr + row[:, None] * stride_row + col[None, :], live, float("-inf")))
    dz = tl.exp(z - lse[:, None])
    if Z_LOSS != 0.0:
        dz *= (1.0 + (2.0 * Z_LOSS) * lse)[:, None]
    dz = tl.where((label - vocab_start)[:, None] == col[None, :], dz - (1.0 - SMOOTHING), dz)
    if SMOOTHING != 0.0:
        dz -= (SMOOTHING + tl.zeros((1, 1), dz.dtype)) / vocab_size

    # 3. Times the gradient of the row's loss. The logits may lie where dz goes: no other program
    # reads this tile.
    dz = to_dtype(tl.where(live, dz * dloss[:, None], 0.0), dlogits_ptr.dtype.element_ty)
    out = dlogits_ptr + row[:, None] * stride_out + col[None, :]
    tl.store(out, dz, (row < rows)[:, None] & (col < width)[None, :])


def _bwd_torch(
    dloss,
    logits,
    labels,
    lse,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float = 0.0,
    out: torch.Tensor | None = None,
    own_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """With `own_lse`, theirs alone, the logits are no more: `out` holds their softmax."""
    columns = max(0, min(logits.shape[1], vocab_size - vocab_start))
    dlogits = logits.new_empty(logits.shape) if out is None else out
    dlogits[:, columns:] = 0
    ignored, wrong = labels == ignore_index, outside_vocabulary(labels, vocab_size, ignore_index)
    logits = logits[:, :columns]
    if logits.numel() == 0:
        return dlogits
    scale = dloss.to(lse.dtype).masked_fill(ignored, 0.0).masked_fill_(wrong, float("nan"))
    softmax_scale = scale if z_loss == 0.0 else scale * (1.0 + (2.0 * z_loss) * lse)
    if own_lse is not None:
        softmax_scale = softmax_scale * torch.exp(own_lse - lse)
    local, here = _local(labels, vocab_start, columns)
    at_label = torch.where(here, (smoothing - 1.0) * scale, 0.0).unsqueeze(1)
    everywhere = (scale * (-smoothing / vocab_size)).unsqueeze(1)
    complete = (
        columns == vocab_size
    )  # then lse is these columns' own, and torch's softmax is faster
    direct, buffer = dlogits.dtype == lse.dtype, None
    for at in _chunks(logits):
        z = logits[at]
        if direct:
            dz = dlogits[at, :columns]
        else:
            dz = buffer = (
                torch.empty_like(z, dtype=lse.dtype) if buffer is None else buffer[: len(z)]
            )
        if own_lse is not None:
            pass
        elif complete:
            torch.softmax(z, 1, dtype=lse.dtype, out=dz)
        else:
            torch.sub(z, lse[at, None], out=dz).exp_()
        dz.mul_(softmax_scale[at, None])
        if smoothing != 0.0:
            dz.add_(everywhere[at])
        dz.scatter_add_(1, local[at], at_label[at])
        if not direct:
            dlogits[at, :columns] = dz
    # Ignored rows are 0 by now unless their logits are inf or NaN; those must not matter either.
    if dlogits.device.type == "cpu":
        # Touches these rows only; on a GPU their number would make the host wait.
        return dlogits.index_fill_(0, ignored.nonzero().squeeze(1), 0.0)
    return dlogits.masked_fill_(ignored.unsqueeze(1), 0.0)


def _bwd_triton(
    dloss,
    logits,
    labels,
    lse,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, width = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    dlogits = logits.new_empty(logits.shape) if out is None else out
    if dlogits.numel():
        many, block, warps = _tile(rows, width)
        with torch.cuda.device_of(logits):
            _cross_entropy_bwd_kernel[(triton.cdiv(rows, many), triton.cdiv(width, block))](
                dloss.contiguous(),
                logits,
                labels.contiguous(),
                lse.contiguous(),
                dlogits,
                rows,
                width,
                max(0, min(width, vocab_size - vocab_start)),
                vocab_start,
                vocab_size,
                ignore_index,
                logits.stride(0),
                dlogits.stride(0),
                smoothing,
                z_loss,
                many,
                block,
                num_warps=warps,
            )
    return dlogits


@torch.library.custom_op("warpweave::cross_entropy_bwd", mutates_args=())
def _cross_entropy_bwd_op(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    impl: str,
) -> torch.Tensor:
    half = _bwd_torch if impl == "torch" else _bwd_triton
    where = vocab_start, vocab_size, ignore_index
    return half(dloss, logits, labels, lse, *where, label_smoothing, z_loss)


@_cross_entropy_bwd_op.register_fake
def _(dloss, logits, *rest):
    return logits.new_empty(logits.shape)


@torch.library.custom_op("warpweave::cross_entropy_bwd_", mutates_args=("logits",))
def _cross_entropy_bwd_in_place_op(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    impl: str,
) -> None:
    half = _bwd_torch if impl == "torch" else _bwd_triton
    where = vocab_start, vocab_size, ignore_index
    half(dloss, logits, labels, lse, *where, label_smoothing, z_loss, out=logits)


@_cross_entropy_bwd_in_place_op.register_fake
def _(*arguments):
    return None


@no_graph
def cross_entropy_bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    in_place: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """dlogits[N, V/tp], in the dtype of logits[N, V/tp], from the losses' gradients dloss[N].

    lse[N] is the log-sum-exp over the whole vocabulary, so combined over the shards; each shard
    then gets its own columns without communication. Ignored rows and padding columns are exactly 0.
    With `in_place` the result overwrites the logits, whose rows must be contiguous.
    """
    impl = choose(impl, dloss, logits, labels, lse)
    size = check_logits(logits, labels, vocab_start, vocab_size)
    if dloss.shape != labels.shape or lse.shape != labels.shape:
        raise ValueError(
            f"need dloss and lse [{len(labels)}], got {[*dloss.shape]} and {[*lse.shape]}"
        )
    options = vocab_start, size, ignore_index, label_smoothing, z_loss, impl
    if not in_place:
        return _cross_entropy_bwd_op(dloss, logits, labels, lse, *options)
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"in_place needs contiguous rows, got strides {[*logits.stride()]}")
    check_written("logits", logits)
    _cross_entropy_bwd_in_place_op(dloss, logits, labels, lse, *options)
    return logits
