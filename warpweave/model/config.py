"""The model and its parallelism as two records.

`GPTConfig` describes the model, and `PRESETS` has named ones. `ParallelPlan` describes how a step
is sharded over a mesh; it changes results only by the order of sums. Every field of both is an
option of ``warpweave train`` (`train.options`), and the field's text here is the option's help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_type_hints

from warpweave.kernels.cost import gpt_step, gpt_weights
from warpweave.kernels.rope_scaling import RopeScaling
from warpweave.kernels.structure import structure
from warpweave.kernels.words import find_activation
from warpweave.layers.style import BlockStyle, HeadStyle, MLPStyle
from warpweave.parallel import schedule as schedules
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.words import Choice, Kind, Overlap

if TYPE_CHECKING:
    from torch import Tensor

    ScheduleName = str
else:  # the available names, for the help of options
    ScheduleName = Literal[(*schedules.FAMILIES,)] | str
Reduce = Literal["library", "ordered"]
Recompute = Literal["none", "selective", "full"]


_hints = lru_cache(maxsize=None)(get_type_hints)  # a planner creates thousands of plans


def _check_words(record: GPTConfig | ParallelPlan) -> None:
    """Raise ``ValueError`` if a field's value is not one of its choices or has the wrong type.

    Values may come from JSON that we did not write.
    """
    for name, kind in _hints(type(record)).items():
        structure(kind, getattr(record, name), name)


@dataclass(frozen=True)
class ParallelPlan:
    """Distribution of the model, the batch and the work of a step over the ranks of a mesh.

    Attributes:
        zero: ZeRO stage, sharded over the dp x cp ranks (hybrid: dp_shard x cp).
        schedule: Pipeline schedule: the order of the micro-batches. You can also pass the path of a
            .csv file with a schedule in torch's notation, one row per pipeline rank.
        chunks: Model chunks (virtual stages) of each pipeline rank, if the schedule supports them.
        microbatches: Gradient accumulation: number of micro-batches per step and data replica.
        early_gradients: Early input gradients: a pipeline stage sends its input gradient before it
            computes its weight gradients. The result is bitwise identical and arrives sooner. This
            option is not used with ZeRO 2 and 3 over data ranks or with ordered reductions, which
            free gradients block by block.
        sequence_parallel: Sequence parallelism: with tp > 1, shard the residual stream's tokens
            over the tensor ranks.
        overlap: Overlap of tensor-parallel collectives with GEMMs: no overlap (none); whole
            collectives, only in the backward (bulk); chunks of tokens (chunked); or within Triton
            kernels, for ranks on one machine (fused).
        recompute: Activation checkpointing: the backward recomputes nothing (none), the MLP's
            hidden activations (selective), or everything except each block's input and the results
            of attention over context ranks (full).
        layout: Sequence sharding over the context ranks. With balanced, the chunks of each
            micro-batch are assigned to ranks according to the work of the documents. (To use a
            complete layout written by ``warpweave plan --out``, pass its file with --config.)
        cp_strategy: Context-parallel attention: keys and values rotate around a ring (ring); keys
            and values are all-gathered, together (gather) or head by head (stream); all-to-alls
            exchange sequence shards for head shards (ulysses); or all-to-alls and a ring are
            combined (hybrid, with ulysses > 1). With auto, the strategy that sends the fewest bytes
            is chosen. With measured, the strategy with the least exposed time is chosen, at the
            link speeds that the run measures when it starts.
        reduce: Reduction of gradients over the data ranks: with the library's collectives, once per
            step if the ZeRO stage allows it (library); or in the order of the global micro-batches
            (ordered). With ordered, results are bitwise identical for any number of data ranks if
            the total number of micro-batches is the same, at the cost of one reduction per
            micro-batch.

    Examples:
        >>> plan = ParallelPlan(zero=1, schedule="zb-h1", microbatches=8)
        >>> [len(actions) for actions in plan.make_schedule(4)]
        [24, 24, 24, 24]
    """

    zero: Literal[0, 1, 2, 3] = 1
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    microbatches: int = 1
    early_gradients: bool = True
    sequence_parallel: bool = True
    overlap: Overlap = "bulk"
    recompute: Recompute = "none"
    layout: Kind = "zigzag"
    cp_strategy: Choice = "auto"
    reduce: Reduce = "library"

    def __post_init__(self) -> None:
        _check_words(self)
        schedules.find_family(self.schedule)

    def make_schedule(self, ranks: int) -> schedules.Schedule:
        """The schedule of `ranks` pipeline ranks: forwards and backwards, without communication.

        Raises ValueError if the schedule does not support this number of micro-batches or chunks.
        """
        family = schedules.find_family(self.schedule)
        return family.make(ranks, self.microbatches, self.chunks)

    def deal(self, replicas: int, size: int) -> Tensor:
        """The samples of a step by micro-batch of a data replica, int64[replicas, microbatches,
        size]. With ordered sums, micro-batches are dealt to the replicas in turn."""
        import torch  # not at the top: options do not need it

        every, m = torch.arange(replicas * self.microbatches * size), self.microbatches
        if self.reduce == "ordered":
            return every.view(m, replicas, size).transpose(0, 1)
        return every.view(replicas, m, size)

    @property
    def asynchronous(self) -> bool:
        """True if the schedule is asynchronous: gradients are those of older weights."""
        return schedules.find_family(self.schedule).asynchronous

    def check_update(self, clip: float | None, fp16: bool, outer: bool) -> None:
        """Raise a one-line ``ValueError`` if the schedule is asynchronous and an option needs all
        stages to update together."""
        words = (
            (f"clip = {clip}, which uses the gradient norm over all stages,", bool(clip)),
            ("dtype = fp16, whose overflow skips the update of all stages,", fp16),
            ("an outer optimizer, which replaces the weights of all stages,", outer),
        )
        for what, given in words:
            if self.asynchronous and given:
                raise ValueError(
                    f"schedule {self.schedule} does not support {what} because its stages update "
                    "their weights one at a time"
                )

    def placement(self, ranks: int) -> list[int]:
        """The pipeline rank of each stage, with `ranks` pipeline ranks."""
        return schedules.placement(self.make_schedule(ranks))


@dataclass(frozen=True)
class GPTConfig(HeadStyle, MLPStyle):
    """Sizes and style of a GPT. The defaults are GPT-2's style.

    Defaults: `kv_heads` = `heads`, `hidden` = 4 * width, `head_size` = width / heads. The options
    of blocks are the fields of ``layers.style``. A config survives a round trip through JSON:
    ``GPTConfig(**...)`` restores what ``dataclasses.asdict`` wrote.

    Attributes:
        vocab_size: Size of the vocabulary.
        seq_len: Sequence length in tokens.
        layers: Number of transformer blocks.
        width: Model width (hidden size).
        heads: Number of query heads.
        kv_heads: Number of key and value heads (GQA). heads must be divisible by kv_heads.
        hidden: Hidden units of the MLP.
        positions: Position encoding: learned, or rotary embedding of queries and keys.
        tied: Weight tying: the head uses the embedding's weight.
        rope_theta: Base of the rotary embedding.
        dropout: Dropout probability of the embedding and of both branches of a block.
        windows: Sliding-window sizes in tokens, assigned to the layers in turn; 0 means full
            attention.
        logit_softcap: Softcap of the logits, softcap * tanh(logit / softcap).
        embedding_scale: Factor that the token embedding is multiplied by.
        local_rope_theta: Base of the rotary embedding in layers with a window, if it differs from
            rope_theta; rope_scaling then applies only to layers without a window.

    Examples:
        >>> config = GPTConfig(vocab_size=256, seq_len=128, layers=2, width=64, heads=8)
        >>> config.head_dim
        8
    """

    vocab_size: int
    seq_len: int
    layers: int
    width: int
    heads: int
    kv_heads: int | None = None
    hidden: int | None = None
    positions: Literal["learned", "rope"] = "learned"
    tied: bool = True
    rope_theta: float = 10000.0
    dropout: float = 0.0
    windows: tuple[int, ...] = ()
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    local_rope_theta: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows))  # JSON has lists
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        _check_words(self)
        for name in ("vocab_size", "seq_len", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_kv_heads < 1 or self.num_hidden < 1:
            raise ValueError(
                f"kv_heads and hidden must be at least 1, got {self.kv_heads} and {self.hidden}"
            )
        if self.head_size is not None and self.head_size < 1:
            raise ValueError(f"head_size must be at least 1, got {self.head_size}")
        if self.head_size is None and self.width % self.heads:
            raise ValueError(f"width ({self.width}) is not divisible by heads ({self.heads})")
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"heads ({self.heads}) is not divisible by kv_heads ({self.num_kv_heads})"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"rope needs an even head size, got {self.head_dim}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if min(self.windows, default=0) < 0:
            raise ValueError(f"windows must be non-negative integers, got {self.windows}")
        for name in ("attention_scale", "softcap", "logit_softcap", "embedding_scale"):
            number = getattr(self, name)
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {number}")
        for name in ("rope_scaling", "local_rope_theta"):
            if getattr(self, name) is not None and self.positions != "rope":
                raise ValueError(f"{name} needs positions = 'rope', got {self.positions!r}")
        if self.qk_norm_whole and not self.qk_norm:
            raise ValueError("qk_norm_whole is a variant of qk_norm; set qk_norm to True as well")

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def num_hidden(self) -> int:
        """MLP width F."""
        return 4 * self.width if self.hidden is None else self.hidden

    @property
    def head_dim(self) -> int:
        """Width of one head, D."""
        return self.width // self.heads if self.head_size is None else self.head_size

    def window(self, layer: int) -> int | None:
        """The sliding window of a block; None means full attention."""
        return self.windows[layer % len(self.windows)] or None if self.windows else None

    def rope(self, *, local: bool) -> tuple[float, RopeScaling | None]:
        """(base, scaling) of the rotary embedding in layers with a window (`local`) or without."""
        if local and self.local_rope_theta is not None:
            return self.local_rope_theta, None
        return self.rope_theta, self.rope_scaling

    def block(self, layer: int) -> BlockStyle:
        """The style of one block, with the window and the rotary embedding of that layer."""
        window = self.window(layer)
        theta, scaling = self.rope(local=window is not None)
        alike = {f.name: getattr(self, f.name) for f in (*fields(HeadStyle), *fields(MLPStyle))}
        own = {"num_kv_heads": self.num_kv_heads, "window": window, "rope_scaling": scaling}
        own["rope_theta"] = theta if self.positions == "rope" else None
        return BlockStyle(**alike | own, dropout=self.dropout)

    def blocks_of(self, stage: int, stages: int) -> range:
        """The blocks of one of `stages` pipeline stages, distributed as evenly as possible."""
        return range(self.layers * stage // stages, self.layers * (stage + 1) // stages)

    def step_flops(self, tokens: int) -> int:
        """Model FLOPs of a training step on `tokens` tokens, computed by ``cost.gpt_step``."""
        heads = {"layers": self.layers, "heads": self.heads, "head_dim": self.head_dim}
        weights = gpt_weights(
            **heads,
            width=self.width,
            kv_heads=self.num_kv_heads,
            hidden=self.num_hidden,
            vocab=self.vocab_size,
            gated=find_activation(self.activation).gated,
        )
        windows = [self.window(layer) for layer in range(self.layers)]
        return gpt_step(
            tokens=tokens, seq_len=self.seq_len, weights=weights, windows=windows, **heads
        )

    def check_tensor(self, tp: int) -> None:
        """Raise a one-line ``ValueError`` unless `tp` tensor ranks can shard a block's matrices."""
        if self.num_kv_heads % tp:
            raise ValueError(f"kv_heads ({self.num_kv_heads}) is not divisible by tp ({tp})")
        if self.num_hidden % tp:
            raise ValueError(f"hidden ({self.num_hidden}) is not divisible by tp ({tp})")

    def check(self, mesh: Mesh, plan: ParallelPlan = ParallelPlan()) -> None:
        """Raise a one-line ``ValueError`` if this model cannot be sharded over `mesh` by `plan`."""
        from warpweave.parallel.context import resolve_strategy  # imports torch: not for options
        from warpweave.parallel.data.ordered import check_order
        from warpweave.parallel.layout import cut

        if mesh.dp_shard is not None and plan.zero == 0:
            raise ValueError(f"dp_shard = {mesh.dp_shard} needs ZeRO 1 to 3, got zero = 0")
        if plan.reduce == "ordered" and (mesh.dp_shard is not None or mesh.outer > 1):
            given = f"dp_shard = {mesh.dp_shard}, outer = {mesh.outer}"
            raise ValueError(
                f"reduce = 'ordered' does not support dp_shard or outer > 1, got {given}"
            )
        self.check_tensor(mesh.tp)
        if plan.asynchronous and plan.zero == 3:
            raise ValueError(
                f"zero must be 0 to 2 with schedule {plan.schedule}: zero = 3 shards weights, but "
                "the schedule keeps old versions of whole weights"
            )
        if plan.asynchronous and plan.reduce == "ordered":
            raise ValueError(
                "reduce = 'ordered' does not support asynchronous schedules, got "
                f"schedule {plan.schedule}"
            )
        if plan.asynchronous and self.tied and mesh.pp > 1:
            raise ValueError(
                f"tied must be False with schedule {plan.schedule}: the gradients of the embedding "
                f"and the head would arrive {mesh.pp - 1} micro-batches apart"
            )
        if plan.reduce == "ordered":
            check_order(plan.make_schedule(mesh.pp), tied=self.tied)
        stages = len(plan.placement(mesh.pp))
        if stages > self.layers:
            raise ValueError(
                f"layers must be at least the number of pipeline stages ({stages}), got "
                f"{self.layers}"
            )
        layout = cut(self.seq_len, mesh.cp, plan.layout)
        if mesh.cp > 1:
            heads = self.heads // mesh.tp, self.num_kv_heads // mesh.tp
            ulysses = mesh.ulysses if mesh.ulysses > 1 else None
            measured = plan.cp_strategy == "measured"
            if measured and ulysses is not None:
                raise ValueError(
                    f"cp_strategy = 'measured' needs ulysses = 1, got {ulysses}, which leaves only "
                    "one strategy; use 'hybrid'"
                )
            resolve_strategy("auto" if measured else plan.cp_strategy, layout, heads, ulysses)


