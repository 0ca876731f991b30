"""The feed-forward half of a transformer block, fused: two products, each with its epilogue.

    z = x W1^T + b1      h = act(z)                          one kernel, z kept
    y = residual + dropout(h W2^T + b2)                      one kernel

    do = dropout'(dy)    dh = do W2     dz = dh act'(z)      one kernel, which makes h again
    dx = dz W1           dW1 = dz^T x   dW2 = do^T h         db1, db2: sums over tokens of dz, do

Each of the three is torch's product and then kernels over its result on GPUs where `runtime.fusion`
has that for faster, unless impl="triton".

x, y: [..., E]; W1: [F, E], or gated [F, 2, E], gate and up side by side; W2: [E, F]. Any slice of F
is an MLP of its own whose y is a partial sum: over tensor ranks the same Function runs with their
collectives around its products, which its `ranks` give it (`gemm.local`).

Saved for backward: x and z. h is made again from the z that act's derivative reads anyway, so the
activations of a block shrink by [T, F]. `recompute="up"` saves x only and replays the first product
(one product more, no z kept); "nothing" saves h too, which is what is fastest on a CPU. All three
give the same numbers, on a GPU to rounding (the kernel of dz takes another tile where h is kept).
Gradients of parameters are made in their grad_dtype, through ``wgrad``.

The products with nothing to fuse (dx, dW1, dW2) are torch's, see `gemm`. Compilers trace the
Function over the operators of its kernels, or of torch.

Sources: Shazeer 2020 (arXiv:2002.05202); Korthikanti et al. 2022 (arXiv:2205.05198) for what to
recompute. Limits: gradients of gradients do not exist.

`function` the Function and the public ops · `hidden` z and h, and the kernel of dz.
"""

from warpweave.kernels.mlp.function import RECOMPUTE, gelu_mlp, mlp, swiglu_mlp
from warpweave.kernels.mlp.hidden import hidden_bwd, hidden_fwd

__all__ = [
    "RECOMPUTE",
    "gelu_mlp",
    "hidden_bwd",
    "hidden_fwd",
    "mlp",
    "swiglu_mlp",
]
