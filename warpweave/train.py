"""Train a GPT on text, on any mesh, from one command.

``warpweave train`` starts its own ranks; ``torchrun ... -m warpweave.train`` uses torchrun's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor
from tqdm import tqdm

from warpweave.checkpoint import CheckpointError, CheckpointReader, open_latest, save_checkpoint
from warpweave.data import Dataset, open_dataset
from warpweave.engine import Engine
from warpweave.gpt import PRESETS, GPTConfig
from warpweave.kernels.cost import gpt_step
from warpweave.launch import Session, join, launch, reported, under_torchrun
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.shard import ParamRecord

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}

# Dense 16-bit FLOP/s of NVIDIA's data sheets, by a part of the device's name.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


class TrainingStopped(RuntimeError):
    """Training cannot go on: a loss or gradient that is not a number."""


@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, and over which mesh."""

    model: Literal[
        "toy", "small", "toy-llama", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl",
        "llama-1b", "llama-8b", "llama-70b",
    ] = "small"  # fmt: skip
    """Preset; the options below change single numbers of it."""
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    seq_len: int | None = None
    vocab_size: int | None = None
    dropout: float | None = None

    data: Path | None = None
    """Text file, folder of text, or token file; default: Python's standard library source."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizers JSON; default: bytes."""

    dp: int = 1
    """Data-parallel replicas."""
    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel (ring attention) ranks."""
    pp: int = 1
    """Pipeline stages."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage over dp x cp."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    microbatches: int = 1
    """Micro-batches per step and data replica."""
    batch: int = 8
    """Sequences per micro-batch."""
    sequence_parallel: bool = True
    """With tp > 1, cut the residual stream's tokens over the tensor ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing."""
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    """How cp cuts the sequence."""

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    steps: int = 500
    lr: float = 1e-3
    min_lr: float = 0.1
    """Final learning rate, as a part of `lr`."""
    warmup: int = 20
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest gradient norm; 0 for none."""
    seed: int = 0

    out: Path = Path("runs/train")
    """Folder for metrics, plot and checkpoints."""
    save_every: int = 0
    """Steps between checkpoints; 0 for one at the end only."""
    keep: int = 3
    """Checkpoints kept."""
    resume: bool = False
    """Go on from the newest good checkpoint in `out`."""
    eval_every: int = 100
    eval_batches: int = 8
    """Micro-batches of validation text per data replica."""
    sample: int = 200
    """Tokens of sampled text at the end."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs warpweave[tensorboard])."""
    timeout: float = 300.0
    """Seconds that any exchange between ranks may take."""

    @property
    def mesh(self) -> Mesh:
        """The mesh's sizes."""
        return Mesh(dp=self.dp, cp=self.cp, tp=self.tp, pp=self.pp)

    def model_config(self, vocab_size: int) -> GPTConfig:
        """The model, with a vocabulary of at least `vocab_size`."""
        preset = PRESETS[self.model]
        names = ("layers", "width", "heads", "kv_heads", "hidden", "seq_len", "dropout")
        changes = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        vocabulary = self.vocab_size or max(preset.vocab_size, vocab_size)
        if vocabulary < vocab_size:
            raise ValueError(f"vocab_size = {vocabulary} is smaller than the data's {vocab_size}")
        return dataclasses.replace(preset, vocab_size=vocabulary, **changes)

    def check(self) -> None:
        """Raise a one-line error for what cannot work, before any rank is started."""
        for name in ("steps", "batch", "microbatches", "keep", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        seq_len = self.seq_len or PRESETS[self.model].seq_len
        data = open_dataset(self.data, seq_len=seq_len, tokenizer=self.tokenizer)
        open_dataset(self.data, seq_len=seq_len, tokenizer=self.tokenizer, split="validation")
        config = self.model_config(data.vocab_size)
        config.check(self.mesh, zigzag=self.layout == "zigzag")
        rows = self.batch * seq_len // self.cp
        if self.sequence_parallel and rows % self.tp:
            raise ValueError(
                f"batch x seq_len / cp = {rows} tokens do not divide by tp = {self.tp} "
                "(sequence parallelism)"
            )
        if self.tensorboard:
            import torch.utils.tensorboard  # noqa: F401  an ImportError now, not after training


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to ``min_lr * lr`` (arXiv:1608.03983)."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    floor = config.min_lr
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class _Interrupt:
    """Ctrl-C or SIGTERM asks for a stop after the current step; Ctrl-C again stops at once.

    One Ctrl-C can arrive twice, from the terminal and from the launcher.
    """

    def __init__(self) -> None:
        self.asked = False
        self._when = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: Any) -> None:
        if self.asked and number == signal.SIGINT and time.monotonic() > self._when + 2.0:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._when = True, time.monotonic()


