"""Overlapped products: virtual ranks in one process, and real ones over shared memory."""

import dataclasses
import itertools
import os
import random
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from close import assert_close_f64, relative_error
from guarded import guarded
from ranks import run_ranks
from refused import check
from triton.runtime.interpreter import interpreter_builder

from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import fused_gemm, gemm
from warpweave.kernels.gemm.epilogue import Epilogue
from warpweave.kernels.gemm.mainloop import find_tile
from warpweave.kernels.overlap import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from warpweave.kernels.overlap import function as overlap_function
from warpweave.kernels.overlap.function import (
    all_gather_gemm_steps,
    gemm_all_reduce_steps,
    gemm_reduce_scatter_steps,
    run_local,
    run_steps,
)
from warpweave.kernels.overlap.signals import await_
from warpweave.kernels.overlap.symmetric import (
    DTYPES,
    OPERATIONS,
    Signature,
    create_file,
    local_memory,
    map_file,
)
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.tile_table import KINDS, GemmTile
from warpweave.kernels.runtime.tiles import pinned
from warpweave.parallel import symmetric
from warpweave.parallel.symmetric import symmetric_memory


def in_two_shots():
    """Run every all-reduce with rows divisible by the ranks in two shots."""
    return mock.patch.object(overlap_function, "ONE_SHOT", -1)


def two_shots(*args):
    with in_two_shots():
        return gemm_all_reduce_steps(*args)


ROUNDS = 4  # of the three operations at every shape, with no reset in between
SHAPES = ((1, 1, 1), (5, 7, 3), (33, 40, 17), (64, 32, 64))


@pytest.mark.parametrize("world", [1, 3, 4])
def test_virtual_ranks_gather_and_multiply(world):
    memories = local_memory(world, slots=64, capacity=1 << 17, polls=3)
    for S, N, K in SHAPES:
        x = torch.randn(world, S, K, dtype=torch.float64)
        b = torch.randn(world, K, N, dtype=torch.float64)
        steps = [all_gather_gemm_steps(x[r], b[r], memories[r], Epilogue()) for r in range(world)]
        for r, (y, z, whole) in enumerate(run_local(steps)):
            memories[r].check()
            assert torch.equal(whole, x.flatten(0, 1))
            assert z is None
            assert_close_f64(y, x.flatten(0, 1) @ b[r], 1e-14)
            assert torch.equal(y, gemm(whole, b[r], impl="triton"))


