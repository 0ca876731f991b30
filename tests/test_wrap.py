"""Pipelines and ZeRO for modules of one's own compute what one plain device computes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpweave import Mesh, Pipeline, Zero
from warpweave.checkpoint import open_checkpoint, save_checkpoint
from warpweave.parallel.data.optimizer import SGD, AdamW

WIDTH, BATCH, STEPS, LR = 6, 8, 3, 0.05
RULE: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Block(nn.Module):
    """A residual block with a norm, a bias, and a parameter that is a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between an embedding and a head, which share a weight; one block runs twice."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in (*self.layers, self.layers[1]):
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def stages(count: int, frozen: bool = False) -> list[nn.Module]:
    """Stages of one, two, and more blocks, in float64."""
    made: list[nn.Module] = [
        nn.Sequential(*(Block() for _ in range(1 + s % 2))) if s % 3 else Block()
        for s in range(count)
    ]
    if frozen:
        for module in made:
            next(module.parameters()).requires_grad_(False)
    return [module.double() for module in made]


def loss_of(y: Tensor, targets: Tensor) -> Tensor:
    return (y - targets).square().mean()


def batches(replicas: int = 1) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    shape = STEPS, replicas * BATCH, 3, WIDTH
    return list(zip(*torch.randn(2, *shape, dtype=torch.float64)))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """torch's AdamW, with decay on matrices alone."""
    params = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2]},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, **RULE)


def trained(module: nn.Module, data: list, clip: float | None = None) -> dict[str, Any]:
    """Train a module on one plain device; losses, norms, and weights."""
    module, found = copy.deepcopy(module), {"losses": [], "norms": []}
    optimizer = optimizer_of(module)
    for inputs, targets in data:
        loss = loss_of(module(inputs), targets)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["norms"].append(norm.item())
    with torch.no_grad():
        found["evaluated"] = float(loss_of(module(data[0][0]), data[0][1]))
    return found | {"weights": {n: p.detach() for n, p in module.named_parameters()}}


def own_part(mesh, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    at, of = mesh.index("dp"), mesh.size("dp")
    return inputs.chunk(of)[at], targets.chunk(of)[at]


def gathered(sharded: Any) -> dict[str, Tensor]:
    """Every tensor that any rank would write."""
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dict(sharded.tensors()))
    names = [name for held in every for name in held]
    assert len(names) == len({*names})  # one writer for each
    return {name: x for held in every for name, x in held.items()}


# ---------------------------------------------------------------- pipelines


def _pipeline(rank: int, sizes: dict, count: int, options: dict, clip, frozen) -> dict[str, Any]:
    mesh = Mesh(**sizes).connect()
    modules = seeded(lambda: stages(count, frozen), mesh.index("dp"))  # replica 0's count
    pipeline = Pipeline(modules, mesh, loss=loss_of, rule=AdamW(**RULE), clip=clip, **options)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for inputs, targets in batches(mesh.size("dp")):
        result = pipeline.step(*own_part(mesh, inputs, targets), lr=LR)
        found["losses"].append(float(result.loss))
        found["norms"].append(float(result.norm))
    first = own_part(mesh, *batches(mesh.size("dp"))[0])
    found["evaluated"] = float(pipeline.evaluate(*first))
    return found | {"weights": gathered(pipeline)}


