"""Every schedule: against torch's generators, the papers' closed forms, and its own drawing."""

from pathlib import Path

import pytest
import torch.distributed.pipelining.schedules as theirs
from refused import check, one_line

from warpweave.parallel.schedule import (
    FAMILIES,
    families,
    find_family,
    from_csv,
    placement,
    send_first,
    to_csv,
    validate,
    with_comm,
    with_reduce,
    with_tie,
    with_update,
)
from warpweave.parallel.schedule.__main__ import main
from warpweave.parallel.simulate import simulate

SYNCHRONOUS = [name for name, family in FAMILIES.items() if not family.asynchronous]
RANKS = (1, 2, 3, 4, 8)


def stages(name: str) -> tuple[int, ...]:
    """List the stages per rank to try."""
    return (1, 2, 3) if FAMILIES[name].chunks is None else (FAMILIES[name].chunks,)


def counts(name: str, p: int) -> list[int]:
    """List the micro-batches to try: fewer than ranks, as many, more; three for many ranks."""
    tried = {1, 2, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 4 * p} if p < 8 else {1, p + 1, 2 * p}
    return sorted(m for m in tried if m >= FAMILIES[name].least(p))


def test_every_file_of_the_folder_is_known():
    files = {path.stem for path in Path(families.__path__[0]).glob("*.py")} - {"__init__"}
    assert {family.generate.__module__.rpartition(".")[2] for family in FAMILIES.values()} == files
    assert {"gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v",
            "v-half", "v-min"} <= set(SYNCHRONOUS)  # fmt: skip


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("p", RANKS)
def test_lists_are_complete_and_free_of_deadlock(name: str, p: int):
    for c in stages(name):
        for m in counts(name, p):
            lists = FAMILIES[name].make(p, m, c)
            assert len(placement(lists)) == p * c
            validate(lists, microbatches=m)
            for passed in (lists, send_first(lists)):
                whole = with_comm(with_update(with_tie(with_reduce(passed))))
                validate(whole, microbatches=m)
                assert from_csv(to_csv(whole)) == whole


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_the_gradients_of_a_stage_are_summed_in_one_order(name: str):
    for p in (2, 4):
        for m in counts(name, p):
            for actions in FAMILIES[name].make(p, m, stages(name)[-1]):
                for stage in {a.stage for a in actions}:
                    for ops in ("BI", "BW"):
                        order = [a.mb for a in actions if a.stage == stage and a.op in ops]
                        assert order == list(range(m))


# ------------------------------------------------------------------------------------- torch