_LLAMA: dict = {"positions": "rope", "norm": "rms", "activation": "swiglu", "bias": False}
_LLAMA3 = _LLAMA | {"vocab_size": 128256, "seq_len": 8192, "rope_theta": 500000.0}

PRESETS = {
    "toy": GPTConfig(256, 128, 2, 128, 4),
    "small": GPTConfig(256, 128, 4, 128, 4),
    "toy-llama": GPTConfig(256, 128, 2, 128, 4, 2, 352, tied=False, **_LLAMA),
    "gpt2": GPTConfig(50257, 1024, 12, 768, 12),
    "gpt2-medium": GPTConfig(50257, 1024, 24, 1024, 16),
    "gpt2-large": GPTConfig(50257, 1024, 36, 1280, 20),
    "gpt2-xl": GPTConfig(50257, 1024, 48, 1600, 25),
    "llama-1b": GPTConfig(layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, **_LLAMA3),
    "llama-8b": GPTConfig(
        layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, tied=False, **_LLAMA3
    ),
    "llama-70b": GPTConfig(
        layers=80, width=8192, heads=64, kv_heads=8, hidden=28672, tied=False, **_LLAMA3
    ),
    "llama3-405b": GPTConfig(
        layers=126, width=16384, heads=128, kv_heads=8, hidden=53248, tied=False, **_LLAMA3
    ),
    "gpt3-175b": GPTConfig(50257, 2048, 96, 12288, 96),
}
