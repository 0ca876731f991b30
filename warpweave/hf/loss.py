"""Fused head and loss of a causal language model; logits are never held in training.

The model's own forward runs unchanged. When it calls its head, the hidden states are saved, and a
meta tensor, which has no memory, is returned instead of the logits. When it calls its loss function
with that tensor, `vocab_parallel_linear_cross_entropy` computes the loss from the hidden states and
the head's weight, on one rank or several. Anything else that a forward does with the logits raises
an error on the meta device.

A model may multiply its logits by a factor or apply a softcap. `apply` determines this when it
compares both forwards (`find_loss_form`), with the fields and numbers that the model read. The
factor is applied to the hidden states. With a softcap, blocks of rows are recomputed in the
backward pass. A bias and LoRA's two matrices become additional columns of the hidden states and of
the weight: [x, 1, A x] [W, b, B]^T.

The loss is fused in training mode, with `labels`, under gradients, as long as the model still has
transformers' loss function and treats its logits as before. In this case, `logits` is None in the
model's output. To run Hugging Face's forward, pass `return_logits=True` or evaluate
(`model.eval()`). The mean over zero labels is 0 here, but NaN in Hugging Face's forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from warpweave.cli.messages import one_line
from warpweave.hf import arguments, seen
from warpweave.hf.changes import forget, known, note
from warpweave.hf.mlp import is_plain_linear
from warpweave.hf.options import HeadVocabulary
from warpweave.hf.patch import original, patch, unpatch
from warpweave.hf.probe import agree, quietly
from warpweave.layers.linear import has_hooks
from warpweave.layers.sharding.dtensor import local
from warpweave.parallel.collectives import copy_to, group_size, own_slice, reduce_from, scatter
from warpweave.parallel.tensor import vocab_parallel_linear_cross_entropy


class LossForm(NamedTuple):
    """logits = factor * (x W^T), or softcap * tanh(x W^T / softcap)."""

    factor: float = 1.0
    softcap: float | None = None
    model: Any = PreTrainedModel  # the model's class
    live: tuple[str, ...] = ()  # its children, and attributes without effect on the loss
    fields: seen.Fields = ()  # the fields of the configuration that its forward read

    @property
    def forward(self) -> Callable:
        return _forward_of(self)

    def __str__(self) -> str:
        factor = f", logits * {self.factor:.6g}" if self.factor != 1 else ""
        return "linear_cross_entropy" + (f", softcap {self.softcap:g}" if self.softcap else factor)


# Prefixes of a model's numbers that its forward only passes on, or that select other outputs.
_LIVE = ("vocab_size", "output_", "use_cache", "return_dict", "use_return_dict")


# ---------------------------------------------------------------- 1. the head

_Columns = list[tuple[torch.Tensor, torch.Tensor]]  # additional columns of x and of W


def head_terms(head: Any) -> Callable | None:
    """x -> (x', W') with head(x) = x' W'^T, for a linear layer, with or without peft's LoRA.

    Returns None for any other head, and for a head with hooks of other code, which must see logits.
    Call this before the head's forward is replaced, because the head then is not a plain linear
    layer.
    """
    if not torch.compiler.is_compiling() and seen.hooked_everywhere():
        return None
    if _is_linear(head):
        return lambda x: _with_columns(x, head, _bias_columns(head, x))
    base, lora = getattr(head, "base_layer", None), getattr(head, "lora_A", None)
    if lora is None or "forward" in head.__dict__ or has_hooks(head) or not _is_linear(base):
        return None
    names = [n for n in head.active_adapters if n in lora]
    layers = [layer for n in names for layer in (lora[n], head.lora_B[n])]
    variants = getattr(head, "lora_variant", names)  # such as DoRA; if missing, assume a variant
    if head.merged or head.disable_adapters or any(n in variants for n in names):
        return None
    plain = all(is_plain_linear(x) or (_is_cut(base) and _is_untouched(x)) for x in layers)
    if not plain or any(layer.bias is not None for layer in layers):
        return None

    def terms(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        columns = _bias_columns(base, x)
        for n in names:
            small = lora[n](head.lora_dropout[n](x.to(lora[n].weight.dtype)))
            columns.append((small.to(x.dtype) * head.scaling[n], local(head.lora_B[n].weight)))
        return _with_columns(x, base, columns)

    return terms


def _is_linear(head: Any) -> bool:
    """Return True if a head is a plain linear layer, or one whose rows are sharded."""
    return isinstance(head, nn.Linear) and (is_plain_linear(head) or _is_cut(head))


def _is_cut(head: Any) -> bool:
    vocabulary = known(head, HeadVocabulary)
    return vocabulary is not None and vocabulary.cut and _is_untouched(head)


def _is_untouched(linear: Any) -> bool:
    """Return True if no other code put a hook or a forward on a linear layer over ranks."""
    own = linear.__dict__.get("forward")
    touched = seen.hooked(linear) is not None or (own is not None and seen.is_from_outside(own))
    return type(linear).forward is nn.Linear.forward and not touched


def vocabulary_of(head: Any) -> HeadVocabulary | None:
    """The sharding of a head, or of the layer that LoRA wraps; None on one device."""
    return known(getattr(head, "base_layer", head), HeadVocabulary)


def _bias_columns(head: nn.Linear, x: torch.Tensor) -> _Columns:
    return [] if head.bias is None else [(x.new_ones(*x.shape[:-1], 1), local(head.bias)[:, None])]


def _with_columns(
    x: torch.Tensor, head: nn.Linear, columns: _Columns
) -> tuple[torch.Tensor, torch.Tensor]:
    """x' and W' of a head with additional columns; if rows are sharded, this rank's rows."""
    weight, vocabulary = local(head.weight), vocabulary_of(head)
    if vocabulary is not None and vocabulary.cut:
        weight = vocabulary.padded(weight)
        columns = [(more, vocabulary.own_rows(w)) for more, w in columns]
    if not columns:
        return x, weight
    more_x, more_w = zip(*columns)
    wide = torch.cat([weight, *(w.to(weight.dtype) for w in more_w)], 1)
    return torch.cat([x, *more_x], -1), wide


