"""Live recovery of an elastic data-parallel run: a new replica gets its state from a peer's memory.

The state is carried over a change of replicas and broadcast to a replica that joins, without a
checkpoint (torchft's "heal"; Oobleck, Jang et al. 2023, arXiv:2309.08125). A replica is the ranks
that hold the whole state once: one data rank of ZeRO 0, or a shard group of hybrid sharding, with
all of its tensor, context and pipeline ranks. Ranks that hold the same part in each replica form a
group along the mesh's axis of replicas and exchange only that part. Here are master weights and
moments m of slices a, b; replica 1 has died and its successor is empty:

    replica, rank in it     0, 0     0, 1     1, 0     1, 1     2, 0     2, 1
    before                  m[a]     m[b]     0        0        m[a]     m[b]
    broadcast over          ---- replicas of rank 0: m[a] -> m[a], of rank 1: m[b] -> m[b] ----
    after                   m[a]     m[b]     m[a]     m[b]     m[a]     m[b]

Flat buffers are sent in place as they are, one after the other. Parameters follow from the master
weights by a cast, and by an all-gather within a replica if ZeRO 1 or 2 shards the update.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.parallel.data.zero import ZeroOptimizer

State = dict[tuple[str, str], Tensor]  # (unit, "param" or moment) -> flat buffer


def held_state(optimizer: ZeroOptimizer) -> State:
    """Return the master weights and moments that this rank holds. Buffers of a GPU are copied to
    the host; those of the CPU are shared."""
    return {
        (unit.name, kind): unit.buffer(kind).cpu()
        for unit in optimizer.units
        for kind in ("param", *optimizer.rule.moments)
    }


@torch.no_grad()
def recover(
    optimizer: ZeroOptimizer,
    state: State | None,
    group: dist.ProcessGroup | None,
    source: int,
    *,
    alike: bool,
) -> None:
    """Give a newly built optimizer's units the state of replica `source`.

    Args:
        optimizer: this rank's optimizer on the new mesh.
        state: `held_state` of this rank on the previous mesh; None if it has none.
        group: the ranks that hold this rank's part in each replica; None for a single replica.
        source: the index in `group` of the replica that sends.
        alike: True if every replica already has the state, so nothing is sent.

    Buffers may differ in length only by their padding, which depends on the number of ranks.
    Collective over `group`, and over the shard group if ZeRO 1 or 2 shards the update.
    """
    for unit in optimizer.units:
        for kind in ("param", *optimizer.rule.moments):
            buffer = unit.buffer(kind)
            if state is not None:
                held = state[unit.name, kind]
                size = min(len(held), len(buffer))
                buffer[:size].copy_(held[:size])
            if group is not None and not alike:
                dist.broadcast(buffer, group=group, group_src=source)
        if not unit.state.is_master:
            unit.state.param.copy_(unit.state.master)
        if unit.placement.optim and not unit.placement.param:
            unit.parameters.publish()
