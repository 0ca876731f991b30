"""Registration of functions as operators ``torch.ops.warpweave.<name>``; the only registrar.

Compilers cannot trace a Triton launch, and DTensor cannot shard one, so both see an operator
instead. An `Op` consists of plain functions and an einsum:

    run       computes: tensors, numbers and records in; a tensor, a tuple or list of them (which
              may share memory), or None
    fake      the same signature: empty outputs of the right shapes and dtypes
    save      what the backward needs: ``save(ctx, inputs, output)``, as in `torch.autograd`
    backward  gradients of run's arguments (None for records) from those of the outputs; trailing
              Nones may be left out
    sharding  the dims that may be sharded, as an einsum: "b_h_, b_h_, b_h_ -> b_h_, bh_"

torch's operators do not accept records, so a NamedTuple is passed as its tensors and lists of
integers, floats and strings (`flatten`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args, get_type_hints

import torch
from torch.autograd import forward_ad

# ---------------------------------------------------------------- records

_NONE, _FALSE, _TRUE, _INT, _FLOAT, _WORD, _DTYPE, _TUPLE = range(8)  # 8, 9, ...: the records


def flatten(value: Any, records: Sequence[type]) -> tuple[int, list[int], list[float], str]:
    """Encode a record, without its tensors, as (length, integers, reals, words); see `unflatten`.

    The integers describe the fields in order: [_INT, 5], [_FLOAT] for the next real, [_WORD] for
    the next word, [kind, length, ...] for a tuple or another record. A compiler's symbols stay
    symbols within lists. The length is a separate number, because DTensor caches a call's sharding
    by what follows its first plain integer, and all of this may affect the sharding.
    """
    integers: list[int] = []
    reals: list[float] = []
    words: list[str] = []
    _put((value,), records, integers, reals, words)
    return len(integers), integers, reals, "\n".join(words)


def _put(fields: Sequence, records: Sequence[type], integers: list, reals: list, words: list):
    for value in fields:
        if value is None or isinstance(value, torch.Tensor):
            integers.append(_NONE)
        elif isinstance(value, bool):
            integers.append(_TRUE if value else _FALSE)
        elif isinstance(value, (int, torch.SymInt)):
            integers += (_INT, value)
        elif isinstance(value, (float, torch.SymFloat)):
            integers.append(_FLOAT)
            reals.append(value)
        elif isinstance(value, str):
            integers.append(_WORD)
            words.append(value)
        elif isinstance(value, torch.dtype):
            integers.append(_DTYPE)
            words.append(str(value).removeprefix("torch."))
        else:
            plain = type(value) in (tuple, list)
            integers += (_TUPLE if plain else _TUPLE + 1 + records.index(type(value)), len(value))
            _put(value, records, integers, reals, words)


def unflatten(
    integers: Sequence[int], reals: Sequence[float], words: str, records: Sequence[type]
) -> Any:
    """Decode the record that was passed to `flatten`, with None for tensors."""
    return _take(1, iter(integers), iter(reals), iter(words.split("\n")), records)[0]


def _take(
    length: int,
    integers: Iterator[int],
    reals: Iterator[float],
    words: Iterator[str],
    records: Sequence[type],
) -> list[Any]:
    fields: list[Any] = []
    for _ in range(length):
        kind = next(integers)
        if kind < _INT:
            fields.append((None, False, True)[kind])
        elif kind < _DTYPE:
            fields.append(next((integers, reals, words)[kind - _INT]))
        elif kind == _DTYPE:
            fields.append(getattr(torch, next(words)))
        else:
            inner = _take(next(integers), integers, reals, words, records)
            fields.append(tuple(inner) if kind == _TUPLE else records[kind - _TUPLE - 1](*inner))
    return fields


# ---------------------------------------------------------------- operators


def operator(
    name: str, fake: Callable[..., Any], **options: Any
) -> Callable[[Callable[..., Any]], Op]:
    """Decorator that turns a `run` function into an `Op`."""
    return lambda run: Op(name, run, fake, **options)


class Op:
    """An operator, called with the positional arguments of `run`.

    Args:
        name: of ``torch.ops.warpweave.<name>``.
        run: every argument annotated: a tensor, ``Tensor | None``, ``list[Tensor]``, bool, int,
            float, str, or a record of `records` or None.
        fake: see above.
        records: the types of records among the arguments, including nested ones.
        writes: names of the arguments that `run` writes to.
        gradient: (save, backward), see above; without it the operator has none.
        direct: for ops within Functions, which never see a tensor subclass: a call is just `run`,
            without any checks, unless a compiler traces.
        sharding: the einsum, or a function of run's arguments that returns it. It has a term for
            each tensor; the tensors of a record are listed in its place. See `kernels.sharding`.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        records: Sequence[type] = (),
        writes: Sequence[str] = (),
        gradient: tuple[Callable[..., None], Callable[..., Any]] | None = None,
        direct: bool = False,
        sharding: str | Callable[..., str] | None = None,
    ) -> None:
        self.run, self.records, self.direct, self.sharding = run, records, direct, sharding
        hints = get_type_hints(run)
        result = hints.pop("return")
        self._tensors = [_tensor_fields(hint, records) for hint in hints.values()]
        parameters = [
            inspect.Parameter(part, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=of)
            for (arg, hint), tensors in zip(hints.items(), self._tensors, strict=True)
            for part, of in _parts(arg, hint, tensors).items()
        ]

        def flat(*args: Any) -> Any:
            return _separate(run(*self.nested(args)))

        flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters, return_annotation=None if result is type(None) else result
        )
        self.operator = torch.library.custom_op(f"warpweave::{name}", flat, mutates_args=writes)
        # Replaces the kernel that custom_op makes. That one imports all of torch.compile at its
        # first call (two seconds) and checks at each call if outputs are inputs.
        torch.library.impl(f"warpweave::{name}", ("cpu", "cuda"), flat)
        self.operator.register_fake(lambda *args: fake(*self.nested(args)))
        self._function: type[torch.autograd.Function] | None = None
        if gradient is None:
            return
        save, backward = gradient
        self._function = _function(name, run, save, backward)

        def setup(ctx: Any, inputs: tuple, output: Any) -> None:
            save(ctx, self.nested(inputs), output)

        def back(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            found = backward(ctx, *grads)
            left = iter(found if isinstance(found, tuple) else (found,))
            flat: list[torch.Tensor | None] = []
            for tensors in self._tensors:
                grad = next(left, None)
                flat += [grad] if tensors is None else [None] * (len(tensors) + 4)
            return tuple(flat)

        self.operator.register_autograd(back, setup_context=setup)

    def __call__(self, *args: Any) -> Any:
        """Return the operator's result.

        If only autograd observes the call, skip torch's dispatcher, which takes longer than a small
        kernel on a GPU.
        """
        if self.direct and not torch.compiler.is_compiling():
            return self.run(*args)
        given = self._given(args)
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        if not _unseen(given) or (recorded and self._function is None):
            return self.operator(*self.flattened(args))  # raises if it has no derivative
        return self._function.apply(*args) if recorded else self.run(*args)

    def _given(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """All tensors among the arguments, including those in lists and records."""
        found: list[Any] = []
        for arg, tensors in zip(args, self._tensors, strict=True):
            if tensors:
                found += [] if arg is None else [getattr(arg, name) for name in tensors]
            elif tensors is None:
                found += arg if type(arg) is list else (arg,)
        return [x for x in found if isinstance(x, torch.Tensor)]

    def flattened(self, args: Sequence[Any]) -> list[Any]:
        """The operator's arguments from those of `run`."""
        found: list[Any] = []
        for arg, tensors in zip(args, self._tensors, strict=True):
            if tensors is None:
                found.append(arg)
            else:
                held = [getattr(arg, name, None) for name in tensors]
                found += [x if isinstance(x, torch.Tensor) else None for x in held]
                found += flatten(arg, self.records)
        return found

    def nested(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of `run` from the operator's."""
        left, found = iter(args), []
        for tensors in self._tensors:
            if tensors is None:
                found.append(next(left))
                continue
            given = [(name, next(left)) for name in tensors]
            _, integers, reals, words = (next(left) for _ in range(4))
            record = unflatten(integers, reals, words, self.records)
            held = {name: x for name, x in given if x is not None}  # others may hold a number
            found.append(record._replace(**held) if held else record)
        return found


def _separate(outputs: Any) -> Any:
    """The outputs, with a contiguous copy of each that shares memory with another.

    `run` may return several views of one result, but torch forbids that to an operator. A single
    view must have the strides that the operator's fake returns.
    """
    if not isinstance(outputs, (tuple, list)):
        return outputs
    held = [x.untyped_storage().data_ptr() if x.numel() else 0 for x in outputs]
    return type(outputs)(
        x.clone(memory_format=torch.contiguous_format) if at and held.count(at) > 1 else x
        for x, at in zip(outputs, held, strict=True)
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _unseen(given: Sequence[torch.Tensor]) -> bool:
    """Return True if nothing needs to see an operator, so that `run` can be called directly.

    Then no compiler, mode or transform is active, and all tensors are plain ones that hold numbers
    (no DTensor, none of a mode, none on "meta").
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return all(type(x) in _PLAIN and not x.is_meta for x in given)


def _function(
    name: str, run: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """An autograd Function with an operator's run and gradient, if only autograd observes it."""
    count = len(inspect.signature(run).parameters)

    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        save(ctx, args, output)
        return output

    def back(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        return found + (None,) * (count - len(found))

    parts = {"forward": staticmethod(forward), "backward": staticmethod(back)}
    return type(name, (torch.autograd.Function,), parts)


def _tensor_fields(hint: Any, records: Sequence[type]) -> list[str] | None:
    """The names of the tensors in a record; None if `hint` is not a record type."""
    record = next((each for each in (hint, *get_args(hint)) if each in records), None)
    if record is None:
        return None
    fields = get_type_hints(record).items()
    return [name for name, of in fields if of is torch.Tensor or torch.Tensor in get_args(of)]


def _parts(name: str, hint: Any, tensors: list[str] | None) -> dict[str, Any]:
    """The operator's arguments for one argument of `run`: names and types."""
    if tensors is None:
        return {name: hint}
    return dict.fromkeys(tensors, torch.Tensor | None) | {
        f"{name}_length": int,
        f"{name}_integers": Sequence[int],
        f"{name}_reals": Sequence[float],
        f"{name}_words": str,
    }
