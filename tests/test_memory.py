"""The estimate of memory against real allocations, and the errors based on it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import weakref

import pytest
import torch
from ranks import run_ranks
from refused import check
from threads import on_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.parallel.mesh import Mesh, single
from warpweave.parallel.tensor.linear_loss import CAPPED
from warpweave.plan.fits import check_memory, free_host_memory
from warpweave.plan.memory import TrainingStep, estimate
from warpweave.train import command as train
from warpweave.train.options import TrainConfig

GIB = 2**30
LLAMA = {"positions": "rope", "norm": "rms", "activation": "swiglu", "bias": False, "tied": False}
GEMMA = LLAMA | {"norm": "rms1p", "activation": "geglu", "norm_place": "sandwich", "tied": True,
                 "softcap": 5.0, "logit_softcap": 5.0}  # fmt: skip


# ---------------------------------------------------------------- exact states

TINY = GPTConfig(vocab_size=101, seq_len=16, layers=3, width=32, heads=4, dropout=0.0)
STATES = [
    (Mesh(), 1, "fp32", "1f1b"),
    (Mesh(), 0, "bf16", "1f1b"),
    (Mesh(dp=2), 0, "bf16", "1f1b"),
    (Mesh(dp=2), 1, "bf16", "1f1b"),
    (Mesh(cp=2), 2, "fp64", "1f1b"),
    (Mesh(dp=2), 3, "bf16", "1f1b"),
    (Mesh(dp=4, dp_shard=2), 3, "fp32", "1f1b"),
    (Mesh(pp=2), 1, "fp32", "gpipe"),
]


def _bytes(tensors) -> int:
    """Sum the allocated bytes of distinct storages."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _allocated(mesh, zero, dtype, schedule="1f1b", optimizer="adamw") -> dict[str, int]:
    plan = ParallelPlan(zero=zero, schedule=schedule, microbatches=2)
    rule = TrainConfig(optimizer=optimizer).rule
    engine = Engine(TINY, mesh, plan, micro_batch_size=2, dtype=NAMED_DTYPES[dtype], rule=rule)
    shape = (2, 2, TINY.seq_len)
    tokens = torch.randint(0, TINY.vocab_size, shape)
    engine.step(tokens, tokens, torch.arange(4).view(2, 2), lr=1e-3)
    weights, gradients, optimizer = [], [], []
    for unit in engine.units:
        weights.append(unit.parameters.flat)
        weights += [] if unit.parameters.shard is None else [unit.parameters.shard]
        gradients += [unit.gradients.flat, unit.gradients.reduced]
        optimizer += [] if unit.state.is_master else [unit.state.master]
        optimizer += unit.state.moments.values()
    kinds = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    units = max(unit.layout.size for unit in engine.units)
    return {name: _bytes(tensors) for name, tensors in kinds.items()} | {"unit": units}


def _connected(rank: int, mesh: Mesh, *how) -> dict[str, int]:
    return _allocated(mesh.connect(), *how)


@pytest.mark.parametrize(("mesh", "zero", "dtype", "schedule"), STATES)
def test_the_states_are_those_that_the_engine_allocates(mesh, zero, dtype, schedule):
    plan = ParallelPlan(zero=zero, schedule=schedule, microbatches=2)
    expected = estimate(TrainingStep(TINY, mesh, plan, 2, dtype))
    if mesh.pp == 1:
        found = on_mesh(mesh, _allocated, zero, dtype, schedule)
    else:  # their messages need processes
        found = run_ranks(mesh.world, _connected, mesh, zero, dtype, schedule)
    size = NAMED_DTYPES[dtype].itemsize
    for rank, real in enumerate(found):
        told = expected[mesh.coordinates(rank)["pp"]]
        # Memory that exists only within a step is not visible between steps.
        gathered = 2 * real["unit"] if zero >= 2 and mesh.data > 1 else 0
        weights = told.weights - (gathered * size if zero == 3 else 0)
        gradients = told.gradients - gathered * max(size, 4)
        # Buffers are padded to 64 bytes for each parameter and to whole slices.
        assert real["weights"] == pytest.approx(weights, rel=0.05)
        assert real["gradients"] == pytest.approx(gradients, rel=0.05)
        assert real["optimizer"] == pytest.approx(told.optimizer, rel=0.05)


