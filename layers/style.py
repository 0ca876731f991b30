"""Architecture options of transformer families (GPT-2, Llama, Gemma, ...) as records, without
torch.

A layer takes its record whole (``style``), and so does each layer inside it: `BlockStyle` is an
`AttentionStyle`, which is a `NormStyle`, and an `MLPStyle`. ``GPTConfig`` has the same fields. For
the use of single layers they are keywords, too (``layers.keywords``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warpweave.kernels.rope_scaling import RopeScaling


@dataclass(frozen=True, kw_only=True)
class NormStyle:
    """The norms of a model.

    Attributes:
        norm: Normalization: LayerNorm, RMSNorm, or RMSNorm whose factors are 1 + weight.
        norm_eps: Epsilon of the norms.
        norm_place: Placement of the norms: before attention and MLP (pre), after both (post), or in
            both places (sandwich).
        norm_bias: Bias of LayerNorm; without, it has one as the linear layers do.
        bias: Biases of linear layers and of LayerNorm.
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
        head_size: Head dim; without, model width / heads.
        qkv_bias: Bias of the qkv projection; without, it has one as the others do.
        qk_norm: QK norm: RMSNorm of each query and key head, before the rotation.
        qk_norm_whole: QK norm over all query heads together, and over all key heads; needs qk_norm.
        attention_scale: Scale of the attention scores; without, 1 / sqrt(head dim).
        softcap: Softcap of the attention scores, softcap * tanh(score / softcap).
        sinks: Attention sinks: each query head has one more logit, learned, in its softmax, with no
            value.
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
        activation: Activation of the MLP: GELU by its tanh approximation or exact (by erf), SwiGLU,
            GELU (by tanh) as a gate, or squared ReLU.
        bias: Biases of linear layers and of LayerNorm.
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
