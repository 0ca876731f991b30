"""PipeDream and PipeDream-2BW: the lists, the passes that they repeat, and training by them.

The truth is the delayed rule in plain autograd: every stage's gradient at the versions of all
stages that the papers say, in a history of weights that knows of no schedule.
"""

from __future__ import annotations

import pytest

from warpweave.parallel.schedule import (
    FAMILIES,
    open_run,
    pipedream,
    pipedream_2bw,
    send_first,
    split_backward,
    validate,
    with_comm,
    with_reduce,
)
from warpweave.parallel.simulate import simulate

NAMES = ("pipedream", "pipedream-vs", "pipedream-2bw")


def _reads(lists, s: int) -> list[int]:
    """The versions that the forwards of stage s read, in the order of micro-batches."""
    return [a.ver for a in sorted(a for a in lists[s] if a.op == "F")]


def _drawn(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def test_the_drawing_is_the_papers() -> None:
    drawn = """
        F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  F4 B2 -  .  B3 -  .  B4 -
        .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  F4 B3 -  .  B4 -  .  .
        .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  F4 B4 -  .  .  .  .
    """
    for lists in (pipedream(3, 5), pipedream_2bw(3, 5, 1)):
        assert _drawn(simulate(lists, {"F": 1, "B": 2}).draw()) == _drawn(drawn)


def test_forwards_read_the_versions_of_the_papers() -> None:
    assert [_reads(pipedream(3, 7), s) for s in range(3)] == [
        [0, 0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6],
    ]  # fmt: skip
    for s in range(3):
        assert _reads(pipedream(3, 7, vertical=True), s) == [0, 0, 0, 1, 2, 3, 4]
        assert _reads(pipedream_2bw(3, 3, 4), s) == [0] * 6 + [1] * 3 + [2] * 3
    updates = [[a.ver for a in row if a.op == "UPDATE"] for row in pipedream_2bw(2, 3, 4)]
    assert updates == [[1, 2, 3, 4]] * 2
    with pytest.raises(ValueError, match=r"needs m >= p micro-batches per update, got m=2 p=3"):
        pipedream_2bw(3, 2, 4)
    with pytest.raises(ValueError, match=r"PipeDream needs p >= 1 .* got p=2 m=0"):
        pipedream(2, 0)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_runs_repeat_a_pass_and_keep_as_many_versions_as_the_papers(name: str, p: int) -> None:
    for m in {1, 2, p, p + 1, 2 * p}:
        if name == "pipedream-2bw" and m < p:
            continue
        lists = FAMILIES[name].make(p, m)
        for variant in (lists, split_backward(lists), send_first(lists)):
            run = open_run(with_reduce(variant), m)
            assert run.updates == (1 if name == "pipedream-2bw" else m)
            assert run.ahead == -(-(p - 1) // m)
            delays = {
                "pipedream": tuple(range(p))[::-1],
                "pipedream-vs": (p - 1,) * p,
                "pipedream-2bw": (1,) * p,
            }
            assert run.staleness == delays[name]
            assert max(run.staleness) == FAMILIES[name].staleness(p)
            done = [a for row in run.steady for a in row if a.op in ("B", "W")]
            assert len(done) == p * m == len({a._replace(ver=0) for a in done})
            begun = [len([a for a in row if a.op == "F"]) for row in run.fill]
            assert begun == [p - 1 - s for s in range(p)]
        versions = simulate(lists, {"F": 1, "B": 2}).versions
        assert versions == tuple(delay + 1 for delay in delays[name])


def test_pipedream_idles_at_the_ends_of_the_run_only() -> None:
    """(p-1)(F+B) in all, where 1F1B has that in every step."""
    for p, n in ((2, 9), (4, 40)):
        timeline = simulate(pipedream(p, n), {"F": 1, "B": 2})
        assert set(timeline.idle) == {3 * (p - 1)}
        assert timeline.activations == tuple(p - s for s in range(p))


def test_wrong_versions_are_refused() -> None:
    def changed(ver: int, *cells: str):
        return [[a._replace(ver=ver) if str(a) in cells else a for a in row] for row in lists]

    lists = pipedream(2, 6)
    validate(with_comm(lists), staleness=1)
    with pytest.raises(ValueError, match="applies the gradient of 0B1, 1 versions old, allowed 0"):
        validate(lists)
    with pytest.raises(ValueError, match="0F3@4 reads version 4, but the newest there is is 2"):
        validate(changed(4, "0F3@2", "0B3@2"), staleness=1)
    with pytest.raises(ValueError, match="0B3@1 runs on version 1, its F read version 2"):
        validate(changed(1, "0B3@2"), staleness=1)
    with pytest.raises(ValueError, match="0UPDATE@9 produces version 9 after version 2"):
        validate(changed(9, "0UPDATE@3"), staleness=1)
    split = split_backward(pipedream_2bw(2, 3, 2))
    dropped = [[a for a in row if str(a) != "1W1"] for row in split]
    with pytest.raises(ValueError, match="stage 1 micro-batch 1 has 1 F, 0 B, 1 I and 0 W"):
        validate(dropped, staleness=1)
    with pytest.raises(ValueError, match="no two of 2 passes of 3 micro-batches are the same"):
        open_run(pipedream(2, 6), 3)
