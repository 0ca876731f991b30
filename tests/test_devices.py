"""The table of GPUs: lookup by the names that CUDA reports, and consistency."""

import pytest

from warpweave.kernels.devices import DEVICES, TARGETS, find_device


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A40", "A40"), ("NVIDIA RTX A4000", None), ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA H200", "H200"), ("NVIDIA H800", "H800"), ("NVIDIA GH200 480GB", None),
        ("NVIDIA B200", "B200"), ("NVIDIA GB200", None), ("", None),
        ("NVIDIA GeForce RTX 4090", None), ("NVIDIA RTX PRO 6000", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell"),
    ],
)  # fmt: skip
def test_a_device_is_known_by_a_word_of_its_name(told, name) -> None:
    found = find_device(told)
    assert (found and found.name) == name


def test_targets_are_devices_of_their_capability() -> None:
    assert [*TARGETS] == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert all(d in DEVICES and target == f"sm_{d.arch}" for target, d in TARGETS.items())
    assert len({d.name for d in DEVICES}) == len(DEVICES)


# TFLOP/s in 16 bits, memory in TB/s, NVLink and network in GB/s of one direction; multiprocessors,
# and for each of them the warps and programs that it holds, and its shared memory in KiB.
SHEETS = {
    "A100": (312, 2.039, 300, 25, 108, 64, 32, 164),
    "A40": (149.7, 0.696, 0, 0, 84, 48, 16, 100),
    "L40S": (362, 0.864, 0, 0, 142, 48, 24, 100),
    "H100": (989, 3.35, 450, 50, 132, 64, 32, 228),
    "H200": (989, 4.8, 450, 50, 132, 64, 32, 228),
    "H800": (989, 3.35, 200, 50, 132, 64, 32, 228),
    "B200": (2250, 8, 900, 50, 148, 64, 32, 228),
    "RTX PRO 6000 Blackwell": (0, 0, 0, 0, 188, 48, 24, 100),
}
PRODUCTS = {90: "wgmma", 100: "tcgen05"}  # by capability; the others have none


def test_figures_are_those_of_the_data_sheets() -> None:
    assert [d.name for d in DEVICES] == [*SHEETS]
    for d in DEVICES:
        speeds = d.half / 1e12, d.memory / 1e12, d.nvlink / 1e9, d.network / 1e9
        parts = d.processors, d.warps, d.blocks, d.shared / 1024
        assert speeds + parts == pytest.approx(SHEETS[d.name]), d.name
        assert d.block_shared == d.shared - 1024  # the system reserves one for each program
        assert d.product == PRODUCTS.get(d.arch, "mma.sync")
