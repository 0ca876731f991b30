"""Context extension of a rotary embedding (linear, NTK, YaRN, Llama 3), as a torch-free record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RopeScaling:
    """Changes to the rotary frequencies for `factor` times as many positions as `original_length`.

    `original_length` is the number of positions that the model was trained on.

    kind:
        "linear"  position interpolation: every frequency / factor (Chen et al. 2023,
                  arXiv:2306.15595).
        "ntk"     a larger base, theta * factor^(R / (R - 2)): the highest frequency stays and the
                  lowest is divided by factor (bloc97 2023; Peng et al. 2023, section 3.1).
        "yarn"    frequencies that turn more than `high` times in original_length stay, and those
                  that turn less than `low` times are interpolated, with a linear ramp over the dims
                  between. Queries and keys are multiplied by 0.1 ln(factor) + 1, the attention
                  temperature (Peng et al. 2023, arXiv:2309.00071). `low` and `high`: 1 and 32. The
                  ramp begins and ends at whole dims unless `truncate` is false (gpt-oss).
        "llama3"  the same idea with a ramp over the number of turns, no temperature (Llama 3.1,
                  arXiv:2407.21783). `low` and `high`: 1 and 4.

    attention_factor replaces YaRN's multiplier of queries and keys (scores get its square). Models
    that include the temperature in the softmax scale pass 1.0. The multiplier is folded into cos
    and sin, so dims that are not rotated are not multiplied, as in Hugging Face transformers.

    Examples:
        >>> from warpweave.kernels.rope import rope_table
        >>> yarn = RopeScaling("yarn", factor=4.0, original_length=4096)
        >>> cos, sin = rope_table(torch.arange(16), 8, scaling=yarn)
    """

    kind: str
    factor: float
    original_length: int = 0
    low: float = 1.0
    high: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for values that give no table."""
        if self.kind not in ("linear", "ntk", "yarn", "llama3"):
            raise ValueError(f'kind must be linear, ntk, yarn or llama3, got "{self.kind}"')
        if not self.factor >= 1:
            raise ValueError(f"factor must be at least 1, got {self.factor}")
        bands = self.kind in ("yarn", "llama3")
        if bands and self.original_length < 1:
            raise ValueError(f"{self.kind} needs original_length >= 1, got {self.original_length}")
        if bands and not 0 < self.low < self._high:
            raise ValueError(f"need 0 < low < high, got {self.low} and {self._high}")

    @property
    def _high(self) -> float:
        return self.high if self.high is not None else 4.0 if self.kind == "llama3" else 32.0

    @property
    def multiplier(self) -> float:
        """The factor by which cos and sin are multiplied."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.kind == "yarn" else 1.0

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """The changed frequencies[R/2] from the plain ones, theta^(-2i / R)."""
        import torch  # not needed by the command line

        if self.kind == "linear":
            return frequencies / self.factor
        R = 2 * len(frequencies)
        i = torch.arange(R // 2, dtype=frequencies.dtype, device=frequencies.device)
        if self.kind == "ntk":
            return frequencies * self.factor ** (-2 * i / max(R - 2, 1))
        if self.kind == "llama3":
            turns = self.original_length * frequencies / (2 * math.pi)
            stay = (turns - self.low) / (self._high - self.low)
        else:

            def dim(turns: float) -> float:  # the dim that makes this many turns
                found = math.log(self.original_length / (turns * 2 * math.pi))
                return R * found / (2 * math.log(theta))

            first, last = dim(self._high), dim(self.low)
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, R - 1)
            stay = 1 - (i - first) / (last - first if last != first else 0.001)
        stay = stay.clamp(0, 1)
        return frequencies * stay + frequencies / self.factor * (1 - stay)
