"""An applied model over tensor and context ranks: see `apply(model, mesh=...)`.

Every rank is given the same tokens and ends with the same loss, and its parameters with their whole
gradients, or its share of them.

    tensor ranks     heads and hidden units are cut (`structure`), the embedding and the head by
                     the vocabulary, over which the loss is parallel too
    sequence         between the first layer and the last, tokens of the residual stream are cut
                     over the tensor ranks as well
    context ranks    there they are cut over the context ranks, also within the layers: attention
                     goes over all of them (`parallel.context`); the loss shares its tokens out

A module with several columns (queries, keys and values, or gate and up) takes its input from the
ranks once for all of them; a single column and every row hide their messages by `overlap`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from warpweave.changes import changes_of, forget, note
from warpweave.hf import attention, norm, seen, structure
from warpweave.hf.mlp import Conv1D, weight_of
from warpweave.hf.options import HeadVocabulary, Replicas, Spread
from warpweave.hf.patch import patch
from warpweave.hf.report import Report
from warpweave.parallel.collectives import all_gather, copy_to, gather, own_slice, scatter
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.tensor import column_parallel_linear, cut_rms_norm, row_parallel_linear
from warpweave.shards import (
    check_alike,
    check_same_inputs,
    placed,
    replace_parameters,
    saver,
    use_local,
    whole,
)
from warpweave.styles import is_plain_embedding, look_up, project

# What transformers notes on a model whose ranks share it.
_TOLD = ("_tp_size", "_is_distributed_loading_by_transformers", "_tp_plan")


class Parallel:
    """A model that is spread over ranks, and the way back."""

    def __init__(self, model: nn.Module, options: Spread) -> None:
        self.model, self.options = model, options
        self.active = False  # tokens are cut between the first layer and the last

    # ------------------------------------------------------------ there

    def spread(self, inputs: dict[str, torch.Tensor], report: Report) -> None:
        """Cut the model.

        Raises ValueError, naming module and reason, where it cannot be; then nothing is changed.
        """
        mesh, model = self.options.mesh, self.model
        tp, changes = mesh.size("tp"), changes_of(model)
        names = {m: n for n, m in model.named_modules()}
        check_alike(model, self._groups())
        self._dropouts = {m: n for m, n in names.items() if isinstance(m, nn.Dropout)}
        for module, name in names.items():
            if isinstance(module, nn.Dropout) and module.p > 0:
                raise ValueError(f"{name}: dropout {module.p} is not drawn over ranks: set it to 0")
            if getattr(module, "attention_dropout", 0.0):
                raise ValueError(f"{name}: attention dropout is not drawn over ranks: set it to 0")
        parts, kept = structure.find_parts(model, inputs, tp)
        layers = _layers(model, parts)
        for name, why in kept.items():
            report.add(name, "parallel", model.get_submodule(name), why)
        # parameter -> the dim that is cut and into how many blocks it falls; the module's groups
        cuts: dict[nn.Parameter, tuple[int, int]] = {}
        sums = self._sums(parts, layers)
        if tp > 1:
            for part in parts:
                self._cut_part(part, cuts)
            self._cut_vocabulary(cuts, report)
        head = _head_of(model)
        if type(head) is nn.Linear:
            cut = head.weight in cuts
            note(head, HeadVocabulary(len(head.weight), cut, self.options))
        for part in parts:
            how = f"{len(part.columns)} columns and a row over {tp}" if tp > 1 else "tokens"
            report.add(names[part.module], "parallel", part.module, how, replaced=True)
            enter = self._entrance(part)
            changes_of(part.module).hooks.append(
                part.module.register_forward_pre_hook(enter, with_kwargs=True)
            )
        device_mesh = None if tp == 1 else mesh.device_mesh["tp"]
        replace_parameters(
            model,
            {p: placed(p, device_mesh, *cuts.get(p, (None, 1))) for p in model.parameters()},
        )
        for module in names:
            if module._parameters and (tp > 1 or sums.get(module)):
                changes_of(module).hooks += use_local(module, sums.get(module, {}))
        if self.options.tokens > 1:
            first, last = layers
            changes.hooks += [
                first.register_forward_pre_hook(self._cut_tokens, with_kwargs=True),
                last.register_forward_hook(self._join_tokens),
            ]
        changes.hooks.append(model.register_forward_pre_hook(self._check_dropout))
        ranks = tp * mesh.size("cp")
        plan = model.__dict__.get("_tp_plan") if tp > 1 else {}  # by which caches count heads
        for name, told in zip(_TOLD, (ranks, True, plan)):
            changes.set(model, name, told)
        device = next(model.parameters()).device.type
        changes.set(model.config, "distributed_config", Replicas(ranks, mesh.size("dp"), device))
        changes.set(model, "save_pretrained", saver(model))

    def _sums(
        self, parts: list[structure.Part], layers: tuple[nn.Module, nn.Module]
    ) -> dict[nn.Module, dict[str, tuple]]:
        """The groups over which gradients of each module's own parameters must be summed."""
        tp, cp = (self.options.mesh.group(axis) for axis in ("tp", "cp"))
        stream = (tp,) if self.options.sequence_parallel else ()
        over: dict[nn.Module, dict[str, tuple]] = {}
        for layer in _siblings(self.model, layers):
            for module in layer.modules():
                over[module] = dict.fromkeys(module._parameters, (*stream, cp))
        for part in parts:
            if part.kind == "attention":  # the norms of a rank's heads
                for module in part.module.modules():
                    over[module] = dict.fromkeys(module._parameters, (tp, cp))
                for module in (part.module, *part.norms):  # what is cut with the heads
                    over[module] = dict.fromkeys(module._parameters, (cp,))
            for column in part.columns:
                over[column] = dict.fromkeys(column._parameters, (cp,))
                if part.columns[column] > 1:
                    over[column]["bias"] = (tp, cp)
            over[part.row] = {"weight": (cp,), "bias": (*stream, cp)}
        return {
            module: {n: tuple(g for g in groups if g is not None) for n, groups in names.items()}
            for module, names in over.items()
            if any(g is not None for groups in names.values() for g in groups)
        }

    def _cut_part(self, part: structure.Part, cuts: dict) -> None:
        tp = self.options.mesh.size("tp")
        for linear, blocks in part.columns.items():
            cuts[linear.weight] = (1 if isinstance(linear, Conv1D) else 0, blocks)
            if blocks > 1 and cuts[linear.weight][0] == 0 and self.options.mesh.size("dp") > 1:
                name = next(n for n, m in self.model.named_modules() if m is linear)
                raise ValueError(
                    f"{name}: {blocks} blocks of rows are cut over tp, which fully_shard over dp "
                    "would put together in another order"
                )
            if linear.bias is not None and blocks == 1:
                cuts[linear.bias] = (0, 1)
            taken = _takes_once(part)
            self._patch(linear, self._linear(column_parallel_linear, taken=taken, blocks=blocks))
        for module in part.norms:
            cuts[module.weight] = (0, 1)
            across = partial(cut_rms_norm, group=self.options.mesh.group("tp"))
            form: Any = norm.find_form(module)
            patch(module, form._replace(across=across))
        if part.sinks is not None:
            cuts[part.sinks] = (0, 1)
        cuts[part.row.weight] = (0 if isinstance(part.row, Conv1D) else 1, 1)
        self._patch(part.row, self._linear(row_parallel_linear))
        if part.kind == "attention" and max(part.columns.values()) > 1:
            for name, number in list(vars(part.module).items()):  # by which it splits
                if type(number) is int and number == part.width:
                    changes_of(part.module).set(part.module, name, number // tp)

    def _cut_vocabulary(self, cuts: dict, report: Report) -> None:
        model: Any = self.model
        names = {m: n for n, m in model.named_modules()}
        embedding, head = model.get_input_embeddings(), _head_of(model)
        plain = is_plain_embedding(embedding)
        tied = head is not None and embedding.weight is head.weight
        cuttable = type(head) is nn.Linear and (plain or not tied)
        if plain and (cuttable or not tied):
            cuts[embedding.weight] = (0, 1)
            self._patch(embedding, self._embedding())
            report.add(
                names[embedding], "parallel", embedding, "embedding, rows over tp", replaced=True
            )
        if cuttable:
            cuts[head.weight] = (0, 1)
            self._patch(head, self._head())
            report.add(names[head], "parallel", head, "head, rows over tp", replaced=True)

    def _patch(self, module: nn.Module, forward: Callable) -> None:
        changes_of(module).set(module, "forward", MethodType(forward, module))

    # ------------------------------------------------------------ forwards

    def _linear(self, product: Callable, *, taken: bool = False, blocks: int = 1) -> Callable:
        """Of a layer that is cut; `taken`: its module's entrance has taken x from the ranks. Of
        several `blocks` the bias is whole."""
        tp = self.options.mesh.group("tp")

        def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
            w, b = weight_of(module), module.bias
            if blocks > 1 and b is not None:
                b = torch.cat([own_slice(block, tp) for block in b.chunk(blocks)])
            if taken:
                return product(x, w, b, group=None)
            if not self._streams():
                return product(x, w, b, **self.options.over)
            y = product(x.transpose(0, 1), w, b, sequence_parallel=True, **self.options.over)
            return y.transpose(0, 1)

        return forward

    def _embedding(self) -> Callable:
        group = self.options.mesh.group("tp")
        return lambda module, ids: look_up(module, ids, group)

    def _head(self) -> Callable:
        return lambda module, x: project(module, x, **self.options.over)

    # ------------------------------------------------------------ tokens

    def _groups(self) -> tuple:
        groups = (self.options.mesh.group(axis) for axis in ("tp", "cp"))
        return tuple(g for g in groups if g is not None)

    def check_next_inputs(self) -> None:
        """At the next call, compare the ranks' batches once: another one on a rank would be a wrong
        loss and no error."""

        def check(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
            check_same_inputs((*args, *kwargs.values()), self._groups())
            hook.remove()

        hook = self.model.register_forward_pre_hook(check, with_kwargs=True)
        changes_of(self.model).hooks.append(hook)

    def _is_active(self) -> bool:
        """Recomputed layers, which nothing enters by the first, run under gradients."""
        return self.options.tokens > 1 and (self.active or torch.is_grad_enabled())

    def _streams(self) -> bool:
        return self.options.sequence_parallel and self._is_active()

    def _layout(self, length: int) -> SequenceLayout:
        return SequenceLayout(length, self.options.mesh.size("cp"))

    def _entrance(self, part: structure.Part) -> Callable:
        """What goes into a module on this rank."""
        tp, cp = (self.options.mesh.group(axis) for axis in ("tp", "cp"))
        once = _takes_once(part)
        cut = {n: m for n, m in part.module.named_modules() if m in part.columns or m is part.row}

        def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            for name, linear in cut.items():
                if tp is not None and module.get_submodule(name) is not linear:
                    raise ValueError(
                        f"{type(module).__name__}.{name}: a layer that is cut over "
                        "ranks was replaced, and adapters do not know how it is cut"
                    )
            if any(map(seen.changed, part.norms)):
                raise ValueError(
                    f"{type(module).__name__}: a norm whose features are cut over ranks was "
                    "changed: warpweave.hf.revert first"
                )
            if part.kind == "attention":
                self._check_attention(module)
            x, put = hidden_states(module, args, kwargs)
            if once and tp is not None:
                x = all_gather(x, tp, dim=1) if self._streams() else copy_to(x, tp)
            args, kwargs = put(x)
            if part.kind == "mlp" or cp is None:
                return args, kwargs
            forget(module, attention.Across)
            if self._is_active():
                layout = self._layout(x.shape[1] * self.options.mesh.size("cp"))
                across = attention.Across(layout, self.options.mesh.context, self.options.strategy)
                note(module, across)
                kwargs = {n: self._own_positions(n, v, layout) for n, v in kwargs.items()}
            return args, kwargs

        return enter

    def _check_attention(self, module: Any) -> None:
        """Raise ValueError if what the module computes now would not be that of one rank."""
        name = type(module).__name__
        config = getattr(module, "config", self.model.config)
        if config._attn_implementation != attention.NAME:
            raise ValueError(
                f"{name}: over ranks its attention is {attention.NAME}, and was set to "
                f"{config._attn_implementation}: warpweave.hf.revert first"
            )
        if module.training and getattr(module, "attention_dropout", 0.0):
            raise ValueError(f"{name}: attention dropout is not drawn over ranks: set it to 0")

    def _check_dropout(self, model: nn.Module, args: tuple) -> None:
        for module, name in self._dropouts.items():
            if module.p > 0 and module.training:
                raise ValueError(f"{name}: dropout {module.p} is not drawn over ranks: set it to 0")

    def _own_positions(self, name: str, value: Any, layout: SequenceLayout) -> Any:
        """Of what is given for every position, this rank's."""
        rank = self.options.mesh.index("cp")
        if name == "position_embeddings" and isinstance(value, (tuple, list)):
            return tuple(layout.shard(x, rank, dim=1) for x in value)
        if name == "position_ids" and value is not None:
            return layout.shard(value, rank, dim=-1)
        return value

    def _cut_tokens(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        mesh, n = self.options.mesh, self.options.tokens
        x, put = hidden_states(layer, args, kwargs)
        fits = x.shape[1] % n == 0
        if torch.is_grad_enabled() and not fits:
            raise ValueError(
                f"{x.shape[1]} tokens do not divide by {n}, as this mesh needs it: pad the batch "
                f"(pad_to_multiple_of={n})"
            )
        # Without gradients, what a cache goes on from is computed by every rank.
        cached = kwargs.get("past_key_values") is not None and not torch.is_grad_enabled()
        self.active = fits and not cached
        if not self.active:
            return None
        if mesh.size("cp") > 1:
            layout = self._layout(x.shape[1])
            shards = [layout.shard(x, rank, dim=1) for rank in range(layout.parts)]
            x = scatter(torch.cat(shards, 1), mesh.group("cp"), dim=1)
        if self.options.sequence_parallel:
            x = scatter(x, mesh.group("tp"), dim=1)
        return put(x)

    def _join_tokens(self, layer: nn.Module, args: tuple, out: Any) -> Any:
        if not self._is_active():
            return None
        mesh = self.options.mesh
        x = out[0] if isinstance(out, tuple) else out
        if self.options.sequence_parallel:
            x = gather(x, mesh.group("tp"), dim=1)
        if mesh.size("cp") > 1:
            x = gather(x, mesh.group("cp"), dim=1)
            layout = self._layout(x.shape[1])
            x = layout.unshard(x.chunk(layout.parts, 1), dim=1)
        return (x, *out[1:]) if isinstance(out, tuple) else x


def join_parameters(model: nn.Module) -> None:
    """Give every rank all of the parameters that `Parallel.spread` cut."""
    found = {
        p: nn.Parameter(whole(p.detach()), p.requires_grad)
        for p in model.parameters()
        if isinstance(p, DTensor)
    }
    replace_parameters(model, found)


def _head_of(model: Any) -> Any:
    """The head's linear layer, also under LoRA."""
    head = model.get_output_embeddings()
    return getattr(head, "base_layer", head)


def _takes_once(part: structure.Part) -> bool:
    """Whether x is taken from the ranks for all columns at once, and not by a single one."""
    return part.kind == "attention" or len(part.columns) > 1


def hidden_states(module: nn.Module, args: tuple, kwargs: dict) -> tuple[torch.Tensor, Callable]:
    """The hidden states among a call's arguments, and the arguments with others in their place."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0], lambda x: ((x, *args[1:]), kwargs)
    x = kwargs.get("hidden_states")
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{type(module).__name__}: takes no hidden_states")
    return x, lambda x: (args, {**kwargs, "hidden_states": x})


def _siblings(model: nn.Module, layers: tuple[nn.Module, nn.Module]) -> list[nn.Module]:
    """All layers of the list whose first and last these are."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and module[0] is layers[0]:
            return list(module)
    return list(dict.fromkeys(layers))


def _layers(model: nn.Module, parts: list[structure.Part]) -> tuple[nn.Module, nn.Module]:
    """The first and the last layer: of the list each of whose modules holds attention."""
    callers = [part.module for part in parts if part.kind == "attention"]
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        held = [[m for m in layer.modules() if m in callers] for layer in module]
        if all(held) and sum(map(len, held)) == len(callers):
            return module[0], module[-1]
    raise ValueError(f"{type(model).__name__}: no list of layers holds all of its attention")
