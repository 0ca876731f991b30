"""Our tensor-parallel layers as values of a transformers `tp_plan`.

`from_pretrained` then shards a model with them while loading it, and no rank ever holds the whole.

    how = DistributedConfig(tp_size=2, enable_sequence_parallel=True)
    model = AutoModelForCausalLM.from_pretrained(ID, distributed_config=planned(how, config))

`planned` translates a model's own plan into these styles, which importing `warpweave.hf` registers:

    warpweave_colwise, warpweave_rowwise    a linear layer with sharded output or input features
    warpweave_gather_colwise                a head: its output is gathered
    warpweave_embedding_rowwise             an embedding, sharded along the vocabulary
    warpweave_input                         a module that gathers or copies its hidden states once
    warpweave_inside_colwise                for all of its columns, and these columns
    warpweave_replicated                    a module that sees only a rank's heads, such as a norm

If tokens are also sharded over the ranks, between the first layer and the last:

    warpweave_sequence                      on the list of layers
    warpweave_sequence_input, warpweave_sequence_colwise, warpweave_sequence_rowwise

Styles whose messages can be hidden also exist as `..._none` and `..._chunked`, see
`parallel.tensor.ranks`; the one without a suffix is "bulk". With the sequence styles, a sequence
must be divisible by the ranks, so they cannot generate token by token
(`warpweave.hf.apply(mesh=...)` can). Experts keep transformers' own styles, and are refused if
tokens are sharded.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from warpweave.hf.arguments import own
from warpweave.hf.plan import Column, Row, Tokens, hidden_states, take_input
from warpweave.layers.sharding.dtensor import use_local
from warpweave.layers.sharding.styles import ColwiseParallel, RowwiseParallel, Style

# ---------------------------------------------------------------- 1. styles


_STYLED = "_warpweave_styled"  # set on a module that has one of these styles


class _Linear(TensorParallelLayer):
    """Adapter from our torch-like styles to transformers' interface."""

    def __init__(self, style: Style) -> None:
        self.style = style

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        self.style.check(module, mesh.size())
        self.style.cut(module, param, mesh, None)  # on the meta device: values are loaded later

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.style.install(module, mesh)
        setattr(module, _STYLED, True)
        return module


class _Input(TensorParallelLayer):
    """Gather or copy hidden states once for all columns of a module, and sum gradients once."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        setattr(module, _STYLED, True)
        return super().install_forward(module, mesh)

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: tuple, kwargs: dict, mesh: DeviceMesh
    ) -> tuple[tuple, dict]:
        x, put = hidden_states(module, args, kwargs)
        return put(take_input(self.tokens, module, x, mesh.get_group()))


class _Replicated(TensorParallelLayer):
    """A module with whole parameters that sees only some of the heads: gradients are summed."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        use_local(module, dict.fromkeys(module._parameters, (mesh.get_group(),)))
        setattr(module, _STYLED, True)
        return module


