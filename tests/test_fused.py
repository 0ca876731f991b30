"""Layers with data movement inside their products, repeated over one workspace: both halves of a
block equal plain torch on ranks with sharded tokens, with the same bits on every repeat."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from close import relative_error
from ranks import run_ranks
from refused import check
from sharded import draw, part, same_birth
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.gemm.epilogue import Epilogue
from warpweave.kernels.overlap import all_gather_gemm, gathering, gemm_reduce_scatter
from warpweave.kernels.overlap.symmetric import Signature, local_memory
from warpweave.kernels.rope import apply_rope, rope_table
from warpweave.kernels.runtime.wgrad import WeightGradients, collect
from warpweave.layers.attention import Attention
from warpweave.layers.block import TransformerBlock
from warpweave.layers.context import TokenContext
from warpweave.layers.linear import ColumnParallelLinear
from warpweave.layers.mlp import MLP
from warpweave.layers.records import collect_records
from warpweave.parallel import symmetric
from warpweave.parallel.collectives import reduce_from
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor import column_parallel_linear, row_parallel_linear
from warpweave.parallel.tensor.mlp import parallel_mlp
from warpweave.parallel.tensor.qkv import parallel_qkv_rope

ROUNDS = 6  # one of each dtype, and all again over what they left
E, D, G, ROWS = 11, 6, 2, 5  # odd sizes; 5 tokens on each rank
DTYPES = (torch.float64, torch.float32, torch.float16)


def _mlp(x, up, down, up_bias, down_bias, drop=None, **ranks):
    if ranks:
        return parallel_mlp(
            x, up, down, up_bias, down_bias, activation="swiglu", residual=x, drop=drop,
            impl="triton", **ranks,
        )  # fmt: skip
    gate, value = (F.linear(x, up[:, i], up_bias[:, i]) for i in (0, 1))
    y = F.linear(F.silu(gate) * value, down, down_bias)
    return x + dropout(y, drop, impl="torch")


def _attention(x, qkv, out, qkv_bias, out_bias, drop=None, **ranks):
    tokens = len(x) * (dist.get_world_size() if ranks else 1)
    table = rope_table(torch.arange(tokens), D, dtype=torch.float64)
    cos, sin = torch.stack(table, -1).unbind(-1)  # every second number in memory
    if x.dtype != torch.float64:
        cos, sin = cos.float(), sin.float()
    if ranks:
        options = {"shape": (1, tokens), "impl": "triton"}
        q, k, v = parallel_qkv_rope(x, qkv, qkv_bias, cos, sin, **options, **ranks)
    else:
        z = torch.einsum("te,kgde->tkgd", x, qkv) + qkv_bias
        q, k, v = z[None, :, :, :G].flatten(2, 3), z[None, :, :, G], z[None, :, :, G + 1]
        q, k = (apply_rope(t, cos, sin, impl="torch") for t in (q, k))
    k, v = (t.repeat_interleave(G, 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    o = o.transpose(1, 2).flatten(2)[0]
    return row_parallel_linear(o, out, out_bias, **ranks) if ranks else F.linear(o, out, out_bias)


def _problem(half, world: int, seed: int) -> tuple[list[torch.Tensor], list[int | None]]:
    """Return x and the four parameters in float64, and the dim of each that is sharded."""
    width = 3 * world
    shapes = {
        _mlp: [(width, 2, E), (E, width), (width, 2), (E,)],
        _attention: [(world, G + 2, D, E), (E, world * G * D), (world, G + 2, D), (E,)],
    }[half]
    drawn = [draw(seed + i, *shape) / 2 for i, shape in enumerate([(world * ROWS, E), *shapes])]
    return drawn, [0, 0, 1, 0, None]


def _results(half, tensors, dy, **options) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = half(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _rounds(rank: int, half) -> None:
    world, kept = dist.get_world_size(), {}
    ranks = {"group": dist.group.WORLD, "sequence_parallel": True, "overlap": "fused"}
    ranks["workspace"] = Workspace(dist.group.WORLD)
    tokens = torch.arange(world * ROWS) + 2**33
    for i in range(ROUNDS):
        seed = i % (ROUNDS // 2)
        dtype = DTYPES[seed]
        whole, cuts = _problem(half, world, 10 * seed)
        dy = draw(10 * seed + 9, *whole[0].shape)
        drop = Drop(0.2, seed, 1, tokens)
        truth = _results(half, whole, dy, drop=drop)
        low, low_dy = [t.to(dtype) for t in whole], dy.to(dtype)
        mine = [part(t, cut) for t, cut in zip(low, cuts)]
        drop = drop._replace(tokens=part(tokens, 0))
        found = _results(half, mine, part(low_dy, 0), drop=drop, **ranks)
        again = kept.setdefault(seed, found)
        assert all(torch.equal(a, b) for a, b in zip(found, again)), "other bits on a repeat"
        # documented: the bias gradient of each rank's own tokens, the caller sums
        found = [*found[:-1], reduce_from(found[-1].double(), dist.group.WORLD)]
        if dtype == torch.float16:
            plain = _results(half, low, low_dy, drop=drop._replace(tokens=tokens))
        for j, (t, right, cut) in enumerate(zip(found, truth, [0, *cuts], strict=True)):
            error = relative_error(t, part(right, cut))
            if dtype == torch.float16:
                # eps twice: torch's own products of a rank's narrow shards differ by about one
                # rounding
                bound = 2 * (relative_error(plain[j], right) + torch.finfo(dtype).eps)
            else:
                bound = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
            assert error <= bound, (i, j, dtype, error, bound)


@pytest.mark.parametrize("half", [_mlp, _attention])
@pytest.mark.parametrize("world", [2, 3])
def test_halves_of_a_block_equal_plain_torch_round_after_round(world, half):
    run_ranks(world, _rounds, half)


# ---------------------------------------------------------------- which products are fused


def _fusing(rank: int) -> None:
    """dx of a column-parallel layer is one fused product if dW is deferred or not needed. Otherwise
    there are two products to hide whole collectives under."""
    ranks = {"group": dist.group.WORLD, "overlap": "fused"}
    ranks["workspace"] = Workspace(dist.group.WORLD)
    for sequence, name in ((True, "gemm_reduce_scatter"), (False, "gemm_all_reduce")):
        for frozen, waiting, times in ((False, False, 0), (False, True, 1), (True, False, 1)):
            x = draw(1, 6, 5).requires_grad_()
            w = draw(2, 8, 5).requires_grad_(not frozen)
            y = column_parallel_linear(x, w, sequence_parallel=sequence, **ranks)
            store = WeightGradients()
            spy = mock.patch.object(gathering, name, wraps=getattr(gathering, name))
            with spy as called, collect(store) if waiting else nullcontext():
                y.backward(draw(3, *y.shape))
            assert called.call_count == times, (sequence, frozen, waiting)
            assert len(store) == waiting
            store.run()
            assert (w.grad is None) == frozen


def test_what_has_no_other_product_to_hide_under_is_fused() -> None:
    run_ranks(2, _fusing)


def _layer(rank: int) -> None:
    """Test that the layers of a mesh share one workspace."""
    mesh = Mesh(tp=2).connect()
    options = {"mesh": mesh, "sequence_parallel": True, "overlap": "fused", "impl": "triton"}
    torch.manual_seed(0)
    layers = [MLP(6, 8, dtype=torch.float64, **options) for _ in range(2)]
    x = draw(5, 6, 6)
    heads = Attention(6, 2, dtype=torch.float64, **options)
    for layer in (heads.qkv, heads.out, layers[0].up, layers[1].down):
        assert layer.over_ranks["overlap"] == "fused"
        assert layer.over_ranks["workspace"] is mesh.workspace("tp")
    assert mesh.workspace("tp")._memory is None
    found = layers[1](layers[0](part(x, 0)))
    assert mesh.workspace("tp")._memory.epoch.item() > 0
    assert mesh.workspace("pp") is None
    torch.manual_seed(0)
    plain = [MLP(6, 8, dtype=torch.float64) for _ in range(2)]
    assert relative_error(found, part(plain[1](plain[0](x)), 0)) < 1e-12


def test_layers_of_a_mesh_share_its_workspace() -> None:
    run_ranks(2, _layer)


# ---------------------------------------------------------------- bad input


def _refused(rank: int) -> None:
    group, x, w = dist.group.WORLD, draw(1, 6, 5), draw(2, 8, 5)
    workspace, table = Workspace(group), rope_table(torch.arange(12), 2, dtype=torch.float64)
    plain = {"group": group, "sequence_parallel": True}
    ranks = plain | {"overlap": "fused", "workspace": workspace}
    backward = ranks | {"sequence_parallel": False}  # only the backward would be fused
    heads, other = (x, draw(3, 1, 4, 2, 5), None, *table), "pass impl='triton', or a different over"
    for call, words in (
        (partial(column_parallel_linear, x, w, overlap="fast", **plain),
         "one of none, bulk, chunked, fused, got 'fast'"),
        (partial(column_parallel_linear, x, w, overlap="fused", **plain),
         "needs `workspace`, got None; pass a Workspace of the"),
        (partial(parallel_mlp, x, w, draw(3, 5, 8), activation="gelu", impl="torch", **ranks),
         other),
        (partial(parallel_qkv_rope, *heads, shape=(1, 12), impl="torch", **ranks), other),
        (partial(row_parallel_linear, draw(1, 5, 8), draw(2, 5, 8), **ranks),
         "5 tokens .* not divisible by the 2 tensor-parallel ranks"),
        (partial(parallel_qkv_rope, *heads, shape=(1, 6), impl="torch", **backward), other),
        (partial(MLP, 8, 8, overlap="fused", impl="torch"), other),
        (partial(Attention, 8, 8, overlap="fused", impl="torch"), other),
    ):  # fmt: skip
        check(call, words)
    assert workspace._memory is None  # nothing was made, and nobody waits


def test_what_cannot_be_fused_is_refused_before_anything_is_made() -> None:
    run_ranks(2, _refused)


def _growing(rank: int) -> None:
    """Test that a workspace grows by itself, but not during graph capture,
    and belongs to one stream."""
    workspace, cuda = Workspace(dist.group.WORLD), torch.device("cuda", 0)
    cpu = torch.device("cpu")
    small = workspace.fitting("op", cpu, 3, 500)
    assert (small.slots, small.capacity) == (4, 512)
    assert workspace.fitting("op", cpu, 4, 512) is small
    large = workspace.fitting("op", cpu, 2, 513)
    assert (large.slots, large.capacity) == (4, 1024)
    more = workspace.fitting("op", cpu, 5, 1)
    assert (more.slots, more.capacity) == (8, 1024)
    streams = mock.Mock(side_effect=[mock.Mock(cuda_stream=n) for n in (1, 2, 1)])
    with mock.patch.object(torch.cuda, "current_stream", streams):
        for words in (
            "the symmetric memory is on cpu, but the tensors are on cuda:0",
            "op on rank . of 2: this workspace was used on",
        ):
            check(lambda: workspace.fitting("op", cuda, 1, 1), words)
        captured, words = Workspace(dist.group.WORLD), "99 bytes .* in 2 parts, .* during graph cap"
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            check(lambda: captured.fitting("op", cuda, 2, 99), words)
    # The host waits only for its own stream, and only if there is something that peers may read: a
    # device that has posted a receive is never idle.
    waits = mock.Mock(cuda_stream=1)
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value=waits),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch.cuda, "synchronize", side_effect=AssertionError),
        mock.patch.object(symmetric, "symmetric_memory") as made,
    ):
        made.return_value = mock.Mock(left="", slots=2, capacity=128)
        made.return_value.epoch.device = cuda
        workspace = Workspace(dist.group.WORLD)
        workspace.fitting("op", cuda, 2, 99)
        assert not waits.synchronize.called
        workspace.fitting("op", cuda, 2, 128)
        assert made.call_count == 1
        workspace.fitting("op", cuda, 2, 129)
        assert (made.call_count, waits.synchronize.call_count) == (2, 1)


def test_a_workspace_grows_but_not_under_capture_and_not_for_two_streams() -> None:
    run_ranks(2, _growing)


def _left(rank: int) -> None:
    """An operation that an error ends after its first launch is not started again over what it has
    published. After a renewal the workspace is correct again."""
    workspace = Workspace(dist.group.WORLD)
    a, b = torch.full((4, 3), float(rank + 1)), torch.ones(3, 2)
    out_of_memory = mock.patch.object(Epilogue, "arguments", side_effect=MemoryError)
    with out_of_memory, pytest.raises(MemoryError):
        gemm_reduce_scatter(a, b, memory=workspace)
    for op in (gemm_reduce_scatter, all_gather_gemm):
        with pytest.raises(ValueError, match=r"interrupted gemm_reduce_sc.*Workspace\.renew"):
            op(10 * a, b, memory=workspace)
    dist.barrier()
    workspace.renew()
    assert torch.equal(gemm_reduce_scatter(10 * a, b, memory=workspace), torch.full((2, 2), 90.0))
    bounded = Workspace(dist.group.WORLD, polls=3)
    if rank == 0:  # the other never arrives
        bounded._memory = local_memory(2, slots=4, capacity=1 << 10, polls=3)[0]
        with pytest.raises(TimeoutError, match="gemm_reduce_scatter on rank 0 of 2, operation 1"):
            gemm_reduce_scatter(a, b, memory=bounded)
        check(lambda: all_gather_gemm(a, b, memory=bounded), "interrupted gemm_reduce_scatter; ")


def _bounded(rank: int) -> None:
    """The mesh's timeout bounds the waits within kernels: 10,000 polls a second on a CPU, 500,000
    on a GPU. The mesh reports a kernel that gave up to the caller of a step."""
    for seconds, polls in ((None, 1_000_000), (0.0005, 5)):
        timeout = None if seconds is None else timedelta(seconds=seconds)
        workspace = Workspace(dist.group.WORLD, timeout=timeout)
        memory = workspace.fitting("op", torch.device("cpu"), 4, 1 << 10)
        assert memory.polls == polls
    mesh = Mesh(tp=2).connect(timeout=timedelta(seconds=7))
    memory = mesh.workspace("tp").fitting("op", torch.device("cpu"), 1, 1)
    assert memory.polls == 70_000
    mesh.check_waits()
    word = Signature("qkv_rope", 3, 5, torch.float32, (1, 1)).word()
    memory.error.copy_(torch.tensor([9, 1, 2, word, word]))  # as a kernel on a GPU leaves it
    words = rf"^qkv_rope on rank {rank} of 2, operation 9 .*: timed out after .* from rank 1;"
    check(mesh.check_waits, words, TimeoutError)
    with mock.patch.object(symmetric, "_over_peers") as made:
        mesh.workspace("tp").renew()
        mesh.workspace("tp")._memory = symmetric.symmetric_memory(
            dist.group.WORLD, "cuda:0", slots=1, capacity=1, timeout=mesh.timeout
        )
    assert made.call_args.args[-1] == 3_500_000
    words = "on rank 0 of 2, operation 1 .* 5 polls for part .* from rank 1;"
    if rank == 0:  # the other never arrives
        with pytest.raises(TimeoutError, match=words):
            gemm_reduce_scatter(torch.ones(4, 3), torch.ones(3, 2), memory=workspace)


@pytest.mark.parametrize(
    ("peers", "reached", "atomic", "said"),
    [
        ([0, 1, 2], {0, 2}, {0, 2}, ""),
        ([0, 1, 2], {0}, {0, 2}, "cuda:1 has no peer access to cuda:2 of rank 2"),
        ([2, 1, 0], {0, 2}, {0}, "cuda:1 has no native atomics on cuda:2 of rank 0; the GPUs must"),
        ([1, 1], {0, 2}, {0, 2},
         "each rank must have its own GPU, got GPUs [1, 1] for ranks 0 to 1"),
    ],
)  # fmt: skip
def test_gpus_that_cannot_signal_are_refused_in_one_line(
    monkeypatch, peers, reached, atomic, said
) -> None:
    """Each error states which peers GPU 1 cannot reach."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: peer in reached)
    found = symmetric.unreachable(1, peers, lambda own, peer: own == 1 and peer in atomic)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_waits_within_kernels_follow_the_timeout_of_the_mesh() -> None:
    run_ranks(2, _bounded)


