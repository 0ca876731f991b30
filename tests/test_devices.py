"""The table of GPUs: found by their names as CUDA tells them, and consistent."""

import pytest

from warpweave.kernels.devices import DEVICES, TARGETS, find_device


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_device_is_known_by_a_word_of_its_name(told, name) -> None:
    found = find_device(told)
    assert (found and found.name) == name


def test_targets_are_devices_of_their_capability() -> None:
    assert [*TARGETS] == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert all(d in DEVICES and target == f"sm_{d.arch}" for target, d in TARGETS.items())
    assert len({d.name for d in DEVICES}) == len(DEVICES)