def torchs(schedule: type, p: int, m: int, c: int):
    """Return the lists of one of torch's generators, made without stages and a process group."""
    rows = []
    for rank in range(p):
        made = schedule.__new__(schedule)
        made.pp_group_size, made._n_microbatches = p, m
        made._num_stages = made.num_stages = p * c
        made.n_local_stages, made._stages = c, [None] * c
        made.number_of_rounds = max(1, m // p)
        made.microbatches_per_round = m // made.number_of_rounds
        row = made._calculate_single_rank_operations(rank)
        rows.append(",".join("" if a is None else str(a) for a in row))
    return from_csv("\n".join(rows))


@pytest.mark.parametrize(
    ("name", "schedule", "chunks"),
    [
        ("interleaved", theirs.ScheduleInterleaved1F1B, (1, 2, 3)),
        ("looped-bfs", theirs.ScheduleLoopedBFS, (1, 2, 3)),
        ("zb-h1", theirs.ScheduleInterleavedZeroBubble, (1, 2, 3)),
        ("zb-v", theirs.ScheduleZBVZeroBubble, (2,)),
        ("dualpipe-v", theirs.ScheduleDualPipeV, (2,)),
    ],
)
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_lists_are_torchs_action_for_action(name: str, schedule: type, chunks, p: int):
    for m in counts(name, p):
        if m % max(1, m // p):  # torch rejects others
            continue
        for c in chunks:
            made = torchs(schedule, p, m, c)
            if name == "looped-bfs":  # torch runs its backward from the last to the first
                mirrored = {"F": lambda i: i, "B": lambda i, m=m: m - 1 - i}
                made = [[a._replace(mb=mirrored[a.op](a.mb)) for a in row] for row in made]
            assert FAMILIES[name].make(p, m, c) == made


def test_a_cell_is_written_as_torch_reads_it():
    text = to_csv(with_comm(FAMILIES["dualpipe-v"].make(2, 4, 2)))
    for row in text.splitlines():
        for field in row.split(","):
            assert str(theirs._Action.from_str(field)) == field
    assert text.count("OVERLAP_F_B") == 2 * 3  # per row: two in the steady part, one at its end


# ------------------------------------------------------------------------------- closed forms


PRICES = [(1, 1, 1), (1, 1.25, 0.75), (2, 1.5, 1.25)]  # F, I, W; their sums are exact


def timeline(name: str, p: int, m: int, price, c: int = 1, **more):
    f, i, w = (each / c for each in price)
    return simulate(FAMILIES[name].make(p, m, c), {"F": f, "I": i, "W": w, **more})


def extra(line, m: int, price) -> tuple[float, float]:
    """Return (of the span, of the widest rank) the excess over the work of m micro-batches."""
    return line.span - m * sum(price), max(line.width) - m * sum(price)


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_bubbles_are_the_closed_forms(p: int, price):
    f, i, w = price
    skew = p - 1
    for m in (2 * p, 3 * p, 4 * p):
        for name in ("gpipe", "1f1b"):
            assert extra(timeline(name, p, m, price), m, price)[0] == skew * (f + i + w)
        for c in (1, 2, 4):
            for name in ("interleaved", "looped-bfs"):
                line = timeline(name, p, m, price, c)
                assert extra(line, m, price)[0] == pytest.approx(skew * (f + i + w) / c)
        assert extra(timeline("zb-h1", p, m, price), m, price)[0] == skew * (f + i - w)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zero_bubbles_are_zero_within_each_rank_and_skewed_between_them(p: int):
    price = (1, 1, 1)
    for m in (2 * p - 1, 2 * p, 4 * p):
        assert extra(timeline("zb-h2", p, m, price), m, price) == (p - 1, 0)
        assert extra(timeline("zb-v", p, m, price, 2), m, price) == ((p - 1) / 2, 0)
    for price in PRICES[1:]:  # the width given in the paper for shorter W
        f, i, w = price
        line = timeline("zb-h2", p, 4 * p, price)
        assert extra(line, 4 * p, price)[1] == pytest.approx((p - 1) * (f + i - 2 * w))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("cell", [2, 2.5, 3])
def test_dualpipe_v_idles_as_deepseek_says(p: int, cell: float):
    """(PP/2 - 1)(F&B + B - 3W) with PP = 2 p is the maximum idle time over ranks."""
    for m in (2 * p, 4 * p):
        lists = FAMILIES["dualpipe-v"].make(p, m, 2)
        line = simulate(lists, {"F": 1, "I": 1, "W": 1, "OVERLAP_F_B": cell})
        assert max(line.idle) == (p - 1) * (cell + 2 - 3)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 8, 16])
def test_peak_activations_are_the_closed_forms(p: int):
    m = 4 * p

    def peaks(name: str, c: int = 1) -> tuple[float, ...]:
        return timeline(name, p, m, (1, 1, 1), c).activations

    assert peaks("gpipe") == peaks("looped-bfs", 2) == (m,) * p
    assert peaks("1f1b") == tuple(p - r for r in range(p))
    assert peaks("interleaved", 2)[0] == p * (1 + (p - 1) / (2 * p))
    assert peaks("zb-h1") == (p,) * p
    assert peaks("zb-h2") == (2 * p - 1,) * p
    assert peaks("zb-v", 2) == (p,) * p
    assert max(peaks("dualpipe-v", 2)) == p + 0.5
    assert max(peaks("v-half", 2)) <= (p + 3) / 2
    assert max(peaks("v-min", 2)) <= (p + 4) / 3


@pytest.mark.parametrize("p", [4, 8, 16])
def test_controllable_memory_costs_the_bubble_that_the_paper_says(p: int):
    """A half and two thirds of 1F1B's, within two steps of half a rank for each seam."""
    m, price = 4 * p, (1, 1, 1)
    whole = extra(timeline("1f1b", p, m, price), m, price)[0]
    assert extra(timeline("v-half", p, m, price, 2), m, price)[0] == pytest.approx(whole / 2, abs=3)
    found = extra(timeline("v-min", p, m, price, 2), m, price)[0]
    assert found == pytest.approx(whole * 2 / 3, abs=1)


# ------------------------------------------------------------------------------------ cells


