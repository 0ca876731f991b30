"""Every option of every command changes its own effect and nothing else; option files.

The engine, the ranks and the boards are mocks that record their calls: no model is computed. For
another command, add a table of its options and a function `run` (`wiring`).
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from refused import check
from wiring import Row, differences, missing

import warpweave.data
import warpweave.machine.tune.command as tune_command
import warpweave.train.command as train
import warpweave.train.trainer as trainer
from warpweave.checkpoint import save_checkpoint
from warpweave.cli.toml import options_of, read_options, write_options
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.tile_table import AttentionTile, write_table
from warpweave.kernels.runtime.tile_table import TileRow as TileRow
from warpweave.launch.interrupt import Interrupt
from warpweave.launch.session import Session
from warpweave.machine.tune.options import TuneConfig
from warpweave.machine.tune.options import parse as parse_tune
from warpweave.machine.tune.search import SearchReport
from warpweave.model.config import ParallelPlan
from warpweave.model.gpt import GPT, PRESETS
from warpweave.parallel.collectives import Pending
from warpweave.parallel.data.outer import OuterRule
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.train import boards, metrics
from warpweave.train.options import TrainConfig, parse

# -------------------------------------------------------------------------- train

LLAMA = "--model toy-llama"
TRAIN = {
    "config": Row("--config options.toml", {"engine.clip"}),
    "model": Row("--model small", {"model.layers"}),
    "init_from": Row("--init-from toy", {"starts from", "loaded"}),
    "data": Row("--data other.txt", {"data.source", "data read", "samples", "validation",
                                     "sample"}),
    "tokenizer": Row("--tokenizer words.json", {"data.tokenizer", "data read", "samples",
                                                "validation", "sample"}),
    "packed": Row("--packed", {"documents"}),
    "separator": Row("--separator 32", {"data.separator", "documents"}, "--packed"),
    "dp": Row("--dp 2", {"mesh.dp", "validation", "tokens"}),
    "dp_shard": Row("--dp-shard 1", {"mesh.dp_shard"}, "--dp 2"),
    "tp": Row("--tp 2", {"mesh.tp"}),
    "cp": Row("--cp 2", {"mesh.cp"}),
    "ulysses": Row("--ulysses 2", {"mesh.ulysses"}, "--cp 2"),
    "pp": Row("--pp 2", {"mesh.pp"}),
    "outer": Row("--outer 2", {"mesh.outer", "validation", "tokens"}, "--outer-every 4"),
    "outer_every": Row("--outer-every 5", {"outer.every"}, "--outer-every 4"),
    "outer_lr": Row("--outer-lr 0.3", {"outer.lr"}, "--outer-every 4"),
    "outer_momentum": Row("--outer-momentum 0.3", {"outer.momentum"}, "--outer-every 4"),
    "fragments": Row("--fragments 2", {"outer.fragments"}, "--outer-every 4"),
    "outer_delay": Row("--outer-delay 3", {"outer.delay"}, "--outer-every 4"),
    "outer_mix": Row("--outer-mix 0.3", {"outer.mix"}, "--outer-every 4"),
    "outer_warmup": Row("--outer-warmup 3", {"outer.warmup"}, "--outer-every 4"),
    "server": Row("--server 2", {"servers.servers"}, "--server 1"),
    "staleness": Row("--staleness 2", {"servers.staleness", "servers.joint"}, "--server 1"),
    "compensation": Row("--compensation 0.1", {"servers.compensation"},
                        "--server 1 --staleness 2"),
    "elastic": Row("--elastic 2", {"elastic"}, "--elastic 1 --dp 3 --zero 0"),
    "batch": Row("--batch 3", {"engine.micro_batch_size", "samples", "validation", "tokens"}),
    "dtype": Row("--dtype bf16", {"engine.dtype"}),
    "steps": Row("--steps 7", {"rates", "keys", "samples", "saved", "evaluated", "tokens",
                               "steps"}),
    "lr": Row("--lr 0.5", {"rates"}),
    "lr_schedule": Row("--lr-schedule linear", {"rates"}),
    "min_lr": Row("--min-lr 0.4", {"rates"}),
    "warmup": Row("--warmup 3", {"rates"}),
    "decay": Row("--decay 0.5", {"rates"}, "--lr-schedule wsd"),
    "optimizer": Row("--optimizer sgd", {"rule.betas", "rule.eps", "rule.momentum",
                                         "rule.moments"}),
    "momentum": Row("--momentum 0.5", {"rule.momentum"}, "--optimizer muon"),
    "betas": Row("--betas 0.5 0.6", {"rule.betas"}),
    "eps": Row("--eps 0.1", {"rule.eps"}),
    "weight_decay": Row("--weight-decay 0.7", {"rule.weight_decay"}),
    "clip": Row("--clip 0.3", {"engine.clip"}),
    "seed": Row("--seed 3", {"engine.seed", "data.seed", "keys", "samples", "sample"}),
    "out": Row("--out elsewhere", {"folder", "data.cache"}),
    "max_restarts": Row("--max-restarts 2", set()),  # `test_ends.py`, `test_launch.py`
    "save_every": Row("--save-every 2", {"saved"}),
    "save_minutes": Row("--save-minutes 1e-9", {"saved"}),
    "keep": Row("--keep 5", {"kept"}),
    "resume": Row("--resume", {"begins at", "loaded", "rates", "keys", "samples", "documents",
                               "tokens", "folder", "saved", "kept", "spared", "evaluated",
                               "compared"},
                  "--out earlier"),
    "eval_every": Row("--eval-every 3", {"evaluated"}),
    "early_stop": Row("--early-stop 1", {"rates", "keys", "samples", "saved", "spared",
                                         "evaluated", "tokens"}),
    "eval_batches": Row("--eval-batches 4", {"validation"}),
    "sample": Row("--sample 9", {"sample"}),
    "tensorboard": Row("--tensorboard", {"boards"}),
    "wandb": Row("--wandb project", {"boards"}),
    "timeline": Row("--timeline t.svg", {"recorded"}),
    "device": Row("--device cpu", {"join backend"}),
    "impl": Row("--impl torch", {"engine.impl", "rule.impl"}),
    "tiles": Row("--tiles tiles.json", {"tiles"}),
    "cuda_graph": Row("--cuda-graph", {"engine.cuda_graph"}),
    "check_every": Row("--check-every 3", {"compared"}),
    "check_collectives": Row("--check-collectives", {"compared"}),
    "timeout": Row("--timeout 77", {"engine.timeout", "join timeout", "mesh timeout"}),
    "vocab_size": Row("--vocab-size 300", {"model.vocab_size"}),
    "seq_len": Row("--seq-len 32", {"model.seq_len", "data.seq_len", "samples", "validation",
                                    "tokens"}),
    "layers": Row("--layers 3", {"model.layers"}),
    "width": Row("--width 64", {"model.width"}),
    "heads": Row("--heads 8", {"model.heads"}),
    "kv_heads": Row("--kv-heads 2", {"model.kv_heads"}),
    "hidden": Row("--hidden 96", {"model.hidden"}),
    "positions": Row("--positions rope", {"model.positions"}),
    "norm": Row("--norm rms", {"model.norm"}),
    "activation": Row("--activation swiglu", {"model.activation"}),
    "bias": Row("--bias False", {"model.bias"}),
    "tied": Row("--no-tied", {"model.tied"}),
    "norm_eps": Row("--norm-eps 0.001", {"model.norm_eps"}),
    "rope_theta": Row("--rope-theta 500.0", {"model.rope_theta"}),
    "dropout": Row("--dropout 0.25", {"model.dropout"}),
    "head_size": Row("--head-size 20", {"model.head_size"}),
    "norm_bias": Row("--norm-bias False", {"model.norm_bias"}),
    "qkv_bias": Row("--qkv-bias False", {"model.qkv_bias"}),
    "qk_norm": Row("--qk-norm True", {"model.qk_norm"}),
    "windows": Row("--windows 8 0", {"model.windows"}),
    "norm_place": Row("--norm-place post", {"model.norm_place"}),
    "qk_norm_whole": Row("--qk-norm-whole True", {"model.qk_norm_whole"}, "--qk-norm True"),
    "attention_scale": Row("--attention-scale 0.2", {"model.attention_scale"}),
    "softcap": Row("--softcap 30.0", {"model.softcap"}),
    "sinks": Row("--sinks True", {"model.sinks"}),
    "logit_softcap": Row("--logit-softcap 20.0", {"model.logit_softcap"}),
    "embedding_scale": Row("--embedding-scale 8.0", {"model.embedding_scale"}),
    "local_rope_theta": Row("--local-rope-theta 300", {"model.local_rope_theta"}, LLAMA),
    "zero": Row("--zero 3", {"plan.zero"}),
    "schedule": Row("--schedule gpipe", {"plan.schedule"}),
    "chunks": Row("--chunks 2", {"plan.chunks"}, "--schedule interleaved"),
    "microbatches": Row("--microbatches 3", {"plan.microbatches", "samples", "tokens"}),
    "early_gradients": Row("--no-early-gradients", {"plan.early_gradients"}),
    "sequence_parallel": Row("--no-sequence-parallel", {"plan.sequence_parallel"}),
    "overlap": Row("--overlap none", {"plan.overlap"}),
    "recompute": Row("--recompute full", {"plan.recompute"}),
    "layout": Row("--layout striped", {"plan.layout"}),
    "cp_strategy": Row("--cp-strategy ring", {"plan.cp_strategy"}),
    "reduce": Row("--reduce ordered", {"plan.reduce", "samples"}, "--microbatches 2 --dp 2"),
}  # fmt: skip
BASE = shlex.split(
    "--model toy --data text.txt --batch 2 --steps 6 --warmup 2 --lr 0.1 --eval-every 2 "
    "--eval-batches 3 --sample 5 --seq-len 16 --microbatches 2 --out run"
)


class Engine:
    """A mock that records its calls. Every evaluation is worse than the previous one."""

    def __init__(self, seen: dict[str, Any], model, mesh, plan, **options) -> None:
        self.seen, self.count, self.mesh, self.outer = seen, 0, mesh, None
        self.device, self.graphs = torch.device("cpu"), None
        outer = options.pop("outer")
        seen |= {f"outer.{f.name}": getattr(outer, f.name, None) for f in fields(OuterRule)}
        rule, device = options.pop("rule"), options.pop("device")
        assert device == torch.device("cpu")
        records = {"model": model, "plan": plan, "mesh": mesh.sizes, "rule": rule}
        for what, record in records.items():
            seen |= {f"{what}.{f.name}": getattr(record, f.name) for f in fields(record)}
        seen |= {f"engine.{name}": value for name, value in options.items()}
        seen |= {"rates": [], "keys": [], "samples": [], "validation": [], "documents": set()}
        self.optimizer = SimpleNamespace(
            loss_scale=None, rule=rule, state=dict, load_state=lambda state: None
        )
        self.gpt = SimpleNamespace(blocks={"0": None}, layout=SimpleNamespace(local_len=16))
        self.passes, self.staleness = SimpleNamespace(ahead=0, asynchronous=False), (0,)

    def load(self, kind, tensor) -> None:
        self.seen["loaded"] = kind

    def begin(
        self, tokens, labels, ids, *, lr, key, interrupted, documents, halted, on_action
    ) -> Pending:
        assert halted is None  # on a CPU no step is launched early
        self.seen["rates"].append(lr)
        self.seen["keys"].append(key)
        self.seen["samples"].append((ids.tolist(), tokens.tolist()))
        self.seen["documents"].add(None if documents is None else int(documents.shape[-1] > 2))
        result = torch.tensor([1.0, 1, interrupted, 0])
        return Pending(None, lambda: SimpleNamespace(all=lambda: result))

    def evaluate(self, tokens, labels, documents) -> torch.Tensor:
        self.seen["validation"].append(tokens.tolist())
        self.seen["validation"] = self.seen["validation"][:1]
        self.count += 1
        return torch.tensor(float(self.count))

    def read(self, kind):
        return iter(())

    def generate(self, prompt, length, *, seed) -> torch.Tensor:
        self.seen["sample"] = (prompt.tolist(), length, seed)
        return torch.zeros(length, dtype=torch.int64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Make the files that the options name."""
    folder = tmp_path_factory.mktemp("options")
    text = " ".join(str(i * i % 977) for i in range(1500))
    (folder / "text.txt").write_text(text)
    (folder / "other.txt").write_text(text[::-1])
    (folder / "options.toml").write_text("clip = 0.3\nsteps = 3  # but the command line wins\n")
    vocabulary = {"model": {"type": "WordLevel", "unk_token": "?",
                            "vocab": {"?": 0, **{str(i): i + 1 for i in range(99)}}},
                  "pre_tokenizer": {"type": "Whitespace"}}  # fmt: skip
    (folder / "words.json").write_text(json.dumps(vocabulary))
    write_table(folder / "tiles.json", [
        TileRow("GPU", "attention_fwd", 2, 64, AttentionTile(16, 16, 1, 1), triton.__version__)
    ])  # fmt: skip
    toy = GPT(dataclasses.replace(PRESETS["toy"], seq_len=16))
    parameters = {name: p.detach() for name, p in toy.named_parameters()}
    save_checkpoint(folder / "toy" / "checkpoints", 1, parameters.items(), state={},
                    config=dataclasses.asdict(toy.config))  # fmt: skip
    return folder


