"""Every fault that broke composition in a real framework makes a check fail here.

The 22 faults were all real: the docstring of each plant names the framework. A plant patches the
function of the library that would carry the fault. The guard (`prove_layout` on the smallest layout
where the fault can show, or a check of one operation) must pass without it and fail with it, by
more than rounding. A guard that still passes is a hole in the proof.

Two plants replace faults that cannot occur literally. 6: no model here has a norm over single heads
yet, so the plant trains a block of our layers that has one. 22: a CPU has no streams, so the
reduction reads the gradient that it would have found there, the one before the last backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from close import relative_error
from plants import instead, planted, replacing
from ranks import run_ranks
from torch import nn

from warpweave.kernels.adamw import sum_of_squares
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.layers import block
from warpweave.layers.embedding import PositionEmbedding
from warpweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from warpweave.layers.loss import VocabParallelLinearCrossEntropy
from warpweave.layers.norm import RMSNorm, _Norm
from warpweave.model import engine, gpt
from warpweave.model.config import ParallelPlan
from warpweave.parallel import schedule, tensor
from warpweave.parallel.collectives import gather, own_slice
from warpweave.parallel.context import gather as kv_gather
from warpweave.parallel.context import ring
from warpweave.parallel.data.flat import FlatLayout
from warpweave.parallel.data.optimizer import AdamW
from warpweave.parallel.data.parameters import FlatParameters
from warpweave.parallel.data.reduce import FlatGradients
from warpweave.parallel.data.unit import Unit, make_unit
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.mesh import ConnectedMesh, Mesh, single
from warpweave.parallel.pipeline.stage import ChainStage
from warpweave.parallel.shard import ParamRecord
from warpweave.parallel.tensor import linear_loss
from warpweave.parallel.tensor import ranks as tensor_ranks
from warpweave.parallel.tensor.ranks import TensorRanks
from warpweave.prove import LIMITS, Layout, expected, proof, prove_layout

LIMIT = LIMITS["fp64"]
NOTICED = LIMITS["fp32"] * 2**29  # a fault must exceed this, so that fp32 also detects it
TIMEOUT = 100.0

Patch = tuple[Any, str, Any]  # place, attribute, replacement
Guard = Callable[[ConnectedMesh], float]  # error in units of rounding, the same on every rank


@dataclass(frozen=True)
class Fault:
    """A planted fault: its number in the list, the patches that plant it, and its guard."""

    number: int
    plant: Callable[[ConnectedMesh], list[Patch]]
    mesh: Mesh
    guard: Layout | Guard
    refused: str | None  # the fault raises a ValueError with these words


FAULTS: dict[str, Fault] = {}


def fault(number: int, guard: Layout | Guard, mesh: Mesh | None = None, *, at=None, refused=None):
    """Register a plant under its number and name; a `Layout` is its own mesh.

    Without `at`, a plant returns its patches for a mesh. With `at`, a place and an attribute, it
    is called in place of that attribute, with the mesh and the original first.
    """

    def register(plant):
        @functools.wraps(plant)
        def patches(mesh):
            value = replacing(functools.partial(plant, mesh))
            return plant(mesh) if at is None else [(*at, value(getattr(*at)))]

        place = guard.mesh if isinstance(guard, Layout) else mesh
        FAULTS[f"{number:02} {plant.__name__}"] = Fault(number, patches, place, guard, refused)
        return plant

    return register


DP, CP, PP = (Layout(Mesh(**{axis: 2})) for axis in ("dp", "cp", "pp"))
# each of these groups acts within a micro-batch, so one is enough
TP, SP = (Layout(Mesh(tp=2), sequence_parallel=sp, count=1) for sp in (False, True))
RING = Layout(Mesh(cp=4))  # the smallest axis on which "auto" chooses the ring


# ------------------------------------------------------------------ separate guards


def _everywhere(error: float) -> float:
    """Return the largest error of all ranks, in units in the last place."""
    worst = torch.tensor(error / torch.finfo(torch.float64).eps, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def smoothed_loss(mesh: ConnectedMesh) -> float:
    """Compare losses and gradients of the vocab-parallel loss with label smoothing with torch."""
    tokens, vocab, rows = 6, 7, 4
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(tokens, 2 * rows, generator=generator, dtype=torch.float64)
    labels = torch.tensor([6, 0, -100, 3, 4, 2])
    weights = torch.randn(tokens, generator=generator, dtype=torch.float64)
    mine = slice(rows * mesh.index("tp"), rows * (mesh.index("tp") + 1))
    logits = whole[:, mine].clone().requires_grad_()
    losses = tensor.vocab_parallel_cross_entropy(
        logits, labels, group=mesh.group("tp"), vocab_size=vocab, label_smoothing=0.3
    )
    (losses * weights).sum().backward()
    whole.requires_grad_()
    expected = F.cross_entropy(whole[:, :vocab], labels, label_smoothing=0.3, reduction="none")
    (expected * weights).sum().backward()
    return _everywhere(
        max(relative_error(losses, expected), relative_error(logits.grad, whole.grad[:, mine]))
    )


class _NormOverHeads(nn.Module):
    """x -> heads -> a norm over each head -> x. Tensor ranks hold different heads, not tokens."""

    def __init__(self, mesh: ConnectedMesh) -> None:
        super().__init__()
        torch.manual_seed(7)
        where = {"dtype": torch.float64, "mesh": mesh}
        self.up = ColumnParallelLinear(8, 24, **where)
        self.norm = RMSNorm(6, sequence_parallel=True, **where)
        self.down = RowParallelLinear(24, 8, **where)

    def forward(self, x):
        return self.down(self.norm(self.up(x).unflatten(-1, (-1, 6))).flatten(-2))


def _trained(mesh: ConnectedMesh) -> dict[str, torch.Tensor]:
    """Return gradients and weights of three Adam steps on a block with a norm over heads."""
    model = _NormOverHeads(mesh)
    records = gpt.collect_records(model)
    unit = make_unit("heads", [(records[n], p) for n, p in model.named_parameters()], mesh)
    optimizer = ZeroOptimizer([unit], mesh, AdamW())
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    found = {}
    for step in range(3):
        unit.gradients.before_backward()
        model(x).backward(dy)
        unit.gradients.after_backward()
        optimizer.sum_partials()
        found |= {f"{step} d{r.name}": t.clone() for r, t in unit.read("grad")}
        optimizer.step(0.01)
    return found | {r.name: t for r, t in unit.read("param")}


def norm_over_heads(mesh: ConnectedMesh) -> float:
    """Compare tensor ranks with one device; a copy that drifts shows on its own rank."""
    expected, found = _trained(single()), _trained(mesh)
    return _everywhere(max(relative_error(found[name], expected[name]) for name in expected))


def one_token(mesh: ConnectedMesh) -> float:
    """Run the proof on batches in which a single token has a loss."""
    right = expected.batch

    def batch(sizes, step):
        tokens, _, ids = right(sizes, step)
        kept = torch.zeros_like(tokens, dtype=torch.bool)
        kept[1, 9] = True
        return tokens, torch.where(kept, tokens, -100), ids

    with mock.patch.object(expected, "batch", batch), mock.patch.object(proof, "batch", batch):
        expected.train.cache_clear()
        error = prove_layout(CP, mesh, TIMEOUT).worst
    expected.train.cache_clear()
    return error


def overflow_on_one_rank(mesh: ConnectedMesh) -> float:
    """Return how far weights move in a step with an infinite gradient slice on one rank."""
    shape = (DP.microbatches, DP.micro_batch_size)
    plan = ParallelPlan(microbatches=shape[0], zero=1)
    model = engine.Engine(DP.model, mesh, plan, micro_batch_size=shape[1], clip=expected.CLIP)
    tokens, labels, ids = (
        t.unflatten(0, (2, *shape))[mesh.index("dp")] for t in expected.batch(DP.sizes, 0)
    )
    model.step(tokens, labels, ids, lr=None)
    before = {record.name: t.clone() for record, t, _ in model.read("param")}
    if mesh.rank == 1:
        model.units[1].gradients.reduced[3] = float("inf")
    model.optimizer.step(expected.RATES[0])
    for unit in model.units:
        unit.parameters.wait()
    pairs = [(t, before[record.name]) for record, t, _ in model.read("param")]
    return _everywhere(max(relative_error(after, weight) for after, weight in pairs))


def deferred_weights(mesh: ConnectedMesh) -> float:
    """Run the proof with every backward pass split in two, as zero-bubble schedules do."""

    def split(plan, p):
        return schedule.split_backward(schedule.one_f_one_b(p, plan.microbatches), lag=1)

    with mock.patch.object(ParallelPlan, "make_schedule", split):
        return prove_layout(Layout(Mesh(dp=2)), mesh, TIMEOUT).worst


# ------------------------------------------------------------------ 1-4: loss, recomputation


@fault(1, smoothed_loss, Mesh(tp=2))
def smoothing_over_the_local_vocabulary(mesh):
    """Megatron-LM #737 and #7452 finding 1: every rank smooths over its own shard."""
    right_first, right_merge = TensorRanks.first_column, TensorRanks.merge
    right, width = Vocabulary.losses, []

    def first_column(ranks, columns):
        width[:] = [columns]
        return right_first(ranks, columns)

    def merge(ranks, stats):
        return torch.cat((right_merge(ranks, stats)[:2], stats[2:]))

    def losses(self, stats, labels):
        return right(self._replace(size=width[0]), stats, labels)

    faults = {"first_column": first_column, "merge": merge}
    return [*((TensorRanks, *fault) for fault in faults.items()), (Vocabulary, "losses", losses)]


