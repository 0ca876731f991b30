"""Options and tensors of an attention call, checked once by the public functions.

`attention` and `context_attention` make an `AttentionOptions` of their keywords and pass it, with
their tensors, to `prepared`; `attention_fwd` and `attention_bwd` pass theirs to `checked`.
Operators, launches, the torch path and the strategies of context parallelism accept the record and
do not check again. Each block of queries and keys has its own `q_runs` and `k_runs`, from which
`resolved` makes the options of a launch; everything else is the same for the whole sequence. The
checks use only shapes, dtypes and numbers, without a host sync. A compiler can trace `prepared`,
because it compares symbols only with bounds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from warpweave.kernels.attention.keywords import Runs
from warpweave.kernels.attention.visible import Packed
from warpweave.kernels.dropout import check_key
from warpweave.kernels.reference import Run, compute_dtype
from warpweave.kernels.runtime.dispatch import check_impl, check_written, choose
from warpweave.kernels.runtime.dtypes import FLOATS, is_autocast
from warpweave.kernels.runtime.tile_table import MAX_HEAD_DIM

FARTHEST = 2**31 - 2  # kernels and document tables hold positions in int32


class AttentionOptions(NamedTuple):
    """`BlockKeywords` as a record."""

    causal: bool = True
    window: int | None = None
    documents: torch.Tensor | Packed | None = None  # a tensor after `checked`
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    dropout_seed: int | torch.Tensor = 0
    dropout_origin: Sequence[int] = (0, 0)
    q_runs: Sequence[Run] | None = None  # after `checked`; users pass `Runs`
    k_runs: Sequence[Run] | None = None
    impl: str | None = None
    table: torch.Tensor | None = None  # of `Packed` documents
    deterministic: bool = False


# ---------------------------------------------------------------- 1. options at the boundary


def check_numbers(options: AttentionOptions) -> AttentionOptions:
    """Return the options with numbers converted to int and float.

    Raises ValueError if one is invalid or out of range.
    """
    check_impl(options.impl)
    origin = options.dropout_origin
    for name, flag in (("causal", options.causal), ("deterministic", options.deterministic)):
        if not isinstance(flag, int):
            raise ValueError(f"{name} must be a bool, got {flag!r}")
    window = None if options.window is None else _integer("window", options.window)
    if window is not None and window < 1:
        raise ValueError(f"window must be None or at least 1, got {window}")
    scale = None if options.scale is None else _real("scale", options.scale)
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    softcap = None if options.softcap is None else _real("softcap", options.softcap)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be None, or positive and finite, got {softcap}")
    dropout = _real("dropout", options.dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"need 0 <= dropout < 1, got {dropout}")
    seed = options.dropout_seed
    seed = seed if isinstance(seed, torch.Tensor) else _integer("dropout_seed", seed)
    if len(origin) != 2:
        raise ValueError(f"dropout_origin must be (sample, head), got {origin}")
    check_key(seed, *origin)
    return options._replace(
        causal=bool(options.causal),
        deterministic=bool(options.deterministic),
        window=None if window is None else min(window, FARTHEST),  # an operator accepts 64 bits
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        dropout_seed=seed,
    )


def checked(
    options: AttentionOptions,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> AttentionOptions:
    """Return the options with numbers converted to int and float, and runs to `Run`.

    Raises ValueError if they, or q, k, v and sinks, are not as `attention` requires. The values of
    documents are checked by `check_boundaries`, which a compiler cannot trace.
    """
    options = check_numbers(options)
    check_attention(q, k, v, sinks)
    if isinstance(options.dropout_seed, torch.Tensor):
        choose("torch", q, options.dropout_seed)  # one device
    documents, table = options.documents, options.table
    if isinstance(documents, Packed):
        documents, table = documents
    if documents is not None:
        check_documents(documents, q, apart=True)
    return options._replace(
        documents=documents,
        table=table,
        q_runs=_checked_runs("q_runs", options.q_runs, q.shape[1]),
        k_runs=_checked_runs("k_runs", options.k_runs, k.shape[1]),
    )


def prepared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions]:
    """Return q, k and v of one head dim and `checked` options; raise ValueError as `checked` does.

    Under autocast q, k and v are cast. If Dv differs from D, the narrower tensors are padded with
    zeros. The scale stays that of the original D, so no score changes, and o is padded with zeros.
    """
    check_are_tensors(q, k, v)
    if q.dtype != torch.float64 and is_autocast(q):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if q.ndim == k.ndim == v.ndim == 4:
        D, Dv = q.shape[3], v.shape[3]
        if Dv != D and k.shape == (*v.shape[:3], D) and D and Dv:
            if options.scale is None:
                options = options._replace(scale=D**-0.5)
            if Dv > D:
                q, k = F.pad(q, (0, Dv - D)), F.pad(k, (0, Dv - D))
            else:
                v = F.pad(v, (0, D - Dv))
    return q, k, v, checked(options, q, k, v, sinks)


def _integer(name: str, n: Any) -> int:
    """Convert n to an int. A compiler's symbol stays a symbol: `operator.index` would make it a
    constant, and every other value would need a new compilation."""
    try:
        return n if type(n) in (int, torch.SymInt) else int(operator.index(n))
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {n!r}") from None


def _real(name: str, x: Any) -> float:
    if type(x) in (float, torch.SymFloat):  # a compiler's symbol has no value
        return float(x)
    if isinstance(x, torch.Tensor) or not hasattr(x, "__float__"):
        raise ValueError(f"{name} must be a number, got {x!r}")
    return float(x)


def _checked_runs(name: str, runs: Runs | None, length: int) -> tuple[Run, ...] | None:
    if runs is None:
        return None
    try:
        found = tuple(Run(*(_integer(name, n) for n in run)) for run in runs)
    except (TypeError, ValueError):  # not a sequence of two or three integers
        found = (Run(-1, -1),)
    if len(found) > 2 or any(start < 0 or n < 0 or by < 1 for start, n, by in found):
        raise ValueError(
            f"{name} must contain at most two runs (start >= 0, length >= 0[, stripes >= 1]), got "
            f"{runs}"
        )
    if any(n >= 2**62 for run in found for n in run):  # an operator accepts 64 bits
        raise ValueError(f"the numbers in {name} must be below 2**62, got {runs}")
    if sum(run.length for run in found) != length:
        raise ValueError(f"the lengths in {name} must add up to {length} rows, got {runs}")
    first, last = (found[0], found[-1]) if found else (Run(0, 0), Run(0, 0))
    if first.stripes != last.stripes and first.length and last.length:
        raise ValueError(f"both runs in {name} must have the same number of stripes, got {runs}")
    return found


def check_documents(documents: torch.Tensor, q: torch.Tensor, *, apart: bool = False) -> None:
    """Raise ValueError unless documents have the form of boundaries for q[B, ...], on its device.

    With `apart`, keys may have separate boundaries.
    """
    if not isinstance(documents, torch.Tensor):
        raise ValueError(
            f"documents must be a tensor of cumulative boundaries (cu_seqlens), got {documents!r}"
        )
    choose("torch", q, documents)  # one device
    if documents.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"documents must be int32 or int64, got {documents.dtype}")
    shape, B = tuple(documents.shape), q.shape[0]
    allowed = [(), (B,), (B, 2)] if apart else [(), (B,)]
    if shape[-1:] < (1,) or shape[:-1] not in allowed:
        words = " or ".join(f"[{', '.join([*map(str, each), 'n + 1'])}]" for each in allowed)
        raise ValueError(f"documents must have the shape {words} for n documents, got {shape}")


def check_boundaries(options: AttentionOptions, queries: int, keys: int) -> None:
    """Raise ValueError unless the documents of checked options ascend from 0 to the sequence's end.

    Also raise it if there are as many boundaries as tokens, because they then look like one
    document id per token. The sequence ends with the larger of `queries` and `keys`, or with runs
    at least at their last position. Separate boundaries of keys may begin and end anywhere before
    that. Values are checked only on a CPU: a GPU would need a host sync, and a compiler has no
    values yet.
    """
    documents = options.documents
    if documents is None:
        return
    n, apart = documents.shape[-1], documents.ndim == 3
    of_each = n in ((queries,) if apart else (queries, keys))
    whole = options.q_runs is None and options.k_runs is None
    if not documents.is_cpu:
        if of_each and n > 2 and whole:  # two entries mean the same either way
            raise ValueError(_boundaries_of_each(documents))
        return
    if type(documents) is not torch.Tensor or torch.compiler.is_compiling():  # tracing: no values
        return
    with torch._C.DisableTorchFunction():  # a GPU skips this, so a recorded step need not see it
        bounds = documents.numpy()
    of_q = bounds[:, 0] if apart else bounds
    begins, ends = of_q[..., 0], of_q[..., -1]
    if begins.any() or (bounds[..., 0] < 0).any() or (bounds[..., 1:] < bounds[..., :-1]).any():
        raise ValueError(
            f"documents must be boundaries that ascend from 0, got {documents.tolist()}"
        )
    end, end_of_k = _end(options.q_runs, queries), _end(options.k_runs, keys)
    end = end if apart else max(end, end_of_k)
    if of_each and (ends < n).any():
        raise ValueError(_boundaries_of_each(documents))
    if (ends < end).any() or (whole and (ends > end).any()):
        raise ValueError(
            f"documents must end at {'' if whole else 'or after '}{end}, the end of the sequence "
            f"(padding counts as a document), got {documents.tolist()}"
        )
    if apart and whole and (bounds[:, 1, -1] > keys).any():
        raise ValueError(
            f"documents must not extend past the {keys} keys, got {bounds[:, 1].tolist()}"
        )


def check_packed(documents: torch.Tensor | None, tokens: torch.Tensor) -> None:
    """Raise ValueError unless documents are None or boundaries of whole sequences tokens[B, S]."""
    if documents is not None:
        check_documents(documents, tokens)
        length = tokens.shape[1]
        check_boundaries(AttentionOptions(documents=documents), length, length)


def _end(runs: Sequence[Run] | None, rows: int) -> int:
    """The last position plus one."""
    if runs is None:
        return rows
    return max((run.positions[-1] + 1 for run in runs if run.length), default=0)


def _boundaries_of_each(documents: torch.Tensor) -> str:
    return (
        f"documents must be boundaries, not one document id for each of the {documents.shape[-1]} "
        f"tokens, got {[*documents.shape]}; if they are boundaries, append the last one once more"
    )


# ---------------------------------------------------------------- 2. tensors at the boundary


def heads_per_kv_head(heads: int, kv_heads: int) -> int:
    """Return the query heads per KV head, or raise ValueError if they do not divide evenly."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are not divisible by {kv_heads} KV heads")
    return heads // kv_heads


