"""The attention function that transformers' models call, computed by `kernels.attention`.

`attention_forward` and `mask.make_mask` are registered under the same name. If only the attention
were registered, a model would get no mask and silently ignore padding.
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
from warpweave.parallel.context.attention import ContextGroup, Links, Strategy, context_attention
from warpweave.parallel.layout import SequenceLayout

NAME = "warpweave"
# Arguments that transformers' eager attention ignores. Any other argument (a bias of the scores, a
# selection of keys, a paged cache, or one that a new version of transformers adds) is refused.
_IGNORED = (
    "position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep",
    "output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
)  # fmt: skip
_WEIGHTS = {"attentions", "cross_attentions"}  # outputs that transformers may collect in a forward


class Across(NamedTuple):
    """The distribution of a call's sequence over ranks, as arguments of `context_attention`. Each
    rank attends with its own rows. A fact of the module (`changes`)."""

    layout: SequenceLayout
    group: ContextGroup
    strategy: Strategy | Links


class Shared(NamedTuple):
    """A fact of a module whose heads or tokens are on several ranks. The ranks would draw dropout
    separately, so the module must not have any."""


class Named(NamedTuple):
    """A fact of a model whose configuration names this attention. Unpickling the model imports this
    class, which registers the attention."""


class _Watched(NamedTuple):
    """The function that observes a module's calls, see `watched`."""

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
    deterministic: bool | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """o[B, Sq, Hq, D] of query[B, Hq, Sq, D], key[B, Hkv, Sk, D] and value[B, Hkv, Sk, Dv].

    The mask determines what is visible, including the window; `sliding_window` is ignored, as in
    transformers' eager attention. Dropout draws one seed per call from the generator of the device.
    `deterministic` is that of `attention`.
    Raises ValueError, naming the module, for an unknown argument (a bias of the scores, a paged
    cache), another mask than `make_mask`'s, attention weights, or dropout in a `Shared` module.
    """
    name = type(module).__name__
    asked = unknown(rest, _IGNORED)
    if rest.get("output_attentions") or _WEIGHTS & requested():
        asked.append("output_attentions (use set_attn_implementation('eager'))")
    if asked:
        raise ValueError(f"{name}: warpweave attention does not support {', '.join(asked)}")
    if known(module, Shared) is not None:
        refuse_dropout(name, dropout)
    across = known(module, Across)
    visible = _visible(module, query, key, attention_mask, is_causal, across)
    scaling = None if scaling is None else float(scaling)
    simple = across is None and softcap is None and s_aux is None and not dropout
    if simple and (few(query) or (attention_mask is None and _is_torchs(query, value))):
        return _attend_plainly(query, key, value, attention_mask, visible, scaling), None
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    options = {
        "causal": visible.causal, "window": visible.window,
        "documents": None if visible.documents is None else visible.documents.to(query.device),
        "scale": scaling, "softcap": softcap, "sinks": s_aux, "deterministic": bool(deterministic),
        "dropout": dropout,
        "dropout_seed": torch.randint(2**62, (), device=query.device) if dropout else 0,
    }  # fmt: skip
    o: Any
    if across is None:
        runs = {"q_runs": (visible.q_run,), "k_runs": (visible.k_run,)}
        o = attention(query, key, value, **options, **runs).contiguous()
    else:
        o = context_attention(query, key, value, **options, **across._asdict()).contiguous()
    if (watched := known(module, _Watched)) is not None:
        watched.watch(module, query, key, value, o, s_aux)
    return o, None


def refuse_dropout(name: str, p: float) -> None:
    """Raise ValueError if an attention that ranks share has dropout."""
    if p:
        why = "attention dropout is not supported with apply(mesh=...)"
        raise ValueError(f"{name}: {why}; set it to 0")


def _is_torchs(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if our attention, without a mask, would only call torch's own operator."""
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
    """Attention by torch's own operator. The mask, of a `few` elements, is written out once for all
    layers."""
    if mask is not None and mask.seen is None:
        mask.seen = visible.written_out(query.device)
    seen = None if mask is None else mask.seen
    o = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None and visible.causal,
        scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
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
    """The keys that the queries of this call see."""
    Sq, Sk, name = query.shape[2], key.shape[2], type(module).__name__
    if across is not None:
        Sq, Sk = Sq * across.layout.parts, Sk * across.layout.parts
    if mask is None:
        # transformers' own default. After a renaming, `apply` would detect that encoders differ.
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = bool(causal) and Sq > 1
        if causal and Sq != Sk:
            raise ValueError(
                f"{name}: warpweave attention got {Sq} queries and {Sk} keys, but no mask that "
                "gives their positions"
            )
        return Visible(causal, None, None, (0, Sq), (0, Sk))
    if not isinstance(mask, Mask):
        raise ValueError(
            f"{name}: warpweave attention needs the mask that transformers builds from "
            f"attention_mask or position_ids, got a mask of shape {[*mask.shape]} that is custom "
            "or has a bias; use model.set_attn_implementation('sdpa')"
        )
    visible = mask.visible
    if (visible.q_run[1], visible.k_run[1]) != (Sq, Sk):
        raise ValueError(
            f"{name}: warpweave attention got {Sq} queries and {Sk} keys, but a mask for "
            f"{visible.q_run[1]} queries and {visible.k_run[1]} keys"
        )
    return visible


@contextmanager
def watched(model: nn.Module, watch: Callable) -> Iterator[None]:
    """Call `watch(module, q, k, v, o, sinks)` for every call of `attention_forward` in the context.
    Only calls by modules of the model count. Heads have the kernel's layout, [B, S, H, D]; sinks
    are [H] or None. There can be only one watcher at a time."""
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
    """Collect the modules of a model that call `attention_forward` in the context, in order."""
    found: dict[nn.Module, None] = {}
    with watched(model, lambda module, *_: found.setdefault(module)):
        yield found


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)
