"""CUDA graphs of training steps, shown safe without a GPU: numbers that change are device data,
recorded steps do not differ, and replays have the bits of ordinary steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from warpweave.compat.flash_attn import flash_attn_func
from warpweave.kernels.attention import attention
from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.gemm import fused_gemm
from warpweave.kernels.norm import layer_norm
from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.model.engine_graph import StepGraphs, check_capture
from warpweave.model.engine_update import StepResult
from warpweave.parallel.data import optimizer
from warpweave.parallel.mesh import Mesh, single
from warpweave.prove import Layout, graph_safe, prove_graph
from warpweave.prove.recording import PretendedGraph, Recording
from warpweave.train.options import parse

ROOT = Path(__file__).resolve().parent.parent

# ---------------------------------------------------------------- numbers as device data


def _dropped(seed: int | torch.Tensor, impl: str) -> list[torch.Tensor]:
    """Results and gradients of everything that has dropout."""
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight, bias = torch.ones(64, requires_grad=True), torch.zeros(64, requires_grad=True)
    drop, q = Drop(0.3, seed, 2, torch.arange(12) + 2**33), x.view(1, 12, 4, 16)
    y, s = layer_norm(x, weight, bias, drop=drop, impl=impl)
    every = [dropout(x, drop, impl=impl), y, s]
    every += [attention(q, q, q, dropout=0.4, dropout_seed=seed, impl=impl)]
    sum((t * t * t).sum() for t in every).backward()
    fused, _ = fused_gemm(x.detach(), weight.detach().diag(), drop=drop, impl=impl)
    return [*every, fused, x.grad, weight.grad, bias.grad]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("seed", [0, 5, 2**40 + 7])
def test_a_seed_in_a_tensor_drops_what_the_number_drops(seed, impl):
    for a, b in zip(_dropped(seed, impl), _dropped(torch.tensor(seed), impl), strict=True):
        assert torch.equal(a, b)
    other = _dropped(torch.tensor(seed + 1), impl)
    assert not any(map(torch.equal, other[:5], _dropped(seed, impl)[:5]))


@pytest.mark.parametrize(
    ("seed", "found"),
    [
        (torch.tensor([3]), r"int64 \[1\]"),
        (torch.tensor(3, dtype=torch.int32), r"int32 \[\]"),
        (torch.tensor(3, device="meta"), "on one device"),
    ],
)
def test_a_seed_in_a_tensor_must_be_an_int64_on_the_device(seed, found):
    x, tokens = torch.ones(4, 8), torch.arange(4)
    q = x.view(1, 4, 1, 8)
    for call in (
        lambda: dropout(x, Drop(0.5, seed, 0, tokens)),
        lambda: layer_norm(x, torch.ones(8), drop=Drop(0.5, seed, 0, tokens)),
        lambda: attention(q, q, q, dropout=0.5, dropout_seed=seed),
    ):
        with pytest.raises(ValueError, match=found):
            call()


# ---------------------------------------------------------------- the engine


def _prove(rank: int, layouts: list[Layout]) -> list:
    return [prove_graph(layout, layout.mesh.connect(), 300.0) for layout in layouts]


@pytest.mark.parametrize(
    ("style", "dtype", "optimizer"),
    [("gpt2", "fp16", "adamw"), ("qwen", "bf16", "muon"), ("llama", "fp32", "sgd")],
)
def test_a_graph_repeats_steps_bit_for_bit_on_one_device(style, dtype, optimizer):
    layout = Layout(Mesh(), style=style, dtype=dtype, optimizer=optimizer, recompute="full")
    proof = prove_graph(layout, single())
    assert proof.right, proof
    assert proof.calls > 500
    assert proof.replays == 5


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(Mesh(dp=2), zero=zero, dtype=d) for zero, d in zip(range(4), ["fp32", "bf16"] * 2)],
        [Layout(Mesh(tp=2), sequence_parallel=sp, dtype="bf16") for sp in (False, True)]
        + [Layout(Mesh(cp=2), strategy="ring", dtype="fp32", style="llama")],
        [Layout(Mesh(cp=2), strategy="ulysses", dtype="fp32"),
         Layout(Mesh(dp=2), reduce="ordered", dtype="fp32", optimizer="muon", zero=2)],
    ],
    ids=["data", "tensor and ring", "ulysses and ordered"],
)  # fmt: skip
def test_a_graph_repeats_steps_bit_for_bit_on_two_ranks(layouts):
    for proofs in run_ranks(2, _prove, layouts):
        for layout, proof in zip(layouts, proofs, strict=True):
            assert proof.right, (layout, proof)


def test_packed_documents_and_launches_of_kernels_are_replayed_too():
    """Documents change from step to step, and the kernels are Triton's."""
    config = GPTConfig(
        vocab_size=32, seq_len=16, layers=1, width=16, heads=2, hidden=16, positions="rope",
        norm="rms", dropout=0.2,
    )  # fmt: skip
    engines = [Engine(config, single(), impl="triton") for _ in range(2)]
    engines[0].use_graphs(PretendedGraph)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for n in range(4):
        tokens = torch.randint(0, 32, (1, 1, 16), generator=torch.Generator().manual_seed(n))
        inputs = {"lr": 0.01 * n, "key": n, "documents": torch.tensor([[[0, 3 + n, 9 + n, 16]]])}
        found, wanted = (e.step(tokens, tokens, ids + n, **inputs).all() for e in engines)
        assert torch.equal(found, wanted)
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        for (_, a, _), (_, b, _) in zip(*(e.read(kind) for e in engines), strict=True):
            assert torch.equal(a, b)