@pytest.mark.parametrize(
    ("optimizer", "zero", "tp"), [("muon", 2, 1), ("muon", 0, 2), ("sgd", 1, 1)]
)
def test_so_are_those_of_other_optimizers(optimizer, zero, tp):
    mesh, plan = Mesh(dp=2 // tp, tp=tp), ParallelPlan(zero=zero, microbatches=2)
    (told,) = estimate(TrainingStep(TINY, mesh, plan, 2, "bf16", optimizer=optimizer))
    for real in on_mesh(mesh, _allocated, zero, "bf16", "1f1b", optimizer):
        assert real["optimizer"] == pytest.approx(told.optimizer, rel=0.05)
    assert (told.update > 0) == (optimizer == "muon")


# ---------------------------------------------------------------- the peak of a step


class Peak(TorchDispatchMode):
    """A mode that tracks the peak of bytes alive in tensors that torch's operators made. The
    process's own peak varies with the state of the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if torch.is_tensor(t)):
            if storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self._alive.pop(key)


PEAKS = {
    "weights": ({"vocab_size": 3000, "seq_len": 16, "layers": 5, "width": 512, "heads": 8}, {}, 1,
                "fp32"),
    "activations": ({"vocab_size": 64, "seq_len": 256, "layers": 4, "width": 256, "heads": 4,
                     "kv_heads": 2, **LLAMA}, {}, 6, "fp32"),
    "recompute": ({"vocab_size": 64, "seq_len": 256, "layers": 4, "width": 256, "heads": 4,
                   "kv_heads": 2, **LLAMA}, {"recompute": "full"}, 6, "fp32"),
    "sandwich": ({"vocab_size": 64, "seq_len": 256, "layers": 4, "width": 256, "heads": 4,
                  "kv_heads": 2, **GEMMA}, {}, 6, "fp32"),
    "softcap": ({"vocab_size": 4000, "seq_len": 256, "layers": 2, "width": 64, "heads": 4,
                 **GEMMA}, {}, 4, "fp32"),
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_the_estimate_is_a_third_above_the_peak_at_most(name):
    options, given, batch, dtype = PEAKS[name]
    config, plan = GPTConfig(**options), ParallelPlan(**given)
    with Peak() as found:
        engine = Engine(config, single(), plan, micro_batch_size=batch, dtype=NAMED_DTYPES[dtype])
        tokens = torch.zeros(1, batch, config.seq_len, dtype=torch.int64)
        for _ in range(2):
            engine.step(tokens, tokens, torch.arange(batch)[None], lr=1e-3)
    (told,) = estimate(TrainingStep(config, Mesh(), plan, batch, dtype))
    assert 0.95 < told.total / found.most < 1.33


def _beside(c: GPTConfig, mesh: Mesh, plan: ParallelPlan, tokens: float, m: int) -> float:
    """Count what a GPU holds in addition to a step's tensors:
    communicators of `SHAPES`, by hand."""
    communicators = {"": 0, "dp": 2, "cp tp": 3, "tp pp": 7, "dp cp pp": 9, "dp shards": 4}
    axes = " ".join(axis for axis in ("dp", "cp", "tp", "pp") if getattr(mesh, axis) > 1)
    held = communicators["dp shards" if mesh.dp_shard else axes] * 200 + 400 + 64
    term = tokens * c.width * m if mesh.tp > 1 else 0
    fused = 2 ** math.ceil(math.log2(term)) if term and plan.overlap == "fused" else 0
    return held * 2**20 + 2 * term + 2 * fused


def _documented(
    c: GPTConfig, mesh: Mesh, plan: ParallelPlan, batch: int, dtype: str, on_cpu: bool
) -> list[dict[str, float]]:
    """Compute the formulas of the module's docstring, if all sizes are
    divisible, for gpipe and 1f1b."""
    b, D = NAMED_DTYPES[dtype].itemsize, (mesh.dp_shard or mesh.dp) * mesh.cp
    m, zero = max(b, 4), plan.zero if D > 1 else 0
    heads, kv, V = c.heads * c.head_dim, c.num_kv_heads * c.head_dim, c.vocab_size / mesh.tp
    gated, rope = c.activation.endswith("glu"), c.positions == "rope"
    norms = 2 * c.width * (1 + (c.norm_place == "sandwich")) * (2 if c.norm == "layer" else 1)

    def block_over(tp: int) -> float:
        rows = heads + 2 * kv + (2 if gated else 1) * c.num_hidden
        matrices = c.width * (rows + heads + c.num_hidden) / tp
        return matrices + norms + (c.bias and rows / tp + 2 * c.width)

    block, positions = block_over(mesh.tp), 0 if rope else c.seq_len * c.width
    loading = 2 * 4 * max(block_over(1), c.vocab_size * c.width, positions)
    T = batch * c.seq_len / mesh.cp
    t = T / mesh.tp if plan.sequence_parallel else T
    A = heads + 2 * kv + (heads + kv if rope else 0)
    Z = c.num_hidden * (1 + gated + on_cpu)
    n = 6 if c.norm_place == "sandwich" else 4
    whole = b * (n * t * c.width + T * (A + heads + Z) / mesh.tp) + 4 * T * c.heads / mesh.tp
    made = b * (2 * heads + 2 * kv) + 8 * c.heads if mesh.cp > 1 else 0
    kept = {
        "none": whole,
        "selective": whole - b * T * Z / mesh.tp,
        "full": b * t * c.width + T * made / mesh.tp,
    }[plan.recompute]
    most, rows = (2**20, 2**10) if on_cpu else (2**26, 2**12)
    logits = min(max(most, rows * V), T * V) * b
    if c.logit_softcap is not None:
        logits = min(max(CAPPED[1], V), T * V) * (b + 2 * m)
    loss = logits + T * c.width * b + (V * c.width * m if on_cpu else 0)
    found, layers = [], c.layers / mesh.pp
    for rank in range(mesh.pp):
        first, last = rank == 0, rank == mesh.pp - 1
        ends = (first or (last and c.tied)) + (last and not c.tied)
        P = layers * block + ends * V * c.width
        P += first and positions
        P += last and c.width * (2 if c.norm == "layer" and c.bias else 1)
        U = max(block, ends and V * c.width, first and positions)
        flight = plan.microbatches
        if plan.schedule == "1f1b":
            flight = min(flight, mesh.pp - rank)
        found.append({
            "weights": P * b / D + 2 * U * b if zero == 3 else P * b,
            "gradients": P * m / D + 2 * U * m if zero > 1 else P * m + (zero and P * m / D),
            "optimizer": (2 + (b != m)) * P * m / (D if zero else 1),
            "activations": flight * layers * kept + 3 * whole + (last and loss),
            "loading": loading,
            "gpu": 0 if on_cpu else _beside(c, mesh, plan, T, m),
            "update": 0,
        })  # fmt: skip
    return found


FORMS = {
    "gpt2": {"vocab_size": 96, "bias": True},
    "llama": {"vocab_size": 4096, "kv_heads": 2, "hidden": 96, **LLAMA},
    "powers of two": {"vocab_size": 4096, "seq_len": 128},
    "gemma": {"vocab_size": 4096, "kv_heads": 2, "head_size": 16, **GEMMA},
}
SHAPES = [Mesh(), Mesh(dp=2), Mesh(cp=2, tp=2), Mesh(tp=2, pp=2), Mesh(dp=4, dp_shard=2),
          Mesh(dp=2, cp=2, pp=2)]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_number_of_the_estimate_is_what_its_formula_says(form):
    """Combines ZeRO stages, recomputation, schedules and dtypes, on CPUs and GPUs."""
    config = GPTConfig(**{"seq_len": 64, "layers": 4, "width": 32, "heads": 4} | FORMS[form])
    turn, batch = 0, 4 if form == "powers of two" else 3
    for mesh, zero, recompute in itertools.product(
        SHAPES, (0, 1, 2, 3), ("none", "selective", "full")
    ):
        turn += 1
        if (turn % 3 and mesh != SHAPES[-1]) or (mesh.dp_shard and not zero):
            continue
        schedule = ("1f1b", "gpipe")[turn % 2]
        plan = ParallelPlan(zero=zero, recompute=recompute, schedule=schedule,
                            microbatches=1 + turn % 4, sequence_parallel=turn % 5 < 3,
                            overlap=("bulk", "fused")[turn // 3 % 2])  # fmt: skip
        dtype, on_cpu = ("fp32", "bf16", "fp64")[turn // 2 % 3], turn % 4 < 2
        device = "cpu" if on_cpu else "cuda"
        found = estimate(TrainingStep(config, mesh, plan, batch, dtype, device))
        for told, truth in zip(
            found, _documented(config, mesh, plan, batch, dtype, on_cpu), strict=True
        ):
            assert dataclasses.asdict(told) == pytest.approx(truth), (mesh, plan, dtype)
            states = truth["weights"] + truth["gradients"] + truth["optimizer"]
            most = max(truth["activations"], truth["loading"]) + truth["gpu"]
            assert told.total == pytest.approx(states + most)


# ---------------------------------------------------------------- available memory


def _machine(tmp_path, meminfo: str, cgroup: str, files: dict[str, str]) -> dict:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(meminfo)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    return {"proc": tmp_path / "proc", "cgroups": tmp_path / "groups"}


MEMINFO = "MemTotal:       9000 kB\nMemAvailable:    1000 kB\n"
MACHINES = {  # the line of /proc/self/cgroup, the groups' files, the bytes free
    "none": ("0::/\n", {}, 1024000),
    "unlimited": ("0::/\n", {"memory.max": "max\n", "memory.current": "5"}, 1024000),
    "v2": (
        "0::/a/b\n",
        {
            "a/memory.max": "90000", "a/memory.current": "80000",
            "a/memory.stat": "anon 1\ninactive_file 5000\n",
            "a/b/memory.max": "70000", "a/b/memory.current": "10000", "a/b/memory.stat": "",
        },
        15000,
    ),
    "v1": (
        "4:cpu:/x\n3:cpuset,memory:/job\n",
        {
            "memory/job/memory.limit_in_bytes": "5000", "memory/job/memory.usage_in_bytes": "4000",
            "memory/job/memory.stat": "total_inactive_file 7\n",
        },
        1007,
    ),
    "own group as root": ("0::/elsewhere\n",
                          {"memory.max": "500", "memory.current": "100", "memory.stat": ""}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_free_honours_control_groups(tmp_path, name):
    cgroup, files, free = MACHINES[name]
    assert free_host_memory(**_machine(tmp_path, MEMINFO, cgroup, files)) == free


def test_a_system_that_tells_nothing_has_all_of_its_memory(tmp_path):
    assert free_host_memory(tmp_path, tmp_path) > 2**28


def test_what_cannot_be_read_of_free_memory_or_of_a_limit_is_passed_over(tmp_path):
    cgroup, files, _ = MACHINES["v2"]
    where = _machine(tmp_path, MEMINFO, cgroup, files)
    (tmp_path / "groups/a/b/memory.current").write_text("many\n")
    assert free_host_memory(**where) == 15000
    (tmp_path / "groups/a/memory.current").unlink()
    assert free_host_memory(**where) == 1024000
    (tmp_path / "groups/a/memory.current").write_text("80000")
    assert free_host_memory(**where) == 15000
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_host_memory(**where) == 1024000
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for odd in ("MemTotal:       9000 kB\n", "nothing\n", "MemAvailable:   many kB\n", ""):
        (tmp_path / "proc/meminfo").write_text(odd)
        assert free_host_memory(**where) == whole


# ---------------------------------------------------------------- errors


def _check(free_gib: float, mesh=None, plan=ParallelPlan(), **options) -> None:
    mesh = Mesh() if mesh is None else mesh
    ranks = options.pop("ranks", mesh.world)
    step = TrainingStep(PRESETS["gpt2"], mesh, plan, **{"batch": 8, "dtype": "fp32"} | options)
    check_memory(step, free=int(free_gib * GIB), ranks=ranks)


def test_what_fits_is_not_refused_and_what_does_not_is_with_the_figure():
    (told,) = estimate(TrainingStep(PRESETS["gpt2"], Mesh(), ParallelPlan(), 8, "fp32"))
    size = told.total / GIB
    _check(1.001 * size)
    words = rf"needs about {size:.1f} GiB \(per rank: weights 0.5"
    check(lambda: _check(0.99 * size), words)
    # Both ranks share the memory of one machine.
    _check(2.0 * size, Mesh(dp=2))
    check(lambda: _check(1.8 * size, Mesh(dp=2)), "for 2 ranks .*this machine has")


@pytest.mark.parametrize(
    ("options", "flag", "way"),
    [
        ({}, "--recompute full", {"plan": ParallelPlan(recompute="full")}),
        ({}, "--batch 1", {"batch": 1}),
        ({"dtype": "fp64"}, "--dtype bf16", {"dtype": "bf16"}),
        ({"mesh": Mesh(dp=8), "batch": 1}, "--zero 3", {"plan": ParallelPlan(zero=3)}),
        ({"device_type": "cuda", "ranks": 1}, "--tp 4", {"mesh": Mesh(tp=4)}),
        ({"mesh": Mesh(dp=8, dp_shard=2), "plan": ParallelPlan(zero=3)}, "--dp-shard 8",
         {"mesh": Mesh(dp=8)}),
    ],
)  # fmt: skip
def test_the_flag_that_is_named_makes_the_memory_that_is_named_enough(options, flag, way):
    with pytest.raises(ValueError, match=flag) as refusal:
        _check(0.2, **options)
    text = str(refusal.value)
    named = float(text.split(f"{flag} (")[1].split(" GiB")[0])
    _check(named + 0.06, **options | way)
    check(lambda: _check(named - 0.06, **options | way), "GiB free")


def test_llama_8b_in_float64_is_refused_before_anything_is_made(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("what is read " * 20000)
    monkeypatch.setattr(train, "free_host_memory", lambda: 16 * GIB)
    monkeypatch.setattr(train, "choose_backend", lambda *_, **__: "gloo")
    monkeypatch.setattr(train, "launch", None)
    monkeypatch.setattr(train, "train_rank", None)
    arguments = ["--model", "llama-8b", "--dtype", "fp64", "--data", str(text)]
    for more in ([], ["--tp", "2"]):
        with pytest.raises(SystemExit) as end:
            train.main([*arguments, "--out", str(tmp_path / "out"), *more])
        assert end.value.code == 2
        said = capsys.readouterr().err.strip()
        assert said.count("\n") == 0
        assert "training needs about" in said
        assert "16.0 GiB free" in said
        assert "--dtype bf16" in said
    assert not (tmp_path / "out").exists()


def test_the_estimate_of_a_large_model_is_quick():
    plan = ParallelPlan(zero=3, microbatches=8)
    mesh = Mesh(dp=4, tp=8, pp=4)
    parts = estimate(TrainingStep(PRESETS["llama-70b"], mesh, plan, 1, "bf16"))
    assert len(parts) == 4
    assert all(rank.total < 80 * GIB for rank in parts)
