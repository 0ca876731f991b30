"""Tensor and context parallelism for an applied model: see `apply(model, mesh=...)`.

Every rank has the same tokens and returns the same loss. Gradients are summed over all ranks and
sharded like their parameters.

    tensor parallel     heads and hidden units are sharded (`structure`), and embedding and head
                        along the vocabulary, with a vocabulary-parallel loss
    sequence parallel   tokens of the residual stream, between the first and the last layer, are
                        also sharded over the tensor ranks
    context parallel    tokens are sharded over the context ranks, also within layers, with
                        context-parallel attention (`parallel.context`); each rank computes the loss
                        of some tokens

`adapters` lets LoRA compute over ranks, `entered` sums the gradients of other modules that enter
the layers later, and `untouched` refuses hooks and forwards that would see one rank's part.

A module with several column-parallel layers (queries, keys and values, or gate and up) gathers its
input once for all of them. The collectives of a single column-parallel layer, and of every
row-parallel layer, overlap with its product according to `overlap`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from warpweave.hf import attention, norm, seen, structure
from warpweave.hf.adapters import ShardedLayer, check_dropout, wrapped
from warpweave.hf.arguments import own
from warpweave.hf.changes import changes_of, forget, known, note
from warpweave.hf.entered import Watch
from warpweave.hf.options import HeadVocabulary, Replicas, Spread, some_groups
from warpweave.hf.patch import patch
from warpweave.hf.plan import Column, Row, Tokens, hidden_states, take_input
from warpweave.hf.report import Report
from warpweave.hf.untouched import Untouched, refuse_copies
from warpweave.layers.sharding.dtensor import (
    Groups,
    check_alike,
    check_same_inputs,
    placed,
    replace_parameters,
    saver,
    use_local,
    whole,
)
from warpweave.layers.sharding.styles import (
    ColwiseParallel,
    Group,
    RowwiseParallel,
    Style,
    is_plain_embedding,
)
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.tensor import cut_rms_norm

# Attributes that transformers sets on a model that is shared by ranks.
_TOLD = ("_tp_size", "_is_distributed_loading_by_transformers", "_tp_plan")
_Plan = dict[nn.Module, Style]
_Sums = dict[nn.Module, dict[str, Groups]]


def spread_model(
    model: Any, spread: Spread, inputs: dict[str, torch.Tensor], report: Report
) -> Watch:
    """Shard an applied model over the tensor and context ranks; return what watches its layers.
    Raises ValueError, naming module and reason, if that is not possible. To undo it, call
    `join_parameters`, then `warpweave.hf.changes.undo` of every module."""
    mesh, changes = spread.mesh, changes_of(model)
    tp = mesh.size("tp")
    names = {m: n for n, m in model.named_modules()}
    check_alike(model.named_parameters(), some_groups(mesh))
    for module, name in names.items():
        if isinstance(module, nn.Dropout):
            check_dropout(module, name)
        # early; see `attention.Shared` for any name
        attention.refuse_dropout(name, getattr(module, "attention_dropout", 0.0))
    parts, kept = structure.find_parts(model, inputs, tp)
    layers = _layers(model, parts)
    for name, why in kept.items():
        report.add(name, "parallel", model.get_submodule(name), why)
    tokens = tokens_of(spread)
    plan = _plan(model, parts, tokens, spread, report) if tp > 1 else {}
    sums = _sums(parts, layers, spread)
    watch = Watch(model, layers, parts, tokens, spread)
    note(model, watch)
    head = _head_of(model)
    if type(head) is nn.Linear:
        note(head, HeadVocabulary(len(head.weight), head in plan, spread))
    for part in parts:
        how = f"{len(part.columns)} column-parallel + 1 row-parallel layers over {tp} ranks"
        how = how if tp > 1 else "tokens"
        report.add(names[part.module], "parallel", part.module, how, replaced=True)
        enter = _Entrance(part, tokens, spread, model.config, watch)
        handle = part.module.register_forward_pre_hook(enter, with_kwargs=True)
        changes_of(part.module).hooks.append(handle)
        note(part.module, attention.Shared())
    note(model, spread)
    _cut(model, parts, plan, spread)
    for module in names:
        groups = sums.get(module, {})
        if module._parameters and (tp > 1 or any(groups.values())):
            changes_of(module).hooks += use_local(module, groups)
    if tokens.divisor > 1:
        for layer, forward in zip(layers, tokens.forwards(layers), strict=True):
            changes_of(layer).set(layer, "forward", forward)
    ranks = tp * mesh.size("cp")
    tp_plan = own(model, "_tp_plan") if tp > 1 else {}  # caches derive the number of heads from it
    for name, told in zip(_TOLD, (ranks, True, tp_plan)):
        own(model, name)
        changes.set(model, name, told)
    device = next(model.parameters()).device.type
    changes.set(model.config, "distributed_config", Replicas(ranks, mesh.size("dp"), device))
    changes.set(model, "save_pretrained", saver(model))
    untouched = Untouched(model, layers, parts, plan.keys(), tokens, spread)
    watch.begin(untouched)
    connected = {model, untouched.stack, *layers, *(part.module for part in parts), *plan}
    refuse_copies(model, connected | ({head} if head is not None else set()), spread)
    return watch


def tokens_of(spread: Spread) -> Tokens:
    """The sharding of a model's tokens between its layers."""
    tp, cp = (spread.mesh.group(axis) for axis in ("tp", "cp"))
    return Tokens(tp, cp, sequence_parallel=spread.sequence_parallel)


