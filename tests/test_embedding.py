"""Embeddings: nn.Embedding on one device, its rows on tensor ranks, padding included."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
import torch.distributed as dist
from close import assert_close_f64
from refused import check
from sharded import MESHES, RTOL, check_layer, draw
from threads import run_threads
from torch import nn

from warpweave.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.tensor import vocab_parallel_embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_drawn_named_and_shaped_as_nn_embedding(dtype):
    torch.manual_seed(3)
    theirs = nn.Embedding(13, 5, dtype=dtype)
    torch.manual_seed(3)
    ours = VocabParallelEmbedding(13, 5, dtype=dtype)
    assert list(ours.state_dict()) == ["weight"]
    assert torch.equal(ours.weight, theirs.weight)
    names = [list(inspect.signature(c).parameters)[:2] for c in (nn.Embedding, type(ours))]
    assert names == [["num_embeddings", "embedding_dim"]] * 2


def test_arguments_of_nn_embedding_that_it_lacks_are_not_taken_for_others():
    with pytest.raises(TypeError, match="positional"):
        VocabParallelEmbedding(13, 5, 0)  # padding_idx


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 0), (2, 1, 3)])
def test_it_looks_up_what_nn_embedding_does_for_ids_of_any_shape(shape):
    theirs = nn.Embedding(13, 5, dtype=torch.float64)
    ours = VocabParallelEmbedding(13, 5, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ids = torch.randint(0, 13, shape)
    dy = draw(1, *shape, 5)
    for layer in (theirs, ours):
        layer(ids).backward(dy)
    assert torch.equal(ours(ids), theirs(ids))
    assert_close_f64(ours.weight.grad, theirs.weight.grad, 1e-14)


def test_ids_with_gaps_between_them_are_looked_up():
    layer = VocabParallelEmbedding(13, 5)
    ids = torch.arange(12).view(3, 4).t()[::2]
    assert torch.equal(layer(ids), layer.weight[ids])


def _outside(rank: int) -> None:
    group, last = dist.group.WORLD, torch.tensor([0, 12])
    table = draw(1, 24, 5).chunk(3)[rank]  # padded: rank 1 has ids 8 to 15, rank 2 has none
    given = {"group": group, "vocab_size": 13, "padded_vocab_size": 24}
    for cut in ({}, {"sequence_parallel": True}):
        ids = torch.cat((last, last[:1])) if cut else last
        found = vocab_parallel_embedding(ids, table, **given, **cut)
        whole = draw(1, 24, 5)[ids]
        assert torch.equal(found, whole[rank : rank + 1] if cut else whole)
        for wrong in (-1, -13, 13, 23, 24):  # ids of padding, or of nothing
            call = partial(vocab_parallel_embedding, torch.full_like(ids, wrong), table)
            check(partial(call, **given, **cut), r"an id is outside \[0, 13\)", RuntimeError)
    for wrong in (-1, 13, 23):
        call = partial(vocab_parallel_embedding, torch.full_like(last, wrong), draw(1, 24, 5))
        check(partial(call, **given | {"group": None}), r"outside \[0, 13\)", RuntimeError)


def test_first_and_last_ids_are_looked_up_and_ids_outside_are_on_no_rank():
    run_threads(3, _outside)


def test_meta_then_to_empty_then_reset_is_a_fresh_layer():
    for make in (
        lambda device: VocabParallelEmbedding(13, 5, device=device),
        lambda device: PositionEmbedding(7, 5, init=0.3, device=device),
    ):
        torch.manual_seed(3)
        expected = make("cpu")
        later = make("meta").to_empty(device="cpu")
        torch.manual_seed(3)
        later.reset_parameters()
        assert torch.equal(later.weight, expected.weight)


def test_positions_are_plain_rows_of_their_table():
    torch.manual_seed(3)
    layer = PositionEmbedding(4096, 5, init=0.5)
    assert layer.weight.std().item() == pytest.approx(0.5, rel=0.02)
    positions = torch.tensor([3, 0, 3])
    assert torch.equal(layer(positions), layer.weight[positions])
    check(
        lambda: layer(positions.float()),
        "positions must be an int64 or int32 tensor, got torch.float32",
    )
    layer(positions).sum().backward()
    assert layer.weight.grad[:5, 0].tolist() == [1, 0, 0, 2, 0]


def test_descriptions_name_sizes_and_cut():
    layer = VocabParallelEmbedding(13, 5)
    assert layer.extra_repr() == "13, 5, tp=1, sequence_parallel=False"
    cut = VocabParallelEmbedding(13, 5, mesh=Mesh(tp=2).seen_from(1), sequence_parallel=True)
    assert cut.extra_repr() == "13, 5, tp=2, sequence_parallel=True"
    assert repr(PositionEmbedding(7, 5)) == "PositionEmbedding(7, 5)"


def _vocabulary(size: int, **options):
    return lambda mesh: VocabParallelEmbedding(size, 5, dtype=torch.float64, mesh=mesh, **options)


def _on_ranks(rank: int, sizes: Mesh) -> None:
    mesh, tp = sizes.connect(), sizes.tp
    flat, batch = draw(1, 24).mul(100).long(), draw(2, 2, 7).mul(100).long()
    for size in (53, 13, 5, 12):  # primes; with 5 on 4 ranks one holds only padding
        ids, more = flat.abs() % size, batch.abs() % size
        check_layer(_vocabulary(size), more, mesh)
        check_layer(_vocabulary(size), more[:0], mesh)
        check_layer(_vocabulary(size, sequence_parallel=True), ids, mesh, cut_out=0)
        rows = _vocabulary(size)(mesh).weight
        held = max(0, min(size - mesh.index("tp") * len(rows), len(rows)))
        assert len(rows) == -(-size // tp)
        assert not rows[held:].any(), "padding is not zero"
    words = rf"ids\[T\] with T divisible by the {tp} tensor-parallel ranks"
    layer = _vocabulary(13, sequence_parallel=True)(mesh)
    check(lambda: layer(flat[: tp + 1].abs() % 13), words)
    _positions(mesh, tp)


def _positions(mesh, tp: int) -> None:
    """Test sequence-parallel positions: every rank looks up its own, and
    gradients are partial sums."""
    layer = PositionEmbedding(12, 5, dtype=torch.float64, partial=True)
    assert layer.records["weight"].partial == ("tp",)
    mine = torch.arange(12).chunk(tp)[mesh.index("tp")]
    layer(mine).backward(draw(4, 12, 5)[mine])
    dist.all_reduce(layer.weight.grad, group=mesh.group("tp"))
    assert_close_f64(layer.weight.grad, draw(4, 12, 5), RTOL)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_prime_vocabularies_equal_one_device_on_tensor_ranks(sizes):
    run_threads(sizes.world, _on_ranks, sizes)
