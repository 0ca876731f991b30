"""Write your own training loop around the engine, on any mesh; the model learns to count modulo 10.

torchrun --nproc-per-node 4 examples/train_gpt.py --tp 2 --pp 2
torchrun --nproc-per-node 4 examples/train_gpt.py --dp 4 --zero 3
"""

from dataclasses import dataclass

import torch
import tyro

from warpweave import Engine, GPTConfig, Mesh, ParallelPlan, join


@dataclass(frozen=True)
class Config:
    """The mesh, the ZeRO stage and the number of steps."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    zero: int = 1
    steps: int = 60


def main(config: Config) -> float:
    """Train and print the loss every ten steps; return the last loss."""
    sizes = Mesh(dp=config.dp, tp=config.tp, cp=config.cp, pp=config.pp)
    with join(sizes) as session:
        mesh = sizes.connect(session.device.type)
        model = GPTConfig(vocab_size=10, seq_len=16, layers=2, width=32, heads=4)
        samples, microbatches = 8 // config.dp, 2
        engine = Engine(
            model,
            mesh,
            ParallelPlan(zero=config.zero, microbatches=microbatches),
            micro_batch_size=samples // microbatches,
            device=session.device,
        )
        loss = float("nan")
        for step in range(config.steps):
            # This data replica's samples, numbered over the run: every mesh sees the same ones.
            ids = torch.arange(samples) + step * 8 + mesh.index("dp") * samples
            counting = (ids[:, None] + torch.arange(17)) % 10
            counting = counting.view(microbatches, -1, 17).to(session.device)
            result = engine.step(
                counting[..., :-1],
                counting[..., 1:],
                ids.view(microbatches, -1).to(session.device),
                lr=0.01,
                key=step,
            )
            loss = float(result.loss)
            if session.rank == 0 and step % 10 == 0:
                print(f"step {step}: loss {loss:.4f}, gradient norm {float(result.norm):.3f}")
    return loss


if __name__ == "__main__":
    main(tyro.cli(Config))