def test_what_an_error_left_midway_is_not_begun_again() -> None:
    run_ranks(2, _left)


def _compiled(rank: int) -> None:
    mesh = Mesh(tp=2).connect()
    options = {"mesh": mesh, "sequence_parallel": True, "overlap": "fused"}
    layer, x = ColumnParallelLinear(6, 4, dtype=torch.float64, **options), draw(rank, 3, 6)
    found = []
    for call in (layer, torch.compile(layer, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        found.append([y, *torch.autograd.grad(y, (leaf, layer.weight), torch.ones_like(y))])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_a_compiler_leaves_the_launches_alone() -> None:
    run_ranks(2, _compiled)


def test_no_columns_are_no_error() -> None:
    run_ranks(2, _empty_dims)


def _empty_dims(rank: int) -> None:
    group = dist.group.WORLD
    ranks = {"group": group, "overlap": "fused", "workspace": Workspace(group)}
    x, w = draw(1, 4, 0, 6), draw(2, 8, 6)
    for sequence in (False, True):
        y = row_parallel_linear(x, w, sequence_parallel=sequence, **ranks)
        assert y.shape == (2 if sequence else 4, 0, 8)


# ---------------------------------------------------------------- under torch's data parallelism


def _block(mesh: ConnectedMesh | None) -> TransformerBlock:
    """Make the block, equal on every call: over the tensor ranks of `mesh` and
    fused, or whole and torch's."""
    fusing = {"mesh": mesh, "sequence_parallel": True, "overlap": "fused", "impl": "triton"}
    torch.manual_seed(7)
    return TransformerBlock(
        8, 2, 6, activation="swiglu", norm="rms", rope_theta=100.0, dtype=torch.float64,
        **(fusing if mesh else {"impl": "torch"}),
    )  # fmt: skip


def _averaged(wrap: Callable[..., nn.Module], mesh: ConnectedMesh) -> float:
    """Return the largest error of output and gradients of a wrapped block in two rounds: of this
    rank's replica of the data, and averaged over the replicas."""
    tokens, worst = 6, 0.0
    whole, mine = _block(None), _block(mesh)
    same_birth(whole, mine, mesh)
    records = collect_records(mine)
    wrapped = wrap(mine, mesh)
    cos_sin = rope_table(torch.arange(tokens), 4, theta=100.0, dtype=torch.float64)
    context = TokenContext(1, None, cos_sin, 0, None)
    for step in range(2):
        x, dy = draw(step, 2, tokens, 8), draw(step + 10, 2, tokens, 8)
        replica = mesh.index("dp")
        spy = mock.patch.object(gathering, "gemm_reduce_scatter", wraps=gemm_reduce_scatter)
        with spy as called:
            y = wrapped(part_of(x[replica], mesh), context)
            y.backward(part_of(dy[replica], mesh))
        assert called.call_count == 2  # out, down
        outputs = [whole(x[r], context) for r in range(2)]
        (sum((a * b).sum() for a, b in zip(outputs, dy)) / 2).backward()
        worst = max(worst, relative_error(y, part_of(outputs[replica], mesh)))
        expected = dict(whole.named_parameters())
        for name, p in mine.named_parameters():
            g = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            if records[name].partial:
                dist.all_reduce(g, group=mesh.group("tp"))
            right = records[name].slice(expected[name].grad, mesh.coords)
            worst = max(worst, relative_error(g, right))
        whole.zero_grad(), mine.zero_grad()
    return worst


def part_of(t: torch.Tensor, mesh: ConnectedMesh) -> torch.Tensor:
    """Return this tensor rank's tokens."""
    return t.detach().chunk(2)[mesh.index("tp")]


def _replicas(block: nn.Module, mesh: ConnectedMesh) -> nn.Module:
    return DistributedDataParallel(block, process_group=mesh.group("dp"))


def _shards(block: nn.Module, mesh: ConnectedMesh) -> nn.Module:
    return fully_shard(block, mesh=mesh.device_mesh["dp"])


def _shards_of_layers(block: nn.Module, mesh: ConnectedMesh) -> nn.Module:
    """Shard layers one by one, so that MLP and attention call their layers, not read them."""
    for layer in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down):
        fully_shard(layer, mesh=mesh.device_mesh["dp"])
    return _shards(block, mesh)


def _data_parallel(rank: int) -> None:
    mesh = Mesh(dp=2, tp=2).connect()
    for wrap in (_replicas, _shards, _shards_of_layers):
        assert _averaged(wrap, mesh) < 1e-12, wrap
    assert _averaged(lambda block, mesh: block, mesh) > 1e-3  # nothing is averaged


def test_ddp_and_fsdp2_average_fused_tensor_ranks_as_one_device_does() -> None:
    run_ranks(4, _data_parallel)
