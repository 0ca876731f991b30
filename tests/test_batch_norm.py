"""Synchronized BatchNorm on 1 to 4 ranks, with any number of samples, against nn.BatchNorm over the
whole batch in float64."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from threads import on_mesh
from torch import nn
from torch.utils.checkpoint import checkpoint

from warpweave.layers.batch_norm import SyncBatchNorm, convert_sync_batchnorm
from warpweave.parallel import collectives
from warpweave.parallel.data.batch_norm import sync_batch_norm
from warpweave.parallel.data.unit import make_unit
from warpweave.parallel.mesh import Mesh, single
from warpweave.parallel.pipeline.stage import ChainStage, Segment
from warpweave.parallel.shard import ParamRecord

C, STEPS = 3, 2
PARTS = [[5], [4, 2], [1, 7], [3, 0, 4], [2, 1, 0, 5]]  # samples of each rank
SHAPES = {"1d": (), "sequence": (5,), "image": (3, 2)}


def _truth(x, dy, tail, momentum):
    """Run BatchNorm over the whole batches. Return outputs, gradients, and the module."""
    kind = nn.BatchNorm2d if len(tail) == 2 else nn.BatchNorm1d
    module = kind(C, momentum=momentum, dtype=torch.float64)
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    nn.init.normal_(module.bias, generator=torch.Generator().manual_seed(2))
    start = copy.deepcopy(module)
    x = [step.clone().requires_grad_() for step in x]
    y = [module(step) for step in x]
    torch.autograd.backward(y, dy)
    return start, module, [t.detach() for t in y], [t.grad for t in x]


def _ours(mesh, start, x, dy, parts, again):
    """Run the same on one rank with its samples. With `again`, use activation checkpointing."""
    module = convert_sync_batchnorm(copy.deepcopy(start), mesh)
    assert type(module) is SyncBatchNorm
    rank = mesh.index("data")
    mine = slice(sum(parts[:rank]), sum(parts[: rank + 1]))
    x = [step[mine].clone().requires_grad_() for step in x]
    one = torch.ones((), dtype=torch.float64, requires_grad=True)

    def block(t):  # the block after the norm needs its output, so the whole norm is recomputed
        return module(t) * one

    run = block if again is None else lambda t: checkpoint(block, t, use_reentrant=again)
    y = [run(step) for step in x]  # two micro-batch forwards before their backwards
    torch.autograd.backward(y, [step[mine] for step in dy])
    grads = torch.stack([module.weight.grad, module.bias.grad])
    if mesh.group("data") is not None:
        dist.all_reduce(grads, group=mesh.group("data"))
    module.eval()
    evaluated = module(x[0].detach())
    return y, [t.grad for t in x], grads, dict(module.named_buffers()), evaluated


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize(
    ("kind", "momentum", "again"),
    [("1d", 0.1, None), ("sequence", None, False), ("image", 0.3, True)],
)
def test_it_is_batch_norm_over_the_whole_batch(parts, kind, momentum, again):
    """Covers forward, backward, running statistics and evaluation, with
    micro-batches and recomputation."""
    tail, samples = SHAPES[kind], sum(parts)
    x = [1e4 + torch.randn(samples, C, *tail, dtype=torch.float64) for _ in range(STEPS)]
    dy = [torch.randn_like(step) for step in x]
    start, module, y, dx = _truth(x, dy, tail, momentum)
    found = on_mesh(Mesh(dp=len(parts)), _ours, start, x, dy, parts, again)
    for step in range(STEPS):
        assert (torch.cat([f[0][step] for f in found]) - y[step]).abs().max() < 1e-9
        assert (torch.cat([f[1][step] for f in found]) - dx[step]).abs().max() < 1e-9
    evaluated = module.eval()(x[0]).detach()
    assert (torch.cat([f[4] for f in found]) - evaluated).abs().max() < 1e-9
    for _, _, grads, buffers, _ in found:
        assert (grads[0] - module.weight.grad).abs().max() < 1e-8
        assert (grads[1] - module.bias.grad).abs().max() < 1e-8
        for name, buffer in module.named_buffers():
            assert buffer.dtype == buffers[name].dtype
            assert (buffer - buffers[name]).abs().max() < 1e-8, name


def _staged(mesh, recompute: bool):
    """Run two micro-batches through a chain of our stage."""
    module = SyncBatchNorm(C, mesh=mesh, dtype=torch.float64)
    params = [(ParamRecord(n, (C,)), p) for n, p in module.named_parameters()]
    unit = make_unit("norm", params, mesh)
    batches = torch.arange(12.0, dtype=torch.float64).view(2, 2, C) * (1 + mesh.rank)
    losses = Segment("loss", lambda x, b: (None, {"loss": x.square().sum()}), ())
    segments = [Segment("norm", lambda x, b: module(b), (unit,), recompute), losses]
    stage = ChainStage(segments)
    stage.begin([*batches])
    for mb in range(2):
        stage.forward(mb, None)
    for mb in range(2):
        stage.backward(mb, None)
    stage.reduce()
    return [*module.buffers(), unit.gradients.reduced.clone()]


def test_a_stage_that_recomputes_updates_running_statistics_once():
    plain, again = (on_mesh(Mesh(dp=2), _staged, recompute) for recompute in (False, True))
    for a, b in zip(plain, again):
        assert all(map(torch.equal, a, b))
        assert a[2] == 2


def test_one_message_forward_and_one_backward(monkeypatch):
    count = []
    for name in ("start_all_gather", "start_reduce_scatter"):
        whole = getattr(collectives, name)

        def spy(*args, name=name, whole=whole):
            count.append((name, args[0].numel()))
            return whole(*args)

        monkeypatch.setattr(collectives, name, spy)

    def one(mesh):
        y, _ = sync_batch_norm(torch.randn(4, C, requires_grad=True), None, None,
                               group=mesh.group("data"))  # fmt: skip
        y.square().sum().backward()

    on_mesh(Mesh(dp=3), one)
    n = 2 * C + 1
    assert sorted(count) == [("start_all_gather", n)] * 3 + [("start_reduce_scatter", 3 * n)] * 3


def test_low_precision_is_summed_in_fp32_and_no_sample_changes_no_statistics():
    module = SyncBatchNorm(C)
    x = torch.randn(64, C, 9).bfloat16()
    y, truth = module(x), nn.BatchNorm1d(C)(x.float())
    assert y.dtype == torch.bfloat16
    assert (y.float() - truth).abs().max() <= 2**-8 * truth.abs().max()
    before = [b.clone() for b in module.buffers()]
    assert module(torch.zeros(0, C)).shape == (0, C)
    assert all(map(torch.equal, before, module.buffers()))
    assert copy.deepcopy(module).mesh is module.mesh


def test_the_converter_replaces_norms_anywhere_and_keeps_parameters_and_mode():
    model = nn.Sequential(nn.Conv2d(2, C, 1), nn.Sequential(nn.BatchNorm2d(C), nn.ReLU()))
    model[1][0].eval()
    weight, buffers = model[1][0].weight, dict(model.named_buffers())
    assert convert_sync_batchnorm(model, single()) is model
    norm = model[1][0]
    assert type(norm) is SyncBatchNorm
    assert norm.weight is weight
    assert not norm.training
    assert buffers == dict(model.named_buffers())
    assert convert_sync_batchnorm(norm, None) is norm
    shared = nn.BatchNorm1d(C)
    twice = convert_sync_batchnorm(nn.Sequential(shared, nn.ReLU(), shared), None)
    assert [type(each) for each in twice] == [SyncBatchNorm, nn.ReLU, SyncBatchNorm]
    assert twice[0].weight is twice[2].weight is shared.weight
    assert twice[0].running_mean is twice[2].running_mean
    bare = SyncBatchNorm(C, affine=False, track_running_stats=False)
    assert bare.eval()(torch.eye(C)).std() > 0.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SyncBatchNorm(C)(torch.zeros(2, 4)), r"expected x\[N, 3, ...\], got \[2, 4\]"),
        (lambda: SyncBatchNorm(C)(torch.zeros(C)), r"expected x\[N, 3"),
        (lambda: SyncBatchNorm(C, mesh=Mesh(dp=2)), "mesh must be connected"),
        (lambda: sync_batch_norm(torch.zeros(2, 3), torch.zeros(2), None, group=None),
         r"weight\[C\], got x\[2, 3\] and weight\[2\]"),
        (lambda: sync_batch_norm(torch.zeros(2), None, None, group=None), r"got x\[2\]"),
    ],
)  # fmt: skip
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0, None])
def test_a_converted_norm_keeps_each_of_its_options(momentum, affine, track):
    """In training, in evaluation and in training again; with a momentum of 0 as well."""
    options = {"eps": 0.5, "momentum": momentum, "affine": affine, "track_running_stats": track}
    theirs = nn.BatchNorm1d(C, **options, dtype=torch.float64)
    with torch.no_grad():
        for i, t in enumerate((*theirs.parameters(), *theirs.buffers())):
            if t.is_floating_point():
                t.copy_(torch.rand(C, generator=torch.Generator().manual_seed(i)) + 0.5)
    ours = convert_sync_batchnorm(copy.deepcopy(theirs), single())
    assert type(ours) is SyncBatchNorm
    assert {name: getattr(ours, name) for name in options} == options
    assert ours.num_features == C
    for training in (True, True, False, True):  # training resumes after evaluation
        theirs.train(training), ours.train(training)
        x = torch.randn(7, C, dtype=torch.float64) + 3
        assert (ours(x) - theirs(x)).abs().max() < 1e-12
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for name, t in theirs.state_dict().items():
            assert (ours.state_dict()[name] - t).abs().max() < 1e-12, name
    assert ours.extra_repr() == theirs.extra_repr()


def test_the_constructor_takes_torchs_arguments_in_torchs_order():
    options = {"eps": 0.5, "momentum": 0.3, "affine": False, "dtype": torch.float64}
    for made in (nn.BatchNorm2d(C, **options), SyncBatchNorm(C, **options)):
        assert (made.num_features, made.eps, made.momentum, made.affine) == (C, 0.5, 0.3, False)
        assert made.running_mean.dtype == torch.float64
    both = (inspect.signature(c).parameters.values() for c in (SyncBatchNorm, nn.BatchNorm2d))
    ours, theirs = ([(p.name, p.default) for p in each][:7] for each in both)
    assert ours == theirs
