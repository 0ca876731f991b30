"""torch's own checks of an operator: schema, autograd, shapes that a compiler sees, tracing."""

import torch

from warpweave.kernels.runtime.op import Op


def well_formed(op: Op, *args: object) -> None:
    """Raise unless `op` passes on these arguments, as `op` itself takes them."""
    torch.library.opcheck(op.operator, tuple(op.flattened(args)))
