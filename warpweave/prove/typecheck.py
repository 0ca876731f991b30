"""Type-check the collectives of a GPT on any mesh, without its ranks.

``typecheck(config, Mesh(dp=128, cp=4, tp=8, pp=4))`` runs forward and backward of one rank of each
pipeline stage, on tensors without data and a process group without peers, while spmd_types infers
the type of each tensor on every axis: Replicate, Invariant, Shard or Partial. A missing, doubled or
wrong collective is a type error at the line that uses its result.

Assumptions: tokens are sharded over dp and cp; parameters are as their `ParamRecord` says, and the
trainer sums their gradients accordingly; stages send the residual stream; a distributed Function
does what its typing rule says (tests check this numerically). Values are not checked.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.model.config import ParallelPlan
from warpweave.model.gpt import GPT, GPTConfig, MicroBatch
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.parallel.pipeline.losses import split_losses


def typecheck(
    config: GPTConfig,
    mesh: Mesh,
    *,
    stages: Iterable[int] | None = None,
    sequence_parallel: bool = False,
    recompute: str = "none",
    layout: str = "zigzag",
) -> None:
    """Check the GPT on every axis of `mesh`, stage by stage (all, or `stages`).

    Raises:
        TypeError: a type is wrong; the message names the stage, the file and the line.
        ValueError: the model cannot be sharded over the mesh at all.
        ImportError: spmd_types is not installed (it is in the extra `typecheck`).
        RuntimeError: a process group exists (this function creates a fake one).
    """
    plan = ParallelPlan(sequence_parallel=sequence_parallel, recompute=recompute, layout=layout)
    if mesh.ulysses > 1:
        raise ValueError(
            f"ulysses must be 1, got {mesh.ulysses}: the typechecker has a single context axis; "
            "use ulysses = 1 to check a ring of the same size"
        )
    config.check(mesh, plan)
    try:
        from spmd_types.types import SpmdTypeError
    except ImportError:
        raise ImportError("typecheck needs spmd_types; install the extra `typecheck`") from None
    if dist.is_initialized():
        raise RuntimeError(
            "typecheck creates its own process group; destroy the existing one first"
        )
    if mesh.data * mesh.tp == 1:
        return  # a stage on one device has no collectives to check
    for stage in stages if stages is not None else range(mesh.pp):
        try:
            with _pretend(mesh, stage) as connected, torch._subclasses.FakeTensorMode():
                model = GPT(config, mesh=connected, plan=plan)
                # Flattening (B, S) with S sharded is a plain shard of the rows only for one sample.
                tokens = torch.zeros(2 if mesh.cp == 1 else 1, config.seq_len, dtype=torch.int64)
                _run_model(model, model.micro_batch(tokens, tokens.clone(), torch.tensor(1.0)))
        except SpmdTypeError as error:
            raise TypeError(f"stage {stage} of {mesh}: {_places(error)}") from error


def _run_model(model: GPT, batch: MicroBatch) -> None:
    """Run forward and, on the last stage, backward under the checker."""
    import spmd_types as spmd
    from spmd_types.checker import typecheck as checking

    mesh, x = model.mesh, None
    tp_rows = spmd.S(0) if model.sequence_parallel else spmd.I
    stream = {"dp": spmd.V, "cp": spmd.S(0), "tp": tp_rows}
    _annotate(model, batch)
    if not model.first:
        x = torch.zeros(len(batch.positions), model.config.width, requires_grad=True)
        _typed(mesh, x, **stream)
    with checking(local=False):
        if model.first:
            x = model.embed(None, batch)
        for block in model.blocks.values():
            x, _ = split_losses(block(x, batch.context))
        _typed(mesh, x, **stream)  # the next stage assumes this type
        if model.last:
            loss = model.head_loss(x, batch)
            _typed(mesh, loss, dp=spmd.V, cp=spmd.P, tp=spmd.I)
            if mesh.size("dp") > 1:  # each data rank has its share of one sum
                loss = spmd.reinterpret(loss, mesh.group("dp"), src=spmd.V, dst=spmd.P)
            loss.backward()


def _annotate(model: GPT, batch: MicroBatch) -> None:
    """Declare the types of parameters and data on each axis before anything runs."""
    from spmd_types import I, R, S, V

    mesh, rows = model.mesh, S(0) if model.sequence_parallel else R
    records = model.parameter_records()
    for name, param in model.named_parameters():
        record = records[name]
        # R: the gradient is a partial sum that the trainer reduces; I: it is equal on every rank.
        dims = [cut.dim for cut in record.cuts if cut.axis == "tp" and cut.parts > 1]
        tp = S(dims[0]) if dims else R if "tp" in record.partial else I
        _typed(mesh, param, dp=R, cp=R, tp=tp)
    _typed(mesh, batch.tokens, dp=V, cp=S(0), tp=R)
    _typed(mesh, batch.labels, dp=V, cp=S(0), tp=R)
    _typed(mesh, batch.positions, dp=R, cp=S(0), tp=rows)
    _typed(mesh, batch.normaliser, dp=R, cp=R, tp=R)
    for table in (*(batch.context.rope or ()), *(batch.context.local_rope or ())):
        _typed(mesh, table, dp=R, cp=S(0), tp=R)
    if batch.context.token_ids is not None:
        _typed(mesh, batch.context.token_ids, dp=V, cp=S(0), tp=rows)


def _typed(mesh: ConnectedMesh, tensor: Tensor, **types: object) -> Tensor:
    """Declare `tensor`'s type, or assert it if it already has one; axes outermost first."""
    import spmd_types as spmd

    types = {axis: t for axis, t in types.items() if mesh.size(axis) > 1}
    cut = [tuple(a for a, t in types.items() if t == spmd.S(d)) for d in range(tensor.ndim)]
    other = {a: t for a, t in types.items() if not any(a in axes for axes in cut)}
    spec = spmd.PartitionSpec(*[axes or None for axes in cut]) if any(cut) else None
    return spmd.assert_type(tensor, other, spec)


