"""Every synchronous schedule, executed: bitwise equal to one device and to 1F1B, with the simulated
memory.

The truth of the first part is plain autograd over the whole model, summed micro-batch by
micro-batch. In the second part ranks are threads, and the truth is 1F1B with the whole engine,
which `prove` compares with a plain model.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deferred import Product
from ranks import run_ranks
from threads import run_threads
from torch import Tensor, nn

from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.pipeline import Distributed, InProcess, ModuleStage, execute
from warpweave.parallel.pipeline.stage import ChainStage
from warpweave.parallel.schedule import FAMILIES, placement, split_backward, to_csv, with_comm
from warpweave.parallel.simulate import simulate
from warpweave.prove.layouts import Layout, Sizes
from warpweave.prove.options import ProveConfig
from warpweave.prove.proof import LIMITS, prove_layout

SYNCHRONOUS = [name for name, family in FAMILIES.items() if not family.asynchronous]
WIDTH, TOKENS, DEPTH = 5, 3, 16
LIKE = ((TOKENS, WIDTH), torch.float32, torch.device("cpu"))


def made(name: str, p: int, m: int):
    """Return the lists of a schedule, with several stages per rank if it allows them."""
    return FAMILIES[name].make(p, m, FAMILIES[name].chunks or 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nn.functional.gelu(Product.apply(self.norm(x), self.weight))


def blocks() -> list[Block]:
    torch.manual_seed(3)
    return [Block() for _ in range(DEPTH)]


def inputs(mb: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(mb))


def loss(mb: int, y: Tensor) -> Tensor:
    return ((y - mb) ** 2).sum() / TOKENS


def gradients(modules) -> list[Tensor]:
    return [p.grad for module in modules for p in module.parameters()]


def one_device(m: int) -> list[Tensor]:
    every = blocks()
    for mb in range(m):
        loss(mb, nn.Sequential(*every)(inputs(mb))).backward()
    return gradients(every)


def staged(lists, mine=None) -> dict[int, ModuleStage]:
    """Build the model as the stages of `lists`, those of ranks `mine`."""
    every, rank_of = blocks(), placement(lists)
    ends = [DEPTH * s // len(rank_of) for s in range(len(rank_of) + 1)]
    return {
        s: ModuleStage(
            nn.Sequential(*every[ends[s] : ends[s + 1]]),
            inputs=inputs if s == 0 else None,
            like=None if s == 0 else LIKE,
            loss=loss if s == len(rank_of) - 1 else None,
        )
        for s, rank in enumerate(rank_of)
        if mine is None or rank in mine
    }


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_gradients_are_one_devices_bit_for_bit(name: str, p: int):
    for m in {FAMILIES[name].least(p), 2 * p + 1}:
        lists = with_comm(made(name, p, m))
        stages = staged(lists)
        execute(lists, stages, InProcess())
        assert equal(gradients(stages[s].module for s in sorted(stages)), one_device(m))


def test_sums_in_another_order_are_other_bits():
    """So the tests above detect an order: of three micro-batches, the last comes first."""
    lists = [row[:3] + row[:2:-1] for row in FAMILIES["gpipe"].make(1, 3)]
    stages = staged(lists)
    execute(lists, stages, InProcess())
    assert not equal(gradients([stages[0].module]), one_device(3))


def _over_gloo(rank: int) -> dict[str, dict[int, list[Tensor]]]:
    found = {}
    for name in SYNCHRONOUS:
        lists = with_comm(made(name, 2, 5))
        stages = staged(lists, [rank])
        execute(lists, stages, Distributed(lists, dist.group.WORLD, timeout=300))
        found[name] = {s: gradients([stage.module]) for s, stage in stages.items()}
    return found


def test_gradients_over_gloo_are_one_devices_bit_for_bit():
    near, far = run_ranks(2, _over_gloo)
    for name in SYNCHRONOUS:
        by_stage = near[name] | far[name]
        found = [g for s in sorted(by_stage) for g in by_stage[s]]
        assert equal(found, one_device(5)), name


# ------------------------------------------------------------------------------- the engine


COUNT = 4
MODEL = GPTConfig(11, 4, 4, 4, 2, tied=False, dropout=0.2)
RANKS = Mesh(dp=2, pp=2)


def plan_of(name: str, **options) -> ParallelPlan:
    chunks = FAMILIES[name].chunks or 2
    return ParallelPlan(schedule=name, chunks=chunks, **{"microbatches": COUNT} | options)


def _stepped(rank: int, plans: list[ParallelPlan], sizes: Mesh) -> list[tuple[dict, float, float]]:
    """Return for each plan the reduced gradients of a rank's units, and the most saved
    micro-batches at a time, counted and simulated."""
    mesh = sizes.connect()
    return [_one_step(plan, mesh) for plan in plans]


def _one_step(plan: ParallelPlan, mesh) -> tuple[dict, float, float]:
    count = plan.microbatches
    engine = Engine(replace(MODEL, layers=2 * mesh.size("pp")), mesh, plan, seed=3)
    tokens = torch.randint(0, 11, (2, count, 1, 4), generator=torch.Generator().manual_seed(4))
    replica, most = mesh.index("dp"), 0
    own = tokens[replica]
    forward = ChainStage.forward

    def counted(stage: ChainStage, *args) -> Tensor | None:
        nonlocal most
        result = forward(stage, *args)
        most = max(most, sum(len(s._saved) for s in engine.stages.values()))
        return result

    for stage in engine.stages.values():
        stage.forward = counted.__get__(stage)
    ids = torch.arange(2 * count).view(2, count, 1)[replica]
    engine.step(own, own.roll(1, -1), ids, lr=None, key=7)
    line = simulate(engine.passes.lists, {"F": 1})
    simulated = line.activations[mesh.index("pp")] * len(engine.stages)
    found = {(unit.name, replica): unit.gradients.reduced.clone() for unit in engine.units}
    return found, most, simulated


def stepped(*plans: ParallelPlan, sizes: Mesh = RANKS) -> list[dict]:
    """Return the gradients of all ranks, and assert that the memory equals the simulated one."""
    found: list[dict] = []
    for ranks in zip(*run_threads(sizes.world, _stepped, list(plans), sizes)):
        assert all(most == simulated for _, most, simulated in ranks)
        found.append({k: x for gradients, *_ in ranks for k, x in gradients.items()})
    return found


def same(a: dict, b: dict) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("zero", range(4))
def test_the_engines_gradients_are_those_of_1f1b_bit_for_bit(zero: int):
    options = {"zero": zero, "recompute": ("none", "selective", "full", "none")[zero]}
    plain = ParallelPlan(microbatches=COUNT, early_gradients=False, **options)
    expected, *found = stepped(plain, *(plan_of(name, **options) for name in SYNCHRONOUS))
    for name, gradients in zip(SYNCHRONOUS, found, strict=True):
        assert same(gradients, expected), name


@pytest.mark.parametrize(
    ("sizes", "m", "names"),
    [(Mesh(pp=4), 8, SYNCHRONOUS), (Mesh(pp=8), 8, ("interleaved", "zb-v"))],
    ids=("p4", "p8"),
)
def test_so_are_those_of_longer_pipelines(sizes: Mesh, m: int, names):
    plain = ParallelPlan(microbatches=m, early_gradients=False)
    expected, *found = stepped(plain, *(plan_of(n, microbatches=m) for n in names), sizes=sizes)
    for name, gradients in zip(names, found, strict=True):
        assert same(gradients, expected), name


def test_a_weight_gradient_that_is_dropped_is_seen():
    """The last W of a stage adds nothing; the list is complete."""
    (expected,) = stepped(ParallelPlan(zero=2, microbatches=COUNT))
    whole = ChainStage.backward_weight

    def dropped(stage: ChainStage, mb: int) -> None:
        if mb == COUNT - 1:
            for weights in stage._saved[mb].weights:
                weights._entries.clear()
        whole(stage, mb)

    with mock.patch.object(ChainStage, "backward_weight", dropped):
        (found,) = stepped(plan_of("zb-v", zero=2))
    assert not same(found, expected)


def test_split_backwards_leave_weights_to_w_whatever_zero_is():
    """W of a micro-batch is late by the whole step: nothing of the next one is in its reduction."""
    (expected,) = stepped(ParallelPlan(zero=3, microbatches=COUNT))
    late = split_backward(FAMILIES["gpipe"].make(2, COUNT), lag=COUNT)
    with mock.patch.object(ParallelPlan, "make_schedule", return_value=late):
        (found,) = stepped(ParallelPlan(zero=3, microbatches=COUNT))
    assert same(found, expected)


# -------------------------------------------------------------------------------- proofs


SMALL = Sizes(samples=8, seq_len=4, vocab=11, layers=4, heads=2, kv_heads=2, head_dim=2, hidden=8)


def _proven(rank: int, layout: Layout) -> float:
    return prove_layout(layout, layout.mesh.connect(), 300.0).worst


@pytest.mark.parametrize(
    "layout",
    [
        Layout(RANKS, zero=2, schedule="zb-v", style="llama", recompute="full"),
        Layout(RANKS, zero=3, schedule="zb-h1", recompute="selective"),
        Layout(RANKS, zero=1, schedule="dualpipe-v", style="gemma", recompute="full"),
        Layout(RANKS, zero=0, schedule="v-half", style="qwen"),
    ],
    ids=lambda layout: layout.schedule,
)
def test_tied_layouts_equal_the_plain_model(layout: Layout):
    """First and last stage are on one rank, and on two, with late weight gradients."""
    small = replace(layout, drawn=SMALL, count=4)
    assert max(run_threads(4, _proven, small)) < LIMITS["fp64"]


def test_a_schedule_in_a_file_is_proven(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(with_comm(made("zb-v", 2, 5))))
    layout = ProveConfig(pp=2, schedule=str(path), dtype="fp64").layouts()[0]
    assert (layout.microbatches, layout.chunks, layout.sizes.samples) == (5, 2, 5)
    wide = replace(layout, mesh=Mesh(dp=3, pp=2), packed=True)
    assert (wide.sizes.samples, wide.microbatches, wide.micro_batch_size) == (15, 5, 1)
    assert wide.sizes.documents == 4
    assert max(run_threads(2, _proven, layout)) < LIMITS["fp64"]


def test_a_step_does_not_read_the_file_again(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(made("1f1b", 1, 2)))
    plan = ParallelPlan(schedule=str(path), microbatches=2)
    engine = Engine(MODEL, Mesh().seen_from(0), plan)
    tokens = torch.randint(0, 11, (2, 1, 4), generator=torch.Generator().manual_seed(4))
    path.unlink()
    for step in range(2):
        assert engine.step(tokens, tokens, torch.arange(2).view(2, 1), lr=0.1, key=step).norm > 0
