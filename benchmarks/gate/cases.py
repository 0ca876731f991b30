"""The calls whose kernels are compiled, each of an ordinary launcher on meta tensors.

To add a kernel, append a `Case` in `cases` below:

    Case("attention fwd bf16 D=128", lambda: attention_fwd(q, k, v, ...), tensor_cores=True)

with `m(*shape, dtype=torch.bfloat16)` for a tensor. `tensor_cores=True` asserts the part's fastest
products (mma.sync, wgmma or tcgen05). `float64=True` permits float64 products, which are otherwise
an error: usually a constant has widened the kernel. `targets=("sm_90", "sm_100")` restricts a case.
`cost` is the least that the call must move and compute. While a launcher is called here
  * `dispatch.choose` returns "triton" for meta tensors,
  * `dispatch.capability` and `dispatch.processors` describe the target, unlike torch.cuda,
  * tensors have no values (`.item()`, `.tolist()` fail).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from warpweave.kernels.cost import Cost

GATED = ("sm_80", "sm_90", "sm_100")  # those of `devices.TARGETS` that are checked


@dataclass(frozen=True)
class Case:
    """One call of a launcher."""

    name: str
    call: Callable[[], object]
    tensor_cores: bool = False
    float64: bool = False
    targets: tuple[str, ...] = GATED
    cost: Cost | None = None


def m(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that has a shape and a dtype but no values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def cases() -> list[Case]:
    """A case of each family and option; called only in the subprocess."""
    from warpweave.kernels import activation, adamw, cost, dropout, muon, norm, rope
    from warpweave.kernels.attention import function as attention
    from warpweave.kernels.cross_entropy import backward, forward
    from warpweave.kernels.cross_entropy.vocabulary import Vocabulary

    T, fp32 = 8192, torch.float32
    f2, h = m(128, 64, dtype=fp32), m(T, 4096)
    tokens, n = m(T, dtype=torch.int64), h.numel()
    gelu, gelu_bwd = (cost.activation(n, backward=back) for back in (False, True))
    swiglu, swiglu_bwd = (
        cost.activation(n // 2, gated=True, backward=back) for back in (False, True)
    )
    found = [
        Case(
            "rope",
            lambda: rope.rope_fwd(m(2, 128, 8, 128), f2, f2),
            cost=cost.rope(2, 128, 8, 128),
        ),
        Case("gelu tanh fwd", lambda: activation.activation_fwd(h, "gelu"), cost=gelu),
        Case("gelu tanh bwd", lambda: activation.activation_bwd(h, h, "gelu"), cost=gelu_bwd),
        Case("gelu erf bwd", lambda: activation.activation_bwd(h, h, "gelu_erf"), cost=gelu_bwd),
        Case("swiglu fwd", lambda: activation.activation_fwd(h, "swiglu"), cost=swiglu),
        Case(
            "swiglu bwd",
            lambda: activation.activation_bwd(m(T, 2048), h, "swiglu"),
            cost=swiglu_bwd,
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
    found += _norm_chains(norm) + _rope_cases(rope) + _adamw_cases(adamw) + _muon_cases(muon)
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
        found += [
            Case(
                f"adamw {dtype}".replace("torch.", ""),
                lambda flat=flat, low=low: _adamw(adamw, flat, low, skip=m(dtype=fp32)),
                float64=dtype == torch.float64,
                cost=cost.adamw(10**7, grad_size=2, param_size=2) if dtype == fp32 else None,
            ),
            Case(
                f"sum_of_squares {dtype}".replace("torch.", ""),
                lambda flat=flat: adamw._sum_of_squares_triton([flat]),
                float64=dtype == torch.float64,
                cost=Cost(2 * 10**7, 10**7 * dtype.itemsize),
            ),
        ]
    return [*found, *_linear_cases(), *_overlap_cases()]


def _attention_options(attention) -> list[Case]:
    """Attention with all options that real models combine."""
    documents = m(9, dtype=torch.int32)
    drop, wide = {"dropout": 0.1, "dropout_seed": 7}, m(64, dtype=torch.float64)
    return [
        *attention_with(attention, "packed window", m(128), documents=documents, window=512),
        *attention_with(attention, "carried softcap", m(128), softcap=50.0, carried=True),
        *attention_with(attention, "dropout", m(64), **drop),
        *attention_with(attention, "dropout documents", wide, documents=documents, **drop),
    ]


def attention_with(
    attention,
    name: str,
    like: torch.Tensor,
    carried: bool = False,
    sliced: bool = False,
    **options,
) -> list[Case]:
    """Both directions, for heads `like` this vector; with sinks unless `carried`. If `sliced`, q is
    part of a packed projection, so that its rows are further apart than those of do.
    """
    from warpweave.kernels import cost

    (D,), dtype = like.shape, like.dtype
    wide = torch.promote_types(dtype, torch.float32)
    do, k = m(2, 4096, 16, D, dtype=dtype), m(2, 4096, 4, D, dtype=dtype)
    q = m(2, 4096, 24, D, dtype=dtype)[:, :, :16] if sliced else do
    given = {name: options[name] for name in ("window", "causal") if name in options}
    sizes = {"kv_heads": 4, "size": dtype.itemsize, **given}
    if carried:  # the sums are wide, read and written
        more = 2 * wide.itemsize - dtype.itemsize
        add_o, add_grads = more * q.numel() + 4 * 2 * 16 * 4096, more * (q.numel() + 2 * k.numel())
    else:
        add_o, add_grads = 0, 0
    costs = {
        "fwd": cost.attention(2, 4096, 4096, 16, D, **sizes) + Cost(0, add_o),
        "bwd": cost.attention(2, 4096, 4096, 16, D, **sizes, backward=True) + Cost(0, add_grads),
    }
    o, dk, row = m(*q.shape, dtype=wide), m(*k.shape, dtype=wide), m(2, 16, 4096, dtype=wide)
    start = {"into": (o, row)} if carried else {"sinks": m(16)}
    add = (o, dk, dk) if carried else (None, None, None)
    calls = {
        "fwd": lambda: attention.attention_fwd(q, k, k, **start, **options),
        "bwd": lambda: attention.attention_bwd(do, q, k, k, row, row, into=add, **options),
    }
    kind = f"D={D} {dtype}".replace("torch.", "")
    made = {"tensor_cores": dtype.itemsize == 2, "float64": dtype == torch.float64}
    return [
        Case(f"attention {name} {way} {kind}", call, cost=costs[way], **made)
        for way, call in calls.items()
    ]


def _norm_chains(norm) -> list[Case]:
    """Norms with all that can be fused, in the layouts of real models; a separate function to
    limit the length."""
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


def _adamw(adamw, flat: torch.Tensor, low: torch.Tensor, skip: torch.Tensor | None) -> None:
    """One step of a trainer, whose count is float64, with a gradient and a copy in bfloat16."""
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    step, scale = adamw.begin_adamw(m(dtype=torch.float64), **rates), m(dtype=torch.float32)
    adamw._adamw_triton(flat, low, flat, flat, low, step, scale, skip, True)


def _adamw_cases(adamw) -> list[Case]:
    """More than 2^31 elements."""
    from warpweave.kernels import cost

    n = 2**31 + 4096
    many, lows = m(n, dtype=torch.float32), m(n)
    return [
        Case(
            "adamw offsets past 2^31",
            lambda: _adamw(adamw, many, lows, skip=None),
            cost=cost.adamw(n, grad_size=2, param_size=2),
        ),
        Case(
            "sum_of_squares offsets past 2^31",
            lambda: adamw._sum_of_squares_triton([lows]),
            cost=Cost(2 * n, 2 * n),
        ),
    ]


def _muon_cases(muon) -> list[Case]:
    """Both symmetric products of a Newton-Schulz step; with few tiles, and with odd strides."""
    from warpweave.kernels import cost

    found = []
    for M, K, dtype in (
        (4096, 14336, torch.bfloat16), (768, 768, torch.bfloat16), (1031, 4099, torch.bfloat16),
        (4096, 14336, torch.float32), (1024, 1024, torch.float64),
    ):  # fmt: skip
        kind, size = f"{M} {dtype}".replace("torch.", ""), {"size": dtype.itemsize}
        x, a = m(M, K, dtype=dtype), m(M, M, dtype=dtype)
        calls = {
            "gram": lambda x=x: muon._symmetric_triton(x, None, 1.0, 1.0),
            "polynomial": lambda a=a: muon._symmetric_triton(a, a, 2.0315, -4.775),
        }
        costs = {
            "gram": cost.symmetric_product(M, K, **size),
            "polynomial": cost.symmetric_product(M, M, add=True, **size),
        }
        found += [
            Case(
                f"muon {name} {kind}",
                call,
                tensor_cores=dtype == torch.bfloat16,
                float64=dtype == torch.float64,
                cost=costs[name],
            )
            for name, call in calls.items()
        ]
    return found


def _overlap_cases() -> list[Case]:
    """Overlapped products of one of eight ranks, in the shapes of an 8B Llama."""
    from warpweave.kernels.gemm.epilogue import Epilogue
    from warpweave.kernels.overlap.gather import all_gather_steps, gather_steps
    from warpweave.kernels.overlap.scatter import scatter_steps
    from warpweave.kernels.overlap.symmetric import SymmetricMemory
    from warpweave.kernels.qkv.gathered import gather_qkv_steps

    T, E, F, W, i64 = 8192, 4096, 14336, 8, torch.int64
    segments = (m(1, dtype=torch.uint8),) * W
    tables = m(W, dtype=i64), m(1, dtype=i64), m(5, dtype=i64)
    memory = SymmetricMemory(1, W, segments, *tables, slots=2**16, capacity=2**32)
    bounded = dataclasses.replace(memory, polls=1000)
    x, up, h, down = m(T // W, E), m(F // W, E), m(T, F // W), m(E, F // W)
    gelu, bias = Epilogue(m(F // W), "gelu", save_z=True), Epilogue(m(E))
    heads, table = m(1, 6, 128, E), m(4096, 64, dtype=torch.float32)

    def heads_of(memory):
        options = {"shape": (2, 4096), "precision": None}
        return gather_qkv_steps(x, heads, m(1, 6, 128), (table, table), memory, **options)

    calls = {
        "qkv": lambda: heads_of(memory),
        "qkv bounded": lambda: heads_of(bounded),
        "all_gather_gemm": lambda: gather_steps(x, up.t(), memory, Epilogue()),
        "all_gather_gemm gelu": lambda: gather_steps(x, up.t(), memory, gelu),
        "gemm_reduce_scatter unrounded": lambda: scatter_steps(
            h, down.t(), memory, bias, owners=W, name="x"
        ),
        "gemm_all_reduce": lambda: scatter_steps(h, down.t(), memory, bias, owners=1, name="x"),
        "gemm_all_reduce in two shots": lambda: all_gather_steps("x", m(T // W, E), memory),
        "all_gather_gemm bounded": lambda: gather_steps(x, up.t(), bounded, gelu),
        "gemm_reduce_scatter unrounded bounded": lambda: scatter_steps(
            h, down.t(), bounded, bias, owners=W, name="x"
        ),
    }
    flops, read = 2 * T * E * F // W, 2 * (T * E + E * F // W + T * F // W)
    return [
        Case(f"overlap {name}", lambda call=call: [*call()], cost=Cost(flops, read))
        for name, call in calls.items()
    ]


def _linear_cases() -> list[Case]:
    """Products with every epilogue in the shapes of an 8B Llama, odd shapes, and wide dtypes."""
    from warpweave.kernels import cost, dropout, mlp, qkv
    from warpweave.kernels.gemm import fused as gemm
    from warpweave.kernels.gemm import gemm_into
    from warpweave.kernels.gemm.mainloop import leaving

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

    def beside(call):
        with leaving(8):
            call()

    crowded = ("gemm everything", "gemm into", "mlp swiglu bwd", "qkv fwd D=128")
    calls |= {f"{name} beside others": lambda name=name: beside(calls[name]) for name in crowded}
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
    least |= {f"{name} beside others": least[name] for name in crowded}
    found = [Case(name, call, tensor_cores=True, cost=least[name]) for name, call in calls.items()]
    q, k = m(2, 4096, 32, 128), m(2, 4096, 8, 128)
    turned = Cost(3 * T * 40 * 128, 4 * T * 48 * 128 + 4096 * 128 * 4)
    return [
        *found,
        Case("qkv bwd", lambda: qkv.qkv_bwd(q, k, k, table[128], table[128]), cost=turned),
        Case("gemm ieee", lambda: wide(fp32, "ieee"), cost=least["gemm tf32"]),
        Case("gemm float64", lambda: wide(fp64), float64=True),
    ]
