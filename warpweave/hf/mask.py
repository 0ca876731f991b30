"""Hugging Face masks as options of our attention: causal or not, a window, documents, positions.

transformers describes a mask as a function of (sample, head, query, key), composed of closures, and
calls the attention's own mask function with it. Ours does not allocate an S x S tensor. It reads
the closures and returns a `Visible`, once per forward (with a host sync if tokens are padded or
packed, but none when one token is decoded). Packed sequences and chunks are documents. Padding at
either end is hidden from all queries, including padding itself. Padding before all tokens sees
nothing, so its output is 0, as with transformers' "sdpa". A mask that is not one interval of keys
per query raises ValueError.

A `Visible` is an attribute of a `Mask`, a tensor of the mask's shape with a single NaN element. A
model that computes with its mask gets NaN, never a wrong number, and the attention refuses anything
except a `Mask`. It must be a tensor for two reasons. transformers accepts only tensors, and its own
BlockMask, as existing masks (generation with a static cache creates them once and passes them to
every forward). And models move and slice masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers
from transformers import masking_utils

from warpweave.hf.arguments import unknown

_Run = tuple[int, int]
_BROKEN = (
    "warpweave attention needs padding at the ends of a sample, but attention_mask has zeros "
    "between its ones; pad on the left, or use set_attn_implementation('sdpa')"
)
# Arguments of transformers' other mask functions, about skipping a mask or its representation.
_IGNORED = (
    "allow_is_causal_skip", "allow_is_bidirectional_skip", "config", "local_size", "use_vmap",
)  # fmt: skip


class Visible(NamedTuple):
    """The keys that each query sees, as arguments of `kernels.attention.attention`."""

    causal: bool
    window: int | None
    documents: torch.Tensor | None
    q_run: _Run
    k_run: _Run

    def written_out(self, device: torch.device) -> torch.Tensor:
        """bool[B or 1, 1, Sq, Sk], True where a query sees a key."""
        q, k = (torch.arange(at, at + n, device=device) for at, n in (self.q_run, self.k_run))
        distance = q[:, None] - k
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen &= distance.abs() < self.window
        if self.documents is None:
            return seen[None, None]
        bounds = self.documents.to(device)
        sides = bounds.unbind(1) if bounds.ndim == 3 else (bounds, bounds)
        rows = (x.expand(len(bounds), -1).contiguous() for x in (q, k))
        of_q, of_k = (
            torch.searchsorted(side.contiguous(), x, right=True) for side, x in zip(sides, rows)
        )
        return (seen & (of_q[:, :, None] == of_k[:, None]))[:, None]


class Mask(torch.Tensor):
    """A tensor [B, 1, Sq, Sk] of NaN, without memory, with a `Visible` in `visible`. `seen` caches
    the mask that is written out of it."""

    visible: Visible
    seen: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.contiguous, torch.Tensor.detach):  # generate() calls contiguous
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.to, torch.Tensor.clone) and isinstance(args[0], Mask):
            return masked(out, args[0].visible)
        return out


def masked(like: torch.Tensor, visible: Visible) -> Mask:
    """A `Mask` with the shape, dtype and device of a tensor."""
    nan = torch.full((), float("nan"), dtype=like.dtype, device=like.device)
    mask = nan.expand(like.shape).as_subclass(Mask)
    mask.visible = visible
    return mask


class _Pattern(NamedTuple):
    causal: bool = False
    window: int | None = None
    starts: tuple[torch.Tensor, ...] = ()  # each [B, n]: the rows where a document begins


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **rest: object,
) -> Mask | None:
    """The mask function that is registered together with our attention.

    Returns a `Mask`. Returns None if rows are positions and a query sees all keys, or all keys up
    to its own. Raises ValueError for a mask function that is not one of transformers' own, for an
    unknown argument, and for padding in the middle of a sample.
    """
    if names := unknown(rest, _IGNORED):
        raise ValueError(
            f"warpweave attention's mask does not support {', '.join(names)}, which transformers "
            f"{transformers.__version__} passes; use model.set_attn_implementation('sdpa')"
        )
    plain = mask_function is masking_utils.causal_mask_function and attention_mask is None
    if plain and isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length:
        return None
    like = torch.empty((), dtype=dtype, device=device).expand(batch_size, 1, q_length, kv_length)
    reads = attention_mask is not None or not isinstance(q_offset, int)
    if q_length == 1 and reads and isinstance(kv_offset, int) and not like.is_cpu:
        return _mask_of_one(mask_function, attention_mask, q_offset, kv_offset, like)
    q_run, k_run = (int(q_offset), q_length), (int(kv_offset), kv_length)
    return _mask_of(mask_function, attention_mask, q_run, k_run, like)


@torch.compiler.disable  # it reads closures and padding
def _mask_of(
    function: Callable,
    attention_mask: torch.Tensor | None,
    q_run: _Run,
    k_run: _Run,
    like: torch.Tensor,
) -> Mask | None:
    """`make_mask` for a mask function; the `Mask` has the shape and dtype of `like`."""
    batch_size, kv_length = len(like), like.shape[-1]
    end = max(sum(q_run), sum(k_run))
    pattern = _pattern_of(function, end)
    causal, window, starts = pattern
    hidden = None
    window = None if window is None or window >= end else window
    if attention_mask is not None:
        seen = min(kv_length, sum(q_run) - k_run[0]) if causal else kv_length
        hidden = _padding(attention_mask[:, k_run[0] :][:, :seen].bool(), seen)
    later = causal and sum(k_run) - 1 > q_run[0]  # some key follows a query; not when decoding one
    if not starts and hidden is None and window is None and (q_run == k_run or not later):
        return None
    documents = None
    if starts or hidden is not None:
        zero = torch.zeros(batch_size, 1, dtype=torch.int64, device=like.device)
        inner = (s.expand(batch_size, -1) for s in starts)
        # With the end, these are never taken for the number of each token's document.
        documents = torch.cat([zero, *inner, zero + end], 1).sort(1).values
    if hidden is not None:
        first, stop = (at + k_run[0] for at in hidden)
        documents = torch.stack((documents, documents.clamp(first, stop)), 1)
    return masked(like, Visible(causal, window, documents, q_run, k_run))


@torch.compiler.disable
def _mask_of_one(
    function: Callable,
    attention_mask: torch.Tensor | None,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    like: torch.Tensor,
) -> Mask:
    """`make_mask` for one query. Its keys are computed on the device, without a host sync. Padding
    in the middle of a sample fails a device assertion, like an index out of range."""
    keys = like.shape[-1]
    pattern = _pattern_of(function, kv_offset + keys)
    at, own = torch.arange(keys, device=like.device), q_offset - kv_offset
    seen = (at <= own if pattern.causal else at >= 0).expand(len(like), -1)
    if pattern.window is not None:
        seen = seen & ((at - own).abs() < pattern.window)
    for starts in pattern.starts:
        before = starts[:, :, None] - kv_offset <= at  # [B, n, keys]
        seen = seen & (before == (starts - kv_offset <= own)[:, :, None]).all(1)
    if attention_mask is not None:
        real = attention_mask[:, kv_offset:][:, :keys].bool()
        seen = seen & torch.nn.functional.pad(real, (0, keys - real.shape[1]))
    first, run = _run_of(seen)
    torch._assert_async((run == seen).all(), _BROKEN)
    of_key = torch.cat((first, first + seen.sum(1, keepdim=True)), 1)
    of_query = torch.arange(2, device=like.device).expand_as(of_key)
    documents = torch.stack((of_query, of_key), 1)
    return masked(like, Visible(False, None, documents, (0, 1), (0, keys)))


# ---------------------------------------------------------------- 1. closures


def _pattern_of(function: Callable, end: int, positions: torch.Tensor | None = None) -> _Pattern:
    """The pattern of a mask function over the keys before `end`. `positions`[B, S] are the rows'
    positions in their packed sequences, if these differ from the rows' own."""
    name = function.__qualname__.removesuffix(".<locals>.inner_mask")
    cells = function.__closure__ or ()
    held = _Held(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells)))
    if function is masking_utils.causal_mask_function:
        return _Pattern(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return _Pattern()
    if function.__module__ == masking_utils.__name__:
        if name == "and_masks.<locals>.and_mask":
            return _both([_pattern_of(part, end, positions) for part in held["mask_functions"]])
        if name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
            return _Pattern(window=held["sliding_window"] + ("bidirectional" in name))
        if name == "chunked_overlay":
            size, padding = held["chunk_size"], held["left_padding"]
            if positions is not None:
                return _Pattern(starts=(_packed(_runs((positions - padding[:, None]) // size)),))
            steps = torch.arange(0, end, size, device=padding.device)
            return _Pattern(starts=((padding[:, None] + steps).clamp(max=end),))
        if name == "packed_sequence_mask_function":
            return _Pattern(starts=(_packed(held["packed_sequence_mask"]),))
        if name == "remap_positions_for_packed_sequence":
            # Within a sequence, positions differ as rows do, so everything but chunks is the same.
            return _pattern_of(held["mask_function"], end, held["position_ids"])
    raise ValueError(
        f"warpweave attention does not support the mask {function.__qualname__}: each query must "
        "see one contiguous run of keys; use model.set_attn_implementation('sdpa')"
    )


class _Held(dict):
    """The variables of a closure by name."""

    def __missing__(self, name: str) -> object:
        raise ValueError(
            f"a mask function of transformers {transformers.__version__} has no variable {name}, "
            "which warpweave attention reads; use model.set_attn_implementation('sdpa')"
        )


def _both(patterns: list[_Pattern]) -> _Pattern:
    windows = [p.window for p in patterns if p.window is not None]
    starts = tuple(start for p in patterns for start in p.starts)
    return _Pattern(any(p.causal for p in patterns), min(windows, default=None), starts)


# ---------------------------------------------------------------- 2. documents


def _packed(number: torch.Tensor) -> torch.Tensor:
    """The first row of every sequence, given the number[B, S] of each row's sequence."""
    each = torch.arange(int(number[:, -1].max()) + 2, device=number.device)
    return torch.searchsorted(number.contiguous(), each.expand(len(number), -1).contiguous())


def _runs(number: torch.Tensor) -> torch.Tensor:
    """Number the runs of equal number[B, S] from 0, and return each row's run."""
    changes = number[:, 1:] != number[:, :-1]
    return torch.nn.functional.pad(changes, (1, 0)).cumsum(1)


def _padding(mask: torch.Tensor, seen: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The start and the end of each sample's tokens, [B, 1] each; None if no key is hidden. The
    mask[B, up to seen] covers the keys that are seen by some query."""
    if mask.is_cpu and mask.shape[1] == seen and bool(mask.all()):  # on a GPU, sync only once below
        return None
    mask = torch.nn.functional.pad(mask, (0, seen - mask.shape[1]))
    first, run = _run_of(mask)
    hides, broken = torch.stack((~mask.all(), (run != mask).any())).tolist()
    if broken:
        raise ValueError(_BROKEN)
    return (first, first + mask.sum(1, keepdim=True)) if hides else None


def _run_of(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first True of each row of bool[B, S], as [B, 1], and a run from there. The run is as long
    as the row's number of True elements."""
    first = mask.int().argmax(1, keepdim=True)
    at = torch.arange(mask.shape[1], device=mask.device)
    return first, (at >= first) & (at < first + mask.sum(1, keepdim=True))
