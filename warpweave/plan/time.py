"""Predict the time of a training step from FLOPs, bytes and the speeds that hardware reaches.

The formulas for FLOPs and bytes are in ``kernels.cost``. `Hardware.efficiency` has the six numbers
that turn them into seconds (matrix products, elementwise and attention; near and far links; a
latency). For one block and micro-batch, with T = tokens of a context rank and E the width:

    products     qkv, output, up (and gate) and down over tp ranks: the roofline, by
                 FLOPs / (peak x efficiency) and bytes / bandwidth; twice that in the backward,
                 where the half for the weights may come later (W)
    attention    the causal half, forward and 2.5 times that backward, over tp and cp ranks
    elementwise  the norms with their residual sums, by bytes
    tensor       4 passes of [T, E] over tp ranks forward (2 all-gathers and reduce-scatters, or 2
                 all-reduces), as many backward, and 2 more with sequence parallelism; `overlap`
                 may hide them behind products. A pass is T E b (tp - 1) / tp bytes on NVLink
    context      a ring's keys and values, (cp - 1) blocks, and in the backward their gradients;
                 (cp - 1) / cp of attention hides them
    recompute    "full" adds a block's forward to its backward, "selective" adds its product up

The pipeline is simulated (``parallel.simulate``) with these times for each stage and its messages.
The first stage adds the embedding's time, the last the head's. After the pipeline come the sum of
gradients over data ranks (unless the last backwards hide it), the optimizer's bytes and the
all-gather of weights (unless the next step's first forward hides it). In every micro-batch,
concurrent with its computation, ZeRO 2 and 3 sum gradients and ZeRO 3 gathers weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import NamedTuple

from warpweave.kernels import cost
from warpweave.kernels.cost import Cost
from warpweave.kernels.words import find_activation
from warpweave.parallel.schedule.actions import FINISHES, Action, B, F, I, W
from warpweave.parallel.simulate import Cell, Timeline, simulate
from warpweave.plan.device import Hardware
from warpweave.plan.memory import SIZES, TrainingStep, parameters_of, pipeline_shape, stage_ranks

# Slowdown of computation by a concurrent message, as a fraction of the message's time: NCCL takes
# processors and memory bandwidth. Set by hand, not fitted by benchmarks/plan_rows.py.
_BESIDE = 0.25
_NEAR_HOP, _FAR_HOP = 3.4e-6, 14e-6  # ring over NVLink or network: NCCL's "simple" protocol
_CHUNKS = 4  # of "chunked" and "fused" overlap, one always exposed; assumed, no row shows it


@dataclass(frozen=True, kw_only=True)
class Job(TrainingStep):
    """A training step on given hardware.

    Attributes:
        hardware: the GPUs.
        fused: use our kernels; False: separate kernels for residual sums, dropout, activation and
            rotation, copies to attention's layout and back, and the loss from fp32 copies of the
            logits.
        scores: attention's scores go through memory, as before FlashAttention. Recompute
            "selective" then recomputes the scores (arXiv:2205.05198).
        stops_early: recompute "full" skips the last product, as torch.utils.checkpoint does.
        scattered: messages between stages are split over tensor ranks, as with sequence
            parallelism, and gathered on arrival (arXiv:2104.04473, 4.1).
        owned: number of parameter tensors, if ZeRO 1 shards by whole tensors, which their owners
            broadcast one by one before the next step; 0: flat shards, gathered during its forward.
        summed: bytes per gradient element in sums over data ranks.
        casts: every input of a block's products is cast to 8 bits, twice (once transposed), and so
            is every gradient of their outputs; the hardware's `products` then has 8-bit figures.
    """

    hardware: Hardware
    fused: bool = True
    scores: bool = False
    stops_early: bool = False
    scattered: bool = False
    owned: int = 0
    summed: int = 4
    casts: bool = False

    @property
    def sequences(self) -> int:
        """Sequences per step, over all replicas."""
        return self.batch * self.plan.microbatches * self.mesh.dp * self.mesh.outer


class Work(NamedTuple):
    """Seconds of one micro-batch on one rank; `weights` is the part of the backward that computes
    weight gradients."""

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0

    def plus(self, other: Work, count: int = 1) -> Work:
        """Return the sum with `count` times `other`."""
        return Work(*(mine + count * theirs for mine, theirs in zip(self, other)))


class StepTime(NamedTuple):
    """The predicted time of a step.

    Attributes:
        seconds: the whole step.
        pipeline: the part from the first forward to the last backward.
        reduction: the exposed sum of gradients.
        update: the optimizer and the exposed all-gather of weights.
        mfu: model FLOPs (``cost.gpt_step``) over the GPUs' peak.
        timeline: the simulated pipeline.
    """

    seconds: float
    pipeline: float
    reduction: float
    update: float
    mfu: float
    timeline: Timeline


def step_time(job: Job) -> float:
    """Return the predicted seconds of a training step."""
    return predict(job).seconds


def predict(job: Job) -> StepTime:
    """Predict a step, simulating its pipeline action by action."""
    work = stage_work(job)

    def price(action: Action) -> float:
        stage = work[action.stage]
        each = {F: stage.forward, B: stage.backward, W: stage.weights}
        each[I] = stage.backward - stage.weights
        return each.get(action.op, 0.0)

    timeline = simulate(job.plan.make_schedule(job.mesh.pp), price, message(job)[1])
    ends = [row[-1].end for row in timeline.cells]
    stop = max(_gradients_summed(job, rank, row) for rank, row in enumerate(timeline.cells))
    update = _update(job, work)
    seconds = stop + update
    flops = job.config.step_flops(job.sequences * job.config.seq_len)
    mfu = flops / (seconds * job.mesh.world * job.hardware.device.half)
    return StepTime(seconds, max(ends), stop - max(ends), update, mfu, timeline)


def _gradients_summed(job: Job, rank: int, row: Sequence[Cell]) -> float:
    """Return the time at which a pipeline rank's gradients are summed: each stage's sum overlaps
    its last backward and, after it, those of the rank's other stages."""
    last = {cell.action.stage: cell.start for cell in row if cell.action.op in FINISHES}
    each, done = gradient_sum(job, rank) / len(last), 0.0
    for start in sorted(last.values()):
        done = max(done, start) + each
    return max(done, row[-1].end)


