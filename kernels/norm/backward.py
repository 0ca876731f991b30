"""Backward of the norms: dx by rows, and partial sums over rows for weight and bias.

See `function` for the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpweave.kernels.dropout import Drop, launch_arguments
from warpweave.kernels.norm.shared import (
    Terms,
    WantedGradients,
    add_to,
    as_rows,
    check_norm,
    columns,
    contiguous,
    load_tile,
    normal,
    row_statistics,
    store_dx,
    tile_of,
    vector,
)
from warpweave.kernels.norm.torch_path import norm_bwd_cpu
from warpweave.kernels.runtime.dispatch import (
    RUNTIME,
    all_registers,
    choose,
    no_graph,
    processors,
    tl,
    triton,
)

BWD_WIDTH = 8192  # longest rows that are held in registers

# ---------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=RUNTIME)
def norm_bwd_kernel(dy_ptr, ds_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, tokens_ptr,
                    dx_ptr, dresidual_ptr, dw_ptr, db_ptr, dx_bias_ptr,
                    rows, stride_dy, stride_ds, stride_s, seed, site,
                    E: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
                    ROWS: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    # 1. This program has tiles pid, pid + programs, ...; its partial sums are in registers. With
    # the
    #    sum for x_bias, no registers are left for the weight, which is then loaded with every row.
    col = tl.arange(0, BLOCK_E)[None, :]
    if dx_bias_ptr is None:
        weight = vector(weight_ptr, col, E)
    dw = tl.zeros((ROWS, BLOCK_E), dw_ptr.dtype.element_ty)
    if db_ptr is not None:
        db = tl.zeros((ROWS, BLOCK_E), dw_ptr.dtype.element_ty)
    if dx_bias_ptr is not None:
        dx_bias = tl.zeros((ROWS, BLOCK_E), dw_ptr.dtype.element_ty)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & (col < E)

        # 2. The normalized row, recomputed.
        mean, rstd = row_statistics(mean_ptr, rstd_ptr, row, rows)
        n = normal(s_ptr, stride_s, mean_ptr, mean, rstd, row, col, mask)

        # 3. Parameter gradients.
        g = load_tile(dy_ptr, stride_dy, row, col, mask)
        dw += g * n
        if db_ptr is not None:
            db += g

        # 4. Input gradient.
        if dx_bias_ptr is not None:
            weight = vector(weight_ptr, col, E)
        g *= weight
        dx = g - n * (tl.sum(g * n, 1) / E)[:, None]
        if mean_ptr is not None:
            dx -= (tl.sum(g, 1) / E)[:, None]
        dx = store_dx(dx * rstd, ds_ptr, tokens_ptr, dx_ptr, dresidual_ptr, row, 0, rows,
                       stride_ds, seed, site, E, THRESHOLD, SCALE, BLOCK_E)  # fmt: skip
        if dx_bias_ptr is not None:
            dx_bias += dx

    # 5. One partial sum per program; torch adds them.
    out = tl.program_id(0).to(tl.int64) * E + tl.arange(0, BLOCK_E)
    inside = tl.arange(0, BLOCK_E) < E
    tl.store(dw_ptr + out, tl.sum(dw, 0), inside)
    if db_ptr is not None:
        tl.store(db_ptr + out, tl.sum(db, 0), inside)
    if dx_bias_ptr is not None:
        tl.store(dx_bias_ptr + out, tl.sum(dx_bias, 0), inside)


@triton.jit(do_not_specialize=RUNTIME)
def norm_bwd_wide_kernel(dy_ptr, ds_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, tokens_ptr,
                         dx_ptr, dresidual_ptr, dw_ptr, db_ptr, dx_bias_ptr,
                         rows, stride_dy, stride_ds, stride_s, seed, site,
                         E: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
                         ROWS: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    # 1. As above, but this program's partial sums are in memory (in the L2 cache), zero at first.
    dtype: tl.constexpr = dw_ptr.dtype.element_ty
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mean, rstd = row_statistics(mean_ptr, rstd_ptr, row, rows)

        # 2. The two means over each row.
        along, level = tl.zeros((ROWS,), dtype), tl.zeros((ROWS,), dtype)
        for start in range(0, E, BLOCK_E):
            col, mask = columns(row, start, rows, E, BLOCK_E)
            n = normal(s_ptr, stride_s, mean_ptr, mean, rstd, row, col, mask)
            g = load_tile(dy_ptr, stride_dy, row, col, mask) * vector(weight_ptr, col, E)
            along += tl.sum(g * n, 1) / E
            if mean_ptr is not None:
                level += tl.sum(g, 1) / E

        # 3. The same blocks again: input gradient, and parameter gradients over ROWS rows. Keeping
        # g and n instead would take half of all registers at E = 16384, and more than all beyond
        # that. The sums would then not fit into registers and would go to memory and back with
        # every row, 8 bytes per element each. Reading bfloat16 a second time costs only 4.
        for start in range(0, E, BLOCK_E):
            col, mask = columns(row, start, rows, E, BLOCK_E)
            n = normal(s_ptr, stride_s, mean_ptr, mean, rstd, row, col, mask)
            g = load_tile(dy_ptr, stride_dy, row, col, mask)
            at = start + tl.arange(0, BLOCK_E)
            out, inside = tl.program_id(0).to(tl.int64) * E + at, at < E
            add_to(dw_ptr, out, inside, g * n)
            if db_ptr is not None:
                add_to(db_ptr, out, inside, g)
            g *= vector(weight_ptr, col, E)
            dx = (g - n * along[:, None] - level[:, None]) * rstd
            dx = store_dx(dx, ds_ptr, tokens_ptr, dx_ptr, dresidual_ptr, row, start, rows,
                           stride_ds, seed, site, E, THRESHOLD, SCALE, BLOCK_E)  # fmt: skip
            if dx_bias_ptr is not None:
                add_to(dx_bias_ptr, out, inside, dx)
        tl.debug_barrier()  # the sums are read by other threads


# ---------------------------------------------------------------- launch


class NormGradients(NamedTuple):
    """Results of `norm_bwd`; dresidual is dx itself if they are equal, absent ones are None.

    Examples:
        >>> from warpweave.kernels.norm import norm_bwd, norm_fwd
        >>> x, weight = torch.randn(2, 16, 64), torch.ones(64)
        >>> y, *saved = norm_fwd(x, weight, layer=False)
        >>> s, mean, rstd = saved
        >>> norm_bwd(torch.ones_like(y), s, weight, mean, rstd).dx.shape
        torch.Size([2, 16, 64])
    """

    dx: torch.Tensor
    dresidual: torch.Tensor | None
    dx_bias: torch.Tensor | None
    dw: torch.Tensor
    db: torch.Tensor | None


@no_graph
def norm_bwd(
    dy: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    *,
    ds: torch.Tensor | None = None,
    bias: bool = False,
    x_bias: bool = False,
    drop: Drop | None = None,
    x_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> NormGradients:
    """The backward half of RMSNorm, or of LayerNorm if `mean` is given.

    ds is the gradient of the returned s, if it has one. `bias` and `x_bias` request their sums.
    x_dtype (by default that of s) and residual_dtype (None if there is no residual) are the dtypes
    of dx and dresidual. dw, db and dx_bias are sums over tokens, in the dtype of rstd. Raises the
    ValueErrors of `rms_norm`, and ValueError for gradients that are not shaped like s.

    Examples:
        >>> from warpweave.kernels.norm import norm_fwd
        >>> x, weight = torch.randn(2, 16, 64), torch.ones(64)
        >>> y, s, mean, rstd = norm_fwd(x, weight, layer=False)
        >>> norm_bwd(torch.ones_like(y), s, weight, mean, rstd).dw.shape
        torch.Size([64])
    """
    impl = choose(impl, dy, s, weight, mean, rstd, ds, getattr(drop, "tokens", None))
    drop = check_norm(s, weight, None, Terms(drop=drop)).drop
    for name, gradient in (("dy", dy), ("ds", ds)):
        if gradient is not None and gradient.shape != s.shape:
            raise ValueError(
                f"{name} must have the shape {[*s.shape]} of s, got {[*gradient.shape]}"
            )
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        if statistic is not None and statistic.shape != s.shape[:-1]:
            raise ValueError(
                f"{name} must be {[*s.shape[:-1]]}, one number per row of s, got "
                f"{[*statistic.shape]}"
            )
    wanted = WantedGradients(bias, x_bias, x_dtype or s.dtype, residual_dtype)
    if impl == "torch":
        # Contiguous, because torch's operator ignores the strides of statistics.
        mean = None if mean is None else mean.contiguous().unsqueeze(-1)
        found = norm_bwd_cpu(dy, s, weight, mean, rstd.contiguous().unsqueeze(-1), wanted, ds, drop)
    else:
        found = launch_backward(dy, s, weight, mean, rstd, wanted, ds, drop)
    gradients = NormGradients(*found)
    if residual_dtype is not None and gradients.dresidual is None:
        return gradients._replace(dresidual=gradients.dx)
    return gradients


def launch_backward(
    dy: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    wanted: WantedGradients,
    ds: torch.Tensor | None,
    drop: Drop | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The fields of `NormGradients` by the kernel, for checked arguments.

    dresidual is None if it is dx.
    """
    bias, x_bias, apart = wanted.bias, wanted.x_bias, wanted.apart(drop)
    E, dy2, s2, ds2 = s.shape[-1], as_rows(dy), as_rows(s), None if ds is None else as_rows(ds)
    kernel, (rows, block, warps) = norm_bwd_kernel, tile_of(E)
    warps = min(16, 2 * warps)  # 8 elements per thread, up to 4096; with 16 some spill on sm_100
    options = {"num_warps": warps}
    # In 16 bits, this many programs run at once per multiprocessor, with 80 registers up to E =
    # 2048, 64 up to 4096, and 128 beyond. The sum of x_bias takes the registers of one program if
    # there are several.
    held = max(1, (3 if block <= 2048 else 2 if block == 4096 else 1) - x_bias)
    widest = BWD_WIDTH // 2 if bias and x_bias else BWD_WIDTH  # three sums take more registers
    if widest < E:
        kernel, (rows, block), held = norm_bwd_wide_kernel, (4, 1024), 1
        options = all_registers(16)  # because there is only one program
    programs = min(triton.cdiv(len(s2), rows), held * processors(s.device))
    dx = torch.empty(s.shape, dtype=wanted.x_dtype, device=s.device)
    dresidual = None if apart is None else torch.empty_like(dx, dtype=apart)
    partial = torch.empty(1 + bias + x_bias, programs, E, dtype=rstd.dtype, device=s.device)
    if widest < E:
        partial.zero_()  # this kernel adds to them
    tokens, seed, site, constants = launch_arguments(drop)
    if programs:
        with torch.cuda.device_of(s):
            kernel[(programs,)](
                dy2, ds2, s2, weight.contiguous(), contiguous(mean), rstd.contiguous(),
                tokens, dx, dresidual,
                partial[0], partial[1] if bias else None, partial[-1] if x_bias else None,
                len(s2), dy2.stride(0), 0 if ds2 is None else ds2.stride(0), s2.stride(0),
                seed, site, E, *constants, rows, block,
                **options)  # fmt: skip
    sums = partial.sum(1)
    return dx, dresidual, sums[-1] if x_bias else None, sums[0], sums[1] if bias else None
