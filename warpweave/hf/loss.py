"""Head and loss of a causal language model, fused: its logits are never held in training.

The model's own forward runs unchanged. When it calls its head, the hidden states are saved and a
tensor on the meta device, without memory, is returned in place of the logits; when it calls its
loss function with that, `vocab_parallel_linear_cross_entropy` computes the loss from the hidden
states and the head's weight, on one rank or several. Anything else that a forward does with logits
raises an error on the meta device.

What a model does to its logits, a factor or a softcap, was determined when `apply` compared both
(`find_loss_form`), with the fields and numbers that it read; the factor is applied to the hidden
states, and with a softcap blocks of rows are recomputed in the backward pass. A bias and LoRA's
two matrices become more columns of the hidden states and of the weight: [x, 1, A x] [W, b, B]^T.

Fused: in training mode, with `labels`, under gradients, as long as the model's loss function is
that of transformers and what it does to its logits is what it did. There `logits` is None in what
the model returns; pass `return_logits=True`, or evaluate (`model.eval()`), and Hugging Face's
forward runs.
The mean over no label at all is 0 here, NaN there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
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
from warpweave.layers.sharding.dtensor import local
from warpweave.parallel.collectives import copy_to, group_size, own_slice, reduce_from, scatter
from warpweave.parallel.tensor import vocab_parallel_linear_cross_entropy


class LossForm(NamedTuple):
    """logits = factor * (x W^T), or softcap * tanh(x W^T / softcap).

    Attributes:
        model: the model's class.
        live: what its forward may read of the model and change nothing, the children with it.
        fields: what its forward read of its configuration.
    """

    factor: float = 1.0
    softcap: float | None = None
    model: Any = PreTrainedModel
    live: tuple[str, ...] = ()
    fields: seen.Fields = ()

    @property
    def forward(self) -> Callable:
        return _forward_of(self)

    def __str__(self) -> str:
        more = f", logits * {self.factor:.6g}" if self.factor != 1 else ""
        more = f", softcap {self.softcap:g}" if self.softcap else more
        return "linear_cross_entropy" + more


# Numbers of a model that its forward hands on, or that only say what else it returns: beginnings.
_LIVE = ("vocab_size", "output_", "use_cache", "return_dict", "use_return_dict")


# ---------------------------------------------------------------- 1. what a head is

_Columns = list[tuple[torch.Tensor, torch.Tensor]]  # more of x and more of W


def head_terms(head: Any) -> Callable | None:
    """x -> (x', W') with head(x) = x' W'^T, of a linear layer, or one under peft's LoRA; else None.

    Call it before the head is caught: a caught one is no plain linear layer. Returns None also for
    a head that somebody hooked, whose hooks must see logits.
    """
    if not torch.compiler.is_compiling() and seen.hooked_everywhere():
        return None
    if _is_linear(head):
        return lambda x: _with_columns(x, head, _bias_columns(head, x))
    base, lora = getattr(head, "base_layer", None), getattr(head, "lora_A", None)
    if lora is None or "forward" in head.__dict__ or seen.has_hooks(head):
        return None
    if not _is_linear(base):
        return None
    names = [n for n in head.active_adapters if n in lora]
    layers = [layer for n in names for layer in (lora[n], head.lora_B[n])]
    variants = getattr(head, "lora_variant", names)  # DoRA and the like; not known is one, too
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
    """Whether a head is a plain linear layer, or one whose rows are sharded."""
    return isinstance(head, nn.Linear) and (is_plain_linear(head) or _is_cut(head))


def _is_cut(head: Any) -> bool:
    vocabulary = known(head, HeadVocabulary)
    return vocabulary is not None and vocabulary.cut and _is_untouched(head)


def _is_untouched(linear: Any) -> bool:
    """Return True if nobody else put a hook or a forward on a linear layer over ranks."""
    own = linear.__dict__.get("forward")
    touched = seen.hooked(linear) is not None or (own is not None and seen.is_from_outside(own))
    return type(linear).forward is nn.Linear.forward and not touched


def vocabulary_of(head: Any) -> HeadVocabulary | None:
    """How a head, or what LoRA wraps, lies on ranks; None for one device."""
    return known(getattr(head, "base_layer", head), HeadVocabulary)


def _bias_columns(head: nn.Linear, x: torch.Tensor) -> _Columns:
    return [] if head.bias is None else [(x.new_ones(*x.shape[:-1], 1), local(head.bias)[:, None])]


def _with_columns(
    x: torch.Tensor, head: nn.Linear, columns: _Columns
) -> tuple[torch.Tensor, torch.Tensor]:
    """The terms of a head with more columns; of one whose rows are sharded, this rank's rows of
    all."""
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
    """`ForCausalLMLoss` of the logits that x[B, S, E] and weight[V, E] would make by `form`; of
    weight[V/R, E] if a `vocabulary` is sharded."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.to(x.device).reshape(x.shape[:-1])
    x = x if form.factor == 1 else x * form.factor
    total = _sum(x, weight, shift_labels, form.softcap, ignore_index, vocabulary)
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels != ignore_index).sum().clamp(min=1)
    elif torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def _sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    softcap: float | None,
    ignore_index: int,
    vocabulary: HeadVocabulary | None,
) -> torch.Tensor:
    """The sum over tokens; of those that every rank has all of, context ranks take a share each."""
    group, cp, size = None, None, len(weight)
    if vocabulary is not None:
        group, cp, size = vocabulary.group, vocabulary.spread.mesh.group("cp"), vocabulary.size
    x, labels = x.flatten(0, -2), labels.flatten()
    if cp is not None:
        short = -len(labels) % group_size(cp)
        x, labels = F.pad(x, (0, 0, 0, short)), F.pad(labels, (0, short), value=ignore_index)
        x, labels, weight = scatter(x, cp), own_slice(labels, cp), copy_to(weight, cp)
    total = vocab_parallel_linear_cross_entropy(
        x, weight, labels, group=group, vocab_size=size, softcap=softcap, ignore_index=ignore_index
    )
    return reduce_from(total, cp)


