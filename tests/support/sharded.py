"""Comparisons of tensor ranks with one device: initialization, output, gradients, faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from close import assert_close_f64
from torch import Tensor, nn

from warpweave.layers.records import collect_records
from warpweave.parallel.collectives import group_size, own_slice, reduce_from
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor.ranks import TensorRanks

RTOL = 1e-12


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw normal numbers that are equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


MESHES = [Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=2)]  # all ranks, or two groups of two


class _Place(threading.local):
    """The position in which `beside_replicas` or `on_first` has put this
    rank, which may be a thread."""

    tensor: tuple[dist.ProcessGroup, int, int] | None = None


_place = _Place()


def world() -> tuple[dist.ProcessGroup | None, int, int]:
    """Return (group, rank, ranks) of the tensor ranks: all ranks, some of them, or no group."""
    if not dist.is_initialized():
        return None, 0, 1
    if _place.tensor is not None:
        return _place.tensor
    return dist.group.WORLD, dist.get_rank(), dist.get_world_size()


def fused() -> dict[str, object]:
    """Return the options that fuse the tensor ranks' data movement into the products, if there is
    any. A single rank has no memory to share."""
    group, *_ = world()
    return {"overlap": "fused", "workspace": None if group is None else Workspace(group)}


def beside_replicas(rank: int, check: Callable[[int], object]) -> None:
    """Run `check` with two tensor ranks next to two others: the group is not the world."""
    mesh = Mesh(dp=2, tp=2).connect()
    _place.tensor = mesh.group("tp"), mesh.index("tp"), mesh.size("tp")
    check(rank)
    _place.tensor = None


def on_first(rank: int, counts: Iterable[int], check: Callable[[int], object]) -> None:
    """Run `check` on this many of the first ranks, while the others wait."""
    for ranks in counts:
        group = dist.new_group([*range(ranks)])
        if rank < ranks:
            _place.tensor = group, rank, ranks
            check(rank)
            _place.tensor = None
        dist.barrier()


def part(t: Tensor, dim: int | None) -> Tensor:
    """Return this rank's chunk along `dim`, or (None) the whole."""
    _, rank, ranks = world()
    return t if dim is None else t.chunk(ranks, dim)[rank]


# ---------------------------------------------------------------- functions over ranks

Tensors = dict[str, Tensor]
BOTH, CUT, UNCUT = (False, True), (True,), (False,)  # whether tokens are cut


class Given(NamedTuple):
    """Options of a case: `shape` describes the problem ("without": tensors that are left out),
    `how` is for the function over ranks only, and `sequences` lists whether tokens are cut."""

    shape: Mapping[str, Any] = MappingProxyType({})
    how: Mapping[str, Any] = MappingProxyType({})
    sequences: tuple[bool, ...] = BOTH