# ---------------------------------------------------------------- 2. the loss


def fused_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    form: LossForm,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    vocabulary: HeadVocabulary | None = None,
) -> torch.Tensor:
    """`ForCausalLMLoss` of the logits that x[B, S, E] and weight[V, E] would give with `form`. The
    weight is [V/R, E] if a `vocabulary` is sharded. Context ranks, which all have the whole x,
    share the tokens."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    labels = shift_labels.to(x.device).reshape(x.shape[:-1]).flatten()
    x = (x if form.factor == 1 else x * form.factor).flatten(0, -2)
    if num_items_in_batch is None:
        num_items_in_batch = (labels != ignore_index).sum().clamp(min=1)
    elif torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(x.device)
    group, cp, size = None, None, len(weight)
    if vocabulary is not None:
        group, cp, size = vocabulary.group, vocabulary.spread.mesh.group("cp"), vocabulary.size
    if cp is not None:
        short = -len(labels) % group_size(cp)
        x, labels = F.pad(x, (0, 0, 0, short)), F.pad(labels, (0, short), value=ignore_index)
        x, labels, weight = scatter(x, cp), own_slice(labels, cp), copy_to(weight, cp)
    total = vocab_parallel_linear_cross_entropy(
        x, weight, labels, group=group, vocab_size=size, softcap=form.softcap,
        ignore_index=ignore_index,
    )  # fmt: skip
    return reduce_from(total, cp) / num_items_in_batch


def _loss_function(
    model: Any, form: LossForm, caught: list[torch.Tensor],
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, *args: Any, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """The loss function of a model while its forward runs without logits. The head has saved x' and
    W' in `caught`."""
    if not caught or logits.device.type != "meta":
        return ForCausalLMLoss(logits, labels, vocab_size, *args, **kwargs)
    x, weight = caught
    vocabulary = vocabulary_of(model.get_output_embeddings())
    rows = len(weight) if vocabulary is None else vocabulary.size
    if rows != vocab_size:
        raise ValueError(f"the head has {rows} rows, but the loss has vocab_size = {vocab_size}")
    names = ("num_items_in_batch", "ignore_index", "shift_labels")
    options = dict(zip(names, args)) | {n: kwargs[n] for n in names if n in kwargs}
    return fused_loss(x, weight, labels, form, **options, vocabulary=vocabulary)


