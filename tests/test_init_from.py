"""Training continues from a transformers model as transformers itself would, on any mesh."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from close import relative_error
from safetensors.torch import load_file
from threads import run_threads
from tokenizers import Tokenizer, models, pre_tokenizers

from warpweave.checkpoint import CheckpointError, open_latest
from warpweave.convert import ConvertError, from_hf, to_hf
from warpweave.data import write_token_file
from warpweave.launch.session import Session
from warpweave.model.config import ParallelPlan
from warpweave.train import command as train
from warpweave.train.lr_schedule import learning_rate
from warpweave.train.options import GPTOverrides, TrainConfig
from warpweave.train.trainer import Trainer

STEPS = 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """Save a random Llama with transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.1, pad_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("hf") / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _config(folder: Path, source: Path, **changes) -> TrainConfig:
    """Return a short training on numbers, from `source`."""
    text = folder / "text"
    if not text.exists():
        text.write_bytes(b" ".join(b"%d" % (i * i % 977) for i in range(1500)))
    return TrainConfig(
        **{
            "init_from": source, "overrides": GPTOverrides(seq_len=16), "data": text, "batch": 2,
            "plan": ParallelPlan(microbatches=2), "steps": STEPS, "warmup": 4, "lr": 0.01,
            "eval_every": 0, "eval_batches": 1, "sample": 0, "out": folder / "run",
            "timeout": 600.0,
        } | changes
    )  # fmt: skip


def _trainer(config: TrainConfig, rank: int = 0) -> Trainer:
    mesh = config.mesh
    return Trainer(config, Session(torch.device("cpu"), rank, mesh.world, None, 600.0, mesh))


def _losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def _theirs(config: TrainConfig, steps: int) -> tuple[list[float], torch.nn.Module]:
    """Run the same steps with transformers and torch. Return the losses, and the trained model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.init_from)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    data, losses = config.open_data("train"), []
    for step in range(steps):
        tokens, labels = data.batch(step, range(4))
        logits = model(tokens).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, config.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_twenty_steps_are_those_of_transformers_and_go_back_to_it(llama, tmp_path):
    config = _config(tmp_path, llama)
    config.check()
    trainer = _trainer(config)
    assert f"starts from {llama}" in trainer.describe()
    result = trainer.run()
    losses, model = _theirs(config, STEPS)
    ours = _losses(config.out)
    assert losses[0] - losses[-1] > 1  # it learns
    assert max(abs(a - b) / b for a, b in zip(ours, losses, strict=True)) < 1e-5
    out = to_hf(result["checkpoint"], tmp_path / "back", like=llama)
    back = load_file(out / "model.safetensors")
    trained = model.state_dict()
    assert set(back) == set(trained)
    for name in back:
        assert relative_error(back[name], trained[name]) < 1e-3, name
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"))  # its text was bytes
    assert from_hf(tmp_path / "back").fields == from_hf(llama).fields | ends


def test_a_gemma_goes_on_as_transformers_does(tmp_path):
    """Covers norms of 1 + w, capped logits, a scaled embedding, alternating windows."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        initializer_range=0.1, pad_token_id=None, sliding_window=8,
        attn_logit_softcapping=3.0, final_logit_softcapping=4.0,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    config = _config(tmp_path, tmp_path / "gemma", steps=6)
    _trainer(config).run()
    losses, _ = _theirs(config, 6)
    ours = _losses(config.out)
    assert losses[0] - losses[-1] > 0.5  # it learns
    assert max(abs(a - b) / b for a, b in zip(ours, losses, strict=True)) < 1e-5


def _on_ranks(rank: int, config: TrainConfig) -> None:
    _trainer(config, rank).run()


@pytest.mark.usefixtures("saved_at_once")
def test_four_ranks_start_from_the_same_weights(llama, tmp_path):
    config = _config(tmp_path, llama, tp=2, pp=2, steps=3)
    run_threads(4, _on_ranks, config)
    losses, _ = _theirs(config, 3)
    ours = _losses(config.out)
    assert max(abs(a - b) / b for a, b in zip(ours, losses, strict=True)) < 1e-5


