"""Parts of the engine alone: the results of a step, the time of updates, the lists it runs, and the
arguments it passes to its parts."""

from __future__ import annotations

import itertools
import math
from unittest import mock
from unittest.mock import call

import pytest
import torch
from refused import check
from test_engine import _data
from threads import on_mesh, run_threads

from warpweave.model import engine as module
from warpweave.model import engine_passes
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.model.engine_passes import make_lists, warm_up
from warpweave.model.engine_update import RankUpdate, StageUpdate, StepResult
from warpweave.parallel.data.optimizer import SGD, AdamW
from warpweave.parallel.data.outer import OuterRule
from warpweave.parallel.mesh import ConnectedMesh, Mesh, single

CONFIG = GPTConfig(19, 6, 4, 8, 2)
UNTIED = GPTConfig(19, 6, 4, 8, 2, tied=False)
NAN, INF = math.nan, math.inf


# ---------------------------------------------------------------- the result of a step


def _result(
    losses: tuple[float, ...], norm: float = 1.0, interrupts: float = 0.0, overflow: bool = False
) -> StepResult:
    named = {name: torch.tensor(x) for name, x in zip(("loss", "z", "aux"), losses)}
    given = torch.tensor(norm), torch.tensor(interrupts), torch.tensor(overflow)
    return StepResult(named, *given, torch.tensor([True, True]))


@pytest.mark.parametrize("losses", [(2.0,), (2.0, 0.5), (2.0, 0.5, 0.25)])
def test_step_loss_is_the_sum_of_losses_and_one_tensor_holds_all_results(losses):
    found = _result(losses, 7.0, 1.5, True)
    assert found.loss == sum(losses)
    assert found.all().tolist() == [sum(losses), 7.0, 1.5, 1.0]
    assert found.all().dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "stops"),
    [
        (((2.0, 1.0),), False),
        (((NAN, 1.0),), True),
        (((2.0, INF),), True),
        (((2.0,), INF), True),
        (((2.0,), NAN), True),
        (((2.0,), INF, 0.0, True), False),  # the loss scale may still shrink
        (((NAN,), INF, 0.0, True), True),
        (((2.0,), 1.0, 0.5), False),  # rank 0 asks for a save
        (((2.0,), 1.0, 1.0), True),
        (((2.0,), 1.0, 3.5), True),
    ],
)
def test_a_step_stops_a_run_if_it_is_not_finite_or_a_rank_was_interrupted(given, stops):
    assert bool(_result(*given).stops) == stops


# ---------------------------------------------------------------- its updates


def _watched(*norms: float) -> mock.Mock:
    """Make a mock of both optimizers and of the losses, whose steps and norms are these."""
    watched, left = mock.Mock(), map(torch.tensor, norms)
    watched.step.side_effect = watched.norm.side_effect = lambda *_: next(left)
    watched.losses.return_value = "pending"
    return watched


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_rank_updates_once_when_the_last_of_its_stages_is_there(stages, outer):
    watched = _watched(2.0, 3.0)
    update = RankUpdate(watched, stages, watched if outer else None)
    halted = torch.ones(())
    for lr in (0.1, None):
        update.begin(lr, halted, watched.losses)
        for _ in range(stages - 1):
            update.arrive()
        assert watched.method_calls == []
        update.arrive()
        before, after = [call.before_update()] * outer, [call.after_update()] * bool(outer and lr)
        own = call.step(0.1, halted) if lr else call.norm()
        expected = [call.sum_partials(), *before, call.losses(), own, *after]
        assert watched.method_calls == expected
        assert (update.losses, float(update.norm)) == ("pending", 2.0 if lr else 3.0)
        assert update.square is None
        watched.reset_mock()


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_asynchronous_stage_updates_per_call_and_averages_squared_norms(updates):
    norms = [3.0, 4.0, 12.0, 5.0, 1.0, 2.0][: 2 * updates]
    watched = _watched(*norms)
    update = StageUpdate(watched, updates)
    for of_step in (norms[:updates], norms[updates:]):
        update.begin(0.5, None, watched.losses)
        for number in range(updates):
            assert not watched.losses.called
            update.arrive()
            assert float(update.norm) == of_step[number]
        expected = [*[call.sum_partials(), call.step(0.5)] * updates, call.losses()]
        assert watched.method_calls == expected
        assert float(update.square) == pytest.approx(sum(n * n for n in of_step) / updates)
        watched.reset_mock()


# ---------------------------------------------------------------- its lists


