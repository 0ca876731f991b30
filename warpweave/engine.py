"""The engine: one training step of a GPT on any mesh, from the schedule's list of actions.

It puts the pieces together and adds no algorithm: the model's segments over ZeRO units (`gpt`),
the chain they run in (`parallel.stage`), the schedule and its executor (`parallel.schedule`,
`parallel.pipeline`), the sharded optimizer (`parallel.zero`). The trainer and `prove` drive it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.gpt import GPT, GPTConfig, MicroBatch
from warpweave.parallel import schedule as schedules
from warpweave.parallel.collectives import Pending, gather, start_all_reduce_
from warpweave.parallel.context import Strategy
from warpweave.parallel.data.optimizer import AdamW, LossScale
from warpweave.parallel.data.zero import Unit, ZeroOptimizer
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.parallel.pipeline import Distributed, Like, execute
from warpweave.parallel.pipeline.stage import ChainStage, Segment
from warpweave.parallel.shard import ParamRecord

SCHEDULES: dict[str, Callable[[int, int], schedules.Schedule]] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
}


def _check_int64(tokens: Tensor, labels: Tensor) -> None:
    if tokens.dtype != torch.int64 or labels.dtype != torch.int64:
        raise ValueError(f"tokens and labels must be int64, got {tokens.dtype} and {labels.dtype}")


@dataclass(frozen=True)
class StepResult:
    """What a step reports, still on the device: 0-dim tensors, the same on every rank.

    Attributes:
        loss: mean loss over all valid tokens of the global batch, before the update.
        norm: global gradient norm before clipping.
        interrupts: number of ranks that were asked to stop.
    """

    loss: Tensor
    norm: Tensor
    interrupts: Tensor

    def all(self) -> Tensor:
        """[loss, norm, interrupts] as one tensor, for one transfer to the host."""
        return torch.stack([self.loss, self.norm.to(self.loss), self.interrupts.to(self.loss)])


class _EngineStage(ChainStage):
    """The chain with what happens to gradients once a step: reduce, tie, update."""

    def __init__(
        self,
        segments: list[Segment],
        mesh: ConnectedMesh,
        optimizer: ZeroOptimizer,
        message: Like,
        last: bool,
    ) -> None:
        super().__init__(segments, last=last)
        self.mesh, self.optimizer, self.message = mesh, optimizer, message
        self.lr: float | None = 0.0
        self.norm: Tensor | None = None
        self.start_loss: Callable[[], Pending]
        self.global_loss: Pending

    def reduce(self) -> None:
        """Finish the sums over the data group, then sum what is partial over the tensor axis."""
        super().reduce()
        self.optimizer.sum_partials()

    def input_like(self, mb: int) -> Like:
        """A pipeline message: one micro-batch's residual stream."""
        return self.message

    def unshard(self) -> None:
        """Nothing: the chain gathers unit by unit, just ahead of use."""

    def reshard(self) -> None:
        """Nothing, likewise."""

    def tie(self) -> Tensor | None:
        """The reduced gradient of the tied embedding, to which the other end's is added.

        Both ends cut the embedding's unit alike, so this rank's slice matches its peer's.
        """
        return next((u.gradients.reduced for u in self.units if u.tied), None)

    def update(self) -> None:
        """The optimizer step; with `lr` None only the norm is computed and gradients are kept.

        The step's loss travels meanwhile.
        """
        self.global_loss = self.start_loss()
        self.norm = self.optimizer.norm() if self.lr is None else self.optimizer.step(self.lr)