# ---------------------------------------------------------------- 3. the forward


class _Fused(NamedTuple):
    """The form of a fused loss, and the module that replaces the head under compilers."""

    form: LossForm
    stand_in: _StandIn


def _forward_of(form: LossForm) -> Callable:
    """The forward of a model with a fused loss; its signature is the model's own."""
    theirs = form.model.forward
    signature = inspect.signature(theirs)

    @wraps(theirs)
    def forward(self: Any, *args: Any, return_logits: bool = False, **kwargs: Any) -> Any:
        terms = None
        if self.training and torch.is_grad_enabled() and not return_logits:
            named = signature.bind_partial(self, *args, **kwargs).arguments
            returns = kwargs.get("return_dict")
            returns = arguments.own(self.config, "return_dict") if returns is None else returns
            if named.get("labels") is not None and returns and _is_causal(self):
                terms = head_terms(self.get_output_embeddings())
        if terms is None:
            return original(self)(*args, **kwargs)
        return _caught_forward(self, form, terms, args, kwargs)

    return forward


def _caught_forward(model: Any, form: LossForm, terms: Callable, args: tuple, kwargs: dict) -> Any:
    """The model's own forward, without logits."""
    head = model.get_output_embeddings()
    caught: list[torch.Tensor] = []  # x' and W', from the head to the loss
    vocabulary = vocabulary_of(head)

    def catch(x):
        caught[:] = terms(x)
        rows = len(caught[1]) if vocabulary is None else vocabulary.size
        return torch.empty(*x.shape[:-1], rows, dtype=x.dtype, device="meta")

    run = _compiled_loss if torch.compiler.is_compiling() else _patched
    before = model.__dict__.get("_loss_function", model)
    model.loss_function = partial(_loss_function, model, form, caught)
    try:
        out = run(model, head, catch, partial(original(model), *args, **kwargs))
    finally:
        del model._loss_function
        if before is not model:
            model._loss_function = before
    return type(out)(**{name: value for name, value in out.items() if name != "logits"})


def _patched(model: nn.Module, head: Any, catch: Callable, run: Callable) -> Any:
    """Call `run` while `catch` is the head's forward. Its hooks still run (FSDP's gather)."""
    before = head.__dict__.get("forward")
    head.__dict__["forward"] = catch
    try:
        return run()
    finally:
        del head.__dict__["forward"]
        if before is not None:
            head.__dict__["forward"] = before


class _StandIn(nn.Module):
    """Module that replaces a head."""

    catch: Callable | None = None

    def forward(self, x):
        return self.catch(x)


def _compiled_loss(model: Any, head: Any, catch: Callable, run: Callable) -> Any:
    """Like `_patched`, for compilers, which cannot follow a forward that is replaced temporarily. A
    head that is not a child of the model computes its logits as usual."""
    fused: Any = known(model, _Fused)
    stand_in = fused.stand_in
    names = [name for name, child in model._modules.items() if child is head]
    stand_in.catch = catch
    for name in names:
        setattr(model, name, stand_in)
    try:
        return run()
    finally:
        for name in names:
            setattr(model, name, head)
        stand_in.catch = None


# ---------------------------------------------------------------- 4. finding the form


