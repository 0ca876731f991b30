"""The contents of a checkpoint about its run, and which options may change on resume: every field
by its name. `test_train.py` has resumed runs, `test_restart.py` restarted ones."""

from __future__ import annotations

import dataclasses
import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_train import _config, _crashed_after, _replace, _rows, _same, _saved, _trainer

from warpweave.checkpoint import CheckpointError
from warpweave.cli.toml import options_of, with_options
from warpweave.data.token_file import WHOLE
from warpweave.model.config import ParallelPlan
from warpweave.train import resume
from warpweave.train.options import TrainConfig
from warpweave.train.resume import Progress, check_run, differences, open_run, progress_of, state_of

DATA = SimpleNamespace(name="text", fingerprint="a" * 20, tokenizer_name="bytes")
HELD_OUT = SimpleNamespace(fingerprint="whole:" + "b" * 20)
ASYNC = {"clip": 0.0, "pp": 3}
PIPEDREAM = TrainConfig(plan=ParallelPlan(schedule="pipedream", microbatches=4), **ASYNC)
OUTER = TrainConfig(outer=2, outer_every=6, outer_mix=0.25, outer_delay=1, fragments=2)


def _state(config: TrainConfig, **changes: Any) -> dict[str, Any]:
    made = {"step": 9, "sequences_per_step": 12, "validation": HELD_OUT} | changes
    return state_of(config, DATA, Progress(5, 4, 2.5, 3, 1), **made)


def _reader(config: TrainConfig, **changes: Any) -> SimpleNamespace:
    state = json.loads(json.dumps(_state(config)))
    for name, value in changes.items():
        state[name] = value
    mesh = dataclasses.asdict(config.mesh) | {"zero": config.plan.zero}
    return SimpleNamespace(path="run/step", step=9, state=state, mesh=mesh)


def test_a_state_has_all_that_decides_a_run_and_is_json():
    config = TrainConfig(seed=7, betas=(0.5, 0.75), optimizer="nadamw", steps=77)
    state = _state(config)
    assert json.loads(json.dumps(state)) == state
    assert state == {
        "step": 9,
        "seed": 7,
        "data": {
            "name": "text", "fingerprint": "a" * 20, "sequences_per_step": 12,
            "tokenizer": "bytes", "validation": HELD_OUT.fingerprint,
        },
        "progress": {"tokens": 5, "evaluated": 4, "best": 2.5, "best_step": 3, "since": 1},
        "outer": None,
        "asynchronous": None,
        "settings": config.settings,
        "layout": dataclasses.asdict(ParallelPlan()) | {
            "batch": 8, "impl": None, "eval_every": 100, "eval_batches": 8, "early_stop": 0,
        },
    }  # fmt: skip
    assert _state(config, validation=None)["data"]["validation"] is None
    found = _state(PIPEDREAM)["asynchronous"]
    assert found == {"schedule": "pipedream", "microbatches": 4, "pp": 3}
    assert _state(OUTER)["outer"] == {
        "replicas": 2, "every": 6, "lr": 0.7, "momentum": 0.9, "fragments": 2, "delay": 1,
        "mix": 0.25, "warmup": 0,
    }  # fmt: skip


@pytest.mark.parametrize("config", [TrainConfig(), PIPEDREAM, OUTER, TrainConfig(seed=3)])
def test_a_run_goes_on_from_its_own_state_and_says_nothing(config):
    reader = _reader(config)
    check_run(reader, config, DATA)
    assert differences(reader, config, 12, HELD_OUT) == ""


