"""Published training speeds (`plan_rows.csv`) as jobs for the planner.

The CSV has the rows as their sources print them, with the whole layout. For values that are not
printed (micro-batch, chunks) we use the planner's best. `kind` is how a source measures: seconds
per step, tokens per second and GPU, or model FLOPs per second and GPU without the causal half (with
the recomputed forward in `tflops_recompute`) or their fraction of the peak in percent (`mfu`).

This file adds only what these rows need and the planner lacks:

* FP8 (and MXFP8): a matrix product at twice the FLOP/s of 16 bits, with a separate efficiency and
  with casts of its inputs; everything else is in 16 bits;
* messages between stages that Megatron-LM splits over tensor ranks, and weights that InternEvo's
  owners broadcast;
* attention of the first FlashAttention, half as fast as today's (arXiv:2307.08691 says twice);
* embedding and head as separate layers, if that makes a pipeline's stages even;
* GB200 and GB300, H100 with HBM2e at 500 W, and a network of 4 x 100 Gbit/s per node.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from warpweave.kernels.cost import gpt_step, gpt_weights
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.parallel.mesh import Mesh
from warpweave.plan.device import HARDWARE, Efficiency, Hardware
from warpweave.plan.time import Job, step_time

ROWS = Path(__file__).with_name("plan_rows.csv")
WORDS = ("source", "table", "model", "gpu", "recompute", "precision", "overlap", "kernels",
         "schedule", "kind", "note")  # fmt: skip
LIKE = {"H200": "H100"}
FLASH_1 = 0.5  # the first FlashAttention's speed, relative to today's
EARLY = ("llm-foundry", "torchtitan")  # recompute by torch.utils.checkpoint
BF16_SUMS = ("Megatron-Bridge", "NeMo docs", "InternEvo")  # libraries that sum gradients in bf16
OWNERS = ("InternEvo",)  # their ZeRO 1 assigns whole tensors to ranks; nine per block (InternLM)
EIGHT_BITS = ("fp8", "mxfp8")
Time = Callable[[Job], float]
_PREDICTED: dict[tuple[Any, ...], float] = {}  # cached, as a library's releases share layouts


def _like(name: str, base: str, node: int = 8, **figures: float) -> Hardware:
    hardware = HARDWARE[base]
    return replace(hardware, name=name, node=node, device=replace(hardware.device, **figures))


# From NVIDIA's data sheets of GB200 and GB300 NVL72: dense FLOP/s, NVLink over the whole rack.
_BLACKWELL = {"half": 2.5e15, "memory": 8e12, "nvlink": 900e9}
GPUS = {
    "A100-40G": HARDWARE["a100-40g"],
    "A100-80G": HARDWARE["a100-80g"],
    "H100": HARDWARE["h100"],
    "H100-500W": _like("h100-500w", "h100", memory=2.4e12),
    "H200": HARDWARE["h200"],
    "B200": HARDWARE["b200"],
    "GB200": _like("gb200", "b200", 72, network=50e9, **_BLACKWELL),
    "GB300": _like("gb300", "b200", 72, network=100e9, **_BLACKWELL),
}


@dataclass(frozen=True)
class Constants(Efficiency):
    """A GPU's efficiencies; `product8` is the one of 8-bit products."""

    product8: float = 0.5


START = Constants(0.65, 0.4, 0.6, 0.7, 0.7, 4e-6)  # the start of every fit, and its prior


