"""The engine: one training step of a GPT on any mesh, from the schedule's list of actions.

It adds no algorithm. It combines the model's segments over ZeRO units (`gpt`), the pipeline stage
that runs them (`pipeline.stage`), the schedule and its executor (`parallel.schedule`,
`parallel.pipeline`), and the sharded optimizer (`data.zero`). The trainer and `prove` call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from warpweave.kernels.devices import CTAS
from warpweave.kernels.gemm.mainloop import leaving
from warpweave.kernels.runtime.dispatch import choose
from warpweave.layers.modes import in_mode
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine_checks import check_batch, check_int64, check_packing, check_step
from warpweave.model.engine_graph import Graph, StepGraphs, check_capture, cuda_graph_on
from warpweave.model.engine_passes import OpenPasses, StepPasses, make_lists, warm_up
from warpweave.model.engine_text import check_prompt, continue_text
from warpweave.model.engine_update import EngineStage, RankUpdate, StageUpdate, StepResult
from warpweave.model.generate import Sampling
from warpweave.model.gpt import GPT, MicroBatch
from warpweave.parallel.collectives import Pending, gather, start_all_reduce_
from warpweave.parallel.data.optimizer import AdamW, LossScale, Rule
from warpweave.parallel.data.ordered import exact_sum
from warpweave.parallel.data.outer import SUM, OuterOptimizer, OuterRule
from warpweave.parallel.data.unit import Unit, guard_state_dict, read_units, version_age
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.parallel.pipeline import Like, OnAction, relay
from warpweave.parallel.pipeline.losses import Losses
from warpweave.parallel.schedule import OpenRun
from warpweave.parallel.shard import ParamRecord


class Engine:
    """A GPT being trained on this rank's part of a mesh.

    Between steps, the all-gather of `gpt`'s parameters may be pending (ZeRO 1 and 2; ``state_dict``
    waits for it), or parameters are freed (ZeRO 3; ``state_dict`` raises an error). `read` returns
    logical weights at any time.

    Args:
        config: the model.
        mesh: the connected mesh.
        plan: distribution of model, batch and work over the mesh.
        micro_batch_size: sequences in a micro-batch.
        dtype: of the parameters; float32, float64, bfloat16 or float16 (with dynamic loss scale).
        device: of all tensors.
        seed: of the initialization.
        rule: the update rule; None is ``AdamW()``.
        clip: maximum gradient norm; None disables clipping.
        outer: the rule by which the mesh's outer replicas synchronize; None for one replica.
        impl: "triton", "torch" or None, as for the kernels.
        timeout: seconds that a pipeline message may take.
        cuda_graph: launch each step as a CUDA graph, captured at the third step of its shape. It
            needs a CUDA device, one pipeline stage, one outer replica and overlap "bulk".

    Raises:
        ValueError: one line that names the conflicting options, before anything is sent.

    Examples:
        >>> from warpweave import PRESETS, Mesh
        >>> engine = Engine(PRESETS["toy-llama"], Mesh().connect())
        >>> x = torch.ones(1, 1, 128, dtype=torch.int64)
        >>> result = engine.step(x, x, x[..., 0], lr=1e-3)
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: ConnectedMesh,
        plan: ParallelPlan = ParallelPlan(),
        *,
        micro_batch_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        rule: Rule | None = None,
        clip: float | None = 1.0,
        outer: OuterRule | None = None,
        impl: str | None = None,
        timeout: float = 300.0,
        cuda_graph: bool = False,
    ) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size}")
        if plan.overlap == "fused" and mesh.size("pp") > 1 and torch.device(device).type == "cuda":
            raise ValueError(
                f"overlap 'fused' with pp = {mesh.size('pp')} may hang on a GPU: its GEMMs wait "
                "for tensor-parallel ranks while holding the SMs that messages between stages need"
            )
        if (replicas := mesh.size("outer")) > 1 and outer is None:
            raise ValueError(f"{replicas} outer replicas need an OuterRule; pass it as outer=")
        self.config, self.mesh, self.plan, self.dtype = config, mesh, plan, dtype
        self._batch = plan.microbatches, micro_batch_size, config.seq_len
        self.micro_batch_size, self.device = micro_batch_size, torch.device(device)
        self._impl = choose(impl, torch.empty(0, device=self.device))  # ValueError if it cannot run
        self.gpt = GPT(config, mesh=mesh, plan=plan, device="meta", dtype=dtype, impl=impl)
        plan.check_update(clip, dtype == torch.float16, outer is not None)
        run = make_lists(config, plan, mesh)
        rows = micro_batch_size * self.gpt.layout.local_len
        own = self.gpt.own_rows(rows)
        chains = self.gpt.segments(zero=plan.zero, device=self.device)
        self.units: list[Unit] = list(
            dict.fromkeys(u for chain in chains.values() for s in chain for u in s.units)
        )
        guard_state_dict(self.gpt, self.units, "Engine.read")
        scale = LossScale().to(self.device) if dtype == torch.float16 else None
        rule = AdamW(impl=impl) if rule is None else rule
        self.optimizer = ZeroOptimizer(
            self.units, mesh, rule, clip=clip, loss_scale=scale, impl=impl, apart=plan.asynchronous
        )
        for unit in self.units:
            unit.write("param", lambda record: record.draw(seed, at=mesh.coords))
        self.message: Like = ((own.stop - own.start, config.width), dtype, self.device)
        self.outer = None if outer is None else self._make_outer(outer)
        self.stages: dict[int, EngineStage] = {}
        steps, staleness = len(chains), [0] * len(self.gpt.placement)
        if isinstance(run, OpenRun):
            steps, staleness = run.updates, [*run.staleness]
        updating = StageUpdate if plan.asynchronous else RankUpdate
        self._update = updating(self.optimizer, steps, self.outer)
        for stage, chain in chains.items():
            earlier = [unit for other in self.stages.values() for unit in other.units]
            self.stages[stage] = EngineStage(
                chain, self._update, self.message, shared=earlier, versions=1 + staleness[stage]
            )
        self.staleness = tuple(staleness)
        passes: Any = OpenPasses if plan.asynchronous else StepPasses
        self.passes: StepPasses | OpenPasses = passes(
            run, self.stages, mesh.group("pp"), device=self.device, timeout=timeout
        )
        self._counted: list[Pending] = []  # sums of valid tokens that were not waited for
        self._check_capture = functools.partial(check_capture, plan, mesh.sizes, self._impl)
        self.graphs: StepGraphs | None = None
        if cuda_graph:
            self.use_graphs(cuda_graph_on(self.device))
        self._cold = self.device.type == "cuda" and mesh.size("pp") > 1  # see `warm_up`

    def _make_outer(self, rule: OuterRule) -> OuterOptimizer:
        """The outer optimizer; fragments interleave layers. The embedding is in the fragment of the
        first layer, and the head in that of the last."""
        rule.check(self.config.layers)
        ends = {"embedding": 0, "positions": 0, "head": self.config.layers - 1}
        names = [unit.name for unit in self.units]
        layers = [ends[n] if n in ends else int(n.removeprefix("block ")) for n in names]
        fragments = [layer % rule.fragments for layer in layers]
        return OuterOptimizer(rule, self.units, fragments, self.mesh)

    # ------------------------------------------------------------------ training

    def feed(
        self,
        tokens: Tensor,
        labels: Tensor,
        sample_ids: Tensor,
        *,
        key: int | Tensor = 0,
        documents: Tensor | None = None,
    ) -> None:
        """Feed the data of one step of an asynchronous schedule, as for `step`, without an update.

        Needed for the first `passes.ahead` steps, before the first call of `step` and after `load`.
        """
        check_batch(tokens, labels, sample_ids, documents, expected=self._batch)
        self._feed(tokens, labels, sample_ids, key, documents)

    def _feed(
        self, tokens: Tensor, labels: Tensor, sample_ids: Tensor, key: int | Tensor,
        documents: Tensor | None,
    ) -> None:  # fmt: skip
        """`feed` without checks."""
        if not self.gpt.training:  # train() walks over all modules
            self.gpt.train()
        scaler = self.optimizer.loss_scale
        scale = scaler.value if scaler is not None else None
        each = self.plan.microbatches // self.passes.updates
        for part in (slice(at, at + each) for at in range(0, self.plan.microbatches, each)):
            valid = self._count_valid(labels[part])
            packed = None if documents is None else documents[part]
            batches = self._micro_batches(
                tokens[part], labels[part], sample_ids[part], valid, key, packed
            )
            self._counted.append(valid)
            if self._cold:
                warm_up(self.stages, batches[0], scale)
                self.passes.restart()
                self._cold = False
            self.passes.feed(batches, scale)

    def step(
        self,
        tokens: Tensor,
        labels: Tensor,
        sample_ids: Tensor,
        *,
        lr: float | Tensor | None,
        key: int | Tensor = 0,
        interrupted: float | Tensor = 0.0,
        documents: Tensor | None = None,
        halted: Tensor | None = None,
        on_action: OnAction | None = None,
    ) -> StepResult:
        """Run one optimizer step on this data replica's part of the global batch.

        Args:
            tokens, labels: int64 [microbatches, micro_batch_size, S], whole sequences; the same on
                all ranks of a data replica.
            sample_ids: int64 [microbatches, micro_batch_size], indices in the global batch.
            lr: learning rate; None for no update, keeping the reduced gradients.
            key: dropout key of this step.
            interrupted: 1 if this rank was interrupted, or a half if it requests some other action
                between steps (only one rank may); all ranks get the sum.
            documents: int64 [microbatches, micro_batch_size, n + 1], boundaries of the documents
                packed into each sequence (`GPT.micro_batch`). The last boundary may be repeated.
            halted: 0-dim, equal on all ranks; if non-zero, no weight or state changes. Pass `stops`
                of the previous step to begin a step before that was read.
            on_action: called before each action of this rank's list, as for `pipeline.execute`.

        `lr`, `key` and `interrupted` may also be 0-dim tensors on the engine's device (float64,
        int64, floating), whose values are not checked.

        With an outer optimizer (`data.outer`), losses and norm are means over its replicas. With an
        asynchronous schedule, the data and `key` belong to the step `passes.ahead` later (`feed`
        accepts the first ones). Losses and norm are those of this step: means, and the root mean
        square, over its updates.

        Raises:
            ValueError: shapes or dtypes do not fit, a parameter is frozen, `halted` is given at a
                step after which replicas synchronize, or with an asynchronous schedule, `halted` is
                given, or `lr` or the data of the steps in between is missing. Nothing was sent.
        """
        return self.begin(
            tokens, labels, sample_ids, lr=lr, key=key, interrupted=interrupted,
            documents=documents, halted=halted, on_action=on_action,
        ).wait()  # fmt: skip

    def begin(
        self,
        tokens: Tensor,
        labels: Tensor,
        sample_ids: Tensor,
        *,
        lr: float | Tensor | None,
        key: int | Tensor = 0,
        interrupted: float | Tensor = 0.0,
        documents: Tensor | None = None,
        halted: Tensor | None = None,
        on_action: OnAction | None = None,
    ) -> Pending:
        """Launch `step`; wait for its `StepResult` later. With an asynchronous schedule, ranks then
        begin their next step without waiting for other ranks' losses."""
        check_step(lr, key)
        if halted is not None and self.outer is not None and self.outer.acts_next:
            raise ValueError("`halted` must be None in a step after which replicas synchronize")
        if self.passes.asynchronous and (lr is None or halted is not None):
            kind = f"asynchronous schedule {self.plan.schedule}"
            raise ValueError(f"with {kind}, `lr` is required and `halted` must be None")
        frozen = (r.name for unit in self.units for r, p in unit.params if not p.requires_grad)
        if (name := next(frozen, None)) is not None:
            raise ValueError(f"the engine trains every parameter, but {name} does not require grad")
        check_batch(tokens, labels, sample_ids, documents, expected=self._batch)
        inputs = {"tokens": tokens, "labels": labels, "sample_ids": sample_ids}
        more = {"lr": lr, "key": key, "interrupted": interrupted, "documents": documents}
        if self.graphs is None or lr is None or on_action is not None:
            return self._begin(**inputs, **more, halted=halted, on_action=on_action)
        self._check_capture(packed=documents is not None)
        for unit in self.units:
            unit.parameters.wait()  # a step without a graph may have left an all-gather
        result = self.graphs(inputs | more | {"halted": halted})
        return Pending(None, lambda: result)

    def use_graphs(self, new_graph: Callable[[], Graph]) -> None:
        """Capture steps from now on, each shape of the data once, except steps without an update or
        with `on_action`. ValueError for a layout whose steps cannot be captured."""
        self._check_capture()

        def whole(**inputs: Any) -> StepResult:
            result = self._begin(**inputs).wait()
            for unit in self.units:
                unit.parameters.wait()  # all communication must finish within the graph
            return result

        self.graphs = StepGraphs(whole, new_graph)

    def _begin(
        self, tokens: Tensor, labels: Tensor, sample_ids: Tensor, *, lr: float | Tensor | None,
        key: int | Tensor, interrupted: float | Tensor, documents: Tensor | None = None,
        halted: Tensor | None = None, on_action: OnAction | None = None,
    ) -> Pending:  # fmt: skip
        """`begin` without checks and graphs."""
        for unit in self.units:
            unit.gradients.clear()  # left by a step without an update, or by one that failed
        self._feed(tokens, labels, sample_ids, key, documents)
        self._update.begin(
            lr,
            halted,
            lambda: self._start_global_losses(self._own_losses(), interrupted, self._update.square),
        )
        with leaving(CTAS if self.mesh.size("world") > 1 else 0):
            self.passes.run(on_action)
        while self._counted:  # on ranks where no loss waited
            self._counted.pop().wait()
        ended = self._update.losses, self._update.norm, self._own_finite()
        result = functools.cache(lambda: self._result(*ended))
        if not self.passes.asynchronous:
            result()
        return Pending(None, result)

    def _result(self, sums: Pending, norm: Tensor, finite: Tensor) -> StepResult:
        """Wait for the losses of a step and return its result."""
        *losses, interrupts = sums.wait()
        if self.passes.asynchronous:
            *losses, square = losses
            losses, norm = [loss / self.passes.updates for loss in losses], square.sqrt()
        named = dict(zip(self.gpt.loss_names, losses, strict=True))
        scaler = self.optimizer.loss_scale
        # The scale after the update: if it is 1, it is not the cause.
        overflow = ~norm.isfinite() & (scaler is not None and scaler.value > 1.0)
        if self.mesh.size("outer") > 1:
            norm, overflow = self._of_replicas(norm, overflow)
        return StepResult(named, norm, interrupts, overflow, finite)

    def _of_replicas(self, norm: Tensor, overflow: Tensor) -> tuple[Tensor, Tensor]:
        """The mean norm of the outer replicas, and True if loss scales explain all norms that are
        not finite. Summed over the world, whose messages pass those of the outer axis."""
        sums = torch.stack([norm, (~norm.isfinite() & ~overflow).to(norm)])
        if self.mesh.index("inner"):  # only the first rank of a replica contributes
            sums.zero_()
        total, blamed = start_all_reduce_(sums, self.mesh.group("world")).wait()
        return total / self.mesh.size("outer"), ~total.isfinite() & (blamed == 0)

    def _micro_batches(
        self,
        tokens: Tensor,
        labels: Tensor,
        sample_ids: Tensor,
        valid: Pending,
        key: int | Tensor,
        documents: Tensor | None,
    ) -> list[MicroBatch]:
        packed = [None] * len(tokens) if documents is None else documents
        found: list[MicroBatch] = []
        for t, y, ids, of in zip(tokens, labels, sample_ids, packed, strict=True):
            like = found[0] if found else None
            more: Any = {"sample_ids": ids, "seed": key, "documents": of, "like": like}
            found.append(self.gpt.micro_batch(t, y, valid, **more))
        return found

    def _count_valid(self, labels: Tensor) -> Pending:
        """Start the sum of valid tokens over data replicas; the result is at least 1, fp32 or
        fp64."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        total = (labels != -100).sum().to(torch.float64)  # fp32 does not count beyond 2**24
        pending = start_all_reduce_(total, self.mesh.group("dp"))
        return Pending(None, lambda: pending.wait().clamp(min=1).to(wide))

    def _own_losses(self) -> list[Losses]:
        """The losses of this rank's stages and micro-batches in the step."""
        return [of_mb for stage in self.stages.values() for of_mb in stage.losses.values()]

    def _start_global_losses(
        self, own: list[Losses], interrupted: float | Tensor = 0.0, square: Tensor | None = None
    ) -> Pending:
        """Start summing [each loss, a stage's `square`, `interrupted`] over the mesh, in a single
        message. Ordered sums add each loss separately, bitwise identical for any data ranks."""
        names = self.gpt.loss_names
        if unknown := sorted({name for losses in own for name in losses} - {*names}):
            raise ValueError(
                f"rank {self.mesh.rank}: a stage returned losses {unknown}, but the model has only "
                f"{[*names]}"
            )
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        more = len(names) + (square is not None)
        sums = torch.zeros(more + 1, dtype=wide, device=self.device)
        world, exact = self.mesh.group("world"), []
        for at, name in enumerate(names):
            shares = [losses[name] for losses in own if name in losses]
            held = [torch.stack(shares)] if shares and self.mesh.index("tp") == 0 else []
            for each in held:  # tensor ranks hold the same share
                sums[at] = each.sum() / self.mesh.size("outer")
            if self.plan.reduce == "ordered":
                unit, total, _ = exact_sum(held, [world], sums)
                exact.append(unit * total)
        sums[-1].fill_(interrupted)
        self.finite = sums.isfinite().all()
        if square is not None and self.mesh.index("data") == self.mesh.index("tp") == 0:
            sums[-2] = square  # only the first rank of a stage contributes
        pending = start_all_reduce_(sums, world)
        if exact:
            rest = slice(len(exact), None)
            return Pending(
                None, lambda: torch.cat([torch.stack(exact).to(wide), pending.wait()[rest]])
            )
        return pending

    def _own_finite(self) -> Tensor:
        """bool[2]: True if this rank's latest losses, or gradients, are finite."""
        return torch.stack([self.finite, self.optimizer.finite.bool()])

    def not_finite_ranks(self, step: StepResult | None = None) -> list[int]:
        """The ranks with a loss that was not finite in a step (None: the latest run). If there are
        none, those with gradients that were not finite. Collective."""
        flags = (~(self._own_finite() if step is None else step.finite)).to(torch.int32)
        table = gather(flags[None], self.mesh.group("world")).tolist()
        by_loss = [rank for rank, (loss, _) in enumerate(table) if loss]
        return by_loss or [rank for rank, (_, gradient) in enumerate(table) if gradient]

    # ------------------------------------------------------------------ without training

    def evaluate(self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
        """Loss of [n, micro_batch_size, S] sequences per data replica, without dropout, 0-dim.

        Data replicas may have different sequences; the mean is over the valid tokens of all. As in
        a step, auxiliary losses are added. `documents` are as for `step`, for n micro-batches.
        """
        check_int64(tokens=tokens, labels=labels)
        size, length = self.micro_batch_size, self.config.seq_len
        fits = len(tokens) > 0 and tuple(tokens.shape[1:]) == (size, length)
        if not fits or labels.shape != tokens.shape:
            raise ValueError(
                f"tokens and labels must have shape [n >= 1, {size}, {length}], got "
                f"{tuple(tokens.shape)} and {tuple(labels.shape)}"
            )
        check_packing(documents, tokens)
        valid = self._count_valid(labels)
        ids = torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        batches = self._micro_batches(tokens, labels, ids, valid, 0, documents)
        with self._global_weights(), in_mode(self.gpt, training=False):
            every = [losses for batch in batches for losses in self._forward(batch)[1]]
        valid.wait()
        return self._start_global_losses(every).wait()[:-1].sum()

    def _global_weights(self) -> AbstractContextManager[None]:
        """Context in which outer replicas use common weights, for work other than training."""
        return nullcontext() if self.outer is None else self.outer.global_weights()

    def _forward(
        self, batch: MicroBatch, final: Callable[[Tensor | None, MicroBatch], Tensor] | None = None
    ) -> tuple[Tensor | None, list[Losses]]:
        """Run one micro-batch through all stages; return the result of `final` (on the last stage,
        else None) and this rank's losses."""
        rank_of, every = self.gpt.placement, []
        message = (len(batch.positions), self.config.width), *self.message[1:]

        def forward(stage: int, x: Tensor | None) -> Tensor | None:
            at_end = stage == len(rank_of) - 1
            x, losses = self.stages[stage].evaluate(x, batch, final if at_end else None)
            every.append(losses)
            return x

        x = relay(forward, self.stages, rank_of, self.mesh.group("pp"), lambda _: message)
        return x if self.gpt.last else None, every

    def generate(
        self, prompt: Tensor, length: int, *, temperature: float = 0.8, seed: int = 0
    ) -> Tensor:
        """Continue `prompt` (int64 [n]) with `length` sampled tokens; the same on every rank.

        This works on any mesh, without a KV cache: every token recomputes the whole window through
        all stages. A window holds at most the model's sequence. Temperature 0 is greedy.
        """
        sampling = Sampling(length, temperature, seed=seed)
        check_prompt(prompt)
        with self._global_weights():
            return continue_text(self.gpt, lambda *to: self._forward(*to)[0], prompt, sampling)

    # ------------------------------------------------------------------ state in and out

    def load(self, kind: str, value: Callable[[ParamRecord], Tensor]) -> None:
        """Set a state from logical tensors, on any mesh: "param" (in all versions), one of its
        older versions ("version1" is one update old) or one of the optimizer's moments."""
        if kind == "param" or version_age(kind):
            self.passes.restart()
        for unit in self._holding(kind):
            unit.write(kind, lambda record: record.slice(value(record), self.mesh.coords))
        if self.outer is not None and kind == "param":
            self.outer.reset()

    def _holding(self, kind: str) -> list[Unit]:
        """The units that have a state of this kind."""
        if self.outer is not None and kind == SUM:
            return self.outer.in_flight
        return [unit for unit in self.units if version_age(kind) < unit.parameters.kept]

    def read(self, kind: str) -> Iterator[tuple[ParamRecord, Tensor, bool]]:
        """Yield (record, logical tensor, mine) for a state of this rank's stages, including "grad".

        Collective over the data and tensor ranks of the stages. For each tensor, `mine` is True on
        exactly one rank of each outer replica: the one that writes it into a checkpoint.
        """
        yield from read_units(self._holding(kind), kind, self.mesh)
