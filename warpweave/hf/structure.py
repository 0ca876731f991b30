"""The parts of a model that tensor ranks can share, derived from what it computes (`find_parts`).

attention     linear layers before the call of the attention function are columns, and the one after
              it is the row. Gradients show which features belong to which head. A norm of all heads
              at once is sharded with the column before it, and per-head sinks with the heads
feed-forward  the forms of `warpweave.hf.mlp`: gate and up are columns, down is the row
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from warpweave.hf import attention, mlp, norm
from warpweave.hf.probe import kind_of, noise, quietly


class CutPart(NamedTuple):
    """A module to be sharded, and its linear layers. `columns` are the column-parallel layers, each
    with the number of equal blocks of its features (3 if queries, keys and values are
    concatenated); each block is sharded."""

    kind: str  # "attention" or "mlp"
    module: nn.Module
    columns: dict[nn.Module, int]
    row: nn.Module
    norms: tuple[nn.Module, ...] = ()  # as wide as a column
    sinks: nn.Parameter | None = None  # the module's own parameter with one number per head

    @property
    def takes_once(self) -> bool:
        """True if x is gathered or copied once for all columns, not by a single column."""
        return self.kind == "attention" or len(self.columns) > 1

    @property
    def width(self) -> int:
        """Features of a block before sharding."""
        return min(mlp.out_features(c) // blocks for c, blocks in self.columns.items())


def find_parts(
    model: nn.Module, inputs: dict[str, torch.Tensor], ranks: int
) -> tuple[list[CutPart], dict[str, str]]:
    """The modules of an applied model that `ranks` can share, in order. Also returns the
    feed-forward modules that cannot be sharded, by name with the reason. Raises ValueError, naming
    module and reason, if an attention cannot be sharded."""
    names = {module: name for name, module in model.named_modules()}
    calls = _attention_calls(model, inputs)
    if not calls:
        raise ValueError(f"{type(model).__name__}: no warpweave attention to shard over ranks")
    found = {}
    for module, call in calls.items():
        try:
            found[module] = _attention_part(module, call, ranks)
        except ValueError as error:
            raise ValueError(f"{names.get(module) or type(module).__name__}: {error}") from None
    kept, forms = {}, {}
    for module, name in names.items():
        if not mlp.is_mlp_candidate(module):
            continue
        if (kind := kind_of(module)) not in forms:
            forms[kind] = mlp.find_mlp_form(module)
        form = forms[kind]
        if isinstance(form, str):
            kept[name] = form
            continue
        blocks = 2 if form.fused else 1
        columns = {getattr(module, n): blocks for n in (form.gate, form.up) if n is not None}
        part = CutPart("mlp", module, columns, getattr(module, form.down))
        if part.width % ranks:
            raise ValueError(f"{name}: {part.width} hidden units are not divisible by tp ({ranks})")
        found[module] = part
    return [found[m] for m in names if m in found], kept


# ---------------------------------------------------------------- attention


class _Call(NamedTuple):
    args: tuple
    kwargs: dict[str, Any]


def _attention_calls(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[nn.Module, _Call]:
    """The modules that call the attention, with the arguments that they received."""
    seen: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen[module] = _Call(args, kwargs)

    with ExitStack() as hooks, quietly(model), attention.callers(model) as callers:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        model(**inputs, use_cache=False)
    return {module: seen[module] for module in callers if module in seen}


def _attention_part(module: nn.Module, call: _Call, ranks: int) -> CutPart:
    """The part for a module that calls the attention once; observes one more call of it."""
    linears = [m for m in module.modules() if isinstance(m, (nn.Linear, mlp.Conv1D))]
    if not all(map(mlp.is_plain_linear, linears)):
        raise ValueError("its linear layers are quantized, wrapped or hooked")
    wide = _wide_norms(module, linears)
    before: dict[nn.Module, torch.Tensor] = {}
    after: dict[nn.Module, torch.Tensor] = {}
    normed: dict[nn.Module, nn.Module] = {}  # by the column before it
    seen: list[tuple[torch.Tensor, ...]] = []

    def note(part: nn.Module, args: tuple, y: torch.Tensor) -> torch.Tensor:
        if seen:
            after[part] = args[0].detach()
            return y
        if part in wide:
            normed.update((c, part) for c, x in before.items() if x is args[0])
        before[part] = y.detach().requires_grad_()
        return before[part]

    watch = attention.watched(module, lambda _, *x: seen.append(x))
    with ExitStack() as hooks, quietly(module), torch.enable_grad(), watch:
        for part in (*linears, *wide):
            hooks.enter_context(part.register_forward_hook(note))
        module(*call.args, **call.kwargs)
    made = {c: before[normed.get(c, c)] for c in before if c not in wide}
    if len(seen) != 1 or len(after) != 1 or len(made) + 1 != len(linears):
        raise ValueError(
            "it must call attention exactly once between its input and output projections"
        )
    if len(normed) != len(wide):
        raise ValueError(
            "an RMSNorm whose width equals a linear layer's output width must directly follow a "
            "linear layer"
        )
    q, k, v, o, sinks = seen[0]
    own = list(module.parameters(recurse=False))
    if own and (len(own) > 1 or own[0] is not sinks):
        raise ValueError("its own parameters cannot be assigned to heads")
    for what, x in (("query", q), ("key", k), ("value", v)):
        if x.shape[2] % ranks:
            raise ValueError(f"{x.shape[2]} {what} heads are not divisible by tp ({ranks})")
    ((row, x),) = after.items()
    if x.shape[-1] != o.shape[2:].numel() or not torch.equal(x.flatten(), o.flatten()):
        raise ValueError("its last linear layer does not read the concatenated heads")
    columns = {c: _blocks_of_heads(y, (q, k, v), ranks) for c, y in made.items()}
    if any(columns[c] > 1 for c in normed):
        raise ValueError("a single norm spans queries, keys and values")
    known = {id(p) for part in (*linears, *wide) for p in part.parameters()} | {id(sinks)}
    others = [p for p in module.parameters() if id(p) not in known]
    if any(p.numel() not in (q.shape[-1], v.shape[-1]) for p in others):
        raise ValueError("it has parameters outside its linear layers and per-head norms")
    return CutPart("attention", module, columns, row, tuple(normed.values()), sinks)


def _wide_norms(module: nn.Module, linears: list[Any]) -> list[nn.Module]:
    """RMSNorms whose weight is as wide as a linear layer's output."""
    widths = {mlp.out_features(linear) for linear in linears}
    forms = {m: norm.find_norm_form(m) for m in module.modules() if norm.is_norm_candidate(m)}
    rms = [m for m, form in forms.items() if isinstance(form, norm.NormForm) and not form.layer]
    return [m for m in rms if m.weight is not None and len(m.weight) in widths]


