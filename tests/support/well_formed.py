"""torch's own checks of an operator: schema, autograd, shapes that a compiler sees, tracing."""

import torch

from warpweave.kernels.runtime.op import Op


def well_formed(op: Op, *args: object) -> None:
    """Raise unless `op` passes on these arguments, as `op` itself takes them."""
    torch.library.opcheck(op.operator, tuple(op.flattened(args)))


def told_right(op: Op, *args: object) -> None:
    """Raise unless the outputs that a compiler is told of are those that `op` makes: the quickest
    of these checks, for dtypes beside the one that all of them are made in."""
    torch.library.opcheck(op.operator, tuple(op.flattened(args)), test_utils="test_faketensor")
