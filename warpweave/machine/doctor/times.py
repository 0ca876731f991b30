"""Times of each kernel family on this GPU, next to cuBLAS, SDPA, torch, and Liger.

Times the forward in bf16 at the sizes of an 8B Llama's layer. Calls are interleaved, and L2 is
flushed before each (`tune.timing`). Results are not compared here; `kernels` and `ranks` do that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from warpweave.cli.messages import one_line
from warpweave.kernels.activation import activate
from warpweave.kernels.adamw import adamw_step
from warpweave.kernels.attention import attention
from warpweave.kernels.cross_entropy import cross_entropy
from warpweave.kernels.gemm import gemm
from warpweave.kernels.linear_cross_entropy import linear_cross_entropy
from warpweave.kernels.mlp import mlp
from warpweave.kernels.norm import rms_norm
from warpweave.machine.tune.calls import Calls
from warpweave.machine.tune.timing import Timer, interleave

OURS, BY = "warpweave", {"impl": "triton"}


class LayerSizes(NamedTuple):
    """Tokens, width, hidden units, vocabulary, and heads."""

    T: int = 4096
    E: int = 4096
    F: int = 14336
    V: int = 32000
    H: int = 32


def time_ops(
    device: torch.device, timer: Timer, sizes: LayerSizes, rounds: int = 15
) -> Iterator[dict[str, Any]]:
    """Yield a row per op: its name and every call's milliseconds, or the error if it cannot run."""
    with torch.no_grad():
        for op, calls in timed_ops(device, sizes):
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


def timed_ops(device: torch.device, sizes: LayerSizes) -> Iterator[tuple[str, Calls]]:
    """Yield each op with our Triton call and the other implementations available here."""
    T, E, hidden, V, H = sizes

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).div(shape[-1] ** 0.5).to(torch.bfloat16)

    x, w, up, down, head = draw(T, E), draw(E), draw(hidden, 2, E), draw(E, hidden), draw(V, E)
    gates, values = (up[:, i].contiguous() for i in (0, 1))
    pairs = draw(T, hidden, 2)
    gate, value = (pairs[..., i].contiguous() for i in (0, 1))
    pairs, logits, labels = pairs.flatten(1), x @ head.t(), torch.arange(T, device=device) % V
    q, k = draw(1, T, H, E // H), draw(1, T, max(1, H // 4), E // H)
    heads = [t.transpose(1, 2).contiguous() for t in (q, k)]
    mask: dict[str, bool] = {"is_causal": True, "enable_gqa": True}
    found: dict[str, Calls] = {
        "rms_norm": {OURS: lambda: rms_norm(x, w, **BY), "torch": lambda: F.rms_norm(x, (E,), w)},
        "swiglu": {
            OURS: lambda: activate(pairs, "swiglu", **BY), "torch": lambda: F.silu(gate) * value,
        },
        "gemm": {OURS: lambda: gemm(x, head.t(), **BY), "cuBLAS": lambda: x @ head.t()},
        "mlp swiglu": {
            OURS: lambda: mlp(x, up, down, activation="swiglu", **BY),
            "cuBLAS": lambda: (F.silu(x @ gates.t()) * (x @ values.t())) @ down.t(),
        },
        "attention causal": {
            OURS: lambda: attention(q, k, k, **BY),
            "SDPA": lambda: F.scaled_dot_product_attention(heads[0], heads[1], heads[1], **mask),
        },
        "cross entropy": {
            OURS: lambda: cross_entropy(logits, labels, **BY),
            "torch": lambda: F.cross_entropy(logits.float(), labels),
        },
        "linear cross entropy": {
            OURS: lambda: linear_cross_entropy(x, head, labels, **BY),
            "torch": lambda: F.cross_entropy((x @ head.t()).float(), labels),
        },
        "adamw": _adamw(device, T * E),
    }  # fmt: skip
    if importlib.util.find_spec("liger_kernel") is not None:
        liger = importlib.import_module("liger_kernel.ops")
        rms, act = liger.LigerRMSNormFunction, liger.LigerSiLUMulFunction
        loss = liger.LigerFusedLinearCrossEntropyFunction
        found["rms_norm"]["Liger"] = lambda: rms.apply(x, w, 1e-6)
        found["swiglu"]["Liger"] = lambda: act.apply(gate, value)
        found["linear cross entropy"]["Liger"] = lambda: loss.apply(x, head, labels)
    yield from found.items()


def _adamw(device: torch.device, n: int) -> Calls:
    """Calls of one AdamW step over n flat fp32 weights."""
    master, grad, m, v = (torch.rand(n, device=device) for _ in range(4))
    step = torch.zeros((), device=device)
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    other = {"amsgrad": False, "maximize": False}
    return {
        OURS: lambda: adamw_step(master, grad, m, v, step=step, **rates, **BY),
        "torch fused": lambda: torch._fused_adamw_(
            [master], [grad], [m], [v], [], [step], **rates, **other
        ),
    }