def test_a_cell_begins_when_both_can_and_gives_when_both_have_ended():
    lists = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1")
    validate(lists)
    assert simulate(lists, {"F": 1, "B": 2}).draw().splitlines() == [
        "F0  .   .   .   F1& B0  -   .   .   .   B1  -",
        ".   F0  B0  -   .   .   .   F1  B1  -   .   .",
    ]
    cheaper = simulate(lists, {"F": 1, "B": 2, "OVERLAP_F_B": 1.5})
    assert (cheaper.span, cheaper.busy) == (10.5, (4.5, 6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1", "deadlock: rank 0 at 0F1& waits for 1I0"),
        ("(0F0;0B0)OVERLAP_F_B", "rank 0 position 0: 0F0& and 0B0 must be an F and a B"),
        ("0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1", "rank 0 position 1: 0F1& and 0I0 must be"),
    ],
)
def test_what_is_no_cell_is_refused(text: str, message: str):
    check(lambda: validate(from_csv(text)), f"^{message}")


# ---------------------------------------------------------------------------------- drawings


WHOLE, CUT = {"F": 1, "B": 2}, {"F": 1, "I": 1, "W": 1}


@pytest.mark.parametrize(
    ("name", "p", "m", "cost"),
    [
        ("gpipe", 4, 4, WHOLE), ("1f1b", 4, 4, WHOLE), ("interleaved", 2, 4, WHOLE),
        ("looped-bfs", 2, 4, WHOLE), ("zb-h1", 4, 7, CUT), ("zb-h2", 4, 7, CUT),
        ("zb-v", 3, 6, CUT), ("dualpipe-v", 2, 6, CUT), ("v-min", 3, 6, CUT),
    ],
)  # fmt: skip
def test_a_file_draws_what_it_makes(name: str, p: int, m: int, cost):
    family = FAMILIES[name]
    chunks = 2 if name in ("interleaved", "looped-bfs") else family.chunks or 1
    lines = simulate(family.make(p, m, chunks), cost).draw().splitlines()
    module = __import__(family.generate.__module__, fromlist=["__doc__"])
    shown = [line.strip() for line in (module.__doc__ or "").splitlines()]
    begin = next(k for k, line in enumerate(shown) if line and lines[0].startswith(line))
    assert len(shown[begin]) > 60
    for line, drawn in zip(lines, shown[begin : begin + p], strict=True):
        assert line.startswith(drawn)


# -------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("zb-v", (2, 4, 1), "schedule zb-v requires chunks = 2 stages per rank, got 1"),
        ("zb-h2", (2, 4, 2), "schedule zb-h2 requires chunks = 1 stages per rank, got 2"),
        ("dualpipe-v", (3, 5, 2), "at least 6 with schedule dualpipe-v on 3 ranks, got 5"),
        ("v-min", (2, 0, 2), "microbatches must be at least 1, got 0"),
        ("zb-h1", (0, 1, 1), "needs p >= 1 stages and m >= 1 micro-batches, got p=0 m=1"),
        ("zb", (1, 1, 1), "schedule must be one of .*, zb-h1, .* or a path ending in .csv, got "),
    ],
)
def test_what_a_schedule_does_not_have_is_one_line(name: str, numbers, message: str):
    with pytest.raises(ValueError, match=message) as error:
        find_family(name).make(*numbers)
    one_line(error)


# ----------------------------------------------------------------------------- user files


def of_file(path: Path, text: str):
    """Return the family of a file with this text."""
    path.write_text(text)
    return find_family(str(path))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_schedule_is_written_and_read_again(name: str, tmp_path: Path, capsys):
    c = stages(name)[-1]
    for comm in ([], ["--comm"]):
        main([name, "--ranks", "2", "--microbatches", "5", "--chunks", str(c), *comm])
        found = of_file(tmp_path / f"{name}.csv", capsys.readouterr().out)
        assert found.make(2, 5, c) == FAMILIES[name].make(2, 5, c)


def test_a_file_with_torchs_messages_is_read(tmp_path: Path):
    """torch puts receives early, which posts them before they are needed."""
    ranks, every = 4, theirs.ScheduleZBVZeroBubble.__new__(theirs.ScheduleZBVZeroBubble)
    every.pp_group_size, every._n_microbatches, every.num_stages = ranks, 9, 2 * ranks
    order = {r: every._calculate_single_rank_operations(r) for r in range(ranks)}
    place = [min(s, 2 * ranks - 1 - s) for s in range(2 * ranks)]
    order = {r: [a for a in row if a is not None] for r, row in order.items()}
    added = theirs._add_send_recv(order, stage_to_rank=place.__getitem__, num_stages=2 * ranks)
    text = "\n".join(",".join(map(str, added[r])) for r in range(ranks))
    found = of_file(tmp_path / "torchs.csv", text).make(ranks, 9, 2)
    assert found == FAMILIES["zb-v"].make(ranks, 9, 2)


