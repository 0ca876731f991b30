"""torch's own checks of an operator: schema, autograd, shapes that a compiler sees, tracing."""

import torch

from warpweave.kernels.runtime.op import Op


def well_formed(op: Op, *args: object) -> None:
    """Raise unless `op` passes on these arguments, in the form that `op` accepts, and the strides
    that a compiler is told equal the real ones for tensors with contiguous columns."""
    torch.library.opcheck(op.operator, tuple(op.flattened(args)))
    told_right(op, *map(_by_columns, args))


def told_right(op: Op, *args: object) -> None:
    """Raise unless the outputs that a compiler is told equal those of `op`. This is the fastest of
    these checks, for dtypes other than the one in which all of them are made."""
    torch.library.opcheck(op.operator, tuple(op.flattened(args)), test_utils="test_faketensor")


def _by_columns(given: object) -> object:
    """Return a tensor of two or more dims with the strides of its
    transpose; anything else unchanged."""
    if not isinstance(given, torch.Tensor) or given.ndim < 2:
        return given
    return given.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
