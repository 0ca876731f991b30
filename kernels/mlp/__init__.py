"""The MLP of a transformer block, fused: two products, each with its epilogue.

    z = x W1^T + b1      h = act(z)                          one kernel, z saved
    y = residual + dropout(h W2^T + b2)                      one kernel

    do = dropout'(dy)    dh = do W2     dz = dh act'(z)      one kernel, which recomputes h
    dx = dz W1           dW1 = dz^T x   dW2 = do^T h         db1, db2: sums over tokens of dz, do

On GPUs where `runtime.fusion` lists that as faster, each of the three is torch's product followed
by kernels on its result, unless impl="triton".

x, y: [..., E]; W1: [F, E], or gated [F, 2, E], gate and up interleaved; W2: [E, F]. The MLP of a
slice of F is a partial sum of y. The same Function runs over tensor ranks, with the collectives of
its `ranks` around the products (`gemm.local`).

x and z are saved for backward. h is recomputed from z, which act's derivative reads anyway, so a
block's activations are smaller by [T, F]. `recompute="up"` saves only x and recomputes z (one more
product). "nothing" also saves h, which is fastest on a CPU. All three give the same results, on a
GPU up to rounding (the kernel of dz uses a different tile if h is saved). Weight gradients have the
parameters' grad_dtype and go through ``wgrad``.

Products without an epilogue (dx, dW1, dW2) are torch's, see `gemm`. Compilers trace the Function
over the operators of its kernels, or of torch.

Sources: Shazeer 2020 (arXiv:2002.05202); Korthikanti et al. 2022 (arXiv:2205.05198) for what to
recompute. Limits: no second derivatives.

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