def _gathered_head():
    def head_loss(self, x, batch):
        whole = gather(self.head_weight, self.mesh.group("tp"))
        return self.loss(self.final_norm(x), whole, batch.labels, batch.normaliser)

    return gpt.GPT, "head_loss", head_loss


@fault(2, TP, refused="pass this rank's shard only")
def gathered_logits(mesh):
    """Megatron-LM #7452 finding 2: whole logits are passed to the vocab-parallel loss."""
    return [_gathered_head()]


@fault(2, TP)
def gathered_logits_unchecked(mesh):
    """The same without our check of the shard's width: the numbers must show it."""
    return [_gathered_head(), (linear_loss, "check_vocabulary", lambda *a: None)]


@fault(3, DP, at=(engine.Engine, "_micro_batches"))
def mean_of_means(mesh, right, self, tokens, labels, ids, valid, *more):
    """Megatron-LM #7452 finding 3, PR #7513, #673, #906: each rank divides by its own tokens."""
    own = (labels != -100).sum().clamp(min=1) * self.mesh.size("dp")
    return right(self, tokens, labels, ids, own, *more)


@fault(3, DP, at=(engine.Engine, "_micro_batches"))
def normaliser_doubled(mesh, right, self, tokens, labels, ids, valid, *more):
    """The same by a factor on which all ranks agree."""
    return right(self, tokens, labels, ids, 2 * valid.wait(), *more)


