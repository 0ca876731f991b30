"""The server and worker of ``warpweave train --server``, independent of how they are started."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpweave.checkpoint import CheckpointError, CheckpointReader, save_checkpoint
from warpweave.cli.messages import say
from warpweave.convert.beside import keep_origin
from warpweave.convert.source import open_model
from warpweave.data import boundaries
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.kernels.runtime.transfer import upload
from warpweave.launch.session import Session
from warpweave.model.config import GPTConfig
from warpweave.model.gpt import GPT
from warpweave.parallel.server.clocks import Term
from warpweave.parallel.server.server import Notes, Server
from warpweave.parallel.server.shard import Shard, spread
from warpweave.parallel.server.worker import Compute, Worker, module_gradient
from warpweave.parallel.shard import ParamRecord
from warpweave.train.lr_schedule import learning_rate
from warpweave.train.metrics import Metrics
from warpweave.train.options import CHECKPOINTS, STALENESS, UPDATES, TrainConfig
from warpweave.train.resume import (
    Progress,
    check_run,
    differences,
    open_run,
    progress_of,
    saved_line,
    state_of,
)
from warpweave.train.server.log import plot_staleness, read_log, staleness_of, write_log


class ServedModel:
    """Model, data, update rule, and the record of every parameter of a run, from its options."""

    def __init__(self, config: TrainConfig, device: str) -> None:
        self.config = config.on(device)
        self.data = config.open_data("train")
        self.model: GPTConfig = config.model_config(self.data.vocab_size)
        self.records = list(GPT(self.model, device="meta").parameter_records().values())
        self.rule = config.rule
        self.dtype = NAMED_DTYPES[str(self.config.dtype)]

    def shard(self, index: int) -> Shard:
        """The initial shard of server `index`."""
        value: Callable[[ParamRecord], Tensor] = self._draw
        if self.config.init_from is not None:
            value = open_model(self.config.init_from, None).tensor
        part = spread(self.records, self.config.server)[index]
        return Shard(part, value, self.rule, self.dtype)

    def _draw(self, record: ParamRecord) -> Tensor:
        return record.draw(self.config.seed)

    def open_run(self) -> CheckpointReader:
        """Open the newest checkpoint of this run. Raises `CheckpointError` if there is none, it
        belongs to a different run, or servers cannot continue from it."""
        reader = open_run(self.config.out / CHECKPOINTS, self.model, None)
        assert reader is not None
        check_run(reader, self.config, self.data)
        wanted = {f"{name}/{r.name}" for name in self.rule.moments for r in self.records}
        if missing := sorted(wanted - set(reader.names)):
            raise CheckpointError(
                f"{reader.path} has no optimizer state ({missing[0]}), which servers need to resume"
            )
        if "server" not in reader.state:
            raise CheckpointError(f"{reader.path} was not written by a --server run")
        # The log is replayed with one set of options.
        saved = reader.state["data"]["sequences_per_step"]
        each = self.config.plan.microbatches * self.config.batch
        differing = [differences(reader, self.config, saved, layout=False)]
        if saved % each:
            differing.append(
                f"sequences_per_step: saved {saved}, which is not divisible by the {each} per "
                "worker of this run"
            )
        if words := "; ".join(filter(None, differing)):
            raise CheckpointError(
                f"{reader.path} can be resumed or replayed only with its own options: {words}"
            )
        return reader

    def restore(self, shard: Shard, reader: CheckpointReader) -> None:
        """Load a server's shard from a checkpoint."""
        for prefix in ("", *(f"{name}/" for name in self.rule.moments)):
            # The function is called at once, so it reads this round's prefix.
            shard.load(prefix, lambda record: reader.mapped(prefix + record.name))  # noqa: B023
        shard.count.fill_(reader.step)

    def gradient(self, gpt: GPT, number: int) -> Compute:
        """The gradient function of worker `number` with its `gpt`, over its micro-batches of a
        step."""
        c, device = self.config, next(gpt.parameters()).device
        size, count = c.batch, c.plan.microbatches * c.batch

        def losses(module: nn.Module, clock: int) -> Iterator[tuple[Tensor, int]]:
            ids = torch.arange(number * count, (number + 1) * count)
            tokens, labels = self.data.batch(clock, ids.tolist())
            for at in range(0, count, size):
                x, y, own = (full[at : at + size] for full in (tokens, labels, ids))
                more = {"sample_ids": own} | ({"documents": boundaries(y)} if c.packed else {})
                given = {name: upload(tensor, device) for name, tensor in more.items()}
                seed = c.dropout_key(clock)
                loss = module(upload(x, device), upload(y, device), seed=seed, **given)
                valid = max(1, int((y != -100).sum()))
                yield loss * valid, valid

        return module_gradient(gpt, losses)

    def make_gpt(self, device: torch.device) -> GPT:
        """Make a worker's model; every pull sets its weights."""
        return GPT(self.model, device=device, dtype=self.dtype, impl=self.config.impl)