@pytest.mark.parametrize(("early", "zero"), [*itertools.product((True, False), range(4))])
@pytest.mark.parametrize(
    ("sizes", "sharded", "reduce"),
    [
        (Mesh(pp=2), False, "library"),
        (Mesh(pp=2), False, "ordered"),
        (Mesh(pp=2, dp=2), True, "library"),
        (Mesh(pp=2, cp=2), True, "library"),
        (Mesh(pp=2, dp=2, dp_shard=1), False, "library"),
    ],
)
def test_gradients_leave_early_where_asked_and_where_none_are_freed(
    sizes, sharded, reduce, early, zero
):
    plan = ParallelPlan(zero=zero, early_gradients=early, reduce=reduce, microbatches=3)
    lists = make_lists(CONFIG, plan, sizes.seen_from(0))
    ops = {action.op for actions in lists for action in actions}
    freed = reduce == "ordered" or (sharded and zero >= 2)
    assert ("I" in ops) == (early and not freed)
    assert {"TIE", "UPDATE", "REDUCE"} <= ops


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_tied_embedding_gradients_are_added_only_across_different_ranks(pp, tied):
    config = GPTConfig(19, 6, 4, 8, 2, tied=tied)
    lists = make_lists(config, ParallelPlan(microbatches=2), Mesh(pp=pp).seen_from(0))
    ties = [int(tied and pp > 1 and rank in (0, pp - 1)) for rank in range(pp)]
    assert [sum(a.op == "TIE" for a in row) for row in lists] == ties
    assert [sum(a.op == "UPDATE" for a in row) for row in lists] == [1] * pp


# ---------------------------------------------------------------- steps in advance


def _ahead(mesh: ConnectedMesh, m: int, ahead: int) -> None:
    """Run steps until the pipeline is full, two more, and one too many; repeat after a load."""
    plan = ParallelPlan(schedule="pipedream", microbatches=m)
    engine = Engine(UNTIED, mesh, plan, clip=None, rule=SGD(0.0))
    tokens = torch.arange(m * 6).view(m, 1, 6) % 19
    data, losses = (tokens, tokens, tokens[..., 0]), []
    weights = {record.name: x.clone() for record, x, _ in engine.read("param")}

    def lacks(got: int) -> None:
        check(
            lambda: engine.step(*data, lr=0.1),
            rf"needs {(ahead + 1) * m} queued micro-batches, got {got}; call Engine.feed with the "
            rf"data of {ahead} steps? before the first step and after a load$",
        )

    for _ in range(2):
        for fed in range(1, ahead + 1):
            lacks(fed * m)
        losses.append([float(engine.step(*data, lr=0.1).loss) for _ in range(2)])
        engine.feed(*data)
        lacks((ahead + 2) * m)
        engine.load("param", lambda record: weights[record.name])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


@pytest.mark.parametrize(("pp", "m", "ahead"), [(1, 2, 0), (2, 3, 1), (3, 3, 1)])
def test_a_step_needs_its_data_and_that_of_the_steps_ahead_and_no_more(pp, m, ahead):
    on_mesh(Mesh(pp=pp), _ahead, m, ahead)


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_each_stage_keeps_the_versions_that_its_own_backwards_need(pp):
    """The last stage's weights are never older than its gradient."""
    plan = ParallelPlan(schedule="pipedream", microbatches=pp)

    def run(mesh: ConnectedMesh) -> tuple[tuple[int, ...], set[int]]:
        engine = Engine(UNTIED, mesh, plan, clip=None)
        return engine.staleness, {unit.parameters.kept for unit in engine.units}

    found = on_mesh(Mesh(pp=pp), run)
    staleness = tuple(range(pp - 1, -1, -1))
    assert found == [(staleness, {pp - rank}) for rank in range(pp)]


def test_a_warm_up_runs_each_stage_once_on_zeros_and_leaves_no_gradient():
    scale, stages = torch.tensor(8.0), {}
    for number in (0, 2, 5):
        y = None if number == 5 else torch.full((2, 3), 7.0)
        stage = stages[number] = mock.Mock(units=[mock.Mock(), mock.Mock()])
        stage.message, stage.forward.return_value = ((4, 3), torch.float64, "cpu"), y
    warm_up(stages, "batch", scale)
    for number, stage in stages.items():
        stage.begin.assert_called_once_with(["batch"], scale)
        (mb, x), (of, dy) = stage.forward.call_args.args, stage.backward.call_args.args
        assert mb == of == 0
        assert (x is None) == (number == 0)
        assert x is None or torch.equal(x, torch.zeros(4, 3, dtype=torch.float64))
        assert (dy is None) == (number == 5)
        assert dy is None or torch.equal(dy, torch.zeros(2, 3))
        stage.reduce.assert_called_once_with()
        for unit in stage.units:
            unit.gradients.clear.assert_called_once_with()


