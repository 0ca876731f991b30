"""`overlap="chunked"`: the products of the blocking twin by chunks, with messages under the chunks.

Operands are small whole numbers if bits are compared. Every sum of them is exact, so the order in
which a smaller product adds does not matter, and any difference is a fault. The tests of the layers
compare layers of real numbers with one device.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable
from typing import get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from every_rank import every_rank
from plants import Plant, instead, noticed, planted
from ranks import NotedWork, run_ranks
from sharded import beside_replicas, draw, part, world
from threads import run_threads

from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import local
from warpweave.kernels.gemm.local import linear
from warpweave.kernels.runtime.wgrad import rows
from warpweave.parallel import tensor
from warpweave.parallel.collectives import Pending
from warpweave.parallel.tensor import chunked
from warpweave.parallel.tensor.ranks import TensorRanks, tensor_ranks
from warpweave.parallel.words import Overlap

K, N = 7, 5
SHARE = 3  # tokens of each rank
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
Tensors = tuple[torch.Tensor | None, ...]


def whole_numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (3 * draw(seed, *shape)).round().clamp(-4, 4).to(dtype)


def operands(dtype: torch.dtype, batch: tuple[int, ...] = (), tokens: int = SHARE) -> dict:
    """Return the whole problem; the ranks have the same bias, and different weights and h."""
    _, rank, ranks = world()
    T = tokens * ranks
    return {
        "x": whole_numbers(1, T, *batch, K, dtype=dtype),
        "weight": whole_numbers(2 + rank, N, K, dtype=dtype),
        "h": whole_numbers(12 + rank, T, *batch, K, dtype=dtype),
        "bias": whole_numbers(22, N, dtype=dtype),
        "dy": whole_numbers(23, T, *batch, N, dtype=dtype),
        "residual": whole_numbers(24, T, *batch, N, dtype=dtype),
    }


def column(ranks: TensorRanks, x: torch.Tensor, weight: torch.Tensor, **_) -> Tensors:
    """Return a product, None, and the tokens that each run was given."""

    def multiply(x: torch.Tensor, first: int) -> tuple:
        return linear(x, weight, None), None, first + torch.arange(len(x))

    return ranks.column_product(part(x, 0 if ranks.sequence_parallel else None), multiply)


def row(ranks: TensorRanks, h, weight, bias, residual, *, dropped: bool = False, **_) -> Tensors:
    cut = 0 if ranks.sequence_parallel else None
    tokens = torch.arange(residual[..., 0].numel()).view(residual.shape[:-1])
    drop = Drop(0.5, 5, 2, part(tokens, cut)) if dropped else None
    return (
        ranks.row_product(h, weight, bias),
        ranks.row_product(h, weight, None, residual=part(residual, cut)),
        ranks.row_product(h, weight, bias, residual=part(residual, cut), drop=drop),
    )


def gradients(ranks: TensorRanks, dy, weight, bias, **_) -> Tensors:
    def multiply(dy: torch.Tensor, first: int) -> tuple:
        dh = (rows(dy) @ weight).view(*dy.shape[:-1], K)
        return dh, None, first + torch.arange(len(dy))

    mine = part(dy, 0 if ranks.sequence_parallel else None)
    made, whole, db = ranks.row_gradients(mine, bias, multiply)
    return *made, whole, db, *ranks.row_gradients(mine, None, multiply)[1:]


def check(product: Callable[..., Tensors], sequence: bool, given: dict, **options) -> None:
    """Assert that chunked results equal those of the blocking twin bit by bit, twice."""
    group, *_ = world()
    words = ("none", "chunked", "chunked")
    every = (TensorRanks(group, sequence, word) for word in words)
    twin, *found = (product(ranks, **given, **options) for ranks in every)
    for tensors in found:
        for a, b in zip(tensors, twin, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def _equal(rank: int) -> None:
    for dtype, batch, sequence in itertools.product(DTYPES, ((), (2, 1)), (False, True)):
        given = operands(dtype, batch)
        check(column, sequence, given)
        check(gradients, sequence, given)
        check(row, sequence, given, dropped=not batch)
        wide = given["residual"].double()  # sums with it are also exact
        y, added, _ = row(TensorRanks(world()[0], sequence, "none"), **given | {"residual": wide})
        product = row(TensorRanks(world()[0], sequence, "none"), **given | {"bias": None})[0]
        assert (y.dtype, added.dtype) == (dtype, wide.dtype)
        assert torch.equal(added, part(wide, 0 if sequence else None) + product)
    for product, tokens in itertools.product((column, row, gradients), (0, 1)):
        check(product, True, operands(torch.float32, (), tokens))
    for tokens in (5, 1, 0):  # the ranks need not divide tokens that are not sharded
        given = operands(torch.float32)
        given |= {name: given[name][:tokens] for name in ("h", "residual")}
        check(row, False, given)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_chunks_give_the_bits_of_the_blocking_twin(ranks: int) -> None:
    run_threads(ranks, _equal)


def test_the_group_need_not_be_the_world() -> None:
    run_ranks(4, beside_replicas, _equal)


@every_rank(3)
def test_terms_are_added_in_the_order_of_ranks_everywhere(rank: int) -> None:
    """The sum of these terms differs for every order of adding."""
    _, _, ranks = world()
    scale = torch.tensor([1e16, 1.0, -1e16][:ranks], dtype=torch.float64)
    whole = torch.arange(1.0, ranks * SHARE + 1, dtype=torch.float64)[:, None]
    y = chunked.product_scatter(whole, lambda h: h * scale[rank], dist.group.WORLD)
    terms = part(whole, 0) * scale
    assert torch.equal(y, ((terms[:, 0] + terms[:, 1]) + terms[:, 2])[:, None])


def test_one_device_and_the_words() -> None:
    for overlap in get_args(Overlap):
        assert tensor_ranks(None, True, overlap) is tensor_ranks(None, False)
    with pytest.raises(ValueError, match="overlap must be one of none, bulk, chunked, fused"):
        tensor_ranks(None, True, "chunks")


# ---------------------------------------------------------------- overlap


def _order(rank: int) -> list[str]:
    """Return events per product: a message is (p)osted, a chunk is (m)ultiplied, a message is
    (w)aited for."""
    events: list[str] = []

    def multiply(part: torch.Tensor, first: int = 0) -> torch.Tensor:
        events.append("m")
        return part + 1

    send, reduce, drawn = dist.batch_isend_irecv, dist.all_reduce, []
    with (
        mock.patch.object(dist, "batch_isend_irecv", lambda ops: [NotedWork(send(ops), events)]),
        mock.patch.object(dist, "all_reduce", lambda x, **o: NotedWork([reduce(x, **o)], events)),
    ):
        x = torch.zeros(SHARE * world()[2], K)
        cut, uncut = (tensor_ranks(dist.group.WORLD, cut, "chunked") for cut in (True, False))
        for product in (
            lambda: cut.column_product(part(x, 0), multiply),
            lambda: cut.row_gradients(part(x, 0), None, multiply),
            lambda: cut.sum_product(x, multiply),
            lambda: uncut.sum_product(x, multiply),
            lambda: uncut.column_product(x, multiply),
        ):
            events.clear()
            product()
            drawn.append("".join(events))
    return drawn


def test_messages_are_under_way_while_chunks_are_multiplied() -> None:
    """This holds for all chunks but the last of a gather and the first of a
    sum, which is unavoidable."""
    expected = {
        2: ["pmwm", "pmwm", "mpmw", "mpmpww", "m"],
        3: ["ppmwmwm", "ppmwmwm", "mpmpmww", "mpmpmpwww", "m"],
    }
    for ranks, drawn in expected.items():
        assert run_ranks(ranks, _order) == [drawn] * ranks


def _hidden(rank: int) -> list[str]:
    """Return the same for a column-parallel backward, whose products are those of dx and dW."""
    events: list[str] = []

    def noted(start: Callable) -> Callable:
        def begin(x: torch.Tensor, group: dist.ProcessGroup) -> Pending:
            events.append("p")
            pending, waits = start(x, group), ["w"]
            return Pending(None, lambda: (events.extend(waits), waits.clear(), pending.wait())[2])

        return begin

    def told(product: Callable) -> Callable:
        return lambda *tensors, **options: (events.append("m"), product(*tensors, **options))[1]

    starts, drawn = ("start_all_gather", "start_reduce_scatter", "start_all_reduce_"), []
    products = (Plant(module, "gemm", told) for module in (tensor.ranks, local))
    with planted(*products, *(Plant(tensor.ranks, name, noted) for name in starts)):
        whole, w = torch.zeros(SHARE * world()[2], K), torch.zeros(N, K)
        for word, cut in itertools.product(("none", "bulk"), (True, False)):
            x, dz = part(whole, 0) if cut else whole, torch.zeros(len(whole), N)
            events.clear()
            ranks = tensor_ranks(dist.group.WORLD, cut, word)
            ranks.column_gradients(dz, x, w, (w, None), (True, True, False))
            drawn.append("".join(events))
    return drawn


def test_bulk_hides_collectives_behind_the_products_and_its_twin_nothing() -> None:
    assert run_ranks(2, _hidden) == [["pwmpwm", "mpwm", "pmpwmw", "mpmw"]] * 2


@every_rank(2, run_ranks)
def test_a_rank_that_never_comes_is_waited_for_as_long_as_the_group_says(rank: int) -> None:
    for product in (
        lambda ranks: ranks.column_product(torch.ones(2, 2), lambda x, _: x),
        lambda ranks: ranks.sum_product(torch.ones(2, 2), lambda h: h + 1),
    ):
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
        if rank == 0:
            began = time.monotonic()
            with pytest.raises(
                RuntimeError, match=r"rank 0 of 2: a message .* ranks \[1\] .*[Tt]imed out"
            ):
                product(tensor_ranks(group, True, "chunked"))
            assert time.monotonic() - began < 60
        dist.barrier()


# ---------------------------------------------------------------- planted faults

EXCHANGE, JOINED = chunked.start_exchange, chunked.joined
GATHER, SCATTER, ROW = chunked.gather_product, chunked.product_scatter, TensorRanks.row_product


def _stale(send, recv, dest, source, group):
    """Plant: a chunk is used before it has arrived, so its buffer holds old values."""
    EXCHANGE(send, torch.empty_like(recv), dest, source, group).wait()
    return Pending(None, recv.zero_)


def _the_other_way(send, recv, dest, source, group):
    """Plant: messages go around the ring in reverse, which shows on three ranks and more."""
    return EXCHANGE(send, recv, source, dest, group)


def _by_arrival(chunks):
    """Plant: this rank's chunk comes first, then those of rank + 1, ..."""
    rank = world()[1] * isinstance(chunks[0], torch.Tensor)  # not for tuples, but for tensors
    return JOINED([*chunks[rank:], *chunks[:rank]])


