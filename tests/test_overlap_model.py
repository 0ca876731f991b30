"""The model of overlapped products: arithmetic by hand, what must be monotone, what it picks."""

import dataclasses
import itertools

import pytest

from warpweave.kernels.devices import DEVICES, find_device
from warpweave.parallel.tensor import overlap_model
from warpweave.parallel.tensor.overlap_model import (
    Product,
    predict,
    product_seconds,
    recommend,
)

H100 = find_device("NVIDIA H100 80GB HBM3")
LARGE = Product(8192, 3584, 8192, 8, "gather")


def test_a_device_is_known_by_its_name():
    assert find_device("NVIDIA H100 80GB HBM3").name == "H100"
    assert find_device("NVIDIA GeForce RTX 4090") is None


def test_what_moves_is_counted_by_hand():
    M, N, K, R = 24, 5, 7, 3
    rows, terms = M // R * K, M // R * N
    assert Product(M, N, K, R, "gather").moved == 2 * rows * 2
    assert Product(M, N, K, R, "scatter").moved == 2 * terms * 4
    assert Product(M, N, K, R, "scatter", wire=2).moved == 2 * terms * 2
    assert Product(M, N, K, R, "reduce").moved == 2 * 2 * terms * 4
    assert Product(M, N, K, R, "scatter", size=8).moved == 2 * terms * 8
    assert Product(M, N, K, 1, "reduce").moved == 0


def test_pieces_are_as_many_messages_as_ranks_that_receive_them():
    """A product of nothing, whose messages take all the time: a gather sends R-1 pieces, a sum that
    all ranks want R of them. A quarter of what moves is paid for by who multiplies."""
    for moves, pieces in (("gather", 7), ("scatter", 7), ("reduce", 8)):
        product = Product(8 * 2**17, 8, 8, 8, moves)
        found = predict(product, H100, "network", symmetric=True)
        piece = product_seconds(2**17, 8, 8, H100)
        moving = product.moved / (overlap_model.TRAFFIC * H100.network)
        messages = pieces * overlap_model.MESSAGE + moving
        assert moving > 10 * piece
        assert found.chunked == pytest.approx(piece + messages + 0.25 * moving)
        assert found.fused is None  # there is no symmetric memory over a network


def test_what_is_fused_adds_terms_where_there_are_any():
    """A product of nothing again: two launches and a flag, what moves, a quarter of it once more;
    and a sum reads its terms, all of all ranks' in one shot where all ranks want it."""
    R, rows = 8, 8 * 2**17
    for moves in ("gather", "scatter", "reduce"):
        product = Product(rows, 8, 8, R, moves)
        found = predict(product, H100, symmetric=True)
        terms, rate = rows * 8 * 4, overlap_model.TRAFFIC * H100.nvlink
        multiplying = (found.product - overlap_model.LAUNCH) / overlap_model.TRITON
        moving = product.moved / rate
        fixed = 2 * overlap_model.LAUNCH + overlap_model.FLAG
        assert moving > multiplying / R
        expected = {
            "gather": moving + multiplying / R + 0.25 * moving,
            "scatter": moving + multiplying / R + 0.25 * moving + terms / H100.memory,
            "reduce": multiplying + max((R - 1) * terms / rate, R * terms / H100.memory),
        }
        assert found.fused == pytest.approx(fixed + expected[moves]), moves