@dataclass(frozen=True)
class Op:
    """A function over tensor ranks.

    Attributes:
        sharded: the function, of this rank's tensors, `shape`, `how`, group, sequence_parallel.
        plain: the same function, of whole tensors by name and `shape`, on one device.
        tensors: the whole problem of a `shape`, in float64; all of them are differentiated.
        cuts: by name, the dim that is cut over the ranks.
        tokens: names that are cut along dim 0 if tokens are.
        results: names of the function's results.
        partial: gradients that are sums over own tokens if tokens are cut: the caller sums.
        weights: tensors whose gradients may be deferred.
        agree: options compared with one device, on threads; `fused`, between processes.
        twins: groups of options whose results have the same bits.
        ways: options for which gradients are also frozen, deferred and accumulated.
        wishes: names whose gradients are requested together; None is every subset.
        low: options in which it runs in bfloat16.
        also: further assertions on the results, (found, sequence, shape).
        within: a context around every run.
    """

    sharded: Callable[..., Any]
    plain: Callable[..., Any]
    tensors: Callable[..., Tensors]
    cuts: dict[str, int]
    tokens: tuple[str, ...] = ("x", "y")
    results: tuple[str, ...] = ("y",)
    partial: tuple[str, ...] = ()
    weights: tuple[str, ...] = ("weight", "bias")
    agree: tuple[Given, ...] = (Given(),)
    fused: tuple[Given, ...] = ()
    twins: tuple[tuple[Given, ...], ...] = ()
    ways: tuple[Given, ...] = (Given(),)
    wishes: tuple[tuple[str, ...], ...] | None = None
    low: tuple[Given, ...] = ()
    also: Callable[[Tensors, bool, dict[str, Any]], None] = lambda found, sequence, shape: None
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def cut(self, name: str, sequence: bool) -> int | None:
        """Return the dim of a tensor that is cut over the ranks, or None."""
        return 0 if sequence and name in self.tokens else self.cuts.get(name)

    def whole(self, shape: Mapping[str, Any]) -> Tensors:
        """Return the whole problem."""
        drawn = self.tensors(**_options(shape))
        return {name: t for name, t in drawn.items() if name not in shape.get("without", ())}

    def mine(self, tensors: Tensors, sequence: bool) -> Tensors:
        """Return this rank's parts."""
        return {name: part(t, self.cut(name, sequence)) for name, t in tensors.items()}

    def on_ranks(self, given: Given, sequence: bool, **tensors: Tensor) -> Any:
        """Run the function over this rank's tensor ranks."""
        over = {"group": world()[0], "sequence_parallel": sequence}
        return self.sharded(**tensors, **_options(given.shape), **given.how, **over)

    def alone(self, shape: dict[str, Any], **tensors: Tensor) -> Any:
        """Run the plain function."""
        return self.plain(**tensors, **_options(shape))


def _options(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shape.items() if name != "without"}


def run(apply: Callable[..., Any], tensors: Tensors, dy: Sequence[Tensor] | None = None) -> tuple:
    """Return (leaves by name, results, gradients: `dy` or drawn ones) of an application. Assert
    that it leaves the leaves unchanged."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    found = apply(**leaves)
    results = found if isinstance(found, tuple) else (found,)
    if dy is None:
        dy = [draw(90 + i, *y.shape) for i, y in enumerate(results)]
    return leaves, results, dy


def gradients(op: Op, apply: Callable[..., Any], tensors: Tensors, dy=None) -> tuple:
    """Return (results and gradients by name, the gradients `dy` that the results were given)."""
    leaves, results, dy = run(apply, tensors, dy)
    before = [t.clone() for t in dy]
    wanted = torch.autograd.grad(results, [*leaves.values()], dy)
    for name, t in tensors.items():
        assert torch.equal(leaves[name].detach(), t), f"{name} was written over"
    assert all(map(torch.equal, dy, before)), "the gradient of a result was written over"
    return dict(zip((*op.results, *leaves), (*(y.detach() for y in results), *wanted))), dy


def agrees(op: Op, given: Given, sequence: bool) -> Tensors:
    """Assert in float64 that this rank's results and gradients are its parts of those of one
    device, and return them."""
    whole = op.whole(given.shape)
    expected, dy = gradients(op, partial(op.alone, given.shape), whole)
    dy = [part(t, op.cut(name, sequence)) for name, t in zip(op.results, dy)]
    mine = op.mine(whole, sequence)
    found, _ = gradients(op, partial(op.on_ranks, given, sequence), mine, dy)
    if sequence:  # documented: each rank's own tokens, the caller sums
        found |= {n: reduce_from(found[n], world()[0]) for n in op.partial if n in found}
    for name, t in expected.items():
        assert found[name].dtype == t.dtype
        assert_close_f64(found[name], part(t, op.cut(name, sequence)), RTOL)
    op.also(found, sequence, given.shape)
    return found


# ---------------------------------------------------------------- layers


def own(x: Tensor, dim: int | None, mesh: ConnectedMesh) -> Tensor:
    """Return this tensor rank's share of `x` as a leaf, cut along `dim` or (None) whole."""
    part = x.detach()
    if dim is not None:
        part = part.chunk(mesh.size("tp"), dim)[mesh.index("tp")]
    return part.clone().requires_grad_(part.is_floating_point())


