"""The proof passes on a handful of layouts of 2, 4 and 8 ranks, and catches every planted fault."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import itertools
import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from warpweave import engine as engines
from warpweave import gpt, prove
from warpweave.kernels import norm
from warpweave.parallel.data import parameters, reduce, zero
from warpweave.parallel.mesh import Mesh, single
from warpweave.parallel.shard import ParamRecord
from warpweave.prove import LIMITS, Errors, Layout, prove_layout

LAYOUTS = {
    2: [
        Layout(Mesh(dp=2), zero=0),
        Layout(Mesh(dp=2), zero=3, style="llama", recompute="selective"),
        Layout(Mesh(cp=2), zero=2, style="llama", tied=False),
        Layout(Mesh(tp=2), style="llama", recompute="full"),
        Layout(Mesh(tp=2), True, style="gpt2", tied=False),
        Layout(Mesh(pp=2), schedule="gpipe", recompute="full"),
    ],
    4: [
        Layout(Mesh(dp=4), zero=1, style="llama"),
        Layout(Mesh(dp=2, cp=2), zero=3, recompute="full"),
        Layout(Mesh(tp=2, cp=2), True, 3, style="llama", tied=False),
        Layout(Mesh(tp=2, pp=2), True, 0, "1f1b", recompute="selective"),
        Layout(Mesh(dp=2, pp=2), False, 2, "1f1b", "llama"),
        Layout(Mesh(tp=4), True, style="gpt2"),
        Layout(Mesh(pp=4), schedule="1f1b", style="llama"),
    ],
    8: [
        Layout(Mesh(dp=2, tp=2, pp=2), True, 1),
        Layout(Mesh(cp=2, tp=2, pp=2), True, 3, "gpipe", "llama"),
    ],
}


def _prove(rank: int, layouts: list[Layout], dtypes: tuple[str, ...]) -> list[Errors]:
    meshes = {sizes: sizes.connect() for sizes in dict.fromkeys(lay.mesh for lay in layouts)}
    chosen = [dataclasses.replace(lay, dtype=d) for lay in layouts for d in dtypes]
    return [prove_layout(layout, meshes[layout.mesh], 30.0) for layout in chosen]


@pytest.mark.parametrize(
    ("world", "dtypes"), [(2, ("fp64", "fp32")), (4, ("fp64",)), (8, ("fp64",))]
)
def test_sampled_layouts_equal_the_plain_model_within_the_limits(world, dtypes):
    layouts = LAYOUTS[world]
    ranks = run_ranks(world, _prove, layouts, dtypes, timeout=90)
    for layout, dtype in itertools.product(layouts, dtypes):
        for errors in ranks:
            found = errors[layouts.index(layout) * len(dtypes) + dtypes.index(dtype)]
            assert found.worst <= LIMITS[dtype], (str(layout), dtype, found)


def test_fp64_errors_are_rounding_and_the_limits_leave_no_room_for_faults():
    assert LIMITS["fp64"] <= 1e-11
    errors = prove_layout(Layout(Mesh()), single())
    assert 0 < errors.worst < 1e-13
    (fp32,) = _prove(0, [Layout(Mesh(), style="llama")], ("fp32",))
    assert 1e-9 < fp32.worst <= LIMITS["fp32"]


def test_what_a_layout_says_is_what_the_engine_is_told():
    layout = Layout(
        Mesh(), True, 3, "gpipe", "llama", False, "full", "gather", "striped", "fp32", "triton"
    )
    told = mock.Mock(side_effect=InterruptedError)
    with mock.patch.object(prove, "Engine", told), pytest.raises(InterruptedError):
        prove_layout(layout, single())
    ((config, mesh), options) = told.call_args
    assert (config, mesh.sizes) == (prove.model_config(layout), layout.mesh)
    assert (config.norm, config.tied) == ("rms", False)
    same = ("sequence_parallel", "zero", "schedule", "recompute", "strategy", "layout", "impl")
    assert {name: options[name] for name in same} == {name: getattr(layout, name) for name in same}
    assert options["dtype"] == torch.float32


# -------------------------------------------------------------------------- planted faults


@contextlib.contextmanager
def _planted(place, name: str, value):
    original = getattr(place, name)
    setattr(place, name, value(original))
    try:
        yield
    finally:
        setattr(place, name, original)


def _with_valid(change):
    """A wrong normaliser: `change(valid, labels)` instead of the global number of valid tokens."""

    def value(original):
        def run(self, tokens, labels, ids, valid, key):
            return original(self, tokens, labels, ids, change(valid.wait(), labels), key)

        return run

    return value


def _local_names(original):
    """Blocks named by their place on the stage instead of by their place in the model."""

    def run(self):
        first = self.layers_of(self.mesh.index("pp")).start
        records = original(self)
        for name in [n for n in records if n.startswith("blocks.") and first]:
            _, i, rest = name.split(".", 2)
            records[name] = records[name].renamed(f"blocks.{int(i) - first}.{rest}")
        return records

    return run


def _same_dropout(original):
    """Every tensor rank draws the mask of the first one's rows."""

    def run(self, *args, **kwargs):
        batch = original(self, *args, **kwargs)
        ids = batch.context.token_ids
        shift = self.mesh.index("tp") * len(ids)
        context = dataclasses.replace(batch.context, token_ids=ids - shift)
        return dataclasses.replace(batch, context=context)

    return run


