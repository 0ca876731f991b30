"""Cases of every op by name: the differentiable ones of `kernels.cases`, and more options.

The product "gemm" has a gradient with impl "torch" only, and "fused_gemm" has none.
"""

from __future__ import annotations

from functools import partial

import torch

from warpweave.kernels import reference
from warpweave.kernels.cases import Case, cases
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import fused_gemm, gemm
from warpweave.kernels.linear_cross_entropy import linear_cross_entropy
from warpweave.kernels.mlp import gelu_mlp, mlp, swiglu_mlp
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.rope import apply_rope_qk, rope_table

T, E, F, V, D = 5, 8, 6, 11, 4
TABLE = rope_table(torch.arange(T), D, dtype=torch.float64)
KEY = {"seed": 7, "site": 1, "tokens": torch.arange(T)}
DROP = Drop(0.25, **KEY)
LABELS = torch.tensor([0, 3, -100, 5, 1])


def _kept() -> torch.Tensor:
    return reference.dropout(torch.ones(T, E), 0.25, **KEY) > 0


_MORE = (
    Case("rms_norm alone", [(T, E), (E,)], rms_norm, reference.rms_norm),
    Case("layer_norm with a bias", [(T, E), (E,), (E,)], layer_norm, reference.layer_norm),
    Case(
        "rms_norm with everything", [(T, E), (E,), (T, E), (E,)],
        lambda x, w, r, b, **how: rms_norm(x, w, residual=r, x_bias=b, drop=DROP, **how),
        lambda x, w, r, b: reference.rms_norm(
            x, w, residual=r, x_bias=b, dropout=0.25, keep=_kept()
        ),
    ),
    Case("rope of a pair", [(2, T, 3, D), (2, T, 1, D)],
         lambda q, k, impl: apply_rope_qk(q, k, *TABLE, impl=impl),
         lambda q, k: tuple(reference.apply_rope(t, *TABLE) for t in (q, k))),
    Case("gelu_mlp", [(T, E), (F, E), (E, F), (F,), (E,)],
         gelu_mlp, partial(reference.mlp, activation="gelu")),
    Case("swiglu_mlp", [(T, E), (F, 2, E), (E, F), (T, E)],
         lambda x, up, down, r, impl: swiglu_mlp(x, up, down, residual=r, drop=DROP, impl=impl),
         lambda *of: reference.mlp(*of[:3], activation="swiglu", residual=of[3], drop=DROP)),
    Case("mlp, up recomputed", [(T, E), (F, 2, E), (E, F), (F, 2), (E,)],
         partial(mlp, activation="geglu", recompute="up"),
         partial(reference.mlp, activation="geglu")),
    Case("gemm", [(T, E), (E, F), (F,)], gemm, reference.fused_gemm),
    Case("fused_gemm", [(T, E), (E, F)],
         lambda a, b, impl: fused_gemm(a, b, activation="gelu", impl=impl)[0],
         partial(reference.fused_gemm, activation="gelu"), differentiable=False),
    *[
        Case(f"linear cross entropy {name}", [(T, E), (V, E)],
             partial(linear_cross_entropy, labels=LABELS, recompute=recompute, reduction="sum"),
             lambda x, w: reference.linear_cross_entropy(x, w, LABELS).sum())
        for name, recompute in (("recomputed", True), ("in forward", False))
    ],
)  # fmt: skip
_SHARED = (case for case in cases(torch.device("cpu"), T) if case.differentiable)
CASES = {case.name: case for case in (*_SHARED, *_MORE)}
