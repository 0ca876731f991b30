"""Architecture options of transformer families (GPT-2, Llama, Gemma, ...), as records.

A layer receives a whole record (``style``) and passes it to the layers inside it: a `BlockStyle` is
an `AttentionStyle`, which is a `NormStyle`, and an `MLPStyle`. ``GPTConfig`` has the same fields.
Layers that are used by themselves also accept the fields as keywords (``layers.keywords``). This
file does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warpweave.kernels.rope_scaling import RopeScaling


@dataclass(frozen=True, kw_only=True)
class NormStyle:
    """Options of a model's norms.

    Attributes:
        norm: Normalization: LayerNorm, RMSNorm, or RMSNorm with factors 1 + weight.
        norm_eps: Epsilon of the norms.
        norm_place: Placement of the norms: before attention and MLP (pre), after both (post), or in
            both places (sandwich).
        norm_bias: Bias of LayerNorm; if not given, the same as bias.
        bias: Biases of linear layers and of LayerNorm.

    Examples:
        >>> NormStyle(norm="rms", norm_place="sandwich").norm_eps
        1e-05
    """

    norm: Literal["layer", "rms", "rms1p"] = "layer"
    norm_eps: float = 1e-5
    norm_place: Literal["pre", "sandwich", "post"] = "pre"
    norm_bias: bool | None = None
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class HeadStyle(NormStyle):
    """The attention options that all blocks of a model share.

    Attributes:
        head_size: Head dim; if not given, model width / heads.
        qkv_bias: Bias of the qkv projection; if not given, the same as bias.
        qk_norm: QK norm: RMSNorm of each query and key head, before the rotation.
        qk_norm_whole: QK norm over all query heads together and over all key heads together;
            requires qk_norm.
        attention_scale: Scale of the attention scores; if not given, 1 / sqrt(head dim).
        softcap: Softcap of the attention scores, softcap * tanh(score / softcap).
        sinks: Attention sinks: one additional learned logit per query head in the softmax. The
            logit has no value vector.
        rope_scaling: Scaling of the rotary embedding for longer sequences; not available on the
            command line.

    Examples:
        >>> HeadStyle(head_size=128, qk_norm=True, norm="rms").softcap is None
        True
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
    """Options of one block's attention.

    Attributes:
        num_kv_heads: number of key and value heads; None means as many as query heads.
        causal: a query sees only keys at its own and earlier positions.
        window: sliding window: a query sees only keys fewer than `window` positions away.
        rope_theta: base of the rotary embedding; None means no rotary embedding.

    Examples:
        >>> from warpweave import Attention
        >>> attention = Attention(64, 8, style=AttentionStyle(num_kv_heads=2, window=8))
    """

    num_kv_heads: int | None = None
    causal: bool = True
    window: int | None = None
    rope_theta: float | None = None


@dataclass(frozen=True, kw_only=True)
class MLPStyle:
    """Options of a block's MLP.

    Attributes:
        activation: Activation of the MLP: GELU (tanh approximation), exact GELU (erf), SwiGLU,
            GeGLU (tanh approximation), or squared ReLU.
        bias: Biases of linear layers and of LayerNorm.

    Examples:
        >>> from warpweave import MLP
        >>> mlp = MLP(64, 256, style=MLPStyle(activation="swiglu", bias=False))
    """

    activation: Literal["gelu", "gelu_erf", "swiglu", "geglu", "relu2"] = "gelu"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class BlockStyle(AttentionStyle, MLPStyle):
    """Options of one block.

    Attributes:
        dropout: dropout probability of both branches. Masks are keyed by global token ids, so
            dropout requires a TokenContext.

    Examples:
        >>> from warpweave import TransformerBlock
        >>> style = BlockStyle(norm="rms", activation="swiglu", rope_theta=10000.0, bias=False)
        >>> block = TransformerBlock(64, 8, 256, style=style)
    """

    dropout: float = 0.0