@fault(4, Layout(Mesh(dp=2, tp=2), sequence_parallel=True, recompute="full"))
def recomputation_gathers_over_data_ranks(mesh):
    """Megatron-LM #7452 finding 4: recomputation gathers the tokens over another group."""
    right, right_gather = block.TransformerBlock.forward, tensor_ranks.start_all_gather

    def elsewhere(x, group, dim=0):
        return right_gather(x, mesh.group("dp"), dim)

    def forward(self, x, context=None):
        if not torch.is_grad_enabled():  # the first time, without a graph
            return right(self, x, context)
        with mock.patch.object(tensor_ranks, "start_all_gather", elsewhere):
            return right(self, x, context)

    return [(block.TransformerBlock, "forward", forward)]


# ------------------------------------------------------------------ 5-7: norm, partial sums


def _counted(cut_axes, right, unit, summed):
    """Count as if all of a unit's parameters were sharded over `cut_axes`."""
    ranges = tuple(dataclasses.replace(r, cut_axes=cut_axes) for r in unit.layout.ranges)
    with mock.patch.object(unit.layout, "ranges", ranges):
        return right(unit, summed)


@fault(5, TP, at=(Unit, "counted_grads"))
def norm_counts_tensor_replicas(mesh, *given):
    """Megatron-LM #7452 finding 8, ROCm TransformerEngine PR #715: once for every tensor rank."""
    return _counted(("tp",), *given)


