"""The simulator against the closed formulas of the papers, exactly, in rational numbers."""

from fractions import Fraction

import pytest
from schedule_lists import lists_of

from warpweave.parallel.schedule import (
    from_csv,
    gpipe,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    send_first,
    split_backward,
    with_comm,
    with_reduce,
    with_tie,
    with_update,
)
from warpweave.parallel.schedule.ordering import begun_before
from warpweave.parallel.simulate import Cell, Timeline, simulate

SIZES = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 7), (4, 2), (4, 4), (4, 16), (8, 8), (8, 32)]
COSTS = [{"F": Fraction(1), "B": Fraction(2)}, {"F": Fraction(3, 7), "B": Fraction(1, 2)}]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("generate", [gpipe, one_f_one_b])
def test_idle_time_and_bubble(generate, cost, p: int, m: int) -> None:
    line = simulate(generate(p, m), cost, comm=Fraction(0))
    each = cost["F"] + cost["B"]
    assert line.span == (m + p - 1) * each
    assert line.idle == ((p - 1) * each,) * p
    assert line.busy == (m * each,) * p
    assert line.bubble == Fraction(p - 1, m + p - 1)
    # a rank's window starts with its first F, s·F late, and ends s·B before rank 0 does
    assert line.width == tuple(line.span - s * each for s in range(p))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peak_activations(p: int, m: int) -> None:
    assert simulate(gpipe(p, m), {"F": 1}).activations == (m,) * p
    saved = tuple(min(m, p - s) for s in range(p))
    assert simulate(one_f_one_b(p, m), {"F": 1}).activations == saved


@pytest.mark.parametrize("generate", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 4), (4, 9)])
def test_sending_gradients_first_saves_a_w_per_hop_at_equal_activations(generate, p, m) -> None:
    costs = {"F": 1, "B": 2, "I": 1, "W": 1}
    whole, early = simulate(generate(p, m), costs), simulate(send_first(generate(p, m)), costs)
    assert whole.span - early.span == p - 1
    assert max(early.activations) == max(whole.activations)


def test_weights_deferred_keep_their_activations() -> None:
    lists = split_backward(one_f_one_b(2, 4), lag=1)
    assert simulate(lists, {"F": 1, "I": 1, "W": 1}).activations == (3, 2)


def test_deferring_w_shortens_the_critical_path_to_f_and_i() -> None:
    """With all W at the end, fill and drain cost F + I per stage instead of F + I + W (m = 1)."""
    p = 4
    whole = simulate(gpipe(p, 1), {"F": 1, "I": 1, "W": 1})
    split = simulate(split_backward(gpipe(p, 1)), {"F": 1, "I": 1, "W": 1})
    assert whole.span == p * 3
    assert split.span == p * 2 + 1


@pytest.mark.parametrize("generate", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 3), (4, 8)])
def test_lowered_lists_cost_the_same(generate, p: int, m: int) -> None:
    cost, comm = {"F": Fraction(1), "I": Fraction(8, 7), "W": Fraction(6, 7)}, Fraction(1, 10)
    for lists in (generate(p, m), split_backward(generate(p, m), lag=1)):
        plain, sent = simulate(lists, cost, comm), simulate(with_comm(lists), cost, comm)
        assert sent.span == plain.span
        assert sent.busy == plain.busy
        assert sent.activations == plain.activations


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 4), (4, 1), (3, 12)])
def test_gpipe_pays_for_each_hop_once_down_and_once_up(p: int, m: int) -> None:
    comm = Fraction(1, 10)
    line = simulate(gpipe(p, m), {"F": 1, "B": 2}, comm)
    assert line.span == (m + p - 1) * 3 + 2 * (p - 1) * comm


def test_the_papers_costs_for_1f1b() -> None:
    """p=4, m=16, F : I : W = 1 : 1.14 : 0.86 gives 18.75 % above the ideal, as the note derives."""
    line = simulate(one_f_one_b(4, 16), {"F": 1, "I": 1.14, "W": 0.86})
    assert line.span / (16 * 3.0) - 1 == pytest.approx(3 / 16)


def test_collectives_take_the_time_they_are_given() -> None:
    lists = with_update(with_tie(with_reduce(one_f_one_b(3, 4))))
    free = simulate(lists, {"F": 1, "B": 2})
    assert free.span == (4 + 2) * 3
    paid = simulate(lists, {"F": 1, "B": 2, "REDUCE": 5, "TIE": 2, "UPDATE": 1})
    assert paid.span == free.span + 5 + 2 + 1
    tie = {cell.action.stage: cell for row in paid.cells for cell in row if cell.action.op == "TIE"}
    assert tie[0].start == tie[2].start == free.span + 5


def test_versions_of_synchronous_and_asynchronous_lists() -> None:
    assert simulate(with_update(one_f_one_b(3, 4)), {"F": 1}).versions == (1, 1, 1)
    line = simulate(pipedream(4, 9), {"F": 1, "B": 1})
    assert line.versions == line.activations == (4, 3, 2, 1)
    for held, text in (
        (2, "0F0 0F1 0B0 0B1 0UPDATE@1 0F2 0F3 0B2 0B3 0UPDATE@2 0F4@1 0B4@1 0UPDATE@3"),
        (1, "0F0 0F1 0I1 0I0 0W0 0UPDATE@1 0W1"),  # a W reads no weights
        # at UPDATE@2: 2 is the newest, 0 is in flight, 1 will be read by F3
        (3, "0F0 0F1 0B0 0UPDATE@1 0F2@1 0B2@1 0UPDATE@2 0B1 0UPDATE@3 0F3@1 0B3@1 0UPDATE@4"),
    ):
        assert simulate(lists_of(text), {"F": 1}).versions == (held,)
    cut = lists_of("0F2@1 0B2@1 0UPDATE@3 0F3@2 0B3@2 0UPDATE@4")  # the newest version is 2
    assert simulate(cut, {"F": 1}, before=begun_before(cut)).versions == (2,)
    begun = lists_of("0F0@-2 0F1@-1 0F2")  # by versions before the newest, which is 0
    assert simulate(begun, {"F": 1}, before=begun_before(begun)).versions == (3,)


