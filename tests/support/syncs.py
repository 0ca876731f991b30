"""A pretended device whose tensors are computed on the CPU, with a count of host synchronizations.

A GPU runs behind its host. The host waits for it where a number is read (``.item()``, ``bool(x)``,
``.tolist()``, ``.cpu()``), where a shape depends on numbers (`nonzero`), and where one of the two
copies from ordinary memory of the other: ``.to("cuda")`` and ``torch.tensor(..., device="cuda")``
also wait, unless they are ``non_blocking``. None of that is visible on a CPU. Here a tensor on
`DEVICE` holds a CPU tensor, on which every operator runs, and `Device.waits` counts the waits by
the function of ours that caused them. Our operators use torch's path, with gradients.

    with Device() as device:
        model(**device.put(inputs))      # after device.put(model)
    device.waits                         # Counter({"warpweave/hf/mask.py _padding": 1})

Run this file as a program, because the device is registered for the whole process. It prints a JSON
object, case -> waits.
"""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from warpweave import hf
from warpweave.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from warpweave.hf import mask as masks
from warpweave.model.config import GPTConfig
from warpweave.model.generate import Sampling, generate
from warpweave.model.gpt import GPT

_setup_privateuseone_for_python_backend("pretended")
torch.pretended.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
DEVICE = torch.device("pretended", 0)
_ROOT = Path(__file__).resolve().parents[2]
_aten = torch.ops.aten
_READING = {  # they return a number, or a shape that depends on numbers
    _aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.nonzero, _aten._unique2,
    _aten.masked_select, _aten.unique_consecutive, _aten.repeat_interleave, _aten.bincount,
}  # fmt: skip


class _There(torch.Tensor):
    """A tensor on the device; `held` holds its values."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> _There:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        kind = {"dtype": held.dtype, "device": DEVICE}
        found = torch.Tensor._make_wrapper_subclass(cls, held.shape, **layout, **kind)
        found.held = held
        return found

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on a tensor whose Device has been left")

    def tolist(self) -> Any:
        """Return the values as a list. torch's tolist rejects subclasses."""
        return self.cpu().tolist()