# ---------------------------------------------------------------- 1. the plan


def _plan(
    model: Any, parts: list[structure.CutPart], tokens: Tokens, spread: Spread, report: Report
) -> _Plan:
    """The style of each module whose parameters are sharded over tensor ranks."""
    plan: _Plan = {}
    names = {m: n for n, m in model.named_modules()}
    for part in parts:
        for linear, blocks in part.columns.items():
            rows = blocks > 1 and not isinstance(linear, structure.mlp.Conv1D)
            if rows and spread.mesh.size("dp") > 1:
                raise ValueError(
                    f"{names[linear]}: {blocks} blocks of rows are sharded over tp, but "
                    "fully_shard over dp would join them in a different order; use dp = 1"
                )
            inside = part.takes_once
            plan[linear] = Column(tokens, inside=inside, blocks=blocks, **spread.options)
            note(linear, ShardedLayer("column", tokens, inside, blocks))
        plan[part.row] = Row(tokens, **spread.options)
        note(part.row, ShardedLayer("row", tokens))
    embedding, head = model.get_input_embeddings(), _head_of(model)
    plain = is_plain_embedding(embedding)
    tied = head is not None and embedding.weight is head.weight
    cuttable = type(head) is nn.Linear and (plain or not tied)
    if plain and (cuttable or not tied):
        plan[embedding] = RowwiseParallel(input_layouts=Replicate())
        note(embedding, ShardedLayer("vocabulary", tokens))
        how = "embedding, rows over tp"
        report.add(names[embedding], "parallel", embedding, how, replaced=True)
    if cuttable:
        plan[head] = ColwiseParallel(output_layouts=Replicate(), **spread.options)
        note(head, ShardedLayer("vocabulary", tokens))
        report.add(names[head], "parallel", head, "head, rows over tp", replaced=True)
    return plan


