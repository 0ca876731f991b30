"""Any ``nn.Module`` as a pipeline stage."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup
from torch.func import functional_call

from warpweave.kernels.runtime.wgrad import WeightGradients, collect
from warpweave.parallel.pipeline.interface import Like, check_version
from warpweave.parallel.pipeline.losses import LOSS, Losses, Output, add_losses, split_losses


class ModuleStage:
    """Any ``nn.Module`` as a stage, with replicated parameters, for users and proofs.

    Args:
        module: x -> y with floating-point x and y, or x -> (y, losses) with auxiliary losses by
            name (`losses`), whose gradients are part of this stage's backward.
        inputs: mb -> input; only on the first stage, where it is required.
        like: (shape, dtype, device) of x; required on all other stages.
        loss: (mb, y) -> scalar, already normalized; only on the last stage, where it is required.
        tied: the parameter that the first and last stage share, if there is a TIE.
        optimizer: at UPDATE, makes a step and clears its gradients.
        group: the ranks over which REDUCE sums gradients; None means a single rank.
        versions: weight stashing (PipeDream, arXiv:1806.03377): the number of newest versions of
            the weights to keep. If it is more than one, a micro-batch may run backward after an
            UPDATE, with the weights of its forward.

    Gradients are in the parameters' ``.grad``. `losses` maps mb to name to the detached loss of the
    last run; the model's own is called "loss".

    Examples:
        >>> from warpweave.parallel.pipeline import InProcess, execute
        >>> from warpweave.parallel.schedule import gpipe
        >>> x = torch.randn(2, 8, 16)
        >>> loss = lambda mb, y: y.mean()
        >>> stage = ModuleStage(nn.Linear(16, 16), inputs=x.__getitem__, loss=loss)
        >>> execute(gpipe(1, 2), {0: stage}, InProcess())
        >>> stage.losses.keys()
        dict_keys([0, 1])
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        inputs: Callable[[int], Tensor] | None = None,
        like: Like | None = None,
        loss: Callable[[int, Tensor], Tensor] | None = None,
        tied: nn.Parameter | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        group: ProcessGroup | None = None,
        versions: int = 1,
    ) -> None:
        if (inputs is None) == (like is None):
            raise ValueError("pass either `inputs` (first stage) or `like` (other stages)")
        self.module, self.tied, self.optimizer, self.group = module, tied, optimizer, group
        self.losses: dict[int, Losses] = {}
        self._inputs, self._like, self._loss = inputs, like, loss
        # Keep the ends of the graph instead of y itself, so y's memory is free once it is sent. The
        # first end is that of y (None if it needs no gradient), then come those of the losses.
        self._graphs: dict[int, tuple[Tensor | None, list[GradientEdge | None]]] = {}
        self._owed: dict[int, WeightGradients] = {}
        self._versions = versions
        self.start()

    def start(self) -> None:
        """Begin a run of the lists: the current weights are version 0."""
        self._newest = 0
        self._stash: dict[int, dict[str, Tensor]] = {}  # version -> name -> weight, if several
        self._read: dict[int, int] = {}  # micro-batch -> version, from forward to backward
        self._stash_newest()

    def input_like(self, mb: int) -> Like:
        """Return the `like` given to the constructor."""
        if self._like is None:
            raise ValueError("the first stage receives nothing")
        return self._like

    def forward(self, mb: int, x: Tensor | None, version: int = 0) -> Tensor | None:
        """Run the module. Every stage keeps its losses in `losses`; the last one returns None."""
        if x is not None:
            x = x.detach().requires_grad_()
        given = self._inputs(mb) if self._inputs is not None else x
        y, losses = split_losses(self._at(version, mb)(given))
        if self._loss is not None:
            total = {LOSS: self._loss(mb, y)}
            add_losses(total, losses)
            losses, y = total, None
        self.losses[mb] = {name: loss.detach() for name, loss in losses.items()}
        ends = [
            get_gradient_edge(end) if end is not None and end.requires_grad else None
            for end in (y, *losses.values())
        ]
        self._graphs[mb] = (x, ends)
        return None if y is None else y.detach()

    def backward(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """Run autograd through the module's graph of `mb`."""
        dx = self._backward(mb, dy)
        self._collect_stashed(mb)
        return dx

    def backward_input(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """Like `backward`, but defer weight gradients to `backward_weight` (`wgrad.collect`)."""
        store = self._owed[mb] = WeightGradients()
        with collect(store):
            return self._backward(mb, dy)

    def backward_weight(self, mb: int) -> None:
        """Compute the deferred weight gradients."""
        self._owed.pop(mb).run()
        self._collect_stashed(mb)

    def _backward(self, mb: int, dy: Tensor | None) -> Tensor | None:
        self._need(self._read[mb], mb)
        x, ends = self._graphs.pop(mb)
        seeds = (dy, *[None] * (len(ends) - 1))
        roots = [(end, seed) for end, seed in zip(ends, seeds) if end is not None]
        if roots:
            torch.autograd.backward(*zip(*roots))
        return None if x is None else x.grad

    # ------------------------------------------------------------------ versions of the weights

    def _stash_newest(self) -> None:
        """With several versions, stash the buffers of the newest weights and drop the oldest. The
        stashed tensors keep their buffers when the parameters get new ones."""
        if self._versions > 1:
            self._stash[self._newest] = {
                name: p.data.requires_grad_(p.requires_grad)
                for name, p in self.module.named_parameters()
            }
            self._stash.pop(self._newest - self._versions, None)

    def _need(self, version: int, mb: int) -> None:
        check_version(mb, version, sorted(self._stash) or [self._newest])

    def _at(self, version: int, mb: int) -> Callable[[Tensor], Output]:
        """Return the module with the weights of `version`."""
        self._need(version, mb)
        self._read[mb] = version
        if self._versions == 1:
            return self.module
        weights = self._stash[version]
        return lambda x: functional_call(self.module, weights, (x,))

    def _collect_stashed(self, mb: int) -> None:
        """Add the gradients of `mb` from stashed copies of the weights to the parameters'."""
        for name, copy in self._stash.get(self._read.pop(mb), {}).items():
            if copy.grad is not None:
                parameter = self.module.get_parameter(name)
                total = parameter.grad
                parameter.grad = copy.grad if total is None else total.add_(copy.grad)
                copy.grad = None

    def reduce(self) -> None:
        """All-reduce every gradient with SUM."""
        if self.group is not None:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self.group)

    def tie(self) -> Tensor | None:
        """Return the tied parameter's gradient."""
        return None if self.tied is None else self.tied.grad

    def update(self) -> None:
        """Make an optimizer step and clear the gradients."""
        if self.optimizer is None:
            raise ValueError("UPDATE needs an optimizer, but this stage has none; pass optimizer=")
        if self._versions > 1:  # the optimizer writes in place; protect versions still being read
            for parameter in self.module.parameters():
                parameter.data = parameter.data.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._newest += 1
        self._stash_newest()
