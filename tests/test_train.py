"""The trainer: a resumed run is the same run, bad input loses nothing, and files of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from close import relative_error
from refused import exits, one_line
from threads import run_threads
from torch.utils._python_dispatch import TorchDispatchMode

import warpweave.train.command as train
from warpweave.checkpoint import CheckpointError, config_digest, open_checkpoint, open_latest
from warpweave.data import write_token_file
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.tile_table import AttentionTile, TileRow, write_table
from warpweave.kernels.runtime.transfer import upload
from warpweave.launch.interrupt import Interrupt
from warpweave.launch.session import Session
from warpweave.model.config import ParallelPlan
from warpweave.model.plain import plain_adamw_step, plain_gpt_loss, plain_init
from warpweave.parallel.mesh import Mesh
from warpweave.prove.expected import plain_config
from warpweave.train.checks import TrainingStopped
from warpweave.train.lr_schedule import learning_rate
from warpweave.train.metrics import Metrics, locked, peak_memory, set_aside, utilisation
from warpweave.train.options import GPTOverrides, TrainConfig, parse
from warpweave.train.resume import check_run, differences
from warpweave.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("undrawn")
PLOT = Metrics._plot
RESULT = ["val_loss", "steps", "stopped", "tokens_per_second", "mesh", "zero", "checkpoint", "plot"]
REFUSALS = (TrainingStopped, CheckpointError)


def _config(folder: Path, **changes) -> TrainConfig:
    """Return a model that trains in a second or less; its data is `folder`/text."""
    text = folder / "text"
    if not text.exists():
        text.write_bytes(b" ".join(b"%d" % (i * i % 977) for i in range(1500)))
    config = TrainConfig(
        model="toy",
        overrides=GPTOverrides(layers=2, width=16, heads=2, seq_len=16, dropout=0.1),
        plan=ParallelPlan(microbatches=2),
        data=text, batch=2, steps=5, warmup=2, lr=0.02, save_every=1, keep=9, eval_every=2,
        eval_batches=1, sample=0, out=folder / "run", timeout=600.0,
    )  # fmt: skip
    return _replace(config, **changes)


def _replace(config: TrainConfig, **changes) -> TrainConfig:
    """Return `config` with other fields, also of its overrides and plan."""
    for inner in ("overrides", "plan"):
        record = getattr(config, inner)
        own = {f.name: changes.pop(f.name) for f in dataclasses.fields(record) if f.name in changes}
        config = dataclasses.replace(config, **{inner: dataclasses.replace(record, **own)})
    return dataclasses.replace(config, **changes)


def _trainer(config: TrainConfig, rank: int = 0, interrupt: Interrupt | None = None) -> Trainer:
    mesh = config.mesh
    session = Session(torch.device("cpu"), rank, mesh.world, None, 60.0, mesh)
    return Trainer(config, session, interrupt)


def _one_step(config: TrainConfig, rank: int = 0) -> Trainer:
    """Train one step, as if the last rank were interrupted during it: all of them stop."""
    interrupt = Interrupt()
    if rank == config.mesh.world - 1:
        interrupt.number = 15
    trainer = _trainer(config, rank, interrupt)
    trainer.run()
    return trainer


def _rows(folder: Path) -> list[dict]:
    """Return the metrics without fields that differ in every run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own = ("tokens_per_second", "peak_memory_mib")
    return [{k: v for k, v in row.items() if k not in own} for row in rows]