def check_are_tensors(q: object, k: object, v: object) -> None:
    """Raise ValueError if an argument is not a tensor: torch's own message prints a schema."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {x!r}")


def check_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
) -> None:
    """Raise ValueError if shapes, heads, head dims, dtypes or devices do not fit together."""
    check_are_tensors(q, k, v)
    choose("torch", q, k, v, sinks)  # one device; next to meta tensors nothing would run
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, S, H, D], got shape {tuple(x.shape)}")
    (B, _, Hq, D), Hkv = q.shape, k.shape[2]
    if k.shape != v.shape or k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            f"k and v must have the same shape [{B}, Sk, Hkv, {D}] for q {tuple(q.shape)}, "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    heads_per_kv_head(Hq, Hkv)
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be in 1..{MAX_HEAD_DIM}, got {D}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS:
        raise ValueError(
            f"q, k, v must have the same floating dtype of at least 16 bits, got {q.dtype}, "
            f"{k.dtype}, {v.dtype}"
        )
    if sinks is not None and (sinks.shape != q.shape[2:3] or not sinks.is_floating_point()):
        raise ValueError(
            f"sinks must have a float dtype and shape ({Hq},), got {sinks.dtype} "
            f"{tuple(sinks.shape)}"
        )


def check_dtype(name: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError for a dtype in which attention does not compute."""
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"{name} must be a floating dtype of at least 16 bits, got {dtype}")


