"""Backward half of cross entropy, on whole logits or on one shard of the vocabulary.

`cross_entropy_bwd` needs the lse over all shards but no communication. `vocabulary` has the
formula. The logits, which exist anyway, are saved for it, and lse[N], from which the softmax is
recomputed. It reads the logits once and writes dlogits once, in place if allowed. The kernel does
not read ignored rows. It computes in float32 (float64 for float64), and dlogits have the dtype of
the logits.
"""

from __future__ import annotations

import torch

from warpweave.kernels.cross_entropy.forward import chunks, local_columns, tile
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary, check_logits
from warpweave.kernels.runtime.dispatch import check_written, choose, no_graph, tl, triton
from warpweave.kernels.runtime.dtypes import to_dtype, upcast
from warpweave.kernels.runtime.op import operator

# ---------------------------------------------------------------- Triton


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
    mask = used[:, None] & (col < columns)[None, :]
    lse = tl.load(lse_ptr + row, used, 0.0)
    dloss = upcast(tl.load(dloss_ptr + row, used, 0.0))
    dloss = tl.where(used & ((label < 0) | (label >= vocab_size)), float("nan"), dloss)

    # 2. Softmax minus the target distribution.
    z = upcast(tl.load(logits_ptr + row[:, None] * stride_row + col[None, :], mask, float("-inf")))
    dz = tl.exp(z - lse[:, None])
    if Z_LOSS != 0.0:
        dz *= (1.0 + (2.0 * Z_LOSS) * lse)[:, None]
    dz = tl.where((label - vocab_start)[:, None] == col[None, :], dz - (1.0 - SMOOTHING), dz)
    if SMOOTHING != 0.0:
        dz -= (SMOOTHING + tl.zeros((1, 1), dz.dtype)) / vocab_size

    # 3. Times the gradient of the row's loss. dz may overwrite the logits: no other program reads
    # this tile.
    dz = to_dtype(tl.where(mask, dz * dloss[:, None], 0.0), dlogits_ptr.dtype.element_ty)
    out = dlogits_ptr + row[:, None] * stride_out + col[None, :]
    tl.store(out, dz, (row < rows)[:, None] & (col < width)[None, :])


def _bwd_triton(
    dloss, logits, labels, lse, vocabulary: Vocabulary, out: torch.Tensor | None = None
) -> torch.Tensor:
    start, size, ignore_index, smoothing, z_loss, _ = vocabulary
    rows, width = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    dlogits = logits.new_empty(logits.shape) if out is None else out
    if dlogits.numel():
        many, block, warps = tile(rows, width)
        with torch.cuda.device_of(logits):
            _cross_entropy_bwd_kernel[(triton.cdiv(rows, many), triton.cdiv(width, block))](
                dloss.contiguous(),
                logits,
                labels.contiguous(),
                lse.contiguous(),
                dlogits,
                rows,
                width,
                vocabulary.columns(width),
                start,
                size,
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


# ---------------------------------------------------------------- torch


def _bwd_torch(
    dloss,
    logits,
    labels,
    lse,
    vocabulary: Vocabulary,
    out: torch.Tensor | None = None,
    own_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The torch path.

    With `own_lse`, the lse of this shard, `out` holds the softmax of the shard instead of the
    logits.
    """
    start, size, ignore_index, smoothing, z_loss, _ = vocabulary
    columns = vocabulary.columns(logits.shape[1])
    dlogits = logits.new_empty(logits.shape) if out is None else out
    dlogits[:, columns:] = 0
    ignored, wrong = labels == ignore_index, vocabulary.outside(labels)
    logits = logits[:, :columns]
    if logits.numel() == 0:
        return dlogits
    scale = dloss.to(lse.dtype).masked_fill(ignored, 0.0).masked_fill_(wrong, float("nan"))
    softmax_scale = scale if z_loss == 0.0 else scale * (1.0 + (2.0 * z_loss) * lse)
    if own_lse is not None:
        softmax_scale = softmax_scale * torch.exp(own_lse - lse)
    local, here = local_columns(labels, start, columns)
    at_label = torch.where(here, (smoothing - 1.0) * scale, 0.0).unsqueeze(1)
    everywhere = (scale * (-smoothing / size)).unsqueeze(1)
    # Without other shards, lse is that of these columns, and torch's softmax is faster.
    complete = columns == size
    direct, buffer = dlogits.dtype == lse.dtype, None
    for at in chunks(logits):
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
    # Ignored rows are already 0 unless their logits are inf or NaN, which must have no effect.
    if dlogits.device.type == "cpu":
        # Write only these rows; on a GPU, their number would need a host sync.
        return dlogits.index_fill_(0, ignored.nonzero().squeeze(1), 0.0)
    return dlogits.masked_fill_(ignored.unsqueeze(1), 0.0)


# ---------------------------------------------------------------- registration and the public half


def bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    vocabulary: Vocabulary,
    out: torch.Tensor | None = None,
    own_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """`cross_entropy_bwd` of checked arguments, not as an operator."""
    if vocabulary.impl == "torch":
        return _bwd_torch(dloss, logits, labels, lse, vocabulary, out, own_lse)
    return _bwd_triton(dloss, logits, labels, lse, vocabulary, out)


@operator(
    "cross_entropy_bwd", lambda dloss, logits, *_: logits.new_empty(logits.shape),
    records=(Vocabulary,), sharding="n, n_, n, n -> n_",
)  # fmt: skip
def cross_entropy_bwd_op(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    vocabulary: Vocabulary,
) -> torch.Tensor:
    return bwd(dloss, logits, labels, lse, vocabulary)


@operator("cross_entropy_bwd_", lambda *_: None, records=(Vocabulary,), writes=("logits",))
def cross_entropy_bwd_in_place_op(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    vocabulary: Vocabulary,
) -> None:
    bwd(dloss, logits, labels, lse, vocabulary, out=logits)


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

    lse[N] is the log-sum-exp over the whole vocabulary, merged over the shards. Each shard then
    computes its columns without communication. Ignored rows and padding columns are exactly 0. With
    `in_place` the result overwrites the logits, whose rows must be contiguous.
    """
    impl = choose(impl, dloss, logits, labels, lse)
    size = check_logits(logits, labels, vocab_start, vocab_size)
    if dloss.shape != labels.shape or lse.shape != labels.shape:
        raise ValueError(
            f"need dloss and lse [{len(labels)}], got {[*dloss.shape]} and {[*lse.shape]}"
        )
    vocabulary = Vocabulary(vocab_start, size, ignore_index, label_smoothing, z_loss, impl)
    if not in_place:
        return cross_entropy_bwd_op(dloss, logits, labels, lse, vocabulary)
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"in_place needs contiguous rows, got strides {[*logits.stride()]}")
    check_written("logits", logits)
    cross_entropy_bwd_in_place_op(dloss, logits, labels, lse, vocabulary)
    return logits
