"""Forward half of cross entropy, on whole logits or on one shard of the vocabulary.

`cross_entropy_fwd` returns statistics that are merged over the shards. `token_losses` computes the
losses from the merged ones. `vocabulary` has the formula.

Forward reads the logits once, with a running maximum and sum (Milakov and Gimelshein 2018,
arXiv:1805.02867). The kernel does not read ignored rows at all. It computes in float32 (float64 for
float64).
"""

from __future__ import annotations

import torch

from warpweave.kernels.cross_entropy.vocabulary import Vocabulary, check_logits
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import choose, no_graph, tl, triton
from warpweave.kernels.runtime.dtypes import upcast
from warpweave.kernels.runtime.op import operator

_CHUNK = 2**18  # elements per step of the CPU path, so that its passes hit the cache


# ---------------------------------------------------------------- Triton


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
    # 1. The rows of this program; ignored rows load nothing below.
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
        mask = used[:, None] & (col < columns)[None, :]
        z = upcast(tl.load(start[:, None] + col[None, :], mask, float("-inf")))
        new_peak = tl.maximum(peak, tl.max(z, 1))
        pivot = tl.where(
            new_peak == float("-inf"), 0.0, new_peak
        )  # avoid -inf - -inf if all values so far are -inf
        exps = exps * tl.exp(peak - pivot) + tl.sum(tl.exp(z - pivot[:, None]), 1)
        peak = new_peak
        if sum_ptr is not None:
            total += tl.sum(tl.where(mask, z, 0.0), 1)

    # 3. The label's logit if this shard holds it; NaN for a label that does not exist.
    here = used & (label >= vocab_start) & (label < vocab_start + columns)
    target = upcast(tl.load(start + (label - vocab_start), here, 0.0))
    target = tl.where(used & ((label < 0) | (label >= vocab_size)), float("nan"), target)
    lse = peak + tl.log(tl.where(peak == float("-inf"), 1.0, exps))
    tl.store(lse_ptr + row, tl.where(used, lse, 0.0), inside)
    tl.store(target_ptr + row, target, inside)
    if sum_ptr is not None:
        tl.store(sum_ptr + row, total, inside)


def tile(rows: int, columns: int) -> tuple[int, int, int]:
    """ROWS, BLOCK_V and num_warps: 16 elements per thread; short rows share a program."""
    block = min(4096, max(16, triton.next_power_of_2(columns)))
    many = min(4096 // block, triton.next_power_of_2(rows))
    return many, block, min(8, max(1, many * block // 512))


def _fwd_triton(logits, labels, vocabulary: Vocabulary, want_sum: bool):
    rows, columns = len(logits), vocabulary.columns(logits.shape[1])
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    lse = logits.new_empty(rows, dtype=compute_dtype(logits))
    target, total = torch.empty_like(lse), lse.new_empty(rows if want_sum else 0)
    if rows:
        many, block, warps = tile(rows, columns)
        with torch.cuda.device_of(logits):
            _cross_entropy_fwd_kernel[(triton.cdiv(rows, many),)](
                logits,
                labels.contiguous(),
                lse,
                target,
                total if want_sum else None,
                rows,
                columns,
                *vocabulary[:3],
                logits.stride(0),
                many,
                block,
                num_warps=warps,
            )
    return lse, target, total


# ---------------------------------------------------------------- torch


def local_columns(labels, vocab_start: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each label's column in this shard, int64[N, 1], and a mask of labels that are in it.

    Labels outside it have an arbitrary column.
    """
    local = labels - vocab_start
    here = (local >= 0) & (local < columns)
    return local.clamp_(0, columns - 1).unsqueeze(1), here


def chunks(logits: torch.Tensor) -> list[slice]:
    """Slices of rows that fit a CPU's cache; one slice of all rows on other devices."""
    rows, columns = logits.shape
    step = max(1, _CHUNK // columns) if logits.device.type == "cpu" else max(1, rows)
    return [slice(a, min(a + step, rows)) for a in range(0, rows, step)]


def _fwd_torch(logits, labels, vocabulary: Vocabulary, want_sum: bool, keep_softmax: bool = False):
    """The torch path.

    With `keep_softmax`, the softmax overwrites the logits, which have the compute dtype.
    """
    columns = vocabulary.columns(logits.shape[1])
    logits, dtype = logits[:, :columns], compute_dtype(logits)
    ignored, wrong = labels == vocabulary.ignore_index, vocabulary.outside(labels)
    lse = logits.new_full(labels.shape, -float("inf"), dtype=dtype)
    target = torch.zeros_like(lse)
    total = torch.zeros_like(lse) if want_sum else lse.new_empty(0)
    if logits.numel():
        local, here = local_columns(labels, vocabulary.start, columns)
        target = torch.where(here & ~ignored, logits.gather(1, local).squeeze(1), target)
        # torch's fastest log-sum-exp on a CPU is inside log_softmax: max(z) - max(log_softmax(z)).
        buffer = None
        for at in chunks(logits):
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


# ---------------------------------------------------------------- registration and the public half


def fwd(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: Vocabulary,
    want_sum: bool,
    keep_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`cross_entropy_fwd` of checked arguments, not as an operator."""
    if vocabulary.impl == "torch":
        return _fwd_torch(logits, labels, vocabulary, want_sum, keep_softmax)
    return _fwd_triton(logits, labels, vocabulary, want_sum)


def _cross_entropy_fake(logits, labels, vocabulary, want_sum):
    lse = logits.new_empty(labels.shape, dtype=compute_dtype(logits))
    return lse, torch.empty_like(lse), torch.empty_like(lse) if want_sum else lse.new_empty(0)


def _cross_entropy_sharding(logits, labels, vocabulary, want_sum) -> str:
    return f"n_, n -> n, n, {'n' if want_sum else 'whole'}"


@operator(
    "cross_entropy_fwd",
    _cross_entropy_fake,
    records=(Vocabulary,),
    sharding=_cross_entropy_sharding,
)
def cross_entropy_fwd_op(
    logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, want_sum: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    vocabulary.check_labels(labels)
    return fwd(logits, labels, vocabulary, want_sum)


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

    lse is the log-sum-exp over this shard's columns, or -inf if all are padding. target is the
    label's logit if this shard holds it, else 0. logit_sum is the sum over this shard's columns, or
    None without `want_sum` (only smoothing needs it). All are fp32 (fp64 for fp64 logits) and 0 in
    ignored rows. To merge shards, apply logsumexp to lse and add the others. `vocab_size` is
    global; by default the vocabulary ends with this shard.
    """
    impl = choose(impl, logits, labels)
    size = check_logits(logits, labels, vocab_start, vocab_size)
    vocabulary = Vocabulary(vocab_start, size, ignore_index, impl=impl)
    lse, target, total = cross_entropy_fwd_op(logits, labels, vocabulary, want_sum)
    return lse, target, total if want_sum else None
