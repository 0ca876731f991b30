"""Schedules as drawings and against torch's, and every rule of the validator by a violation."""

from itertools import chain, product

import pytest
import torch.distributed.pipelining.schedules as theirs
from schedule_lists import edit, lists_of, swap

from warpweave.parallel.schedule import (
    FAMILIES,
    Action,
    acknowledged,
    from_csv,
    gpipe,
    interleaved,
    one_f_one_b,
    order,
    placement,
    posted_ahead,
    posted_at_need,
    send_first,
    split_backward,
    to_csv,
    validate,
    with_comm,
    with_reduce,
    with_tie,
    with_update,
)
from warpweave.parallel.schedule.actions import deps, gives, link, links
from warpweave.parallel.simulate import simulate

GENERATORS = [gpipe, one_f_one_b]


@pytest.mark.parametrize("p", range(1, 6))
@pytest.mark.parametrize("c", [1, 2, 3])
def test_interleaved_is_valid_and_idles_as_its_formula_says(p: int, c: int) -> None:
    for m in range(1, 12):
        lists = interleaved(p, m, c)
        assert placement(lists) == [stage % p for stage in range(p * c)]
        for passed in (lists, send_first(lists)):
            validate(with_update(with_reduce(with_comm(passed))), microbatches=m)
        if m % p == 0:
            timeline = simulate(lists, {"F": 1, "B": 2})
            assert timeline.span == 3 * (m * c + p - 1)  # stages are c times smaller


