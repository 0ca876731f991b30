"""Auxiliary losses of blocks on any stage: gradients join in the backward, values in the sum.

The truth is one autograd graph of the total loss. For a GPT on a mesh it is the plain model,
trained by the same rule with these losses added to its own (`prove_layout`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
from deferred import Product
from threads import on_mesh
from torch import Tensor, nn

from warpweave.layers.block import TransformerBlock
from warpweave.layers.records import collect_records
from warpweave.model import gpt
from warpweave.model import plain as plain_gpt
from warpweave.model.config import GPTConfig
from warpweave.model.engine import Engine
from warpweave.parallel.collectives import reduce_from
from warpweave.parallel.data.unit import make_unit
from warpweave.parallel.mesh import Mesh, single
from warpweave.parallel.pipeline import InProcess, ModuleStage, execute
from warpweave.parallel.pipeline.losses import LOSS, split_losses
from warpweave.parallel.pipeline.stage import ChainStage, Segment
from warpweave.parallel.schedule import one_f_one_b, split_backward, with_comm
from warpweave.prove import Errors, Layout, expected, prove_layout

WIDTH, MICRO_BATCHES, DEPTH = 5, 3, 8
WIDE = {"dtype": torch.float64}


class _Layer(nn.Module):
    """tanh(x W^T + b); odd layers have losses of the sum and of the
    result, with one name in common."""

    def __init__(self, k: int) -> None:
        super().__init__()
        torch.manual_seed(k)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, **WIDE) / 2)
        self.bias = nn.Parameter(torch.randn(WIDTH, **WIDE))
        self.k = k

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        h = Product.apply(x, self.weight) + self.bias
        y = torch.tanh(h)
        if self.k % 2 == 0:
            return y
        return y, {"z": h.logsumexp(-1).square().sum() / 7, f"of {self.k}": (y**4).sum() / 3}


class _Chain(nn.Sequential):
    """Layers in a row, and their losses added by name."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total: dict[str, Tensor] = {}
        for layer in self:
            x, losses = split_losses(layer(x))
            total |= {name: total.get(name, 0.0) + loss for name, loss in losses.items()}
        return x, total


def _batches() -> Tensor:
    return torch.randn(MICRO_BATCHES, 3, WIDTH, generator=torch.Generator().manual_seed(1), **WIDE)


