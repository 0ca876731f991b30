"""Kernels reject invalid arguments and accept valid ones: each condition is tested alone.

Covers products, norms, rotations, elementwise ops, AdamW steps, and products with data movement
over ranks. `test_attention_refusals` and `test_loss_refusals` cover the others.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from refused import Rows, Table, ints, strided
from refused import zeros as z

from warpweave.kernels import cost
from warpweave.kernels.activation import activate, activation_bwd, activation_fwd
from warpweave.kernels.adamw import adamw_step, sum_of_squares
from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.gemm import fused_gemm, gemm, gemm_into
from warpweave.kernels.mlp import gelu_mlp, hidden_bwd, hidden_fwd, mlp
from warpweave.kernels.norm import layer_norm, norm_bwd, norm_fwd, rms_norm
from warpweave.kernels.overlap import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from warpweave.kernels.overlap.symmetric import local_memory
from warpweave.kernels.qkv import qkv_bwd, qkv_rope
from warpweave.kernels.rope import RopeScaling, apply_rope, apply_rope_qk, rope_table

NAN, INF = float("nan"), float("inf")
F16, F32, F64, INT = torch.float16, torch.float32, torch.float64, torch.int64

# ---------------------------------------------------------------- products

TOKENS = torch.arange(3)
DROPS: Rows = [
    ({"drop": Drop(0.5, 2**63 - 1, 2**32 - 1, TOKENS)}, None),
    ({"drop": Drop(0.0, 0, 0, TOKENS)}, None),
    ({"drop": (0.5, 0, 0, TOKENS)}, "`drop` must be a Drop"),
    ({"drop": Drop(1.0, 0, 0, TOKENS)}, "need 0 <= p < 1, got 1.0"),
    ({"drop": Drop(-0.01, 0, 0, TOKENS)}, "need 0 <= p < 1"),
    ({"drop": Drop(NAN, 0, 0, TOKENS)}, "need 0 <= p < 1"),
    ({"drop": Drop(0.5, 0, 0, None)}, r"drop.tokens must be int64\[3\], .* got None"),
    ({"drop": Drop(0.5, 0, 0, TOKENS[:2])}, r"drop.tokens must be int64\[3\]"),
    ({"drop": Drop(0.5, 0, 0, TOKENS.int())}, "got torch.int32"),
    ({"drop": Drop(0.5, 0, 0, TOKENS[:, None])}, None),
    ({"drop": Drop(0.5, -1, 0, TOKENS)}, "need 0 <= seed"),
    ({"drop": Drop(0.5, 2**63, 0, TOKENS)}, "need 0 <= seed"),
    ({"drop": Drop(0.5, 0, -1, TOKENS)}, "0 <= site < 2"),
    ({"drop": Drop(0.5, 0, 2**32, TOKENS)}, "0 <= site < 2"),
]
AB = {"a": z(3, 4), "b": z(4, 6)}
HALVES = {name: x.half() for name, x in AB.items()}
DOUBLES = {name: x.double() for name, x in AB.items()}
PRODUCT: Rows = [
    ({}, None),
    ({"b": z(5, 6)}, r"need a\[M, K\] and b\[K, N\]"),
    ({"a": z(4)}, "need a"),
    ({"b": z(4)}, "need a"),
    ({"b": z(4, 6, dtype=F64)}, "the same float dtype"),
    ({"a": z(3, 4, dtype=INT), "b": z(4, 6, dtype=INT)}, "the same float dtype"),
    ({"bias": z(6)}, None),
    ({"bias": z(6, dtype=F16)}, None),
    ({"bias": z(4)}, r"bias must be \[N\] with a float dtype"),
    ({"bias": z(1, 6)}, r"bias must be \[N\] with a float dtype"),
    ({"bias": z(6, dtype=INT)}, r"bias must be \[N\] with a float dtype"),
    ({"out_dtype": F32}, None),
    ({"out_dtype": F64}, "must be torch.float32 or"),
    ({"out_dtype": F16}, "result for .* inputs must be .*, got"),
    ({**HALVES, "out_dtype": F32}, None),
    ({**HALVES, "out_dtype": torch.bfloat16}, "result for .* inputs must be .*, got"),
    ({**DOUBLES, "out_dtype": F64}, None),
    ({**DOUBLES, "out_dtype": F32}, "must be torch.float64 or torch.float64, got torch.float32"),
    ({"a": z(3, 4, grad=True)}, "is not differentiable"),
    ({"b": z(4, 6, grad=True)}, "is not differentiable"),
    ({"bias": z(6, grad=True)}, "is not differentiable"),
    ({"precision": "tf32x3"}, None),
    ({"precision": "fp32"}, "precision must be"),
]
FUSED: Rows = [
    *PRODUCT,
    *DROPS,
    ({"activation": "silu"}, "activation must be one of"),
    ({"activation": "swiglu"}, None),
    ({"activation": "swiglu", "b": z(4, 5)}, "gate and up interleaved, got N = 5"),
    ({"activation": "swiglu", "b": z(4, 7)}, "gate and up interleaved, got N = 7"),
    ({"activation": "gelu", "b": z(4, 5)}, None),
    ({"activation": "gelu", "save_z": True}, None),
    ({"save_z": True}, "save_z=True requires an activation"),
    ({"residual": z(3, 6)}, None),
    ({"residual": z(6)}, "residual must have"),
    (
        {"residual": z(3, 6), "activation": "swiglu"},
        r"residual must have the result's shape \[3, 3\]",
    ),
    ({"residual": z(3, 3), "activation": "swiglu"}, None),
    ({"residual": z(3, 6, grad=True)}, "is not differentiable"),
    ({"b": z(4, 6).to("meta")}, "one device"),
]
INTO: Rows = [
    ({}, None),
    ({"out": z(3, 5)}, r"out must be \[M, N\]"),
    ({"out": z(4, 6)}, "out must be"),
    ({"out": z(3, 1).expand(3, 6)}, "elements must not share memory"),
    ({"out": torch.empty_strided((1, 6), (0, 1)).zero_(), "a": z(1, 4)}, None),
    ({"out": z(3, 6, dtype=INT)}, "result for .* inputs must be .*, got"),
    ({"out": z(3, 6, dtype=F64)}, "result for .* inputs must be .*, got"),
    ({**HALVES}, None),
    ({**HALVES, "out": z(3, 6, dtype=torch.bfloat16)}, "result for .* inputs must be .*, got"),
    ({**DOUBLES}, "must be torch.float64 or torch.float64, got torch.float32"),
    *[({"precision": "tf32x3", "impl": impl}, None) for impl in (None, "torch", "triton")],
    *[({"precision": "fp32", "impl": impl}, "precision must be") for impl in (None, "triton")],
    ({"out": z(3, 6, grad=True)}, "is not differentiable"),
    ({"a": z(3, 4, grad=True)}, "is not differentiable"),
]
MLP: Rows = [
    ({}, None),
    *DROPS,
    ({"activation": "silu"}, "activation must be one of"),
    ({"activation": "gelu"}, r"gelu needs x\[..., E\], up_weight\[F, E\]"),
    ({"activation": "gelu", "up_weight": z(5, 4)}, None),
    ({"up_weight": z(10, 4)}, r"\[F, 2, E\]"),
    ({"up_weight": z(2, 5, 4)}, r"\[F, 2, E\]"),
    ({"x": z(3, 5)}, "swiglu needs x"),
    ({"x": z(4), "residual": z(4)}, None),
    ({"x": z()}, "swiglu needs x"),
    ({"down_weight": z(4, 6)}, "swiglu needs x"),
    ({"down_weight": z(5, 5)}, "swiglu needs x"),
    ({"residual": z(3, 4)}, None),
    ({"residual": z(4)}, r"residual must have the shape \[3, 4\] of x"),
    ({"up_bias": z(5, 2)}, None),
    ({"up_bias": z(10)}, r"up_bias must be \[5, 2\]"),
    ({"up_bias": z(2, 5)}, r"up_bias must be \[5, 2\]"),
    ({"down_bias": z(4)}, None),
    ({"down_bias": z(1)}, r"down_bias must be \[4\]"),
    ({"down_bias": z(1, 4)}, r"down_bias must be \[4\]"),
    *[({"recompute": name}, None) for name in ("nothing", "activation", "up")],
    ({"recompute": "full"}, "recompute must be one of"),
    ({"x": z(3, 4, dtype=F64)}, "dtypes differ"),
    *[
        ({name: z(*shape, dtype=F64)}, f"mlp: dtypes differ: .*{name} torch.float64")
        for name, shape in (("up_weight", (5, 2, 4)), ("down_weight", (4, 5)),
                            ("up_bias", (5, 2)), ("down_bias", (4,)))
    ],
    ({"residual": z(3, 4, dtype=F64)}, None),
]  # fmt: skip
MLP_BASE = {
    "x": z(3, 4), "up_weight": z(5, 2, 4), "down_weight": z(4, 5), "activation": "swiglu",
}  # fmt: skip
GELU_BASE = {"x": z(3, 4), "up_weight": z(5, 4), "down_weight": z(4, 5)}
GELU: Rows = [
    ({}, None),
    ({"approximate": "none"}, None),
    ({"approximate": "erf"}, "approximate must be"),
]
HIDDEN_IN: Rows = [
    ({}, None),
    ({"x": z(3, 4)}, "need a"),
    ({"x": z(3, 5, dtype=F64)}, "the same float dtype"),
    ({"up_bias": z(10)}, None),
    ({"up_bias": z(1)}, r"bias must be"),
    ({"up_weight": z(9, 5)}, r"gate and up interleaved"),
    ({"up_weight": z(9, 5), "activation": "gelu"}, None),
    ({"activation": "silu"}, "activation must be one of"),
]
HIDDEN: Rows = [
    ({}, None),
    ({"z": z(3, 5)}, "expected z to be torch.float32"),
    ({"z": z(2, 10)}, "expected z to be torch.float32"),
    ({"z": z(3, 10, dtype=F64)}, "expected z to be torch.float32"),
    ({"z": z(3, 10, dtype=F16)}, "expected z to be torch.float32"),
    ({"activation": "relu2", "z": z(3, 5)}, None),
    ({"activation": "relu2"}, "expected z to be torch.float32"),
    ({"down_weight": z(5, 5)}, "need a"),
    ({"dy": z(3, 4, dtype=F64)}, "the same float dtype"),
]
COS = z(3, 2)
QKV_ROWS: Rows = [
    ({}, None),
    ({"x": z(3, 6)}, r"qkv_rope: need x\[B, S, E\] .*, got \[3, 6\] and \[2, 4, 4, 6\]"),
    ({"x": z(2, 3, 5)}, "need x"),
    ({"weight": z(2, 4 * 4, 6)}, "need x"),
    ({"weight": z(2, 3, 4, 6)}, None),
    ({"weight": z(2, 2, 4, 6)}, "need x"),
    ({"weight": z(2, 4, 0, 6), "cos": None, "sin": None}, "need x"),
    ({"weight": z(2, 4, 3, 6)}, "even head_dim, got 3"),
    ({"weight": z(2, 4, 3, 6), "cos": None, "sin": None}, None),
    ({"bias": z(2, 4, 4)}, None),
    ({"bias": z(32)}, r"qkv_rope: bias must be \[2, 4, 4\], got \[32\]"),
    ({"cos": None}, "both be tensors, or both None"),
    ({"sin": None}, "both be tensors, or both None"),
    ({"cos": z(2, 2)}, r"qkv_rope: cos and sin must .* = \[3, 2\], got \[2, 2\] and \[3, 2\]"),
    ({"sin": z(3, 3)}, r"qkv_rope: cos and sin must .* = \[3, 2\], got \[3, 2\] and \[3, 3\]"),
    ({"cos": COS.long()}, "float dtype, got torch.int64 and torch.float32"),
    ({"sin": COS.long()}, "float dtype, got torch.float32 and torch.int64"),
    ({"cos": z(3, 2, grad=True)}, "must not require grad"),
    ({"sin": z(3, 2, grad=True)}, "must not require grad"),
    ({"x": z(2, 3, 6, dtype=F64)}, "dtypes differ"),
    ({"bias": z(2, 4, 4, dtype=F64)}, "dtypes differ"),
    ({"precision": "tf32x3", "impl": "triton"}, None),
    *[({"precision": "fp32", "impl": impl}, "precision must be") for impl in ("torch", "triton")],
]
DK = z(2, 3, 2, 4)
QKV_BACK: Rows = [
    ({}, None),
    ({"cos": None, "sin": None}, None),
    ({"dq": z(3, 4, 4)}, "do not match"),
    ({"dq": z(1, 3, 4, 4)}, "do not match"),
    ({"dq": z(2, 2, 4, 4)}, "do not match"),
    ({"dq": z(2, 3, 3, 4)}, "do not match"),
    (
        {"dq": z(2, 3, 4, 6)},
        r"\[2, 3, 4, 6\] torch.float32, \[2, 3, 2, 4\] torch.float32 and \[2, 3, 2, 4\] torch.f",
    ),
    ({"dq": z(2, 3, 4, 4, dtype=F64)}, "do not match"),
    ({"dv": z(2, 3, 1, 4)}, "do not match"),
    ({"dk": z(2, 3, 0, 4), "dv": z(2, 3, 0, 4)}, "do not match"),
    ({n: z(2, 3, 0, 4) for n in ("dq", "dk", "dv")}, None),
    ({"dv": DK.double()}, r"\[2, 3, 2, 4\] torch.float32 and \[2, 3, 2, 4\] torch.float64"),
    ({"sin": None}, r"cos and sin must be .* = \[3, 2\], got \[3, 2\] and None"),
    ({"sin": z(3, 1)}, r"cos and sin must be .* = \[3, 2\], got \[3, 2\] and \[3, 1\]"),
    ({"cos": z(2, 2)}, r"cos and sin must be .* = \[3, 2\], got \[2, 2\] and \[3, 2\]"),
]
ROPE: Rows = [
    ({}, None),
    ({"x": z(3, 2, 4)}, r"x must be \[B, S, H, D\] .*, got \[3, 2, 4\] torch.float32"),
    ({"x": z(2, 3, 2, 4, dtype=INT)}, r"with a float dtype, got \[2, 3, 2, 4\] torch.int64"),
    ({"x": z(2, 3, 2, 9)}, None),
    ({"x": z(2, 3, 2, 3)}, "2 <= R <= D = 3, got R = 4"),
    ({"cos": z(3, 0), "sin": z(3, 0)}, "got R = 0"),
    ({"cos": z(2, 2), "sin": z(2, 2)}, r"must be \[S, R/2\]"),
    ({"cos": z(3, 1)}, r"R/2\] for x \[2, 3, 2, 4\], got \[3, 1\], \[3, 2\]"),
    ({"cos": COS[..., None], "sin": COS[..., None]}, r"must be \[S, R/2\]"),
    *QKV_ROWS[15:19],
]
ROPE_QK: Rows = [
    ({}, None),
    ({"k": z(2, 3, 1, 4)}, None),
    ({"k": z(1, 3, 2, 4)}, "must have the same B, S, D, and dtype"),
    (
        {"k": z(2, 3, 2, 6)},
        r"B, S, D, and dtype, got \[2, 3, 2, 4\] torch.f.*32 and \[2, 3, 2, 6\] torch.f",
    ),
    ({"k": z(2, 2, 2, 4)}, r"must be \[S, R/2\]"),
    ({"k": z(2, 3, 2, 4, dtype=F64)}, r"4\] torch.float32 and \[2, 3, 2, 4\] torch.float64"),
    ({"k": z(3, 2, 4)}, r"x must be \[B, S, H, D\]"),
]
ANGLES: Rows = [
    ({}, None),
    ({"rotary_dim": 7}, r"rotary_dim must be even .* positions must be \[S\], got 7 and \[3\]"),
    ({"rotary_dim": 0}, "rotary_dim must be even and at least 2"),
    ({"rotary_dim": 2}, None),
    ({"positions": ints([0, 1], [2, 3])}, r"positions must be \[S\]"),
    ({"positions": TOKENS.int()}, None),
    ({"positions": TOKENS.half()}, "positions must be an int64 or int32 tensor, got torch.float16"),
    ({"positions": [0, 1]}, "positions must be a tensor of integers, got list"),
    ({"theta": 1.0}, "theta must be greater than 1, got 1.0"),
    ({"theta": 1.001}, None),
    ({"theta": NAN}, "theta must be greater than 1"),
]
BAND = {"kind": "yarn", "original_length": 1}
SCALING: Rows = [
    ({}, None),
    ({"kind": "dynamic"}, 'kind must be linear, ntk, yarn or llama3, got "dynamic"'),
    ({"factor": 0.999}, "factor must be at least 1, got 0.999"),
    ({"factor": 1.0}, None),
    ({"factor": NAN}, "factor must be at least 1"),
    (BAND, None),
    ({"kind": "yarn"}, "yarn needs original_length >= 1, got 0"),
    ({"kind": "llama3"}, "llama3 needs original_length >= 1, got 0"),
    ({**BAND, "low": 0.0}, "0 < low < high"),
    ({**BAND, "low": 32.0}, "0 < low < high, got 32.0 and 32.0"),
    ({**BAND, "low": 31.9}, None),
    ({**BAND, "kind": "llama3", "low": 4.0}, "0 < low < high, got 4.0 and 4.0"),
    ({"low": 0.0}, None),  # no band uses it
    ({**BAND, "high": 0.0}, "0 < low < high, got 1.0 and 0.0"),
    ({**BAND, "high": 1.0}, "0 < low < high, got 1.0 and 1.0"),
    ({**BAND, "high": 1.1}, None),
]

# ---------------------------------------------------------------- norms and elements

X, E6 = z(4, 6), z(6)
NORMS: Rows = [
    ({}, None),
    ({"eps": 0.0}, None),
    ({"eps": -1e-9}, "eps must be at least 0, got -1e-09"),
    ({"eps": NAN}, "eps must be at least 0"),
    ({"weight": None}, r"weight must be \[E\] .* ones\(E\)"),
    ({"weight": z(5)}, r"weight must be \[E\]"),
    ({"weight": z(1, 6)}, r"weight must be \[E\] .*, got weight \[1, 6\], x \[4, 6\]"),
    ({"x": z(4, 0), "weight": z(0)}, r"weight must be \[E\]"),
    ({"x": z(), "weight": z()}, r"weight must be \[E\]"),
    ({"x": z(6)}, None),
    ({"x": z(4, 6, dtype=INT)}, "x must have a float dtype, got torch.int64"),
    ({"weight": z(6, dtype=INT)}, "weight must have a float dtype"),
    ({"residual": X}, None),
    ({"residual": z(4, 6, dtype=F64)}, None),
    ({"residual": z(1, 6)}, r"residual must have the shape \[4, 6\] of x, got \[1, 6\]"),
    ({"residual": z(4, 6, dtype=INT)}, "residual must have a float dtype"),
    ({"x_bias": E6}, None),
    ({"x_bias": z(1)}, r"x_bias must have the shape \[6\] of weight, got \[1\]"),
    ({"x_bias": z(6, dtype=INT)}, "x_bias must have a float dtype"),
    ({"out_dtype": F16}, None),
    ({"out_dtype": INT}, "out_dtype must be one of"),
    *[(change | {"x": z(3, 6)}, words) for change, words in DROPS],
]
LAYER: Rows = [
    *NORMS,
    ({"bias": E6}, None),
    ({"bias": z(1)}, r"^bias must have the shape \[6\] of weight, got \[1\]"),
    ({"bias": 1e-5}, "expected a tensor, got float 1e-05"),
    ({"bias": z(6, dtype=INT)}, "bias must have a float dtype"),
]
HALF_NORM: Rows = [row for row in LAYER if "out_dtype" not in row[0]]
NORM_BACK: Rows = [
    ({}, None),
    ({"mean": None}, None),
    ({"dy": z(3, 6)}, r"dy must have the shape \[4, 6\] of s, got \[3, 6\]"),
    ({"ds": X}, None),
    ({"ds": z(3, 6)}, r"ds must have the shape \[4, 6\] of s, got \[3, 6\]"),
    ({"mean": z(3)}, r"mean must be \[4\], one number per row of s, got \[3\]"),
    *[(change | {"dy": X[:3], "s": X[:3], "mean": z(3), "rstd": z(3)}, words)
      for change, words in DROPS],
    ({"rstd": z(4, 1)}, r"rstd must be \[4\], one number per row of s, got \[4, 1\]"),
    ({"weight": z(5)}, r"weight must be \[E\]"),
]  # fmt: skip
ACTIVATE: Rows = [
    ({}, None),
    ({"activation": "silu"}, "activation must be one of"),
    ({"x": z(3, 5)}, r"swiglu needs x\[..., 2F\] with gate and up interleaved, got \[3, 5\]"),
    ({"x": z()}, r"swiglu needs x\[..., 2F\] with gate and up interleaved, got \[\]"),
    ({"x": z(), "activation": "gelu"}, None),
    ({"x": z(3, 5), "activation": "relu2"}, None),
    ({"x": z(3, 4, dtype=INT)}, "swiglu needs a float dtype, got torch.int64"),
]
ACTIVATE_BACK: Rows = [
    ({}, None),
    ({"dy": z(3, 4)}, r"dy must have the shape of swiglu\(x\) for x \[3, 4\], got \[3, 4\]"),
    ({"dy": z(2, 2)}, r"must have the shape of swiglu\(x\)"),
    *[({"dy": z(*s)}, r"must have the shape of swiglu\(x\)") for s in ((2, 3), (6,), (3, 1, 2))],
    ({"dy": z(3, 4), "activation": "gelu"}, None),
    ({"activation": "gelu"}, r"must have the shape of gelu\(x\)"),
    ({"x": z(3, 5)}, r"gate and up interleaved"),
    ({"x": z(), "dy": z()}, r"gate and up interleaved"),
    ({"activation": "silu"}, "activation must be one of"),
]
DROPPED: Rows = [
    *DROPS,
    ({"x": z(3, 5, dtype=INT)}, "x must have a float dtype"),
    ({"x": z()}, "and at least one dim"),
    ({"x": z(5), "drop": Drop(0.5, 0, 0, ints(7))}, None),
    ({"x": z(3, 1, 5)}, None),
]
ONE = torch.ones(())
RATES = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
STEP_BASE = dict.fromkeys(("master", "grad", "m", "v"), E6) | {"step": ONE, **RATES}
STEP: Rows = [
    ({}, None),
    ({"master": z(6, dtype=F16)}, "master must be float32 or float64"),
    *[
        ({name: x}, f"{name} must be contiguous with shape")
        for x in (z(5), strided(E6))
        for name in ("grad", "m", "v", "param")
    ],
    (dict.fromkeys(("master", "grad", "m", "v"), z(2, 3)), "master must be contiguous with shape"),
    ({"grad": z(6, dtype=F16)}, None),
    ({"grad": z(6, dtype=INT)}, "grad must have a float dtype"),
    ({"grad": z(6).to("meta")}, "one device"),
    ({"param": z(6, dtype=F16)}, None),
    ({"param": z(6, dtype=INT)}, "param must have a float dtype"),
    ({"m": z(6, dtype=F64)}, "m must have a float dtype"),
    ({"v": z(6, dtype=F64)}, "v must have a float dtype"),
    *[({name: z(1)}, f"{name} must be a 0-dim") for name in ("step", "grad_scale", "skip")],
    *[({name: ONE}, None) for name in ("grad_scale", "skip")],
    ({"step": ONE.double()}, None),
    ({"step": ONE.half()}, "step must be float32 or float64"),
    ({"step": ONE.long()}, "step must be float32 or float64"),
    *[({name: 0.0}, None) for name in ("lr", "eps", "weight_decay", "beta1", "beta2")],
    *[
        ({name: value}, "need 0 <= beta < 1 and lr, eps, weight_decay >= 0")
        for name in ("lr", "eps", "weight_decay", "beta1", "beta2")
        for value in ((-1e-9, NAN, 1.0) if "beta" in name else (-1e-9, NAN))
    ],
]
SQUARES: Rows = [
    ({}, None),
    ({"flats": z(2, 3)}, "flat contiguous float"),
    ({"flats": strided(E6)}, "flat contiguous float"),
    ({"flats": z(6, dtype=INT)}, "flat contiguous float"),
]
SEEN: Rows = [
    ({}, None),
    ({"window": 3}, None),
    ({"Sk": 9}, None),
    ({"Sk": 9, "window": 3}, r"Sq, Sk and sum\(documents\) must be equal"),
    ({"Sk": 9, "documents": [8]}, r"Sq, Sk and sum\(documents\) must be equal"),
    ({"documents": [5, 3]}, None),
    ({"documents": [5, 2]}, r"Sq, Sk and sum\(documents\) must be equal"),
]

# ---------------------------------------------------------------- over two ranks' memory


def shared(call, slots=2, capacity=256, **given):
    """Return a call that ends at its check, or else at data that the other rank never published."""
    memory, _ = local_memory(2, slots=slots, capacity=capacity, polls=1)
    try:
        call(memory=memory, **given)
    except TimeoutError:
        pass
    except ValueError:
        assert not memory.segments[0].any(), "refused when something was published"
        raise


A, B = z(4, 2), z(2, 3)
MOVED: Rows = [
    ({}, None),
    ({"b": z(3, 3)}, "need a"),
    ({"b": z(2, 3, dtype=F64)}, "the same float dtype"),
    ({"bias": z(3)}, None),
    ({"bias": z(2)}, "bias must be"),
    ({"out_dtype": F16}, "result for .* inputs must be .*, got"),
    ({"precision": "fp32"}, "precision must be"),
    ({"b": z(2, 3, grad=True)}, "is not differentiable"),
    ({"bias": z(3, grad=True)}, "is not differentiable"),
    ({"b": z(2, 99)}, "needs .* parts and .* bytes of symmetric memory, but this memory has"),
    ({"slots": 0}, "needs 1 parts and .* this memory has 0 parts and 256 bytes"),
    ({"drop": Drop(1.0, 0, 0, TOKENS)}, "need 0 <= p < 1"),
]
SENT: Rows = [
    *MOVED,
    (
        {"b": z(2, 24)},
        "needs 1 parts and 384 bytes of symmetric memory, but this memory has 2 parts and 256 "
        "bytes",
    ),
    ({"a": z(4, 2, grad=True)}, "is not differentiable"),
]
SCATTER: Rows = [
    *SENT,
    ({"a": z(5, 2)}, r"dim 0 of `a` \[5, 2\] is not divisible by 2 ranks"),
    ({"residual": z(4, 3)}, r"residual must have the result's shape \[2, 3\]"),
]
REDUCE: Rows = [
    *SENT,
    ({"a": z(5, 2)}, None),
    ({"residual": z(2, 3)}, r"residual must have the result's shape \[4, 3\]"),
]
GATHER: Rows = [
    *[row for row in MOVED if "b" not in row[0] or row[0]["b"].shape[1] < 9],
    ({"x": z(4, 2, grad=True)}, "is not differentiable"),
    ({"x": z(4, 0), "b": z(0, 3)}, r"needs x\[S, K\] with K >= 1"),
    ({"x": z(0, 0), "b": z(0, 3)}, None),
    ({"x": z(33, 2)}, "needs 1 parts and 264 bytes .* this memory has 2 parts and 256 bytes"),
    ({"x": z(32, 2)}, None),
    ({"residual": z(4, 3)}, r"residual must have the result's shape \[8, 3\]"),
    ({"save_z": True}, "save_z=True"),
    ({"activation": "swiglu"}, r"gate and up interleaved"),
]

TABLES = {
    "gemm": Table(gemm, {**AB, "impl": "triton"}, PRODUCT),
    "gemm_into": Table(gemm_into, {**AB, "out": z(3, 6), "add": True}, INTO),
    "fused_gemm": Table(fused_gemm, AB, FUSED),
    "mlp": Table(mlp, MLP_BASE, MLP),
    "gelu_mlp": Table(gelu_mlp, GELU_BASE, GELU),
    "hidden_fwd": Table(
        hidden_fwd, {"x": z(3, 5), "up_weight": z(10, 5), "activation": "swiglu"}, HIDDEN_IN
    ),
    "hidden_bwd": Table(
        hidden_bwd,
        {"dy": z(3, 4), "down_weight": z(4, 5), "z": z(3, 10), "activation": "swiglu"},
        HIDDEN,
    ),
    "qkv_rope": Table(
        qkv_rope,
        {"x": z(2, 3, 6), "weight": z(2, 4, 4, 6), "bias": None, "cos": COS, "sin": COS},
        QKV_ROWS,
    ),
    "qkv_bwd": Table(
        qkv_bwd, {"dq": z(2, 3, 4, 4), "dk": DK, "dv": DK, "cos": COS, "sin": COS}, QKV_BACK
    ),
    "apply_rope": Table(apply_rope, {"x": DK, "cos": COS, "sin": COS}, ROPE),
    "apply_rope_qk": Table(apply_rope_qk, {"q": DK, "k": DK, "cos": COS, "sin": COS}, ROPE_QK),
    "rope_table": Table(rope_table, {"positions": TOKENS, "rotary_dim": 4}, ANGLES),
    "RopeScaling": Table(RopeScaling, {"kind": "linear", "factor": 2.0}, SCALING),
    "rms_norm": Table(rms_norm, {"x": X, "weight": E6}, NORMS),
    "layer_norm": Table(layer_norm, {"x": X, "weight": E6}, LAYER),
    "norm_bwd": Table(
        norm_bwd, {"dy": X, "s": X, "weight": E6, "mean": z(4), "rstd": z(4)}, NORM_BACK
    ),
    "activate": Table(activate, {"x": z(3, 4), "activation": "swiglu"}, ACTIVATE),
    "activation_fwd": Table(activation_fwd, {"x": z(3, 4), "activation": "swiglu"}, ACTIVATE[:-1]),
    "norm_fwd": Table(norm_fwd, {"x": X, "weight": E6, "layer": True}, HALF_NORM),
    "activation_bwd": Table(
        activation_bwd, {"dy": z(3, 2), "x": z(3, 4), "activation": "swiglu"}, ACTIVATE_BACK
    ),
    "dropout": Table(dropout, {"x": z(3, 5), "drop": Drop(0.5, 0, 0, TOKENS)}, DROPPED),
    "adamw_step": Table(adamw_step, STEP_BASE, STEP),
    "sum_of_squares": Table(sum_of_squares, {"flats": E6}, SQUARES),
    "cost of attention": Table(cost.attention, {"B": 1, "Sq": 8, "Sk": 8, "H": 1, "D": 4}, SEEN),
    "all_gather_gemm": Table(partial(shared, all_gather_gemm), {"x": A, "b": B}, GATHER),
    "gemm_reduce_scatter": Table(partial(shared, gemm_reduce_scatter), {"a": A, "b": B}, SCATTER),
    "gemm_all_reduce": Table(partial(shared, gemm_all_reduce), {"a": A, "b": B}, REDUCE),
}


@pytest.mark.parametrize("name", TABLES)
def test_what_breaks_one_rule_is_refused_and_what_breaks_none_is_not(name) -> None:
    TABLES[name].check()


NORM_MORE = {"residual": X, "x_bias": E6, "drop": Drop(0.5, 0, 0, ints(1, 2, 3, 4))}
MORE = {  # tensors that a call may have in addition to those of its base
    "gemm": {"bias": z(6)},
    "fused_gemm": {"bias": z(6), "residual": z(3, 6), "drop": Drop(0.5, 0, 0, TOKENS)},
    "mlp": {"up_bias": z(5, 2), "down_bias": z(4), "residual": z(3, 4),
            "drop": Drop(0.5, 0, 0, TOKENS)},
    "hidden_fwd": {"up_bias": z(10)},
    "qkv_rope": {"bias": z(2, 4, 4)},
    "rms_norm": NORM_MORE,
    **dict.fromkeys(("layer_norm", "norm_fwd"), NORM_MORE | {"bias": E6}),
    "norm_bwd": {"ds": X, "drop": Drop(0.5, 0, 0, ints(1, 2, 3, 4))},
    "adamw_step": {"grad_scale": ONE, "skip": ONE, "param": E6},
    "all_gather_gemm": {"bias": z(3), "residual": z(8, 3)},
    "gemm_reduce_scatter": {"bias": z(3), "residual": z(2, 3), "drop": Drop(0.5, 0, 0, ints(1, 2))},
    "gemm_all_reduce": {"residual": z(4, 3), "drop": Drop(0.5, 0, 0, ints(0, 1, 2, 3))},
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in TABLES if n != "RopeScaling" and "cost" not in n])
def test_every_tensor_must_be_where_the_others_are(name) -> None:
    TABLES[name].elsewhere(MORE.get(name, {}))


ALONE = {  # tensors whose length no other argument shares
    "gemm": {("a", 0)}, "rope_table": {("positions", 0)}, "sum_of_squares": {("flats", 0)},
    "apply_rope": {("x", 0), ("x", 2)}, "apply_rope_qk": {("q", 2), ("k", 2)},
    "dropout": {("x", 1)}, "activate": {("x", 0)}, "activation_fwd": {("x", 0)},
    "gelu_mlp": {("x", 0)}, "hidden_fwd": {("x", 0)}, "qkv_rope": {("x", 0)},
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_one_of_many_is_not_broadcast(name) -> None:
    assert TABLES[name].one_of_many(MORE.get(name, {})) == ALONE.get(name, set())
