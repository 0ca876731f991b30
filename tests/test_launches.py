"""A micro-batch's cost on the host: a layer's launches, and the tables of its documents."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from close import assert_close_f64
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from warpweave.kernels.attention import visible
from warpweave.model.gpt import GPT, GPTConfig

GPT2 = {"vocab_size": 37, "seq_len": 12, "width": 16, "heads": 4}
LLAMA = GPT2 | {
    "positions": "rope", "norm": "rms", "activation": "swiglu", "bias": False, "tied": False,
    "kv_heads": 2, "hidden": 24,
}  # fmt: skip
DOCUMENTS = torch.tensor([[0, 5, 12], [0, 1, 12]])


class _Others(TorchDispatchMode):
    """A mode that counts operators other than views and allocations, for
    which torch launches a kernel."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func.namespace == "aten" and not func.is_view and "empty" not in str(func):
            self.found[str(func).removeprefix("aten.").split(".")[0]] += 1
        return result


@contextmanager
def _launched() -> Iterator[Counter[str]]:
    found, run = Counter[str](), GridExecutor.__call__

    def launch(self, *args, **options):
        found[self.fn.__name__.strip("_").removesuffix("_kernel")] += 1
        with _disable_current_modes():  # the interpreter's own copies
            return run(self, *args, **options)

    with mock.patch.object(GridExecutor, "__call__", launch), _Others(found):
        yield found


def _gpt(config: dict, layers: int) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=layers, **config), impl="triton")


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_layer_launches_no_more_kernels_than_it_is_allowed(config) -> None:
    """Counts the launches that a second layer adds; "mm" is torch's product."""
    forward = Counter(norm_fwd=2, qkv_fwd=1, attention_fwd=1, mm=1, gemm=2)
    backward = Counter(
        norm_bwd=2, hidden_bwd=1, attention_delta=1, attention_dkdv=1, attention_dq=1, qkv_bwd=1,
        mm=7, add=1, sum=3 if config is GPT2 else 0,
    )  # fmt: skip
    tokens, counts = torch.randint(0, 37, (2, 12)), []
    for layers in (1, 2):
        gpt = _gpt(config, layers)
        with _launched() as of_forward:
            loss = gpt(tokens, tokens)
        with _launched() as of_backward:
            loss.backward()
        counts.append((of_forward, of_backward))
    for one, two, allowed in zip(*counts, (forward, backward), strict=True):
        assert two - one <= allowed, (two - one) - allowed
        assert {"attention_fwd", "attention_dq"} & (two - one).keys()


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_documents_are_looked_up_once_for_all_kernels_of_all_layers(config) -> None:
    gpt, tokens = _gpt(config, 2), torch.randint(0, 37, (2, 12))
    search = torch.searchsorted
    with mock.patch.object(visible.torch, "searchsorted", wraps=search) as searched:
        loss = gpt(tokens, tokens, documents=DOCUMENTS)
        loss.backward()
    assert searched.call_count == 1
    plain = GPT(GPTConfig(layers=2, **config), impl="torch")  # it accepts the boundaries
    plain.load_state_dict(gpt.state_dict())
    plain(tokens, tokens, documents=DOCUMENTS).backward()
    for ours, theirs in zip(gpt.parameters(), plain.parameters(), strict=True):
        assert_close_f64(ours.grad, theirs.grad, 1e-4)
