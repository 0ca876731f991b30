"""Each program of README and of docs/ runs when pasted alone, and each command's options exist.

Programs are blocks of ``python``, fragments of programs are ``py``, and commands are ``sh``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch

from warpweave.checkpoint import save_checkpoint
from warpweave.cli.command_line import read_command_line
from warpweave.cli.toml import read_options
from warpweave.data import open_dataset
from warpweave.machine.doctor.options import DoctorConfig
from warpweave.machine.tune.options import TuneConfig
from warpweave.model.gpt import GPT, PRESETS, GPTConfig
from warpweave.parallel.schedule import FAMILIES, to_csv
from warpweave.plan.memory import TrainingStep, estimate
from warpweave.plan.options import PlanConfig
from warpweave.prove import ProveConfig
from warpweave.train.options import TrainConfig
from warpweave.train.sample_options import SampleConfig

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
CONFIGS = {
    "train": TrainConfig, "prove": ProveConfig, "plan": PlanConfig, "doctor": DoctorConfig,
    "sample": SampleConfig, "tune": TuneConfig,
}  # fmt: skip

PLANNED = {  # as written by ``warpweave plan --out``
    "dp": 1, "cp": 1, "tp": 1, "pp": 2, "zero": 1, "schedule": "1f1b", "chunks": 1, "batch": 1,
    "microbatches": 4, "recompute": "none", "sequence_parallel": True, "overlap": "bulk",
}  # fmt: skip


def _blocks(page: Path, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for kind, text in blocks if kind == language]


def _commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return (command, its options) for every call of warpweave in a page's shell blocks."""
    found = []
    for line in "".join(_blocks(page, "sh")).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True) if "warpweave" in line else []
        at = words.index("warpweave") + 1 if "warpweave" in words[:-1] else 0
        if at and words[at] in CONFIGS:
            found.append((words[at], words[at + 1 :]))
        elif "warpweave.train" in words:
            found.append(("train", words[words.index("warpweave.train") + 1 :]))
    return found


PROGRAMS = [
    pytest.param(page.name, number, text, id=f"{page.name}-{number}")
    for page in (README, *PAGES)
    for number, text in enumerate(_blocks(page, "python"))
]
COMMANDS = [(page.name, *found) for page in (README, *PAGES) for found in _commands(page)]


def _layers(names: dict) -> None:
    assert names["y"].shape == (2, 16, 64)
    assert all(p.grad is not None for p in names["gpt"].parameters())


def _hugging_face(names: dict) -> None:
    changed = {type(m).__name__ for m in names["model"].modules() if "forward" in vars(m)}
    assert changed == {"LlamaForCausalLM", "LlamaMLP", "LlamaRMSNorm"}
    assert names["model"].config._attn_implementation == "warpweave"


def _kernels(names: dict) -> None:
    assert names["y"].shape == names["q"].shape == (2, 16, 4, 16)
    assert names["loss"].isfinite()


def _weights(names: dict) -> None:
    parameters = names["gpt"].named_parameters()
    assert all(torch.equal(p, names["saved"].tensor(name)) for name, p in parameters)


def _convert(names: dict) -> None:
    assert names["found"].config.heads == 4
    assert Path("runs", "hf-toy", "config.json").is_file()


def _make_train() -> None:
    """Make the files that `make train` leaves, with a smaller model."""
    config = {"vocab_size": 11, "seq_len": 4, "layers": 1, "width": 8, "heads": 2}
    params = {name: p.detach() for name, p in GPT(GPTConfig(**config)).named_parameters()}
    moments = {f"exp_avg/{name}": torch.zeros_like(p) for name, p in params.items()}
    folder = Path("runs", "train", "checkpoints")
    save_checkpoint(folder, 500, (params | moments).items(), config=config, state={})


def _nanogpt(names: dict) -> None:
    assert len(open_dataset("train.bin", seq_len=16).tokens) > 1000


# Assertions after a program that asserts nothing itself.
CHECKS = {
    ("README.md", 0): _layers, ("README.md", 1): _hugging_face, ("index.md", 0): _hugging_face,
    ("library.md", 0): _layers, ("library.md", 2): _kernels, ("library.md", 3): _weights,
    ("library.md", 4): _convert, ("from_nanogpt.md", 1): _nanogpt,
}  # fmt: skip


@pytest.mark.parametrize(("page", "number", "text"), PROGRAMS)
def test_a_program_runs_alone(tmp_path, monkeypatch, page, number, text):
    monkeypatch.chdir(tmp_path)
    _make_train()
    Path("train.bin").write_bytes(bytes(4000))  # as nanoGPT's prepare.py writes it
    if "from transformers" in text:
        pytest.importorskip("transformers", reason="an extra of its own")
    names: dict = {"__name__": "__main__"}
    exec(text, names)
    CHECKS.get((page, number), lambda names: None)(names)


@pytest.mark.parametrize(("page", "command", "options"), COMMANDS)
def test_a_command_has_the_options_that_it_is_given(tmp_path, monkeypatch, page, command, options):
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text("".join(f"{n} = {json.dumps(v)}\n" for n, v in PLANNED.items()))
    Path("mine.csv").write_text(to_csv(FAMILIES["zb-v"].make(2, 4, 2)))  # as in docs/schedules.md
    kind = CONFIGS[command]
    assert isinstance(read_command_line(kind, command, None, options), kind)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_file_of_options_has_only_options(tmp_path, page):
    for text in _blocks(page, "toml"):
        (tmp_path / "run.toml").write_text(text)
        read_options(tmp_path / "run.toml", TrainConfig())


def test_the_figures_of_the_layout_page_are_the_estimates():
    model, rows = "", 0
    for line in (ROOT / "docs" / "which_layout.md").read_text().splitlines():
        found = re.fullmatch(r"\|(?: ([\w-]+),.*)? \| `(.*)` \|((?: [\d.]+ \|)+)", line)
        if found is None:
            continue
        model, rows = found[1] or model, rows + 1
        words = ["--model", model, *shlex.split(found[2])]
        config = read_command_line(TrainConfig, "train", None, words)
        step = TrainingStep(PRESETS[model], config.mesh, config.plan, 1, "bf16", "cuda")
        most = max(estimate(step), key=lambda rank: rank.total)
        kinds = ("weights", "gradients", "optimizer", "activations", "gpu", "total")
        parts = [f"{getattr(most, kind) / 2**30:.1f}" for kind in kinds]
        assert parts == re.findall(r"[\d.]+", found[3]), line
    assert rows == 11


def test_nothing_of_the_pages_is_passed_over():
    programs = Counter(program.values[0] for program in PROGRAMS)
    commands = Counter(page for page, *_ in COMMANDS)
    pages = {"from_hugging_face.md", "from_liger.md", "from_flash_attention.md", "from_nanogpt.md",
             "from_transformer_engine.md", "train_from_scratch.md", "which_layout.md"}  # fmt: skip
    assert set(programs) == pages | {"README.md", "index.md", "library.md", "commands.md"}
    assert (programs["README.md"], programs["library.md"]) == (2, 5)
    assert set(CHECKS) <= {(page, n) for page, n, _ in (program.values for program in PROGRAMS)}
    assert commands["README.md"] >= 3
    assert commands["commands.md"] >= 13
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
