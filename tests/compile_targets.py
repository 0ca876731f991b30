"""Compile the kernels for GPUs that are not there, and report what the compiler made of them.

A case is a call of an ordinary launcher on meta tensors. In a subprocess without TRITON_INTERPRET,
`warpweave.tune.aot` compiles every kernel the call launches down to the cubin, and nothing runs.

To add a kernel, append a `Case` in `cases` below:

    Case("attention fwd bf16 D=128", lambda: attention_fwd(q, k, v, ...), tensor_cores=True)

with `m(*shape, dtype=torch.bfloat16)` for a tensor. `tensor_cores=True` asserts the part's fastest
products (mma.sync, wgmma or tcgen05); `float64=True` permits float64 ones, which otherwise are a
constant that widened a kernel; `targets=("sm_90", "sm_100")` restricts a case; `cost` is what the
call must at least move and compute. `tile_cases` goes through the tile tables: every tile that is
shipped, and attention's once more with the options that keep more in registers. For the launcher's
sake
  * `dispatch.choose` answers "triton" for meta tensors,
  * `dispatch.capability` and `dispatch.processors` answer for the target, so ask them, not
    torch.cuda,
  * values of tensors do not exist (`.item()`, `.tolist()` fail).
To look at one's own kernels:  python -P tests/compile_targets.py sm_90 attention
(--tiles: the tables' cases instead; --clock: with their hot loops, and what waits for what in
them). `test_compiles.py` asserts: no spills, shared memory within the target's limit, tensor cores
where claimed, and no wgmma that waits for the one before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch

from warpweave.kernels.cost import Cost
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.tune.aot import Compiled, compiling
from warpweave.tune.clock import HotLoop
from warpweave.tune.parts import PARTS

TARGETS = ("sm_80", "sm_90", "sm_100")
SHARED_LIMIT = {target: part.block_shared for target, part in PARTS.items()}
# Cases of kernels that read rows: at least half of their loads take 128 bits (statistics and
# labels are single values).
ROWWISE = ("dropout", "gelu", "layer_norm", "rms_norm", "rope", "swiglu")
# Kernels in which ranks tell one another by flags in memory, which are atomic exchanges.
TELLING = ("_publish_kernel", "_partials_kernel", "_arrived_kernel", "_gather_kernel",
           "_gather_gemm_kernel", "_gather_qkv_kernel")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call of a launcher."""

    name: str
    call: Callable[[], object]
    tensor_cores: bool = False
    float64: bool = False
    targets: tuple[str, ...] = TARGETS
    cost: Cost | None = None


@dataclass(frozen=True)
class Report:
    """What the compiler made of one kernel of one case: see `aot.Compiled`.

    `cost` is the case's [FLOPs, bytes]; `error` is what the compiler said instead, if it failed.
    """

    target: str
    case: str
    kernel: str
    tensor_cores: bool
    float64: bool
    num_warps: int
    registers: int
    stack: int
    shared: int
    occupancy: int
    programs: int
    product: str
    constants: dict[str, Any]
    instructions: dict[str, int]
    cost: tuple[int, int] | None
    error: str = ""
    serialised: str = ""
    unordered: str = ""
    loops: list[HotLoop] = dataclasses.field(default_factory=list)
    outside: int = 0
    unread: str = ""


