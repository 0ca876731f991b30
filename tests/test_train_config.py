"""The meaning of a run's options: what it starts, what ranks agree on, and errors.
`test_options.py` tests where each option arrives, `test_limits.py` the limits of their numbers."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from refused import check

import warpweave.train.command as train
from warpweave.checkpoint import save_checkpoint
from warpweave.cli.toml import options_of, with_options
from warpweave.data import write_token_file
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.machine.tune.aot import TARGETS
from warpweave.machine.tune.options import TuneConfig
from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.model.gpt import GPT
from warpweave.parallel.data.optimizer import SGD, AdamW, Muon, NAdamW
from warpweave.parallel.schedule import FAMILIES
from warpweave.parallel.server.server import ServerPlan
from warpweave.prove import ProveConfig
from warpweave.train import boards, idle_options, option_kinds
from warpweave.train.options import GPTOverrides, TrainConfig
from warpweave.train.sample_options import SampleConfig

# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({}, False),
        ({"dp": 1}, False),
        ({"batch": 2, "steps": 9, "timeout": 2.0, "staleness": 0}, False),
        *(({axis: 2}, True) for axis in ("dp", "cp", "tp", "pp", "outer")),
        *(({name: 1}, True) for name in ("server", "max_restarts", "elastic")),
    ],
)
def test_a_command_starts_ranks_if_any_axis_or_server_or_restart_asks_for_it(changes, starts):
    assert TrainConfig(**changes).starts_ranks is starts


@pytest.mark.parametrize(
    ("axes", "ranks", "words"),
    [
        ({"outer": 2, "tp": 3}, 9, "outer=2 x dp=any x cp=1 x tp=3 x pp=1 has 6 ranks, but 9"),
        ({"dp": 4, "cp": 5}, 7, "mesh dp=4 x cp=5 x tp=1 x pp=1 has 20 ranks, but 7 were"),
        ({"dp": 2, "outer": 3, "pp": 5}, 29,
         "outer=3 x dp=2 x cp=1 x tp=1 x pp=5 has 30 ranks, but 29"),
        ({"dp": 2, "outer": 3, "pp": 5}, 30, None),
        ({"outer": 2, "tp": 3}, 12, None),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_is_named_with_all_its_axes(axes, ranks, words):
    config = TrainConfig(outer_every=4, **axes)
    check(lambda: config.for_ranks(ranks), words)
    assert words or config.for_ranks(ranks).mesh.world == ranks


def test_vocab_is_the_presets_unless_data_needs_more_or_an_option_sets_it():
    of_preset = PRESETS["gpt2"].vocab_size
    for overrides, needed, found in (
        ({}, 300, of_preset), ({}, of_preset, of_preset), ({}, of_preset + 1, of_preset + 1),
        ({"vocab_size": 700}, 300, 700), ({"vocab_size": 300}, 300, 300),
        ({"seq_len": 8, "layers": 3}, 1, of_preset),
    ):  # fmt: skip
        config = TrainConfig(model="gpt2", overrides=GPTOverrides(**overrides))
        wanted = dataclasses.replace(PRESETS["gpt2"], **overrides | {"vocab_size": found})
        assert config.model_config(needed) == wanted


# ---------------------------------------------------------------- servers

ONE_RANK = {
    "tp": 2, "cp": 2, "pp": 2, "dp_shard": 1, "early_stop": 1, "outer": 2, "outer_every": 3,
    "timeline": Path("t.svg"), "max_restarts": 1, "elastic": 1,
}  # fmt: skip
PLAN = {
    "zero": 0, "schedule": "gpipe", "chunks": 2, "early_gradients": False,
    "sequence_parallel": False, "overlap": "none", "recompute": "full", "layout": "striped",
    "cp_strategy": "ring", "reduce": "ordered",
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_RANK)
def test_workers_of_servers_are_one_rank_each_that_only_trains(name):
    value = ONE_RANK[name]
    with pytest.raises(ValueError, match=f"^--server does not support {name} = {value}; leave"):
        _ = TrainConfig(server=1, **{name: value}).server_plan
    assert TrainConfig(**{name: value}).server_plan is None


@pytest.mark.parametrize("name", PLAN)
def test_a_plan_of_several_ranks_is_refused_of_workers_of_servers(name):
    plan = ParallelPlan(microbatches=3, **{name: PLAN[name]})
    with pytest.raises(ValueError, match=f"^{name} = {PLAN[name]} has no effect with --server"):
        _ = TrainConfig(server=1, plan=plan).server_plan


def test_the_plans_fields_are_refused_of_workers_or_are_their_micro_batches():
    names = {field.name for field in dataclasses.fields(ParallelPlan)}
    assert names == {*PLAN, "microbatches"}
    assert TrainConfig(server=1, plan=ParallelPlan(microbatches=3)).server_plan is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tiles": Path("x.json")}, "--server workers do not read tile tables"),
        ({"compensation": 0.5},
         "compensation = 0.5 needs delayed gradients, but staleness is 0; pass"),
        ({"compensation": 0.5, "staleness": 1}, None),
        ({"compensation": 0.5, "staleness": "unbounded"}, None),
        ({"staleness": "unbounded"}, None),
        ({"dtype": "fp16"}, "dtype = fp16 needs loss scaling"),
        *(({"dtype": dtype}, None) for dtype in ("fp32", "bf16", "fp64", None)),
        ({"optimizer": "muon"}, "--server needs an elementwise optimizer, got muon"),
        *(({"optimizer": rule}, None) for rule in ("adamw", "nadamw", "sgd")),
        ({"dp": 4}, None),
    ],
)  # fmt: skip
def test_what_servers_can_do_is_told_before_they_start(changes, words):
    config = TrainConfig(**{"server": 2} | changes)
    check(lambda: config.server_plan, words and f"^{words}")
    assert words or config.server_plan.servers == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"staleness": 2}, "staleness = 2 and compensation = 0 apply"),
        ({"staleness": "unbounded"}, "staleness = unbounded and compensation = 0 apply"),
        ({"compensation": 0.25}, "staleness = 0 and compensation = 0.25 apply"),
    ],
)
def test_options_of_servers_need_servers(changes, words):
    with pytest.raises(ValueError, match=f"^{words} to parameter servers only; pass --server$"):
        _ = TrainConfig(**changes).server_plan


def test_servers_are_told_every_number_of_theirs():
    given = {"clip": 0.75, "timeout": 77.0, "save_every": 5, "save_minutes": 2.5}
    for staleness, most, joint in ((0, 0, True), (3, 3, False), ("unbounded", None, False)):
        compensation = 0.0 if joint else 0.125
        config = TrainConfig(server=6, staleness=staleness, compensation=compensation, **given)
        assert config.server_plan == ServerPlan(
            servers=6, staleness=most, joint=joint, compensation=compensation, **given
        )
    assert TrainConfig(server=1, clip=0.0).server_plan.clip is None


# ---------------------------------------------------------------- update rules


@pytest.mark.parametrize("dtype", [None, "fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("impl", [None, "torch"])
def test_a_rule_has_the_options_of_its_own_optimizer(dtype, impl):
    """Muon works in bf16 if the parameters have 16 bits."""
    numbers = {"betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.25, "impl": impl}
    config = TrainConfig(momentum=0.375, dtype=dtype, **numbers)
    low = torch.bfloat16 if dtype in ("bf16", "fp16") else None
    wanted = {
        "adamw": AdamW(**numbers),
        "nadamw": NAdamW(**numbers),
        "sgd": SGD(momentum=0.375, weight_decay=0.25),
        "muon": Muon(0.375, 0.25, rest=AdamW(**numbers), dtype=low, impl=impl),
    }
    for name, rule in wanted.items():
        found = dataclasses.replace(config, optimizer=name).rule
        assert type(found) is type(rule)
        assert found == rule


def test_settings_hold_each_option_that_a_resumed_run_must_have():
    """These are all that affect the weights, except data, seed and model, compared separately."""
    changed: dict[str, Any] = {
        "steps": 7, "lr": 0.5, "lr_schedule": "wsd", "min_lr": 0.25, "warmup": 3, "decay": 0.75,
        "optimizer": "muon", "momentum": 0.5, "eps": 0.125, "weight_decay": 0.375, "clip": 0.0,
        "dtype": "bf16", "packed": True, "separator": 9, "betas": (0.5, 0.625),
    }  # fmt: skip
    usual = TrainConfig().settings
    assert TrainConfig(**changed).settings == changed | {"betas": [0.5, 0.625]}
    for name, value in changed.items():
        settings = TrainConfig(**{name: value}).settings
        assert {key for key in settings if settings[key] != usual[key]} == {name}


# ---------------------------------------------------------------- replicas that sync


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"outer": 2}, "outer = 2"),
        ({"outer_lr": 0.5}, "outer_lr = 0.5"),
        ({"outer_momentum": 0.5}, "outer_momentum = 0.5"),
        ({"outer_delay": 1}, "outer_delay = 1"),
        ({"outer_mix": 0.5}, "outer_mix = 0.5"),
        ({"outer_warmup": 4}, "outer_warmup = 4"),
        ({"fragments": 2}, "fragments = 2"),
        ({"outer": 3, "outer_mix": 0.5}, "outer = 3"),
        ({}, None),
    ],
)
def test_an_option_of_an_outer_optimizer_needs_one(changes, what):
    assert TrainConfig(outer_every=4, **changes).outer_rule is not None
    words = what and f"^{what} requires --outer-every, the number of steps between"
    check(lambda: TrainConfig(**changes).outer_rule, words)
    assert what or TrainConfig().outer_rule is None


@pytest.mark.parametrize(("layers", "fragments"), [(8, 8), (None, 4), (1, 1)])
def test_each_fragment_needs_a_layer_of_the_model_that_is_trained(layers, fragments):
    """The preset has four."""
    config = TrainConfig(outer_every=72, fragments=fragments, overrides=GPTOverrides(layers=layers))
    assert config.outer_rule.fragments == fragments
    more = dataclasses.replace(config, fragments=9 if fragments == 8 else 2 * fragments)
    with pytest.raises(ValueError, match=rf"fragments \({more.fragments}\) must be at most"):
        _ = more.outer_rule


# ---------------------------------------------------------------- checks before any rank starts


@pytest.fixture
def asked(monkeypatch) -> list[Any]:
    """Record the checks of data, boards and plan."""
    seen: list[Any] = []

    def opened(config: TrainConfig, split: str) -> SimpleNamespace:
        seen.append(split)
        return SimpleNamespace(vocab_size=256)

    monkeypatch.setattr(TrainConfig, "open_data", opened)
    monkeypatch.setattr(boards, "check_boards", lambda *given: seen.append(given))
    monkeypatch.setattr(ParallelPlan, "check_update", lambda plan, *given: seen.append(given))
    return seen


@pytest.mark.parametrize(
    ("changes", "update", "shown"),
    [
        ({}, (1.0, False, False), (False, None)),
        ({"clip": 0.0, "dtype": "fp16"}, (0.0, True, False), (False, None)),
        ({"dtype": "bf16", "outer_every": 2}, (1.0, False, True), (False, None)),
        ({"tensorboard": True}, (1.0, False, False), (True, None)),
        ({"wandb": "mine"}, (1.0, False, False), (False, "mine")),
    ],
)
def test_updates_boards_and_both_splits_are_looked_at_before_a_run(asked, changes, update, shown):
    TrainConfig(**changes).check()
    assert {*asked} == {update, shown, "train", "validation"}


@pytest.mark.parametrize(
    ("momentum", "fits"),
    [(0.0, True), (0.999, True), (1.0, False), (-1e-9, False), (math.nan, False)],
)
@pytest.mark.usefixtures("asked")
def test_a_momentum_is_less_than_one(momentum, fits):
    words = rf"momentum must be in \[0, 1\), got {momentum}"
    check(TrainConfig(momentum=momentum, optimizer="sgd").check, None if fits else words)


@pytest.mark.parametrize("suffix", ["svg", "png", "json", "pdf", ""])
@pytest.mark.usefixtures("asked")
def test_a_timeline_gets_its_folder_once_it_is_of_a_kind_that_can_be_written(tmp_path, suffix):
    path = tmp_path / "a" / "b" / f"t.{suffix}".rstrip(".")
    config = TrainConfig(timeline=path)
    fits = suffix in ("svg", "png", "json")
    words = r"a timeline's name must end in \.svg or \.png or \.json, got"
    for _ in range(2):  # the folder may already exist
        check(config.check, None if fits else words)
        assert path.parent.is_dir() == bool(list(tmp_path.iterdir())) == fits


# ---------------------------------------------------------------- options without effect

# (option, value, the others with which it has no effect, others with which it has one)
IDLE: tuple[tuple[str, Any, dict[str, Any], dict[str, Any]], ...] = (
    ("model", "toy", {"init_from": Path("run")}, {}),
    ("separator", 32, {"packed": False}, {"packed": True, "data": Path("text")}),
    ("separator", 49, {"packed": True, "data": Path("t.bin")},
     {"packed": True, "data": Path("u.bin")}),
    ("packed", True, {"data": Path("t.bin")}, {"data": Path("t.bin"), "separator": 3}),
    ("packed", True, {"data": Path("t.bin"), "separator": 49}, {"data": Path("text")}),
    ("packed", True, {"data": Path("text/a.txt")}, {}),
    ("rope_theta", 500.0, {"positions": "learned"}, {"model": "toy-llama"}),
    ("rope_theta", 500.0, {"positions": "rope", "windows": (8, 4), "local_rope_theta": 9.0},
     {"positions": "rope", "windows": (8, 0), "local_rope_theta": 9.0}),
    ("local_rope_theta", 9.0, {"positions": "rope"}, {"positions": "rope", "windows": (8, 0)}),
    ("windows", (128, 0), {"seq_len": 128}, {"seq_len": 129}),
    ("norm_bias", False, {"norm": "rms"}, {"norm": "layer"}),
    ("sample", 5, {"server": 1}, {}),
    ("eval_every", 5, {"server": 1}, {}),
    ("check_every", 5, {"server": 1}, {"dp": 2}),
    ("check_collectives", True, {"server": 1}, {"dp": 2}),
    ("timeout", 5.0, {}, {"server": 1}),
    ("check_every", 5, {}, {"outer": 2, "outer_every": 1}),
    ("check_collectives", True, {}, {"pp": 2}),
    ("zero", 2, {"tp": 2}, {"cp": 2}),
    ("zero", 3, {"dp": 2, "dp_shard": 1}, {"dp": 2}),
    ("overlap", "chunked", {"dp": 2}, {"tp": 2}),
    ("chunks", 2, {"schedule": "interleaved"}, {"schedule": "interleaved", "pp": 2}),
    ("schedule", "zb-h1", {}, {"pp": 2}),
    ("layout", "striped", {}, {"cp": 2}),
    ("cp_strategy", "ring", {}, {"cp": 2}),
    ("outer_every", 8, {"steps": 7}, {"steps": 8}),
    ("outer_every", 8, {"steps": 8, "outer_delay": 1}, {"steps": 4, "fragments": 2}),
    ("outer_every", 8, {"steps": 8, "outer_warmup": 1}, {"steps": 9, "outer_warmup": 1}),
    ("momentum", 0.5, {}, {"optimizer": "muon"}),
    ("momentum", 0.5, {"optimizer": "nadamw"}, {"optimizer": "sgd"}),
    ("betas", (0.5, 0.5), {"optimizer": "sgd"}, {"optimizer": "muon"}),
    ("eps", 0.5, {"optimizer": "sgd"}, {"optimizer": "nadamw"}),
    ("lr_schedule", "linear", {"steps": 20}, {"steps": 21}),
    ("min_lr", 0.5, {"steps": 20}, {"steps": 21}),
    ("decay", 0.5, {"lr_schedule": "wsd", "steps": 20}, {"lr_schedule": "wsd"}),
    ("decay", 0.5, {"lr_schedule": "linear"}, {"lr_schedule": "wsd"}),
    ("min_lr", 0.5, {"lr_schedule": "constant"}, {"lr_schedule": "linear"}),
    ("min_lr", 0.5, {"lr_schedule": "wsd", "decay": 0.0}, {"lr_schedule": "wsd"}),
    ("early_stop", 2, {"eval_every": 0}, {}),
    ("early_stop", 2, {"steps": 100}, {"steps": 101}),
    ("save_every", 9, {"steps": 8}, {"steps": 9}),
    ("eval_every", 9, {"steps": 8}, {"steps": 9}),
    ("check_every", 9, {"steps": 8, "dp": 2}, {"steps": 9, "dp": 2}),
    ("keep", 2, {"save_minutes": 0.0}, {"save_minutes": 0.0, "save_every": 1}),
    ("keep", 2, {"save_minutes": 0.0}, {"save_minutes": 0.0, "resume": "auto"}),
    ("keep", 2, {"save_minutes": 0.0}, {"save_minutes": 0.0, "early_stop": 1}),
    ("tiles", Path("t.json"), {"impl": "torch", "device": "cuda"}, {"device": "cuda"}),
    ("tiles", Path("t.json"), {"device": "cpu"}, {"device": "cpu", "impl": "triton"}),
)  # fmt: skip
IDLE_SAMPLE: tuple[tuple[str, Any, dict[str, Any], dict[str, Any]], ...] = (
    *((name, value, {"temperature": 0.0}, {}) for name, value in
      (("top_k", 3), ("top_p", 0.5), ("seed", 3))),
    *((name, value, {"top_k": 1}, {"top_k": 2}) for name, value in
      (("temperature", 0.5), ("top_p", 0.5), ("seed", 3))),
    ("top_k", 50, {}, {"tp": 2, "timeout": 9.0, "model": Path("other")}),
    ("timeout", 9.0, {}, {"pp": 2}),
)  # fmt: skip
# Each of the others has its effect with any other options, or is rejected with those that prevent
# it (the options of outer replicas, servers and elastic runs, ulysses, dp_shard, ...).
ALWAYS = {
    *("config", "init_from", "data", "tokenizer", "out", "resume", "device", "impl", "dtype"),
    *("dp", "dp_shard", "tp", "cp", "ulysses", "pp", "outer", "outer_lr", "outer_momentum"),
    *("fragments", "outer_delay", "outer_mix", "outer_warmup", "batch", "microbatches", "server"),
    *("staleness", "compensation", "elastic", "steps", "lr", "warmup", "optimizer", "weight_decay"),
    *("clip", "seed", "save_minutes", "max_restarts", "eval_batches", "tensorboard", "wandb"),
    *("timeline", "vocab_size", "seq_len", "layers", "width", "heads", "kv_heads", "hidden"),
    *("positions", "tied", "dropout", "logit_softcap", "embedding_scale", "activation", "bias"),
    *("norm", "norm_eps", "norm_place", "head_size", "qkv_bias", "qk_norm", "qk_norm_whole"),
    *("attention_scale", "softcap", "sinks", "recompute", "reduce"),
    "cuda_graph",  # refused where it cannot work
    *("early_gradients", "sequence_parallel"),  # on if possible; off always has an effect
}
ALWAYS_SAMPLE = {
    *("best", "model", "prompt", "tokens", "tokenizer", "tp", "pp", "dtype", "device", "impl"),
}


@pytest.fixture
def files(tmp_path, monkeypatch) -> None:
    """Make data of two files, token files with 50 words (t without the last), models of 50, 51."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for name in "abc":
        (tmp_path / "text" / f"{name}.txt").write_text("some text, " * 60)
    tokens = np.arange(1000) % 49
    write_token_file(tmp_path / "t.bin", tokens, vocab_size=50)
    write_token_file(tmp_path / "u.bin", np.append(tokens, 49)[::-1].copy(), vocab_size=50)
    for name, vocabulary in (("run", 50), ("other", 51)):
        config = dataclasses.replace(PRESETS["toy"], vocab_size=vocabulary, layers=1)
        weights = {n: p.detach() for n, p in GPT(config).named_parameters()}
        save_checkpoint(
            tmp_path / name / "checkpoints", 1, weights.items(), state={},
            config=dataclasses.asdict(config),
        )  # fmt: skip