def _loss_function(
    model: Any, form: LossForm, caught: list[torch.Tensor],
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, *args: Any, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """The loss function of a model while its forward runs without logits; its head has left x' and
    W' in `caught`."""
    if not caught or logits.device.type != "meta":
        return ForCausalLMLoss(logits, labels, vocab_size, *args, **kwargs)
    x, weight = caught
    vocabulary = vocabulary_of(model.get_output_embeddings())
    rows = len(weight) if vocabulary is None else vocabulary.size
    if rows != vocab_size:
        raise ValueError(f"the head has {rows} rows and the loss a vocabulary of {vocab_size}")
    names = ("num_items_in_batch", "ignore_index", "shift_labels")
    options = dict(zip(names, args)) | {n: kwargs[n] for n in names if n in kwargs}
    return fused_loss(x, weight, labels, form, **options, vocabulary=vocabulary)


# ---------------------------------------------------------------- 3. the forward


class _Fused(NamedTuple):
    """Of a model whose loss is fused: how, and what takes the place of its head in compilers."""

    form: LossForm
    stand_in: _StandIn


def _forward_of(form: LossForm) -> Callable:
    """The forward of a model whose loss is fused; its signature is the model's own."""
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
    """`run` while `catch` is the head's forward, around which its hooks go on (FSDP's gather)."""
    before = head.__dict__.get("forward")
    head.__dict__["forward"] = catch
    try:
        return run()
    finally:
        del head.__dict__["forward"]
        if before is not None:
            head.__dict__["forward"] = before


class _StandIn(nn.Module):
    """Takes the place of a head."""

    catch: Callable | None = None

    def forward(self, x):
        return self.catch(x)


def _compiled_loss(model: Any, head: Any, catch: Callable, run: Callable) -> Any:
    """The same as compilers can follow it, who know no forward that comes and goes. A head that is
    no child of the model makes its logits there."""
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


# ---------------------------------------------------------------- 4. whether it fits a model


def find_loss_form(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> LossForm | str:
    """What a model makes of its head's output, seen on `inputs` with labels, or why its loss is
    not fused."""
    parameters = inspect.signature(type(model).forward).parameters
    if "labels" not in parameters or "input_ids" not in inputs:
        return "its forward takes no labels"
    head = model.get_output_embeddings()
    if head is None or not _is_causal(model):
        return "its loss is not that of a causal language model"
    if head_terms(head) is None:
        return "its head is no plain linear layer"
    if seen.owns_numbers(model):
        return "its logits may meet numbers of its own"
    made: list[torch.Tensor] = []

    def widen(_: nn.Module, args: tuple, z: torch.Tensor) -> torch.Tensor:
        made.append(_of_all_sizes(z))
        return made[-1]

    hook = head.register_forward_hook(widen)
    try:
        with quietly(model), seen.noted(model) as fields:
            out = model(**inputs, labels=inputs["input_ids"])
    except Exception as error:  # whatever a model says to inputs that it does not know
        return f"does not run on its dummy inputs: {one_line(error)}"
    finally:
        hook.remove()
    if len(made) != 1 or getattr(out, "logits", None) is None or out.loss is None:
        return "its forward does not make logits of its head once"
    form = _form_of(model, made[0], out.logits)
    if isinstance(form, str):
        return form
    live = [name for name, _ in model.named_children()]
    for name, value in vars(model).items():
        if not isinstance(value, (int, float, tuple)) or name.startswith(("_", *_LIVE)):
            live.append(name)
    fixed = tuple(f for f in fields.items() if not f[0][-1].startswith(_LIVE))
    return form._replace(model=type(model), live=tuple(live), fields=fixed)


def _of_all_sizes(z: torch.Tensor) -> torch.Tensor:
    """A head's output with columns of about 1 to 1000, on which a cap shows also in 16 bits."""
    size = torch.logspace(0, 3, z.shape[-1], device=z.device) / z.float().std().clamp(min=1e-6)
    return (z.float() * size).to(z.dtype)


def _is_causal(model: Any) -> bool:
    """Whether a model's loss function is transformers' own of causal language models; asking the
    model would warn where it falls back to that, and cut a compiler's graph."""
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
    capped = softcap * torch.tanh(z / softcap) if softcap else z  # in its dtype, as it does it
    z, capped, logits = z.float(), capped.float(), logits.float()
    factor = ((z * logits).sum() / (z * z).sum()).item()
    if agree(logits, z):
        return LossForm()
    if softcap and agree(logits, capped):
        return LossForm(softcap=float(softcap))
    return LossForm(factor) if agree(logits, z * factor) else "its logits are not its head's output"


def install(model: PreTrainedModel, form: LossForm) -> None:
    """Let the model's forward make its loss by `form`."""
    note(model, _Fused(form, _StandIn()))
    patch(model, form, _around_head(model))


def _around_head(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that hold the head, within the model: logits go through them."""
    head = model.get_output_embeddings()
    name = next((n for n, m in model.named_modules() if m is head), "")
    names = name.split(".")[:-1]
    return [model.get_submodule(".".join(names[: n + 1])) for n in range(len(names))]


def is_installed(model: nn.Module) -> bool:
    return known(model, _Fused) is not None


def uninstall(model: PreTrainedModel) -> None:
    """Put the forward back."""
    unpatch(model)
    forget(model, _Fused)


def differs(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> str | None:
    """Why an installed model's loss is not what its original forward makes; None if it is."""
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
    except Exception as error:  # whatever a forward does to logits that are not there
        return f"its forward needs the logits: {one_line(error)}"
    if found is None or found.device.type == "meta":  # made of the logits that are not there
        return "its loss is not made by its loss_function"
    # Theirs rounds capped logits to its dtype, ours has them in float32.
    rounded = model.dtype if _softcap_of(model) else None
    same = agree(wanted.float(), found.float(), rounded=rounded)
    return None if same else "its loss is another one"
