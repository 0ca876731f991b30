"""The planner: memory and time by closed forms, and the layout that is chosen."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from warpweave.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.dtypes import DTYPES
from warpweave.gpt import GPT
from warpweave.parallel.mesh import Mesh
from warpweave.plan.memory import (
    SIZES,
    States,
    TrainingStep,
    block_activations,
    live_blocks,
    sharded,
    units_of,
)

# ---------------------------------------------------------------- memory

TINY = {"vocab_size": 101, "seq_len": 16, "layers": 5, "width": 32, "heads": 4}
STYLES = [
    {},
    {"tied": False, "bias": False, "kv_heads": 2, "activation": "swiglu", "norm": "rms"},
    {"positions": "rope", "qk_norm": True, "norm_place": "sandwich", "head_size": 16},
    {"positions": "rope", "qk_norm": True, "qk_norm_whole": True, "sinks": True, "hidden": 88},
    {"qkv_bias": False, "norm_bias": False, "norm_place": "post", "activation": "geglu"},
    {"qkv_bias": True, "bias": False, "kv_heads": 2, "activation": "relu2"},
]


@pytest.mark.parametrize("style", STYLES)
def test_parameters_are_counted_as_the_model_has_them(style: dict) -> None:
    """Each unit's closed form against the parameters of the model on the meta device."""
    config = GPTConfig(**TINY | style)
    for mesh, plan in (
        (Mesh(), ParallelPlan()),
        (Mesh(tp=2), ParallelPlan()),
        (Mesh(tp=2, pp=2, dp=2), ParallelPlan(schedule="interleaved", chunks=2, microbatches=2)),
    ):
        for rank in range(mesh.pp):
            at = mesh.seen_from(mesh.rank_at(pp=rank))
            found: dict[str, int] = {}
            for name, param in GPT(config, mesh=at, plan=plan, device="meta").named_parameters():
                parts = name.split(".")
                unit = parts[1] if parts[0] == "blocks" else parts[0]
                found[unit] = found.get(unit, 0) + param.numel()
            assert units_of(config, mesh, plan, rank) == found


def test_sizes_are_those_of_the_dtypes() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == SIZES


def test_zero_is_that_of_the_papers_first_figure() -> None:
    """arXiv:1910.02054: 7.5 B parameters, 64 ranks, K = 12, in GB as printed there."""
    whole = States(*(7_500_000_000 * each for each in (2, 2, 12)))
    found = [sum(sharded(whole, zero, 64)) / 1e9 for zero in range(4)]
    assert [round(gb, 1) for gb in found] == [120.0, 31.4, 16.6, 1.9]
    assert found == pytest.approx([120, 30 + 90 / 64, 15 + 105 / 64, 120 / 64])


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_activations_without_fusion_are_korthikantis(tp: int, sequence_parallel: bool) -> None:
    """arXiv:2205.05198, table 2: what a layer of Megatron-LM keeps of a micro-batch."""
    s, b, h, a = 2048, 4, 6144, 64
    config = GPTConfig(51200, s, 48, h, a)
    plan = ParallelPlan(sequence_parallel=sequence_parallel)
    step = TrainingStep(config, Mesh(tp=tp), plan, b, "bf16", "cuda")
    kept, spared = block_activations(step, fused=False)
    sbh, scores = s * b * h, 5 * a * s * s * b
    if sequence_parallel:
        assert kept == (34 * sbh + scores) // tp
    else:
        assert kept == 10 * sbh + (24 * sbh + scores) // tp
    assert spared == scores // tp
    assert block_activations(step)[0] < kept - spared  # no masks, no second hidden activations


def test_blocks_in_flight_are_the_schedules() -> None:
    """1F1B keeps p - r micro-batches of rank r's layers, GPipe all of them."""
    ofob, gpipe = (ParallelPlan(schedule=name, microbatches=7) for name in ("1f1b", "gpipe"))
    assert live_blocks(ofob, 4, 8) == (8, 6, 4, 2)
    assert live_blocks(gpipe, 4, 8) == (14, 14, 14, 14)
    looped = dataclasses.replace(ofob, schedule="interleaved", chunks=2, microbatches=8)
    assert live_blocks(looped, 4, 8) == (11, 9, 7, 5)  # 2 (p - 1 - r) + (c - 1) p + 1


# ---------------------------------------------------------------- the command


def test_planning_imports_no_torch() -> None:
    """Importing torch takes seconds."""
    code = (
        "import sys, warpweave.plan.memory, warpweave.convert.families\n"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_parameters_of_named_models() -> None:
    """As their names say, in billions."""
    for name, billions in (("gpt2-xl", 1.56), ("llama-8b", 8.03), ("llama-70b", 70.55)):
        units = units_of(PRESETS[name], Mesh(), ParallelPlan(), 0)
        assert sum(units.values()) / 1e9 == pytest.approx(billions, rel=0.005)
