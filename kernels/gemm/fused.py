"""Matrix products, and products whose epilogue is everything up to the next one.

    y[M, N] = a[M, K] b[K, N] + bias[N]          out[M, N] (+)= a[M, K] b[K, N]

    z = a b + bias                               `fused_gemm`: each line is optional
    h = act(z)                                   z, what backward recomputes from, may be kept
    h = h / (1 - p) where kept, else 0           the mask of `dropout`: tokens, columns, seed, site
    y = h + residual                             all from the accumulators, rounded once

act: see `activation`; a gated one makes y[M, N/2] of z[M, N], its gates and ups interleaved. It is
applied to z as rounded to its dtype, so that what is recomputed from z is what forward saw.

Programs are persistent (see `product`). Any strides; sums in float32 (float64 for float64), with
`out_dtype` float32 unrounded. float32 operands are multiplied exactly ("ieee") or on tensor cores
("tf32", "tf32x3").

Products with nothing to fuse go to torch (cuBLAS; `cpu` on a CPU): no Triton kernel beats it
there, and what an epilogue saves is memory, not arithmetic. Triton also adds a 16-bit product to a
float32 buffer, where torch would need a float32 matrix beside it.

Sources: Kerr et al. 2017 (CUTLASS) for the epilogue; Korthikanti et al. 2022 (arXiv:2205.05198) for
what is worth keeping. Limits: not differentiable (the callers are the halves of autograd
Functions), but for `gemm` by torch; with dropout, N (of y) is whole on every rank.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from warpweave.kernels.activation import activation_fwd, curve, find_activation
from warpweave.kernels.dropout import Drop, dropout, kept
from warpweave.kernels.gemm import cpu as gemm_cpu
from warpweave.kernels.gemm.product import find_tile, grid, halves, launch_options, product, tile_at
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import check_written, choose, refuse_graph, tl, triton
from warpweave.kernels.runtime.numeric import to_dtype, upcast

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# ---------------------------------------------------------------- kernel


@triton.jit
def _epilogue(
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
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ADD: tl.constexpr,
):
    """All that follows the product, of accumulators at rows m and columns from `col`."""
    COLS: tl.constexpr = y.shape[1] // 2 if GATED else y.shape[1]
    n = col + tl.arange(0, y.shape[1])
    live = (m < M)[:, None] & (n < N)[None, :]

    # 1. Bias.
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(y.dtype)[None, :]

    # 2. Activation, of what backward will see.
    if CURVE is not None:
        z = to_dtype(y, DTYPE)
        if z_ptr is not None:
            tl.store(z_ptr + m[:, None] * N + n[None, :], z, live)
        y = upcast(z)
        if GATED:
            gate, up = tl.split(y.reshape(y.shape[0], COLS, 2))
            y = curve(gate, CURVE) * up
            col = col // 2
            n = col + tl.arange(0, COLS)
            live = (m < M)[:, None] & (n < N // 2)[None, :]
        else:
            y = curve(y, CURVE)

    # 3. Dropout.
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + m, m < M, 0)[:, None]
        group = col // 4 + tl.arange(0, COLS // 4)[None, :]
        keep = kept(seed, site, token, group, THRESHOLD, y.shape[0], COLS // 4)
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


@triton.jit(do_not_specialize=["seed", "site"])
def _gemm_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    z_ptr,
    tokens_ptr,
    residual_ptr,
    y_ptr,
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
    CURVE: tl.constexpr,
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
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        # 1. The accumulators of a tile.
        row, col = tile_at(index, M, N, BLOCK_M, BLOCK_N, GROUP)
        m, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        y = product(
            a_ptr, b_ptr, m, n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip

        # 2. The epilogue, a quarter at a time: with what it reads, a whole tile is more than the
        #    registers.
        left, right = halves(y)
        first, second = halves(left)
        third, fourth = halves(right)
        STEP: tl.constexpr = BLOCK_N // 4
        _epilogue(
            first, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col,
            M, N, stride_rm, stride_rn, stride_ym, stride_yn,
            a_ptr.dtype.element_ty, CURVE, GATED, THRESHOLD, SCALE, ADD,
        )  # fmt: skip
        _epilogue(
            second, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + STEP,
            M, N, stride_rm, stride_rn, stride_ym, stride_yn,
            a_ptr.dtype.element_ty, CURVE, GATED, THRESHOLD, SCALE, ADD,
        )  # fmt: skip
        _epilogue(
            third, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + 2 * STEP,
            M, N, stride_rm, stride_rn, stride_ym, stride_yn,
            a_ptr.dtype.element_ty, CURVE, GATED, THRESHOLD, SCALE, ADD,
        )  # fmt: skip
        _epilogue(
            fourth, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + 3 * STEP,
            M, N, stride_rm, stride_rn, stride_ym, stride_yn,
            a_ptr.dtype.element_ty, CURVE, GATED, THRESHOLD, SCALE, ADD,
        )  # fmt: skip


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    activation: str | None = None,
    z: torch.Tensor | None = None,
    drop: Drop | None = None,
    residual: torch.Tensor | None = None,
    add: bool = False,
    precision: str | None = None,
) -> None:
    """Fill (or add to) y; nothing is checked."""
    (M, K), N = a.shape, b.shape[1]
    if y.numel() == 0:
        return
    name, gated = (None, False) if activation is None else find_activation(activation)
    heavy = add or (drop is not None and residual is not None)
    tile = find_tile(a, b, "heavy" if heavy else "large")
    with torch.cuda.device_of(a):
        _gemm_kernel[grid(tile, M, N, a.device)](
            a,
            b,
            None if bias is None else bias.contiguous(),
            z,
            None if drop is None else drop.tokens.contiguous(),
            residual,
            y,
            0 if drop is None else drop.seed,
            0 if drop is None else drop.site,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            *((0, 0) if residual is None else residual.stride()),
            *y.stride(),
            name,
            gated,
            0 if drop is None else round(drop.p * 2**32),
            1.0 if drop is None else 1 / (1 - drop.p),
            add,
            find_precision(precision),
            K % tile.k == 0,
            tile.m,
            tile.n,
            tile.k,
            tile.group,
            **launch_options(tile, a),
        )


# ---------------------------------------------------------------- checks


def find_precision(precision: str | None) -> str:
    """How Triton multiplies float32: as asked, or by None as torch's own products do."""
    if precision is None:
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    if precision not in ("ieee", "tf32", "tf32x3"):
        raise ValueError(f'precision must be None, "ieee", "tf32" or "tf32x3", got {precision!r}')
    return precision