def _saved(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    reader = open_latest(folder / "checkpoints")
    assert step is None or reader.step == step
    return {name: reader.tensor(name) for name in reader.names}


def _held(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return all state that a trainer holds on this stage, as logical tensors; collective."""
    return {
        prefix + record.name: tensor.clone()
        for kind, prefix in (("param", ""), ("exp_avg", "exp_avg/"), ("exp_avg_sq", "exp_avg_sq/"))
        for record, tensor, _ in trainer.engine.read(kind)
    }


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[k], b[k]) for k in a)


def _crashed_after(step: int, whole: Path, folder: Path) -> None:
    """Write files of a run that dies after `step`: later metrics, half a row, no new checkpoint."""
    shutil.copytree(whole, folder)
    for path in (folder / "checkpoints").glob("step_*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')


# -------------------------------------------------------------------------- the plain model's run


def _plain_run(config: TrainConfig) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Return the expected metrics and final state: the plain model in float64 on one device."""
    train, held_out = config.open_data("train"), config.open_data("validation")
    model = config.model_config(train.vocab_size)
    plain = plain_config(model)
    params = plain_init(plain, config.seed, torch.float64)
    moments: dict[str, dict[str, torch.Tensor]] = {}
    rows: list[dict] = []
    samples = config.mesh.dp * config.batch

    def documents(labels: torch.Tensor) -> torch.Tensor | None:
        ends = (labels == -100).long()
        return ends.cumsum(1) - ends if config.packed else None

    def evaluate(step: int) -> None:
        count = samples * config.eval_batches
        batch = held_out.fixed_batch(range(count), count=count)
        apart = {"dropout": 0.0, "document": documents(batch[1])}
        total, valid = plain_gpt_loss(params, *batch, plain, **apart)
        rows.append({"step": step, "val_loss": float(total / valid)})

    for step in range(config.steps):
        batch = train.batch(step, range(samples * config.plan.microbatches))
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        key = config.seed * 2**32 + step  # a different mask for every step and seed
        total, valid = plain_gpt_loss(leaves, *batch, plain, seed=key, document=documents(batch[1]))
        loss = total / valid
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        lr, decay = learning_rate(config, step), config.weight_decay
        clip = config.clip or None
        norm = plain_adamw_step(params, grads, moments, step + 1, lr=lr, weight_decay=decay,
                                clip=clip, beta1=config.betas[0], beta2=config.betas[1],
                                eps=config.eps)  # fmt: skip
        rows.append({"step": step + 1, "loss": loss.item(), "grad_norm": norm.item(), "lr": lr,
                     "tokens": (step + 1) * batch[0].numel()})  # fmt: skip
        if config.eval_every and (step + 1) % config.eval_every == 0 and step + 1 < config.steps:
            evaluate(step + 1)
    evaluate(config.steps)
    state = dict(params)
    for name, moment in moments.items():
        state |= {f"exp_avg/{name}": moment["m"], f"exp_avg_sq/{name}": moment["v"]}
    return rows, state


LLAMA = {"model": "toy-llama", "heads": 4, "kv_heads": 2, "hidden": 20}
RUNS = (
    {"steps": 4},  # the last one is a multiple of `eval_every`, but evaluated once
    LLAMA | {"clip": 0.0},
    {"dp": 3, "zero": 2},
    {"pp": 3, "layers": 4},
    {"dp": 2, "tp": 2, "zero": 1},
    {"cp": 2, "tp": 2, "zero": 3, "recompute": "selective", "layout": "striped"} | LLAMA,
    {"dp": 2, "pp": 2, "zero": 0, "schedule": "gpipe"} | LLAMA,
    {"cp": 2, "dp": 2, "zero": 2, "recompute": "full"},
    {"pp": 2, "tp": 2, "sequence_parallel": False},
    {"pp": 4, "layers": 4, "microbatches": 3, "batch": 1},
    {"cp": 2, "cp_strategy": "measured", "betas": (0.7, 0.8), "eps": 0.01},
    {"packed": True},
    {"cp": 2, "cp_strategy": "ring", "packed": True, "separator": ord(" ")},
)


def _run(rank: int, config: TrainConfig) -> None:
    _trainer(config, rank).run()


@pytest.mark.usefixtures("saved_at_once")
@pytest.mark.parametrize("changes", RUNS)
def test_a_run_is_the_plain_models_step_by_step_on_every_mesh(tmp_path, changes):
    """Compares losses, norms, evaluations, weights, moments, with dropout, decay, an active clip.

    Its text consists of many short files, so that no two samples have the same number of labels.
    """
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):
        words = b" ".join(b"%d" % (j * j % 977) for j in range(i, i + 12))
        (folder / f"{i}.txt").write_bytes(words)
    common = {"dtype": "fp64", "seed": 5, "clip": 0.4, "weight_decay": 0.3, "eval_batches": 3}
    config = _config(tmp_path, **{"steps": 3} | common | changes, save_every=0)
    if config.mesh.world == 1:
        _run(0, config)
    else:
        run_threads(config.mesh.world, _run, config)
    rows, state = _plain_run(config)
    assert max(row.get("grad_norm", 0.0) for row in rows) > 0.4
    for row, truth in zip(_rows(config.out), rows, strict=True):
        assert row == pytest.approx(truth, rel=1e-11)
    saved = _saved(config.out, config.steps)
    assert set(saved) == set(state)
    for name, tensor in saved.items():
        assert relative_error(tensor, state[name]) < 1e-8, name


# -------------------------------------------------------------------------- resume


def _whole_and_resumed(rank: int, config: TrainConfig, stops: list[int]) -> None:
    _trainer(config, rank).run()
    for stop in stops:
        out = config.out.with_name(f"{config.out.name}-{stop}")
        if rank == 0:
            _crashed_after(stop, config.out, out)
        if config.mesh.world > 1:
            torch.distributed.barrier()
        trainer = _trainer(_replace(config, out=out, resume=True), rank)
        assert trainer.step == stop
        trainer.run()


@pytest.mark.usefixtures("saved_at_once")
@pytest.mark.parametrize("world", [1, 4])
def test_a_run_resumed_at_any_step_continues_bit_for_bit(tmp_path, world):
    stops = [1, 2, 3, 4] if world == 1 else [3]
    config = _config(tmp_path)
    if world == 1:
        _whole_and_resumed(0, config, stops)
    else:
        config = _replace(config, tp=2, dp=2, zero=2, dtype="bf16")
        run_threads(4, _whole_and_resumed, config, stops)
    rows, state = _rows(config.out), _saved(config.out, 5)
    assert [row["step"] for row in rows] == [1, 2, 2, 3, 4, 4, 5, 5]
    for stop in stops:
        resumed = tmp_path / f"run-{stop}"
        assert _rows(resumed) == rows, stop
        assert _same(_saved(resumed, 5), state), stop


CHAIN = (({"dp": 2}, 3), ({"tp": 2}, 1), ({"pp": 2}, 0), ({"cp": 2}, 2), ({"tp": 2}, 3))


def _along_the_chain(rank: int, config: TrainConfig) -> None:
    for step, (axes, zero) in enumerate(CHAIN, 1):
        micro = 1 if axes.get("dp") else 2  # the global batch stays the same
        now = _replace(config, **axes, zero=zero, microbatches=micro)
        before = _saved(config.out, step)
        held = _held(_trainer(now, rank))
        assert all(torch.equal(held[name], before[name]) for name in held), axes
        if "pp" not in axes:
            assert set(held) == set(before), axes
        torch.distributed.barrier()
        assert _one_step(now, rank).step == step + 1


@pytest.mark.usefixtures("saved_at_once")
def test_run_resumed_on_other_meshes_and_zero_stages_stays_the_same(tmp_path, capsys):
    config = _config(tmp_path, dtype="fp64", steps=7, eval_every=0)
    _trainer(config).run()
    changing = _replace(config, out=tmp_path / "chain")
    _one_step(changing)
    changing = _replace(changing, resume=True)
    run_threads(2, _along_the_chain, changing)
    assert _same(_held(_trainer(changing)), _saved(changing.out, 6))
    _one_step(changing)
    capsys.readouterr()
    for row, truth in zip(_rows(changing.out), _rows(config.out)):
        assert row == pytest.approx(truth, rel=1e-11)
    ours, truth = _saved(changing.out, 7), _saved(config.out, 7)
    for name, tensor in truth.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-8, atol=1e-12)


