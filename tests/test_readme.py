"""Each of README's programs runs when it is pasted alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from warpweave.checkpoint import save_checkpoint
from warpweave.gpt import GPT, GPTConfig

README = Path(__file__).resolve().parents[1] / "README.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def _layers(names: dict) -> None:
    assert names["y"].shape == (2, 16, 64)
    assert all(p.grad is not None for p in names["gpt"].parameters())


def _hugging_face(names: dict) -> None:
    assert {e.kind for e in names["report"].replaced()} == {"norm", "mlp", "attention", "loss"}


def _kernels(names: dict) -> None:
    assert names["y"].shape == names["q"].shape == (2, 16, 4, 16)
    assert names["loss"].isfinite()


def _weights(names: dict) -> None:
    parameters = names["gpt"].named_parameters()
    assert all(torch.equal(p, names["saved"].tensor(name)) for name, p in parameters)


def _make_train() -> None:
    """What `make train` leaves, of a smaller model."""
    config = {"vocab_size": 11, "seq_len": 4, "layers": 1, "width": 8, "heads": 2}
    params = {name: p.detach() for name, p in GPT(GPTConfig(**config)).named_parameters()}
    moments = {f"exp_avg/{name}": torch.zeros_like(p) for name, p in params.items()}
    folder = Path("runs", "train", "checkpoints")
    save_checkpoint(folder, 500, (params | moments).items(), config=config, state={})


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs_alone(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    _make_train()
    if "transformers" in PROGRAMS[number]:
        pytest.importorskip("transformers", reason="an extra of its own")
    names: dict = {}
    exec(PROGRAMS[number], names)
    (_layers, _hugging_face, _kernels, _weights)[number](names)
