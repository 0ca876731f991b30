"""Attention: `attention`, and its halves for autograd Functions of one's own.

`function` the op · `device` kernels · `visible` which tiles a mask leaves · `options` arguments,
checked · `tiles` their sizes · `torch_path` on a CPU.
"""

from warpweave.kernels.attention.function import (
    attention,
    attention_bwd,
    attention_delta,
    attention_dsinks,
    attention_fwd,
)

__all__ = ["attention", "attention_bwd", "attention_delta", "attention_dsinks", "attention_fwd"]