def test_resuming_a_finished_run_repeats_the_result_and_writes_nothing_new(tmp_path, capsys):
    config = _config(tmp_path, steps=2)
    first = _trainer(config).run()
    rows = _rows(config.out)
    manifest = Path(first["checkpoint"]) / "manifest.json"
    stamp = os.stat(manifest).st_mtime_ns
    again = _trainer(_replace(config, resume=True)).run()
    assert again == first | {"tokens_per_second": 0.0}
    assert _rows(config.out) == rows
    assert os.stat(manifest).st_mtime_ns == stamp
    said = f"nothing to train, evaluating {first['checkpoint']} only: the run has completed all 2"
    assert f"{said} steps\n" in capsys.readouterr().err
    # With more steps it goes on, and says that the schedule is now another one.
    longer = _trainer(_replace(config, resume=True, steps=3, lr=0.01)).run()
    assert longer["steps"] == 3
    assert "steps: saved 2, now 3; lr: saved 0.02, now 0.01" in capsys.readouterr().err


def test_a_resumed_run_says_every_setting_that_is_another(tmp_path, capsys):
    config = _config(tmp_path)
    _one_step(config)
    saved = {"lr": 0.02, "min_lr": 0.1, "warmup": 2, "weight_decay": 0.1, "clip": 1.0,
             "lr_schedule": "cosine", "decay": 0.2, "eps": 1e-8, "packed": False,
             "separator": None}  # fmt: skip
    now = {
        "lr": 0.01, "min_lr": 0.3, "warmup": 1, "weight_decay": 0.2, "clip": 0.5,
        "lr_schedule": "wsd", "decay": 0.4, "eps": 1e-6, "packed": True, "separator": 32,
    }  # fmt: skip
    capsys.readouterr()
    other = {"steps": 6, "microbatches": 3, "dtype": "bf16", "betas": (0.5, 0.9)}
    _trainer(_replace(config, resume=True, **other, **now))
    said = capsys.readouterr().err.strip().split(": ", 2)[2]
    expected = {f"{name}: saved {saved[name]}, now {now[name]}" for name in saved}
    expected |= {"betas: saved [0.9, 0.95], now [0.5, 0.9]"}
    expected |= {"steps: saved 5, now 6", "dtype: saved fp32, now bf16"}
    expected |= {"sequences_per_step: saved 4, now 6", "microbatches: saved 2, now 3"}
    assert set(said.split("; ")) == expected


def test_a_resumed_run_may_change_its_dtype(tmp_path, capsys):
    for dtype in ("fp64", "fp32", "bf16", "fp16"):
        config = _config(tmp_path, dtype=dtype, resume=dtype != "fp64")
        trainer = _one_step(config)
    assert trainer.step == 4
    assert "dtype: saved bf16, now fp16" in capsys.readouterr().err
    assert _saved(config.out)["final_norm.weight"].dtype == torch.float32


