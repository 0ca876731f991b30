"""The arguments of an attention call, checked once and in their simplest form.

Everything here is decided on the host from shapes, dtypes and Python numbers; nothing waits for a
device. `attention.py` documents what the arguments mean.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warpweave.kernels.reference import Run, compute_dtype
from warpweave.kernels.runtime.dispatch import check_written
from warpweave.kernels.runtime.tile_table import MAX_HEAD_DIM

Runs = Sequence[tuple[int, ...]]  # each a `Run`, or what one is made from

_Flat = tuple[int, int, int, int, int]

FARTHEST = 2**31 - 2  # kernels and the tables of documents hold positions in int32

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Mask(NamedTuple):
    """window 0 is none; documents [1 or B, n + 1] or None; runs are (start, length) twice, then the
    stripes of both: see `visible`."""

    causal: bool
    window: int
    documents: torch.Tensor | None
    q_runs: _Flat
    k_runs: _Flat


class Scores(NamedTuple):
    """How scores become weights; softcap 0 and dropout 0 are none.

    `sample` and `head` are the global numbers of the first sample and head, for dropout.
    """

    scale: float
    softcap: float
    dropout: float
    seed: int
    sample: int
    head: int


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError on shapes, heads, head dims or dtypes that do not fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, S, H, D], got shape {tuple(x.shape)}")
    (B, _, Hq, D), (_, _, Hkv, _) = q.shape, k.shape
    if k.shape != v.shape or k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            f"k and v must have one shape [{B}, Sk, Hkv, {D}] for q {tuple(q.shape)}, "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if Hkv == 0 or Hq % Hkv:
        raise ValueError(f"the {Hq} heads of q must be a multiple of the {Hkv} heads of k and v")
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be in 1..{MAX_HEAD_DIM}, got {D}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise ValueError(
            f"q, k, v must have one floating dtype of at least 16 bits, got {q.dtype}, {k.dtype}, "
            f"{v.dtype}"
        )


def check_scores(
    head_dim: int,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    seed: int,
    origin: Sequence[int],
) -> Scores:
    """Raise ValueError on numbers out of range."""
    scale = head_dim**-0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite or None, got {softcap}")
    if not 0 <= dropout < 1:
        raise ValueError(f"need 0 <= dropout < 1, got {dropout}")
    if not 0 <= seed < 2**63 or len(origin) != 2 or not all(0 <= n < 2**32 for n in origin):
        raise ValueError(
            "need 0 <= dropout_seed < 2**63 and dropout_origin = (sample, head) below 2**32, "
            f"got {seed} and {tuple(origin)}"
        )
    return Scores(scale, float(softcap or 0.0), float(dropout), seed, *origin)


def check_mask(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool,
    window: int | None,
    documents: torch.Tensor | None,
    q_runs: Runs | None,
    k_runs: Runs | None,
    *,
    keyed: bool = False,
) -> Mask:
    """Raise ValueError on runs that do not fit the rows, a window below 1, or documents that are no
    boundaries (their values are read on a CPU only: elsewhere that would wait for the device).

    Positions become rows where no one could tell, unless they are `keyed`: dropout draws by them.
    """
    q_flat = _check_runs("q_runs", q_runs, q.shape[1])
    k_flat = _check_runs("k_runs", k_runs, k.shape[1])
    window = None if window is None else _integer(window)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 or None, got {window}")
    ends = [
        start + (n - 1) * flat[4] + 1 if n else 0
        for flat in (q_flat, k_flat)
        for start, n in (flat[:2], flat[2:4])
    ]
    if window is None or window >= max(ends):  # no two positions are that far apart
        window = 0
    if max(ends) + window > FARTHEST:
        raise ValueError(
            f"positions, and a window from them on, must lie below {FARTHEST}, got the position "
            f"{max(ends) - 1} and the window {window or None}"
        )
    if documents is not None:
        _check_documents(documents, q.shape[0])
        if documents.device.type == "cpu" or (q_runs is None and k_runs is None):
            problem = not_boundaries(documents, q.shape[1], k.shape[1])
            if problem:
                raise ValueError(problem)
        documents = documents if documents.ndim == 2 else documents[None]
    elif not window and not keyed:
        q_flat, k_flat = _simplest(causal, q_flat, k_flat)
    return Mask(causal, window, documents, q_flat, k_flat)


def _simplest(causal: bool, q: _Flat, k: _Flat) -> tuple[_Flat, _Flat]:
    """Runs that compare as `q` and `k` do where nothing but the causal mask asks."""
    q_rows, k_rows = (0, q[1] + q[3], 0, 0, 1), (0, k[1] + k[3], 0, 0, 1)
    if not causal or (q == k and (q[3] == 0 or q[0] + (q[1] - 1) * q[4] < q[2])):
        return q_rows, k_rows  # equal ascending positions compare like rows
    if q[4] == k[4] > 1 and q[3] == k[3] == 0:
        # a + i P >= b + j P iff i + (a - b) // P >= j: rows, one side moved on
        ahead = (q[0] - k[0]) // q[4]
        return (max(ahead, 0), *q_rows[1:]), (max(-ahead, 0), *k_rows[1:])
    return q, k


def _check_runs(name: str, runs: Runs | None, length: int) -> _Flat:
    """The runs as (start0, length0, start1, length1, stripes), without empty ones, neighbours
    joined."""
    if runs is None:
        return (0, length, 0, 0, 1)
    whole = as_runs(name, runs)
    if sum(run.length for run in whole) != length:
        raise ValueError(f"the lengths of {name} {runs} must add up to the {length} rows")
    whole = [run for run in whole if run.length]
    if len({run.stripes for run in whole}) > 1:
        raise ValueError(f"both of {name} must have as many stripes, got {runs}")
    by = whole[0].stripes if whole else 1
    if len(whole) == 2 and whole[0].positions.stop == whole[1].start:
        whole = [Run(whole[0].start, length, by)]
    first, second = [*whole, Run(0, 0), Run(0, 0)][:2]
    return (first.start, first.length, second.start, second.length, by)


def check_dtype(name: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError on a dtype that attention does not compute in."""
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"{name} must be a floating dtype of at least 16 bits, got {dtype}")


