"""`apply`: warpweave inside a model, module by module; `revert`: all of it undone."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from warpweave.hf import attention, loss, mlp, norm, parallel, seen
from warpweave.hf.options import Options
from warpweave.hf.patch import is_foreign, is_patched, patch, unpatch
from warpweave.hf.probe import agree, kind_of, quietly
from warpweave.hf.report import Report
from warpweave.messages import one_line
from warpweave.parallel.context import Links, Strategy, check_strategy
from warpweave.parallel.mesh import ConnectedMesh, connected
from warpweave.parallel.tensor.overlap import check_overlap

KINDS = ("norm", "mlp", "attention", "loss")
_BEFORE = "_attention_before_warpweave"
_Model = TypeVar("_Model", bound=nn.Module)


def apply(
    model: _Model,
    *,
    only: Collection[str] | None = None,
    dry: bool = False,
    example: dict[str, torch.Tensor] | None = None,
    mesh: ConnectedMesh | None = None,
    sequence_parallel: bool = False,
    overlap: str = "bulk",
    strategy: Strategy | Links = "auto",
    report: Report | None = None,
) -> _Model:
    """Let a model compute with warpweave's kernels wherever that was seen to compute the same, and
    over the tensor and context ranks of a mesh.

    Norms and feed-forward modules are compared one of each kind, attention and loss by the whole
    model on a few tokens (twice, padded too), with nothing left behind: neither gradients nor
    another random state. Names of parameters, `state_dict` and the signature of `forward` stay.
    Call it before the model is wrapped (DDP, FSDP, compile), before or after peft.

    Args:
        model: a transformers model, or one in peft's; of any other `nn.Module`, norms and
            feed-forward modules.
        only: of the kinds "norm", "mlp", "attention" and "loss", those to replace. Default: all.
        dry: report what would be replaced and leave the model as it is.
        example: the inputs to compare on, as `model(**example)` takes them, for a model that does
            not run on its own `dummy_inputs`.
        mesh: a connected mesh, whose ranks along tp and cp hold the same model, are given the same
            tokens and share their work; see `warpweave.hf.parallel`. Every rank calls `apply`, and
            later the model's forward, `save_pretrained` and `revert`.
        sequence_parallel: between the layers, tokens are cut over the tensor ranks too.
        overlap: how messages and products hide one another, see `parallel.tensor.overlap`.
        strategy: of attention over context ranks, or their speeds, see `parallel.context`.
        report: a `Report` to add each module to, replaced or kept, and why. Without one a short
            table of that is printed, by the first rank.

    Returns the model itself.

    Raises ValueError if `only` names another kind, if it was applied already, if there is nothing
    to replace, or (naming the module) if ranks cannot share it. TypeError if `model` is no module.
    For what a replaced attention refuses later see `warpweave.hf.attention`; for `logits` while
    training see `warpweave.hf.loss`.
    """
    kinds = _check(model, only)
    options = _check_mesh(model, kinds, mesh, sequence_parallel, overlap, strategy)
    found = Report()
    try:
        if "norm" in kinds:
            _replace_norms(model, found)
        if "mlp" in kinds:
            _replace_mlps(model, found)
        if "attention" in kinds or "loss" in kinds:
            _replace_whole(model, kinds, example, found)
        if not found.replaced():
            reasons = "; ".join(sorted({e.why for e in found.entries})) or "no module is known"
            raise ValueError(f"nothing to replace in {type(model).__name__}: {reasons}")
        if options is not None:
            _spread(model, options, example, found)
    except BaseException:
        _undo(model)
        raise
    if dry:
        _undo(model)
    if report is not None:
        report.entries += found.entries
    elif not (dist.is_initialized() and dist.get_rank()):
        print(found)
    return model


def revert(model: nn.Module) -> None:
    """Undo `apply`: every forward, the attention and the loss function are what they were.

    Raises ValueError if `apply` was not called.
    """
    if not _is_applied(model):
        raise ValueError(f"{type(model).__name__} has nothing of warpweave.hf in it")
    _undo(model)


def _check(model: nn.Module, only: Collection[str] | None) -> set[str]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply needs a model, got {type(model).__name__}")
    kinds = set(KINDS if only is None else [only] if isinstance(only, str) else only)
    if not kinds or kinds - set(KINDS):
        raise ValueError(f"only must be some of {', '.join(KINDS)}, got {only!r}")
    if _is_applied(model):
        raise ValueError(f"{type(model).__name__} has warpweave.hf in it already: revert it first")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(f"{type(model).__name__} has parameters on the meta device: load it first")
    return kinds


def _check_mesh(
    model: nn.Module,
    kinds: set[str],
    mesh: ConnectedMesh | None,
    sequence_parallel: bool,
    overlap: str,
    strategy: Strategy | Links,
) -> Options | None:
    mesh = connected(mesh)
    check_overlap(overlap)
    check_strategy(strategy)
    if mesh.size("tp") == mesh.size("cp") == 1:
        return None
    if mesh.size("pp") > 1:
        raise ValueError(f"{type(model).__name__}: its layers are not cut into pp stages here")
    if not isinstance(model, PreTrainedModel) or "attention" not in kinds:
        raise ValueError(
            f"{type(model).__name__}: a mesh needs a transformers model and its attention replaced"
        )
    return Options(mesh, sequence_parallel and mesh.size("tp") > 1, overlap, strategy)


def _is_applied(model: nn.Module) -> bool:
    return any(
        is_patched(module) or loss.is_installed(module) or _BEFORE in module.__dict__
        for module in model.modules()
    )


def _undo(model: nn.Module) -> None:
    for module in model.modules():
        if (spread := parallel.parallel_of(module)) is not None:
            spread.join()
    for module in model.modules():
        if _BEFORE in module.__dict__:
            _set_attention(module, module.__dict__.pop(_BEFORE))
        if loss.is_installed(module):
            loss.uninstall(module)
        elif is_patched(module):
            unpatch(module)


def _spread(
    model: PreTrainedModel,
    options: Options,
    example: dict[str, torch.Tensor] | None,
    report: Report,
) -> None:
    """Spread an applied model and see that it computes what it did."""
    inputs = _inputs_of(model, example)
    if example is None:  # as many tokens as ranks can share
        ids = inputs["input_ids"]
        length = -(-ids.shape[1] // options.tokens) * options.tokens
        inputs = {"input_ids": ids.repeat(1, length)[:, :length]}
    wanted = _outputs(model, inputs)
    ranks = parallel.Parallel(model, options)
    ranks.spread(inputs, report)
    found = _outputs(model, inputs)
    why = next((x for x in (wanted, found) if isinstance(x, str)), None)
    if why is None and not all(map(agree, wanted, found)):
        why = "over ranks the model's output was another one"
    why = why or (loss.differs(model, inputs) if loss.is_installed(model) else None)
    if why is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be spread over {options.mesh.sizes}: {why}"
        )
    ranks.check_next_inputs()


# ---------------------------------------------------------------- 1. module by module


def _replace_norms(model: nn.Module, report: Report) -> None:
    found: dict[tuple, tuple[norm.Form | str, dict]] = {}
    for name, module in model.named_modules():
        if not norm.is_candidate(module):
            continue
        form: norm.Form | str = "its forward was replaced by somebody else"
        if not is_foreign(module):
            key, fields = kind_of(module), {}
            if key not in found:
                found[key] = norm.find_form(module, fields), fields
            form, fields = found[key]
        if isinstance(form, norm.Form):
            seen.look(module, form.live, fields)
            patch(module, norm.forward_of(form))
        report.add(name, "norm", module, isinstance(form, norm.Form), str(form))


def _replace_mlps(model: nn.Module, report: Report) -> None:
    found: dict[tuple, tuple[mlp.Form | str, dict]] = {}
    activations: dict[tuple, str | None] = {}
    inside: set[nn.Module] = set()  # of a replaced module
    for name, module in model.named_modules():
        if module in inside or is_foreign(module):
            continue
        if any(p.ndim == 3 for p in module.parameters(recurse=False)):
            report.add(name, "mlp", module, False, "products of grouped experts")
        if mlp.is_candidate(module):
            key, fields = kind_of(module), {}
            if key not in found:
                found[key] = mlp.find_form(module, fields), fields
            form, fields = found[key]
            if isinstance(form, mlp.Form):
                seen.look(module, form.live, fields)
                patch(module, mlp.forward_of(form))
                inside.update(module.modules())
            report.add(name, "mlp", module, isinstance(form, mlp.Form), str(form))
        elif _is_named_activation(module) and not is_patched(module):
            kind = kind_of(module)
            if kind not in activations:
                activations[kind] = mlp.slow_activation(module)
            if activations[kind]:
                seen.look(module)
                patch(module, mlp.activation_forward(activations[kind]))
                report.add(name, "mlp", module, True, f"activation, {activations[kind]}")


def _is_named_activation(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return any(word in name for word in ("activation", "gelu", "relu"))


# ---------------------------------------------------------------- 2. the whole model


def _replace_whole(
    model: nn.Module,
    kinds: set[str],
    example: dict[str, torch.Tensor] | None,
    report: Report,
) -> None:
    whole = next(((n, m) for n, m in model.named_modules() if isinstance(m, PreTrainedModel)), None)
    if whole is None:
        for kind in sorted(kinds & {"attention", "loss"}):
            report.add("", kind, model, False, "no transformers model")
        return
    name, model = whole  # as it is, or what peft wraps
    inputs = _inputs_of(model, example)
    if "attention" in kinds:
        _replace_attention(model, inputs, report, name)
    if "loss" in kinds:
        form = loss.find_form(model, inputs, fields := {})
        if isinstance(form, loss.Form):
            loss.install(model, form, fields)
            why = loss.differs(model, inputs)
            if why is not None:
                loss.uninstall(model)
                form = why
        report.add(name, "loss", model, isinstance(form, loss.Form), str(form))


def _inputs_of(
    model: PreTrainedModel, example: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """What a model is compared on."""
    inputs = dict(model.dummy_inputs if example is None else example)
    if example is None:
        inputs.pop("attention_mask", None)  # `_paddings` makes its own
    return {k: v.to(model.device) for k, v in inputs.items() if isinstance(v, torch.Tensor)}


def _replace_attention(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], report: Report, own_name: str
) -> None:
    """Switch the attention and keep it so if the whole model's output stays what it was."""
    names = {m: f"{own_name}.{n}".strip(".") for n, m in model.named_modules()}
    for module, name in names.items():
        if "inv_freq" in dict(module.named_buffers(recurse=False)):
            why = "rotation is a function inside the attention, no module"
            report.add(name, "rotary", module, False, why)
    if not model._can_set_attn_implementation():
        why = "its attention does not go through transformers' AttentionInterface"
        report.add(own_name, "attention", model, False, why)
        return
    wanted = _outputs(model, inputs)
    if isinstance(wanted, str):
        report.add(
            own_name, "attention", model, False, f"does not run on its dummy inputs: {wanted}"
        )
        return
    before = {
        name: module.config._attn_implementation
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
    }
    model.set_attn_implementation(attention.NAME)
    model.__dict__[_BEFORE] = before
    with attention.callers() as callers:
        found = _outputs(model, inputs)
    why = found if isinstance(found, str) else None
    if why is None and not callers:
        why = "no module called it"
    if why is None and not all(map(agree, wanted, found)):
        why = "the model's output was another one"
    if why is not None:
        _set_attention(model, model.__dict__.pop(_BEFORE))
        report.add(own_name, "attention", model, False, why)
        return
    for module in callers:
        report.add(names.get(module, ""), "attention", module, True, "attention, with its mask")