def test_a_resume_that_is_another_run_is_refused(tmp_path):
    config = _config(tmp_path)
    _one_step(config)
    other = tmp_path / "other"
    other.write_bytes(config.data.read_bytes()[::-1])
    before = sorted(config.out.rglob("*"))
    for changes, words in (
        ({"width": 32, "heads": 4},
         "a different config; heads: saved 2, now 4; width: saved 16, now"),
        ({"data": other}, "was trained on different data: .*text .*, but this run uses .*other"),
        ({"seed": 3}, "was trained with seed 0, but this run has seed 3; pass --seed 0$"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=words) as caught:
            _trainer(_replace(config, resume=True, **changes))
        one_line(caught)
    assert sorted(config.out.rglob("*")) == before


def test_a_resume_on_other_validation_data_is_announced(tmp_path, capsys):
    """That data is the last tenth of a file. Losses before and after are not comparable."""
    config = _config(tmp_path)
    _one_step(config)
    config = _replace(config, resume=True)
    _trainer(config)
    assert "settings that differ" not in capsys.readouterr().err
    before = config.open_data("validation").fingerprint[-12:]
    text = config.data.read_bytes()
    config.data.write_bytes(text[:-1] + b"~")
    now = config.open_data("validation").fingerprint[-12:]
    _trainer(config)
    said = (
        f"from {config.out}/checkpoints/step_00000001: validation data: saved {before}, now {now}\n"
    )
    assert f"with settings that differ {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokenizer", "what"),
    [({"tokenizer": "bytes"}, "different tokens (tokenizer was bytes, is now cccccccccccc)"),
     ({"tokenizer": 20 * "c"}, "different data"), ({}, "different data")],
)  # fmt: skip
def test_another_tokenizer_is_not_taken_for_another_text(tokenizer, what):
    saved = {"name": "text", "fingerprint": 20 * "a"} | tokenizer
    reader = SimpleNamespace(path="run", state={"data": saved, "seed": 0})
    now = SimpleNamespace(name="text", fingerprint=20 * "b", tokenizer_name=20 * "c")
    with pytest.raises(CheckpointError) as caught:
        check_run(reader, TrainConfig(data="text"), now)
    assert str(caught.value) == (
        f"run was trained on {what}: text (aaaaaaaaaaaa), but this run uses text (bbbbbbbbbbbb)"
    )


def test_a_checkpoint_from_before_a_field_was_there_is_gone_on_from(tmp_path):
    config = _config(tmp_path)
    _one_step(config)
    step = config.out / "checkpoints" / "step_00000001"
    manifest = json.loads((step / "manifest.json").read_bytes())
    for name in ("head_size", "qkv_bias", "qk_norm", "windows", "sinks", "rope_scaling"):
        del manifest["config"][name]
    del manifest["state"]["progress"]
    manifest["config_sha256"] = config_digest(manifest["config"])
    data = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    (step / "manifest.json").write_bytes(data)
    (step / "manifest.sha256").write_text(hashlib.sha256(data).hexdigest())
    trainer = _trainer(_replace(config, resume=True, batch=1, steps=1))
    assert (trainer.step, trainer.progress.tokens, trainer.progress.evaluated) == (1, 64, 1)
    words = r"a different config; qk_norm: saved False, now True$"
    with pytest.raises(CheckpointError, match=words):
        _trainer(_replace(config, resume=True, qk_norm=True))


def test_a_setting_from_before_it_was_there_is_no_other_one():
    state = {"data": {"sequences_per_step": 8}, "settings": {"lr": 1.0}}
    reader, config = SimpleNamespace(state=state, mesh={}), TrainConfig(decay=0.5)
    said = differences(reader, config, 8).split("; ")
    assert set(said) == {"lr: saved 1.0, now 0.001", "decay: saved 0.2, now 0.5"}