def test_a_checkpoint_of_ours_goes_on_with_other_data_as_a_new_run(llama, tmp_path):
    first = _config(tmp_path, llama, steps=2)
    _trainer(first).run()
    other = tmp_path / "other"
    other.write_bytes(first.data.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match="was trained on different data"):
        _trainer(dataclasses.replace(first, data=other, resume=True))
    saved = open_latest(first.out / "checkpoints")
    for source in (first.out, saved.path):
        config = dataclasses.replace(first, init_from=source, data=other, out=tmp_path / "second")
        config.check()
        trainer = _trainer(config)
        assert trainer.step == 0
        for record, tensor, _ in trainer.engine.read("param"):
            assert torch.equal(tensor, saved.tensor(record.name)), record.name
        assert not any(m.any() for _, m, _ in trainer.engine.read("exp_avg"))


def test_a_run_that_started_so_is_resumed_from_its_own_checkpoint(llama, tmp_path):
    config = _config(tmp_path, llama, steps=4, save_every=2)
    _trainer(config).run()
    whole = _losses(config.out)
    short = dataclasses.replace(config, steps=4, out=tmp_path / "again", save_every=2)
    stopped = _trainer(short)
    for _ in range(2):
        stopped._train_step()
    stopped.save()
    stopped.saver.wait()
    resumed = _trainer(dataclasses.replace(short, resume=True))
    assert resumed.step == 2
    assert "starts from" not in resumed.describe()
    resumed.run()
    assert _losses(short.out)[-2:] == whole[-2:]


def test_the_models_tokenizer_is_the_default(llama, tmp_path):
    words = Tokenizer(models.WordLevel({str(i): i for i in range(99)} | {"?": 99}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    config = _config(tmp_path, llama)
    assert config.open_data("train").vocab_size == 256
    words.save(str(llama / "tokenizer.json"))
    try:
        assert config.open_data("train").vocab_size == 100
        assert config.token_cache == config.out / "tokens"
        assert config.model_config(100).vocab_size == 256  # that of the weights, not of the data
        ids = np.arange(999, dtype=np.uint16) % 7
        write_token_file(tmp_path / "tokens.bin", ids, vocab_size=7)
        np.save(tmp_path / "tokens.npy", ids)
        for name in ("tokens.bin", "tokens.npy"):  # its tokens are ids already
            tokens = dataclasses.replace(config, data=tmp_path / name)
            assert tokens.open_data("train").vocab_size == 7
    finally:
        (llama / "tokenizer.json").unlink()
    for other in ("tokenizer.model", "vocab.json", "tokenizer_config.json"):
        (llama / other).touch()
        try:
            with pytest.raises(ConvertError, match=rf"has {other} but no tokenizer.json, "):
                config.open_data("train")
        finally:
            (llama / other).unlink()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 3},
         r"blocks.2.attention_norm.weight: .* has no such tensor, but .* shape \(16,\)$"),
        ({"width": 32}, r"embedding.weight: .* has shape \(256, 16\), but .* shape \(256, 32\)$"),
        ({"vocab_size": 300},
         r"embedding.weight: .* has shape \(256, 16\), but .* shape \(300, 16\)$"),
        ({"tied": True}, r"head.weight: .* has shape \(256, 16\), but .* no such tensor$"),
    ],
)  # fmt: skip
def test_options_that_the_weights_do_not_fit_are_refused(options, message, llama, tmp_path):
    config = _config(tmp_path, llama, overrides=GPTOverrides(seq_len=16, **options))
    with pytest.raises(ValueError, match=message):
        config.check()


def test_data_with_more_words_than_the_model_is_refused(llama, tmp_path):
    with pytest.raises(ValueError, match=r"^vocab_size = 256 is smaller than the data's 300$"):
        _config(tmp_path, llama).model_config(300)


def test_a_folder_that_is_no_model_ends_the_command_in_one_line(tmp_path, capsys):
    with pytest.raises(ConvertError, match="is not a transformers model"):
        _config(tmp_path, tmp_path).check()
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(SystemExit) as caught:
        train.main(["--init-from", str(tmp_path), "--out", str(tmp_path / "run")])
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip().count("\n") == 0
    assert not (tmp_path / "run").exists()
    for target in ("nowhere", "manifest.json"):  # links are rejected, not followed
        (tmp_path / "manifest.json").unlink()
        (tmp_path / "manifest.json").symlink_to(target)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            _config(tmp_path, tmp_path).check()
