"""Whole training steps in NCCL's order: no rank hangs, and every bit equals gloo's.

The docstring of `pretend_nccl` lists its rules. gloo forgives or may forgive each fault of
`FAULTS`; each must be detected here. `make pretend` prints them as a table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import threads
import torch
import torch.distributed as dist
from plants import Plant, instead, planted, replacing
from pretend_nccl import AbortedError, Drains, loaded_beside_messages, most_held, run_nccl
from processors import Device, stuck
from threads import run_threads
from torch import nn

from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.parallel import collectives, messages
from warpweave.parallel.buffers import Buffers
from warpweave.parallel.data import reduce
from warpweave.parallel.data.parameters import FlatParameters
from warpweave.parallel.data.reduce import FlatGradients
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.pipeline import ModuleStage, execute, transport
from warpweave.parallel.pipeline.stage import ChainStage
from warpweave.parallel.pipeline.transport import Distributed
from warpweave.parallel.schedule import gpipe, interleaved, one_f_one_b, with_comm

SIZES = {"vocab_size": 23, "seq_len": 8, "width": 8, "heads": 4, "hidden": 12}


def _steps(rank: int, sizes: Mesh, plan: ParallelPlan) -> list[torch.Tensor]:
    """Run two steps. Return losses, norms and this rank's weights. The losses of an asynchronous
    schedule are waited for after the next step."""
    mesh, stale = sizes.connect(), plan.asynchronous
    config = GPTConfig(**SIZES, layers=max(2 * plan.chunks, sizes.pp), tied=not stale)
    own = {"clip": None if stale else 1.0, "dtype": torch.float64, "seed": 3}
    engine = Engine(config, mesh, plan, micro_batch_size=2, **own)
    draw = torch.Generator().manual_seed(mesh.index("dp"))
    ids = torch.arange(2 * plan.microbatches).view(-1, 2)
    found = []
    for key in range(2 + engine.passes.ahead):
        text = torch.randint(0, SIZES["vocab_size"], (plan.microbatches, 2, 9), generator=draw)
        inputs, labels = text[..., :-1].contiguous(), text[..., 1:].contiguous()
        if key < engine.passes.ahead:
            engine.feed(inputs, labels, ids, key=key)
        elif stale:
            found.append(engine.begin(inputs, labels, ids, lr=0.02, key=key))
        else:
            found.append(engine.step(inputs, labels, ids, lr=0.02, key=key))
    results = [step.wait() if stale else step for step in found]
    return [*(r.all() for r in results), *(t for _, t, _ in engine.read("param"))]


CASES = {
    "1f1b": (Mesh(pp=2), {}),
    "gpipe": (Mesh(pp=2), {"schedule": "gpipe"}),
    "interleaved": (Mesh(pp=2), {"schedule": "interleaved", "chunks": 2}),
    "late gradients": (Mesh(pp=2), {"early_gradients": False}),
    "zero 0": (Mesh(dp=2), {"zero": 0}),
    "zero 1": (Mesh(dp=2), {"zero": 1}),
    "zero 2": (Mesh(dp=2), {"zero": 2}),
    "zero 3": (Mesh(dp=2), {"zero": 3}),
    "in order, zero 0": (Mesh(dp=2), {"reduce": "ordered", "zero": 0}),
    "in order, zero 3": (Mesh(pp=2, dp=2), {"reduce": "ordered", "zero": 3}),
    "hybrid sharding": (Mesh(dp=4, dp_shard=2), {"zero": 3}),
    "tensor": (Mesh(tp=2), {"sequence_parallel": False}),
    "sequence, none": (Mesh(tp=2), {"overlap": "none"}),
    "sequence, bulk": (Mesh(tp=2), {"overlap": "bulk"}),
    "sequence, chunked": (Mesh(tp=2), {"overlap": "chunked"}),
    "ring": (Mesh(cp=2), {"cp_strategy": "ring"}),
    "gather": (Mesh(cp=2), {"cp_strategy": "gather"}),
    "stream": (Mesh(cp=2), {"cp_strategy": "stream"}),
    "ulysses": (Mesh(cp=2), {"cp_strategy": "ulysses"}),
    "ulysses and ring": (Mesh(cp=4, ulysses=2), {"cp_strategy": "hybrid"}),
    "pipeline of zero 2": (Mesh(pp=2, dp=2), {"zero": 2}),
    "pipeline of zero 3": (Mesh(pp=2, dp=2), {"zero": 3}),
    "pipedream": (Mesh(pp=2, dp=2), {"schedule": "pipedream", "zero": 1}),
    "2bw": (Mesh(pp=4), {"schedule": "pipedream-2bw"}),
    "pipeline of tensor": (Mesh(pp=2, tp=2), {"recompute": "full"}),
}


def _case(name: str) -> tuple[Mesh, ParallelPlan]:
    sizes, options = CASES[name]
    return sizes, ParallelPlan(microbatches=4 if sizes.pp > 1 else 2, **options)


@cache
def plainly(name: str) -> list[list[torch.Tensor]]:
    sizes, plan = _case(name)
    return run_threads(sizes.world, _steps, sizes, plan)


def _is_right(name: str, drains: Drains, lazily: bool = False) -> None:
    sizes, plan = _case(name)
    found = run_nccl(sizes.world, _steps, sizes, plan, drains=drains, lazily=lazily)
    for mine, plain in zip(found, plainly(name), strict=True):
        for a, b in zip(mine, plain, strict=True):
            assert torch.equal(a, b), "another number"


OF_EACH_KIND = (
    "interleaved", "zero 3", "in order, zero 3", "hybrid sharding", "sequence, chunked", "stream",
    "ulysses and ring", "pipedream", "2bw", "pipeline of tensor",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "drains"),
    [*((name, "never") for name in CASES), *((name, "always") for name in OF_EACH_KIND)],
)
def test_steps_end_and_every_bit_is_as_in_gloos_order(name: str, drains: Drains) -> None:
    _is_right(name, drains)


@pytest.mark.parametrize("drains", ["first", 0.05])
@pytest.mark.parametrize("name", ["interleaved", "pipeline of zero 3"])
def test_hosts_that_wait_now_and_then(name: str, drains: Drains) -> None:
    _is_right(name, drains)


@pytest.mark.parametrize("name", ["1f1b", "ring", "hybrid sharding"])
def test_communicators_made_at_their_first_use(name: str) -> None:
    _is_right(name, "never", lazily=True)


@replacing
def _cold(right, self, *args, **options):
    """Make an engine that warms up its stages, as on a GPU."""
    right(self, *args, **options)
    self._cold = True


@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved", "pipeline of zero 2", "pipeline of zero 3"]
)
def test_stages_that_are_warmed_up_change_no_bit(name: str) -> None:
    plainly(name)
    with planted(Plant(Engine, "__init__", _cold)):
        _is_right(name, "first")


def _loaded(rank: int, sizes: Mesh, plan: ParallelPlan) -> bool:
    _steps(rank, sizes, plan)
    return any("backward" in name for name in loaded_beside_messages())


def test_stages_are_warmed_up_before_a_message_is_under_way() -> None:
    late = {}
    for plants in ((), (Plant(Engine, "__init__", _cold),)):
        with planted(*plants):
            late[len(plants)] = run_nccl(2, _loaded, *_case("interleaved"), drains="never")
    assert late == {0: [True, False], 1: [False, False]}


def _blocks(rank: int) -> tuple[set, set]:
    """Return (most thread blocks, high priority) of the communicators of axes and of links."""
    mesh = Mesh(pp=2, dp=2, cp=2).connect()
    links = Distributed(with_comm(one_f_one_b(2, 1)), mesh.group("pp"))._communicators.values()
    axes = [
        group for axis, group in mesh.groups.items() if group and axis not in ("world", "inner")
    ]
    return tuple(
        {(g.options.config.max_ctas, g.options.is_high_priority_stream) for g in groups}
        for groups in (axes, links)
    )


def test_communicators_say_how_many_processors_they_take() -> None:
    found = run_nccl(8, _blocks)
    assert found == [({(16, False)}, {(4, True)})] * 8, f"axes and links take {found[0]}"


def _unlike(rank: int) -> list[torch.Tensor]:
    """Return the gradients of the layers of rank 0 or 1 of a pipeline, next to a different pipeline
    with two stages per rank and twice the links."""
    group = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    chunks, at = 1 + rank % 2, rank // 2
    lists = with_comm(interleaved(2, 2, chunks) if chunks > 1 else one_f_one_b(2, 2))
    torch.manual_seed(3)
    layers, (x, y) = [nn.Linear(3, 3) for _ in range(4)], torch.randn(2, 2, 5, 3)
    each, last = 2 // chunks, 2 * chunks - 1
    stages = {
        s: ModuleStage(
            nn.Sequential(*layers[each * s : each * (s + 1)]),
            inputs=(lambda mb: x[mb]) if s == 0 else None,
            like=((5, 3), torch.float32, torch.device("cpu")) if s else None,
            loss=(lambda mb, z: ((z - y[mb]) ** 2).sum()) if s == last else None,
        )
        for s in range(at, 2 * chunks, 2)
    }
    execute(lists, stages, Distributed(lists, group))
    return [layer.weight.grad for layer in layers]


def test_pipelines_side_by_side_may_have_unlike_lists() -> None:
    one, another, *rest = run_nccl(4, _unlike)
    for mine, theirs in ((one, rest[0]), (another, rest[1])):
        assert all((a is None) != (b is None) for a, b in zip(mine, theirs, strict=True))
    whole, parts = (
        [a if b is None else b for a, b in zip(*pair)]
        for pair in ((one, rest[0]), (another, rest[1]))
    )
    assert all(map(torch.equal, whole, parts))


def _by_its_ranks(self, number):
    """Make a pipeline's groups as if no other rank took part."""
    members = dist.get_process_group_ranks(self._group)
    return [dist.new_group(members, use_local_synchronization=True) for _ in range(number)]