def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path, capsys):
    config = _config(tmp_path, steps=3, eval_every=0)
    _trainer(config).run()
    config = _replace(config, resume=True)
    shards = [next((config.out / "checkpoints" / f"step_0000000{n}").glob("rank*"))
              for n in (1, 2, 3)]  # fmt: skip
    data = bytearray(shards[2].read_bytes())
    data[len(data) // 2] ^= 4
    shards[2].write_bytes(data)
    os.truncate(shards[1], len(data) // 2)
    capsys.readouterr()
    trainer = _trainer(config)
    said = capsys.readouterr().err
    assert trainer.step == 1
    assert all(f"warpweave: skipped: {path} " in said for path in shards[1:])
    shards[0].unlink()
    words = f"3 steps, none of them valid; the last error: {shards[0]} is"
    with pytest.raises(CheckpointError, match=words):
        _trainer(config)


# -------------------------------------------------------------------------- steps launched ahead


def _begins(trainer: Trainer) -> list:
    """Return a list that grows with the steps that the trainer begins."""
    begun, begin = [], trainer._begin

    def spied(step, *before):
        begun.append(step)
        return begin(step, *before)

    trainer._begin = spied
    return begun


def test_steps_that_begin_before_the_last_loss_is_read_are_the_same_run(tmp_path):
    """Evaluations, checkpoints and an interrupt come after the same steps, bit for bit."""
    config = _config(tmp_path, dtype="fp16", steps=7, eval_every=3, layers=1)
    plain = _trainer(config)
    plain.engine.optimizer.loss_scale.interval = 2
    plain.run()
    ahead = _replace(config, out=tmp_path / "ahead", save_every=0)
    for stop, order in ((4, "b0 b1 r1 b2 r2 r3 e3 b3 b4 r4"), (None, "b4 b5 r5 r6 e6 b6 r7 e7")):
        trainer = _trainer(ahead)
        trainer.ahead, trainer.engine.optimizer.loss_scale.interval = True, 2
        begun, seen, write = _begins(trainer), [], trainer.metrics.write

        def spied(row, begun=begun, seen=seen, write=write):
            seen.extend(f"b{step}" for step in begun)
            seen.append(f"{'re'['val_loss' in row]}{row['step']}")
            begun.clear()
            write(row)

        def interrupt(*given, t=trainer, stop=stop, begin=trainer._begin):
            t.interrupt.number = 15 if given[0] + 1 == stop else t.interrupt.number
            return begin(*given)

        trainer.metrics.write, trainer._begin = spied, interrupt
        result = trainer.run()
        assert (" ".join(seen), result["steps"]) == (order, stop or 7)
        ahead = _replace(ahead, resume=True)
        end = f"step_0000000{stop or 7}"
        here, there = (open_checkpoint(c.out / "checkpoints" / end) for c in (ahead, config))
        assert here.state["optimizer"] == there.state["optimizer"]
        assert _same(*({n: r.tensor(n) for n in r.names} for r in (here, there)))
    assert _rows(ahead.out) == _rows(config.out)


def test_a_step_reads_one_tensor_of_its_device_when_the_next_one_has_begun(tmp_path, monkeypatch):
    """A host with a GPU would wait for it. Uses SGD, because AdamW's step on a CPU reads a flag."""
    trainer = _trainer(_config(tmp_path, optimizer="sgd", steps=9, eval_every=0, save_every=0))
    trainer.ahead, begun, fetched, seen = True, _begins(trainer), [], []
    cpu, numbers = torch.Tensor.cpu, torch.ops.aten._local_scalar_dense

    def fetch(tensor):
        seen.append(f"read with step {begun[-1]} begun")
        fetched.append(cpu(tensor).clone())  # a copy, as from a GPU
        return fetched[-1]

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is numbers:
                places = [x.untyped_storage().data_ptr() for x in (args[0], *fetched[-1:])]
                if len({*places}) != 1 or not fetched:
                    seen.append("a number of the device's is read")
            return func(*args, **kwargs or {})

    monkeypatch.setattr(torch.Tensor, "cpu", fetch)
    with Reads():
        for _ in range(3):
            trainer._train_step()
    assert seen == [f"read with step {step} begun" for step in (1, 2, 3)]


def test_batches_go_to_a_gpu_by_pinned_memory_and_the_host_goes_on():
    x = mock.Mock(is_cpu=True)
    found = upload(x, torch.device("cuda", 1))
    x.pin_memory().to.assert_called_once_with(torch.device("cuda", 1), non_blocking=True)
    assert found is x.pin_memory().to()


# -------------------------------------------------------------------------- values not finite


def _poisoned(rank: int, config: TrainConfig, where: str) -> tuple[str, bool, int]:
    trainer = _trainer(config, rank)
    trainer.ahead = True  # step 4 has begun when the loss of step 3 is read
    begun = _begins(trainer)

    def poison(_module, _inputs, out):
        if begun[-1:] == [2]:
            if where == "loss":
                return out * math.nan
            out.register_hook(lambda gradient: gradient * math.nan)
        return out

    if rank == 1 and where == "loss":
        trainer.engine.gpt.blocks["1"].register_forward_hook(poison)
    if rank == 0 and where != "loss":
        trainer.engine.gpt.blocks["0"].register_forward_hook(poison)
    with pytest.raises(TrainingStopped) as caught:
        trainer.run()
    assert begun == [0, 1, 2, 3]
    held, saved = _held(trainer), _saved(config.out, 2)
    return str(caught.value), all(torch.equal(held[n], saved[n]) for n in held), trainer.step


@pytest.mark.usefixtures("saved_at_once")
@pytest.mark.parametrize(
    ("where", "axis", "rank"), [("loss", "dp", "1 (dp=1)"), ("gradient norm", "pp", "0 (pp=0)")]
)
def test_nan_on_one_rank_stops_all_and_names_step_and_rank(tmp_path, where, axis, rank):
    config = _config(tmp_path, **{axis: 2}, zero=2, eval_every=0, save_every=2, dropout=0.0)
    first, second = run_threads(2, _poisoned, config, where)
    assert first == second
    words = (
        f"{where} is nan at step 3, first seen on rank {rank}; a rerun did not reproduce it; the "
        f"weights were not updated; the last good checkpoint is {config.out}/checkpoints/"
    )
    assert first == (f"{words}step_00000002", True, 2)  # unchanged weights, and the step


def test_fp16_overflow_shrinks_the_loss_scale_to_1_and_then_stops_the_run(tmp_path):
    trainer = _trainer(_config(tmp_path, dtype="fp16", steps=9, save_every=0, dropout=0.0))
    trainer.engine.optimizer.loss_scale.value.fill_(4.0)

    def poison(_module, _inputs, out):
        out.register_hook(lambda gradient: gradient * math.inf)

    trainer.engine.gpt.blocks["0"].register_forward_hook(poison)
    with (
        mock.patch.object(trainer.metrics, "flush") as flushed,
        pytest.raises(TrainingStopped, match=r"gradient norm is .* at step 2"),
    ):
        trainer.run()  # 4 -> 2 may be the scale's fault; at 1 the scale cannot be to blame
    flushed.assert_called_once_with()  # no board loses earlier rows, although nothing was saved
    assert float(trainer.engine.optimizer.loss_scale.value) == 1.0


def test_an_fp16_run_resumed_around_an_overflow_has_the_same_loss_scale(tmp_path):
    def trained(config: TrainConfig) -> Trainer:
        trainer = _trainer(config)
        scale = trainer.engine.optimizer.loss_scale
        scale.interval = 2
        if not config.resume:
            scale.value.fill_(256.0)

        def spoil(_module, _inputs, out):
            if trainer.step == 2 and out.requires_grad:  # not in the evaluation
                out.register_hook(lambda gradient: gradient * math.inf)

        trainer.engine.gpt.blocks["0"].register_forward_hook(spoil)
        trainer.run()
        return trainer

    config = _config(tmp_path, dtype="fp16", steps=8, layers=1)
    trained(config)
    steps = sorted((config.out / "checkpoints").glob("step_*"))
    scales = [open_checkpoint(path).state["optimizer"]["loss_scale"] for path in steps]
    assert scales == [256, 512, 256, 256, 512, 512, 1024, 1024]
    rows, state = _rows(config.out), _saved(config.out, 8)
    assert [row["step"] for row in rows if row.get("grad_norm", 0) is None] == [3]
    for stop in (2, 3, 4):
        out = tmp_path / f"run-{stop}"
        _crashed_after(stop, config.out, out)
        trained(_replace(config, out=out, resume=True))
        assert _rows(out) == rows, stop
        assert _same(_saved(out, 8), state), stop


def test_a_validation_loss_that_is_no_number_stops_the_run(tmp_path, monkeypatch):
    trainer = _trainer(_config(tmp_path, steps=1))
    monkeypatch.setattr(trainer.engine, "evaluate", lambda *_: torch.tensor(math.inf))
    words = "validation loss is inf at step 1, not seen on any single rank; a rerun did not "
    with pytest.raises(TrainingStopped, match=f"{words}reproduce it; the last good .*_00000001"):
        trainer.run()


# -------------------------------------------------------------------------- files of a run


def test_a_run_leaves_metrics_a_plot_and_the_last_checkpoints(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Metrics, "_plot", PLOT)
    config = _config(tmp_path, keep=2, sample=6, layers=1)
    result = _trainer(config).run()
    out = config.out
    assert list(result) == RESULT
    assert result["mesh"] == {
        "dp": 1, "cp": 1, "tp": 1, "pp": 1, "ulysses": 1, "dp_shard": None, "outer": 1
    }  # fmt: skip
    assert (result["steps"], result["zero"]) == (5, 1)
    assert result["tokens_per_second"] > 0
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert result["plot"] == str(out / "loss.png")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    assert set(steps[0]) == {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second"}
    evaluations = [row for row in rows if "val_loss" in row]
    assert [row["step"] for row in evaluations] == [2, 4, 5]
    assert round(evaluations[-1]["val_loss"], 4) == result["val_loss"]
    assert evaluations[0]["peak_memory_mib"][0] > 10
    kept = sorted(path.name for path in (out / "checkpoints").glob("step*"))
    assert kept == ["step_00000004", "step_00000005"]
    printed = capsys.readouterr()
    assert "--- sample ---" in printed.out
    assert "peak memory per rank: " in printed.out
    assert "loss=" in printed.err
    assert "MiB]" in printed.err


def test_a_step_that_takes_long_once_does_not_count_in_the_rate(tmp_path, monkeypatch):
    trainer = _trainer(_config(tmp_path, steps=3, save_every=0))
    took = iter([100.0, 0.5, 0.25])

    def step():
        trainer.step += 1
        return {"step": trainer.step, "loss": 1.0}, next(took), False

    monkeypatch.setattr(trainer, "_train_step", step)
    monkeypatch.setattr(trainer, "save", lambda: None)
    assert trainer.run()["tokens_per_second"] == round(2 * 64 / 0.75, 1)


def test_the_options_that_a_run_leaves_are_the_same_run_bit_for_bit(tmp_path, capsys):
    config = _config(tmp_path, steps=4, eval_every=3, kv_heads=1, tied=False, seed=3, clip=0.1,
                     betas=(0.7, 0.8), lr_schedule="wsd", decay=0.5)  # fmt: skip
    _one_step(config)
    _trainer(_replace(config, resume=True)).run()
    again = parse(["--config", str(config.out / "config.toml"), "--out", str(tmp_path / "again")])
    assert again == _replace(config, out=tmp_path / "again", dtype="fp32")  # a CPU's
    _trainer(again).run()
    assert _rows(config.out) == _rows(again.out)
    assert _same(_saved(config.out, 4), _saved(again.out, 4))


LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: 1.0, 12: 0.5}


def _with_losses(config: TrainConfig) -> Trainer:
    """Make a trainer whose evaluations are those of `LOSSES`."""
    trainer = _trainer(config)
    trainer.engine.evaluate = lambda *_: torch.tensor(LOSSES[trainer.step])
    return trainer


def test_early_stop_keeps_the_best_checkpoint_and_its_count_across_a_resume(tmp_path, capsys):
    config = _config(tmp_path, steps=12, keep=1, save_every=3, early_stop=2, layers=1)
    result = _with_losses(config).run()
    assert (result["steps"], result["val_loss"], result["stopped"]) == (8, 2.0, "early")
    assert (result["lowest_val_loss"], result["lowest_step"]) == (2.0, 4)
    err = capsys.readouterr().err
    assert "the run stopped early at step 8, after 2 evaluations without a validation loss below " \
        "2.0000 (step 4)" in err  # fmt: skip
    shown = [line.split(": ", 1)[1] for line in err.split("\n") if ": validation loss" in line]
    assert shown == [f"step {at}: validation loss {LOSSES[at]:.4f}" for at in (2, 4, 6, 8)]
    kept = sorted(path.name for path in (config.out / "checkpoints").glob("step*"))
    assert kept == ["step_00000004", "step_00000008"]
    rows, resumed = _rows(config.out), _replace(config, resume=True)
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 6, 8]
    assert _with_losses(resumed).run() == result | {"tokens_per_second": 0.0}
    assert "step_00000008 only: the run stopped early at step 8" in capsys.readouterr().err
    assert _rows(config.out) == rows
    interrupted = _config(tmp_path, out=tmp_path / "b", steps=12, keep=1, early_stop=2, layers=1)
    trainer = _with_losses(interrupted)
    train_step = trainer._train_step
    trainer._train_step = lambda: (*train_step()[:2], trainer.step == 6)
    trainer.run()
    assert _with_losses(_replace(interrupted, resume=True)).run()["steps"] == 8
    assert _rows(interrupted.out) == rows
    longer = _with_losses(_replace(resumed, early_stop=3)).run()
    assert (longer["steps"], longer["lowest_step"], longer["val_loss"]) == (12, 12, 0.5)
    assert longer["stopped"] is False


def test_a_new_run_moves_an_earlier_one_aside(tmp_path, capsys):
    config = _config(tmp_path, steps=1, eval_every=0)
    for _ in range(3):
        _trainer(config).run()
    assert f"run in {config.out} to {config.out}/earlier-2" in capsys.readouterr().err
    for folder in (config.out, config.out / "earlier-1", config.out / "earlier-2"):
        assert len(_rows(folder)) == 2
        assert _saved(folder, 1)
    shutil.rmtree(config.out / "earlier-1")  # a user may do this; other folders remain
    parts = {path.name for path in config.out.iterdir() if path.name != "earlier-2"}
    for name in (more := {"origin", "tensorboard", "wandb"}):  # not every run has these
        (config.out / name).mkdir(exist_ok=True)
    set_aside(config.out)
    assert _saved(config.out / "earlier-1", 1)
    assert {path.name for path in (config.out / "earlier-1").iterdir()} == parts | more
    assert {path.name for path in config.out.iterdir()} == {"earlier-1", "earlier-2"}


def test_tokens_outside_the_data_are_left_out_of_the_sample(tmp_path, monkeypatch):
    trainer = _trainer(_config(tmp_path, vocab_size=300, sample=3, seed=4))
    asked = []

    def generate(prompt, length, *, seed):
        asked.append((bytes(prompt.tolist()), length, seed))
        return torch.tensor([256, 65, 299, 255, 66, 257])

    monkeypatch.setattr(trainer.engine, "generate", generate)
    assert trainer._sample_text() == "A\ufffdB"  # 256 bytes, one of which begins no character
    text = trainer.config.data.read_bytes()  # its last twentieth is for validation
    assert asked == [(text[-round(len(text) / 20) :][:8], 3, 4)]


def test_launches_of_a_run_take_the_tiles_of_the_table_that_it_was_given(tmp_path):
    row = TileRow("GPU", "attention_fwd", 2, 64, AttentionTile(16, 16, 1, 1), triton.__version__)
    write_table(tmp_path / "tiles.json", [row])
    try:
        _trainer(_config(tmp_path, tiles=tmp_path / "tiles.json"))
        assert tiles.find_on("attention_fwd", 90, "GPU", 2, 64) == row.tile
        _trainer(_config(tmp_path))
        assert tiles.find_on("attention_fwd", 90, "GPU", 2, 64) != row.tile
    finally:
        tiles.load(None)


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [("NVIDIA H100 80GB HBM3", "bf16", 989e12), ("NVIDIA A100-SXM4-40GB", "fp16", 312e12),
     ("NVIDIA A100-SXM4-40GB", "fp32", None), ("Unknown", "bf16", None)],
)  # fmt: skip
def test_utilisation_is_of_all_ranks_of_a_known_peak(tmp_path, monkeypatch, device, dtype, peak):
    trainer = _trainer(_config(tmp_path, dtype=dtype))

    def found() -> dict[str, float]:
        return utilisation(1e9, trainer.model, dtype, trainer.session)

    assert found() == {}  # on a CPU
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    there = dataclasses.replace(trainer.session, device=torch.device("cuda"), world=4)
    monkeypatch.setattr(trainer, "session", there)
    flops = 1e9 * trainer.model.step_flops(16) / 16
    assert found() == ({"mfu": pytest.approx(flops / (4 * peak), rel=1e-3)} if peak else {})