@fault(5, TP, at=(Unit, "counted_grads"))
def norm_misses_sharded_parameters(mesh, *given):
    """torchtitan #596: the other tensor ranks' shards are omitted."""
    return _counted((), *given)


@fault(5, DP, at=(ZeroOptimizer, "norm"))
def norm_counts_data_replicas(mesh, right, self):
    """The same over data ranks, which all hold the whole gradient with ZeRO 0."""
    groups = {**self.mesh.groups, "tp": self.mesh.group("world")}
    with mock.patch.object(self, "mesh", dataclasses.replace(self.mesh, groups=groups)):
        return right(self)


@fault(5, Layout(Mesh(dp=2), zero=2), at=(ZeroOptimizer, "norm"))
def norm_a_percent_too_large(mesh, right, self):
    """Clipping uses a norm other than that of the gradients."""
    return right(self) * 1.01


@fault(6, norm_over_heads, Mesh(tp=2), at=(_Norm, "_parameter"))
def norm_over_heads_not_summed(mesh, right, self, *args):
    """Megatron-LM #7452 finding 11: no sum over tensor ranks without sequence parallelism."""
    self._partial = ()
    return right(self, *args)


@fault(7, SP, at=(_Norm, "_parameter"))
def layer_norm_not_summed(*given):
    """Megatron-LM #1446: LayerNorm's gradients under sequence parallelism stay partial."""
    return norm_over_heads_not_summed(*given)


@fault(7, SP, at=(RowParallelLinear, "__init__"))
def row_bias_not_summed(mesh, right, self, *args, **options):
    """Megatron-LM #1446, the biases after a reduce-scatter."""
    right(self, *args, **options)
    self.records["bias"] = dataclasses.replace(self.records["bias"], partial=())


@fault(7, SP, at=(PositionEmbedding, "__init__"))
def position_table_not_summed(mesh, right, self, *args, partial, **options):
    """The same for the learned positions, of which each rank looks up those of its own tokens."""
    right(self, *args, **options)


# ------------------------------------------------------------------ 8-10: stages, data ranks


@fault(8, PP, at=(gpt.GPT, "parameter_records"))
def layers_named_by_place_on_the_stage(mesh, right, self):
    """Megatron-LM #7452 finding 12: another pp reads other layers' tensors without an error."""
    records, first = right(self), self.layers_of(self.mesh.index("pp")).start
    for name in records:
        if name.startswith("blocks."):
            _, i, rest = name.split(".", 2)
            records[name] = records[name].renamed(f"blocks.{int(i) - first}.{rest}")
    return records


@fault(9, PP, at=(ChainStage, "begin"))
def gradients_divided_by_micro_batches(mesh, right, self, batches, seed=None):
    """picotron: the loss is already a mean, and is divided by the micro-batches once more."""
    right(self, batches, torch.tensor(1 / len(batches), dtype=torch.float64))


@fault(9, PP)
def gradients_divided_by_tokens_again(mesh):
    """torchtitan #2972: the pipeline scales gradients by the global tokens a second time."""
    begins, right = ChainStage.begin, engine.EngineStage.reduce

    def begin(self, batches, *args):
        self.tokens = batches[0].normaliser
        begins(self, batches, *args)

    def reduce(self):
        right(self)
        for unit in self.units:
            unit.gradients.reduced.div_(self.tokens.wait())

    return [(ChainStage, "begin", begin), (engine.EngineStage, "reduce", reduce)]


@fault(10, CP, at=(Unit, "__init__"))
def no_sum_over_context_ranks(mesh, right, self, *parts, **options):
    """picotron: gradients are summed only over dp, so not at all if dp = 1."""
    right(self, *parts, **options)
    self.gradients.group = mesh.group("dp")


# ------------------------------------------------------------------ 11-12: attention


