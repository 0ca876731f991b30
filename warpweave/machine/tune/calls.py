"""Rows of the tile table, and the calls that compare tiles for each row.

A `Problem` is one row: a kernel, a dtype, and a head dim or a kind of product. One of its calls is
timed, in the sizes of an 8B Llama. The others use the same tile and therefore must also compile:
masks, dropout, epilogues, precisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from warpweave.kernels import mlp, qkv
from warpweave.kernels.attention import function as attention
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import fused as gemm
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.kernels.runtime.tile_table import KINDS, OPTIONAL_KERNELS, Kind, Tile
from warpweave.kernels.runtime.tiles import Key, row_on

TOKENS, WIDTH = 8192, 4096

Make = Callable[..., torch.Tensor]
"""make(*sizes, dtype=...): a tensor of arbitrary floats."""
Call = Callable[[], tuple[torch.Tensor, ...]]
Calls = dict[str, Callable[[], object]]
"""Calls by name."""


@dataclass(frozen=True)
class Problem:
    """One row of the tile table: one of `tile_table.KERNELS`, a dtype ("bf16", "fp32", or "fp64"),
    whose element size selects the tiles, and a head dim or a kind of product."""

    kernel: str
    dtype: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kernel} {self.dtype} {self.kind}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of its tensors."""
        return NAMED_DTYPES[self.dtype]

    @property
    def size(self) -> int:
        """Bytes per element."""
        return self.torch_dtype.itemsize

    @property
    def head_dim(self) -> int:
        """The head dim of an attention kernel."""
        assert isinstance(self.kind, int)
        return self.kind

    @property
    def replaces(self) -> tuple[str, ...]:
        """The kernels that run where an optional kernel has no tile."""
        return ("attention_dkdv", "attention_dq") if self.kernel == "attention_bwd" else ()

    def shipped(self, arch: int) -> Tile | None:
        """The shipped tile on a device of capability `arch`; None if an optional kernel has none,
        so that others run instead."""
        row = row_on(self.kernel, arch, "", self.size, self.kind)
        return None if row is None else row.tile

    def pins(self, tile: Tile | None) -> dict[Key, Tile | None]:
        """Pins that make this problem's calls use `tile`, or without one the kernels it `replaces`.

        Products pin all kinds, because a product's size decides its kind."""
        kinds = KINDS if self.kernel == "gemm" else (self.kind,)
        return {(self.kernel, self.size, kind): tile for kind in kinds}


def problems(
    kernels: tuple[str, ...], dtypes: tuple[str, ...], head_dims: tuple[int, ...]
) -> list[Problem]:
    """The rows of the tile table for these options, dtype by dtype. Optional kernels come last, as
    they are compared with the best tiles of the others."""
    return [
        Problem(kernel, dtype, kind)
        for dtype in dtypes
        for kernel in sorted(kernels, key=OPTIONAL_KERNELS.__contains__)
        for kind in (KINDS if kernel == "gemm" else head_dims)
    ]


def timed_call(problem: Problem, make: Make, tokens: int = TOKENS, width: int = WIDTH) -> Call:
    """The call that compares tiles of `problem`, with tensors from `make`."""
    if problem.kernel == "gemm":
        return _timed_product(problem, make, tokens, width)
    q, k, rows = _attention_inputs(problem, make, tokens, width)
    if problem.kernel == "attention_fwd":
        return lambda: attention.attention_fwd(q, k, k, impl="triton")
    # The values of rows do not matter if all tiles use them; a large lse keeps exp(s - lse) small.
    lse, delta, do = rows.abs() + 8, rows, q.flip(1)
    return lambda: attention.attention_bwd(do, q, k, k, lse, delta, impl="triton")


def other_calls(problem: Problem, make: Make, tokens: int = TOKENS, width: int = WIDTH) -> Calls:
    """Calls by name that use the same tile but keep different values in registers."""
    others = _other_products if problem.kernel == "gemm" else _other_attention
    return others(problem, make, tokens, width)


# ---------------------------------------------------------------- attention


