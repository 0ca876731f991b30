"""Attention: `attention`, and its halves for autograd Functions of one's own.

`function` the op · `forward`, `backward` kernels with their launches · `device`, `launch` what
those share · `visible` which tiles a mask leaves · `options` arguments, checked · `tiles` their
sizes · `torch_path` on a CPU.
"""

from warpweave.kernels.attention.backward import attention_bwd, attention_delta, attention_dsinks
from warpweave.kernels.attention.forward import attention_fwd
from warpweave.kernels.attention.function import attention

__all__ = ["attention", "attention_bwd", "attention_delta", "attention_dsinks", "attention_fwd"]