def _idle(rows: Any, config: Any) -> list[str]:
    return [line.partition(" = ")[0] for line in idle_options.idle_lines(rows, config)]


@pytest.mark.usefixtures("files")
def test_options_without_effect_are_named_and_only_then():
    """Tests each row of the table and each of its options, with what makes it idle and without."""
    sampled = SampleConfig(Path("run"), ("x",))
    for rows, usual, cases in (
        (idle_options.TRAIN, TrainConfig(), IDLE),
        (idle_options.SAMPLE, sampled, IDLE_SAMPLE),
    ):
        seen = set()
        for name, value, others, effective in cases:
            config = with_options(usual, others | {name: value})
            lines = idle_options.idle_lines(rows, config)
            (line,) = (x for x in lines if x.startswith(f"{name} = "))
            assert line.startswith(f"{name} = {value} has no effect: "), line
            assert "{" not in line
            assert name not in _idle(rows, with_options(usual, others)), (name, "is not given")
            assert name not in _idle(rows, with_options(usual, effective | {name: value})), line
            seen |= {(row, name) for row in rows if name in row.options and row.when(config)}
            refused = any(row.refused and (row, name) in seen for row in rows)
            if refused and others in ({"packed": False}, {"eval_every": 0}):
                with pytest.raises(ValueError, match=f"^{name} = {value} has no effect: "):
                    config.check()
        assert seen == {(row, name) for row in rows for name in row.options}
        assert _idle(rows, usual) == []


