"""Invalid arguments are rejected and valid ones accepted: each condition of a check is tested
alone.

A check of two conditions that is only tested with both broken passes its tests with `and` in place
of `or`. So every row here breaks exactly one rule, and rows without words are valid but come close.
Add a row for each new condition of a check.
"""

from __future__ import annotations

import pytest
import torch
from refused import check, rows
from threads import Group, on_threads

from warpweave.layers.context import KVCache
from warpweave.layers.mlp import MLP
from warpweave.parallel import collectives, tensor
from warpweave.parallel.context import Links, check_strategy, context_attention
from warpweave.parallel.data.optimizer import SGD
from warpweave.parallel.data.unit import make_unit
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.mesh import Mesh, single
from warpweave.parallel.pipeline.execute import execute
from warpweave.parallel.pipeline.module import ModuleStage
from warpweave.parallel.pipeline.transport import Distributed, InProcess
from warpweave.parallel.schedule import gpipe, interleaved, one_f_one_b
from warpweave.parallel.schedule.actions import (
    REDUCE,
    SEND_F,
    TIE,
    UPDATE,
    WHOLE,
    Action,
    B,
    F,
    I,
    W,
    placement,
)
from warpweave.parallel.schedule.passes import split_backward, with_comm
from warpweave.parallel.schedule.text import from_csv
from warpweave.parallel.schedule.validation import validate
from warpweave.parallel.shard import ParamRecord

NAN = float("nan")
x, w, b = torch.zeros(4, 6), torch.zeros(5, 6), torch.zeros(5)
ids, table = torch.zeros(4, dtype=torch.int64), torch.zeros(8, 3)
q, kv = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 1, 8)


# ---------------------------------------------------------------- sizes


def _layout(*of: tuple[int, ...], parts: int = 2) -> SequenceLayout:
    return SequenceLayout(8, parts, "balanced", chunks=of)


def _optimizer(clip: float | None) -> ZeroOptimizer:
    p = torch.nn.Parameter(torch.zeros(3))
    unit = make_unit("unit", [(ParamRecord("p", (3,)), p)], single())
    return ZeroOptimizer([unit], single(), SGD(), clip=clip)


def _attention(rows: int = 4, keys: int = 4, **layout) -> object:
    layout = SequenceLayout(**{"seq_len": 4, "parts": 1} | layout)
    return context_attention(q[:, :rows], kv[:, :keys], kv[:, :keys], layout=layout, group=None)


@rows(
    [
        (lambda: Mesh(dp=0), "dp must be a positive integer, got 0"),
        (lambda: Mesh(tp=2.0), "tp must be a positive integer, got 2.0"),
        (lambda: Mesh(cp=4, ulysses=3), r"cp \(4\) is not divisible by ulysses \(3\)"),
        (lambda: Mesh(cp=1), None),
        (lambda: SequenceLayout(8, 0), "parts >= 1"),
        (lambda: SequenceLayout(-1, 2), "seq_len >= 0"),
        (lambda: SequenceLayout(0, 1), None),
        (lambda: SequenceLayout(8, 2, "balanced"), "'balanced' requires chunks"),
        (lambda: SequenceLayout(8, 2, chunks=((0, 3), (1, 2))), "other kinds do not allow"),
        (lambda: _layout((0,), (1,), (2,)),
         "same nonzero number of chunks for each of the 2 parts"),
        (lambda: _layout((0, 1, 2), (3,)), "same nonzero number of chunks for each of the 2 parts"),
        (lambda: _layout((), ()), "same nonzero number of chunks for each of the 2 parts"),
        (lambda: _layout((0, 3), (1, 1)), "expected chunks 0 to 3 exactly once each"),
        (lambda: _layout((0, 4), (1, 2)), "expected chunks 0 to 3 exactly once each"),
        (lambda: _layout((3, 0), (1, 2)), "in ascending order on each rank"),
        (lambda: _layout((0, 3), (1, 2)), None),
        (lambda: check_strategy("rings"), "strategy must be Links or one of"),
        (lambda: check_strategy(Links(1.0, 1.0)), None),
        (lambda: check_strategy("stream"), None),
        (lambda: _attention(), None),
        (lambda: _attention(seq_len=3), r"puts 3 tokens on each rank"),
        (lambda: _attention(rows=3), r"puts 4 tokens on each rank, but got q\[1, 3"),
        (lambda: _attention(keys=3), r"puts 4 tokens on each rank, .* k\[1, 3"),
        (lambda: _optimizer(None), None),
        (lambda: _optimizer(0.0), "clip must be positive"),
        (lambda: _optimizer(NAN), "clip must be positive"),
        (lambda: _optimizer(1e-9), None),
        (lambda: KVCache(4).extend("layer", kv, kv), None),
        (lambda: KVCache(3).extend("layer", kv, kv), "the KV cache holds at most 3 tokens"),
        (lambda: KVCache(4, start=1).extend("layer", kv, kv),
         "the KV cache holds at most 4 tokens"),
        (lambda: KVCache(5, start=1).extend("layer", kv, kv), None),
        (lambda: MLP(4, 8, recompute="all"), "recompute must be one of"),
    ]
)  # fmt: skip
def test_sizes(call, words) -> None:
    check(call, words)


