"""Interception of every collective and message that a thread is about to issue.

All operations of torch.distributed, whether ours or a user's, go through torch's dispatcher, in
both forward and backward. `Observer` is a dispatch mode that passes each of them to `before` as an
`Operation`, whose key is the same on all ranks that take part in it:

    two ranks of group 3: two collectives, then a message between the ranks
    rank 0    all_reduce -> "3/0"    all_gather -> "3/1"    isend to 1    -> "3/0>1/0"
    rank 1    all_reduce -> "3/0"    all_gather -> "3/1"    irecv from 0  -> "3/0>1/0"

Outside ``with observer``, nothing is intercepted and there is no cost.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _python_dispatch as dispatch
from torch.utils._pytree import tree_leaves

_NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "recv_": "recv",
}


class Operation(NamedTuple):
    """A collective, or one end of a message, that this rank is about to issue.

    Attributes:
        key: identifies the group's n-th collective, or the n-th message from one rank to another.
        ranks: the participating ranks, as ranks of the default group.
        what: the name, and what must be equal on all ranks: "all_reduce of float32[4, 5]".
        given: the tensors that this rank contributes. Empty if it receives a broadcast; the buffers
            if it receives a message.
        side: "send" or "recv" for a message, "" for a collective.
        sizes: for an all-to-all, the numbers of elements for and from each rank.
    """

    key: str
    ranks: tuple[int, ...]
    what: str
    given: tuple[torch.Tensor, ...]
    side: str = ""
    sizes: tuple[list[int], list[int]] | None = None


class Observer(dispatch.TorchDispatchMode):
    """Pass each operation that is issued within ``with observer`` to `before`.

    It may be entered again, even by several threads (`carried`), and its count continues.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def before(self, operation: Operation) -> None:
        """Handle an operation that is about to be issued; raise to prevent it."""
        raise NotImplementedError

    def numbered(self, group: str) -> str:
        """The key of the next operation of a group, or of a link within a group."""
        return f"{group}/{next(self._numbers[group])}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.before(self._operation(func, args))
        return func(*args, **(kwargs or {}))

    def _operation(self, func: Any, args: tuple) -> Operation:
        op = func._schema.name.removeprefix("c10d::")
        at = next(i for i, a in enumerate(func._schema.arguments) if a.name == "process_group")
        group = dist.ProcessGroup.unbox(args[at])
        ranks, name = tuple(dist.get_process_group_ranks(group)), str(group.group_name)
        every = tree_leaves(args[at - 1])  # in torch's schemas the input precedes the group
        given = tuple(x for x in every if isinstance(x, torch.Tensor))
        what = f"{_NAMES.get(op, op.strip('_'))} of {described(given)}"
        if op in ("send", "recv_"):
            me, peer = group.rank(), args[2]
            src, dst = (me, peer) if op == "send" else (peer, me)
            key = self.numbered(f"{name}/{src}>{dst}")
            return Operation(key, (ranks[src], ranks[dst]), what, given, op.strip("_"))
        sizes = None
        if op == "alltoall_base_":
            what, sizes = f"all_to_all of {given[0].dtype}", (list(args[4]), list(args[3]))
        elif op == "broadcast_":
            what += f" from rank {ranks[args[2]]}"
            given = given if group.rank() == args[2] else ()
        return Operation(self.numbered(name), ranks, what, given, sizes=sizes)


def described(tensors: tuple[torch.Tensor, ...]) -> str:
    """ "float32[4, 5]" for each tensor, for error messages."""
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}" for x in tensors)


def observers() -> list[Observer]:
    """The observers that this thread has entered."""
    return [m for m in dispatch._get_current_dispatch_mode_stack() if isinstance(m, Observer)]


def carried(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fn` for another thread so that this thread's observers also see what it issues (torch's
    modes are per thread)."""
    if not (found := observers()):
        return fn

    def run(*args: Any) -> Any:
        with ExitStack() as modes:
            for mode in found:
                modes.enter_context(mode)
            return fn(*args)

    return run