def least_time(job: Job) -> float:
    """Return a lower bound for the time of a step under any schedule of this job's stages.

    A rank starts when its first stage's input has arrived, then works through all micro-batches.
    After its last backward the stages before it still have theirs, unless the schedule splits
    backwards, so that weight gradients may come last:

        rank r   | F of the stages before | m (F + B) of its own stages | B of the stages before |
    """
    (ranks, splits), work = pipeline_shape(job.plan, job.mesh.pp), stage_work(job)
    hop = message(job)[1]
    starts: dict[int, tuple[float, float]] = {}  # per rank: time before it starts, and after it
    busy, ahead, after = [0.0] * job.mesh.pp, 0.0, 0.0
    for stage, rank in enumerate(ranks):
        ahead += hop if stage and ranks[stage - 1] != rank else 0.0
        starts.setdefault(rank, (ahead, 0.0 if splits else after))
        busy[rank] += work[stage].forward + work[stage].backward
        ahead, after = ahead + work[stage].forward, after + work[stage].backward
    m = job.plan.microbatches
    pipeline = max(sum(starts[rank]) + m * each for rank, each in enumerate(busy))
    return pipeline + _update(job, work)


# ---------------------------------------------------------------- a stage


def stage_work(job: Job) -> list[Work]:
    """Return the work of each stage on one micro-batch."""
    ranks = stage_ranks(job.plan, job.mesh.pp)
    alike = replace(job.plan, zero=0, schedule="1f1b", chunks=1, microbatches=1)
    (block, embedding, head), found = _pieces(replace(job, plan=alike)), []
    for stage, rank in enumerate(ranks):
        blocks = len(job.config.blocks_of(stage, len(ranks)))
        work = Work().plus(block, blocks)
        if stage == 0:
            work = work.plus(embedding)
        if stage == len(ranks) - 1:
            work = work.plus(head)
        found.append(_beside_zero(job, rank, work) if job.plan.zero > 1 else work)
    return found


