"""Training steps on a pretended GPU: nothing is computed, and every tensor knows its device.

A device of torch's private-use type replaces the GPU, its tensors are fake (``FakeTensorMode``),
messages are dropped (the ``fake`` backend), and Triton kernels are not launched. What remains of a
step is the work of the host. It exposes two faults that a computation on the CPU cannot: a tensor
made on the wrong device, and a value read back to the host, which would stall the device.

Run this file as a program, because the device is registered for the whole process. It prints one
JSON object with the error of each case, for the correct engine and for the engine with either
fault.
"""

from __future__ import annotations

import collections
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from triton.runtime.jit import JITFunction

from warpweave.kernels.runtime import dispatch
from warpweave.model.config import ParallelPlan
from warpweave.model.engine import Engine
from warpweave.model.gpt import GPTConfig
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.pipeline import transport

DEVICE = "pretended"
ALL = slice(None)
MESHES = (  # with some of the three cases
    ({}, ALL), ({"dp": 2}, slice(2, 3)), ({"tp": 2}, slice(0, 1)), ({"cp": 2}, slice(1, 2)),
    ({"pp": 2}, slice(2, 3)), ({"dp": 2, "tp": 2, "cp": 2, "pp": 2}, ALL),
)  # fmt: skip
SIZES = {"vocab_size": 250, "seq_len": 32, "layers": 2, "heads": 4, "width": 64}
STYLES: dict[str, dict[str, Any]] = {
    "gpt2": {"dropout": 0.1},
    "llama": {
        "positions": "rope", "norm": "rms", "activation": "swiglu", "bias": False, "tied": False,
        "kv_heads": 2,
    },
}  # fmt: skip
MICROBATCHES, BATCH = 2, 2


def register() -> collections.Counter[str]:
    """Create the device and let Triton's path accept it. Return the count of launches."""
    _setup_privateuseone_for_python_backend(DEVICE)
    getattr(torch, DEVICE).get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    choose = dispatch.choose

    def choose_here(impl: str | None, *tensors: torch.Tensor | None) -> str:
        choose("torch", *tensors)  # checks the devices
        return impl or "triton"

    for name, module in list(sys.modules.items()):
        if name.startswith("warpweave") and getattr(module, "choose", None) is choose:
            module.choose = choose_here
    launches: collections.Counter[str] = collections.Counter()

    def run(self, *args, grid, warmup, **options) -> None:
        for value in (*args, *options.values()):
            if isinstance(value, torch.Tensor) and value.device.type != DEVICE:
                raise RuntimeError(f"{self.fn.__name__} was given a tensor on {value.device}")
        launches[self.fn.__name__] += 1

    JITFunction.run = run
    torch.utils.swap_tensors = _swap
    # Once per run the ranks exchange facts on the host; here no other rank answers.
    transport.Distributed._connect = lambda self: dict.fromkeys(
        transport.links(self._lists) if self._group is not None else (), self._group
    )
    ZeroOptimizer._agree = lambda self, mine: mine
    return launches


def _swap(a: torch.Tensor, b: torch.Tensor) -> None:
    """Call ``torch.utils.swap_tensors`` without its check for weak
    references: fake mode holds some."""
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


def train(
    sizes: dict[str, int], rank: int, zero: int, style: str, dtype: torch.dtype, impl: str
) -> None:
    """Run two steps and an evaluation of a small GPT as `rank` of the mesh."""
    mesh = Mesh(**sizes)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world)
    try:
        connected = mesh.connect()
        with FakeTensorMode(allow_non_fake_inputs=False):
            config = GPTConfig(**SIZES, **STYLES[style])
            plan = ParallelPlan(microbatches=MICROBATCHES, zero=zero)
            how = {"dtype": dtype, "device": torch.device(DEVICE, 0), "impl": impl}
            engine = Engine(config, connected, plan, micro_batch_size=BATCH, **how)
            likes = {(s, i): engine.message for s in range(mesh.pp) for i in range(MICROBATCHES)}
            engine.passes.transport._agree = lambda lists, stages: likes
            ids = torch.zeros(MICROBATCHES, BATCH, dtype=torch.int64, device=engine.device)
            tokens = ids[..., None].expand(-1, -1, SIZES["seq_len"]).contiguous()
            for _ in range(2):
                result = engine.step(tokens, tokens, ids, lr=1e-3)
            for value in (result.all(), engine.evaluate(tokens, tokens)):
                if value.device != engine.device:
                    raise RuntimeError(f"a result is on {value.device}")
    finally:
        dist.destroy_process_group()


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plant one of two faults in every step: "read back" a value, or a tensor "on the host"."""
    count, batches = Engine._count_valid, Engine._micro_batches

    def read_back(self, labels):
        count(self, labels).wait().item()
        return count(self, labels)

    def on_the_host(self, tokens, labels, sample_ids, valid, *more):
        there = torch.zeros_like(sample_ids, device="cpu")
        return batches(self, tokens, labels, there, valid, *more)

    places = {
        "read back": ("_count_valid", read_back),
        "on the host": ("_micro_batches", on_the_host),
    }
    with mock.patch.object(Engine, *places[fault]):
        yield


def failures(meshes: Iterable[tuple[dict[str, int], slice]]) -> dict[str, str | None]:
    """Run every mesh with its ZeRO stages, as its last rank. Return case -> error, or None."""
    found: dict[str, str | None] = {}
    for sizes, chosen in meshes:
        for case in (
            (0, "gpt2", torch.bfloat16, "triton"),
            (1, "gpt2", torch.float16, "torch"),
            (3, "llama", torch.bfloat16, "triton"),
        )[chosen]:
            name = " ".join(map(str, (sizes, *case)))
            try:
                train(sizes, Mesh(**sizes).world - 1, *case)
                found[name] = None
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def main() -> None:
    """Run the correct engine on every mesh, then each fault on one device."""
    warnings.simplefilter("ignore")
    launches = register()
    result: dict[str, Any] = {"healthy": failures(MESHES), "launches": dict(launches)}
    for fault in ("read back", "on the host"):
        with planted(fault):
            result[fault] = failures(MESHES[:1])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