def test_several_stages_on_a_rank_share_it() -> None:
    vee = lists_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    line = simulate(vee, {"F": 1, "B": 1}, comm=1)
    assert line.activations == (1.0, 1.0)
    assert line.span == 8 + 4
    assert line.draw().splitlines() == [
        "0F0 .   .   .   .   3F0 3B0 .   .   .   .   0B0",
        ".   .   1F0 2F0 .   .   .   .   2B0 1B0 .   .",
    ]
    uneven = lists_of("0F0 2F0 2B0 0B0", "1F0 1B0")
    assert simulate(uneven, {"F": 1, "B": 1}).draw().splitlines() == [
        "0F0 .   2F0 2B0 .   0B0",
        ".   1F0 .   .   1B0 .",
    ]


def test_a_deadlock_is_reported() -> None:
    lists = gpipe(2, 1)
    lists[0].reverse()
    with pytest.raises(ValueError, match="deadlock: rank 0 at 0B0 waits for 0F0 and 1I0"):
        simulate(lists, {"F": 1})


@pytest.mark.parametrize("lower", [list, with_comm])
def test_the_tied_gradients_meet_after_the_later_end_and_one_message(lower) -> None:
    """For either end being later, and either rank arriving first."""
    later = set()
    for lag in (0, (0, 0, 4), (4, 0, 0)):
        for step in (1, -1):
            lists = with_tie(lower(split_backward(one_f_one_b(3, 4), lag=lag)[::step]))
            line = simulate(lists, {"F": 1, "I": 1, "W": 5}, comm=Fraction(1, 4))
            first, last = line.cells[0][-1], line.cells[2][-1]
            assert first.action.op == last.action.op == "TIE"
            ready = [line.cells[rank][-2].end for rank in (0, 2)]
            assert first.start == last.start == max(ready) + Fraction(1, 4)
            later.add(ready[0] > ready[1])
    assert later == {False, True}


def test_a_drawing_has_a_column_per_tick_from_the_first_start_on() -> None:
    line = simulate(gpipe(2, 1), {"F": 2, "B": 4})
    assert line.draw(2).splitlines() == ["F0 .  .  .  B0 -", ".  F0 B0 -  .  ."]
    assert line.draw(4).splitlines() == ["F0 .  B0", "F0 B0 ."]  # halves are rounded to even
    assert simulate(gpipe(1, 1), {"F": 1, "B": 2}).draw(0.5) == "F0 -  B0 -  -  -"
    later = Timeline(
        tuple(tuple(Cell(a, s + 7, e + 7) for a, s, e in row) for row in line.cells),
        line.activations, line.versions,
    )  # fmt: skip
    assert later.draw(2) == line.draw(2)
    for name in ("span", "width", "busy", "idle", "bubble"):
        assert getattr(later, name) == getattr(line, name), name


def test_a_rank_without_actions_is_idle_and_holds_nothing() -> None:
    line = simulate([*one_f_one_b(2, 3), []], {"F": 1, "B": 2})
    assert (line.span, line.width, line.busy) == (12, (12, 9, 0), (9, 9, 0))
    assert (line.idle, line.bubble) == ((3, 3, 12), 18 / 36)
    assert (line.activations, line.versions) == ((2, 1, 0), (1, 1, 0))
    assert line.draw().splitlines()[2] == "." + "  ." * 11


def test_the_actions_of_a_cell_share_its_time_in_proportion_to_their_costs() -> None:
    lists = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1")
    (row,) = simulate(lists, {"F": 1, "B": 3, "OVERLAP_F_B": 2}).cells
    assert [(c.start, c.end) for c in row] == [(0, 1), (1, 1.5), (1.5, 3), (3, 6)]
    (row,) = simulate(lists, {"F": 1, "I": 3}).cells  # B is I plus a W without cost
    assert [(c.start, c.end) for c in row] == [(0, 1), (1, 2), (2, 5), (5, 8)]


def test_versions_are_the_most_of_any_stage_of_a_rank_and_in_a_long_run() -> None:
    first = "0F0 0F1 1F0 1B0 1UPDATE@1 1F1@1 1B1@1 1UPDATE@2 0B0 0UPDATE@1 0B1 0UPDATE@2"
    second = "0F0 0F1 1F0 1F1 1B0 1UPDATE@1 1B1 1UPDATE@2 0B0 0B1 0UPDATE@1"
    for text in (first, second):
        assert simulate(lists_of(text), {"F": 1}).versions == (2,)
    lists = pipedream(3, 14)
    assert simulate(lists, {"F": 1, "B": 2}).versions == (3, 2, 1)
    assert simulate(pipedream(3, 14, vertical=True), {"F": 1, "B": 2}).versions == (3, 3, 3)
    assert simulate(pipedream_2bw(3, 4, 5), {"F": 1, "B": 2}).versions == (2, 2, 2)
