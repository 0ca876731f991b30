"""PipeDream and PipeDream-2BW: the lists, the passes that they repeat, and training with them.

The truth is the delayed rule in plain autograd: every stage's gradient at the versions of all
stages given in the papers, from a history of weights that is independent of schedules.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from refused import check, one_line
from test_train import _trainer
from threads import run_threads
from torch import Tensor
from torch.func import functional_call

from warpweave.checkpoint import CheckpointError, open_latest
from warpweave.kernels.runtime.wgrad import WeightGradients, accumulate
from warpweave.launch.interrupt import Interrupt
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.model.gpt import GPT
from warpweave.parallel.collectives import Pending
from warpweave.parallel.data.optimizer import SGD, AdamW, Muon, NAdamW, Piece
from warpweave.parallel.data.outer import OuterRule
from warpweave.parallel.data.parameters import FlatParameters
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.parallel.schedule import (
    FAMILIES,
    leave_open,
    pipedream,
    pipedream_2bw,
    send_first,
    split_backward,
    validate,
    with_comm,
    with_reduce,
)
from warpweave.parallel.simulate import simulate
from warpweave.plan.memory import TrainingStep, estimate
from warpweave.train.options import GPTOverrides, TrainConfig

NAMES = ("pipedream", "pipedream-vs", "pipedream-2bw")


def _reads(lists, s: int) -> list[int]:
    """Return the versions that the forwards of stage s read, in the order of micro-batches."""
    return [a.ver for a in sorted(a for a in lists[s] if a.op == "F")]


def _drawn(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def test_the_drawing_is_the_papers() -> None:
    drawn = """
        F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  F4 B2 -  .  B3 -  .  B4 -
        .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  F4 B3 -  .  B4 -  .  .
        .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  F4 B4 -  .  .  .  .
    """
    for lists in (pipedream(3, 5), pipedream_2bw(3, 5, 1)):
        assert _drawn(simulate(lists, {"F": 1, "B": 2}).draw()) == _drawn(drawn)


def test_forwards_read_the_versions_of_the_papers() -> None:
    assert [_reads(pipedream(3, 7), s) for s in range(3)] == [
        [0, 0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6],
    ]  # fmt: skip
    for s in range(3):
        assert _reads(pipedream(3, 7, vertical=True), s) == [0, 0, 0, 1, 2, 3, 4]
        assert _reads(pipedream_2bw(3, 3, 4), s) == [0] * 6 + [1] * 3 + [2] * 3
    updates = [[a.ver for a in row if a.op == "UPDATE"] for row in pipedream_2bw(2, 3, 4)]
    assert updates == [[1, 2, 3, 4]] * 2
    check(lambda: pipedream_2bw(3, 2, 4), "needs m >= p micro-batches per update, got m=2 p=3")
    check(lambda: pipedream(2, 0), r"PipeDream needs p >= 1 .* got p=2 m=0")


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_runs_repeat_a_pass_and_keep_as_many_versions_as_the_papers(name: str, p: int) -> None:
    for m in {1, p, p + 1} if p < 8 else {p + 1}:
        if name == "pipedream-2bw" and m < p:
            continue
        lists = FAMILIES[name].make(p, m)
        for variant in (lists, split_backward(lists), send_first(lists)):
            run = leave_open(with_reduce(variant), m)
            assert run.updates == (1 if name == "pipedream-2bw" else m)
            assert run.ahead == -(-(p - 1) // m)
            delays = tuple(_delay(name, p, s) for s in range(p))
            assert run.staleness == delays
            done = [a for row in run.steady for a in row if a.op in ("B", "W")]
            assert len(done) == p * m == len({a._replace(ver=0) for a in done})
            begun = [len([a for a in row if a.op == "F"]) for row in run.fill]
            assert begun == [p - 1 - s for s in range(p)]
        versions = simulate(lists, {"F": 1, "B": 2}).versions
        assert versions == tuple(delay + 1 for delay in delays)


def test_pipedream_idles_at_the_ends_of_the_run_only() -> None:
    """(p-1)(F+B) in total, where 1F1B has that in every step."""
    for p, n in ((2, 9), (4, 40)):
        timeline = simulate(pipedream(p, n), {"F": 1, "B": 2})
        assert set(timeline.idle) == {3 * (p - 1)}
        assert timeline.activations == tuple(p - s for s in range(p))


def test_wrong_versions_are_refused() -> None:
    def changed(ver: int, *cells: str):
        return [[a._replace(ver=ver) if str(a) in cells else a for a in row] for row in lists]

    lists, once = pipedream(2, 6), partial(validate, staleness=1)
    once(with_comm(lists))
    words = "applies the gradient of 0B1, which is 1 weight version old; the limit "
    check(lambda: validate(lists), rf"{words}\(staleness\) is 0$")
    words = "0F3@4 reads version 4, but the newest version is 2"
    check(lambda: once(changed(4, "0F3@2", "0B3@2")), words)
    words = "0B3@1 uses version 1 of the weights, but the F of the same micro-batch read version 2"
    check(lambda: once(changed(1, "0B3@2")), words)
    words = "0UPDATE@9 produces version 9 of the weights right after version 2; versions must"
    check(lambda: once(changed(9, "0UPDATE@3")), words)
    split = split_backward(pipedream_2bw(2, 3, 2))
    dropped = [[a for a in row if str(a) != "1W1"] for row in split]
    check(lambda: once(dropped), "stage 1 micro-batch 1 has 1 F, 0 B, 1 I and 0 W")
    words = r"none of the 2 passes \(3 micro-batches each\) is the same as the next one"
    check(lambda: leave_open(pipedream(2, 6), 3), words)


# ----------------------------------------------------------------------------- training


CONFIG = GPTConfig(
    vocab_size=23, seq_len=8, layers=4, width=16, heads=2, hidden=20, tied=False, dropout=0.1
)
SIZE, RATES = 2, (0.01, 0.004, 0.02)
RULES = {
    "adamw": AdamW(eps=1e-2),
    "muon": Muon(rest=AdamW(eps=1e-2)),
    "sgd": SGD(0.9, 0.1),
    "nadamw": NAdamW((0.99, 0.999), eps=1e-2),
}


def _data(step: int, m: int, dp: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and labels [dp, m, SIZE, S] and sample ids [dp, m, SIZE] of a step."""
    shape = (dp, m, SIZE, CONFIG.seq_len)
    draw = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(0, CONFIG.vocab_size, shape, generator=draw) for _ in "xy")
    labels[torch.rand(shape, generator=draw) < 0.3] = -100
    count = dp * m * SIZE
    return tokens, labels, step * count + torch.arange(count).view(shape[:3])


