"""`apply` and `revert`: replace the forwards of a Hugging Face model, and undo it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from warpweave.cli.messages import one_line
from warpweave.hf import adapters, attention, loss, mlp, norm, parallel
from warpweave.hf.arguments import own
from warpweave.hf.changes import NAME, changes_of, note, undo
from warpweave.hf.options import Spread
from warpweave.hf.patch import Form, is_foreign, patch, unpatch
from warpweave.hf.probe import agree, kind_of, quietly
from warpweave.hf.report import Report
from warpweave.parallel.context import Links, Strategy, check_strategy
from warpweave.parallel.mesh import ConnectedMesh, connected
from warpweave.parallel.tensor.ranks import check_overlap

KINDS = ("norm", "mlp", "attention", "loss")
_IMPLEMENTATION = "_attn_implementation_internal"  # the attribute of a configuration
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
    """Replace the forwards of a model's modules by warpweave's if both agree on a probe.

    With `mesh`, also shard the model over its tensor and context ranks. One norm or feed-forward
    module of each kind is compared; attention and loss are compared with the whole model on a few
    tokens (twice, once with padding). The comparison does not change gradients or random state.
    Names of parameters, `state_dict` and the signature of `forward` do not change. Call `apply`
    before the model is wrapped (DDP, FSDP, compile), before or after peft.

    Args:
        model: a transformers model, also inside peft's. For any other `nn.Module`, only norms and
            feed-forward modules are replaced.
        only: the kinds to replace, out of "norm", "mlp", "attention" and "loss". Default: all.
        dry: report what would be replaced, but do not change the model.
        example: inputs for the comparison, passed as `model(**example)`, for a model that does not
            run on its own `dummy_inputs`.
        mesh: a connected mesh. Its ranks along tp and cp have the same model and the same tokens,
            and share the work; see `warpweave.hf.parallel`. Every rank must call `apply`, and later
            the model's forward, `save_pretrained` and `revert`.
        sequence_parallel: between the layers, shard tokens over the tensor ranks as well.
        overlap: overlap of collectives with matrix products, see `parallel.tensor.ranks`.
        strategy: strategy of context-parallel attention, or `Links`, see `parallel.context`.
        report: a `Report` to which each module is added as replaced or kept, with the reason.
            Without one, the first rank prints a short table.

    Returns the model itself.

    Raises ValueError if `only` names an unknown kind, if `apply` was called before, if there is
    nothing to replace, or (naming the module) if the model cannot be sharded. Raises TypeError if
    `model` is not a module. `warpweave.hf.attention` lists what a replaced attention rejects later,
    and `warpweave.hf.loss` describes `logits` in training.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from warpweave.hf import Report
        >>> config = LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1)
        >>> report = Report()
        >>> model = apply(LlamaForCausalLM(config), report=report)
        >>> sorted({entry.kind for entry in report.replaced()})
        ['attention', 'loss', 'mlp', 'norm']
    """
    kinds = _check_model(model, only)
    spread = _check_mesh(model, kinds, mesh, sequence_parallel, overlap, strategy)
    found = Report()
    try:
        if "norm" in kinds:
            _replace_norms(model, found)
        if "mlp" in kinds:
            adapted = adapters.adapted(model)
            with adapters.taken_out(model):
                _replace_mlps(model, found, adapted)
        if "attention" in kinds or "loss" in kinds:
            _replace_whole(model, kinds, example, found)
        if not found.replaced():
            reasons = "; ".join(sorted({e.why for e in found.entries})) or "no known module"
            raise ValueError(f"nothing to replace in {type(model).__name__}: {reasons}")
        if spread is not None:
            _spread(_transformers_model(model), spread, example, found)
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
    """Undo `apply`: restore every forward, the attention and the loss function.

    Raises ValueError if `apply` was not called.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from warpweave.hf import Report, apply
        >>> config = LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1)
        >>> model = apply(LlamaModel(config), report=Report())
        >>> revert(model)
    """
    if not _is_applied(model):
        raise ValueError(f"{type(model).__name__} does not use warpweave.hf; call apply first")
    _undo(model)


def _check_model(model: nn.Module, only: Collection[str] | None) -> set[str]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply needs a model, got {type(model).__name__}")
    kinds = set(KINDS if only is None else [only] if isinstance(only, str) else only)
    if not kinds or kinds - set(KINDS):
        raise ValueError(f"`only` must be one or more of {', '.join(KINDS)}, got {only!r}")
    if _is_applied(model):
        raise ValueError(f"{type(model).__name__} already uses warpweave.hf; call revert first")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(f"{type(model).__name__} has parameters on the meta device; load it first")
    return kinds


def _check_mesh(
    model: nn.Module,
    kinds: set[str],
    mesh: ConnectedMesh | None,
    sequence_parallel: bool,
    overlap: str,
    strategy: Strategy | Links,
) -> Spread | None:
    mesh = connected(mesh)
    check_overlap(overlap)
    check_strategy(strategy)
    if mesh.size("tp") == mesh.size("cp") == 1:
        return None
    name, given = type(model).__name__, ", ".join(sorted(kinds))
    if mesh.size("pp") > 1:
        raise ValueError(f"{name}: apply does not support pipeline stages; use pp = 1")
    if _transformers_model(model) is None:
        raise ValueError(f"apply(mesh=...) needs a transformers model, got {name}")
    if "attention" not in kinds:
        raise ValueError(f"{name}: with a mesh, `only` must include attention, got {given}")
    return Spread(mesh, sequence_parallel and mesh.size("tp") > 1, overlap, strategy)


def _transformers_model(model: nn.Module) -> Any:
    """The transformers model: `model` itself, or the one that peft wraps; None if there is none."""
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)


def _is_applied(model: nn.Module) -> bool:
    return any(NAME in module.__dict__ for module in model.modules())


def _undo(model: nn.Module) -> None:
    for module in model.modules():
        parallel.join_parameters(module)
    for module in model.modules():
        undo(module)


def _spread(
    model: PreTrainedModel, spread: Spread, example: dict[str, torch.Tensor] | None, report: Report
) -> None:
    """Shard an applied model over ranks and check that it computes the same as before."""
    inputs = _inputs_of(model, example)
    if example is None:  # a number of tokens that ranks can share
        ids = inputs["input_ids"]
        n = parallel.tokens_of(spread).divisor
        length = -(-ids.shape[1] // n) * n
        inputs = {"input_ids": ids.repeat(1, length)[:, :length]}
    wanted = _outputs(model, inputs)
    with adapters.taken_out(model):
        watch = parallel.spread_model(model, spread, inputs, report)
    watch.untouched.check_layers()
    watch.look()  # lets adapters on the layers compute over ranks
    found = _outputs(model, inputs)
    why = wanted if isinstance(wanted, str) else None
    if why is None and isinstance(found, str):
        why = f"its forward fails once the model is sharded (it may need all heads): {found}"
    if why is None and not all(map(agree, wanted, found)):
        why = "its output differs from the output before sharding"
    why = why or (loss.differs(model, inputs) if loss.is_installed(model) else None)
    if why is not None:
        raise ValueError(f"{type(model).__name__} cannot be spread over {spread.mesh.sizes}: {why}")
    if example is None:  # ranks can share its tokens; otherwise, the first forward is checked
        # Raises if a parameter would get only a part of its gradient, see `entered`.
        with quietly(model), torch.enable_grad():
            model(**inputs, use_cache=False)
    parallel.check_next_inputs(model, spread)


# ---------------------------------------------------------------- 1. module by module


def _replace_norms(model: nn.Module, report: Report) -> None:
    forms: dict[tuple, Form | str] = {}
    for name, module in model.named_modules():
        if not norm.is_norm_candidate(module):
            continue
        if is_foreign(module):
            report.add(name, "norm", module, "its forward was replaced by other code")
        else:
            report.add(name, "norm", module, _patch_module(module, norm.find_norm_form, forms))


def _replace_mlps(model: nn.Module, report: Report, adapted: Collection[nn.Module]) -> None:
    forms: dict[tuple, Form | str] = {}
    inside: set[nn.Module] = set()  # of a replaced module
    for name, module in model.named_modules():
        if module in inside or is_foreign(module):
            continue
        if any(p.ndim == 3 for p in module.parameters(recurse=False)):
            report.add(name, "mlp", module, "products of grouped experts")
        if mlp.is_mlp_candidate(module):
            form = _patch_module(module, mlp.find_mlp_form, forms)
            if isinstance(form, mlp.MLPForm) and form.plain and module in adapted:
                report.add(name, "mlp", module, "adapters on its linear layers")
                unpatch(module)
                continue
            report.add(name, "mlp", module, form)
            if not isinstance(form, str):
                inside.update(module.modules())
        elif mlp.is_activation(module):
            form = _patch_module(module, mlp.activation_of, forms)
            if not isinstance(form, str):
                report.add(name, "mlp", module, form)


def _patch_module(
    module: nn.Module, find: Callable[[Any], Form | str], forms: dict[tuple, Form | str]
) -> Form | str:
    """Patch a module with its form, if there is one; `forms` caches the forms of known kinds."""
    if (kind := kind_of(module)) not in forms:
        forms[kind] = find(module)
    form = forms[kind]
    if not isinstance(form, str):
        patch(module, form)
    return form


# ---------------------------------------------------------------- 2. the whole model


def _replace_whole(
    model: nn.Module, kinds: set[str], example: dict[str, torch.Tensor] | None, report: Report
) -> None:
    whole = next(((n, m) for n, m in model.named_modules() if isinstance(m, PreTrainedModel)), None)
    if whole is None:
        for kind in sorted(kinds & {"attention", "loss"}):
            report.add("", kind, model, "no transformers model")
        return
    name, model = whole  # the model itself, or the one that peft wraps
    inputs = _inputs_of(model, example)
    if "attention" in kinds:
        _replace_attention(model, inputs, report, name)
    if "loss" in kinds:
        form = loss.find_loss_form(model, inputs)
        if not isinstance(form, str):
            loss.install(model, form)
            if (why := loss.differs(model, inputs)) is not None:
                loss.uninstall(model)
                form = why
        report.add(name, "loss", model, form)


def _inputs_of(
    model: PreTrainedModel, example: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """The inputs for comparing a model."""
    inputs = dict(model.dummy_inputs if example is None else example)
    if example is None:
        inputs.pop("attention_mask", None)  # `_paddings` makes its own
    return {k: v.to(model.device) for k, v in inputs.items() if isinstance(v, torch.Tensor)}


def _replace_attention(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], report: Report, own_name: str
) -> None:
    """Replace the attention, but undo it unless the whole model's output agrees with before."""
    keep = partial(report.add, own_name, "attention", model)
    names = {m: f"{own_name}.{n}".strip(".") for n, m in model.named_modules()}
    for module, name in names.items():
        if "inv_freq" in dict(module.named_buffers(recurse=False)):
            why = "RoPE is applied by a function inside attention, not by a module"
            report.add(name, "rotary", module, why)
    if not model._can_set_attn_implementation():
        return keep("its attention does not use transformers' AttentionInterface")
    wanted = _outputs(model, inputs)
    if isinstance(wanted, str):
        return keep(f"it does not run on `example` (default: its dummy_inputs): {wanted}")
    changes = changes_of(model)
    configs = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    for config in configs:
        own(config, _IMPLEMENTATION)
        changes.remember(config, _IMPLEMENTATION)
    model.set_attn_implementation(attention.NAME)
    with attention.callers(model) as callers:
        found = _outputs(model, inputs)
    why = found if isinstance(found, str) else None
    if why is None and not callers:
        why = "no module called it"
    if why is None and not all(map(agree, wanted, found)):
        why = "the model's output was different"
    if why is not None:
        for config in configs:
            changes.restore(config, _IMPLEMENTATION)
        return keep(why)
    note(model, attention.Named())
    for module in callers:
        name, how = names.get(module, ""), "attention, with its mask"
        report.add(name, "attention", module, how, replaced=True)


def _outputs(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor] | str:
    """The model's first output at real tokens, without padding and with padding on the left. If the
    model fails, return the error's text instead."""
    found = []
    try:
        for more, real in _paddings(model, inputs):
            with quietly(model):
                out = model(**inputs, **more)
            first = next(v for v in out.values() if isinstance(v, torch.Tensor))
            whole = real is None or first.shape[:2] != real.shape  # e.g. one class per sample
            found.append(first if whole else first[real])
    except Exception as error:  # a model may raise anything on inputs that it does not expect
        return one_line(error)
    return found


def _paddings(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor]
) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """Yield additional inputs, with a mask of the real tokens (None: all)."""
    parameters = inspect.signature(type(model).forward).parameters
    more: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    decoder = model.config.is_encoder_decoder  # its output has no padded tokens
    ids, given = inputs.get("input_ids"), inputs.get("attention_mask")
    yield more, None if decoder or given is None else given.bool()
    padded = ids is not None and ids.ndim == 2 and ids.shape[1] > 2
    if padded and "attention_mask" in parameters and given is None:
        mask = torch.ones_like(ids)
        mask[1:, :2] = 0
        yield {**more, "attention_mask": mask}, None if decoder else mask.bool()
