"""Costs compared with torch's own counter and with the sizes of an op's real tensors."""

import pytest
import torch
from einops import rearrange, repeat
from torch.utils.flop_counter import FlopCounterMode

from warpweave.kernels import cost, norm, reference
from warpweave.kernels.cost import Cost
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm.local import LOCAL
from warpweave.kernels.mlp import function as mlp


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_costs_add_multiply_and_bound_time() -> None:
    c = 2 * Cost(10, 4) + Cost(1, 2)
    assert c == Cost(21, 10)
    assert c.seconds(21, 5) == 2
    assert c.seconds(7, 10) == 3


def test_gemm_counts_what_torch_counts() -> None:
    a, b = torch.randn(7, 11), torch.randn(11, 5)
    with FlopCounterMode(display=False) as counter:
        c = a @ b
    assert cost.gemm(7, 5, 11, size=4) == Cost(counter.get_total_flops(), _bytes(a, b, c))


def test_attention_follows_the_fields_convention() -> None:
    B, S, H, D = 2, 64, 4, 16
    full = cost.attention(B, S, S, H, D, causal=False)
    q, lse = torch.empty(B, S, H, D, dtype=torch.bfloat16), torch.empty(B, H, S)
    with FlopCounterMode(display=False) as counter:
        x = torch.randn(B, H, S, D)
        (x @ x.mT) @ x
    assert full.flops == counter.get_total_flops() == 4 * B * H * S * S * D
    assert full.bytes == _bytes(q, q, q, q, lse)
    assert cost.attention(B, S, S, H, D).flops * 2 == full.flops
    backward = cost.attention(B, S, S, H, D, causal=False, backward=True)
    assert backward.flops * 2 == full.flops * 5
    grouped = cost.attention(B, S, S, H, D, kv_heads=1)
    assert full.bytes - grouped.bytes == 2 * _bytes(q) * 3 // 4


def test_attention_counts_the_band_of_a_window_and_every_document_alone() -> None:
    """As many pairs as `reference.visible` shows, and exactly half of the full band if causal."""
    position = torch.arange(23)
    for window, lengths in ((5, None), (None, (9, 0, 14)), (5, (9, 3, 11)), (99, None)):
        documents = None if lengths is None else torch.tensor((0, *lengths)).cumsum(0)
        options = {"causal": False, "window": window, "documents": documents}
        seen = reference.visible(position, position, **options)
        w = [min(window or n, n) for n in lengths or (23,)]
        full = cost.attention(2, 23, 23, 3, 7, causal=False, window=window, documents=lengths)
        causal = cost.attention(2, 23, 23, 3, 7, window=window, documents=lengths)
        pairs = full.flops // (4 * 2 * 3 * 7)
        band = sum(2 * n * x - x * x for n, x in zip(lengths or (23,), w))
        assert pairs == band
        # The convention rounds the band's edge: one more token for each row that reaches beyond the
        # window.
        assert pairs - int(seen.sum()) == sum(lengths or (23,)) - sum(w)
        assert causal.flops * 2 == full.flops
    with pytest.raises(ValueError, match=r"got 23, 23 and \[9, 9\]"):
        cost.attention(1, 23, 23, 1, 1, documents=(9, 9))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layer", [False, True])
def test_norm_moves_the_tensors_its_halves_take_and_give(layer, residual) -> None:
    x, w = torch.randn(6, 10), torch.randn(10)
    r = torch.randn(6, 10) if residual else None
    y, s, mean, rstd = norm.norm_fwd(x, w, w if layer else None, layer=layer, residual=r)
    grads = norm.norm_bwd(y, s, w, mean, rstd, ds=r, bias=layer)
    forward, backward = [x, w, y, rstd], [y, s, w, rstd, grads.dx, grads.dw]
    if layer:
        forward, backward = forward + [w, mean], backward + [mean, grads.db]
    if residual:
        forward, backward = forward + [r, s], backward + [r]
    options = {"layer": layer, "residual": residual, "size": 4}
    assert cost.norm(6, 10, **options).bytes == _bytes(*forward)
    assert cost.norm(6, 10, **options, backward=True).bytes == _bytes(*backward)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("terms", ["x_bias", "dropout", "residual x_bias", "residual dropout"])
