"""Which way an MLP takes for each of its products, and why."""

from __future__ import annotations

import torch

from warpweave.kernels.activation import find_activation
from warpweave.kernels.dropout import Drop, check_drop
from warpweave.kernels.gemm.fused import epilogue_name
from warpweave.kernels.mlp.function import check_mlp, choose_recompute
from warpweave.kernels.mlp.hidden import slope_name
from warpweave.kernels.runtime.dispatch import capability, check_impl
from warpweave.kernels.runtime.dtypes import operand_dtype
from warpweave.kernels.runtime.fusion import ask, explain


def explain_mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    activation: str,
    residual: torch.Tensor | None = None,
    drop: Drop | None = None,
    recompute: str = "activation",
    impl: str | None = None,
    arch: int | None = None,
) -> list[str]:
    """A line for each product of `mlp` with these arguments that has something to fuse: one kernel
    or apart, and the PREDICTED times of both.

    Args:
        arch: the capability (90) of another GPU than x's; the tensors may be on any device then,
            and autocast does not count.

    Raises:
        ValueError: shapes or options do not fit, or `impl` cannot run.
    """
    check_mlp(x, up_weight, down_weight, None, None, residual, activation, "explain_mlp")
    recompute, T = choose_recompute(recompute, "triton", x), x.shape[:-1].numel()
    drop = check_drop(drop, torch.Size((T,)))
    if check_impl(impl) is not None:
        return [f"mlp: {impl}, asked for"]
    dtype = x.dtype
    if arch is None:
        if ask(impl, x, up_weight, down_weight) == "torch":
            return [f"mlp: torch, as on every {x.device.type}"]
        dtype = operand_dtype("explain_mlp", x, {"up_weight": up_weight})
        arch = capability(x.device)
    where = {"dtype": dtype, "arch": arch}
    if residual is not None and residual.dtype != dtype:
        residual = None  # a wider one is added after the product
    E, F = down_weight.shape
    lines = [explain(activation, T, F * (1 + find_activation(activation).gated), E, **where)]
    if drop is not None or residual is not None:
        lines.append(explain(epilogue_name(None, drop, residual), T, E, F, **where))
    return [*lines, explain(slope_name(activation, recompute != "nothing"), T, F, E, **where)]
