"""Declared sharding computes what the plain model computes, with the collectives of our layers."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from close import assert_close_f64
from ranks import run_ranks
from refused import check
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from warpweave.layers.sharding.declare import _on_result, _placements, _read, shard
from warpweave.layers.sharding.explain import explain_sharding
from warpweave.layers.sharding.memory import OneMemory
from warpweave.layers.sharding.rules import _attention_rule, _class_loss, computed
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.gpt import GPT as HandWritten
from warpweave.model.plain import PlainConfig, plain_gpt_loss, plain_init
from warpweave.parallel.mesh import Mesh

EXAMPLE = str(Path(__file__).resolve().parents[1] / "examples" / "declared_gpt.py")
GPT2 = PlainConfig(96, 12, 2, 32, 4, 4, 48)
LLAMA = PlainConfig(96, 12, 2, 32, 4, 2, 48, "rope", "rms", "swiglu", bias=False, tied=False)

# The example's plan as tuples of mesh axes, for dp x tp.
TUPLES = {
    "(tokens)": ("dp", None), "(labels)": ("dp", None), "*embedding.weight": ("tp", None),
    "*.qkv.weight": ("tp", None), "*.qkv.bias": ("tp",), "*.attention.out.weight": (None, "tp"),
    "*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp"),
    **dict.fromkeys(("embedding()", "*norm()", "*.attention()", "*.mlp()"), ("dp", None, None)),
}  # fmt: skip
DATA = {"(tokens)": "batch seq", "(labels)": "batch seq"}


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels: none of the first row's and all but three of the second's count."""
    tokens = torch.randint(96, (4, 12), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    labels[0] = labels[1, -3:] = -100
    return tokens, labels


def _mesh(sizes: dict[str, int]) -> Any:
    return init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))


def _equal_plain(rank: int, plans: list[tuple[dict[str, int], str]]) -> None:
    """Compare loss and gradients of both styles, each gradient with its parameter's placement."""
    example = runpy.run_path(EXAMPLE)
    named, axes = example["PLAN"], example["AXES"]
    cases = {
        "data": [(LLAMA, DATA, {"batch": "dp"})],
        "tensor": [(GPT2, named, {**axes, "batch": ()}), (LLAMA, named, {**axes, "batch": ()})],
        "both": [(GPT2, TUPLES, None), (LLAMA, named, axes)],
        "sequence": [(GPT2, example["SEQUENCE_PLAN"], example["SEQUENCE_AXES"])],
        "context": [(GPT2, named, {"seq": "cp"}), (LLAMA, named, {"seq": "cp"})],
    }
    for sizes, (config, plan, axes) in ((sizes, case) for sizes, of in plans for case in cases[of]):
        weights = plain_init(config, 0, torch.float64)
        weights = {name: w.requires_grad_() for name, w in weights.items()}
        total, valid = plain_gpt_loss(weights, *_batch(), config)
        (total / valid).backward()
        model = shard(example["make"](config), plan, _mesh(sizes), axes)
        loss = model(*_batch())
        loss.backward()
        assert_close_f64(loss.full_tensor().detach(), (total / valid).detach())
        for name, parameter in model.named_parameters():
            assert parameter.grad.placements == parameter.placements, name
            assert_close_f64(parameter.grad.full_tensor(), weights[name].grad)


@pytest.mark.parametrize(
    "plans",
    [
        [({"dp": 2}, "data"), ({"tp": 2}, "tensor")],
        [({"cp": 3}, "context")],
        [({"dp": 2, "tp": 2}, "both"), ({"dp": 2, "tp": 2}, "sequence")],
    ],
    ids=lambda plans: " and ".join(which for _, which in plans),
)
def test_a_declared_gpt_is_the_plain_one(plans: list[tuple[dict[str, int], str]]) -> None:
    run_ranks(torch.Size(plans[0][0].values()).numel(), _equal_plain, plans)