def test_a_norm_with_what_stands_before_it_moves_its_tensors(terms, stream, layer) -> None:
    x, w, dy = torch.randn(6, 10).bfloat16(), torch.randn(10).bfloat16(), torch.randn(6, 10)
    residual = torch.randn(6, 10, dtype=stream) if "residual" in terms else None
    x_bias = w if "x_bias" in terms else None
    tokens = torch.arange(6) if "dropout" in terms else None
    drop = None if tokens is None else Drop(0.1, 0, 0, tokens)
    y, s, mean, rstd = norm.norm_fwd(
        x, w, w if layer else None, layer=layer, residual=residual, x_bias=x_bias, drop=drop,
        out_dtype=torch.float32,
    )  # fmt: skip
    forward = [x, w, residual, x_bias, tokens, y, s, mean, rstd] + [w] * layer
    grads = norm.norm_bwd(
        dy, s, w, mean, rstd, ds=s, bias=layer, x_bias=x_bias is not None, x_dtype=x.dtype,
        residual_dtype=None if residual is None else stream, drop=drop,
    )  # fmt: skip
    apart = grads.dresidual if grads.dresidual is not grads.dx else None
    backward = [dy, s, s, w, mean, rstd, tokens, grads.dx, apart]
    # of these the model counts the parameters' gradients
    sums = (grads.dw, grads.db, grads.dx_bias)
    backward += [t.bfloat16() for t in sums if t is not None]
    options = {"layer": layer, "stream_size": stream.itemsize, "out_size": 4}
    options |= {name: name in terms for name in ("residual", "x_bias", "dropout")}
    for tensors, direction in ((forward, False), (backward, True)):
        moved = _bytes(*(t for t in tensors if t is not None))
        assert cost.norm(6, 10, backward=direction, **options).bytes == moved


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layer", [False, True])
def test_a_norm_counts_an_operation_for_each_symbol_of_its_formula(layer, backward) -> None:
    """They are listed in the docstring, plus one more per element for each added term."""
    forward = ["square", "add", "scale", "weigh"] + ["sum", "centre", "shift"] * layer
    back = ["n", "g", "g n", "its sum", "n c", "subtract", "scale", "dy n", "dw"]
    back += ["centre", "sum g", "subtract", "db"] * layer
    each = len(back if backward else forward)
    options = {"layer": layer, "backward": backward}
    assert cost.norm(6, 10, **options).flops == 60 * each
    for terms in (["residual"], ["x_bias"], ["dropout"], ["residual", "x_bias", "dropout"]):
        found = cost.norm(6, 10, **options, **dict.fromkeys(terms, True))
        assert found.flops == 60 * (each + len(terms))


ELEMENTWISE = {  # operations of one output in forward and backward, and of one row of logits
    cost.activation: [({"n": 7}, 7 * 9, 7 * 18), ({"n": 7, "gated": True}, 7 * 5, 7 * 12)],
    cost.cross_entropy: [({"N": 3, "V": 5}, 4 * 15, 4 * 15)],
}


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_elementwise_ops_count_their_operations(op) -> None:
    for sizes, forward, backward in ELEMENTWISE[op]:
        assert op(**sizes).flops == forward
        assert op(**sizes, backward=True).flops == backward
    assert cost.dropout(3, 5).flops == 15
    assert cost.adamw(9) == Cost(16 * 9, 9 * 4 * 7)  # a float32 gradient, and no copy


def test_symmetric_product_costs_one_triangle_of_flops_and_added_bytes() -> None:
    x, out = torch.randn(5, 8), torch.randn(5, 5)
    triangle = int(torch.ones(5, 5).triu().sum())
    found = cost.symmetric_product(5, 8, size=4)
    assert found == Cost(2 * triangle * 8, _bytes(x, out))
    more = cost.symmetric_product(5, 8, add=True, size=4)
    assert more == Cost(found.flops, found.bytes + 4 * triangle)


