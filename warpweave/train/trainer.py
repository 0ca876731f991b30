"""The training loop of one rank (its command: `command`; its options: `options`)."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
from tqdm import tqdm

from warpweave.checkpoint import BackgroundSaver, CheckpointError
from warpweave.cli.messages import say
from warpweave.convert.beside import keep_origin
from warpweave.convert.source import find_step, open_model
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.launch.interrupt import Interrupt
from warpweave.launch.session import Session
from warpweave.model.config import GPTConfig
from warpweave.model.engine import Engine
from warpweave.model.engine_update import StepResult
from warpweave.model.gpt import GPT
from warpweave.parallel.checked import CollectiveMismatch
from warpweave.parallel.collectives import Pending
from warpweave.parallel.exchange import exchange
from warpweave.plan.fits import check_memory
from warpweave.plan.memory import TrainingStep
from warpweave.train import resume
from warpweave.train.batches import Batches
from warpweave.train.checks import Agreement, TrainingStopped
from warpweave.train.lr_schedule import learning_rate
from warpweave.train.metrics import Metrics, peak_memory
from warpweave.train.not_finite import first_seen
from warpweave.train.options import CHECKPOINTS, TrainConfig
from warpweave.train.state import restore_tensors, saved_tensors
from warpweave.train.timeline import Marks, write_measured

RAISED_BY_ALL = (TrainingStopped, CheckpointError, CollectiveMismatch)  # on every rank


class Begun(NamedTuple):
    """A launched step: its pending result, learning rate, and launch time."""

    result: Pending
    lr: float
    began: float


class Trainer:
    """The training loop on one rank; collective over the session's ranks.

    `session` is this rank's connection, with `config`'s mesh or its remaining replicas. `interrupt`
    tells this rank to stop; None for never.
    """

    updates = True  # a launched step includes its update

    def __init__(
        self, config: TrainConfig, session: Session, interrupt: Interrupt | None = None
    ) -> None:
        config = config.on(session.device.type)
        self.config, self.session = config, session
        self.interrupt = interrupt or Interrupt()
        tiles.load(config.tiles)
        limit = timedelta(seconds=session.timeout)
        self.mesh = session.mesh.connect(session.device.type, timeout=limit)
        replica = self.mesh.index("outer") * config.mesh.dp + self.mesh.index("dp")
        self.batches = Batches(config, replica, session.device)
        self.model = config.model_config(self.batches.train.vocab_size)
        if session.device.type == "cuda":  # on CPUs `run` has checked all ranks of a machine
            free, total = torch.cuda.mem_get_info(session.device)
            check_fits(config, self.model, "cuda", free=free, total=total, ranks=1)
        self.engine = Engine(
            self.model, self.mesh, config.plan, micro_batch_size=config.batch,
            dtype=NAMED_DTYPES[str(config.dtype)], device=session.device, seed=config.seed,
            rule=config.rule, clip=config.clip or None, outer=config.outer_rule, impl=config.impl,
            timeout=config.timeout, cuda_graph=config.cuda_graph,
        )  # fmt: skip
        self.agreement = Agreement(config, session, self.engine)
        self.step, self.progress, self.stopped = 0, resume.Progress(), False
        # True if a step is launched before the previous result is read.
        self.ahead = session.device.type != "cpu" or self.engine.passes.asynchronous
        self._begun: Begun | None = None
        self._interrupted, self._read = False, 0.0  # when the last step's result was read
        self._evaluation = (-1, math.nan)  # step and loss of this process's last evaluation
        self.saver = BackgroundSaver(self.mesh.group("world"), timeout=session.timeout)
        self.sequences_per_step = config.replicas * config.plan.microbatches * config.batch
        trained = self.sequences_per_step // config.mesh.dp * session.mesh.dp  # by present replicas
        self.tokens_per_step = trained * self.model.seq_len
        self.peak_memory: list[float] = []
        self._timely, self._saved = False, time.monotonic()  # save_minutes are over; last save
        self.config = config = dataclasses.replace(config, resume=self._resume())
        if not config.resume and config.init_from is not None:
            source = open_model(config.init_from, self.mesh.group("world"))
            self.engine.load("param", source.tensor)
        self._fed = self.step  # the first step whose data the engine does not have
        self.metrics: Metrics | None = None
        if session.rank == 0:
            tokens, due = self.tokens_per_step, self.over or self._due
            self.metrics = Metrics(
                config, session, self.model, self.step, tokens_per_step=tokens, evaluates=due
            )
            files = config.out, config.init_from, config.tokenizer_file
            keep_origin(*files, self.batches.train.tokenizer_name, again=config.resume)

    def describe(self) -> str:
        """A one-line description of the run: ranks, mesh, plan, and model size."""
        c, m, plan = self.config, self.config.mesh, self.config.plan
        count = sum(p.numel() for p in GPT(self.model, device="meta").parameters())
        ranks = "1 rank" if m.world == 1 else f"{m.world} ranks"
        outer = f"outer={m.outer} " * (m.outer > 1)
        shard = f"dp_shard={m.dp_shard} " * (m.dp_shard is not None)
        source = c.init_from and not c.resume and (find_step(c.init_from) or c.init_from)
        return (
            f"{ranks} ({self.session.where}), {outer}dp={m.dp} {shard}tp={m.tp} cp={m.cp} "
            f"pp={m.pp}, ZeRO {plan.zero}, {plan.schedule} with {plan.microbatches} micro-batches "
            f"of {c.batch}; {count:,} parameters in {c.dtype}, {self.tokens_per_step:,} tokens per "
            "step"
            + (f"; starts from {source}" if source else "")
            + (f"; resumed at step {self.step}" if c.resume else "")
        )

    # ------------------------------------------------------------------ the loop

    def run(self) -> dict[str, Any]:
        """Train until the end or a stop, save, evaluate, and sample. Return the result's fields."""
        tqdm.set_lock(threading.RLock())  # the default is a multiprocessing lock, which leaks
        try:
            with self.saver:
                seconds = self._steps()
        finally:
            if self.metrics is not None:
                self.metrics.flush()
        c = self.config
        if c.timeline and self.session.rank == 0 and not (seconds and self.step == c.steps):
            say(f"{c.timeline} was not written: this process did not run the last step, {c.steps}")
        # The first step compiles and connects; it does not count unless it is the only one.
        counted = seconds[1:] or seconds
        rate = len(counted) * self.tokens_per_step / sum(counted) if counted else 0.0
        if not self.stopped and self._evaluation[0] != self.step:  # early stopping has evaluated
            self.evaluate()
        return self._result(None if self.stopped else self._evaluation[1], rate)

    def _steps(self) -> list[float]:
        """Train until the run is over or stopped. Return the seconds of each step."""
        seconds: list[float] = []
        self._evaluate_if_due()  # an interrupted run saves before it evaluates
        silent = self.session.rank != 0
        with tqdm(
            total=self.config.steps, initial=self.step, disable=silent, mininterval=0.5, unit="step"
        ) as bar:
            bar.set_postfix_str("first step: compiling and connecting")
            while not self.over and not self.stopped:
                row, took, self.stopped = self._train_step()
                seconds.append(took)
                if len(seconds) == 1:
                    self.peak_memory = peak_memory(self.session.device, self.mesh)
                self._log(bar, row, took)
                self._after_step()
        return seconds

    @property
    def over(self) -> bool:
        """True if all steps are done or the validation loss has stopped falling (`early_stop`)."""
        early = self.progress.stops_early(self.config.early_stop)
        return early or self.step >= self.config.steps

    @property
    def _due(self) -> bool:
        """True if an evaluation is due at this step."""
        every = self.config.eval_every
        return every > 0 and self.step > self.progress.evaluated and self.step % every == 0

    def _after_step(self) -> None:
        """Evaluate and save if due. The last step is saved here and evaluated afterwards."""
        c = self.config
        lowest = not self.stopped and self._evaluate_if_due() and c.early_stop > 0
        timely = self._timely and self._begun is None  # finish a launched step first
        timely |= c.save_every > 0 and self.step % c.save_every == 0
        if self.over or self.stopped or timely or lowest:
            self.save()

    def _evaluate_if_due(self) -> bool:
        """Evaluate if due. Return True if the loss is the lowest so far."""
        if self.over or not self._due:
            return False
        lowest = self.progress.see(self.step, self.evaluate())
        if self.over and self.session.rank == 0:
            say(f"the run {self.progress.why(self.step, self.config.steps)}")
        return lowest

    def _train_step(self) -> tuple[dict[str, Any], float, bool]:
        """Run one step. Return (its row of metrics, its seconds, True if a rank was asked to stop).

        On a GPU the next step is launched before this one's loss is read, unless something must
        happen in between. If this step stops the run, the next one changes nothing
        (`StepResult.stops`). With an asynchronous schedule the next step has already changed
        weights by then, so it becomes the last one.
        """
        now = self._begun or self._begin(self.step)
        outer = self.engine.outer
        acts = outer is not None and outer.acts_next  # an outer step cannot be undone
        halts = self._interrupted or self._timely or self._pauses(self.step + 1) or acts
        early = self.ahead and not halts
        self._begun = self._begin(self.step + 1, now) if early else None
        result = now.result.wait()
        loss, norm, interrupts, overflow = (float(x) for x in result.all().cpu())
        self.mesh.check_waits()
        # fp16 may overflow under its loss scale, which then shrinks.
        if not math.isfinite(loss) or (not math.isfinite(norm) and not overflow):
            self._stop(loss, norm, step=result)
        self._commit(now)
        self.step += 1
        self.progress.tokens += self.tokens_per_step
        row: dict[str, Any] = {
            "step": self.step, "loss": loss, "grad_norm": None if overflow else norm, "lr": now.lr,
            "tokens": self.progress.tokens,
        }  # fmt: skip
        if self.engine.passes.asynchronous:
            row["staleness"] = [*self.engine.staleness]
        began = max(now.began, self._read)
        self._made(row, began)
        row |= self.agreement.after_step(self.step)
        self._read = time.perf_counter()
        self._interrupted |= interrupts >= 1
        self._timely |= interrupts % 1 > 0
        goes_on = self._begun is not None and self.engine.passes.asynchronous
        return row, self._read - began, self._interrupted and not goes_on

    def _made(self, row: dict[str, Any], began: float) -> None:
        """Hook for subclasses, called after a step has changed the weights and before any further
        collective, which may find that a rank has died. `began` is a `time.perf_counter` value."""

    def _begin(self, step: int, before: Begun | None = None) -> Begun:
        """Launch a step. It may queue behind a step `before` whose result has not been read."""
        self.session.beat(step, "training step")
        began = time.perf_counter()
        c, last = self.config, step + self.engine.passes.ahead
        for fed in range(self._fed, last):
            tokens, labels, documents, ids = self.batches.step(fed)
            self.engine.feed(tokens, labels, ids, key=c.dropout_key(fed), documents=documents)
        self._fed = last + 1
        tokens, labels, documents, ids = self.batches.step(last)
        lr = learning_rate(c, step)
        free = self.engine.passes.asynchronous  # steps under way cannot be undone
        data = {"tokens": tokens, "labels": labels, "learning rate": lr, "key": c.dropout_key(last)}
        drawn = c.timeline if step + 1 == c.steps else None
        timed = drawn is not None or self.agreement.due(step + 1)
        marks = Marks(self.engine.device) if timed else None
        with self.agreement.of_step(step + 1, began, data, marks):
            result = self.engine.begin(
                tokens, labels, ids, lr=lr if self.updates else None, key=data["key"],
                documents=documents, interrupted=self._wishes(),
                halted=None if before is None or free else before.result.wait().stops,
                on_action=marks,
            )  # fmt: skip
        if drawn is not None and marks is not None:
            write_measured(self.engine, marks, drawn)
        return Begun(result, lr, began)

    def _wishes(self) -> float:
        """The `interrupted` of `Engine.begin`: 1 to stop, plus 0.5 on rank 0 after save_minutes."""
        stops = self.interrupt.number is not None or self.saver.failed
        due = 0 < 60 * self.config.save_minutes <= time.monotonic() - self._saved
        return stops + 0.5 * (due and self.session.rank == 0 and not self.saver.busy)

    def _commit(self, begun: Begun) -> None:
        """Hook for subclasses: update the weights if the step was launched without (`updates`)."""

    def _pauses(self, step: int) -> bool:
        """True if an evaluation, a checkpoint, a comparison, or the end follows `step`."""
        c = self.config
        every = c.save_every, c.eval_every, c.check_every
        return step >= c.steps or any(n and step % n == 0 for n in every)

    def _log(self, bar: tqdm, row: dict[str, Any], seconds: float) -> None:
        """Write a step's metrics and advance the progress bar, on rank 0."""
        if self.metrics is None:
            return
        row = self.metrics.trained(row, seconds)
        shown = {"loss": f"{row['loss']:.3f}", "tokens/s": f"{row['tokens_per_second']:.0f}"}
        if "mfu" in row:
            shown["mfu"] = f"{row['mfu']:.1%}"
        several = " max" if len(self.peak_memory) > 1 else ""
        shown["peak"] = f"{max(self.peak_memory):.0f} MiB{several}"
        bar.set_postfix(shown, refresh=False)
        bar.update()

    def _stop(
        self, loss: float, norm: float, what: str = "loss", step: StepResult | None = None
    ) -> NoReturn:
        """Raise on every rank, naming where the loss or a gradient first was not finite."""
        number = self.step + (what == "loss")
        seen = first_seen(self.engine, self.batches, self.step, what, step)
        words = f"{what} is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
        # The optimizer skips the update when the norm is not finite.
        untouched = not math.isfinite(norm) and self.config.outer_rule is None
        untouched &= not self.engine.passes.asynchronous
        kept = "the weights were not updated; " if untouched else ""
        try:
            path = self.saver.wait()
            last = f"the last good checkpoint is {path}" if path else "there is no checkpoint"
        except CheckpointError as error:
            last = str(error)
        raise TrainingStopped(f"{words} at step {number}, {seen}; {kept}{last}")

    def evaluate(self) -> float:
        """Mean loss on fixed validation samples, in nats per token."""
        self.session.beat(self.step, "evaluation")
        with self.agreement.of_evaluation():
            value = float(self.engine.evaluate(*self.batches.held_out()))
        self.mesh.check_waits()
        if not math.isfinite(value):
            self._stop(value, 0.0, "validation loss")
        self._evaluation = (self.step, value)
        self.peak_memory = peak_memory(self.session.device, self.mesh)
        if self.metrics is not None:
            self.metrics.evaluated(self.step, value, self.peak_memory)
        return value

    # ------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Start writing a checkpoint of logical tensors, after the previous one is written.
        Collective."""
        self.session.beat(self.step, "saving")
        optimizers = exchange(self.engine.optimizer.state(), self.mesh.group("outer"))
        state = resume.state_of(
            self.config, self.batches.train, self.progress,
            step=self.step, sequences_per_step=self.sequences_per_step,
            validation=self.batches.validation,
        )  # fmt: skip
        self._timely, self._saved = False, time.monotonic()
        if self.metrics is not None:
            self.metrics.flush()
        c = self.config
        self.saver.save(
            c.out / CHECKPOINTS, self.step, saved_tensors(self.engine),
            config=dataclasses.asdict(self.model),
            state=state | {"optimizer": optimizers[0], "optimizers": optimizers},
            mesh=dataclasses.asdict(self.session.mesh) | {"zero": c.plan.zero},
            keep=c.keep, spare=self.progress.best_step if c.early_stop else None,
        )  # fmt: skip

    def _resume(self) -> bool:
        """Restore the newest checkpoint if requested. Return True if there was one."""
        folder, group = self.config.out / CHECKPOINTS, self.mesh.group("world")
        reader = resume.open_run(folder, self.model, group, self.config.resume)
        if reader is None:
            return False
        resume.check_run(reader, self.config, self.batches.train)
        versions = reader.state.get("asynchronous") is not None
        restore_tensors(self.engine, reader, versions=versions)
        of_replicas = reader.state.get("optimizers") or [reader.state["optimizer"]]
        self.engine.optimizer.load_state(of_replicas[self.mesh.index("outer")])
        self.step = reader.step
        self.progress = resume.progress_of(reader, self.model.seq_len)
        self.saver.path = reader.path
        if self.session.rank == 0:
            differing = resume.differences(
                reader, self.config, self.sequences_per_step, self.batches.validation
            )
            if differing:
                say(f"resuming with settings that differ from {reader.path}: {differing}")
            if self.over:
                why = self.progress.why(self.step, self.config.steps)
                say(f"nothing to train, evaluating {reader.path} only: the run {why}")
        return True

    # ------------------------------------------------------------------ the end

    def _result(self, val_loss: float | None, rate: float) -> dict[str, Any]:
        """Sample, plot, and print. Return the fields of the last output line."""
        self.peak_memory = peak_memory(self.session.device, self.mesh)
        text, plot, c = None, None, self.config
        if not self.stopped and c.sample:
            self.session.beat(self.step, "sampling")
            text = self._sample_text()
        if self.engine.graphs is not None:
            self.engine.graphs.reset()  # NCCL's groups cannot end before
        if self.metrics is not None:
            if self.stopped:
                say(resume.saved_line(self.step))
            plot = self.metrics.plot()
            self.metrics.close()
            if text is not None:
                print(f"\n--- sample ---\n{text}\n--------------")
            print("peak memory per rank:", ", ".join(f"{m:.0f} MiB" for m in self.peak_memory))
        return {
            "val_loss": None if val_loss is None else round(val_loss, 4),
            "steps": self.step,
            "stopped": self.stopped or (self.over and self.step < c.steps and "early"),
            "tokens_per_second": round(rate, 1),
            "mesh": dataclasses.asdict(c.mesh),
            "zero": c.plan.zero,
            "checkpoint": str(self.saver.path),
            "plot": plot and str(plot),
        } | (self.progress.lowest(self.step, val_loss) if c.early_stop else {})

    def _sample_text(self) -> str:
        """Generate a continuation of the validation text's first tokens."""
        prompt = torch.from_numpy(self.batches.validation.tokens[:8].astype("int64"))
        tokens = self.engine.generate(prompt, self.config.sample, seed=self.config.seed).tolist()
        # The model's vocabulary may be larger than the data's; an untrained model samples from all.
        return self.batches.train.decode([t for t in tokens if t < self.batches.train.vocab_size])


def check_fits(config: TrainConfig, model: GPTConfig, device: str, **memory: int) -> None:
    """Run `check_memory` for a training step on "cpu" or "cuda"."""
    sizes = config.mesh, config.plan, config.batch, str(config.dtype), device
    check_memory(TrainingStep(model, *sizes, config.optimizer, config.outer_rule), **memory)
