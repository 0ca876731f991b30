"""Activations by name, without torch, for options, the planner and size formulas."""

from __future__ import annotations

from typing import NamedTuple


class Activation(NamedTuple):
    """An activation: its elementwise function, and `gated` if that gates pairs."""

    pointwise: str
    gated: bool


ACTIVATIONS = {
    "gelu": Activation("gelu", False),
    "gelu_erf": Activation("gelu_erf", False),
    "relu2": Activation("relu2", False),
    "swiglu": Activation("silu", True),
    "geglu": Activation("gelu", True),
}


def find_activation(name: str) -> Activation:
    """Return the entry of ACTIVATIONS, or raise ValueError."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