PIPELINES = [
    ({"pp": 1}, 3, {"schedule": "interleaved", "microbatches": 2}),
    ({"pp": 2}, 2, {"schedule": "gpipe", "microbatches": 4}),
    ({"pp": 2}, 2, {"schedule": "1f1b", "microbatches": 8, "recompute": True}),
    ({"pp": 2}, 4, {"schedule": "interleaved", "microbatches": 4}),
    ({"pp": 2}, 2, {"schedule": "zb-h1", "microbatches": 4}),
    ({"pp": 2}, 4, {"schedule": "zb-v", "microbatches": 4}),
    ({"pp": 3}, 3, {"schedule": "1f1b", "microbatches": 4}),
    *(({"pp": 2, "dp": 2}, 4, {"schedule": "interleaved", "microbatches": 2, "zero": zero})
      for zero in range(4)),
    ({"pp": 2, "dp": 2}, 2, {"schedule": "zb-h1", "microbatches": 4, "zero": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "count", "options"), PIPELINES)
def test_pipeline_trains_as_one_plain_device(sizes, count, options):
    clip, frozen = (0.5, True) if options.get("zero") == 2 else (None, False)
    plain = nn.Sequential(*seeded(lambda: stages(count, frozen)))
    wanted = trained(plain, batches(sizes.get("dp", 1)), clip)
    ranks = sizes["pp"] * sizes.get("dp", 1)
    for found in run_ranks(ranks, _pipeline, sizes, count, options, clip, frozen):
        for kind in ("losses", "norms", "evaluated"):
            torch.testing.assert_close(found[kind], wanted[kind], rtol=1e-10, atol=0)
        trainable = {n: p for n, p in wanted["weights"].items() if n in found["weights"]}
        assert len(trainable) == sum(p.requires_grad for p in plain.parameters())
        for name, weight in trainable.items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-9, atol=1e-12)


def test_pipeline_refuses_what_does_not_fit():
    tied = stages(2)
    tied[1].add_module("tied", tied[0])
    one, batch = Mesh().seen_from(0), torch.zeros(6, WIDTH, dtype=torch.float64)
    for modules, options, message in (
        (tied, {}, r"stage 1 shares \S+ with stage 0"),
        ([], {}, r"the number of modules \(0\) must be a positive multiple of pp = 1"),
        (stages(1), {"schedule": "pipedream"}, "pipedream updates .* choose one of v-half, "),
        (stages(1), {"schedule": "1F1B"},
         r"schedule must be one of v-half, (?!.*pipedream).*'1f1b'"),
        (stages(3), {"schedule": "1f1b"}, "1f1b needs 1 modules if pp = 1, got 3"),
        (stages(1), {"schedule": "zb-v"}, "zb-v needs 2 modules if pp = 1, got 1"),
        (stages(1), {"loss": nn.MSELoss}, r"loss must be a function .* got <class .*MSELoss"),
        (stages(1), {"rule": torch.optim.SGD}, r"rule must be .*, got <class .*SGD"),
        ([nn.Identity()], {}, "has no parameter that requires a gradient"),
        ([Block().to("meta")], {}, "is on the meta device; materialize"),
        ([Block()], {"microbatches": 2.0}, "microbatches must be an integer, got 2.0"),
        ([Block(), Block().double()], {}, "float64 parameters cannot be mixed"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Pipeline(modules, one, **{"loss": loss_of, "schedule": "interleaved", **options})
    pipeline = Pipeline(stages(1), one, loss=loss_of, microbatches=4)
    with pytest.raises(ValueError, match="Pipeline needs outer = 1, got 2"):
        Pipeline(stages(1), Mesh(outer=2).seen_from(0), loss=loss_of)
    with pytest.raises(ValueError, match=r"divisible by microbatches = 4"):
        pipeline.step(batch, batch, lr=LR)
    pipeline.step(batch[:4], batch[:4], lr=LR)
    with pytest.raises(ValueError, match=r"expected micro-batches of shape \(1, 6\), .* \(1, 5\)"):
        pipeline.step(batch[:4, :5], batch[:4], lr=LR)


# ---------------------------------------------------------------- ZeRO


def ids(replicas: int) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randint(0, 11, (STEPS, 2, replicas * 4, 5)))


def model_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _zero(rank: int, sizes: dict, stage: int, recompute: bool, microbatches: int, folder: str):
    mesh = Mesh(**sizes).connect()
    model = seeded(lambda: Model(recompute), rank).double()
    zero = Zero(model, mesh, stage=stage, rule=AdamW(**RULE), clip=0.5, microbatches=microbatches)
    norms, evaluated = [], []
    for tokens in ids(mesh.size("dp")):
        for part in tokens[:microbatches]:
            loss = model_loss(model, part.chunk(mesh.size("dp"))[mesh.index("dp")])
            (loss / microbatches).backward()
        norms.append(zero.step(LR).item())
        with torch.no_grad():
            evaluated.append(model_loss(model, tokens[0]).item())
    held = sum(u.parameters.flat.untyped_storage().nbytes() for u in zero.units)
    weights = gathered(zero)
    more = {"config": {}, "state": zero.state(), "group": mesh.group("world")}
    save_checkpoint(folder, STEPS, zero.tensors(), **more)
    other = Zero(seeded(lambda: Model(), 9).double(), mesh, stage=(stage + 2) % 4)
    saved = open_checkpoint(f"{folder}/step_{STEPS:08d}")
    other.load(saved.tensor)
    other.load_state(saved.state)
    again = gathered(other)
    assert other.state() == zero.state() == {"count": float(STEPS)}
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    return {"norms": norms, "evaluated": evaluated, "weights": weights, "held": held}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("sizes", "recompute", "microbatches"),
    [({}, True, 2), ({"dp": 2}, False, 1), ({"dp": 2}, True, 2),
     ({"dp": 4, "dp_shard": 2}, False, 2)],
)  # fmt: skip
def test_zero_trains_as_one_plain_device(tmp_path, sizes, recompute, microbatches, stage):
    replicas = sizes.get("dp", 1)
    plain = seeded(Model, 0).double()
    optimizer, norms, evaluated = optimizer_of(plain), [], []
    for tokens in ids(replicas):
        for part in tokens[:microbatches]:
            (model_loss(plain, part) / microbatches).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            evaluated.append(model_loss(plain, tokens[0]).item())
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    for found in run_ranks(replicas, _zero, sizes, stage, recompute, microbatches, str(tmp_path)):
        torch.testing.assert_close(found["norms"], norms, rtol=1e-10, atol=0)
        torch.testing.assert_close(found["evaluated"], evaluated, rtol=1e-10, atol=0)
        assert len(found["weights"]) == 3 * len(weights)  # and two moments
        for name, weight in weights.items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-9, atol=1e-12)
        assert (found["held"] == 0) == (stage == 3 and replicas > 1)  # gathered parameters