@pytest.mark.parametrize("keyword", ["q_runs", "windw"])
def test_attention_over_ranks_refuses_positions_and_unknown_keywords(keyword) -> None:
    layout = SequenceLayout(4, 1)
    with pytest.raises(TypeError, match=keyword):
        context_attention(q, kv, kv, layout=layout, group=None, **{keyword: None})


# ---------------------------------------------------------------- tensors over tensor ranks


def _embedding(group, ids=ids, rows=4, size=8, **options):
    given = {"group": group, "vocab_size": size} | options
    tensor.vocab_parallel_embedding(ids, table[:rows], **given)


def _mlp(group, x=x):
    up, down = torch.zeros(5, 6), torch.zeros(6, 5)
    tensor.parallel_mlp(x, up, down, activation="relu2", group=group)


def _qkv(group, x=x, shape=(2, 2), **options):
    weight = torch.zeros(1, 3, 2, 6)
    tensor.parallel_qkv_rope(x, weight, None, None, None, shape=shape, group=group, **options)


def _loss(group, logits=x, labels=ids, size=12, **options):
    tensor.vocab_parallel_cross_entropy(logits, labels, group=group, vocab_size=size, **options)


def _head(group, **options):
    given = {"group": group, "vocab_size": 10} | options
    tensor.vocab_parallel_linear_cross_entropy(x, w, ids, **given)


def _column(group, x=x, w=w, b=b, **options):
    tensor.column_parallel_linear(x, w, b, group=group, **options)


def _row(group, x=x, w=w, b=b, **options):
    tensor.row_parallel_linear(x, w, b, group=group, **options)


CUT = {"sequence_parallel": True}
NOT_K = r"rank .: x must be \[\.\.\., K\] .* and weight must be \[N, K\], got x"
LINEARS = [
    row
    for linear in (_column, _row)
    for row in (
        (lambda group, f=linear: f(group), None),
        (lambda group, f=linear: f(group, b=None), None),
        (lambda group, f=linear: f(group, x=x[0]), r"x must be .* \(with at least two dims"),
        (lambda _, f=linear: f(None, x=x[0]), None),
        (lambda group, f=linear: f(group, x=x[:, :5]), rf"{NOT_K}\[4, 5\] and weight\[5, 6\]"),
        (lambda group, f=linear: f(group, w=w[..., None]), NOT_K),
        (lambda group, f=linear: f(group, b=b[:4]), r"expected bias\[5\] .* got bias\[4\]"),
        (lambda group, f=linear: f(group, b=b[:, None]), r"got bias\[5, 1\]"),
    )
]  # fmt: skip

CUT_BY = ("scatter", "gather", "all_gather", "reduce_scatter", "own_slice", "start_all_gather",
          "start_reduce_scatter")  # fmt: skip
DIMS = {2: "dim 2 does not exist", -3: "dim -3 does not exist", 1: None, -2: None}
COLLECTIVES = [
    (lambda group, name=name, dim=dim: getattr(collectives, name)(x, group, dim), words)
    for name in CUT_BY
    for dim, words in DIMS.items()
]