def _always_own_run(x, multiply, group):
    """Plant: every chunk is labeled with this rank's tokens."""
    return GATHER(x, lambda part, _: multiply(part, world()[1] * len(x)), group)


def _twice(h, multiply, group):
    """Plant: this rank's own term is added twice."""
    return SCATTER(h, multiply, group) + part(multiply(h), 0)


def _bias_per_chunk(ranks, h, weight, bias, **options):
    y = ROW(ranks, h, weight, bias, **options)
    return y if bias is None or ranks.overlap == "none" else y + (world()[2] - 1) * bias


FAULTS = {
    "a stale chunk": (chunked, "start_exchange", _stale, (column, row, gradients), 2),
    "the other way": (chunked, "start_exchange", _the_other_way, (column, row, gradients), 3),
    "joined by arrival": (chunked, "joined", _by_arrival, (column, gradients), 2),
    "first of the own run": (chunked, "gather_product", _always_own_run, (column,), 2),
    "a term twice": (chunked, "product_scatter", _twice, (row,), 2),
    "a bias per chunk": (TensorRanks, "row_product", _bias_per_chunk, (row,), 2),
}


def _planted(rank: int) -> None:
    given = operands(torch.float32)
    for name, (where, place, fault, products, ranks) in FAULTS.items():
        for product in products if world()[2] >= ranks else ():
            with planted(instead(where, place, fault)):
                found = noticed(world()[0], check, product, True, given)
            assert found >= world()[2] - 1, f"{name}, {product.__name__}: noticed on {found} ranks"


@pytest.mark.parametrize("ranks", [2, 3])
def test_planted_faults_are_noticed(ranks: int) -> None:
    run_ranks(ranks, _planted)
