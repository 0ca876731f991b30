"""The rank pool itself: results in order, failures named, no process left by a killed parent."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import run_ranks
from triton.runtime import interpreter


def _sum(rank: int, value: float) -> float:
    x = torch.tensor([value * (rank + 1)])
    dist.all_reduce(x)
    return x.item()


def _fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("planted on rank one")
    dist.barrier()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_back_in_rank_order(world: int) -> None:
    assert run_ranks(world, _sum, 2.0) == [world * (world + 1.0)] * world


def _interpreter(rank: int) -> str:
    return interpreter._patch_lang.__module__


def test_ranks_interpret_kernels_as_quickly_as_this_process() -> None:
    assert run_ranks(1, _interpreter) == [interpreter._patch_lang.__module__]
    assert _interpreter(0) == "quick_interpreter"


def test_the_failing_rank_is_named() -> None:
    with pytest.raises(AssertionError, match="planted on rank one"):
        run_ranks(2, _fail)


_child = ranks._child


def _dropped(rank: int, world: int, store: str, timeout: float, fn, args: tuple, pipe) -> None:
    """Act as a rank that gloo does not connect, as often as there are files in a folder."""
    left = sorted(Path(args[0]).iterdir())
    if rank == 0 and left:
        left[0].unlink()
        dist.init_process_group = mock.Mock(side_effect=RuntimeError("Gloo connectFullMesh failed"))
    _child(rank, world, store, timeout, fn, args, pipe)


def _one(rank: int, folder: str) -> float:
    return _sum(rank, 1.0)


@pytest.mark.parametrize("times", [1, 3])
def test_ranks_that_gloo_did_not_connect_start_anew(times: int, tmp_path) -> None:
    for i in range(times):
        (tmp_path / str(i)).touch()
    with mock.patch.object(ranks, "_child", _dropped):
        if times < 3:
            assert run_ranks(2, _one, str(tmp_path)) == [3.0, 3.0]
            return
        with pytest.raises(ranks.NotMetError, match="connectFullMesh failed"):
            run_ranks(2, _one, str(tmp_path))


def _stay(rank: int, fifo: str) -> None:
    with open(fifo, "wb", buffering=0) as held:
        held.write(b"%d " % os.getpid())
        time.sleep(600)


def test_ranks_end_with_a_killed_parent(tmp_path) -> None:
    """Each holds a pipe open; its end is read when the last of them is gone."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    code = f"import ranks, test_ranks; ranks.run_ranks(2, test_ranks._stay, {fifo!r})"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-P", "-c", code], env=env)
    said = b""
    with open(fifo, "rb", buffering=0) as pipe:
        try:
            while said.count(b" ") < 2:
                got = pipe.read(64)
                assert got, "the ranks ended by themselves"
                said += got
            parent.kill()
            parent.wait()
            assert select.select([pipe], [], [], 60.0)[0], "the ranks go on"
            assert pipe.read(64) == b""
        finally:
            parent.kill()
            parent.wait()
            for pid in said.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
