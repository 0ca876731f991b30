"""One executor on virtual and on real ranks: gradients bitwise equal to those of one device.

The truth is plain autograd over the whole model, gradients accumulated micro-batch by micro-batch.
Comparisons are ``torch.equal`` in fp32: a pipeline does the same operations in the same order.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from deferred import Product
from plants import instead, planted
from ranks import run_ranks
from refused import check
from threads import on_threads
from torch import Tensor, nn

from warpweave.parallel.pipeline import Distributed, InProcess, ModuleStage, execute
from warpweave.parallel.pipeline import transport as transport_module
from warpweave.parallel.schedule import (
    Action,
    from_csv,
    gpipe,
    interleaved,
    one_f_one_b,
    placement,
    split_backward,
    validate,
    with_comm,
    with_reduce,
    with_tie,
    with_update,
)

TOKENS, DEPTH = 3, 4
WIDTHS = (6, 5, 7, 6, 5)  # unequal, so that link shapes differ; blocks 0 and 3 can be tied
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Parameter(torch.randn(out, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(Product.apply(self.norm(x), self.weight))


def model() -> list[Block]:
    torch.manual_seed(3)
    return [Block(*pair) for pair in pairwise(WIDTHS)]


def data(m: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(11 + replica)
    x = torch.randn(m, TOKENS, WIDTHS[0], generator=draw)
    return x, torch.randn(m, TOKENS, WIDTHS[-1], generator=draw)


def loss_of(m: int, target: Tensor) -> Callable[[int, Tensor], Tensor]:
    """Return the sum over tokens over the number in all micro-batches: normalized only here."""
    return lambda mb, y: ((y - target[mb]) ** 2).sum() / (m * TOKENS)


def gradients(modules) -> list[Tensor]:
    return [p.grad for module in modules for p in module.parameters()]


def truth(m: int, replica: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Return gradients and losses of one device."""
    blocks, (x, target) = model(), data(m, replica)
    loss, losses = loss_of(m, target), []
    for mb in range(m):
        value = loss(mb, nn.Sequential(*blocks)(x[mb]))
        value.backward()
        losses.append(value.detach())
    return gradients(blocks), losses


def build(
    stages: int, m: int, mine=None, *, replica: int = 0, loss=None, lr=None, **options
) -> dict[int, ModuleStage]:
    """Build the model as contiguous stages, those numbered in `mine` (all by default), with SGD if
    there is an `lr`."""
    blocks, (x, target) = model(), data(m, replica)
    bounds = [DEPTH * s // stages for s in range(stages + 1)]
    result = {}
    for s in range(stages) if mine is None else mine:
        module = nn.Sequential(*blocks[bounds[s] : bounds[s + 1]])
        result[s] = ModuleStage(
            module,
            optimizer=None if lr is None else torch.optim.SGD(module.parameters(), lr=lr),
            inputs=(lambda mb: x[mb]) if s == 0 else None,
            like=None if s == 0 else ((TOKENS, WIDTHS[bounds[s]]), torch.float32, CPU),
            loss=(loss or loss_of(m, target)) if s == stages - 1 else None,
            **options,
        )
    return result


def grads_of(stages: dict[int, ModuleStage]) -> list[Tensor]:
    return gradients(stages[s].module for s in sorted(stages))


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def lists_of(*rows: str):
    return [from_csv(row.replace(" ", ","))[0] for row in rows]


def vee(m: int):
    """Return two ranks with four stages in a V: every kind of link at once. In GPipe order."""
    down, up = [range(m)] * 2
    return [
        [Action(op, s, i) for op, s in (("F", near), ("F", far)) for i in down]
        + [Action(op, s, i) for op, s in (("B", far), ("B", near)) for i in up]
        for near, far in ((0, 3), (1, 2))
    ]


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "1f1b split": lambda p, m: split_backward(one_f_one_b(p, m), lag=1),
    "gpipe split late": lambda p, m: split_backward(gpipe(p, m), lag=m),
}


def lowered(name: str, p: int, m: int):
    return with_comm(with_reduce(SCHEDULES[name](p, m)))


# ------------------------------------------------------------------------------- virtual ranks


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_virtual_ranks_equal_one_device_bit_for_bit(name: str, p: int, m: int) -> None:
    expected, losses = truth(m)
    stages = build(p, m)
    Product.calls = 0
    execute(lowered(name, p, m), stages, InProcess())
    assert equal(grads_of(stages), expected)
    assert [stages[p - 1].losses[mb] for mb in range(m)] == [{"loss": x} for x in losses]
    assert Product.calls == DEPTH * m  # once per layer and micro-batch, split or not