@fault(11, RING)
def ring_backward_keeps_the_first_keys(mesh):
    """diffusers #14265: every hop of the backward uses the K and V of the first."""
    right_ring, right, first = ring.ring_backward, ring.block_bwd, []

    def ring_backward(rank, upstream, q, kept, **options):
        first[:] = kept[0].clone().transpose(2, 3)
        return right_ring(rank, upstream, q, kept, **options)

    def block_bwd(upstream, q, k, v, *args, **options):
        return right(upstream, q, *first, *args, **options)

    return [(ring, "ring_backward", ring_backward), (ring, "block_bwd", block_bwd)]


@fault(12, CP)
def gathered_keys_get_no_gradient_from_others(mesh):
    """Megatron-LM #1464, #1465: dk and dv of the own queries only; the forward is correct."""

    def reduce_scatter(dk, dv, layout, group):
        return tuple(layout.shard(x, dist.get_rank(group), 1) for x in (dk, dv))

    return [(kv_gather, "_reduce_scatter", reduce_scatter)]


@fault(12, RING, at=(ring, "block_bwd"))
def ring_backward_with_the_lse_of_one_hop(mesh, right, upstream, q, k, v, options, **more):
    """The same in the ring: each tile is normalized by its own softmax, not by the whole one."""
    own = ring.block_fwd(q, k, v, options)[1]
    return right(upstream._replace(lse=own), q, k, v, options, **more)


# ------------------------------------------------------------------ 13-14: dropout, masks


def _drops(change):
    """Return both places that key dropout, with changed keys."""
    right, right_key = gpt.dropout, block.TransformerBlock._drop

    def dropout(x, drop, **options):
        changed = drop._replace(**change(seed=drop.seed, tokens=drop.tokens))
        return right(x, changed, **options)

    def key(self, site, context):
        drop = right_key(self, site, context)
        if drop is None:  # in an evaluation
            return None
        return drop._replace(**change(seed=drop.seed, tokens=drop.tokens))

    return [(gpt, "dropout", dropout), (block.TransformerBlock, "_drop", key)]


@fault(13, SP)
def one_mask_for_all_tensor_ranks(mesh):
    """Megatron-LM #1256: ranks with different tokens drop the same elements."""
    return _drops(lambda tokens, **_: {"tokens": tokens - mesh.index("tp") * len(tokens)})


@fault(13, TP)
def own_stream_for_replicated_tokens(mesh):
    """Megatron-LM #1256, the reverse: ranks with the same tokens drop different elements."""
    return _drops(lambda seed, **_: {"seed": seed + 1000 * mesh.index("tp")})


def _losses(mean):
    """Replace the mean of the loss layer: `mean(losses, own valid tokens, normaliser, mesh)`."""
    right = VocabParallelLinearCrossEntropy.forward

    def forward(self, x, weight, labels, normaliser):
        total = right(self, x, weight, labels, 1.0)
        return mean(total, (labels != -100).sum(), normaliser.wait(), self.mesh)

    return [(VocabParallelLinearCrossEntropy, "forward", forward)]


@fault(14, CP)
def masked_rank_makes_nan(mesh):
    """Megatron-LM #1764: the mean over a rank's own tokens, 0 / 0 if it has none."""
    return _losses(lambda total, own, normaliser, mesh: total / own * (own / normaliser))


@fault(14, one_token, Mesh(cp=2))
def one_token_counts_half(mesh):
    """Megatron-LM PR #7513: the mean of the context ranks' means, of which one is empty."""
    return _losses(lambda total, own, _, mesh: total / own.clamp(min=1) / mesh.size("cp"))


# ------------------------------------------------------------------ 15: the tied embedding


@fault(15, PP)
def tied_gradients_not_summed(mesh):
    """Megatron-LM #1447: each end of the pipeline continues with its own part."""
    return [(engine.EngineStage, "tie", lambda self: None)]


@fault(15, PP, at=(Unit, "counted_grads"))
def tied_gradient_counted_twice(mesh, right, self, summed):
    """torchtitan #1524: the global norm counts the shared weight of both stages."""
    with mock.patch.object(self, "owner", True):
        return right(self, summed)