class _Sequence(TensorParallelLayer):
    """A list of layers; tokens are sharded over the ranks between the first and the last."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        group = mesh.get_group()
        summed: list[nn.Module] = []  # modules that see some of the tokens

        def sum_gradients(layer: nn.Module, args: tuple) -> None:
            if not summed:
                summed.extend(_without_style(module))  # by now, all styles are on their modules
                for part in summed:
                    use_local(part, dict.fromkeys(part._parameters, (group,)))

        need = "sequence parallelism"
        tokens = Tokens(group, None, sequence_parallel=True, need=need, always=True)
        for layer, forward in zip(module, tokens.forwards(list(module)), strict=True):
            layer.forward = forward
        module[0].register_forward_pre_hook(sum_gradients)
        return module


def _without_style(layers: Any) -> list[nn.Module]:
    """Modules within layers that own parameters and have no style."""
    every = (part for layer in layers for part in layer.modules())
    found = [part for part in every if part._parameters and not hasattr(part, _STYLED)]
    for layer in layers:
        if layer in found:
            raise ValueError(
                f"{type(layer).__name__}: a layer must have parameters only in its submodules"
            )
    return found


for _name in ("shard_param", "install_forward", "transform_inputs_pre_forward"):
    own(TensorParallelLayer, _name)  # methods that transformers calls and a style replaces
WORD = "warpweave_"
_ENDINGS = {"bulk": "", "none": "_none", "chunked": "_chunked"}
_WHOLE = Tokens(None, None, sequence_parallel=False)
_CUT = Tokens(None, None, sequence_parallel=True, always=True)  # a module's ranks are its mesh's
_STYLES: dict[str, TensorParallelLayer] = {
    "embedding_rowwise": _Linear(RowwiseParallel(input_layouts=Replicate())),
    "inside_colwise": _Linear(Column(_WHOLE, inside=True)),
    "input": _Input(_WHOLE),
    "replicated": _Replicated(),
    "sequence": _Sequence(),
    "sequence_input": _Input(_CUT),
}
for _overlap, _ending in _ENDINGS.items():
    for _word, _style in (
        ("colwise", ColwiseParallel(overlap=_overlap)),
        ("rowwise", RowwiseParallel(overlap=_overlap)),
        ("gather_colwise", ColwiseParallel(output_layouts=Replicate(), overlap=_overlap)),
        ("sequence_colwise", Column(_CUT, input_layouts=Shard(1), overlap=_overlap)),
        ("sequence_rowwise", Row(_CUT, output_layouts=Shard(1), overlap=_overlap)),
    ):
        _STYLES[f"{_word}{_ending}"] = _Linear(_style)
for _word, _layer in _STYLES.items():
    ALL_PARALLEL_STYLES.register(WORD + _word, _layer)


# ---------------------------------------------------------------- 2. plans


# Styles of transformers that have a counterpart of ours.
_HEADS = ("colwise_gather_output", "colwise_rep")
_KNOWN = ("colwise", "rowwise", "replicated_with_grad_allreduce")
_LAYERS = "layers.*."


def planned(
    how: DistributedConfig, config: PretrainedConfig, *, overlap: str = "bulk"
) -> DistributedConfig:
    """A distributed configuration with the model's own `tp_plan` translated into our styles.

    Args:
        how: the configuration that `from_pretrained` would get. `enable_sequence_parallel`, which
            transformers reserves, also shards the tokens between the layers. Entries of its own
            `tp_plan` stay.
        config: the configuration of the model.
        overlap: "none", "bulk" or "chunked".

    Raises ValueError for any other overlap and, naming the module, for a model without a plan that
    these styles can express.

    Examples:
        >>> from transformers import LlamaConfig
        >>> from transformers.distributed import DistributedConfig
        >>> plan = planned(DistributedConfig(tp_size=2), LlamaConfig()).tp_plan
        >>> plan["model.layers.*.mlp.up_proj"]
        'warpweave_inside_colwise'
    """
    if overlap not in _ENDINGS:
        raise ValueError(f"overlap must be one of {', '.join(_ENDINGS)}, got {overlap!r}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ours = _words(model, how.enable_sequence_parallel, _ENDINGS[overlap])
    theirs = how.tp_plan if isinstance(how.tp_plan, dict) else {}
    return dataclasses.replace(how, tp_plan={**ours, **theirs})


def _words(model: Any, sequence_parallel: bool, ending: str) -> dict[str, str]:
    """A model's plan in our styles."""
    theirs: dict[str, str] = dict(model.tp_plan or {})
    if not theirs:
        raise ValueError(f"{type(model).__name__} has no tp_plan; use warpweave.hf.apply(mesh=...)")
    ours, sequence = {}, "sequence_" if sequence_parallel else ""
    columns: dict[str, list[str]] = {}  # by the module that they are in
    parametrised = _parametrised(model)
    for name, word in theirs.items():
        inside = _LAYERS in name
        if inside and word in _KNOWN and name not in parametrised:
            if sequence_parallel:
                raise ValueError(
                    f"{name}: the tp_plan shards a single parameter, which warpweave's styles do "
                    "not support with sequence parallelism"
                )
            continue  # a parameter of experts, which keeps transformers' style
        if word in _HEADS:
            ours[name] = f"{WORD}gather_colwise{ending}"
        elif word == "embedding_rowwise":
            ours[name] = f"{WORD}embedding_rowwise"
        elif word == "colwise" and inside:
            columns.setdefault(name.rpartition(".")[0], []).append(name)
        elif word == "rowwise" and inside:
            ours[name] = f"{WORD}{sequence}rowwise{ending}"
        elif word == "replicated_with_grad_allreduce" and inside:
            ours[name] = f"{WORD}replicated"
        elif sequence_parallel or word in _KNOWN:
            raise ValueError(f"{name}: {word} has no counterpart among warpweave's styles")
    for name in parametrised:
        parent = next((p for p in columns if name.startswith(f"{p}.")), None)
        if parent is not None and name not in theirs:
            raise ValueError(f"{name}: the tp_plan has no entry for this part of a sharded module")
    for parent, names in columns.items():
        if len(names) == 1:
            ours[names[0]] = f"{WORD}{sequence}colwise{ending}"
        else:
            ours[parent] = f"{WORD}{sequence}input"
            ours |= dict.fromkeys(names, f"{WORD}inside_colwise")
    if sequence_parallel:
        layers = {name.partition(_LAYERS)[0] for name in theirs if _LAYERS in name}
        ours |= {f"{prefix}layers": f"{WORD}sequence" for prefix in layers}
    return ours


def _parametrised(model: nn.Module) -> set[str]:
    """Names of the modules that own parameters, with "*" for numbers."""
    names = (name for name, module in model.named_modules() if module._parameters)
    return {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