def _blocks_of_heads(y: torch.Tensor, heads: tuple[torch.Tensor, ...], ranks: int) -> int:
    """The number of blocks in y[..., N] such that a rank's heads use an equal share of each."""
    owner = torch.full((y.shape[-1],), -1)
    for rank in range(ranks):
        for x in heads:
            own = x.chunk(ranks, 2)[rank]
            if not own.requires_grad:
                continue
            total = (own * (noise(*own.shape, like=own) + 3)).sum()
            (g,) = torch.autograd.grad(total, y, retain_graph=True, allow_unused=True)
            if g is None:
                continue
            features = (g != 0).flatten(0, -2).any(0).cpu()
            if (owner[features] >= 0).logical_and(owner[features] != rank).any():
                raise ValueError(
                    "an output feature of a projection is used by heads on several ranks"
                )
            owner[features] = rank
    for blocks in (1, 2, 3):
        if len(owner) % (blocks * ranks) == 0:
            wanted = torch.arange(ranks).repeat_interleave(len(owner) // (blocks * ranks))
            if torch.equal(owner, wanted.repeat(blocks)):
                return blocks
    raise ValueError(
        f"the {len(owner)} output features of a projection must form one, two or three blocks of "
        f"equal width, each divisible by tp ({ranks}); queries, keys and values that share one "
        "projection must be equally wide"
    )