def _held(rank: int, sizes: Mesh, plan: ParallelPlan) -> int:
    _steps(rank, sizes, plan)
    return most_held()


def test_messages_of_more_micro_batches_hold_no_more_memory() -> None:
    held = {}
    for count in (4, 6):
        plan = ParallelPlan(microbatches=count)
        held[count] = run_nccl(2, _held, Mesh(pp=2), plan, drains="never")
    assert held[4] == held[6], f"more is held: {held}"


@pytest.mark.parametrize(
    ("sizes", "strategy", "layout"),
    [
        (Mesh(cp=3), "ring", "zigzag"),
        (Mesh(cp=3), "ring", "contiguous"),
        (Mesh(cp=4, ulysses=2), "hybrid", "contiguous"),
    ],
)
def test_a_ring_of_more_micro_batches_holds_no_more_memory(sizes, strategy, layout) -> None:
    held = {}
    for count in (1, 3):
        plan = ParallelPlan(microbatches=count, layout=layout, cp_strategy=strategy)
        held[count] = run_nccl(sizes.world, _held, sizes, plan, drains="never")
    assert min(held[1]) > 0
    assert held[1] == held[3], f"more is held: {held}"


def _one_fails(rank: int, seen: list[Exception]) -> None:
    """Let rank 1 exit, and put the other rank's error into `seen`."""
    transport = Distributed(lists := with_comm(gpipe(2, 1)), dist.group.WORLD)
    if rank == 1:
        raise ValueError("no batch")
    torch.manual_seed(3)
    stage = ModuleStage(nn.Linear(3, 3), inputs=lambda mb: torch.ones(5, 3))
    try:
        execute(lists, {0: stage}, transport)
    except Exception as error:
        seen.append(error)