def test_asynchronous_schedules_have_an_effect_without_a_pipeline():
    """PipeDream updates after each micro-batch, 2BW by gradients at the weights one update ago."""
    for rows, usual in ((idle_options.TRAIN, TrainConfig()), (idle_options.PROVE, ProveConfig())):
        idle = {name: _idle(rows, with_options(usual, {"schedule": name})) for name in FAMILIES}
        assert {name for name, found in idle.items() if "schedule" not in found} == {
            "1f1b", "pipedream", "pipedream-vs", "pipedream-2bw"
        }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "rows", "always"),
    [
        (TrainConfig(), idle_options.TRAIN, ALWAYS),
        (SampleConfig(Path("run"), ("x",)), idle_options.SAMPLE, ALWAYS_SAMPLE),
    ],
    ids=["train", "sample"],
)
def test_every_option_always_has_an_effect_or_a_row(config, rows, always):
    """Add a row to the table, or a name here, for each new option."""
    options = {name for row in rows for name in row.options}
    assert options | always == {*options_of(config)}
    assert not options & always


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("separator", [-1, 50, 999999])
def test_a_separator_outside_the_vocabulary_is_refused(separator, capsys):
    for data, size in (("t.bin", 50), ("text", 256)):
        if separator >= size or separator < 0:
            words = ["--packed", f"--separator={separator}", "--data", data, "--seq-len", "16"]
            with pytest.raises(SystemExit, match="2"):
                train.main(["--model", "toy", *words])
            said = f"separator = {separator} is not a token id of "
            assert said in (err := capsys.readouterr().err)
            assert f"whose vocabulary is [0, {size})" in err


