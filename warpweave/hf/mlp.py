"""Feed-forward modules, recognized by two or three linear layers around an activation.

    plain    y = down(act(up(x)))                 one Function, `kernels.mlp.mlp`
    gated    y = down(act(gate(x)) * up(x))       the middle is one Function, `gated_product`

The gated kernel expects gate and up interleaved, [F, 2, E]. A Hugging Face model has two weights,
and interleaving them would copy both in every step. Gated modules therefore keep their three
products, and only the part between them is fused. It keeps gate and up for the backward pass; torch
also keeps act(gate). Since the linear layers are still called, LoRA, hooks and parallel plans on
them continue to work, whether added before or after. The plain kernel reads the weights in place.
If a linear layer is no longer plain (LoRA, hooks, quantized), the original forward runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from warpweave.hf import seen
from warpweave.hf.patch import few, original
from warpweave.hf.probe import agree, noise, quietly, takes_more, tried
from warpweave.kernels.activation import activate
from warpweave.kernels.mlp import mlp
from warpweave.kernels.runtime.dispatch import once_differentiable
from warpweave.layers.linear import has_hooks

# ---------------------------------------------------------------- 1. activations

_FUNCTIONS: dict[str, Callable] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}
_PLAIN = ("gelu", "gelu_erf", "relu2")  # those of `mlp`, by the same names
_GATED = ("silu", "gelu", "gelu_erf")


def name_of(function: Callable) -> str | None:
    """The name of our activation that a function computes, or None. The function is evaluated in
    float32 on a grid, and far outside it, where clipping shows."""
    far = torch.logspace(1, 3, 41)
    x = torch.cat([torch.linspace(-8, 8, 1001), far, -far])
    with torch.no_grad():
        y = tried(function, x.clone())
    if y is not None and y.shape == x.shape:
        for name, ours in _FUNCTIONS.items():
            wanted = ours(x)
            if ((y - wanted).abs() < 5e-6 * wanted.abs().clamp(min=1)).all():
                return name
    return None


class ActivationForm(NamedTuple):
    """A module that computes one of our activations in several torch operators."""

    name: str
    live: tuple[str, ...] = ()
    fields: seen.Fields = ()

    def __str__(self) -> str:
        return f"activation, {self.name}"

    @property
    def forward(self) -> Callable:
        name = self.name
        return lambda self, input: _FUNCTIONS[name](input) if few(input) else activate(input, name)


def is_activation(module: nn.Module) -> bool:
    """Return True if a module is named like an activation and has no parts."""
    name = type(module).__name__.lower()
    named = any(word in name for word in ("activation", "gelu", "relu"))
    return named and next(module.children(), None) is None and not seen.owns_numbers(module)


def activation_of(module: nn.Module) -> ActivationForm | str:
    """The activation that a module computes, or the reason to keep the module."""
    name = name_of(module)
    if name not in _PLAIN:
        return "not one of our activations"
    with torch.enable_grad():
        node = module(torch.ones(2, requires_grad=True)).grad_fn
    one = all(hasattr(following, "variable") for following, _ in node.next_functions)
    return "one operator of torch" if one else ActivationForm(name)


# ---------------------------------------------------------------- 2. the middle of a gated module


class _GatedProduct(torch.autograd.Function):
    """h = act(gate) * up; keeps only gate and up for the backward."""

    @staticmethod
    def forward(ctx, gate, up, name):
        ctx.name = name
        ctx.save_for_backward(gate, up)
        return _FUNCTIONS[name](gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        gate, up = ctx.saved_tensors
        dup = _FUNCTIONS[ctx.name](gate).mul_(dh)
        dact = dh * up
        if ctx.name == "silu":
            dgate = torch.ops.aten.silu_backward(dact, gate)
        else:
            how = "tanh" if ctx.name == "gelu" else "none"
            dgate = torch.ops.aten.gelu_backward(dact, gate, approximate=how)
        return dgate, dup, None


def gated_product(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """act(gate) * up of one shape and dtype, differentiable once, for an activation in _GATED."""
    return _GatedProduct.apply(gate, up, name)


# ---------------------------------------------------------------- 3. modules


class MLPForm(NamedTuple):
    """The form of a feed-forward module: names of its parts, and its activation."""

    activation: str
    up: str
    down: str
    gate: str | None = None
    fused: str = ""  # "gate, up" or "up, gate" if `up` computes both
    inside: tuple[str, ...] = ()  # dropouts of the hidden units (gated only)
    after: tuple[str, ...] = ()  # dropouts at the end
    fields: seen.Fields = ()  # the fields of the configuration that it read

    def __str__(self) -> str:
        return f"mlp, {self.activation}" if self.plain else f"gated {self.activation}"

    @property
    def plain(self) -> bool:
        return self.gate is None and not self.fused

    @property
    def live(self) -> tuple[str, ...]:
        names = (self.up, self.down, self.gate, *self.inside, *self.after)
        return tuple(n for n in names if n is not None)

    @property
    def forward(self) -> Callable:
        return partial(_plain_forward if self.plain else _gated_forward, self)


def linears(module: nn.Module) -> dict[str, Any]:
    """The module's own linear layers by name."""
    return {n: c for n, c in module.named_children() if isinstance(c, (nn.Linear, Conv1D))}


