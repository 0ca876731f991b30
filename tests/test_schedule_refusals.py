"""Each rule of schedules at its edge, with its whole error message.

Lists are long for rules that count: numbers of two digits, several stages, several updates.
`test_schedule.py` has the rules with short lists.
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from schedule_lists import edit, lists_of, swap

from warpweave.parallel.schedule import (
    FAMILIES,
    Action,
    Schedule,
    cut_into_passes,
    find_family,
    from_csv,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    split_backward,
    to_csv,
    validate,
    with_comm,
    with_reduce,
    with_tie,
    with_update,
)
from warpweave.parallel.schedule.__main__ import main
from warpweave.parallel.schedule.actions import cells


def joined(lists: Schedule, name: str) -> Schedule:
    """Return `lists` with the action of this name made the first of a cell."""
    return [[a._replace(joined=str(a) == name) for a in row] for row in lists]


def refusal(lists: Schedule, **options: int) -> str:
    """Return the one-line error of `validate` for them."""
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        validate(lists, **options)
    return str(error.value)


VEE = lists_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
STEP = with_comm(gpipe(2, 2))
LONG = with_comm(gpipe(2, 12))
REDUCED = lists_of("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1 1REDUCE_GRAD")
NO_CELL = "must be an F and a B of different micro-batches to form an overlapped pair"
ONE_OF = "expected F once, and either B once or I and W once each"


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        # ---- cells
        (joined(lists_of("0F0 0B0 0F1"), "0F1"), f"rank 0 position 2: 0F1& and None {NO_CELL}"),
        (joined(lists_of("0F0 0F1 0B0 0B1"), "0B0"), f"rank 0 position 2: 0B0& and 0B1 {NO_CELL}"),
        # ---- each micro-batch once
        (edit(gpipe(2, 12), "1B11"),
         f"rank 1: stage 1 micro-batch 11 has 1 F, 0 B, 0 I and 0 W; {ONE_OF}"),
        (edit(gpipe(2, 12), "0F10", "0F10", "0F10"),
         f"rank 0: stage 0 micro-batch 10 has 2 F, 1 B, 0 I and 0 W; {ONE_OF}"),
        (edit(gpipe(1, 2), "0B1", "0I1", "0B1"),
         f"rank 0: stage 0 micro-batch 1 has 1 F, 1 B, 1 I and 0 W; {ONE_OF}"),
        (edit(gpipe(1, 2), "0B1", "0I1", "0W1", "0W1"),
         f"rank 0: stage 0 micro-batch 1 has 1 F, 0 B, 1 I and 2 W; {ONE_OF}"),
        # ---- versions
        *[
            (edit(split_backward(gpipe(1, 1)), old, f"{old}@1"),
             f"rank 0 position {at}: {old}@1 uses version 1 of the weights, but the F of the "
             "same micro-batch read version 0")
            for at, old in enumerate(("0I0", "0W0"), 1)
        ],
        (lists_of("0F0 0B0 0UPDATE@1 0F1@1 0B1@1 0UPDATE@2 0F2@3 0B2@3 0UPDATE@3"),
         "rank 0 position 6: 0F2@3 reads version 3, but the newest version is 2"),
        *[(lists_of(f"0F0 0B0 0UPDATE@1 0F1@1 0B1@1 0UPDATE@{n}"),
           f"rank 0 position 5: 0UPDATE@{n} produces version {n} of the weights right after "
           "version 1; versions must increase by 1") for n in (1, 3)],
        (lists_of("0F0 0B0 0UPDATE@1 0UPDATE@2"),
         "rank 0 position 3: 0UPDATE@2 has no gradient to apply"),
        (lists_of("0F0 0B0 0UPDATE@1 0F1@1 0B1@1 0UPDATE@2 0F2@2 0B2@2"),
         "stage 0: the gradient of 0B2@2 comes after the last UPDATE"),
        (lists_of("0F0 0F1 0F2 0I0 0I1 0I2 0W1 0UPDATE@1 0W0 0W2"),
         "rank 0 position 7: 0UPDATE@1 must come after the W of micro-batches [0, 2] of stage 0"),
        ([*with_update(gpipe(3, 1))[:2], gpipe(3, 1)[2]],
         "stages 0 to 2 must have the same number of updates, got [1, 1, 0]"),
        # ---- messages
        (edit(with_comm(VEE), "1F0", "1F0", "1SEND_F0"),
         "1SEND_F0 connects stages 1 and 2, which must both exist and be on different ranks"),
        (edit(with_comm(VEE), "0B0", "0B0", "0SEND_B0"),
         "0SEND_B0 connects stages 0 and -1, which must both exist and be on different ranks"),
        (edit(STEP, "0B0", "0B0", "0SEND_B0"),  # the last stage is on another rank
         "0SEND_B0 connects stages 0 and -1, which must both exist and be on different ranks"),
        (edit(STEP, "0F0", "0RECV_F0", "0F0"),
         "0RECV_F0 connects stages 0 and -1, which must both exist and be on different ranks"),
        (edit(with_comm(VEE), "3F0", "3F0", "3RECV_B0"),
         "3RECV_B0 connects stages 3 and 4, which must both exist and be on different ranks"),
        *[(edit(LONG, name), f"{name} must occur once, but occurs 0 times")
          for name in ("0SEND_F11", "1RECV_F11", "1SEND_B11", "0RECV_B11")],
        *[(edit(LONG, name, name, name), f"{name} must occur once, but occurs 2 times")
          for name in ("0SEND_F10", "1RECV_F10", "1SEND_B10", "0RECV_B10")],
        (swap(swap(LONG, "1RECV_F10", "1RECV_F11"), "1F10", "1F11"),
         "link F from rank 0 to 1: message 10 is sent by 0SEND_F10, but the receiver expects the "
         "message of 0SEND_F11"),
        (swap(swap(LONG, "0RECV_B3", "0RECV_B4"), "0B3", "0B4"),
         "link B from rank 1 to 0: message 3 is sent by 1SEND_B3, but the receiver expects the "
         "message of 1SEND_B4"),
        # ---- sums over data ranks
        (REDUCED, "stage 0: the gradients of 0B0 0B1 have no REDUCE before the end"),
        (edit(REDUCED, "0B0", "0B0", "0REDUCE_GRAD"),
         "stage 0: the gradients of 0B1 have no REDUCE before the end"),
        (edit(with_tie(VEE), "0B0", "0B0", "3TIE"),
         "rank 0 position 4: 3TIE: a TIE is allowed only on stages [0]"),
        # ---- an action of a whole stage has no micro-batch
        *[
            (
                [[*gpipe(1, 12)[0], Action(op, 0, 11, int(op == "UPDATE"))]],
                f"rank 0 position 24: 0{op}11{'@1' * (op == 'UPDATE')}: {op} applies to a whole "
                "stage, so it must not have a micro-batch number",
            )
            for op in ("REDUCE", "TIE", "UPDATE")
        ],
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_its_place(lists: Schedule, message: str) -> None:
    assert refusal(lists) == message


@pytest.mark.parametrize("name", ["0F", "0B", "0SEND_F", "1RECV_F", "1SEND_B", "0RECV_B"])
def test_a_micro_batch_must_be_within_their_number(name: str) -> None:
    """The last one is valid, so a second action of it is rejected for a different reason."""
    stage, op = int(name[0]), name[1:]
    for mb in (-7, -1, 2, 3):
        lists = [[*row] for row in STEP]
        lists[stage].append(Action(op, stage, mb))
        at, shown = len(lists[stage]) - 1, "" if mb == -1 else mb
        words = f"rank {stage} position {at}: {name}{shown}: expected a micro-batch from 0 to 1"
        assert refusal(lists, microbatches=2) == f"{words}, got {mb}"
    lists = [[*row] for row in STEP]
    lists[stage].append(Action(op, stage, 1))
    assert "expected a micro-batch" not in refusal(lists, microbatches=2)


def test_activations_are_counted_over_all_stages_of_a_rank() -> None:
    vee = lists_of("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1")
    validate(vee, activations=4)
    for most, rank, at, action in ((3, 1, 3, "2F1"), (2, 0, 2, "3F0"), (1, 0, 1, "0F1")):
        words = f"rank {rank} position {at}: {action} makes its rank hold {most + 1}"
        assert refusal(vee, activations=most) == f"{words} activations; at most {most} are allowed"
    late = split_backward(gpipe(1, 3), lag=1)  # W, not I, frees an activation
    validate(late, activations=3)
    assert "its rank hold 3 activations; at most 2 are allowed" in refusal(late, activations=2)
    assert refusal(gpipe(2, 1), activations=0).startswith("rank 0 position 0: 0F0 makes its ran")


@pytest.mark.parametrize("p", [1, 3])
def test_pipedream_reduces_before_each_update_and_is_p_minus_1_updates_stale(p) -> None:
    lists = with_comm(with_reduce(pipedream(p, 12)))
    validate(lists, staleness=p - 1, microbatches=12)
    for row in lists:
        for before, after in pairwise(row):
            assert (after.op == "UPDATE") == (before.op == "REDUCE")
    if p > 1:
        words = (
            r"rank 0 position \d+: 0UPDATE@3 applies the gradient of 0B2, which is 2 weight "
            r"versions old; the limit \(staleness\) is 1"
        )
        assert re.fullmatch(words, refusal(lists, staleness=p - 2))


# ---------------------------------------------------------------------------------------- passes


def test_a_pass_after_the_update_is_refused_with_the_rank_that_has_one() -> None:
    done = with_update(one_f_one_b(3, 2))
    for make in (with_update, with_tie):
        for rank in range(3):
            lists = [done[r] if r == rank else row for r, row in enumerate(one_f_one_b(3, 2))]
            words = f"^{make.__name__}: rank {rank} already has UPDATE; pass lists without it$"
            with pytest.raises(ValueError, match=words):
                make(lists)


@pytest.mark.parametrize("lag", [-1, (2, 1, -3)])
def test_a_negative_lag_is_refused_on_any_rank(lag) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'lag must be >= 0, got {lag}')}$"):
        split_backward(one_f_one_b(3, 2), lag=lag)


def test_a_lag_must_be_given_for_each_rank_or_for_all() -> None:
    with pytest.raises(ValueError, match="shorter"):
        split_backward(one_f_one_b(3, 2), lag=[0, 1])


def test_splitting_the_backwards_takes_cells_apart() -> None:
    cell = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1")
    assert split_backward(cell) == lists_of("0F0 0F1 0I0 0W0 0I1 0W1")


@pytest.mark.parametrize("each", [0, -1, 5, 24])
def test_passes_that_do_not_divide_the_micro_batches_are_refused(each: int) -> None:
    words = f"^12 micro-batches are not divisible by {each} per pass$"
    with pytest.raises(ValueError, match=words):
        cut_into_passes(pipedream(2, 12), each)


@pytest.mark.parametrize("each", [1, 3, 12])
def test_passes_one_after_the_other_are_the_run(each: int) -> None:
    passes = cut_into_passes(pipedream(2, 12), each)
    assert len(passes) == 12 // each
    assert [[a for one in passes for a in one[r]] for r in range(2)] == pipedream(2, 12)


def test_ranks_without_a_stage_are_refused() -> None:
    for make in (interleaved, FAMILIES["zb-h1"].make):
        words = "^interleaved 1F1B needs c >= 1 stages per rank, got c=0$"
        with pytest.raises(ValueError, match=words):
            make(2, 4, 0)


# ------------------------------------------------------------------------------------------ text


def test_numbers_of_several_digits_negative_versions_and_blanks_are_read() -> None:
    whole = [Action("UPDATE", 0, ver=3), Action("TIE", 0)]  # without a micro-batch
    lists = [[Action(op, 12, 345, 67) for op in "FB"], [], [Action("I", 3, 10, -2), *whole]]
    assert to_csv(lists) == "12F345@67,12B345@67\n\n3I10@-2,0UPDATE@3,0TIE\n"
    assert from_csv(to_csv(lists)) == lists
    assert from_csv(" 0F0 , ,0B10\n( 0F11 ; 1B12 )OVERLAP_F_B ,\n") == [
        [Action("F", 0, 0), Action("B", 0, 10)],
        [Action("F", 0, 11, joined=True), Action("B", 1, 12)],
    ]
    alone = [Action("B", 0, 0), Action("F", 0, 1, joined=True)]  # an invalid list, to print it
    assert list(cells(alone)) == [(alone[0],), (alone[1],)]
    assert to_csv([alone]) == "0B0,0F1\n"


@pytest.mark.parametrize(
    "field",
    ["F0", "0f0", "0X0", "0F0@", "0F0&", "-1F0", "0F 0", "0SENDF0", "0REDUCE1x", "(0F0;0B1)",
     "(0F0;0B1)OVERLAP", "(0F0)OVERLAP_F_B", "(0F0;0X1)OVERLAP_F_B", "(0Y0;0B1)OVERLAP_F_B",
     "(0f0;0B1)OVERLAP_F_B", "(0F0;1)OVERLAP_F_B"],
)  # fmt: skip
def test_a_field_that_is_no_action_is_refused_with_its_row_and_place(field: str) -> None:
    words = "row 2 field 3: expected [stage][op][micro-batch][@version], as in 2F0, or "
    words = f"^{re.escape(words)}[^\n]*, got {re.escape(repr(field))}$"
    with pytest.raises(ValueError, match=words):
        from_csv(f"0F0\n1F0,1B0\n2F0,,2B0,{field},2F1")


def test_the_command_prints_two_ranks_and_four_micro_batches_by_default(capsys) -> None:
    main(["1f1b"])
    assert capsys.readouterr().out == to_csv(one_f_one_b(2, 4))
    main(["interleaved", "--ranks", "3", "--comm"])
    assert capsys.readouterr().out == to_csv(with_comm(interleaved(3, 4, 1)))
    with pytest.raises(SystemExit):
        main(["zb-v"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("error: schedule zb-v requires chunks = 2 stages per rank, got 1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n0F0,0B0", "rank 0: has no action"),  # a leading blank line is a rank
        ("0F0,0B0\n1F0,1B0,1REDUCE_GRAD",
         "rank 1: 1REDUCE is added automatically, depending on other options; remove it"),
    ],
)  # fmt: skip
def test_a_file_is_refused_for_the_first_wrong_rank(text, message, tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^schedule {re.escape(str(path))}: {message}$"):
        find_family(str(path))


@pytest.mark.parametrize("name", ["minecsv", "mine.csv.txt"])
def test_a_schedule_is_read_only_from_a_path_that_ends_in_csv(name) -> None:
    with pytest.raises(ValueError, match=f"a path ending in .csv, got '{name}'$"):
        find_family(name)


def test_a_file_has_as_many_chunks_as_its_fullest_rank(tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,2F0,2B0,0B0\n1F0,1B0")
    assert find_family(str(path)).chunks == 2
    assert find_family(str(path)).make(2, 1, 2) == lists_of("0F0 2F0 2B0 0B0", "1F0 1B0")
