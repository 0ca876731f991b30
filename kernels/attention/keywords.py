"""The keywords that all attention calls have in common, for type checkers and for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch

from warpweave.kernels.attention.visible import Packed

Runs = Sequence[tuple[int, ...]]  # each a `Run` or its fields


class AttentionKeywords(TypedDict, total=False):
    """The keywords of every attention call, as defined by `attention`.

    Examples:
        >>> keywords = AttentionKeywords(causal=True, window=8)  # attention(q, k, v, **keywords)
    """

    causal: bool
    window: int | None
    documents: torch.Tensor | Packed | None
    scale: float | None
    softcap: float | None
    dropout: float
    dropout_seed: int | torch.Tensor
    dropout_origin: Sequence[int]
    deterministic: bool
    impl: str | None


class BlockKeywords(AttentionKeywords, total=False):
    """The keywords of an attention call of some queries and keys, whose positions are given.

    Examples:
        >>> keywords = BlockKeywords(q_runs=((16, 8),), k_runs=((0, 8),))  # (start, length)
    """

    q_runs: Runs | None
    k_runs: Runs | None


_BLOCK = frozenset(BlockKeywords.__annotations__)
_CALL = _BLOCK - {"q_runs", "k_runs"}


def check_keywords(function: str, keywords: Mapping[str, object], *, block: bool) -> None:
    """Raise TypeError, as Python does, unless all are `BlockKeywords` or, if not `block`,
    `AttentionKeywords`."""
    for name in keywords:
        if name not in (_BLOCK if block else _CALL):
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
