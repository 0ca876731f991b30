"""ZeRO-3 on your own model, with a checkpoint that is saved and loaded.

torchrun --standalone --nproc-per-node 2 examples/own_zero.py
"""

import sys
import tempfile

import torch
from torch import nn

from warpweave import Mesh, Zero, join
from warpweave.checkpoint import open_latest, save_checkpoint


def model() -> nn.Module:
    """Blocks in an nn.Sequential are gathered and freed one by one."""
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)]
    return nn.Sequential(*blocks)


def main(folder: str) -> float:
    """Train, save, load into another ZeRO stage; return the difference of the two losses."""
    with join(Mesh(dp=2), backend="gloo") as session:
        mesh = Mesh(dp=2).connect()
        zero = Zero(model(), mesh, stage=3)
        torch.manual_seed(session.rank)  # each rank has its own data
        for _ in range(30):
            x = torch.randn(16, 16)
            loss = nn.functional.mse_loss(zero.model(x), x.cumsum(1))
            loss.backward()
            zero.step(lr=1e-2)
        world = mesh.group("world")
        save_checkpoint(folder, 30, zero.tensors(), config={}, state=zero.state(), group=world)

        again, saved = Zero(model(), mesh, stage=1), open_latest(folder, group=world)
        again.load(saved.tensor)
        again.load_state(saved.state)
        with torch.no_grad():
            difference = (zero.model(x) - again.model(x)).abs().max().item()
        print(f"rank {session.rank}: loss {loss.item():.3f}, loaded outputs differ by {difference}")
    return difference


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir() + "/own_zero")
