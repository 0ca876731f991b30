"""The costs, against torch's own counter and against the sizes of tensors an op really has."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from warpweave.kernels import cost, norm, reference
from warpweave.kernels.cost import Cost


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_costs_add_multiply_and_bound_time() -> None:
    c = 2 * Cost(10, 4) + Cost(1, 2)
    assert c == Cost(21, 10)
    assert c.intensity == 2.1
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


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layer", [False, True])
def test_norm_moves_the_tensors_its_halves_take_and_give(layer, residual) -> None:
    x, w = torch.randn(6, 10), torch.randn(10)
    r = torch.randn(6, 10) if residual else None
    if layer:
        y, s, mean, rstd = norm.layer_norm_fwd(x, w, w, residual=r)
        grads = norm.layer_norm_bwd(y, s, w, mean, rstd, ds=r)
        forward = [x, w, w, y, mean, rstd]
        backward = [y, s, w, mean, rstd, *grads]
    else:
        y, s, rstd = norm.rms_norm_fwd(x, w, residual=r)
        grads = norm.rms_norm_bwd(y, s, w, rstd, ds=r)
        forward, backward = [x, w, y, rstd], [y, s, w, rstd, *grads]
    if residual:
        forward, backward = forward + [r, s], backward + [r]
    options = {"layer": layer, "residual": residual, "size": 4}
    assert cost.norm(6, 10, **options).bytes == _bytes(*forward)
    assert cost.norm(6, 10, **options, backward=True).bytes == _bytes(*backward)


def test_elementwise_ops_move_their_tensors() -> None:
    x, y, half = torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2, 4)
    table = torch.randn(5, 4)
    assert cost.rope(3, 5, 2, 8, size=4).bytes == _bytes(x, y, table, table)
    assert cost.gelu(240, size=4).bytes == _bytes(x, y)
    assert cost.gelu(240, size=4, backward=True).bytes == _bytes(x, y, y)
    assert reference.swiglu(x).shape == half.shape
    assert cost.swiglu(120, size=4).bytes == _bytes(x, half)
    assert cost.swiglu(120, size=4, backward=True).bytes == _bytes(x, half, x)
    tokens = torch.arange(30)
    assert cost.dropout(30, 8, size=4).bytes == _bytes(x, y, tokens)
    logits, labels, row = torch.randn(7, 50), torch.arange(7), torch.randn(7)
    assert cost.cross_entropy(7, 50, size=4).bytes == _bytes(logits, labels, row, row)
    backward = cost.cross_entropy(7, 50, size=4, backward=True)
    assert backward.bytes == _bytes(logits, logits, labels, row, row)
    assert cost.adamw(9, grad_size=2, param_size=2).bytes == 9 * (4 * 6 + 2 + 2)


@pytest.mark.parametrize("gated", [False, True])
def test_a_gpt_step_counts_what_torch_counts_in_forward_and_backward(gated: bool) -> None:
    """A GPT's products, written out; torch's counter sees full (not causal) attention."""
    B, S, L, E, H, G, D, F, V = 2, 6, 3, 8, 4, 2, 5, 7, 11
    shapes = [(E, (H + 2 * G) * D), (H * D, E), (E, F), (F, E)] + [(E, F)] * gated
    weights = [torch.randn(s, requires_grad=True) for s in shapes * L + [(E, V)]]
    x = torch.randn(B * S, E, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        h, it = x, iter(weights)
        for _ in range(L):
            q, k, v = (h @ next(it)).view(B, S, -1, D).transpose(1, 2).split((H, G, G), 1)
            k, v = k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)
            h = ((q @ k.mT) @ v).transpose(1, 2).reshape(B * S, H * D) @ next(it)
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
    assert cost.gpt_step(tokens=B * S, seq_len=S, causal=False, **shape) == counted
    causal = cost.gpt_step(tokens=B * S, seq_len=S, **shape)
    assert counted - causal == 3 * L * 2 * B * H * S * S * D
