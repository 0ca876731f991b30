"""The fixture `arena` of tests of faults, and the table that ``pytest -m faults`` prints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from arena import Arena


def layouts_of(function: pytest.Function | pytest.FunctionDefinition) -> tuple[str, ...]:
    """Return the layouts of a test of faults, by default two tensor ranks."""
    mark = function.get_closest_marker("layouts")
    return mark.args if mark else ("tp2",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arena" in metafunc.fixturenames:
        layouts = layouts_of(metafunc.definition)
        chosen = layouts if metafunc.config.getoption("--all-layouts") else layouts[:1]
        metafunc.parametrize("arena", chosen, indirect=True)


@pytest.fixture(scope="session")
def _references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of undisturbed runs, which all workers of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if hasattr(request.config, "workerinput") else base) / "undisturbed"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture
def arena(request: pytest.FixtureRequest, _references: Path) -> Iterator[Arena]:
    """Jobs on the layout of this test, in a folder that is removed afterwards."""
    from arena import Arena

    def note(happened: str) -> None:
        request.node.user_properties.append(("happened", happened))

    folder = Path(tempfile.mkdtemp(prefix="warpweave-faults-"))
    arena = Arena(folder, request.param, _references, note)
    yield arena
    arena.leave()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if "faults" not in config.option.markexpr:
        return
    terminalreporter.section("faults")
    terminalreporter.line(f"{'test':40}{'layout':22}{'seconds':>8}  {'verdict':9}what happened")
    for verdict in ("passed", "failed"):
        for report in terminalreporter.stats.get(verdict, ()):
            test, _, layout = report.nodeid.rpartition("::")[2].partition("[")
            happened = "; ".join(
                text for what, text in report.user_properties if what == "happened"
            )
            name = test.removeprefix("test_").replace("_", " ")
            terminalreporter.line(
                f"{name:40}{layout.rstrip(']'):22}{report.duration:8.1f}  {verdict:9}{happened}"
            )
