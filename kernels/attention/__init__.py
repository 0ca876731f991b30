"""Attention: `attention`, and its halves for autograd Functions of one's own.

`function` the public calls and the operator · `options` the record of what they are asked, and the
checks · `forward`, `backward` formulas, kernels and launches · `device`, `launch` what those share,
tiles too · `visible` which tiles a mask leaves · `torch_path` on a CPU.
"""

from warpweave.kernels.attention.backward import attention_delta, attention_dsinks
from warpweave.kernels.attention.function import attention, attention_bwd, attention_fwd

__all__ = ["attention", "attention_bwd", "attention_delta", "attention_dsinks", "attention_fwd"]