def _guard_state_dict(gpt: GPT, units: list[Unit]) -> None:
    """No ``state_dict`` of parameters that are still on their way, or freed."""

    def check(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        for unit in units:
            unit.parameters.wait()
            if not unit.parameters.materialised:
                raise RuntimeError(
                    f"ZeRO 3 keeps only a shard of {unit.name} on this rank: Engine.read gives "
                    "whole tensors, state_dict cannot"
                )

    gpt.register_state_dict_pre_hook(check)


class Engine:
    """A GPT being trained on this rank's part of a mesh.

    Between steps `gpt`'s own parameters may still be on their way (ZeRO 1 and 2; ``state_dict``
    waits for them) or not be there at all (ZeRO 3; ``state_dict`` refuses): `read` gives whole
    weights at any time.

    Args:
        config: the model.
        mesh: the connected mesh.
        microbatches: micro-batches per step and data replica.
        micro_batch_size: sequences in each.
        zero: ZeRO stage over the data group (dp x cp).
        schedule: "gpipe" or "1f1b".
        early_gradients: a stage sends its input's gradient before it makes those of its weights
            (`schedule.send_first`); not with ZeRO 2 and 3, which free gradients segment by segment.
            The results are the same, to the bit.
        sequence_parallel, recompute, layout, strategy, impl: as ``GPT``.
        dtype: of the parameters; float32, float64, bfloat16 or float16 (with dynamic loss scale).
        device: where everything lives.
        seed: of the initialisation and the dropout.
        betas, eps, weight_decay, clip: AdamW's.
        timeout: seconds that a pipeline message may take.

    Raises:
        ValueError: one line naming what does not fit, before anything is sent.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: ConnectedMesh,
        *,
        microbatches: int = 1,
        micro_batch_size: int = 1,
        zero: int = 0,
        schedule: str = "1f1b",
        early_gradients: bool = True,
        sequence_parallel: bool = True,
        recompute: str = "none",
        layout: str = "zigzag",
        strategy: Strategy = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip: float | None = 1.0,
        impl: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {sorted(SCHEDULES)}, got {schedule!r}")
        if microbatches < 1 or micro_batch_size < 1:
            raise ValueError(
                f"microbatches and micro_batch_size must be at least 1, got {microbatches} and "
                f"{micro_batch_size}"
            )
        self.config, self.mesh, self.seed = config, mesh, seed
        self.microbatches, self.micro_batch_size = microbatches, micro_batch_size
        self.device = torch.device(device)
        self.gpt = GPT(
            config,
            mesh=mesh,
            sequence_parallel=sequence_parallel,
            recompute=recompute,
            layout=layout,
            strategy=strategy,
            device="meta",
            dtype=dtype,
            impl=impl,
        )
        rows = micro_batch_size * config.seq_len // mesh.size("cp")
        own = self.gpt.own_rows(rows)
        self.dtype = dtype
        segments = self.gpt.segments(zero=zero, device=self.device)
        self.units: list[Unit] = list(dict.fromkeys(u for s in segments for u in s.units))
        _guard_state_dict(self.gpt, self.units)
        scale = LossScale().to(self.device) if dtype == torch.float16 else None
        rule = AdamW(betas, eps, weight_decay, impl)
        self.optimizer = ZeroOptimizer(
            self.units, mesh, rule, clip=clip, loss_scale=scale, impl=impl
        )
        self.message: Like = ((own.stop - own.start, config.width), dtype, self.device)
        self.stage = _EngineStage(segments, mesh, self.optimizer, self.message, self.gpt.last)
        self.schedule = self._plan(schedule, early_gradients)
        self.transport = Distributed(
            self.schedule, mesh.group("pp"), device=self.device, timeout=timeout
        )
        self.load("param", lambda record: record.draw(seed))

    def _plan(self, name: str, early: bool) -> schedules.Schedule:
        lists = SCHEDULES[name](self.mesh.size("pp"), self.microbatches)
        if early and not any(unit.placement.grad for unit in self.units):
            lists = schedules.send_first(lists)
        lists = schedules.with_reduce(schedules.with_comm(lists))
        if self.config.tied:
            lists = schedules.with_tie(lists)
        lists = schedules.with_update(lists)
        schedules.validate(lists, microbatches=self.microbatches)
        return lists

    # ------------------------------------------------------------------ training

    def step(
        self,
        tokens: Tensor,
        labels: Tensor,
        sample_ids: Tensor,
        *,
        lr: float | None,
        key: int = 0,
        interrupted: bool = False,
    ) -> StepResult:
        """One optimizer step on this data replica's part of the global batch.

        Args:
            tokens, labels: int64 [microbatches, micro_batch_size, S], whole sequences; the same on
                all ranks of a data replica.
            sample_ids: int64 [microbatches, micro_batch_size], numbers in the global batch.
            lr: learning rate; None leaves weights and gradients as they are after the reduction.
            key: dropout key of this step.
            interrupted: this rank was asked to stop; all ranks learn how many were.

        Raises:
            ValueError: shapes or dtypes do not fit, or a parameter is frozen; nothing was sent.
        """
        expected = (self.microbatches, self.micro_batch_size, self.config.seq_len)
        if tuple(tokens.shape) != expected or labels.shape != tokens.shape:
            raise ValueError(
                f"tokens and labels must have shape {expected}, got {tuple(tokens.shape)} and "
                f"{tuple(labels.shape)}"
            )
        if tuple(sample_ids.shape) != expected[:2]:
            raise ValueError(
                f"sample_ids must have shape {expected[:2]}, got {tuple(sample_ids.shape)}"
            )
        _check_int64(tokens, labels)
        frozen = (r.name for unit in self.units for r, p in unit.params if not p.requires_grad)
        if (name := next(frozen, None)) is not None:
            raise ValueError(f"the engine trains every parameter, but {name} does not require grad")
        for unit in self.units:
            unit.gradients.clear()  # what a step without an update, or one that failed, left there
        valid = self._count_valid(labels)
        batches = self._micro_batches(tokens, labels, sample_ids, valid, key)
        if not self.gpt.training:  # it walks over all modules
            self.gpt.train()
        scale = self.optimizer.loss_scale
        self.stage.lr = lr
        self.stage.begin(batches, scale.value if scale is not None else None)
        self.stage.start_loss = lambda: self._start_global_loss(interrupted)
        execute(self.schedule, {self.mesh.index("pp"): self.stage}, self.transport)
        assert self.stage.norm is not None
        valid.wait()  # where no loss did
        loss, interrupts = self.stage.global_loss.wait()
        return StepResult(loss, self.stage.norm, interrupts)

    def _micro_batches(
        self, tokens: Tensor, labels: Tensor, sample_ids: Tensor, valid: Pending, key: int
    ) -> list[MicroBatch]:
        return [
            self.gpt.micro_batch(t, y, valid, sample_ids=ids, seed=key)
            for t, y, ids in zip(tokens, labels, sample_ids, strict=True)
        ]

    def _count_valid(self, labels: Tensor) -> Pending:
        """Start summing the numbers of valid tokens over the replicas: at least 1, fp32 or fp64."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        total = (labels != -100).sum().to(torch.float64)  # fp32 does not count beyond 2**24
        pending = start_all_reduce_(total, self.mesh.group("dp"))
        return Pending(None, lambda: pending.wait().clamp(min=1).to(wide))

    def _start_global_loss(self, interrupted: bool = False) -> Pending:
        """Start summing [mean loss, number of interrupted ranks] over the mesh, in one message."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        sums = torch.zeros(2, dtype=wide, device=self.device)
        if self.gpt.last and self.mesh.index("tp") == 0:  # tensor ranks hold the same share
            sums[0] = torch.stack(self.stage.losses).sum()
        if interrupted:
            sums[1] = 1.0
        self.finite = sums[0].isfinite()
        return start_all_reduce_(sums, self.mesh.group("world"))

    def not_finite_ranks(self) -> list[int]:
        """The ranks whose own loss share or gradients were not finite in the last step; collective.

        The loss decides where it is to blame; gradients are named when every loss was finite.
        """
        flags = torch.stack([~self.finite, ~self.optimizer.finite.bool()]).to(torch.int32)
        every = [flags]
        if self.mesh.group("world") is not None:
            every = [torch.empty_like(flags) for _ in range(self.mesh.size("world"))]
            dist.all_gather(every, flags)
        table = torch.stack(every).tolist()
        by_loss = [rank for rank, (loss, _) in enumerate(table) if loss]
        return by_loss or [rank for rank, (_, gradient) in enumerate(table) if gradient]

    # ------------------------------------------------------------------ without training

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of [n, micro_batch_size, S] sequences per data replica, no dropout, 0-dim.

        Every data replica may bring other sequences; the mean is over all valid tokens of all.
        """
        size, length = self.micro_batch_size, self.config.seq_len
        fits = len(tokens) > 0 and tuple(tokens.shape[1:]) == (size, length)
        if not fits or labels.shape != tokens.shape:
            raise ValueError(
                f"tokens and labels must have shape [n >= 1, {size}, {length}], got "
                f"{tuple(tokens.shape)} and {tuple(labels.shape)}"
            )
        _check_int64(tokens, labels)
        valid = self._count_valid(labels)
        ids = torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        self.gpt.eval()
        self.stage.losses = [
            y
            for batch in self._micro_batches(tokens, labels, ids, valid, 0)
            if (y := self._forward(batch)) is not None
        ]
        valid.wait()
        return self._start_global_loss().wait()[0]

    def _forward(
        self, batch: MicroBatch, final: Callable[[Tensor | None, MicroBatch], Tensor] | None = None
    ) -> Tensor | None:
        """One micro-batch through all stages; the last stage returns its loss (or `final`'s)."""
        stage, x = self.mesh.index("pp"), None
        if not self.gpt.first:
            shape, dtype, device = self.message
            x = torch.empty(tuple(shape), dtype=dtype, device=device)
            dist.recv(x, group_src=stage - 1, group=self.mesh.group("pp"))
        y = self.stage.evaluate(x, batch, final if self.gpt.last else None)
        if self.gpt.last:
            return y
        dist.send(y.contiguous(), group_dst=stage + 1, group=self.mesh.group("pp"))
        return None

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, length: int, *, temperature: float = 0.8, seed: int = 0
    ) -> Tensor:
        """Continue `prompt` (int64 [n]) by `length` sampled tokens; the same on every rank.

        The whole window is run again for every token, through all stages: simple, and right on
        every mesh. A window longer than the model's sequence drops its oldest tokens. Temperature 0
        takes the likeliest token.
        """
        if temperature < 0:
            raise ValueError(f"temperature must not be negative, got {temperature}")
        generator = torch.Generator().manual_seed(seed % 2**63)
        self.gpt.eval()
        tokens, size = prompt.tolist(), self.config.seq_len
        if not tokens:
            raise ValueError("generate needs a prompt of at least one token")
        ones = torch.ones((), device=self.device)
        for _ in range(length):
            window = tokens[-size:]
            padded = torch.tensor(window + [0] * (size - len(window)), device=self.device)
            padded = padded.expand(self.micro_batch_size, size)
            batch = self.gpt.micro_batch(padded, torch.full_like(padded, -100), ones)
            logits = self._forward(batch, self.gpt.logits)
            # Drawn on every rank, so that it is the same whichever of them holds the position.
            draw = torch.empty(self.config.vocab_size, dtype=torch.float64)
            noise = -draw.exponential_(generator=generator).log()
            tokens.append(self._sample(logits, len(window) - 1, temperature * noise))
        return torch.tensor(tokens)

    def _sample(self, logits: Tensor | None, at: int, noise: Tensor) -> int:
        """The token after position `at`; the rank that holds it tells the rest.

        The largest of logits plus Gumbel noise times temperature is a draw from their softmax.
        """
        layout, sizes = self.gpt.layout, self.mesh.sizes
        owner = layout.owner(at)
        choice = torch.zeros(1, dtype=torch.int64, device=self.device)
        if logits is not None and self.mesh.index("cp") == owner:
            row = layout.positions(owner).tolist().index(at)
            full = gather(logits[row], self.mesh.group("tp"), dim=-1)[: self.config.vocab_size]
            choice = (full.double().cpu() + noise).argmax().view(1).to(self.device)
        if self.mesh.group("world") is not None:
            dist.broadcast(choice, sizes.rank_at(dp=0, cp=owner, tp=0, pp=sizes.pp - 1))
        return int(choice)

    # ------------------------------------------------------------------ state in and out

    def load(self, kind: str, value: Callable[[ParamRecord], Tensor]) -> None:
        """Set "param" or one of the optimizer's moments from logical tensors, on any mesh."""
        for unit in self.units:
            unit.write(kind, value)

    def read(self, kind: str) -> Iterator[tuple[ParamRecord, Tensor, bool]]:
        """Yield (record, logical tensor, mine) of this stage's state, "grad" included.

        Collective over the data and tensor ranks of the stage. `mine` is True on exactly one rank
        of the whole mesh for each tensor: the one that writes it into a checkpoint.
        """
        tp, ranks = self.mesh.size("tp"), self.mesh.size("data") * self.mesh.size("tp")
        me = self.mesh.index("data") * tp + self.mesh.index("tp")
        count = 0
        for unit in self.units:
            for record, tensor in unit.read(kind):
                yield record, tensor, unit.owner and count % ranks == me
                count += 1