def _mine(mesh: ConnectedMesh, m: int, step: int) -> list[Tensor]:
    """Return the part of this data rank."""
    return [x[mesh.index("dp")] for x in _data(step, m, mesh.size("dp"))]


def _delay(name: str, p: int, s: int) -> int:
    return {"pipedream": p - 1 - s, "pipedream-vs": p - 1, "pipedream-2bw": 1, "1f1b": 0}[name]


def _stage(name: str, p: int) -> int:
    """Return the stage of a parameter."""
    kind, number, *_ = [*name.split("."), ""]
    if kind == "blocks":
        return next(s for s in range(p) if int(number) in CONFIG.blocks_of(s, p))
    return 0 if kind in ("embedding", "positions") else p - 1


def _rule_step(rule, record, w: Tensor, grad: Tensor, moments: dict, lr: float, t: int) -> Tensor:
    """Return a parameter after a step, by the library's rule for one element or matrix."""
    scale, skip = torch.ones((), dtype=w.dtype), torch.zeros((), dtype=w.dtype)
    matrix = isinstance(rule, Muon) and bool(record.matrices)
    names = rule.matrix_moments if matrix else rule.moments
    for name in names:
        moments.setdefault(name, torch.zeros_like(w))
    if matrix:
        u = rule.nesterov(grad, moments[names[0]], scale, skip)
        grad = record.join([rule.orthogonalize(part) for part in record.split(u)])
    w = w.clone()
    flat = {name: moments[name].view(-1) for name in names}
    step = rule.begin(lr, torch.tensor(t + 1.0, dtype=torch.float64))
    piece = Piece(w.view(-1), grad.reshape(-1), flat, matrix, None, record.decay)
    rule.update(piece, step, scale, skip)
    return w


