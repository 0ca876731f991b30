"""Steps recorded operator by operator: compared, and replayed as a CUDA graph would be.

A CUDA graph repeats the launches of its capture: the same numbers, the same addresses, the same
order. What a step reads on the host, or passes as a number that changes, is then wrong without an
error. All of this is visible without a GPU, where a step calls torch's dispatcher:

    Recording          the calls of a step, with their numbers, and their tensors by storage
    compare_recordings of two recordings: what a graph of the first gets wrong in the second
    PretendedGraph     captures a step on any device, and replays its calls on the same storages

A call is an operator of torch or of this library, a collective, a launch of a Triton kernel, or a
storage that is resized. Operators that call others are one call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from warpweave.kernels.runtime.dispatch import HAS_TRITON

_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_TO_HOST = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_LATER = ("send", "recv_")  # messages that must be started on both sides before one is waited for


class Extent(NamedTuple):
    """A tensor of a call: the name of its storage, and the part that it covers."""

    storage: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """A call of a step.

    Attributes:
        name: of the operator or kernel.
        values: its numbers, words and extents, in order.
        where: the line that made it, outside of torch.
        again: repeats it on the same storages, and returns the work to wait for.
        reads: True if the host waits for its result.
    """

    name: str
    values: tuple[Any, ...]
    where: str
    again: Callable[[], list[Any]] = field(repr=False)
    reads: bool = False


class Difference(NamedTuple):
    """A fault of a CUDA graph: a frozen number or storage, another order of calls, a host read.

    Examples:
        >>> print(Difference("number", "aten.mul_.Tensor", "train:9 step", "1.0", "2.0"))
        aten.mul_.Tensor at train:9 step: a number is 1.0 in the first step and 2.0 in the second
    """

    kind: str
    call: str
    where: str
    first: str
    second: str

    def __str__(self) -> str:
        found = {
            "host read": "the host reads a result",
            "order": f"the first step calls {self.first} where the second calls {self.second}",
        }
        usual = f"a {self.kind} is {self.first} in the first step and {self.second} in the second"
        return f"{self.call} at {self.where}: {found.get(self.kind, usual)}"


class Recording(TorchDispatchMode):
    """A context that records the calls inside it.

    Args:
        before: called with each storage that existed before, when it is first seen.

    Attributes:
        calls: the recorded calls.
    """

    def __init__(self, before: Callable[[torch.UntypedStorage], None] | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._before, self._names = before, dict[int, str]()
        self._kept: list[torch.UntypedStorage] = []  # no other storage gets their addresses
        self._made, self._patches = 0, ExitStack()

    def __enter__(self) -> Recording:
        resize = torch.UntypedStorage.resize_
        stack = self._patches
        stack.enter_context(_HostReads(self))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", self._resizing(resize)))
        if dist.is_available():
            stack.enter_context(patch.object(dist.Work, "wait", _without_modes(dist.Work.wait)))
        if HAS_TRITON:
            from triton.runtime.interpreter import InterpretedFunction
            from triton.runtime.jit import JITFunction

            for kind in (JITFunction, InterpretedFunction):
                stack.enter_context(patch.object(kind, "run", self._launching(kind.run)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    # ------------------------------------------------------------------ calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_flatten((args, kwargs))[0]
        if foreign := [t for t in types if t not in (Tensor, torch.nn.Parameter)]:
            raise TypeError(f"a recording needs plain tensors, got {foreign[0].__name__}")
        values = [self._value(x) for x in given]
        held_args, held_kwargs = tree_map_only(Tensor, torch.ops.aten.alias, (args, kwargs))
        out = func(*args, **kwargs)
        made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        fresh = [x.untyped_storage()._cdata not in self._names for x in made]
        values += [self._value(x, made=True) for x in made]
        results = [torch.ops.aten.alias(x) if new else None for x, new in zip(made, fresh)]
        allocates = func.overloadpacket.__name__.startswith(("empty", "new_empty"))

        def again() -> list[Any]:
            return [] if allocates else _repeat(func, held_args, held_kwargs, results)

        reads = not _VALUES.isdisjoint(func.tags)
        if func is torch.ops.aten.index.Tensor:  # only masks have a shape that depends on values
            reads = any(isinstance(x, Tensor) and x.dtype == torch.bool for x in given)
        self._note(str(func), values, again, reads)
        return out

    def _launching(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel's `run` that records the launch, unless it is part of an operator."""
        recording = self

        def launch(kernel: Any, *args: Any, **options: Any) -> Any:
            if not torch._C._len_torch_dispatch_stack():
                return run(kernel, *args, **options)
            with _disable_current_modes():
                held = tree_map_only(Tensor, Tensor.detach, (args, options))
                values = [recording._value(x) for x in tree_flatten(held)[0]]

                def again() -> list[Any]:
                    run(kernel, *held[0], **held[1])
                    return []

                recording._note(kernel.fn.__name__, values, again)
                return run(kernel, *args, **options)

        return launch

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """A storage's `resize_` that records the call."""
        recording = self

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            name = recording._storage(storage)

            def again() -> list[Any]:
                resize(storage, size)
                return []

            recording._note("resize_", [name, size], again)
            return resize(storage, size)

        return resized

    def _note(
        self, name: str, values: Sequence[Any], again: Callable[[], list[Any]], reads: bool = False
    ) -> None:
        self.calls.append(Call(name, tuple(values), _caller(), again, reads))

    # ------------------------------------------------------------------ values

    def _value(self, x: Any, made: bool = False) -> Any:
        """A value that can be compared: of a tensor its place, of an object its type."""
        if isinstance(x, Tensor):
            storage = self._storage(x.untyped_storage(), made)
            return Extent(storage, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)
        if isinstance(x, torch.ScriptObject):
            return _process_group(x) or str(x._type())
        return x if isinstance(x, _COMPARED) or x is None else type(x).__name__

    def _storage(self, storage: torch.UntypedStorage, made: bool = False) -> str:
        key = storage._cdata
        if key not in self._names:
            self._kept.append(storage)
            self._names[key] = f"made in the step, number {self._made}" if made else f"held {key:x}"
            self._made += made
            if not made and self._before is not None:
                with _disable_current_modes():
                    self._before(storage)
        return self._names[key]


