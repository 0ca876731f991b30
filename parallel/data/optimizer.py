"""Optimizers on flat shards: update rules, master weights and moments, fp16's loss scale.

A rule is a frozen record that names its moments and updates one flat `Piece`, a contiguous range of
a unit's buffer, in place. Master weights and moments are float32 (float64 for float64 parameters).
They cover the same elements of a unit's buffer as its reduced gradients: this rank's slice (ZeRO 1
to 3), or everything (ZeRO 0).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from warpweave.kernels.adamw import AdamWStep, adamw_update, begin_adamw
from warpweave.kernels.muon import orthogonalize
from warpweave.parallel.data.parameters import FlatParameters


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter's master weights, gradients and moments: float64 for float64
    parameters, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class OptimizerState:
    """The master weights and the moments of a unit.

    Args:
        parameters: the unit's parameters. If they have the masters' dtype, they are the masters.
        region: the elements of the flat buffer that are covered.
    """

    def __init__(self, parameters: FlatParameters, region: slice) -> None:
        self.region, self._parameters = region, parameters
        wide = master_dtype(self.param.dtype)
        self.is_master = self.param.dtype == wide
        self._own_master = None if self.is_master else self.param.to(wide)
        self.moments: dict[str, Tensor] = {}
        self.of_rest: set[str] = set()  # moments that matrices do not have

    @property
    def param(self) -> Tensor:
        """The newest weights of `region`, in the parameters' dtype."""
        flat, shard = self._parameters.flat, self._parameters.shard
        return flat[self.region] if shard is None else shard

    @property
    def master(self) -> Tensor:
        """The master weights; they share the memory of `param` if no cast is needed."""
        return self.param if self._own_master is None else self._own_master

    @property
    def matrices(self) -> int:
        """Number of leading elements that are weights of linear maps (`FlatLayout.matrices`)."""
        ends = min(self._parameters.layout.matrices, self.region.stop)
        return max(0, ends - self.region.start)

    def add_moments(self, names: Iterable[str], rest: Container[str] = ()) -> None:
        """Allocate zeros, like the masters, for each moment that does not exist yet. Matrices do
        not have those in `rest`, which cover only the remainder of the region."""
        for name in names:
            if name not in self.moments:
                start = self.matrices if name in rest else 0
                self.moments[name] = torch.zeros_like(self.master[start:])
                if name in rest:
                    self.of_rest.add(name)

    def moment(self, name: str, part: slice) -> Tensor | None:
        """Return the moment of a part of the region; None for matrices that do not have it."""
        moment = self.moments[name]
        missing = len(self.master) - len(moment)
        if part.start < missing:
            return None
        return moment[part.start - missing : part.stop - missing]


@dataclass(frozen=True)
class Piece:
    """A range of a unit's buffer that a rule updates: flat tensors [n] of one master dtype.

    Attributes:
        master: the weights.
        grad: the summed gradient, which is only read.
        moments: name -> state, updated in place.
        matrix: True for weights of linear maps. For Muon, `grad` is then the step direction.
        param: set to the new weights in the parameters' dtype; None if `master` is the parameters.
        decay: True if weight decay applies.

    Examples:
        >>> from warpweave.parallel.data.optimizer import SGD
        >>> w, g, m, one = torch.ones(8), torch.ones(8), torch.zeros(8), torch.tensor(1.0)
        >>> piece = Piece(w, g, {"momentum": m}, False, None, True)
        >>> step = SGD().begin(0.1, count=one)
        >>> SGD().update(piece, step, scale=one, skip=torch.tensor(0.0))
        >>> round(w[0].item(), 4)
        0.9
    """

    master: Tensor
    grad: Tensor
    moments: dict[str, Tensor]
    matrix: bool
    param: Tensor | None
    decay: bool


