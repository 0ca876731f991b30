"""Forward of the norms: one pass over a row that fits, two passes over a wide row.

See `function` for the formulas.
"""

from __future__ import annotations

import torch

from warpweave.kernels.dropout import Drop, launch_arguments
from warpweave.kernels.norm.shared import (
    NormOptions,
    Terms,
    as_rows,
    check_norm,
    columns,
    contiguous,
    load_tile,
    store_y,
    sum_of,
    tile_of,
)
from warpweave.kernels.norm.torch_path import norm_fwd_cpu, residual_sum
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import RUNTIME, choose, no_graph, tl, triton

FWD_WIDTH = 16384  # longest rows that are held in registers

# ---------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=RUNTIME)
def norm_fwd_kernel(x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, weight_ptr, bias_ptr,
                    y_ptr, s_ptr, mean_ptr, rstd_ptr,
                    rows, stride_x, stride_residual, seed, site,
                    E: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr,
                    SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    # 1. A tile of whole rows of s, rounded as stored.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col, mask = columns(row, 0, rows, E, BLOCK_E)
    s = sum_of(x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, s_ptr, row, 0, rows, stride_x,
             stride_residual, seed, site, E, THRESHOLD, SCALE, BLOCK_E)  # fmt: skip

    # 2. Statistics of each row.
    if mean_ptr is not None:
        mean = tl.sum(s, 1) / E
        tl.store(mean_ptr + row, mean, row < rows)
        s = tl.where(mask, s - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(s * s, 1) / E + EPS)
    tl.store(rstd_ptr + row, rstd, row < rows)

    # 3. The result.
    store_y(s, rstd, weight_ptr, bias_ptr, y_ptr, row, col, mask, E)


@triton.jit(do_not_specialize=RUNTIME)
def norm_fwd_wide_kernel(x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, weight_ptr, bias_ptr,
                         y_ptr, s_ptr, mean_ptr, rstd_ptr,
                         rows, stride_x, stride_residual, seed, site,
                         E: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr,
                         SCALE: tl.constexpr, ROWS: tl.constexpr,
                         BLOCK_E: tl.constexpr):  # fmt: skip
    # 1. Block by block of columns: s, and the running statistics.
    dtype: tl.constexpr = rstd_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mean, squares = tl.zeros((ROWS,), dtype), tl.zeros((ROWS,), dtype)
    before = tl.zeros((1,), dtype)
    for start in range(0, E, BLOCK_E):
        s = sum_of(x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, s_ptr, row, start, rows, stride_x,
                 stride_residual, seed, site, E, THRESHOLD, SCALE, BLOCK_E)  # fmt: skip
        if mean_ptr is not None:
            col, mask = columns(row, start, rows, E, BLOCK_E)
            count = tl.sum((col < E).to(dtype), 1)
            centre = tl.sum(s, 1) / count
            s = tl.where(mask, s - centre[:, None], 0.0)
            away, share = centre - mean, count / (before + count)
            squares += away * away * before * share
            mean += away * share
            before += count
        squares += tl.sum(s * s, 1)
    rstd = 1 / tl.sqrt(squares / E + EPS)
    tl.store(rstd_ptr + row, rstd, row < rows)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, row < rows)

    # 2. The same blocks again, loaded as stored (possibly by other threads).
    tl.debug_barrier()
    for start in range(0, E, BLOCK_E):
        col, mask = columns(row, start, rows, E, BLOCK_E)
        if s_ptr is not None:
            s = load_tile(s_ptr, E, row, col, mask)
        else:
            s = load_tile(x_ptr, stride_x, row, col, mask)
        if mean_ptr is not None:
            s -= mean[:, None]
        store_y(s, rstd, weight_ptr, bias_ptr, y_ptr, row, col, mask, E)


# ---------------------------------------------------------------- launch


@no_graph
def norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    layer: bool,
    residual: torch.Tensor | None = None,
    x_bias: torch.Tensor | None = None,
    drop: Drop | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(y, s, mean or None, rstd): the forward half of RMSNorm, or of LayerNorm if `layer`.

    Arguments and errors as for `rms_norm`. y is new; s is x itself if nothing is added to x and
    nothing is dropped. mean and rstd are [...], fp32 (fp64).

    Examples:
        >>> y, s, mean, rstd = norm_fwd(torch.randn(2, 16, 64), torch.ones(64), layer=False)
        >>> mean is None, rstd.shape
        (True, torch.Size([2, 16]))
    """
    terms = Terms(residual, x_bias, drop)
    impl = choose(impl, x, weight, bias, *terms.tensors)
    terms = check_norm(x, weight, bias, terms, eps)
    options = NormOptions(layer, eps, out_dtype or x.dtype)
    if impl == "torch":
        s = residual_sum(x, terms)
        y, mean, rstd = norm_fwd_cpu(s, weight, bias, options)
        return y, s, mean.squeeze(-1) if mean is not None else None, rstd.squeeze(-1)
    return launch_forward(x, weight, bias, terms, options)


def launch_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    terms: Terms,
    options: NormOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`norm_fwd` of checked arguments, using the kernel."""
    s, y = x, torch.empty(x.shape, dtype=options.out_dtype, device=x.device)
    if not terms.absent:
        s = torch.empty(x.shape, dtype=terms.dtype(x), device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=compute_dtype(s), device=x.device)
    mean = torch.empty_like(rstd) if options.layer else None
    if not rstd.numel():
        return y, s, mean, rstd
    E, x2, r2 = x.shape[-1], as_rows(x), None if terms.residual is None else as_rows(terms.residual)
    kernel, (rows, block, warps) = norm_fwd_kernel, tile_of(E)
    if E > FWD_WIDTH:
        kernel, (rows, block, warps) = norm_fwd_wide_kernel, (1, 8192, 16)
    tokens, seed, site, constants = launch_arguments(terms.drop)
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(len(x2), rows),)](
            x2, contiguous(terms.x_bias), r2, tokens, weight.contiguous(), contiguous(bias),
            y, None if s is x else s, mean, rstd,
            len(x2), x2.stride(0), 0 if r2 is None else r2.stride(0),
            seed, site, E, options.eps, *constants, rows, block,
            num_warps=warps)  # fmt: skip
    return y, s, mean, rstd
