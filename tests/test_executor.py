"""The executor, its in-process transport and its stages: messages and stored state.

Covers several stages on a rank, several messages on a link, and several losses of a stage. That
gradients are correct is tested in `test_pipeline.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from refused import check
from test_pipeline import lists_of
from torch import Tensor, nn

from warpweave.layers.records import collect_records
from warpweave.parallel.data.unit import make_unit
from warpweave.parallel.mesh import single
from warpweave.parallel.pipeline import Distributed, InFlight, InProcess, ModuleStage, execute
from warpweave.parallel.pipeline.losses import LOSS, add_losses, split_losses
from warpweave.parallel.pipeline.stage import ChainStage, Segment
from warpweave.parallel.schedule import Schedule, gpipe, interleaved, with_comm


class Plain:
    """A stage that passes on one buffer, holding the micro-batch, and keeps what it receives."""

    def __init__(self, gives: bool = True) -> None:
        self.received: list[tuple[str, int, float]] = []
        self.buffer, self.gives = torch.zeros(2), gives

    def start(self) -> None: ...

    def input_like(self, mb: int):
        return (2,), torch.float32, torch.device("cpu")

    def _hand_on(self, op: str, mb: int, given: Tensor | None) -> Tensor | None:
        if given is not None:
            self.received.append((op, mb, given[0].item()))
        return self.buffer.fill_(mb + 0.5) if self.gives else None

    def forward(self, mb: int, x: Tensor | None, version: int) -> Tensor | None:
        return self._hand_on("F", mb, x)

    def backward(self, mb: int, dy: Tensor | None) -> Tensor | None:
        return self._hand_on("B", mb, dy)

    backward_input = backward

    def backward_weight(self, mb: int) -> None: ...

    def update(self) -> None: ...


def run(lists: Schedule, stages: int, **more) -> dict[int, Plain]:
    made = {s: Plain(**more) for s in range(stages)}
    execute(lists, made, InProcess())
    return made


@pytest.mark.parametrize(
    ("lists", "stages", "message"),
    [
        # updates the named stage, not the other one on the rank
        (["0F0 0F1 0F2 1F0 1F1 1F2 1I0 0I0 1I1 0I1 1I2 0I2 0W1 0UPDATE@1"], 2,
         "rank 0: 0UPDATE@1 must come after the W of micro-batches [0, 2]"),
        (["0F0 0F1 1F0 1F1 1I1 1I0 0I1"], 2,
         "rank 0: no W follows the I of these (stage, micro-batch) pairs: [(0, 1), (1, 0), "
         "(1, 1)]"),
        (["0F1 0F0 1F0 1B0"], 2,
         "rank 0: the action list ends with unused data of these (kind, stage, micro-batch) "
         "triples: [('B', 0, 0), ('F', 1, 1)]"),
        (["0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], 2,
         "messages were sent but never received: 0SEND_F1 0SEND_F2"),
        (["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1SEND_F0 1RECV_B0", "2RECV_F0 2F0"], 3,
         "deadlock: rank 0 waits for 0RECV_B0 from rank 1; rank 1 waits for 1RECV_B0 from rank 2"),
    ],
)  # fmt: skip
def test_an_error_names_all_micro_batches_messages_and_ranks_concerned(
    lists: list[str], stages: int, message: str
) -> None:
    check(lambda: run(lists_of(*lists), stages), f"^{re.escape(message)}$", RuntimeError)


@pytest.mark.parametrize(("silent", "waiting"), [("1F0", 2), ("2B0", 1)])
def test_a_stage_that_gives_nothing_is_named_with_the_one_that_waits(silent, waiting) -> None:
    made = {s: Plain() for s in range(3)}
    made[int(silent[0])].gives = False
    made[2].forward = lambda mb, x, version: None
    call = partial(execute, lists_of("0F0 1F0 2F0 2B0 1B0 0B0"), made, InProcess())
    words = f"^rank 0: {silent} returned None, but stage {waiting} waits for data$"
    check(call, words, RuntimeError)


def test_lists_of_several_ranks_without_messages_are_rejected() -> None:
    words = "^the lists of 3 ranks have no SEND or RECV; call with_comm to add them$"
    check(lambda: run(interleaved(3, 3, 2), 6), words)
    run(lists_of("0F0 1F0 1B0 0B0"), 2)  # a single rank sends nothing


UNFINISHED = r": the run ends with unfinished \(stage, micro-batch\) pairs: \[\(0, 1\), \(0, 2\)\]$"


def test_every_rank_is_asked_whether_its_micro_batches_have_ended() -> None:
    """Stage 0 is on the second rank, and its last two outputs are not sent in this pass."""
    lists = lists_of("1RECV_F0 1F0 1B0 1SEND_B0", "0F0 0SEND_F0 0F1 0F2 0RECV_B0 0B0")
    run_ = InFlight()
    run_.check_ended()
    execute(lists, {s: Plain() for s in range(2)}, InProcess(), run_)
    check(run_.check_ended, f"^rank 1{UNFINISHED}", RuntimeError)
    run_.advance(4, 3)
    run_.advance(4, 3)
    assert (run_.microbatches, run_.versions) == (8, 6)


def test_a_weight_gradient_may_be_owed_from_one_pass_to_the_next() -> None:
    stage, run_, begun = Plain(), InFlight(), lists_of("0F0 0F1 0F2 0I0 0W0 0I1 0I2")
    done: list[int] = []
    stage.backward_weight = done.append
    execute(begun, {0: stage}, InProcess(), run_)
    check(run_.check_ended, f"^rank 0{UNFINISHED}", RuntimeError)
    run_.advance(1)
    execute(lists_of("0W0 0F2 0I2"), {0: stage}, InProcess(), run_)
    run_.advance(1)
    assert done == [0, 1]
    late = InFlight()
    late.ranks |= run_.ranks
    late.advance(2)
    for row, words in (
        ("0UPDATE@1", r"0UPDATE@1 must come after the W of .* \[0, 1\]$"),
        ("0I1", "^rank 0: 0I1 occurs twice$"),
    ):
        check(partial(execute, lists_of(row), {0: stage}, InProcess(), late), words, RuntimeError)
    execute(lists_of("0W1 0W0"), {0: stage}, InProcess(), run_)
    assert done == [0, 1, 3, 2]
    run_.check_ended()


def test_forward_reads_current_or_earlier_weight_versions_but_not_later_ones() -> None:
    for row, words in (
        ("0F0@1 0B0@1", "0F0@1 comes before 0UPDATE@1, on which it depends"),
        ("0F0 0B0 0UPDATE@1 0F1@2 0B1@2", "0F1@2 comes before 0UPDATE@2, on which it depends"),
    ):
        check(partial(run, lists_of(row), 1), f"^rank 0: {words}$", RuntimeError)
    run(lists_of("0F0 0B0 0UPDATE@1 0F1@1 0B1@1 0F2 0B2"), 1)

    one, run_, stage = "0F{} 0B{} 0UPDATE@1 0F{}@1 0B{}@1 0UPDATE@2", InFlight(), Plain()
    seen: list[tuple[int, int]] = []

    stage.forward = lambda mb, x, version: seen.append((mb, version)) or stage.buffer
    for _ in range(3):  # version 0 of each pass is the newest of the previous one
        execute(lists_of(one.format(0, 0, 1, 1)), {0: stage}, InProcess(), run_)
        run_.advance(2, 2)
    assert seen == [(mb, mb) for mb in range(6)]
    words = "^rank 0: 0F0@1 comes before 0UPDATE@1, on which it depends$"
    call = partial(execute, lists_of("0F0@1 0B0@1"), {0: stage}, InProcess(), run_)
    check(call, words, RuntimeError)
    execute(lists_of("0F0@-1 0B0@-1"), {0: stage}, InProcess(), run_)
    assert seen[-1] == (6, 5)


def test_stage_may_overwrite_its_result_before_the_next_stage_receives_it() -> None:
    made = run(with_comm(gpipe(2, 3)), 2)
    assert made[1].received == [("F", mb, mb + 0.5) for mb in range(3)]
    assert made[0].received == [("B", mb, mb + 0.5) for mb in range(3)]


def test_shapes_are_agreed_of_every_micro_batch_of_every_stage() -> None:
    """Covers empty micro-batches, those of no dims and of eight, in any dtype that can be sent."""
    shapes = [(), (0,), (3, 0, 2), (1,) * 8, (0,) * 8, (7, 5)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.float16]

    class Varied(Plain):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage = stage

        def input_like(self, mb: int):
            at = mb + 5 * self.stage
            return shapes[at % 6], dtypes[at % 5], torch.device("cpu")

    lists = [[a for row in zip(*gpipe(3, 12)) for a in row]]
    lists[0].sort(key=lambda a: (a.op == "B", a.stage if a.op == "F" else -a.stage, a.mb))
    made = {s: Varied(s) for s in range(3)}
    transport = Distributed(lists, None)
    transport.open(lists, made)
    for s in (1, 2):
        for mb in range(12):
            assert transport.like(s, mb) == made[s].input_like(mb)


# ----------------------------------------------------------------------------- modules


def test_a_module_stage_says_what_it_was_not_given() -> None:
    module, like = nn.Linear(2, 2), ((3, 2), torch.float32, torch.device("cpu"))
    first = ModuleStage(module, inputs=lambda mb: torch.zeros(3, 2))
    check(lambda: first.input_like(0), "^the first stage receives nothing$")
    assert ModuleStage(module, like=like).input_like(7) == like
    check(first.update, "^UPDATE needs an optimizer, but this stage has none")
    assert first.tie() is None


def test_losses_and_outputs_of_a_module_stage_are_detached() -> None:
    stage = ModuleStage(
        nn.Linear(2, 2), inputs=lambda mb: torch.ones(3, 2), loss=lambda mb, y: (mb + 1) * y.sum()
    )
    for mb in (0, 11):
        assert stage.forward(mb, None) is None
        assert not stage.losses[mb][LOSS].requires_grad
        stage.backward(mb, None)
    assert stage.losses[11][LOSS] == pytest.approx(12 * stage.losses[0][LOSS].item())
    middle = ModuleStage(nn.Linear(2, 2), like=((3, 2), torch.float32, torch.device("cpu")))
    assert not middle.forward(0, torch.ones(3, 2)).requires_grad


# ----------------------------------------------------------------------------- losses


def test_each_loss_must_be_a_0_dim_tensor_of_32_bits_and_losses_add_by_name() -> None:
    right = torch.ones((), dtype=torch.float64)
    for name in ("a", "b", "c"):
        for wrong, found in (
            (torch.ones(1), r"torch.float32 \[1\]"),
            (torch.ones(1, 1), r"torch.float32 \[1, 1\]"),
            (torch.ones((), dtype=torch.float16), r"torch.float16 \[\]"),
            (True, "True"),
            (None, "None"),
        ):
            losses = {"a": right, "b": right, "c": right} | {name: wrong}
            words = f"^the loss '{name}' must be .*; got {found}$"
            check(partial(split_losses, (right, losses)), words)
    y, losses = split_losses((right, {"a": right, "b": torch.ones(())}))
    total: dict[str, Tensor] = {}
    for _ in range(3):
        add_losses(total, losses)
    add_losses(total, {"c": right})
    assert total == {"a": 3.0, "b": 3.0, "c": 1.0}
    assert y is right


# ----------------------------------------------------------------------------- chains


def _chain(segments: int) -> ChainStage:
    made = []
    for k in range(segments):
        layer = nn.Linear(2, 2, dtype=torch.float64)
        records = {n: r.renamed(f"{k}.{n}") for n, r in collect_records(layer).items()}
        unit = make_unit(f"{k}", [(records[n], p) for n, p in layer.named_parameters()], single())

        def fn(x, batch, layer=layer, last=k == segments - 1):
            y = layer(batch if x is None else x)
            return (None, {LOSS: y.sum(), "aux": y.square().sum()}) if last else y

        made.append(Segment(f"{k}", fn, (unit,)))
    return ChainStage(made)


def test_fed_micro_batches_are_numbered_on_and_losses_are_those_since_then() -> None:
    chain = _chain(2)
    batches = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None, None].expand(5, 3, 2)
    wanted = [chain.evaluate(None, batch)[1][LOSS] for batch in batches]
    chain.begin(batches[:2])
    for mbs in ((0, 1), (2, 3), (4,)):
        for mb in mbs:
            chain.forward(mb, None)
            chain.backward(mb, None)
        assert [*chain.losses] == [*mbs]
        assert [chain.losses[mb][LOSS] for mb in mbs] == [wanted[mb] for mb in mbs]
        chain.feed(batches[mbs[-1] + 1 : mbs[-1] + 3])
        assert chain.losses == {}
    chain.begin(batches[3:])
    chain.forward(0, None)
    chain.backward(0, None)
    assert chain.losses[0][LOSS] == wanted[3]
    chain.begin(batches)
    assert chain.losses == {}


@pytest.mark.parametrize("each", [1, 2, 3, 6, None])
@pytest.mark.parametrize("fed", [0, 6])
def test_gradients_are_reduced_after_every_so_many_micro_batches(each, fed: int) -> None:
    """This counts those at the beginning and those fed later; by default, reduction follows all at
    the beginning."""
    chain, every = _chain(2), 6 if each is None else each
    chain.bucket_bytes = 0  # a reduction begins as soon as a gradient is complete
    batches = torch.ones(6 + fed, 3, 2, dtype=torch.float64)
    started: list[int] = []
    for unit in chain.units:
        unit.gradients.start = lambda following=(), *, last: started.append(mb) if last else None
    chain.begin(batches[:6], each=each)
    for mb in range(6 + fed):
        if mb == 6:
            chain.feed(batches[6:])
        chain.forward(mb, None)
        chain.backward(mb, None)
        ends = (mb + 1) % every == 0
        assert [at for at in started if at == mb] == [mb] * len(chain.units) * ends
        if ends:
            chain.reduce()
    assert len(started) == (6 + fed) // every * len(chain.units)


def test_parameters_are_freed_after_the_last_neighbor_that_reads_them() -> None:
    given = _chain(3).segments
    both = given[0].units
    chain = ChainStage([given[0], replace(given[1], units=given[1].units + both), given[2]])
    chain._must_cut = True
    freed: list[str] = []
    for unit in chain.units:
        unit.parameters.reshard = lambda name=unit.name: freed.append(name)
    batch = torch.ones(3, 2, dtype=torch.float64)
    chain.evaluate(None, batch)
    assert freed == ["1", "0", "2"]
    chain.begin([batch])
    chain.forward(0, None)
    assert freed[3:] == ["1", "0"]  # those of the last segment are needed first
    chain.backward(0, None)
    assert freed[5:] == ["2", "1", "0"]
