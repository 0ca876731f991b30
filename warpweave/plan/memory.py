"""Estimate a training step's memory per rank, before anything is allocated.

In bytes per rank, with P the rank's parameters (its stage, its tensor shard), D = dp x cp the ranks
over which ZeRO shards (dp_shard x cp with hybrid sharding), b the bytes of a parameter and m those
of its master (8 for float64, otherwise 4), U the largest unit (a block, the embedding or the head):

    weights       P b                                        ZeRO 3: P b / D + 2 U b
                  an asynchronous schedule: one more copy for every older version
                  (PipeDream: pp - 1 - stage, 2BW: 1)
    gradients     P m, ZeRO 1: + P m / D                     ZeRO 2, 3: P m / D + 2 U m
                  reduce "ordered", any ZeRO: P m / D + 4 U m, ZeRO 0: + P m
    optimizer     2 P m (AdamW), P m (SGD) or (2 P - W) m    ZeRO 1 to 3: those / D
                  (Muon, with W elements in the matrices of blocks),
                  + P m if b differs from m
                  an outer optimizer: + P m, with momentum 2 P m, + P m / fragments for a sum
    activations   of every micro-batch in flight (set by the schedule) and every block:

                      b (n t E + T (A + H D + Z) / tp) + 4 T H / tp   (lse)

                  with T = batch seq_len / cp tokens, t = T / tp with sequence parallelism, else T;
                  n = 4 (two norms and their outputs; 6 with norm_place "sandwich"); A the queries,
                  keys and values (q and k twice with a rotary embedding); Z the MLP's hidden
                  activations: before the activation function (twice as many if it is gated) and, on
                  a CPU only, after it; none with recompute "selective". With "full" b t E per
                  block, and with context ranks T (b (2 H + 2 Hkv) D + 8 H) / tp of attention
                  results (those of Ulysses; a ring keeps less). Add three whole blocks for the
                  block in its backward (its activations, their gradients and temporaries: measured
                  on CPUs, not derived). On the rank with the loss add its block of logits (with a
                  softcap also two fp32 copies) and (on a CPU) dW, V E m / tp.
    update        with Muon, after the activations are freed: directions and messages of them, 4 W m
                  (ZeRO 1 to 3: / D), and four times the largest matrix, unsharded; from the code,
                  not measured
    loading       the largest unit, unsharded, in float32, twice: drawn and scaled before any step
    gpu           on GPUs only, everything that is not a tensor of the step. Each is a constant
                  below, with its source; none was measured here: modules, cuBLAS workspaces, NCCL's
                  buffers
                  (C communicators: the world, one per axis or product of axes that has its own
                  ranks, four between pipeline stages), with tensor parallelism two of the terms
                  [T, E] of its sums, T E m each, and with overlap "fused" two symmetric buffers of
                  such a term, rounded up to a power of two

The estimate is the sum of these, with only the largest of activations, update and loading. Sampling
needs less than a step: one sequence, without gradients, and one row of logits. The estimate does
not include message buffers, fragmentation of the allocator, or the memory of a process without a
model (0.3 GiB on a CPU; on a GPU its context, which already exists when the free memory is read).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from warpweave.kernels.words import find_activation
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.parallel.mesh import Mesh, factors
from warpweave.parallel.schedule import FAMILIES, find_family, placement, staleness
from warpweave.parallel.schedule.actions import I, W, held_activations
from warpweave.parallel.words import CAPPED, chunks_of, local_rows

if TYPE_CHECKING:
    from warpweave.parallel.data.outer import OuterRule

SIZES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}  # bytes per element
_MIB = 2**20
# Kernels of torch, cuBLAS and Triton, loaded at their first launch: taken from public reports of
# 0.6 to 1 GiB for context and modules, of which the context alone is about half.
_MODULES = 400 * _MIB
# torch's default on Hopper (CUBLAS_WORKSPACE_CONFIG=:4096:8), on the main and the side stream.
_CUBLAS = 2 * 32 * _MIB
# 100 to 300 MiB at eight ranks, by public reports: some 24 channels, each with a buffer of 4 MiB
# (NCCL_BUFFSIZE) for each of its neighbors.
_COMMUNICATOR = 200 * _MIB
_BETWEEN_STAGES = 4  # communicators for a pipeline's links (`transport`)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank; see the module's docstring for the formulas.

    Examples:
        >>> MemoryEstimate(weights=8, gradients=8, optimizer=24, activations=64, loading=16).total
        104
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loading: int
    gpu: int = 0
    update: int = 0

    @property
    def total(self) -> int:
        """The peak, in bytes."""
        states = self.weights + self.gradients + self.optimizer
        return states + max(self.activations, self.loading, self.update) + self.gpu


@dataclass(frozen=True)
class TrainingStep:
    """A training step, to estimate its memory.

    Attributes:
        config, mesh, plan: as passed to the engine, already checked.
        batch: sequences in a micro-batch.
        dtype: a key of `SIZES`, for parameters and activations.
        device_type: "cpu" or "cuda".
        optimizer: "adamw", "nadamw", "muon" or "sgd".
        outer: the outer optimizer, or None.

    Examples:
        >>> from warpweave import Mesh, ParallelPlan, PRESETS
        >>> plan = ParallelPlan(zero=3)
        >>> step = TrainingStep(PRESETS["gpt2"], Mesh(dp=8), plan, 4, "bf16", "cuda")
    """

    config: GPTConfig
    mesh: Mesh
    plan: ParallelPlan
    batch: int
    dtype: str
    device_type: str = "cpu"
    optimizer: str = "adamw"
    outer: OuterRule | None = None

    @property
    def tokens(self) -> int:
        """T: tokens of a micro-batch on one context rank."""
        length, cp = self.config.seq_len, self.mesh.cp
        return self.batch * local_rows(length, cp, chunks_of(length, cp, self.plan.layout))

    @property
    def rows(self) -> int:
        """Rows of the residual stream on one tensor rank."""
        return self.tokens // self.mesh.tp if self.plan.sequence_parallel else self.tokens


class States(NamedTuple):
    """Bytes of model states, of a rank or of one parameter: the weights, their gradients, and the
    optimizer's states (masters and moments)."""

    weights: int
    gradients: int
    optimizer: int


