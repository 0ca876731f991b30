"""Hooks and forwards that users put on a model that is spread over ranks: right, or refused.

What a module computes on one rank may be a part: some of the tokens, heads or hidden units. A hook
on it, or a forward in the place of its own, would see that part. So `Untouched` compares hooks and
forwards with those that `apply` left, before each forward:

    a layer                 its hooks see whole tokens, see `Tokens.forwards`
    inside a layer          refused where tokens are sharded
    inside a sharded part   (attention, feed-forward) refused over tensor ranks
    a sharded part          its backward hooks are refused: gradients are summed before them
    embedding and head      their hooks see whole outputs

New forwards are refused wherever a module computes a part. Hooks that only move parameters, as of
`fully_shard`, are let through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from warpweave.changes import changes_of
from warpweave.hf import seen
from warpweave.hf.options import Spread
from warpweave.hf.plan import Tokens
from warpweave.hf.structure import CutPart

_BACKWARD = ("_backward_hooks",)
_REVERT = "call warpweave.hf.revert first, or do it before apply(mesh=...) on one device"


class _Own(NamedTuple):
    """A module that computes a part, as `apply` left it.

    Attributes:
        hooks: the kinds of hooks that would see the part.
        part: what it computes, in an error.
        kind, of_class: its class and the forward of that.
        forward: its own forward, or None.
    """

    name: str
    hooks: tuple[str, ...]
    part: str
    kind: type
    of_class: Callable
    forward: Any


class Untouched:
    """Watches hooks and forwards of a spread model.

    Args:
        model: the model, spread.
        layers: its layers, in order.
        parts: its attention and feed-forward modules that are sharded.
        styled: its modules with sharded parameters.
    """

    def __init__(
        self, model: Any, layers: list[nn.Module], parts: list[CutPart],
        styled: Collection[nn.Module], tokens: Tokens, spread: Spread,
    ) -> None:  # fmt: skip
        self.layers, self.tokens = layers, tokens
        names = {m: n for n, m in model.named_modules()}
        found: dict[nn.Module, tuple[tuple[str, ...], str]] = {}
        for module in styled:  # embedding and head; those of parts follow
            found[module] = (), "rows"
        for part in parts if spread.mesh.size("tp") > 1 else ():
            inner = dict.fromkeys(part.module.modules(), (seen.HOOKS, "heads or hidden units"))
            found |= inner | {part.module: (_BACKWARD, "heads or hidden units")}
        if tokens.divisor > 1:
            for layer in layers:
                found |= dict.fromkeys(layer.modules(), (seen.HOOKS, "tokens"))
                found[layer] = (), "tokens"
        self.own: dict[nn.Module, _Own] = {}
        for module, (hooks, what) in found.items():
            kind, forward = type(module), module.__dict__.get("forward")
            self.own[module] = _Own(names[module], hooks, what, kind, kind.forward, forward)
        self.stack, self.list = _stack(model, layers)
        # A wrapper, as peft's, calls the model's forward, and passes over hooks of the model.
        where = self.stack if self.stack is not model else layers[0]
        changes_of(where).hooks.append(where.register_forward_pre_hook(self._check))
        if tokens.divisor > 1:
            changes_of(self.stack).hooks += [
                self.stack.register_forward_pre_hook(self._enter, with_kwargs=True),
                self.stack.register_forward_hook(self._leave),
            ]

    def _check(self, module: nn.Module, args: tuple) -> None:
        """A pre-hook of the module that calls the layers, or of the first layer."""
        everywhere = seen.hooked_everywhere()
        if everywhere is not None and self.own:
            raise ValueError(
                f"a {everywhere} would see one rank's part of {type(self.stack).__name__}: "
                f"{_REVERT}"
            )
        for module, own in self.own.items():
            hook = seen.hooked(module, own.hooks)
            if hook is not None:
                raise ValueError(
                    f"{own.name}: a {hook} would see one rank's {own.part}: hook the layer that "
                    f"holds the module, or {_REVERT}"
                )
            same = type(module) is not own.kind or own.kind.forward is own.of_class
            forward = module.__dict__.get("forward")
            if (forward is not own.forward and seen.is_from_outside(forward)) or not same:
                raise ValueError(
                    f"{own.name}: its forward was replaced, and would compute with one rank's "
                    f"{own.part}: {_REVERT}"
                )

    def _enter(self, stack: Any, args: tuple, kwargs: dict) -> None:
        """A pre-hook of the module that calls the layers."""
        found = [*getattr(stack, self.list)]
        if len(found) != len(self.layers) or any(a is not b for a, b in zip(found, self.layers)):
            raise ValueError(
                f"{type(stack).__name__}.{self.list}: expected the {len(self.layers)} layers that "
                f"apply(mesh=...) found, got {len(found)}: call warpweave.hf.revert, change the "
                "layers, and apply again"
            )
        self.tokens.inside = False
        config = getattr(stack, "config", None)
        asked = kwargs.get("output_hidden_states")
        asked = getattr(config, "output_hidden_states", False) if asked is None else asked
        self.tokens.asked = {"hidden_states"} if asked else set()

    def _leave(self, stack: nn.Module, args: tuple, out: Any) -> None:
        """A hook of the module that calls the layers."""
        if self.tokens.inside:
            self.tokens.inside = False
            raise ValueError(
                f"{type(stack).__name__}: its forward did not reach the last of {len(self.layers)} "
                "layers, where tokens are gathered: call warpweave.hf.revert, change the number of "
                "layers, and apply again"
            )


def _stack(model: nn.Module, layers: list[nn.Module]) -> tuple[nn.Module, str]:
    """The module that holds the list of layers, and the name of that list."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and [*child] == layers:
                return module, name
    raise AssertionError("the layers are those of a list")


# ---------------------------------------------------------------- what cannot follow


def refuse_copies(model: Any, modules: Collection[nn.Module], spread: Spread) -> None:
    """Refuse to copy or pickle the model and these modules of it, which hold connections to other
    ranks, and to resize its embeddings."""
    for module in modules:
        refuse = partial(_refuse_copy, type(module).__name__, str(spread.mesh.sizes))
        changes_of(module).set(module, "__reduce_ex__", refuse)
    before = model.get_input_embeddings()
    rows = before.num_embeddings if isinstance(before, nn.Embedding) else None

    def resize(model: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Transformers' own, of as many tokens as there are."""
        if new_num_tokens in (None, rows) and not (args or kwargs.get("pad_to_multiple_of")):
            return model.get_input_embeddings()
        raise ValueError(
            f"{type(model).__name__} is spread over {spread.mesh.sizes}: its {rows} embeddings "
            f"cannot be resized to {new_num_tokens}: call warpweave.hf.revert, resize, and apply "
            "again"
        )

    changes_of(model).set(model, "resize_token_embeddings", MethodType(resize, model))


def _refuse_copy(kind: str, mesh: str, protocol: int) -> Any:
    raise ValueError(
        f"{kind} is spread over {mesh} and holds connections to other ranks, which are neither "
        "copied nor pickled: use save_pretrained or state_dict, or call warpweave.hf.revert first"
    )
