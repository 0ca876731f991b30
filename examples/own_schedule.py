"""Write your own pipeline schedule as data; validate it, draw it, and run it through the engine.

python examples/own_schedule.py                                  # validates and draws it
torchrun --nproc-per-node 2 examples/own_schedule.py             # and trains with it

It folds the pipeline into a V: of 2 p stages on p ranks, rank r holds r and 2 p - 1 - r. The first
and the last stage, with the embedding and the head, are on the same rank, so their tied weight
needs no message. In the fold a micro-batch moves to the next stage at once. A schedule is a list of
actions per rank; the engine adds sends, receives, reductions and updates. The losses equal those of
1F1B, and of one device.
"""

import os
from dataclasses import dataclass

import torch

from warpweave import Engine, GPTConfig, Mesh, ParallelPlan, join
from warpweave.parallel import schedule as schedules
from warpweave.parallel.schedule import Action, Schedule
from warpweave.parallel.simulate import simulate


def folded(ranks: int, microbatches: int) -> Schedule:
    """Return the schedule: all forwards down the V and up again, then all backwards in reverse."""
    every, lists = range(microbatches), []
    for down in range(ranks):
        up = 2 * ranks - 1 - down
        forward = [Action("F", stage, i) for stage in (down, up) for i in every]
        backward = [Action("B", stage, i) for stage in (up, down) for i in every]
        lists.append(forward + backward)
    return lists


@dataclass(frozen=True)
class FoldedPlan(ParallelPlan):
    """A plan whose schedule is `folded`."""

    def make_schedule(self, ranks: int) -> Schedule:
        """Return the lists of actions, which the engine completes and validates again."""
        return folded(ranks, self.microbatches)


def losses(ranks: int, plan: ParallelPlan, steps: int = 5) -> list[float]:
    """Train a model to count modulo ten on `ranks` pipeline ranks; return the losses."""
    sizes = Mesh(pp=ranks)
    mesh = sizes.connect()
    model = GPTConfig(vocab_size=10, seq_len=16, layers=4, width=32, heads=4)
    engine = Engine(model, mesh, plan, micro_batch_size=2)
    ids = torch.arange(2 * plan.microbatches).view(-1, 2)
    counting = (ids[..., None] + torch.arange(17)) % 10
    results = [
        engine.step(counting[..., :-1], counting[..., 1:], ids, lr=0.01) for _ in range(steps)
    ]
    return [float(result.loss) for result in results]


def main(microbatches: int = 4) -> dict[str, list[float]]:
    """Validate, draw and train; return the losses of both schedules."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with join(Mesh(pp=ranks)) as session:
        drawn = folded(max(ranks, 2), microbatches)
        schedules.validate(
            drawn, microbatches=microbatches
        )  # raises a one-line ValueError if wrong
        if session.rank == 0:
            timeline = simulate(drawn, {"F": 1, "B": 2})  # a backward takes twice as long
            print(timeline.draw())
            print(f"idle {timeline.bubble:.0%} of the time")
        found = {
            "folded": losses(ranks, FoldedPlan(microbatches=microbatches)),
            "1f1b": losses(ranks, ParallelPlan(microbatches=microbatches)),
        }
        if session.rank == 0:
            for name, values in found.items():
                print(f"{name:8}", " ".join(f"{loss:.6f}" for loss in values))
    return found


if __name__ == "__main__":
    main()