def _truth(depth: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return gradients of the sum of all losses, and the losses by name of every micro-batch."""
    chain, every = _Chain(*map(_Layer, range(depth))), []
    for x in _batches():
        y, losses = chain(x)
        losses = {LOSS: y.square().sum(), **losses}
        sum(losses.values()).backward()
        every.append({name: loss.detach() for name, loss in losses.items()})
    return [p.grad for p in chain.parameters()], every


def _close(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-13 * b.abs().max()


def _same_losses(found, expected) -> None:
    for mb, losses in enumerate(expected):
        assert found[mb].keys() == losses.keys()
        _close(found[mb].values(), [losses[name] for name in found[mb]])


# ----------------------------------------------------------------------------- a chain of segments


def _segments(recompute: bool) -> list[Segment]:
    segments = []
    for k in range(4):
        layer = _Layer(k)
        records = {n: r.renamed(f"{k}.{n}") for n, r in collect_records(layer).items()}
        unit = make_unit(f"{k}", [(records[n], p) for n, p in layer.named_parameters()], single())

        def fn(x, batch, layer=layer):
            y, losses = split_losses(layer(batch if x is None else x))
            return (None, {LOSS: y.square().sum(), **losses}) if layer.k == 3 else (y, losses)

        segments.append(Segment(unit.name, fn, (unit,), recompute))
    return segments


@pytest.mark.parametrize("order", ["FB", "F B", "FIW", "F I W"])
@pytest.mark.parametrize("recompute", [False, True], ids=["fused", "cut and recomputed"])
def test_a_chain_starts_backward_from_every_loss_and_counts_each_once(recompute, order) -> None:
    grads, losses = _truth(4)
    for scale in (None, torch.tensor(64.0, **WIDE)):
        chain = ChainStage(_segments(recompute))
        chain.begin(_batches(), scale)
        does = {"F": chain.forward, "B": chain.backward, "I": chain.backward_input}
        for phase in order.split():
            for mb, op in product(range(MICRO_BATCHES), phase):
                chain.backward_weight(mb) if op == "W" else does[op](mb, None)
        chain.reduce()
        found = [p.grad for unit in chain.units for _, p in unit.params]
        _close(found, grads if scale is None else [g * scale for g in grads])
        _same_losses(chain.losses, losses)
    y, found = chain.evaluate(None, _batches()[0])
    assert y is None
    _same_losses([found], losses[:1])


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (torch.ones(3), r"torch.float32 \[3\]"),
        (torch.ones((), dtype=torch.bfloat16), r"torch.bfloat16 \[\]"),  # sums would be rounded
        (0.5, "0.5"),
    ],
)
def test_what_is_no_loss_is_refused(loss, words: str) -> None:
    with pytest.raises(ValueError, match=f"the loss 'z' must be a 0-dim .* dtype; got {words}$"):
        split_losses((None, {"z": loss}))


# ----------------------------------------------------------------------------- modules as stages


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_modules_return_losses_on_any_stage(p: int, split: bool) -> None:
    grads, losses = _truth(DEPTH)
    bounds, x = [DEPTH * s // p for s in range(p + 1)], _batches()
    like = ((3, WIDTH), torch.float64, torch.device("cpu"))
    stages = {
        s: ModuleStage(
            _Chain(*map(_Layer, range(bounds[s], bounds[s + 1]))),
            inputs=(lambda mb: x[mb]) if s == 0 else None,
            like=None if s == 0 else like,
            loss=(lambda mb, y: y.square().sum()) if s == p - 1 else None,
            versions=1 + (p == 2),
        )
        for s in range(p)
    }
    lists = one_f_one_b(p, MICRO_BATCHES)
    execute(with_comm(split_backward(lists, lag=1) if split else lists), stages, InProcess())
    _close([w.grad for s in range(p) for w in stages[s].module.parameters()], grads)
    found: list[dict[str, Tensor]] = [{} for _ in range(MICRO_BATCHES)]
    for stage, mb in product(stages.values(), range(MICRO_BATCHES)):
        for name, loss in stage.losses[mb].items():
            found[mb][name] = found[mb].get(name, 0.0) + loss
    _same_losses(found, losses)


def test_a_loss_reaches_a_stage_whose_activation_needs_no_gradient() -> None:
    """Its backward also has no output at which the gradient of y could begin."""
    weight = nn.Parameter(torch.ones(2, **WIDE))
    module = nn.Module()
    module.weight, module.forward = weight, lambda x: (x, {"z": (weight * 3).sum()})
    stage = ModuleStage(module, inputs=lambda mb: torch.ones(2, **WIDE))
    stage.forward(0, None)
    stage.backward(0, torch.ones(2, **WIDE))
    assert weight.grad.tolist() == [3, 3]


def test_a_modules_loss_of_the_models_name_is_added_to_it() -> None:
    weight = nn.Parameter(torch.full((2,), 2.0, **WIDE))
    module = nn.Module()
    module.weight, module.forward = weight, lambda x: (x * weight, {LOSS: weight.sum()})
    stage = ModuleStage(
        module, inputs=lambda mb: torch.ones(2, **WIDE), loss=lambda mb, y: 3 * y.sum()
    )
    stage.forward(0, None)
    stage.backward(0, None)
    assert (stage.losses[0][LOSS].item(), weight.grad.tolist()) == (16, [4, 4])


@pytest.mark.parametrize("recompute", [False, True], ids=["fused", "cut and recomputed"])
def test_a_loss_that_depends_on_nothing_is_counted_and_has_no_gradient(recompute) -> None:
    """For example that of a router that no token has reached, or a number to report."""
    grads, losses = _truth(4)
    segments = _segments(recompute)

    def fn(x, batch):
        y, own = split_losses(segments[1].fn(x, batch))
        return y, {"idle": torch.tensor(0.25, **WIDE), **own}

    chain = ChainStage([segments[0], replace(segments[1], fn=fn), *segments[2:]])
    chain.begin(_batches())
    for mb in range(MICRO_BATCHES):
        chain.forward(mb, None)
        chain.backward(mb, None)
    chain.reduce()
    _close([p.grad for unit in chain.units for _, p in unit.params], grads)
    _same_losses(chain.losses, [{**of, "idle": torch.tensor(0.25, **WIDE)} for of in losses])


# ----------------------------------------------------------------------------- GPT on any mesh


def _activity(x: Tensor) -> Tensor:
    """Compute a loss of the residual stream that enters a block, a sum over tokens."""
    return 0.3 * x.pow(4).sum() + 0.02 * x.sum(-1).square().sum()


class _Block(TransformerBlock):
    """A block with a loss of its own input, divided by the number of tokens of the global batch."""

    tokens = 1

    def forward(self, x, context=None):
        mesh = self.mlp.up.mesh
        loss = _activity(x / 2) / self.tokens
        # rows are sharded over tensor ranks
        if x.shape[0] < context.layout.local_len * context.batch:
            loss = reduce_from(loss, mesh.group("tp"))
        return super().forward(x, context), {"activity": loss}


@contextmanager
def _with_losses(tokens: int, plain: bool = True) -> Iterator[None]:
    """Add `_activity` to every block of `GPT`, and to the plain model."""
    seen, norm, loss = [], plain_gpt._norm, plain_gpt.plain_gpt_loss

    def watched(x, params, name, config):
        if name.endswith("attention_norm"):
            seen.append(_activity(x / 2))
        return norm(x, params, name, config)

    def with_activity(params, given, *args, **options):
        seen.clear()
        total, valid = loss(params, given, *args, **options)
        return total + sum(seen) / tokens * max(valid, 1), valid

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(gpt, "TransformerBlock", _Block))
        enter(mock.patch.object(_Block, "tokens", tokens))
        enter(mock.patch.object(gpt.GPT, "loss_names", (LOSS, "activity")))
        if plain:
            enter(mock.patch.object(plain_gpt, "_norm", watched))
            enter(mock.patch.object(expected, "plain_gpt_loss", with_activity))
        expected.train.cache_clear()
        yield
    expected.train.cache_clear()


def _prove(layout: Layout, plain: bool = True) -> Errors:
    with _with_losses(layout.sizes.samples * layout.sizes.seq_len, plain):
        return on_mesh(layout.mesh, lambda mesh: prove_layout(layout, mesh))[0]


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(Mesh(), recompute="full")],
        [Layout(Mesh(pp=3), zero=1)],
        [
            Layout(Mesh(tp=2, pp=2), True, style="llama", recompute="full"),
            Layout(Mesh(cp=2, tp=2), False, 3, style="llama", tied=False),
            Layout(Mesh(dp=2, pp=2), zero=2, schedule="interleaved"),
        ],
    ],
    ids=["one rank", "three", "four"],
)
def test_gpt_with_losses_in_every_block_equals_the_plain_gpt_on_any_mesh(layouts) -> None:
    for layout in layouts:
        assert (errors := _prove(layout)).worst < 32, (layout, errors)
    errors = _prove(layout, plain=False)  # must fail: the plain model without them
    assert min(errors.loss, errors.grad, errors.evaluation) > 1e6, errors


def test_a_step_reports_losses_by_name_and_their_sum_as_does_a_whole_model() -> None:
    config = GPTConfig(11, 6, 2, 8, 2, dropout=0.0)
    tokens = torch.randint(0, 11, (1, 3, 7), generator=torch.Generator().manual_seed(2))
    given = (tokens[..., :-1], tokens[..., 1:])
    with _with_losses(tokens=18):
        engine = Engine(config, single(), micro_batch_size=3, dtype=torch.float64)
        loss = engine.gpt(*(x[0] for x in given)).detach()
        result = engine.step(*given, torch.zeros(1, 3, dtype=torch.int64), lr=0.0)
        held_out = engine.evaluate(*given)
    assert result.losses.keys() == {LOSS, "activity"}
    assert min(result.losses.values()) > 1e-6
    assert float(result.loss) == pytest.approx(float(loss), rel=1e-14)
    assert result.loss == sum(result.losses.values())
    assert float(held_out) == pytest.approx(float(loss), rel=1e-14)
    with (
        _with_losses(tokens=18),
        mock.patch.object(gpt.GPT, "loss_names", (LOSS,)),
        pytest.raises(ValueError, match=r"rank 0: a stage returned losses \['activity'\], but"),
    ):
        engine.evaluate(*given)
