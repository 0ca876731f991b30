"""The sharding plan of a Hugging Face model: a parallel style for each module.

`warpweave.hf.parallel` derives such a plan, {module: style}, from a model. `warpweave.hf.styles`
registers the same styles with transformers as values of a `tp_plan`. Linear layers have the styles
of `warpweave.layers.sharding`, with sharded tokens of x[B, S, E] if requested. The other styles are
for whole modules.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from warpweave.hf import seen
from warpweave.hf.arguments import cache_of, check_whole, note_part
from warpweave.hf.mlp import Conv1D
from warpweave.layers.sharding.styles import ColwiseParallel, Group, RowwiseParallel
from warpweave.parallel.collectives import (
    all_gather,
    copy_to,
    gather,
    group_size,
    own_slice,
    scatter,
)
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.tensor import column_parallel_linear


class Tokens:
    """The tokens of the residual stream between the first layer and the last, x[B, S, E].

    They are sharded over the context ranks, in a zigzag layout, and with sequence parallelism also
    over the tensor ranks. Without gradients they may be replicated: see `cut`.

    Args:
        tp, cp: the tensor and context ranks, None for one rank.
        sequence_parallel: also shard tokens over `tp`.
        need: the name, in an error, of what requires a length divisible by the ranks.
        always: shard tokens in every call, or raise ValueError if that is not possible.
    """

    def __init__(
        self, tp: Group, cp: Group, *, sequence_parallel: bool, need: str = "this mesh",
        always: bool = False,
    ) -> None:  # fmt: skip
        self.tp, self.cp, self.sequence_parallel = tp, cp, sequence_parallel
        self.need, self.always = need, always
        self.active = False  # True if the current forward shards tokens
        self.layers: list[Any] = []  # tokens are sharded between these layers
        self.whole: set[int] = set()  # numbers of layers, other than 0, that whole tokens enter
        self.asked: set[str] = set()  # outputs of layers that the model's caller requests
        self.inside = False  # True if tokens were sharded, but not yet gathered after the last

    @property
    def divisor(self) -> int:
        """The number by which the number of tokens must be divisible."""
        tp, cp = group_size(self.tp) if self.sequence_parallel else 1, group_size(self.cp)
        return tp * cp * (2 if cp > 1 else 1)

    def are_cut(self) -> bool:
        """Return True if tokens are sharded now. Recomputed layers run under gradients, but without
        passing through the first layer."""
        return self.always or (self.divisor > 1 and (self.active or torch.is_grad_enabled()))

    def dim(self, module: nn.Module, x: torch.Tensor) -> int | None:
        """The dim of a module's x[B, S, ...] that is sharded over the tensor ranks, or None. Raises
        ValueError unless x has three dims, since dim 1 would not be the sequence."""
        if not (self.sequence_parallel and self.are_cut()):
            return None
        if x.ndim != 3:
            raise ValueError(
                f"{type(module).__name__}: x{[*x.shape]} has {x.ndim} dims, but sequences "
                "are sharded along dim 1 of a 3-D tensor; remove this module from the tp_plan, or "
                "do not shard sequences"
            )
        return 1

    def layout(self, length: int) -> SequenceLayout:
        """The layout of `length` tokens on the context ranks."""
        return SequenceLayout(length, group_size(self.cp))

    def cut(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Shard the tokens that enter the first layer, or return None to leave them whole.

        Without gradients, they stay whole if their number is not divisible by the ranks, or if
        there is a cache, which must receive the keys and values of all tokens. Raises ValueError
        for a cache that is not whole or not known, see `cache_of`.
        """
        x, put = hidden_states(layer, args, kwargs)
        n, learns = self.divisor, torch.is_grad_enabled()
        fits = x.shape[1] % n == 0
        if not fits and (learns or self.always):
            raise ValueError(
                f"the number of tokens must be divisible by {n} for {self.need}, got {x.shape[1]}; "
                f"pad the batch (pad_to_multiple_of={n})"
            )
        cache = None if self.always else cache_of(layer, args, kwargs)
        if not learns:
            check_whole(layer, cache)
        self.active = fits and (learns or cache is None)
        if not (self.active or self.always):
            return None
        if cache is not None and self.cp is not None:
            note_part(cache)
        return put(self.shard(x))

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of x[B, S, E]."""
        if self.cp is not None:
            layout = self.layout(x.shape[1])
            shards = [layout.shard(x, rank, dim=1) for rank in range(layout.parts)]
            x = scatter(torch.cat(shards, 1), self.cp, dim=1)
        return scatter(x, self.tp, dim=1) if self.sequence_parallel else x

    def join(self, layer: nn.Module, args: tuple, out: Any) -> Any:
        """Gather all tokens in a layer's output. Return None if they are not sharded."""
        if not self.are_cut():
            return None
        x = out[0] if isinstance(out, tuple) else out
        if self.sequence_parallel:
            x = gather(x, self.tp, dim=1)
        if self.cp is not None:
            x = gather(x, self.cp, dim=1)
            layout = self.layout(x.shape[1])
            x = layout.unshard(x.chunk(layout.parts, 1), dim=1)
        return (x, *out[1:]) if isinstance(out, tuple) else x

    # ------------------------------------------------------------ between layers

    def forwards(self, layers: list[Any]) -> list[MethodType]:
        """New forwards of the layers, which pass sharded tokens to each other.

        Whole tokens enter the first layer and leave the last. They also enter and leave a layer
        with hooks of other code, and every layer if hidden states are requested, so hooks and
        requests see the same as on one device. Tokens are sharded inside the forward, out of reach
        of hooks.
        """
        self.layers = layers
        return [MethodType(self._forward_of(n, layer), layer) for n, layer in enumerate(layers)]

    def _forward_of(self, n: int, layer: Any) -> Callable:
        own = layer.__dict__.get("forward")

        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            given = args, kwargs
            if n == 0:
                args, kwargs = self.cut(layer, *given) or given
                if not seen.in_backward():
                    self._decide(given[1])
            elif n in self.whole and self.are_cut():
                x, put = hidden_states(layer, *given)
                args, kwargs = put(self.shard(x))
            # A class that is set later, for example by `fully_shard`, has its own forward.
            run = own or MethodType(type(layer).forward, layer)
            out = run(*args, **kwargs)
            last = n + 1 == len(self.layers)
            joined = self.join(layer, args, out) if last or n + 1 in self.whole else None
            self.inside = self.inside and not last
            return out if joined is None else joined

        return forward

    def _decide(self, kwargs: dict) -> None:
        """Decide, once per forward, which layers whole tokens enter."""
        self.whole, self.inside = set(), self.are_cut()
        if not self.inside:
            return
        given = {name for name in _PER_TOKEN if kwargs.get(f"output_{name}")}
        asked = seen.requested() | given | self.asked
        if others := sorted(asked - {_STATES}):
            raise ValueError(
                f"{type(self.layers[0]).__name__}: with cp or sequence_parallel, each rank has "
                f"{', '.join(others)} only for its own tokens; do not request layer outputs other "
                "than hidden_states"
            )
        for n, layer in enumerate(self.layers):
            if asked or seen.hooked(layer):
                self.whole |= {n, n + 1}


