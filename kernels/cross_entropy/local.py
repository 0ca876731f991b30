"""What a loss asks of the ranks that hold columns of the vocabulary each, on one device."""

from __future__ import annotations

from typing import Any

import torch

from warpweave.kernels.cross_entropy.in_forward import fwd_bwd_op
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.gemm.local import Local


class LocalVocabulary(Local):
    """One device: all columns are here. `parallel.tensor.loss` has the one of a cut vocabulary.

    The head is a column-parallel product, its columns the vocabulary: x is gathered, dx summed.
    """

    def own(self, vocabulary: Vocabulary, width: int) -> Vocabulary:
        """What this rank's `width` columns stand for."""
        return vocabulary

    def merge(self, stats: torch.Tensor) -> torch.Tensor:
        """This rank's stats[k, N] (lse, target and, with smoothing, logit_sum) combined with those
        of the others."""
        return stats

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens of x."""
        return x

    def term_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What a rank's term of a dx of this dtype has."""
        return dtype

    def sum(self, dx: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' terms of dx[T, E], this rank's tokens of it."""
        return dx

    def fwd_bwd(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        vocabulary: Vocabulary,
        *,
        dx_dtype: torch.dtype | None,
        want_dw: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`linear_cross_entropy_fwd_bwd` of all tokens of x, and the sum over ranks of this rank's
        tokens of dx; here one operator, dx in the dtype of x."""
        want_dx = dx_dtype is not None
        return fwd_bwd_op(x, weight, labels, want_dx, want_dw, *vocabulary.packed())

    def loss_type(self, equation: str, *operands: Any) -> Any:
        """The type of losses whose einsum over the columns v of the vocabulary is `equation`."""
        from spmd_types import rules

        return rules.einsum(equation.replace("v", "_"), *operands)  # v is whole


LOCAL_VOCABULARY = LocalVocabulary()
