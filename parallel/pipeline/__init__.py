"""Running a schedule: one executor, in one process or over torch.distributed.

`execute` walks the lists · `interface` what a stage and a transport must offer · `transport` the
two transports · `stage` a chain of segments over ZeRO units · `module` any module as a stage ·
`losses` what either may return beside its activation.
"""

from warpweave.parallel.pipeline.execute import execute
from warpweave.parallel.pipeline.interface import Like, Stage, Transport
from warpweave.parallel.pipeline.module import ModuleStage
from warpweave.parallel.pipeline.transport import Distributed, InProcess

__all__ = ["Distributed", "InProcess", "Like", "ModuleStage", "Stage", "Transport", "execute"]
