"""FlashAttention under masks of global positions: `attention`, and its forward and backward halves.

Use the halves in your own autograd Functions.

`function` the public functions and the operator · `options` their options and checks, as one record
· `forward`, `backward` formulas, kernels and launches · `device`, `launch` helpers for both, and
tiles · `visible` the keys that a query sees, and so the tiles to visit · `torch_path` the CPU path.
"""

from warpweave.kernels.attention.backward import attention_delta, attention_dsinks
from warpweave.kernels.attention.function import attention, attention_bwd, attention_fwd

__all__ = ["attention", "attention_bwd", "attention_delta", "attention_dsinks", "attention_fwd"]
