"""Dropout: the generator's published vectors, and one mask for every layout and implementation."""

import pytest
import torch
from close import assert_close_f64
from well_formed import well_formed

from warpweave.kernels import dropout as module
from warpweave.kernels import reference
from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.norm import rms_norm

IMPLS = ("torch", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)
SEED = 2**40 + 12345


def test_the_reference_generator_gives_the_published_vectors() -> None:
    """Compare with Random123's kat_vectors, philox4x32 with 10 rounds."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert reference.philox((0,) * 4, (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    words = 0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD
    assert reference.philox((ones,) * 4, (ones,) * 2) == words
    assert reference.philox(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    as_tensors = [torch.tensor(word) for word in pi[0]]
    assert tuple(int(w) for w in reference.philox(as_tensors, pi[1])) == reference.philox(*pi)


@impls
@pytest.mark.parametrize("shape", [(1, 1), (37, 67), (3, 2050), (130, 8), (0, 5)], ids=str)
def test_every_implementation_gives_the_bits_of_the_reference(shape, impl) -> None:
    x = torch.randn(shape)
    tokens = torch.arange(shape[0]) * 7919 * 2**28  # beyond 32 bits
    for p, site in ((0.1, 0), (0.5, 2**32 - 1)):
        arguments = {"seed": SEED, "site": site, "tokens": tokens}
        truth = reference.dropout(x, p, **arguments)
        assert torch.equal(dropout(x, Drop(p, **arguments), impl=impl), truth)


def test_the_torch_path_is_right_across_its_chunks() -> None:
    tokens = torch.arange(700) + 5
    for rows, columns in ((700, 101), (3, 2**16 + 5)):  # 630 rows at a time, one with more groups
        key = {"seed": SEED, "site": 9, "tokens": tokens[:rows]}
        dropped = module.dropped(Drop(0.3, **key), columns)
        kept = reference.dropout(torch.ones(rows, columns), 0.3, **key) != 0
        assert torch.equal(dropped, ~kept)


def test_a_probability_is_rounded_to_the_nearest_word() -> None:
    found = [module.threshold(p) for p in (0.0, 2**-33 * 1.5, 0.1, 0.25, 0.7, 1 - 2**-53)]
    assert found == [0, 1, 429496730, 2**30, 3006477107, 2**32]


@impls
def test_a_probability_that_rounds_to_one_drops_everything(impl) -> None:
    x, tokens = torch.ones(3, 7, dtype=torch.float64), torch.arange(3)
    for p, words in ((1 - 1e-12, 2**32), (1 - 2**-32, 2**32 - 1)):
        assert module.threshold(p) == words
        y = dropout(x.requires_grad_(), Drop(p, 5, 1, tokens), impl=impl)
        assert not y.any()
        assert not torch.autograd.grad(y.sum(), x)[0].any()
        y, s = rms_norm(x, x[0], residual=x, drop=Drop(p, 5, 1, tokens), impl=impl)
        assert torch.equal(s, x)
        assert y.all()


@impls
def test_every_key_changes_the_mask(impl) -> None:
    x, tokens = torch.ones(64, 67), torch.arange(64)

    def mask(seed=SEED, site=3, shift=0):
        return dropout(x, Drop(0.5, seed, site, tokens + shift), impl=impl) != 0

    base = mask()
    others = [mask(seed=SEED + 1), mask(seed=SEED + 2**32), mask(site=4), mask(shift=2**32)]
    for other in others:
        assert 0.4 < (other != base).float().mean() < 0.6
    assert torch.equal(mask(shift=1)[:-1], base[1:])


@impls
def test_any_sharding_of_the_tokens_drops_the_same(impl) -> None:
    x, tokens = torch.randn(40, 33), torch.randperm(40) + 2**33
    whole = dropout(x, Drop(0.2, 1, 2, tokens), impl=impl)
    parts = [dropout(x[i::3], Drop(0.2, 1, 2, tokens[i::3]), impl=impl) for i in range(3)]
    for i, part in enumerate(parts):
        assert torch.equal(part, whole[i::3])


def test_the_rate_is_p_and_columns_are_independent() -> None:
    n, p = 4000, 0.3
    kept = dropout(torch.ones(n, 64), Drop(p, 0, 0, torch.arange(n))) != 0
    rates = kept.double().mean(0)
    assert (rates - (1 - p)).abs().max() < 5 * (p * (1 - p) / n) ** 0.5
    assert torch.corrcoef(kept.double().T).fill_diagonal_(0).abs().max() < 6 / n**0.5


@impls
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_kept_values_and_gradients_are_scaled_and_dropped_ones_are_zero(dtype, impl) -> None:
    x = torch.randn(37, 66).to(dtype)[:, ::2].requires_grad_()
    dy = torch.randn(37, 33).to(dtype)
    y = dropout(x, Drop(0.25, 5, 1, torch.arange(37)), impl=impl)
    (dx,) = torch.autograd.grad(y, x, dy)
    kept = y != 0
    assert 0.6 < kept.double().mean() < 0.9
    scale = 1 / 0.75
    assert torch.equal(y, torch.where(kept, x * scale, 0))
    assert torch.equal(dx, torch.where(kept, dy * scale, 0))


@impls
def test_dropping_infinity_gives_zero_and_p_zero_is_the_identity(impl) -> None:
    x = torch.full((50, 8), float("inf"))
    y = dropout(x, Drop(0.5, 5, 1, torch.arange(50)), impl=impl)
    assert not y.isnan().any()
    assert (y == 0).any()
    assert dropout(x, Drop(0.0, 5, 1, torch.arange(50)), impl=impl) is x


@impls
def test_gradcheck(impl) -> None:
    x, tokens = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.arange(3)
    assert torch.autograd.gradcheck(lambda x: dropout(x, Drop(0.5, 1, 1, tokens), impl=impl), x)
    y = dropout(x, Drop(0.5, 1, 1, tokens), impl=impl)
    assert_close_f64(y, reference.dropout(x, 0.5, seed=1, site=1, tokens=tokens), 1e-15)


def test_the_operators_are_well_formed() -> None:
    x, tokens = torch.randn(3, 5, requires_grad=True), torch.arange(3)
    well_formed(module.dropout_op, x, Drop(0.1, SEED, 2, tokens))
    well_formed(module.dropped, Drop(0.1, SEED, 2, tokens), 5)


def test_rows_times_strides_past_two_to_the_31_do_not_wrap() -> None:
    """The memory between the rows is never touched."""
    rows, stride = 2**11 + 16, 2**20
    x = torch.empty(rows * stride, dtype=torch.float16).as_strided((rows, 2), (stride, 1))
    near = x.copy_(torch.randn(rows, 2)).contiguous()
    drop = Drop(0.5, SEED, 2, torch.arange(rows))
    assert torch.equal(dropout(x, drop, impl="triton"), dropout(near, drop, impl="torch"))