def sharded(states: States, zero: int, ranks: int) -> States:
    """Shard model states with ZeRO over `ranks` data ranks (arXiv:1910.02054, figure 1).

    For psi parameters of 2 + 2 + 12 bytes on N ranks:

        stage 0  16 psi          1  4 psi + 12 psi / N    2  2 psi + 14 psi / N    3  16 psi / N
    """
    shares = (ranks if zero >= stage else 1 for stage in (3, 2, 1))
    return States(*(held // share for held, share in zip(states, shares)))


def estimate(step: TrainingStep) -> list[MemoryEstimate]:
    """Estimate each pipeline rank; all ranks at the same pipeline index need the same.

    Examples:
        >>> from warpweave import Mesh, ParallelPlan, PRESETS
        >>> from warpweave.plan.memory import TrainingStep
        >>> plan = ParallelPlan(zero=3)
        >>> step = TrainingStep(PRESETS["gpt2"], Mesh(dp=8), plan, 4, "bf16", "cuda")
        >>> [f"{rank.total / 2**30:.1f} GiB" for rank in estimate(step)]
        ['3.0 GiB']
    """
    return [_estimate_rank(step, rank) for rank in range(step.mesh.pp)]


def _estimate_rank(step: TrainingStep, rank: int) -> MemoryEstimate:
    """Estimate one pipeline rank."""
    size, data = SIZES[step.dtype], step.mesh.size("shard")
    master, zero = max(size, 4), step.plan.zero if data > 1 else 0
    units = units_of(step.config, step.mesh, step.plan, rank)
    P, U = sum(units.values()), max(units.values())
    matrices, largest = _muon_matrices(step, rank)
    elements = {"muon": 2 * P - matrices, "sgd": P}.get(step.optimizer, 2 * P)
    elements += (master != size) * P
    if step.outer is not None:  # global weights, outer momentum, and the sum in flight
        elements += len(step.outer.states) * P + _largest_fragment(step, units)
    held = sharded(States(P * size, P * master, elements * master), zero, data)
    weights = held.weights + (2 * U * size if zero == 3 else 0)
    if step.plan.asynchronous:  # one full copy per older version
        weights += P * size * staleness(step.plan.make_schedule(step.mesh.pp))[rank]
    gradients = held.gradients + (P * master // data if zero == 1 else 0)
    gradients += 2 * U * master if zero >= 2 else 0
    if step.plan.reduce == "ordered":
        gradients = P * master // data + (P * master if data > 1 and not zero else 0)
        gradients += (4 if data > 1 else 2) * U * master
    update = 4 * (matrices // (data if zero else 1) + largest) * master
    # A loaded parameter is whole: the units of one stage on one rank.
    loading = max(_units(step.config, 1, (0,), 0).values()) * 4 * 2
    whole, kept = _kept(step)
    activations = live_blocks(step.plan, step.mesh.pp, step.config)[rank] * kept + 3 * whole
    if stage_ranks(step.plan, step.mesh.pp)[-1] == rank:
        activations += _loss(step, size, master)
    parts = weights, gradients, held.optimizer, activations, loading
    return MemoryEstimate(*parts, _gpu(step, master), update)


def least_memory(step: TrainingStep) -> float:
    """Return a lower bound for the fullest rank's bytes under any schedule.

    It is what a mean rank needs with one micro-batch in all of its blocks and no embedding.
    """
    mesh, size, blocks = step.mesh, SIZES[step.dtype], step.config.layers / step.mesh.pp
    P, master = int(blocks * block_parameters(step.config, mesh.tp)), max(size, 4)
    elements = (2 if step.optimizer == "adamw" else 1) + (master != size)
    states = States(P * size, P * master, elements * P * master)
    held = sharded(states, step.plan.zero, mesh.size("shard"))
    whole, kept = _kept(step)
    return sum(held) + blocks * kept + 3 * whole + _gpu(step, master)


def _kept(step: TrainingStep) -> tuple[int, int]:
    """Return a block's activation bytes per micro-batch: all, and those kept with recomputation."""
    config, mesh, size = step.config, step.mesh, SIZES[step.dtype]
    whole, spared = block_activations(step)
    heads = config.heads + config.num_kv_heads
    attended = 2 * heads * config.head_dim * size + 8 * config.heads if mesh.cp > 1 else 0
    again = step.rows * config.width * size + attended * step.tokens // mesh.tp
    kept = {"none": whole, "selective": whole - spared, "full": again}[step.plan.recompute]
    return whole, kept


def stage_ranks(plan: ParallelPlan, ranks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage."""
    return pipeline_shape(plan, ranks)[0]


def pipeline_shape(plan: ParallelPlan, ranks: int) -> tuple[tuple[int, ...], bool]:
    """Return the pipeline rank of each stage, and True if the schedule splits backwards in two.

    Raises ValueError if the schedule does not support these micro-batches or chunks.
    """
    m = plan.microbatches
    if plan.schedule not in FAMILIES:  # a file, which may change between calls
        return _pipeline_shape.__wrapped__(plan.schedule, m, plan.chunks, ranks)
    if m > 4 * ranks:  # more micro-batches change neither result
        m = 2 * ranks + m % (2 * ranks)
    return _pipeline_shape(plan.schedule, m, plan.chunks, ranks)


@lru_cache(maxsize=4096)
def _pipeline_shape(name: str, m: int, chunks: int, ranks: int) -> tuple[tuple[int, ...], bool]:
    lists = find_family(name).make(ranks, m, chunks)
    return tuple(placement(lists)), any(a.op in (I, W) for actions in lists for a in actions)


def live_blocks(plan: ParallelPlan, ranks: int, config: GPTConfig) -> tuple[int, ...]:
    """Return the most blocks, counted once per micro-batch, whose activations each pipeline rank's
    list of actions keeps at once."""
    count = _live_blocks if plan.schedule in FAMILIES else _live_blocks.__wrapped__
    return count(plan.schedule, plan.microbatches, plan.chunks, ranks, config)


@lru_cache(maxsize=4096)
def _live_blocks(name: str, m: int, chunks: int, ranks: int, config: GPTConfig) -> tuple[int, ...]:
    lists = find_family(name).make(ranks, m, chunks)
    stages = len(placement(lists))
    each = [len(config.blocks_of(stage, stages)) for stage in range(stages)]
    return tuple(max(held_activations(actions, each.__getitem__), default=0) for actions in lists)


def _gpu(step: TrainingStep, master: int) -> int:
    """Return the bytes that a rank has on a GPU apart from the step's tensors; 0 on a CPU."""
    if step.device_type == "cpu":
        return 0
    mesh, held = step.mesh, _MODULES + _CUBLAS
    if mesh.world > 1:
        held += _COMMUNICATOR * (1 + _groups(mesh) + _BETWEEN_STAGES * (mesh.pp > 1))
    if mesh.tp > 1:
        term = step.tokens * step.config.width * master
        held += 2 * term
        if step.plan.overlap == "fused":
            held += 2 * (1 << (term - 1).bit_length())
    return held


@lru_cache(maxsize=4096)
def _groups(mesh: Mesh) -> int:
    """Count the groups a rank is in, besides the world: each set of axes with several ranks."""
    whole = ("world",) if mesh.outer > 1 else ("world", "inner")
    axes = [axis for axis in mesh.seen_from(0).groups if axis not in whole and mesh.size(axis) > 1]
    return len({tuple(f for f in factors(axis) if mesh.size(f) > 1) for axis in axes})


def units_of(config: GPTConfig, mesh: Mesh, plan: ParallelPlan, rank: int) -> dict[str, int]:
    """Return the parameters in each ZeRO unit on a pipeline rank: a block (by its number), the
    embedding, the positions, the final norm, the head."""
    return _units(config, mesh.tp, stage_ranks(plan, mesh.pp), rank)


def parameters_of(step: TrainingStep) -> tuple[int, ...]:
    """Return the number of parameters on each pipeline rank."""
    return _parameters(step.config, step.mesh.tp, stage_ranks(step.plan, step.mesh.pp))


@lru_cache(maxsize=4096)
def _parameters(config: GPTConfig, tp: int, stages: tuple[int, ...]) -> tuple[int, ...]:
    ranks = range(max(stages) + 1)
    return tuple(sum(_units(config, tp, stages, rank).values()) for rank in ranks)


@lru_cache(maxsize=4096)
def _units(config: GPTConfig, tp: int, stages: tuple[int, ...], rank: int) -> dict[str, int]:
    first, last = stages[0] == rank, stages[-1] == rank
    rows, norm = -(-config.vocab_size // tp) * config.width, _norm_parameters(config)
    units = {"embedding": rows} if first or (last and config.tied) else {}
    if first and config.positions == "learned":
        units["positions"] = config.seq_len * config.width
    each = block_parameters(config, tp)
    for stage in (stage for stage, at in enumerate(stages) if at == rank):
        units |= dict.fromkeys(map(str, config.blocks_of(stage, len(stages))), each)
    if last:
        units |= {"final_norm": norm} | ({} if config.tied else {"head": rows})
    return units


def block_parameters(config: GPTConfig, tp: int = 1) -> int:
    """Return the number of parameters of one block on a tensor rank."""
    queries, keys = config.heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, gates = config.num_hidden, 2 if find_activation(config.activation).gated else 1
    qkv, up, width = queries + 2 * keys, gates * hidden, config.width
    count = sum(_block_matrices(config)) // tp
    has_qkv_bias = config.bias if config.qkv_bias is None else config.qkv_bias
    count += has_qkv_bias * qkv // tp + config.bias * (up // tp + 2 * width)
    if config.qk_norm:
        count += (queries + keys) // tp if config.qk_norm_whole else 2 * config.head_dim
    count += config.sinks * config.heads // tp
    return count + (4 if config.norm_place == "sandwich" else 2) * _norm_parameters(config)


def _norm_parameters(config: GPTConfig) -> int:
    """Return the number of parameters of a norm over the width."""
    bias = config.bias if config.norm_bias is None else config.norm_bias
    return config.width * (2 if config.norm == "layer" and bias else 1)


def _block_matrices(config: GPTConfig) -> list[int]:
    """Return the elements of a block's matrices: queries, keys, values, output, up (gate), down."""
    queries, keys = config.heads * config.head_dim, config.num_kv_heads * config.head_dim
    gates = 2 if find_activation(config.activation).gated else 1
    rows = [queries, keys, keys, queries, *[config.num_hidden] * (gates + 1)]
    return [config.width * count for count in rows]


def _largest_fragment(step: TrainingStep, units: dict[str, int]) -> int:
    """Return the most elements of these units that the outer optimizer averages at once, given
    its fragments."""
    assert step.outer is not None
    layers, sums = step.config.layers, Counter[int]()
    ends = {"embedding": 0, "positions": 0, "head": layers - 1, "final_norm": layers - 1}
    for name, count in units.items():
        sums[(ends[name] if name in ends else int(name)) % step.outer.fragments] += count
    return max(sums.values())


def _muon_matrices(step: TrainingStep, rank: int) -> tuple[int, int]:
    """Return the elements of all matrices that Muon updates on a pipeline rank, and of the largest
    one, unsharded; 0, 0 for other optimizers."""
    if step.optimizer != "muon":
        return 0, 0
    blocks = sum(name.isdigit() for name in units_of(step.config, step.mesh, step.plan, rank))
    each = _block_matrices(step.config)
    return blocks * (sum(each) // step.mesh.tp), max(each)


def block_activations(step: TrainingStep, *, fused: bool = True) -> tuple[int, int]:
    """Return the activation bytes that one block keeps per micro-batch, and how many of them
    recompute "selective" drops.

    With `fused` they are those of our kernels (see the module's docstring), and "selective" drops
    the MLP's hidden activations. Without, they are what arXiv:2205.05198 counts for Megatron-LM,
    which also keeps dropout masks, the MLP's hidden activations after the activation function, and
    attention scores before and after softmax and dropout; "selective" drops the scores:

        s b h (10 + 24 / t + 5 a s / (h t)), with sequence parallelism s b h (34 + 5 a s / h) / t
    """
    config, tp, size = step.config, step.mesh.tp, SIZES[step.dtype]
    T, E = step.tokens, config.width
    q, kv = config.heads * config.head_dim, config.num_kv_heads * config.head_dim
    gates = 2 if find_activation(config.activation).gated else 1
    norms = 6 if config.norm_place == "sandwich" else 4
    if not fused:
        scores = (2 * size + 1) * config.heads * T * config.seq_len // tp
        over = size * T * (2 * q + 2 * kv + config.num_hidden * (gates + 1)) // tp
        return (size * norms + 2) * step.rows * E + over + scores, scores
    attention = 2 * q + 2 * kv + (q + kv if config.positions == "rope" else 0)
    hidden = config.num_hidden * (gates + (step.device_type == "cpu"))
    hidden = size * T * hidden // tp
    over = (size * attention + 4 * config.heads) * T // tp
    return size * norms * step.rows * E + over + hidden, hidden


def _loss(step: TrainingStep, size: int, master: int) -> int:
    """Return the bytes of the head's blocks of logits, and of what head and loss keep for the
    backward."""
    config, tokens, on_cpu = step.config, step.tokens, step.device_type == "cpu"
    vocabulary = math.ceil(config.vocab_size / step.mesh.tp)
    most, rows = (2**20, 2**10) if on_cpu else (2**26, 2**12)
    logits = min(max(most, rows * vocabulary), tokens * vocabulary) * size
    if config.logit_softcap is not None:  # plus the float32 copies that the backward makes
        logits = min(max(CAPPED[1], vocabulary), tokens * vocabulary) * (size + 2 * master)
    return logits + tokens * config.width * size + on_cpu * vocabulary * config.width * master