TWO_BYTES = {
    "gemm": (3, 4, 5), "symmetric_product": (3, 4), "fused_gemm": (3, 4, 5), "mlp": (3, 4, 5),
    "qkv_rope": (2, 3, 4, 2, 1, 6), "attention": (2, 3, 3, 4, 5), "norm": (3, 4),
    "rope": (2, 3, 4, 6), "activation": (7,), "dropout": (3, 4), "cross_entropy": (3, 4),
    "linear_cross_entropy": (3, 4, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", TWO_BYTES)
def test_an_element_has_two_bytes_unless_another_size_is_given(name) -> None:
    op, sizes = getattr(cost, name), TWO_BYTES[name]
    assert op(*sizes) == op(*sizes, size=2) != op(*sizes, size=4)
    if name not in ("gemm", "symmetric_product", "fused_gemm", "rope", "dropout"):
        assert op(*sizes) != op(*sizes, backward=True) == op(*sizes, backward=True, size=2)


def test_attention_of_other_keys_than_queries_moves_both() -> None:
    B, Sq, Sk, H, Hkv, D = 2, 6, 10, 4, 2, 8
    q, k, lse = torch.randn(B, Sq, H, D), torch.randn(B, Sk, Hkv, D), torch.randn(B, H, Sq)
    sizes = {"B": B, "Sq": Sq, "Sk": Sk, "H": H, "D": D, "kv_heads": Hkv, "size": 4}
    with FlopCounterMode(display=False) as counter:
        heads = k.transpose(1, 2).repeat_interleave(2, 1)
        o = ((q.transpose(1, 2) @ heads.mT) @ heads).transpose(1, 2)
    flops = counter.get_total_flops()
    for causal in (False, True):
        forward = cost.attention(causal=causal, **sizes)
        assert forward == Cost(flops // (1 + causal), _bytes(q, k, k, o, lse))
        moved = _bytes(q, k, k, o, lse, o, q, k, k)  # do, dq, dk, dv
        backward = cost.attention(causal=causal, backward=True, **sizes)
        assert backward == Cost(flops // (1 + causal) * 5 // 2, moved)


def test_elementwise_ops_move_their_tensors() -> None:
    x, y, half = torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2, 4)
    table = torch.randn(5, 4)
    assert cost.rope(3, 5, 2, 8, size=4).bytes == _bytes(x, y, table, table)
    turning, partial = x[..., :6], torch.randn(5, 3)
    copied = cost.rope(3, 5, 2, 8, size=4, rotary_dim=6)
    assert copied.bytes == _bytes(x, y, partial, partial)
    assert copied.flops == 3 * turning.numel()
    assert cost.activation(240, size=4).bytes == _bytes(x, y)
    assert cost.activation(240, size=4, backward=True).bytes == _bytes(x, y, y)
    assert reference.swiglu(x).shape == half.shape
    assert cost.activation(120, gated=True, size=4).bytes == _bytes(x, half)
    assert cost.activation(120, gated=True, size=4, backward=True).bytes == _bytes(x, half, x)
    tokens = torch.arange(30)
    assert cost.dropout(30, 8, size=4).bytes == _bytes(x, y, tokens)
    logits, labels, row = torch.randn(7, 50), torch.arange(7), torch.randn(7)
    assert cost.cross_entropy(7, 50, size=4).bytes == _bytes(logits, labels, row, row)
    backward = cost.cross_entropy(7, 50, size=4, backward=True)
    assert backward.bytes == _bytes(logits, logits, labels, row, row)
    x, w = torch.randn(7, 8), torch.randn(50, 8)
    forward = cost.linear_cross_entropy(7, 50, 8, size=4)
    assert forward.bytes == _bytes(x, w, labels, row, row)
    backward = cost.linear_cross_entropy(7, 50, 8, size=4, backward=True)
    assert backward.bytes == _bytes(x, w, labels, row, row, x, w)
    assert forward.flops == cost.gemm(7, 50, 8).flops + cost.cross_entropy(7, 50).flops
    assert backward.flops - forward.flops == cost.gemm(7, 50, 8).flops
    assert cost.adamw(9, grad_size=2, param_size=2).bytes == 9 * (4 * 6 + 2 + 2)


@pytest.mark.parametrize("recompute", ["activation", "up", "nothing"])
@pytest.mark.parametrize("gated", [False, True])
def test_mlp_cost_equals_kernel_traffic_and_flops_counted_by_torch(gated, recompute) -> None:
    T, E, F = 6, 10, 7
    x, w1, w2 = torch.randn(T, E), torch.randn(2 * F if gated else F, E), torch.randn(E, F)
    name, r = "swiglu" if gated else "relu2", torch.randn(T, E)
    options = mlp.MLPOptions(name, recompute=recompute, impl="torch")
    with FlopCounterMode(display=False) as counter:
        y, z, saved = mlp.mlp_fwd(x, w1, None, w2, None, r, options, save=True)
    h = reference.activate(x @ w1.t(), name)
    kept = [] if z is None else [z]
    assert (recompute == "up", recompute == "nothing") == (z is None, saved is not None)
    sizes = {"gated": gated, "recompute": recompute, "size": 4}
    if recompute == "activation":
        assert cost.mlp(T, E, F, gated=gated, size=4) == cost.mlp(T, E, F, **sizes)
    alone = cost.mlp(T, E, F, **sizes)
    forward = cost.mlp(T, E, F, residual=True, **sizes)
    assert forward == alone + Cost(0, _bytes(r))
    assert forward == Cost(counter.get_total_flops(), _bytes(x, w1, h, *kept, h, w2, r, y))
    with FlopCounterMode(display=False) as counter:
        z = mlp.mlp_up_again(x, w1, None, options) if z is None else z
        dz, again = mlp.mlp_bwd(y, w2, z, options, want_hidden=saved is None)
        h = again if saved is None else saved
        dx, dw1, _ = LOCAL.column_gradients(dz, x, w1, (w1, None), (True, True, False))
        dw2 = y.t() @ h
    z = x @ w1.t()
    moved = [y, w2, z, dz, dz, w1, dx, dz, x, dw1, y, h, dw2]
    made = {"activation": [h], "up": [h, x, w1, z], "nothing": []}[recompute]
    backward = cost.mlp(T, E, F, backward=True, **sizes)
    assert backward == Cost(counter.get_total_flops(), _bytes(*moved, *made))


def test_a_fused_gemm_moves_its_tensors() -> None:
    a, b, bias, y = torch.randn(6, 5), torch.randn(5, 8), torch.randn(8), torch.randn(6, 8)
    options = {"size": 4, "bias": True, "save_z": True, "residual": True}
    assert cost.fused_gemm(6, 8, 5, **options) == Cost(2 * 6 * 8 * 5, _bytes(a, b, bias, y, y, y))
    half = cost.fused_gemm(6, 8, 5, gated=True, **options)
    assert half.bytes == _bytes(a, b, bias, y, y)
    plain = _bytes(a, b, y)
    for name, tensor in (("bias", bias), ("save_z", y), ("residual", y)):
        more = cost.fused_gemm(6, 8, 5, size=4, **{name: True})
        assert more.bytes - plain == _bytes(tensor)


def test_a_qkv_projection_moves_its_tensors() -> None:
    x, w, z = torch.randn(2, 3, 8), torch.randn(20, 8), torch.randn(2, 3, 20)
    table = torch.ones(3, 2)
    shape = {"B": 2, "S": 3, "E": 8, "heads": 3, "kv_heads": 1, "D": 4, "size": 4}
    assert cost.qkv_rope(**shape).flops == 2 * 6 * 20 * 8 + 3 * 6 * 16
    assert cost.qkv_rope(**shape).bytes == _bytes(x, w, z, table, table)
    backward = cost.qkv_rope(**shape, backward=True)
    assert backward.bytes == _bytes(z, z, table, table, z, w, x, z, x, w)
    assert backward.flops == 2 * (2 * 6 * 20 * 8) + 3 * 6 * 16


@pytest.mark.parametrize("gated", [False, True])
def test_a_gpt_step_counts_what_torch_counts_in_forward_and_backward(gated: bool) -> None:
    """A GPT's products, written out. torch's counter assumes full (not causal) attention."""
    B, S, L, E, H, G, D, F, V = 2, 6, 3, 8, 4, 2, 5, 7, 11
    shapes = [(E, (H + 2 * G) * D), (H * D, E), (E, F), (F, E)] + [(E, F)] * gated
    weights = [torch.randn(s, requires_grad=True) for s in shapes * L + [(E, V)]]
    x = torch.randn(B * S, E, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        h, it = x, iter(weights)
        for _ in range(L):
            qkv = rearrange(h @ next(it), "(b s) (heads d) -> b heads s d", b=B, d=D)
            q, k, v = qkv.split((H, G, G), 1)
            k, v = (repeat(x, "b g s d -> b (g each) s d", each=H // G) for x in (k, v))
            h = rearrange((q @ k.mT) @ v, "b h s d -> (b s) (h d)") @ next(it)
            up, down = next(it), next(it)
            hidden = h @ up
            if gated:
                hidden = hidden * (h @ next(it))
            h = hidden @ down
        (h @ next(it)).sum().backward()
    shape = {"layers": L, "width": E, "heads": H, "kv_heads": G, "head_dim": D, "hidden": F}
    shape |= {"vocab": V, "gated": gated}
    assert cost.gpt_weights(**shape) == sum(w.numel() for w in weights)
    counted = counter.get_total_flops()
    step = {"tokens": B * S, "seq_len": S, "weights": cost.gpt_weights(**shape)}
    step |= {name: shape[name] for name in ("layers", "heads", "head_dim")}
    assert cost.gpt_step(**step, causal=False) == counted
    causal = cost.gpt_step(**step)
    assert counted - causal == 3 * L * 2 * B * H * S * S * D


def test_a_gpt_step_counts_the_keys_that_a_window_shows() -> None:
    """For the S keys of causal attention, W count: half of the last one, as in a whole layer."""
    shape = {"layers": 3, "heads": 4, "head_dim": 5}
    S, windows = 24, [6, None, 40]
    pairs = [min(q + 1, W or S) for W in windows for q in range(S)]
    halves = sum(min(W or S, S) / 2 for W in windows)
    counted = cost.gpt_step(tokens=S, seq_len=S, weights=700, windows=windows, **shape)
    assert counted == 3 * (2 * S * 700 + 4 * 4 * 5 * (sum(pairs) - halves))
