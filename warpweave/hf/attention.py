"""Attention as transformers' models call it, by `kernels.attention`.

`attention_forward` and `mask.make_mask` are registered under one name, because a model whose
attention is registered without its mask is given none, and silently ignores padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from warpweave.hf.arguments import unknown
from warpweave.hf.changes import forget, known, note
from warpweave.hf.mask import Mask, Visible, make_mask
from warpweave.hf.patch import always_ours, few
from warpweave.hf.probe import WIDE
from warpweave.hf.seen import requested
from warpweave.kernels.attention import attention
from warpweave.parallel.context.attention import (
    ContextGroup,
    Links,
    Strategy,
    context_attention,
)
from warpweave.parallel.layout import SequenceLayout

NAME = "warpweave"
# What transformers' eager attention ignores. Any other argument (a bias of the scores, a choice
# among keys, a paged cache, or one that a new version of transformers adds) is refused.
_IGNORED = (
    "position_ids", "cache_position", "use_cache", "return_dict", "deterministic", "logits_to_keep",
    "output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
)  # fmt: skip
_WEIGHTS = {"attentions", "cross_attentions"}  # among what transformers collects of a forward


class Across(NamedTuple):
    """How the sequence of a module's call lies on ranks, each of which attends its own rows: as
    `context_attention` takes it. A fact of the module."""

    layout: SequenceLayout
    group: ContextGroup
    strategy: Strategy | Links


class Shared(NamedTuple):
    """A fact of a module whose heads or tokens are on several ranks, which draw dropout separately
    and so may not have any."""


class Named(NamedTuple):
    """A fact of a model whose configuration names this attention.

    Unpickling the model imports this class, which registers the attention.
    """


class _Watched(NamedTuple):
    """Who is told of a module's calls, see `watched`."""

    watch: Callable


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """o[B, Sq, Hq, D] of query[B, Hq, Sq, D], key[B, Hkv, Sk, D] and value[B, Hkv, Sk, Dv].

    The mask says what is visible, also the window: as for transformers' eager attention,
    `sliding_window` says nothing more. Dropout draws from torch's CPU generator one seed per call.

    Raises ValueError, naming the module, on what the kernel cannot do: an argument that it does not
    know (a bias of the scores, a paged cache), a mask that `make_mask` did not make, attention
    weights as an output, dropout in a module that is `Shared`.
    """
    name = type(module).__name__
    asked = unknown(rest, _IGNORED)
    if rest.get("output_attentions") or _WEIGHTS & requested():
        asked.append("output_attentions (set_attn_implementation('eager') has)")
    if asked:
        raise ValueError(f"{name}: warpweave attention has no {', '.join(asked)}")
    if dropout and known(module, Shared) is not None:
        raise ValueError(f"{name}: attention dropout is not drawn over ranks: set it to 0")
    across = known(module, Across)
    visible = _visible(module, query, key, attention_mask, is_causal, across)
    simple = across is None and softcap is None and s_aux is None and not dropout
    if simple and (few(query) or (attention_mask is None and _is_torchs(query, value))):
        return _attend_plainly(query, key, value, attention_mask, visible, scaling), None
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    options = {
        "causal": visible.causal,
        "window": visible.window,
        "documents": None if visible.documents is None else visible.documents.to(query.device),
        "scale": None if scaling is None else float(scaling),
        "softcap": softcap,
        "sinks": s_aux,
        "dropout": dropout,
        "dropout_seed": int(torch.randint(2**62, ())) if dropout else 0,
    }
    o: Any
    if across is None:
        runs = {"q_runs": (visible.q_run,), "k_runs": (visible.k_run,)}
        o = attention(query, key, value, **options, **runs)
    else:
        o = context_attention(query, key, value, **options, **across._asdict())
    o = o.contiguous()
    watched = known(module, _Watched)
    if watched is not None:
        watched.watch(module, query, key, value, o, s_aux)
    return o, None


def _is_torchs(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether our attention without a mask would call torch's own operator, and nothing else."""
    if torch.compiler.is_compiling() or always_ours():
        return False
    return query.is_cpu and query.dtype in WIDE and query.shape[-1] == value.shape[-1]


def _attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask | None,
    visible: Visible,
    scaling: float | None,
) -> torch.Tensor:
    """By torch's own operator, with the mask, of a `few` numbers, written out for all layers."""
    seen = None
    if mask is not None:
        if mask.seen is None:
            mask.seen = visible.written_out(query.device)
        seen = mask.seen
    o = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None and visible.causal,
        scale=None if scaling is None else float(scaling),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return o.transpose(1, 2).contiguous()


def _visible(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool | None,
    across: Across | None,
) -> Visible:
    """What the queries of this call see."""
    Sq, Sk, name = query.shape[2], key.shape[2], type(module).__name__
    if across is not None:
        Sq, Sk = Sq * across.layout.parts, Sk * across.layout.parts
    if mask is None:
        # transformers' own default; after a renaming, `apply` would find that encoders differ.
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = bool(causal) and Sq > 1
        if causal and Sq != Sk:
            raise ValueError(
                f"{name}: warpweave attention got {Sq} queries, {Sk} keys and no mask that says "
                "where they stand"
            )
        return Visible(causal, None, None, (0, Sq), (0, Sk))
    if not isinstance(mask, Mask):
        raise ValueError(
            f"{name}: warpweave attention takes masks that transformers makes from attention_mask "
            f"or position_ids, not a mask {[*mask.shape]} of one's own or with a bias in it: "
            "use model.set_attn_implementation('sdpa')"
        )
    visible = mask.visible
    if (visible.q_run[1], visible.k_run[1]) != (Sq, Sk):
        raise ValueError(
            f"{name}: warpweave attention got {Sq} queries and {Sk} keys, but a mask of "
            f"{visible.q_run[1]} and {visible.k_run[1]}"
        )
    return visible


@contextmanager
def watched(model: nn.Module, watch: Callable) -> Iterator[None]:
    """Meanwhile `watch(module, q, k, v, o, sinks)` is told of every call of `attention_forward` by
    a module of the model: heads as the kernel takes them, [B, S, H, D], and [H] or None. One
    watches at a time.
    """
    modules = list(model.modules())
    for module in modules:
        note(module, _Watched(watch))
    try:
        yield
    finally:
        for module in modules:
            forget(module, _Watched)


@contextmanager
def callers(model: nn.Module) -> Iterator[dict[nn.Module, None]]:
    """The modules of a model that call `attention_forward` meanwhile, in their order."""
    found: dict[nn.Module, None] = {}
    with watched(model, lambda module, *_: found.setdefault(module)):
        yield found


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)
