"""The proof's messages and numbers: a layout's line and command, rows at their limit, the error
that counts, the layouts an option requests, and the run that all must reproduce."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shlex
from types import SimpleNamespace

import pytest
import torch
import tyro

from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.parallel.mesh import Mesh, single
from warpweave.prove import LIMITS, Errors, Layout, ProveConfig, command, expected, options, proof
from warpweave.prove import truth as truths
from warpweave.prove.layouts import Sizes, all_layouts, draw
from warpweave.prove.typecheck import typecheck

BASE = Layout(Mesh(dp=4, tp=2, cp=4), zero=1, dtype="fp32")
# Another value of every field that a layout's command has.
OTHER = {
    "sequence_parallel": True, "zero": 2, "schedule": "gpipe", "style": "llama", "tied": False,
    "recompute": "full", "strategy": "gather", "layout": "striped", "overlap": "chunked",
    "dtype": "bf16", "impl": "triton", "packed": True, "count": 1, "device": "cuda",
    "optimizer": "sgd", "reduce": "ordered",
}  # fmt: skip
MESHES = {
    "dp": Mesh(dp=2, tp=2, cp=4), "cp": Mesh(dp=4, tp=2, cp=2), "tp": Mesh(dp=4, tp=4, cp=4),
    "pp": Mesh(dp=4, tp=2, cp=4, pp=2), "ulysses": Mesh(dp=4, tp=2, cp=4, ulysses=2),
    "dp_shard": Mesh(dp=4, tp=2, cp=4, dp_shard=2), "outer": Mesh(dp=4, tp=2, cp=4, outer=2),
}  # fmt: skip


def test_each_option_of_a_layout_is_in_its_line_and_its_command(monkeypatch) -> None:
    """The command gives exactly that layout again."""
    monkeypatch.setattr("warpweave.launch.devices.choose_backend", lambda *_: "nccl")
    found = {"": BASE}
    for name, value in OTHER.items():
        more = {"device": {"impl": "triton"}, "impl": {}}.get(name, {})
        found[name] = dataclasses.replace(BASE, **{name: value} | more)
    for name, mesh in MESHES.items():
        more = {"ulysses": {"strategy": "hybrid"}}.get(name, {})
        found[name] = dataclasses.replace(BASE, mesh=mesh, **more)
    fields = {field.name for field in dataclasses.fields(Layout)} - {"mesh", "drawn"}
    assert fields == set(OTHER)
    assert len({str(layout) for layout in found.values()}) == len(found)
    assert len({layout.command for layout in found.values()}) == len(found)
    for name, layout in found.items():
        program, what, *words = shlex.split(layout.command)
        assert (program, what) == ("warpweave", "prove")
        (again,) = tyro.cli(ProveConfig, args=words).layouts()
        count = layout.microbatches
        assert again == dataclasses.replace(layout, count=count), name
    random = draw(7)
    said = dataclasses.replace(random, dtype="fp64", impl="torch").command
    assert said == "warpweave prove --random 1 --seed 7 --dtype fp64 --impl torch"
    assert str(random).startswith("seed 7: ")


# ---------------------------------------------------------------- the verdict


def _errors(value: float = 0.0, where: str = "w", first: str = "", **own: float) -> Errors:
    each = dict.fromkeys(proof.KINDS, value) | own
    relative = {kind: 1 / (1 + e) for kind, e in each.items()}
    return Errors(**each, where=where, relative=relative, first=first)


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_row_is_ok_up_to_its_limit_and_wrong_beyond(dtype: str) -> None:
    layout, limit = dataclasses.replace(BASE, dtype=dtype), LIMITS[dtype]
    for kind in proof.KINDS:
        for error, wrong in (
            (0.0, False), (limit, False), (math.nextafter(limit, 99), True), (math.nan, True),
            (math.inf, True),
        ):  # fmt: skip
            errors = _errors(**{kind: error})
            row = command.table_row(3, 120, layout, errors)
            assert row.startswith("[  3/120] WRONG " if wrong else "[  3/120] ok ")
            again = f"{layout}; largest: w; rerun: {layout.command}"
            assert row.endswith(again if wrong else str(layout))
            row = command.table_row(3, 120, layout, dataclasses.replace(errors, first="f"))
            again = again.replace("; largest", "; first wrong: f; largest")
            assert row.endswith(again if wrong else str(layout))
    head = command.table_head(120).splitlines()
    assert all(f"x{LIMITS[d]:.0f} in {d}" in "".join(head) for d in LIMITS)
    assert head[-1].startswith("row ")


def test_every_error_is_the_largest_of_all_ranks_and_the_worst_rank_is_named(monkeypatch) -> None:
    """It is given with the relative error of the rank whose error it is."""
    mesh = Mesh(dp=2, tp=2)
    ranks = [
        _errors(1.0, "first", "b", loss=5.0), _errors(2.0, "second", "?", grad=6.0, moment=0.5),
        _errors(1.5, "third", token=7.0), _errors(0.5, "fourth", "a", norm=6.5),
    ]  # fmt: skip
    for at in itertools.permutations(range(4)):
        every = [dataclasses.asdict(ranks[number]) for number in at]
        monkeypatch.setattr(proof, "exchange", lambda own, group, every=every: every)
        connected = SimpleNamespace(sizes=mesh, group=lambda axis: None)
        found = proof._worst_rank(ranks[0], connected, {"a": 0, "b": 1})
        assert found.first == f"a on {mesh.describe(at.index(3))}"
        wanted = dict.fromkeys(proof.KINDS, 2.0)
        wanted |= {"loss": 5.0, "grad": 6.0, "token": 7.0, "norm": 6.5, "moment": 1.5}
        assert found.each == wanted
        assert found.relative == {kind: 1 / (1 + error) for kind, error in wanted.items()}
        assert found.where == f"third on {mesh.describe(at.index(2))}"
        assert found.worst == 7.0


def test_comparison_keeps_the_largest_error_per_kind_and_names_the_largest() -> None:
    order = {"d": 0, "c": 1, "e": 2}
    compare = proof._Comparison(SimpleNamespace(rounding={}, largest={}), 2.5, order)
    for kind, what, times, relative in (
        ("loss", "a", 2.0, 0.2), ("grad", "b", 1.0, 0.1), ("loss", "c", 3.0, 0.3),
        ("grad", "d", 0.5, 0.9), ("norm", "e", 3.0, 0.7), ("weight", "f", 0.0, 0.0),
    ):  # fmt: skip
        compare.add(kind, what, times, relative)
    assert compare.errors == {"loss": 3.0, "grad": 1.0, "norm": 3.0, "weight": 0.0}
    assert compare.relative == {"loss": 0.3, "grad": 0.1, "norm": 0.7, "weight": 0.0}
    assert (compare.where, compare.first) == ("c", "c")  # d, which is earlier, is within the limit
    compare.add("grad", "d", 2.75, 0.8)
    assert (compare.where, compare.first) == ("c", "d")
    compare.add("token", "g", math.nan, math.nan)
    assert (compare.errors["token"], compare.where) == (math.inf, "g")
    assert compare.relative["token"] == math.inf
    compare.add("grad", "i", 3.0, math.nan)
    assert (compare.errors["grad"], compare.relative["grad"]) == (3.0, math.inf)
    compare.add("loss", "h", math.inf)
    assert compare.where == "g"
    assert compare.relative["loss"] == math.inf


def test_a_rank_proves_what_it_is_needed_for_and_rank_0_writes(tmp_path, monkeypatch, capsys):
    """Largest worlds first; groups are renewed for a new layout, but not for a new dtype."""
    alone, pair = Layout(Mesh()), Layout(Mesh(dp=2))
    layouts = [Layout(Mesh(dp=3)), Layout(Mesh(dp=3), dtype="fp32"), Layout(Mesh(dp=3), zero=1),
               pair, dataclasses.replace(pair, style="llama"), alone]  # fmt: skip
    for rank, count in ((0, 6), (1, 5), (2, 3)):
        done: list[Layout] = []
        renewed: list[Mesh] = []
        beats: list[tuple] = []
        session = SimpleNamespace(
            store=None, rank=rank, beat=lambda *of, b=beats: b.append(of),
            renew=renewed.append, close=lambda: None,
        )  # fmt: skip
        monkeypatch.setattr(command, "join", lambda *_, s=session, **__: s)
        monkeypatch.setattr(Mesh, "connect", lambda self, device: self)

        def prove(layout, mesh, timeout, checked, done=done):
            assert (mesh, timeout, checked) == (layout.mesh, 9.0, None)
            done.append(layout)
            return _errors(float(len(done)))

        monkeypatch.setattr(command, "prove_layout", prove)
        path = tmp_path / f"{rank}"
        command.prove_rank(layouts, 9.0, str(path))
        assert done == layouts[:count]
        assert renewed == [layout.mesh for layout in layouts[2:count]]
        assert beats == [(n, str(layout)) for n, layout in enumerate(layouts[:count])]
        printed = capsys.readouterr().out
        if rank:
            assert (path.exists(), printed) == (False, "")
            continue
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["layout"] for row in rows] == [str(layout) for layout in layouts]
        assert [row["errors"]["loss"] for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        lines = [line for line in printed.splitlines() if line.startswith("[")]
        assert [line.split("]")[0] for line in lines] == [f"[{n}/6" for n in range(1, 7)]
        assert printed.count("row ") == 1


# ---------------------------------------------------------------- requested layouts


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seed": 1, "dp": 2}, "--world requires --all, and --seed requires --random"),
        ({"all": True, "outer": 2}, "--all and --random choose the layouts; pass only"),
        ({"random": 1, "optimizer": "sgd"}, "--all and --random choose the layouts; pass"),
        ({"zero": 3, "dp": 2, "pp": 2, "schedule": "pipedream"}, "zero must be 0 to 2"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ProveConfig(**given).layouts()


def test_options_choose_layouts_largest_worlds_first(monkeypatch) -> None:
    one = {"dtype": "fp64"}
    assert ProveConfig(random=1, **one).layouts() == [draw(0)]
    two = sorted((draw(9), draw(10)), key=lambda layout: -layout.mesh.world)
    assert ProveConfig(random=2, seed=9, **one).layouts() == two
    assert set(ProveConfig(all=True, world=1, **one).layouts()) == set(all_layouts(1))
    both = [(layout.dtype, layout.impl) for layout in ProveConfig(dp=2).layouts()]
    assert both == [("fp64", "torch"), ("fp32", "torch")]
    asked: list[tuple] = []
    monkeypatch.setattr("warpweave.launch.devices.choose_backend", lambda *of: asked.append(of))
    for given, world in (({"tp": 2, "pp": 2, "overlap": "fused"}, 4), ({"all": True}, 4)):
        found = ProveConfig(device="cuda", **given).layouts()
        kinds = {("fp32", "cuda", "triton"), ("bf16", "cuda", "triton")}
        assert {(x.dtype, x.device, x.impl) for x in found} == kinds
        assert asked.pop() == (world, "nccl")
        fused = {x.mesh.pp > 1 for x in found if x.overlap == "fused"}
        assert fused == {"all" not in given}  # the engine itself rejects it
    found = ProveConfig(device="cuda", random=44, seed=24, dtype="bf16").layouts()
    drawn = [dataclasses.replace(draw(i, "triton"), device="cuda", dtype="bf16", impl="triton")
             for i in range(24, 68)]  # fmt: skip
    fit = [x for x in drawn if x.overlap != "fused" or x.mesh.pp == 1]
    assert (len([x for x in fit if x.overlap == "fused"]), len(fit)) == (3, 43)
    assert found == sorted(fit, key=lambda x: -x.mesh.world)


def test_a_schedule_without_a_pipeline_is_a_line_before_the_proof(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "prove_rank", lambda *_: None)
    monkeypatch.setattr(command, "launch", lambda *_, **__: None)
    for given, idle in (({"schedule": "zb-v"}, True), ({"schedule": "zb-v", "pp": 2}, False),
                        ({}, False), ({"random": 9}, False)):  # fmt: skip
        with pytest.raises(SystemExit):
            command.run(ProveConfig(dtype="fp64", **given))
        said = "schedule = zb-v has no effect: pp is 1"
        assert (said in capsys.readouterr().err) == idle, given


def test_ranks_are_started_for_several_of_them_on_a_cpu() -> None:
    for given, starts in (
        ({}, False), ({"zero": 3}, False), ({"seed": 5}, False), ({"all": True}, True),
        ({"random": 1}, True), *(({axis: 2}, True) for axis in ("dp", "cp", "tp", "pp", "outer")),
    ):  # fmt: skip
        assert ProveConfig(**given).starts_ranks is starts, given
        assert not ProveConfig(**given, device="cuda").starts_ranks
        assert not ProveConfig(**given, typecheck=True).starts_ranks


def test_a_planned_layout_of_up_to_64_ranks_is_proven_by_processes(tmp_path, capsys) -> None:
    plan = {"zero": 1, "schedule": "1f1b", "chunks": 1, "microbatches": 7, "recompute": "full",
            "sequence_parallel": False, "overlap": "none", "batch": 3}  # fmt: skip
    path = tmp_path / "plan.toml"

    def parse(*words: str, **mesh: int) -> ProveConfig:
        axes = dict.fromkeys(("dp", "cp", "tp", "pp"), 1) | mesh
        path.write_text("".join(f"{n} = {json.dumps(v)}\n" for n, v in (plan | axes).items()))
        return options.parse(["--config", str(path), *words])

    for mesh in ({"dp": 64}, {"dp": 2, "cp": 4, "tp": 8}, {"pp": 64}):
        found = parse(**mesh)
        assert {axis: getattr(found, axis) for axis in mesh} == mesh
        told = (found.recompute, found.overlap, found.sequence_parallel, found.microbatches)
        assert told == ("full", "none", False, None)
        said = f"prove ignores these options of {path}: chunks = 1, microbatches = 7, batch = 3\n"
        assert capsys.readouterr().err == f"\nwarpweave: {said}"
    assert parse("--typecheck", dp=65).dp == 65
    said = "zero = 1, schedule = 1f1b, chunks = 1, microbatches = 7, overlap = none, batch = 3\n"
    err = capsys.readouterr().err
    assert err == f"\nwarpweave: --typecheck ignores these options of {path}: {said}"
    assert parse("--outer", "2", dp=32).outer == 2
    for words, mesh, world in (((), {"dp": 65}, 65), (("--outer", "2"), {"dp": 33}, 66)):
        with pytest.raises(SystemExit):
            parse(*words, **mesh)
        said = capsys.readouterr().err
        assert f"the proof needs {world} ranks, more than the limit of 64 processes" in said
    for words in (["--tp", "65"], ["--all", "--world", "65"]):
        with pytest.raises(ValueError, match="needs 65 ranks, more than the limit of 64"):
            options.parse(words).layouts()


@pytest.mark.parametrize("wrong", [None, 0, 2])
@pytest.mark.parametrize("preset", [None, "llama-70b"])
def test_types_are_checked_stage_by_stage_of_the_trained_model(monkeypatch, capsys, preset, wrong):
    """A preset has the layout's dropout, because its program has one more operation with it."""
    seen: list[tuple] = []

    def check(model, mesh, **given) -> None:
        if wrong == len(seen):
            raise TypeError("it is a sum")
        seen.append((model, mesh, [*given.pop("stages")], given))

    monkeypatch.setattr("warpweave.prove.typecheck.typecheck", check)
    config = ProveConfig(typecheck=True, model=preset, tp=2, cp=2, pp=4, sequence_parallel=True,
                         recompute="full", layout="striped")  # fmt: skip
    own, summary = config.typechecked(), {}
    command._typecheck(config, summary)
    done = 4 if wrong is None else wrong
    model = own.model if preset is None else PRESETS[preset]
    assert own.model.dropout > 0 == PRESETS["llama-70b"].dropout
    model = dataclasses.replace(model, dropout=own.model.dropout)
    given = {"sequence_parallel": True, "recompute": "full", "layout": "striped"}
    assert seen == [(model, Mesh(tp=2, cp=2, pp=4), [stage], given) for stage in range(done)]
    verdict = {"passed": True} if done == 4 else {"passed": False, "error": "it is a sum"}
    assert summary == {"typechecked": done, "ranks": 16} | verdict
    said = capsys.readouterr().out.splitlines()
    assert said == [f"stage {stage} of 4: ok" for stage in range(done)]


