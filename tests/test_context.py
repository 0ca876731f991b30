"""Every context-parallel strategy equals one device, rejects bad input, and typechecks."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from close import assert_all_close, assert_close_f64, relative_error
from every_rank import every_rank
from plants import Plant, instead, planted
from ranks import run_ranks
from rules import rulecheck
from spmd_types import P, R, S, assert_type
from spmd_types._mesh import set_current_mesh
from spmd_types.checker import typecheck
from spmd_types.rulecheck import RuleCheckError
from spmd_types.types import SpmdTypeError
from test_ring import NAMES, Case, whole_attention
from threads import Group, on_mesh, on_threads, run_threads
from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from warpweave.kernels import reference
from warpweave.kernels.attention import attention
from warpweave.kernels.attention.forward import block_fwd
from warpweave.kernels.attention.options import AttentionOptions
from warpweave.parallel.collectives import group_rank, group_size, reduce_from
from warpweave.parallel.context import attention as context
from warpweave.parallel.context import context_attention, gather, ring
from warpweave.parallel.context.strategy import Shards
from warpweave.parallel.layout import SequenceLayout, balance
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.messages import run_in_process

STRATEGIES = ["ring", "gather", "stream", "ulysses", "auto"]
Tensors = tuple[torch.Tensor, ...]


def _run(case: Case, rank: int, strategy: str, **options) -> Tensors:
    """Return this rank's o, lse, dq, dk, dv."""
    inputs, cotangents = case.shard(rank)
    inputs = [x.clone().requires_grad_() for x in inputs]
    options |= {"layout": case.layout, "group": dist.group.WORLD, "causal": case.causal}
    out = context_attention(*inputs, **options, strategy=strategy, return_lse=True)
    return *(x.detach() for x in out), *torch.autograd.grad(out, inputs, cotangents)


def _errors(case: Case, rank: int, strategy: str) -> dict[str, float]:
    got = zip(NAMES, _run(case, rank, strategy), case.truth())
    dims = {"lse": 2}
    return {n: relative_error(a, case.layout.shard(b, rank, dims.get(n, 1))) for n, a, b in got}


# ------------------------------------------------------------------ 1. exactness on ranks


def _cases(world: int) -> list[Case]:
    zigzag = Case(SequenceLayout(10 * world, world), kv_heads=1)
    plain = replace(zigzag, layout=replace(zigzag.layout, kind="contiguous"), kv_heads=4)
    striped = replace(zigzag, layout=replace(zigzag.layout, kind="striped"), kv_heads=2)
    return [zigzag, plain, replace(zigzag, causal=False, kv_heads=2), striped]


def _every_strategy(rank: int, world: int) -> None:
    for case in _cases(world):
        for strategy in STRATEGIES:
            errors = _errors(case, rank, strategy)
            assert max(errors.values()) <= 1e-11, f"{strategy} {case}: {errors}"
        inputs = case.shard(rank)[0]
        options = {"layout": case.layout, "group": dist.group.WORLD, "causal": case.causal}
        scaled = context_attention(*inputs, **options, scale=0.5)
        q, k, v = case.draw()[0]
        whole = whole_attention(q * 0.5 * math.sqrt(case.dim), k, v, case.causal)[0]
        assert_close_f64(scaled, case.layout.shard(whole, rank, 1))


SINKS = torch.tensor([0.3, -2.0, 1.0, -math.inf], dtype=torch.float64)  # the last one is no sink


