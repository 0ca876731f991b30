"""`warpweave.plan.timeline`: pictures and traces show when each action runs, compared with times
computed by hand for 1F1B on two ranks with F = 1 and B = 2."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from warpweave.parallel.schedule import Action, one_f_one_b
from warpweave.parallel.simulate import Cell, Timeline, simulate
from warpweave.plan.timeline import (
    COLOURS,
    GAP,
    LEFT,
    OTHER,
    ROW,
    TOP,
    WAITING,
    WIDTH,
    bars,
    png,
    svg,
    trace,
    write_timeline,
)

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
            assert times == "{:g} to {:g} s".format(*BY_HAND[rank, action])
    assert found == {key: pytest.approx(times, abs=0.01) for key, times in BY_HAND.items()}
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert "1F1B: idle 33%, activations of at most 2 micro-batches" in words
    numbers = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "n"]
    assert sorted(numbers) == ["0"] * 4 + ["1"] * 4
    assert "title>0F" not in svg({"1F1B": timeline})  # without tooltips the picture is small


def test_time_has_an_axis_with_its_unit_and_every_colour_is_in_the_legend(timeline) -> None:
    """This includes milliseconds, receives and updates, and ranks with several stages."""
    row = (
        Cell(Action("F", 0, 0), 0.0, 0.1), Cell(Action("I", 2, 0), 0.1, 0.2),
        Cell(Action("W", 2, 0), 0.2, 0.3), Cell(Action("RECV_B", 0, 0), 0.3, 0.42),
        Cell(Action("UPDATE", 0), 0.42, 0.45),
    )  # fmt: skip
    every = Timeline((row,), (1,), (1,))
    for given, unit, span, marks, words in (
        (timeline, "s", 9, range(10), ["forward", "backward"]),
        (timeline, "passes", 9, range(10), ["forward", "backward"]),
        (every, "s", 450, range(0, 451, 50),
         ["forward", "input gradients", "weight gradients", "sends, sums and updates",
          "waiting to receive"]),
    ):  # fmt: skip
        root = ElementTree.fromstring(svg({"x": given}, unit=unit))
        texts = [*root.iter(f"{SVG}text")]
        found = {float(t.get("x")): t.text for t in texts if t.get("class") == "tick"}
        assert [*found.values()] == [str(n) for n in marks]
        assert [*found] == pytest.approx([LEFT + WIDTH * n / span for n in marks], abs=0.1)
        said = [text.text for text in texts]
        assert f"time in {'ms' if given is every else unit}" in said
        (first,) = (at for at, word in enumerate(said) if word == "forward")
        assert said[first : first + len(words)] == words
        assert ("darker: a rank's later stages" in said[-1]) == (given is every)
        squares = {p.get("class") for p in root.iter(f"{SVG}path") if p.get("class")}
        assert len(squares) == len(words)
        assert squares <= set(re.findall(r"\.(c\d+){", root.find(f"{SVG}style").text))


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
    right, bottom = map(float, root.get("viewBox").split()[2:])
    assert (root.get("width"), root.get("height")) == (f"{right:.0f}", f"{bottom:.0f}")
    assert max(ends) < right
    assert max(float(text.get("y")) for text in root.iter(f"{SVG}text")) < bottom


def test_the_trace_has_a_complete_event_per_action_in_microseconds(timeline) -> None:
    found = json.loads(json.dumps(trace({"1F1B": timeline}, second=4)))["traceEvents"]
    events = [e for e in found if e["ph"] == "X"]
    assert {(e["tid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events} == {
        key: (250_000 * start, 250_000 * end) for key, (start, end) in BY_HAND.items()
    }


def test_files_by_their_suffix(timeline, tmp_path) -> None:
    from matplotlib.image import imread

    for suffix in ("svg", "png", "json"):
        write_timeline(tmp_path / "a" / "new" / f"t.{suffix}", {"1F1B": timeline})
    picture = ElementTree.parse(tmp_path / "a" / "new" / "t.svg").getroot()
    assert picture.tag == f"{SVG}svg"
    assert len([*picture.iter(f"{SVG}title")]) == 8  # each bar has a label
    assert len(json.loads((tmp_path / "a" / "new" / "t.json").read_text())["traceEvents"]) == 3 + 8
    pixels = (imread(tmp_path / "a" / "new" / "t.png")[..., :3] * 255).round().astype(int)
    area = {
        op: (pixels == [int(COLOURS[op][0][i : i + 2], 16) for i in (1, 3, 5)]).all(-1).sum()
        for op in "FB"
    }  # four forwards of one time unit and four backwards of two, in two rows of nine
    assert area["B"] == pytest.approx(2 * area["F"], rel=0.05)
    assert area["F"] > 0.05 * pixels.shape[0] * pixels.shape[1]
    with pytest.raises(ValueError, match=r"must end in \.svg or \.png or \.json, got 'a.p"):
        write_timeline("a.pdf", {"1F1B": timeline})


def test_stages_of_a_rank_are_shaded_and_instant_actions_are_not_drawn() -> None:
    row = (
        Cell(Action("F", 0, 0), 0, 1), Cell(Action("F", 2, 0), 1, 2), Cell(Action("F", 4, 0), 2, 3),
        Cell(Action("SEND_F", 4, 0), 3, 3), Cell(Action("UPDATE", 0), 3, 4),
    )  # fmt: skip
    picture = svg({"chunks": Timeline((row,), (1,), (1,))})
    light, dark = COLOURS["F"]
    assert [picture.count(colour) for colour in (light, "#5f98d2", dark)] == [1, 1, 1]
    assert picture.count('class="c') == 4 + 2  # plus two squares of the legend


def test_waiting_in_a_receive_is_idle_as_nothing_is() -> None:
    """A measured receive has a duration; a simulated timeline has a gap there."""
    rows = (
        (Cell(Action("F", 0, 0), 0, 1), Cell(Action("RECV_B", 0, 0), 1, 3),
         Cell(Action("B", 0, 0), 3, 4)),
        (Cell(Action("RECV_F", 1, 0), 0, 1), Cell(Action("F", 1, 0), 1, 2),
         Cell(Action("B", 1, 0), 2, 3)),
    )  # fmt: skip
    for waits in (True, False):
        kept = [[c for c in row if waits or not c.action.op.startswith("RECV")] for row in rows]
        line = Timeline(tuple(map(tuple, kept)), (1, 1), (1, 1))
        assert "idle 50%, " in svg({"measured": line})


def test_trace_events_hold_stage_micro_batch_and_version_per_title_and_rank() -> None:
    """No two of these are equal, in two timelines, of one rank and of three."""
    actions = [Action("F", 3, 5, 7), Action("B", 4, 12, 9), Action("W", 2, 0, 1)]
    lone = Timeline(((Cell(actions[0], 0, 1),),), (1,), (1,))
    rows = tuple((Cell(action, 2, 2 + at),) for at, action in enumerate(actions, 1))
    found = trace({"a": lone, "b": Timeline(rows, (1, 1, 1), (1, 1, 1))})["traceEvents"]
    names = [e for e in found if e["ph"] == "M"]
    named = [(e["name"], e["pid"], e.get("tid"), e["args"]["name"]) for e in names]
    assert named == [
        ("process_name", 0, None, "a"), ("thread_name", 0, 0, "rank 0"),
        ("process_name", 1, None, "b"),
        *(("thread_name", 1, rank, f"rank {rank}") for rank in range(3)),
    ]  # fmt: skip
    drawn = [e for e in found if e["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["cat"], e["ts"], e["dur"]) for e in drawn] == [
        (0, 0, str(actions[0]), "F", 0, 1e6),
        *((1, r, str(a), a.op, 2e6, (r + 1) * 1e6) for r, a in enumerate(actions)),
    ]
    assert [e["args"] for e in drawn] == [
        {"stage": a.stage, "micro-batch": a.mb, "version": a.ver} for a in (actions[0], *actions)
    ]


def test_bar_colors_depend_on_the_operation_and_on_the_stages_of_their_rank() -> None:
    """A receive with a duration is waiting; sums, sends and updates are other work."""
    others = ["SEND_F", "SEND_B", "REDUCE", "UPDATE"]
    ops = ["RECV_F", "RECV_B", *others, *COLOURS]
    row = tuple(Cell(Action(op, 1, 0), at, at + 1) for at, op in enumerate(ops))
    two = tuple(Cell(Action(op, 5, 0), 90, 91) for op in COLOURS)
    three = tuple(Cell(Action("F", stage, 0), stage, stage + 1) for stage in (0, 8))
    found = [*bars(Timeline((row, (*row, *two), three), (1, 1, 1), (1, 1, 1)))]
    light, dark = ([shades[end] for shades in COLOURS.values()] for end in (0, 1))
    wanted = [*[WAITING] * 2, *[OTHER] * len(others), *light]
    assert [bar.colour for bar in found] == [*wanted, *wanted, *dark, light[0], dark[0]]
    assert [bar.rank for bar in found] == [0] * len(row) + [1] * (len(row) + 4) + [2] * 2


def test_bars_have_place_and_color_and_a_number_if_wide_enough() -> None:
    """Measured ranks, of which the first does not begin first and one does nothing, with twelve
    pixels per unit of time; in two pictures of different actions."""
    first = (
        (Cell(Action("F", 0, 0), 7, 8), Cell(Action("B", 0, 0), 10, 10.9),
         Cell(Action("UPDATE", 0), 60, 65.5)),
        (),
        (Cell(Action("RECV_F", 2, 3), 5, 6.5), Cell(Action("F", 2, 12), 6.5, 7.5)),
    )  # fmt: skip
    second = ((Cell(Action("W", 0, 4), 40, 44), Cell(Action("I", 1, 5), 44, 46)),)
    shown = {"a": Timeline(first, (1, 1, 1), (1, 1, 1)), "b": Timeline(second, (1,), (1,))}
    root = ElementTree.fromstring(svg(shown))
    style = root.find(f"{SVG}style").text
    fills = dict(re.findall(r"\.(c\d+){fill:(#\w+)}", style))
    drawn = [
        (*(float(rect.get(key)) for key in ("x", "y", "width", "height")), fills[rect.get("class")])
        for rect in root.iter(f"{SVG}rect")
        if rect.get("class")
    ]
    top = {"a": 4 + TOP, "b": 4 + 2 * TOP + 3 * ROW + GAP}
    forward, backward, weight = (COLOURS[op][0] for op in "FBW")
    wanted = [
        ("a", 0, 2, 1, forward), ("a", 0, 5, 0.9, backward), ("a", 0, 55, 5.5, OTHER),
        ("a", 2, 0, 1.5, WAITING), ("a", 2, 1.5, 1, forward),
        ("b", 0, 0, 4, weight), ("b", 0, 4, 2, COLOURS["I"][1]),
    ]  # fmt: skip
    assert drawn == [
        (
            pytest.approx(LEFT + 12 * start, abs=0.06), top[name] + rank * ROW,
            pytest.approx(12 * width, abs=0.06), ROW - 2, colour,
        )
        for name, rank, start, width, colour in wanted
    ]  # fmt: skip
    texts = [*root.iter(f"{SVG}text")]
    numbers = [t for t in texts if t.get("class") == "n"]
    assert [(float(t.get("x")), float(t.get("y")), t.text) for t in numbers] == [
        (pytest.approx(LEFT + 12 * middle, abs=0.06), top[name] + rank * ROW + 13, number)
        for name, rank, middle, number in (
            ("a", 0, 2.5, "0"), ("a", 2, 0.75, "3"), ("a", 2, 2, "12"), ("b", 0, 2, "4"),
            ("b", 0, 5, "5"),
        )
    ]  # fmt: skip
    named = [(t.get("x"), float(t.get("y")), t.text) for t in texts if "rank " in t.text[:5]]
    assert named == [
        ("8", top[name] + rank * ROW + 14, f"rank {rank}")
        for name, rank in (("a", 0), ("a", 1), ("a", 2), ("b", 0))
    ]


def test_a_title_has_what_the_rank_that_holds_most_holds() -> None:
    rows = tuple((Cell(Action("F", rank, 0), 0, 1),) for rank in range(3))
    for held, words in (((1, 3, 2), "3"), ((2, 0.5, 1), "2"), ((0.5, 1, 2.5), "2.5")):
        picture = svg({"x": Timeline(rows, held, (1, 1, 1))})
        assert f"x: idle 0%, activations of at most {words} micro-batches<" in picture


@pytest.mark.parametrize(("counts", "edge"), [((199, 1), "0.5"), ((1, 200), "0"), ((200, 1), "0")])
def test_bars_of_a_row_of_many_are_not_hidden_by_their_edges(counts, edge) -> None:
    """Tests the longest row, in any of the stacked pictures."""

    def made(*counts: int) -> Timeline:
        rows = [
            tuple(Cell(Action("F", rank, i), i, i + 1) for i in range(n))
            for rank, n in enumerate(counts)
        ]
        return Timeline(tuple(rows), (1,) * len(rows), (1,) * len(rows))

    few = made(2)
    for pictures in ({"a": made(*counts)}, {"a": few, "b": made(*counts)},
                     {"a": made(*counts), "b": few}):  # fmt: skip
        assert f"stroke-width:{edge}}}" in svg(pictures)


def test_a_png_has_each_ranks_row_with_its_bars_and_name(timeline, tmp_path, monkeypatch) -> None:
    import matplotlib.pyplot as plt

    three = simulate(one_f_one_b(3, 2), {"F": 1, "B": 2})
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    assert three.span > 1  # in seconds
    png({"two": timeline, "three": three}, tmp_path / "t.png")
    monkeypatch.undo()
    (figure,) = drawn
    for axis, name, of in zip(figure.axes, ("two", "three"), (timeline, three), strict=True):
        ranks = len(of.cells)
        low, high = sorted(axis.get_ylim())
        assert (low, high) == (-0.5, ranks - 0.5)
        assert axis.yaxis_inverted()  # rank 0 is on top, as in the SVG
        labels = [label.get_text() for label in axis.get_yticklabels()]
        assert (axis.get_yticks().tolist(), labels) == (
            [*range(ranks)], [f"rank {rank}" for rank in range(ranks)]
        )  # fmt: skip
        assert axis.get_title(loc="left").startswith(f"{name}: idle ")
        found = []
        for several in axis.collections:
            for path in several.get_paths():
                (x0, y0), (x1, y1) = path.get_extents().get_points()
                found.append((round((y0 + y1) / 2), round(x0, 6), round(x1, 6)))
                assert (y1 - y0) == pytest.approx(0.9)
        assert sorted(found) == sorted((bar.rank, bar.cell.start, bar.cell.end) for bar in bars(of))
    assert figure.axes[-1].get_xlabel() == "time in s"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "backward"]
    tall = [axis.get_position().height for axis in figure.axes]
    assert tall[1] == pytest.approx(1.5 * tall[0], rel=0.01)
    plt.close(figure)
