"""The planner's step time, part by part, against a second implementation of its formulas, for
hundreds of random steps. The hand-computed cases in `test_plan.py` combine few options."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass

import pytest

from warpweave.kernels import cost
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.schedule import FAMILIES, find_family, placement
from warpweave.plan.device import HARDWARE, Hardware
from warpweave.plan.memory import pipeline_shape, units_of
from warpweave.plan.time import (
    Job,
    block_parts,
    gradient_sum,
    least_time,
    message,
    predict,
    stage_work,
    step_traffic,
)

MODELS = [
    GPTConfig(1003, 512, 12, 256, 8, dropout=0.1),
    GPTConfig(2000, 1024, 13, 512, 16, kv_heads=8, hidden=1408, positions="rope", norm="rms",
              activation="swiglu", bias=False, tied=False, windows=(256, 0, 2048)),
    GPTConfig(777, 768, 12, 256, 8, positions="rope", norm="rms1p", activation="geglu",
              norm_place="sandwich", head_size=48, logit_softcap=5.0),
]  # fmt: skip
SIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


def _hardware(rng: random.Random) -> Hardware:
    """Draw an A100 or H100, with links or memory sometimes much slower, four or eight to a node."""
    found = HARDWARE[rng.choice(("a100-80g", "h100"))]
    slower = {
        name: getattr(found.device, name) / rng.choice((1, 1, 30))
        for name in ("nvlink", "network", "memory")
    }
    device = dataclasses.replace(found.device, **slower)
    return dataclasses.replace(found, device=device, node=rng.choice((4, 8)))


def _draw(seed: int) -> Job:
    """Draw a valid step: sizes are divisible, and the schedule has its stages and micro-batches."""
    rng = random.Random(seed)
    while True:
        mesh = Mesh(
            dp=rng.choice((1, 1, 2, 3, 8)), cp=rng.choice((1, 1, 2, 4)), tp=rng.choice((1, 2, 8)),
            pp=rng.choice((1, 2, 3, 4)), outer=rng.choice((1, 1, 1, 2)),
        )  # fmt: skip
        if mesh.dp == 8 and rng.random() < 0.7:
            mesh = dataclasses.replace(mesh, dp_shard=rng.choice((2, 4)))
        name = rng.choice([n for n, family in FAMILIES.items() if not family.asynchronous])
        chunks = FAMILIES[name].chunks or rng.choice((2, 3))
        zero = rng.choice((1, 2, 3) if mesh.dp_shard else (0, 1, 2, 3)) if mesh.data > 1 else 0
        plan = ParallelPlan(
            zero=zero, schedule=name, chunks=chunks, microbatches=rng.randint(1, 9),
            sequence_parallel=rng.random() < 0.6,
            recompute=rng.choice(("none", "selective", "full")),
            overlap=rng.choice(("none", "bulk", "chunked", "fused")),
        )  # fmt: skip
        config = rng.choice(MODELS)
        try:
            pipeline_shape(plan, mesh.pp)
            config.check(mesh, plan)
        except ValueError:
            continue
        fused = rng.random() < 0.6
        return Job(
            config, mesh, plan, rng.choice((1, 2, 4)), rng.choice([*SIZE]), "cuda",
            hardware=_hardware(rng), fused=fused, scores=not fused and rng.random() < 0.5,
            stops_early=rng.random() < 0.5, scattered=rng.random() < 0.5,
            summed=rng.choice((2, 4)), casts=rng.random() < 0.3,
        )  # fmt: skip


@dataclass
class Written:
    """The formulas of a step, written from the docstrings of `plan.time`, `plan.device` and
    `kernels.cost`."""

    job: Job

    def __post_init__(self) -> None:
        job, self.c, self.mesh = self.job, self.job.config, self.job.mesh
        eff, device = job.hardware.efficiency, job.hardware.device
        self.b, self.L = SIZE[job.dtype], eff.latency
        self.flop, self.bytes = device.half * eff.product, device.memory * eff.elementwise
        self.T = job.batch * self.c.seq_len // self.mesh.cp
        self.sp = job.plan.sequence_parallel
        self.rows = self.T // self.mesh.tp if self.sp else self.T
        self.E, self.D, self.F = self.c.width, self.c.head_dim, self.c.num_hidden
        self.kv = self.c.num_kv_heads
        self.gated = self.c.activation in ("swiglu", "geglu")

    def product(self, M: int, N: int, K: int) -> float:
        moved = (M * K + K * N + M * N) * self.b
        return max(2 * M * N * K / self.flop, moved / self.bytes) + self.L

    def stream(self, *moved: float) -> float:
        return sum(moved) / self.bytes + len(moved) * self.L

    def sent(self, inner: int, size: int, moved: float) -> float:
        if size == 1:
            return 0.0
        return self.L * math.ceil(math.log2(size)) + moved / self.speed(inner, size)

    def joined(self, inner: int, size: int) -> bool:
        return self.job.hardware.node % (inner * size) == 0

    def speed(self, inner: int, size: int) -> float:
        device, eff = self.job.hardware.device, self.job.hardware.efficiency
        near = device.nvlink * eff.near
        adapters = max(1, self.job.hardware.node // inner)
        far = adapters * device.network * eff.far
        return near if self.joined(inner, size) else min(near, far)

    @property
    def near(self) -> float:
        """Return the seconds of a pass over the tensor ranks."""
        tp = self.mesh.tp
        return self.sent(1, tp, self.T * self.E * self.b * (tp - 1) / tp)

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        tp, T, E = self.mesh.tp, self.T, self.E
        q, kv, up = self.c.heads * self.D, self.kv * self.D, self.F * (2 if self.gated else 1)
        return {"qkv": (T, (q + 2 * kv) // tp, E), "output": (T, E, q // tp),
                "up": (T, up // tp, E), "down": (T, E, self.F // tp)}  # fmt: skip

    def products(self) -> tuple[float, float, float]:
        shapes = self.shapes().values()
        weights = sum(self.product(N, K, M) for M, N, K in shapes)
        return (
            sum(self.product(*shape) for shape in shapes),
            sum(self.product(M, K, N) for M, N, K in shapes) + weights,
            weights,
        )

    def attention(self) -> tuple[float, float]:
        job, S, H = self.job, self.c.seq_len, self.c.heads // self.mesh.tp
        q, kv = job.batch * S * H * self.D, job.batch * S * self.kv // self.mesh.tp * self.D
        lse, cp, found = job.batch * H * S * 4, self.mesh.cp, []
        for back in (False, True):
            if job.scores:
                flops = 4 * job.batch * H * S * S * self.D * (1 + back)
                moved = job.batch * H * S * S * (5 * self.b + 1) * (1 + back)
                found.append((flops / self.flop + moved / self.bytes) / cp + 4 * self.L)
                continue
            each = []
            for window in self.c.windows or (0,):
                w = min(window or S, S)
                flops = 2 * job.batch * H * (2 * S * w - w * w) * self.D * (2.5 if back else 1)
                moved = (4 if back else 2) * (q + kv) * self.b + lse
                speed = job.hardware.device.half * job.hardware.efficiency.attention
                each.append(max(flops / speed, moved / self.bytes))
            found.append(sum(each) / len(each) / cp + self.L)
        return found[0], found[1]

    def norm(self, back: bool, residual: bool) -> float:
        layer = self.c.norm == "layer"
        return cost.norm(
            self.rows, self.E, layer=layer, residual=residual, backward=back, size=self.b
        ).bytes

    def elementwise(self) -> tuple[float, float]:
        job, b, T, tp, found = self.job, self.b, self.T, self.mesh.tp, []
        for back in (False, True):
            moved = [self.norm(back, job.fused)] * (4 if self.c.norm_place == "sandwich" else 2)
            if not job.fused:
                n = T * self.F // tp
                passes = (5 if back else 3) if self.gated else (3 if back else 2)
                moved += [passes * n * b] + [3 * self.rows * self.E * b] * 2
                if self.c.dropout:
                    moved += [2 * self.rows * self.E * b + 8 * self.rows] * 2
                moved += [4 * T * ((self.c.heads + self.kv) // tp) * self.D * b]
                if self.c.positions == "rope":
                    table = T * self.D * 4
                    moved += [2 * T * ((self.c.heads + self.kv) // tp) * self.D * b + table]
            if job.casts:
                values = sum(N if back else K for _, N, K in self.shapes().values())
                moved += [(b + 2) * T * values]
            found.append(self.stream(*moved))
        return found[0], found[1]

    def tensor(self) -> tuple[float, float]:
        if self.mesh.tp == 1:
            return 0.0, 0.0
        overlap, (ahead, back, _) = self.job.plan.overlap, self.products()
        passes = 4, (6 if self.sp else 4)
        shown = {"none": (1, 1), "bulk": (1, 1 / 3 if self.sp else 0)}.get(overlap, (0.25, 0.25))
        found = [
            count * self.near * part + max(0, count * self.near * (1 - part) - work)
            for count, part, work in zip(passes, shown, (ahead, back))
        ]
        return found[0], found[1]

    def ring(self) -> tuple[int, int]:
        block = 2 * self.T * (self.kv // self.mesh.tp) * self.D * (self.mesh.cp - 1)
        return block * self.b, block * (self.b + max(4, self.b))

    def context(self) -> tuple[float, float]:
        cp, found = self.mesh.cp, []
        for moved, work in zip(self.ring(), self.attention()):
            found.append(max(0.0, self.sent(self.mesh.tp, cp, moved) - work * (cp - 1) / cp))
        return found[0], found[1]

    def recomputed(self) -> float | None:
        if self.job.plan.recompute == "none":
            return None
        if self.job.plan.recompute == "selective":
            up = self.product(*self.shapes()["up"])
            return self.attention()[0] if self.job.scores else up
        parts = (self.products, self.attention, self.elementwise, self.tensor, self.context)
        last = self.product(*self.shapes()["down"])
        return sum(part()[0] for part in parts) - (last if self.job.stops_early else 0)

    def parts(self) -> dict[str, tuple[float, float, float]]:
        found = {"products": self.products()}
        for name in ("attention", "elementwise", "tensor", "context"):
            found[name] = (*getattr(self, name)(), 0.0)
        again = self.recomputed()
        return found if again is None else found | {"recompute": (0.0, again, 0.0)}

    def embedding(self) -> tuple[float, float, float]:
        moved, sums = self.T * self.E * self.b, self.near * (1 if self.sp else 2)
        return self.stream(2 * moved) + sums, self.stream(4 * moved) + sums, 0.0

    def head(self) -> tuple[float, float, float]:
        T, V, E, b = self.T, math.ceil(self.c.vocab_size / self.mesh.tp), self.E, self.b
        logits = [T * V * b, 2 * T * V * b] if self.job.fused else [(b + 12) * T * V] * 2
        if self.job.fused:
            logits = [moved + 16 * T for moved in logits]
        ahead = self.product(T, V, E) + self.stream(self.norm(False, False), logits[0])
        weights = self.product(V, E, T)
        back = self.product(T, E, V) + weights + self.stream(self.norm(True, False), logits[1])
        return ahead + self.near, back + self.near, weights

    # ---- a step

    def ranks(self) -> list[int]:
        plan = self.job.plan
        return placement(
            find_family(plan.schedule).make(self.mesh.pp, plan.microbatches, plan.chunks)
        )

    def blocks(self) -> list[int]:
        n = len(self.ranks())
        return [self.c.layers * (s + 1) // n - self.c.layers * s // n for s in range(n)]

    def P(self, rank: int) -> int:
        return sum(units_of(self.c, self.mesh, self.job.plan, rank).values())

    def over_shards(self, rank: int, each: float) -> float:
        D = self.shards
        return self.sent(self.mesh.tp, D, self.P(rank) * each * (D - 1) / D)

    @property
    def shards(self) -> int:
        return (self.mesh.dp_shard or self.mesh.dp) * self.mesh.cp

    @property
    def wide(self) -> int:
        return max(self.job.summed, self.b)

    def stages(self) -> list[tuple[float, float, float]]:
        ranks, found = self.ranks(), []
        block = [sum(each) for each in zip(*self.parts().values())]
        for stage, (rank, count) in enumerate(zip(ranks, self.blocks())):
            work = [count * seconds for seconds in block]
            for end, more in ((0, self.embedding()), (len(ranks) - 1, self.head())):
                if stage == end:
                    work = [a + b for a, b in zip(work, more)]
            zero, n = self.job.plan.zero, ranks.count(rank)
            if zero > 1:
                gather = self.over_shards(rank, self.b / n) if zero == 3 else 0.0
                summed = gather + self.over_shards(rank, self.wide / n)
                for at, sent in ((0, gather), (1, summed)):
                    work[at] = max(work[at], sent) + 0.25 * min(work[at], sent)
            found.append((work[0], work[1], work[2]))
        return found

    def message(self) -> tuple[float, float]:
        if self.mesh.pp == 1:
            return 0.0, 0.0
        cut = self.job.scattered and not self.sp and self.mesh.tp > 1
        moved = self.rows * self.E * self.b / (self.mesh.tp if cut else 1)
        inner = self.mesh.tp * self.mesh.cp * self.mesh.dp
        device, eff = self.job.hardware.device, self.job.hardware.efficiency
        own = device.network * eff.far  # each rank has a separate adapter
        speed = device.nvlink * eff.near if self.joined(inner, self.mesh.pp) else own
        return moved, self.L + moved / speed + (self.near if cut else 0)

    def gradient_sum(self, rank: int) -> float:
        P, tp, data, D = self.P(rank), self.mesh.tp, self.mesh.dp * self.mesh.cp, self.shards
        if self.job.plan.zero == 0:
            return 2 * self.sent(tp, data, P * self.wide * (data - 1) / data)
        n = data // D
        replicas = 2 * self.sent(tp * D, n, P * self.wide / D * (n - 1) / n)
        return replicas + (self.over_shards(rank, self.wide) if self.job.plan.zero == 1 else 0)

    def update(self) -> float:
        found, zero, stages = [], self.job.plan.zero, self.stages()
        for rank in range(self.mesh.pp):
            n = self.P(rank) // (self.shards if zero else 1)
            own = self.stream(n * (28 + (self.b if self.b < 4 else 0)))
            first = sum(s[0] for s, at in zip(stages, self.ranks()) if at == rank)
            gather = self.over_shards(rank, self.b) if zero in (1, 2) else 0.0
            found.append(own + max(0.0, gather - first))
        return max(found)

    def traffic(self) -> dict[str, tuple[str, float]]:
        plan, mesh, found, m = self.job.plan, self.mesh, {}, self.job.plan.microbatches
        layers = max(self.blocks()) * len(self.ranks()) // mesh.pp
        passes = 4 + (6 if self.sp else 4) + 4 * (plan.recompute == "full")
        each = self.T * self.E * self.b * (mesh.tp - 1) / mesh.tp
        found["tp"] = 1, mesh.tp, m * layers * passes * each
        found["cp"] = mesh.tp, mesh.cp, m * layers * sum(self.ring())
        inner = mesh.tp * mesh.cp * mesh.dp
        stages = len(self.ranks()) // mesh.pp
        found["pp"] = inner, mesh.pp, 2 * m * stages * self.message()[0]
        P, D, w, b = max(map(self.P, range(mesh.pp))), self.shards, max(4, self.b), self.b
        sums = (2 * w, w + b, m * w + b, m * (w + 2 * b))[plan.zero]
        n = mesh.dp * mesh.cp // D
        moved = P * sums * (D - 1) / D + 2 * P * w / D * (n - 1) / n
        found["dp"] = mesh.tp, mesh.dp * mesh.cp, moved
        return {
            axis: ("NVLink" if self.joined(inner, size) else "network", sent)
            for axis, (inner, size, sent) in found.items()
            if size > 1
        }


def _near(found: object, wanted: object) -> None:
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("start", range(0, 320, 40))
def test_a_step_takes_what_the_formulas_say_part_by_part(start: int) -> None:
    for seed in range(start, start + 40):
        job = _draw(seed)
        truth = Written(job)
        found = block_parts(job)
        assert found.keys() == truth.parts().keys()
        for name, part in truth.parts().items():
            _near(tuple(found[name]), part)
        for work, wanted in zip(stage_work(job), truth.stages(), strict=True):
            _near(tuple(work), wanted)
        _near(message(job), truth.message())
        for rank in range(job.mesh.pp):
            _near(gradient_sum(job, rank), truth.gradient_sum(rank))
        traffic = {axis: (link, moved) for axis, link, moved in step_traffic(job)}
        assert {axis: link for axis, (link, _) in traffic.items()} == {
            axis: link for axis, (link, _) in truth.traffic().items()
        }
        for axis, (_, moved) in truth.traffic().items():
            _near(traffic[axis][1], moved)


@pytest.mark.parametrize("start", range(0, 160, 40))
def test_a_step_is_its_pipeline_its_exposed_sums_and_its_update(start: int) -> None:
    for seed in range(start, start + 40):
        job = _draw(seed)
        truth, time, stages = Written(job), predict(job), stage_work(job)
        ranks = truth.ranks()
        stop = 0.0
        for rank, row in enumerate(time.timeline.cells):
            last: dict[int, float] = {}
            for cell in row:
                op, work = cell.action.op, stages[cell.action.stage]
                seconds = {"F": work.forward, "B": work.backward, "W": work.weights}
                seconds["I"] = work.backward - work.weights
                _near(cell.end - cell.start, seconds.get(op, 0.0))
                if op in ("B", "W"):
                    last[cell.action.stage] = cell.start
            assert {*last} == {stage for stage, at in enumerate(ranks) if at == rank}
            done, each = 0.0, truth.gradient_sum(rank) / len(last)
            for began in sorted(last.values()):  # one sum after another
                done = max(done, began) + each
            stop = max(stop, done, row[-1].end)
        pipeline = max(row[-1].end for row in time.timeline.cells)
        _near(time.pipeline, pipeline)
        _near(time.reduction, stop - pipeline)
        _near(time.update, truth.update())
        _near(time.seconds, stop + truth.update())
        mesh, plan = job.mesh, job.plan
        sequences = job.batch * plan.microbatches * mesh.dp * mesh.outer
        world = mesh.outer * mesh.dp * mesh.cp * mesh.tp * mesh.pp
        flops = job.config.step_flops(sequences * job.config.seq_len)
        _near(time.mfu, flops / (time.seconds * world * job.hardware.device.half))
        least = least_time(job)
        assert 0.3 * time.seconds < least <= time.seconds * (1 + 1e-12), seed


def test_what_is_drawn_has_every_option() -> None:
    jobs = [_draw(seed) for seed in range(320)]
    for name in ("zero", "recompute", "overlap", "sequence_parallel", "schedule"):
        kinds = {getattr(job.plan, name) for job in jobs}
        assert len(kinds) == {"zero": 4, "recompute": 3, "overlap": 4}.get(name, len(kinds)) > 1
    for name in ("fused", "scores", "stops_early", "scattered", "summed", "casts"):
        assert len({getattr(job, name) for job in jobs}) == 2
    for axis in ("dp", "cp", "tp", "pp", "outer"):
        assert sum(getattr(job.mesh, axis) > 1 for job in jobs) > 40
    assert sum(job.mesh.size("replica") > 1 < job.mesh.size("shard") for job in jobs) > 10
    shown = [{axis: link for axis, link, _ in step_traffic(job)} for job in jobs]
    for axis in ("tp", "cp", "pp", "dp"):
        assert {of.get(axis) for of in shown} >= {"NVLink", "network"}