def _options(length: int) -> list[dict]:
    """List options of attention other than a causal mask, alone and together."""
    documents = torch.tensor([0, 3, 3, length // 2 + 1, length])
    others = torch.tensor([0, 0, 2, length - 2, length])
    dropout = {"dropout": 0.3, "dropout_seed": 7, "dropout_origin": (3, 2)}
    each = torch.stack((documents, others))
    together = {"window": length // 2, "documents": each, "softcap": 2.0, "sinks": SINKS}
    return [
        {"window": 4},
        {"window": length // 2 + 1, "causal": False},
        {"window": 1},
        {"softcap": 2.0, "scale": 0.7},
        {"sinks": SINKS},
        {"documents": documents, "causal": False},
        {"documents": each},
        {"documents": torch.stack((documents, documents.clamp(2, length - 3))).expand(2, -1, -1)},
        dropout,
        together | dropout,
    ]


class Problem(NamedTuple):
    """Inputs and cotangents of a case with its attention options, and the truth."""

    case: Case
    given: dict
    sinks: torch.Tensor | None
    truth: Tensors  # o, lse, dq, dk, dv and dsinks


def _problems(world: int, kinds: Sequence[str], options: Sequence[int]) -> list[Problem]:
    found, heads = [], 4 if world <= 4 else 8
    for kind, i in itertools.product(kinds, options):
        case = Case(SequenceLayout(6 * world, world, kind), batch=2, heads=heads, kv_heads=2)
        given = {"causal": True} | _options(case.layout.seq_len)[i]
        inputs, (do, dlse) = case.draw()
        inputs = [x.clone().requires_grad_() for x in inputs]
        if (sinks := given.pop("sinks", None)) is not None:
            sinks = sinks.repeat(heads // 4)
            inputs.append(sinks.clone().requires_grad_())
        o, lse = reference.attention(*inputs[:3], sinks=(inputs[3:] or [None])[0], **given)
        seen = lse.detach().isfinite()  # -inf has no gradient
        grads = torch.autograd.grad((o, lse.masked_fill(~seen, 0)), inputs, (do, dlse))
        found.append(Problem(case, given, sinks, (o.detach(), lse.detach(), *grads)))
    return found


def _every_option(group: Group | tuple[Group, Group], problems: list[Problem]) -> None:
    pair = group if isinstance(group, tuple) else (group, None)
    rank = group_rank(pair[0]) * group_size(pair[1]) + group_rank(pair[1])
    strategies = ["hybrid"] if isinstance(group, tuple) else ["ring", "gather", "stream", "ulysses"]
    for (case, given, sinks, truth), strategy in itertools.product(problems, strategies):
        inputs, cotangents = case.shard(rank)
        inputs = [x.clone().requires_grad_() for x in inputs]
        if sinks is not None:  # every rank holds all of them, and a share of their gradient
            inputs.append(sinks.clone().requires_grad_())
        out = context_attention(
            *inputs[:3], sinks=(inputs[3:] or [None])[0], layout=case.layout, group=group,
            strategy=strategy, return_lse=True, **given,
        )  # fmt: skip
        got = torch.autograd.grad(out, inputs, cotangents)
        for x, y, dim in zip((*out, *got[:3]), truth, (1, 2, 1, 1, 1)):
            assert_close_f64(x, case.layout.shard(y, rank, dim))
        if sinks is not None:
            assert_close_f64(reduce_from(reduce_from(got[3], pair[0]), pair[1]), truth[5])


@pytest.mark.parametrize("world", [2, 3, 8])
def test_masks_scores_sinks_and_dropout_equal_one_device(world: int) -> None:
    every = ("zigzag", "contiguous", "striped"), range(10)
    problems = _problems(world, *(every if world == 3 else (("zigzag", "striped"), (7, 9))))
    on_threads(world, _every_option, problems)


@pytest.mark.parametrize("ulysses", [2, 3])  # of six ranks: fewer than the ring has, and more
def test_so_they_do_in_the_hybrid_with_ulysses(ulysses: int) -> None:
    problems = _problems(6, ("zigzag", "contiguous"), (1, 7, 8, 9))
    mesh = Mesh(cp=6, ulysses=ulysses)
    on_mesh(mesh, lambda connected: _every_option(connected.context, problems))


@every_rank(4, run_ranks)
def test_hops_outside_the_window_are_not_computed(rank: int) -> None:
    """Test that hops which a window hides from a rank are passed on, but not computed."""
    layout, tiles = SequenceLayout(24, 4, "contiguous"), []

    def counted(q, k, v, options, **more):
        tiles.append(options.k_runs)
        return block_fwd(q, k, v, options, **more)

    inputs = Case(layout).shard(rank)[0]
    with mock.patch.object(ring, "block_fwd", counted):
        for window, causal, count in ((7, True, 2), (8, True, 3), (7, False, 3), (1, True, 1)):
            tiles.clear()
            options = {"layout": layout, "group": dist.group.WORLD, "strategy": "ring"}
            context_attention(*inputs, **options, causal=causal, window=window)
            inner = rank == 2  # it has enough ranks on either side
            assert not inner or len(tiles) == count, (window, causal, tiles)


@every_rank(2)
def test_a_second_derivative_is_refused(rank: int) -> None:
    case = Case(SequenceLayout(8, 2))
    for strategy in STRATEGIES:
        inputs = [x.requires_grad_() for x in case.shard(rank)[0]]
        options = {"layout": case.layout, "group": dist.group.WORLD, "strategy": strategy}
        o = context_attention(*inputs, **options)
        for dx in torch.autograd.grad(o.sum(), inputs, create_graph=True):
            for x in inputs:
                with pytest.raises(RuntimeError, match="Attention does not support second deriv"):
                    torch.autograd.grad(dx.sum() + (x * x).sum(), x, retain_graph=True)


def _any_length(rank: int, world: int) -> None:
    """Test lengths that are prime, or smaller than the number of ranks, and balanced layouts."""
    for length, causal in ((13, True), (13, False), (2, True)):
        ends = torch.tensor([0, length // 4, length // 2 + 1, length])
        of_each = torch.stack((ends, torch.tensor([0, length // 4, length // 2, length])))
        layouts = [SequenceLayout(length, world, kind) for kind in ("zigzag", "contiguous")]
        layouts += [SequenceLayout(length, world, "striped")]
        # Four chunks per rank, which are two kernel calls.
        layouts += [balance(length, world, ends.tolist(), each=each) for each in (2, 4)]
        masks = ((None, None), (3, None), (None, ends), (3, of_each))
        for layout, (window, documents) in itertools.product(layouts, masks):
            case = Case(layout, causal=causal, heads=4, kv_heads=2)
            whole, (do, dlse) = case.draw()
            whole = [x.clone().requires_grad_() for x in whole]
            given = {"causal": causal, "window": window, "documents": documents}
            out = reference.attention(*whole, **given)
            truth = *out, *torch.autograd.grad(out, whole, (do, dlse))
            given |= {"layout": layout, "group": dist.group.WORLD, "return_lse": True}
            real = layout.positions(rank) < length
            for strategy in ("ring", "gather", "stream", "ulysses"):
                mine, cotangents = case.shard(rank)
                mine = [x.clone().requires_grad_() for x in mine]
                if layout.kind == "balanced" and strategy == "ring":
                    with pytest.raises(ValueError, match="balanced layout supports 'gather'"):
                        context_attention(*mine, strategy=strategy, **given)
                    continue
                out = context_attention(*mine, strategy=strategy, **given)
                got = *out, *torch.autograd.grad(out, mine, cotangents)
                for a, b, dim in zip(got, truth, (1, 2, 1, 1, 1)):
                    b, rows = layout.shard(b.detach(), rank, dim), real.nonzero()[:, 0]
                    assert_close_f64(a.index_select(dim, rows), b.index_select(dim, rows))
                assert not any(dx[:, ~real].any() for dx in got[2:])  # padding has no gradient


def test_any_length_on_any_number_of_ranks() -> None:
    run_threads(3, _any_length, 3)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_strategy_equals_whole_attention(world: int) -> None:
    (run_threads if world < 4 else run_ranks)(world, _every_strategy, world)


def test_without_a_group_it_is_plain_attention() -> None:
    case = Case(SequenceLayout(7, 1))
    q, k, v = case.draw()[0]
    o, lse = context_attention(q, k, v, layout=case.layout, group=None, return_lse=True)
    assert_all_close((o, lse), whole_attention(q, k, v, True), 1e-11)


@every_rank(2, run_ranks)
def test_bf16_and_autocast_on_two_ranks(rank: int) -> None:
    """bf16 partial sums stay fp32 in transit, so the strategies differ by one final rounding."""
    case = Case(SequenceLayout(32, 2), dtype=torch.bfloat16)
    with mock.patch.object(
        gather, "start_reduce_scatter", side_effect=gather.start_reduce_scatter
    ) as summed:
        gathered = _run(case, rank, "gather")
    assert [call.args[0].dtype for call in summed.call_args_list] == [torch.float32]
    for name, a, b in zip(NAMES, _run(case, rank, "ring"), gathered):
        assert a.dtype == b.dtype == (torch.float32 if name == "lse" else torch.bfloat16)
        assert relative_error(a, b) <= 2**-8, name
    inputs = [x.float() for x in case.shard(rank)[0]]
    options = {"layout": case.layout, "group": dist.group.WORLD, "strategy": "ring"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = context_attention(*inputs, **options)
    assert torch.equal(cast, context_attention(*(x.bfloat16() for x in inputs), **options))


@every_rank(2, run_ranks)
def test_stream_is_gather_head_by_head(rank: int) -> None:
    """ "gather" runs in Hkv messages of one head each; the next one starts before a tile."""
    case = Case(SequenceLayout(12, 2), heads=8, kv_heads=4)
    events: list[int | str] = []

    def start(x, group):
        events.append(x.numel())
        return _start(x, group)

    def tile(*args, **options):
        events.append("t")
        return block_fwd(*args, **options)

    whole = _run(case, rank, "gather")
    with mock.patch.multiple(gather, start_all_gather=start, block_fwd=tile):
        streamed = _run(case, rank, "stream")
        head = 2 * case.batch * case.layout.local_len * case.dim
        assert events == [head, head, "t", head, "t", head, "t", "t", *[head] * 4]
        events.clear()
        assert all(map(torch.equal, streamed, _run(case, rank, "stream", overlap=False)))
        assert events == [head, "t"] * 4 + [head] * 4
    for got, expected in zip(streamed, whole):
        assert relative_error(got, expected) <= 1e-14


@every_rank(2)
def test_values_may_have_a_head_dim_of_their_own(rank: int) -> None:
    """Like `attention`, this operator accepts values of another head dim, on several ranks."""
    layout, (q, k, v) = SequenceLayout(12, 2), torch.randn(3, 1, 12, 2, 6, dtype=torch.float64)
    v = v[..., :4]
    whole = attention(q, k, v)
    for strategy in ("ring", "gather", "stream", "ulysses"):
        mine = (layout.shard(x, rank, 1) for x in (q, k, v))
        o = context_attention(*mine, layout=layout, group=dist.group.WORLD, strategy=strategy)
        assert_close_f64(o, layout.shard(whole, rank, 1), 1e-13)


_start = gather.start_all_gather


@every_rank(2)
def test_any_strides(rank: int) -> None:
    """Heads, rows and elements may have any strides, also in the output's gradient."""
    case = Case(SequenceLayout(12, 2), heads=4, kv_heads=2)
    truth = [case.layout.shard(x, rank, dim) for x, dim in zip(case.truth(), (1, 2, 1, 1, 1))]
    for strategy, order in itertools.product(STRATEGIES, itertools.permutations(range(4))):
        back = [order.index(dim) for dim in range(4)]
        inputs, (do, dlse) = case.shard(rank)
        *inputs, do = (x.permute(order).contiguous().permute(back) for x in (*inputs, do))
        for x in inputs:
            x.requires_grad_()
        options = {"layout": case.layout, "group": dist.group.WORLD, "strategy": strategy}
        out = context_attention(*inputs, **options, return_lse=True)
        assert_all_close((*out, *torch.autograd.grad(out, inputs, (do, dlse))), truth, 1e-11)


# ------------------------------------------------------------------ 2. planted faults in "gather"


def _unsorted(layout: SequenceLayout, shards: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(list(shards), dim)


def _not_summed(dk: torch.Tensor, dv: torch.Tensor, layout: SequenceLayout, group) -> Tensors:
    rank = dist.get_rank(group)
    return layout.shard(dk, rank, 1), layout.shard(dv, rank, 1)


_delta = context.attention_delta
FAULTS: dict[str, tuple[tuple[Plant, ...], set[str]]] = {
    "no fault": ((), set()),
    "K‖V stay in rank order": ((instead(SequenceLayout, "unshard", _unsorted),), set(NAMES)),
    "dK‖dV are not summed over ranks": (
        (instead(gather, "_reduce_scatter", _not_summed),),
        {"dk", "dv"},
    ),
    "the gradient through lse is dropped": (
        (instead(context, "attention_delta", lambda o, do, dlse, impl: _delta(o, do)),),
        {"dq", "dk"},
    ),
}


@every_rank(3, run_ranks)
def test_planted_faults_show_exactly_where_they_should(rank: int) -> None:
    case = Case(SequenceLayout(24, 3))
    for fault, (plants, wrong) in FAULTS.items():
        with planted(*plants):
            errors = _errors(case, rank, "gather")
        assert {n for n, error in errors.items() if error > 1e-3} == wrong, f"{fault}: {errors}"
        assert all(error <= 1e-11 for n, error in errors.items() if n not in wrong), fault


# ------------------------------------------------------------------ 3. choice and errors


@every_rank(2)
def test_what_does_not_fit_is_refused_before_anything_is_sent(rank: int) -> None:
    layout, q, kv = SequenceLayout(16, 2), torch.zeros(2, 8, 4, 8), torch.zeros(2, 8, 2, 8)
    wrong = [
        ((q, kv, kv), {"layout": SequenceLayout(16, 4)}, "has 4 parts but the group has 2 ranks"),
        ((q[0], kv[0], kv[0]), {}, r"q must be \[B, S, H, D\], got shape \(8, 4, 8\)"),
        ((q, kv, kv[:, :, :1]), {}, r"k and v must have the same shape .* and \(2, 8, 1, 8\)"),
        ((q[:1], kv, kv), {}, r"for q \(1, 8, 4, 8\), got \(2, 8, 2, 8\)"),
        ((q[..., :3, :], kv, kv), {}, "3 query heads are not divisible by 2 KV heads"),
        ((q[:, :7], kv[:, :7], kv[:, :7]), {}, r"8 tokens on each rank, but got q\[2, 7, 4, 8\]"),
        ((*[torch.zeros(2, 9, 4, 8)] * 3,), {}, r"8 tokens on each rank, but got q\[2, 9, 4, 8\]"),
        ((q, kv, kv),  # one of the 16 rows is padding
         {"layout": SequenceLayout(15, 2), "documents": torch.tensor([0, 5, 16])},
         r"documents must end at 15, the end .* got \[0, 5, 16\]"),
        ((q, kv.double(), kv), {},
         "the same floating dtype of .* got torch.float32, torch.float64, torch.float32"),
        ((q, kv.to("meta"), kv), {}, "one device, got cpu and meta"),
        ((q, kv, kv), {"documents": torch.tensor([0, 9, 4])},
         r"documents must be boundaries that ascend from 0, got \[0, 9, 4\]"),
        ((q, kv, kv), {"documents": torch.tensor([0, 5, 8])},  # 16 tokens, 8 of them here
         r"documents must end at 16, the end .* got \[0, 5, 8\]"),
        ((q, kv, kv), {"documents": torch.zeros(3, 2, dtype=torch.int64)},
         r"documents must have the shape .* \[2, n \+ 1\] or \[2, 2, n \+ 1\] for n documents, "
         r"got \(3, 2\)"),
        ((q, kv[:, :7], kv[:, :7]), {},
         r"8 tokens on each rank, but got q\[2, 8, 4, 8\], k\[2, 7, 2, 8\]"),
        ((q, kv, kv), {"documents": torch.arange(2).repeat_interleave(8)},
         r"boundaries, not one document id for each of the 16 tokens, got \[16\]"),
        ((q, kv, kv), {"window": 0}, "window must be None or at least 1, got 0"),
        ((q, kv, kv), {"sinks": torch.zeros(3)}, r"sinks must have a float dtype and shape \(4,\)"),
        ((q[:, :, :1], kv[:, :, :1], kv[:, :, :1]), {"strategy": "ulysses"},
         "Ulysses over 2 ranks needs at least 2 query heads, got 1"),
        ((q, kv, kv), {"strategy": "hybrid"},
         r"'hybrid' needs a pair of process groups \(ring, Ulysses\), got one"),
        ((q, kv, kv), {"strategy": "ring", "group": (dist.group.WORLD, None)},
         "'ring' needs one process group, got a pair"),
    ]  # fmt: skip
    squared = {"group": (dist.group.WORLD, dist.group.WORLD), "strategy": "hybrid"}
    with pytest.raises(ValueError, match="of 4: the layout has 2 parts but the group has 4 ranks"):
        context_attention(q, kv, kv, layout=layout, **squared)
    sent = AssertionError("something was sent")
    with (
        mock.patch.object(dist, "batch_isend_irecv", side_effect=sent),
        mock.patch.object(gather, "start_all_gather", side_effect=sent),
        mock.patch.object(dist, "all_to_all_single", side_effect=sent),
    ):
        for tensors, options, message in wrong:
            options = {"layout": layout, "group": dist.group.WORLD} | options
            with pytest.raises(ValueError, match=rf"cp rank {rank} of 2: .*{message}"):
                context_attention(*tensors, **options)
        with pytest.raises(ValueError, match=r"^strategy must be Links or one of .* got 'rings'$"):
            context_attention(q, kv, kv, layout=layout, group=dist.group.WORLD, strategy="rings")
        with pytest.raises(AssertionError, match="something was sent"):
            context_attention(q, kv, kv, layout=layout, group=dist.group.WORLD)


# ------------------------------------------------------------------ 4. types
#
# torch's LocalTensorMode keeps all ranks in one process, where P2P cannot run and a kernel cannot
# have a different mask per rank. The ring therefore runs by `run_in_process` (test_ring.py shows
# that process groups give the same bits); of "gather" all but the kernel runs, which is mapped.


class _LocalRing(context._ContextAttention):
    """The ring on LocalTensors; a world of one has the shards of all ranks in a row."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, strategy, layout, group, ulysses_group, options, overlap):
        given = {"layout": layout, "options": options}
        inputs = [x._local_tensors for x in (q, k, v)]
        with maybe_disable_local_tensor_mode():
            if len(inputs[0]) == 1:
                whole = [layout.unshard(x[0].chunk(layout.parts, 1), 1) for x in inputs]
                o, lse = whole_attention(*whole, options.causal)
                ranks = range(layout.parts)
                o = torch.cat([layout.shard(o, rank, 1) for rank in ranks], 1)
                lse = torch.cat([layout.shard(lse, rank, 2) for rank in ranks], 2)
                return LocalTensor({0: o}), LocalTensor({0: lse})
            outputs, lanes = {}, len(inputs[0]) // layout.parts
            for lane in range(lanes):  # a lane: one rank of the axes below
                members = range(lane, len(inputs[0]), lanes)
                steps = [
                    ring.ring_forward(cp, *(x[rank] for x in inputs), **given)
                    for cp, rank in enumerate(members)
                ]
                outputs |= dict(zip(members, run_in_process(steps)))
            ordered = sorted(outputs)
            return tuple(LocalTensor({r: outputs[r][i] for r in ordered}) for i in range(2))


class _LocalLayout:
    """A contiguous layout for any number of ranks, whose `runs` returns those of all of them."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len

    parts = property(lambda self: dist.get_world_size())
    unshard = property(lambda self: SequenceLayout(self._seq_len, self.parts, "contiguous").unshard)

    def runs(self, rank: torch.SymInt) -> list:
        layout = SequenceLayout(self._seq_len, self.parts, "contiguous")
        return [layout.runs(rank) for rank in range(self.parts)]


def _mapped_kernel(q, k, v, options, **more):
    """Run the kernel with the q_runs of every rank."""
    inputs = [x._local_tensors for x in (q, k, v)]
    with maybe_disable_local_tensor_mode():
        outputs = {}
        for rank in sorted(inputs[0]):
            own = options._replace(q_runs=options.q_runs[rank])
            outputs[rank] = block_fwd(*(x[rank] for x in inputs), own, **more)
    return tuple(LocalTensor({rank: out[i] for rank, out in outputs.items()}) for i in range(2))


def _qkv(batch: int = 3, seq: int = 8, heads: int = 4, kv_heads: int = 2) -> Tensors:
    shapes = [(batch, seq, heads, 5), (batch, seq, kv_heads, 5), (batch, seq, kv_heads, 5)]
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def _arguments(strategy, layout, options: AttentionOptions | None = None) -> tuple:
    return (*_qkv(), None, strategy, layout, "cp", None, options or AttentionOptions(), True)


SHARDED = {name: {"cp": S(1)} for name in "qkv"}


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
def test_the_ring_has_the_type_it_states(kind: str) -> None:
    def args(parts: int) -> tuple:
        return _arguments(ring.RING, SequenceLayout(8, parts, kind))

    assert rulecheck(_LocalRing, args(2)).checked == [SHARDED]
    rulecheck(_LocalRing, args(4), SHARDED, mesh={"cp": 4})
    heads = {name: {"cp": S(1), "tp": S(2)} for name in "qkv"}
    rulecheck(_LocalRing, args(2), heads, mesh={"cp": 2, "tp": 2})
    values = {"q": {"cp": S(1), "tp": R}, "k": {"cp": S(1), "tp": R}, "v": {"cp": S(1), "tp": P}}
    rulecheck(_LocalRing, args(2), {k: values[k] for k in "qkv"}, mesh={"cp": 2, "tp": 2})


def test_gather_has_the_type_it_states() -> None:
    args = _arguments(gather.GATHER, _LocalLayout(8))

    def call(shards: Shards, options: AttentionOptions) -> list:
        return [(slice(None), options._replace(q_runs=shards.layout.runs(shards.rank)))]

    with mock.patch.multiple(gather, block_fwd=_mapped_kernel, _kernel_calls=call):
        assert rulecheck(context._ContextAttention, args).checked == [SHARDED]
        rulecheck(context._ContextAttention, args, SHARDED, mesh={"cp": 4})


def test_a_wrong_rule_is_found() -> None:
    class _KeepsRows(_LocalRing):
        """A fault: a rank attends only to its own keys, with the same rule."""

        @staticmethod
        def forward(ctx, q, k, v, sinks, strategy, layout, group, ulysses_group, options, overlap):
            return whole_attention(q, k, v, options.causal)

    args = _arguments(ring.RING, SequenceLayout(8, 2), AttentionOptions(causal=False))
    with pytest.raises(RuleCheckError, match="differs from the reference"):
        rulecheck(_KeepsRows, args)


@pytest.mark.parametrize("strategy", ["ring", "gather", "stream", "ulysses"])
def test_types_on_a_mesh_of_1024_ranks(strategy: str) -> None:
    """Fake groups: sharded q, k, v give sharded o and lse; replicated k is rejected."""
    sizes = {"dp": 16, "cp": 8, "tp": 8}
    dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        placed = {"dp": S(0), "cp": S(1), "tp": S(2)}
        options = {"group": mesh.get_group("cp"), "strategy": strategy, "return_lse": True}
        options["layout"] = SequenceLayout(16, 8)
        with set_current_mesh(mesh):
            q, k, v = (x.requires_grad_() for x in _qkv(1, 2, 8, 1))
            for x in (q, k, v):
                assert_type(x, placed)
            bounds = torch.tensor([0, 5, 16])
            each = [bounds.repeat(*shape) for shape in ((1, 1), (1, 2, 1))]  # per-sample boundaries
            alike = [bounds, *(x.clone() for x in each)]
            for x in (*each, *alike):
                assert_type(x, {"dp": R if any(x is y for y in alike) else S(0), "cp": R, "tp": R})
            same = k.detach().clone()
            assert_type(same, placed | {"cp": R})
            with (
                typecheck(local=False),
                mock.patch.object(context, "check_boundaries"),  # it reads values of a shard
            ):
                for documents in (None, bounds, *each):
                    o, lse = context_attention(q, k, v, documents=documents, **options)
                    assert_type(o, placed)
                    assert_type(lse, {"dp": S(0), "tp": S(1), "cp": S(2)})
                for documents in alike[1:]:
                    with pytest.raises(SpmdTypeError, match="mesh_dp"):
                        context_attention(q, k, v, documents=documents, **options)
                with pytest.raises(SpmdTypeError, match="mismatch on axis mesh_cp"):
                    context_attention(q, same, v, **options)
    finally:
        dist.destroy_process_group()
