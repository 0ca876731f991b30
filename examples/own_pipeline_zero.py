"""A pipeline whose stages are sharded by ZeRO-3, proven equal to one plain device.

torchrun --standalone --nproc-per-node 2 examples/own_pipeline_zero.py  # 2 stages
torchrun --standalone --nproc-per-node 4 examples/own_pipeline_zero.py  # and 2 data ranks

A proof in three steps: train a copy on one device in float64, train in parallel, and compare. In
float64 rounding is 1e-16, so a wrong gradient cannot hide behind a tolerance.
"""

import copy
import os

import torch
from torch import nn

from warpweave import Mesh, Pipeline, join
from warpweave.parallel.data.optimizer import SGD


def plain(model: nn.Module, batches: torch.Tensor, lr: float) -> dict[str, torch.Tensor]:
    """Train a copy of the model on one device with torch's SGD; return its weights."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for x in batches:
        nn.functional.mse_loss(model(x), x.cumsum(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def main() -> float:
    """Train both ways; return the largest difference of a weight."""
    sizes = Mesh(pp=2, dp=int(os.environ.get("WORLD_SIZE", "2")) // 2)
    with join(sizes, backend="gloo") as session:
        mesh = sizes.connect()
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2)]
        stages = [stage.double() for stage in stages]
        batches = torch.randn(10, 32, 16, dtype=torch.float64)
        wanted = plain(nn.Sequential(*stages), batches, lr=0.1)

        rule = SGD(momentum=0.9, weight_decay=0.0)
        loss = nn.functional.mse_loss
        pipeline = Pipeline(stages, mesh, loss=loss, microbatches=4, zero=3, rule=rule)
        for batch in batches:
            x = batch.chunk(sizes.dp)[mesh.index("dp")]  # this data rank's part
            pipeline.step(x, x.cumsum(1), lr=0.1)
        found = ((name, x) for name, x in pipeline.tensors() if name in wanted)
        difference = max(((x - wanted[name]).abs().max().item() for name, x in found), default=0.0)
        assert difference < 1e-12, difference
        print(f"rank {session.rank}: weights differ from one device's by at most {difference:.0e}")
    return difference


if __name__ == "__main__":
    main()
