"""The epilogue of a product as a record, and the kernel that applies it; `fused` has the formula.

Programs are persistent (see `mainloop`). Products fused with communication use the same record and
device helpers (`kernels.overlap`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpweave.kernels.activation import find_activation, pointwise
from warpweave.kernels.dropout import Drop, check_drop, keep_mask, launch_arguments, split_drop
from warpweave.kernels.gemm.mainloop import (
    find_tile,
    gemm_options,
    grid,
    next_tile,
    operands,
    split_columns,
    tile_counter,
    tile_origin,
    tile_product,
)
from warpweave.kernels.runtime.dispatch import RUNTIME, tl, triton
from warpweave.kernels.runtime.dtypes import to_dtype, upcast

# ---------------------------------------------------------------- the record


class Arguments(NamedTuple):
    """The kernel arguments of an epilogue.

    These are bias, z, tokens and residual; seed and site; the residual's strides; ACT, GATED,
    THRESHOLD and SCALE.
    """

    tensors: tuple[torch.Tensor | None, ...]
    key: tuple[int | torch.Tensor, int]
    strides: tuple[int, ...]
    constants: tuple[str | None, bool, int, float]


class Epilogue(NamedTuple):
    """residual + dropout(act(product + bias)), each optional; `save_z` saves the argument of act.

    Its tensors cover the rows that are stored: residual [M, N], drop.tokens [M].
    """

    bias: torch.Tensor | None = None
    activation: str | None = None
    save_z: bool = False
    drop: Drop | None = None
    residual: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    precision: str | None = None

    @property
    def name(self) -> str:
        """Its name in `runtime.fusion`."""
        rest = ["dropout"] * (self.drop is not None) + ["residual"] * (self.residual is not None)
        return " and ".join([self.activation] * (self.activation is not None) + rest) or "bias"

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Bias, residual, a seed that is a tensor, and tokens."""
        return self.bias, self.residual, *split_drop(self.drop)[1]

    def columns(self, N: int) -> int:
        """The result's columns for a product with N columns: half if the activation is gated."""
        gated = self.activation is not None and find_activation(self.activation).gated
        return N // 2 if gated else N

    def checked(self, shape: tuple[int, int]) -> Epilogue:
        """Return this epilogue without a dropout of probability 0.

        Raises ValueError unless it fits a product of `shape` [M, N].
        """
        check_precision(self.precision)
        made = shape[0], self.columns(shape[1])
        if made[1] < shape[1] and shape[1] % 2:
            raise ValueError(
                f"{self.activation} needs b[K, 2F] with gate and up interleaved, got N = {shape[1]}"
            )
        if self.save_z and self.activation is None:
            raise ValueError("save_z=True requires an activation, but activation is None")
        if self.residual is not None and self.residual.shape != made:
            raise ValueError(
                f"residual must have the result's shape {[*made]}, got {[*self.residual.shape]}"
            )
        return self._replace(drop=check_drop(self.drop, torch.Size(made[:1])))

    def of_rows(self, rows: slice) -> Epilogue:
        """The epilogue for only these rows."""
        drop, residual = self.drop, self.residual
        return self._replace(
            drop=drop and drop._replace(tokens=drop.tokens[rows]),
            residual=None if residual is None else residual[rows],
        )

    def outputs(self, a: torch.Tensor, M: int, N: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Empty y[M, N or N / 2], and z[M, N] or None, for a product with rows like a's."""
        dtype = a.dtype if self.out_dtype is None else self.out_dtype
        z = a.new_empty(M, N) if self.save_z else None
        return a.new_empty(M, self.columns(N), dtype=dtype), z

    def arguments(self, z: torch.Tensor | None) -> Arguments:
        """The epilogue as kernel arguments."""
        name, gated = (None, False) if self.activation is None else find_activation(self.activation)
        tokens, seed, site, dropping = launch_arguments(self.drop)
        bias = None if self.bias is None else self.bias.contiguous()
        strides = (0, 0) if self.residual is None else self.residual.stride()
        tensors = bias, z, tokens, self.residual
        return Arguments(tensors, (seed, site), strides, (name, gated, *dropping))


def check_precision(precision: str | None) -> None:
    """Raise ValueError unless `precision` is None or known to `find_precision`.

    None becomes torch's setting only at the launch, because a compiler cannot read it.
    """
    if precision is not None:
        find_precision(precision)


def find_precision(precision: str | None) -> str:
    """Triton's precision for float32 products: the given one, or torch's setting for None."""
    if precision is None:
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    if precision not in ("ieee", "tf32", "tf32x3"):
        raise ValueError(f'precision must be None, "ieee", "tf32" or "tf32x3", got {precision!r}')
    return precision


# ---------------------------------------------------------------- the kernel


@triton.jit
def epilogue(
    y,
    bias_ptr,
    z_ptr,
    tokens_ptr,
    residual_ptr,
    y_ptr,
    seed,
    site,
    m,
    col,
    M,
    N,
    stride_rm,
    stride_rn,
    stride_ym,
    stride_yn,
    DTYPE: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ADD: tl.constexpr,
):
    """Apply the epilogue to accumulators at rows m and columns from `col`."""
    COLS: tl.constexpr = y.shape[1] // 2 if GATED else y.shape[1]
    n = col + tl.arange(0, y.shape[1])
    live = (m < M)[:, None] & (n < N)[None, :]

    # 1. Bias.
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(y.dtype)[None, :]

    # 2. Activation of the value that backward will see.
    if ACT is not None:
        z = to_dtype(y, DTYPE)
        if z_ptr is not None:
            tl.store(z_ptr + m[:, None] * N + n[None, :], z, live)
        y = upcast(z)
        if GATED:
            gate, up = tl.split(y.reshape(y.shape[0], COLS, 2))
            y = pointwise(gate, ACT) * up
            col = col // 2
            n = col + tl.arange(0, COLS)
            live = (m < M)[:, None] & (n < N // 2)[None, :]
        else:
            y = pointwise(y, ACT)

    # 3. Dropout.
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + m, m < M, 0)[:, None]
        group = col // 4 + tl.arange(0, COLS // 4)[None, :]
        keep = keep_mask(seed, site, token, group, THRESHOLD, y.shape[0], COLS // 4)
        y = tl.where(keep, y * SCALE, 0.0)

    # 4. Residual.
    if residual_ptr is not None:
        at = residual_ptr + m[:, None] * stride_rm + n[None, :] * stride_rn
        y += tl.load(at, live, 0.0).to(y.dtype)

    # 5. Store, or add.
    y_ptrs = y_ptr + m[:, None] * stride_ym + n[None, :] * stride_yn
    if ADD:
        y += tl.load(y_ptrs, live, 0.0).to(y.dtype)
    tl.store(y_ptrs, to_dtype(y, y_ptr.dtype.element_ty), live)


@triton.jit
def finish_tile(
    y,
    bias_ptr,
    z_ptr,
    tokens_ptr,
    residual_ptr,
    y_ptr,
    seed,
    site,
    m,
    col,
    M,
    N,
    stride_rm,
    stride_rn,
    stride_ym,
    stride_yn,
    DTYPE: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ADD: tl.constexpr,
):
    """Apply `epilogue` to a quarter of a tile's columns at a time.

    A whole tile, with all that its epilogue loads, does not fit into the registers.
    """
    left, right = split_columns(y)
    first, second = split_columns(left)
    third, fourth = split_columns(right)
    STEP: tl.constexpr = y.shape[1] // 4
    epilogue(
        first, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col,
        M, N, stride_rm, stride_rn, stride_ym, stride_yn, DTYPE, ACT, GATED, THRESHOLD, SCALE, ADD,
    )  # fmt: skip
    epilogue(
        second, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + STEP,
        M, N, stride_rm, stride_rn, stride_ym, stride_yn, DTYPE, ACT, GATED, THRESHOLD, SCALE, ADD,
    )  # fmt: skip
    epilogue(
        third, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + 2 * STEP,
        M, N, stride_rm, stride_rn, stride_ym, stride_yn, DTYPE, ACT, GATED, THRESHOLD, SCALE, ADD,
    )  # fmt: skip
    epilogue(
        fourth, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + 3 * STEP,
        M, N, stride_rm, stride_rn, stride_ym, stride_yn, DTYPE, ACT, GATED, THRESHOLD, SCALE, ADD,
    )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def _gemm_kernel(
    a,
    b,
    bias_ptr,
    z_ptr,
    tokens_ptr,
    residual_ptr,
    y_ptr,
    counter_ptr,
    seed,
    site,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_rm,
    stride_rn,
    stride_ym,
    stride_yn,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    DESCRIBED: tl.constexpr = stride_am is None or stride_ak is None
    DTYPE: tl.constexpr = a.dtype if DESCRIBED else a.dtype.element_ty
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    index = tl.program_id(0)
    while index < tiles:
        # 1. The accumulators of a tile.
        following = next_tile(index, counter_ptr)
        row, col = tile_origin(index, M, N, BLOCK_M, BLOCK_N, GROUP)
        y = tile_product(
            a, b, row, col, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip

        # 2. The epilogue.
        finish_tile(
            y, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site,
            row + tl.arange(0, BLOCK_M), col, M, N, stride_rm, stride_rn, stride_ym, stride_yn,
            DTYPE, ACT, GATED, THRESHOLD, SCALE, ADD,
        )  # fmt: skip
        index = following


def launch_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    after: Epilogue,
    *,
    z: torch.Tensor | None = None,
    add: bool = False,
) -> None:
    """Write or add to y, and write z; nothing is checked."""
    (M, K), N = a.shape, b.shape[1]
    if y.numel() == 0:
        return
    heavy = add or (after.drop is not None and after.residual is not None)
    tile, given = find_tile(a, b, "heavy" if heavy else "large"), after.arguments(z)
    a_tiles, b_tiles, strides = operands(a, b, tile)
    with torch.cuda.device_of(a):
        _gemm_kernel[grid(tile, M, N, a.device)](
            a_tiles, b_tiles, *given.tensors, y, tile_counter(a.device), *given.key, M, N, K,
            *strides, *given.strides, *y.stride(), *given.constants, add,
            find_precision(after.precision), K % tile.k == 0,
            tile.m, tile.n, tile.k, tile.group, **gemm_options(tile, a),
        )  # fmt: skip