def _of_both(rank: int) -> list[tuple[Counter, Counter]]:
    return [_collectives(sequence) for sequence in (False, True)]


def _collectives(sequence: bool) -> tuple[Counter, Counter]:
    """Return the collectives of one more block, declared and hand-written, on two tensor ranks."""
    example = runpy.run_path(EXAMPLE)
    plan = example["SEQUENCE_PLAN" if sequence else "PLAN"]
    axes = example["SEQUENCE_AXES" if sequence else "AXES"]
    mesh = _mesh({"tp": 2})
    declared, written = [], []
    for layers in (2, 3):
        config = PlainConfig(96, 12, layers, 32, 4, 4, 48)
        model = shard(example["make"](config), plan, mesh, {**axes, "batch": ()})
        with explain_sharding(model) as seen:
            model(*_batch()).backward()
        declared.append(Counter((sent.name, sent.bytes) for sent in seen.sent))
        ours = HandWritten(
            GPTConfig(96, 12, layers, 32, 4, hidden=48), mesh=Mesh(tp=2).connect("cpu"),
            plan=ParallelPlan(sequence_parallel=sequence, overlap="none"), dtype=torch.float64,
        )  # fmt: skip
        with CommDebugMode() as counted:
            ours(*_batch()).backward()
        written.append(Counter({str(op): n for op, n in counted.get_comm_counts().items()}))
    return declared[1] - declared[0], written[1] - written[0]


def test_a_block_has_the_collectives_of_the_hand_written_one() -> None:
    """Two all-reduces in each direction, or, if tokens are sharded between parts, as many
    all-gathers and reduce-scatters. Ours gathers x once more for the gradient of a weight, and sums
    the gradients of norms in the optimizer."""
    size = 4 * 12 * 32 * 8  # a micro-batch's activations, float64
    half = size // 2
    for whole, cut in run_ranks(2, _of_both):
        assert whole == ({("all_reduce", size): 4}, {"c10d.allreduce_": 4})
        declared, written = cut
        assert declared.pop(("all_reduce", 32 * 8)) == 4  # two norms, weight and bias
        assert declared == {("all_gather_into_tensor", half): 4, ("reduce_scatter_tensor", half): 4}
        assert written == {"c10d._allgather_base_": 6, "c10d._reduce_scatter_base_": 4}


LLAMA_PLAN = {
    "(input_ids)": "batch seq", "*.[qkv]_proj.weight": "(heads dim=8) width",
    "*.o_proj.weight": "width (heads dim=8)", "*.gate_proj.weight": "hidden width",
    "*.up_proj.weight": "hidden width", "*.down_proj.weight": "width hidden",
    "lm_head.weight": "vocab width", "*norm()": "batch seq width",
    "*.self_attn()": "batch seq width", "*.mlp()": "batch seq width",
}  # fmt: skip


def _hugging_face(rank: int) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    tokens, _ = _batch()
    expected = model(tokens).logits
    expected.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    mesh = _mesh({"dp": 2, "tp": 2})
    axes = {"batch": "dp", "heads": "tp", "hidden": "tp", "vocab": "tp"}
    shard(model, LLAMA_PLAN, mesh, axes)
    with explain_sharding(model) as seen:
        logits = model(tokens).logits  # the model begins a cache
        logits.square().mean().backward()
    assert_close_f64(logits.full_tensor().detach(), expected.detach())
    for name, p in model.named_parameters():
        assert_close_f64(p.grad.full_tensor(), gradients[name])
    assert seen.counts("tp", "forward") == {"all_reduce": 4}
    assert seen.counts("tp", "backward") == {"all_reduce": 5}  # one for the norm before the head
    assert seen.counts("dp", "forward") == {}
    assert seen.counts("dp", "backward") == {"all_reduce": len(gradients)}
    assert seen.layouts["model.layers.1.mlp.up_proj()"] == "[4/dp, 12, 48/tp]"
    assert seen.layouts["model.layers.1.mlp.down_proj()"] == "[4/dp, 12, 32] {partial tp}"