@dataclass(frozen=True, eq=False)
class Row:
    """A published row: `words` and `numbers` by column; a number that is not printed is None."""

    words: dict[str, str]
    numbers: dict[str, float | None]

    def __getattr__(self, name: str) -> Any:
        if name in WORDS:
            return self.words[name]
        number = self.numbers[name]
        return int(number) if number is not None and number == int(number) else number

    @property
    def problem(self) -> str | None:
        """The reason why the row cannot be predicted, or None."""
        product = self.tp * self.pp * self.cp * self.dp
        if product != self.n_gpus:
            return f"tp x pp x cp x dp = {product}, not {self.n_gpus}"
        if not self.shapes():
            return (
                f"no step of {self.global_batch} sequences over dp = {self.dp} in micro-batches of "
                f"{self.micro_batch}, {self.layers} layers in {self.pp} x {self.chunks} stages"
            )
        if self.precision not in ("fp16", "bf16", *EIGHT_BITS):
            return f"no figure for {self.precision}"
        return None

    def shapes(self) -> list[tuple[int, int]]:
        """Return the (micro-batch, chunks) with which the row may have been run.

        If a source counts embedding and head as layers, there may be two more stages than blocks.
        """
        batches = [1, 2, 4] if self.micro_batch is None else [self.micro_batch]
        chunks = [1, 2, 4, 8] if self.chunks is None else [self.chunks]
        found = [(b, c) for b in batches for c in chunks]
        return [
            (b, c)
            for b, c in found
            if self.global_batch % (self.dp * b) == 0
            and self.pp * c <= self.layers + 2
            and (c == 1 or self.global_batch // (self.dp * b) % self.pp == 0)
        ]

    def same(self) -> tuple[Any, ...]:
        """Return the values that rows with the same layout share, in any release."""
        return (
            *(self.words[w] for w in WORDS if w not in ("source", "table", "note", "kind")),
            *(value for name, value in self.numbers.items() if name != "value"),
        )

    @property
    def library(self) -> str:
        """The source without its release."""
        return self.source.split(",")[0]


def read(path: Path = ROWS) -> list[Row]:
    """Return the published rows."""
    with path.open() as file:
        return [
            Row(
                {name: row[name] for name in WORDS},
                {name: float(v) if v else None for name, v in row.items() if name not in WORDS},
            )
            for row in csv.DictReader(file)
        ]


# ------------------------------------------------------------------ a row as a job of the planner


def hardware_of(row: Row, constants: Constants) -> Hardware:
    """Return the row's GPUs with these efficiencies."""
    hardware = GPUS[row.gpu]
    given = asdict(constants)
    product8 = given.pop("product8")
    if row.kernels == "flash-1":
        given["attention"] *= FLASH_1
    device = hardware.device
    if row.precision in EIGHT_BITS:
        device = replace(device, half=2 * device.half)
        given |= {"product": product8, "attention": given["attention"] / 2}
    if "4 x 100 Gbit/s per node" in row.note:
        device = replace(device, network=6.25e9)
    return replace(hardware, device=device, efficiency=Efficiency(**given))


class Balanced(GPTConfig):
    """A model whose stages count embedding and head as a layer each, an option of Megatron-LM, if
    that makes them even."""

    def blocks_of(self, stage: int, stages: int) -> range:
        """Return the blocks on one of `stages` pipeline stages."""
        each, left = divmod(self.layers + 2, stages)
        if left or stages == 1:
            return super().blocks_of(stage, stages)
        return range(max(0, each * stage - 1), min(self.layers, each * (stage + 1) - 1))


@cache
def _config(
    layers: int, width: int, heads: int, kv: int, hidden: int, gated: int, seq_len: int, vocab: int,
    dropout: float,
) -> GPTConfig:  # fmt: skip
    style: dict[str, Any] = {}
    if gated:
        style = {"activation": "swiglu", "norm": "rms", "positions": "rope", "tied": False}
    sizes = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv, "hidden": hidden}
    return Balanced(vocab, seq_len, **sizes, dropout=dropout, **style)


@cache
def _jobs(row: Row) -> tuple[Job, ...]:
    """Return the jobs that the row may be, on hardware with any efficiencies."""
    sizes = (row.layers, row.width, row.heads, row.kv_heads, row.hidden, row.gated)
    scores = row.kernels == "unfused"  # Megatron-LM of 2021, which also has dropout
    in_bf16 = row.library in BF16_SUMS or row.note == "pure bf16 weights"
    found = []
    for batch, chunks in row.shapes():
        plan = ParallelPlan(
            zero=row.zero, schedule="1f1b" if chunks == 1 else "interleaved", chunks=chunks,
            microbatches=row.global_batch // (row.dp * batch),
            sequence_parallel=bool(row.sequence_parallel),
            overlap={"none": "none", "async": "chunked"}[row.overlap],
            recompute={"op": "selective"}.get(row.recompute, row.recompute), cp_strategy="ring",
        )  # fmt: skip
        job = Job(
            _config(*sizes, row.seq_len, row.vocab, 0.1 if scores else 0.0),
            Mesh(row.dp, row.cp, row.tp, row.pp, dp_shard=row.dp_shard), plan, batch, "bf16",
            "cuda", hardware=GPUS[row.gpu], fused=row.kernels in ("fused", "unfused"),
            scores=scores, scattered=scores, stops_early=row.library in EARLY,
            owned=9 * row.layers + 3 if row.library in OWNERS else 0,
            casts=row.precision in EIGHT_BITS, summed=2 if in_bf16 else 4,
        )  # fmt: skip
        found.append(job)
    return tuple(found)


def jobs(row: Row, constants: Constants) -> Iterator[Job]:
    """Yield the jobs that the row may be, with these efficiencies."""
    hardware = hardware_of(row, constants)
    return (replace(job, hardware=hardware) for job in _jobs(row))


def flops(row: Row) -> float:
    """Return the FLOPs of a step as the row's source counts them."""
    sizes = {"heads": row.heads, "head_dim": row.width // row.heads, "layers": row.layers}
    weights = gpt_weights(
        **sizes, width=row.width, kv_heads=row.kv_heads, hidden=row.hidden, vocab=row.vocab,
        gated=bool(row.gated),
    )  # fmt: skip
    tokens = row.global_batch * row.seq_len
    found = gpt_step(tokens=tokens, seq_len=row.seq_len, weights=weights, **sizes, causal=False)
    if row.kind == "tflops_recompute":  # plus the blocks' forward again
        found += (found - 6 * tokens * row.width * row.vocab) / 3
    return found


def seconds_printed(row: Row) -> float:
    """Return the printed value as seconds per step."""
    if row.kind == "step_s":
        return row.value
    if row.kind == "tokens_s":
        return row.global_batch * row.seq_len / (row.value * row.n_gpus)
    if row.kind == "mfu":
        return flops(row) / (row.value / 100 * GPUS[row.gpu].device.half * row.n_gpus)
    return flops(row) / (row.value * 1e12 * row.n_gpus)


def seconds_predicted(row: Row, constants: Constants, time: Time = step_time) -> float:
    """Return the predicted seconds per step: the fastest of all jobs that it may be."""
    key = row.same(), constants, time
    if key not in _PREDICTED:
        _PREDICTED[key] = min(map(time, jobs(row, constants)))
    return _PREDICTED[key]
