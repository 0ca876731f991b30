"""Checks of an engine's data before anything is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from warpweave.kernels.attention.options import check_packed
from warpweave.kernels.dropout import check_key
from warpweave.parallel.data.optimizer import check_lr


def check_int64(**given: Tensor) -> None:
    """Raise ValueError unless each is an int64 tensor."""
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.dtype != torch.int64:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be int64, got {kind}")


def check_step(lr: float | Tensor | None, key: int | Tensor) -> None:
    """Raise ValueError unless a step's learning rate and dropout key are in range."""
    if lr is not None:
        check_lr(lr)
    check_key(key, 0)


def check_packing(documents: Tensor | None, tokens: Tensor) -> None:
    """Raise ValueError unless `documents` has boundaries for every sequence of `tokens`."""
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
    documents: Tensor | None,
    *,
    expected: tuple[int, int, int],
) -> None:
    """Raise ValueError unless these tensors are the data of a step (`Engine.step`).

    `expected` is (micro-batches, sequences per micro-batch, tokens per sequence).
    """
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
