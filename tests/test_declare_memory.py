"""Views, in-place writes and host reads in a declared model equal those of the
plain model on one device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from close import assert_close_f64
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from warpweave.layers.sharding.declare import shard

SHAPE = (4, 6, 4)
Form = Callable[[Tensor, Tensor], Any]


def _assigns(x: Tensor, t: Tensor) -> None:
    x[:, 1:] = t[:, :-1]
    x[0] = 1.5
    x[:, 0, 0] = t[:1, 0, :].mean()  # a number, which broadcasts
    x[..., 1] = t[None, ..., 2]
    x[-1, :, 1:] += 2


def _assigns_by_positions(x: Tensor, t: Tensor) -> None:
    x[:, [0, 2]] = t[:, :2]
    x[torch.tensor([0, 3]), 1] *= 2
    x[t > 1] = t[t > 1] * 2
    x[t.sum((1, 2)) > 0] = 0.5
    x.index_put_((torch.tensor([0, 0]), torch.tensor([1, 1])), t[0, :2], accumulate=True)
    x.masked_scatter_(t < -1, t)


def _writes_along_a_dim(x: Tensor, t: Tensor) -> None:
    at = torch.tensor([0, 3])
    x.index_add_(1, at, t[:, :2])
    x.index_copy_(1, at, t[:, 2:4])
    x.index_fill_(1, torch.tensor([2]), 0.5)
    x.scatter_add_(1, torch.zeros(SHAPE, dtype=torch.long), t)
    x.scatter_(1, torch.ones(4, 1, 4, dtype=torch.long), t[:, :1])
    x[:, 1:].index_add_(1, torch.tensor([2, 0]), t[:, :2])


def _writes_of_values(x: Tensor, t: Tensor) -> None:
    x += 1
    x.masked_fill_(t > 1, 0.5)
    x.clamp_(min=-1)
    x.fill_diagonal_(3.0) if x.ndim == 2 else x[:, :4].tril_()
    x.sub_(t[:, :1]).mul_(t[0]).add_(t.sum().item())
    x[:, 2:].fill_(t[0, 0, 0])
    x[1:].cumsum_(0)
    x[..., 3].fill_(2.0)


def _through_reshapes(x: Tensor, t: Tensor) -> None:
    x.transpose(0, 1)[1:].mul_(t.transpose(0, 1)[1:])
    x.flatten(0, 1)[3:17].mul_(t.flatten(0, 1)[3:17])
    x.flatten(1)[:, 3:9].add_(t.flatten(1)[:, 3:9])
    x.unsqueeze(1)[:, :, 2].mul_(2)
    x.mT[:, 1].mul_(2)
    x.movedim(2, 0)[2].copy_(t[..., 0])
    x.diagonal(dim1=0, dim2=2).copy_(t.diagonal(dim1=0, dim2=2))
    x[:, :1].expand(4, 1, 4).squeeze(1).mul_(t[:, 1])


def _through_views_of_views(x: Tensor, t: Tensor) -> None:
    x[:, 1:][:, :3][1:][..., 1:].mul_(t[1:, :3, 1:])
    rows = x[1:]
    columns = rows[:, ::2]
    columns.transpose(1, 2)[:, 2:].zero_()
    rows.add_(t[1:])
    columns[..., 1].sub_(t[1:, ::2, 0])


def _with_old_views(x: Tensor, t: Tensor) -> Tensor:
    """Write to a tensor, or to one of its views, after other views were made."""
    first, rows, columns = x[:, :1], x[1:], x[:, 1:]
    columns.mul_(t[:, 1:])
    x.mul_(t)
    rows += 1
    first.add_(columns[:, 1:2].detach())
    with torch.no_grad():
        kept = columns.sum()
    return columns[1:] * kept + rows[:, 1:] - first[1:] + x[1:, 1:]


def _returns_old_view(x: Tensor, t: Tensor) -> Tensor:
    view = x[:, 1:]
    x.mul_(t)
    return view


def _without_gradients(x: Tensor, t: Tensor) -> None:
    with torch.no_grad():
        x[:, 1:] += t[:, :-1]
        for row in x:
            row[1:].mul_(2)
        for column in x.unbind(1)[2:]:
            column.mul_(2)
        x.split(2, 2)[1].zero_()
        x.chunk(2, 0)[1].mul_(3)
        torch.mul(t[:, 1:], 2, out=x[:, 1:])
        torch.max(t, 1, keepdim=True, out=(x[:, :1], torch.empty(4, 1, 4, dtype=torch.long)))
    x.detach()[:, 2:4].mul_(2)


def _by_modules(x: Tensor, t: Tensor) -> None:
    torch._foreach_add_([x[:, 1:]], [t[:, 1:]])
    nn.ReLU(inplace=True)(x[:, 1:])


def _to_plain(x: Tensor, t: Tensor) -> Tensor:
    """Write DTensors to plain tensors."""
    made = torch.zeros(SHAPE)
    view = made[:, 1:]
    view += t[:, 1:]
    made.mul_(x)
    mask = torch.zeros(SHAPE, dtype=torch.bool)
    mask[:, :3] = (t > 0)[:, :3]
    mask |= t > 1
    return (made + view[:, :1]).masked_fill(mask, 0.5)


def _from_empty(x: Tensor, t: Tensor) -> Tensor:
    made, counts = torch.empty_like(x), (t > 0).long()
    made[:, :3], made[:, 3:] = x[:, :3], t[:, 3:]
    counts[:, 1:] += counts[:, :-1].clone()
    return made * counts


def _adds_across(x: Tensor, t: Tensor) -> None:
    x[:, 1:] += t[:, :-1]


def _scales_rows(x: Tensor, t: Tensor) -> Tensor:
    """Scale rows. The gradient of x has the sharding of t."""
    x[:1].mul_(t[:1])
    x[:, :1].mul_(t[:, :1])
    return x + t


WRITES: list[Form] = [
    _adds_across, _scales_rows, _assigns, _assigns_by_positions, _writes_along_a_dim,
    _writes_of_values, _through_reshapes, _through_views_of_views, _with_old_views,
    _returns_old_view, _without_gradients, _by_modules, _to_plain, _from_empty,
]  # fmt: skip

READS: list[Form] = [
    lambda x, t: x.sum().item(),
    lambda x, t: float(x.mean()) + float(x.max()) + float(x.norm()) + x.abs().prod().item(),
    lambda x, t: int(x.sum() * 10) + x.argmax(1).sum().item() + complex(x.sum()).real,
    lambda x, t: x[0, 0, 0].item() + x[3, 5, 3].item() + x.sum(0)[5, 3].item(),
    lambda x, t: math.exp(x.mean()) + float(f"{x.sum():.9f}") + x.logsumexp(1).sum().item(),
    lambda x, t: (x > 0).any() * 2 + (x > 1.8).any(1).sum() + (x > -1).all(2).sum(),
    lambda x, t: 2 if bool((x > 2.6).any()) else 3,
    lambda x, t: 2 if (x > -1.5).all() else 3,
    lambda x, t: 2 if x.sum() > 0 else 3,
    lambda x, t: sum(x.sum((0, 1)).tolist()) + sum(float(row) for row in x.sum((1, 2))),
    lambda x, t: float(np.asarray(x.sum(0))[1, 2] + x.numpy()[3, 5, 1]),
    lambda x, t: [x.sum(1).equal(2 * x.sum(1)), torch.equal(x, 1 * x)].index(True),
    lambda x, t: [torch.allclose(x, x + t), torch.allclose(x, x + 1e-12 * t)].index(True),
    lambda x, t: torch.tensor([x.sum(), x.mean(), 2.0, 1.0]),
    lambda x, t: x[x > 0].sum() + (x > 0).nonzero().shape[0] + (x > 1).unique().shape[0],
    lambda x, t: range(100)[(x > 0).sum()] + len(torch.arange((t > 0).sum())),
    lambda x, t: F.one_hot((x.abs() * 3).long()).shape[-1],
]


class _Runs(nn.Module):
    """A module that returns a form's result for two tensors, which `lift`
    passes on as partial sums."""

    def __init__(self, form: Form, partial: bool, reads: bool) -> None:
        super().__init__()
        self.form, self.partial, self.reads = form, partial, reads
        self.lift = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.lift.weight)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        if self.partial:
            x, t = self.lift(x), self.lift(t)
        y = x * 1
        self.placements = getattr(y, "placements", None)
        result = self.form(y.detach() if self.reads else y, t)
        return t * result if self.reads else y * t if result is None else result


def _run(model: nn.Module) -> tuple[Tensor, ...]:
    """Return a result, and the gradients of two tensors from a sum with odd weights."""
    draws = torch.Generator().manual_seed(1)
    x, t, weight = (torch.randn(SHAPE, generator=draws) for _ in range(3))
    x.requires_grad_(), t.requires_grad_()
    result = model(x, t)
    result = result.full_tensor() if hasattr(result, "full_tensor") else result
    (result * weight[tuple(map(slice, result.shape))]).sum().backward()
    zeros = torch.zeros(SHAPE)
    return result.detach(), *(zeros if y.grad is None else y.grad for y in (x, t))


def _mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("r",))


def _as_one_device(rank: int, forms: str) -> None:
    torch.set_default_dtype(torch.float64)
    mesh, reads = _mesh(), forms == "reads"
    for number, form in enumerate(READS if reads else WRITES):
        expected = _run(_Runs(form, False, reads))
        for d, e in ((0, 0), (1, 1), (2, 0), (None, None)):  # the sharded dims of x and t
            model = _Runs(form, d is None, reads)
            plan: dict = {"lift.weight": (None, "r" if d is None else None)}
            for name, sharded in (("(x)", d), ("(t)", e)):
                sharded = 2 if sharded is None else sharded
                plan[name] = ["r" if at == sharded else None for at in range(3)]
            found = _run(shard(model, plan, mesh))
            assert model.placements == (Partial() if d is None else Shard(d),)
            for what, one, other in zip(("value", "of x", "of t"), found, expected, strict=True):
                try:
                    assert_close_f64(one, other, 1e-12)
                except AssertionError as error:
                    where = "partial" if d is None else f"sharded over {d}"
                    name = number if reads else form.__name__
                    raise AssertionError(f"{name}, {where}, {what}: {error}") from None


@pytest.mark.parametrize("forms", ["writes", "reads"])
def test_sharded_memory_is_that_of_one_device(forms: str) -> None:
    run_ranks(2, _as_one_device, forms)


REFUSED: list[tuple[Form, str]] = [
    (lambda x, t: x.unsqueeze_(0),
     "unsqueeze_ cannot change the shape of a DTensor in place; use unsq"),
    (lambda x, t: x.transpose_(0, 1), "the shape of a DTensor in place; use transpose, which"),
    (lambda x, t: setattr(x, "data", t),
     "x.data = y has no effect if x is a DTensor; write x.copy_(y)"),
    (lambda x, t: torch.abs(t, out=x[0]),
     "expected out= of shape (4, 6, 4), got a DTensor of shape (6, 4)"),
    (lambda x, t: torch._foreach_zero_([x[:, 1:], x[1:]]),
     "_foreach_zero_ writes to two views of the same sharded tensor at once; write to them one"),
]  # fmt: skip


def _counts(model: nn.Module, *given: Tensor) -> int:
    with CommDebugMode() as counted:
        model(*given)
    return counted.get_total_counts()


class _Passes(nn.Module):
    """A module that writes to another module's result, which is that module's input."""

    def __init__(self) -> None:
        super().__init__()
        self.fill = nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = x * t
        y = self.fill(x)
        y.mul_(2)
        x[:, 1:].add_(t[:, 1:])
        return x + y


def _edges(rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    mesh, plan = _mesh(), {"(x)": ("r", None, None), "(t)": ("r", None, None)}
    x, t = torch.randn(SHAPE), torch.randn(SHAPE)
    for form, words in REFUSED:
        with torch.no_grad(), pytest.raises(ValueError, match=re.escape(words)):
            shard(_Runs(form, False, False), plan, mesh)(x, t)

    # If the plan moves a module's result, it is still the same tensor object.
    moved = {"(x)": (None, "r", None), "fill()": ("r", None, None)}
    found = _run(shard(_Passes(), moved, mesh))
    for one, other in zip(found, _run(_Passes()), strict=True):
        assert_close_f64(one, other, 1e-12)

    # Writes within a shard, and reads of replicated data, send nothing.
    for form, reads in ((_adds_across, False), (lambda x, t: x.ndim, True)):
        assert _counts(shard(_Runs(form, False, reads), plan, mesh), x, t) == 0
    alike = shard(_Runs(lambda x, t: x.sum().item(), False, True), {"(x)": (None,) * 3}, mesh)
    assert _counts(alike, x, t) == 0

    # Results are never partial, so a single rank can read a loss.
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            model = shard(_Runs(lambda x, t: x.sum(), False, False), plan, mesh)
            loss = model(x, t)
            assert loss.placements == (Replicate(),)
            if rank == 0:
                assert_close_f64(torch.tensor(loss.item()), x.sum(), 1e-12)
            written = shard(_Runs(_with_old_views, False, False), {"(x)": (None, "r", None)}, mesh)
            expected = _Runs(_with_old_views, False, False)(x, t)
            assert_close_f64(written(x, t).full_tensor(), expected, 1e-12)


def test_writes_that_shards_cannot_follow_are_refused() -> None:
    run_ranks(2, _edges)
