"""AdamW over one flat shard, with the low-precision copy, compared with torch's fused AdamW."""

from __future__ import annotations

from typing import Any

import kernel_harness
import torch
from kernel_harness import OURS, Problem

from warpweave.kernels import cost, reference
from warpweave.kernels.adamw import adamw_step, sum_of_squares

CLAIM = "One pass over master, gradient and moments also writes the weights' copy."
SIZES = {"tiny": 1003, "check": 1_000_003, "full": 2**28}
RATES = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def _ours(master, grad, m, v, param) -> tuple[torch.Tensor, ...]:
    step = torch.zeros((), device=master.device)
    adamw_step(master, grad, m, v, step=step, param=param, impl="triton", **RATES)
    return master, m, v, (param == master.to(param.dtype)).float()


def _torch(master, grad, m, v, param) -> tuple[torch.Tensor, ...]:
    step = torch.ones((), device=master.device)
    torch._fused_adamw_(
        [master], [grad], [m], [v], [], [step], amsgrad=False, maximize=False, **RATES
    )
    param.copy_(master)
    return master, m, v, (param == master.to(param.dtype)).float()


def _truth(master, grad, m, v, param) -> tuple[torch.Tensor, ...]:
    master, m, v = reference.adamw_step(master, grad, m, v, step=1, **RATES)
    return master, m, v, torch.ones_like(master)  # the copy is the rounded master


def problems(scale: str) -> list[Problem]:
    """Return a step, and the sum of squares that clipping needs."""
    n = SIZES[scale]

    def state(device: torch.device) -> tuple[Any, ...]:
        master, grad, m = (torch.randn(n, device=device) for _ in range(3))
        return (
            master,
            grad,
            m,
            torch.rand(n, device=device),
            torch.empty_like(master, dtype=torch.bfloat16),
        )

    return [
        Problem(
            "adamw + copy", f"n={n}", torch.float32, cost.adamw(n, param_size=2), state,
            {OURS: _ours, "torch fused + copy": _torch}, _truth,
        ),
        Problem(
            "sum_of_squares", f"n={n}", torch.float32, cost.Cost(2 * n, 4 * n),
            lambda device: (torch.randn(n, device=device),),
            {
                OURS: lambda x: (sum_of_squares(x, impl="triton"),),
                "torch": lambda x: (torch.linalg.vector_norm(x).square(),),
            },
            lambda x: (x.square().sum(),),
        ),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run `kernel_harness.main`."""
    kernel_harness.main("kernels_optimizer", CLAIM, problems, arguments)


if __name__ == "__main__":
    main()