# ---------------------------------------------------------------- parts of an engine


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_an_engine_hands_its_options_on_to_its_parts(schedule):
    plan = ParallelPlan(schedule=schedule, microbatches=2)
    names = "choose", "GPT", "ZeroOptimizer", "AdamW"
    watched = {name: mock.Mock(wraps=getattr(module, name)) for name in names}
    spy = mock.patch.object(engine_passes, "Distributed", wraps=engine_passes.Distributed)
    with mock.patch.multiple(module, **watched), spy as transport:
        Engine(UNTIED, single(), plan, impl="torch", timeout=7.0, clip=None, seed=3)
    assert [each.kwargs["timeout"] for each in transport.call_args_list] == [7.0]
    assert watched["choose"].call_args.args[0] == "torch"
    for name in ("GPT", "ZeroOptimizer", "AdamW"):
        assert watched[name].call_args.kwargs["impl"] == "torch", name
    own = watched["ZeroOptimizer"].call_args.kwargs
    assert (own["clip"], own["apart"]) == (None, schedule == "pipedream")


@pytest.mark.parametrize("outer", [None, OuterRule(2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_plan_is_asked_about_clip_fp16_and_an_outer_optimizer_also_of_one(
    monkeypatch, dtype, outer
):
    seen = []
    monkeypatch.setattr(ParallelPlan, "check_update", lambda plan, *given: seen.append(given))
    for clip in (None, 0.5):
        Engine(CONFIG, single(), dtype=dtype, clip=clip, outer=outer)
    assert seen == [(clip, dtype == torch.float16, outer is not None) for clip in (None, 0.5)]


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda:0")])
def test_fused_overlap_beside_stages_is_refused_on_any_gpu(device):
    plan, mesh = ParallelPlan(overlap="fused", microbatches=2), Mesh(pp=2, tp=2).seen_from(0)
    words = "^overlap 'fused' with pp = 2 may hang on a GPU: .*need$"
    check(lambda: Engine(CONFIG, mesh, plan, device=device), words)


# norms of two replicas, whether their loss scales are to blame, the mean, and the verdict
SEVERAL = [
    ((3.0, 5.0), (False, False), 4.0, False),
    ((INF, 5.0), (True, False), INF, True),
    ((INF, 5.0), (False, False), INF, False),
    ((INF, INF), (True, True), INF, True),
    ((INF, NAN), (True, False), NAN, False),
    ((NAN, 1.0), (True, False), NAN, True),
]


def _means(mesh: ConnectedMesh) -> list[tuple[float, bool]]:
    engine = Engine(CONFIG, mesh, dtype=torch.float64, outer=OuterRule(2))
    at, found = mesh.index("outer"), []
    for norms, blames, *_ in SEVERAL:
        norm = torch.tensor(norms[at], dtype=torch.float64)
        mean, overflow = engine._of_replicas(norm, torch.tensor(blames[at]))
        found.append((float(mean), bool(overflow)))
    return found


def test_replica_norm_is_a_mean_and_overflows_only_because_of_loss_scales():
    for found in on_mesh(Mesh(outer=2, dp=2), _means):
        for (mean, overflow), (*_, expected, blamed) in zip(found, SEVERAL, strict=True):
            assert mean == pytest.approx(expected, nan_ok=True)
            assert overflow == blamed


BAD = [  # ranks whose losses are not finite, ranks whose gradients are not, and the ranks named
    ((), (), []),
    ((), (1, 3), [1, 3]),
    ((2,), (0, 1, 2, 3), [2]),
    ((0, 3), (), [0, 3]),
]


def _named(mesh: ConnectedMesh) -> list[list[int]]:
    engine, found = Engine(CONFIG, mesh), []
    for losses, gradients, _ in BAD:
        own = torch.tensor([mesh.rank not in losses, mesh.rank not in gradients])
        last = torch.zeros(())
        step = StepResult({"loss": last}, last, last, last.bool(), own)
        found.append(engine.not_finite_ranks(step))
        engine.finite, engine.optimizer.finite = own[0], own[1].float()
        assert engine.not_finite_ranks() == found[-1]
    return found


def test_ranks_with_bad_losses_are_named_before_ranks_with_bad_gradients():
    for found in on_mesh(Mesh(dp=2, tp=2), _named):
        assert found == [named for *_, named in BAD]


def _summed(mesh: ConnectedMesh) -> list[float]:
    """Sum two micro-batches on each rank, whose losses identify their replica."""
    engine = Engine(UNTIED, mesh, dtype=torch.float64)
    last = mesh.index("pp") == mesh.size("pp") - 1
    own = [{"loss": torch.tensor(x + mesh.index("dp"))} for x in (0.25, 2.0) if last]
    square = torch.tensor(10.0 + mesh.index("pp"))
    given = (0.5 * (mesh.rank == 0), square), (1.0,)
    found = [engine._start_global_losses(own, *more).wait() for more in given]
    assert {x.dtype for x in found} == {torch.float64}
    return torch.cat(found).tolist()


def test_losses_are_summed_over_replicas_and_norms_over_stages():
    loss = 0.25 + 2.0 + 1.25 + 3.0
    for found in on_mesh(Mesh(dp=2, pp=2, tp=2), _summed):
        assert found == [loss, 10.0 + 11.0, 0.5, loss, 8.0]


@pytest.mark.parametrize("kind", ["param", "version1", "exp_avg"])
def test_loaded_weights_make_replicas_meet_anew_and_forget_what_is_under_way(kind):
    """Older weight versions are discarded as well; loading moments does neither."""
    engine = Engine(CONFIG, single(), rule=AdamW(), outer=OuterRule(2))
    resets = mock.patch.object(engine.outer, "reset")
    with resets as reset, mock.patch.object(engine.passes, "restart") as restart:
        state = {record.name: tensor for record, tensor, _ in engine.read(kind)}
        engine.load(kind, lambda record: state[record.name])
    assert reset.call_count == (kind == "param")
    assert restart.call_count == (kind != "exp_avg")


def test_text_and_evaluation_are_of_the_weights_that_replicas_have_in_common():
    engine, inside = Engine(CONFIG, single(), outer=OuterRule(2)), mock.MagicMock()
    inside.forward = mock.Mock(wraps=engine._forward)
    with (
        mock.patch.object(engine.outer, "global_weights", inside),
        mock.patch.object(engine, "_forward", inside.forward),
    ):
        for run, forwards in (
            (lambda: engine.generate(torch.tensor([1, 2]), 2), 2),
            (lambda: engine.evaluate(*torch.zeros(2, 3, 1, 6, dtype=torch.int64)), 3),
        ):
            run()
            names = [name for name, *_ in inside.mock_calls]
            assert names == ["", "().__enter__", *["forward"] * forwards, "().__exit__"]
            inside.reset_mock()


# ---------------------------------------------------------------- several stages per rank

DEEP = GPTConfig(37, 16, 7, 16, 4, hidden=20, dropout=0.1)
SEVERAL_STAGES = {  # per rank: schedule, chunks, mesh
    "interleaved": ("interleaved", 3, Mesh(pp=2)),
    "folded": ("zb-v", 2, Mesh(pp=3)),  # the first rank has the last stage
    "all on each of two replicas": ("interleaved", 3, Mesh(dp=2)),
    "alone": ("1f1b", 1, Mesh()),
}


def _on_stages(rank: int, name: str) -> dict:
    schedule, chunks, sizes = SEVERAL_STAGES[name]
    mesh = sizes.connect()
    plan = ParallelPlan(schedule=schedule, chunks=chunks, microbatches=6)
    engine = Engine(DEEP, mesh, plan, dtype=torch.float64, seed=3)
    tokens, labels, ids = (x[:, :1] for x in _data(5, single(), 8))
    held_out = float(engine.evaluate(tokens, labels))
    result = engine.step(tokens[:6], labels[:6], ids[:6], lr=0.02)
    texts = [
        engine.generate(torch.tensor(prompt), 4, temperature=t, seed=5).tolist()
        for prompt, t in (([1], 0.8), ([30, 3], 0.0))
    ]
    return {"numbers": [held_out, float(result.loss), float(result.norm)], "texts": texts}


@pytest.mark.parametrize("name", [*SEVERAL_STAGES][:-1])
def test_ranks_with_several_stages_evaluate_and_write_as_one_device(name):
    """This holds for any rank with the last stage, and for any neighbors."""
    (alone,) = run_threads(1, _on_stages, "alone")
    for story in run_threads(SEVERAL_STAGES[name][2].world, _on_stages, name):
        assert story["numbers"] == pytest.approx(alone["numbers"], rel=1e-12)
        assert story["texts"] == alone["texts"]