@fault(15, Layout(Mesh(dp=2, pp=2), zero=1), at=(FlatLayout, "__init__"))
def tied_embedding_cut_differently(mesh, right, self, records, *place):
    """Megatron-LM #1447: under ZeRO-1 the ends add slices that hold other rows."""
    right(self, records, *place)
    if mesh.index("pp") and [r.name for r in self.records] == ["embedding.weight"]:
        (r,), shift = self.ranges, 32
        assert r.stop + shift <= self.size, "the shift must not change sizes"
        self.offsets = {name: at + shift for name, at in self.offsets.items()}
        self.ranges = (dataclasses.replace(r, stop=r.stop + shift),)


# ------------------------------------------------------------------ 16-19: tensor ranks


@fault(16, TP)
def partial_gradient_leaves_the_loss(mesh):
    """torchtitan PR #3412: one shard's gradient of the head's input is used as if whole."""
    return [(TensorRanks, "sum", lambda ranks, dx: dx)]


@fault(16, SP)
def partial_gradient_leaves_the_loss_in_slices(mesh):
    """The same under sequence parallelism: a slice of it is used in place of its scattered sum."""
    return [(TensorRanks, "sum", lambda ranks, dx: own_slice(dx, ranks.group))]


@fault(17, TP, at=(ParamRecord, "slice"))
def every_rank_loads_the_first_qkv(mesh, right, self, full, at):
    """picotron #32: the attention shards are cut with rank 0's index on every rank."""
    return right(self, full, at | {"tp": 0} if ".qkv." in self.name else at)


@fault(18, TP, at=(TensorRanks, "row_product"))
def row_bias_once_per_rank(mesh, right, ranks, h, weight, bias, **options):
    """torchtitan's planted control in test_distributed_linear: added before the sum over ranks."""
    y = right(ranks, h, weight, bias, **options)
    return y if bias is None else y + (mesh.size("tp") - 1) * bias


@fault(19, TP, at=(Vocabulary, "columns"))
def padding_takes_part_in_the_softmax(mesh, right, vocabulary, width):
    """Megatron-LM #1754: the padding rows of the vocabulary also have probability."""
    return right(vocabulary._replace(size=vocabulary.size + vocabulary.size % 2), width)


# ------------------------------------------------------------------ 20-22: the step


@fault(20, overflow_on_one_rank, Mesh(dp=2))
def only_the_rank_that_overflows_skips(mesh):
    """The found-inf rules of Megatron-LM and nanotron, broken: the flag is not shared."""

    def norm(self):
        own = torch.stack(
            [sum_of_squares(g) for u in self.units for g in u.counted_grads(("tp",))]
        ).sum()
        total = own.nan_to_num(posinf=0.0)
        dist.all_reduce(total)
        return torch.where(own.isfinite(), total, own).sqrt()

    return [(ZeroOptimizer, "norm", norm)]


@fault(21, deferred_weights, Mesh(dp=2))
def deferred_weights_miss_the_reduction(mesh):
    """pytorch #144530: gradients are reduced after the input's part of the backward pass."""

    def backward_input(self, mb, dy):
        dx = self._backward(mb, dy, deferred=True)
        self._backwards_left -= 1
        for units in reversed(self._saved[mb].chain.completes):
            self._reduce_completed(units)
        ChainStage.reduce(self)
        return dx

    def backward_weight(self, mb):
        for weights in self._saved.pop(mb).weights:
            weights.run()

    return [
        (ChainStage, "backward_input", backward_input),
        (ChainStage, "backward_weight", backward_weight),
    ]


@fault(22, Layout(Mesh(dp=2), zero=1))
def reduction_overtakes_its_producer(mesh):
    """DeepSpeed PR #7898: it waits on the wrong stream and reads earlier data."""
    right_backward, right, before = ChainStage.backward, FlatGradients.start, {}

    def backward(self, mb, dy):
        before.update((u.gradients, u.gradients.flat.clone()) for u in self.units)
        return right_backward(self, mb, dy)

    def reduce(self, following=(), **options):
        for gradients in (self, *following):
            gradients.flat.copy_(before[gradients])
        right(self, following, **options)

    return [(ChainStage, "backward", backward), (FlatGradients, "start", reduce)]


