"""``warpweave collectives``: the fit of the model, the summary, bad arguments, and a real run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from warpweave.machine.collectives import command
from warpweave.machine.collectives.command import rows_table, summarised
from warpweave.machine.collectives.fit import fit, terms
from warpweave.machine.collectives.options import CollectivesConfig
from warpweave.parallel.algorithms.all_reduce import all_reduces
from warpweave.parallel.algorithms.network import Network, traffic
from warpweave.parallel.mesh import Mesh


def _measured(ranks: int, sizes: list[int], network: Network) -> list[dict]:
    return [
        {"algorithm": name, "elements": n, "seconds": traffic(of, ranks, n, network).seconds}
        for n in sizes
        for name, of in all_reduces(ranks).items()
    ]


@pytest.mark.parametrize(
    "network", [Network(3e-5, 2e-9, 5e-10), Network(3e-5, 2e-9), Network(0.0, 2e-9, 5e-10)]
)
def test_the_network_is_found_from_the_times_that_it_gives(network) -> None:
    rows = _measured(5, [1000, 300_000], network)
    found = fit(
        [terms(all_reduces(5)[r["algorithm"]], 5, r["elements"]) for r in rows],
        [r["seconds"] for r in rows],
    )
    for name in ("alpha", "beta", "gamma"):
        expected = getattr(network, name)
        assert getattr(found, name) == pytest.approx(expected, rel=1e-6, abs=1e-15), name


def test_no_constant_is_below_zero() -> None:
    """An unconstrained fit of times that fall with the bytes would give a negative byte cost."""
    found = fit([[1, 10, 0], [1, 1000, 0], [2, 1000, 0]], [2.0, 1.0, 2.0])
    assert found.beta == found.gamma == 0
    assert found.alpha > 0


def test_no_other_network_has_less_error() -> None:
    """By Karush, Kuhn and Tucker: the error rises along a constant that is
    0, and is level otherwise."""
    numbers, supports = np.random.default_rng(0), set()
    for _ in range(100):
        rows, seconds = numbers.uniform(0.1, 1, (5, 3)), numbers.uniform(0.1, 1, 5)
        found = fit(rows.tolist(), seconds.tolist())
        constants = np.array([found.alpha, found.beta, found.gamma])
        relative = rows / seconds[:, None]
        slope = relative.T @ (relative @ constants - 1)
        assert (constants >= 0).all()
        assert (slope > -1e-9).all()
        assert (abs(slope[constants > 0]) < 1e-9).all()
        supports.add(tuple(constants > 0))
    assert len(supports) == 7  # each subset of constants


def test_the_summary_has_every_rows_prediction_and_the_backends_time() -> None:
    config, network = CollectivesConfig(ranks=4, sizes=("4K", "64K")), Network(1e-5, 1e-9)
    own = [{"algorithm": "gloo", "elements": n, "seconds": 1e-3} for n in config.elements]
    found = summarised(config, own + _measured(4, config.elements, network))
    assert found["network"] == pytest.approx({"alpha": 1e-5, "beta": 1e-9, "gamma": 0}, abs=1e-14)
    assert found["predicted_by_measured"] == [1, 1]
    ring = next(r for r in found["rows"] if (r["algorithm"], r["bytes"]) == ("ring", 65536))
    assert (ring["rounds"], ring["busiest"], ring["at_once"]) == (6, 2 * 65536 * 3 // 4, 65536)
    lines = rows_table(found).splitlines()
    assert len(lines) == 1 + len(found["rows"]) + 2
    assert any(line.split() == ["gloo", "4,096", "1.000"] for line in lines)


def test_a_wrong_sum_is_an_error() -> None:
    command._check("ring", torch.full((3,), 6.0), 3)
    with pytest.raises(
        ValueError,
        match=r"ring: every element must be 6, which is the sum of 1..3, got \[5.0, 6.0\]",
    ):
        command._check("ring", torch.tensor([6.0, 5.0, 6.0]), 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ranks": 1}, "ranks must be 2..64, got 1"),
        ({"ranks": 65}, "ranks must be 2..64, got 65"),
        ({"node": 0}, "ranks (4) is not divisible by node (0)"),
        ({"ranks": 6, "node": 4}, "ranks (6) is not divisible by node (4)"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"sizes": ("1K", "7")}, "sizes must be multiples of 4 bytes (such as 64K), got '7'"),
        ({"sizes": ("0",)}, "sizes must be multiples of 4 bytes (such as 64K), got '0'"),
        ({"sizes": ("6",)}, "sizes must be multiples of 4 bytes (such as 64K), got '6'"),
        ({"sizes": ("K",)}, "sizes must be multiples of 4 bytes (such as 64K), got 'K'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(options, says, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "launch", lambda *_, **__: pytest.fail("it has started ranks"))
    with pytest.raises(SystemExit) as caught:
        command.run(replace(CollectivesConfig(), **options))
    assert (caught.value.code, capsys.readouterr().err.strip()) == (2, f"warpweave: {says}")


def test_a_rank_of_torchrun_starts_no_ranks(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "launch", lambda *_, **__: pytest.fail("it has started ranks"))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        command.run(CollectivesConfig())
    says = "warpweave: collectives starts its own ranks; run it without torchrun"
    assert (caught.value.code, capsys.readouterr().err.strip()) == (2, says)


def test_sizes_are_sorted_and_named_once() -> None:
    assert CollectivesConfig(sizes=("1m", "8", "1K", "1024")).elements == [2, 256, 1 << 18]
    assert CollectivesConfig(sizes=("4", "2G", "3M")).elements == [1, 3 << 18, 1 << 29]
    for ranks, node in ((2, 1), (64, 64), (6, 3)):
        CollectivesConfig(ranks=ranks, node=node, repeats=1).check()


@pytest.mark.parametrize("node", [None, 2, 3])
def test_the_table_has_each_figure_of_its_row_in_its_column(node) -> None:
    config = CollectivesConfig(ranks=6, sizes=("24K", "6M"), node=node)
    network = Network(3e-5, 2e-9, 5e-10)
    algorithms = all_reduces(6, node)
    rows = [
        {"algorithm": name, "elements": n, "seconds": (1 + i) * 1e-3}
        for n in config.elements
        for i, name in enumerate(["gloo", *algorithms])
    ]
    with mock.patch.object(command, "fit", return_value=network) as fitted:
        found = summarised(config, rows)
    ours = [row for row in rows if row["algorithm"] != "gloo"]
    terms_of, seconds = fitted.call_args.args
    assert seconds == [row["seconds"] for row in ours]
    assert terms_of == [terms(algorithms[r["algorithm"]], 6, r["elements"]) for r in ours]
    head, *lines = rows_table(found).splitlines()
    assert head.split("  ")[0] == "algorithm"
    ratios = []
    for line, row in zip(lines, rows, strict=False):
        moved = traffic(algorithms[row["algorithm"]], 6, row["elements"], network) if (
            row in ours
        ) else None  # fmt: skip
        figures = [f"{4 * row['elements']:,}"]
        if moved is not None:
            ratios.append(moved.seconds / row["seconds"])
            figures += [f"{moved.rounds}", f"{moved.busiest:,}", f"{moved.at_once:,}"]
            figures += [f"{1e3 * moved.seconds:.3f}"]
        assert line.split() == [*row["algorithm"].split(), *figures, f"{1e3 * row['seconds']:.3f}"]
    low, high = round(min(ratios), 3), round(max(ratios), 3)
    assert found["predicted_by_measured"] == [low, high]
    assert lines[-1] == (
        "fitted: 30.0 us per round, 2.000 ns per byte over a link, 0.500 ns per byte reduced; "
        f"predicted / measured from {low:.2f} to {high:.2f}"
    )
    assert found["network"] == {"alpha": 3e-5, "beta": 2e-9, "gamma": 5e-10}
    assert found["ranks"] == 6


def test_the_plot_has_measured_points_and_predicted_lines_over_bytes(tmp_path) -> None:
    from matplotlib.axes import Axes

    rows = [
        {"algorithm": name, "bytes": n, "seconds": n * 1e-6, **more}
        for n in (4, 64)
        for name, more in (("gloo", {}), ("ring", {"predicted": n * 2e-6}))
    ]
    drawn, draw = [], Axes.plot

    def noted(self, x, y, *how, **more):
        drawn.append((more.get("label"), list(x), y))
        return draw(self, x, y, *how, **more)

    with mock.patch.object(Axes, "plot", noted):
        command.plot({"ranks": 2, "rows": rows}, tmp_path / "x.png")
    measured, predicted = [pytest.approx([k * n for n in (4, 64)]) for k in (1e-3, 2e-3)]
    assert drawn == [
        ("gloo", [4, 64], measured), ("ring", [4, 64], measured), (None, [4, 64], predicted),
    ]  # fmt: skip


def _one_rank(monkeypatch, config: CollectivesConfig, seconds: list[float]) -> tuple[list, list]:
    """Return the rows of a single rank whose collectives take these seconds,
    and which ran on which data."""
    ran: list[tuple] = []
    session = mock.Mock(rank=0, device=torch.device("cpu"))
    joined = mock.Mock(return_value=session)
    monkeypatch.setattr(command, "join", joined)
    monkeypatch.setattr(command, "reported", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(command.dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(command, "_check", lambda name, x, ranks: ran.append(("check", name)))
    times = iter(seconds)

    def timed(run, x):
        ran.append((x.numel(), float(x[0])))
        x.fill_(9.0)
        return next(times)

    monkeypatch.setattr(command, "_timed", timed)
    with mock.patch.object(command, "all_reduces", wraps=all_reduces) as made:
        rows = command.collectives_rank(config, 5)
    assert made.call_args == mock.call(config.ranks, config.node)
    assert joined.call_args.args == (Mesh(dp=config.ranks),)
    assert joined.call_args.kwargs == {"timeout": config.timeout, "backend": None, "port": 5}
    session.close.assert_called_once_with()
    return rows, ran


def test_each_is_measured_as_often_as_asked_after_one_that_is_checked(monkeypatch) -> None:
    """The median counts, without the first run, which connects. Each input
    begins with the rank's number."""
    config = CollectivesConfig(ranks=4, node=4, sizes=("8", "40"), repeats=4, timeout=7.0)
    names = ["gloo", *all_reduces(4, 4)]
    seconds = [
        n + 10.0 * i + (100.0, 1.0, 2.0, 4.0, 90.0)[repeat]
        for n in (1000, 2000)
        for repeat in range(5)
        for i in range(len(names))
    ]
    rows, ran = _one_rank(monkeypatch, config, seconds)
    assert rows == [
        {"algorithm": name, "elements": elements, "seconds": n + 10.0 * i + 3.0}
        for n, elements in ((1000, 2), (2000, 10))
        for i, name in enumerate(names)
    ]
    assert [x for x in ran if x[0] == "check"] == [("check", name) for name in names] * 2
    each = 5 * len(names)
    assert [x for x in ran if x[0] != "check"] == [(2, 1.0)] * each + [(10, 1.0)] * each


