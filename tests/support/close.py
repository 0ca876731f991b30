"""Comparisons of numbers: norm-wise in float64, or within an error budget in low precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max|actual - expected| / max|expected| in float64. Equal
    infinities agree; NaN never does."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    if actual.numel() == 0:
        return 0.0
    a, b = actual.detach().double(), expected.detach().double()
    same = (a == b) | (a.isneginf() & b.isneginf()) | (a.isposinf() & b.isposinf())
    difference = torch.where(same, 0.0, (a - b).abs())
    scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
    error = difference.max().item()
    if error != error:
        return float("inf")
    return error / scale if scale > 0 else error


def assert_close_f64(actual: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-11) -> None:
    """Assert that `actual` equals `expected` up to `rtol` of the largest expected magnitude."""
    error = relative_error(actual, expected)
    assert error <= rtol, f"relative error {error:.3e} > {rtol:.1e}"


def assert_all_close(
    actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], rtol: float = 1e-12
) -> None:
    """Apply `assert_close_f64` to each pair. Both sides must have the same length."""
    for a, b in zip(actual, expected, strict=True):
        assert_close_f64(a, b, rtol)


def assert_same_bits(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Assert that each tensor of `actual` is bitwise equal to its counterpart in `expected`."""
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def assert_error_budget(
    actual: torch.Tensor, same_dtype: torch.Tensor, truth: torch.Tensor, factor: float = 2.0
) -> None:
    """Assert error(actual) <= factor * error(same_dtype) + eps, both against the float64 `truth`.

    `same_dtype` is plain torch in the dtype under test. eps is that dtype's machine epsilon, so an
    exact torch result does not make the budget zero. In 16 bits, error(same_dtype) comes from
    rounding stored values and is equal on every CPU. In float32 it comes from rounding sums, in an
    order that depends on the CPU kernel. Such sums count as at least 2 eps.
    """
    eps = torch.finfo(same_dtype.dtype).eps
    least = 2 * eps if same_dtype.dtype == torch.float32 else 0.0
    budget = factor * max(relative_error(same_dtype, truth), least) + eps
    error = relative_error(actual, truth)
    assert error <= budget, f"relative error {error:.3e} > budget {budget:.3e}"


def assert_close_or_none(
    actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None], rtol: float
) -> None:
    """Like `assert_all_close`; both sides must be None in the same places."""
    assert [a is None for a in actual] == [b is None for b in expected]
    made = [(a, b) for a, b in zip(actual, expected) if a is not None]
    assert_all_close(*zip(*made), rtol)