def is_mlp_candidate(module: nn.Module) -> bool:
    """Return True if a module has two or three linear layers, an activation, and nothing else."""
    inner = linears(module)
    rest = [c for n, c in module.named_children() if n not in inner]
    return (
        len(inner) in (2, 3)
        and not seen.owns_numbers(module)
        and not any(seen.owns_numbers(part) for c in rest for part in c.modules())
        and len({_widths(c) for c in inner.values()}) <= 2
        and bool(_activations(module))
    )


def find_mlp_form(module: nn.Module) -> MLPForm | str:
    """The form that agrees with the module's forward, or the reason why there is none."""
    inner, more = linears(module), takes_more(module)
    if more is not None:
        return more
    if not all(map(is_plain_linear, inner.values())):
        return "quantized or wrapped linear layers"
    names = {name_of(function) for function in _activations(module)}
    if len(names) != 1 or None in names:
        return "it has several activations, or one that warpweave does not support"
    (activation,) = names
    drops = tuple(n for n, c in module.named_children() if isinstance(c, nn.Dropout))
    exact = copy.deepcopy(module).float()  # in 16 bits, a forward with a factor of 0.99 would agree
    for part in exact.modules():
        if isinstance(part, nn.Dropout):  # reveals its position, even if it is disabled
            part.p = 0.5
    for form in _forms(inner, activation, drops):
        if form.plain and activation not in _PLAIN:
            continue
        with seen.noted(exact) as fields:
            if _agrees(module, form) and _agrees(exact, form):
                return form._replace(fields=tuple(fields.items()))
    return "its forward does not match any MLP of warpweave"