@functools.cache
def _delayed(
    name: str, p: int, m: int, *, rule: str = "adamw", dp: int = 1, dtype=torch.float64
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of every step, and the final weights, by the delayed rule on one device.

    Update t of stage s uses the gradient, at the weights of all stages of their delays' updates
    before t, of one micro-batch (PipeDream), or of the m of a step (2BW).
    """
    gpt = GPT(CONFIG, seed=3, dtype=dtype)
    records, each = gpt.parameter_records(), m if name in ("pipedream-2bw", "1f1b") else 1
    history = [{n: w.detach().clone() for n, w in gpt.named_parameters()}]
    moments: dict[str, dict] = {n: {} for n in history[0]}
    losses = []
    for step, lr in enumerate(RATES):
        tokens, labels, ids = _data(step, m, dp)
        of_step = []
        for part in (slice(at, at + each) for at in range(0, m, each)):
            t, total = len(history) - 1, {}
            valid = (labels[:, part] != -100).sum().clamp(min=1).to(dtype)
            of_update = []
            for r in range(dp):
                at = {n: max(0, t - _delay(name, p, _stage(n, p))) for n in history[0]}
                old = {n: history[at[n]][n].clone().requires_grad_() for n in history[0]}
                share, sums = [], {w: torch.empty_like(w) for w in old.values()}
                for mb in range(part.start, part.stop):
                    batch = gpt.micro_batch(
                        tokens[r, mb], labels[r, mb], valid, sample_ids=ids[r, mb], seed=step
                    )
                    named = {f"gpt.{n}": w for n, w in old.items()}
                    loss = functional_call(_Loss(gpt), named, batch)
                    with accumulate(WeightGradients(sums)):  # accumulated, as by stages
                        loss.backward()
                    share.append(loss.detach())
                of_update.append(torch.stack(share))
                for n, w in old.items():
                    total[n] = w.grad if n not in total else total[n] + w.grad
            of_step.append(torch.stack(of_update))  # [dp, each]
            new = {}
            for n, w in history[-1].items():
                new[n] = _rule_step(RULES[rule], records[n], w, total[n], moments[n], lr, t)
            history.append(new)
        of_rank = torch.cat(of_step, 1)
        losses.append(float(sum(row.sum() for row in of_rank) / (m // each)))
    return losses, history[-1]


class _Loss(torch.nn.Module):
    """The whole model's share of the loss of a micro-batch."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, batch) -> Tensor:
        x = self.gpt.embed(None, batch)
        for block in self.gpt.blocks.values():
            x = block(x, batch.context)
        return self.gpt.head_loss(x, batch)


def _engine(mesh, name: str, m: int, *, rule: str = "adamw", dtype=torch.float64, **plan) -> Engine:
    return Engine(
        CONFIG, mesh, ParallelPlan(schedule=name, microbatches=m, **plan),
        micro_batch_size=SIZE, dtype=dtype, seed=3, rule=RULES[rule], clip=None,
    )  # fmt: skip


def _train(rank: int, sizes: Mesh, name: str, m: int, **options):
    mesh = sizes.connect()
    engine = _engine(mesh, name, m, **options)
    engine._cold = sizes.pp == 3  # as on a GPU: stages run once before the first message
    mine, ahead = partial(_mine, mesh, m), engine.passes.ahead
    for step in range(ahead):
        engine.feed(*mine(step), key=step)
    results = [
        engine.step(*mine(step + ahead), lr=lr, key=step + ahead) for step, lr in enumerate(RATES)
    ]
    kept = {unit.parameters.kept for unit in engine.units}
    weights = {record.name: w.clone() for record, w, _ in engine.read("param")}
    return [float(r.loss) for r in results], weights, kept


def _weight_bytes(rank: int, sizes: Mesh, name: str, m: int) -> int:
    """Return the bytes of all versions of a stage's parameters, as a run holds them."""
    engine = _engine(sizes.connect(), name, m)
    held = ((w, 1 + len(u.parameters._older)) for u in engine.units for _, w in u.params)
    return sum(w.nbytes * versions for w, versions in held)


@pytest.mark.parametrize("name", NAMES)
def test_the_estimate_of_memory_counts_the_versions(name: str) -> None:
    plan = ParallelPlan(schedule=name, microbatches=3)
    told = estimate(TrainingStep(CONFIG, Mesh(pp=3), plan, SIZE, "fp64"))
    held = run_threads(3, _weight_bytes, Mesh(pp=3), name, 3)
    assert [rank.weights for rank in told] == held


def _trained(sizes: Mesh, name: str, m: int, **options):
    """Return losses, weights of all stages, and the number of versions each stage keeps."""
    ranks = run_threads(sizes.world, lambda rank: _train(rank, sizes, name, m, **options))
    assert all(losses == ranks[0][0] for losses, _, _ in ranks)
    weights = {n: w for _, of_rank, _ in ranks for n, w in of_rank.items()}
    return ranks[0][0], weights, [kept for _, _, kept in ranks[:: sizes.dp]]


CASES = {
    "p1": ("pipedream-2bw", Mesh(), 3, {}),
    "p2, a look-ahead": ("pipedream", Mesh(pp=2), 2, {"rule": "nadamw"}),
    "p3, fewer micro-batches than stages": ("pipedream", Mesh(pp=3), 1, {"rule": "sgd"}),
    "p4": ("pipedream", Mesh(pp=4), 3, {"recompute": "full"}),
    "p3 vertical sync": ("pipedream-vs", Mesh(pp=3), 2, {}),
    "p4 2bw": ("pipedream-2bw", Mesh(pp=4), 4, {"recompute": "full"}),
    "p2 2bw muon": ("pipedream-2bw", Mesh(pp=2), 2, {"rule": "muon"}),
    "p2 dp2 zero 1": ("pipedream", Mesh(pp=2, dp=2), 2, {"zero": 1}),
    "p2 dp2 zero 1 muon": ("pipedream", Mesh(pp=2, dp=2), 2,
                           {"zero": 1, "rule": "muon", "recompute": "full"}),
    "p2 dp2 zero 2": ("pipedream", Mesh(pp=2, dp=2), 2, {"zero": 2}),
    "p2 dp2 2bw zero 1": ("pipedream-2bw", Mesh(pp=2, dp=2), 3, {"zero": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_delayed_rule_to_the_bit(case: str) -> None:
    name, sizes, m, options = CASES[case]
    losses, weights, kept = _trained(sizes, name, m, **options)
    rule = options.get("rule", "adamw")
    expected, final = _delayed(name, sizes.pp, m, rule=rule, dp=sizes.dp)
    assert kept == [{1 + _delay(name, sizes.pp, s)} for s in range(sizes.pp)]
    assert losses == expected
    assert weights.keys() == final.keys()
    assert all(torch.equal(weights[n], w) for n, w in final.items())


def test_the_delays_and_the_versions_show() -> None:
    """Each rule's run differs from the second step on; a wrong backward version is detected."""
    runs = [_delayed(name, 2, 2)[0] for name in ("1f1b", *NAMES)]
    assert all(abs(a[-1] - b[-1]) > 1e-6 for i, a in enumerate(runs) for b in runs[:i])
    show = FlatParameters.show
    for age in (0, 1):  # of all weights, for any version requested
        with mock.patch.object(FlatParameters, "show", lambda self, _, age=age: show(self, age)):
            try:
                losses, _, _ = _trained(Mesh(pp=2), "pipedream", 2)
            except IndexError:  # the last stage keeps no older version
                continue
        assert losses != _delayed("pipedream", 2, 2)[0]


def _resumed(rank: int, sizes: Mesh, name: str, m: int) -> tuple[list[float], dict[str, Tensor]]:
    """Run two steps with one engine, and the others with a second one that loads its state."""
    mesh = sizes.connect()
    mine = partial(_mine, mesh, m)

    def run(engine: Engine, steps: range) -> list[float]:
        ahead = engine.passes.ahead
        for step in range(steps.start, steps.start + ahead):
            engine.feed(*mine(step), key=step)
        found = []
        for step in steps:
            given = mine(step + ahead)
            found.append(float(engine.step(*given, lr=RATES[step], key=step + ahead).loss))
            engine.evaluate(*given[:2])  # changes nothing
        return found

    first, second = (_engine(mesh, name, m) for _ in "ab")
    losses = run(first, range(2))
    run(second, range(1))  # undone by loading
    older = [f"version{age}" for age in range(1, 1 + max(first.staleness))]
    for kind in ("param", *older, "exp_avg", "exp_avg_sq"):
        state = {record.name: tensor.clone() for record, tensor, _ in first.read(kind)}
        second.load(kind, lambda record, state=state: state[record.name])
    second.optimizer.load_state(first.optimizer.state())
    losses += run(second, range(2, len(RATES)))
    return losses, {record.name: w.clone() for record, w, _ in second.read("param")}


@pytest.mark.parametrize(
    ("name", "sizes", "m"),
    [("pipedream", Mesh(pp=3), 3), ("pipedream-2bw", Mesh(pp=2, dp=2), 3)],  # with ZeRO 1
    ids=["pipedream", "2bw"],
)
def test_a_run_that_was_taken_up_again_is_the_same_run_to_the_bit(name, sizes, m) -> None:
    ranks = run_threads(sizes.world, _resumed, sizes, name, m)
    losses, weights = _delayed(name, sizes.pp, m, rule="adamw", dp=sizes.dp)
    assert ranks[0][0] == losses
    found = {n: w for _, of_rank in ranks for n, w in of_rank.items()}
    assert all(torch.equal(found[n], w) for n, w in weights.items())


def test_no_rank_waits_for_the_losses_of_another_before_its_next_step() -> None:
    """The last stage begins its second step while the first holds back its losses of the first."""

    def run(rank: int) -> None:
        engine = _engine(Mesh(pp=3).connect(), "pipedream", 3)
        send = engine._start_global_losses

        def held(*losses):
            if rank == 0 and not results:
                dist.irecv(torch.empty(1), group_src=2).wait()
            return send(*losses)

        engine._start_global_losses = held  # type: ignore[method-assign]
        engine.feed(*(x[0] for x in _data(0, 3)))
        results: list[Pending] = []
        for step in range(2):
            if (rank, step) == (2, 1):
                dist.isend(torch.ones(1), group_dst=0)
            results.append(engine.begin(*(x[0] for x in _data(step + 1, 3)), lr=0.01))
        assert all(result.wait().loss.isfinite() for result in results)

    run_threads(3, run)


def test_steps_need_the_data_of_those_that_have_begun() -> None:
    def wrong(rank: int) -> None:
        engine = _engine(Mesh(pp=2).connect(), "pipedream", 2)
        given = [x[0] for x in _data(0, 2)]
        step = partial(engine.step, *given)
        check(partial(step, lr=0.1), "needs 4 queued micro-batches, got 2")
        for more in ({"lr": None}, {"lr": 0.1, "halted": torch.ones(())}):
            check(partial(step, **more), "`lr` is required and `halted` must be None")

    run_threads(2, wrong)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"clip": 1.0}, "clip = 1.0, which uses the gradient norm over all stages, because "),
        ({"dtype": torch.float16}, "dtype = fp16, whose overflow skips the update of all stages"),
        ({"outer": OuterRule(2)}, "an outer optimizer, which replaces the weights of all stages"),
        ({"zero": 3}, "zero must be 0 to 2 with schedule pipedream: zero = 3 shards weights, but"),
        ({"reduce": "ordered"}, "reduce = 'ordered' does not support asynchronous schedules, got"),
        ({"tied": True, "pp": 3}, "tied must be False .* would arrive 2 micro-batches apart"),
        ({"name": "pipedream-2bw", "pp": 3}, "at least 3 with schedule pipedream-2bw on 3 ranks"),
    ],
)
def test_what_needs_all_stages_at_once_is_refused(what: dict, words: str) -> None:
    engine = {name: what[name] for name in ("clip", "dtype", "outer") if name in what}
    own = {name: what[name] for name in ("zero", "reduce") if name in what}
    plan = ParallelPlan(schedule=what.get("name", "pipedream"), microbatches=2, **own)
    config = dataclasses.replace(CONFIG, tied=what.get("tied", False))
    with pytest.raises(ValueError, match=words) as error:
        Engine(config, Mesh(pp=what.get("pp", 1)).seen_from(0), plan, **{"clip": None} | engine)
    one_line(error)