def test_the_paths_of_a_gpu_have_nothing_that_a_graph_would_freeze(tmp_path):
    """Kernels compile but do not run. Learning rates and keys that are numbers are found."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(ROOT / "benchmarks")])
    command = [sys.executable, "-P", str(ROOT / "tests" / "support" / "graph_on_gpu.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    numbers = found.pop("numbers")
    assert len(found) == 2
    assert not any(found.values()), found
    assert all(any(name in each for each in numbers) for name in ("_adamw_scalars", "norm"))


def test_attention_under_other_names_draws_its_dropout_seed_on_the_device():
    q = torch.randn(1, 8, 2, 16, requires_grad=True)

    def step(scale: torch.Tensor) -> None:
        (flash_attn_func(q, q, q, dropout_p=0.2, causal=True) * scale).sum().backward()
        q.grad = None

    assert not _found(step, ONE, TWO)


def _batch(engine: Engine) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(0, 256, (1, engine.micro_batch_size, engine.config.seq_len))
    return tokens, tokens, torch.arange(engine.micro_batch_size)[None]


def test_shapes_are_captured_separately_and_only_so_many():
    """Numbers and 0-dim tensors share a graph. After four shapes, steps run without one."""
    made, runs = [], []

    class Counted(PretendedGraph):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    def step(tokens, lr, halted=0.0):
        runs.append(tokens.shape)
        return StepResult({"loss": tokens.sum() * lr + halted}, *torch.zeros(4))

    graphs, kept, wanted = StepGraphs(step, Counted), [], []
    for size in range(1, 7):
        for n in range(6):
            lr = 0.5 * n if n % 2 else torch.tensor(0.5 * n, dtype=torch.float64)
            halted = torch.tensor(1.0) if n == 3 else None
            inputs = {"tokens": torch.full((size,), float(n)), "lr": lr, "halted": halted}
            kept.append(graphs(inputs).loss)
            wanted.append(size * n * 0.5 * n + (n == 3))
        assert len(made) == min(size, 4)
        assert runs.count((size,)) == (3 if size <= 4 else 6)
    assert [loss.item() for loss in kept] == wanted  # a replay does not change earlier results
    graphs.reset()
    assert not any(graph.recording.calls for graph in made)


class _Settled(PretendedGraph):
    """Checks before each replay that no all-gather of weights is pending."""

    units: ClassVar[list] = []

    def replay(self) -> None:
        assert all(unit.parameters._gather is None for unit in self.units)
        super().replay()


def _eager_step_between_replays(rank: int) -> list[bool]:
    mesh = Mesh(dp=2).connect()
    engines = [Engine(PRESETS["toy"], mesh, ParallelPlan(zero=1)) for _ in range(2)]
    engines[0].use_graphs(_Settled)
    _Settled.units, pending = engines[0].units, []
    batch, equal = _batch(engines[0]), []
    for n in range(6):
        marks = (lambda rank, index: None) if n == 4 else None
        found, wanted = (e.step(*batch, lr=0.01, key=n, on_action=marks).all() for e in engines)
        equal.append(torch.equal(found, wanted))
        pending.append(any(unit.parameters._gather is not None for unit in engines[0].units))
    return [*equal, pending[4]]


def test_an_eager_step_between_replays_is_waited_for():
    """A step with `on_action` has no graph and leaves an all-gather of weights (ZeRO 1)."""
    for results in run_ranks(2, _eager_step_between_replays):
        assert all(results)


def test_a_failed_capture_changes_nothing_and_is_not_used_again():
    count, graph = torch.zeros(()), PretendedGraph()

    def step():
        count.add_(1)
        raise KeyError("a fault")

    with pytest.raises(KeyError, match="a fault"):
        graph.capture(step)
    assert count.item() == 0


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (
            Mesh(pp=2),
            {},
            r"CUDA graphs need pp = 1 and a synchronous schedule, got pp = 2 and 1f1b",
        ),
        (Mesh(outer=2), {}, "need one replica, got 2 outer replicas"),
        (Mesh(tp=2), {"overlap": "fused", "impl": "triton"}, "or 'chunked', got 'fused'"),
        (Mesh(), {"packed": True}, "packed documents need impl 'triton', got 'torch'"),
        (Mesh(dp=2), {"packed": True, "impl": "triton"}, "documents need one rank, got 2"),
        (Mesh(cp=2), {"layout": "balanced"}, "a layout other than 'balanced'"),
    ],
)
def test_a_layout_that_cannot_be_captured_is_refused_by_name(mesh, options, message):
    layout = Layout(mesh, **options)
    with pytest.raises(ValueError, match=message):
        check_capture(layout.plan, layout.mesh, layout.impl, packed=layout.packed)


@pytest.mark.parametrize("words", [["--check-collectives"], ["--elastic", "1", "--dp", "2"]])
def test_options_that_need_every_call_are_refused_with_graphs(words):
    config = parse(["--model", "toy", "--cuda-graph", *words])
    with pytest.raises(ValueError, match=r"^cuda_graph does not support (check_collec|elastic)"):
        config.check()


def test_a_key_that_is_a_number_is_checked_with_graphs_too():
    engine = Engine(PRESETS["toy"], single())
    engine.use_graphs(PretendedGraph)
    with pytest.raises(ValueError, match=r"need 0 <= seed < 2\*\*63"):
        engine.step(*_batch(engine), lr=0.1, key=-1)


def test_a_cpu_has_no_cuda_graphs():
    with pytest.raises(ValueError, match=r"^cuda_graph=True needs a CUDA device, got cpu$"):
        Engine(PRESETS["toy"], single(), cuda_graph=True)


# ---------------------------------------------------------------- planted faults


def _found(step, *examples) -> list[str]:
    return [str(each) for each in graph_safe(step, *examples)]


X = torch.arange(4.0)
ONE, TWO = (torch.tensor(1.0),), (torch.tensor(2.0),)


class _Faults:
    """Steps with one fault each, which a graph would repeat without an error."""

    def __init__(self) -> None:
        self.n, self.scale = 0, torch.ones(())
        self.weights = torch.ones(4)

    def seed_as_a_number(self, x):
        self.n += 1
        return dropout(X[None], Drop(0.5, self.n, 0, torch.zeros(1, dtype=torch.int64)))

    def rate_as_a_number(self, x):
        self.n += 1
        self.weights.sub_(x, alpha=0.1 * self.n)

    def rebound_loss_scale(self, x):
        self.scale = self.scale * x

    def host_read(self, x):
        return X * x.item()

    def host_read_of_a_list(self, x):
        return X * x.tolist()

    def branch_on_a_value(self, x):
        return X * 2 if x > 1 else X

    def fresh_buffer(self, x):
        self.n += 1
        return torch.tensor(float(self.n)) * x

    def another_slice(self, x):
        self.n += 1
        return X[self.n % 3 :].sum() * x

    def another_order(self, x):
        self.n += 1
        first, second = (torch.sin, torch.cos)[:: 1 if self.n % 2 else -1]
        return second(first(x))

    def sometimes_more(self, x):
        self.n += 1
        return x.sin() if self.n % 2 else x.sin().cos()

    def data_dependent_shape(self, x):
        return X[x < X]

    def mask_of_values(self, x):
        return X[x > X]

    def comparison_on_the_host(self, x):
        return X if torch.allclose(X, x) else X * x

    def another_dtype(self, x):
        self.n += 1
        return x.to(torch.float64 if self.n % 2 else torch.float16)


@pytest.mark.parametrize("name", [name for name in vars(_Faults) if not name.startswith("_")])
def test_a_planted_fault_is_found_with_its_line(name):
    faults = _Faults()
    found = _found(getattr(faults, name), ONE, TWO)
    assert found
    assert all("test_graph:" in each or "warpweave." in each for each in found)


def _collectives_in_another_order(rank: int) -> list[list[str]]:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    count = [0]

    def step(x):
        count[0] += 1
        for group in groups[:: 1 if count[0] % 2 else -1]:
            dist.all_reduce(x, group=group)

    def right(x):
        for group in groups:
            dist.all_reduce(x, group=group)

    return [_found(each, ONE, TWO) for each in (step, right)]


def test_collectives_of_groups_in_another_order_are_found():
    for wrong, right in run_ranks(2, _collectives_in_another_order):
        assert any("group" in each for each in wrong)
        assert not right


def test_the_faults_of_an_engine_are_found(monkeypatch):
    """A loss scale that is rebound, as it once was, and a key that is passed as a number."""
    engine = Engine(PRESETS["toy"], single(), dtype=torch.float16)
    batch, count = _batch(engine), [0]

    def step():
        count[0] += 1
        engine.step(*batch, lr=1e-3, key=7)

    assert not graph_safe(step)

    def rebind(self, overflow, halted=None):
        self.value = torch.where(overflow.bool(), self.value * 0.5, self.value)

    with monkeypatch.context() as patches:
        patches.setattr(optimizer.LossScale, "update", rebind)
        assert any(each.kind == "storage" for each in graph_safe(step))

    def with_numbers():
        count[0] += 1
        engine.step(*batch, lr=1e-3 * count[0], key=7)

    kinds = {each.kind for each in graph_safe(with_numbers)}
    assert kinds == {"number"}


# ---------------------------------------------------------------- recordings


def test_a_capture_changes_nothing_and_a_replay_repeats_its_numbers():
    x, scale, graph = torch.ones(3), [2.0], PretendedGraph()

    def step():
        x.mul_(scale[0]).add_(torch.zeros(3))
        return x.sum()

    total = graph.capture(step)
    assert x.tolist() == [1.0] * 3
    scale[0] = 5.0
    for power in (2, 4, 8):
        graph.replay()
        assert x.tolist() == [float(power)] * 3
        assert total.item() == 3.0 * power


def test_a_capture_refuses_a_host_read():
    with pytest.raises(RuntimeError, match=r"_local_scalar_dense.* reads a result on the host"):
        PretendedGraph().capture(lambda: torch.ones(()).item())


def test_a_recording_keeps_the_order_of_forward_backward_and_resizes():
    w, buffer = torch.ones(2, requires_grad=True), torch.zeros(4)
    with Recording() as recording:
        buffer.untyped_storage().resize_(32)
        (w.sin() * 2).sum().backward()
    names = [call.name.removeprefix("aten.").split(".")[0] for call in recording.calls]
    assert names.index("resize_") < names.index("sin") < names.index("cos")
    assert all("test_graph" in call.where for call in recording.calls)


def test_graph_safe_needs_steps_to_compare():
    with pytest.raises(ValueError, match=r"needs at least two examples or none, got 1$"):
        graph_safe(lambda x: x, ONE)
    with pytest.raises(
        ValueError, match=r"equal shapes and dtypes, got \[\] torch.float32 and \[2\]"
    ):
        graph_safe(lambda x: x, ONE, (torch.ones(2),))
