"""torch's own checks of an operator: schema, autograd, shapes that a compiler sees, tracing."""

import torch

from warpweave.kernels.runtime.op import Op


def well_formed(op: Op, *args: object) -> None:
    """Raise unless `op` passes on these arguments, as `op` itself takes them, and the strides that
    a compiler is told of are those that it makes of tensors whose columns are contiguous."""
    torch.library.opcheck(op.operator, tuple(op.flattened(args)))
    told_right(op, *map(_by_columns, args))


def told_right(op: Op, *args: object) -> None:
    """Raise unless the outputs that a compiler is told of are those that `op` makes: the quickest
    of these checks, for dtypes beside the one that all of them are made in."""
    torch.library.opcheck(op.operator, tuple(op.flattened(args)), test_utils="test_faketensor")


def _by_columns(given: object) -> object:
    """A matrix or more with the strides of its transpose; anything else itself."""
    if not isinstance(given, torch.Tensor) or given.ndim < 2:
        return given
    return given.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