def _set_attention(model: PreTrainedModel, before: dict[str, str]) -> None:
    for name, implementation in before.items():
        model.get_submodule(name).config._attn_implementation_internal = implementation


def _outputs(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor] | str:
    """The model's first output at tokens, unpadded and padded on the left, or why there is none."""
    found = []
    try:
        for more, real in _paddings(model, inputs):
            with quietly(model):
                out = model(**inputs, **more)
            first = next(v for v in out.values() if isinstance(v, torch.Tensor))
            whole = real is None or first.shape[:2] != real.shape  # as of a class per sample
            found.append(first if whole else first[real])
    except Exception as error:  # whatever a model says to inputs that it does not know
        return one_line(error)
    return found


def _paddings(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor]
) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """More inputs, and which tokens are real: None for all."""
    parameters = inspect.signature(type(model).forward).parameters
    more: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    yield more, None
    ids = inputs.get("input_ids")
    padded = ids is not None and ids.ndim == 2 and ids.shape[1] > 2
    if padded and "attention_mask" in parameters and "attention_mask" not in inputs:
        mask = torch.ones_like(ids)
        mask[1:, :2] = 0
        decoder = model.config.is_encoder_decoder  # whose output is of no padded token
        yield {**more, "attention_mask": mask}, None if decoder else mask.bool()
