"""Steps of an engine as CUDA graphs: launched as a whole, so that the host does not limit the GPU.

A graph repeats the launches of its capture, with the same numbers and addresses. Everything that
changes is therefore data on the device: the batch, the learning rate, the dropout key and the flags
are copied to fixed buffers before each replay. `warpweave.prove.recording` shows without a GPU that
a step has no other number that changes, and that a replay computes what the step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from warpweave.model.config import ParallelPlan
from warpweave.model.engine_update import StepResult
from warpweave.parallel.mesh import Mesh

_RUNNING = {"halted": 0.0}  # of a step that does not depend on an earlier one
_WARM_UP = 2  # steps without a graph: they compile kernels, load them, and fill the caches
_SHAPES = 4  # captured shapes of the data; steps of other shapes run without a graph


class Graph(Protocol):
    """A step that is captured once and replayed many times."""

    def warm_up(self, step: Callable[[], Any]) -> Any:
        """Run `step` as it will run in the capture, and return its result."""
        ...

    def capture(self, step: Callable[[], Any]) -> Any:
        """Record `step` without running it, and return the tensors that each replay sets."""
        ...

    def replay(self) -> None:
        """Run the captured step."""
        ...

    def reset(self) -> None:
        """Free the captured step."""
        ...


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` of a device, with a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._graph, self._stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)

    def warm_up(self, step: Callable[[], Any]) -> Any:
        """Run `step` on the stream of the capture, whose buffers it allocates."""
        with torch.cuda.device(self._device):
            outside = torch.cuda.current_stream()
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                result = step()
            outside.wait_stream(self._stream)
        return result

    def capture(self, step: Callable[[], Any]) -> Any:
        """Capture `step`; other threads, such as NCCL's watchdog, may call CUDA meanwhile."""
        how: Any = {"stream": self._stream, "capture_error_mode": "thread_local"}
        with torch.cuda.device(self._device), torch.cuda.graph(self._graph, **how):
            return step()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        with torch.cuda.device(self._device):
            self._graph.replay()

    def reset(self) -> None:
        """Free the graph."""
        self._graph.reset()


def cuda_graph_on(device: torch.device) -> Callable[[], CudaGraph]:
    """Return what makes graphs of a CUDA device; ValueError for another device."""
    if device.type != "cuda":
        raise ValueError(f"cuda_graph=True needs a CUDA device, got {device}")
    return partial(CudaGraph, device)


class StepGraphs:
    """Steps captured by the shapes of their data.

    The first steps of a shape run without a graph.

    Args:
        step: a step whose inputs are given by name.
        new_graph: makes an empty graph.
    """

    def __init__(self, step: Callable[..., StepResult], new_graph: Callable[[], Graph]) -> None:
        self.step, self._new_graph = step, new_graph
        self._graphs: dict[Any, _Captured] = {}

    def __call__(self, inputs: Mapping[str, Tensor | float | None]) -> StepResult:
        """Run a step with these inputs, of which those that are None are left out; in a graph,
        numbers become tensors on the device of the others."""
        given = {name: x for name, x in inputs.items() if x is not None}
        shapes = tuple((n, x.shape) for n, x in given.items() if isinstance(x, Tensor) and x.ndim)
        if shapes not in self._graphs:
            if len(self._graphs) == _SHAPES:
                return self.step(**given)
            static = {name: x.clone() for name, x in as_tensors(_RUNNING | given).items()}
            self._graphs[shapes] = _Captured(self._new_graph(), self.step, static)
        try:
            return self._graphs[shapes].run(_RUNNING | given)
        except BaseException:
            self._graphs.pop(shapes).reset()  # a failed capture cannot be used again
            raise

    def reset(self) -> None:
        """Free all graphs. Needed before NCCL's groups are destroyed, which waits for them."""
        for captured in self._graphs.values():
            captured.reset()
        self._graphs.clear()


def as_tensors(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inputs of a step with every number as a 0-dim tensor on the device of the tokens, int64
    for the dropout key and float64 for others; without those that are None."""
    device = inputs["tokens"].device
    return {
        name: x
        if isinstance(x, Tensor)
        else torch.tensor(x, dtype=torch.int64 if name == "key" else torch.float64, device=device)
        for name, x in inputs.items()
        if x is not None
    }


class _Captured:
    """One graph with the buffers of its inputs and results."""

    def __init__(
        self, graph: Graph, step: Callable[..., StepResult], static: dict[str, Tensor]
    ) -> None:
        self._graph, self._step, self._static = graph, step, static
        self._result: StepResult | None = None
        self._runs = 0

    def run(self, given: Mapping[str, Tensor | float]) -> StepResult:
        for name, x in given.items():
            if isinstance(x, Tensor):
                self._static[name].copy_(x, non_blocking=True)
            else:
                self._static[name].fill_(x)
        if self._runs < _WARM_UP:
            self._runs += 1
            return self._graph.warm_up(self._whole)
        if self._result is None:
            self._result = self._graph.capture(self._whole)
        self._graph.replay()
        return self._result.clone()  # the next replay overwrites these tensors

    def reset(self) -> None:
        self._graph.reset()

    def _whole(self) -> StepResult:
        return self._step(**self._static)


def check_capture(plan: ParallelPlan, mesh: Mesh, impl: str, *, packed: bool = False) -> None:
    """Raise ValueError, in one sentence, for a layout whose steps cannot be captured.

    packed: whether the data contains packed documents.
    """
    if mesh.pp > 1 or plan.asynchronous:
        raise ValueError(
            f"CUDA graphs need pp = 1 and a synchronous schedule, got pp = {mesh.pp} and "
            f"{plan.schedule}: the host waits for messages between stages"
        )
    if mesh.outer > 1:
        raise ValueError(
            f"CUDA graphs need one replica, got {mesh.outer} outer replicas, which do not "
            "synchronize in every step"
        )
    if plan.overlap == "fused":
        raise ValueError(
            "CUDA graphs need overlap 'none', 'bulk', or 'chunked', got 'fused', whose kernels "
            "exchange memory addresses between ranks"
        )
    if plan.layout == "balanced" and mesh.cp > 1:
        raise ValueError(
            "CUDA graphs need a layout other than 'balanced', whose rows are chosen on the host"
        )
    if packed and mesh.world > 1:
        raise ValueError(
            f"CUDA graphs of packed documents need one rank, got {mesh.world}: the number "
            "of documents differs between ranks"
        )
    if packed and impl == "torch":
        raise ValueError(
            "CUDA graphs of packed documents need impl 'triton', got 'torch', which reads the "
            "documents' boundaries on the host"
        )