@rows(
    [
        *LINEARS,
        *COLLECTIVES,
        (lambda group: _row(group, x=x[:3], **CUT), "3 tokens .* not divisible by the 2"),
        (lambda group: _row(group, x=x[:3]), None),
        (lambda group: _row(group, **CUT), None),
        (lambda _: _row(None, x=x[:3], **CUT), None),
        (lambda group: _column(group, x=x[:3], **CUT), None),  # of each rank
        (lambda group: _embedding(group), None),
        (lambda group: _embedding(group, ids=ids.view(2, 2)), None),
        (lambda group: _embedding(group, ids=ids[:3]), None),
        (lambda group: _embedding(group, ids=ids, **CUT), None),
        (lambda group: _embedding(group, ids=ids.view(2, 2), **CUT), r"got ids\[2, 2\]"),
        (lambda group: _embedding(group, ids=ids[:3], **CUT), r"got ids\[3\]"),
        (lambda group: _embedding(group, ids=ids.int()), None),
        (lambda group: _embedding(group, ids=ids.float()), "ids must be .*, got torch.float32"),
        (lambda group: _embedding(group, rows=3), "3 rows on each of 2 .* vocabulary of 8"),
        (lambda group: _embedding(group, rows=8), "pass this rank's shard only"),
        (lambda group: _embedding(group, size=7), None),  # padded by one
        (lambda group: _embedding(group, size=5), "padded vocabulary of 6"),
        (lambda group: _embedding(group, size=5, padded_vocab_size=8), None),
        (lambda group: _embedding(group, size=1, padded_vocab_size=8), None),
        (lambda group: _embedding(group, size=0, padded_vocab_size=8),
         r"vocab_size must be in \[1, 8\], got 0"),
        (lambda group: _embedding(group, size=9, padded_vocab_size=8),
         r"vocab_size must be in \[1, 8\], got 9"),
        (lambda group: _loss(group), None),
        (lambda group: _loss(group, logits=x[None], labels=ids[:1]), "expected logits"),
        (lambda group: _loss(group, labels=ids[:3]), r"and \(3,\)"),
        (lambda group: _loss(group, labels=ids[:, None]), r"and \(4, 1\)"),
        (lambda group: _loss(group, label_smoothing=1.0), r"must be in \[0, 1\), got 1.0"),
        (lambda group: _loss(group, label_smoothing=-0.1), r"must be in \[0, 1\), got -0.1"),
        (lambda group: _loss(group, label_smoothing=0.999), None),
        (lambda group: _loss(group, z_loss=-0.1), "z_loss must not be negative, got -0.1"),
        (lambda group: _loss(group, z_loss=NAN), "z_loss must not be negative, got nan"),
        (lambda group: _head(group), None),
        (lambda group: _head(group, reduction="mean"), 'must be "sum" or "none"'),
        (lambda group: _head(group, softcap=0.0), "softcap must be positive or None, got 0.0"),
        (lambda group: _head(group, softcap=NAN), "softcap must be positive or None, got nan"),
        (lambda group: _head(group, vocab_size=11), "5 weight rows .* vocabulary of 12"),
        (lambda group: _mlp(group), None),
        (lambda group: _mlp(group, x=x[0]), "at least two dims"),
        (lambda _: _mlp(None, x=x[0]), None),
        (lambda group: _qkv(group), None),
        (lambda group: _qkv(group, x=x[:, None]), r"R = 1 .* got x\[4, 1, 6\]$"),
        (lambda group: _qkv(group, x=x[:3]), r"\[2, 2\] and R = 1 .* got x\[3, 6\]$"),
        (lambda group: _qkv(group, x=x[:2], **CUT), None),
        (lambda group: _qkv(group, **CUT), r"R = 2 .* got x\[4, 6\]$"),
        (lambda _: _qkv(None, **CUT), None),
    ]
)  # fmt: skip
def test_tensors_over_two_ranks(call, words) -> None:
    def on_rank(group: Group) -> None:
        check(lambda: call(group), words)

    on_threads(2, on_rank)


# ---------------------------------------------------------------- schedules

ONE = [Action(F, 0, 0), Action(B, 0, 0)]  # one stage, one micro-batch
CROSSED = with_comm(gpipe(2, 1))


def _valid(*more: Action, lists=None, at: int | None = None, **options) -> None:
    place = len(ONE) if at is None else at
    validate(lists or [[*ONE[:place], *more, *ONE[place:]]], **options)


def _replaced(old: str, *new: Action) -> list[list[Action]]:
    """Return two stages on two ranks, lowered, with `new` in place of `old`."""
    return [[x for a in own for x in (new if str(a) == old else (a,))] for own in CROSSED]


SPLIT = [Action(op, 0, 0) for op in (F, I, W)]


