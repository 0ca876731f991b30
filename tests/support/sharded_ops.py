"""The operations over tensor ranks as one table, each with its equivalent on one device.

A row is an `Op`: the function on this rank's shards, the same in plain torch on whole tensors, how
both are cut, and the options that apply. `test_sharded_ops.py` tests the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from sharded import CUT, UNCUT, Given, Op, Tensors, draw, part, world

from warpweave.kernels import reference
from warpweave.kernels.activation import ACTIVATIONS
from warpweave.kernels.cross_entropy import blocks
from warpweave.kernels.dropout import Drop
from warpweave.kernels.mlp import RECOMPUTE
from warpweave.kernels.rope import rope_table
from warpweave.parallel import collectives, tensor
from warpweave.parallel.tensor.linear_loss import vocab_parallel_linear_cross_entropy

T = 12  # tokens: like all sizes that are cut, divisible by 1, 2, 3 and 4


def each(shapes: list[dict[str, Any]], hows: list[dict[str, Any]], **more: Any) -> list[Given]:
    """Combine every shape with every option of how."""
    return [Given(shape, how, **more) for shape in shapes for how in hows]


NONE, BULK, CHUNKED = ({"overlap": word} for word in ("none", "bulk", "chunked"))
TRITON = {"impl": "triton"}
NO_BIAS = {"without": ("bias",)}

# ---------------------------------------------------------------- linear layers

WIDE, NARROW = 24, 7


def _linear(n: int, k: int) -> Callable[..., Tensors]:
    def tensors(shape: tuple[int, ...] = (T,)) -> Tensors:
        return {"x": draw(1, *shape, k), "weight": draw(2, n, k), "bias": draw(3, n)}

    return tensors


def _layer(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def layer(x, weight, bias=None, *, shape=(T,), **options):
        return function(x, weight, bias, **options)

    return layer


MANY = {"shape": (T, 2)}
_LINEAR = {
    "plain": _layer(F.linear),
    "fused": (*each([{}, NO_BIAS], [{}]), Given(MANY, {}, CUT)),
    "twins": (each([{}], [NONE, BULK]), each([NO_BIAS], [NONE, BULK])),
    "ways": tuple(each([{}, NO_BIAS], [{}, CHUNKED])),
}
COLUMN = Op(
    sharded=_layer(tensor.column_parallel_linear),
    tensors=_linear(WIDE, NARROW),
    cuts={"weight": 0, "bias": 0, "y": -1},
    tokens=("x",),
    agree=(*each([{}, NO_BIAS], [CHUNKED]), *each([MANY], [{}, CHUNKED], sequences=CUT),
           Given({"shape": (2, 5)}, {}, UNCUT)),
    **_LINEAR,
)  # fmt: skip
ROW = Op(
    sharded=_layer(tensor.row_parallel_linear),
    tensors=_linear(NARROW, WIDE),
    cuts={"x": -1, "weight": 1},
    tokens=("y",),
    partial=("bias",),
    agree=(*each([{}, NO_BIAS], [CHUNKED]), *each([MANY], [{}, CHUNKED], sequences=CUT),
           *each([{"shape": (0,)}], [{}, CHUNKED], sequences=UNCUT),
           Given({"shape": (1, 3)}, {}, UNCUT)),
    **_LINEAR | {"fused": (*_LINEAR["fused"], Given({"shape": (0,)}, {}, UNCUT))},
)  # fmt: skip

# ---------------------------------------------------------------- a cut vocabulary

# on 4 ranks of 12 columns: one whole, one with one column, two without any
VOCAB, PADDED, WIDTH = 13, 48, 5
IDS = torch.tensor([0, 12, 11, 12, 3, 0, 5, 6, 7, 12, 1, 9])
LABELS = torch.tensor([0, 12, 11, -100, 3, 0, 5, 6, 7, 12, -100, 9])


def _size(vocab: int, padded: int | None) -> int:
    return padded or -(-vocab // world()[2]) * world()[2]


def _embedding(weight, *, padded=PADDED, **options):
    vocabulary = {"vocab_size": VOCAB, "padded_vocab_size": padded}
    return tensor.vocab_parallel_embedding(IDS, weight, **vocabulary, **options)


EMBEDDING = Op(
    sharded=_embedding,
    plain=lambda weight, padded=PADDED: F.embedding(IDS, weight),
    tensors=lambda padded=PADDED: {"weight": draw(1, _size(VOCAB, padded), WIDTH)},
    cuts={"weight": 0},
    tokens=("y",),
    agree=(Given(), Given({"padded": None})),
)


def _cross_entropy(logits, *, sequence_parallel, padded=PADDED, smoothing=0.0, **options):
    vocabulary = {"vocab_size": VOCAB, "padded_vocab_size": padded, "label_smoothing": smoothing}
    return tensor.vocab_parallel_cross_entropy(logits, LABELS, **vocabulary, **options)


def _plain_cross_entropy(logits, padded=PADDED, smoothing=0.0):
    kept = logits[:, :VOCAB]
    return F.cross_entropy(kept, LABELS, reduction="none", label_smoothing=smoothing)


def _logits(padded=PADDED, smoothing=0.0) -> Tensors:
    z = draw(1, T, _size(VOCAB, padded)) * 30
    z[:, VOCAB:] = 1e3  # padding that takes part in a result is noticed at once
    return {"logits": z}


def equal_everywhere(losses: torch.Tensor) -> None:
    """Assert that losses are bitwise equal on all ranks."""
    group, _, ranks = world()
    every = collectives.start_all_gather(losses.reshape(1, -1), group).wait()
    assert torch.equal(every, losses.reshape(1, -1).expand(ranks, -1)), "losses differ"


def _ignored(found: Tensors, sequence: bool, shape: dict[str, Any]) -> None:
    assert not found["y"][[3, 10]].any()
    assert not found["logits"][[3, 10]].any()
    equal_everywhere(found["y"])


LOSS = Op(
    sharded=_cross_entropy,
    plain=_plain_cross_entropy,
    tensors=_logits,
    cuts={"logits": 1},
    tokens=(),
    weights=(),
    agree=tuple(
        Given({"padded": padded, "smoothing": smoothing}, how, UNCUT)
        for padded in (None, PADDED)
        for smoothing in (0.0, 0.3)
        for how in (({}, TRITON) if padded and smoothing else ({},))
    ),
    ways=(),
    also=_ignored,
)

# ---------------------------------------------------------------- the head and its loss

# 4 ranks of 300: one whole, one with one row, two of padding; 3 x 3 blocks, or 3 of whole rows
HEAD, HEAD_PADDED = 301, 1200
HEAD_LABELS = torch.tensor([0, 300, 299, -100, 3, 0, 5, 6, 7, 300, -100, 9])
SMALL = blocks.BlockSizes(elements=512, most_rows=4, fewest_rows=5)
WAYS = [
    {"recompute": r, "reduction": s} for r, s in ((True, "none"), (True, "sum"), (False, "sum"))
]


def small_blocks(sizes: blocks.BlockSizes = SMALL) -> AbstractContextManager[Any]:
    return mock.patch.object(blocks, "CPU", sizes)


def _head_problem(padded=HEAD_PADDED, **_) -> Tensors:
    w = draw(2, _size(HEAD, padded), WIDTH) * 2
    w[HEAD:] = 1e3
    return {"x": draw(1, T, WIDTH) * 2, "weight": w}


def head_loss(
    x, weight, labels=None, *, padded=HEAD_PADDED, smoothing=0.0, recompute=True, many_dims=False,
    loss=vocab_parallel_linear_cross_entropy, **options,
):  # fmt: skip
    """Return the loss under test, for tokens of one dim, or of two dims with the first cut."""
    labels = HEAD_LABELS if labels is None else labels
    if many_dims:
        x, labels = (t.unflatten(0, (-1, 3 if len(x) % 3 == 0 else 2)) for t in (x, labels))
    losses = loss(
        x, weight, labels, vocab_size=HEAD, padded_vocab_size=padded, label_smoothing=smoothing,
        recompute=recompute, **options,
    )  # fmt: skip
    if losses.dim():
        assert losses.shape == labels.shape
    return losses.flatten() if losses.dim() else losses


def _plain_head(x, weight, *, smoothing=0.0, z_loss=0.0, softcap=None, reduction="sum", **_):
    z = x @ weight[:HEAD].t()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    losses = F.cross_entropy(z, HEAD_LABELS, reduction="none", label_smoothing=smoothing)
    losses = losses + (z_loss * z.logsumexp(1).square()).masked_fill(HEAD_LABELS == -100, 0)
    return losses if reduction == "none" else losses.sum()


def _composed(x, w, labels, *, group, sequence_parallel, reduction, recompute, **options):
    """Compose the same loss from its two parts, which hold the logits."""
    z = tensor.column_parallel_linear(x, w, group=group, sequence_parallel=sequence_parallel)
    losses = tensor.vocab_parallel_cross_entropy(z, labels, group=group, **options)
    return losses if reduction == "none" else losses.sum()


def _head_also(found: Tensors, sequence: bool, shape: dict[str, Any]) -> None:
    first = world()[1] * len(found["weight"])
    assert not found["weight"][max(0, HEAD - first) :].any()
    assert sequence or not found["x"][[3, 10]].any()
    assert all(t.dtype == torch.float64 for t in found.values())
    equal_everywhere(found["y"])


_SMOOTH = {"smoothing": 0.3, "z_loss": 0.1}
_TERMS = [way | terms for way in WAYS for terms in ({"padded": None}, _SMOOTH)]
_CAPPED = [{"reduction": r, "softcap": 3.0} for r in ("none", "sum")]
LINEAR_LOSS = Op(
    sharded=head_loss,
    plain=_plain_head,
    tensors=_head_problem,
    cuts={"weight": 0},
    tokens=("x",),
    weights=("weight",),
    agree=(*each(_TERMS, [{}, CHUNKED]),
           *each(_TERMS[1::2], [NONE, {"loss": _composed}, {"many_dims": True}]),
           *each(_CAPPED, [{}, CHUNKED]),
           *each([_SMOOTH | {"recompute": r} for r in (True, False)], [TRITON])),
    fused=tuple(each([_TERMS[0], *_TERMS[1::2]], [TRITON])),
    ways=tuple(each([*WAYS, {"recompute": False}], [{}])),
    also=_head_also,
    within=small_blocks,
)  # fmt: skip

# ---------------------------------------------------------------- MLP

UNITS = 24


def tokens_of(sequence: bool) -> torch.Tensor:
    """Return the global indices of this rank's tokens."""
    return part(torch.arange(T) * 3 + 2**33, 0 if sequence else None)