# ----------------------------------------------------------------------------- the trainer


def _config(out, **changes) -> TrainConfig:
    own = {"plan": ParallelPlan(schedule="pipedream-2bw", microbatches=2), "clip": 0.0}
    small = GPTOverrides(layers=1, width=16, heads=2, seq_len=16, tied=False)
    text = out.parent / "text"
    text.write_bytes(b" ".join(b"%d" % (i * i % 977) for i in range(1500)))
    rest = {"steps": 6, "batch": 1, "eval_every": 0, "eval_batches": 1, "sample": 0, "warmup": 2}
    return TrainConfig(
        **{"overrides": small, "out": out, "data": text, "save_every": 3} | own | rest | changes
    )


def _rows(config: TrainConfig) -> list[dict]:
    lines = (config.out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "per_sec" not in k} for line in lines]


def test_the_trainer_goes_on_from_versions_and_from_an_interrupt(tmp_path) -> None:
    """A single rank, where 2BW has its delay of one update; the metrics contain it."""
    config = _config(tmp_path / "whole")
    config.check()
    _trainer(config).run()
    trained = [row for row in _rows(config) if "loss" in row]
    assert [row["staleness"] for row in trained] == [[1]] * 6

    interrupt = Interrupt()
    stopped = dataclasses.replace(config, out=tmp_path / "stopped")
    trainer = _trainer(stopped, interrupt=interrupt)
    begin = trainer._begin

    def interrupted(step, *before):
        interrupt.number = 15 if step == 3 else interrupt.number
        return begin(step, *before)

    trainer._begin = interrupted
    # The interrupt is noticed in step 4; the next one has begun, and changed the weights.
    assert trainer.run()["steps"] == 5
    _trainer(dataclasses.replace(stopped, resume=True)).run()
    last = [open_latest(c.out / "checkpoints") for c in (config, stopped)]
    assert last[0].names == last[1].names
    assert any(name.startswith("version1/") for name in last[0].names)
    assert all(torch.equal(last[0].tensor(n), last[1].tensor(n)) for n in last[0].names)
    assert [r for r in _rows(stopped) if "loss" in r] == trained

    other = _config(stopped.out, resume=True, plan=ParallelPlan(microbatches=2))
    with pytest.raises(
        CheckpointError, match=r"schedule .*pipedream-2bw.*, but this run uses 1f1b; "
    ):
        _trainer(other)
    plain = _config(tmp_path / "plain", plan=ParallelPlan(microbatches=2), steps=3)
    _trainer(plain).run()
    shutil.copytree(plain.out, tmp_path / "on")
    trainer = _trainer(_config(tmp_path / "on", resume=True))
    newest, older = (  # the checkpoint's weights become both
        {r.name: w.clone() for r, w, _ in trainer.engine.read(k)} for k in ("param", "version1")
    )
    assert newest.keys() == older.keys()
    assert all(torch.equal(newest[n], older[n]) for n in newest)
    trainer.run()
    wrong = _config(tmp_path / "x", clip=1.0)
    check(wrong.check, "clip = 1.0, which uses the gradient norm over all")


