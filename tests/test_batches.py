"""The samples of each replica, and values that ranks exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_server import _options
from threads import on_mesh, run_threads

from warpweave.data import boundaries
from warpweave.parallel.exchange import exchange
from warpweave.parallel.mesh import Mesh
from warpweave.train.batches import Batches


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reduce", ["library", "ordered"])
def test_replicas_share_the_samples_of_a_step_and_of_an_evaluation(tmp_path: Path, packed, reduce):
    words = f"--dp 3 --microbatches 4 --eval-batches 5 --reduce {reduce}"
    more = "--packed --separator 32" if packed else ""
    config = _options(tmp_path, *words.split(), *more.split())
    parts = [Batches(config, replica, torch.device("cpu")) for replica in range(3)]
    ids = config.plan.deal(3, 2)
    for step in (0, 7):
        whole = config.open_data("train").batch(step, range(24))
        for replica, part in enumerate(parts):
            tokens, labels, documents, own = part.step(step)
            assert torch.equal(own, ids[replica])
            assert torch.equal(tokens, whole[0][own])
            assert torch.equal(labels, whole[1][own])
            _check(documents, labels, packed)
    count = 5 * 2 * 3
    whole = config.open_data("validation").fixed_batch(range(count), count=count)
    found = [part.held_out() for part in parts]
    for tokens, labels, documents in found:
        assert tokens.shape == labels.shape == (5, 2, 16)
        _check(documents, labels, packed)
    for at in (0, 1):
        assert torch.equal(torch.cat([x[at] for x in found]).flatten(0, 1), whole[at])


def _check(documents: torch.Tensor | None, labels: torch.Tensor, packed: bool) -> None:
    if not packed:
        assert documents is None
        return
    expected = boundaries(labels.flatten(0, 1))
    assert torch.equal(documents, expected.unflatten(0, labels.shape[:2]))
    assert expected.shape[1] > 2


VALUES: list[Any] = [
    {"rank": 0, "text": "\u00e9\n" * 70}, None, [1.5, 1e-300, 2**70], "", {"a": [True, {}]},
]  # fmt: skip


def test_ranks_exchange_json_of_any_length_in_rank_order():
    assert exchange(VALUES, None) == [VALUES]
    for found in run_threads(5, lambda rank: exchange(VALUES[rank], dist.group.WORLD)):
        assert found == VALUES


@pytest.mark.parametrize("axis", ["tp", "dp", "cp"])
def test_an_exchange_stays_within_its_group(axis):
    mesh, values = Mesh(dp=2, tp=3), [*VALUES, {"rank": 5}]
    groups = {"tp": [[0, 1, 2], [3, 4, 5]], "dp": [[0, 3], [1, 4], [2, 5]],
              "cp": [[rank] for rank in range(6)]}  # fmt: skip
    of = {rank: group for group in groups[axis] for rank in group}
    found = on_mesh(mesh, lambda own: exchange(values[own.rank], own.group(axis)))
    assert found == [[values[other] for other in of[rank]] for rank in range(6)]
