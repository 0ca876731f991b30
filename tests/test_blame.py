"""The rank at fault if nothing raises: ranks that end as NCCL's watchdog ends them, and the
contents of torch's flight recorder."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from warpweave.launch import ranks as launch
from warpweave.launch.blame import End, behind, rank_at_fault, recorded
from warpweave.launch.processes import DUMPS, told_ranks
from warpweave.parallel.mesh import Mesh

ABORTED = -signal.SIGABRT
WORDS = "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=SEND)"


def _watched(port: int) -> None:
    """Hang on rank 1. The watchdogs of ranks 0 and 2 print, have the recorder write, and abort."""
    import faulthandler

    faulthandler.disable()  # the test's own handler
    rank = int(os.environ["RANK"])
    assert "TORCH_CPP_LOG_LEVEL" not in os.environ
    if rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    store = dist.PrefixStore("attempt_0", dist.TCPStore("127.0.0.1", port, is_master=False))
    store.set(f"ready/{rank}", "")
    store.wait(["ready/0", "ready/2"])
    store.set("beat/1", json.dumps([7, "saving", time.time()]))
    print(WORDS.format(rank), file=sys.stderr, flush=True)
    Path(f"{os.environ[DUMPS]}{rank}").write_bytes(pickle.dumps({"entries": []}))
    os.kill(os.getpid(), signal.SIGABRT)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at children without collecting them")
def test_after_a_watchdog_abort_the_hung_rank_is_named_and_dumps_are_kept(
    monkeypatch, capfd, tmp_path
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(launch._LINGER, "nccl", 1.0)
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    with pytest.raises(SystemExit) as end:
        launch.launch(_watched, (), Mesh(tp=3), backend="nccl")
    err = capfd.readouterr().err
    (said,) = [line for line in err.splitlines() if line.startswith("warpweave: ")]
    assert end.value.code == 1
    assert WORDS.format(0) in err
    assert WORDS.format(2) in err
    found = re.fullmatch(
        r"warpweave: ranks 0, 2 were killed by SIGABRT, probably from NCCL's watchdog \(see its "
        r"messages above\); not aborted: rank 1 \(tp=1\), last seen at step 7 \(saving\), "
        r"(\d+\.\d) s ago", said
    )  # fmt: skip
    assert found, said
    assert float(found[1]) < 20  # it ignores SIGTERM, for which torch's launcher waits 30 s
    assert len([*tmp_path.rglob("flight_recorder_rank_*")]) == 2


def _store(**beats: list) -> dist.Store:
    store = dist.HashStore()
    store.set("verdict", "what the ranks found")
    for rank, beat in beats.items():
        store.set(f"beat/{rank[1:]}", json.dumps([*beat, time.time()]))
    return store


WATCHDOG = "killed by SIGABRT, probably from NCCL's watchdog (see its messages above)"


@pytest.mark.parametrize(
    ("ends", "dumps", "said"),
    [
        # A rank that died by itself is the cause, also if lower ranks end after it.
        ([(2, -9), (0, ABORTED), (1, ABORTED)], {}, "rank 2 (tp=2) was killed by SIGKILL before"),
        ([(1, 3), (0, ABORTED)], {}, "what the ranks found"),
        # Under gloo an abort comes from the rank itself.
        ([(1, ABORTED), (0, 1)], None, "rank 1 (tp=1) was killed by SIGABRT before its first step"),
        # The launcher's signals are no evidence against those that outlived the watchdog's.
        ([(1, ABORTED), (0, -15), (2, -9)], {}, f"rank 1 (tp=1) was {WATCHDOG}; not aborted: "
         "rank 0 (tp=0) before its first step; not aborted: rank 2 (tp=2) before"),
        ([(1, 134), (2, 134)], {}, f"ranks 1, 2 were {WATCHDOG}; not aborted: rank 0 (tp=0)"),
        ([(2, ABORTED), (0, ABORTED), (1, ABORTED)], {},
         f"all ranks were {WATCHDOG}; cause unknown; rank 2 (tp=2), the first to abort, ended "
         "before its first"),
    ],
)  # fmt: skip
def test_evidence_names_a_rank_and_its_number_does_not(ends, dumps, said):
    line = rank_at_fault([End(*end) for end in ends], Mesh(tp=3), _store(), dumps)
    assert line.startswith(said)


def test_ended_ranks_are_listed_in_order_with_where_the_first_was_last_seen():
    """The order in which they ended does not matter."""
    store = _store(r0=[8, "saving"], r1=[9, "evaluation"], r2=[7, "training step"])
    line = rank_at_fault([End(r, ABORTED) for r in (3, 1, 2)], Mesh(tp=4), store, {})
    assert line.startswith(f"ranks 1, 2, 3 were {WATCHDOG}; not aborted: rank 0 (tp=0), last")
    line = rank_at_fault([End(r, ABORTED) for r in (2, 0, 1)], Mesh(tp=3), store, {})
    assert (
        "; cause unknown; rank 2 (tp=2), the first to abort, ended, last seen at step 7 (training "
        "step), " in line
    )


def _dump(groups: dict[str, str], *entries: tuple[str, int, str, bool]) -> bytes:
    """Return what a flight recorder wrote: of each entry the group, number, name, and if P2P."""
    rows = [
        {"process_group": (group, ""), "collective_seq_id": number, "profiling_name": name,
         "is_p2p": alone}
        for group, number, name, alone in entries
    ]  # fmt: skip
    config = {name: {"name": name, "ranks": ranks} for name, ranks in groups.items()}
    return pickle.dumps({"pg_config": config, "entries": rows}, protocol=2)


def test_the_first_collective_that_a_rank_left_out_is_named(tmp_path):
    """Of two groups the one recorded first counts, by the largest number of each rank."""

    def dump(*entries: tuple[str, int]) -> bytes:
        rows = ((name, number, f"{name}{number}", False) for name, number in entries)
        return _dump({"7": "[0, 1]", "8": "[0, 2, 10, 1]"}, *rows)

    dumps = {0: dump(("7", 2), ("7", 1), ("8", 1)), 1: dump(("7", 1))}
    dumps |= {2: dump(("8", 1), ("8", 2)), 10: dump()}
    found = behind(dumps)
    assert found == {
        0: "did not join 82 (number 2 of group 8)",
        1: "did not join 72 (number 2 of group 7)",  # nothing of group 8
        10: "did not join 81 (number 1 of group 8)",
    }
    for rank, data in dumps.items():
        (tmp_path / f"r{rank:02}").write_bytes(data)
    files = {rank: tmp_path / f"r{rank:02}" for rank in (2, 0, 1)}
    line = rank_at_fault([End(0, ABORTED)], Mesh(tp=3), _store(), files)
    said = line.split("; ")
    assert said[0] == f"rank 0 (tp=0) was {WATCHDOG}"
    assert said[1].startswith("rank 0 (tp=0) did not join 82 (number 2 of group 8)")
    assert said[2] == (
        "rank 1 (tp=1) did not join 72 (number 2 of group 7) according to the flight recorder "
        f"({tmp_path}/r00 and others)"
    )
    assert ["not aborted: " in words for words in said] == [False] * 3 + [True] * 2


def _recorded(rank: int) -> bytes:
    """Return a rank's flight recorder after a run in which rank 1 of 3 skips the second collective
    of a group, for which nobody waits."""
    import torch._C._distributed_c10d as c10d

    group = dist.new_group([0, 1, 2], backend="gloo")
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x)
    if rank != 1:
        dist.all_reduce(x, group=group, async_op=True)
    return c10d._dump_fr_trace(True, False, False)


def test_the_flight_recorder_names_the_rank_that_did_not_join(tmp_path):
    dumps = dict(enumerate(run_ranks(3, _recorded)))
    assert behind({rank: dumps[rank] for rank in (0, 2)}) == {}
    (rank, what), = behind(dumps).items()  # fmt: skip
    assert rank == 1
    assert re.fullmatch(r"did not join gloo:all_reduce \(number \d+ of group \d+\)", what)
    for rank, data in dumps.items():
        (tmp_path / f"r{rank}").write_bytes(data)
    files = recorded(f"{tmp_path}/r", 4, 0.0)
    ends = [End(rank, ABORTED) for rank in range(3)]
    line = rank_at_fault(ends, Mesh(tp=3), _store(), files)
    assert re.fullmatch(
        rf"all ranks were {re.escape(WATCHDOG)}; rank 1 \(tp=1\) did not join gloo:all_reduce "
        r"\(number \d+ of group \d+\) according to the flight recorder "
        rf"\({tmp_path}/r0 and others\)", line
    )  # fmt: skip
    assert recorded(f"{tmp_path}/r", 4, time.time() + 9) == {}  # ignore those of an earlier run
    for rank, seconds in enumerate((6, 7, 8)):
        os.utime(tmp_path / f"r{rank}", (9, seconds))
    assert recorded(f"{tmp_path}/r", 2, 7.0) == {1: tmp_path / "r1"}
    assert [*recorded(f"{tmp_path}/r", 4, 6.0)] == [0, 1, 2]
    assert recorded(None, 4, 0.0) is None


def test_member_that_never_joined_is_behind_and_p2p_messages_do_not_count():
    """gloo's recorder lacks these entries: members of groups and point-to-point messages."""

    def dump(*entries: tuple[int, str, bool]) -> bytes:
        return _dump({"5": "[0, 1]"}, *(("5", *entry) for entry in entries))

    joined = dump((1, "nccl:all_gather", False))
    found = behind({0: joined, 1: dump(), 2: dump()})
    assert found == {1: "did not join nccl:all_gather (number 1 of group 5)"}
    assert behind({0: joined, 1: joined[:-1] + dump((9, "nccl:send 1->0", True))[2:]}) == {}
    assert behind({0: joined, 1: dump()[:-9]}) == {}  # cut short: no evidence


def test_the_watchdog_speaks_and_gloo_does_not(monkeypatch):
    for name in (DUMPS, "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    assert told_ranks("gloo", "/f")["TORCH_CPP_LOG_LEVEL"] == "FATAL"
    nccl = told_ranks("nccl", "/f")
    assert "TORCH_CPP_LOG_LEVEL" not in nccl
    assert (nccl[DUMPS], nccl["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("/f/flight_recorder_rank_", "1")
    monkeypatch.setenv(DUMPS, "/mine_")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert told_ranks("gloo", "/f")["TORCH_CPP_LOG_LEVEL"] == "INFO"
    assert told_ranks("nccl", "/f")[DUMPS] == "/mine_"