@fault(22, Layout(Mesh(dp=2), zero=1))
def updated_slices_not_gathered(mesh):
    """Each rank continues with its own new slice and the others' old ones."""
    return [(FlatParameters, "publish", lambda self: None)]


@fault(0, DP)
def nothing(mesh):
    """No fault, after all the others: tests the verdict, and that no plant remains."""
    return []


# ------------------------------------------------------------------ with and without


@dataclass(frozen=True)
class Found:
    """A guard's error without the fault and with it; `words` if it raised."""

    without: float
    planted: float
    words: str = ""
    low: dict[str, float] = field(default_factory=dict)  # planted, in 16 bits


def _error(guard: Layout | Guard, mesh: ConnectedMesh) -> float:
    if isinstance(guard, Layout):
        return prove_layout(guard, mesh, TIMEOUT).worst
    return guard(mesh)


def _measure(rank: int, world: int) -> dict[str, Found]:
    """Measure every fault on meshes of `world` ranks, planted and removed one after the other."""
    chosen = {name: f for name, f in FAULTS.items() if f.mesh.world == world}
    meshes = {sizes: sizes.connect() for sizes in dict.fromkeys(f.mesh for f in chosen.values())}
    guards = {f.guard: meshes[f.mesh] for f in chosen.values()}
    without = {guard: _error(guard, mesh) for guard, mesh in guards.items()}
    found = {}
    for name, f in chosen.items():
        mesh, words, low = meshes[f.mesh], "", {}
        with planted(*(instead(*patch) for patch in f.plant(mesh))):
            try:
                error = _error(f.guard, mesh)
            except ValueError as problem:  # anything else is not a fault but a mistake in its plant
                if f.refused is None:
                    raise
                error, words = float("inf"), str(problem)
            for dtype in LOW.get(f.plant.__name__, ()):
                low[dtype] = _error(dataclasses.replace(f.guard, dtype=dtype), mesh)
        found[name] = Found(without[f.guard], error, words, low)
    return found


# Also detected in 16 bits, where the plain model's own error decides what is allowed.
LOW = {
    "normaliser_doubled": ("bf16",), "tied_gradients_not_summed": ("bf16",),
    "one_mask_for_all_tensor_ranks": ("bf16",), "no_sum_over_context_ranks": ("fp16",),
    "every_rank_loads_the_first_qkv": ("fp16",), "layer_norm_not_summed": ("fp16",),
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, list[Found]]:
    """Return name of the fault -> the results of every rank of its world."""
    results: dict[str, list[Found]] = {}
    for world in sorted({f.mesh.world for f in FAULTS.values()}):
        for ranks in run_ranks(world, _measure, world, timeout=120):
            for name, one in ranks.items():
                results.setdefault(name, []).append(one)
    return results


def _judge(name: str, ranks: list[Found]) -> None:
    """Assert that the guard passes without the fault and fails with it, on every rank."""
    f = FAULTS[name]
    for rank, one in enumerate(ranks):
        assert one.without <= LIMIT, f"fault {name}: rank {rank} is red without it: {one}"
        assert one.planted > NOTICED, f"fault {name} is not noticed on rank {rank}: {one}"
        assert (f.refused or "") in one.words, f"fault {name}: rank {rank} says {one.words!r}"
        assert tuple(one.low) == LOW.get(f.plant.__name__, ())
        for dtype, error in one.low.items():
            assert error > 2 * LIMITS[dtype], f"fault {name} is not noticed in {dtype}: {one}"


@pytest.mark.parametrize("name", [name for name, f in FAULTS.items() if f.number])
def test_a_planted_fault_turns_its_guard_red(name, found):
    assert len(found[name]) == FAULTS[name].mesh.world
    _judge(name, found[name])


def test_a_fault_that_is_not_noticed_fails_with_its_number(found):
    with pytest.raises(AssertionError, match="fault 00 nothing is not noticed on rank 0"):
        _judge("00 nothing", found["00 nothing"])
    assert all(one.planted <= LIMIT for one in found["00 nothing"]), "a fault was not pulled out"


def test_all_22_faults_are_planted():
    assert {f.number for f in FAULTS.values()} == set(range(23))
    assert all(f.plant.__doc__ for f in FAULTS.values())