def _count_all(original):
    return lambda self, summed: [self.gradients.reduced]


SP, PP = Layout(Mesh(tp=2), True), Layout(Mesh(pp=2))
FAULTS = {
    "normaliser doubled": (Layout(Mesh(dp=2)), engines.Engine, "_micro_batches",
                           _with_valid(lambda valid, _: 2 * valid)),
    "normaliser of the replica's own tokens": (
        Layout(Mesh(dp=2)), engines.Engine, "_micro_batches",
        _with_valid(lambda _, labels: (labels != -100).sum().clamp(min=1))),
    "one more division by the micro-batches": (
        PP, engines.Engine, "_micro_batches",
        _with_valid(lambda valid, labels: valid * len(labels))),
    "tied gradients not summed over the stages": (PP, engines._EngineStage, "tie",
                                                  lambda _: lambda self: None),
    "tied parameter counted twice in the norm": (PP, zero.Unit, "counted_grads", _count_all),
    "replicated parameters counted once per tensor rank": (
        Layout(Mesh(tp=2)), zero.Unit, "counted_grads", _count_all),
    "norm and row-bias gradients not summed over tensor ranks": (
        SP, zero.ZeroOptimizer, "sum_partials", lambda _: lambda self: None),
    "gradients not summed over context ranks": (
        Layout(Mesh(cp=2)), reduce.FlatGradients, "start",
        lambda _: lambda self, following=(): None),
    "every tensor rank loads the first one's slice": (
        Layout(Mesh(tp=2), style="llama"), ParamRecord, "slice",
        lambda original: lambda self, full, at: original(self, full, at | {"tp": 0})),
    "layers named by their place on the stage": (PP, gpt.GPT, "parameter_records", _local_names),
    "one dropout mask for all tensor ranks": (SP, gpt.GPT, "micro_batch", _same_dropout),
    "vocabulary padding takes part in the softmax": (
        Layout(Mesh(tp=2)), gpt.VocabParallelLinearCrossEntropy, "__init__",
        lambda original: lambda self, size, **kw: original(self, -(-size // 2) * 2, **kw)),
    "updated slices are not gathered again": (
        Layout(Mesh(dp=2), zero=1), parameters.FlatParameters, "publish",
        lambda _: lambda self: None),
    "clipping by the unreduced norm": (
        Layout(Mesh(dp=2), zero=2), zero.ZeroOptimizer, "norm",
        lambda original: lambda self: original(self) * 1.01),
}  # fmt: skip


def _faults(rank: int) -> dict[str, tuple[Errors, Errors]]:
    meshes = {sizes: sizes.connect() for sizes in (Mesh(dp=2), Mesh(cp=2), Mesh(tp=2), Mesh(pp=2))}
    found = {}
    for name, (layout, place, attribute, value) in FAULTS.items():
        with _planted(place, attribute, value):
            found[name] = prove_layout(layout, meshes[layout.mesh], 30.0)
        dist.barrier()
    return found


def test_every_planted_fault_is_caught_far_outside_the_limits_on_every_rank():
    for found in run_ranks(2, _faults, timeout=90):
        for name, errors in found.items():
            assert errors.worst > 5 * LIMITS["fp32"], (name, errors)


def _interpreted(rank: int) -> list[Errors]:
    """One step with every Triton kernel interpreted: two layouts, and one with a wrong kernel."""
    right = norm._launch_fwd

    def too_much_eps(*args):
        *others, eps, y, s, mean, rstd = args
        return right(*others, eps + 0.01, y, s, mean, rstd)

    found = []
    with mock.patch.object(prove, "STEPS", 1):
        llama = Layout(
            Mesh(cp=2), style="llama", zero=2, tied=False, strategy="ring", impl="triton"
        )
        gpt2 = Layout(Mesh(tp=2), True, recompute="selective", impl="triton")
        for layout in (llama, gpt2):
            found.append(prove_layout(layout, layout.mesh.connect(), 60.0))
        with mock.patch.object(norm, "_launch_fwd", too_much_eps):
            found.append(prove_layout(gpt2, gpt2.mesh.connect(), 60.0))
    return found


@pytest.mark.timeout(200)
def test_the_triton_kernels_prove_layouts_too():
    for llama, gpt2, planted in run_ranks(2, _interpreted, timeout=180):
        assert max(llama.worst, gpt2.worst) <= LIMITS["fp64"], (llama, gpt2)
        assert planted.worst > LIMITS["fp32"], planted


def test_the_report_names_what_is_wrong():
    with _planted(ParamRecord, "draw", _shifted("blocks.1.mlp.up.weight")):
        errors = prove_layout(Layout(Mesh()), single())
    assert errors.where.startswith(("gradient of", "blocks."))
    assert errors.worst > LIMITS["fp32"]
    with _planted(zero.Unit, "read", _nan_for("final_norm.bias")):
        errors = prove_layout(Layout(Mesh()), single())
    assert errors.worst == float("inf")
    assert "final_norm.bias" in errors.where


def _shifted(name: str):
    def value(original):
        def draw(self, seed, **options):
            return original(self, seed, **options) + (self.name == name)

        return draw

    return value


def _nan_for(name: str):
    def value(original):
        def read(self, kind):
            for record, tensor in original(self, kind):
                yield record, tensor * float("nan") if record.name == name else tensor

        return read

    return value


# -------------------------------------------------------------------------- the table


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_table_holds_every_mesh_and_every_choice_that_means_something(world):
    layouts = prove.table(world)
    assert len(layouts) == len(set(layouts))
    sizes = [n for n in (1, 2, 4) if world % n == 0]
    every = {m for m in itertools.product(sizes, repeat=4) if torch.Size(m).numel() == world}
    axes = [(lay.mesh.dp, lay.mesh.cp, lay.mesh.tp, lay.mesh.pp) for lay in layouts]
    assert set(axes) == every
    for mesh in every:
        dp, cp, tp, pp = mesh
        mine = [lay for lay, at in zip(layouts, axes) if at == mesh]
        assert {lay.zero for lay in mine} == set(range(4 if dp * cp > 1 else 1))
        assert {lay.sequence_parallel for lay in mine} == {False} | {tp > 1}
        assert {lay.schedule for lay in mine} >= ({"gpipe", "1f1b"} if pp > 1 else {"1f1b"})
        styles = set(itertools.product(("gpt2", "llama"), (True, False)))
        assert {(lay.style, lay.tied) for lay in mine} == styles
    assert {lay.recompute for lay in layouts} == {"none", "selective", "full"}


def test_eight_ranks_are_proven_on_the_meshes_of_three_and_four_axes():
    layouts = prove.table(8, min_axes=3)
    assert {tuple(sorted(dataclasses.astuple(lay.mesh))) for lay in layouts} == {(1, 2, 2, 2)}
    assert len({lay.mesh for lay in layouts}) == 4


def test_the_batch_has_ranks_without_any_valid_token():
    for step in range(prove.STEPS):
        tokens, labels = prove.batch(step)
        valid = labels != -100
        assert tokens.shape == labels.shape == (prove.SAMPLES, prove.SEQ_LEN)
        assert valid.any()
        by_sample = valid.view(4, -1).sum(1)  # four data ranks
        chunks = valid.view(prove.SAMPLES, 4, -1).sum((0, 2))  # the zigzag halves of two cp ranks
        zigzag = torch.stack([chunks[0] + chunks[3], chunks[1] + chunks[2]])
        assert (by_sample == 0).any() or (zigzag == 0).any()
        assert by_sample.unique().numel() > 1


# -------------------------------------------------------------------------- the command


def _main(*argv: str) -> tuple[int, list[str]]:
    out = io.StringIO()
    with pytest.raises(SystemExit) as caught, contextlib.redirect_stdout(out):
        prove.main(list(argv))
    return caught.value.code, out.getvalue().splitlines()


def test_the_command_exits_with_zero_and_a_line_of_json():
    code, lines = _main("--style", "llama")
    summary = json.loads(lines[-1])
    assert code == 0
    assert (summary["passed"], summary["layouts"]) == (True, 2)
    assert summary["worst"] == summary["worst_by_dtype"]["fp64"] <= LIMITS["fp64"]
    assert summary["limits"] == LIMITS
    assert [line.endswith("ok") for line in lines[:-1]] == [True, True]


def test_the_command_exits_with_one_when_a_layout_is_wrong():
    fault = _with_valid(lambda valid, _: 2 * valid)
    with _planted(engines.Engine, "_micro_batches", fault):
        code, lines = _main("--dtype", "fp64")
    assert code == 1
    assert "WRONG: gradient of" in lines[0]
    assert json.loads(lines[-1])["passed"] is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [(("--dp", "3"), "does not divide: 8 samples over dp = 3\n"),
     (("--cp", "5", "--tp", "3"), "tokens over 2 * cp = 10, 8 heads over tp = 3\n"),
     (("--tp", "0"), "mesh axis tp must be a positive integer, got 0")],
)  # fmt: skip
def test_the_command_exits_with_two_and_one_line_for_a_layout_that_cannot_be(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        prove.main(list(argv))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("error", "code"), [(1e-6, 0), (1e-3, 1)])
def test_the_command_starts_the_ranks_of_each_world_and_judges_what_they_wrote(
    error, code, monkeypatch
):
    launched = []

    def launch(entry, args, mesh):
        inspect.signature(entry).bind(*args, 29500)  # the launcher adds the port
        launched.append((entry, args[0], mesh))
        row = {"loss": 0.0, "grad": error, "norm": 0.0, "weight": 0.0, "where": ""}
        with open(args[2], "w") as file:
            json.dump([row] * len(args[0]), file)

    monkeypatch.setattr(prove, "launch", launch)
    found, lines = _main("--tp", "2", "--pp", "2", "--zero", "1", "--dtype", "fp32")
    layout = Layout(Mesh(tp=2, pp=2), True, 1, dtype="fp32")
    assert launched == [(prove.prove_rank, [layout], Mesh(dp=4))]
    assert found == code
    summary = json.loads(lines[-1])
    assert (summary["passed"], summary["worst"]) == (code == 0, error)