@pytest.mark.parametrize(("p", "m", "c"), [(2, 4, 2), (3, 6, 2), (4, 8, 2), (4, 8, 3)])
def test_interleaved_is_torchs_own(p: int, m: int, c: int) -> None:
    for rank, actions in enumerate(interleaved(p, m, c)):
        warm = min(m * c, 2 * (p - 1 - rank) + (c - 1) * p)

        def ahead(step: int, rank: int = rank) -> int:
            return step // p % c * p + rank

        def back(step: int, rank: int = rank, warm: int = warm) -> int:
            return (c - 1 - (step - warm) // p % c) * p + rank

        made = theirs._get_1f1b_rank_ops(c, p, warm, m * c - warm, warm, rank, ahead, back)
        op = {"FORWARD": "F", "FULL_BACKWARD": "B"}
        ops = [(a.stage_index, op[a.computation_type.name], a.microbatch_index) for a in made if a]
        assert [(a.stage, a.op, a.mb) for a in actions] == ops


def drawing(lists) -> list[str]:
    return simulate(lists, {"F": 1, "B": 1, "I": 1, "W": 1}).draw().splitlines()


def full(lists):
    """Add every pass of a synchronous step with tied weights over data ranks."""
    return with_comm(with_update(with_tie(with_reduce(lists))))


# fmt: off
DRAWINGS = {
    "gpipe is all forwards, then all backwards": (gpipe(3, 4), [
        "F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3",
        ".  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .",
        ".  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .",
    ]),
    "1f1b alternates after a warm-up that shrinks by one per stage": (one_f_one_b(4, 5), [
        "F0 F1 F2 F3 .  .  .  B0 F4 B1 .  B2 .  B3 .  B4",
        ".  F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4 .",
        ".  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .  .",
        ".  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .  .",
    ]),
    "1f1b with fewer micro-batches than stages": (one_f_one_b(4, 2), [
        "F0 F1 .  .  .  .  .  B0 .  B1",
        ".  F0 F1 .  .  .  B0 .  B1 .",
        ".  .  F0 F1 .  B0 .  B1 .  .",
        ".  .  .  F0 B0 F1 B1 .  .  .",
    ]),
    "naive model parallelism is gpipe with one micro-batch": (gpipe(3, 1), [
        "F0 .  .  .  .  B0",
        ".  F0 .  .  B0 .",
        ".  .  F0 B0 .  .",
    ]),
    "split backwards let W fill the bubbles": (split_backward(one_f_one_b(2, 3), lag=1), [
        "F0 F1 .  I0 F2 I1 W0 .  I2 W1 W2",
        ".  F0 I0 F1 I1 W0 F2 I2 W1 W2 .",
    ]),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_schedule_is_as_it_is_drawn(name: str) -> None:
    lists, rows = DRAWINGS[name]
    assert drawing(lists) == rows


def test_a_backward_twice_as_long_is_drawn_twice_as_wide() -> None:
    assert simulate(one_f_one_b(2, 2), {"F": 1, "B": 2}).draw().splitlines() == [
        "F0 F1 .  .  B0 -  .  B1 -",
        ".  F0 B0 -  F1 B1 -  .  .",
    ]


def test_the_lag_of_a_weight_gradient_is_counted_over_the_stages_of_a_rank() -> None:
    both = lists_of("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
    assert split_backward(both, lag=1) == lists_of(
        "0F0 1F0 1I0 0I0 1W0 0F1 1F1 1I1 0W0 0I1 1W1 0W1"
    )


def test_send_first_splits_what_another_rank_waits_for_and_nothing_else() -> None:
    assert send_first(one_f_one_b(2, 2)) == lists_of(
        "0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1I1 1W1"
    )
    assert send_first(gpipe(1, 2)) == gpipe(1, 2)
    both = [one_f_one_b(2, 1)[0] + one_f_one_b(2, 1)[1]]  # two stages on one rank
    assert send_first(both) == both
    (_, last) = with_comm(send_first(one_f_one_b(2, 1)))
    assert [a.op for a in last] == ["RECV_F", "F", "I", "SEND_B", "W"]
    with pytest.raises(ValueError, match="send_first: the lists already have sends"):
        send_first(with_comm(gpipe(2, 1)))
# fmt: on


def test_gradient_accumulation_is_gpipe_with_one_stage() -> None:
    assert gpipe(1, 2) == lists_of("0F0 0F1 0B0 0B1")
    assert one_f_one_b(1, 2) == lists_of("0F0 0B0 0F1 0B1")


def torch_order(schedule, p: int, m: int):
    made = schedule.__new__(schedule)
    made._num_stages, made._n_microbatches = p, m
    return made._get_pipeline_order()


def as_ours(rows) -> list[list[Action]]:
    """Convert torch's actions through the interchange text, without idle slots and REDUCE_GRAD."""
    text = "\n".join(",".join("" if a is None else str(a) for a in rows[r]) for r in sorted(rows))
    return [[a for a in row if a.op != "REDUCE"] for row in from_csv(text)]


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 5), (4, 4), (4, 9)])
def test_equal_to_torchs_generators_where_those_are_right(p: int, m: int) -> None:
    assert as_ours(torch_order(theirs.ScheduleGPipe, p, m)) == gpipe(p, m)
    torchs = as_ours(torch_order(theirs.Schedule1F1B, p, m))
    assert torchs[:-1] == one_f_one_b(p, m)[:-1]
    # torch lists its last rank from micro-batch 1 on (2.13); its runtime does not use that list
    assert [a._replace(mb=a.mb - (a.op == "F")) for a in torchs[-1]] == one_f_one_b(p, m)[-1]
    with pytest.raises(ValueError, match=f"stage {p - 1} micro-batch 0 has 0 F"):
        validate(torchs, microbatches=m)


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 8)])
def test_torchs_zero_bubble_is_1f1b_without_its_w(p: int, m: int) -> None:
    rows = {}
    for rank in range(p):
        made = theirs.ScheduleInterleavedZeroBubble.__new__(theirs.ScheduleInterleavedZeroBubble)
        made.n_local_stages, made.pp_group_size, made._n_microbatches = 1, p, m
        made.microbatches_per_round, made.number_of_rounds = p, 1
        rows[rank] = made._calculate_single_rank_operations(rank)
    torchs = [[a for a in row if a.op != "W"] for row in as_ours(rows)]
    ours = [[a for a in row if a.op != "W"] for row in split_backward(one_f_one_b(p, m))]
    assert torchs == ours