@contextmanager
def _pretend(sizes: Mesh, stage: int) -> Iterator[ConnectedMesh]:
    """Connect the mesh as the first rank of `stage` sees it, with a process group without peers."""
    import spmd_types as spmd
    from spmd_types._mesh_axis import _reset
    from spmd_types.checker import typecheck as checking
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from warpweave.kernels.sharding import register_shardings

    register_shardings()
    rank = sizes.rank_at(pp=stage)
    dist.init_process_group("fake", rank=rank, world_size=sizes.world, store=FakeStore())
    try:
        connected = sizes.connect()
        # Each stage is a separate program. dp ranks share nothing but sums, so the type "differs"
        # suffices. cp and tp ranks hold parts of whole tensors, so there it matters which part.
        axes = connected.device_mesh["dp", "cp", "tp"]
        with spmd.set_current_mesh(axes, local_axes=("dp",) if sizes.dp > 1 else ()):
            # Run one operation while tensors still have data: when the checker first meets an axis,
            # it creates (and keeps) a mesh of that size from a tensor whose values it reads.
            probe = _typed(connected, torch.zeros(1, 1), dp=spmd.V, cp=spmd.S(0), tp=spmd.S(1))
            with checking(local=False):
                probe.clone()
            yield connected
    finally:
        dist.destroy_process_group()
        _reset()  # axes are cached by their ranks, and the next mesh is a different one


def _places(error: Exception) -> str:
    """Return "file:line in function, from file:line ...: message", innermost first, without
    frames of libraries."""
    import spmd_types

    libraries = (*(os.path.dirname(m.__file__) for m in (torch, spmd_types)), __file__)
    where = ", from ".join(
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not frame.filename.startswith(libraries) and frame.name != "spmd_typecheck"
    )
    return f"{where or 'between the stage and its neighbors'}: {str(error).splitlines()[0]}"
