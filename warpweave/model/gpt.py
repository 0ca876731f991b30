"""GPT: GPT-2, Llama, Gemma and the models between them, on any mesh.

``GPT(config)`` is an ordinary module on one device. ``GPT(config, mesh=...)`` is this rank's part:
the blocks of its pipeline stages, with heads, hidden units and vocabulary sharded over the tensor
axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from warpweave.kernels.attention.options import check_packed
from warpweave.kernels.attention.visible import packed, rows_of
from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.rope import rope_table
from warpweave.kernels.runtime.dtypes import check_integers
from warpweave.layers.attention import Attention
from warpweave.layers.block import TransformerBlock
from warpweave.layers.context import TokenContext
from warpweave.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from warpweave.layers.loss import VocabParallelLinearCrossEntropy
from warpweave.layers.norm import make_norm
from warpweave.layers.place import Place
from warpweave.layers.records import collect_records
from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.parallel.collectives import Pending
from warpweave.parallel.context import Links, Strategy, measure_links
from warpweave.parallel.context.explain import table
from warpweave.parallel.data.unit import Unit, make_unit
from warpweave.parallel.layout import SequenceLayout, cut
from warpweave.parallel.mesh import ConnectedMesh, connected
from warpweave.parallel.pipeline.losses import LOSS, Output, add_losses, split_losses
from warpweave.parallel.pipeline.stage import Segment
from warpweave.parallel.shard import ParamRecord
from warpweave.parallel.tensor import column_parallel_linear

__all__ = ["GPT", "PRESETS", "GPTConfig", "MicroBatch"]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on one rank.

    Attributes:
        tokens, labels: int64 [T], this context rank's tokens, one sample after the other.
        positions: int64, each row's position in its document, for the rows of the residual stream
            ([T], or [T/tp] with sequence parallelism).
        context: the context of the blocks.
        normaliser: global number of valid tokens in the whole step, 0-dim, or its pending
            all-reduce, which only the loss waits for.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    context: TokenContext
    normaliser: Tensor | Pending


_TIMED = 2048  # tokens whose attention is timed: much more than a launch, under 1 s on a CPU


def _rounded(x: float, dtype: torch.dtype) -> float:
    """Round x to `dtype`, because transformers' factor of a bf16 embedding is also bf16."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def _check_forward(tokens: Tensor, labels: Tensor | None, sample_ids: Tensor | None) -> None:
    """Raise ValueError unless the inputs are integers: tokens and labels [B, S], ids [B]."""
    for name, given in {"tokens": tokens, "labels": labels, "sample_ids": sample_ids}.items():
        if name == "tokens" or given is not None:
            check_integers(name, given)
    if tokens.ndim != 2:
        raise ValueError(f"tokens must have shape [batch, sequence], got {[*tokens.shape]}")
    if labels is not None and labels.shape != tokens.shape:
        raise ValueError(
            f"labels must have the tokens' shape {[*tokens.shape]}, got {[*labels.shape]}"
        )
    if sample_ids is not None and sample_ids.shape != tokens.shape[:1]:
        raise ValueError(
            f"sample_ids must have shape {[*tokens.shape[:1]]}, one per sequence, got "
            f"{[*sample_ids.shape]}"
        )