def test_i_leaves_the_linear_weights_to_w() -> None:
    stage = build(1, 1)[0]
    stage.forward(0, None)
    stage.backward_input(0, None)
    assert all(block.weight.grad is None for block in stage.module)
    assert all(block.norm.weight.grad is not None for block in stage.module)
    stage.backward_weight(0)
    assert equal(grads_of({0: stage}), truth(1)[0])


def test_a_v_shaped_placement_equals_one_device() -> None:
    stages = build(4, 3)
    execute(with_comm(vee(3)), stages, InProcess())
    assert equal(grads_of(stages), truth(3)[0])


def test_accumulation_goes_on_over_passes_and_update_clears_it() -> None:
    lists, m = with_comm(with_update(one_f_one_b(2, 3))), 3
    stages = build(2, m, lr=0.5)
    before = [p.detach().clone() for s in stages.values() for p in s.module.parameters()]
    execute(lists, stages, InProcess())
    after = [p.detach() for s in stages.values() for p in s.module.parameters()]
    moved = [b - 0.5 * g for b, g in zip(before, truth(m)[0])]
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(after, moved))
    assert grads_of(stages) == [None] * len(after)


@pytest.mark.parametrize("where", ["two ranks", "one rank"])
def test_tied_gradients_are_summed_once_on_both_ends(where: str) -> None:
    m = 2
    separate = truth(m)[0]
    stages = build(4, m)
    for s in (0, 3):
        stages[s].tied = stages[s].module[0].weight
    lists = vee(m) if where == "one rank" else one_f_one_b(4, m)
    execute(with_comm(with_tie(lists)), stages, InProcess())
    found = grads_of(stages)
    weight = [k for k, (name, _) in enumerate(nn.Sequential(*model()).named_parameters())
              if name in ("0.weight", "3.weight")]  # fmt: skip
    first, last = weight
    assert torch.equal(found[first], separate[first] + separate[last])
    assert torch.equal(found[last], found[first])
    others = [k for k in range(len(found)) if k not in weight]
    assert equal([found[k] for k in others], [separate[k] for k in others])


# ----------------------------------------------------------------------------- planted faults


def test_a_gradient_scaled_by_micro_batches_is_seen() -> None:
    m = 5
    _, target = data(m)
    right = loss_of(m, target)
    stages = build(2, m, loss=lambda mb, y: right(mb, y) / m)
    execute(lowered("1f1b", 2, m), stages, InProcess())
    assert not equal(grads_of(stages), truth(m)[0])


def edit(lists, old: str, *new: str):
    new_actions = [a for cell in new for a in lists_of(cell)[0]]
    result = [[b for a in row for b in ([a] if str(a) != old else new_actions)] for row in lists]
    assert result != lists
    return result


def swap(lists, one: str, two: str):
    return edit(edit(edit(lists, one, "99F0"), two, one), "99F0", two)