@pytest.mark.skipif(find_spec("transformers") is None, reason="an extra of its own")
def test_a_hugging_face_llama_is_sharded_by_ten_lines() -> None:
    run_ranks(4, _hugging_face)


class _Attends(nn.Module):
    """Attention heads of 2 from separate products, which share `kv` keys and values."""

    def __init__(self, kv: int, scale: float | None = None, **options: Any) -> None:
        super().__init__()
        self.kv, self.options = kv, {"is_causal": True, "scale": scale} | options
        self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 2 * kv)
        self.k = nn.Linear(8, 2 * kv, bias=False)  # its gradient is only rounding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, **self.options)
        return y.transpose(1, 2).flatten(2)


class _Classifies(nn.Module):
    def __init__(self, loss: Any = F.cross_entropy, **options: Any) -> None:
        super().__init__()
        self.linear, self.loss, self.options = nn.Linear(4, 5), loss, options
        self.register_buffer("weight", torch.rand(5))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.loss is F.nll_loss:
            y = y.log_softmax(-1)
        return self.loss(y, target, self.weight, ignore_index=255, **self.options)


def _masked(*shape: int) -> _Attends:
    """Return masks of 2 samples, 4 heads, 6 queries and keys, in which each query sees itself."""
    mask = torch.randn(shape) * 2
    return _Attends(4, attn_mask=mask, is_causal=False)


def _attention_options(rank: int, mesh: Any) -> None:
    """Test dropout, and the causal mask with fewer queries than keys."""
    q, seen = DTensor.from_local(torch.randn(2, 3, 4, 5), mesh, [Shard(2)]), {}

    def attend(*given: Any, scale: float | None) -> torch.Tensor:
        seen.update(zip(("q", "k", "v", "mask", "dropout", "causal"), given), scale=scale)
        return given[0]

    for causal in (False, True):
        _attention_rule(attend, q, q, q, None, 0.25, causal, 0.7)
        assert (seen["dropout"], seen["scale"], seen["causal"]) == (0.25, 0.7, False)
        assert [seen[name].shape[2] for name in "qkv"] == [4, 8, 8]
        rows = torch.arange(4)[:, None] + 4 * rank  # rows of the whole sequence
        wanted = torch.arange(8) <= rows if causal else None
        assert seen["mask"] is None if wanted is None else torch.equal(seen["mask"], wanted)
    short = DTensor.from_local(torch.randn(2, 3, 2, 5), mesh, [Shard(2)])  # 4 queries, 8 keys
    _attention_rule(attend, short, q, q, is_causal=True)
    assert torch.equal(seen["mask"], torch.arange(8) <= torch.arange(2)[:, None] + 2 * rank)


def _uneven_attention(mesh: Any) -> None:
    """Test samples, heads or queries not divisible by the ranks: every rank holds all of them."""
    x = torch.randn(3, 3, 5, 4)
    wanted = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    for d in range(4):
        q = distribute_tensor(x, mesh, [Shard(d)])
        found = _attention_rule(F.scaled_dot_product_attention, q, q, q, is_causal=True)
        assert found.placements == (Replicate(),)
        assert_close_f64(found.to_local(), wanted, 1e-13)


def _joins_with_nothing(mesh: Any) -> None:
    """Test tensors of shape (0,), the first one or not, wider in dtype or not."""
    x = torch.randn(2, 4, 3, dtype=torch.float32)
    cut = distribute_tensor(x, mesh, [Shard(1)])
    with OneMemory(mesh, computed):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            nothing = torch.tensor([], dtype=dtype)
            for func, given, more in (
                (torch.cat, [nothing, cut], {"dim": -1}),
                (torch.concat, [cut, nothing, cut], {"dim": 0}),
                (torch.concatenate, [cut, nothing], {"axis": 2}),
            ):
                found = func(given, **more)
                whole = [x if isinstance(t, DTensor) else t for t in given]
                expected = func(whole, **more)
                assert found.dtype == expected.dtype
                assert torch.equal(found.full_tensor(), expected)
        empty = torch.cat([nothing, distribute_tensor(nothing, mesh, [Shard(0)])])
        assert empty.shape == (0,)