class Rule(Protocol):
    """The arithmetic of an optimizer.

    Examples:
        >>> class SignSGD:
        ...     moments = matrix_moments = ()
        ...     def begin(self, lr, count):
        ...         return lr
        ...     def update(self, piece, lr, scale, skip):
        ...         piece.master.sub_(lr * piece.grad.sign() * (skip == 0))
        ...         if piece.param is not None:
        ...             piece.param.copy_(piece.master)
    """

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the state tensors per parameter, as a checkpoint stores them."""
        ...

    @property
    def matrix_moments(self) -> tuple[str, ...]:
        """The subset of `moments` that weights of linear maps have (`ParamRecord.matrices`)."""
        ...

    def begin(self, lr: float | Tensor, count: Tensor) -> Any:
        """Compute once per step what `update` needs for every piece.

        lr: a number, or a 0-dim fp64 tensor next to the weights (CUDA graphs need a tensor).
        count: 0-dim fp64, the number of this step, 1 for the first; if the step will be skipped, it
        is that of the step before.
        """
        ...

    def update(self, piece: Piece, step: Any, scale: Tensor, skip: Tensor) -> None:
        """Update `piece` in place from its gradient times `scale` (0-dim). `step`: from `begin`.

        If `skip` (0-dim) is non-zero, nothing changes. No host sync.
        """
        ...


def check_lr(lr: float | Tensor) -> None:
    """Raise ValueError unless the learning rate is a finite number of at least 0.

    It may also be a 0-dim fp64 tensor, whose value stays on the device and is not checked.
    """
    if isinstance(lr, Tensor):
        if lr.ndim or lr.dtype != torch.float64:
            raise ValueError(f"lr must be a 0-dim float64 tensor, got {lr.dtype} {[*lr.shape]}")
        return
    if not isinstance(lr, Real) or not 0 <= lr < math.inf:
        raise ValueError(f"lr must be finite and at least 0, got {lr!r}")


def check_rule(rule: Rule, clip: float | None) -> None:
    """Raise ValueError if `rule` is no update rule (a class, an optimizer of torch) or `clip` is
    not positive."""
    if isinstance(rule, type) or not hasattr(rule, "begin"):
        raise ValueError(f"rule must be a warpweave update rule such as AdamW(), got {rule!r}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, or None for no clipping, got {clip}")


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), by the fused kernel.

    Examples:
        >>> from warpweave import Mesh, Zero
        >>> zero = Zero(nn.Linear(16, 16), Mesh().connect(), stage=1, rule=AdamW(weight_decay=0.01))
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    impl: str | None = None
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    @property
    def matrix_moments(self) -> tuple[str, ...]:
        """All moments."""
        return self.moments

    def begin(self, lr: float | Tensor, count: Tensor) -> AdamWStep:
        """The rates, and on a GPU the bias corrections of this step."""
        (beta1, beta2), decay = self.betas, self.weight_decay
        rates = {"beta1": beta1, "beta2": beta2, "eps": self.eps, "weight_decay": decay}
        return begin_adamw(count, lr=lr, **rates, impl=self.impl)

    def update(self, piece: Piece, step: AdamWStep, scale: Tensor, skip: Tensor) -> None:
        """Update in one pass over the piece (`kernels.adamw`)."""
        adamw_update(
            piece.master,
            piece.grad,
            piece.moments["exp_avg"],
            piece.moments["exp_avg_sq"],
            step,
            decay=piece.decay,
            grad_scale=scale,
            skip=skip,
            param=piece.param,
            impl=self.impl,
        )


@dataclass(frozen=True)
class NAdamW(AdamW):
    """NAdam (Dozat 2016) with decoupled weight decay: AdamW with Nesterov's look-ahead, used as the
    delay correction of arXiv:2505.01099 for asynchronous pipelines.

    m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
    u = beta1 m / (1 - beta1^(t+1)) + (1 - beta1) g / (1 - beta1^t)
    w <- w - lr weight_decay w - lr u / (sqrt(v / (1 - beta2^t)) + eps)

    The step looks ahead along the momentum. A stale gradient is discounted by 1 - beta1, with beta1
    near 1 (0.99 in the paper). The paper's code uses ``torch.optim.NAdam``, where beta1 rises from
    half of that value during the first thousands of steps; here it is constant.
    """

    def begin(self, lr: float | Tensor, count: Tensor) -> AdamWStep:
        """The rates, and the number of the step."""
        return AdamWStep(lr, *self.betas, self.eps, self.weight_decay, count)

    def update(self, piece: Piece, step: AdamWStep, scale: Tensor, skip: Tensor) -> None:
        """Update by elementwise torch operators, with one pass over the piece for each."""
        (b1, b2), g, skipped = self.betas, piece.grad * scale, skip.bool()
        lr, t = step.lr, step.scalars
        m, v = (piece.moments[name] for name in self.moments)
        m.copy_(torch.where(skipped, m, m.lerp(g, 1 - b1)))
        v.copy_(torch.where(skipped, v, v.lerp(g * g, 1 - b2)))
        u = m * (b1 / (1 - b1 ** (t + 1))) + g * ((1 - b1) / (1 - b1**t))
        new = piece.master * (1 - lr * self.weight_decay) if piece.decay else piece.master
        _set_weights(piece, new - lr * u / ((v / (1 - b2**t)).sqrt() + self.eps), skip)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD``: decay is added to g.

    b <- momentum b + (g + weight_decay w);  w <- w - lr b

    Examples:
        >>> from warpweave import Mesh, Zero
        >>> zero = Zero(nn.Linear(16, 16), Mesh().connect(), stage=1, rule=SGD(momentum=0.0))
    """

    momentum: float = 0.9
    weight_decay: float = 0.0
    moments: tuple[str, ...] = ("momentum",)

    @property
    def matrix_moments(self) -> tuple[str, ...]:
        """All moments."""
        return self.moments

    def begin(self, lr: float | Tensor, count: Tensor) -> float | Tensor:
        """The learning rate."""
        return lr

    def update(self, piece: Piece, step: float | Tensor, scale: Tensor, skip: Tensor) -> None:
        """Update by elementwise torch operators, with one pass over the piece for each."""
        g = piece.grad * scale
        if piece.decay:
            g = g.add_(piece.master, alpha=self.weight_decay)
        b, skipped = piece.moments["momentum"], skip.bool()
        b.copy_(torch.where(skipped, b, self.momentum * b + g))
        _set_weights(piece, piece.master - step * b, skip)