STEP = with_comm(one_f_one_b(2, 2))
SPLIT = with_comm(with_update(split_backward(one_f_one_b(2, 2), lag=1)))


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (edit(STEP, "0SEND_F1"), "deadlock: rank 0 waits for 0RECV_B1 from rank 1; rank 1 waits"),
        (edit(STEP, "0F1"), "rank 0: 0SEND_F1 comes before 0F1"),
        (edit(STEP, "1RECV_F1"), "rank 1: 1F1 comes before 1RECV_F1"),
        (edit(STEP, "1B1"), "rank 1: 1SEND_B1 comes before 1I1"),
        (edit(STEP, "1SEND_B1"),
         r"rank 1: the action list ends with unused data .*: \[\('B', 0, 1\)\]"),
        (edit(edit(STEP, "1B1"), "1SEND_B1"), "deadlock: rank 0 waits for 0RECV_B1 from rank 1"),
        (edit(edit(STEP, "0RECV_B1"), "0B1"), "messages were sent but never received: 1SEND_B1"),
        (swap(STEP, "0SEND_F0", "0SEND_F1"), "rank 0: 0SEND_F1 comes before 0F1"),
        (swap(swap(STEP, "0SEND_F0", "0SEND_F1"), "0F0", "0F1"),
         "link F from rank 0 to 1: 1RECV_F0 got 0SEND_F1, expected 0SEND_F0"),
        (swap(STEP, "0RECV_B0", "0RECV_B1"), "0RECV_B1 got 1SEND_B0, expected 1SEND_B1"),
        (edit(STEP, "0F1", "0F1", "0F1"), "rank 0: 0F1 occurs twice"),
        (edit(STEP, "1F1", "1F1", "1F1"), "rank 1: 1F1 occurs twice"),
        (edit(SPLIT, "1W1"), r"rank 1: 1UPDATE@1 must come after the W of micro-batches \[1\]"),
        (edit(SPLIT, "1W1", "1W1", "1W1"), "rank 1: 1W1 occurs twice"),
        (swap(SPLIT, "1W1", "1UPDATE@1"),
         r"1UPDATE@1 must come after the W of micro-batches \[1\]"),
        (edit(edit(SPLIT, "1W1"), "1UPDATE@1"), r"no W follows the I of these .*\(1, 1\)"),
    ],
)  # fmt: skip
def test_wrong_lists_are_found_while_running(lists, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as error:
        execute(lists, build(2, 2, lr=0.0), InProcess())
    assert "\n" not in str(error.value)


def test_what_does_not_fit_is_refused() -> None:
    words = r"expected stages \[0, 1\] for ranks \[0, 1\], got \[1\]"
    check(lambda: execute(STEP, build(2, 2, [1]), InProcess()), words)
    words = r"for ranks \[0, 1\], got \[0, 1, 2\]"
    check(lambda: execute(STEP, build(3, 2), InProcess()), words)
    for width, dtype in ((8, torch.float32), (7, torch.float64)):
        stages = build(2, 2)
        stages[1]._like = ((TOKENS, width), dtype, CPU)
        words = rf"1RECV_F0: expected shape \(3, {width}\) {dtype}, got \(3, 7\) .*32"
        check(partial(execute, STEP, stages, InProcess()), words)
    lists = [[Action("UPDATE", 0, ver=1), Action("F", 0, 0, 0)]]
    words = r"reads version 0 of the weights, but the stage holds only versions \[1\]"
    check(lambda: execute(lists, build(1, 1, lr=0.0), InProcess()), words)
    check(lambda: Distributed(STEP, None), "is for 2 ranks, but the pipeline group has 1")
    for ranks in (1, 3):  # fewer and more
        on_threads(ranks, _refuses_the_size, ranks)
    first, other = {"inputs": lambda mb: torch.ones(2)}, {"like": ((2,), torch.float32, CPU)}
    for given in ({}, first | other):
        check(partial(ModuleStage, nn.Linear(2, 2), **given), "either `inputs`")


def _refuses_the_size(group, ranks: int) -> None:
    words = f"2 ranks, but the pipeline group has {ranks}$"
    check(lambda: Distributed(STEP, group), words)


def test_a_single_rank_needs_no_process_group() -> None:
    lists = gpipe(1, 3)
    stages = build(1, 3)
    execute(lists, stages, Distributed(lists, None))
    assert equal(grads_of(stages), truth(3)[0])


# ---------------------------------------------------------------------------------- versions


def _delayed(m: int, lr: float, delay: int, each: int) -> list[Tensor]:
    """Run w_{t+1} = w_t - lr g_t(w_{max(t - delay, 0)}), g_t summed over `each` micro-batches."""
    blocks, (x, target) = model(), data(m)
    loss, parameters = loss_of(m, target), [p for b in blocks for p in b.parameters()]
    weights = [[p.detach().clone() for p in parameters]]
    for t in range(m // each):
        for p, old in zip(parameters, weights[max(t - delay, 0)]):
            p.data.copy_(old)
        done = range(t * each, (t + 1) * each)
        total = sum(loss(mb, nn.Sequential(*blocks)(x[mb])) for mb in done)
        grads = torch.autograd.grad(total, parameters)
        weights.append([w - lr * g for w, g in zip(weights[-1], grads)])
    return weights[-1]


def _versions_behind(
    stages: int, m: int, delay: int, each: int, weights: str = "B"
) -> list[list[Action]]:
    """Add an UPDATE after every `each` micro-batches; forwards read the weights of `delay` UPDATEs
    ago, or the first, not the newest."""
    rows = []
    for s in range(stages):
        row = []
        for t in range(m // each + delay):
            ahead, done = (range(k * each, (k + 1) * each) for k in (t, t - delay))
            if t >= delay:
                ver = max(t - 2 * delay, 0)
                ops = {"B": ["B"], "IW": ["I", "W"], "I..W": ["I"]}[weights]
                row += [Action(op, s, mb, ver) for mb in done for op in ops]
                row += [Action("W", s, mb, ver) for mb in done if weights == "I..W"]
                row.append(Action("UPDATE", s, ver=t - delay + 1))
            row += [Action("F", s, mb, max(t - delay, 0)) for mb in ahead if mb < m]
        rows.append(row)
    return rows


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("delay", "each"), [(1, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("weights", ["B", "IW", "I..W"])
def test_versions_of_the_weights_give_the_delayed_gradient(stages, delay, each, weights) -> None:
    """PipeDream-2BW (arXiv:2006.09503) and longer delays, with and without accumulation."""
    m, lr = 4 * each, 0.3
    lists = _versions_behind(stages, m, delay, each, weights)
    validate(lists, staleness=delay)
    words = rf"{delay} weight versions? old; the limit \(staleness\) is {delay - 1}$"
    check(partial(validate, lists, staleness=delay - 1), words)
    lists = with_comm(lists)
    made = build(stages, m, versions=delay + 1, lr=lr)
    execute(lists, made, InProcess())
    found = [p.detach() for s in sorted(made) for p in made[s].module.parameters()]
    expected, fresh = (_delayed(m, lr, d, each) for d in (delay, 0))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=3e-5), (a - b).abs().max()
    assert max((a - b).abs().max() for a, b in zip(expected, fresh)) > 1e-2  # the delay shows
    fewer = build(stages, m, versions=delay, lr=lr)  # fewer than are read
    words = "reads version 0 of the weights, but the stage holds only"
    check(lambda: execute(lists, fewer, InProcess()), words)


def test_what_is_frozen_stays_so_in_every_version() -> None:
    lists = _versions_behind(1, 4, 1, 2)
    made = build(1, 4, versions=2, lr=0.3)
    frozen = made[0].module[1].weight.requires_grad_(False)
    before = frozen.clone()
    execute(lists, made, InProcess())
    assert torch.equal(frozen, before)


def test_a_run_begins_with_version_0_alone() -> None:
    """It does not begin with leftovers of the previous run, which may have failed."""
    (stage,) = build(1, 4, versions=3, lr=0.3).values()
    words = r"reads version 1 of the weights, but the stage holds only versions \[0\]"
    for _ in range(2):
        stage.start()
        check(lambda: stage.forward(1, None, 1), words)
        stage.forward(0, None)
        stage.backward(0, None)
        stage.update()
        stage.forward(1, None, 1)  # the run ends midway


# ---------------------------------------------------------------------------------- real ranks


class Counting(Distributed):
    """A transport that counts sent tensors kept alive, sends not waited for, and receives not
    posted ahead."""

    peak = late = lost = 0

    def send(self, link, action, tensor) -> None:
        super().send(link, action, tensor)
        self.lost += 1
        self.peak = max(self.peak, len(self._sending))

    def _arrive(self, action) -> None:
        super()._arrive(action)
        self.lost -= 1

    def _take(self, want) -> Tensor:
        self.late += want.action not in self._posted
        return super()._take(want)


def _mine(lists, rank: int) -> list[int]:
    return [s for s, r in enumerate(placement(lists)) if r == rank]


def _at_need(rank: int) -> list[Tensor]:
    """Test receives posted late, and (two stages per rank) early: the bits of one device."""
    lists = with_comm(interleaved(2, 4, 2))
    with planted(instead(transport_module, "by_gloo", lambda group, device: False)):
        transport = Distributed(lists, dist.group.WORLD, timeout=300)
    assert any(lists[r][i] not in rs for (r, i), rs in transport._posts.items())  # some early
    stages = build(DEPTH, 4, _mine(lists, rank))
    for _ in range(2):
        stages = build(DEPTH, 4, _mine(lists, rank))
        execute(lists, stages, transport)
        assert not transport._posted
    return grads_of(stages)


def test_receives_posted_when_they_must_be_change_no_bit() -> None:
    near, far = run_ranks(2, _at_need)
    expected = truth(4)[0]
    each = len(expected) // DEPTH
    parts = [near[:each], far[:each], near[each:], far[each:]]
    assert equal([g for part in parts for g in part], expected)


def _real(rank: int, p: int) -> dict[str, list[Tensor]]:
    result = {}
    for name, m in product(SCHEDULES, (1, 5)):
        lists = lowered(name, p, m)
        transport = Counting(lists, dist.group.WORLD, timeout=300)
        stages = build(p, m, _mine(lists, rank))
        Product.calls = 0
        execute(lists, stages, transport)
        assert not transport.lost
        assert not transport.late
        if name == "1f1b" and m > p and rank < p - 1:  # not all m outputs and m gradients
            assert transport.peak <= 2 * (p - rank)
        assert Product.calls == m * len(list(stages[rank].module))
        result[f"{name} {m}"] = grads_of(stages)
        again = build(p, m, [rank])  # the same transport serves the next step
        execute(lists, again, transport)
        assert equal(grads_of(again), grads_of(stages))
    return result


@pytest.mark.parametrize("p", [2, 3, 4])
def test_real_ranks_equal_one_device_bit_for_bit(p: int) -> None:
    ranks = run_ranks(p, _real, p)
    for name, m in product(SCHEDULES, (1, 5)):
        found = [g for rank in ranks for g in rank[f"{name} {m}"]]
        assert equal(found, truth(m)[0]), (name, m)


def _vee_and_tie(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    lists = with_comm(vee(3))
    stages = build(4, 3, _mine(lists, rank))
    execute(lists, stages, Distributed(lists, dist.group.WORLD, timeout=300))
    tied = with_comm(with_tie(with_tie(one_f_one_b(2, 3))))  # the second one doubles
    ends = build(2, 3, [rank])
    ends[rank].tied = ends[rank].module[-rank].weight  # blocks 0 and 3
    transport = Counting(tied, dist.group.WORLD, timeout=300)
    execute(tied, ends, transport)
    assert not transport.lost
    return grads_of(stages), ends[rank].tied.grad


def test_real_ranks_in_a_v_and_with_tied_weights() -> None:
    (near, tie_0), (far, tie_1) = run_ranks(2, _vee_and_tie)
    expected = truth(3)[0]
    each = len(expected) // DEPTH  # stages 0 and 3 are on rank 0
    assert equal(near[:each] + far + near[each:], expected)
    names = [name for name, _ in nn.Sequential(*model()).named_parameters()]
    total = 2 * (expected[names.index("0.weight")] + expected[names.index("3.weight")])
    assert torch.equal(tie_0, total)
    assert torch.equal(tie_1, total)


def _two_by_two(rank: int) -> list[Tensor]:
    """Run pp = 2 outermost, dp = 2: two pipelines side by side, with REDUCE over the replicas."""
    stage, replica = divmod(rank, 2)
    down = [dist.new_group([r, r + 2]) for r in range(2)][replica]
    across = [dist.new_group([2 * s, 2 * s + 1]) for s in range(2)][stage]
    lists = with_comm(with_reduce(one_f_one_b(2, 3)))
    stages = build(2, 3, [stage], replica=replica, group=across)
    execute(lists, stages, Distributed(lists, down, timeout=300))
    return grads_of(stages)


def test_pipelines_side_by_side_reduce_their_gradients() -> None:
    ranks = run_ranks(4, _two_by_two)
    expected = [a + b for a, b in zip(truth(3, 0)[0], truth(3, 1)[0])]
    for replica in range(2):
        assert equal(ranks[replica] + ranks[2 + replica], expected)


def _errors(rank: int) -> list[str]:
    found = []

    def note(run: Callable[[], object]) -> None:
        try:
            run()
            found.append("no error")
        except (ValueError, RuntimeError) as error:
            found.append(str(error))

    other = with_comm(gpipe(2, 2)) if rank else STEP
    note(lambda: Distributed(other, dist.group.WORLD, timeout=300))
    transport = Distributed(STEP, dist.group.WORLD, timeout=3)
    note(lambda: execute(with_comm(gpipe(2, 2)), build(2, 2, [rank]), transport))
    stages = build(2, 2, [rank])
    transport.open(STEP, stages)  # both agree on shapes, then rank 0 never starts
    if rank == 1:
        note(lambda: execute(STEP, stages, transport))
    dist.barrier()
    transport = Distributed(STEP, dist.group.WORLD, timeout=3)
    stages = build(2, 2, [rank])
    if rank == 0:
        stages[0].module.append(nn.Linear(WIDTHS[2], 8))
    note(lambda: execute(STEP, stages, transport))
    dist.barrier()
    transport = Distributed(STEP, dist.group.WORLD, timeout=3)
    stages = build(2, 2, [rank])
    if rank == 1:
        stages[1]._like = (*stages[1]._like[:1], torch.float64, CPU)
    note(lambda: execute(STEP, stages, transport))
    return found


def test_errors_of_real_ranks_name_rank_action_and_numbers() -> None:
    zero, one = run_ranks(2, _errors)
    for found in (zero, one):
        assert "the ranks of the pipeline group have different schedules" in found[0]
        assert f"rank {int(found is one)}: this transport was built for a different" in found[1]
        assert not any("\n" in text for text in found)
    assert one[2].startswith("rank 1: 1RECV_F0 from rank 0 failed (the timeout is 3 s): ")
    assert "0SEND_F0: expected shape (3, 7) torch.float32, got (3, 8) torch.float32" in zero[2]
    assert "0SEND_F0: expected shape (3, 7) torch.float64, got (3, 7) torch.float32" in zero[3]
    assert one[3].startswith("rank 1: 1RECV_F0 from rank 0 failed (the timeout is 3 s): ")
