"""Dropout masked by global indices, so that every layout of a run drops the same elements.

    word[t, e] = philox4x32-10(counter = (token lo, token hi, e // 4, site),
                               key = (seed lo, seed hi))[e % 4]
    y = x / (1 - p) where word >= round(p * 2^32), else 0

x, y: [T, E]; tokens[T] are the global indices (batch index * sequence length + position) of the
local rows, for any sharding of T. `site` numbers the place in the network. In training, the seed is
different in each step; in a CUDA graph it must be a tensor, because a replay repeats the numbers of
the capture. E must not be sharded: a shard would need a column offset.

Only tokens are saved for backward: Triton recomputes the mask, which is cheaper than reading it.
The torch path saves the mask (one byte per element), because computing it is most of the cost on a
CPU. Both masks are bitwise equal. Dropped elements are exact zeros, even for infinite x.

Sources: Srivastava et al. 2014; Salmon et al. 2011 (Random123). Limits: 0 <= seed < 2^63, 0 <= site
< 2^32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpweave.kernels.runtime.dispatch import (
    RUNTIME,
    choose,
    no_graph,
    refuse_tangents,
    tl,
    triton,
)
from warpweave.kernels.runtime.dtypes import to_dtype, upcast
from warpweave.kernels.runtime.op import operator

_LOW = 0xFFFFFFFF


class Drop(NamedTuple):
    """The key of a dropout: probability, seed, site, and global token indices int64[...].

    The seed is a number, or a 0-dim int64 tensor next to the tokens, whose value is not checked.

    Examples:
        >>> from warpweave.kernels.dropout import dropout
        >>> drop = Drop(p=0.5, seed=1, site=0, tokens=torch.arange(16))
        >>> y = dropout(torch.ones(16, 64), drop)
        >>> torch.equal(y[4:], dropout(torch.ones(12, 64), drop._replace(tokens=drop.tokens[4:])))
        True
    """

    p: float
    seed: int | torch.Tensor
    site: int
    tokens: torch.Tensor


def check_drop(drop: Drop | None, shape: torch.Size) -> Drop | None:
    """Return `drop` with its tokens in `shape`, that of x[..., E] without E; None if p is 0.

    Raises ValueError unless it is a Drop with 0 <= p < 1, as many int64 tokens as `shape` has
    elements, 0 <= seed < 2^63 and 0 <= site < 2^32.
    """
    if drop is None:
        return None
    if not isinstance(drop, Drop):
        raise ValueError(f"`drop` must be a Drop(p, seed, site, tokens), got {drop!r}")
    p, seed, site, tokens = drop
    if not 0 <= p < 1:
        raise ValueError(f"need 0 <= p < 1, got {p}")
    if tokens is None or tokens.numel() != shape.numel() or tokens.dtype != torch.int64:
        got = None if tokens is None else f"{tokens.dtype} {[*tokens.shape]}"
        raise ValueError(
            f"drop.tokens must be int64{[*shape]}, one token index for each row, got {got}"
        )
    check_key(seed, site)
    if isinstance(seed, torch.Tensor):
        choose("torch", seed, tokens)  # one device
    if p == 0:
        return None
    return drop if tokens.shape == shape else drop._replace(tokens=tokens.reshape(shape))


def check_key(seed: int | torch.Tensor, *counters: int) -> None:
    """Raise ValueError unless 0 <= seed < 2^63 and the counters fit 32 bits.

    The counters are a site, or a sample and a head. A seed that is a tensor must be 0-dim int64;
    its value stays on the device, unchecked.
    """
    if isinstance(seed, torch.Tensor):
        if seed.ndim or seed.dtype != torch.int64:
            raise ValueError(
                f"seed must be an int or a 0-dim int64 tensor, got {seed.dtype} {[*seed.shape]}"
            )
        seed = 0
    if not (0 <= seed < 2**63 and all(0 <= n < 2**32 for n in counters)):
        what, words = ("site", "sample, head")[len(counters) - 1], " and ".join(map(str, counters))
        raise ValueError(f"need 0 <= seed < 2**63 and 0 <= {what} < 2**32, got {seed} and {words}")


def split_drop(drop: Drop | None) -> tuple[Drop | None, tuple[torch.Tensor | None, ...]]:
    """A drop without its tensors, and these, for autograd to save; see `join_drop`."""
    if not isinstance(drop, Drop):  # none, or not yet checked
        return drop, (None, None)
    if not isinstance(drop.seed, torch.Tensor):
        return drop._replace(tokens=None), (None, drop.tokens)
    return drop._replace(seed=0, tokens=None), (drop.seed, drop.tokens)


def join_drop(
    drop: Drop | None, seed: torch.Tensor | None, tokens: torch.Tensor | None
) -> Drop | None:
    """The inverse of `split_drop`."""
    if drop is None:
        return None
    return drop._replace(seed=drop.seed if seed is None else seed, tokens=tokens)


def threshold(p: float) -> int:
    """Return the bound below which words are dropped."""
    return round(p * 2**32)


def launch_arguments(
    drop: Drop | None,
) -> tuple[torch.Tensor | None, int | torch.Tensor, int, tuple[int, float]]:
    """A kernel's tokens, seed, site and (THRESHOLD, SCALE).

    Without dropout these are constants, so that one compiled kernel is enough.
    """
    if drop is None:
        return None, 0, 0, (0, 1.0)
    p, seed, site, tokens = drop
    return tokens.contiguous(), seed, site, (threshold(p), 1 / (1 - p))


# ---------------------------------------------------------------- Triton


@triton.jit
def key_of(seed):
    """The seed, which is a number or a pointer to one."""
    if seed.dtype.is_ptr():
        return tl.load(seed)
    else:
        return tl.cast(seed, tl.int64)


@triton.jit
def words(seed, first, c2, c3, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """uint32[ROWS, 4 GROUPS]: the four words of each counter (first lo, first hi, c2, c3), next to
    one another; `first` is int64, and all of them broadcast to [ROWS, GROUPS]."""
    zero = tl.zeros((ROWS, GROUPS), tl.uint32)
    c0 = zero + (first & 0xFFFFFFFF).to(tl.uint32)
    c1 = zero + ((first >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2, c3 = zero + tl.cast(c2, tl.uint32), zero + tl.cast(c3, tl.uint32)
    w0, w1, w2, w3 = tl.philox(key_of(seed), c0, c1, c2, c3)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(ROWS, 4 * GROUPS)


@triton.jit
def keep_mask(
    seed, site, token, group, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    """bool[ROWS, 4 GROUPS]: true for those of columns 4g to 4g + 3 that are kept, for token[ROWS,
    1] (int64) and g in group[1, GROUPS]."""
    drawn = words(seed, token, group, site, ROWS, GROUPS)
    if THRESHOLD < 4294967296:  # else p rounds to 1, and everything is dropped
        return drawn >= tl.full((1, 1), THRESHOLD, tl.uint32)
    else:
        return drawn.to(tl.int64) >= THRESHOLD


# These arguments change from step to step and must not cause a recompilation.
@triton.jit(do_not_specialize=RUNTIME)
def _dropout_kernel(
    x_ptr,
    tokens_ptr,
    y_ptr,
    seed,
    site,
    rows,
    stride_x,
    E: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    # 1. The mask of a tile.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.load(tokens_ptr + row, row < rows, 0)[:, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
    keep = keep_mask(seed, site, token, group, THRESHOLD, ROWS, GROUPS)

    # 2. Scale what is kept.
    col = (tl.program_id(1) * 4 * GROUPS + tl.arange(0, 4 * GROUPS))[None, :]
    live = (row[:, None] < rows) & (col < E)
    x = upcast(tl.load(x_ptr + row[:, None] * stride_x + col, live, 0.0))
    y = tl.where(keep, x * SCALE, 0.0)
    tl.store(y_ptr + row[:, None] * E + col, to_dtype(y, y_ptr.dtype.element_ty), live)


@no_graph
def dropout_fwd(x: torch.Tensor, drop: Drop) -> torch.Tensor:
    """Launch the Triton kernel, unchecked: x to y in the forward, dy to dx in the backward."""
    T, E = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    groups = min(512, triton.next_power_of_2(triton.cdiv(E, 4)))
    rows = 512 // groups
    tokens, seed, site, constants = launch_arguments(drop)
    with torch.cuda.device_of(x):
        _dropout_kernel[(triton.cdiv(T, rows), triton.cdiv(E, 4 * groups))](
            x,
            tokens,
            y,
            seed,
            site,
            T,
            x.stride(0),
            E,
            *constants,
            rows,
            groups,
            num_warps=4,
        )
    return y


def _save_dropout(ctx, inputs, output) -> None:
    _, drop = inputs
    ctx.drop, tensors = split_drop(drop)
    ctx.save_for_backward(*tensors)


def _dropout_backward(ctx, dy):
    return dropout_op(dy, join_drop(ctx.drop, *ctx.saved_tensors))


@operator(
    "dropout", lambda x, drop: x.new_empty(x.shape), records=(Drop,),
    gradient=(_save_dropout, _dropout_backward), sharding="t_, , t -> t_",
)  # fmt: skip
def dropout_op(x: torch.Tensor, drop: Drop) -> torch.Tensor:
    """The Triton path of `dropout`, x[T, E]."""
    return dropout_fwd(x, drop)


# ---------------------------------------------------------------- torch


def _dropped_fake(drop: Drop, E: int) -> torch.Tensor:
    return drop.tokens.new_empty(drop.tokens.shape[0], E, dtype=torch.bool)  # len is a constant


@operator("dropped", _dropped_fake, records=(Drop,), sharding=", t -> t_")
def dropped(drop: Drop, E: int) -> torch.Tensor:
    """bool[T, E], true where dropout drops; an operator, so compilers need not trace the rounds.

    Products of 32-bit words wrap in int64 with all 64 bits correct. Words 0 and 2 are kept clean to
    32 bits, because they are multiplied. Words 1 and 3 are products whose upper half is cut off
    later. The rows are processed in place, a few at a time, so that the six buffers stay in cache.
    """
    p, seed, site, tokens = drop
    groups = torch.arange((E + 3) // 4, device=tokens.device)
    drawn = torch.empty(len(tokens), len(groups), 4, dtype=torch.bool, device=tokens.device)
    rows = max(1, 2**14 // max(1, len(groups)))
    shift, clean = torch.bitwise_right_shift, torch.bitwise_and
    for start in range(0, len(tokens), rows):
        token = tokens[start : start + rows, None]
        c0, c1, c2, c3 = token & _LOW, (token >> 32) & _LOW, groups, torch.full_like(token, site)
        key0, key1 = seed & _LOW, seed >> 32
        for i in range(10):
            p0, p1 = c0 * 0xD2511F53 if i < 3 else c0.mul_(0xD2511F53), c2 * 0xCD9E8D57
            if i < 3:  # broadcasting still grows the words
                c0, c2 = ((p1 >> 32) ^ (c1 ^ key0)) & _LOW, ((p0 >> 32) ^ (c3 ^ key1)) & _LOW
            else:
                c0 = shift(p1, 32).bitwise_xor_(c1).bitwise_xor_(key0).bitwise_and_(_LOW)
                c2 = shift(p0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(key1).bitwise_and_(_LOW)
            c1, c3 = p1, p0
            key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
        words = (c0, clean(c1, _LOW), c2, clean(c3, _LOW))
        for j, word in enumerate(words):
            torch.lt(word, threshold(p), out=drawn[start : start + rows, :, j])
    return drawn.flatten(1)[:, :E].contiguous()


# ---------------------------------------------------------------- public


def dropout(x: torch.Tensor, drop: Drop, *, impl: str | None = None) -> torch.Tensor:
    """Zero each element of x[..., E] with probability p and divide the rest by 1 - p.

    x may have any sharding except of E. If p is 0, the result is x itself. The mask depends only on
    the column and on the key, whose tokens[...] are the global indices of the rows. Differentiable
    in x. Raises ValueError if numbers are out of range, if tokens do not fit (see `check_drop`), or
    if `impl` cannot run. Srivastava et al. 2014.

    Examples:
        >>> from warpweave.kernels.dropout import Drop
        >>> drop = Drop(p=0.5, seed=1, site=0, tokens=torch.arange(16))
        >>> dropout(torch.ones(16, 64), drop).unique().tolist()
        [0.0, 2.0]
    """
    impl = choose(impl, x, getattr(drop, "tokens", None))
    if x.ndim == 0 or not x.dtype.is_floating_point:
        raise ValueError(
            f"x must have a float dtype and at least one dim, got {x.dtype} {[*x.shape]}"
        )
    key = check_drop(drop, torch.Size((x.shape[:-1].numel(),)))
    if key is None:
        return x
    flat = x.reshape(key.tokens.numel(), x.shape[-1])
    if impl == "torch":
        return (flat * (1 / (1 - key.p))).masked_fill(dropped(key, x.shape[-1]), 0).view(x.shape)
    refuse_tangents("dropout", x)
    return dropout_op(flat, key).view(x.shape)