def test_nothing_raises_in_a_rank_whose_peer_has_failed() -> None:
    with pytest.raises(ValueError, match=r"^no batch$"):
        run_nccl(2, _one_fails, seen := [])
    assert not seen


def test_a_deadlock_is_not_told_by_an_error_of_ours() -> None:
    told = pytest.raises(AbortedError, match=r"^all ranks that are left wait: ")
    with told, planted(Plant(Distributed, "_connect", _swapped)):
        _is_right("1f1b", "never")


# ---------------------------------------------------------------- processors


def test_fused_products_beside_a_pipeline_need_processors_left_for_messages() -> None:
    lists = with_comm(one_f_one_b(2, 2))
    left = "0SEND_F1, (0, 0) 0B0 runs, (0, 1) 0RECV_B0 runs, (1, 0) 1RECV_F1 runs, (1, 1) 1SEND_B0"
    assert left in stuck(lists, 2, Device())
    assert not stuck(lists, 2, Device(fused=False))
    _fused_fit()


_LEFT = 2 * 4  # processors that products leave free: a rank has two links


def _fused_fit() -> None:
    left = stuck(with_comm(one_f_one_b(2, 2)), 2, Device(grid=132 - _LEFT))
    assert not left, f"no room: {left}"


# ---------------------------------------------------------------- faults