def _by_keyword(mesh: Any) -> None:
    """Test that functions of torch with a rule accept their arguments by name."""
    x = torch.randn(4, 6)
    cut = distribute_tensor(x, mesh, [Shard(1)])
    with OneMemory(mesh, computed):
        for func, named in (
            (torch.rms_norm, {"normalized_shape": [6]}),
            (torch.dist, {"other": 2 * x, "p": 3}),
            (torch.cumsum, {"dim": -1}),
            (torch.var, {"dim": -1, "correction": 0}),
        ):
            expected = func(input=x, **named)
            assert_close_f64(func(input=cut, **named).full_tensor(), expected, 1e-13)


def _as_one_rank(rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    mesh, x = _mesh({"a": 2}), torch.randn(2, 6, 8)
    target = torch.tensor([0, 1, 255, 3, 4, 255, 2, 255])  # the second rank has fewer targets
    rows, rest = {"(x)": "rows width", "(target)": "rows"}, (torch.randn(8, 4), target)
    sequence, heads = {"(x)": "batch seq width"}, {"[qkv].*": "heads ..."}
    queries = {"q.*": "heads ..."}
    for make, plan, axes, given in (
        (lambda: _Attends(4), sequence, {"seq": "a"}, (x,)),
        (lambda: _Attends(1), sequence, {"seq": "a"}, (x,)),
        (lambda: _Attends(1), queries, {"heads": "a"}, (x,)),
        (lambda: _Attends(1), sequence, {"batch": "a"}, (x,)),
        (lambda: _Attends(4, 3.0), sequence, {"seq": "a"}, (x,)),
        (lambda: _Attends(1, 0.2), queries, {"heads": "a"}, (x,)),
        (lambda: _Attends(2, enable_gqa=True), queries, {"heads": "a"}, (x,)),
        (lambda: _masked(6, 6), sequence, {"seq": "a"}, (x,)),
        (lambda: _masked(1, 6), sequence, {"seq": "a"}, (x,)),
        (lambda: _masked(4, 1, 6), heads, {"heads": "a"}, (x,)),
        (lambda: _masked(1, 4, 1, 6), sequence, {"batch": "a"}, (x,)),
        (lambda: _Classifies(F.nll_loss), rows, {"rows": "a"}, rest),
        (lambda: _Classifies(reduction="sum"), rows, {"rows": "a"}, rest),
    ):
        torch.manual_seed(0)
        model = make()
        expected = model(*given)
        expected.square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        found = shard(model, plan, mesh, axes)(*given)
        found.square().sum().backward()
        assert_close_f64(found.full_tensor().detach(), expected.detach(), 1e-13)
        for name, p in model.named_parameters():
            assert_close_f64(p.grad.full_tensor(), gradients[name], 1e-13)
    _attention_options(rank, mesh)
    _uneven_attention(mesh)
    _joins_with_nothing(mesh)
    _by_keyword(mesh)


def test_attention_and_weighted_losses_are_those_of_one_rank() -> None:
    """One key for all heads or samples, keys of a sharded sequence, scales of the model's own,
    masks that broadcast, groups of heads, ignored classes, sums of losses."""
    run_ranks(2, _as_one_rank)


def test_a_mean_loss_is_of_as_many_targets_as_there_are_whatever_its_dtype() -> None:
    """In bfloat16, 301 would be rounded. If targets are probabilities, all of them count."""

    def total(input: torch.Tensor, target: Any, *, reduction: str = "mean") -> torch.Tensor:
        return input.sum()

    for dtype in (torch.bfloat16, torch.float64):
        x = torch.tensor([300.0], dtype=dtype)
        found = _class_loss(total, x, torch.zeros(301, dtype=torch.int64))
        assert torch.equal(found, torch.tensor(300 / 301, dtype=dtype))
    x, weight = torch.randn(6, 5), torch.rand(5)
    shares = torch.randn(6, 5).softmax(-1)
    for options in ({}, {"weight": weight}, {"label_smoothing": 0.25}):
        found = _class_loss(F.cross_entropy, x, shares, **options)
        assert torch.equal(found, F.cross_entropy(x, shares, **options))
    target = torch.tensor([0, 4, -100, 2, 2, 1])
    both = {"weight": weight, "label_smoothing": 0.25}
    for options in ({}, {"weight": weight}, both, {"label_smoothing": 0.25}, {"ignore_index": 2}):
        given = target.clamp(min=0) if "ignore_index" in options else target
        wanted = F.cross_entropy(x, given, **options)
        torch.testing.assert_close(_class_loss(F.cross_entropy, x, given, **options), wanted)


class _Passes(nn.Module):
    """A module with products of every argument; it returns all but x and z unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.requires_grad_(False)
        self.fill, self.third = nn.Identity(), nn.Identity()
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: Any, y: Any = None, z: Any = None) -> tuple:
        out = self.fill(self.first(x)) + (0 if z is None else self.second(z)) + self.shift
        return self.third(out), y, z


def _arguments(rank: int) -> None:
    mesh, x, z = _mesh({"a": 2}), torch.randn(2, 4), torch.randn(2, 4)
    plan = {
        "first.weight": ("a", None), "*.weight": (None, "a"), "*.bias": (None,), "shift": ("a",),
        "(z)": ("a", None), "(x)": (None, "a"), "()": (None, "a"), "(y)": ("a",),
        "first(input)": ("a", None), "f*(input)": (None, "a"), "second()": ("a", None),
        "*d()": (None, "a"), "f*()": (None, "a"),
    }  # fmt: skip
    model, seen = _Passes(), []
    expected = model(x, 3, z)[0].detach()
    shard(model, plan, mesh)
    model.first.register_forward_pre_hook(lambda _, given: seen.append(given[0].placements))
    model.second.register_forward_hook(lambda *given: seen.append(given[-1].placements))
    placed = {name: held.placements for name, held in model.state_dict().items()}
    assert placed == {
        "first.weight": (Shard(0),), "second.weight": (Shard(1),), "shift": (Shard(0),),
        "first.bias": (Replicate(),), "second.bias": (Replicate(),),
    }  # fmt: skip
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    assert grads == {name: name.startswith("first") for name in grads}
    for args, named in (((x, 3, z), {}), ((x, 3), {"z": z}), ((), {"z": z, "x": x, "y": 3})):
        out, beside, last = model(*args, **named)
        assert (beside, last.placements, out.placements) == (3, (Shard(0),), (Shard(1),))
        assert seen[-2:] == [(Shard(0),)] * 2
        torch.testing.assert_close(out.full_tensor(), expected)
    out, beside, last = model(x)
    assert (beside, last) == (None, None)
    assert isinstance(out, DTensor)
    out, beside, _ = model(x, torch.ones(2))
    assert beside.placements == (Shard(0),)


def test_the_first_entry_decides_and_arguments_arrive_by_place_or_name() -> None:
    run_ranks(2, _arguments)


def _placed(dims: Any, axes: dict, shape: tuple[int, ...]) -> list:
    """Return the place of a tensor on dp = 2 x tp = 3 x cp = 4: a dim, or None, for each axis."""
    sizes = {"dp": 2, "tp": 3, "cp": 4}
    size = [*sizes.values()].__getitem__
    mesh: Any = SimpleNamespace(mesh_dim_names=(*sizes,), ndim=3, size=size)
    found = _placements("x", _read("e", dims, axes), torch.Size(shape), mesh)
    return [p.dim if p.is_shard() else None for p in found]


AXES = {"a": "dp", "b": "tp", "both": ("dp", "cp"), "turned": ("cp", "dp"), "none": ()}


@pytest.mark.parametrize(
    ("dims", "shape", "found"),
    [
        ("a b", (2, 3), [0, 1, None]), ("... a", (5, 7, 2), [2, None, None]),
        ("... a", (2,), [0, None, None]), ("b ... a", (3, 5, 7, 2), [3, 0, None]),
        ("b ... a", (3, 2), [1, 0, None]), ("b a ...", (3, 2, 5), [1, 0, None]),
        ("...", (), [None] * 3), ("none c", (1, 1), [None] * 3), ("both b", (8, 3), [0, 1, 0]),
        ("both b", (4, 3), "x: dim 0: size 4 is not divisible by 8 ranks"),
        ("both b", (8, 4), "x: dim 1: size 4 is not divisible by 3 ranks"),
        ("turned b", (8, 3), "x: dim 0 lists axes ('cp', 'dp'); use the mesh's order ('dp', 'tp'"),
        ((("cp", "dp"), None), (8, 3), "x: dim 0 lists axes ('cp', 'dp')"),
        ((("dp", "cp"), None, "tp"), (16, 5, 6), [0, 2, 0]),
        ("a a", (2, 2), "x: axis 'dp' would shard two dims of (2, 2)"),
        ("(a c=5)", (20,), [0, None, None]),
        ("(a c=5)", (15,), "x: dim 0: size 3 is not divisible by 2 ranks"),
        ("(a c=5)", (12,),
         "x: dim 0 has size 12, which does not match the sizes (None, 5) in the plan"),
        ("(a=4 c)", (20,), [0, None, None]),
        ("(a=3 c)", (6,), "x: dim 0: size 3 is not divisible by 2 ranks"),
        ("(a c)", (6,), [0, None, None]), ("(a=2 c=3)", (6,), [0, None, None]),
        ("(a c d=3)", (6,), [0, None, None]),  # nothing more is known
        ("(a=2 c=3)", (12,),
         "x: dim 0 has size 12, which does not match the sizes (2, 3) in the plan"),
        ("a=2 b", (4, 3), "x: dim 0 has size 4, which does not match the sizes (2,) in the plan"),
        ("a=4 b=3", (4, 3), [0, 1, None]),
        ("(c a)", (6,), "plan['e']: only the first name in (c a) can be sharded"),
        ("(c d a)", (6,), "plan['e']: only the first name in (c d a) can be sharded"),
        ("(a b c)", (6,), "plan['e']: only the first name in (a b c) can be sharded"),
        ("a ... b ...", (6,),
         "plan['e']: 'a ... b ...' may contain only names, name=size pairs and one '...'"),
        ("a b)", (6,), "plan['e']: 'a b)' has unbalanced parentheses"),
        ("a b", (2, 3, 1), "x has shape (2, 3, 1), but the plan names 2 dims"),
        ("a ... b", (2,), "x has shape (2,), but the plan names 2 dims"),
    ],
)  # fmt: skip
def test_dims_lie_where_an_entry_has_them_or_do_not_fit(dims, shape, found) -> None:
    if isinstance(found, list):
        assert _placed(dims, AXES, shape) == found
    else:
        check(lambda: _placed(dims, AXES, shape), re.escape(found))


@pytest.mark.parametrize("result", [(), [torch.ones(1)], (1, torch.ones(1)), None, {"x": 1}])
def test_result_is_placed_if_it_is_a_tensor_or_a_tuple_starting_with_one(result) -> None:
    hook = _on_result("up()", lambda x: x + 1)
    one = torch.ones(1)
    assert hook(nn.Tanh(), (), one) == 2
    assert hook(nn.Tanh(), (), (one, one, result)) == (2, one, result)
    words = f"up() returns a {type(result).__name__}, but a plan entry for an output needs a tensor"
    check(lambda: hook(nn.Tanh(), (), result), re.escape(words))


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 8)
        self.head.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


REFUSED: list[tuple[dict, dict | None, str]] = [
    ({"u.weight": "a b"}, {"a": "tp"}, "no parameter or module matches ['u.weight']"),
    ({"up.weight": ("tp", "tp")}, None, "up.weight: axis 'tp' would shard two dims of (8, 6)"),
    ({"up.weight": "a b"}, {"a": "tp", "b": "tp"}, "up.weight: axis 'tp' would shard two dims"),
    ({"up.weight": ("ep", None)}, None, "up.weight: the mesh has axes ('tp',), not 'ep'"),
    ({"up.weight": "a b c"}, {"a": "tp"}, "up.weight has shape (8, 6), but the plan names 3"),
    ({"up.weight": "(a b"}, {"a": "tp"}, "plan['up.weight']: '(a b' has unbalanced parentheses"),
    ({"up.weight": "(a b) c"}, {"b": "tp"}, "only the first name in (a b) can be sharded"),
    ({"up.weight": "(a b=8) c"}, {"a": "tp"},
     "up.weight: dim 0: size 1 is not divisible by 2 ranks (dim size 8 = 1 x 8)"),
    ({"up.weight": "a=7 b"}, {},
     "up.weight: dim 0 has size 8, which does not match the sizes (7,) in the plan"),
    ({"up.weight": "a b"}, {"z": "tp"}, "axes: ['z'] do not occur in the plan"),
    ({"up.weight": "... ..."}, {}, "only names, name=size pairs and one '...', got '...'"),
    ({"up.weight": "a=0 b"}, {}, "only names, name=size pairs and one '...', got 'a=0'"),
    ({"up(y)": "a b"}, {"a": "tp"}, "up(y): forward has only the arguments ['input']"),
    ({"up.weight": ("tp", None), "head.weight": (None, None)}, None, "head.weight is tied to up."),
]  # fmt: skip


def _refusals(rank: int) -> None:
    mesh, plain = _mesh({"tp": 2}), init_device_mesh("cpu", (2,))
    check(lambda: shard(_Small(), {}, plain), "shard needs a mesh whose axes have names")
    shard(_Small(), {"up.weight": "a=8 b"}, mesh, {"a": "tp"})
    words = "no parameter or buffer of _Small is a DTensor; shard the"
    check(explain_sharding(_Small()).__enter__, words)
    for plan, axes, words in REFUSED:
        check(partial(shard, _Small(), plan, mesh, axes), re.escape(words))
    model = shard(_Small(), {"(x)": "rows width", "up()": "rows w"}, mesh, {"rows": "tp"})
    changed = _Small()
    changed.forward = lambda x: 2 * x  # set on the object, not on its class
    shard(changed, {"(x)": "rows width"}, mesh, {"rows": "tp"})
    assert changed(torch.ones(4, 6)).full_tensor().eq(2).all()
    words = r"the model\(x\): dim 0: size 3 is not divisible by 2 ranks"
    check(lambda: model(torch.zeros(3, 6)), words)
    model.up.register_forward_hook(lambda *_: [1], prepend=True)
    words = r"up\(\) returns a list, but a plan entry for an output"
    check(lambda: model(torch.zeros(4, 6)), words)
    deep = shard(_Small(), {"up()": "rows w"}, mesh, {"rows": "tp"})
    words = r"up\(\) has shape \(2, 4, 8\), but the plan names 2"
    check(lambda: deep(torch.zeros(2, 4, 6)), words)


def test_plans_that_do_not_fit_are_refused_with_the_parameters_name() -> None:
    run_ranks(2, _refusals)