@lru_cache(maxsize=4096)
def _pieces(job: Job) -> tuple[Work, Work, Work]:
    """Return the work of a block, the embedding and the head; cached for jobs that differ only in
    options without effect on these."""
    return block_work(job), _embedding_work(job), _head_work(job)


def block_work(job: Job) -> Work:
    """Return the work of a block, over all parts."""
    return reduce(Work.plus, block_parts(job).values(), Work())


def block_parts(job: Job) -> dict[str, Work]:
    """Return the work of each part of a block, as listed in the module's docstring."""
    products, attention = _product_work(job), _attention_work(job)
    parts = {
        "products": products,
        "attention": attention,
        "elementwise": _elementwise_work(job),
        "tensor": _tensor_work(job, products),
        "context": _context_work(job, attention),
    }
    if job.plan.recompute == "full":
        again = sum(part.forward for part in parts.values())
        again -= _product_time(job, *product_shapes(job)[3]) if job.stops_early else 0.0
        parts["recompute"] = Work(0.0, again)
    elif job.plan.recompute == "selective":
        again = attention.forward if job.scores else _product_time(job, *product_shapes(job)[2])
        parts["recompute"] = Work(0.0, again)
    return parts


def product_shapes(job: Job) -> list[tuple[int, int, int]]:
    """Return M, N, K of a block's forward products on a rank: qkv, output, up (and gate), down."""
    config, tp, T, E = job.config, job.mesh.tp, job.tokens, job.config.width
    q, kv = config.heads * config.head_dim, config.num_kv_heads * config.head_dim
    gates, hidden = 2 if find_activation(config.activation).gated else 1, config.num_hidden
    return [(T, (q + 2 * kv) // tp, E), (T, E, q // tp), (T, gates * hidden // tp, E),
            (T, E, hidden // tp)]  # fmt: skip


def _product_time(job: Job, M: int, N: int, K: int) -> float:
    """Return the seconds of a matrix product."""
    hardware = job.hardware
    found = cost.gemm(M, N, K, size=SIZES[job.dtype])
    return found.seconds(hardware.products, hardware.stream) + hardware.efficiency.latency


def _stream(job: Job, *costs: Cost) -> float:
    """Return the seconds of elementwise kernels, from their bytes."""
    each = (found.bytes / job.hardware.stream for found in costs)
    return sum(each) + len(costs) * job.hardware.efficiency.latency


def _product_work(job: Job) -> Work:
    shapes = product_shapes(job)
    forward = sum(_product_time(job, M, N, K) for M, N, K in shapes)
    inputs = sum(_product_time(job, M, K, N) for M, N, K in shapes)
    weights = sum(_product_time(job, N, K, M) for M, N, K in shapes)
    return Work(forward, inputs + weights, weights)


def _attention_work(job: Job) -> Work:
    config, mesh, S = job.config, job.mesh, job.config.seq_len
    heads, kv_heads = config.heads // mesh.tp, config.num_kv_heads // mesh.tp
    latency, efficiency = job.hardware.efficiency.latency, job.hardware.efficiency
    found, size = [], SIZES[job.dtype]
    for backward in (False, True):
        like = {"kv_heads": kv_heads, "backward": backward, "size": size}
        shape = job.batch, S, S, heads, config.head_dim
        if not job.scores:  # windows: the mean over layers
            windows = config.windows or (0,)
            each = [cost.attention(*shape, window=w or None, **like) for w in windows]
            speed = job.hardware.device.half * efficiency.attention
            sums = [one.seconds(speed, job.hardware.stream) for one in each]
            found.append(sum(sums) / len(sums) / mesh.cp + latency)
        else:  # all pairs; products, softmax and dropout move the scores through memory
            flops = cost.attention(*shape, causal=False).flops * (2 if backward else 1)
            scores = job.batch * heads * S * S
            moved = scores * (5 * size + 1) * (2 if backward else 1)
            seconds = flops / job.hardware.products + moved / job.hardware.stream
            found.append(seconds / mesh.cp + 4 * latency)
    return Work(*found)


def _elementwise_work(job: Job) -> Work:
    config, size, rows, E = job.config, SIZES[job.dtype], job.rows, job.config.width
    norms = 4 if config.norm_place == "sandwich" else 2
    gated, n = find_activation(config.activation).gated, job.tokens * config.num_hidden
    found = []
    for back in (False, True):
        norm = cost.norm(
            rows, E, layer=config.norm == "layer", residual=job.fused, backward=back, size=size
        )
        each = [norm] * norms
        if not job.fused:
            each += [cost.activation(n // job.mesh.tp, gated=gated, backward=back, size=size)]
            each += [Cost(rows * E, 3 * rows * E * size)] * 2  # residual sums
            each += [cost.dropout(rows, E, size=size)] * (2 if config.dropout else 0)
            heads = 2 * (config.heads + config.num_kv_heads) // job.mesh.tp
            each += [Cost(0, 2 * job.tokens * heads * config.head_dim * size)]  # attention's layout
            if config.positions == "rope":
                heads = (config.heads + config.num_kv_heads) // job.mesh.tp
                each += [cost.rope(1, job.tokens, heads, config.head_dim, size=size)]
        if job.casts:
            values = sum(N if back else K for _, N, K in product_shapes(job))
            each += [Cost(0, (size + 2) * job.tokens * values)]
        found.append(_stream(job, *each))
    return Work(*found)


def _embedding_work(job: Job) -> Work:
    """Return the work of looking up embedding rows, summed over tensor ranks; fp32 gradients."""
    moved = job.tokens * job.config.width * SIZES[job.dtype]
    passes = 1 if job.plan.sequence_parallel else 2
    near = passes * tensor_pass(job)[1]
    return Work(_stream(job, Cost(0, 2 * moved)) + near, _stream(job, Cost(0, 4 * moved)) + near)


def _head_work(job: Job) -> Work:
    """Return the work of the final norm, the product with the head, and the loss."""
    config, T, E, size = job.config, job.tokens, job.config.width, SIZES[job.dtype]
    V = -(-config.vocab_size // job.mesh.tp)
    near = tensor_pass(job)[1]
    norm = [cost.norm(job.rows, E, layer=config.norm == "layer", size=size)]
    back = [cost.norm(job.rows, E, layer=config.norm == "layer", backward=True, size=size)]
    if job.fused:
        norm += [cost.cross_entropy(T, V, size=size)]
        back += [cost.cross_entropy(T, V, backward=True, size=size)]
    else:  # an fp32 copy and its log-softmax; the gradients of both
        norm += [Cost(4 * T * V, (size + 4 + 4 + 4) * T * V)]
        back += [Cost(4 * T * V, (4 + 4 + 4 + size) * T * V)]
    forward = _product_time(job, T, V, E) + _stream(job, *norm)
    weights = _product_time(job, V, E, T)
    backward = _product_time(job, T, E, V) + weights + _stream(job, *back)
    return Work(forward + near, backward + near, weights)


# ---------------------------------------------------------------- messages: (bytes, seconds)


def _sent(job: Job, inner: int, size: int, moved: float) -> tuple[float, float]:
    """Return (bytes, seconds) of a collective of `size` ranks that each send `moved` bytes."""
    if size == 1:
        return 0.0, 0.0
    latency = job.hardware.efficiency.latency * math.ceil(math.log2(size))
    return moved, latency + moved / job.hardware.bandwidth(inner, size)


def tensor_pass(job: Job) -> tuple[float, float]:
    """Return (bytes, seconds) of one all-gather or reduce-scatter of [T, E] over tensor ranks."""
    tp, whole = job.mesh.tp, job.tokens * job.config.width * SIZES[job.dtype]
    return _sent(job, 1, tp, whole * (tp - 1) / tp)


def tensor_passes(job: Job) -> tuple[int, int]:
    """Return the passes over the tensor ranks in a block's forward and backward."""
    return (4, 6 if job.plan.sequence_parallel else 4) if job.mesh.tp > 1 else (0, 0)


def _tensor_work(job: Job, products: Work) -> Work:
    """Return the part of the tensor ranks' collectives that products do not hide.

    "bulk" hides those in the backward that run concurrently with a product: a column-parallel
    layer's second input gather with the product for its gradient, and the sum of that gradient with
    the product for the weights'. "chunked" and "fused" hide all but their first part.
    """
    (ahead, back), each = tensor_passes(job), tensor_pass(job)[1]
    if job.plan.overlap in ("chunked", "fused"):
        shown = (1 / _CHUNKS, 1 / _CHUNKS)
    else:
        bare = 2 / 6 if job.plan.sequence_parallel else 0.0
        shown = (1.0, bare if job.plan.overlap == "bulk" else 1.0)
    every = zip((ahead, back), shown, products)
    return Work(*(n * each * p + max(0.0, n * each * (1 - p) - work) for n, p, work in every))


def context_bytes(job: Job) -> tuple[float, float]:
    """Return the bytes that a context rank sends in a block's forward and backward, in a ring over
    all ranks: keys and values, and in the backward also their fp32 gradients."""
    config, cp, size = job.config, job.mesh.cp, SIZES[job.dtype]
    kv = 2 * job.tokens * config.num_kv_heads // job.mesh.tp * config.head_dim
    return (cp - 1) * kv * size, (cp - 1) * kv * (size + max(4, size))


def _context_work(job: Job, attention: Work) -> Work:
    cp, tp = job.mesh.cp, job.mesh.tp
    sent = zip(context_bytes(job), attention)
    return Work(*(max(0.0, _sent(job, tp, cp, n)[1] - t * (cp - 1) / cp) for n, t in sent))


def message(job: Job) -> tuple[float, float]:
    """Return (bytes, seconds) of a message between stages: each tensor rank's rows of [T, E]."""
    mesh, hardware = job.mesh, job.hardware
    if mesh.pp == 1:
        return 0.0, 0.0
    cut = mesh.tp if job.scattered and not job.plan.sequence_parallel else 1
    moved = job.rows * job.config.width * SIZES[job.dtype] / cut
    gather = tensor_pass(job)[1] if cut > 1 else 0.0
    inner = mesh.tp * mesh.cp * mesh.dp
    far = hardware.device.network * hardware.efficiency.far
    speed = hardware.bandwidth(inner, mesh.pp) if hardware.joins(inner, mesh.pp) else far
    return moved, hardware.efficiency.latency + moved / speed + gather


def _over_shards(job: Job, rank: int, each: float) -> float:
    """Return the seconds of an all-gather or reduce-scatter over the shards of a pipeline rank's
    parameters, of `each` bytes."""
    shard = job.mesh.size("shard")
    moved = parameters_of(job)[rank] * each * (shard - 1) / shard
    return _sent(job, job.mesh.tp, shard, moved)[1]


def gradient_sum(job: Job, rank: int) -> float:
    """Return the seconds to sum a pipeline rank's gradients over data ranks at a step's end."""
    mesh, wide, P = job.mesh, max(job.summed, SIZES[job.dtype]), parameters_of(job)[rank]
    if job.plan.zero == 0:
        return 2 * _sent(job, mesh.tp, mesh.data, P * wide * (mesh.data - 1) / mesh.data)[1]
    shard, replicas = mesh.size("shard"), mesh.size("replica")
    over = P * wide / shard * (replicas - 1) / replicas
    of_replicas = 2 * _sent(job, mesh.tp * shard, replicas, over)[1]
    return of_replicas + (_over_shards(job, rank, wide) if job.plan.zero == 1 else 0.0)


def _beside_zero(job: Job, rank: int, work: Work) -> Work:
    """Return a stage's work, slowed by what ZeRO 2 and 3 send in each micro-batch."""
    stages, size = stage_ranks(job.plan, job.mesh.pp).count(rank), SIZES[job.dtype]
    gather = _over_shards(job, rank, size / stages) if job.plan.zero == 3 else 0.0
    summed = gather + _over_shards(job, rank, max(job.summed, size) / stages)
    return Work(_slowed(work.forward, gather), _slowed(work.backward, summed), work.weights)


def _slowed(work: float, message: float) -> float:
    """Return the seconds of computation and a concurrent message, which slow each other."""
    return max(work, message) + _BESIDE * min(work, message)


def _update(job: Job, work: list[Work]) -> float:
    """Return the seconds of the slowest rank's optimizer step and of the part of its all-gather of
    weights (ZeRO 1 and 2) that the next step's first forward does not hide."""
    size, shard = SIZES[job.dtype], job.mesh.size("shard") if job.plan.zero else 1
    first = [0.0] * job.mesh.pp
    for stage, rank in enumerate(stage_ranks(job.plan, job.mesh.pp)):
        first[rank] += work[stage].forward
    found = []
    for rank, P in enumerate(parameters_of(job)):
        own = _stream(job, cost.adamw(P // shard, param_size=size if size < 4 else 0))
        gather = _over_shards(job, rank, size) if job.plan.zero in (1, 2) else 0.0
        shown = max(0.0, gather - first[rank])
        if job.owned:  # not hidden by any forward
            shown = gather + min(shard, job.owned) * _ring_latency(job, shard)
        found.append(own + shown)
    return max(found)


def _ring_latency(job: Job, size: int) -> float:
    """Return the seconds until a ring's first bytes reach the last of `size` data ranks."""
    far = math.ceil(size / max(1, job.hardware.node // job.mesh.tp)) - 1
    return far * _FAR_HOP + (size - 1 - far) * _NEAR_HOP


def step_traffic(job: Job) -> Iterator[tuple[str, str, float]]:
    """Yield for each axis its name, its link, and the bytes that a rank sends in a step.

    The rank is the one that sends most; the first and last stages' own parts are not counted.
    """
    mesh, plan = job.mesh, job.plan
    stages = stage_ranks(plan, mesh.pp)
    layers = max(len(job.config.blocks_of(s, len(stages))) for s in range(len(stages)))
    layers *= len(stages) // mesh.pp
    m = plan.microbatches

    def over(inner: int, size: int) -> str:
        return "NVLink" if job.hardware.joins(inner, size) else "network"

    if mesh.tp > 1:
        passes = sum(tensor_passes(job)) + (4 if plan.recompute == "full" else 0)
        yield "tp", over(1, mesh.tp), m * layers * passes * tensor_pass(job)[0]
    if mesh.cp > 1:
        yield "cp", over(mesh.tp, mesh.cp), m * layers * sum(context_bytes(job))
    if mesh.pp > 1:
        inner = mesh.tp * mesh.cp * mesh.dp
        yield "pp", over(inner, mesh.pp), 2 * m * len(stages) / mesh.pp * message(job)[0]
    if mesh.data > 1:
        P = max(parameters_of(job))
        wide, size, shard = max(4, SIZES[job.dtype]), SIZES[job.dtype], mesh.size("shard")
        share, replicas = (shard - 1) / shard, mesh.size("replica")
        sums = {0: 2 * wide, 1: wide + size, 2: m * wide + size, 3: m * (wide + 2 * size)}
        moved = P * sums[plan.zero] * share
        moved += 2 * P * wide / shard * (replicas - 1) / replicas
        yield "dp", over(mesh.tp, mesh.data), moved