def _set_weights(piece: Piece, new: Tensor, skip: Tensor) -> None:
    """Set the weights of the piece to `new`, unless `skip` is non-zero."""
    piece.master.copy_(torch.where(skip.bool(), piece.master, new))
    if piece.param is not None:
        piece.param.copy_(piece.master)


Scale = Literal["moonlight", "jordan"]


@dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): orthogonalized Nesterov
    momentum for the matrices of linear maps (`ParamRecord.matrices`), AdamW for the rest.

    m <- momentum m + (1 - momentum) g;  u = (1 - momentum) g + momentum m
    w <- w - lr weight_decay w - lr s O(u)

    O is that of each whole matrix, by Newton-Schulz steps (`kernels.muon`), on every layout.
    Queries, keys and values are separate matrices, and so are gate and up (`data.muon`). m is an
    average, whereas Jordan's first version had a sum; O does not depend on the factor
    1 / (1 - momentum) between them.

    Attributes:
        momentum, weight_decay: as above.
        scale: s of a matrix [out, in]. "moonlight" is 0.2 sqrt(max(out, in)), with which an update
            has the size of AdamW's, so learning rate and decay carry over (Liu et al. 2025,
            arXiv:2502.16982). "jordan" is sqrt(max(1, out / in)).
        rest: the rule for embedding, head, norms and biases, with the same learning rate.
        dtype: dtype of the Newton-Schulz steps and of what ranks send for them. None means the
            masters' dtype; bfloat16 is usual with 16-bit parameters.
        impl: "triton", "torch" or None, as for the kernels.

    Examples:
        >>> from warpweave import Engine, GPTConfig, Mesh
        >>> config = GPTConfig(vocab_size=256, seq_len=16, layers=2, width=64, heads=8)
        >>> engine = Engine(config, Mesh().connect(), rule=Muon())
    """

    momentum: float = 0.95
    weight_decay: float = 0.1
    scale: Scale = "moonlight"
    rest: AdamW = AdamW()
    dtype: torch.dtype | None = None
    impl: str | None = None

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise ValueError(f"scale must be one of {get_args(Scale)}, got {self.scale!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")

    @property
    def moments(self) -> tuple[str, ...]:
        """The moments of AdamW; the first is the momentum of matrices."""
        return self.rest.moments

    @property
    def matrix_moments(self) -> tuple[str, ...]:
        """The first of `moments`."""
        return self.rest.moments[:1]

    def nesterov(self, grad: Tensor, m: Tensor, scale: Tensor, skip: Tensor) -> Tensor:
        """Return u for grad[n] times `scale`, in the dtype of m[n], which is updated in place."""
        g = grad * scale
        m.copy_(torch.where(skip.bool(), m, m.lerp(g, 1 - self.momentum)))
        return g.lerp_(m, self.momentum)

    def orthogonalize(self, u: Tensor) -> Tensor:
        """Return s O(u) of a matrix u[out, in]."""
        out, cols = u.shape
        s = 0.2 * max(out, cols) ** 0.5 if self.scale == "moonlight" else max(1, out / cols) ** 0.5
        return orthogonalize(u, impl=self.impl) * s

    def begin(self, lr: float | Tensor, count: Tensor) -> AdamWStep:
        """That of the rule for the rest."""
        return self.rest.begin(lr, count)

    def update(self, piece: Piece, step: AdamWStep, scale: Tensor, skip: Tensor) -> None:
        """Make a step of AdamW; for matrices, a step along the direction in ``piece.grad``."""
        if not piece.matrix:
            self.rest.update(piece, step, scale, skip)
            return
        lr = step.lr
        shrink = 1 - lr * self.weight_decay if piece.decay else 1.0
        _set_weights(piece, piece.master * shrink - lr * piece.grad, skip)


class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740), on the device.

    The scale halves on a step whose gradients overflow (all ranks skip that step, because the flag
    is the global norm) and doubles after `interval` steps without overflow.
    """

    def __init__(self, initial: float = 2.0**16, interval: int = 2000) -> None:
        self.value = torch.full((), initial)
        self.good_steps = torch.zeros(())
        self.interval = interval

    def update(self, overflow: Tensor, halted: Tensor | None = None) -> None:
        """Adapt `value` in place after a step. `overflow` (0-dim) is non-zero if the step was
        skipped because of its gradients. If `halted` is non-zero, nothing changes."""
        bad = overflow.bool()
        good = torch.where(bad, 0.0, self.good_steps + 1)
        grow = good >= self.interval
        factor = torch.where(bad, 0.5, torch.where(grow, 2.0, 1.0))
        value, good = (self.value * factor).clamp(1.0, 2.0**24), torch.where(grow, 0.0, good)
        if halted is not None:
            value = torch.where(halted.bool(), self.value, value)
            good = torch.where(halted.bool(), self.good_steps, good)
        self.value.copy_(value)
        self.good_steps.copy_(good)

    def to(self, device: torch.device) -> LossScale:
        """Move the scale's tensors."""
        self.value, self.good_steps = self.value.to(device), self.good_steps.to(device)
        return self
