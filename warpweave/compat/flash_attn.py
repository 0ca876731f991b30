"""The functions of flash-attention 2, with its arguments and their meaning.

    from warpweave.compat.flash_attn import flash_attn_func      # was: from flash_attn import ...

There are two differences from `warpweave.kernels.attention.attention`. `causal` defaults to False,
and queries are at the END of the keys: query i of Sq has position p = i + Sk - Sq among Sk keys. It
sees the keys p - left .. p + right of ``window_size=(left, right)``. A negative side has no bound,
and `causal` sets right to 0. Rows that see no key are 0, with lse = -inf.

Our kernel's window has the same width on both sides. An asymmetric window is therefore a causal one
of left + right + 1 keys, with queries shifted forward by `right` positions. Packed sequences
(`varlen`) are one call with documents, without waiting for the device, if they have no mask, or
the same tensor of boundaries for queries and keys and no asymmetric window. Otherwise, the
boundaries are read, once for all layers that get the same tensor. If those of queries and keys
differ, or the window is asymmetric, each sequence is one call.

Any floating dtype of at least 16 bits and any head size up to 256 is supported. Dropout zeroes
weights by a key drawn from the generator of q's device. `torch.manual_seed` makes it reproducible,
but the masks differ from flash-attention's. `alibi_slopes` and `block_table` are not supported and
raise ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpweave.kernels.attention import attention
from warpweave.kernels.rope import apply_rope
from warpweave.kernels.runtime.transfer import upload

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """softmax(scale q k^T + mask) v; differentiable.

    q[B, Sq, Hq, D], k and v[B, Sk, Hkv, D]; each KV head serves Hq / Hkv adjacent query heads.
    `softmax_scale` None means D**-0.5, and a `softcap` of 0 means no softcap.

    Returns o[B, Sq, Hq, D], or (o, lse[B, Hq, Sq], None) with `return_attn_probs`; the
    probabilities themselves are never computed. Raises ValueError for `alibi_slopes`, and in the
    same cases as `attention`.

    Examples:
        >>> q, k, v = (torch.randn(2, 16, heads, 8) for heads in (4, 2, 2))
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 16, 4, 8])
    """
    _refuse_given(alibi_slopes=alibi_slopes)
    options = _options(q.device, dropout_p, softmax_scale, softcap, deterministic)
    return _result(_attend_at_the_end(q, k, v, causal, window_size, options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with k and v in one tensor, kv[B, Sk, 2, Hkv, D]."""
    k, v = _unpacked("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with q, k and v in one tensor, qkv[B, S, 3, H, D]."""
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """`flash_attn_func` for n packed sequences.

    Sequence j has the queries cu_seqlens_q[j] .. cu_seqlens_q[j + 1] - 1, and its keys likewise.

    q[Tq, Hq, D], k and v[Tk, Hkv, D]. Both boundaries are int32 (or int64)[n + 1], ascending from
    0. The last one is the number of rows; rows beyond it have no meaning. `max_seqlen_q` and
    `max_seqlen_k`, by which flash-attention sizes its launches, are not used here.

    Returns o[Tq, Hq, D], or (o, lse[Hq, Tq], None) with `return_attn_probs`. Raises ValueError for
    boundaries that do not fit, for `alibi_slopes` and for `block_table` (a paged cache).

    Examples:
        >>> q, k, v = (torch.randn(16, 4, 8) for _ in range(3))
        >>> ends = torch.tensor([0, 10, 16], dtype=torch.int32)  # two sequences
        >>> flash_attn_varlen_func(q, k, v, ends, ends, 10, 10, causal=True).shape
        torch.Size([16, 4, 8])
    """
    _refuse_given(alibi_slopes=alibi_slopes, block_table=block_table)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(f"{name} must be [tokens, heads, D], got shape {tuple(x.shape)}")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x.ndim != 1 or len(x) < 1 or x.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} must be a non-empty 1-D int32 or int64 tensor with one more entry than "
                f"there are sequences, got {x.dtype} {tuple(x.shape)}"
            )
    options = _options(q.device, dropout_p, softmax_scale, softcap, deterministic)
    both = ("cu_seqlens_q", cu_seqlens_q, q), ("cu_seqlens_k", cu_seqlens_k, k)
    if q.is_cpu:  # elsewhere reading them waits for the device
        for each in both:
            _boundaries(*each)
    same = cu_seqlens_q is cu_seqlens_k and len(q) == len(k)
    unmasked = not causal and max(window_size) < 0 and len(cu_seqlens_q) == len(cu_seqlens_k)
    one_call = _mask(causal, window_size, len(q), len(q))
    if unmasked or (same and "q_runs" not in one_call):
        one_call |= {"q_runs": ((0, len(q)),), "k_runs": ((0, len(k)),)}
        documents = torch.stack((cu_seqlens_q, cu_seqlens_k.to(cu_seqlens_q)))[None]
        # Rows beyond the last sequence form one more document. Because of its end beyond all rows,
        # n boundaries for n rows are not mistaken for the document of each row.
        documents = F.pad(documents, (0, 1), value=torch.iinfo(torch.int32).max)
        o, lse = attention(
            q[None], k[None], v[None], documents=documents, return_lse=True, **one_call, **options
        )
        return _result((o[0], lse[0]), return_attn_probs)
    q_ends, k_ends = (_boundaries(*each) for each in both)
    if len(q_ends) != len(k_ends):
        raise ValueError(
            f"cu_seqlens_q has {len(q_ends) - 1} sequences, but cu_seqlens_k has {len(k_ends) - 1}"
        )
    if q_ends == k_ends and cu_seqlens_q is not cu_seqlens_k and len(q) == len(k):
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_q, max_seqlen_q, max_seqlen_k, dropout_p,
            softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs,
        )  # fmt: skip
    parts = []
    for number, (a, b, c, d) in enumerate(zip(q_ends, q_ends[1:], k_ends, k_ends[1:])):
        sequence = q[None, a:b], k[None, c:d], v[None, c:d]
        where = options | {"dropout_origin": (number, 0)}
        o, lse = _attend_at_the_end(*sequence, causal, window_size, where)
        parts.append((o[0], lse[0]))
    rest = len(q) - q_ends[-1]
    o = torch.cat([o for o, _ in parts] + [q.new_zeros(rest, q.shape[1], v.shape[2])])
    lses = [lse for _, lse in parts]
    none = torch.full((q.shape[1], rest), -torch.inf, device=q.device)
    return _result((o, torch.cat([*lses, none.to(lses[0].dtype if lses else None)], 1)),
                   return_attn_probs)  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with k and v in one tensor, kv[Tk, 2, Hkv, D]."""
    k, v = _unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with q, k and v in one tensor, qkv[T, 3, H, D]."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache; `k` and `v` are first written into it, in place.

    Args:
        q: [B, Sq, Hq, D], the last positions of the updated cache.
        k_cache, v_cache: [B, Smax, Hkv, D], or with more samples, if `cache_batch_idx` int[B] gives
            the sample of each row of q.
        k, v: [B, Snew, Hkv, D], written to the rows starting at cache_seqlens. Pass both or
            neither.
        rotary_cos, rotary_sin: [at least all positions, R/2]. k is rotated by the rows of its
            positions before it is written. So is q if there is a causal mask or a window;
            otherwise, all of q is rotated by the row cache_seqlens.
        cache_seqlens: number of filled rows of the cache before this call, one for all samples or
            int[B]. A tensor is read, which waits for the device. None (without k) means all rows.
            Samples of different lengths are one call each.
        rotary_interleaved: pairs are (2i, 2i + 1), not (i, i + R/2).
        cache_leftpad: the first row of the cache that holds a token, one for all samples or int[B],
            which is read. Rows before it are hidden.
        num_splits: the split of flash-attention's work; it has no effect here.

    Returns o[B, Sq, Hq, D], or (o, lse[B, Hq, Sq]) with `return_softmax_lse`; there are no
    gradients. Raises ValueError if the cache is full, if only one of two tensors that belong
    together is given, and for `block_table` (a paged cache) and `alibi_slopes`.

    Examples:
        >>> cache_k, cache_v = torch.zeros(2, 32, 4, 8), torch.zeros(2, 32, 4, 8)
        >>> q, k, v = (torch.randn(2, 1, 4, 8) for _ in range(3))
        >>> flash_attn_with_kvcache(q, cache_k, cache_v, k, v, cache_seqlens=10, causal=True).shape
        torch.Size([2, 1, 4, 8])
    """
    _refuse_given(alibi_slopes=alibi_slopes, block_table=block_table)
    if (k is None) != (v is None) or (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("k must be passed with v, and rotary_cos with rotary_sin")
    if k is None and rotary_cos is not None:
        raise ValueError("rotary_cos needs k and v: the keys in the cache are already rotated")
    if k is not None and cache_seqlens is None:
        raise ValueError("k needs cache_seqlens, the number of filled rows of the cache")
    if rotary_cos is not None and rotary_cos.shape != rotary_sin.shape:
        shapes = [*rotary_cos.shape], [*rotary_sin.shape]
        raise ValueError(
            "rotary_cos and rotary_sin must have the same shape, got {} and {}".format(*shapes)
        )
    batch, new = q.shape[0], 0 if k is None else k.shape[1]
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (batch, new, *cache.shape[2:])
        if x is not None and (x.shape != wanted or x.dtype != cache.dtype):  # none is broadcast
            raise ValueError(
                f"{name} must be {cache.dtype} {[*wanted]}, got {x.dtype} {[*x.shape]}"
            )
    at = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    filled = _integers("cache_seqlens", at, batch, k_cache.shape[1] - new)
    samples = range(batch) if cache_batch_idx is None else cache_batch_idx
    rows = _integers("cache_batch_idx", samples, batch, k_cache.shape[0] - 1)
    if new and len(set(rows)) < batch:
        raise ValueError(f"cache_batch_idx must not list a sample twice, got {rows}")
    begins = None
    if cache_leftpad is not None:
        found = _integers("cache_leftpad", cache_leftpad, batch, k_cache.shape[1])
        begins = upload(torch.tensor(found), q.device)
    options = _options(q.device, 0.0, softmax_scale, softcap, False)
    as_one = len(set(filled)) == 1 and rows == list(range(len(k_cache)))
    parts = []
    for these in [slice(0, batch)] if as_one else [slice(i, i + 1) for i in range(batch)]:
        cached = these if as_one else slice(rows[these.start], rows[these.start] + 1)
        length, queries = filled[these.start], q[these]
        if rotary_cos is not None:
            by = rotary_cos, rotary_sin, rotary_interleaved
            moves = causal or max(window_size) >= 0
            queries = _rotated(queries, length, *by, moves)
        if k is not None:
            keys = k[these] if rotary_cos is None else _rotated(k[these], length, *by)
            k_cache[cached, length : length + new] = keys
            v_cache[cached, length : length + new] = v[these]
        keys, values = (cache[cached, : length + new] for cache in (k_cache, v_cache))
        first = None if begins is None else begins[these]
        parts.append(_attend_at_the_end(queries, keys, values, causal, window_size, options, first))
    o, lse = (torch.cat(each) if len(each) > 1 else each[0] for each in zip(*parts))
    return (o, lse) if return_softmax_lse else o


# ---------------------------------------------------------------- shared helpers


def _attend_at_the_end(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window_size: Window,
    options: dict,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of queries at the end of the keys; keys before row first[B] are hidden."""
    mask = _mask(causal, window_size, q.shape[1], k.shape[1])
    if first is not None:
        start = max(q.shape[1] - k.shape[1], 0)  # where the keys' rows begin
        # beyond every position, including those of an asymmetric window
        end = 2 * (q.shape[1] + k.shape[1]) if "q_runs" in mask else q.shape[1]
        ends = (torch.arange(2, device=q.device) * end).expand(len(q), -1)
        mask["documents"] = torch.stack((ends, ends.clamp(min=start + first[:, None])), 1)
    o, lse = attention(q, k, v, return_lse=True, **mask, **options)
    return o, lse


def _mask(causal: bool, window_size: Window, queries: int, keys: int) -> dict:
    """The keywords of `attention` for flash-attention's mask; no runs if rows are positions."""
    if len(window_size) != 2:
        raise ValueError(f"window_size must be (left, right), got {window_size}")
    ends = queries + keys  # no key is that far away
    left, right = (ends if side < 0 else min(int(side), ends) for side in window_size)
    right = 0 if causal else right
    window, ahead = None if left == ends else left + 1, 0
    if right not in (0, left):  # asymmetric
        ahead, window = right, None if window is None else left + right + 1
    mask: dict = {"causal": right == 0 or ahead > 0, "window": window}
    q_start, k_start = ahead + max(keys - queries, 0), max(queries - keys, 0)
    if q_start or k_start:
        mask |= {"q_runs": ((q_start, queries),), "k_runs": ((k_start, keys),)}
    return mask


def _options(
    device: torch.device, dropout: float, scale: float | None, softcap: float, deterministic: bool
) -> dict:
    """The keywords that every sequence of a call shares."""
    seed = torch.randint(2**63 - 1, (), device=device) if dropout else 0
    return {
        "scale": scale, "softcap": softcap or None, "dropout": dropout, "dropout_seed": seed,
        "deterministic": bool(deterministic),
    }  # fmt: skip


def _result(found: tuple[Tensor, Tensor], return_attn_probs: bool) -> Result:
    return (*found, None) if return_attn_probs else found[0]


def _refuse_given(**given: Tensor | None) -> None:
    reasons = {"alibi_slopes": "adds no bias to the scores", "block_table": "reads no paged cache"}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is not supported: the kernel {reasons[name]}")


def _unpacked(name: str, packed: Tensor, parts: int, ndim: int) -> tuple[Tensor, ...]:
    if packed.ndim != ndim or packed.shape[-3] != parts:
        shape = ("[B, S, {}, heads, D]" if ndim == 5 else "[tokens, {}, heads, D]").format(parts)
        raise ValueError(f"{name} must be {shape}, got shape {tuple(packed.shape)}")
    return packed.unbind(-3)


def _boundaries(name: str, boundaries: Tensor, x: Tensor) -> list[int]:
    """The boundaries as a list; ValueError unless they ascend from 0 to at most x's rows."""
    ends = _read_numbers(boundaries)
    if ends[0] != 0 or ends != sorted(ends) or ends[-1] > len(x):
        raise ValueError(
            f"{name} must ascend from 0 to at most {len(x)}, the number of rows, got {ends}"
        )
    return ends


def _read_numbers(x: Tensor) -> Any:
    """``x.tolist()``, cached so that all layers wait for a GPU only once. `x` is read again only if
    torch has written to it since. Writes through its address are not detected."""
    if x.is_cpu or x.is_inference():  # inference tensors do not count writes
        return x.tolist()
    version, found = vars(x).get("_read_numbers", (-1, []))
    if version != x._version:
        found = x.tolist()
        vars(x)["_read_numbers"] = x._version, found
    return list(found) if isinstance(found, list) else found


def _integers(
    name: str, value: int | Tensor | Sequence[int], batch: int, highest: int
) -> list[int]:
    """One number per sample; ValueError unless all are in 0 .. highest."""
    found = _read_numbers(value) if isinstance(value, Tensor) else value
    found = list(found) if isinstance(found, (list, tuple, range)) else [found] * batch
    fit = all(isinstance(n, int) and 0 <= n <= highest for n in found)
    if len(found) != batch or not fit:
        raise ValueError(f"{name} must have {batch} values in 0..{highest}, got {found}")
    return found


def _rotated(
    x: Tensor, start: int, cos: Tensor, sin: Tensor, interleaved: bool, moves: bool = True
) -> Tensor:
    """Rotate x[b, S, H, D] by the table's rows from `start`, or all of it by the row `start`."""
    end = start + (x.shape[1] if moves else 1)
    if end > len(cos):
        raise ValueError(f"rotary_cos has {len(cos)} positions, but position {end - 1} is needed")
    rows = [table[start:end].expand(x.shape[1], -1) for table in (cos, sin)]
    return apply_rope(x, *rows, interleaved=interleaved)