def m(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that has a shape and a dtype but no values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def cases() -> list[Case]:
    """Every case; called in the subprocess only."""
    from warpweave.kernels import activation, adamw, cost, dropout, rope
    from warpweave.kernels.attention import function as attention
    from warpweave.kernels.cross_entropy import backward, forward
    from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
    from warpweave.kernels.norm import function as norm

    T, fp32 = 8192, torch.float32
    f, b, f2, h = m(1, dtype=fp32), m(1), m(128, 64, dtype=fp32), m(T, 4096)
    tokens = m(T, dtype=torch.int64)
    found = [
        Case("planted spill", lambda: _planted_kernel[(1,)](f, f, 16384, False, num_warps=1)),
        Case("planted tile", lambda: _planted_kernel[(1,)](b, b, 1024, True, num_warps=16)),
        Case(
            "planted claim",
            lambda: _planted_kernel[(1,)](f, f, 128, False, num_warps=4),
            tensor_cores=True,
        ),
        Case("planted order", _planted_order, targets=("sm_90",)),
        Case(
            "rope",
            lambda: rope.rope_fwd(m(2, 128, 8, 128), f2, f2),
            cost=cost.rope(2, 128, 8, 128),
        ),
        Case(
            "gelu tanh fwd",
            lambda: activation.activation_fwd(h, "gelu"),
            cost=cost.gelu(h.numel()),
        ),
        Case(
            "gelu tanh bwd",
            lambda: activation.activation_bwd(h, h, "gelu"),
            cost=cost.gelu(h.numel(), backward=True),
        ),
        Case(
            "gelu erf bwd",
            lambda: activation.activation_bwd(h, h, "gelu_erf"),
            cost=cost.gelu(h.numel(), backward=True),
        ),
        Case(
            "swiglu fwd",
            lambda: activation.activation_fwd(h, "swiglu"),
            cost=cost.swiglu(h.numel() // 2),
        ),
        Case(
            "swiglu bwd",
            lambda: activation.activation_bwd(m(T, 2048), h, "swiglu"),
            cost=cost.swiglu(h.numel() // 2, backward=True),
        ),
        Case(
            "dropout",
            lambda: dropout.dropout_fwd(h, dropout.Drop(0.1, 7, 3, tokens)),
            cost=cost.dropout(*h.shape),
        ),
    ]
    for E in (768, 8192):
        x, w, row = m(T, E), m(E), m(T, dtype=fp32)
        found += [
            Case(
                f"rms_norm fwd E={E}",
                lambda x=x, w=w: norm.norm_fwd(x, w, layer=False, residual=x),
                cost=cost.norm(T, E, residual=True),
            ),
            Case(
                f"rms_norm bwd E={E}",
                lambda x=x, w=w, r=row: norm.norm_bwd(x, x, w, None, r, ds=x),
                cost=cost.norm(T, E, residual=True, backward=True),
            ),
            Case(
                f"layer_norm fwd E={E}",
                lambda x=x, w=w: norm.norm_fwd(x, w, w, layer=True),
                cost=cost.norm(T, E, layer=True),
            ),
            Case(
                f"layer_norm bwd E={E}",
                lambda x=x, w=w, r=row: norm.norm_bwd(x, x, w, r, r, ds=x, bias=True),
                cost=cost.norm(T, E, layer=True, residual=True, backward=True),
            ),
        ]
    found += _norm_chains(norm) + _rope_cases(rope) + _adamw_cases(adamw)
    for D, dtype in ((64, torch.bfloat16), (128, torch.float16)):
        q, k = m(2, 4096, 16, D, dtype=dtype), m(2, 4096, 4, D, dtype=dtype)
        row = m(2, 16, 4096, dtype=fp32)
        found += [
            Case(
                f"attention fwd D={D}",
                lambda q=q, k=k: attention.attention_fwd(q, k, k),
                tensor_cores=True,
                cost=cost.attention(2, 4096, 4096, 16, D, kv_heads=4),
            ),
            Case(
                f"attention bwd D={D}",
                lambda q=q, k=k, r=row: attention.attention_bwd(q, q, k, k, r, r),
                tensor_cores=True,
                cost=cost.attention(2, 4096, 4096, 16, D, kv_heads=4, backward=True),
            ),
        ]
    q, row = m(2, 4096, 16, 128), m(2, 16, 4096, dtype=fp32)
    found.append(
        Case(
            "attention delta",
            lambda q=q, row=row: attention.attention_delta(q, q, row),
            cost=Cost(2 * q.numel(), 4 * q.numel() + 8 * row.numel()),
        )
    )
    found += _attention_options(attention)
    for V, dtype in [(256, torch.bfloat16), (50257, torch.bfloat16), (128256, fp32)]:
        z, t, row = m(T, V, dtype=dtype), m(T, dtype=torch.int64), m(T, dtype=fp32)
        name = f"V={V} {dtype}".replace("torch.", "")
        found += [
            Case(
                f"cross_entropy fwd {name}",
                lambda z=z, t=t, V=V: forward._fwd_triton(z, t, Vocabulary(0, V), True),
                cost=cost.cross_entropy(T, V, size=dtype.itemsize),
            ),
            Case(
                f"cross_entropy bwd {name}",
                lambda z=z, t=t, row=row, V=V: backward._bwd_triton(
                    row, z, t, row, Vocabulary(0, V, label_smoothing=0.1)
                ),
                cost=cost.cross_entropy(T, V, backward=True, size=dtype.itemsize),
            ),
            Case(
                f"cross_entropy bwd in place, z-loss {name}",
                lambda z=z, t=t, row=row: backward._bwd_triton(
                    row, z, t, row, Vocabulary(128, 10**6, z_loss=1e-4), z
                ),
                cost=cost.cross_entropy(T, V, backward=True, size=dtype.itemsize),
            ),
        ]
    for dtype in (fp32, torch.float64):
        flat, low = m(10**7, dtype=dtype), m(10**7)
        one, rates = m(dtype=fp32), adamw._Rates(1e-3, 0.9, 0.95, 1e-8, 0.1)
        step = m(dtype=torch.float64)  # as the trainer counts
        found += [
            Case(
                f"adamw {dtype}".replace("torch.", ""),
                lambda flat=flat, low=low, step=step, one=one, rates=rates: adamw._adamw_triton(
                    flat, low, flat, flat, low, step, one, one, rates
                ),
                float64=True,  # the scalars of a step
                cost=cost.adamw(10**7, grad_size=2, param_size=2) if dtype == fp32 else None,
            ),
            Case(
                f"sum_of_squares {dtype}".replace("torch.", ""),
                lambda flat=flat: adamw._sum_of_squares_triton(flat),
                float64=dtype == torch.float64,
                cost=Cost(2 * 10**7, 10**7 * dtype.itemsize),
            ),
        ]
    return [*found, *_linear_cases(), *_overlap_cases()]


def _attention_options(attention) -> list[Case]:
    """Attention with all that can be asked of it at once in real models."""
    documents = m(9, dtype=torch.int32)
    return [
        *_attention_with(attention, "packed window", m(128), documents=documents, window=512),
        *_attention_with(attention, "carried softcap", m(128), softcap=50.0, carried=True),
        *_attention_with(attention, "dropout", m(64), dropout=0.1, dropout_seed=7),
    ]


def _attention_with(
    attention,
    name: str,
    like: torch.Tensor,
    carried: bool = False,
    sliced: bool = False,
    **options,
) -> list[Case]:
    """Both directions, for heads `like` this vector; what is not `carried` has sinks. The q of what
    is `sliced` is one of a packed projection, so that its rows lie further apart than those of do.
    """
    from warpweave.kernels import cost

    (D,), dtype, fp32 = like.shape, like.dtype, torch.float32
    do, k = m(2, 4096, 16, D, dtype=dtype), m(2, 4096, 4, D, dtype=dtype)
    q = m(2, 4096, 24, D, dtype=dtype)[:, :, :16] if sliced else do
    given = {name: options[name] for name in ("window", "causal") if name in options}
    sizes = {"kv_heads": 4, "size": dtype.itemsize, **given}
    if carried:  # the sums are float32, read and written
        more = 2 * 4 - dtype.itemsize
        add_o, add_grads = more * q.numel() + 4 * 2 * 16 * 4096, more * (q.numel() + 2 * k.numel())
    else:
        add_o, add_grads = 0, 0
    costs = {
        "fwd": cost.attention(2, 4096, 4096, 16, D, **sizes) + Cost(0, add_o),
        "bwd": cost.attention(2, 4096, 4096, 16, D, **sizes, backward=True) + Cost(0, add_grads),
    }
    o, dk, row = m(*q.shape, dtype=fp32), m(*k.shape, dtype=fp32), m(2, 16, 4096, dtype=fp32)
    start = {"into": (o, row)} if carried else {"sinks": m(16)}
    add = (o, dk, dk) if carried else (None, None, None)
    calls = {
        "fwd": lambda: attention.attention_fwd(q, k, k, **start, **options),
        "bwd": lambda: attention.attention_bwd(do, q, k, k, row, row, into=add, **options),
    }
    kind = f"D={D} {dtype}".replace("torch.", "")
    return [
        Case(f"attention {name} {way} {kind}", call, tensor_cores=dtype != fp32, cost=costs[way])
        for way, call in calls.items()
    ]


def _norm_chains(norm) -> list[Case]:
    """Norms with all that can be fused, in the layouts of real models; their own function for
    length."""
    from warpweave.kernels import cost
    from warpweave.kernels.dropout import Drop

    fp32, found = torch.float32, []
    for E in (768, 5120, 8192, 16384, 65536):
        T = 2**24 // E // 16 * 16
        x, w, s, row = m(T, E), m(E), m(T, E, dtype=fp32), m(T, dtype=fp32)
        drop = {"drop": Drop(0.1, 1, 1, m(T, dtype=torch.int64))}
        made = {"x_bias": True, "x_dtype": x.dtype, "residual_dtype": fp32, "ds": s}
        calls = {
            "rms_norm chain fwd": lambda x=x, w=w, s=s: norm.norm_fwd(
                x, w, layer=False, residual=s, x_bias=w
            ),
            "rms_norm chain bwd": lambda x=x, w=w, s=s, row=row, made=made: norm.norm_bwd(
                x, s, w, None, row, **made
            ),
            "layer_norm chain fwd": lambda x=x, w=w, s=s, drop=drop: norm.norm_fwd(
                x, w, w, layer=True, residual=s, x_bias=w, **drop
            ),
            "layer_norm chain bwd": lambda x=x, w=w, s=s, row=row, made=made, drop=drop: (
                norm.norm_bwd(x, s, w, row, row, bias=True, **made, **drop)
            ),
        }
        for name, call in calls.items():
            layer, backward = name.startswith("layer"), name.endswith("bwd")
            least = cost.norm(
                T, E, layer=layer, residual=True, x_bias=True, dropout=layer, backward=backward,
                stream_size=4,
            )  # fmt: skip
            found.append(Case(f"{name} E={E}", call, cost=least))
    x, w, wide = m(2**20, 4096), m(4096), m(2**20, 8192)
    found.append(
        Case(
            "rms_norm fwd into a slice, offsets past 2^31",
            lambda: norm.norm_fwd(x, w, layer=False, residual=x, out=wide[:, 4096:]),
            cost=cost.norm(2**20, 4096, residual=True),
        )
    )
    return found


def _rope_cases(rope) -> list[Case]:
    """Pairs and widths of rotation."""
    from warpweave.kernels import cost

    fp32, found = torch.float32, []
    for D, R in ((128, 128), (128, 32), (96, 96), (256, 64)):
        qkv, table = m(2, 4096, 48, D), m(4096, R // 2, dtype=fp32)
        q, k = qkv[:, :, :32], qkv[:, :, 32:40]
        for interleaved in (False, True):
            name = f"D={D} R={R}" + " interleaved" * interleaved
            options = {"interleaved": interleaved}
            found += [
                Case(
                    f"rope pair {name}",
                    lambda q=q, k=k, t=table, o=options: rope.rope_qk_fwd(q, k, t, t, **o),
                    cost=cost.rope(2, 4096, 40, D, rotary_dim=R),
                ),
            ]
    x, table = m(2, 2**16, 256, 128), m(2**16, 64, dtype=fp32)
    least = cost.rope(2, 2**16, 256, 128)
    found.append(Case("rope offsets past 2^31", lambda: rope.rope_fwd(x, table, table), cost=least))
    return found


def _adamw_cases(adamw) -> list[Case]:
    """More than 2^31 elements."""
    from warpweave.kernels import cost

    n, one = 2**31 + 4096, m(dtype=torch.float32)
    many, lows = m(n, dtype=torch.float32), m(n)
    rates = adamw._Rates(1e-3, 0.9, 0.95, 1e-8, 0.1)
    return [
        Case(
            "adamw offsets past 2^31",
            lambda: adamw._adamw_triton(many, lows, many, many, lows, one, one, None, rates),
            float64=True,  # the scalars of a step
            cost=cost.adamw(n, grad_size=2, param_size=2),
        ),
        Case(
            "sum_of_squares offsets past 2^31",
            lambda: adamw._sum_of_squares_triton(lows),
            cost=Cost(2 * n, 2 * n),
        ),
    ]


def _overlap_cases() -> list[Case]:
    """Overlapped products, of one of eight ranks, in the shapes of an 8B Llama."""
    from warpweave.kernels.overlap.epilogue import Epilogue
    from warpweave.kernels.overlap.gather import all_gather_steps, gather_steps
    from warpweave.kernels.overlap.scatter import scatter_steps
    from warpweave.kernels.overlap.symmetric import SymmetricMemory
    from warpweave.kernels.qkv.gathered import gather_qkv_steps

    T, E, F, W, i64 = 8192, 4096, 14336, 8, torch.int64
    segments = (m(1, dtype=torch.uint8),) * W
    tables = m(W, dtype=i64), m(1, dtype=i64), m(5, dtype=i64)
    memory = SymmetricMemory(1, W, segments, *tables, slots=2**16, capacity=2**32)
    bounded = dataclasses.replace(memory, polls=1000)
    whole = (m(2**34, dtype=torch.uint8),) * W
    engines = dataclasses.replace(memory, segments=whole, engines=True)
    x, up, h, down = m(T // W, E), m(F // W, E), m(T, F // W), m(E, F // W)
    gelu, bias = Epilogue(m(F // W), "gelu", save_z=True), Epilogue(m(E))
    heads, table = m(1, 6, 128, E), m(4096, 64, dtype=torch.float32)

    def heads_of(memory):
        options = {"shape": (2, 4096), "precision": None}
        return gather_qkv_steps(x, heads, m(1, 6, 128), (table, table), memory, **options)

    calls = {
        "qkv": lambda: heads_of(memory),
        "qkv bounded": lambda: heads_of(bounded),
        "qkv by engine": lambda: heads_of(engines),
        "all_gather_gemm by engine": lambda: gather_steps(x, up.t(), engines, Epilogue()),
        "all_gather_gemm gelu by engine": lambda: gather_steps(x, up.t(), engines, gelu),
        "all_gather_gemm by engine bounded": lambda: gather_steps(
            x, up.t(), dataclasses.replace(engines, polls=1000), gelu
        ),
        "all_gather_gemm": lambda: gather_steps(x, up.t(), memory, Epilogue()),
        "all_gather_gemm gelu": lambda: gather_steps(x, up.t(), memory, gelu),
        "gemm_reduce_scatter": lambda: scatter_steps(
            h, down.t(), memory, bias, wire=torch.bfloat16, owners=W, name="x"
        ),
        "gemm_reduce_scatter unrounded": lambda: scatter_steps(
            h, down.t(), memory, bias, wire=torch.float32, owners=W, name="x"
        ),
        "gemm_all_reduce": lambda: scatter_steps(
            h, down.t(), memory, bias, wire=torch.float32, owners=1, name="x"
        ),
        "gemm_all_reduce in two shots": lambda: all_gather_steps("x", m(T // W, E), memory),
        "all_gather_gemm bounded": lambda: gather_steps(x, up.t(), bounded, gelu),
        "gemm_reduce_scatter bounded": lambda: scatter_steps(
            h, down.t(), bounded, bias, wire=torch.bfloat16, owners=W, name="x"
        ),
    }
    flops, read = 2 * T * E * F // W, 2 * (T * E + E * F // W + T * F // W)
    return [
        Case(f"overlap {name}", lambda call=call: [*call()], cost=Cost(flops, read))
        for name, call in calls.items()
    ]


def _linear_cases() -> list[Case]:
    """Products with every epilogue, in the shapes of an 8B Llama; odd ones; wide element types."""
    from warpweave.kernels import cost, dropout, mlp, qkv
    from warpweave.kernels.gemm import fused as gemm
    from warpweave.kernels.gemm import gemm_into

    T, E, F, fp32, fp64 = 8192, 4096, 14336, torch.float32, torch.float64
    x, up, down, bias = m(T, E), m(2 * F, E), m(E, F), m(2 * F)
    drop = dropout.Drop(0.1, 7, 3, m(T, dtype=torch.int64))
    row, far = m(T, F), m(2**20, E)
    table = {D: m(4096, D // 2, dtype=fp32) for D in (80, 128)}

    def fused(activation, wide=False, **options):
        weight, b = (up, bias) if wide else (up[:F], bias[:F])
        options |= {"save_z": True, "impl": "triton"}
        return gemm.fused_gemm(x, weight.t(), b, activation=activation, **options)

    def slope(activation, z, want_hidden=True):
        options = {"want_hidden": want_hidden, "impl": "triton"}
        return mlp.hidden_bwd(x, down, m(T, z), activation=activation, **options)

    def wide(dtype, precision=None):
        a, b = m(T, E, dtype=dtype), m(E, E, dtype=dtype)
        return gemm.gemm(a, b, precision=precision, impl="triton")

    calls = {
        "gemm bias": lambda: gemm.gemm(x, up.t(), bias, impl="triton"),
        "gemm into": lambda: gemm_into(x.t(), row, m(E, F, dtype=fp32), True, impl="triton"),
        "gemm gelu": lambda: fused("gelu"),
        "gemm gelu_erf": lambda: fused("gelu_erf"),
        "gemm relu2": lambda: fused("relu2"),
        "gemm swiglu": lambda: fused("swiglu", wide=True),
        "gemm everything": lambda: fused("geglu", wide=True, drop=drop, residual=row),
        "gemm dropout residual": lambda: gemm.fused_gemm(
            row, down.t(), bias[:E], drop=drop, residual=x, impl="triton"
        ),
        "gemm small": lambda: gemm.fused_gemm(
            x[:500], m(E, 1024), activation="gelu", save_z=True, impl="triton"
        ),
        "gemm odd": lambda: gemm.fused_gemm(
            m(4099, 1031),
            m(1031, 2054),
            activation="swiglu",
            save_z=True,
            residual=m(4099, 1027),
            impl="triton",
        ),
        "gemm offsets past 2^31": lambda: gemm.fused_gemm(
            far, m(E, E), residual=far, impl="triton"
        ),
        "gemm tf32": lambda: wide(fp32, "tf32"),
        "gemm tf32x3": lambda: wide(fp32, "tf32x3"),
        "mlp gelu bwd": lambda: slope("gelu", F),
        "mlp relu2 bwd": lambda: slope("relu2", F),
        "mlp swiglu bwd": lambda: slope("swiglu", 2 * F),
        "mlp geglu bwd": lambda: slope("geglu", 2 * F),
        "mlp gelu bwd, h kept": lambda: slope("gelu", F, False),
        "mlp relu2 bwd, h kept": lambda: slope("relu2", F, False),
        "mlp swiglu bwd, h kept": lambda: slope("swiglu", 2 * F, False),
    }
    for D in (80, 128):
        calls[f"qkv fwd D={D}"] = lambda D=D: qkv.qkv_fwd(
            x.view(2, 4096, E), m(8, 6, D, E), m(8, 6, D), table[D], table[D], impl="triton"
        )
    kept = {"bias": True, "save_z": True}
    slopes = {
        name: Cost(2 * T * E * F, 2 * (T * E + E * F + 2 * T * Z))
        for name, Z in (("gelu", F), ("relu2", F), ("swiglu", 2 * F), ("geglu", 2 * F))
    }
    least = {
        "gemm bias": cost.fused_gemm(T, 2 * F, E, bias=True),
        "gemm into": Cost(2 * T * E * F, 2 * (T * E + T * F) + 8 * E * F),
        "gemm gelu": cost.fused_gemm(T, F, E, **kept),
        "gemm gelu_erf": cost.fused_gemm(T, F, E, **kept),
        "gemm relu2": cost.fused_gemm(T, F, E, **kept),
        "gemm swiglu": cost.fused_gemm(T, 2 * F, E, gated=True, **kept),
        "gemm everything": cost.fused_gemm(T, 2 * F, E, gated=True, residual=True, **kept),
        "gemm dropout residual": cost.fused_gemm(T, E, F, bias=True, residual=True),
        "gemm small": cost.fused_gemm(500, 1024, E, save_z=True),
        "gemm odd": cost.fused_gemm(4099, 2054, 1031, gated=True, save_z=True, residual=True),
        "gemm offsets past 2^31": cost.fused_gemm(2**20, E, E, residual=True),
        "gemm tf32": cost.gemm(T, E, E, size=4),
        "gemm tf32x3": cost.gemm(T, E, E, size=4),
        **{f"mlp {name} bwd": slope + Cost(0, 2 * T * F) for name, slope in slopes.items()},
        **{f"mlp {name} bwd, h kept": slope for name, slope in slopes.items()},
        **{f"qkv fwd D={D}": cost.qkv_rope(2, 4096, E, 32, 8, D) for D in table},
    }
    found = [Case(name, call, tensor_cores=True, cost=least[name]) for name, call in calls.items()]
    q, k = m(2, 4096, 32, 128), m(2, 4096, 8, 128)
    turned = Cost(3 * T * 40 * 128, 4 * T * 48 * 128 + 4096 * 128 * 4)
    return [
        *found,
        Case("qkv bwd", lambda: qkv.qkv_bwd(q, k, k, table[128], table[128]), cost=turned),
        Case("gemm ieee", lambda: wide(fp32, "ieee"), cost=least["gemm tf32"]),
        Case("gemm float64", lambda: wide(fp64), float64=True),
    ]


@triton.jit
def _planted_kernel(x_ptr, y_ptr, N: tl.constexpr, DOT: tl.constexpr):
    """What the checks must catch: a row that no warp can hold, a product whose tiles are too
    large."""
    if DOT:
        k, i = tl.arange(0, N), tl.arange(0, 128)
        a = tl.load(x_ptr + i[:, None] * N + k[None, :])
        b = tl.load(y_ptr + i[None, :] + k[:, None] * 128)
        tl.store(x_ptr + i[:, None] * 128 + i[None, :], tl.dot(a, b).to(tl.bfloat16))
    else:
        k = tl.arange(0, N)
        x = tl.load(x_ptr + k)
        tl.store(y_ptr + k, x - tl.sum(x, 0))


def _planted_order() -> None:
    """A tile, loaded by pointers, at which ptxas lets each wgmma wait for the one before; that of
    CUDA 13.4, which Triton 3.9 takes, no longer does."""
    from warpweave.kernels import mlp
    from warpweave.kernels.runtime.tile_table import GemmTile
    from warpweave.kernels.runtime.tiles import pinned

    x, w, z = m(8192, 4096), m(4096, 14336), m(8192, 2 * 14336)
    pointers = mock.patch.object(
        mlp.hidden, "operands", lambda a, b, tile: (a, b, (*a.stride(), *b.stride()))
    )
    with pointers, pinned({("gemm", 2, "large"): GemmTile(128, 128, 64, 8, 1, 8, 4)}):
        mlp.hidden_bwd(x, w, z, activation="swiglu", want_hidden=True, impl="triton")


# ---------------------------------------------------------------- every shipped tile


def tile_cases() -> list[Case]:
    """A call for every tile that the three targets find, and the launch sizes of formulas."""
    attention = [*_attention_tiles(), *_attention_variants()]
    return [*attention, *_product_tiles(), *_row_tiles()]


def _attention_tiles() -> list[Case]:
    from warpweave.kernels import cost
    from warpweave.kernels.attention import function as attention
    from warpweave.kernels.runtime.tiles import shipped_table

    found = []
    B, S, H, kv = 2, 4096, 16, 4
    dims = sorted({72, *(row.kind for row in shipped_table() if row.kernel == "attention_fwd")})
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        row = m(B, H, S, dtype=wide)
        for D in dims:
            q, k = m(B, S, H, D, dtype=dtype), m(B, S, kv, D, dtype=dtype)
            for causal in (True, False):
                name = f"D={D} {'causal' if causal else 'full'} {dtype}".replace("torch.", "")
                sizes = {"kv_heads": kv, "causal": causal, "size": dtype.itemsize}
                common = {
                    "tensor_cores": dtype == torch.bfloat16,
                    "float64": dtype == torch.float64,
                }
                found += [
                    Case(
                        f"attention fwd {name}",
                        lambda q=q, k=k, c=causal: attention.attention_fwd(q, k, k, causal=c),
                        cost=cost.attention(B, S, S, H, D, **sizes),
                        **common,
                    ),
                    Case(
                        f"attention bwd {name}",
                        lambda q=q, k=k, r=row, c=causal: attention.attention_bwd(
                            q, q, k, k, r, r, causal=c
                        ),
                        cost=cost.attention(B, S, S, H, D, backward=True, **sizes),
                        **common,
                    ),
                ]
    return found


def _attention_variants() -> list[Case]:
    """What keeps more in registers than plain attention does. Each has spilled at a tile that was
    clean without, or is the next of kin of one that has; `attention.tiles` has the rules."""
    from warpweave.kernels.attention import function as attention

    drop = {"dropout": 0.1, "dropout_seed": 7}
    variants: dict[str, dict] = {
        "window": {"window": 512},
        "carried": {"carried": True},
        "carried softcap": {"carried": True, "softcap": 50.0},
        "dropout": drop,
        "dropout softcap window": {**drop, "softcap": 50.0, "window": 512},
        "dropout carried": {**drop, "carried": True},
        "dropout unaligned": {**drop, "q_runs": ((8, 4096),), "k_runs": ((8, 4096),)},
        "striped window": {"window": 512, "q_runs": ((2, 4096, 8),), "k_runs": ((3, 4096, 8),)},
    }
    sliced: dict[str, dict] = {
        "sliced": {"sliced": True},
        "sliced full": {"sliced": True, "causal": False},
        "sliced window": {"sliced": True, "window": 512},
    }
    masked = ("window", "carried softcap", "dropout softcap window", "striped window")
    return [
        case
        for dims, dtypes, names in (
            ((40, 72, 200), (torch.bfloat16,), masked),  # columns beyond the head are masked off
            ((64, 128, 256), (torch.bfloat16, torch.float32), variants),
            ((128,), (torch.bfloat16,), sliced),
        )
        for D in dims
        for dtype in dtypes
        for name in names
        for case in _attention_with(attention, name, m(D, dtype=dtype), **(variants | sliced)[name])
    ]


def _product_tiles() -> list[Case]:
    """Every kind of product; "small" is what a product of few tiles takes, whatever its kind."""
    from warpweave.kernels import cost, mlp
    from warpweave.kernels.gemm import fused as gemm

    found, N, K = [], 4096, 4096
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for M in (4096, 128):
            a, b, z = m(M, K, dtype=dtype), m(K, N, dtype=dtype), m(M, N, dtype=dtype)
            calls = {
                "plain": lambda a=a, b=b: gemm.fused_gemm(a, b, impl="triton"),
                "fused": lambda a=a, b=b: gemm.fused_gemm(
                    a, b, activation="gelu", save_z=True, impl="triton"
                ),
                "slope": lambda a=a, b=b, z=z: mlp.hidden_bwd(
                    a, b, z, activation="gelu", want_hidden=True, impl="triton"
                ),
            }
            more = {"plain": 0, "fused": 1, "slope": 2}  # z; z and h
            size = dtype.itemsize
            found += [
                Case(
                    f"product {kind} M={M} {dtype}".replace("torch.", ""),
                    call,
                    tensor_cores=dtype == torch.bfloat16,
                    float64=dtype == torch.float64,
                    cost=cost.gemm(M, N, K, size=size) + Cost(0, more[kind] * M * N * size),
                )
                for kind, call in calls.items()
            ]
    return found


def _row_tiles() -> list[Case]:
    """Norms of every padded width, losses of every padded vocabulary up to the block's limit."""
    from warpweave.kernels import cost
    from warpweave.kernels.cross_entropy import backward, forward
    from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
    from warpweave.kernels.norm import function as norm

    found, T = [], 8192
    for power in range(4, 17):
        E = 2**power
        x, w, row = m(T, E), m(E), m(T, dtype=torch.float32)
        for layer in (False, True):
            kind, sizes = "layer_norm" if layer else "rms_norm", {"layer": layer, "residual": True}
            found += [
                Case(
                    f"{kind} fwd E={E}",
                    lambda x=x, w=w, layer=layer: norm.norm_fwd(
                        x, w, w if layer else None, layer=layer, residual=x
                    ),
                    cost=cost.norm(T, E, **sizes),
                ),
                Case(
                    f"{kind} bwd E={E}",
                    lambda x=x, w=w, row=row, layer=layer: norm.norm_bwd(
                        x, x, w, row if layer else None, row, ds=x, bias=layer
                    ),
                    cost=cost.norm(T, E, backward=True, **sizes),
                ),
            ]
    for power in range(4, 13):
        V = 2**power if power < 12 else 128256
        z, t, row = m(T, V), m(T, dtype=torch.int64), m(T, dtype=torch.float32)
        found += [
            Case(
                f"cross_entropy fwd V={V}",
                lambda z=z, t=t, V=V: forward._fwd_triton(z, t, Vocabulary(0, V), False),
                cost=cost.cross_entropy(T, V),
            ),
            Case(
                f"cross_entropy bwd V={V}",
                lambda z=z, t=t, row=row, V=V: backward._bwd_triton(
                    row, z, t, row, Vocabulary(0, V)
                ),
                cost=cost.cross_entropy(T, V, backward=True),
            ),
        ]
    return found


# ---------------------------------------------------------------- in the subprocess

_FOUND: list[Case] = []  # of this process and its forks


def _compile_case(task: tuple[str, int, bool]) -> list[Report]:
    """Compile one case for one target."""
    target, index, clock = task
    case = _FOUND[index]
    of_case: dict[str, Any] = {
        "target": target,
        "case": case.name,
        "tensor_cores": case.tensor_cores,
        "float64": case.float64,
        "cost": None if case.cost is None else (case.cost.flops, case.cost.bytes),
    }
    with compiling(target, clock=clock) as compiled:
        try:
            case.call()
        except Exception as error:  # of any pass of the compiler: the other cases go on
            of_case["error"] = _reason(error)
            compiled[:] = [Compiled("failed", 0, {}, 0, 0, 0, 0, 0, "", {})]
    if not compiled:
        raise RuntimeError(f"case {case.name!r} launched no kernel")
    return [Report(**of_case, **vars(kernel)) for kernel in compiled]


def _reason(error: BaseException) -> str:
    """The innermost error: Triton wraps it in one per call of a device function."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[-2000:]


def _compile_here(
    targets: tuple[str, ...], only: str, *, tiles: bool, planted: bool, clock: bool, jobs: int
) -> list[Report]:
    """Compile the cases whose name contains `only`, shared out over `jobs` forks."""
    found = tile_cases() if tiles else cases()
    _FOUND.extend(c for c in found if planted or not c.name.startswith("planted"))
    tasks = [
        (target, index, clock)
        for index, case in enumerate(_FOUND)
        for target in targets
        if any(word in case.name for word in only.split("|"))
        and (target in case.targets or target not in TARGETS)
    ]
    with get_context("fork").Pool(jobs) as pool:
        return [report for reports in pool.imap(_compile_case, tasks) for report in reports]


# ---------------------------------------------------------------- in the test process


def compile_targets(
    targets: tuple[str, ...] = TARGETS,
    only: str = "",
    *,
    tiles: bool = False,
    jobs: int = 2,
    timeout: float = 3000,  # of two minutes on two idle cores
    planted: bool = True,
    clock: bool = False,
) -> dict[str, list[Report]]:
    """Compile the cases whose name contains `only` (with `tiles`, of `tile_cases`) for every
    target; `planted` includes those that must fail, `clock` reads the hot loops."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = cache
        command = [sys.executable, "-P", __file__, ",".join(targets), only, f"--jobs={jobs}"]
        flags = ["--tiles"] * tiles + ["--planted"] * planted + ["--clock"] * clock
        done = subprocess.run(
            [*command, "--json", *flags],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    if done.returncode:
        raise RuntimeError(f"compiling for {targets} failed:\n{done.stderr[-4000:]}")
    reports = [Report(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]
    reports = [
        dataclasses.replace(r, loops=[HotLoop(**loop) for loop in vars(r)["loops"]])
        for r in reports
    ]
    return {target: [r for r in reports if r.target == target] for target in targets}


def failures(reports: list[Report]) -> list[str]:
    """One line for each thing that is wrong with a kernel."""
    wrong = []
    for r in reports:
        where = f"{r.target} {r.case} ({r.kernel})"
        limit = SHARED_LIMIT[r.target]
        if r.error:
            wrong.append(f"{where}: {r.error}")
            continue
        if r.stack and "float64" not in r.case:  # float64 is for proofs: it must fit, not be fast
            wrong.append(f"{where}: {r.registers} registers and {r.stack} bytes of stack")
        if r.shared > limit:
            wrong.append(f"{where}: {r.shared} bytes of shared memory > {limit}")
        elif not r.occupancy:
            wrong.append(f"{where}: not one program fits")
        if r.tensor_cores and not r.instructions["tensor_core"]:
            wrong.append(f"{where}: no tensor-core instruction")
        elif r.tensor_cores and not r.product.startswith(_product(r)):
            wrong.append(f"{where}: {r.product} instead of {_product(r)}")
        if r.serialised:
            wrong.append(f"{where}: {r.serialised}")
        if r.unordered:
            wrong.append(f"{where}: {r.unordered}")
        if r.instructions["float64"] and not r.float64:
            wrong.append(f"{where}: {r.instructions['float64']} float64 instructions")
        if r.instructions["atomic"] != r.instructions["flag"]:
            wrong.append(f"{where}: {r.instructions['atomic']} atomic instructions")
        if r.instructions["flag"] and r.kernel not in TELLING:
            wrong.append(f"{where}: {r.instructions['flag']} flags of a kernel that tells nothing")
        wide, loads = r.instructions["load_128_bit"], r.instructions["load"]
        if r.case.startswith(ROWWISE) and not 2 * wide >= loads > 0:
            wrong.append(f"{where}: {wide} of {loads} loads take 128 bits")
    return wrong


def _product(r: Report) -> str:
    """The tensor-core instruction that a kernel is to use.

    wgmma takes 64 keys at least, for which dk and dv of heads past 128 have registers on Hopper
    only in plain attention: else mma.sync has to do there.
    """
    few = r.kernel == "attention_dkdv_kernel" and r.constants.get("BLOCK_N", 64) < 64
    return "mma.sync" if r.target == "sm_90" and few else PARTS[r.target].product


def main(arguments: list[str]) -> None:
    """``compile_targets.py sm_90[,sm_100] [PART OF A NAME] [--tiles] [--planted] [--clock]
    [--jobs=N] [--json]``"""
    words = [a for a in arguments if not a.startswith("--")]
    jobs = [int(a.removeprefix("--jobs=")) for a in arguments if a.startswith("--jobs=")]
    reports = _compile_here(
        tuple(words[0].split(",")),
        words[1] if len(words) > 1 else "",
        tiles="--tiles" in arguments,
        planted="--planted" in arguments,
        clock="--clock" in arguments,
        jobs=jobs[0] if jobs else 1,
    )
    if "--json" in arguments:
        print(json.dumps([dataclasses.asdict(r) for r in reports]))
        return
    for r in reports:
        print(
            f"{r.target:7} {r.case:40} {r.kernel:32} warps {r.num_warps:2} regs {r.registers:3} "
            f"stack {r.stack:4} shared {r.shared:6} {r.instructions}"
            f"{r.serialised}{r.error}{r.unread}"
        )
        for loop in r.loops:
            print(
                f"    {loop.instructions} instructions, {loop.stalls} stalls, ideal "
                f"{loop.ideal:.3f} ({loop.bound}), serial {loop.serial:.3f} {loop.classes}\n"
                f"    {loop.order}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
