"""Kernel tests on a GPU: the device of the tensors that a test makes."""

from __future__ import annotations

import torch
from on_gpu import Placed

_MAKE = """
def make(torch):
    drawn = torch.randn(3, generator=torch.Generator().manual_seed(1))
    return (
        drawn, torch.tensor([1, 2]), torch.ones(2, requires_grad=True), torch.full((2,), 1.0),
        torch.arange(3, device="cpu"), drawn.abs(),
    )
"""


def _made(path: str) -> tuple[torch.Tensor, ...]:
    """Return what a file at this path makes if tests are placed on "meta"."""
    names: dict = {}
    exec(compile(_MAKE, path, "exec"), names)
    with Placed("meta"):
        return names["make"](torch)


def test_what_a_test_makes_is_placed_unless_it_says_where() -> None:
    made = _made(__file__)
    assert [x.device.type for x in made] == ["meta"] * 4 + ["cpu", "meta"]
    assert [x.requires_grad for x in made] == [False, False, True, False, False, False]
    assert made[2].is_leaf


def test_what_the_library_makes_lies_where_it_says() -> None:
    assert {x.device.type for x in _made(torch.__file__)} == {"cpu"}
    assert torch.ones(1).device.type == "cpu"