def _mlp_problem(activation="gelu", **_) -> Tensors:
    units = (UNITS, 2) if ACTIVATIONS[activation].gated else (UNITS,)
    shapes = {
        "x": (T, NARROW), "up_weight": (*units, NARROW), "down_weight": (NARROW, UNITS),
        "up_bias": units, "down_bias": (NARROW,), "residual": (T, NARROW),
    }  # fmt: skip
    return {name: draw(i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def _mlp(*, activation="gelu", dropped=False, sequence_parallel, **given):
    drop = Drop(0.3, 5, 2, tokens_of(sequence_parallel)) if dropped else None
    where = {"activation": activation, "sequence_parallel": sequence_parallel}
    return tensor.parallel_mlp(drop=drop, **where, **given)


def _plain_mlp(*, activation="gelu", dropped=False, **given):
    drop = Drop(0.3, 5, 2, torch.arange(T) * 3 + 2**33) if dropped else None
    return reference.mlp(**given, activation=activation, drop=drop)


_SWIGLU = {"activation": "swiglu"}
_DROPPED, _RECOMPUTE = {"dropped": True}, [{"recompute": r} for r in RECOMPUTE]
MLP = Op(
    sharded=_mlp,
    plain=_plain_mlp,
    tensors=_mlp_problem,
    cuts={"up_weight": 0, "down_weight": 1, "up_bias": 0},
    tokens=("x", "residual", "y"),
    partial=("down_bias",),
    weights=("up_weight", "up_bias", "down_weight", "down_bias"),
    agree=(*[Given({"activation": a} | less) for a in ACTIVATIONS
             for less in ({}, {"without": ("up_bias", "residual")})],
           Given(_DROPPED | {"without": ("down_bias",)}), Given(_SWIGLU | _DROPPED, TRITON),
           *each([_DROPPED], [CHUNKED | r for r in _RECOMPUTE]), Given(_SWIGLU, TRITON | CHUNKED)),
    fused=(Given({"without": ("down_bias", "residual")}, TRITON),
           *each([_SWIGLU | _DROPPED], [TRITON | r for r in _RECOMPUTE])),
    twins=(each([_SWIGLU], [o | r for o in (BULK, NONE) for r in ({}, *_RECOMPUTE)]),),
    ways=(*each([_SWIGLU], _RECOMPUTE),
          *each([{}], [r | o for r in _RECOMPUTE for o in (BULK, CHUNKED)])),
    wishes=(("x",), ("down_weight",), ("up_bias",), ("down_bias",), ("up_bias", "down_bias"),
            ("up_weight", "down_bias")),
    low=tuple(each([{"without": ("residual",)}], [BULK, CHUNKED])),
)  # fmt: skip

# ---------------------------------------------------------------- queries, keys and values

B, LENGTH, KV = 2, 6, 12


def table(D: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    wide = rope_table(torch.arange(LENGTH) * 7 + 3, D, theta=100.0, dtype=torch.float64)
    return wide if dtype == torch.float64 else (wide[0].float(), wide[1].float())


def _qkv_problem(G=1, D=4, **_) -> Tensors:
    rows = (KV, G + 2, D)
    return {"x": draw(1, B * LENGTH, NARROW), "weight": draw(2, *rows, NARROW),
            "bias": draw(3, *rows)}  # fmt: skip


def _qkv(x, weight, bias=None, *, G=1, D=4, rotate=True, **options):
    cos, sin = table(D, x.dtype) if rotate else (None, None)
    return tensor.parallel_qkv_rope(x, weight, bias, cos, sin, shape=(B, LENGTH), **options)


def _plain_qkv(x, weight, bias=None, *, G=1, D=4, rotate=True):
    cos, sin = table(D) if rotate else (torch.ones(LENGTH, D // 2), torch.zeros(LENGTH, D // 2))
    return reference.qkv_rope(x.unflatten(0, (B, LENGTH)), weight, bias, cos, sin)


_UNROTATED, _ODD = {"rotate": False}, {"rotate": False, "D": 5}  # dims that cannot be rotated
_HEADS = [{"G": G} | less for G in (1, 3) for less in ({}, NO_BIAS)]
QKV = Op(
    sharded=_qkv,
    plain=_plain_qkv,
    tensors=_qkv_problem,
    cuts={"weight": 0, "bias": 0, "q": 2, "k": 2, "v": 2},
    tokens=("x",),
    results=("q", "k", "v"),
    agree=(*each(_HEADS, [CHUNKED]),  # 3 and 4 ranks cut samples in the middle
           *each([h | more for h in _HEADS for more in (_UNROTATED, _ODD)], [{}]),
           *each([{"G": 2, "D": 6}], [TRITON, TRITON | CHUNKED], sequences=CUT),
           Given(_ODD, TRITON, UNCUT)),
    fused=(*each([_HEADS[1], _HEADS[2]], [TRITON]),
           *each([_ODD, _UNROTATED], [TRITON], sequences=CUT)),
    twins=tuple(each([h], [BULK, NONE]) for h in _HEADS),
    wishes=(("x",), ("weight",), ("bias",), ("x", "bias")),
    low=(Given(),),
)  # fmt: skip

OPS = {
    "column": COLUMN, "row": ROW, "embedding": EMBEDDING, "loss": LOSS,
    "linear loss": LINEAR_LOSS, "mlp": MLP, "qkv": QKV,
}  # fmt: skip