@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        (TrainConfig(), OUTER,
         "trained with no outer optimizer, but this run has the outer settings {'replicas': 2"),
        (OUTER, TrainConfig(),
         r"the outer settings {'replicas': 2, .*}, but this run has no outer optimizer$"),
        (OUTER, dataclasses.replace(OUTER, outer=3), r"'replicas': 2, .* has .* {'replicas': 3"),
        (OUTER, dataclasses.replace(OUTER, outer_lr=0.5), r"'lr': 0.7, .* run has .*'lr': 0.5"),
        (OUTER, dataclasses.replace(OUTER, outer_mix=0.5), r"'mix': 0.25, .* run has .*'mix': 0.5"),
        (TrainConfig(seed=4), TrainConfig(seed=5),
         "was trained with seed 4, but this run has seed 5; pass --seed 4$"),
        (TrainConfig(seed=3), TrainConfig(),
         "was trained with seed 3, but this run has seed 0; pass --seed 3$"),
        (TrainConfig(optimizer="muon"), TrainConfig(), "optimizer muon, whose state does not fit"),
        (TrainConfig(), TrainConfig(optimizer="sgd"), "optimizer adamw, whose state does not fit"),
        (TrainConfig(optimizer="nadamw"), TrainConfig(), "optimizer nadamw, whose state does not"),
        (PIPEDREAM, TrainConfig(pp=3), r"'schedule': 'pipedream', .*}.*, but this run uses 1f1b; "),
        (PIPEDREAM, dataclasses.replace(PIPEDREAM, pp=2), r"'pp': 3.* uses {.*'pp': 2.*}; resume"),
        (PIPEDREAM, with_options(PIPEDREAM, {"microbatches": 6}),
         r"'microbatches': 4, .*this run uses {.*'microbatches': 6"),
        (PIPEDREAM, with_options(PIPEDREAM, {"schedule": "pipedream-2bw"}),
         r"'schedule': 'pipedream', .*this run uses {'schedule': 'pipedream-2bw'"),
    ],
)  # fmt: skip
def test_another_run_is_refused_with_what_was_saved_and_what_is_now(saved, now, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        check_run(_reader(saved), now, DATA)
    assert str(caught.value).startswith("run/step ")
    assert "\n" not in str(caught.value)


def test_a_synchronous_run_goes_on_asynchronously_and_that_is_said():
    """Its weights become all versions; the message has the same words as the file."""
    reader = _reader(TrainConfig(pp=3, clip=0.0))
    check_run(reader, PIPEDREAM, DATA)
    assert differences(reader, PIPEDREAM, 12, HELD_OUT) == (
        "schedule: saved 1f1b, now pipedream; microbatches: saved 1, now 4"
    )


LAYOUT: dict[str, Any] = {
    "dp": 4, "cp": 2, "tp": 2, "pp": 2, "ulysses": 2, "dp_shard": 2, "zero": 2,
    "schedule": "interleaved", "chunks": 2, "microbatches": 4, "early_gradients": False,
    "sequence_parallel": False, "overlap": "chunked", "recompute": "full", "layout": "striped",
    "cp_strategy": "hybrid", "reduce": "ordered", "batch": 3, "impl": "torch", "eval_every": 7,
    "eval_batches": 3, "early_stop": 2,
}  # fmt: skip


def test_a_resumed_run_names_every_changed_option_of_its_layout():
    """Covers every option together, each alone, and a checkpoint that recorded only the mesh and
    the ZeRO stage. Outer replicas may not change."""
    usual = TrainConfig(dp=2, cp=4)
    names = {*dataclasses.asdict(usual.mesh), *dataclasses.asdict(usual.plan)} - {"outer"}
    assert names <= {*LAYOUT}
    reader, before = _reader(usual), options_of(usual)
    config = with_options(usual, LAYOUT)
    check_run(reader, config, DATA)
    lines = [f"{name}: saved {before[name]}, now {value}" for name, value in LAYOUT.items()]
    assert {*differences(reader, config, 12, HELD_OUT).split("; ")} == {*lines}
    assert differences(reader, config, 12, HELD_OUT, layout=False) == ""
    for (name, value), line in zip(LAYOUT.items(), lines, strict=True):
        if name != "ulysses":  # with hybrid attention only
            changed = with_options(usual, {name: value})
            assert differences(reader, changed, 12, HELD_OUT) == line
    del reader.state["layout"]
    of_mesh = {"dp", "cp", "tp", "pp", "ulysses", "dp_shard", "zero"}
    said = {*differences(reader, config, 12, HELD_OUT).split("; ")}
    assert said == {line for line in lines if line.partition(":")[0] in of_mesh}


@pytest.mark.parametrize("saved", [None, HELD_OUT.fingerprint, "whole:" + "c" * 20])
@pytest.mark.parametrize("now", [None, HELD_OUT])
@pytest.mark.parametrize("sequences", [12, 8])
def test_other_validation_data_and_batches_are_said_where_both_are_known(saved, now, sequences):
    data = _state(TrainConfig())["data"] | {"validation": saved}
    reader = _reader(TrainConfig(), data=data)
    found = differences(reader, TrainConfig(), sequences, now)
    said = [f"sequences_per_step: saved 12, now {sequences}"] * (sequences != 12)
    if now is not None and saved not in (None, HELD_OUT.fingerprint):
        said.append(f"validation data: saved {'c' * 12}, now {'b' * 12}")
    assert found == "; ".join(said)


@pytest.mark.parametrize("tokenizer", [None, "bytes", "not saved"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["text", "other"])
def test_a_token_file_of_an_older_version_is_known_by_its_name(tokenizer, whole, name):
    """Its fingerprint was that of the file's ends. For a text, or with a hash of the whole file,
    that hash alone decides."""
    held = {"name": "text", "fingerprint": WHOLE * whole + "c" * 9, "tokenizer": tokenizer}
    if tokenizer == "not saved":
        del held["tokenizer"]
    reader = _reader(TrainConfig(), data=held | {"sequences_per_step": 12})
    now = SimpleNamespace(name=name, fingerprint=WHOLE + "d" * 9, tokenizer_name=tokenizer)
    if tokenizer is None and not whole and name == "text":
        check_run(reader, TrainConfig(), now)
        said = "fingerprint: saved ends of the file, now whole file"
        assert differences(reader, TrainConfig(), 12) == said
        return
    with pytest.raises(CheckpointError, match="run/step was trained on different data: text"):
        check_run(reader, TrainConfig(), now)
    ends = tokenizer is None and not whole
    assert bool(differences(reader, TrainConfig(), 12)) == ends


@pytest.mark.parametrize("missing", [(), ("tokens",), ("evaluated", "best"), None])
def test_progress_that_was_not_saved_is_derived(missing):
    reader, derived = _reader(TrainConfig()), Progress(tokens=9 * 12 * 32, evaluated=9)
    saved = Progress(5, 4, 2.5, 3, 1)
    if missing is None:
        del reader.state["progress"]
        assert progress_of(reader, 32) == derived
        return
    for name in missing:
        del reader.state["progress"][name]
    wanted = {name: getattr(derived, name) for name in missing}
    assert progress_of(reader, 32) == dataclasses.replace(saved, **wanted)


def test_a_run_that_must_go_on_is_refused_where_there_is_no_checkpoint(tmp_path):
    model, folder = TrainConfig(model="toy").model_config(256), tmp_path / "none"
    for given in ((), (True,)):
        words = f"^nothing to resume from: no checkpoint in {folder}$"
        with pytest.raises(CheckpointError, match=words):
            open_run(folder, model, None, *given)
    assert open_run(folder, model, None, False) is None
    assert open_run(folder, model, None, "auto") is None


def test_each_checkpoint_that_is_passed_over_is_said_every_time(tmp_path, monkeypatch, capsys):
    """This holds if the same message was printed before, and for any warning filter."""
    config = TrainConfig(model="toy").model_config(256)

    def newest(folder, *, group):
        assert (folder, group) == (tmp_path, None)
        for step in (3, 2):
            warnings.warn(f"step {step} is damaged", stacklevel=1)

    monkeypatch.setattr(resume, "open_latest", newest)
    for _ in range(2):
        assert open_run(tmp_path, config, None, "auto") is None
        said = capsys.readouterr().err.split("\n")
        assert [line for line in said if line] == [
            f"warpweave: step {step} is damaged" for step in (3, 2)
        ]
    assert open_run(tmp_path, config, None, False) is None
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_one_outer_replica_goes_on_bit_for_bit_with_or_without_momentum(tmp_path, momentum):
    """The momentum is saved if there is one."""
    options = {"outer_every": 2, "outer_lr": 0.5, "outer_momentum": momentum, "dtype": "bf16"}
    config = _config(tmp_path, steps=5, eval_every=0, layers=1, **options)
    _trainer(config).run()
    rows, state = _rows(config.out), _saved(config.out, 5)
    kinds = {name.rsplit("/", 1)[0] for name in state if "/" in name}
    wanted = {"replica0/param", "replica0/exp_avg", "replica0/exp_avg_sq"}
    assert kinds - {"outer_sum"} == wanted | ({"outer_momentum"} if momentum else set())
    for stop in (1, 3):
        out = tmp_path / f"run-{stop}"
        _crashed_after(stop, config.out, out)
        _trainer(_replace(config, out=out, resume=True)).run()
        assert _rows(out) == rows
        assert _same(_saved(out, 5), state)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
