"""The site of docs/ as a reader opens it from a folder: signatures, search, code, and pictures."""

from __future__ import annotations

import ast
import html
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import is_typeddict

import pytest
from test_api import ENTRIES
from test_docs import DOCS, PAGES, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built site; a dead link or an unknown name fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = ["-P", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True, timeout=300,
    )  # fmt: skip
    return folder


def _signatures(site: Path) -> dict[str, str]:
    """Return, for each entry of the API pages, the text of its signature."""
    found, code = {}, r'<div class="[^"]*doc-signature.*?<code>(.*?)</code>'
    for page in (site / "api").glob("*.html"):
        for entry in page.read_text().split('<h2 id="')[1:]:
            signature = re.search(code, entry.partition("<h3")[0], re.DOTALL)
            if signature:
                found[entry.partition('"')[0]] = html.unescape(re.sub("<.*?>", "", signature[1]))
    return found


def _parameters(signature: str) -> list[str]:
    """Return the names of the parameters of a signature, in the order of Python's."""
    arguments = ast.parse(f"def {signature.strip()}: ...").body[0].args
    names = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs]
    return [found.arg for found in (*names, arguments.kwarg) if found]


def test_every_signature_has_the_parameters_that_python_shows(site) -> None:
    shown, checked = _signatures(site), 0
    for name, entry in ENTRIES.items():
        if name in shown and not is_typeddict(entry):
            taken = list(inspect.signature(entry).parameters)
            assert _parameters(shown[name]) == taken, (name, shown[name])
            checked += 1
    assert checked > 90
    linear = shown["warpweave.layers.linear.ColumnParallelLinear"]
    assert "    sequence_parallel: bool = False,\n" in linear
    assert "    dtype: torch.dtype | None = None,\n" in linear


def test_search_works_without_a_server(site) -> None:
    """Browsers refuse fetch() of a file, so the index and the search's worker are scripts."""
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'(?:<script[^>]*src|<link[^>]*href)="(?:https?:)?//', text), page
        if page.name != "404.html":
            shim = re.search(r'src="([^"]*iframe-worker\.js)"', text)[1]
            assert (page.parent / shim).is_file()


def test_wide_code_scrolls_and_every_block_is_highlighted(site) -> None:
    style = next((site / "assets" / "stylesheets").glob("main.*.css")).read_text()
    assert re.search(r"\.md-typeset pre>code\{[^}]*overflow:auto", style)
    for page in PAGES:
        fences = re.findall(r"^ *```(\w*)$", page.read_text(), re.MULTILINE)[::2]
        assert all(fences), f"{page}: a block of code without a language"
    assert '<div class="language-sh highlight">' in (site / "commands.html").read_text()


def test_home_page_shows_code(site) -> None:
    text = (site / "index.html").read_text()
    assert text.index('<div class="language-python highlight">') < text.index("<table>")


def test_pictures_follow_the_color_scheme_of_the_page(site) -> None:
    style = next((site / "assets" / "stylesheets").glob("palette.*.css")).read_text()
    assert "color-scheme:dark" in style
    pictures = re.findall(r"\]\((pictures/[^)]*)\)", "".join(p.read_text() for p in PAGES))
    assert len(pictures) > 10
    for name in pictures:
        assert "@media(prefers-color-scheme:dark){text{" in (DOCS / name).read_text(), name
