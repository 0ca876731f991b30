"""The planner's page: it parses, requests nothing from the network, and its numbers are those of
its JSON. Headless browsers are checked by hand; this test parses the document."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from warpweave.parallel.schedule import one_f_one_b
from warpweave.parallel.simulate import Timeline, simulate
from warpweave.plan.page import COLOURS, LEFT, ROW, TOP, WIDTH, plan_page

GIB = 2**30
LAYOUTS = [
    {"layout": "tp8 pp2", "seconds": 1.25, "mfu": 0.512345, "zero": 1},
    {"layout": "tp4 <pp4>", "seconds": 1.5, "mfu": 0.42, "zero": 0},
]
MEMORY = [
    {"weights": 10 * GIB, "optimizer": 20 * GIB, "activations": 30 * GIB},
    {"weights": 12 * GIB, "optimizer": 24 * GIB, "activations": 15 * GIB},
]
VOID = {"meta", "rect", "line"}


class Parsed(HTMLParser):
    """A parser that records tags in order with their attributes and text, and fails on a stray
    closing tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict, list[str]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), []))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.found:
            self.found[-1][2].append(data)

    def all(self, tag: str) -> list[tuple[dict, str]]:
        return [(attrs, "".join(text)) for name, attrs, text in self.found if name == tag]

    def rects(self, height: int) -> list[dict]:
        return [attrs for attrs, _ in self.all("rect") if attrs["height"] == str(height)]


def _memory(document: str) -> Parsed:
    """Parse the picture of memory, whose bars are 17 high, and keys 12."""
    picture = document[document.index('<svg id="memory"') :]
    return Parsed(picture[: picture.index("</svg>") + 6])


RECORD = {
    "layouts": [{"traffic": {"tp": {"link": "NVLink", "bytes": 1.25e9},
                             "dp": {"link": "network", "bytes": 3e10}}}],
    "refused": {"too <large>": 3, "no divisor": 70},
}  # fmt: skip
WORDS = "a <model> & more", "a step has 24 sequences of 100 tokens", "5 layouts were simulated"


def _page(memory: list, capacity: float, timeline: Timeline, words: tuple = WORDS) -> str:
    return plan_page(RECORD, words, LAYOUTS, memory, capacity, timeline)


@pytest.fixture(scope="module")
def document() -> str:
    timeline = simulate(one_f_one_b(2, 4), {"F": 0.01, "B": 0.02})
    return _page(MEMORY, 80 * GIB, timeline)


def test_the_page_says_what_a_step_has_what_is_sent_and_what_was_refused(document) -> None:
    parsed = Parsed(document)
    said = [text.strip() for _, text in parsed.all("p")]
    assert all(words in said for words in WORDS[1:])
    tables = {attrs["id"] for attrs, _ in parsed.all("table")}
    assert tables == {"layouts", "traffic", "refused"}
    cells = [text.strip() for _, text in parsed.all("td")]
    assert cells[cells.index("tp") :] == [
        "tp", "NVLink", "1.25", "dp", "network", "30.00", "70", "no divisor", "3", "too <large>",
    ]  # fmt: skip


def test_both_pictures_have_an_axis_with_a_unit(document) -> None:
    drawn = {}
    for name in ("memory", "timeline"):
        picture = document[document.rindex("<svg", 0, document.index("</svg>")) :]
        document = document[document.index("</svg>") + 6 :]
        parsed = Parsed(picture[: picture.index("</svg>") + 6])
        drawn[name] = [text.strip() for _, text in parsed.all("text")]
    assert drawn["memory"][-11:] == [*map(str, range(0, 90, 10)), "GiB", "capacity 80.0 GiB"]
    assert drawn["timeline"][-12:] == [
        *map(str, range(0, 160, 20)), "time in ms", "forward", "backward",
        "numbers: micro-batches; gaps: idle",
    ]  # fmt: skip


def test_nothing_that_is_written_is_stretched(document) -> None:
    """The wheel redraws bars and ticks, because an outer scale would stretch their labels."""
    assert "preserveAspectRatio" not in document
    assert 'setAttribute("viewBox"' not in document


def test_the_page_asks_for_nothing_from_outside(document) -> None:
    assert re.findall(r"https?://[^\"'\s]+", document) == ["http://www.w3.org/2000/svg"] * 2
    assert not re.search(r"<(link|img|iframe)|\ssrc=|@import|url\(|fetch\(", document)
    assert "<model>" not in document


def test_the_json_in_the_page_is_what_it_shows(document) -> None:
    parsed = Parsed(document)
    plan = json.loads(next(text for attrs, text in parsed.all("script") if attrs.get("id")))
    assert plan["layouts"] == LAYOUTS
    assert plan["memory"] == MEMORY
    cells = [(a["data-value"], text) for a, text in parsed.all("td") if "data-value" in a]
    assert [value for value, _ in cells] == [str(v) for row in LAYOUTS for v in row.values()]
    assert [text for _, text in cells][:4] == ["tp8 pp2", "1.25", "51.2%", "1"]
    heads = [text for _, text in parsed.all("th")]
    assert heads[:4] == ["layout", "seconds per step", "MFU", "ZeRO"]


