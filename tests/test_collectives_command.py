"""``warpweave collectives``: the fit of the model, the summary, what is refused, and a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from warpweave.collectives import command
from warpweave.collectives.command import rows_table, summarised
from warpweave.collectives.fit import fit, terms
from warpweave.collectives.options import CollectivesConfig
from warpweave.parallel.algorithms.all_reduce import all_reduces
from warpweave.parallel.algorithms.network import Network, traffic


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
    """Times that fall with the bytes, which unconstrained squares would fit by a negative byte."""
    found = fit([[1, 10, 0], [1, 1000, 0], [2, 1000, 0]], [2.0, 1.0, 2.0])
    assert found.beta == found.gamma == 0
    assert found.alpha > 0


def test_no_other_network_has_less_error() -> None:
    """Karush, Kuhn and Tucker: the error rises along a constant that is 0, and is level else."""
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
    assert len(supports) == 7  # each choice of constants


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
    with pytest.raises(ValueError, match=r"ring: the sum of 1..3 is 6, found \[5.0, 6.0\]"):
        command._check("ring", torch.tensor([6.0, 5.0, 6.0]), 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ranks": 1}, "ranks must be 2..64, got 1"),
        ({"ranks": 6, "node": 4}, "nodes of 4 do not divide 6 ranks"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"sizes": ("1K", "7")}, "sizes must be multiples of 4 bytes such as 64K, got '7'"),
        ({"sizes": ("K",)}, "sizes must be multiples of 4 bytes such as 64K, got 'K'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(options, says, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        command.run(replace(CollectivesConfig(), **options))
    assert (caught.value.code, capsys.readouterr().err.strip()) == (2, f"warpweave: {says}")


def test_sizes_are_sorted_and_named_once() -> None:
    assert CollectivesConfig(sizes=("1m", "8", "1K", "1024")).elements == [2, 256, 1 << 18]


def test_a_run_writes_rows_and_a_plot(tmp_path) -> None:
    options = ["--ranks", "2", "--sizes", "64", "8K", "--repeats", "1", "--out", str(tmp_path)]
    run = [sys.executable, "-P", "-m", "warpweave.cli", "collectives", *options]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    assert json.loads((tmp_path / "collectives.json").read_text()) == found
    assert (tmp_path / "collectives.png").stat().st_size > 10_000
    names = [row["algorithm"] for row in found["rows"] if row["bytes"] == 64]
    assert names == ["gloo", *all_reduces(2)]
    assert all(row["seconds"] > 0 for row in found["rows"])
