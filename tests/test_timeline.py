"""`warpweave.timeline`: pictures and traces say when each action runs, against times worked out by
hand for 1F1B on two ranks with F = 1 and B = 2."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from warpweave.parallel.schedule import Action, one_f_one_b
from warpweave.parallel.simulate import Cell, Timeline, simulate
from warpweave.timeline import COLOURS, LEFT, ROW, TOP, WIDTH, svg, trace, write_timeline

#            0   1   2   3   4   5   6   7   8
# rank 0    F0  F1  ......  B0      ..  B1        rank 1 runs F0 at 1 and B0 at 2, then F1 and B1
# rank 1    ..  F0  B0      F1  B1      ......
BY_HAND = {
    (0, "0F0"): (0, 1), (0, "0F1"): (1, 2), (0, "0B0"): (4, 6), (0, "0B1"): (7, 9),
    (1, "1F0"): (1, 2), (1, "1B0"): (2, 4), (1, "1F1"): (4, 5), (1, "1B1"): (5, 7),
}  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate(one_f_one_b(2, 2), {"F": 1, "B": 2})


def test_the_picture_has_a_bar_where_each_action_runs(timeline) -> None:
    root = ElementTree.fromstring(svg({"1F1B": timeline}, tooltips=True))
    found, scale = {}, WIDTH / 9
    for rect in root.iter(f"{SVG}rect"):
        if (tip := rect.find(f"{SVG}title")) is not None:
            x, y, width = (float(rect.get(key)) for key in ("x", "y", "width"))
            start, rank = (x - LEFT) / scale, (y - 4 - TOP) / ROW
            action, times = tip.text.split(": ")
            found[rank, action] = (start, start + width / scale)
            assert times == "{:g} to {:g}".format(*BY_HAND[rank, action])
    assert found == {key: pytest.approx(times, abs=0.01) for key, times in BY_HAND.items()}
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert "1F1B: idle 33%, activations of at most 2 micro-batches" in words
    assert sorted(w for w in words if w in ("0", "1")) == ["0"] * 4 + ["1"] * 4
    assert "title>0F" not in svg({"1F1B": timeline})  # without tooltips the picture is small


def test_a_title_is_text_and_not_markup(timeline) -> None:
    root = ElementTree.fromstring(svg({"<b>&": timeline}))
    assert any((text.text or "").startswith("<b>&:") for text in root.iter(f"{SVG}text"))


def test_two_panels_share_one_scale_and_do_not_overlap(timeline) -> None:
    twice = Timeline(
        tuple(tuple(Cell(a, 5 + 2 * s, 5 + 2 * e) for a, s, e in row) for row in timeline.cells),
        timeline.activations, timeline.versions,
    )  # fmt: skip
    root = ElementTree.fromstring(svg({"a": timeline, "b": twice}))
    rects = [r for r in root.iter(f"{SVG}rect") if r.get("class")]
    first, second = rects[:8], rects[8:]
    for a, b in zip(first, second, strict=True):
        # drawn with one decimal each
        assert float(b.get("width")) == pytest.approx(2 * float(a.get("width")), abs=0.2)
        assert float(b.get("x")) - LEFT == pytest.approx(2 * (float(a.get("x")) - LEFT), abs=0.2)
    ends = [float(b.get("x")) + float(b.get("width")) for b in second]
    assert max(ends) == pytest.approx(LEFT + WIDTH, abs=0.2)
    assert max(float(a.get("y")) for a in first) + ROW <= min(float(b.get("y")) for b in second)


def test_the_trace_has_a_complete_event_per_action_in_microseconds(timeline) -> None:
    found = json.loads(json.dumps(trace({"1F1B": timeline}, second=4)))["traceEvents"]
    events = [e for e in found if e["ph"] == "X"]
    assert {(e["tid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events} == {
        key: (250_000 * start, 250_000 * end) for key, (start, end) in BY_HAND.items()
    }
    assert {e["pid"] for e in events} == {0}
    names = {e["args"]["name"] for e in found if e["ph"] == "M"}
    assert names == {"1F1B", "rank 0", "rank 1"}
    b1 = next(e for e in events if e["name"] == "1B1")
    assert b1["args"] == {"stage": 1, "micro-batch": 1, "version": 0}


def test_files_by_their_suffix(timeline, tmp_path) -> None:
    from matplotlib.image import imread

    for suffix in ("svg", "png", "json"):
        write_timeline(tmp_path / "new" / f"t.{suffix}", {"1F1B": timeline})
    assert ElementTree.parse(tmp_path / "new" / "t.svg").getroot().tag == f"{SVG}svg"
    assert len(json.loads((tmp_path / "new" / "t.json").read_text())["traceEvents"]) == 3 + 8
    pixels = (imread(tmp_path / "new" / "t.png")[..., :3] * 255).round().astype(int)
    area = {
        op: (pixels == [int(COLOURS[op][0][i : i + 2], 16) for i in (1, 3, 5)]).all(-1).sum()
        for op in "FB"
    }  # four forwards of one unit of time and four backwards of two, in two rows of nine
    assert area["B"] == pytest.approx(2 * area["F"], rel=0.05)
    assert area["F"] > 0.08 * pixels.shape[0] * pixels.shape[1]
    with pytest.raises(ValueError, match=r"a timeline is a file in \.svg, \.png, \.json, got 'a.p"):
        write_timeline("a.pdf", {"1F1B": timeline})


def test_stages_of_a_rank_are_shaded_and_actions_that_take_no_time_are_not_drawn() -> None:
    row = (
        Cell(Action("F", 0, 0), 0, 1), Cell(Action("F", 2, 0), 1, 2), Cell(Action("F", 4, 0), 2, 3),
        Cell(Action("SEND_F", 4, 0), 3, 3), Cell(Action("UPDATE", 0), 3, 4),
    )  # fmt: skip
    picture = svg({"chunks": Timeline((row,), (1,), (1,))})
    light, dark = COLOURS["F"]
    assert [picture.count(colour) for colour in (light, "#5f98d2", dark)] == [1, 1, 1]
    assert picture.count('class="c') == 4


def test_waiting_in_a_receive_is_idle_as_nothing_is() -> None:
    """A measured receive lasts; a timeline of a simulation has a gap there."""
    rows = (
        (Cell(Action("F", 0, 0), 0, 1), Cell(Action("RECV_B", 0, 0), 1, 3),
         Cell(Action("B", 0, 0), 3, 4)),
        (Cell(Action("RECV_F", 1, 0), 0, 1), Cell(Action("F", 1, 0), 1, 2),
         Cell(Action("B", 1, 0), 2, 3)),
    )  # fmt: skip
    for waits in (True, False):
        kept = tuple(
            tuple(c for c in row if waits or not c.action.op.startswith("RECV")) for row in rows
        )
        assert "idle 50%, " in svg({"measured": Timeline(kept, (1, 1), (1, 1))})