class Trainer:
    """The training loop on one rank."""

    def __init__(self, config: TrainConfig, session: Session) -> None:
        self.config, self.session = config, session
        self.train_data, self.val_data = self._open_data()
        self.model = config.model_config(self.train_data.vocab_size)
        self.mesh = config.mesh.connect(session.device.type)
        self.engine = Engine(
            self.model,
            self.mesh,
            microbatches=config.microbatches,
            micro_batch_size=config.batch,
            zero=config.zero,
            schedule=config.schedule,
            sequence_parallel=config.sequence_parallel,
            recompute=config.recompute,
            layout=config.layout,
            dtype=DTYPES[config.dtype],
            device=session.device,
            seed=config.seed,
            weight_decay=config.weight_decay,
            clip=config.clip or None,
            timeout=config.timeout,
        )
        self.interrupt = _Interrupt()
        self.metrics = _Metrics(config, resume=config.resume) if session.rank == 0 else None
        self.step = 0
        self.checkpoint: Path | None = None
        self.tokens_per_step = config.dp * config.microbatches * config.batch * self.model.seq_len
        if config.resume:
            self._resume()

    def _open_data(self) -> tuple[Dataset, Dataset]:
        c = self.config
        seq_len = c.seq_len or PRESETS[c.model].seq_len
        options = {"seq_len": seq_len, "seed": c.seed, "tokenizer": c.tokenizer}
        return (
            open_dataset(c.data, split="train", **options),
            open_dataset(c.data, split="validation", **options),
        )

    # ------------------------------------------------------------------ the loop

    def run(self) -> dict[str, Any]:
        """Train to the last step (or an interrupt), save, evaluate, sample; the result's fields."""
        tqdm.set_lock(threading.RLock())  # its default lock is one of processes, and leaks
        bar = tqdm(
            total=self.config.steps,
            initial=self.step,
            disable=self.session.rank != 0,
            mininterval=0.5,
            unit="step",
        )
        started, first = time.perf_counter(), self.step
        stopped = False
        while self.step < self.config.steps and not stopped:
            stopped = self._train_step(bar)
            every = self.config.save_every
            if stopped or (every and self.step % every == 0 and self.step < self.config.steps):
                self.save()
        seconds = time.perf_counter() - started
        bar.close()
        if not stopped:
            self.save()
        rate = (self.step - first) * self.tokens_per_step / seconds if self.step > first else 0.0
        val_loss = None if stopped else self.evaluate()
        return self._result(val_loss, rate, stopped)

    def _train_step(self, bar: tqdm) -> bool:
        """One step with its logging; True if a rank was asked to stop."""
        self.session.beat(self.step, "training step")
        began = time.perf_counter()
        tokens, labels, ids = self._batch(self.step)
        lr = learning_rate(self.config, self.step)
        result = self.engine.step(
            tokens,
            labels,
            ids,
            lr=lr,
            key=_key(self.config.seed, self.step),
            interrupted=self.interrupt.asked,
        )
        loss, norm, interrupts = (float(x) for x in result.all().cpu())
        self._stop_if_not_finite(loss, norm)
        self.step += 1
        seconds = time.perf_counter() - began
        if self.metrics is not None:
            rate = self.tokens_per_step / seconds
            row = {"step": self.step, "loss": loss, "grad_norm": norm, "lr": lr}
            row["tokens_per_second"] = round(rate, 1)
            row |= self._utilisation(rate)
            self.metrics.write(row)
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", tokens_s=f"{rate:.0f}")
        every = self.config.eval_every
        if every and self.step % every == 0 and self.step < self.config.steps:
            self.evaluate()
        return interrupts > 0

    def _batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """This data replica's samples of a step: tokens and labels [m, b, S], sample ids [m, b]."""
        m, b, dp = self.config.microbatches, self.config.batch, self.mesh.index("dp")
        ids = torch.arange(dp * m * b, (dp + 1) * m * b)
        tokens, labels = self.train_data.batch(step, ids.tolist())
        device = self.session.device
        shape = (m, b, self.model.seq_len)
        return (
            tokens.view(shape).to(device),
            labels.view(shape).to(device),
            ids.view(m, b).to(device),
        )

    def _stop_if_not_finite(self, loss: float, norm: float) -> None:
        """Raise on every rank, naming the ranks, if loss or gradients are no longer numbers."""
        if math.isfinite(loss) and (math.isfinite(norm) or self.engine.optimizer.loss_scale):
            return
        ranks = self.engine.not_finite_ranks()
        what = "loss" if not math.isfinite(loss) else "gradient norm"
        names = ", ".join(self.config.mesh.describe(r) for r in ranks) or "no single rank"
        last = f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else (
            "there is no checkpoint yet"
        )  # fmt: skip
        raise TrainingStopped(
            f"{what} is {loss if what == 'loss' else norm} at step {self.step}, first seen on "
            f"{names}; weights were not updated, {last}"
        )

    def _utilisation(self, tokens_per_second: float) -> dict[str, float]:
        """Model FLOP/s utilisation on a GPU of known peak, by ``kernels.cost.gpt_step``."""
        if self.session.device.type != "cuda":
            return {}
        name, half = torch.cuda.get_device_name(), self.config.dtype in ("bf16", "fp16")
        peak = next((p for part, p in PEAK_FLOPS.items() if part in name), None)
        if peak is None or not half:
            return {}
        m = self.model
        flops = gpt_step(
            tokens=1,
            seq_len=m.seq_len,
            layers=m.layers,
            width=m.width,
            heads=m.heads,
            kv_heads=m.num_kv_heads,
            head_dim=m.head_dim,
            hidden=m.num_hidden,
            vocab=m.vocab_size,
            gated=m.activation == "swiglu",
        )
        return {"mfu": round(tokens_per_second * flops / (peak * self.session.world), 4)}

    def evaluate(self) -> float:
        """Mean loss on fixed validation samples, in nats per token."""
        self.session.beat(self.step, "evaluation")
        c = self.config
        count = c.eval_batches * c.batch
        dp = self.mesh.index("dp")
        tokens, labels = self.val_data.fixed_batch(
            range(dp * count, (dp + 1) * count), count=count * c.dp
        )
        shape = (c.eval_batches, c.batch, self.model.seq_len)
        device = self.session.device
        loss = self.engine.evaluate(tokens.view(shape).to(device), labels.view(shape).to(device))
        value = float(loss)
        if self.metrics is not None:
            self.metrics.write({"step": self.step, "val_loss": value})
        return value

    # ------------------------------------------------------------------ checkpoints

    @property
    def _folder(self) -> Path:
        return self.config.out / "checkpoints"

    def save(self) -> None:
        """Write a checkpoint of logical tensors; every rank takes part."""
        self.session.beat(self.step, "saving")
        state = {
            "step": self.step,
            "seed": self.config.seed,
            "data": {
                "name": self.train_data.name,
                "fingerprint": self.train_data.fingerprint,
                "samples": self.step * self.tokens_per_step // self.model.seq_len,
            },
            "optimizer": self.engine.optimizer.state(),
            "dtype": self.config.dtype,
        }
        self.checkpoint = save_checkpoint(
            self._folder,
            self.step,
            self._tensors(),
            config=dataclasses.asdict(self.model),
            state=state,
            mesh=dataclasses.asdict(self.config.mesh) | {"zero": self.config.zero},
            group=self.mesh.group("world"),
            keep=self.config.keep,
        )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors this rank writes; collective, as the others' are gathered along the way."""
        for kind, prefix in (("param", ""), ("exp_avg", "exp_avg/"), ("exp_avg_sq", "exp_avg_sq/")):
            for record, tensor, mine in self.engine.read(kind):
                if mine:
                    yield prefix + record.name, tensor.cpu().contiguous()

    def _resume(self) -> None:
        reader = open_latest(self._folder, group=self.mesh.group("world"))
        if reader is None:
            raise CheckpointError(f"nothing to resume from: {self._folder} holds no checkpoint")
        reader.require_config(dataclasses.asdict(self.model))
        self._check_data(reader)
        for kind, prefix in (("param", ""), ("exp_avg", "exp_avg/"), ("exp_avg_sq", "exp_avg_sq/")):

            def saved(record: ParamRecord, prefix: str = prefix) -> Tensor:
                return reader.tensor(prefix + record.name)

            self.engine.load(kind, saved)
        self.engine.optimizer.load_state(reader.state["optimizer"])
        self.step = reader.step
        self.checkpoint = reader.path
        if self.metrics is not None:
            self.metrics.rewind(self.step)

    def _check_data(self, reader: CheckpointReader) -> None:
        saved = reader.state["data"]
        if saved["fingerprint"] != self.train_data.fingerprint:
            raise CheckpointError(
                f"{reader.path} was trained on other data: saved {saved['name']} "
                f"({saved['fingerprint'][:12]}), now {self.train_data.name} "
                f"({self.train_data.fingerprint[:12]})"
            )
        if reader.state["seed"] != self.config.seed:
            raise CheckpointError(
                f"{reader.path} was trained with seed {reader.state['seed']}, "
                f"now {self.config.seed}"
            )

    # ------------------------------------------------------------------ the end

    def _result(self, val_loss: float | None, rate: float, stopped: bool) -> dict[str, Any]:
        """Sample, plot, print; the fields of the last line."""
        memory = self._peak_memory()
        text = None
        if not stopped and self.config.sample:
            self.session.beat(self.step, "sampling")
            text = self._sample_text()
        plot = None
        if self.metrics is not None:
            plot = self.metrics.plot()
            self.metrics.close()
            if text is not None:
                print(f"\n--- sample ---\n{text}\n--------------")
            print("peak memory per rank: " + ", ".join(f"{m:.0f} MiB" for m in memory))
        return {
            "val_loss": None if val_loss is None else round(val_loss, 4),
            "steps": self.step,
            "tokens_per_second": round(rate, 1),
            "mesh": dataclasses.asdict(self.config.mesh),
            "zero": self.config.zero,
            "checkpoint": str(self.checkpoint),
            "plot": str(plot),
            "interrupted": stopped,
        }

    def _sample_text(self) -> str:
        prompt = torch.tensor([ord("\n")] if self.config.tokenizer is None else [0])
        if self.config.tokenizer is None and self.train_data.tokenizer is not None:
            prompt = torch.tensor(list(b"\ndef "))
        tokens = self.engine.generate(prompt, self.config.sample, seed=self.config.seed)
        return self.train_data.decode(tokens.tolist())

    def _peak_memory(self) -> list[float]:
        """Peak memory of every rank in MiB: allocated on a GPU, resident on the CPU."""
        if self.session.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**20
        else:
            unit = 2**20 if sys.platform == "darwin" else 2**10
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        mine = torch.tensor([peak], device=self.session.device)
        if self.mesh.group("world") is None:
            return mine.tolist()
        every = [torch.empty_like(mine) for _ in range(self.session.world)]
        dist.all_gather(every, mine)
        return [float(m) for m in every]