# ---------------------------------------------------------------- 3. tensors of the halves


class Upstream(NamedTuple):
    """The inputs of the backward of some rows of q, besides q, k and v; all are over all keys.

    Attributes:
        do: [B, S, Hq, D], the gradient of o.
        lse: [B, Hq, S].
        delta: [B, Hq, S] from `attention_delta`; may be None if o is given.
        o: [B, S, Hq, D], given if no gradient came through lse; it saves the CPU path a copy.
    """

    do: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor | None
    o: torch.Tensor | None = None

    def part(self, rows: slice, heads: slice) -> Upstream:
        """The same for some rows and heads of q."""
        do, lse, delta, o = self
        return Upstream(
            do[:, rows, heads],
            lse[:, heads, rows],
            None if delta is None else delta[:, heads, rows],
            None if o is None else o[:, rows, heads],
        )


def check_upstream(q: torch.Tensor, upstream: Upstream) -> None:
    """Raise ValueError unless do and o are shaped like q and lse and delta [B, Hq, Sq]."""
    do, lse, delta, o = upstream
    choose("torch", q, *upstream)
    for name, x in (("do", do), ("o", o)):
        if x is not None and x.shape != q.shape:
            raise ValueError(
                f"{name} must have the shape {tuple(q.shape)} of q, got {tuple(x.shape)}"
            )
    B, S, H, _ = q.shape
    for name, x in (("lse", lse), ("delta", delta)):
        if x is not None and (x.shape != (B, H, S) or x.dtype != compute_dtype(q)):
            raise ValueError(
                f"{name} must be {compute_dtype(q)} of shape {(B, H, S)}, "
                f"got {x.dtype} {tuple(x.shape)}"
            )
    if delta is None and o is None:
        raise ValueError("attention_bwd needs delta or o, got neither")


