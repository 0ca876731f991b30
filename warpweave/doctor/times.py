"""What each kernel family takes on this GPU beside cuBLAS, SDPA, torch's own and Liger's kernels.

Forward in bf16 at the sizes of an 8B Llama's layer; calls take turns, and L2 is flushed before each
(`tune.timing`). What `kernels` and `ranks` check is not compared again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from warpweave.kernels.activation import activate
from warpweave.kernels.adamw import adamw_step
from warpweave.kernels.attention import attention
from warpweave.kernels.cross_entropy import cross_entropy
from warpweave.kernels.gemm import gemm
from warpweave.kernels.linear_cross_entropy import linear_cross_entropy
from warpweave.kernels.mlp import mlp
from warpweave.kernels.norm import rms_norm
from warpweave.messages import one_line
from warpweave.tune.timing import Timer, interleave

OURS = "warpweave"
Calls = dict[str, Callable[[], object]]


class Sizes(NamedTuple):
    """Tokens, width, hidden units, vocabulary, heads."""

    T: int = 4096
    E: int = 4096
    F: int = 14336
    V: int = 32000
    H: int = 32


def measure(
    device: torch.device, timer: Timer, sizes: Sizes, rounds: int = 15
) -> Iterator[dict[str, Any]]:
    """A row for each op: its name and the milliseconds of every call, or why it cannot run here."""
    with torch.no_grad():
        for op, calls in problems(device, sizes):
            row: dict[str, Any] = {"op": op}
            able: Calls = {}
            for name, call in calls.items():
                try:
                    call()
                    able[name] = call
                except (RuntimeError, ValueError, TypeError) as error:
                    row[name] = one_line(error)[:80]
            times = interleave(able, timer, rounds=rounds)
            yield row | {name: round(median(ms), 4) for name, ms in times.items()}


def problems(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Calls]]:
    """Each op with ours, by Triton, and what else computes it here."""
    T, E, hidden, V, H = sizes
    liger = _liger()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).div(shape[-1] ** 0.5).to(torch.bfloat16)

    x, w, up, down, head = draw(T, E), draw(E), draw(hidden, 2, E), draw(E, hidden), draw(V, E)
    by = {"impl": "triton"}
    rms: Calls = {
        OURS: lambda: rms_norm(x, w, **by),
        "torch": lambda: F.rms_norm(x, (E,), w, 1e-6),
    }
    if liger is not None:
        rms["Liger"] = lambda: liger.LigerRMSNormFunction.apply(x, w, 1e-6)
    yield "rms_norm", rms
    yield (
        "gemm",
        {OURS: lambda: gemm(x, head.t(), **by), "cuBLAS": lambda: x @ head.t()},
    )
    pairs = draw(T, 2 * hidden)
    gate, value = pairs[:, ::2].contiguous(), pairs[:, 1::2].contiguous()
    swiglu: Calls = {
        OURS: lambda: activate(pairs, "swiglu", **by),
        "torch": lambda: F.silu(gate) * value,
    }
    if liger is not None:
        swiglu["Liger"] = lambda: liger.LigerSiLUMulFunction.apply(gate, value)
    yield "swiglu", swiglu
    gates, values = up[:, 0].contiguous(), up[:, 1].contiguous()
    yield (
        "mlp swiglu",
        {
            OURS: lambda: mlp(x, up, down, activation="swiglu", **by),
            "cuBLAS": lambda: (F.silu(x @ gates.t()) * (x @ values.t())) @ down.t(),
        },
    )
    q = draw(1, T, H, E // H)
    k = draw(1, T, max(1, H // 4), E // H)
    heads = [t.transpose(1, 2).contiguous() for t in (q, k, k)]
    yield (
        "attention causal",
        {
            OURS: lambda: attention(q, k, k, **by),
            "SDPA": lambda: F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True),
        },
    )
    labels = torch.arange(T, device=device) % V
    logits = x @ head.t()
    yield (
        "cross entropy",
        {
            OURS: lambda: cross_entropy(logits, labels, **by),
            "torch": lambda: F.cross_entropy(logits.float(), labels),
        },
    )
    loss: Calls = {
        OURS: lambda: linear_cross_entropy(x, head, labels, **by),
        "torch": lambda: F.cross_entropy((x @ head.t()).float(), labels),
    }
    if liger is not None:
        loss["Liger"] = lambda: liger.LigerFusedLinearCrossEntropyFunction.apply(x, head, labels)
    yield "linear cross entropy", loss
    yield "adamw", _adamw(device, T * E)


def _adamw(device: torch.device, n: int) -> Calls:
    """One step over flat fp32 weights."""
    master, grad, m, v = (torch.rand(n, device=device) for _ in range(4))
    step = torch.zeros((), device=device)
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    other = {"amsgrad": False, "maximize": False}
    return {
        OURS: lambda: adamw_step(master, grad, m, v, step=step, **rates, impl="triton"),
        "torch fused": lambda: torch._fused_adamw_(
            [master], [grad], [m], [v], [], [step], **rates, **other
        ),
    }


def _liger() -> Any:
    """Liger's ops; None where it is not installed."""
    try:
        import liger_kernel.ops as ops

        return ops
    except ImportError:
        return None
