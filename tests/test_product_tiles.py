"""The tile that a product uses, at the sizes where it changes; the kind of
tile each kernel requests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from warpweave.kernels.devices import CTAS
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import epilogue, fused_gemm, gemm, gemm_into, mainloop
from warpweave.kernels.gemm.epilogue import Epilogue
from warpweave.kernels.mlp import hidden
from warpweave.kernels.overlap import gather, scatter
from warpweave.kernels.overlap.symmetric import local_memory
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.tile_table import KINDS, OPTIONAL, GemmTile

KIND = {kind: GemmTile(32, 64, 16, 1, 1, 4, n) for n, kind in enumerate((*KINDS, *OPTIONAL), 1)}
PINNED = {("gemm", size, kind): tile for size in (2, 4, 8) for kind, tile in KIND.items()}
MANY = 6  # processors: tiles of two rows and three columns


def _named(tile: GemmTile) -> str:
    return next(kind for kind, own in KIND.items() if own == tile)


@pytest.mark.parametrize("kind", ["large", "heavy", "wide", "symmetric"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_product_is_large_with_a_tile_for_each_processor_and_16_byte_loads(
    kind, shared, monkeypatch
) -> None:
    monkeypatch.setattr(mainloop, "processors", lambda device: MANY)

    def found(m: int, n: int, k: int = 16, step: int = 1) -> str:
        a, b = torch.empty(m, k), torch.empty(k * step, n)[::step]
        with tiles.pinned(PINNED):
            if not shared:
                return _named(mainloop.find_tile(a, b, kind))
            return _named(mainloop.shared_tile(a[:1], m, b, kind))

    for m, n in ((33, 144), (64, 192), (1, 384), (192, 16), (33, 160)):
        assert found(m, n) == kind, (m, n)
    for m, n in ((32, 192), (64, 128), (1, 320), (160, 16), (32, 64)):
        assert found(m, n) == "small", (m, n)
    assert found(64, 193) == found(64, 192, 24) == "small"  # no 16-byte loads
    assert found(64, 192, 32, step=2) == kind


def test_the_kind_of_a_shared_tile_is_the_large_one_by_default(monkeypatch) -> None:
    monkeypatch.setattr(mainloop, "processors", lambda device: 1)
    with tiles.pinned(PINNED):
        tile = mainloop.shared_tile(torch.empty(32, 16), 32, torch.empty(16, 64))
    assert _named(tile) == "large"


def _strided(shape: tuple[int, int], strides: tuple[int, int]) -> Tensor:
    """Make tensors on the meta device, where every address is 0, a multiple of 16."""
    return torch.empty_strided(shape, strides, device="meta")


@pytest.mark.parametrize(
    ("shape", "strides", "aligned"),
    [
        ((5, 48), (48, 1), True),
        ((5, 40), (48, 1), True),
        ((5, 40), (40, 1), False),
        ((5, 48), (32, 1), False),  # rows overlap
        ((5, 48), (0, 1), False),
        ((48, 5), (1, 48), True),
        ((40, 5), (1, 48), True),
        ((40, 5), (1, 40), False),
        ((48, 5), (1, 32), False),
        ((5, 48), (96, 2), False),
        ((16, 16), (16, 16), False),
        ((1, 1), (16, 1), True),
        ((0, 16), (16, 1), False),
        ((16, 0), (16, 1), False),
        ((2**31 - 1, 16), (16, 1), True),
        ((2**31, 16), (16, 1), False),
        ((16, 2**31), (1, 16), False),
    ],
)
def test_aligned_is_of_contiguous_rows_or_columns_at_multiples_of_16(shape, strides, aligned):
    assert mainloop.is_aligned(_strided(shape, strides)) == aligned
    if max(shape) < 2**20:
        padded = torch.empty(4096)
        for first in (0, 1, 4, 8):
            given = padded[first:].as_strided(shape, strides)
            assert mainloop.is_aligned(given) == (aligned and given.data_ptr() % 16 == 0)


def test_each_kernel_asks_for_its_kind(monkeypatch) -> None:
    asked: list[str] = []
    for module, name in (
        (epilogue, "find_tile"), (hidden, "find_tile"),
        (gather, "shared_tile"), (scatter, "shared_tile"),
    ):  # fmt: skip
        find = getattr(module, name)

        def noted(*given, find=find):
            asked.append(given[-1] if isinstance(given[-1], str) else "large")
            return find(*given)

        monkeypatch.setattr(module, name, noted)
    a, b, out = torch.zeros(4, 8), torch.zeros(8, 6), torch.zeros(4, 6)
    drop, ours = Drop(0.5, 1, 2, torch.arange(4)), {"impl": "triton"}

    def kinds(call) -> list[str]:
        asked.clear()
        call()
        return [*asked]

    assert kinds(lambda: gemm(a, b, **ours)) == ["large"]
    for add in (False, True):
        assert kinds(lambda add=add: gemm_into(a, b, out, add, **ours)) == [
            "heavy" if add else "large"
        ]
    for dropped in (None, drop):
        for residual in (None, out):
            heavy = dropped is not None and residual is not None
            options = {"drop": dropped, "residual": residual, "activation": "gelu"} | ours
            found = kinds(lambda options=options: fused_gemm(a, b, **options))
            assert found == ["heavy" if heavy else "large"]
    for want in (False, True):
        call = {"activation": "gelu", "want_hidden": want} | ours
        found = kinds(lambda call=call: hidden.hidden_bwd(a, b, out, **call))
        assert found == ["large" if want else "heavy"]
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        (memory,) = local_memory(1, slots=8, capacity=1 << 12, polls=3)
        given = a.to(dtype), b.to(dtype), memory, Epilogue()
        assert kinds(lambda given=given: [*gather.gather_steps(*given)]) == ["large"]
        for name in ("gemm_reduce_scatter", "gemm_all_reduce"):
            found = kinds(
                lambda given=given, name=name: [*scatter.scatter_steps(*given, owners=1, name=name)]
            )
            assert found == ["wide" if dtype.itemsize == 2 else "large"]


def test_waiting_programs_are_at_least_one_and_leave_sms_to_collectives(monkeypatch):
    device = torch.device("cpu")
    for here, most in (
        (1, 1), (4, 1), (CTAS, 1), (CTAS + 1, 1), (CTAS + 2, 2), (CTAS + 3, 3), (132, 132 - CTAS),
    ):  # fmt: skip
        monkeypatch.setattr(gather, "processors", lambda device, here=here: here)
        for parts in (1, 2, 3, 8, 9, 50, 1000):
            assert gather.waiting_programs(parts, device) == min(parts, most)
            for copying in (0, 1, 2, 4, 16):  # next to the copiers, at least one for the tiles
                (programs,) = gather.Peers((), (2, copying, 0), copying).grid(parts, device)
                assert programs == max(min(copying + parts, most), copying + 1)