GENERATORS = [gpipe, one_f_one_b, lambda p, m: interleaved(p, m, 2)]


@rows(
    [
        *[(lambda f=f: f(0, 1), "needs p >= 1 .*m >= 1 .*got p=0 m=1$") for f in GENERATORS],
        *[(lambda f=f: f(2, 0), "needs p >= 1 .*m >= 1 .*got p=2 m=0$") for f in GENERATORS],
        *[(lambda f=f: f(1, 1), None) for f in GENERATORS],
        (lambda: interleaved(1, 1, 0), "c >= 1"),
        (lambda: split_backward([ONE], lag=-1), "lag must be >= 0"),
        (lambda: split_backward([ONE]), None),
        (lambda: placement([[]]), r"numbered 0, 1, 2, \.\.\. without gaps, got \[\]"),
        (lambda: placement([[Action(F, 1, 0)]]), r"without gaps, got \[1\]"),
        (lambda: placement([[Action(F, 0, 0)], [Action(F, 0, 0)]]), "ranks 0 and 1"),
        (lambda: from_csv("0F0,,0B0\n"), None),
        (lambda: from_csv("F0\n"), "got 'F0'"),
        (lambda: from_csv("0Q0\n"), "got '0Q0'"),
        # micro-batches
        (lambda: _valid(), None),
        (lambda: _valid(Action(F, 0, 0)), "2 F, 1 B"),
        (lambda: _valid(Action(B, 0, 0)), "1 F, 2 B"),
        (lambda: _valid(lists=[[Action(F, 0, 0), Action(I, 0, 0)]]), "1 I and 0 W"),
        (lambda: _valid(lists=[SPLIT]), None),
        (lambda: _valid(microbatches=2), "micro-batch 1 has 0 F"),
        (lambda: _valid(Action(F, 0, 1), microbatches=1), "micro-batch from 0 to 0, got 1"),
        (lambda: _valid(Action(F, 0, WHOLE)), "micro-batch from 0 to 0, got -1"),
        (lambda: _valid(Action(UPDATE, 0, 0, 1)), "must not have a micro-batch number"),
        (lambda: _valid(Action(UPDATE, 0, WHOLE, 1)), None),
        # order within a stage
        (lambda: _valid(lists=[ONE[::-1]]), "0B0 comes before 0F0"),
        # versions
        (lambda: _valid(lists=[[Action(F, 0, 0, 1), Action(B, 0, 0, 1)]]), "newest version is 0"),
        (lambda: _valid(lists=[[ONE[0], Action(B, 0, 0, 1)]]),
         "the same micro-batch read version 0"),
        (lambda: _valid(Action(UPDATE, 0, WHOLE, 2)),
         "version 2 of the weights right after version 0"),
        (lambda: _valid(Action(UPDATE, 0, WHOLE, 1), at=1), "has no gradient to apply"),
        (lambda: _valid(*[Action(op, 0, 1) for op in (F, B)], Action(UPDATE, 0, WHOLE, 1)), None),
        (lambda: _valid(Action(UPDATE, 0, WHOLE, 1), Action(F, 0, 1, 1), Action(B, 0, 1, 1)),
         "comes after the last UPDATE"),
        # reductions, ties
        (lambda: _valid(Action(REDUCE, 0)), None),
        (lambda: _valid(Action(REDUCE, 0), at=1), "have no REDUCE before the end"),
        (lambda: _valid(Action(UPDATE, 0, WHOLE, 1), Action(REDUCE, 0)),
         "have no REDUCE before UPD"),
        (lambda: _valid(Action(TIE, 0), Action(REDUCE, 0)), "have no REDUCE before TIE"),
        # messages
        (lambda: _valid(lists=CROSSED), None),
        (lambda: _valid(lists=_replaced("0SEND_F0")), "0SEND_F0 must occur once, but"),
        (lambda: _valid(lists=_replaced("1RECV_F0")), "1RECV_F0 must occur once, but"),
        (lambda: _valid(lists=_replaced("1B0", Action(B, 1, 0), Action(SEND_F, 1, 0))),
         "stages 1 and 2, which must both exist and be on different ranks"),
        (lambda: _valid(lists=[[*ONE, Action(F, 1, 0), Action(B, 1, 0), Action(SEND_F, 0, 0)]]),
         "stages 0 and 1, which must both exist and be on different ranks"),
    ]
)  # fmt: skip
def test_schedules(call, words) -> None:
    check(call, words)