def test_memory_is_stacked_to_scale(document) -> None:
    picture, bars = document[document.index('<svg id="memory"') :], _memory(document).rects(17)
    assert len(bars) == 6
    for rank, held in enumerate(MEMORY):
        x = float(LEFT)
        for bar, colour, size in zip(bars[3 * rank :], COLOURS, held.values()):
            assert float(bar["x"]) == pytest.approx(x, abs=0.02)
            assert float(bar["width"]) == pytest.approx(size / (80 * GIB) * WIDTH, abs=0.01)
            assert bar["fill"] == colour
            x += float(bar["width"])
    assert "60.0 GiB" in picture
    assert "51.0 GiB" in picture
    assert re.search(rf'<line x1="{LEFT + WIDTH}.00"', picture)


def test_the_timeline_has_a_bar_an_action(document) -> None:
    drawn = document[document.index('<div id="timeline">') :]
    assert drawn.count("</title></rect>") == 16
    assert "<title>1B0: 20 to 40 ms</title>" in drawn
    assert "idle 20%" in drawn


def test_each_row_bar_and_word_stands_where_it_belongs() -> None:
    """The first layout is the chosen one. A later rank may be the fullest, with one more kind, and
    beyond the line of a GPU's memory."""
    timeline = simulate(one_f_one_b(1, 1), {"F": 1, "B": 2})
    memory = [{"weights": 5 * GIB}, {"weights": 7 * GIB, "update <x>": 21.25 * GIB}]
    found = _page(memory, 16 * GIB, timeline, ("x", "", ""))
    rows = [attrs for attrs, _ in Parsed(found).all("tr")][: 1 + len(LAYOUTS)]
    assert [attrs.get("class") for attrs in rows] == [None, "chosen", None]
    parsed, scale = _memory(found), WIDTH / (28.25 * GIB)
    bars, keys = parsed.rects(17), [attrs["fill"] for attrs in parsed.rects(12)]
    widths = [size * GIB * scale for size in (5, 0, 7, 21.25)]
    assert [float(bar["width"]) for bar in bars] == pytest.approx(widths, abs=0.01)
    assert bars[0]["y"] == bars[1]["y"] != bars[2]["y"] == bars[3]["y"]
    tips = [text for _, text in parsed.all("title")]
    assert tips == ["weights: 5.00 GiB", "update <x>: 0.00 GiB", "weights: 7.00 GiB",
                    "update <x>: 21.25 GiB"]  # fmt: skip
    words = [text for _, text in parsed.all("text")]
    assert words == ["weights", "update <x>", "rank 0", "5.0 GiB", "rank 1", "28.2 GiB",
                     *("0", "5", "10", "15", "20", "25"), "GiB", "capacity 16.0 GiB"]  # fmt: skip
    assert keys == [bars[0]["fill"], bars[1]["fill"]] == [*COLOURS[:2]]
    ((line, _),) = parsed.all("line")
    ends = [float(line["x1"]), float(line["x2"])]
    assert ends == pytest.approx([LEFT + 16 * GIB * scale] * 2, abs=0.01)
    numbers = json.loads(found.split('id="plan">')[1].split("</script>")[0])
    assert (numbers["title"], numbers["capacity"]) == ("x", 16 * GIB)


def test_bars_of_nothing_take_no_room_and_colours_begin_anew_after_the_last() -> None:
    """Nine kinds, some of which a rank does not hold; a rank's labels come after its bars."""
    kinds = [f"kind {at}" for at in range(len(COLOURS) + 2)]
    sizes = [[2, 0, 3, 1, 0, 2, 1, 3, 4], [1, 1, 0, 0, 5, 0, 0.001, 0, 2]]
    memory = [{kind: n * GIB for kind, n in zip(kinds, of, strict=True)} for of in sizes]
    del memory[1][kinds[3]]  # not even named
    found = _page(memory, 64 * GIB, simulate(one_f_one_b(1, 1), {"F": 1, "B": 2}))
    parsed = _memory(found)
    bars, keys = parsed.rects(17), parsed.rects(12)
    colours = [*COLOURS, *COLOURS[:2]]
    assert [attrs["fill"] for attrs in keys] == colours
    assert [attrs["fill"] for attrs in bars] == 2 * colours
    each, words = LEFT + 110 * np.arange(len(kinds)), dict(map(reversed, parsed.all("text")))
    assert [float(attrs["x"]) for attrs in keys] == [*each]
    assert [float(words[kind]["x"]) for kind in kinds] == [*(each + 16)]
    scale = WIDTH / 64
    for rank, (of, total) in enumerate(zip(sizes, ("16.0 GiB", "9.0 GiB"), strict=True)):
        ends = LEFT + scale * np.cumsum([0, *of])
        own = bars[rank * len(kinds) :][: len(kinds)]
        assert [float(bar["x"]) for bar in own] == pytest.approx(ends[:-1], abs=0.01)
        assert float(words[total]["x"]) == pytest.approx(ends[-1] + 4, abs=0.01)
        assert {float(bar["y"]) for bar in own} == {TOP + rank * ROW}
        assert {float(words[w]["y"]) for w in (total, f"rank {rank}")} == {TOP + rank * ROW + 14}
    ((line, _),) = parsed.all("line")
    assert (float(line["y1"]), float(line["y2"])) == (TOP, TOP + 2 * ROW)
    assert float(words["capacity 64.0 GiB"]["y"]) == TOP + 2 * ROW + 29