def _attention_inputs(
    problem: Problem, make: Make, tokens: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make q[2, S, H, D], k[2, S, H / 4, D], and rows[2, H, S], shaped as lse and delta."""
    D, S, kv = problem.head_dim, tokens // 2, max(1, width // problem.head_dim // 4)
    q, k = (make(2, S, heads, D, dtype=problem.torch_dtype) for heads in (4 * kv, kv))
    return q, k, make(2, 4 * kv, S, dtype=compute_dtype(q))


def _other_attention(problem: Problem, make: Make, tokens: int, width: int) -> Calls:
    q, k, rows = _attention_inputs(problem, make, tokens, width)
    o, dk = (make(*x.shape, dtype=rows.dtype) for x in (q, k))
    forward = problem.kernel == "attention_fwd"
    documents = torch.linspace(0, q.shape[1], 9, device=q.device).to(torch.int32)
    options: dict[str, dict] = {
        "full": {"causal": False},
        "packed window": {"documents": documents, "window": 512},
        "softcap": {"softcap": 50.0},
        "dropout": {"dropout": 0.1, "dropout_seed": 7},
        "carried": {"into": (o, rows) if forward else (o, dk, dk)},
    }

    if problem.kernel == "attention_bwd":  # a user's tile is for plain attention alone
        options = {"full": options["full"]}

    def call(more: dict) -> object:
        if forward:
            return attention.attention_fwd(q, k, k, impl="triton", **more)
        return attention.attention_bwd(q, q, k, k, rows, rows, impl="triton", **more)

    return {name: partial(call, more) for name, more in options.items()}


# ---------------------------------------------------------------- products


def _timed_product(problem: Problem, make: Make, tokens: int, width: int) -> Call:
    dtype, T, E, F = problem.torch_dtype, tokens, width, width * 7 // 2
    if problem.kind == "small":
        T, F = tokens // 32, width // 2
    x = make(T, E, dtype=dtype)
    if problem.kind != "heavy":
        up, bias = make(F, E, dtype=dtype), make(F, dtype=dtype)
        return lambda: gemm.fused_gemm(
            x, up.t(), bias, activation="gelu", save_z=True, impl="triton"
        )
    down, z = make(E, F, dtype=dtype), make(T, F, dtype=dtype)
    out = make(E, F, dtype=compute_dtype(x))

    def both() -> tuple[torch.Tensor, ...]:
        """Run a product that adds to float32 and one that multiplies by a slope."""
        gemm.gemm_into(x.t(), z, out, True, impl="triton")
        dz, _ = mlp.hidden_bwd(x, down, z, activation="gelu", impl="triton")
        return out, dz

    return both


def _other_products(problem: Problem, make: Make, tokens: int, width: int) -> Calls:
    """A heavy product's tile serves the products that `mainloop.find_tile` selects. A large one's
    serves all other epilogues, and a small one's everything, including odd sizes."""
    found: Calls = {}
    if problem.kind != "large":
        found |= _heavy_products(problem.torch_dtype, make, tokens, width)
        found |= _slopes(problem.torch_dtype, make, tokens, width, want_hidden=False)
    if problem.kind != "heavy":
        found |= _epilogues(problem.torch_dtype, make, tokens, width)
        found |= _slopes(problem.torch_dtype, make, tokens, width, want_hidden=True)
    if problem.kind == "small":
        T, E, dtype = tokens - 1, width - 1, problem.torch_dtype
        a, b, r = (make(*s, dtype=dtype) for s in ((T, E), (E, E + 3), (T, (E + 3) // 2)))
        found["odd sizes"] = lambda: gemm.fused_gemm(
            a, b, activation="swiglu", save_z=True, residual=r, impl="triton"
        )
    return found


def _heavy_products(dtype: torch.dtype, make: Make, T: int, E: int) -> Calls:
    F = E * 7 // 2
    x, up, bias, row = (make(*s, dtype=dtype) for s in ((T, E), (2 * F, E), (2 * F,), (T, F)))
    out = make(E, F, dtype=compute_dtype(x))
    drop = Drop(0.1, 7, 3, torch.zeros(T, dtype=torch.int64, device=x.device))
    return {
        "adding": lambda: gemm.gemm_into(x.t(), row, out, True, impl="triton"),
        "everything": lambda: gemm.fused_gemm(
            x, up.t(), bias, activation="geglu", save_z=True, drop=drop, residual=row, impl="triton"
        ),
    }


def _slopes(dtype: torch.dtype, make: Make, T: int, E: int, *, want_hidden: bool) -> Calls:
    F = E * 7 // 2
    x, down, row = (make(*s, dtype=dtype) for s in ((T, E), (E, F), (T, F)))
    wide = make(T, 2 * F, dtype=dtype)

    def slope(name: str, precision: str | None = None) -> object:
        z = wide if name in ("swiglu", "geglu") else row
        return mlp.hidden_bwd(
            x, down, z, activation=name, want_hidden=want_hidden, precision=precision, impl="triton"
        )

    kind = "gradient and value of" if want_hidden else "gradient of"
    names = ("gelu", "gelu_erf", "relu2", "swiglu", "geglu")
    found: Calls = {f"{kind} {n}": partial(slope, n) for n in names}
    if dtype == torch.float32:
        found |= {f"{kind} gelu in {p}": partial(slope, "gelu", p) for p in ("tf32", "tf32x3")}
    return found


def _epilogues(dtype: torch.dtype, make: Make, T: int, E: int) -> Calls:
    F, D = E * 7 // 2, min(128, E // 4)
    x, up, bias, row = (make(*s, dtype=dtype) for s in ((T, E), (2 * F, E), (2 * F,), (T, F)))
    kv = E // D // 4
    packed, table = make(6 * kv * D, E, dtype=dtype), make(T // 2, D // 2, dtype=torch.float32)

    def fused(name: str | None, precision: str | None = None) -> object:
        return gemm.fused_gemm(
            x, up[:F].t(), bias[:F],
            activation=name, save_z=name is not None, precision=precision, impl="triton",
        )  # fmt: skip

    found: Calls = {
        "swiglu": lambda: gemm.fused_gemm(
            x, up.t(), bias, activation="swiglu", save_z=True, residual=row, impl="triton"
        ),
        "qkv": lambda: qkv.qkv_fwd(
            x.view(2, T // 2, E), packed.view(-1, 6, D, E), None, table, table, impl="triton"
        ),
    }
    found |= {name: partial(fused, name) for name in ("gelu_erf", "relu2")}
    found["plain"] = partial(fused, None)
    if dtype == torch.float32:
        found |= {f"in {p}": partial(fused, "gelu", p) for p in ("tf32", "tf32x3")}
    return found
