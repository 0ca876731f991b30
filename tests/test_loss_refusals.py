"""Losses reject invalid arguments and accept valid ones: each condition
of a check is tested alone."""

from __future__ import annotations

import pytest
import torch
from refused import Rows, Table, ints, strided
from refused import zeros as z

from warpweave.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_bwd,
    cross_entropy_fwd,
    linear_cross_entropy,
)

NAN, INF = float("nan"), float("inf")
F64, INT = torch.float64, torch.int64

LABELS, LOSSES = ints(1, -100, 9), z(3)
OPTIONS: Rows = [
    ({}, None),
    *[({"reduction": name}, None) for name in ("mean", "sum", "none")],
    ({"reduction": "avg"}, "reduction must be"),
    ({"label_smoothing": 1.0}, None),
    ({"label_smoothing": 1.001}, r"label_smoothing must be in \[0, 1\], got 1.001"),
    ({"label_smoothing": -0.001}, "label_smoothing must be in"),
    ({"label_smoothing": NAN}, "label_smoothing must be in"),
    ({"z_loss": 1e30}, None),
    *[({"z_loss": c}, "z_loss must be finite and not negative") for c in (-1e-9, INF, NAN)],
    ({"labels": ints(1, 10, -100)}, r"labels must be in \[0, 10\) or -100, got 10"),
    ({"labels": ints(1, -1, -100)}, "labels must be in .* got -1"),
    ({"labels": ints(12, -100, -1)}, "got 12$"),  # the first of several
    ({"labels": ints(1, 7, -1), "ignore_index": -1}, None),
    ({"labels": ints(1, 7, 99), "ignore_index": 99}, None),
    ({"labels": LABELS.int()}, "int64"),
    ({"labels": LABELS[:2]}, r"\[2\]"),
    ({"vocab_size": 10}, None),
    ({"vocab_size": 11}, "got 11"),
    ({"vocab_size": 0}, "0"),
    ({"vocab_size": 0, "labels": ints(-100, -100, -100)}, "vocab_size .*got 0"),
    ({"vocab_size": 9}, r"labels must be in \[0, 9\) or -100, got 9"),
]
CROSS: Rows = [
    *OPTIONS,
    ({"logits": z(3, 10, 1)}, r"need logits\[N, V\]"),
    ({"logits": z(3, 10, dtype=INT)}, "logits must have a float dtype"),
]
CROSS_HALF: Rows = [
    ({}, None),
    ({"vocab_start": 90}, None),
    ({"vocab_start": -1}, "vocab_start >= 0"),
    ({"vocab_size": 1, "labels": ints(0, 0, 0)}, None),
    ({"vocab_size": 0}, "vocab_size >= 1, got 0, 0"),
    ({"vocab_size": 9}, "got 9"),
]
CROSS_BACK: Rows = [
    ({}, None),
    ({"dloss": z(2)}, r"need dloss and lse \[3\]"),
    ({"lse": z(2)}, r"need dloss and lse \[3\]"),
    *[
        ({name: z(*shape)}, r"need dloss and lse \[3\], got .*\[(4|3, 1|1, 3)\]")
        for name in ("dloss", "lse")
        for shape in ((4,), (3, 1), (1, 3))
    ],
    ({"in_place": True}, None),
    ({"in_place": True, "logits": strided(z(3, 10))}, "contiguous rows"),
    ({"logits": strided(z(3, 10))}, None),
    ({"in_place": True, "logits": z(1, 10).expand(3, 10)}, "elements must not share memory"),
    ({"in_place": True, "logits": strided(z(3, 1)), "labels": 0 * LABELS}, None),
]
HEAD: Rows = [
    *OPTIONS,
    ({"x": z(4)}, "needs x"),
    ({"x": z(3, 5)}, "needs x"),
    ({"weight": z(10, 4, 1)}, "needs x"),
    ({"x": z(3, 1, 4), "labels": LABELS[:, None]}, None),
    ({"labels": LABELS[:, None]}, r"needs labels int64\[3\]"),
    ({"x": z(3, 4, dtype=F64)}, "dtypes differ"),
    ({"x": z(3, 4, dtype=INT)}, "needs float dtypes"),
    ({"labels": LABELS.to("meta")}, "one device, got cpu and meta"),
    ({"impl": "cuda"}, "got 'cuda'"),
    ({"weight": z(10, 4, dtype=INT)}, "needs float dtypes"),
    ({"recompute": False}, None),
    ({"recompute": False, "reduction": "none"}, "same incoming gradient for every token"),
    ({"recompute": True, "reduction": "none"}, None),
]

GIVEN = {"logits": z(3, 10), "labels": LABELS}
TABLES = {
    "cross_entropy": Table(cross_entropy, GIVEN, CROSS),
    "cross_entropy_fwd": Table(cross_entropy_fwd, GIVEN, CROSS_HALF),
    "cross_entropy_bwd": Table(
        cross_entropy_bwd, GIVEN | {"dloss": LOSSES, "lse": LOSSES}, CROSS_BACK
    ),
    "linear_cross_entropy": Table(
        linear_cross_entropy, {"x": z(3, 4), "weight": z(10, 4), "labels": LABELS}, HEAD
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_what_breaks_one_rule_is_refused_and_what_breaks_none_is_not(name) -> None:
    TABLES[name].check()


@pytest.mark.parametrize("name", TABLES)
def test_one_of_many_is_not_broadcast(name) -> None:
    alone = {("logits", 1)} if name == "cross_entropy_bwd" else set()
    assert TABLES[name].one_of_many() == alone


@pytest.mark.parametrize("name", TABLES)
def test_every_tensor_must_be_on_the_device_of_the_others(name) -> None:
    TABLES[name].elsewhere()