def seen_of_train(argv: list[str], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return observations of ``warpweave train`` with these options, on its first rank."""
    seen: dict[str, Any] = {"saved": [], "evaluated": [], "kept": set(), "spared": set()}
    seen["boards"], seen["recorded"], seen["compared"] = [], [], 0
    open_dataset, save = warpweave.data.open_dataset, trainer.BackgroundSaver.save

    def join(mesh: Mesh, *, timeout: float, backend: str | None, port: int | None) -> Session:
        seen["join timeout"], seen["join backend"] = timeout, backend
        return Session(torch.device("cpu"), 0, mesh.world, None, timeout, mesh)

    def connect(mesh: Mesh, device: str, *, timeout) -> ConnectedMesh:
        seen["mesh timeout"] = timeout
        return mesh.seen_from(0)

    def opened(source, **options):
        data = open_dataset(source, **options)
        split = options.pop("split")
        if split == "train":
            seen.update({f"data.{k}": v for k, v in options.items()} | {"data.source": source})
            seen["data read"] = data.fingerprint
        return data

    def saved(saver, where, step, tensors, **options):
        seen["folder"] = where
        seen["saved"].append(step)
        seen["kept"].add(options["keep"])
        seen["spared"].add(options["spare"])
        return save(saver, where, step, tensors, **options)

    def written(self, row) -> None:
        if "val_loss" in row:
            seen["evaluated"].append(row["step"])
        else:
            seen["tokens"] = row["tokens"]

    def described(trainer) -> str:
        seen["begins at"] = trainer.step
        seen["steps"] = trainer.config.steps
        return ""

    class Compared(trainer.Agreement):
        def due(self, step):
            return self._every > 0 and step % self._every == 0

        def after_step(self, step):
            return {}

        def _timed(self, began, marks):
            return self._comparing(True)

        def _comparing(self, due):
            seen["compared"] += due or self._always
            return nullcontext()

    patch.setattr(trainer, "Agreement", Compared)
    patch.setattr(train, "reported", lambda *args, **options: nullcontext())
    patch.setattr(Interrupt, "listen", lambda self: None)
    patch.setattr(train, "join", join)
    patch.setattr(Mesh, "connect", connect)
    patch.setattr(trainer, "Engine", lambda *args, **options: Engine(seen, *args, **options))
    patch.setattr(warpweave.data, "open_dataset", opened)
    patch.setattr(trainer.BackgroundSaver, "save", saved)
    patch.setattr(metrics.Metrics, "write", written)
    patch.setattr(metrics.Metrics, "plot", lambda self: None)
    patch.setattr(train.Trainer, "describe", described)
    patch.setattr(trainer, "open_model", lambda path, group: seen.update({"starts from": path})
                  or SimpleNamespace(tensor=None))  # fmt: skip
    patch.setattr(tiles, "load", lambda path: seen.update(tiles=path))
    for board in ("TensorBoard", "WeightsAndBiases"):
        patch.setattr(boards, board, lambda *args, name=board: seen["boards"].append(name)
                      or SimpleNamespace(flush=list, close=list))  # fmt: skip
    patch.setitem(sys.modules, "wandb", SimpleNamespace(init=None))
    patch.setattr(
        trainer, "write_measured", lambda engine, marks, path: seen["recorded"].append(path)
    )
    config = parse(argv)
    config = config.for_ranks(config.mesh.world)
    config.check()
    assert train.train_rank(config) == 0
    if config.elastic:  # `test_elastic.py` tests the replicas
        seen["elastic"] = config.elastic
    if (plan := config.server_plan) is not None:  # `test_server.py` tests the servers
        seen |= {f"servers.{name}": value for name, value in vars(plan).items()}
    return seen


@pytest.fixture(scope="module")
def plain_runs() -> dict[str, dict[str, Any]]:
    """Cache the observations of runs without the option of a row, which rows share."""
    return {}


ALONE = [
    n for n in TRAIN if TRAIN[n].given or TRAIN[n].changes not in ({f"model.{n}"}, {f"plan.{n}"})
]
TOGETHER = [name for name in TRAIN if name not in ALONE]


@pytest.mark.parametrize("name", ALONE)
def test_an_option_of_train_changes_what_it_says_and_nothing_else(
    name, folder, plain_runs, monkeypatch, capsys
):
    monkeypatch.chdir(folder)

    def run(words: list[str]) -> dict[str, Any]:
        key = shlex.join(words)
        if key not in plain_runs:
            with pytest.MonkeyPatch.context() as patch:
                seen = seen_of_train(BASE + words, patch)
            if TRAIN[name].given != key:
                return seen
            plain_runs[key] = seen
        return plain_runs[key]

    assert differences(TRAIN[name], run) == TRAIN[name].changes


def test_the_fields_of_model_and_plan_arrive_under_their_own_names(folder, monkeypatch, capsys):
    """All are set in one run, each to a value that no other has."""
    monkeypatch.chdir(folder)
    words = " ".join(TRAIN[name].option for name in TOGETHER)
    config = parse(BASE)
    before = vars(config.base) | vars(config.plan)
    seen = seen_of_train([*BASE, *words.split()], monkeypatch)
    for name in TOGETHER:
        (key,) = TRAIN[name].changes
        value, _, given = seen[key], *TRAIN[name].option.partition(" ")[1:]
        said = " ".join(map(str, value if isinstance(value, tuple) else [value]))
        assert said == (given or "False"), name
        assert value != before[name], name


# -------------------------------------------------------------------------- tune

TUNE = {
    "kernels": Row("--kernels gemm", {"problems"}),
    "dtypes": Row("--dtypes fp32", {"problems"}),
    "head_dims": Row("--head-dims 96", {"problems"}),
    "steps": Row("--steps 1", {"steps"}),
    "minutes": Row("--minutes 3", {"minutes"}),
    "output": Row("--output other.json", {"table"}),
    "dry": Row("--dry", {"problems", "steps", "minutes", "table", "compiled for"}),
    "target": Row("--target sm_80", {"compiled for"}, "--dry --minutes 9"),
}


def seen_of_tune(argv: list[str], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return observations of ``warpweave tune`` with these options."""
    seen: dict[str, Any] = {}

    def tuned(todo, bench, output, *, minutes, steps) -> SearchReport:
        seen.update(problems=todo, table=output, minutes=minutes, steps=steps)
        return SearchReport([], [], [])

    def compiled(problem, part, compile_one, steps):
        seen.update({"compiled for": part, "dry steps": steps})
        raise ValueError("enough")

    patch.setattr(tune_command, "tune", tuned)
    patch.setattr(tune_command, "cuda_bench", lambda: SimpleNamespace(device="GPU"))
    patch.setattr(tune_command, "fitting", compiled)
    config = parse_tune(argv)
    if config.dry:
        with pytest.raises(ValueError, match="enough"):
            tune_command.dry_run(config)
    else:
        tune_command.tune_here(config, tune_command.cuda_bench)
    return seen


@pytest.mark.parametrize("name", TUNE)
def test_an_option_of_tune_changes_what_it_says_and_nothing_else(name, monkeypatch, capsys):
    found = differences(TUNE[name], lambda words: seen_of_tune(words, monkeypatch))
    assert found - {"dry steps"} == TUNE[name].changes


# -------------------------------------------------------------------------- the tables are complete


@pytest.mark.parametrize(("table", "record"), [(TRAIN, TrainConfig()), (TUNE, TuneConfig())])
def test_every_option_has_a_row(table, record):
    assert missing(table, record) == set()


# -------------------------------------------------------------------------- a file of options


def test_every_option_comes_back_from_the_file_that_a_run_leaves(tmp_path):
    path, words = tmp_path / "x.toml", [row.option for row in TRAIN.values()]
    config = parse(shlex.split(" ".join(words[1:])))
    path.write_text(write_options(config))
    assert read_options(path, TrainConfig()) == config
    assert len(path.read_text().splitlines()) == len(TRAIN)
    path.write_text(write_options(config, ("config", "resume")))
    assert parse(["--config", str(path), "--resume"]) == config
    now, default = options_of(config), options_of(TrainConfig())
    assert {n for n in now if now[n] == default[n]} == {"config", "model"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stpes = 3", "unknown option 'stpes'; did you mean 'steps'?"),
        ("[plan]\nzero = 1", "unknown option 'plan'"),
        ("config = 'x.toml'", "unknown option 'config'"),
        ("steps = 'many'", "steps must be an integer, got 'many'"),
        ("steps = 3.0", "steps must be an integer, got 3.0"),
        ("steps = true", "steps must be an integer, got True"),
        ("resume = 1", "resume must be true or false or one of auto, got 1"),
        ("lr = '1e-3'", "lr must be a number, got '1e-3'"),
        ("lr = true", "lr must be a number, got True"),
        ("lr = 1" + 400 * "0", "lr must be a number, got 1000"),
        ("data = 3", "data must be a path in quotes, got 3"),
        ("out = 2026-01-01", "out must be a path in quotes, got datetime.date(2026, 1, 1)"),
        ("betas = [0.9]", "betas must be a list of 2 values, each a number, got [0.9]"),
        ("betas = [0.9, 0.95, 0.99]",
         "betas must be a list of 2 values, each a number, got [0.9, 0.95, "),
        ("steps = 'é'", "steps must be an integer, got 'é'"),
        ("steps = " + 9999 * "[", "is not TOML: "),
        ("windows = [8, 0.5]", "windows[1] must be an integer, got 0.5"),
        ("zero = 4", "zero must be one of 0, 1, 2, 3, got 4"),
        ("zero = true", "zero must be one of 0, 1, 2, 3, got True"),
        ("schedule = 'zero bubble'", "schedule must be one of "),
        ("layout = 'balancd'",
         "layout must be one of zigzag, contiguous, striped, balanced, got 'balancd'; did you "
         "mean 'balanced'?"),
        ("seq_len = 8\nseq-len = 9", "seq_len is set twice"),
        ("steps = ", "is not TOML: Invalid value"),
        ("steps = 3 # \xe9".encode("latin-1"), "is not TOML: 'utf-8' codec can't decode"),
        (None, "cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_options_is_one_line_with_file_and_key(tmp_path, capsys, text, says):
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as caught:
        parse(["--config", str(path)])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    separator = " " if text is None or "TOML" in says else ": "
    assert line.startswith(f"warpweave: {path}{separator}{says}")


def test_a_file_gives_options_in_any_spelling_and_the_command_line_wins(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('seq-len = 8\nlr = 1\nwindows = []\nsequence_parallel = false\nout = "a \\"b"')
    found = parse(["--seq-len", "9", f"--config={path}", "--sequence-parallel", "--dp", "None"])
    assert (found.overrides.seq_len, found.overrides.windows) == (9, ())
    assert (found.lr, type(found.lr), found.out) == (1.0, float, Path('a "b'))
    assert found.plan.sequence_parallel
    assert found.config is None


def test_config_file_of_an_earlier_version_is_read_with_its_old_option_value(tmp_path, capsys):
    """`auto` was the name of `bulk`. In a command it is now an error that lists the values."""
    path = tmp_path / "config.toml"
    path.write_text('overlap = "auto"\ncp_strategy = "auto"\nlayout = "zigzag"\n')
    plan = parse(["--config", str(path)]).plan
    assert (plan.overlap, plan.cp_strategy) == ("bulk", "auto")
    with pytest.raises(SystemExit):
        parse(["--overlap", "auto"])
    said = capsys.readouterr().err
    assert "overlap must be one of none, bulk, chunked, fused, got 'auto'" in said
    check(lambda: ParallelPlan(overlap="auto"), "overlap must be one of none, bulk, chunked, fused")


def test_a_value_of_old_is_todays_however_its_key_is_spelt(tmp_path):
    path = tmp_path / "config.toml"
    for key in ("cp-strategy", "cp_strategy"):
        path.write_text(f'{key} = "around"\n')
        found = read_options(path, TrainConfig(), (), {("cp_strategy", "around"): "ring"})
        assert found.plan.cp_strategy == "ring"


@pytest.mark.parametrize("name", ["a\\b'\"\x7f\n", "\U0001f600 é", ""])
def test_names_of_files_and_numbers_come_back_as_they_are(tmp_path, name):
    config = TrainConfig(out=Path(name), lr=0.1 + 0.2, eps=5e-324, clip=1e22, seed=2**70)
    (tmp_path / "x.toml").write_text(write_options(config))
    assert read_options(tmp_path / "x.toml", TrainConfig()) == config
