"""Shared fields of config.json files: expected values, defaults, rotary embedding."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warpweave.kernels.rope_scaling import RopeScaling
from warpweave.kernels.structure import read_document, structure
from warpweave.model.config import GPTConfig


class ConvertError(ValueError):
    """A folder or model that cannot be converted; the message is one line with the reason."""


def read_json(path: Path, kind: Any = dict) -> Any:
    """Return the content of a JSON file of a model's folder, of a type that `structure` knows."""
    if not os.path.exists(path):  # False for a name that is too long, where Path.exists raises
        name = path.parent
        if os.path.exists(name):
            raise ConvertError(f"{name} is not a transformers model: it has no {path.name}")
        hint = f"; if it is a Hub model, download it first: hf download {name} --local-dir FOLDER"
        on_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name))
        raise ConvertError(f"{name} does not exist" + (hint if on_hub else ""))
    try:
        return structure(kind, read_document(path), f"{path}: ")
    except ValueError as error:
        raise ConvertError(str(error)) from None


def expect(fields: Mapping[str, Any], name: str, *values: Any) -> Any:
    """Return a field's value (the first of `values` if it is missing); require one of `values`."""
    value = fields.get(name, values[0])
    if value not in values:
        known = " or ".join(map(str, values))
        raise ConvertError(f"{name} = {value!r} is not supported; expected {known}")
    return value


def given(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a field, or its family's default if it is missing or null."""
    value = fields.get(name)
    return default if value is None else value


def read_rope(c: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return (theta, scaling) from ``rope_parameters`` or ``rope_scaling``. The latter is the name
    before transformers 5. Even there it takes precedence, and so does an original length outside of
    both."""
    p = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in p.values()):
        raise ConvertError(
            "rope_parameters must be one set for all layers, got one per layer type "
            f"({', '.join(p)})"
        )
    theta = float(p.get("rope_theta", c.get("rope_theta", 10000.0)))
    expect({**c, **p}, "partial_rotary_factor", 1.0)
    kind = p.get("rope_type", p.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise ConvertError(
            f"RoPE scaling of type {kind!r} is not supported; expected linear, llama3 or yarn"
        )
    factor = float(p["factor"])
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    length = given(p, "original_max_position_embeddings", c["max_position_embeddings"])
    length = given(c, "original_max_position_embeddings", length)
    if kind == "llama3":
        low, high = float(p["low_freq_factor"]), float(p["high_freq_factor"])
        return theta, RopeScaling("llama3", factor, length, low, high)
    attention = p.get("attention_factor")
    if attention is None and p.get("mscale") and p.get("mscale_all_dim"):
        above, below = (
            0.1 * p[name] * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim")
        )
        attention = above / below
    low, high = float(given(p, "beta_slow", 1.0)), float(given(p, "beta_fast", 32.0))
    return theta, RopeScaling("yarn", factor, length, low, high, attention, p.get("truncate", True))


def write_rope(c: GPTConfig) -> dict[str, Any]:
    """Return the ``rope_parameters`` from which `read_rope` restores the rotary embedding."""
    s, theta = c.rope_scaling, {"rope_theta": c.rope_theta}
    if s is None:
        return {"rope_type": "default", **theta}
    out = {"rope_type": s.kind, "factor": s.factor, **theta}
    if s.kind == "llama3":
        out |= {"low_freq_factor": s.low, "high_freq_factor": s.high}
    if s.kind == "yarn":
        out |= {"beta_slow": s.low, "beta_fast": s.high, "truncate": s.truncate}
        if s.attention_factor is not None:
            out["attention_factor"] = s.attention_factor
    if s.kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = s.original_length
    return out