# Outputs of layers with one number or row per token, by transformers' names.
_STATES = "hidden_states"
_PER_TOKEN = {_STATES, "router_logits", "router_probs"}


def hidden_states(module: nn.Module, args: tuple, kwargs: dict) -> tuple[torch.Tensor, Callable]:
    """The hidden states among a call's arguments, and a function that replaces them there."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0], lambda x: ((x, *args[1:]), kwargs)
    x = kwargs.get("hidden_states")
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{type(module).__name__}: its forward got no hidden_states")
    return x, lambda x: (args, {**kwargs, "hidden_states": x})


class Column(ColwiseParallel):
    """A column-parallel linear layer of x[B, S, E], whose tokens may be sharded. With `inside`, the
    enclosing module has already gathered x, see `take_input`. The output features are `blocks`
    equal blocks, each of which is sharded; with several blocks, the bias is replicated."""

    def __init__(
        self, tokens: Tokens, *, inside: bool = False, blocks: int = 1, **options: Any
    ) -> None:
        super().__init__(**options)
        self.tokens, self.inside, self.blocks = tokens, inside, blocks

    def placement(self, module: Any, name: str) -> Placement:
        dim = 1 if name == "weight" and isinstance(module, Conv1D) else 0
        if self.blocks == 1:
            return Shard(dim)
        return Replicate() if name == "bias" else _StridedShard(dim, split_factor=self.blocks)

    def compute(self, module: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        if self.inside:
            w, b = self.weight(module), self.bias(module, group)
            return column_parallel_linear(x, w, b, group=None)
        return self._multiply(module, x, group, self.tokens.dim(module, x), -1)

    def weight(self, module: Any) -> torch.Tensor:
        return _out_in(module, super().weight(module))

    def bias(self, module: Any, group: Group) -> torch.Tensor | None:
        b = super().bias(module, group)
        return b if b is None or self.blocks == 1 else rows_of_blocks(b, group, self.blocks)


class Row(RowwiseParallel):
    """A row-parallel linear layer to y[B, S, E], whose tokens may be sharded."""

    def __init__(self, tokens: Tokens, **options: Any) -> None:
        super().__init__(**options)
        self.tokens = tokens

    def placement(self, module: Any, name: str) -> Placement:
        transposed = name == "weight" and isinstance(module, Conv1D)
        return Shard(0) if transposed else super().placement(module, name)

    def compute(self, module: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return self._multiply(module, x, group, -1, self.tokens.dim(module, x))

    def weight(self, module: Any) -> torch.Tensor:
        return _out_in(module, super().weight(module))


def rows_of_blocks(x: torch.Tensor, group: Group, blocks: int) -> torch.Tensor:
    """This rank's rows of a replicated tensor: its share of each of several equal blocks."""
    return torch.cat([own_slice(block, group) for block in x.chunk(blocks)])


def _out_in(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """A linear layer's weight as (out, in), including GPT-2's."""
    return weight.t() if isinstance(module, Conv1D) else weight


def take_input(tokens: Tokens, module: nn.Module, x: torch.Tensor, group: Group) -> torch.Tensor:
    """Prepare x[B, S, E] once for all column-parallel layers of a module. Sharded tokens are
    all-gathered once, and the gradient is summed over the ranks once."""
    return copy_to(x, group) if tokens.dim(module, x) is None else all_gather(x, group, dim=1)