class GPT(nn.Module):
    """A GPT, or one rank's part of it.

    Parameters have the same full names on every mesh: ``blocks.7.mlp.up.weight`` is in block 7, on
    whichever stage that is. Their initial values depend only on `seed` and the name.

    Args:
        config: sizes and style.
        mesh: the connected mesh; None is one device.
        plan: distribution of the model over the mesh; `segments` applies recompute "full". With
            ``cp_strategy="measured"``, the constructor times messages and attention. A plan enables
            sequence parallelism by default, but without a plan it is off.
        seed: of the initialization.
        device, dtype: of the parameters; on "meta", nothing is drawn.
        impl: "triton", "torch" or None, as for the kernels.

    Attributes:
        loss_names: names of the losses that the stages return. They are the same on every rank,
            because their values are summed over the mesh in one message. The loss of a step is
            their sum.

    Raises:
        ValueError: the model cannot be sharded over the mesh.

    Examples:
        >>> from warpweave import GPTConfig
        >>> gpt = GPT(GPTConfig(vocab_size=256, seq_len=16, layers=2, width=64, heads=8))
        >>> tokens = torch.randint(0, 256, (2, 16))
        >>> gpt(tokens, labels=tokens.roll(-1, 1)).backward()
    """

    loss_names: tuple[str, ...] = (LOSS,)

    def __init__(
        self,
        config: GPTConfig,
        *,
        mesh: ConnectedMesh | None = None,
        plan: ParallelPlan = ParallelPlan(sequence_parallel=False),
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        mesh = connected(mesh)
        config.check(mesh.sizes, plan)
        self.config, self.mesh, self.plan, self.impl = config, mesh, plan, impl
        self.placement = tuple(plan.placement(mesh.size("pp")))
        self.sequence_parallel = plan.sequence_parallel and mesh.size("tp") > 1
        self.layout = cut(config.seq_len, mesh.size("cp"), plan.layout)
        here = mesh.index("pp")
        self.stages = tuple(s for s, rank in enumerate(self.placement) if rank == here)
        self.first, self.last = self.placement[0] == here, self.placement[-1] == here
        self.strategy = self._strategy(dtype)
        place = Place(
            device=device,
            dtype=dtype,
            mesh=mesh,
            sequence_parallel=self.sequence_parallel,
            overlap=plan.overlap,
            strategy=self.strategy,
            recompute="up" if plan.recompute == "selective" else None,
            impl=impl,
        )
        if self.first or (self.last and config.tied):
            self.embedding = VocabParallelEmbedding(config.vocab_size, config.width, place=place)
        if self.first and config.positions == "learned":
            self.positions = PositionEmbedding(
                config.seq_len,
                config.width,
                device=device,
                dtype=dtype,
                partial=self.sequence_parallel,
            )
        layers = [i for stage in self.stages for i in self.layers_of(stage)]
        self.blocks = nn.ModuleDict({str(i): self._block(i, place) for i in layers})
        if self.last:
            self.final_norm = make_norm(config, config.width, place)
            if not config.tied:
                self.head = VocabParallelEmbedding(config.vocab_size, config.width, place=place)
            self.loss = VocabParallelLinearCrossEntropy(
                config.vocab_size, softcap=config.logit_softcap, place=place
            )
        self.initialise(seed)

    def _block(self, i: int, place: Place) -> TransformerBlock:
        c = self.config
        init, sizes = 0.02 / math.sqrt(2 * c.layers), (c.width, c.heads, c.num_hidden)
        return TransformerBlock(
            *sizes, style=c.block(i), place=place, site=1 + 2 * i, out_init=init
        )

    def _strategy(self, dtype: torch.dtype | None) -> Strategy | Links:
        """The plan's strategy, or the measured `Links` if it is "measured"."""
        choice, ranks = self.plan.cp_strategy, self.mesh.device_mesh
        if choice != "measured":
            return choice
        group = self.mesh.group("cp")
        if group is None or ranks is None:
            return "auto"
        rows, heads = min(self.layout.local_len, _TIMED), self.config.heads // self.mesh.size("tp")
        shape = 1, rows, heads, self.config.head_dim
        return measure_links(group, torch.zeros(shape, dtype=dtype, device=ranks.device_type))

    def explain_context(self, batch: int) -> str:
        """A table of attention's costs for `batch` samples, and the measured speeds of context
        ranks, if any."""
        taken = {}
        for layer in self.modules():
            if isinstance(layer, Attention):
                costs = layer.context_costs(self.layout, batch)
                taken |= {cost: None for cost in costs if cost.auto}
        return f"context ranks, {self.strategy}:\n{table([*taken])}"

    def layers_of(self, stage: int) -> range:
        """The blocks of pipeline stage `stage`."""
        return self.config.blocks_of(stage, len(self.placement))

    def parameter_records(self) -> dict[str, ParamRecord]:
        """Map the full name of every parameter of this rank's stages to its record."""
        return collect_records(self)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every parameter from (seed, name), except those without data."""
        records = self.parameter_records()
        for name, param in self.named_parameters():
            if not (param.is_meta or isinstance(param, torch._subclasses.FakeTensor)):
                param.copy_(records[name].draw(seed, at=self.mesh.coords))

    # ------------------------------------------------------------------ forward

    def micro_batch(
        self,
        tokens: Tensor,
        labels: Tensor,
        normaliser: Tensor | Pending,
        *,
        sample_ids: Tensor | None = None,
        seed: int | Tensor = 0,
        documents: Tensor | None = None,
        like: MicroBatch | None = None,
    ) -> MicroBatch:
        """This rank's view of a micro-batch of whole sequences.

        Args:
            tokens, labels: int64 [B, S]; labels are already the next tokens, -100 has no loss.
            normaliser: global number of valid tokens in the step, 0-dim, or its pending sum.
            sample_ids: int64 [B], each sample's index in the global batch; keys the dropout.
            seed: dropout key of this step.
            documents: int32 or int64 [n + 1] or [B, n + 1], boundaries of packed documents from 0
                to S, the same on all ranks. Attention stays within documents, and learned positions
                count from the start of a document (rotary embedding depends only on differences).
                None means one document.
            like: another micro-batch on this device; its rotary tables are reused if they fit.

        Raises:
            ValueError: S differs from the model's sequence length while the context axis shards the
                sequence, or is longer than it; the micro-batch's tokens are not divisible by the
                tensor axis; or documents are not boundaries from 0 to S (on a GPU, their values are
                not read).
        """
        batch, length = tokens.shape
        layout = self.layout
        if layout.parts == 1:
            if length > self.config.seq_len:
                raise ValueError(
                    f"a sequence has {length} tokens, but the model's limit is {layout.seq_len}"
                )
            layout = SequenceLayout(length, 1)
        check_packed(documents, tokens)
        layout = layout.for_documents(documents)
        index, device = self.mesh.index("cp"), tokens.device
        local = layout.positions(index, device)
        positions = local.expand(batch, -1)
        within = None
        if documents is not None:
            within = packed(documents, layout.padded_len)
            table = rows_of(within.table, layout.runs(index))
            positions = positions - table[:, 0]
        positions = positions.clamp(max=self.config.seq_len - 1)  # for the layout's padding
        tables: dict[str, Any]
        if like is not None and like.context.layout == layout:
            tables = {"rope": like.context.rope, "local_rope": like.context.local_rope}
        else:
            tables = self.rope_tables(local)
        tokens = layout.shard(tokens, index, 1).reshape(-1)
        labels = layout.shard(labels, index, 1, fill=-100).reshape(-1)
        rows = self.own_rows(len(tokens))
        token_ids = None
        if self.config.dropout:
            if sample_ids is None:
                sample_ids = torch.arange(batch, device=device)
            token_ids = (sample_ids[:, None] * self.config.seq_len + local).flatten()[rows]
        return MicroBatch(
            tokens,
            labels,
            positions.flatten()[rows],
            TokenContext(
                batch,
                layout,
                seed=seed,
                token_ids=token_ids,
                documents=within,
                **tables,
            ),
            normaliser,
        )

    def rope_tables(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The rotary tables of int64 positions[S], under the names of `TokenContext`'s fields."""
        c, dtype = self.config, self._dtype()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        kinds = {"rope": False} if c.positions == "rope" else {}
        kinds |= {"local_rope": True} if c.local_rope_theta is not None else {}
        tables = {}
        for name, local in kinds.items():
            theta, scaling = c.rope(local=local)
            tables[name] = rope_table(
                positions, c.head_dim, theta=theta, scaling=scaling, dtype=wide
            )
        return tables

    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def own_rows(self, tokens: int) -> slice:
        """This tensor rank's rows of the residual stream."""
        if not self.sequence_parallel:
            return slice(0, tokens)
        tp, index = self.mesh.size("tp"), self.mesh.index("tp")
        if tokens % tp:
            raise ValueError(
                f"sequence parallelism shards tokens over tp, but {tokens} tokens of a micro-batch "
                f"are not divisible by tp ({tp})"
            )
        return slice(index * tokens // tp, (index + 1) * tokens // tp)

    def embed(self, _: Tensor | None, batch: MicroBatch) -> Tensor:
        """Token (and position) embedding: x[T, E], or x[T/tp, E]."""
        x = self.embedding(batch.tokens)
        if self.config.embedding_scale is not None:
            x = x * _rounded(self.config.embedding_scale, x.dtype)
        if self.config.positions == "learned":
            x = x + self.positions(batch.positions)
        if self.config.dropout and self.training:
            drop = Drop(self.config.dropout, batch.context.seed, 0, batch.context.token_ids)
            x = dropout(x, drop, impl=self.impl)
        return x

    @property
    def head_weight(self) -> Tensor:
        """weight[ceil(V/tp), E] of the head, or of the embedding if they are tied."""
        return self.embedding.weight if self.config.tied else self.head.weight

    def logits(self, x: Tensor | None, _: MicroBatch) -> Tensor:
        """Final norm and head: x[T, E] or x[T/tp, E] -> logits[T, ceil(V/tp)]."""
        logits = column_parallel_linear(
            self.final_norm(x),
            self.head_weight,
            group=self.mesh.group("tp"),
            sequence_parallel=self.sequence_parallel,
            overlap=self.plan.overlap,
            workspace=self.mesh.workspace("tp"),
        )
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def head_loss(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Final norm, head and loss: this context rank's term of the global mean, 0-dim.

        The logits are computed and discarded block by block.
        """
        return self.loss(self.final_norm(x), self.head_weight, batch.labels, batch.normaliser)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        seed: int | Tensor | None = None,
        sample_ids: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Run the whole model without a pipeline: tokens int64 [B, S] -> logits or mean loss.

        Args:
            tokens: int64 [B, S].
            labels: int64 [B, S], already the next tokens; -100 has no loss.
            seed: dropout key, for example the number of the step. Required to train a model with
                dropout. Equal keys drop the same elements.
            sample_ids: int64 [B], each sample's index in the global batch, by default 0, 1, ...
                Replicas with different samples must pass different ids, or their dropout is equal.
            documents: boundaries of packed documents; see `micro_batch`.

        Returns logits[B, S/cp, ceil(V/tp)]. With `labels`, returns this rank's share of the loss
        averaged over the valid tokens of the given batch (0-dim), plus auxiliary losses of blocks.

        Raises:
            ValueError: the model has several stages, the tokens or labels are not integers [B, S]
                or do not fit it, or the seed is missing.
        """
        _check_forward(tokens, labels, sample_ids)
        if len(self.stages) < len(self.placement):
            raise ValueError(
                "forward needs the whole model: the mesh has more than one pipeline stage"
            )
        if seed is None and self.config.dropout and self.training:
            raise ValueError(
                f"dropout = {self.config.dropout} needs a seed; pass a different one in every step "
                "(gpt(tokens, labels, seed=step)), or call eval()"
            )
        targets = labels if labels is not None else torch.full_like(tokens, -100)
        valid = (targets != -100).sum().clamp(min=1)
        batch = self.micro_batch(
            tokens,
            targets,
            valid,
            sample_ids=sample_ids,
            seed=0 if seed is None else seed,
            documents=documents,
        )
        x, losses = self.embed(None, batch), {}
        for block in self.blocks.values():
            x, more = split_losses(block(x, batch.context))
            add_losses(losses, more)
        if labels is not None:
            return sum(losses.values(), start=self.head_loss(x, batch))
        rows, local = tokens.shape[0], batch.context.layout.local_len
        return self.logits(x, batch).unflatten(0, (rows, local))

    # ------------------------------------------------------------------ division into segments

    def segments(
        self, *, zero: int = 0, device: torch.device | str = "cpu"
    ) -> dict[int, list[Segment]]:
        """Map each of this rank's stages to its chain of segments over ZeRO units, one per block.

        A tied embedding is a separate unit, so both stages that hold it shard it equally. If they
        are on one rank, they share it. The parameters become views of the units' flat buffers, with
        the same values.
        """
        records = self.parameter_records()
        params = dict(self.named_parameters())

        def unit(name: str, prefixes: tuple[str, ...], tied: bool = False) -> Unit:
            chosen = [(records[n], p) for n, p in params.items() if n.startswith(prefixes)]
            ends = {"tied": tied, "owner": self.first or not tied}
            ordered = self.plan.reduce == "ordered"
            return make_unit(
                name, chosen, self.mesh, zero=zero, device=device, ordered=ordered, **ends
            )

        shared = None
        if self.config.tied and (self.first or self.last):
            shared = unit("embedding", ("embedding.",), tied=not (self.first and self.last))

        def first() -> Segment:
            if shared is None:
                units: tuple[Unit, ...] = (unit("embedding", ("embedding.", "positions.")),)
            elif self.config.positions == "learned":
                units = (shared, unit("positions", ("positions.",)))
            else:
                units = (shared,)
            return Segment("embedding", self.embed, units)

        def block(i: int) -> Segment:
            module = self.blocks[str(i)]

            def run(x: Tensor | None, batch: MicroBatch) -> Output:
                return module(x, batch.context)

            own = unit(f"block {i}", (f"blocks.{i}.",))
            return Segment(f"block {i}", run, (own,), self.plan.recompute == "full")

        def loss(x: Tensor | None, batch: MicroBatch) -> Output:
            return None, {LOSS: self.head_loss(x, batch)}

        def last() -> Segment:
            units = (unit("head", ("final_norm.", "head.")),)
            return Segment("head", loss, units if shared is None else (shared, *units))

        chains = {s: [block(i) for i in self.layers_of(s)] for s in self.stages}
        if self.first:
            chains[0].insert(0, first())
        if self.last:
            chains[len(self.placement) - 1].append(last())
        return chains