class Fault(NamedTuple):
    """A fault that, planted in a case or a check, gives an error with these words."""

    case: str
    plants: Callable[[], tuple[Plant, ...]]
    told: str
    drains: Drains = "never"
    lazily: bool = False


def _ahead() -> Plant:
    """Post receives as on gloo."""
    return instead(transport, "by_gloo", lambda group, device: True)


@replacing
def _a_number_is_read(right, self, *args, **options):
    y = right(self, *args, **options)
    float(torch.ones(()))
    return y


@replacing
def _synchronizes(right, self, *args, **options):
    torch.cuda.synchronize()
    return right(self, *args, **options)


@replacing
def _no_wait(right, self):
    """Return the result of a wait at once."""
    return self._finish()


@replacing
def _forgets(right, self):
    self._gather = None


@replacing
def _free_at_once(right, self, link, action, tensor):
    right(self, link, action, tensor)
    self._buffers.give_back(self._sending[action][2])


def _unbatched(sends, receives, group):
    works = [dist.isend(x, group=group, group_dst=to) for x, to in sends]
    works += [dist.irecv(x, group=group, group_src=source) for x, source in receives]
    return collectives.Pending(None, lambda: [work.wait() for work in works])


@replacing
def _swapped(right, self):
    made = right(self)
    one, two, *_ = made
    return {**made, one: made[two], two: made[one]} if self.rank else made


@replacing
def _freed_early(right, self, *args, **options):
    right(self, *args, **options)
    reduce.free(self.flat)


@replacing
def _accumulates(right, self, *args, **options):
    right(self, *args, **options)
    self.flat.add_(0.0)


@replacing
def _one_more(right, self, *args, **options):
    if self.mesh.rank == 1:
        collectives.start_all_reduce_(torch.zeros(5), self.mesh.group("world"))
    return right(self, *args, **options)


@replacing
def _another_message(right, self, want):
    """Plant: the wait for a receive is that for the send before it."""
    if self._sending and want.action in self._posted:
        _, other, _ = next(iter(self._sending.values()))
        self._posted[want.action] = other, self._posted[want.action][1]
    return right(self, want)


CHECKS = {
    "pipelines with unlike lists": test_pipelines_side_by_side_may_have_unlike_lists,
    "thread blocks": test_communicators_say_how_many_processors_they_take,
    "more micro-batches": test_messages_of_more_micro_batches_hold_no_more_memory,
    "fused products": _fused_fit,
}
_NO_GREETING = {"send": lambda *args, **options: None, "recv": lambda *args, **options: None}