def _cut(model: Any, parts: list[structure.CutPart], plan: _Plan, spread: Spread) -> None:
    """Apply a plan's styles to their modules; shard parameters that have one number per head."""
    tp, mesh = spread.mesh.size("tp"), spread.mesh.device_mesh
    if tp == 1:
        return
    mesh = mesh["tp"]
    held = ((m, n, p) for m in plan for n, p in m._parameters.items() if p is not None)
    cuts: dict[Any, Placement] = {p: plan[m].placement(m, n) for m, n, p in held}
    for part in parts:
        if part.sinks is not None:
            cuts[part.sinks] = Shard(0)
        for module in part.norms:
            cuts[module.weight] = Shard(0)
            across = partial(cut_rms_norm, group=spread.mesh.group("tp"))
            form: Any = norm.find_norm_form(module)
            patch(module, form._replace(across=across))
        if part.kind == "attention" and max(part.columns.values()) > 1:
            for name, number in list(vars(part.module).items()):  # the width it splits by
                if type(number) is int and number == part.width:
                    changes_of(part.module).set(part.module, name, number // tp)
    for module, style in plan.items():
        changes_of(module).remember(module, "forward")
        style.install(module, mesh)
    found = {p: placed(p, mesh, cuts.get(p, Replicate())) for p in model.parameters()}
    replace_parameters(model, found)


def _sums(parts: list[structure.CutPart], layers: list[nn.Module], spread: Spread) -> _Sums:
    """The groups over which gradients of each module's own parameters must be summed."""
    both, cp = some_groups(spread.mesh), some_groups(spread.mesh, "cp")
    over: dict[nn.Module, Groups] = {}
    for layer in layers:
        over |= dict.fromkeys(layer.modules(), both if spread.sequence_parallel else cp)
    for part in parts:
        if part.kind == "attention":
            over |= dict.fromkeys(part.module.modules(), both)  # norms of a rank's heads
            over |= dict.fromkeys((part.module, *part.norms), cp)  # sharded with the heads
        over |= dict.fromkeys((*part.columns, part.row), cp)
    found = {m: dict.fromkeys(m._parameters, groups) for m, groups in over.items()}
    for part in parts:
        for column, blocks in part.columns.items():
            if blocks > 1:  # each rank reads its part of a whole bias
                found[column]["bias"] = both
    return found


# ---------------------------------------------------------------- 2. during every call


class _Entrance:
    """Pre-hook that prepares the input of a module with sharded linear layers or tokens."""

    def __init__(
        self, part: structure.CutPart, tokens: Tokens, spread: Spread, config: Any, watch: Watch
    ) -> None:
        self.part, self.tokens, self.spread, self.config = part, tokens, spread, config
        self.watch = watch
        linears = {*part.columns, part.row}
        self.cut = {n: m for n, m in part.module.named_modules() if m in linears}

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        part, tp = self.part, self.spread.mesh.group("tp")
        self.check(module, tp)
        x, put = hidden_states(module, args, kwargs)
        if part.takes_once and tp is not None:
            x = take_input(self.tokens, module, x, tp)
        args, kwargs = put(x)
        if part.kind == "mlp" or self.tokens.cp is None:
            return args, kwargs
        forget(module, attention.Across)
        if self.tokens.are_cut():
            layout = self.tokens.layout(x.shape[1] * self.spread.mesh.size("cp"))
            context = self.spread.mesh.context
            note(module, attention.Across(layout, context, self.spread.strategy))
            rank = self.spread.mesh.index("cp")
            kwargs = {n: own_positions(n, v, layout, rank) for n, v in kwargs.items()}
        return args, kwargs

    def check(self, module: Any, tp: Group) -> None:
        """Raise ValueError if the module would no longer compute the same as on one rank."""
        kind = type(module).__name__
        for name, linear in self.cut.items():
            found = linear if tp is None else module.get_submodule(name)
            if found is not linear and not (self.watch.adapt(found) and wrapped(found) is linear):
                raise ValueError(
                    f"{kind}.{name}: a layer that is sharded over ranks was replaced; replace it "
                    "before apply(mesh=...)"
                )
        if any(map(seen.changed, self.part.norms)):
            why = "a norm whose features are sharded over ranks was changed"
            raise ValueError(f"{kind}: {why}; call warpweave.hf.revert first")
        if self.part.kind == "mlp":
            return
        config = getattr(module, "config", self.config)
        if config._attn_implementation != attention.NAME:
            raise ValueError(
                f"{kind}: with apply(mesh=...), attn_implementation must be {attention.NAME}, got "
                f"{config._attn_implementation}; call warpweave.hf.revert first"
            )
        if module.training:
            attention.refuse_dropout(kind, getattr(module, "attention_dropout", 0.0))


def own_positions(name: str, value: Any, layout: SequenceLayout, rank: int) -> Any:
    """A context rank's part of an argument with one entry per position. An argument with an unknown
    name stays whole, and does not fit the rank's part of the sequence."""
    if name == "position_embeddings" and isinstance(value, (tuple, list)):
        return tuple(layout.shard(x, rank, dim=1) for x in value)
    if name == "position_ids" and value is not None:
        return layout.shard(value, rank, dim=-1)
    return value


def check_next_inputs(model: Any, spread: Spread) -> None:
    """Compare the ranks' batches once, in the next call. With different batches, the loss would be
    wrong without an error."""
    groups = some_groups(spread.mesh)

    def check(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        check_same_inputs((*args, *kwargs.values()), groups)
        for hook in hooks:
            hook.remove()

    # peft calls a model's forward without its hooks. Then the embedding's ids are compared.
    modules = (model, wrapped(model.get_input_embeddings()))
    hooks = [m.register_forward_pre_hook(check, with_kwargs=True) for m in modules]
    changes_of(model).hooks += hooks


# ---------------------------------------------------------------- 3. the model's parts


def join_parameters(model: nn.Module) -> None:
    """All-gather the parameters of a model if `spread_model` has sharded it."""
    if known(model, Spread) is None:
        return
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    replace_parameters(model, {p: nn.Parameter(whole(p.detach()), p.requires_grad) for p in cut})


def _head_of(model: Any) -> Any:
    """The head's linear layer, also when LoRA wraps it."""
    return wrapped(model.get_output_embeddings())


def _layers(model: nn.Module, parts: list[structure.CutPart]) -> list[nn.Module]:
    """The layers: the module list in which every module contains attention."""
    callers = [part.module for part in parts if part.kind == "attention"]
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        held = [[m for m in layer.modules() if m in callers] for layer in module]
        if all(held) and sum(map(len, held)) == len(callers):
            return list(module)
    kind = type(model).__name__
    raise ValueError(f"{kind}: no list of layers contains all of its attention modules")
