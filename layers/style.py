"""How the transformers of different families differ: records of options, without torch.

A layer takes its record whole (``style``), and so does each layer inside it: `BlockStyle` is an
`AttentionStyle`, which is a `NormStyle`, and an `MLPStyle`. ``GPTConfig`` has the same fields. For
whoever uses one layer alone they are keywords too, see `fields_as_keywords`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from warpweave.kernels.rope_scaling import RopeScaling


@dataclass(frozen=True, kw_only=True)
class NormStyle:
    """The norms of a model.

    Attributes:
        norm: LayerNorm, RMSNorm, or RMSNorm whose factors are 1 + weight.
        norm_eps: Epsilon of the norms.
        norm_place: Norms stand before attention and MLP, after both, or in both places.
        norm_bias: LayerNorm has a bias; without, it has one as the linear layers do.
        bias: Linear layers and LayerNorm have biases.
    """

    norm: Literal["layer", "rms", "rms1p"] = "layer"
    norm_eps: float = 1e-5
    norm_place: Literal["pre", "sandwich", "post"] = "pre"
    norm_bias: bool | None = None
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class HeadStyle(NormStyle):
    """What the attention heads of all blocks of a model have alike.

    Attributes:
        head_size: Width of a head.
        qkv_bias: The qkv projection has a bias; without, it has one as the others do.
        qk_norm: RMSNorm of each query and key head, before the rotation.
        qk_norm_whole: With qk_norm: one over all query heads together, and one over all key heads.
        attention_scale: Factor of the attention scores; without, 1 / sqrt(width of a head).
        softcap: Attention scores become softcap * tanh(score / softcap).
        sinks: Each query head has one more logit, learned, in its softmax, with no value.
        rope_scaling: How the rotary embedding was changed for longer sequences; not an option of
            the command line.
    """

    head_size: int | None = None
    qkv_bias: bool | None = None
    qk_norm: bool = False
    qk_norm_whole: bool = False
    attention_scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    rope_scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionStyle(HeadStyle):
    """The attention of one block.

    Attributes:
        num_kv_heads: key and value heads; None is as many as query heads.
        causal: a query sees keys at its own and earlier positions.
        window: and less than `window` away from its own (sliding window).
        rope_theta: base of the rotary embedding; None is none.
    """

    num_kv_heads: int | None = None
    causal: bool = True
    window: int | None = None
    rope_theta: float | None = None


@dataclass(frozen=True, kw_only=True)
class MLPStyle:
    """The feed-forward half of a block.

    Attributes:
        activation: GELU by its tanh approximation or exact (by erf), SwiGLU, GELU (by tanh) as a
            gate, or squared ReLU.
        bias: Linear layers and LayerNorm have biases.
    """

    activation: Literal["gelu", "gelu_erf", "swiglu", "geglu", "relu2"] = "gelu"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class BlockStyle(AttentionStyle, MLPStyle):
    """One block.

    Attributes:
        dropout: probability on both branches, keyed by global token ids (needs a context).
    """

    dropout: float = 0.0


def fields_as_keywords(
    *positional: str, unused: tuple[str, ...] = (), **records: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a constructor that takes records: it takes their fields as keywords, too.

    With ``@fields_as_keywords(style=AttentionStyle, place=Place)`` the call
    ``Attention(64, 8, window=3, mesh=mesh)`` is
    ``Attention(64, 8, style=AttentionStyle(window=3), place=Place(mesh=mesh))``. A field that is
    given beside its record replaces the record's value. ``inspect.signature`` shows the fields.

    Args:
        positional: fields that may be given without their names, after the constructor's own.
        unused: fields that the layer has no use for, which are no keywords.
        records: parameter of the constructor, by keyword only -> the frozen dataclass it takes.
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(init).parameters.values()
        offered = {
            name: [f for f in fields(kind) if f.name not in unused]
            for name, kind in records.items()
        }
        every = {f.name: f for of_record in offered.values() for f in of_record}
        named = {p.name for p in own} | {*positional}
        parameters = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        for kind_of, names in (
            (inspect.Parameter.POSITIONAL_OR_KEYWORD, positional),
            (inspect.Parameter.KEYWORD_ONLY, [name for name in every if name not in named]),
        ):
            parameters += [
                inspect.Parameter(n, kind_of, default=every[n].default, annotation=every[n].type)
                for n in names
            ]
        parameters += [
            p.replace(default=None) if p.name in records else p
            for p in own
            if p.kind is p.KEYWORD_ONLY
        ]
        public = inspect.Signature(parameters)

        @functools.wraps(init)
        def wrapped(*args: Any, **keywords: Any) -> None:
            given = public.bind(*args, **keywords).arguments
            for name, kind in records.items():
                chosen = {f.name: given.pop(f.name) for f in offered[name] if f.name in given}
                given[name] = replace(given.get(name) or kind(), **chosen)
            init(**given)

        wrapped.__signature__ = public  # type: ignore[attr-defined]
        return wrapped

    return decorate