class Skipping(nn.Module):
    """Calls one of two branches; its blocks take and return tuples and keywords."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, *, x: Tensor, mask: None = None) -> tuple[Tensor, None]:
            return self.linear(x), mask

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Pair() for _ in range(3)).to(dtype)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, skip: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                x, _ = layer(x=x)
        return x * self.scale


def _odd_calls(rank: int, stage: int) -> dict[str, Tensor]:
    mesh = Mesh(dp=2).connect()
    model = seeded(Skipping)
    zero = Zero(model, mesh, stage=stage, rule=SGD(momentum=0.9, weight_decay=0.0))
    torch.manual_seed(3)
    for skip in (0, 1, 3, 2):
        model(torch.randn(4, WIDTH, dtype=torch.float64), 3)  # a forward without a backward
        x = torch.randn(4, WIDTH, dtype=torch.float64)
        model(x.chunk(2)[rank], skip).square().mean().backward()
        zero.step(LR)
    return gathered(zero)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_allows_skipped_blocks_and_forwards_without_backward(stage):
    model = seeded(Skipping)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    torch.manual_seed(3)
    for skip in (0, 1, 3, 2):
        torch.randn(4, WIDTH, dtype=torch.float64)
        x = torch.randn(4, WIDTH, dtype=torch.float64)
        model(x, skip).square().mean().backward()
        for p in model.parameters():  # no gradient counts as zero
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(2, _odd_calls, stage):
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), rtol=1e-10, atol=1e-13)


def test_zero_refuses_what_does_not_fit():
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])
            self.layers[0].register_forward_hook(lambda *given: {1, 2})

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    one = Mesh().seen_from(0)
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    for make, message in (
        (lambda: Zero(nested, one, stage=4), "the ZeRO stage must be one of 0, 1, 2, 3, got 4"),
        (lambda: Zero(nested, one, clip=-1.0), "clip must be positive, or None"),
        (lambda: Zero(nested, one, stage="3"), "the ZeRO stage must be one of 0, 1, 2, 3, got '3'"),
        (lambda: Zero(nested, one, rule=torch.optim.AdamW),
         r"rule must be .* as AdamW\(\), got <class"),
        (lambda: Zero(nested, one, blocks=[nested[0], nested[0][0]]), "is inside another block"),
        (lambda: Zero(nn.Tanh(), one), "has no parameter that requires a gradient"),
        (lambda: Zero(Opaque(), one).model(torch.ones(1, 2)), "returned a set in which no tensor"),
        (lambda: Zero(Block().to("meta"), one), "is on the meta device"),
        (lambda: Zero(Block(), Mesh()), "mesh must be connected"),
        (lambda: Zero(Block(), Mesh(outer=2).seen_from(0)),
         "Zero needs pp = 1 and outer = 1, got 1 and 2"),
        (lambda: Zero(Block(), one).step(LR),
         r"before zero.step\(\) must be microbatches = 1, got 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make()


def test_zero_refuses_a_backward_after_which_its_own_step_was_forgotten():
    zero = Zero(nn.Linear(2, 2), Mesh().connect(), microbatches=2)
    for _ in range(2):
        zero.model(torch.ones(1, 2)).sum().backward()
    words = r"before zero.step\(lr\) must be microbatches = 2, got 3"
    with pytest.raises(RuntimeError, match=words):
        zero.model(torch.ones(1, 2)).sum().backward()
    assert zero.step(LR).isfinite()


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -1e-3])
def test_a_learning_rate_that_would_destroy_the_weights_is_refused(lr):
    zero = Zero(nn.Linear(2, 2), Mesh().connect())
    zero.model(torch.ones(1, 2)).sum().backward()
    pipeline = Pipeline([nn.Linear(2, 2)], Mesh().connect(), loss=nn.functional.mse_loss)
    for step in (zero.step, partial(pipeline.step, torch.ones(1, 2), torch.ones(1, 2))):
        with pytest.raises(ValueError, match=f"lr must be finite and at least 0, got {lr}"):
            step(lr=lr)


def test_zero_3_refuses_a_state_dict_of_shards():
    for message in run_ranks(2, _state_dict):
        assert message.startswith("ZeRO 3 keeps only a shard of")


def _state_dict(rank: int) -> str:
    model = Model()
    model.register_buffer("count", torch.tensor([float(rank)]))
    Zero(model, Mesh(dp=2).connect(), stage=3)
    assert model.count.item() == 0  # that of the first rank
    with pytest.raises(RuntimeError, match="use load"):
        model.load_state_dict({})
    with pytest.raises(ValueError, match="Model already has a Zero"):
        Zero(model, Mesh(dp=2).connect())
    with pytest.raises(RuntimeError) as error:
        model.state_dict()
    return str(error.value)


def test_zero_keeps_float32_masters_of_bfloat16_parameters():
    model, one = seeded(lambda: Skipping(torch.bfloat16)), Mesh().seen_from(0)
    wide = [p.detach().float() for p in model.layers.parameters()]
    zero = Zero(model, one, rule=SGD(momentum=0.0, weight_decay=0.0))
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    for _ in range(3):
        model(x, 3).sum().backward()
        gradients = [p.grad.clone() for p in model.layers.parameters()]
        assert {g.dtype for g in gradients} == {torch.float32}
        zero.step(1e-3)
        wide = [w - 1e-3 * g for w, g in zip(wide, gradients, strict=True)]
    held = dict(zero.tensors())
    for (name, p), w in zip(model.layers.named_parameters(prefix="layers"), wide, strict=True):
        torch.testing.assert_close(held[name], w, rtol=1e-5, atol=1e-7)
        assert torch.equal(p, held[name].to(torch.bfloat16))


# ---------------------------------------------------------------- ordinary code around Zero


@dataclasses.dataclass
class Output:
    """A container that torch's pytrees do not know."""

    logits: Tensor


