"""A pipeline of your own modules, under 1F1B and under a zero-bubble schedule.

torchrun --standalone --nproc-per-node 2 examples/own_pipeline.py
"""

import torch
from torch import nn

from warpweave import Mesh, Pipeline, join


def train(schedule: str, stages: int, steps: int = 30) -> list[float]:
    """Train on two pipeline ranks; return the losses."""
    mesh = Mesh(pp=2).connect()
    torch.manual_seed(0)  # the same modules on every rank
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(stages)]
    pipeline = Pipeline(
        blocks, mesh, loss=nn.functional.mse_loss, schedule=schedule, microbatches=4
    )
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 16)  # the same batch on every rank of a pipeline
        losses.append(pipeline.step(x, x.cumsum(1), lr=1e-2).loss.item())
    return losses


def main() -> dict[str, list[float]]:
    """Train with both schedules; print the first and the last loss."""
    with join(Mesh(pp=2), backend="gloo") as session:
        found = {"1f1b": train("1f1b", 2), "zb-v": train("zb-v", 4)}  # zb-v has two stages per rank
        if session.rank == 0:
            for schedule, losses in found.items():
                print(f"{schedule}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return found


if __name__ == "__main__":
    main()