@pytest.mark.parametrize("size", [2, 8])
def test_what_is_fused_moves_rows_in_their_dtype_and_terms_in_fp32(size):
    for moves, wire in (("gather", size), ("scatter", max(4, size)), ("reduce", max(4, size))):
        product = dataclasses.replace(LARGE, moves=moves, size=size)
        said = dataclasses.replace(product, wire=wire)
        assert predict(product, H100, symmetric=True) == predict(said, H100, symmetric=True)
        half = dataclasses.replace(product, wire=wire // 2)
        assert predict(half, H100, symmetric=True).fused < predict(said, H100, symmetric=True).fused


def test_a_product_takes_whole_waves():
    """132 tiles of 128 x 256 are one wave, one more is two; unless smaller tiles suit better."""
    K = 8192
    wave = 2 * 128 * 256 * K * 132 / (overlap_model.PRODUCT * 989e12)
    one = product_seconds(128 * 132, 256, K, H100)
    assert one == pytest.approx(overlap_model.LAUNCH + wave)
    more = product_seconds(128 * 133, 256, K, H100) - overlap_model.LAUNCH
    assert more == pytest.approx(5 * 1.3 / 4 * wave)  # five waves of 64 x 128
    thin = product_seconds(1, 1 << 20, 64, H100) - overlap_model.LAUNCH
    assert thin >= (1 << 20) * 65 * 2 / 3.35e12  # of the memory


@pytest.mark.parametrize("moves", ["gather", "scatter", "reduce"])
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_what_must_be_monotone_is(moves, device):
    def at(**changes):
        product = dataclasses.replace(Product(4096, 2048, 4096, 8, moves), **changes)
        found = predict(product, device, symmetric=True)
        return [found.product, found.messages, found.whole, found.fused]

    for size in ("M", "N", "K"):
        steps = [at(**{size: 1 << n}) for n in range(9, 16)]
        for less, more in itertools.pairwise(steps):
            assert all(a <= b for a, b in zip(less, more)), size
    for rate in ("half", "memory", "nvlink"):
        faster = dataclasses.replace(device, **{rate: 2 * getattr(device, rate)})
        product = Product(4096, 2048, 4096, 8, moves)
        slow, fast = (predict(product, d, symmetric=True) for d in (device, faster))
        assert all(a >= b for a, b in zip(dataclasses.astuple(slow), dataclasses.astuple(fast))), (
            rate
        )


@pytest.mark.parametrize("moves", ["gather", "scatter", "reduce"])
def test_nothing_is_faster_than_what_it_hides(moves):
    """Neither than the product, nor than the messages at full speed: so no gain reaches 2."""
    for M in (256, 1000, 4096, 32768):
        for N, K in ((3584, 8192), (8192, 1024), (8192, 3584)):
            p = predict(Product(M, N, K, 8, moves), H100, symmetric=True)
            for seconds in (p.chunked, p.fused):
                assert seconds > max(p.product, p.messages - overlap_model.MESSAGE)
                assert p.whole / seconds < 2


def test_it_fuses_where_peers_memory_can_be_reached_and_the_product_is_large():
    choice = recommend(LARGE, H100, symmetric=True)
    assert choice.overlap == "fused"
    assert 1.1 < choice.gain < 1.6
    assert choice.gain == choice.predicted.whole / choice.predicted.fused
    for options in ({"symmetric": False}, {"symmetric": True, "link": "network"}):
        other = recommend(LARGE, H100, **options)
        assert other.overlap != "fused"
        assert other.predicted.fused is None
    slow = dataclasses.replace(LARGE, N=28672)  # the network takes as long as the product
    assert recommend(slow, H100, "network", symmetric=False).overlap == "chunked"


@pytest.mark.parametrize(
    ("product", "why"),
    [
        (dataclasses.replace(LARGE, M=2047), "fewer than 2048 rows"),
        (dataclasses.replace(LARGE, M=2048, N=1024), "less than 1e+11 FLOP"),
        (dataclasses.replace(LARGE, ranks=1), "one rank moves nothing"),
        (Product(4096, 65536, 512, 8, "gather"), "nothing would be faster"),
    ],
)
def test_it_leaves_alone_what_would_lose(product, why):
    choice = recommend(product, H100, symmetric=True)
    assert (choice.overlap, choice.gain) == ("whole", 1.0)
    assert choice.why.endswith(why)


def test_it_says_what_and_why_and_that_this_is_a_prediction():
    lines = str(recommend(LARGE, H100, symmetric=True)).splitlines()
    assert lines[0] == (
        "overlap: fused, gather around [8192, 8192] [8192, 3584] on 8 x H100 over nvlink"
    )
    assert lines[1].startswith("PREDICTION: 1.")
    assert len(lines) == 3
    assert str(recommend(LARGE, None, symmetric=True)) == (
        "overlap: whole, nothing is known of the speed of this device"
    )