def check_operands(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError unless a[M, K] b[K, N] + bias[N] exists, of one floating dtype."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"need a[M, K] and b[K, N], got {[*a.shape]} and {[*b.shape]}")
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        raise ValueError(f"a and b must have one floating dtype, got {a.dtype} and {b.dtype}")
    if bias is not None and (bias.shape != b.shape[1:] or bias.dtype not in DTYPES):
        raise ValueError(
            f"bias must be floating and [N] of b {[*b.shape]}, got {bias.dtype} {[*bias.shape]}"
        )


def _check_out(a: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype not in (a.dtype, compute_dtype(a)):
        raise ValueError(
            f"the product of {a.dtype} is given in {a.dtype} or {compute_dtype(a)}, not in {dtype}"
        )


def _check_epilogue(
    shape: tuple[int, int], drop: Drop | None, residual: torch.Tensor | None
) -> None:
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual must be {[*shape]} as the result, got {[*residual.shape]}")
    if drop is None:
        return
    if not isinstance(drop, Drop):
        raise ValueError(f"drop must be a Drop(p, seed, site, tokens), got {drop!r}")
    p, seed, site, tokens = drop
    if not 0 <= p < 1:
        raise ValueError(f"need 0 <= p < 1, got {p}")
    if tokens.shape != shape[:1] or tokens.dtype != torch.int64:
        raise ValueError(f"need int64 tokens[{shape[0]}], got {tokens.dtype} {[*tokens.shape]}")
    if not (0 <= seed < 2**63 and 0 <= site < 2**32):
        raise ValueError(f"need 0 <= seed < 2**63 and 0 <= site < 2**32, got {seed} and {site}")


# ---------------------------------------------------------------- registration

# What is left of a call when everything is checked, and the operators that compilers see of it:
# they can trace no launch. Without a compiler the call of an operator is saved.


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    precision: str | None,
) -> torch.Tensor:
    """a[M, K] b[K, N] + bias[N] by Triton."""
    y = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
    _launch(a, b, bias, y, precision=precision)
    return y


_gemm_op = torch.library.custom_op("warpweave::gemm", mutates_args=())(_product)


@_gemm_op.register_fake
def _(a, b, bias, dtype, precision):
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def _product_into(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    precision: str | None,
    impl: str,
) -> None:
    """out[M, N] (+)= a[M, K] b[K, N]."""
    if impl == "torch":
        gemm_cpu.product_into(a, b, out, add)
    else:
        _launch(a, b, None, out, add=add, precision=precision)


_gemm_into_op = torch.library.custom_op("warpweave::gemm_into", mutates_args=("out",))(
    _product_into
)


@_gemm_into_op.register_fake
def _(*arguments):
    return None


def _fused(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    keep: bool,
    drop: Drop | None,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    precision: str | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y[M, N or N/2], z[M, N] or None)."""
    if impl == "torch":
        return _fused_torch(a, b, bias, activation, keep, drop, residual, dtype)
    y = a.new_empty(_fused_shape(a, b, activation), dtype=dtype)
    z = a.new_empty(a.shape[0], b.shape[1]) if keep else None
    _launch(
        a,
        b,
        bias,
        y,
        activation=activation,
        z=z,
        drop=drop,
        residual=residual,
        precision=precision,
    )
    return y, z


@torch.library.custom_op("warpweave::fused_gemm", mutates_args=())
def _fused_gemm_op(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tokens: torch.Tensor | None,
    activation: str | None,
    keep: bool,
    p: float,
    seed: int,
    site: int,
    dtype: torch.dtype,
    precision: str | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    drop = None if tokens is None else Drop(p, seed, site, tokens)
    y, z = _fused(a, b, bias, activation, keep, drop, residual, dtype, precision, impl)
    return y, a.new_empty(0, 0) if z is None else z  # operators return no None


@_fused_gemm_op.register_fake
def _(a, b, bias, residual, tokens, activation, keep, p, seed, site, dtype, precision, impl):
    y = a.new_empty(_fused_shape(a, b, activation), dtype=dtype)
    return y, a.new_empty((a.shape[0], b.shape[1]) if keep else (0, 0))


def _fused_shape(a: torch.Tensor, b: torch.Tensor, activation: str | None) -> tuple[int, int]:
    gated = activation is not None and find_activation(activation).gated
    return a.shape[0], b.shape[1] // 2 if gated else b.shape[1]


# ---------------------------------------------------------------- public


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """a[M, K] b[K, N] + bias[N] in `out_dtype`, by default the dtype of `a`.

    a and b have one dtype and any strides. With 16-bit a and b and out_dtype float32, the result is
    the accumulators, unrounded.

    Args:
        precision: how the Triton kernel multiplies float32: "ieee", "tf32" or "tf32x3"; None is
            what torch is set to (``torch.set_float32_matmul_precision``).
        impl: None is torch, on CUDA too (cuBLAS): nothing is fused; "triton" is our kernel.

    Raises:
        ValueError: by the Triton kernel, on shapes or dtypes that do not fit, if something that it
            multiplies requires a gradient or if it cannot run; torch raises what it raises.
    """
    dtype = a.dtype if out_dtype is None else out_dtype
    if impl is None or choose(impl, a, b, bias) == "torch":
        return gemm_cpu.product(a, b, bias, dtype)
    check_operands(a, b, bias)
    _check_out(a, dtype)
    refuse_graph("the Triton kernel of gemm", a, b, bias)
    multiply = _gemm_op if torch.compiler.is_compiling() else _product
    return multiply(a, b, bias, dtype, precision)


def gemm_into(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    *,
    precision: str | None = None,
    impl: str | None = None,
) -> None:
    """Add a[M, K] b[K, N] to out[M, N], or overwrite `out` with it.

    a and b have one dtype and any strides; out that dtype, or float32 to be given (or added) the
    accumulators of 16-bit operands unrounded. `precision` as for `gemm`.

    Args:
        impl: None is Triton where 16-bit operands on CUDA meet a float32 `out` (torch would need a
            float32 matrix beside it), else torch.

    Raises:
        ValueError: out has another shape or dtype or elements that are one in memory, something
            requires a gradient; by the Triton kernel, on shapes or dtypes that do not fit or if it
            cannot run; torch raises what it raises.
    """
    if out.shape != (a.shape[0], b.shape[-1]):
        raise ValueError(
            f"out must be [M, N] of a {[*a.shape]} and b {[*b.shape]}, got {[*out.shape]}"
        )
    check_written("out", out)
    if impl is None and (a.dtype == out.dtype or not a.is_cuda):
        impl = "torch"
    impl = choose(impl, a, b, out)
    if impl == "triton":
        check_operands(a, b, None)
    _check_out(a, out.dtype)  # torch would cast the operands to it: to integers, without a word
    refuse_graph("gemm_into", a, b, out)
    multiply = _gemm_into_op if torch.compiler.is_compiling() else _product_into
    multiply(a, b, out, add, precision, impl)


def fused_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    keep: bool = False,
    drop: Drop | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """residual + dropout(act(a[M, K] b[K, N] + bias[N])), and with `keep` the argument of act.

    Args:
        activation: a key of ``activation.ACTIVATIONS``, or None; a gated one halves N.
        keep: return z[M, N], rounded to the dtype of `a`, too; it needs an activation.
        drop: what `dropout` takes; its mask is that of `dropout` on the whole result.
        residual: [M, N] (N/2 if gated), any strides.
        out_dtype: of the result; float32 with 16-bit operands leaves it unrounded.
        precision: as for `gemm`.
        impl: as for every kernel: None is Triton on CUDA tensors, torch on others.

    Returns:
        (y, z or None).

    Raises:
        ValueError: shapes, dtypes or numbers do not fit, something requires a gradient, or `impl`
            cannot run.
    """
    impl = choose(impl, a, b, bias, residual, getattr(drop, "tokens", None))
    check_operands(a, b, bias)
    refuse_graph("fused_gemm", a, b, bias, residual)
    dtype = a.dtype if out_dtype is None else out_dtype
    _check_out(a, dtype)
    if precision is not None:  # None is asked of torch at the launch: compilers cannot trace it
        find_precision(precision)
    gated = activation is not None and find_activation(activation).gated
    if gated and b.shape[1] % 2:
        raise ValueError(f"{activation} needs b[K, 2F] of gate, up pairs, got {[*b.shape]}")
    if keep and activation is None:
        raise ValueError("keep=True keeps the argument of an activation: activation is None")
    _check_epilogue(_fused_shape(a, b, activation), drop, residual)
    if drop is not None and drop.p == 0:
        drop = None
    if not torch.compiler.is_compiling():
        return _fused(a, b, bias, activation, keep, drop, residual, dtype, precision, impl)
    p, seed, site, tokens = (0.0, 0, 0, None) if drop is None else drop
    y, z = _fused_gemm_op(
        a, b, bias, residual, tokens, activation, keep, p, seed, site, dtype, precision, impl
    )
    return y, z if keep else None


def _fused_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    keep: bool,
    drop: Drop | None,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One operator of torch after the other; each rounds to the dtype of its result."""
    # The dtypes are settled: autocast would multiply, and return, in its own.
    cast = not a.is_meta and torch.is_autocast_enabled(a.device.type)
    with torch.autocast(a.device.type, enabled=False) if cast else nullcontext():
        z = gemm_cpu.product(a, b, bias, dtype if activation is None else a.dtype)
    if activation is None:
        y = z
    else:
        y = activation_fwd(z, activation, impl="torch").to(dtype)
    if drop is not None:
        p, seed, site, tokens = drop
        y = dropout(y, p, seed=seed, site=site, tokens=tokens, impl="torch")
    if residual is not None:
        y += residual
    return y, z if keep else None
