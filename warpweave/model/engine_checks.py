"""What an engine checks of its data before anything is sent, and when a
``state_dict`` is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from warpweave.kernels.attention.options import check_packed
from warpweave.model.gpt import GPT
from warpweave.parallel.data.unit import Unit


def check_int64(**given: Tensor) -> None:
    """Raise ValueError unless each is an int64 tensor."""
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.dtype != torch.int64:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be int64, got {kind}")


def check_packing(documents: Tensor | None, tokens: Tensor) -> None:
    """ValueError unless `documents` are boundaries of documents in every sequence of `tokens`."""
    if documents is None:
        return
    if (documents.ndim, documents.shape[:2]) != (3, tokens.shape[:2]):
        raise ValueError(
            f"documents must have shape [{tokens.shape[0]}, {tokens.shape[1]}, boundaries], got "
            f"{tuple(documents.shape)}"
        )
    check_packed(documents.flatten(0, 1), tokens.flatten(0, 1))


def check_batch(
    tokens: Tensor,
    labels: Tensor,
    sample_ids: Tensor,
    expected: tuple[int, int, int],
    documents: Tensor | None,
) -> None:
    """ValueError unless they are the data of a step of `expected` micro-batches, sequences in each,
    tokens (`Engine.step`)."""
    check_int64(tokens=tokens, labels=labels, sample_ids=sample_ids)
    if tuple(tokens.shape) != expected or labels.shape != tokens.shape:
        raise ValueError(
            f"tokens and labels must have shape {expected}, got {tuple(tokens.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if tuple(sample_ids.shape) != expected[:2]:
        raise ValueError(
            f"sample_ids must have shape {expected[:2]}, got {tuple(sample_ids.shape)}"
        )
    check_packing(documents, tokens)


def guard_state_dict(gpt: GPT, units: list[Unit]) -> None:
    """Makes ``state_dict`` wait for a pending all-gather, and refuse freed parameters (ZeRO 3)."""

    def check(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        for unit in units:
            unit.parameters.wait()
            if not unit.parameters.materialised:
                raise RuntimeError(
                    f"ZeRO 3 keeps only a shard of {unit.name} on this rank: Engine.read gives "
                    "whole tensors, state_dict cannot"
                )

    gpt.register_state_dict_pre_hook(check)
