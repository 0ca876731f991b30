"""Pipeline parallelism: an executor of schedules, in one process or over torch.distributed.

`execute` runs the lists · `interface` the protocols of a stage and a transport · `transport` the
two transports · `stage` a chain of segments over ZeRO units as a stage · `module` any ``nn.Module``
as a stage · `losses` the losses that either may return in addition to its activation · `relay` one
forward pass without a schedule.
"""

from warpweave.parallel.pipeline.execute import InFlight, execute
from warpweave.parallel.pipeline.interface import Like, OnAction, Stage, Transport
from warpweave.parallel.pipeline.module import ModuleStage
from warpweave.parallel.pipeline.relay import relay
from warpweave.parallel.pipeline.transport import Distributed, InProcess

__all__ = [
    "Distributed", "InFlight", "InProcess", "Like", "ModuleStage", "OnAction", "Stage", "Transport",
    "execute", "relay",
]  # fmt: skip