def backward(y: Tensor, dy: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter's gradient from the gradient `dy` of `y`."""
    y.backward(dy)
    return {name: p.grad for name, p in module.named_parameters()}


def everything(module: nn.Module, x: Tensor, run: Any = None) -> list[Tensor | None]:
    """Return y = run(x), by default module(x), and the gradients of x and of every parameter from a
    drawn gradient of y."""
    leaf = x.detach().requires_grad_()
    module.zero_grad()
    y = (run or module)(leaf)
    y.backward(draw(2, *y.shape))
    return [y, leaf.grad, *(p.grad for p in module.parameters())]


def same_birth(one: nn.Module, mine: nn.Module, mesh: ConnectedMesh) -> None:
    """Assert that `mine` was initialized as this rank's slices of `one`,
    then give both other values."""
    records, here = collect_records(mine), mesh.coords
    whole = dict(one.named_parameters())
    assert set(whole) == {name for name, _ in mine.named_parameters()} == set(records)
    for i, (name, p) in enumerate(mine.named_parameters()):
        assert torch.equal(p, records[name].slice(whole[name], here)), name
        with torch.no_grad():  # so that nothing stays at 0 or 1
            whole[name].copy_(draw(50 + i, *whole[name].shape) / 2)
            p.copy_(records[name].slice(whole[name], here))


def check_layer(
    make: Callable[[ConnectedMesh | None], nn.Module], x: Tensor, mesh: ConnectedMesh, *,
    cut_in: int | None = None, cut_out: int | None = None,
    run: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x),
) -> None:  # fmt: skip
    """Assert that make(mesh) on this rank's share of `x` is its share of make(None) on `x`.

    Initialization under one manual_seed is compared bitwise. The output and all gradients are
    compared within RTOL in float64; gradients of parameters whose record is "partial" are summed
    over the tensor ranks first. The ranks of other axes hold the numbers of `x` in another order,
    so that mixing them up is detected.
    """
    others = mesh.rank // mesh.size("tp")  # tensor ranks are neighbors
    x = x.roll(others) if others else x
    torch.manual_seed(7)
    one = make(None)
    torch.manual_seed(7)
    mine = make(mesh)
    same_birth(one, mine, mesh)
    x_one, x_mine = own(x, None, mesh), own(x, cut_in, mesh)
    y_one, y_mine = run(one, x_one), run(mine, x_mine)
    assert_close_f64(y_mine, own(y_one, cut_out, mesh), RTOL)
    dy = draw(9 + others, *y_one.shape)
    expected = backward(y_one, dy, one)
    grads = backward(y_mine, own(dy, cut_out, mesh).detach(), mine)
    if x.is_floating_point():
        assert_close_f64(x_mine.grad, own(x_one.grad, cut_in, mesh), RTOL)
    for name, record in collect_records(mine).items():
        if record.partial:
            dist.all_reduce(grads[name], group=mesh.group("tp"))
        assert_close_f64(grads[name], record.slice(expected[name], mesh.coords), RTOL)


# ---------------------------------------------------------------- planted faults


def own_tokens_again(ranks: TensorRanks, x: Tensor) -> Tensor:
    """Plant in ``TensorRanks.gather``: this rank's tokens replace those of the others."""
    return x.repeat(group_size(ranks.group), 1) if ranks.sequence_parallel else x


def without_the_sum_of_dx() -> Callable[..., tuple]:
    """Plant in ``TensorRanks.column_gradients``: this rank's share of dx replaces the sum."""
    right = TensorRanks.column_gradients

    def planted(ranks, dz, x, weight, leaves, needs):
        dx = dz @ weight
        return (
            own_slice(dx, ranks.group) if ranks.sequence_parallel else dx,
            *right(ranks, dz, x, weight, leaves, needs)[1:],
        )

    return planted