WHOLE_FILE = with_comm(FAMILIES["zb-v"].make(2, 4, 2))


def changed(old: str, new: str = "") -> str:
    """Return the file with one field changed or removed."""
    rows = [row.split(",") for row in to_csv(WHOLE_FILE).splitlines()]
    assert sum(row.count(old) for row in rows) == 1
    rows = [[new if field == old else field for field in row] for row in rows]
    return "\n".join(",".join(filter(None, row)) for row in rows)


def swapped(one: str, two: str) -> str:
    text = f",{to_csv(WHOLE_FILE)}".replace("\n", "\n,")
    assert one in text
    assert two in text
    for old, new in ((one, "?"), (two, one), ("?", two)):
        text = text.replace(f",{old},", f",{new},")
    return text.rstrip(",\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed("3W1"), "stage 3 micro-batch 1 has 1 F, 0 B, 1 I and 0 W; expected F once"),
        (changed("3W1", "3W0"), "rank 0: stage 3 micro-batch 0 has 1 F, 0 B, 1 I and 2 W"),
        (changed("1F2", "0F2"), "stage 0 must be on one rank, got ranks 0 and 1"),
        (changed("2I0", "2X0"), "row 1 field 9: expected .stage..op..micro-batch."),
        (changed("0SEND_F1"), "0SEND_F1 must occur once, but occurs 0 times"),
        (swapped("1RECV_F0", "1RECV_F1"), "link F from rank 0 to 1: message 0 is sent by 0SEND_F0"),
        (changed("0W1", "0REDUCE_GRAD"),
         "rank 0: 0REDUCE is added automatically, depending on other options"),
        (to_csv(with_update(FAMILIES["1f1b"].make(2, 2))),
         "rank 0: 0UPDATE@1 is added automatically"),
        ("0F0,0B0\n\n1F0,1B0", "rank 1: has no action"),
        ("0F0,0B0\n,,", "rank 1: has no action"),
        (swapped("0I0", "0W0"), r"rank 0 position \d+: 0W0 comes before 0I0"),
        (swapped("0F1", "3F0"),
         "deadlock: rank 0 at 3F0 waits for 3RECV_F0; rank 1 at 1RECV_F1 waits"),
        # without messages, for which no order suits both ranks
        ("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0",
         "link F from rank 0 to 1: message 0 is sent by 0SEND_F0, but the receiver expects the "
         "message of 0SEND_F1"),
    ],
)  # fmt: skip
def test_a_file_that_is_subtly_wrong_is_refused_with_the_reason(text, message, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"^schedule .*wrong\.csv: .*{message}") as error:
        of_file(tmp_path / "wrong.csv", text)
    one_line(error)


def test_blank_lines_at_the_end_are_no_ranks(tmp_path: Path):
    lists = FAMILIES["1f1b"].make(2, 3)
    assert of_file(tmp_path / "mine.csv", to_csv(lists) + "\n \n\n").make(2, 3) == lists


def test_a_file_of_other_numbers_is_refused(tmp_path: Path):
    family = of_file(tmp_path / "mine.csv", to_csv(FAMILIES["zb-v"].make(2, 4, 2)))
    for numbers, message in (
        ((3, 4, 2), "is for 2 ranks and 4 micro-batches, got 3 and 4"),
        ((2, 5, 2), "is for 2 ranks and 4 micro-batches, got 2 and 5"),
        ((2, 3, 2), "at least 4 with schedule .*mine.csv on 2 ranks, got 3"),
        ((2, 4, 1), "requires chunks = 2 stages per rank, got 1"),
    ):
        check(lambda numbers=numbers: family.make(*numbers), message)
    none = str(tmp_path / "none.csv")
    check(lambda: find_family(none), r"none\.csv cannot be read: No such file")


def test_more_activations_than_the_limit_are_named():
    lists = FAMILIES["1f1b"].make(4, 8)
    validate(lists, activations=4)
    check(lambda: validate(lists, activations=3), "^rank 0 position 3: 0F3 makes its rank hold 4")