def test_torch_reads_our_text_and_we_read_torchs() -> None:
    ours = with_comm(with_reduce(split_backward(one_f_one_b(3, 4))))
    text = to_csv(ours)
    for row in text.splitlines():
        parsed = [theirs._Action.from_str(cell) for cell in row.split(",")]
        assert ",".join(map(str, parsed)) == row
    assert from_csv(text) == ours


def test_torch_lowers_to_the_same_sends_and_receives() -> None:
    compute = one_f_one_b(3, 4)
    parsed = {r: [theirs._Action.from_str(str(a)) for a in row] for r, row in enumerate(compute)}
    torchs = theirs._add_send_recv(parsed, lambda stage: stage, 3)
    for rank, actions in enumerate(with_comm(compute)):
        assert sorted(map(str, torchs[rank])) == sorted(map(str, actions))


def test_deps_of_compute_and_lowered_actions() -> None:
    assert deps(Action("F", 1, 2, 3), 3) == (Action("UPDATE", 1, ver=3), Action("F", 0, 2))
    assert deps(Action("B", 1, 2), 3, [0, 1, 2]) == (Action("F", 1, 2), Action("RECV_B", 1, 2))
    assert deps(Action("B", 1, 2), 3, [0, 1, 1]) == (Action("F", 1, 2), Action("I", 2, 2))
    assert deps(Action("RECV_B", 1, 2), 3, [0, 1, 2]) == (Action("SEND_B", 2, 2),)
    assert gives(Action("B", 1, 2, 5)) == (Action("I", 1, 2), Action("W", 1, 2))
    with pytest.raises(ValueError, match="unknown op 'G'"):
        deps(Action("G", 0, 0), 1)


# --------------------------------------------------------------------------------------- passes