def test_seconds_are_those_of_the_last_rank(monkeypatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(command.dist, "barrier", lambda: said.append("barrier"))
    clock = mock.Mock(perf_counter=mock.Mock(side_effect=[10.0, 12.5]))
    monkeypatch.setattr(command, "time", clock)

    def slower(x, op):
        assert (x.dtype, float(x), op) == (torch.float64, 2.5, command.dist.ReduceOp.MAX)
        x.fill_(4.0)

    monkeypatch.setattr(command.dist, "all_reduce", slower)
    assert command._timed(said.append, torch.zeros(1)) == 4.0
    assert said[0] == "barrier"


@pytest.mark.parametrize("device", [None, "cuda"])
def test_collectives_command_uses_the_given_device_and_creates_its_folder(
    device, tmp_path, monkeypatch, capsys
) -> None:
    config = CollectivesConfig(ranks=3, sizes=("96",), out=tmp_path / "a" / "b", device=device)
    rows = [{"algorithm": name, "elements": 24, "seconds": 1e-3} for name in all_reduces(3)]
    started = mock.Mock(return_value=rows)
    chosen = mock.Mock(return_value="the backend")
    monkeypatch.setattr(command, "launch", started)
    monkeypatch.setattr(command, "choose_backend", chosen)
    command.run(config, "processes")
    assert chosen.call_args == mock.call(3, {"cpu": "gloo", "cuda": "nccl"}.get(device))
    assert started.call_args == mock.call(
        command.collectives_rank, (config,), Mesh(dp=3), backend="the backend",
        processes="processes",
    )  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == json.loads((config.out / "collectives.json").read_text())
    assert {path.name for path in config.out.iterdir()} == {"collectives.json", "collectives.png"}


def test_a_run_writes_rows_and_a_plot(tmp_path) -> None:
    options = ["--ranks", "2", "--sizes", "64", "8K", "--repeats", "1", "--out", str(tmp_path)]
    run = [sys.executable, "-P", "-m", "warpweave", "collectives", *options]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    assert json.loads((tmp_path / "collectives.json").read_text()) == found
    assert (tmp_path / "collectives.png").stat().st_size > 10_000
    names = [row["algorithm"] for row in found["rows"] if row["bytes"] == 64]
    assert names == ["gloo", *all_reduces(2)]
    assert all(row["seconds"] > 0 for row in found["rows"])
