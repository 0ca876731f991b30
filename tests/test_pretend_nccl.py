"""Training steps under NCCL's order: no rank waits for ever, and every bit is as on gloo's."""

from __future__ import annotations

import pytest
import torch
from pretend_nccl import run_nccl
from threads import run_threads

from warpweave.config import GPTConfig, ParallelPlan
from warpweave.engine import Engine
from warpweave.parallel.mesh import Mesh

CONFIG = GPTConfig(vocab_size=37, seq_len=16, layers=4, width=16, heads=4, hidden=20, dropout=0.1)


def _steps(rank: int, sizes: Mesh, plan: dict) -> list[torch.Tensor]:
    mesh = sizes.connect()
    plan = ParallelPlan(**{"microbatches": 4, **plan})
    engine = Engine(CONFIG, mesh, plan, micro_batch_size=2, dtype=torch.float64, seed=3)
    generator = torch.Generator().manual_seed(mesh.index("dp"))
    tokens = torch.randint(0, 37, (2, 4, 2, 17), generator=generator)
    ids = torch.arange(8).view(4, 2) + 8 * mesh.index("dp")
    found = []
    for key in range(2):
        x, y = tokens[key, ..., :-1].contiguous(), tokens[key, ..., 1:].contiguous()
        result = engine.step(x, y, ids, lr=0.02, key=key)
        found.append(result.all().clone())
    return [*found, *(t for _, t, _ in engine.read("param"))]


CASES = {
    "pp2": (Mesh(pp=2), {}),
    "pp2 gpipe": (Mesh(pp=2), {"schedule": "gpipe"}),
    "pp4": (Mesh(pp=4), {}),
}


@pytest.mark.parametrize("drains", ["never", "first", "always"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_gloo_to_the_bit(name: str, drains: str) -> None:
    sizes, plan = CASES[name]
    expected = run_threads(sizes.world, _steps, sizes, plan)
    found = run_nccl(sizes.world, _steps, sizes, plan, drains=drains)
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