class Device(TorchDispatchMode):
    """A context in which `DEVICE` exists."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.found: dict[str, Counter[str]] = {}

    def __enter__(self) -> Device:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) is a copy
        return super().__enter__()

    def __exit__(self, *error) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)

    @contextmanager
    def counted(self, case: str) -> Iterator[None]:
        """Record the waits of the block as `found[case]`."""
        self.waits = self.found[case] = Counter()
        yield
        self.waits = Counter()

    def put(self, what: Any) -> Any:
        """Move tensors, or a module with its parameters and buffers, to the device."""
        if not isinstance(what, torch.nn.Module):
            return tree_map_only(torch.Tensor, _There, what)
        for module in what.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    there = torch.nn.Parameter(_There(p.detach()), requires_grad=p.requires_grad)
                    module._parameters[name] = there
            for name, b in module._buffers.items():
                module._buffers[name] = None if b is None else _There(b)
        return what

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func.overloadpacket is _aten.is_pinned:
            return False
        if func.overloadpacket in (_aten.pin_memory, _aten._pin_memory):
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = any(isinstance(x, _There) for x in given)
        if self._is_waited_for(func.overloadpacket, args, kwargs, there):
            self.waits[_asked()] += 1
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == DEVICE.type
            kwargs["device"] = torch.device("cpu")
        held = {id(x.held): x for x in given if isinstance(x, _There)}
        args, kwargs = tree_map_only(_There, lambda x: x.held, (args, kwargs))
        out = func(*args, **kwargs)
        if not there:
            return out

        # a result that was written in place is the given tensor
        def wrapped(x: torch.Tensor) -> _There:
            return held[id(x)] if id(x) in held else _There(x)

        return tree_map_only(torch.Tensor, wrapped, out)

    @staticmethod
    def _is_waited_for(packet: Any, args: tuple, kwargs: dict, there: bool) -> bool:
        if packet is _aten.copy_:
            blocking = not kwargs.get("non_blocking") and not (len(args) > 2 and args[2])
            return blocking and isinstance(args[0], _There) != isinstance(args[1], _There)
        if packet is _aten._to_copy and kwargs.get("device") is not None:
            goes = torch.device(kwargs["device"]).type == DEVICE.type
            free = kwargs.get("non_blocking") and hasattr(args[0], "is_pinned_here")
            return goes != there and not free
        by_mask = packet in (_aten.index, _aten.index_put_) and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        return there and (packet in _READING or by_mask)


def _asked() -> str:
    """Return the innermost running function of ours, or else the innermost of transformers."""
    theirs = "elsewhere"
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(_ROOT) and path.parts[len(_ROOT.parts)] not in ("tests", ".venv"):
            return f"{path.relative_to(_ROOT)} {frame.name}"
        if theirs == "elsewhere" and "transformers" in path.parts:
            theirs = f"transformers {path.name} {frame.name}"
    return theirs


# ---------------------------------------------------------------- cases


def ours(device: Device) -> None:
    """Decode two prompts, whose texts end after at most three tokens."""
    gpt = GPT(GPTConfig(61, 40, 2, 16, 4, positions="rope"))
    prompts = [[1, 2, 3], [4, 5]]
    stop = tuple(text[2] for text in generate(gpt, prompts, Sampling(3)))
    texts = generate(gpt, prompts, Sampling(20, stop=stop))
    device.put(gpt)
    for tokens in (4, 20):
        with device.counted(f"generate {tokens}"):
            assert generate(gpt, prompts, Sampling(tokens, stop=stop)) == texts


def theirs(device: Device) -> None:
    """Run a Hugging Face model with windows in every other layer: forwards with and without
    padding, and six tokens decoded with either cache."""
    model = hf.apply(hf_models.make("gemma2").eval(), report=hf.Report())
    ids = torch.randint(3, hf_models.V, (2, 14), generator=torch.Generator().manual_seed(1))
    ones, mask = torch.ones_like(ids), torch.ones_like(ids)
    mask[0, :5] = 0
    caches = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}
    length = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    padded = {"input_ids": ids, "attention_mask": mask}
    logits = model(**padded, use_cache=False).logits
    texts = {name: model.generate(**padded, **length, **cache) for name, cache in caches.items()}
    for name in [name for name in vars(model) if name == "_cache"]:
        delattr(model, name)  # the static layer, which is on the CPU
    device.put(model)
    padded = device.put(padded)
    with device.counted("forward"):
        found = model(**padded, use_cache=False).logits
    torch.testing.assert_close(found.cpu()[mask.bool()], logits[mask.bool()])
    for name, cache in caches.items():
        with device.counted(name):
            found = model.generate(**padded, **length, **cache)
        assert torch.equal(found.cpu(), texts[name]), name
    broken = torch.ones(2, 14, dtype=torch.int64)
    broken[0, 4] = 0
    past = model(**device.put({"input_ids": ids, "attention_mask": ones})).past_key_values
    step = {"input_ids": ids[:, :1], "attention_mask": torch.cat((broken, broken[:, :1]), 1)}
    # the device's error, on a GPU
    with pytest.raises(RuntimeError, match="zeros between its ones"):
        model(**device.put(step), past_key_values=past)


def flash(device: Device, kind: str) -> None:
    """Run three layers of a flash-attention call, and three after a write to its boundaries."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(10, 2, 8, generator=generator)
    cache = torch.randn(2, 16, 2, 8, generator=generator)
    numbers, written = torch.tensor([0, 4, 10]), torch.tensor([0, 7, 10])
    if kind == "cache":
        q, numbers = q[None, :2].transpose(0, 1), torch.tensor([3, 5])
        written = numbers + 1

    def layer(q: torch.Tensor, numbers: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if kind == "cache":
            kept = cache.clone() if q.is_cpu else device.put(cache.clone())
            rows = {"cache_seqlens": numbers, "cache_leftpad": other}
            return flash_attn_with_kvcache(q, kept, kept, q, q, **rows, causal=True)
        window = (3, 1) if kind == "lopsided" else (-1, -1)
        ends = (numbers, numbers if kind == "same" else other, 6, 6)
        return flash_attn_varlen_func(q, q, q, *ends, causal=True, window_size=window)

    wanted = [layer(q, x, x.clone()) for x in (numbers, written)]
    q, numbers, other, written = device.put((q, numbers.clone(), numbers.clone(), written))
    with device.counted(f"flash {kind}"):
        found = [layer(q, numbers, other) for _ in range(3)]
        numbers.copy_(written)
        other.copy_(written)
        found += [layer(q, numbers, other) for _ in range(3)]
    for number, o in enumerate(found):
        torch.testing.assert_close(o.cpu(), wanted[number // 3])


def main() -> None:
    """Run all cases."""
    make = masks.masked  # a tensor cannot be of two subclasses
    masks.masked = lambda like, visible: make(
        torch.empty((), dtype=like.dtype).expand(like.shape), visible
    )
    with Device() as device, torch.no_grad():
        ours(device)
        for kind in ("same", "lopsided", "two", "cache"):
            flash(device, kind)
        theirs(device)
    print(json.dumps(device.found))


if __name__ == "__main__":
    main()