def test_with_comm_sends_where_data_exists_and_receives_where_it_is_used() -> None:
    assert with_comm(one_f_one_b(2, 2)) == lists_of(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    with pytest.raises(ValueError, match="already have sends and receives"):
        with_comm(with_comm(gpipe(2, 1)))


def test_with_comm_is_silent_between_neighbours_on_one_rank() -> None:
    vee = lists_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert placement(vee) == [0, 1, 1, 0]
    assert with_comm(vee) == lists_of(
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    )
    validate(full(vee))
    assert with_tie(gpipe(1, 2)) == gpipe(1, 2)  # a single stage shares the parameter with no other
    assert with_tie(vee) == lists_of("0F0 3F0 3B0 0B0 0TIE", "1F0 2F0 2B0 1B0")
    assert links(with_tie(with_comm(vee))) == links(with_comm(vee))  # both ends on one rank


def test_links_are_shared_by_both_ends_and_separate_by_payload() -> None:
    lists = with_tie(with_comm(gpipe(3, 1)))
    assert link(Action("SEND_F", 0, 0), [0, 1, 2]) == link(Action("RECV_F", 1, 0), [0, 1, 2])
    assert [tuple(wire) for wire in links(lists)] == [
        ("B", 1, 0), ("B", 2, 1), ("F", 0, 1), ("F", 1, 2), ("TIE", 0, 2), ("TIE", 2, 0),
    ]  # fmt: skip
    untied = with_comm(gpipe(3, 1))  # a model whose ends share no weight
    assert links(untied) == [wire for wire in links(lists) if wire.kind != "TIE"]


def test_with_reduce_once_or_after_each_micro_batch() -> None:
    assert with_reduce(gpipe(1, 2)) == lists_of("0F0 0F1 0B0 0B1 0REDUCE")
    assert with_reduce(gpipe(1, 2), each=True) == lists_of("0F0 0F1 0B0 0REDUCE 0B1 0REDUCE")
    split = split_backward(gpipe(1, 2), lag=1)
    assert with_reduce(split) == lists_of("0F0 0F1 0I0 0I1 0W0 0W1 0REDUCE")


def test_passes_leave_their_input_alone() -> None:
    lists = one_f_one_b(3, 4)
    before = [list(actions) for actions in lists]
    full(split_backward(lists))
    assert lists == before
    for p, m in ((1, 2), (3, 4)):  # with a single stage, some have nothing to add
        lists = one_f_one_b(p, m)
        for changed in (
            split_backward(lists), send_first(lists), with_comm(lists), with_reduce(lists),
            with_tie(lists), with_update(lists),
        ):  # fmt: skip
            assert not {id(changed), *map(id, changed)} & {id(lists), *map(id, lists)}


# ----------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("generate", GENERATORS)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (4, 7)])
def test_what_we_generate_is_valid(generate, p: int, m: int) -> None:
    lists = generate(p, m)
    validate(lists, microbatches=m)
    for lag in (0, 1, m + 1):
        validate(full(split_backward(lists, lag=lag)), microbatches=m)


def test_asynchronous_lists_fit_the_versions() -> None:
    two = lists_of(
        "0F0 0F1 0B0 0UPDATE@1 0F2 0B1 0UPDATE@2 0F3@1 0B2 0UPDATE@3 0B3@1 0UPDATE@4",
        "1F0 1B0 1UPDATE@1 1F1@1 1B1@1 1UPDATE@2 1F2@2 1B2@2 1UPDATE@3 1F3@3 1B3@3 1UPDATE@4",
    )
    for most, words in (
        (0, "0UPDATE@2 applies the gradient of 0B1, which is 1 weight version old"),
        (1, "0UPDATE@3 applies the gradient of 0B2, which is 2 weight versions old"),
    ):
        with pytest.raises(ValueError, match=words):
            validate(two, staleness=most)
    validate(two, staleness=2)


def test_an_update_is_as_old_as_the_oldest_of_its_gradients() -> None:
    for pair in ("0B1 0B2@1", "0B2@1 0B1"):
        mixed = lists_of(f"0F0 0F1 0B0 0UPDATE@1 0F2@1 {pair} 0UPDATE@2")
        words = "applies the gradient of 0B1, which is 1 weight version old"
        with pytest.raises(ValueError, match=words):
            validate(mixed)
        validate(mixed, staleness=1)


ZERO = full(one_f_one_b(3, 2))
VEE = with_update(with_tie(lists_of("0F0 3F0 3I0 0B0 3W0", "1F0 2F0 2B0 1B0")))
SPLIT = with_comm(with_update(split_backward(one_f_one_b(2, 2))))


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (edit(gpipe(3, 2), "1F1"), "stage 1 micro-batch 1 has 0 F, 1 B, 0 I and 0 W"),
        (edit(gpipe(3, 2), "1B0", "1B0", "1B0"), "stage 1 micro-batch 0 has 1 F, 2 B"),
        (edit(SPLIT, "0W1"), "stage 0 micro-batch 1 has 1 F, 0 B, 1 I and 0 W"),
        (swap(SPLIT, "0I0", "0W0"), "0W0 comes before 0I0"),
        (swap(gpipe(2, 2), "1F1", "1B1"), "1B1 comes before 1F1"),
        (edit(gpipe(2, 2), "1F1", "0F1"), "stage 0 must be on one rank, got ranks 0 and 1"),
        (gpipe(4, 1)[:2] + gpipe(4, 1)[3:], r"numbered .* without gaps, got \[0, 1, 3\]"),
        (edit(gpipe(2, 1), "1F0", "1F0@1"),
         "1B0 uses version 0 of the weights, but the F of the same micro-batch read version 1"),
        (edit(ZERO, "1REDUCE"), "stage 1: the gradients of 1B0 1B1 have no REDUCE before UPDATE"),
        (swap(ZERO, "1B1", "1REDUCE"),
         "stage 1: the gradients of 1B1 have no REDUCE before UPDATE"),
        (swap(ZERO, "0TIE", "0REDUCE"),
         "stage 0: the gradients of 0B0 0B1 have no REDUCE before TIE"),
        (edit(ZERO, "2TIE"), "stage 2: the gradients of 2B0 2B1 have no TIE before UPDATE"),
        (swap(VEE, "3W0", "0TIE"), "stage 0: the gradients of 3W0 have no TIE before UPDATE"),
        (edit(ZERO, "1REDUCE", "1REDUCE", "1TIE"),
         r"1TIE: a TIE is allowed only on stages \[0, 2\]"),
        (edit(ZERO, "1F1", "99REDUCE", "1F1"), r"numbered .* without gaps, got \[0, 1, 2, 99\]"),
        (edit(gpipe(2, 1), "1B0", "1B0", "1F7"), "stage 0 micro-batch 1 has 0 F, 0 B"),
        (swap(gpipe(2, 2), "0F0", "0B0"), "0B0 comes before 0F0"),
    ],
)  # fmt: skip
def test_each_rule_by_its_violation(lists, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        validate(lists)
    assert "\n" not in str(error.value)


def test_deadlocks_name_what_each_rank_waits_for() -> None:
    lists = swap(gpipe(2, 1), "0F0", "0B0")
    words = "rank 0 at 0B0 waits for 0F0 and 1I0; rank 1 at 1F0 waits"
    with pytest.raises(ValueError, match=words):
        order(lists)


def test_ties_meet() -> None:
    early = with_comm(with_tie(gpipe(3, 1)))
    early[0] = [early[0][-1], *early[0][:-1]]  # rank 0 ties before it has sent anything
    with pytest.raises(ValueError, match="rank 0 at 0TIE waits for 2TIE"):
        order(early)


def test_acknowledged_sends_follow_from_the_messages_that_answer_them() -> None:
    known = acknowledged(with_comm(one_f_one_b(2, 3)))
    text = {str(a): " ".join(map(str, sends)) for a, sends in known.items()}
    assert text == {
        "0RECV_B0": "0SEND_F0", "0RECV_B1": "0SEND_F1", "0RECV_B2": "0SEND_F2", "1RECV_F0": "",
        "1RECV_F1": "", "1RECV_F2": "1SEND_B0",
    }  # fmt: skip


def test_few_sends_are_ever_kept() -> None:
    p, m = 4, 32
    lists = with_comm(one_f_one_b(p, m))
    known = acknowledged(lists)
    for rank, actions in enumerate(lists):
        kept = peak = 0
        for a in actions:
            kept += a.op in ("SEND_F", "SEND_B")
            peak = max(peak, kept)
            kept -= len(known.get(a, ()))
        assert peak <= 2 * (p - rank) + 1, (rank, peak)


# ------------------------------------------------------------ times at which receives are posted


def stuck_if_drained(lists, posts) -> bool:
    """Return True if ranks deadlock that, before they compute, wait for all that they started.

    This reimplements the rule of NCCL with a host that waits for its device: a message is a pair of
    kernels that end together, and ranks take turns, one action each. A TIE is a message in each
    direction, and the sum of both, unless both ends are on one rank.
    """
    both = 1 + (placement(lists)[0] != placement(lists)[-1])
    met: set[tuple[int, int]] = set()  # (rank, number of its TIE)
    ends: dict[tuple, set[int]] = {}  # (payload, receiving stage, micro-batch) -> ranks begun
    at, begun = [0] * len(lists), [None] * len(lists)

    def begin(rank: int, op: str, stage: int, mb: int) -> None:
        ends.setdefault((op, stage, mb), set()).add(rank)

    while True:
        before = list(at), list(begun)
        for rank, actions in enumerate(lists):
            if at[rank] == len(actions):
                continue
            action = actions[at[rank]]
            if begun[rank] != at[rank]:
                begun[rank] = at[rank]
                for receive in posts.get((rank, at[rank]), ()):
                    begin(rank, receive.op, receive.stage, receive.mb)
            if action.op in ("SEND_F", "SEND_B"):
                step = 1 if action.op == "SEND_F" else -1
                begin(rank, action.op.replace("SEND", "RECV"), action.stage + step, action.mb)
            elif action.op in ("RECV_F", "RECV_B"):
                assert rank in ends[action.op, action.stage, action.mb], "taken, never posted"
            elif any(who == {rank} for who in ends.values()):
                continue
            elif action.op == "TIE":
                number = sum(a.op == "TIE" for a in actions[: at[rank]])
                met.add((rank, number))
                if sum(n == number for _, n in met) < both:
                    continue
            at[rank] += 1
        if (list(at), list(begun)) == before:
            return at != [len(actions) for actions in lists]


def at_their_places(lists):
    return {
        (rank, index): [action]
        for rank, actions in enumerate(lists)
        for index, action in enumerate(actions)
        if action.op.startswith("RECV")
    }


def early(lists, posts) -> dict[str, str]:
    """Return receive -> the action before which it is posted, if that is not itself."""
    return {
        str(receive): str(lists[rank][index])
        for (rank, index), receives in posts.items()
        for receive in receives
        if receive != lists[rank][index]
    }


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_rank_computes_under_a_message_that_waits_for_it(p: int, name: str) -> None:
    counts = (2 * p,) if p == 8 else (1, 2, p - 1, p + 1, 2 * p, 4 * p)
    splits = (list, send_first)
    if FAMILIES[name].generate.__module__.endswith((".gpipe", ".one_f_one_b", ".interleaved")):
        splits += (split_backward, lambda x: split_backward(x, lag=p - 1))
    stuck = 0
    for m, c in product(counts, (2, 3) if FAMILIES[name].chunks is None else (0,)):
        if m < FAMILIES[name].least(p):
            continue
        made = FAMILIES[name].make(p, m, c or FAMILIES[name].chunks)
        for split in splits:
            lists = with_comm(split(made))
            if not FAMILIES[name].asynchronous:
                lists = with_update(with_tie(lists))
            posts = posted_at_need(lists)
            places = at_their_places(lists)
            assert sorted(chain(*posts.values())) == sorted(chain(*places.values()))
            assert not stuck_if_drained(lists, posts)
            ahead = posted_ahead(lists)
            assert stuck_if_drained(lists, ahead)  # from the first action on: every list
            needs = stuck_if_drained(lists, places)
            assert needs == bool(early(lists, posts)) == (posts != places)
            stuck += needs
    if name in ("gpipe", "1f1b", "interleaved"):
        assert (stuck > 0) == (name == "interleaved")


def test_receives_that_must_be_early_are_those_on_their_way() -> None:
    lists = with_comm(interleaved(2, 4, 2))
    moved = early(lists, posted_at_need(lists))
    assert (moved["2RECV_B1"], moved["1RECV_B0"]) == ("0F3", "1F2")


def test_a_rank_at_a_tie_has_posted_what_the_other_end_must_send_first() -> None:
    """There is an update after each micro-batch. 0F1's message is in flight when rank 1 reaches its
    first TIE, and rank 0 does not reach its own before that message has ended."""
    end = "{0}REDUCE_GRAD,{0}TIE,{0}UPDATE@{1}"
    rows = ("0F0,0F1,0B0", "0B1"), ("1F0,1B0", "1F1@1,1B1@1")
    text = [",".join((a, end.format(s, 1), b, end.format(s, 2))) for s, (a, b) in enumerate(rows)]
    lists = with_comm(from_csv("\n".join(text)))
    validate(lists, staleness=1)
    posts = posted_at_need(lists)
    assert early(lists, posts) == {"1RECV_F1": "1TIE"}
    assert stuck_if_drained(lists, at_their_places(lists))
    assert not stuck_if_drained(lists, posts)


def test_one_receive_of_each_link_is_posted_ahead() -> None:
    lists = with_comm(one_f_one_b(3, 2))
    posts = posted_ahead(lists)
    drawn = {(rank, str(lists[rank][i])): list(map(str, rs)) for (rank, i), rs in posts.items()}
    assert drawn == {
        (0, "0F0"): ["0RECV_B0"], (0, "0RECV_B0"): ["0RECV_B1"],
        (1, "1RECV_F0"): ["1RECV_F0", "1RECV_F1", "1RECV_B0"], (1, "1RECV_B0"): ["1RECV_B1"],
        (2, "2RECV_F0"): ["2RECV_F0", "2RECV_F1"],
    }  # fmt: skip