class Net(nn.Module):
    """Blocks, a shared activation, and a head, called in one of many ways."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, kept: list | None = None) -> Any:
            y = self.linear(x)
            if kept is not None:
                kept.append(y.mean())
            return y, (x * 0).sum().sqrt()  # an output with a singular derivative

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.act, self.head = how, nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.Inner() for _ in range(3))
        if how == "lists of lists":
            self.layers = nn.ModuleList(nn.ModuleList([layer, nn.Tanh()]) for layer in self.layers)

    def loss(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for layer in self.layers:
            if self.how == "lists of lists":
                x = layer[1](layer[0](x)[0])
            elif self.how == "child of a block":
                x = layer.linear(x)
            else:
                x = self.act(layer(x, kept if self.how == "kept list" else None)[0])
        y = x if self.how == "head outside" else self.head(x)
        return y, sum(kept)

    def forward(self, x: Tensor) -> Any:
        y, extra = self.loss(x)
        return Output(y) if self.how == "dataclass" else (y, extra)


def run_net(net: Net, x: Tensor) -> Tensor:
    """The loss of a net, called in its way."""
    if net.how == "method":
        y, extra = net.loss(x)
    elif net.how == "dataclass":
        y, extra = net(x).logits, 0
    else:
        y, extra = net(x)
    if net.how == "head outside":
        y = y @ net.head.weight.T + net.head.bias
    if net.how == "in place":
        y /= 2
    return y.square().mean() + extra


WAYS = ("plain", "lists of lists", "kept list", "head outside", "dataclass", "in place",
        "zero_grad", "child of a block", "method")  # fmt: skip


def _ways(rank: int, stage: int) -> dict[str, dict[str, Tensor] | str]:
    mesh, found = Mesh(dp=2).connect(), {}
    for how in WAYS:
        net = seeded(lambda how=how: Net(how)).double()
        zero = Zero(net, mesh, stage=stage, rule=SGD(momentum=0.9, weight_decay=0.0))
        try:
            for x, _ in batches():
                if how == "zero_grad":
                    net.zero_grad(set_to_none=stage % 2 == 0)
                run_net(net, x.chunk(2)[rank]).backward()
                zero.step(LR)
                assert all(p.isfinite().all() for p in net.parameters())  # read after a step
        except RuntimeError as error:
            found[how] = str(error)
        else:
            found[how] = gathered(zero)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_is_right_in_whatever_way_a_model_is_called_or_fails(stage):
    ranks = run_ranks(2, _ways, stage)
    for how in WAYS:
        net = seeded(lambda how=how: Net(how)).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
        for x, _ in batches():
            run_net(net, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        for found in ranks:
            if stage == 3 and how in ("child of a block", "method"):
                assert isinstance(found[how], str)  # the parameters are not there
                continue
            assert not isinstance(found[how], str), (how, found[how])
            for name, p in net.named_parameters():
                torch.testing.assert_close(found[how][name], p.detach(), rtol=1e-9, atol=1e-13)


def _sequential(rank: int) -> dict[str, list[float]]:
    mesh, found = Mesh(pp=2).connect(), {}
    for how in ("shared", "dropout"):
        made = seeded(lambda how=how: _two_stages(how))
        pipeline = Pipeline(made, mesh, loss=loss_of, recompute=how == "dropout", zero=0)
        found[how] = [pipeline.step(x, y, lr=LR).loss.item() for x, y in batches()]
    return found


def _two_stages(how: str) -> list[nn.Module]:
    act, middle = nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    if how == "dropout":
        act = nn.Dropout(0.5)
    first = nn.Sequential(nn.Flatten(2), middle, act, nn.Linear(WIDTH, WIDTH), act, middle)
    return [first.double(), nn.Linear(WIDTH, WIDTH).double()]


def test_children_of_a_sequential_may_be_shared_and_dropout_recomputed():
    for how in ("shared", "dropout"):
        plain = nn.Sequential(*seeded(lambda how=how: _two_stages(how)))
        losses = trained(plain, batches())["losses"]
        for found in run_ranks(2, _sequential):
            torch.testing.assert_close(found[how], losses, rtol=1e-10, atol=0)
