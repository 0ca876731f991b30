"""Time that a training step and single operators cost the host, measured without a GPU.

A step of GPT-2 124M takes a GPU less time than Python needs to launch its kernels. So this counts
the launches of `Engine.step` and times the host: launches go through all of Triton to a launcher
that does nothing (`warpweave.machine.tune.aot.pretending`), and torch's own operators run on tiny
CPU tensors, which takes about as long as launching them. The driver's share, 2 to 5 microseconds
per launch, is missing. The model has the preset's layers and is narrow: all GEMMs then use cuBLAS,
whereas at full width some weight gradients use our kernel instead.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from unittest.mock import patch

import torch
import torch.nn.functional as F
from harness import header, interleave, parser, results_folder, write_report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from warpweave import Mesh
from warpweave.kernels.attention import attention
from warpweave.kernels.mlp import mlp
from warpweave.kernels.norm import layer_norm
from warpweave.machine.tune.aot import pretending
from warpweave.model.config import PRESETS
from warpweave.model.engine import Engine

CLAIM = "What the host does for one step: its launches, torch's operators, and milliseconds."
TARGET = "sm_90"
NARROW = {"vocab_size": 512, "seq_len": 32, "width": 192, "heads": 3}
BF16 = {"dtype": torch.bfloat16, "requires_grad": True}


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Let CPU tensors take the paths of a GPU's."""
    mm = torch.mm

    def any_dtype(a, b, *, out_dtype=None, out=None):
        y = mm(a, b)  # a CPU has no product of another dtype
        return y if out_dtype is None else y.to(out_dtype) if out is None else out

    with (
        pretending(TARGET),
        patch.object(torch.Tensor, "is_cuda", property(lambda self: True)),
        patch.object(torch, "mm", any_dtype),
    ):
        yield


class Operators(TorchDispatchMode):
    """Counts the operators of torch that a GPU would run: no views, no allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        free = func.is_view or name.startswith(("empty", "new_empty", "detach", "promote_types"))
        if func.namespace == "aten" and not free:
            self.found[name] += 1
        return func(*args, **kwargs or {})


def counted(step: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """The Triton launches and torch operators of one call, by name."""
    launches: Counter[str] = Counter()
    run = JITFunction.run

    def count(self, *args, **options):
        launches[self.fn.__name__] += 1
        return run(self, *args, **options)

    with patch.object(JITFunction, "run", count):
        step()
    # Our operators call their kernels directly unless a mode is active, as in an ordinary step.
    with Operators() as operators, patch.object(torch._C, "_len_torch_dispatch_stack", int):
        step()
    return launches, operators.found


def make_step(preset: str) -> Callable[[], object]:
    """One training step of a narrow model with the preset's layers, in bf16."""
    config = PRESETS[preset]
    grouped = {"kv_heads": 1, "hidden": 256} if config.kv_heads is not None else {}
    config = dataclasses.replace(config, **NARROW, **grouped)
    engine = Engine(config, Mesh().connect(), dtype=torch.bfloat16)
    tokens = torch.zeros((1, 1, config.seq_len), dtype=torch.int64)
    return lambda: engine.step(tokens, tokens, tokens[..., 0], lr=1e-4)


def operators() -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Operators of ours and the nearest ones of torch, by name."""
    x = torch.zeros(32, 192, **BF16)
    weight, bias = torch.ones(192, **BF16), torch.zeros(192, **BF16)
    up, down = torch.zeros(256, 192, **BF16), torch.zeros(192, 256, **BF16)
    q = torch.zeros(1, 32, 3, 64, **BF16)
    return {
        "attention": (
            lambda: attention(q, q, q, causal=True),
            lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        ),
        "layer_norm": (
            lambda: layer_norm(x, weight, bias),
            lambda: F.layer_norm(x, (192,), weight, bias),
        ),
        "mlp": (
            lambda: mlp(x, up, down, activation="gelu"),
            lambda: F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down),
        ),
    }


def with_backward(forward: Callable[[], Tensor], times: int) -> Callable[[], None]:
    """`times` calls of `forward`, each with its backward pass."""
    dy = torch.zeros_like(forward())

    def call() -> None:
        for _ in range(times):
            forward().backward(dy)

    return call


def repeat(call: Callable[[], object], times: int) -> Callable[[], None]:
    """`times` calls."""

    def calls() -> None:
        for _ in range(times):
            call()

    return calls


def time_operators(rounds: int, times: int) -> list[dict[str, object]]:
    """Print and return microseconds per call of each operator and of torch's, interleaved."""
    rows = []
    for name, (ours, theirs) in operators().items():
        for kind, make in (("forward", repeat), ("forward and backward", with_backward)):
            calls = {"warpweave": make(ours, times), "torch": make(theirs, times)}
            ms: Mapping[str, list[float]] = interleave(calls, rounds=rounds)
            us = {who: round(1e3 * median(found) / times, 1) for who, found in ms.items()}
            ratio = median(a / b for a, b in zip(*ms.values(), strict=True))
            rows.append({"operator": name, "call": kind, "us": us, "ratio": ratio})
            print(
                f"{name:12} {kind:21} {us['warpweave']:7} us, torch {us['torch']:7}: {ratio:.2f} x"
            )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(CLAIM).parse_args(argv)
    torch.set_num_threads(1)
    rounds = options.rounds or (1 if options.quick else 15)
    steps = {}
    with pretended_gpu():
        for preset in ("gpt2",) if options.quick else ("gpt2", "llama-1b"):
            step = make_step(preset)
            step()  # compiles
            launches, calls = counted(step)
            ms = median(interleave({"step": step}, rounds=rounds)["step"])
            for what, found in (("Triton launches", launches), ("torch operators", calls)):
                print(f"{preset}: {found.total()} {what}: {dict(found.most_common(12))}")
            print(f"{preset}: {ms:.1f} ms per step")
            steps[preset] = {"launches": launches, "operators": calls, "ms": round(ms, 2)}
        rows = time_operators(rounds, 3 if options.quick else 100)
    report = {"script": "host_time", "claim": CLAIM, "header": header(), "steps": steps}
    write_report(report | {"operators": rows}, results_folder(options))


if __name__ == "__main__":
    main()