def _key(seed: int, step: int) -> int:
    """The dropout key of a step: 64 bits, seed above and step below."""
    return ((seed & 0x7FFFFFFF) << 32) | (step & 0xFFFFFFFF)


class _Metrics:
    """Metrics as JSONL, optionally TensorBoard, and a plot; on rank 0."""

    def __init__(self, config: TrainConfig, *, resume: bool) -> None:
        self.folder = config.out
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "metrics.jsonl"
        self.file = self.path.open("a" if resume else "w")
        self.board = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.folder / "tensorboard"))

    def write(self, row: dict[str, float]) -> None:
        """Append one row; the file is complete up to here at any time."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in row.items():
                if name != "step":
                    self.board.add_scalar(name, value, int(row["step"]))

    def rewind(self, step: int) -> None:
        """Forget the rows after `step`: they will be written again."""
        self.file.close()
        kept = [row for row in self._rows() if row["step"] <= step]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self.file = self.path.open("a")

    def _rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self.path.read_text().splitlines() if line]

    def plot(self) -> Path:
        """Training and validation loss over steps, as PNG."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        rows = self._rows()
        figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
        for name, style in (("loss", {"lw": 0.8}), ("val_loss", {"lw": 1.5, "marker": "o"})):
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                label = "training" if name == "loss" else "validation"
                axes.plot(*zip(*points), label=label, **style)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        path = self.folder / "loss.png"
        figure.savefig(path)
        plt.close(figure)
        return path

    def close(self) -> None:
        """Close the files."""
        self.file.close()
        if self.board is not None:
            self.board.close()


def train_rank(config: TrainConfig, port: int | None = None) -> None:
    """Train as one rank of a launched (or single) job; rank 0 prints the result's JSON line."""
    session = join(config.mesh, timeout=config.timeout, port=port)
    with reported(session):
        trainer = Trainer(config, session)
        result = trainer.run()
        session.beat(trainer.step, "closing")
        session.close()
    if session.rank == 0:
        print(json.dumps(result), flush=True)
    if session.world == 1 and result["interrupted"]:
        sys.exit(130)


def main(argv: list[str] | None = None) -> None:
    """The command ``warpweave train``."""
    config = tyro.cli(TrainConfig, prog="warpweave train", description=__doc__, args=argv)
    try:
        config.check()
    except (ValueError, ImportError) as error:
        print(f"warpweave: {error}", file=sys.stderr)
        sys.exit(2)
    if under_torchrun() or config.mesh.world == 1:
        train_rank(config)
    else:
        launch(train_rank, (config,), config.mesh)


if __name__ == "__main__":
    main()
