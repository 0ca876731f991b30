"""The attention layer: nn.MultiheadAttention on one device, heads sharded over tensor ranks."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from close import assert_all_close, assert_close_f64, assert_same_bits
from einops import rearrange
from every_rank import every_rank
from sharded import MESHES, RTOL, check_layer, draw, own
from threads import run_threads
from torch import Tensor, nn

from warpweave.kernels.rope import RopeScaling, rope_table
from warpweave.layers.attention import Attention
from warpweave.layers.context import KVCache, TokenContext
from warpweave.layers.norm import ColumnParallelRMSNorm, RMSNorm
from warpweave.layers.records import collect_records
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.mesh import ConnectedMesh, Mesh

F64 = {"dtype": torch.float64}


def _grouped(stacked: Tensor, heads: int) -> Tensor:
    """Reorder torch's rows (all q, all k, all v) as q, k, v of head 0, then of head 1, ..."""
    return rearrange(stacked, "(qkv h d) ... -> (h qkv d) ...", qkv=3, h=heads)


def _from_torch(theirs: nn.MultiheadAttention) -> dict[str, Tensor]:
    state = theirs.state_dict()
    converted = {"qkv.weight": _grouped(state["in_proj_weight"], theirs.num_heads)}
    if "in_proj_bias" in state:
        converted["qkv.bias"] = _grouped(state["in_proj_bias"], theirs.num_heads)
    names = ("weight", "bias") if "out_proj.bias" in state else ("weight",)
    return converted | {f"out.{name}": state[f"out_proj.{name}"] for name in names}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_and_differentiates_as_multihead_attention(causal, bias):
    theirs = nn.MultiheadAttention(15, 3, bias=bias, batch_first=True, **F64)
    ours = Attention(15, 3, bias=bias, causal=causal, **F64)
    with torch.no_grad():
        for i, p in enumerate(theirs.parameters()):
            p.copy_(draw(20 + i, *p.shape))
    ours.load_state_dict(_from_torch(theirs), strict=True)
    mask = nn.Transformer.generate_square_subsequent_mask(7, **F64) if causal else None
    x, x_ours = (draw(1, 2, 7, 30)[..., ::2].requires_grad_() for _ in range(2))  # with gaps
    y, _ = theirs(x, x, x, attn_mask=mask, need_weights=False)
    y.backward(draw(2, 2, 7, 15))
    y_ours = ours(x_ours)
    y_ours.backward(draw(2, 2, 7, 15))
    assert_close_f64(y_ours, y, RTOL)
    assert_close_f64(x_ours.grad, x.grad, RTOL)
    assert_close_f64(ours.qkv.weight.grad, _grouped(theirs.in_proj_weight.grad, 3), RTOL)
    assert_close_f64(ours.out.weight.grad, theirs.out_proj.weight.grad, RTOL)
    if bias:
        assert_close_f64(ours.qkv.bias.grad, _grouped(theirs.in_proj_bias.grad, 3), RTOL)
        assert_close_f64(ours.out.bias.grad, theirs.out_proj.bias.grad, RTOL)


def _truth(layer: Attention, x: Tensor, theta: float | None) -> Tensor:
    """Compute grouped-query causal attention, one head at a time."""
    rows = layer.qkv(x).unflatten(-1, (-1, layer.group + 2, layer.head_dim))
    S, half, out = x.shape[1], layer.head_dim // 2, []
    future = torch.ones(S, S, dtype=torch.bool).triu(1)

    def turn(t: Tensor) -> Tensor:  # as complex numbers
        if theta is None:
            return t
        angle = torch.arange(S, **F64)[:, None] * theta ** (-torch.arange(half, **F64) / half)
        z = torch.complex(t[..., :half], t[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    style = layer.style
    scale = style.attention_scale or layer.head_dim**-0.5
    hidden = future if style.window is None else future | future.mT.triu(-S).tril(-style.window)
    for kv in range(rows.shape[2]):
        k, v = turn(rows[:, :, kv, -2]), rows[:, :, kv, -1]
        for g in range(layer.group):
            scores = turn(rows[:, :, kv, g]) @ k.mT * scale
            if style.softcap is not None:
                scores = style.softcap * (scores / style.softcap).tanh()
            scores = scores.masked_fill(hidden, -torch.inf)
            if layer.sinks is not None:
                sink = layer.sinks[kv * layer.group + g].expand(len(x), S, 1)
                scores = torch.cat((scores, sink), -1)
            out.append(scores.softmax(-1)[..., :S] @ v)
    return layer.out(torch.cat(out, -1))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 1), (4, 4)])
