"""A call for every shipped tile, and for the launch sizes that formulas give.

Attention is also called with the options that keep more in registers.
"""

from __future__ import annotations

from functools import partial

import torch

from gate.cases import Case, attention_with, m
from warpweave.kernels.cost import Cost


def tile_cases() -> list[Case]:
    """A call for every tile that the three targets use, and for the launch sizes of formulas."""
    attention = [*_attention_tiles(), *_fused_backward(), *_attention_variants()]
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


def _fused_backward() -> list[Case]:
    """The backward in one kernel, with the tile where ``warpweave tune`` begins; its sums of dq are
    added by the copy engine."""
    from warpweave.kernels.attention import function as attention
    from warpweave.kernels.runtime.tiles import pinned
    from warpweave.machine.tune.candidates import FUSED

    B, S, H, kv = 2, 4096, 16, 4
    row = m(B, H, S, dtype=torch.float32)

    def call(D: int, causal: bool) -> object:
        q, k = m(B, S, H, D), m(B, S, kv, D)
        with pinned({("attention_bwd", 2, D): FUSED}):
            return attention.attention_bwd(q, q, k, k, row, row, causal=causal)

    return [
        Case(
            f"attention fused bwd D={D} {'causal' if causal else 'full'} bfloat16",
            partial(call, D, causal),
            tensor_cores=True,
            targets=("sm_90",),
        )
        for D in (64, 128)
        for causal in (True, False)
    ]


def _attention_variants() -> list[Case]:
    """Options that keep more in registers than plain attention.

    Each has spilled at a tile that was clean without it, or is closely related to one that has, so
    `tiles.json` has a row for it.
    """
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
            ((40, 72, 200), (torch.bfloat16,), masked),  # columns past the head dim are masked off
            ((64, 128, 256), (torch.bfloat16, torch.float32), variants),
            ((128,), (torch.bfloat16,), sliced),
        )
        for D in dims
        for dtype in dtypes
        for name in names
        for case in attention_with(attention, name, m(D, dtype=dtype), **(variants | sliced)[name])
    ]


def _product_tiles() -> list[Case]:
    """Every kind of product; "small" is used by any product of few tiles."""
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
    """Norms of every padded width, and losses of every padded vocabulary up to the block limit."""
    from warpweave.kernels import cost, norm
    from warpweave.kernels.cross_entropy import backward, forward
    from warpweave.kernels.cross_entropy.vocabulary import Vocabulary

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