def test_a_shard_of_any_strides_is_gathered():
    memories = local_memory(2, slots=64, capacity=1 << 17, polls=3)
    rows, b = torch.randn(2, 7, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    wide = torch.randn(2, 14, 13, dtype=torch.float64)
    for x in (rows, rows.mT.contiguous().mT, wide[:, ::2, 3:9], wide[:, :7, ::2][..., :6]):
        steps = [all_gather_gemm_steps(x[r], b, memories[r], Epilogue()) for r in range(2)]
        for y, _, whole in run_local(steps):
            assert torch.equal(whole, x.flatten(0, 1))
            assert_close_f64(y, x.flatten(0, 1) @ b, 1e-14)


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("op", [gemm_reduce_scatter_steps, gemm_all_reduce_steps, two_shots])
def test_virtual_ranks_multiply_and_sum(world, op):
    memories = local_memory(world, slots=64, capacity=1 << 18, polls=3)
    for S, N, K in SHAPES:
        a = torch.randn(world, world * S, K, dtype=torch.float64)
        b = torch.randn(world, K, N, dtype=torch.float64)
        y = run_local([op(a[r], b[r], memories[r], Epilogue()) for r in range(world)])
        whole = torch.einsum("rmk,rkn->mn", a, b)
        for r in range(world):
            memories[r].check()
            own = whole[r * S : (r + 1) * S] if op is gemm_reduce_scatter_steps else whole
            assert_close_f64(y[r], own, 1e-14)


# ---------------------------------------------------------------- real processes


def _delay(seed: int) -> None:
    """Delay atomics of this process from now on, at random."""
    draw, atomic = random.Random(seed), interpreter_builder.create_atomic_rmw

    def late(*args):
        if draw.random() < 0.15:
            time.sleep(draw.random() * 0.01)
        return atomic(*args)

    interpreter_builder.create_atomic_rmw = late


def _run_shared(rank: int, world: int, rounds: int, folder: Path) -> list:
    symmetric.FOLDER = folder  # other jobs of this machine may use the default
    _delay(rank)
    memory = symmetric_memory(dist.group.WORLD, "cpu", slots=64, capacity=1 << 18)
    found = []
    for i in range(rounds):
        S, N, K = SHAPES[i % len(SHAPES)]
        torch.manual_seed(i)
        a = torch.randn(world, world * S, K, dtype=torch.float64)
        b = torch.randn(world, K, N, dtype=torch.float64)
        y, _, whole = all_gather_gemm(a[0, rank * S : (rank + 1) * S], b[rank], memory=memory)
        assert torch.equal(whole, a[0])
        assert_close_f64(y, a[0] @ b[rank], 1e-14)
        total = torch.einsum("rmk,rkn->mn", a, b)
        y = gemm_reduce_scatter(a[rank], b[rank], memory=memory)
        assert_close_f64(y, total[rank * S : (rank + 1) * S], 1e-14)
        with in_two_shots() if i % 2 else nullcontext():
            y = gemm_all_reduce(a[rank], b[rank], memory=memory)
        assert_close_f64(y, total, 1e-14)
        found.append(y)
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_real_ranks_over_shared_memory_however_they_are_delayed(world, tmp_path):
    results = run_ranks(world, _run_shared, world, ROUNDS, tmp_path)
    assert os.listdir(tmp_path) == []
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def _of_other_sizes(rank: int, folder: Path) -> str:
    symmetric.FOLDER = folder
    with pytest.raises(ValueError, match="cannot map their group's shared files") as caught:
        symmetric_memory(dist.group.WORLD, "cpu", slots=4, capacity=1024 * (1 + (rank == 1)))
    return str(caught.value)


def test_ranks_that_ask_for_other_sizes_are_refused_and_leave_nothing(tmp_path):
    found = run_ranks(3, _of_other_sizes, tmp_path)
    assert all("ranks [0, 1, 2] cannot map" in message for message in found)
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- epilogues, dtypes, errors


def _alone(op, *operands, **options):
    """Return an operation of a single rank."""
    (memory,) = local_memory(1, slots=64, capacity=1 << 18, polls=3)
    with guarded():
        return op(*operands, memory=memory, **options)


@pytest.mark.parametrize("K", [16, 32, 48])
def test_a_depth_may_be_any_part_of_its_tiles(K):
    tiles = {("gemm", 8, kind): GemmTile(16, 32, 32, 1, 1, 4, 1) for kind in KINDS}
    a, b = torch.randn(5, K, dtype=torch.float64), torch.randn(K, 7, dtype=torch.float64)
    with pinned(tiles):
        for op in (all_gather_gemm, gemm_reduce_scatter, gemm_all_reduce):
            found = _alone(op, a, b)
            assert_close_f64(found if isinstance(found, torch.Tensor) else found[0], a @ b, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_epilogues_are_those_of_the_fused_product(dtype, activation):
    M, N, K = 19, 24, 37
    a, b, bias = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype), torch.randn(N).to(dtype)
    width = N // 2 if activation == "swiglu" else N
    wide = torch.randn(2 * M, 3 * width).to(dtype)  # rows and columns are not adjacent
    options = {"drop": Drop(0.3, 5, 2, torch.arange(7, 7 + M)), "residual": wide[::2, ::3]}
    save = activation is not None
    plain = fused_gemm(a, b, bias, activation=activation, save_z=save, impl="triton", **options)
    y, z, whole = _alone(all_gather_gemm, a, b, bias, activation=activation, save_z=save, **options)
    assert torch.equal(whole, a)
    assert torch.equal(y, plain[0])
    assert torch.equal(z, plain[1]) if save else z is None
    if activation is None:
        for op in (gemm_reduce_scatter, gemm_all_reduce):
            assert torch.equal(_alone(op, a, b, bias, **options), plain[0])
        with in_two_shots():
            assert torch.equal(_alone(gemm_all_reduce, a, b, bias, **options), plain[0])


def test_two_shots_drop_and_add_by_the_rows_of_each_rank():
    world, M, N, K = 3, 12, 8, 5
    a, b = torch.randn(world, M, K).double(), torch.randn(world, K, N).double()
    drop, residual = Drop(0.4, 3, 1, torch.arange(M) + 5), torch.randn(M, N).double()
    epilogue = Epilogue(torch.randn(N).double(), drop=drop, residual=residual)
    found = []
    for shots, op in enumerate((gemm_all_reduce_steps, two_shots), 1):
        memories = local_memory(world, slots=64, capacity=1 << 14, polls=3)
        found += run_local([op(a[r], b[r], memories[r], epilogue) for r in range(world)])
        assert all(m.epoch.item() == shots for m in memories)
    assert all(torch.equal(y, found[0]) for y in found)


def test_an_all_reduce_takes_two_shots_where_that_saves_bytes_enough(monkeypatch):
    world, a, b = 4, torch.zeros(8, 2), torch.zeros(2, 3)
    for limit, rows, epochs in ((143, 8, 2), (144, 8, 1), (0, 7, 1)):  # saves 3 * 0.5 * 96 bytes
        monkeypatch.setattr(overlap_function, "ONE_SHOT", limit)
        memories = local_memory(world, slots=4, capacity=1 << 10, polls=3)
        run_local([gemm_all_reduce_steps(a[:rows], b, m, Epilogue()) for m in memories])
        assert all(m.epoch.item() == epochs for m in memories)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_partial_sums_travel_unrounded(dtype):
    world, a, b = 3, torch.randn(3, 9, 8).to(dtype), torch.randn(3, 8, 5).to(dtype)
    truth = torch.einsum("rmk,rkn->mn", a.double(), b.double())
    rounded = sum((a[r] @ b[r]).double() for r in range(world))
    memories = local_memory(world, slots=8, capacity=1 << 12, polls=3)
    epilogue = Epilogue(out_dtype=torch.float32)
    for op in (gemm_reduce_scatter_steps, gemm_all_reduce_steps):
        y = run_local([op(a[r], b[r], memories[r], epilogue) for r in range(world)])
        found = torch.cat(y) if op is gemm_reduce_scatter_steps else y[0]
        assert relative_error(found, truth) < 1e-6 < relative_error(rounded, truth)


def test_files_that_are_not_there_or_of_another_size_are_refused(tmp_path):
    create_file(tmp_path / "there", 512)
    assert map_file(tmp_path / "there", 512).sum() == 0
    with pytest.raises(OSError, match="there has 512 bytes, expected 256"):
        map_file(tmp_path / "there", 256)
    with pytest.raises(OSError, match="No such file"):
        map_file(tmp_path / "gone", 512)
    assert not (tmp_path / "gone").exists()


def test_where_operands_lie_does_not_change_how_ranks_cut():
    a, b = torch.zeros(128 * 64 + 1)[1:].view(128, 64), torch.zeros(64, 64)
    kinds = dict.fromkeys(KINDS, GemmTile(32, 32, 16, 1, 1, 4, 1))
    tiles = {("gemm", 4, kind): tile for kind, tile in kinds.items()}
    tiles["gemm", 4, "small"] = GemmTile(16, 32, 16, 1, 1, 4, 1)
    memories = local_memory(2, slots=64, capacity=1 << 17, polls=3)
    with pinned(tiles):
        assert find_tile(a, b, "large") != find_tile(a.clone(), b, "large")
        operands = (a, a.clone())
        steps = [all_gather_gemm_steps(a, b, m, Epilogue()) for a, m in zip(operands, memories)]
        run_local(steps)
    assert not any(m.error.any() for m in memories)


def test_an_empty_operation_is_no_epoch():
    memories = local_memory(2, slots=4, capacity=1 << 10, polls=3)
    for rows, columns in ((0, 3), (4, 0)):
        a, b = torch.zeros(rows, 2), torch.zeros(2, columns)
        y = run_local([gemm_reduce_scatter_steps(a, b, m, Epilogue()) for m in memories])
        assert y[0].shape == (rows // 2, columns)
    assert all(m.epoch.item() == 0 for m in memories)


def test_a_rank_that_never_comes_is_named():
    where = "on rank 0 of 2, operation 1 on this symmetric memory"
    gone = f"{where}: timed out after 3 polls for part 0 from rank 1; check"
    for op in (gemm_reduce_scatter, all_gather_gemm):
        memory, _ = local_memory(2, slots=4, capacity=1 << 10, polls=3)
        with pytest.raises(TimeoutError, match=f"{op.__name__} {gone}"):
            op(torch.zeros(4, 2), torch.zeros(2, 3), memory=memory)


D, F = torch.float64, torch.float32
OTHERS = {  # (op, rows, columns, dtype) of all ranks but the last, of the last, and the text
    "a longer shard": (("gather", 5, 3, D), ("gather", 20, 3, D), "all_gather_gemm [20, 3]"),
    "a shorter shard": (("gather", 20, 3, D), ("gather", 5, 3, D), "all_gather_gemm [5, 3]"),
    "another depth": (("gather", 5, 3, D), ("gather", 5, 4, D), "all_gather_gemm [5, 4]"),
    "more rows": (("scatter", 5, 3, D), ("scatter", 20, 3, D), "gemm_reduce_scatter [60, 3]"),
    "more columns": (("reduce", 5, 3, D), ("reduce", 5, 40, D), "gemm_all_reduce [5, 40]"),
    "another dtype": (("gather", 5, 3, D), ("gather", 5, 3, F), "[5, 3] of torch.float32"),
    "another sum's": (("scatter", 5, 3, F), ("scatter", 5, 3, D), "[15, 3] of torch.float64"),
    "another operation": (("gather", 5, 3, D), ("reduce", 5, 3, D), "gemm_all_reduce [5, 3]"),
}


def _different(kind: str, rank: int, world: int, memory):
    """Return the steps of a rank while the last rank is in a different operation."""
    op, rows, columns, dtype = OTHERS[kind][rank == world - 1]
    if op == "gather":
        x, b = torch.ones(rows, columns, dtype=dtype), torch.ones(columns, 2, dtype=dtype)
        return all_gather_gemm_steps(x, b, memory, Epilogue())
    a = torch.ones(rows * (world if op == "scatter" else 1), 2, dtype=dtype)
    b = torch.ones(2, columns, dtype=dtype)
    steps = gemm_reduce_scatter_steps if op == "scatter" else gemm_all_reduce_steps
    return steps(a, b, memory, Epilogue())


@pytest.mark.parametrize("kind", OTHERS)
def test_a_rank_in_another_operation_is_named(kind):
    world, told = 3, OTHERS[kind][2]
    memories = local_memory(world, slots=64, capacity=1 << 16, polls=3)
    run_local([_different(kind, rank, world, memories[rank]) for rank in range(world)])
    for rank in range(world):
        words = rf"^\w+ on rank {rank} of 3, operation 1 on this symmetric memory: rank"
        with pytest.raises(ValueError, match=words) as caught:
            memories[rank].check()
        message = str(caught.value)
        theirs, own = message.split(", but this rank runs ")
        assert "parts of" in own
        assert told in (own if rank == world - 1 else theirs)
        assert rank == world - 1 or "rank 2 runs" in theirs


def _of_other_length(rank: int) -> None:
    memory = symmetric_memory(dist.group.WORLD, "cpu", slots=64, capacity=1 << 16)
    x, b = torch.ones(5 + 15 * rank, 3), torch.ones(3, 2)
    other = rf"rank {1 - rank} runs all_gather_gemm \[{20 - 15 * rank}, 3\] of torch.float32"
    where = f"all_gather_gemm on rank {rank} of 2, operation 1 on this symmetric memory"
    with pytest.raises(ValueError, match=f"{where}: {other}"):
        all_gather_gemm(x, b, memory=memory)
    with pytest.raises(ValueError, match="interrupted all_gather_gemm; "):
        all_gather_gemm(x[:5], b, memory=memory)


def test_processes_with_shards_of_different_length_tell_each_other():
    run_ranks(2, _of_other_length, timeout=120.0)


@pytest.mark.parametrize("name", [*OPERATIONS, "what nobody knows"])
def test_a_signature_is_read_as_it_was_written(name):
    known = name if name in OPERATIONS else "another operation"
    sizes = (1, 1, (16, 1)), (2**20 - 1, 128, (256, 128)), (7, 2**19, (64, 32))
    for (rows, columns, part), dtype in itertools.product(sizes, DTYPES):
        signature = Signature(name, rows, columns, dtype, part)
        word = signature.word()
        assert 0 < word < 2**63
        longer = signature._replace(rows=rows + 2**20, columns=columns + 2**22)
        assert longer.word() == word  # sizes are modulo 2^20
        assert Signature.of(word) == signature._replace(name=known)


def test_after_one_wait_in_vain_none_is_long(monkeypatch):
    memory, _ = local_memory(2, slots=64, capacity=1 << 16, polls=100)
    looks, atomic = [], interpreter_builder.create_atomic_rmw
    monkeypatch.setattr(
        interpreter_builder, "create_atomic_rmw", lambda *args: looks.append(0) or atomic(*args)
    )
    a, b, words = torch.zeros(66, 2), torch.zeros(2, 33), "timed out after 100 polls for part 0 "
    with pytest.raises(TimeoutError, match=words + "from rank 1; check"):
        gemm_reduce_scatter(a, b, memory=memory)
    tiles = 3 * 2  # at most, with 16 rows and 32 columns
    waits, published = 2 * 4 * tiles, 2 * tiles  # quarters of a tile, from two ranks each
    assert 100 < len(looks) <= 101 + waits + published


def test_only_an_operation_that_has_begun_is_remembered_as_ended_midway():
    memory, _ = local_memory(2, slots=4, capacity=1 << 10, polls=3)
    a, b = torch.zeros(4, 2), torch.zeros(2, 3)
    for op in (gemm_reduce_scatter, gemm_all_reduce, all_gather_gemm):
        check(partial(op, a, b.t(), memory=memory), "need a")
        words = r"needs \d+ parts and .* this memory has 4 parts and 1024 bytes"
        check(partial(op, torch.zeros(256, 2), torch.zeros(2, 64), memory=memory), words)
    assert memory.left == []
    with pytest.raises(TimeoutError):
        gemm_all_reduce(a, b, memory=memory)
    assert memory.left == ["gemm_all_reduce"]
    memory.leave("another one")
    first = "gemm_reduce_scatter on rank 0 of 2: an error interrupted gemm_all_reduce;"
    check(lambda: gemm_reduce_scatter(a, b, memory=memory), first)


def test_operation_calls_leave_on_an_error_after_its_first_launch():
    def steps(launches: int, error: BaseException | None = None):
        for _ in range(launches):
            yield
        if error is not None:
            raise error
        return launches

    errors = TimeoutError("late"), ValueError("another"), KeyboardInterrupt()
    for error, launches in itertools.product(errors, (0, 1, 2)):
        memory = mock.Mock()
        with pytest.raises(type(error)):
            run_steps("it", steps(launches, error), memory)
        assert memory.mock_calls == [mock.call.leave("it")] * (launches > 0)
    for error in errors[:2]:
        memory = mock.Mock(**{"settle.side_effect": error})
        with pytest.raises(type(error)):
            run_steps("it", steps(2), memory)
        assert memory.mock_calls == [mock.call.settle(), mock.call.leave("it")]
    for launches in (0, 1, 2):
        memory = mock.Mock()
        assert run_steps("it", steps(launches), memory) == launches
        assert memory.mock_calls == [mock.call.settle()]


def test_a_segment_is_a_new_file_that_its_owner_alone_may_open(tmp_path):
    create_file(tmp_path / "there", 512)
    assert (tmp_path / "there").stat().st_mode & 0o777 == 0o600
    map_file(tmp_path / "there", 512)[:] = 7
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "there", 512)
    assert map_file(tmp_path / "there", 512).unique().tolist() == [7]


def test_virtual_ranks_take_turns_and_results_are_in_rank_order():
    turns = []

    def steps(rank: int, many: int):
        for _ in range(many):
            turns.append(rank)
            yield
        return f"of {rank}"

    assert run_local([steps(0, 3), steps(1, 0), steps(2, 1), steps(3, 2)]) == [
        "of 0", "of 1", "of 2", "of 3",
    ]  # fmt: skip
    assert turns == [0, 2, 3, 0, 3, 0]
    assert run_local([]) == []


def test_memory_fits_up_to_its_last_part_and_byte_and_only_on_its_device():
    _, memory = local_memory(2, slots=7, capacity=1000)
    assert memory.capacity == 1024  # rounded to whole alignments
    here = torch.device("cpu")
    for slots, size in ((7, 1024), (0, 0), (7, 0), (0, 1024)):
        assert memory.fitting("it", here, slots, size) is memory
    for slots, size in ((8, 1024), (7, 1025), (8, 0), (0, 1025)):
        needs = f"it on rank 1 of 2 needs {slots} parts and {size} bytes of .*, "
        words = f"{needs}but this memory has 7 parts and 1024 bytes$"
        check(partial(memory.fitting, "it", here, slots, size), words)
    there = SimpleNamespace(device=torch.device("cuda:0"))
    far = dataclasses.replace(memory, epoch=there)
    assert far.fitting("it", torch.device("cuda:0"), 7, 1024) is far
    for device in ("cuda:1", "cpu"):
        words = f"it: .* cuda:0, but the tensors are on {device}$"
        check(partial(far.fitting, "it", torch.device(device), 7, 1024), words)


def test_a_wait_in_vain_and_another_operation_are_reported_with_all_numbers():
    memory = local_memory(4, slots=4, capacity=1 << 10, polls=9)[2]
    memory.check()
    own = Signature("gemm_reduce_scatter", 20, 3, torch.float64, (16, 32))
    other = Signature("qkv_rope", 7, 5, torch.bfloat16, (64, 1))
    own_text = "gemm_reduce_scatter [20, 3] of torch.float64, parts of 16 x 32"
    other_text = "qkv_rope [7, 5] of torch.bfloat16, parts of 64 x 1"
    for epoch in (1, 2, 11):
        memory.error.copy_(torch.tensor([epoch, 3, 12, own.word(), own.word()]))
        where = f"gemm_reduce_scatter on rank 2 of 4, operation {epoch} on this symmetric memory"
        with pytest.raises(TimeoutError) as caught:
            memory.check()
        late = "timed out after 9 polls for part 12 from rank 3"
        assert str(caught.value) == f"{where}: {late}; check whether that rank failed or is late"
        memory.error[3] = other.word()
        with pytest.raises(ValueError, match="this rank runs") as caught:
            memory.settle()
        runs = f"rank 3 runs {other_text}, but this rank runs {own_text}"
        assert str(caught.value) == f"{where}: {runs}"


@triton.jit
def _wait(flag_ptr, error_ptr, POLLS: tl.constexpr):
    await_(flag_ptr, 3, error_ptr, 7, 5, 9, POLLS, "gpu")


@pytest.mark.parametrize(
    ("polls", "comes"), [(3, 1), (3, 2), (3, 4), (3, 5), (1, 2), (1, 3), (0, 8)]
)
def test_a_flag_that_comes_at_the_last_poll_has_come(monkeypatch, polls, comes):
    flag, error = torch.zeros(1, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    looks, atomic = [], interpreter_builder.create_atomic_rmw

    def look(*args):
        looks.append(0)
        flag.fill_(3 if len(looks) >= comes else 2)  # the previous epoch has not reached it
        return atomic(*args)

    monkeypatch.setattr(interpreter_builder, "create_atomic_rmw", look)
    _wait[(1,)](flag, error, polls)
    late = 0 < polls < comes - 1
    assert len(looks) == (1 + polls if late else comes)
    assert error.tolist() == ([3, 7, 5, 9, 9] if late else [0] * 5)
    if late:  # the first report is kept
        looks.clear()
        error.copy_(torch.tensor([2, 1, 0, 4, 8]))
        _wait[(1,)](flag, error, polls)
        assert len(looks) == 1
        assert error.tolist() == [2, 1, 0, 4, 8]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_operation_asks_for_its_parts_and_bytes_and_no_more(dtype):
    world, element = 3, dtype.itemsize
    S, N, K, term = 49, 70, 20, max(element, 4)  # terms of a sum are at least fp32
    a, b = torch.ones(world * S, K, dtype=dtype), torch.ones(K, N, dtype=dtype)
    memory = mock.Mock(rank=1, world=world, **{"fitting.side_effect": InterruptedError})
    kinds = dict.fromkeys(KINDS, GemmTile(16, 32, 16, 1, 1, 4, 1))
    with pinned({("gemm", element, kind): tile for kind, tile in kinds.items()}):
        for steps, x, slots, size in (
            (all_gather_gemm_steps, a[:S], 4, S * K * element),  # ceil(49 / 16) parts of rows
            (gemm_reduce_scatter_steps, a, 4 * 3, world * S * N * term),  # ceil(70 / 32) of columns
            (gemm_all_reduce_steps, a, 10 * 3, world * S * N * term),
            (two_shots, a, 4 * 3, world * S * N * term),
        ):
            with pytest.raises(InterruptedError):
                next(steps(x, b, memory, Epilogue()))
            whole = gemm_all_reduce_steps if steps is two_shots else steps
            asked = whole.__name__.removesuffix("_steps"), torch.device("cpu"), slots, size
            assert memory.fitting.call_args.args == asked
