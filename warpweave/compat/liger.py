"""The modules of Liger-Kernel, with the same arguments, parameter names and meaning.

    from warpweave.compat.liger import LigerRMSNorm      # was: from liger_kernel.transformers

State dicts can be loaded in both directions. The differences are:

* Every kernel here computes in float32 and rounds once, at the store. `casting_mode`, which tells
  Liger when to round, has no effect (nor would it matter for float32 and float64).
* Losses are float32 for half-precision logits.
* No input is ever overwritten, so `in_place` saves no memory.
* A mean over zero labels is 0.
* A requested `bias` of `LigerLayerNorm` starts at 0, not at random values.

Anything that a kernel does not support raises ValueError naming the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpweave.kernels.cross_entropy import cross_entropy, linear_cross_entropy
from warpweave.kernels.mlp import mlp
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.rope import apply_rope_qk
from warpweave.layers.linear import fusable
from warpweave.parallel.tensor import vocab_parallel_linear_cross_entropy


def _initial(init_fn: str, size: int) -> Tensor:
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f'init_fn must be "ones" or "zeros", got {init_fn!r}')
    return torch.ones(size) if init_fn == "ones" else torch.zeros(size)


class LigerRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dim.

    Args:
        hidden_size, eps, offset: E, epsilon, and the offset, which is 1 for Gemma, with
            ``init_fn="zeros"``.
        casting_mode: "llama", "gemma" or "none", see above.
        init_fn: initialization of the weight, "ones" or "zeros".
        in_place, row_mode: Liger's use of memory and blocks; no effect here.
        elementwise_affine: if False, there is no weight; it counts as 1 - offset.

    Examples:
        >>> LigerRMSNorm(64)(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        if casting_mode not in ("llama", "gemma", "none"):
            raise ValueError(
                f'casting_mode must be "llama", "gemma" or "none", got {casting_mode!r}'
            )
        self.hidden_size, self.variance_epsilon, self.offset = hidden_size, eps, offset
        self.casting_mode, self.in_place, self.row_mode = casting_mode, in_place, row_mode
        self.elementwise_affine = elementwise_affine
        weight = _initial(init_fn, hidden_size)
        self.weight: nn.Parameter | None
        self.register_parameter("weight", nn.Parameter(weight) if elementwise_affine else None)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """x[..., E] -> y[..., E]."""
        if self.weight is None:
            scale = hidden_states.new_ones(self.hidden_size)
        elif self.offset:  # 1.003 is not a bfloat16 number
            scale = self.weight.to(compute_dtype(self.weight)) + self.offset
        else:
            scale = self.weight
        return cast(Tensor, rms_norm(hidden_states, scale, self.variance_epsilon))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}, offset={self.offset}"


class LigerLayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim.

    Like Liger's, it always has a trained `bias`, whether or not one is requested. The bias starts
    at 0, like that of `nn.LayerNorm`.

    Examples:
        >>> LigerLayerNorm(64)(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = nn.Parameter(_initial(init_fn, hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """x[..., E] -> y[..., E]."""
        eps = self.variance_epsilon
        return cast(Tensor, layer_norm(hidden_states, self.weight, self.bias, eps))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"


class _GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)), without biases. Sizes are the config's hidden_size
    and intermediate_size. A layer that is replaced, wrapped or hooked is called instead of
    fused."""

    _activation: str
    _names: tuple[str, ...]
    _act: Callable[[Tensor], Tensor]

    def __init__(self, config: Any) -> None:
        super().__init__()
        named = [n for n in ("hidden_activation", "hidden_act") if hasattr(config, n)]
        if not named:
            raise ValueError("the config has neither hidden_act nor hidden_activation")
        act = next((value for n in named if (value := getattr(config, n))), None)
        if act is not None and act not in self._names:  # None is the family's default
            raise ValueError(f"hidden_act must be one of {', '.join(self._names)}, got {act!r}")
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., E] -> y[..., E]. The kernel expects gate and up in one tensor, which is created in
        every call. That copies 2 F E elements, compared with 6 F E FLOPs for each token."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if not all(fusable(module, nn.Linear) for module in (gate, up, down)):
            return down(self._act(gate(x)) * up(x))
        pairs = torch.stack((gate.weight, up.weight), 1)
        return mlp(x, pairs, down.weight, activation=self._activation)


