"""The projection to queries, keys and values, with the rotary embedding in its epilogue.

    z = x W^T + b        q, k = rope(z of their rows)        v = z of its rows
    dz = (rope^-1(dq), rope^-1(dk), dv)     dx = dz W     dW = dz^T x     db = sum over tokens of dz

x: [B, S, E]; W: [Hkv, G + 2, D, E], for each KV head its G query heads, then its key, then its
value, so that a slice of KV heads is a slice of W; b: [Hkv, G + 2, D]; q: [B, S, Hkv G, D]; k, v:
[B, S, Hkv, D], contiguous as attention reads them; cos, sin: [S, D/2] from `rope_table`. W must
have four dims, because a matrix with all queries before all keys would look the same.

The two elements of a rotated pair are D/2 columns from each other. The kernel orders its columns by
pairs, so that both are adjacent, in one tile, for any D: column 2p + h of the product is row
(p // (D/2)) D + h D/2 + p % (D/2) of W, flattened. Values are rotated by an angle of 0.

x and the table are saved for backward. One kernel rotates dq and dk back and writes dz; the
products are torch's. Rotation is in float32 (float64 for float64) from the accumulators, rounded
once.

If `runtime.fusion` lists that as faster, impl=None runs torch's product, then a copy of q, the
kernel of `rope` and a copy of v.

Sources: Su et al. 2021 (arXiv:2104.09864); Ainslie et al. 2023 (arXiv:2305.13245) for the groups.
Limits: all of D is rotated, in pairs of halves (not the interleaved pairs of GPT-J); no second
derivatives. With an odd D, which cannot be rotated, nothing is fused: a product, and views.

`function` the Function and the public op · `kernels` the kernels in both directions.
"""

from warpweave.kernels.qkv.function import qkv_rope
from warpweave.kernels.qkv.kernels import qkv_bwd, qkv_fwd

__all__ = ["qkv_bwd", "qkv_fwd", "qkv_rope"]
