"""The pages of docs/: the map is current, numbers match benchmarks/results, and links and the names
of the API reference exist."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PAGES = [*ROOT.glob("*.md"), ROOT / "examples" / "README.md", *DOCS.rglob("*.md")]


def _script(monkeypatch, name: str):
    monkeypatch.syspath_prepend(str(DOCS / "scripts"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_the_map_is_what_the_sources_and_tests_say(monkeypatch) -> None:
    script = _script(monkeypatch, "map")
    message = "the map is old: python docs/scripts/map.py writes it again"
    assert (DOCS / "map.md").read_text() == script.page(), message


def test_schedules_are_drawn_as_the_code_makes_them(monkeypatch) -> None:
    script, page = _script(monkeypatch, "schedules"), (DOCS / "schedules.md").read_text()
    assert page == script.filled(page), "python docs/scripts/schedules.py draws them again"
    pictures = script.pictures(page)
    # equal to pipedream, except for updates and versions
    others = {"pipedream-vs", "pipedream-2bw"}
    assert set(pictures) == {f"{n}.svg" for n in set(script.FAMILIES) - others} | {"pipelines.svg"}
    assert all(f"`{name}`" in page for name in others)
    found = {path.name: path.read_text() for path in (DOCS / "pictures").iterdir()}
    assert found == pictures, "python docs/scripts/schedules.py draws them again"
    assert max(map(len, found.values())) < 40_000
    changed = script.pictures("<!-- draw zb-h1 4 8 1 F=1 I=1 W=1 -->")
    assert found["zb-h1.svg"] != changed["zb-h1.svg"]


def test_the_map_has_every_source_file_and_says_what_it_is_for(monkeypatch) -> None:
    script = _script(monkeypatch, "map")
    page = (DOCS / "map.md").read_text()  # equal to the script's output, see above
    rows = [_cells(line) for line in page.splitlines() if line.startswith("| `")]
    files = [p for part in script.PARTS for p in (ROOT / part).rglob("*.py")]
    names = sorted(path.name for path in files if path.name != "__init__.py")
    assert sorted(cells[0].strip("`") for cells in rows) == names
    assert [cells[0] for cells in rows if len(cells[1]) < 12] == []
    tests = script.tests_by_module()
    assert "test_docs.py" not in tests["warpweave.kernels.merge"]
    assert "test_merge.py" in tests["warpweave.kernels.merge"]
    named = script.named("warpweave.kernels.merge", {"test_a.py", "test_merge.py"})
    assert named == "`test_merge.py`, `test_a.py`"
    assert "test_restart.py" in tests["warpweave.train.trainer"]  # by a helper in test_train.py


def test_the_map_follows_a_helper_to_what_it_uses_and_no_further(monkeypatch, tmp_path) -> None:
    (tmp_path / "support").mkdir()
    (tmp_path / "support" / "helper.py").write_text(
        "from warpweave.model.gpt import GPT\nfrom warpweave.model import engine\nimport other\n"
        "MADE = [GPT]\ndef used():\n    return MADE, other.x\ndef unused():\n    engine.Engine()\n"
    )
    (tmp_path / "other.py").write_text("import warpweave.prove.proof\n")
    for name, text in (("function", "from helper import used"), ("file", "import helper")):
        (tmp_path / f"test_{name}.py").write_text(text)
    helpers = _script(monkeypatch, "map").Helpers(tmp_path)
    used = {"warpweave.model.gpt.GPT", "warpweave.prove.proof"}
    assert helpers.modules_of("test_function") == used
    assert helpers.modules_of("test_file") == used | {"warpweave.model.engine"}


def _quoted(page: Path) -> Iterator[tuple[str, str]]:
    """Return (script, ratio with its quantiles) for every number in a
    page's tables of measurements."""
    for line in page.read_text().splitlines():
        found = re.search(r"`(\w+)\.py` \|$", line)
        for ratio in re.findall(r"\d\.\d\d \(\d\.\d\d to \d\.\d\d\)", line) if found else ():
            yield found[1], ratio


QUOTING = [(ROOT / "README.md", 8), (DOCS / "performance.md", 17)]


@pytest.mark.parametrize(("page", "count"), QUOTING)
def test_what_is_quoted_as_measured_is_in_the_results(page, count) -> None:
    quoted = list(_quoted(page))
    assert len(quoted) >= count
    for script, ratio in quoted:
        files = [json.loads(path.read_text()) for path in RESULTS.glob(f"cpu*/{script}.json")]
        ratios = [r for file in files for row in file["rows"] for r in row["ratios"].values()]
        measured = {f"{r['median']:.2f} ({r['p20']:.2f} to {r['p80']:.2f})" for r in ratios}
        assert ratio in measured, (script, measured)