class LigerSwiGLUMLP(_GatedMLP):
    """The gated MLP with SiLU; `config.hidden_act` is "silu" or "swish".

    Examples:
        >>> from transformers import LlamaConfig
        >>> mlp = LigerSwiGLUMLP(LlamaConfig(hidden_size=64, intermediate_size=128))
        >>> mlp(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    _activation, _names, _act = "swiglu", ("silu", "swish"), staticmethod(F.silu)


class LigerGEGLUMLP(_GatedMLP):
    """The gated MLP with the tanh approximation of GELU.

    ``hidden_act="gelu"``, which transformers computes with erf, is refused, because Liger would use
    the approximation for it.

    Examples:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=64, hidden_act="gelu_pytorch_tanh")
        >>> LigerGEGLUMLP(config)(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    _activation, _names = "geglu", ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_tanh")
    _act = staticmethod(partial(F.gelu, approximate="tanh"))


@dataclass
class CrossEntropyOutput:
    """A loss together with additional outputs; outputs that were not requested are None.

    Attributes:
        loss: 0-dim, or losses[N].
        z_loss: always None here.
        token_accuracy: the share of labels that have the largest logit, float32, 0-dim. For the
            reduction "none", 1 or 0 for each token, and 0 for ignored ones.
        predicted_tokens: int64[N], the class of the largest logit, -1 for ignored tokens.

    Examples:
        >>> from warpweave.compat.liger import LigerCrossEntropyLoss
        >>> loss = LigerCrossEntropyLoss(return_token_accuracy=True)
        >>> loss(torch.eye(16), torch.arange(16)).token_accuracy
        tensor(1.)
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class _Loss(nn.Module):
    """Base class with the options of both losses."""

    def __init__(
        self,
        weight: Tensor | None,
        ignore_index: int,
        lse_square_scale: float,
        label_smoothing: float,
        reduction: str,
        softcap: float | None,
        return_z_loss: bool,
        return_token_accuracy: bool,
        return_predicted_tokens: bool,
    ) -> None:
        super().__init__()
        _refuse_because("the kernel returns one sum", return_z_loss=return_z_loss)
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be in 0..1, got {label_smoothing}")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
        if weight is not None and (label_smoothing or lse_square_scale):
            other = "label_smoothing" if label_smoothing else "lse_square_scale"
            raise ValueError(f"class weights cannot be combined with {other} in this kernel")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap must be positive or None, got {softcap}")
        self.ignore_index, self.lse_square_scale = ignore_index, lse_square_scale
        self.label_smoothing, self.reduction, self.softcap = label_smoothing, reduction, softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def _returned(
        self, loss: Tensor, target: Tensor, predict: Callable[[], Tensor]
    ) -> Tensor | CrossEntropyOutput:
        """The loss with any requested outputs, from each token's predicted class by `predict`."""
        if not self.return_token_accuracy and not self.return_predicted_tokens:
            return loss
        with torch.no_grad():
            valid = target != self.ignore_index
            predicted = predict().masked_fill(~valid, -1)
            right = (predicted == target) & valid
            accuracy = right.float()
            if self.reduction != "none":
                accuracy = (right.sum() / valid.sum().clamp(min=1)).float()
        return CrossEntropyOutput(
            loss,
            token_accuracy=accuracy if self.return_token_accuracy else None,
            predicted_tokens=predicted if self.return_predicted_tokens else None,
        )

    @property
    def _options(self) -> dict:
        return {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.lse_square_scale,
        }

    def _weighted(self, losses: Tensor, target: Tensor, weight: Tensor, classes: int) -> Tensor:
        """Reduce losses[N] times the weight[V] of their class; a mean divides by these weights."""
        if weight.shape != (classes,):
            raise ValueError(f"weight must be [{classes}], one per class, got {[*weight.shape]}")
        valid = target != self.ignore_index
        scale = weight.to(losses.device, losses.dtype)[target.masked_fill(~valid, 0)] * valid
        losses = losses * scale
        if self.reduction == "none":
            return losses
        total, weights = losses.sum(), scale.sum()
        return total / torch.where(weights > 0, weights, 1) if self.reduction == "mean" else total


def _check_labels(rows: Tensor, target: Tensor) -> None:
    if rows.ndim != 2 or target.shape != rows.shape[:1]:
        raise ValueError(
            f"_input must be [tokens, size] and target [tokens], got {[*rows.shape]} and "
            f"{[*target.shape]}; flatten them"
        )


def _refuse_because(reason: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} = {value} is not supported: {reason}")


class LigerCrossEntropyLoss(_Loss):
    """Cross entropy of logits, with z-loss, label smoothing, softcap or class weights.

    Args:
        weight: class weights [V]; not with `label_smoothing` or `lse_square_scale`.
        ignore_index, label_smoothing, reduction: as for `F.cross_entropy`.
        lse_square_scale: adds this factor times the square of the log-sum-exp to each token's loss.
        softcap: logits become softcap * tanh(logits / softcap), in a float32 copy.
        return_token_accuracy, return_predicted_tokens: return a `CrossEntropyOutput`, which
            requires reading the logits once more.
        return_z_loss: not supported, because the kernel returns a single sum.

    Examples:
        >>> loss = LigerCrossEntropyLoss(label_smoothing=0.1)
        >>> loss(torch.randn(16, 256), torch.arange(16)).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__(
            weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
            return_z_loss, return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
        self.weight = weight

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        """logits[N, V] and labels int64[N] -> the loss (0-dim) or losses[N]."""
        _check_labels(_input, target)
        if self.softcap is not None:
            _input = _input.to(compute_dtype(_input))
            _input = self.softcap * torch.tanh(_input / self.softcap)
        if self.weight is None:
            loss = cross_entropy(_input, target, reduction=self.reduction, **self._options)
        else:
            losses = cross_entropy(_input, target, reduction="none", **self._options)
            loss = self._weighted(losses, target, self.weight, _input.shape[1])
        return self._returned(loss, target, lambda: _input.argmax(1))


class LigerFusedLinearCrossEntropyLoss(_Loss):
    """Cross entropy of the logits `_input lin_weight^T`, which are never held all at once.

    Args:
        ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction: as for
            `LigerCrossEntropyLoss` (`ce_weight` is its `weight`).
        accum_dtype: dtype for summing the weight's gradient: always float32 here (float64 for
            float64); anything else is refused.
        softcap: as for ``LigerCrossEntropyLoss``, computed for some rows at a time; the backward
            recomputes their logits.
        return_token_accuracy, return_predicted_tokens: return a `CrossEntropyOutput`, which
            requires computing the logits once more, for some rows at a time.
        return_z_loss, use_token_scaling: not supported.

    Examples:
        >>> loss, head = LigerFusedLinearCrossEntropyLoss(), torch.randn(256, 64)
        >>> loss(head, torch.randn(16, 64), torch.arange(16)).shape
        torch.Size([])
    """

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__(
            ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
            return_z_loss, return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
        _refuse_because(
            "losses are not scaled by predicted probability", use_token_scaling=use_token_scaling
        )
        if accum_dtype is not torch.float32:
            _refuse_because("gradients are summed in float32", accum_dtype=accum_dtype)
        self.ce_weight, self.accum_dtype = ce_weight, accum_dtype
        self.use_token_scaling = use_token_scaling

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """lin_weight[V, E], hidden states[N, E], labels int64[N] and optionally a bias[V] -> the
        loss (0-dim) or losses[N].

        With a bias, the weight is copied to add a column.
        """
        _check_labels(_input, target)
        if bias is not None:
            if bias.shape != lin_weight.shape[:1]:
                raise ValueError(f"bias must be [{len(lin_weight)}], got {[*bias.shape]}")
            _input = torch.cat((_input, _input.new_ones(len(_input), 1)), 1)
            lin_weight = torch.cat((lin_weight, bias[:, None].to(lin_weight.dtype)), 1)
        if self.ce_weight is not None:
            losses = self._losses(_input, lin_weight, target, "none")
            loss = self._weighted(losses, target, self.ce_weight, len(lin_weight))
        else:
            loss = self._losses(_input, lin_weight, target, self.reduction)
        return self._returned(loss, target, lambda: _largest(_input, lin_weight))

    def _losses(self, x: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        if self.softcap is None:
            return linear_cross_entropy(x, weight, target, reduction=reduction, **self._options)
        whole = {"group": None, "vocab_size": len(weight), "softcap": self.softcap}
        kind = "sum" if reduction == "mean" else reduction
        loss = vocab_parallel_linear_cross_entropy(
            x, weight, target, reduction=kind, **whole, **self._options
        )
        valid = (target != self.ignore_index).sum().clamp(min=1)
        return loss / valid if reduction == "mean" else loss


def _largest(x: Tensor, weight: Tensor) -> Tensor:
    """int64[N], the row of weight[V, E] that has the largest product with each row of x[N, E]. At
    most 2^26 products are held at a time."""
    rows = x.split(max(1, 2**26 // len(weight)))
    return torch.cat([F.linear(part, weight.to(x.dtype)).argmax(1) for part in rows])


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Rotate q[B, H, S, D] and k[B, Hkv, S, D] in pairs (i, i + D/2).

    Args:
        cos, sin: [S, D] or [1 or B, S, D]; the second half of D repeats the first, as in
            transformers.
        position_ids: unused, as in Liger: cos and sin are already those of the positions.
        unsqueeze_dim: the dim of the heads: 1, or 2 for q[B, S, H, D] (with transformers' meaning).

    Returns both in q's layout. Raises ValueError for shapes that do not fit.

    Examples:
        >>> angles = torch.rand(16, 4).repeat(1, 2)
        >>> q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
        >>> q, k = liger_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim must be 1 or 2, got {unsqueeze_dim}")
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must have four dims, got {[*q.shape]} and {[*k.shape]}")
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    (B, S, _, D) = q.shape
    cos, sin = (table[None] if table.ndim == 2 else table for table in (cos, sin))
    if cos.shape not in ((1, S, D), (B, S, D)) or sin.shape != cos.shape:
        raise ValueError(
            f"cos and sin must have shape {[S, D]}, {[1, S, D]} or {[B, S, D]}, got {[*cos.shape]} "
            f"and {[*sin.shape]}"
        )
    tables = [table[..., : D // 2].flatten(0, 1) for table in (cos, sin)]
    if len(cos) == 1:
        q, k = apply_rope_qk(q, k, *tables)
    else:  # each sample has its own positions: concatenate the samples to one sequence
        one = apply_rope_qk(*(x.flatten(0, 1)[None] for x in (q, k)), *tables)
        q, k = (y.view(B, S, *y.shape[2:]) for y in one)
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)
