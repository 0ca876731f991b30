"""Parameters of a third-party model on tensor ranks: shards make up the whole, and a forward sees
them. Each rank is one of a pretended group, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from threads import on_mesh, on_threads
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from warpweave.layers.sharding import dtensor as shards
from warpweave.parallel.mesh import Mesh

GRID = Mesh(tp=2, cp=2)


@contextmanager
def _rank(rank: int, ranks: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def _shares(p: nn.Parameter, ranks: int, placement: Placement) -> list[torch.Tensor]:
    """Return each rank's part of `p`, once the records of all ranks refer to it."""
    found = []
    for rank in range(ranks):
        with _rank(rank, ranks) as mesh:
            own = shards.placed(p, mesh, placement)
            assert isinstance(own, nn.Parameter)
            assert isinstance(own.data, DTensor)
            assert (own.shape, own.stride(), own.dtype) == (p.shape, p.stride(), p.dtype)
            assert own.requires_grad == p.requires_grad
            share = shards.local(own).detach()
            assert placement == Replicate() or share.untyped_storage().nbytes() == share.nbytes
            found.append(share.clone())
    return found


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_shares_of_all_ranks_are_the_parameter(ranks, trains):
    """Each block of a dim is sharded; a single one may be uneven, down to ranks without a part."""
    for shape, dim, blocks in (
        ((12, 5), 0, 1), ((5, 12), 1, 1), ((12,), 0, 2), ((12, 5), 0, 2), ((5, 12), 1, 2),
        ((7, 3), 0, 1), ((1, 4), 0, 1), ((3, 7), 1, 1),
    ):  # fmt: skip
        p = nn.Parameter(torch.randn(shape), requires_grad=trains)
        placement = Shard(dim) if blocks == 1 else _StridedShard(dim, split_factor=blocks)
        found = _shares(p, ranks, placement)
        rows = -(-shape[dim] // (ranks * blocks))
        assert [s.shape[dim] for s in found[:-1]] == [
            min(rows * blocks, max(0, shape[dim] - r * rows)) for r in range(ranks - 1)
        ]
        pieces = [s.chunk(blocks, dim) for s in found]
        whole = [part for block in zip(*pieces, strict=True) for part in block]
        assert torch.equal(torch.cat(whole, dim), p)
        assert all(torch.equal(s, p) for s in _shares(p, ranks, Replicate()))
    assert shards.placed(p, None, Shard(0)) is p
    assert shards.local(p) is p
    assert shards.whole(p) is p


def test_a_ranks_rows_of_a_vocabulary_are_filled_up_with_zeros():
    weight = torch.ones(2, 3)
    for rows, ranks, size in ((8, 4, 2), (5, 2, 3), (9, 2, 5), (4, 3, 2)):
        found = shards.padded_rows(weight, rows, ranks)
        assert found.shape == (size, 3)
        assert torch.equal(found[:2], weight)
        assert not found[2:].any()


def test_tied_parameters_are_replaced_everywhere_and_others_stay():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    b.weight = a.weight
    new = nn.Parameter(torch.zeros(3, 3))
    bias = a.bias
    shards.replace_parameters(nn.Sequential(a, b), {a.weight: new})
    assert a.weight is b.weight is new
    assert a.bias is bias
    assert b.bias is None
    bias.requires_grad_(False)  # a frozen parameter is replaced by a frozen one
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    shards.replace_parameters(nn.ModuleList([nn.ModuleList([a]), b]), {bias: frozen})
    assert a.bias is frozen
    assert a.weight is b.weight is new


def _used(group, fails: bool) -> tuple:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
    hooks = shards.use_local(layer, {"bias": (group,)})
    seen = {}

    def forward(x):
        seen.update(layer._parameters)
        if fails:
            raise ArithmeticError
        return x @ layer.weight.T + layer.bias

    before = dict(layer._parameters)
    layer.forward = forward
    x = torch.full((4, 3), float(1 + group.rank))
    if fails:
        with pytest.raises(ArithmeticError):
            layer(x)
    else:
        (layer(x) * (1 + group.rank)).sum().backward()
    assert dict(layer._parameters) == before
    assert seen["weight"] is before["weight"]
    for hook in hooks:
        hook.remove()
    return layer.bias.grad


def test_gradients_are_summed_during_a_forward_and_state_is_restored_after():
    assert on_threads(3, _used, True) == [None] * 3
    for gradient in on_threads(3, _used, False):
        assert gradient.tolist() == [4.0 * (1 + 2 + 3)] * 2


def _summed(mesh, axes: tuple[str, ...]) -> torch.Tensor:
    layer = nn.Linear(2, 2, bias=False)
    sums = tuple(mesh.group(axis) for axis in axes)
    shards.use_local(layer, dict.fromkeys(("weight", "bias"), sums))
    layer(torch.ones(1, 2) * 10.0**mesh.rank).sum().backward()
    return layer.weight.grad


def test_a_gradient_is_summed_over_each_of_its_groups():
    """This also holds if one of the parameters is not there."""
    for axes, of in (
        ((), lambda rank: [rank]), (("tp",), lambda rank: [rank, rank ^ 1]),
        (("cp",), lambda rank: [rank, rank ^ 2]), (("tp", "cp"), lambda rank: range(4)),
    ):  # fmt: skip
        for rank, gradient in enumerate(on_mesh(GRID, _summed, axes)):
            assert gradient.tolist() == [[sum(10.0**r for r in of(rank))] * 2] * 2, axes


def _said(check: Callable, *given: object) -> str:
    try:
        check(*given)
    except ValueError as error:
        return str(error)
    return "alike"


def _alike(group, culprit: int | None) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if group.rank == culprit:
        model[1].bias.data[0] += 1e-7
    return _said(shards.check_alike, model.named_parameters(), (group,))


def test_every_rank_names_the_first_parameter_that_some_rank_has_otherwise():
    assert on_threads(3, _alike, None) == ["alike"] * 3
    for culprit in range(3):
        said = on_threads(3, _alike, culprit)
        assert len(set(said)) == 1
        assert said[0].startswith("1.bias: the ranks hold different values")


def _groups(mesh) -> tuple:
    return mesh.group("tp"), mesh.group("cp")


def _alike_on_a_grid(mesh, culprit: int | None, more: float) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if mesh.rank == culprit:
        model[1].weight.data[0, 0] += more
    return _said(shards.check_alike, model.named_parameters(), _groups(mesh)).partition(":")[0]


def test_a_rank_that_differs_is_reported_on_all_ranks_of_a_grid():
    """This includes the rank that shares no group with it."""
    assert on_mesh(GRID, _alike_on_a_grid, None, 0.0) == ["alike"] * 4
    for culprit in range(4):
        for more in (1.0, -1.0):
            assert on_mesh(GRID, _alike_on_a_grid, culprit, more) == ["1.weight"] * 4


INPUTS = {
    "ids": torch.tensor([[3, 1, 2, 0], [5, 5, 7, 0]]),
    "mask": torch.tensor([[True, True, False], [True, False, False]]),
    "types": torch.tensor([4, 6], dtype=torch.int32),
    "scale": torch.tensor([0.5]),
    "name": "text",
    "none": None,
}
OTHERS = {
    "ids": [
        torch.tensor([[1, 3, 2, 0], [5, 5, 7, 0]]),  # the same in a different order
        torch.tensor([[5, 5, 7, 0], [3, 1, 2, 0]]),
        torch.tensor([[3, 1, 2, 0], [5, 5, 7, 1]]),
        torch.tensor([[3, 1, 2, 0, 0], [5, 5, 7, 0, 0]]),
        torch.tensor([[3, 1, 2, 0]]),
    ],
    "mask": [INPUTS["mask"].flip(0), ~INPUTS["mask"], INPUTS["mask"][:, :2]],
    "types": [torch.tensor([6, 4], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)],
}


def _given(mesh, culprit: int | None, name: str, other: object, of: dict = INPUTS) -> str:
    inputs = of | ({name: other} if mesh.rank == culprit else {})
    return _said(shards.check_same_inputs, inputs.values(), _groups(mesh))


@pytest.mark.parametrize("culprit", range(4))
def test_other_integer_inputs_on_any_rank_are_refused_on_all(culprit):
    for name, others in OTHERS.items():
        for other in others:
            said = on_mesh(GRID, _given, culprit, name, other)
            assert len({*said}) == 1
            assert said[0].startswith("the ranks of tp and cp received different tokens"), other


def test_one_other_id_of_a_large_vocabulary_is_seen_in_a_long_text():
    """The id is where the sine of its position is almost zero; the sum of all is beyond 2^24."""
    ids = torch.full((1, 710), 200_000)
    for at in (354, 709):
        other = ids.clone()
        other[0, at] += 1
        for culprit in (0, 3):
            said = on_mesh(GRID, _given, culprit, "ids", other, {"ids": ids})
            assert len({*said}) == 1
            assert said[0].startswith("the ranks of tp and cp received different tokens")
    assert on_mesh(GRID, _given, None, "ids", ids, {"ids": ids}) == ["alike"] * 4


def test_inputs_other_than_integers_may_differ_or_be_missing():
    for name, other in (("scale", torch.zeros(3)), ("name", "other"), ("none", 3.5), ("ids", None)):
        culprit = None if name == "ids" else 1
        assert on_mesh(GRID, _given, culprit, name, other) == ["alike"] * 4
    shards.check_same_inputs([None, torch.ones(2), "x"], (None,))  # nothing is compared


def _compares(group, largest: list[int]) -> None:
    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
                largest[0] = max(largest[0], out.numel())
            return out

    torch.manual_seed(0)
    model = nn.Linear(50, 40)
    with Made():
        shards.check_alike(model.named_parameters(), (group,))


def test_parameters_are_compared_without_a_copy_of_any():
    """In float64 a copy would be twice as large as the parameter."""
    largest = [0]
    on_threads(2, _compares, largest)
    assert 0 < largest[0] <= 2 * 2  # a sum of each parameter, from each rank


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("told", [None, {"tp": 2}])
def test_first_rank_saves_the_whole_model_and_leaves_its_config_unchanged(rank, fails, told):
    """This holds for any files and any outcome of the save; every rank gathers and waits."""
    config = SimpleNamespace(distributed_config=told) if told else SimpleNamespace()
    before, saved = dict(vars(config)), []

    def save_pretrained(folder, *, state_dict, **options):
        assert "distributed_config" not in vars(config)
        saved.append((folder, state_dict, options))
        if fails:
            raise OSError("full")

    state = {"a": torch.nn.Parameter(torch.ones(2)), "b": torch.zeros(3)}
    state["tied"] = state["a"]
    model = SimpleNamespace(
        save_pretrained=save_pretrained, config=config,
        state_dict=lambda keep_vars=False: {n: x if keep_vars else x.data for n, x in state.items()}
    )  # fmt: skip
    save = shards.saver(model)
    for given in (None, {"c": torch.ones(1)}):
        saved.clear()
        with (
            mock.patch.object(dist, "get_rank", return_value=rank),
            mock.patch.object(dist, "barrier") as barrier,
            mock.patch.object(shards, "whole", side_effect=lambda x: x + 1) as whole,
        ):
            if rank == 0 and fails:
                with pytest.raises(OSError, match="full"):
                    save("folder", state_dict=given, safe=True)
            else:
                save("folder", state_dict=given, safe=True)
                barrier.assert_called_once_with()
        expected = state if given is None else given
        assert whole.call_count == len({*map(id, expected.values())})
        assert vars(config) == before
        assert len(saved) == (rank == 0)
        for folder, written, options in saved:
            assert (folder, options) == ("folder", {"safe": True})
            assert written.keys() == expected.keys()
            assert all(torch.equal(written[n], x + 1) for n, x in expected.items())
            assert not any(x.requires_grad for x in written.values())
            assert given is not None or written["tied"] is written["a"]