FAULTS = {
    "receives posted ahead, a kernel is loaded": Fault(
        "1f1b", lambda: (_ahead(),), "ranks .* wait: .*the device", "first"
    ),
    "receives posted ahead, a number is read": Fault(
        "1f1b", lambda: (_ahead(), Plant(ChainStage, "forward", _a_number_is_read)),
        "wait: .*_local_scalar_dense",
    ),
    "receives posted ahead, the host synchronises": Fault(
        "1f1b", lambda: (_ahead(), Plant(ChainStage, "forward", _synchronizes)),
        "wait: .*synchronize",
    ),
    "gathered parameters are not waited for": Fault(
        "zero 3", lambda: (Plant(FlatParameters, "wait", _forgets),), "reads what all_gather"
    ),
    "published parameters are not waited for": Fault(
        "zero 1", lambda: (Plant(FlatParameters, "wait", _forgets),), "reads what all_gather"
    ),
    "no wait for a collective": Fault(
        "sequence, bulk", lambda: (Plant(collectives.Pending, "wait", _no_wait),), "has under way"
    ),
    "what is sent is written to": Fault(
        "gpipe", lambda: (Plant(Distributed, "send", _free_at_once),), "has under way"
    ),
    "what was received is written to before its backward": Fault(
        "gpipe", lambda: (instead(transport, "FINISHES", ("F",)),),
        "another number|inplace operation",
    ),
    "an exchange is two operations": Fault(
        "ring", lambda: (instead(messages, "start_batch", _unbatched),), "ranks .* wait: "
    ),
    "two communicators are swapped": Fault(
        "1f1b", lambda: (Plant(Distributed, "_connect", _swapped),),
        "wait: |sent and received differ",
    ),
    "a gradient's memory is given back early": Fault(
        "zero 2", lambda: (Plant(FlatGradients, "start", _freed_early),), "given back under way"
    ),
    "a gradient is added to under way": Fault(
        "zero 2", lambda: (Plant(FlatGradients, "start", _accumulates),),
        "writes to what reduce_scatter",
    ),
    "one rank begins a collective more": Fault(
        "zero 0", lambda: (Plant(Engine, "_start_global_losses", _one_more),),
        "different collectives",
    ),
    "links are not greeted, and connect at their first message": Fault(
        "1f1b", lambda: (Plant(threads, "_PRETENDED", lambda right: {**right, **_NO_GREETING}),),
        r"wait: rank 0 for the communicator of \(0, 1\)", lazily=True,
    ),
    "a pipeline's groups are made by its ranks alone": Fault(
        "pipelines with unlike lists",
        lambda: (instead(Distributed, "_make_groups", _by_its_ranks),),
        r"wait: rank 1 for the communicator of \(1, 3\)",
    ),
    "links take as many thread blocks as NCCL likes": Fault(
        "thread blocks", lambda: (instead(transport, "_CTAS", 32),), r"\(32, True\)"
    ),
    "every message has memory of its own": Fault(
        "more micro-batches", lambda: (instead(Buffers, "give_back", lambda *_: None),), "held"
    ),
    "fused products leave no processor to messages": Fault(
        "fused products", lambda: (instead(sys.modules[__name__], "_LEFT", 0),),
        r"no room: .*0SEND_F1, \(0, 0\) 0B0 runs",
    ),
    "the wait is for another message": Fault(
        "gpipe", lambda: (Plant(Distributed, "_take", _another_message),), "has under way"
    ),
}  # fmt: skip


def shows(fault: Fault) -> None:
    """Raise if the fault is planted."""
    if fault.case in CHECKS:
        CHECKS[fault.case]()
    else:
        _is_right(fault.case, fault.drains, fault.lazily)


@pytest.mark.parametrize("name", FAULTS)
def test_what_gloo_forgives_is_told(name: str) -> None:
    fault = FAULTS[name]
    if fault.case in CASES:
        plainly(fault.case)
    told = pytest.raises((AssertionError, RuntimeError, AbortedError), match=fault.told)
    with told, planted(*fault.plants()):
        shows(fault)