def find_loss_form(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> LossForm | str:
    """The form that a model applies to its head's output, or the reason not to fuse its loss. The
    model runs on `inputs` with labels."""
    parameters = inspect.signature(type(model).forward).parameters
    if "labels" not in parameters or "input_ids" not in inputs:
        return "its forward has no labels"
    head = model.get_output_embeddings()
    if head is None or not _is_causal(model):
        return "its loss is not that of a causal language model"
    if head_terms(head) is None:
        return "its head is not a plain linear layer"
    if seen.owns_numbers(model):
        return "the model itself has tensors that may change its logits"
    made: list[torch.Tensor] = []

    def widen(_: nn.Module, args: tuple, z: torch.Tensor) -> torch.Tensor:
        # Columns of about 1 to 1000, so a cap shows even in 16 bits.
        size = torch.logspace(0, 3, z.shape[-1], device=z.device) / z.float().std().clamp(min=1e-6)
        made.append((z.float() * size).to(z.dtype))
        return made[-1]

    try:
        with head.register_forward_hook(widen), quietly(model), seen.noted(model) as fields:
            out = model(**inputs, labels=inputs["input_ids"])
    except Exception as error:  # a model may raise anything on inputs that it does not expect
        return f"it does not run on `example` (default: its dummy_inputs): {one_line(error)}"
    if len(made) != 1 or getattr(out, "logits", None) is None or out.loss is None:
        return "its forward does not compute logits from its head exactly once"
    form = _form_of(model, made[0], out.logits)
    if isinstance(form, str):
        return form
    live = [name for name, _ in model.named_children()]
    for name, value in vars(model).items():
        if not isinstance(value, (int, float, tuple)) or name.startswith(("_", *_LIVE)):
            live.append(name)
    fixed = tuple(f for f in fields.items() if not f[0][-1].startswith(_LIVE))
    return form._replace(model=type(model), live=tuple(live), fields=fixed)


def _is_causal(model: Any) -> bool:
    """Return True if a model has transformers' own loss function for causal language models."""
    # Reading the attribute would warn in case of a fallback, and break a compiler's graph.
    own = model.__dict__.get("_loss_function")
    if own is None:
        own = LOSS_MAPPING.get(arguments.own(model, "loss_type"), ForCausalLMLoss)
    return own is ForCausalLMLoss


def _softcap_of(model: PreTrainedModel) -> float | None:
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def _form_of(model: PreTrainedModel, z: torch.Tensor, logits: torch.Tensor) -> LossForm | str:
    if z.shape != logits.shape:
        return "its logits are not its head's output"
    softcap = _softcap_of(model)
    capped = softcap * torch.tanh(z / softcap) if softcap else z  # in its dtype, like the model
    z, capped, logits = z.float(), capped.float(), logits.float()
    factor = ((z * logits).sum() / (z * z).sum()).item()
    if agree(logits, z):
        return LossForm()
    if softcap and agree(logits, capped):
        return LossForm(softcap=float(softcap))
    return LossForm(factor) if agree(logits, z * factor) else "its logits are not its head's output"


def install(model: PreTrainedModel, form: LossForm) -> None:
    """Make the model's forward compute its loss with `form`."""
    head = model.get_output_embeddings()
    name = next((n for n, m in model.named_modules() if m is head), "")
    outer = accumulate(name.split(".")[:-1], "{}.{}".format)  # logits pass through these modules
    note(model, _Fused(form, _StandIn()))
    patch(model, form, [model.get_submodule(each) for each in outer])


def is_installed(model: nn.Module) -> bool:
    return known(model, _Fused) is not None


def uninstall(model: PreTrainedModel) -> None:
    """Restore the forward."""
    unpatch(model)
    forget(model, _Fused)


def differs(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> str | None:
    """The reason why an installed model's loss differs from its original forward's, or None."""
    fused: Any = known(model, _Fused)
    terms = head_terms(model.get_output_embeddings())
    if terms is None:  # the original forward runs
        return None
    given = {**inputs, "labels": inputs["input_ids"]}
    with quietly(model):
        wanted = original(model)(**given).loss
    try:
        with quietly(model):
            found = _caught_forward(model, fused.form, terms, (), given).loss
    except Exception as error:  # a forward may raise anything if logits are missing
        return f"its forward needs the logits: {one_line(error)}"
    if found is None or found.device.type == "meta":  # computed from the missing logits
        return "its loss does not come from its loss_function"
    # The original rounds capped logits to the model's dtype; ours are float32.
    rounded = model.dtype if _softcap_of(model) else None
    same = agree(wanted.float(), found.float(), rounded=rounded)
    return None if same else "its loss was different"