def _gated_forward(form: MLPForm, module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    activation, small = _FUNCTIONS[form.activation], few(hidden_states)
    product = _product if small else lambda linear, x: linear(x)
    up = product(getattr(module, form.up), hidden_states)
    if form.gate is not None:
        gate = product(getattr(module, form.gate), hidden_states)
    else:
        gate, up = up.chunk(2, -1) if form.fused == "gate, up" else up.chunk(2, -1)[::-1]
    h = activation(gate).mul_(up) if small else gated_product(gate, up, form.activation)
    for name in form.inside:
        h = getattr(module, name)(h)
    y = product(getattr(module, form.down), h)
    for name in form.after:
        y = getattr(module, name)(y)
    return y


def _plain_forward(form: MLPForm, module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    up, down = getattr(module, form.up), getattr(module, form.down)
    if few(hidden_states):
        y = _product(down, _FUNCTIONS[form.activation](_product(up, hidden_states)))
    elif is_plain_linear(up) and is_plain_linear(down):
        y = mlp(
            hidden_states, weight_of(up), weight_of(down), up.bias, down.bias,
            activation=form.activation,
        )  # fmt: skip
    else:
        return original(module)(hidden_states)
    for name in form.after:
        y = getattr(module, name)(y)
    return y


def _product(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """linear(x) for a `few` elements, without the module call, which takes a tenth of the time."""
    if not is_plain_linear(linear):
        return linear(x)
    parameters = linear._parameters
    weight = parameters["weight"]
    return F.linear(x, weight.t() if isinstance(linear, Conv1D) else weight, parameters["bias"])


def is_plain_linear(module: Any) -> bool:
    """Return True if a module is only its weight and bias: no hook, wrapper or quantization."""
    kind = type(module)
    if kind not in (nn.Linear, Conv1D) or "forward" in module.__dict__ or has_hooks(module):
        return False
    weight = module._parameters.get("weight")
    return type(weight) in (nn.Parameter, torch.Tensor) and weight.is_floating_point()


def weight_of(linear: Any) -> torch.Tensor:
    """The weight (out, in), as a view."""
    return linear.weight.t() if isinstance(linear, Conv1D) else linear.weight


def out_features(linear: Any) -> int:
    return linear.nf if isinstance(linear, Conv1D) else linear.out_features


def _widths(module: nn.Module) -> frozenset[int]:
    """The two widths of a linear layer, as a set."""
    return frozenset(getattr(module, "weight", torch.empty(0, 0)).shape)


def _activations(module: nn.Module) -> list[Callable]:
    """The parts of a module that may be its activation."""
    inner = linears(module)
    own = {k: v for k, v in vars(module).items() if callable(v) and not isinstance(v, type)}
    own.pop("forward", None)
    children = [
        c for n, c in module.named_children()
        if n not in inner and not isinstance(c, (nn.Dropout, nn.Identity))
    ]  # fmt: skip
    return children + [v for k, v in own.items() if not k.startswith("_")]


def _forms(inner: dict[str, Any], activation: str, drops: tuple[str, ...]) -> list[MLPForm]:
    """Every possible order of linear layers with these shapes, and of dropouts."""
    out = {n: out_features(c) for n, c in inner.items()}
    into = {n: c.weight.numel() // out[n] for n, c in inner.items()}
    found = []
    for down in inner:
        width, F_ = out[down], into[down]
        others = [n for n in inner if n != down]
        if any(into[n] != width for n in others):
            continue
        if len(others) == 1 and out[others[0]] == F_:
            found.append(MLPForm(activation, others[0], down))
        elif len(others) == 1 and out[others[0]] == 2 * F_:
            orders = ("gate, up", "up, gate")
            found += [MLPForm(activation, others[0], down, fused=order) for order in orders]
        elif len(others) == 2 and all(out[n] == F_ for n in others):
            pairs = (others, others[::-1])
            found += [MLPForm(activation, up, down, gate=gate) for gate, up in pairs]
    found = [f for f in found if f.plain or activation in _GATED]
    inside = [f._replace(inside=drops) for f in found if drops and not f.plain]
    return [f._replace(after=drops) for f in found] + inside


def _agrees(module: nn.Module, form: MLPForm) -> bool:
    """Return True if a form's forward agrees with the module's, in evaluation and training."""
    up, forward = getattr(module, form.up), form.forward
    x = noise(2, 5, weight_of(up).shape[1], like=up.weight)
    for training in (False, True):
        with quietly(module, training=training):
            scale = F.linear(x, weight_of(up)).float().std().item()
        for units in (2, 30):  # magnitudes where activations bend, and where a forward may clip
            probe = x * (units / scale if scale > 0 else 1.0)
            with quietly(module, training=training):
                wanted = tried(module.forward, probe)
            with quietly(module, training=training):
                found = tried(partial(forward, module), probe)
            if wanted is None or found is None or not agree(wanted, found):
                return False
    return True