def test_the_page_of_performance_says_what_is_predicted_of_an_h100() -> None:
    """Each row is one of fusion.md: epilogue, passes, may, is, taken."""
    text = (RESULTS / "clock" / "fusion.md").read_text()
    rows = text.partition("## H100")[2].partition("\n## ")[0].splitlines()
    predicted = {cells[0]: cells for cells in map(_cells, rows) if len(cells) > 8}
    page = (DOCS / "performance.md").read_text().partition("## Fused or not")[2]
    said = [cells for cells in map(_cells, page.splitlines()) if cells[0] in predicted]
    said = [cells for cells in said if cells[0] not in ("op", "---")]
    assert len(said) == 6
    for op, *figures in said:
        _, _, epilogue, passes, _, allowed, slower, _, _, taken = predicted[op]
        assert figures == [epilogue, passes, allowed, slower, taken], op


def test_the_page_of_performance_says_how_well_the_planner_predicts() -> None:
    """Each row is one of plan/rows.md; README quotes the median error of half test."""
    text = (RESULTS / "plan" / "rows.md").read_text()
    rows = {cells[0]: cells for cells in map(_cells, text.splitlines()) if len(cells) == 6}
    page = (DOCS / "performance.md").read_text().partition("## The planner")[2]
    said = [cells for cells in map(_cells, page.splitlines()) if cells[0] in rows]
    said = [cells for cells in said if cells[1][0] in "123456789"]
    assert len(said) == 6
    for cells in said:
        assert cells == rows[cells[0]][:4]
    words = f"median error {rows['test'][2]} on published rows that were not used for fitting"
    assert words in (DOCS / "features.md").read_text()


def test_the_number_of_layouts_that_are_proven_is_that_of_prove_all() -> None:
    from warpweave.prove.layouts import all_layouts

    count = f"{sum(len(all_layouts(world)) for world in range(1, 5)):,}"
    assert f"`prove`: {count} layouts of 1 to 4 ranks" in (DOCS / "features.md").read_text()
    assert f"# are all {count} layouts of 1 to 4 ranks right?" in (DOCS / "commands.md").read_text()


def test_the_table_of_models_has_every_preset_and_its_sizes() -> None:
    from warpweave.model.config import PRESETS

    page = (DOCS / "commands.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+)` \| (.*) \|$", page, re.MULTILINE)
    table = {name: cells.replace(",", "").split(" | ") for name, cells in rows}
    for name, c in PRESETS.items():
        heads = f"{c.heads}" if c.kv_heads is None else f"{c.heads} ({c.kv_heads})"
        sizes = (c.layers, c.width, heads, c.hidden or 4 * c.width, c.seq_len, c.vocab_size)
        assert table[name] == [*map(str, sizes), "yes" if c.tied else "no"], name


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(page) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in path:
            assert page.name == "CHANGELOG.md", f"{link}: nothing of ours is published yet"
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target), link
        inside = page.is_relative_to(DOCS)
        assert not inside or target.is_relative_to(DOCS), f"{link} leaves the site"


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))


def test_the_examples_are_all_listed() -> None:
    listed = re.findall(r"examples/(\w+\.py)", (ROOT / "examples" / "README.md").read_text())
    assert set(listed) == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_the_words_of_ours_are_words_of_the_code() -> None:
    """The overlaps and layouts that the glossary explains are values of the options."""
    from warpweave.parallel.words import Kind, Overlap

    glossary = (DOCS / "glossary.md").read_text()
    overlaps = next(line for line in glossary.splitlines() if line.startswith("| overlap |"))
    assert re.findall(r"`(\w+)`", overlaps) == list(get_args(Overlap))
    layouts = next(line for line in glossary.splitlines() if line.startswith("| zigzag,"))
    assert set(re.findall(r"\w+", layouts.split("|")[1])) == set(get_args(Kind))


# Files that commands write, or that other repositories hold.
WRITTEN = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
WRITTEN |= {"train.py", "prepare.py", "tiles.json", "origin/", "README.md"}
NAMED = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", [page for page in NAMED if page != "docs/map.md"])
def test_every_file_that_a_page_names_is_there(page) -> None:
    """Files are named by path from the root, or by name after another file of the same
    folder; tests by name."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    beside = ROOT / "docs"
    for line in text.splitlines():
        for name in re.findall(r"`((?:[\w-]+/)*[\w-]+(?:\.py|\.json(?!l)|\.md|/))`", line):
            if name in WRITTEN:
                continue
            places = [ROOT / name, beside / name, ROOT / "tests" / name, ROOT / "benchmarks" / name]
            found = [place for place in places if place.exists()]
            assert found, f"{name}: {line}"
            beside = found[0].parent


def test_readme_and_home_page_state_the_same_hardware() -> None:
    for page in (ROOT / "README.md", DOCS / "index.md"):
        text = page.read_text().replace("\n", " ")
        status = re.search(r"\*\*Status, .*?\*\*.*?  ", text)[0]
        for words in ("CPU ranks", "A100, H100, and B200", "run on one H100"):
            assert words in status, page
        assert "on CPUs so far" not in text, page