# ---------------------------------------------------------------- option values


def test_an_option_takes_each_word_that_there_is():
    """This covers presets, dtypes and compilation targets, in every command."""
    for config, name, wanted in (
        (TrainConfig, "model", PRESETS),
        (TrainConfig, "dtype", NAMED_DTYPES),
        (SampleConfig, "dtype", NAMED_DTYPES),
        (ProveConfig, "dtype", (*NAMED_DTYPES, "both")),
        (TuneConfig, "target", TARGETS),
    ):
        kind = get_type_hints(config)[name]
        words = get_args(next(k for k in (kind, *get_args(kind)) if get_origin(k) is Literal))
        assert sorted(words) == sorted(wanted), (config.__name__, name)


def test_options_are_pickled_for_ranks_on_python_3_12_and_later(monkeypatch):
    """There, make_dataclass itself sets __module__, to the module that calls it."""
    config = TrainConfig(overrides=GPTOverrides(seq_len=9))
    assert pickle.loads(pickle.dumps(config)) == config
    make = dataclasses.make_dataclass

    def make_later(*args, **options):
        made = make(*args, **options)
        made.__module__ = options.get("module") or option_kinds.__name__
        return made

    monkeypatch.setattr(dataclasses, "make_dataclass", make_later)
    assert option_kinds.overrides_of(GPTConfig, __name__).__module__ == __name__