@pytest.mark.parametrize("error", [ValueError("no such stages"), ImportError("not installed")])
def test_what_cannot_be_tried_is_refused_without_a_verdict(monkeypatch, error) -> None:
    def fails(*_, **__) -> None:
        raise error

    monkeypatch.setattr("warpweave.prove.typecheck.typecheck", fails)
    monkeypatch.setattr(ProveConfig, "layouts", fails)
    for run in (command._typecheck, command._prove):
        summary: dict = {}
        with pytest.raises(command._RefusedError, match=str(error)):
            run(ProveConfig(typecheck=run is command._typecheck, tp=2), summary)
        assert "passed" not in summary


def test_a_proof_by_torchrun_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(command, "prove_rank", lambda *_: None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(command._RefusedError, match="run it without torchrun"):
        command._prove(ProveConfig(), {})


def test_the_program_whose_types_are_checked_has_each_option_that_is_given(monkeypatch) -> None:
    seen = []

    def made(config, *, mesh, plan) -> None:
        seen.append(plan)
        raise ArithmeticError

    monkeypatch.setattr("warpweave.prove.typecheck.GPT", made)
    given = {"sequence_parallel": True, "recompute": "full", "layout": "striped"}
    for more in ({}, *({name: value} for name, value in given.items()), given):
        with pytest.raises(ArithmeticError):
            typecheck(Layout(Mesh(tp=2, cp=2)).model, Mesh(tp=2, cp=2), **more)
        assert seen.pop() == ParallelPlan(**{"sequence_parallel": False} | more)


def test_what_was_never_compared_is_infinitely_wrong(monkeypatch) -> None:
    add, lost = proof._Comparison.add, {"norm": math.inf, "token": math.inf}

    def lose(self, kind: str, *rest) -> None:
        if kind not in lost:
            add(self, kind, *rest)

    monkeypatch.setattr(proof._Comparison, "add", lose)
    found = proof.prove_layout(Layout(Mesh(), optimizer="sgd"), single())
    for errors in (found.each, found.relative):
        assert {kind: error for kind, error in errors.items() if error > 100.0} == lost


# ---------------------------------------------------------------- the run to reproduce


@pytest.mark.parametrize("layers", [4, 6, 9])
def test_delays_are_those_of_a_parameters_stage(layers: int) -> None:
    model = GPTConfig(11, 4, layers, 4, 2)
    for stages in (1, 2, 4):
        delays = {"pipedream": [stages - 1 - s for s in range(stages)],
                  "pipedream-vs": [stages - 1] * stages, "pipedream-2bw": [1] * stages}  # fmt: skip
        for name, wanted in delays.items():
            rule = expected.Delayed(name, stages, 2, 3)
            stage_of = {"embedding.weight": 0, "positions.weight": 0, "head.weight": stages - 1,
                        "final_norm.weight": stages - 1}  # fmt: skip
            for stage in range(stages):
                for layer in model.blocks_of(stage, stages):
                    stage_of[f"blocks.{layer}.mlp.up.weight"] = stage
            for parameter, stage in stage_of.items():
                assert rule.delay(parameter, layers) == wanted[stage], (name, parameter)
            found = [part.tolist() for part in rule.updates(12)]
            parts = [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]  # two replicas
            assert found == ([[*range(12)]] if name == "pipedream-2bw" else parts)


def test_step_of_several_updates_has_their_mean_loss_and_rms_norm(monkeypatch):
    norms, losses = [], []

    def updated(*of, right=expected.plain_adamw_step, **how):
        norms.append(float(right(*of, **how)))
        return torch.tensor(norms[-1], dtype=torch.float64)

    def lost(*of, right=expected.plain_gpt_loss, **how):
        total, valid = right(*of, **how)
        if "seed" in how:  # not in an evaluation
            losses.append(float(total.detach()) / max(int(valid), 1))
        return total, valid

    monkeypatch.setattr(expected, "plain_adamw_step", updated)
    monkeypatch.setattr(expected, "plain_gpt_loss", lost)
    sizes = Sizes(6, 8, 11, layers=2, heads=2, kv_heads=2, head_dim=4, hidden=10)
    model = Layout(Mesh(), tied=False, drawn=sizes, count=1).model
    for name, updates in (("pipedream", 3), ("pipedream-2bw", 1)):
        norms.clear()
        losses.clear()
        rule = expected.Delayed(name, stages=2, replicas=1, microbatches=3)
        found = expected.train.__wrapped__(model, sizes, delayed=rule)
        assert len(norms) == len(losses) == updates * expected.STEPS
        for step in range(expected.STEPS):
            own = slice(updates * step, updates * (step + 1))
            mean = math.sqrt(sum(norm**2 for norm in norms[own]) / updates)
            assert float(found[f"norm of step {step}"]) == pytest.approx(mean, rel=1e-12)
            loss = sum(losses[own]) / updates
            assert float(found[f"loss of step {step}"]) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_are_moved_by_one_unit_of_their_own_dtype_up_or_down(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    draw = {"generator": generator, "dtype": torch.float64}
    params = {name: torch.randn(500, **draw).to(dtype) for name in "ab"}
    before = {name: p.clone() for name, p in params.items()}
    eps, patterns = torch.finfo(dtype).eps, []
    for number in (1, 2, 3, 1):
        moved = expected._moved(params, number)
        assert all(torch.equal(p, before[name]) for name, p in params.items())
        signs = []
        for name, p in moved.items():
            assert p.dtype == dtype
            far = (p.double() - before[name].double()) / (eps * before[name].double())
            assert far.abs().min() >= 0.5  # rounded to a whole unit, of which there are
            assert far.abs().max() <= 1.5  # one to two in eps times the number
            signs.append((far > 0).tolist())
        ups = sum(map(sum, signs))
        assert 400 < ups < 600
        assert signs[0] != signs[1]
        patterns.append(signs)
    assert patterns[0] == patterns[3]
    assert patterns[0] != patterns[1] != patterns[2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_is_the_largest_change_by_any_moved_training(monkeypatch, dtype) -> None:
    """It is at least one unit, and zero if a training run overflows. A number that is zero except
    for rounding is as large as the largest of its family."""
    layout, eps = Layout(Mesh()), torch.finfo(dtype).eps
    shapes = expected.compared(expected.plain_config(layout.model))
    words = {what.format(name): s for what, family in shapes.items() for name, s in family.items()}
    zero = 64 * 2.0**-46
    family = [w for w in words if w.startswith("gradient of ") and w.endswith(" at step 1")]
    held = dict.fromkeys(words, -2.0) | dict.fromkeys(family, 1.0)
    held |= dict(zip(family, (zero, -zero, 1.01 * zero, 0.0, -64.0)))
    changed = dict.fromkeys(words, 0.5)
    changed |= dict(zip(words, (math.nan, math.inf, 0.0, -math.inf, math.nan)))
    asked: list[tuple] = []

    def train(model, sizes, of, number, *rest):
        asked.append((model, sizes, of, number, *rest))
        found = {word: torch.full(s, held[word], dtype=torch.float64) for word, s in words.items()}
        for at, word in enumerate(words) if number else ():
            most = at % truths.MOVED == number - 1
            found[word].view(-1)[-1] += changed[word] * (-1 if at % 2 else 1) * (1 if most else 0.5)
        return found

    monkeypatch.setattr(truths, "train", train)
    found = truths.truth(layout.model, layout.sizes, dtype, None, "cpu", "adamw", None)
    told = layout.model, layout.sizes
    of = [torch.float64, *[dtype] * truths.MOVED]
    assert asked == [(*told, wide, n, "cpu", "adamw", None) for n, wide in enumerate(of)]
    for at, word in enumerate(words):
        size = 64.0 if word in (*family[:2], family[3]) else abs(held[word])
        assert found.largest[word] == size, word
        assert torch.equal(found.values[word], torch.full_like(found.values[word], held[word]))
        by = changed[word]
        wanted = max(abs(by), eps * size) if math.isfinite(by) else 0.0
        assert found.rounding[word] == pytest.approx(wanted), (at, word)
    assert found.values.keys() == words.keys()


@pytest.mark.parametrize(("length", "number"), [(16, 4), (6, 4), (7, 4), (5, 3)])
def test_documents_cover_every_sample_and_tokens_know_theirs(length: int, number: int) -> None:
    sizes = Sizes(6, length, 11, 1, 2, 2, 4, 8, documents=number)
    for step in range(2 * expected.STEPS):
        bounds = expected.documents(sizes, step)
        more = number + 2 == length  # not one number per token
        assert bounds.shape == (6, number + 2 + more)
        assert (bounds[:, 0] == 0).all()
        assert (bounds[:, -1] == length).all()
        assert (bounds.diff(dim=1) >= 0).all()
        found = expected._numbers(sizes, step)
        for sample, ends in enumerate(bounds.tolist()):
            for token in range(length):
                document = int(found[sample, token])
                first, end = ([*ends, length][document + at - 1] for at in (0, 1))
                assert first <= token < end
    one = dataclasses.replace(sizes, documents=1)
    assert expected.documents(one, 0) is expected._numbers(one, 0) is None
    lengths = [len(expected.prompt(sizes, step)) for step in range(3)]
    assert lengths == [1, length // 2, length + 1]