def test_the_peak_of_a_gpu_is_what_was_allocated_in_mib(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *device: 3 * 2**20)
    monkeypatch.setattr(torch, "tensor", lambda values, device: torch.Tensor(values))
    mesh = mock.Mock(group=lambda axis: None)
    assert peak_memory(torch.device("cuda"), mesh) == [3.0]


def test_dropout_keys_tell_seeds_of_31_bits_and_steps_of_32_apart():
    numbers = [0, 1, 2**15, 2**16, 2**24 + 1, 2**30, 2**31 - 1]
    keys = {TrainConfig(seed=seed).dropout_key(step) for seed in numbers for step in numbers}
    assert len(keys) == 49


def test_token_files_and_their_vocabulary_train(tmp_path):
    config = _config(tmp_path, data=tmp_path / "tokens.bin", vocab_size=7, steps=1, sample=3)
    write_token_file(config.data, np.arange(900, dtype=np.int64) % 7, vocab_size=7)
    assert _trainer(config).run()["steps"] == 1


# -------------------------------------------------------------------------- errors


REFUSED = {
    r"hidden \(31\) is not divisible by tp \(2\)": {"tp": 2, "hidden": 31},
    r"width \(16\) is not divisible by heads \(3\)": {"heads": 3},
    r"batch x seq_len / cp \(17\) is not divisible by tp \(2\)": {
        "tp": 2, "seq_len": 17, "batch": 1
    },
    "mesh axis dp must be a positive integer, got 0": {"dp": 0},
    "betas must be in .0, 1., got .0.9, 1.0": {"betas": (0.9, 1.0)},
    "vocab_size = 100 is smaller than the data's 256": {"vocab_size": 100},
    "vocab_size = 0 is smaller than the data's": {"vocab_size": 0},
    "missing.txt does not exist": {"data": Path("missing.txt")},
    "its train split has 0 tokens, but one sample needs seq_len . 1 = 17": {"data": "empty"},
    "has no file": {"data": "folder"},
    "missing.json cannot be read": {"tiles": Path("missing.json")},
    "nothing to resume from: no checkpoint in .*run/checkpoints": {"resume": True},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_in_one_line_before_anything_is_written(tmp_path, message):
    changes = dict(REFUSED[message])
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    if isinstance(changes.get("data"), str):
        changes["data"] = tmp_path / changes["data"]
    config = _config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message.replace(".", r".")) as caught:
        config.check()
    one_line(caught)
    assert not config.out.exists()