def test_a_timeline_is_written_or_missed(tmp_path, capsys) -> None:
    """This includes asynchronous schedules. An impossible folder is an error before training."""
    config = _config(tmp_path / "run", steps=2, timeline=tmp_path / "new" / "t.json")
    config.check()
    _trainer(config).run()
    assert json.loads(config.timeline.read_text())["traceEvents"]
    assert "was not written" not in capsys.readouterr().err
    _trainer(dataclasses.replace(config, resume=True)).run()
    words = "t.json was not written: this process did not run the last step, "
    assert f"{words}2" in capsys.readouterr().err
    with pytest.raises(OSError, match="text"):
        dataclasses.replace(config, timeline=tmp_path / "text" / "t.json").check()
    interrupt = Interrupt()
    config = _config(tmp_path / "b", steps=9, timeline=config.timeline)
    stopped = _trainer(config, interrupt=interrupt)
    interrupt.number = 15  # some steps are trained by then, but not the last
    assert 0 < stopped.run()["steps"] < 9
    assert f"{words}9" in capsys.readouterr().err


def test_a_save_in_time_waits_for_the_step_that_has_begun(tmp_path) -> None:
    """That step has changed the weights."""
    trainer = _trainer(_config(tmp_path / "run", save_every=0, save_minutes=1e-9, steps=4))
    save, found = trainer.save, []

    def saves() -> None:
        found.append((trainer.step, trainer._begun is None))
        save()

    trainer.save = saves
    trainer.run()
    assert found[0] == (2, True)
    assert {waited for _, waited in found} == {True}