class RunNotes(Notes):
    """Server 0's output: metrics, the log of updates, and checkpoints."""

    def __init__(self, served: ServedModel, reader: CheckpointReader | None) -> None:
        c = served.config
        self.served, self.path = served, c.out / UPDATES
        self.checkpoint: Path | None = None
        self.progress = Progress()
        step, rows = 0, list[dict[str, Any]]()
        if reader is not None:
            step, rows = reader.step, read_log(self.path)[1][: reader.step]
            self.progress = progress_of(reader, served.model.seq_len)
        session = Session(torch.device("cpu"), 0, c.mesh.dp, None, c.timeout, c.mesh)
        tokens = c.plan.microbatches * c.batch * served.model.seq_len
        again = dataclasses.replace(c, resume=reader is not None)
        self.metrics = Metrics(again, session, served.model, step, tokens_per_step=tokens)
        files = c.out, c.init_from, c.tokenizer_file
        keep_origin(*files, served.data.tokenizer_name, again=reader is not None)
        head = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        write_log(self.path, head | {"servers": c.server}, rows)
        self._last = time.perf_counter()

    def update(self, version: int, lr: float, norm: float, terms: Sequence[Term]) -> None:
        log: dict[str, Any] = {"version": version, "lr": lr, "norm": norm}
        log["terms"] = [dataclasses.asdict(t) for t in terms]
        with self.path.open("a") as file:
            file.write(json.dumps(log) + "\n")
        count = sum(t.count for t in terms)
        tokens = len(terms) * self.metrics.tokens_per_step
        self.progress.tokens += tokens
        before, self._last = self._last, time.perf_counter()
        self.metrics.write(
            {"step": version, "loss": sum(t.loss * t.count for t in terms) / count,
             "grad_norm": norm, "lr": lr, "tokens": self.progress.tokens,
             "tokens_per_second": round(tokens / (self._last - before), 1),
             "staleness": max(t.staleness for t in terms),
             "delay": max(version - 1 - t.pulled for t in terms)}
        )  # fmt: skip

    def save(self, state: dict[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> None:
        served, c, version = self.served, self.served.config, state["version"]
        self.metrics.flush()
        per_step = c.mesh.dp * c.plan.microbatches * c.batch
        told = state_of(c, served.data, self.progress, step=version, sequences_per_step=per_step)
        told |= {"optimizer": {"count": float(version)}, "server": state}
        self.checkpoint = save_checkpoint(
            c.out / CHECKPOINTS, version, tensors, config=dataclasses.asdict(served.model),
            state=told, mesh=dataclasses.asdict(c.mesh) | {"zero": 0}, keep=c.keep,
        )  # fmt: skip

    def say(self, line: str) -> None:
        say(line)

    def result(self, stopped: bool) -> dict[str, Any]:
        """Evaluate the last checkpoint and plot. Return the fields of the last output line."""
        c, reader = self.served.config, self.served.open_run()
        if stopped:
            say(saved_line(reader.step))
        value = None if stopped else evaluate(self.served, reader)
        if value is not None:
            self.metrics.evaluated(reader.step, value, [])
        _, rows = read_log(self.path)
        plot_staleness(rows, c.out / STALENESS)
        plot = self.metrics.plot()
        self.metrics.close()
        return {
            "val_loss": None if value is None else round(value, 4),
            "updates": reader.step,
            "stopped": stopped,
            "servers": c.server,
            "workers": c.mesh.dp,
            **staleness_of(rows),
            "checkpoint": str(self.checkpoint),
            "plot": plot and str(plot),
        }


@torch.no_grad()
def evaluate(served: ServedModel, reader: CheckpointReader) -> float:
    """Mean loss with a checkpoint's weights on fixed validation samples, in nats per token."""
    c, data = served.config, served.config.open_data("validation")
    gpt = served.make_gpt(torch.device("cpu")).eval()
    for name, param in gpt.named_parameters():
        param.copy_(reader.mapped(name))
    count = c.eval_batches * c.batch * c.mesh.dp
    total, valid = 0.0, 0
    for at in range(0, count, c.batch):
        x, y = data.fixed_batch(range(at, at + c.batch), count=count)
        n = int((y != -100).sum())
        more = {"documents": boundaries(y)} if c.packed else {}
        total, valid = total + n * float(gpt(x, y, **more)), valid + n
    return total / max(1, valid)


def serve(
    config: TrainConfig, store: dist.Store, index: int, workers: Iterable[int], *, resume: bool
) -> dict[str, Any]:
    """Be server `index` until the run ends. Return server 0's result, {} for the others."""
    served = ServedModel(config, "cpu")
    shard, reader, state = served.shard(index), None, None
    if resume:
        reader = served.open_run()
        served.restore(shard, reader)
        state = reader.state["server"]
    notes = RunNotes(served, reader) if index == 0 else None
    server = Server(
        store, index, config.server_plan, shard, records=served.records, notes=notes,
        lr=lambda clock: learning_rate(config, clock),
    )  # fmt: skip
    stopped = server.serve(workers, state)
    return {} if notes is None else notes.result(stopped)


def work(config: TrainConfig, store: dist.Store, number: int | None, device: torch.device) -> None:
    """Be a worker until the run ends."""
    served = ServedModel(config, device.type)
    worker = Worker(store, served.records, config.server_plan, dtype=served.dtype, number=number)
    worker.run(config.steps, served.gradient(served.make_gpt(device), worker.number))