def _integer(n: Any) -> int:
    """n as an integer; TypeError if it is none. A compiler's symbol remains one: `operator.index`
    would make it a constant, and every other value a compilation of its own."""
    return n if type(n) in (int, torch.SymInt) else int(operator.index(n))


def as_runs(name: str, runs: Runs) -> list[Run]:
    """At most two runs, named, or ValueError."""
    try:
        found = [Run(*(_integer(n) for n in run)) for run in runs]
    except TypeError:  # no sequence of two or three integers
        found = [Run(-1, -1)]
    if len(found) > 2 or any(start < 0 or n < 0 or by < 1 for start, n, by in found):
        raise ValueError(
            f"{name} must be at most two (start >= 0, length >= 0, stripes >= 1 or left out), "
            f"got {runs}"
        )
    if any(n >= 2**62 for run in found for n in run):  # an operator takes 64 bits
        raise ValueError(f"the numbers of {name} must lie below 2**62, got {runs}")
    return found


def check_kinds(
    q: object,
    k: object,
    v: object,
    causal: object,
    window: object,
    documents: object,
    scale: object,
    softcap: object,
    dropout: object,
    seed: object,
) -> None:
    """Raise ValueError on what is no number or no tensor: torch's own message is a schema."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {x!r}")
    if not isinstance(causal, int):
        raise ValueError(f"causal must be a bool, got {causal!r}")
    for name, n in (("window", 0 if window is None else window), ("dropout_seed", seed)):
        try:
            _integer(n)
        except TypeError:
            raise ValueError(f"{name} must be an integer, got {n!r}") from None
    for name, x in (("scale", scale), ("softcap", softcap), ("dropout", dropout)):
        if x is None and name != "dropout":
            continue
        if isinstance(x, torch.Tensor) or not hasattr(x, "__float__"):
            raise ValueError(f"{name} must be a number, got {x!r}")
    if documents is not None and not isinstance(documents, torch.Tensor):
        raise ValueError(f"documents must be a tensor of boundaries, got {documents!r}")


def _check_documents(documents: torch.Tensor, B: int) -> None:
    if documents.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"documents must be int32 or int64, got {documents.dtype}")
    shape = tuple(documents.shape)
    if len(shape) not in (1, 2) or shape[-1] < 1 or (len(shape) == 2 and shape[0] != B):
        raise ValueError(f"documents must have the shape [n + 1] or [{B}, n + 1], got {shape}")
    if documents.device.type == "cpu" and (
        documents[..., 0].any() or (documents.diff(dim=-1) < 0).any()
    ):
        raise ValueError(
            f"documents must be boundaries that ascend from 0, got {documents.tolist()}"
        )


def not_boundaries(documents: torch.Tensor, *tokens: int) -> str | None:
    """What is wrong with documents of as many entries as there are tokens that do not reach as far:
    they are the number of each token's document. None if nothing is.

    Nobody reads the entries elsewhere than on a CPU; as many boundaries as tokens are wrong there.
    """
    n = documents.shape[-1]
    if n < 3 or n not in tokens:  # two entries mean the same either way
        return None
    if documents.device.type == "cpu" and not (documents[..., -1] < n).any():
        return None
    return (
        f"documents must be boundaries, not the document of each of the {n} tokens, got "
        f"{[*documents.shape]}; boundaries that are as many may repeat the last one"
    )


def check_sinks(q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor | None:
    """The sinks in the dtype to compute in, contiguous; ValueError unless floating [Hq]."""
    if sinks is None:
        return None
    if sinks.shape != q.shape[2:3] or not sinks.is_floating_point():
        raise ValueError(
            f"sinks must be floating of shape ({q.shape[2]},), "
            f"got {sinks.dtype} {tuple(sinks.shape)}"
        )
    return sinks.detach().to(compute_dtype(q)).contiguous()


def check_rows(
    q: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor | None,
    o: torch.Tensor | None,
) -> None:
    """Raise ValueError unless do and o are shaped like q and lse and delta [B, Hq, Sq]."""
    for name, x in (("do", do), ("o", o)):
        if x is not None and x.shape != q.shape:
            raise ValueError(f"{name} must have q's shape {tuple(q.shape)}, got {tuple(x.shape)}")
    B, S, H, _ = q.shape
    for name, x in (("lse", lse), ("delta", delta)):
        if x is not None and (x.shape != (B, H, S) or x.dtype != compute_dtype(q)):
            raise ValueError(
                f"{name} must be {compute_dtype(q)} of shape {(B, H, S)}, "
                f"got {x.dtype} {tuple(x.shape)}"
            )
    if delta is None and o is None:
        raise ValueError("attention_bwd needs delta or o, got neither")


def check_into(name: str, into: torch.Tensor, like: torch.Tensor) -> None:
    """Raise ValueError unless `into`, which a kernel adds to, has the shape of `like`, the dtype to
    compute in and stride 1 in the last dim."""
    dtype = compute_dtype(like)
    check_written(name, into)
    fits = into.shape == like.shape and into.dtype == dtype
    if not fits or (into.numel() and into.stride(-1) != 1) or into.requires_grad:
        raise ValueError(
            f"{name} to add to must be {dtype} of shape {tuple(like.shape)} with stride 1 in the "
            f"last dim and no gradient, got {into.dtype} {tuple(into.shape)} of strides "
            f"{into.stride()}"
        )