@pytest.mark.parametrize("theta", [None, 100.0])
def test_grouped_heads_and_rotary_embedding_follow_the_formula(heads, kv_heads, theta):
    layer = Attention(12 * heads // 2, heads, num_kv_heads=kv_heads, rope_theta=theta, **F64)
    x = draw(1, 2, 7, 12 * heads // 2)
    # a float32 table would be off by 1e-7
    assert_close_f64(layer(x), _truth(layer, x, theta), RTOL)
    assert layer.qkv.weight.shape[0] == (heads + 2 * kv_heads) * 6


OPTIONS = [
    {"window": 3},
    {"softcap": 0.5},
    {"sinks": True},
    {"window": 2, "softcap": 0.5, "sinks": True, "rope_theta": 100.0},
    {"attention_scale": 0.9, "softcap": 2.0},  # the cap applies to scaled scores
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_windows_softcaps_and_sinks_follow_the_formula(options):
    layer = Attention(36, 6, num_kv_heads=2, **F64, **options)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(draw(20 + i, *p.shape) / 2)
    grads = []
    for fn in (layer, lambda x: _truth(layer, x, layer.style.rope_theta)):
        layer.zero_grad()
        y = fn(draw(1, 2, 7, 36))
        y.backward(draw(2, 2, 7, 36))
        grads.append([y, *(p.grad for p in layer.parameters())])
    assert_all_close(*grads, RTOL)
    x, cache = draw(1, 2, 7, 36), KVCache(9)
    for tokens in torch.arange(7).split([4, 1, 2]):  # decoding, which is a separate call
        rope = rope_table(tokens, 6, theta=layer.style.rope_theta or 2.0, dtype=torch.float64)
        decoded = layer(x[:, tokens].flatten(0, 1), TokenContext(2, rope=rope, cache=cache))
        assert_close_f64(decoded.view(2, -1, 36), grads[0][0][:, tokens], RTOL)
        cache.start += len(tokens)
    plain = Attention(36, 6, num_kv_heads=2, **F64)
    plain.load_state_dict(layer.state_dict(), strict=not options.get("sinks"))
    assert not torch.allclose(plain(draw(1, 2, 7, 36)), layer(draw(1, 2, 7, 36)))


def test_packed_documents_do_not_look_at_each_other():
    layer, x = Attention(12, 2, **F64), draw(1, 2, 7, 12)
    packed = layer(x.flatten(0, 1), TokenContext(2, documents=torch.tensor([0, 3, 7])))
    apart = torch.cat((layer(x[:, :3]), layer(x[:, 3:])), 1)
    assert_close_f64(packed.unflatten(0, (2, 7)), apart, RTOL)


@pytest.mark.parametrize("scaling", [None, RopeScaling("linear", 4.0)], ids=["plain", "scaled"])
def test_flattened_tokens_with_a_context_are_the_batch_without(scaling):
    """Without a context, the layer makes the table and scales it as the style says."""
    layer = Attention(12, 2, rope_theta=100.0, rope_scaling=scaling, **F64)
    x = draw(1, 3, 5, 12)
    rope = rope_table(torch.arange(5), 6, theta=100.0, scaling=scaling, dtype=torch.float64)
    for layout in (None, SequenceLayout(5, 1)):
        y = layer(x.flatten(0, 1), TokenContext(3, layout, rope))
        assert torch.equal(y.unflatten(0, (3, 5)), layer(x))


def test_a_style_decides_on_the_bias_of_qkv_alone():
    for both, alone in ((True, False), (False, True), (True, None), (False, None)):
        layer = Attention(12, 2, bias=both, qkv_bias=alone)
        assert (layer.qkv.bias is not None) == (both if alone is None else alone)
        assert (layer.out.bias is not None) == both


def test_a_qk_norm_is_made_where_it_is_asked_for():
    """This does not depend on whether the norm is over whole queries."""
    for asked, whole, kind in (
        (False, False, type(None)), (False, True, type(None)),
        (True, False, RMSNorm), (True, True, ColumnParallelRMSNorm),
    ):  # fmt: skip
        layer = Attention(12, 6, num_kv_heads=3, qk_norm=asked, qk_norm_whole=whole, norm="rms1p")
        assert [type(norm) for norm in (layer.q_norm, layer.k_norm)] == [kind, kind]
        if asked:
            sizes = [tuple(norm.weight.shape) for norm in (layer.q_norm, layer.k_norm)]
            assert sizes == ([(12,), (6,)] if whole else [(2,), (2,)])
            assert layer.q_norm.offset


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("layout", [None, SequenceLayout(5, 1)])
def test_an_empty_batch_with_a_context_has_empty_output_and_zero_gradients(layout, hooked):
    layer = Attention(12, 2, num_kv_heads=1, rope_theta=100.0)
    if hooked:
        layer.qkv.register_forward_hook(lambda *_: None)
    rope = rope_table(torch.arange(5 if layout else 0), 6)
    x = torch.zeros(0, 12, requires_grad=True)
    y = layer(x, TokenContext(0, layout, rope))
    assert y.shape == (0, 12)
    y.sum().backward()
    assert x.grad.shape == (0, 12)
    assert all(not p.grad.any() for p in layer.parameters())


def test_sinks_begin_at_zero_and_are_reset_to_it():
    assert Attention(12, 6, sinks=True).sinks.tolist() == [0.0] * 6
    layer = Attention(12, 6, sinks=True, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.sinks.fill_(7)
    layer.reset_parameters()
    assert layer.sinks.tolist() == [0.0] * 6
    assert layer.sinks.requires_grad
    plain = Attention(12, 6)
    plain.reset_parameters()  # there is none to reset
    assert plain.sinks is None


@pytest.mark.parametrize(
    ("heads", "options", "message"),
    [
        (5, {}, "embed_dim (12) is not divisible by num_heads (5)"),
        (6, {"num_kv_heads": 4}, "6 query heads are not divisible by 4 KV heads"),
        (6, {"num_kv_heads": 0}, "need at least one head and one KV head, got 6 and 0"),
        (0, {}, "need at least one head and one KV head, got 0 and 0"),
        (0, {"num_kv_heads": 1}, "need at least one head and one KV head, got 0 and 1"),
        (4, {"rope_theta": 1e4}, "rope needs an even head size, got 3"),
        (4, {"head_size": 0}, "head_size must be at least 1, got 0"),
        (2, {"window": -1}, "window must be None or at least 1, got -1"),
        (2, {"softcap": 0.0}, "softcap must be None, or positive and finite, got 0.0"),
        (6, {"num_kv_heads": 3, "mesh": ConnectedMesh(Mesh(tp=2), 0, {"tp": None}, None)},
         "num_kv_heads (3) is not divisible by the size of the mesh axis tp (2)"),
    ],
)  # fmt: skip
def test_heads_and_numbers_that_do_not_fit_are_refused(heads, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Attention(12, heads, **options)


def test_without_rope_any_number_and_size_of_heads_works():
    assert Attention(12, 5, head_size=4).head_dim == 4
    assert Attention(12, 4).head_dim == 3
    one = Attention(12, 1, num_kv_heads=1, head_size=1)
    assert one(torch.zeros(2, 3, 12)).shape == (2, 3, 12)


def test_inputs_without_batch_or_rotary_table_are_refused():
    layer = Attention(12, 2, rope_theta=100.0)
    with pytest.raises(ValueError, match=r"^without a context, attention expects x\[B, S, E\], "):
        layer(torch.zeros(5, 12))
    with pytest.raises(ValueError, match=r"context.rope is None$"):
        layer(torch.zeros(5, 12), TokenContext(1))
    alone = Attention(12, 2, sequence_parallel=True)  # on one rank that shards nothing
    assert alone(torch.zeros(2, 5, 12)).shape == (2, 5, 12)


@pytest.mark.parametrize("layout", [SequenceLayout(6, 1), SequenceLayout(10, 2)])
def test_layout_that_does_not_fit_is_refused_on_one_device(layout):
    with pytest.raises(ValueError, match=r"^context_attention, cp rank 0 of 1: "):
        Attention(12, 2)(torch.zeros(5, 12), TokenContext(1, layout))


def test_what_a_hooked_projection_makes_turns_as_the_context_says():
    x = draw(1, 2 * 6, 12)
    options = {"theta": 100.0, "dtype": torch.float64}
    one, other = (rope_table(torch.arange(6) * n, 4, **options) for n in (3, 7))
    for window, local in ((None, None), (4, other)):
        context = TokenContext(2, rope=one, local_rope=local)
        layer = Attention(12, 3, rope_theta=100.0, window=window, **F64)
        expected = layer(x, context)
        layer.qkv.register_forward_hook(lambda *_: None)
        assert_close_f64(layer(x, context), expected, 1e-13)


def test_dropout_of_multihead_attention_is_not_taken_for_bias():
    with pytest.raises(TypeError, match="positional"):
        Attention(12, 2, 0.1)


def test_its_description_names_heads_mask_and_rotary_base():
    assert Attention(12, 6, num_kv_heads=2, rope_theta=100.0).extra_repr() == (
        "embed_dim=12, num_heads=6, num_kv_heads=2, causal=True, window=None, softcap=None, "
        "sinks=False, rope_theta=100.0"
    )
    every = {"num_kv_heads": 3, "causal": False, "window": 5, "softcap": 2.0, "sinks": True}
    every |= {"rope_theta": 10.0, "norm": "rms1p", "norm_eps": 0.1, "bias": False, "head_size": 4}
    every |= {"qkv_bias": True, "qk_norm": True, "qk_norm_whole": True, "attention_scale": 0.5}
    said = Attention(12, 6, **every).extra_repr().split(", ")
    every |= {"embed_dim": 12, "num_heads": 6}
    assert sorted(said) == sorted(f"{name}={value}" for name, value in every.items())


def test_kv_cache_holds_its_capacity_per_layer_and_overwrites_from_start():
    cache, kept = KVCache(5), {}
    for n in (2, 3):
        for layer, heads in (("a", 2), ("b", 1), (0, 3)):
            new = [draw(n + i, 2, n, heads, 4) for i in range(2)]
            found = cache.extend(layer, *new)
            kept[layer] = [torch.cat(t, 1) for t in zip(kept[layer], new)] if cache.start else new
            assert_same_bits(found, kept[layer])
        cache.start += n
    with pytest.raises(ValueError, match=r"^the KV cache holds at most 5 tokens, got 6$"):
        cache.extend("a", *(torch.ones(2, 1, 2, 4) for _ in "kv"))
    cache.start = 3  # later tokens are overwritten
    found = cache.extend("b", *(torch.ones(2, 1, 1, 4) for _ in "kv"))
    assert all(torch.equal(t[:, :3], u[:, :3]) for t, u in zip(found, kept["b"]))
    assert all(t.shape[1] == 4 and t[:, 3].eq(1).all() for t in found)


def _on_ranks(rank: int, sizes: Mesh) -> None:
    mesh, tp = sizes.connect(), sizes.tp
    more = {"window": 4, "softcap": 0.7, "sinks": True}
    for group, bias, theta, extra in (
        (1, True, None, {}), (2, False, 100.0, {}), (3, True, 100.0, {}), (2, True, 100.0, more),
        (2, False, 100.0, {"head_size": 4, "qkv_bias": True, "qk_norm": True, "norm_eps": 0.1}),
    ):  # fmt: skip
        heads = tp * group * (2 if tp == 2 else 1)  # two KV heads or one a rank
        options = {"num_kv_heads": heads // group, "bias": bias, "rope_theta": theta} | extra

        def make(mesh, sp=False, heads=heads, options=options):
            cut = {"mesh": mesh, "sequence_parallel": sp}
            return Attention(2 * heads, heads, **F64, **cut, **options)

        x = draw(1, 2, 6, 2 * heads)
        dim = extra.get("head_size", 2)
        rope = rope_table(torch.arange(6), dim, theta=100.0, dtype=torch.float64)
        context = TokenContext(2, rope=rope if theta else None)
        check_layer(make, x, mesh)
        check_layer(make, x.transpose(0, 1), mesh)
        check_layer(make, x[:0], mesh)
        check_layer(
            lambda mesh, make=make: make(mesh, True),
            x.flatten(0, 1), mesh, cut_in=0, cut_out=0, run=lambda m, x, c=context: m(x, c),
        )  # fmt: skip
        if tp > 1:
            with pytest.raises(ValueError, match=r"attention expects x\[T/tp, E\] and a context"):
                make(mesh, True)(x)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_heads_cut_over_tensor_ranks_equal_one_device(sizes):
    run_threads(sizes.world, _on_ranks, sizes)


@every_rank(4)
def test_a_sequence_cut_over_context_ranks_is_attended_whole(rank: int) -> None:
    mesh = Mesh(cp=2, tp=2).connect()
    _over_context_ranks(mesh, {})
    for strategy in ("ring", "gather", "stream", "ulysses"):
        _over_context_ranks(mesh, {"strategy": strategy, "impl": "triton"})


def _over_context_ranks(mesh: ConnectedMesh, how: dict) -> None:
    at = mesh.index("cp")
    torch.manual_seed(7)
    options = {"num_kv_heads": 2, "rope_theta": 100.0, "window": 5, "softcap": 1.0, "sinks": True}
    layer = Attention(12, 6, mesh=mesh, **how, **options, **F64)
    torch.manual_seed(7)
    alone = Attention(12, 6, **options, **F64)
    with torch.no_grad():
        alone.sinks.copy_(draw(3, 6))
        layer.sinks.copy_(layer.records["sinks"].slice(alone.sinks, mesh.coords))
    x, layout = draw(1, 1, 8, 12).requires_grad_(), SequenceLayout(8, 2)
    rope = rope_table(layout.positions(at), 2, theta=100.0, dtype=torch.float64)
    mine = layout.shard(x, at, 1).flatten(0, 1).detach().requires_grad_()
    y = layer(mine, TokenContext(1, layout, rope))
    truth, dy = alone(x), draw(4, 1, 8, 12)
    truth.backward(dy)
    y.backward(layout.shard(dy, at, 1).flatten(0, 1))
    assert_close_f64(y, layout.shard(truth, at, 1).flatten(0, 1), RTOL)
    assert_close_f64(mine.grad, layout.shard(x.grad, at, 1).flatten(0, 1), RTOL)
    expected = {name: p.grad for name, p in alone.named_parameters()}
    for name, record in collect_records(layer).items():
        grad = layer.get_parameter(name).grad
        dist.all_reduce(grad, group=mesh.group("cp"))
        assert_close_f64(grad, record.slice(expected[name], mesh.coords), RTOL)
    with pytest.raises(ValueError, match="the layout has 1 parts but the group has 2 ranks"):
        layer(own(x, None, mesh))  # a sharded sequence needs a context
