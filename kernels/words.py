"""Activations by name, and suggestions for misspelled words.

This file imports only the standard library: options, the planner and size formulas use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to an error message about `word`: "; did you mean 'zb-v'?".

    It names the nearest of the `known` words, ignoring case. Return "" if none is near.
    """
    plain = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), plain, 1)
    return f"; did you mean {plain[near[0]]!r}?" if near else ""