_COMPARED: tuple[type, ...] = (
    *(bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _without_modes(wait: Callable[..., Any]) -> Callable[..., Any]:
    """A work's `wait` whose operators are not recorded: gloo copies results there, NCCL does
    not."""

    def waited(work: dist.Work, *args: Any) -> Any:
        with _disable_current_modes():
            return wait(work, *args)

    return waited


class _HostReads(TorchFunctionMode):
    """Records the reads of a tensor that do not pass the dispatcher on a CPU."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _TO_HOST:
            self._recording._note(func.__name__, (), list, reads=True)
        return func(*args, **(kwargs or {}))


def _process_group(x: torch.ScriptObject) -> str | None:
    """The name of a process group that was passed to an operator."""
    if "ProcessGroup" not in str(x._type()):
        return None
    return f"group {dist.ProcessGroup.unbox(x).group_name}"


def _repeat(func: Any, args: tuple, kwargs: dict[str, Any], results: list[Any]) -> list[Any]:
    """Call an operator again, copy what it makes to the storages of `results`, and return its
    work."""
    found = tree_flatten(func(*args, **kwargs))[0]
    if func.namespace == "_c10d_functional":
        for x in found:
            torch.ops._c10d_functional.wait_tensor(x)
    for into, x in zip(results, (x for x in found if isinstance(x, Tensor)), strict=True):
        if into is not None and into.numel():
            into.copy_(x)
    work: list[Any] = [x for x in found if isinstance(x, torch.ScriptObject)]
    if func.overloadpacket.__name__ in _LATER:
        return work
    for each in work:
        each.wait()
    return []


def _caller() -> str:
    """The innermost line that is neither torch's nor of this file."""
    frame = sys._getframe(2)
    inside = os.path.dirname(torch.__file__), __file__
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    return f"{module}:{frame.f_lineno} {frame.f_code.co_name}"


# ---------------------------------------------------------------- comparison


def compare_recordings(first: Recording, second: Recording) -> list[Difference]:
    """List what a graph of the step `first` gets wrong in the step `second`.

    Every difference is listed once per line of code. After a difference in the order of calls,
    nothing can be compared.
    """
    found = dict.fromkeys(
        Difference("host read", call.name, call.where, "", "")
        for call in first.calls + second.calls
        if call.reads
    )
    for a, b in zip(first.calls, second.calls):
        if a.name != b.name or len(a.values) != len(b.values):
            found[Difference("order", a.name, a.where, a.name, b.name)] = None
            return list(found)
        for x, y in zip(a.values, b.values):
            if x == y or (x != x and y != y):
                continue
            found[_difference(a, x, y)] = None
    short, long = sorted((first, second), key=lambda each: len(each.calls))
    if len(short.calls) < len(long.calls):
        extra = long.calls[len(short.calls)]
        names = ("nothing more", extra.name)
        found[
            Difference("order", extra.name, extra.where, *names[:: 1 if short is first else -1])
        ] = None
    return list(found)


def _difference(call: Call, x: Any, y: Any) -> Difference:
    if isinstance(x, Extent) and isinstance(y, Extent):
        if x.storage != y.storage:
            return Difference("storage", call.name, call.where, x.storage, y.storage)
        texts = (f"{[*p.shape]} at {p.offset} with strides {p.strides}" for p in (x, y))
        return Difference("shape", call.name, call.where, *texts)
    return Difference("number", call.name, call.where, repr(x), repr(y))


# ---------------------------------------------------------------- replay


class PretendedGraph:
    """A captured step that any device can replay, with the semantics of a CUDA graph.

    As in a capture, nothing that existed before is changed while recording. A replay repeats the
    calls on the same storages; numbers are those of the capture.

    Examples:
        >>> x, graph = torch.ones(2), PretendedGraph()
        >>> y = graph.capture(lambda: x * 2)
        >>> _ = x.fill_(5)
        >>> graph.replay()
        >>> y.tolist()
        [10.0, 10.0]
    """

    def __init__(self) -> None:
        self.recording = Recording(self._save)
        self._saved: list[tuple[torch.UntypedStorage, Tensor]] = []

    def warm_up(self, step: Callable[[], Any]) -> Any:
        """Run `step` and return its result."""
        return step()

    def capture(self, step: Callable[[], Any]) -> Any:
        """Record `step` and return its result, whose tensors each replay sets.

        Raises RuntimeError if the host reads a result, as a capture does.
        """
        try:
            with self.recording:
                result = step()
        finally:
            for storage, held in self._saved:
                if storage.nbytes() != len(held):
                    storage.resize_(len(held))
                _bytes(storage).copy_(held)
            self._saved.clear()
        read = next((call for call in self.recording.calls if call.reads), None)
        if read is not None:
            raise RuntimeError(
                f"{read.name} at {read.where} reads a result on the host, which a CUDA graph "
                "cannot do"
            )
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat the captured calls."""
        work: list[Any] = []
        for call in self.recording.calls:
            if work and not call.name.startswith("c10d."):
                for each in work:
                    each.wait()
                work.clear()
            work += call.again()
        for each in work:
            each.wait()

    def reset(self) -> None:
        """Forget the captured calls."""
        self.recording.calls.clear()

    def _save(self, storage: torch.UntypedStorage) -> None:
        self._saved.append((storage, _bytes(storage).clone()))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The storage as uint8[n]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