def check_carried(
    q: torch.Tensor,
    sinks: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    into: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Raise ValueError unless `into` is None or (o, lse) of q's rows, which can be updated."""
    if into is None:
        return
    if isinstance(into, torch.Tensor) or len(into) != 2:
        raise ValueError(f"`into` must be (o, lse), got {type(into).__name__} of {len(into)}")
    if sinks is not None or out_dtype is not None:
        raise ValueError(
            "`into` cannot be combined with `sinks` or `out_dtype`; to include sinks, "
            "initialize `into` with o = 0 and lse = sinks"
        )
    o, lse = into
    choose("torch", q, o, lse)
    _check_into("o", o, q)
    B, S, H, _ = q.shape
    if lse.shape != (B, H, S) or lse.dtype != compute_dtype(q) or not lse.is_contiguous():
        raise ValueError(
            f"the lse to accumulate into must be a contiguous {compute_dtype(q)} tensor of shape "
            f"{(B, H, S)}, got {lse.dtype} {tuple(lse.shape)}, strides {lse.stride()}"
        )


def check_carried_gradients(
    into: Sequence[torch.Tensor | None], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Raise ValueError unless each of `into` = (dq, dk, dv) is None or can be added to."""
    if (into[1] is None) != (into[2] is None):
        raise ValueError("`into` must contain both dk and dv, or neither")
    choose("torch", q, *into)
    for name, x, like in zip(("dq", "dk", "dv"), into, (q, k, v)):
        if x is not None:
            _check_into(name, x, like)


def _check_into(name: str, into: torch.Tensor, like: torch.Tensor) -> None:
    """Raise ValueError unless a kernel can add to `into`: it has the shape of `like`, the compute
    dtype, and stride 1 in the last dim."""
    dtype = compute_dtype(like)
    check_written(name, into)
    fits = into.shape == like.shape and into.dtype == dtype
    if not fits or (into.numel() and into.stride(-1) != 1) or into.requires_grad:
        raise ValueError(
            f"the {name} to accumulate into must be {dtype} of shape {tuple(like.shape)} with "
            f"stride 1 in the last dim, and must not require grad; got {into.dtype} "
            f"{tuple(into.shape)}, strides {into.stride()}"
        )


# ---------------------------------------------------------------- 4. options for a kernel


def resolved(options: AttentionOptions, q: torch.Tensor, k: torch.Tensor) -> AttentionOptions:
    """Return checked options as the launches of a block need them.

    The scale is set, runs are neither None nor empty, adjacent runs are joined, documents have two
    dims, and a window as wide as the sequence becomes None. If only the causal mask uses positions,
    runs are replaced by equivalent ones from row 0, except with dropout, which is keyed by
    positions. Raises ValueError for positions that a kernel cannot hold.
    """
    causal, window, documents, scale, *_ = options
    q_runs, k_runs = _joined(options.q_runs, q.shape[1]), _joined(options.k_runs, k.shape[1])
    end = max(_end(q_runs, 0), _end(k_runs, 0))
    if window is not None and window >= end:  # no two positions are that far apart
        window = None
    if end + (window or 0) > FARTHEST:
        raise ValueError(
            f"position plus window must be below {FARTHEST}, got position {end - 1} and "
            f"window {window}"
        )
    if documents is not None:
        documents = documents if documents.ndim > 1 else documents[None]
    elif window is None and not options.dropout:
        q_runs, k_runs = _as_rows(causal, q_runs, k_runs)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return options._replace(
        window=window, documents=documents, scale=scale, q_runs=q_runs, k_runs=k_runs
    )


def _joined(runs: Runs | None, length: int) -> tuple[Run, ...]:
    """The runs without empty ones, with adjacent runs joined."""
    if runs is None:
        return (Run(0, length),) if length else ()
    found = tuple(run for run in (Run(*run) for run in runs) if run.length)
    if len(found) == 2 and found[0].positions.stop == found[1].start:
        return (Run(found[0].start, length, found[0].stripes),)
    return found


def _as_rows(
    causal: bool, q: tuple[Run, ...], k: tuple[Run, ...]
) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Runs from row 0 with the same causal mask as `q` and `k`, if they exist."""
    q_rows, k_rows = (sum(run.length for run in runs) for runs in (q, k))
    ascending = len(q) < 2 or q[0].positions[-1] < q[1].start
    if not causal or (q == k and ascending):  # equal ascending positions compare like rows
        return (Run(0, q_rows),), (Run(0, k_rows),)
    if len(q) == len(k) == 1 and q[0].stripes == k[0].stripes > 1:
        # a + i P >= b + j P iff i + (a - b) // P >= j: rows, with one side shifted
        ahead = (q[0].start - k[0].start) // q[0].stripes
        return (Run(max(ahead, 0), q_rows),), (Run(max(-ahead, 0), k_rows),)
    return q, k