# ---------------------------------------------------------------- execution


class Plain:
    """A stage that passes on its input, and records the order of its calls."""

    def __init__(self, like=((2,), torch.float32)) -> None:
        self.like = like

    def start(self) -> None: ...

    def input_like(self, mb):
        return *self.like, torch.device("cpu")

    def forward(self, mb, x, version):
        return torch.zeros(2)

    backward = backward_input = lambda self, mb, dy: torch.zeros(2)

    def backward_weight(self, mb) -> None: ...

    def update(self) -> None: ...

    def reshard(self) -> None: ...


def _ran(*lists: list[Action], stages: int = 1) -> None:
    try:
        execute([*lists], {s: Plain() for s in range(stages)}, InProcess())
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _opened(lists, built=None, like=((2,), torch.float32), stages: int = 2) -> None:
    transport = Distributed(built or lists, None)
    transport.open(lists, {s: Plain(like) for s in range(stages)})


TWO = [[Action(F, 0, 0), Action(F, 1, 0), Action(B, 1, 0), Action(B, 0, 0)]]  # on one rank


def _module(**options) -> None:
    ModuleStage(torch.nn.Linear(2, 2), **options)


STALE = from_csv("0F0,0F1,0B0,0UPDATE@1,0B1,0UPDATE@2\n")[0]


@rows(
    [
        (lambda: _ran(ONE), None),
        (lambda: _ran([ONE[0], *ONE]), "0F0 occurs twice"),
        (lambda: _ran([*ONE, ONE[1]]), "0B0 occurs twice"),
        (lambda: _ran([*ONE, Action(I, 0, 0)]), "0I0 occurs twice"),
        (lambda: _ran([*SPLIT, ONE[1]]), "0B0 occurs twice"),
        (lambda: _ran(ONE[::-1]), "0B0 comes before 0F0"),
        (lambda: _ran([*ONE, *[Action(UPDATE, 0, WHOLE, n) for n in (1, 1)]]), None),
        (lambda: _ran([Action(F, 0, 0), Action(I, 0, 0), Action(UPDATE, 0, WHOLE, 1)]),
         r"UPDATE@1 must come after the W of micro-batches \[0\]"),
        (lambda: _ran([Action(F, 0, 0), Action(I, 0, 0)]), "no W follows the I of these"),
        (lambda: _ran([*TWO[0][:3], Action(I, 0, 0), Action(UPDATE, 1, WHOLE, 1), Action(W, 0, 0)],
                      stages=2), None),  # that gradient belongs to another stage
        (lambda: _ran(*CROSSED, stages=2), None),
        (lambda: _ran(*gpipe(2, 1), stages=2), "2 ranks have no SEND or RECV"),
        (lambda: _ran(TWO[0], stages=2), None),
        (lambda: _ran(TWO[0], stages=1), r"expected stages \[0, 1\] .* got \[0\]"),
        (lambda: _module(), "either `inputs`"),
        (lambda: _module(inputs=[x].__getitem__), None),
        (lambda: _module(like=((2,), torch.float32, "cpu")), None),
        (lambda: _module(inputs=[x].__getitem__, like=((2,), x.dtype, "cpu")), "either `inputs`"),
        (lambda: Distributed([STALE], None), r"1 weight version old; the limit \(staleness\) is 0"),
        (lambda: Distributed([STALE], None, staleness=1), None),
        (lambda: _opened(TWO), None),
        (lambda: _opened([[*TWO[0]]], built=TWO), None),  # equal lists count as the same
        (lambda: _opened(gpipe(1, 1), built=TWO), "built for a different schedule"),
        (lambda: _opened(TWO, like=((1,) * 8, torch.int32)), None),
        (lambda: _opened(TWO, like=((1,) * 9, torch.int32)), "at most 8 dims"),
        (lambda: _opened(TWO, like=((2,), torch.bool)), "got .2,. torch.bool"),
    ]
)  # fmt: skip
def test_lists_that_run(call, words) -> None:
    check(call, words)


def test_a_run_that_failed_leaves_no_message_for_the_next() -> None:
    transport, stages = InProcess(), {s: Plain() for s in range(2)}
    with pytest.raises(RuntimeError, match="1F0 comes before 1RECV_F0"):
        execute(_replaced("1RECV_F0"), stages, transport)
    execute(CROSSED, stages, transport)
