"""Merging partial attention: against the reference, against whole attention, and with -inf."""

import pytest
import torch
from close import assert_close_f64, relative_error

from warpweave.kernels import reference
from warpweave.kernels.merge import merge, merge_


def _partial(dtype: torch.dtype = torch.float64, shift: float = 0.0):
    return torch.randn(2, 7, 3, 5, dtype=dtype), torch.randn(2, 3, 7, dtype=dtype) + shift


def test_merge_equals_the_reference_and_in_place_equals_merge() -> None:
    (o_a, lse_a), (o_b, lse_b) = _partial(), _partial(shift=2.0)
    o, lse = merge(o_a, lse_a, o_b, lse_b)
    want_o, want_lse = reference.merge(o_a, lse_a, o_b, lse_b)
    assert_close_f64(o, want_o, 1e-14)
    assert_close_f64(lse, want_lse, 1e-14)
    assert merge_(o_a, lse_a, o_b, lse_b)[0] is o_a
    assert torch.equal(o_a, o)
    assert torch.equal(lse_a, lse)


def test_merging_the_parts_of_a_row_in_any_order_is_attention_over_the_row() -> None:
    q = torch.randn(2, 7, 3, 5, dtype=torch.float64)
    k, v = torch.randn(2, 2, 13, 3, 5, dtype=torch.float64)
    whole, whole_lse = reference.attention(q, k, v, causal=False)
    parts = [
        reference.attention(q, k[:, a:b], v[:, a:b], causal=False)
        for a, b in ((0, 4), (4, 5), (5, 13))
    ]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        o, lse = torch.zeros_like(q), torch.full((2, 3, 7), -float("inf"), dtype=torch.float64)
        for n in order:
            merge_(o, lse, *parts[n])
        assert_close_f64(o, whole, 1e-14)
        assert_close_f64(lse, whole_lse, 1e-14)
    log2_units = [(o, lse / 0.6931471805599453) for o, lse in parts]
    assert relative_error(merge(*log2_units[0], *log2_units[2])[0], whole) > 1e-3


@pytest.mark.parametrize("merger", [merge, reference.merge])
def test_a_side_without_keys_changes_nothing_to_the_last_bit(merger) -> None:
    o, lse = _partial()
    empty_o, empty_lse = torch.zeros_like(o), torch.full_like(lse, -float("inf"))
    for arguments in ((o, lse, empty_o, empty_lse), (empty_o, empty_lse, o, lse)):
        merged_o, merged_lse = merger(*arguments)
        assert torch.equal(merged_o, o)
        assert torch.equal(merged_lse, lse)
    both_o, both_lse = merger(empty_o, empty_lse, empty_o, empty_lse)
    assert torch.equal(both_o, empty_o)
    assert torch.equal(both_lse, empty_lse)


def test_empty_rows_among_others_do_not_disturb_them() -> None:
    (o_a, lse_a), (o_b, lse_b) = _partial(), _partial()
    lse_a[:, :, :4], o_a[:, :4] = -float("inf"), 0.0
    lse_b[:, :, 2:5], o_b[:, 2:5] = -float("inf"), 0.0
    for got, want in zip(merge(o_a, lse_a, o_b, lse_b), reference.merge(o_a, lse_a, o_b, lse_b)):
        assert not got.isnan().any()
        assert_close_f64(got, want, 1e-14)


@pytest.mark.parametrize("gap", [100.0, 1000.0, -1000.0])
def test_a_gap_that_overflows_the_exponential_does_not_overflow_the_merge(gap: float) -> None:
    (o_a, lse_a), (o_b, lse_b) = _partial(torch.float32), _partial(torch.float32, gap)
    o, lse = merge(o_a, lse_a, o_b, lse_b)
    assert torch.equal(o, o_b if gap > 0 else o_a)
    assert torch.equal(lse, lse_b if gap > 0 else lse_a)
