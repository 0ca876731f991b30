"""GPUs that cannot be used: a one-line error for each reason, and no fallback to the CPU."""

from __future__ import annotations

import os
import re
import sys

import pytest
import torch
from refused import check
from support.gpus import pretend_gpus

from warpweave.launch import devices as gpus
from warpweave.launch.devices import choose_backend, refusal, take_device
from warpweave.parallel.mesh import Mesh

AGAIN = "or pass --device cpu"
CONNECTIONS, ORDER = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"


@pytest.mark.parametrize(
    ("there", "ranks", "options", "found"),
    [
        (0, 1, {}, "gloo"),
        (0, 8, {}, "gloo"),
        (0, 1, {"asked": "nccl"}, f"torch {torch.__version__} sees no GPU"),
        (8, 8, {}, "nccl"),
        (8, 8, {"asked": "gloo"}, "gloo"),
        (9, 8, {"launched": False}, "nccl"),
        (7, 8, {}, f"7 GPU(s) are too few for 8 ranks; start one rank per GPU, {AGAIN}"),
        (7, 8, {"launched": False}, "7 GPU(s) are too few for 8 ranks"),
        (1, 8, {}, "1 GPU(s) are too few for 8 ranks"),
        (1, 8, {"launched": False}, "nccl"),  # each may see a different one
        (7, 8, {"asked": "nccl"}, "7 GPU(s) are too few for 8 ranks"),
        (7, 8, {"asked": "gloo"}, "gloo"),
    ],
)
def test_ranks_compute_on_gpus_or_are_refused_and_on_the_cpu_if_asked(
    monkeypatch, tmp_path, there, ranks, options, found
):
    pretend_gpus(monkeypatch, there)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "none")
    if found in ("nccl", "gloo"):
        assert choose_backend(ranks, **options) == found
    else:
        check(lambda: choose_backend(ranks, **options), re.escape(found))


def test_torch_that_sees_no_gpu_on_a_gpu_machine_is_an_error(monkeypatch, tmp_path):
    pretend_gpus(monkeypatch, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    line = f"NVIDIA's driver, but torch {torch.__version__} sees no GPU; install a torch build for"
    check(lambda: choose_backend(1), re.escape(f"{line} the driver's CUDA version, {AGAIN}"))
    assert choose_backend(1, "gloo") == "gloo"
    for hidden in ("", "-1"):  # by the user
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert choose_backend(1) == "gloo"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    check(lambda: choose_backend(1), re.escape(line))


def test_a_torch_without_nccl_is_named_where_ranks_are_several(monkeypatch):
    pretend_gpus(monkeypatch, 2, nccl=False)
    assert choose_backend(1) == "nccl"  # for a single rank
    check(lambda: choose_backend(2), f"has no NCCL, which 2 ranks on GPUs need; .*{AGAIN}")


def _rank(monkeypatch, local: int, here: int, world: int | None = None) -> None:
    """Set the environment of rank `local` of those `here`, on one machine or
    several, of `world` ranks."""
    sizes = (("WORLD_SIZE", world or here), ("LOCAL_WORLD_SIZE", here), ("LOCAL_RANK", local))
    for name, value in sizes:
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("count", "index"), [(1, 0), (4, 2)])
def test_a_rank_takes_the_only_gpu_that_it_is_shown_or_that_of_its_number(
    monkeypatch, count, index
):
    chosen = pretend_gpus(monkeypatch, count)
    _rank(monkeypatch, 2, 3)
    backend, device, own = take_device(None, launched=False)
    assert (backend, own) == ("nccl", {"name": "H", "uuid": str(index)})
    assert chosen == [device] == [torch.device("cuda", index)]


@pytest.mark.parametrize(
    ("world", "driver", "given", "connections", "order"),
    [
        (2, 12080, {}, "32", "1"),
        (2, 12030, {}, "32", "1"),
        (2, 12029, {}, "32", None),  # would serialize the operations
        (2, 12080, {CONNECTIONS: "1", ORDER: "0"}, "1", "0"),
        (1, 12080, {}, None, None),
    ],
)  # fmt: skip
def test_cuda_and_nccl_are_told_of_many_communicators_before_they_start(
    monkeypatch, world, driver, given, connections, order
):
    pretend_gpus(monkeypatch, 2, driver=driver)
    _rank(monkeypatch, 0, world)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = []
    started = lambda _: seen.append((os.environ.get(CONNECTIONS), os.environ.get(ORDER)))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_device", started)
    take_device(None, launched=False)
    assert seen == [(connections, order)]


@pytest.mark.parametrize("here", [1, 3])
def test_ranks_on_other_machines_need_queue_connections_but_no_local_gpus(monkeypatch, here):
    pretend_gpus(monkeypatch, here, driver=12080)
    _rank(monkeypatch, here - 1, here, 2 * here)
    backend, device, _ = take_device(None, launched=False)
    assert (backend, device) == ("nccl", torch.device("cuda", here - 1))
    assert (os.environ.get(CONNECTIONS), os.environ.get(ORDER)) == ("32", "1")


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(8, 1, 8), (8, 3, 2), (8, 8, 1), (2, 5, 1)]
)
def test_ranks_share_the_cores_that_they_may_use_and_have_one_each(
    monkeypatch, cores, processes, threads
):
    given: list[int] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(cores)}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    gpus.share_cores(processes)
    assert given == [threads]


def test_a_gpu_that_others_fill_is_named_with_its_rank(monkeypatch):
    pretend_gpus(monkeypatch, 2, problem="CUDA error: out of memory\nSearch for `cudaError`")
    _rank(monkeypatch, 1, 2)
    _, _, own = take_device(None, launched=False)
    found = refusal([{"name": "H", "uuid": "0"}, own], Mesh(dp=2))
    assert found == "rank 1 (dp=1) cannot use cuda:1: CUDA error: out of memory"


def _gpus(*names: str) -> list[dict]:
    return [{"name": name, "uuid": f"u{i}"} for i, name in enumerate(names)]


SLICE = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
ALIKE = "all ranks must compute on the same kind of device, but"


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        (_gpus("H", "H", "H"), None),
        ([{"name": "cpu"}] * 3, None),
        (_gpus(SLICE), None),  # alone it is a GPU like any other
        (_gpus(SLICE, SLICE),
         f"rank 0 (dp=0) has {SLICE}, a MIG slice, which NCCL does not support"),
        (_gpus("H", "H", "A"), f"{ALIKE} rank 0 (dp=0) has H, rank 2 (dp=2) has A"),
        (_gpus("H", "A", "B", "A", "H"),
         f"{ALIKE} rank 0 (dp=0) has H, rank 1 (dp=1) has A, rank 2 (dp=2) has B"),
        ([*_gpus("H"), {"name": "cpu"}], f"{ALIKE} rank 0 (dp=0) has H, rank 1 (dp=1) has cpu"),
        ([*_gpus("H", "H"), {"name": "H", "uuid": "u1"}],
         f"ranks 1, 2 share one GPU (u1), but need one each; start one rank per GPU, {AGAIN}"),
        ([*_gpus("H", "H"), *_gpus("H"), *_gpus("H", "H")],
         f"ranks 0, 2, 3 share one GPU (u0), but need one each; start one rank per GPU, {AGAIN}"),
    ],
)  # fmt: skip
def test_why_ranks_cannot_compute_together_is_said_in_one_line(devices, line):
    assert refusal(devices, Mesh(dp=len(devices))) == line
