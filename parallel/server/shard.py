"""A server's part of the weights: whole parameters, their optimizer state, and the updates.

    parameters over two servers by bytes (largest first, each to the least loaded server)
    server 0   embedding 64K | norm 1K
    server 1   up 32K | down 32K | bias 1K

An update divides the sum of its terms' gradients by the sum of their counts and passes it to a rule
of `parallel.data.optimizer`. Delay compensation (DC-ASGD, Zheng et al. 2017, arXiv:1609.08326)
corrects a gradient g computed at older weights w_old. It uses the diagonal of the outer product of
g as the Hessian:

    g + lambda g * g * (w - w_old)
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from warpweave.kernels.adamw import sum_of_squares
from warpweave.parallel.data.flat import FlatLayout
from warpweave.parallel.data.optimizer import Piece, Rule, master_dtype
from warpweave.parallel.shard import ParamRecord


def records_of(module: nn.Module) -> list[ParamRecord]:
    """Return a record for each parameter of any module. Matrices decay, vectors do not.

    Raises:
        ValueError: a parameter is frozen.

    Examples:
        >>> [record.name for record in records_of(nn.Linear(4, 2))]
        ['weight', 'bias']
    """
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    if frozen:
        raise ValueError(
            f"parameter {frozen[0]} does not require grad, but servers train every parameter; "
            "call requires_grad_()"
        )
    return [
        ParamRecord(name, tuple(p.shape), decay=p.ndim > 1) for name, p in module.named_parameters()
    ]


def digest(records: Sequence[ParamRecord], dtype: torch.dtype) -> str:
    """SHA-256 of names, shapes and dtype: equal if weights and gradients match each other."""
    rows = sorted([r.name, list(r.shape)] for r in records)
    return hashlib.sha256(json.dumps([str(dtype), rows]).encode()).hexdigest()


def spread(records: Sequence[ParamRecord], servers: int) -> list[list[ParamRecord]]:
    """The records of each server, about equal in bytes: longest processing time first.

    Raises:
        ValueError: there are fewer parameters than servers, or no server.

    Examples:
        >>> from warpweave.parallel.server.shard import records_of
        >>> parts = spread(records_of(nn.Linear(4, 2)), servers=2)
        >>> [[record.name for record in part] for part in parts]
        [['weight'], ['bias']]
    """
    if not 1 <= servers <= len(records):
        most = f"{len(records)} (each holds at least one parameter)"
        raise ValueError(f"servers must be from 1 to {most}, got {servers}")
    parts: list[list[ParamRecord]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for record in sorted(records, key=lambda r: (-torch.Size(r.shape).numel(), r.name)):
        least = loads.index(min(loads))
        parts[least].append(record)
        loads[least] += max(1, torch.Size(record.shape).numel())
    return parts


class Shard:
    """The weights and optimizer state of some parameters, on the host.

    Args:
        records: the parameters.
        value: returns the logical tensor of a record.
        rule: the update rule. It must work on single elements, as AdamW and SGD do.
        dtype: the dtype in which weights are pulled. Masters, gradients and moments are fp32, or
            fp64 for fp64.

    Attributes:
        layout: the offsets in the flat buffers, the same on servers and workers.
        master: [layout.size], the master weights.

    Examples:
        >>> from warpweave.parallel.data.optimizer import SGD
        >>> from warpweave.parallel.server.shard import records_of, spread
        >>> module = nn.Linear(4, 2)
        >>> weights = dict(module.named_parameters())
        >>> records = spread(records_of(module), servers=1)[0]
        >>> shard = Shard(records, lambda r: weights[r.name].detach(), SGD(), torch.float32)
    """

    def __init__(
        self,
        records: Sequence[ParamRecord],
        value: Callable[[ParamRecord], Tensor],
        rule: Rule,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layout, self.rule, self.dtype = FlatLayout(records, 1, 0), rule, dtype
        self.master = torch.zeros(self.layout.size, dtype=master_dtype(dtype))
        self.moments = {name: torch.zeros_like(self.master) for name in rule.moments}
        self.count = torch.zeros((), dtype=torch.float64)  # updates made
        self.load("", value)

    @property
    def weights(self) -> Tensor:
        """[layout.size], a copy in the dtype of the parameters."""
        return self.master.to(self.dtype, copy=True)

    def compensate(self, g: Tensor, count: int, old: Tensor, factor: float) -> None:
        """Compensate a gradient [layout.size] in place for the updates since the weights `old` at
        which it was computed. It is the gradient of the sum of `count` losses."""
        g.addcmul_(g * g, self.master - old, value=factor / count)

    def sum(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the sum of gradients [layout.size], in order, in the first one's memory."""
        return functools.reduce(Tensor.add_, gradients)

    def squares(self, total: Tensor) -> Tensor:
        """The sum of squares of a gradient [layout.size], 0-dim: this server's part of the norm."""
        return sum_of_squares(total).double()

    @torch.no_grad()
    def update(self, total: Tensor, lr: float, scale: float) -> None:
        """Apply one step of the rule, with the gradient `total` times `scale`."""
        factor = torch.tensor(scale, dtype=self.master.dtype)
        self.count += 1
        step = self.rule.begin(lr, self.count)
        for r in self.layout.ranges:
            part = slice(r.start, r.stop)
            moments = {name: moment[part] for name, moment in self.moments.items()}
            where = {"master": self.master[part], "grad": total[part], "moments": moments}
            piece = Piece(**where, matrix=False, param=None, decay=r.decay)
            self.rule.update(piece, step, factor, torch.zeros(()))

    # ------------------------------------------------------------------ state in and out

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of masters, named as the parameters, and of moments, "moment/name"."""
        for prefix, buffer in self._buffers():
            for record in self.layout.records:
                yield prefix + record.name, self.layout.view(buffer, record)

    def shapes(self, records: Sequence[ParamRecord]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of the `read` of a server that has these `records` and the same rule."""
        for prefix, _ in self._buffers():
            for record in FlatLayout(records, 1, 0).records:
                yield prefix + record.name, record.shape

    def load(self, prefix: str, value: Callable[[ParamRecord], Tensor]) -> None:
        """Set the masters (prefix "") or a moment (its name and "/") from logical tensors."""
        buffer = dict(self._buffers())[prefix]
        for record in self.layout.records:
            self.layout.view(buffer, record).copy_(value(record))

    def _buffers(self) -> list[tuple[str, Tensor]]:
        return [("", self.master), *((f"{name}/", m) for name, m in self.moments.items())]


def norm_and_scale(
    squares: Sequence[Tensor], count: int, clip: float | None
) -> tuple[float, float]:
    """Return (global norm of the mean gradient, factor for the summed gradient). The norm is from
    every server's `squares`, added in server order; the factor clips it. Raise FloatingPointError
    if the norm is not finite."""
    norm = float(torch.stack(list(squares)).sum().sqrt()) / count
    if not norm < float("inf"):
        raise FloatingPointError(f"the gradient norm is {norm}")
    return norm, min(1.0, clip / (norm + 1e-6)) / count if clip is not None else 1.0 / count
