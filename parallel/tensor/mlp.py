"""Tensor-parallel MLP: its hidden units are sharded over the tensor ranks.

A column-parallel layer, an activation and a row-parallel layer in one autograd Function. The
activation is the epilogue of the first product, its derivative is the epilogue of the first product
of the backward, and the hidden activations may be recomputed (`kernels.mlp`). Collectives, types
and the four-rank picture are those of ``tensor``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from warpweave.kernels.dropout import Drop
from warpweave.kernels.mlp import mlp
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor.ranks import tensor_ranks


def parallel_mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
    residual: torch.Tensor | None = None,
    drop: Drop | None = None,
    recompute: str | None = None,
    overlap: str = "bulk",
    workspace: Workspace | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """y = residual + dropout(act(x W1^T + b1) W2^T + b2), hidden units sharded over the group.

    Forward:          h[T, F/R]{S(-1)} = act(z), z = x[T, E]{I} W1[F/R, E]{S(0)}^T + b1[F/R]{S(0)}
                      y[T, E]{I} = all-reduce(h W2[E, F/R]{S(1)}^T) + b2[E]{I}
    Input gradient:   dz[T, F/R]{S(-1)} = (dy W2) act'(z)      dx[T, E]{I} = all-reduce(dz W1)
    Weight gradients: dW1[F/R, E]{S(0)} = dz^T x      dW2[E, F/R]{S(1)} = dy^T h, no collective
    Bias gradients:   db1[F/R]{S(0)}, db2[E]{I} = sums over tokens of dz and dy, no collective

    With sequence_parallel, x[T/R, E]{S(0)} and dy[T/R, E]{S(0)} are all-gathered, and y and dx are
    reduce-scattered. db2{P} is the sum over this rank's own tokens, as in the two linear layers. A
    gated activation has W1[F/R, 2, E] and b1[F/R, 2], with the rows of gate and up interleaved.

    Args:
        x: x[..., E] replicated, or x[T/R, ..., E] with sequence_parallel.
        up_weight, up_bias, down_weight, down_bias: this rank's shards of W1, b1 and W2, and all of
            b2; leaf parameters, or views of them.
        activation: "gelu", "gelu_erf", "relu2", "swiglu" or "geglu".
        group, overlap, workspace: as for `column_parallel_linear`.
        sequence_parallel: x and y have their tokens sharded over the group along dim 0.
        residual, drop: a tensor like y, and the key of the dropout; see `kernels.mlp.mlp`.
        recompute: "nothing", "activation" or "up"; None chooses, see `kernels.mlp.mlp`. "up"
            all-gathers x once more.
        impl: "triton", "torch" or None to choose by device.

    Returns y like x, in the dtype of `x` or of autocast. Raises ValueError if shapes, dtypes or
    options do not match.
    """
    ranks = tensor_ranks(group, sequence_parallel, overlap, workspace, x=x, impl=impl)
    if group is not None and x.ndim < 2:
        raise ValueError(
            f"{ranks.name('mlp')}: tensor-parallel ranks need x[..., E] with at least two dims, "
            f"got {[*x.shape]}"
        )
    return mlp(
        x, up_weight, down_weight, up_bias, down_bias, activation=activation, residual=residual,
        drop=drop, recompute=recompute, impl=impl, ranks=ranks,
    )  # fmt: skip