def test_dp_takes_the_ranks_that_are_left(tmp_path):
    config = _config(tmp_path, tp=2, pp=2)
    assert config.mesh == Mesh(dp=1, tp=2, pp=2)
    assert config.for_ranks(4).dp == 1
    assert config.for_ranks(12).mesh == Mesh(dp=3, tp=2, pp=2)
    hybrid = _replace(config, dp_shard=2)
    assert hybrid.for_ranks(16).mesh == Mesh(dp=4, tp=2, pp=2, dp_shard=2)
    with pytest.raises(ValueError, match=r"dp \(3\) is not divisible by dp_shard \(2\)"):
        hybrid.for_ranks(12)
    for ranks in (2, 6):
        with pytest.raises(ValueError, match=f"dp=any x cp=1 x tp=2 x pp=2 has .* {ranks} were"):
            config.for_ranks(ranks)
    with pytest.raises(ValueError, match=r"dp=1 x .* has 4 ranks, but 8 were started"):
        _replace(config, dp=1).for_ranks(8)


def _arguments(config: TrainConfig) -> list[str]:
    names = {config.overrides: ("layers", "width", "heads", "seq_len"),
             config: ("model", "data", "steps", "out", "tp")}  # fmt: skip
    return [f"--{n.replace('_', '-')}={getattr(of, n)}" for of, own in names.items() for n in own]


def _refused(config: TrainConfig, capsys) -> str:
    return exits(lambda: train.main(_arguments(config)), capsys)


def test_the_command_refuses_with_2_and_one_line(tmp_path, capsys):
    said = _refused(_config(tmp_path, tp=3), capsys)
    assert re.fullmatch(r"warpweave: .*\(2\) is not divisible by tp \(3\)", said), said


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    config = _config(tmp_path, out=tmp_path / "file" / "run")
    said = f"warpweave: --out {config.out} cannot be written to: Not a directory"
    assert _refused(config, capsys) == said


def test_two_jobs_cannot_share_a_folder(tmp_path, capsys):
    config = _config(tmp_path)
    for _ in range(2):  # the folder is available again in between
        with locked(config.out):
            assert f"another job is writing to {config.out}" in _refused(config, capsys)


def test_only_torchruns_rank_0_reports_a_mesh_that_does_not_fit(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for local, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", local)
        monkeypatch.setenv("LOCAL_RANK", local)
        assert len(_refused(_config(tmp_path, tp=2), capsys).splitlines()) == lines
    assert not (tmp_path / "run").exists()
