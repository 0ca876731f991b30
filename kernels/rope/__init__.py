"""Rotary position embedding: `apply_rope` of one tensor, `apply_rope_qk` of queries and keys.

`table` computes the angles, also for extended contexts · `rotation` has the kernel, the torch path,
and the registration.
"""

from warpweave.kernels.rope.rotation import (
    apply_rope,
    apply_rope_qk,
    check_table,
    rope_fwd,
    rope_qk_fwd,
)
from warpweave.kernels.rope.table import rope_table
from warpweave.kernels.rope_scaling import RopeScaling

__all__ = [
    "RopeScaling",
    "apply_rope",
    "apply_rope_qk",
    "check_table",
    "rope_fwd",
    "rope_qk_fwd",
    "rope_table",
]
