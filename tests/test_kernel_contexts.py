"""Pinned tiles and reserved processors apply only to launches of their block and thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest
import torch

from warpweave.kernels.gemm import mainloop
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.tile_table import GemmTile

CPU = torch.device("cpu")
PLAIN = tiles.find("gemm", CPU, 4, "wide")
TILE = GemmTile(16, 32, 16, 1, 4, 4, 1)


def _pin(n: int) -> AbstractContextManager[None]:
    return tiles.pinned({("gemm", 4, "large"): TILE._replace(group=n)})


def _pinned() -> int:
    tile = tiles.find("gemm", CPU, 4, "wide")  # uses that of "large"
    return 0 if tile == PLAIN else tile.group


def _left() -> int:
    """Return how many of the 64 processors a product leaves unused."""
    (programs,) = mainloop.grid(TILE, 1 << 14, 1 << 14, CPU)
    counts = mainloop.tile_counter(CPU) is not None
    left = 64 - programs // TILE.residents
    assert counts == (left > 0)
    return left


CONTEXTS: dict[str, tuple[Callable[[int], Any], Callable[[], int]]] = {
    "tiles that are pinned": (_pin, _pinned),
    "processors that are left": (mainloop.leaving, _left),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_setting_holds_only_within_its_block_and_thread_even_after_an_error(name, monkeypatch):
    monkeypatch.setattr(mainloop, "processors", lambda device: 64)
    enter, told = CONTEXTS[name]
    assert told() == 0
    with enter(3):
        assert told() == 3
        with enter(5):
            assert told() == 5
            with ThreadPoolExecutor(1) as other:
                assert other.submit(told).result() == 0
        assert told() == 3
        with suppress(KeyError), enter(7):
            raise KeyError
        assert told() == 3
    assert told() == 0
    with suppress(KeyError), enter(7):
        raise KeyError
    assert told() == 0
