"""The signals between ranks have no race and no deadlock in any order;
planted faults are detected."""

import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interleavings import Recorder, explore, races
from triton.runtime.interpreter import interpreter_builder

from warpweave.kernels.devices import CTAS
from warpweave.kernels.gemm.epilogue import Epilogue
from warpweave.kernels.overlap import gather, scatter
from warpweave.kernels.overlap.symmetric import local_memory
from warpweave.kernels.runtime.tile_table import KINDS, GemmTile
from warpweave.kernels.runtime.tiles import pinned

TILE = GemmTile(m=16, n=32, k=16, group=1, residents=1, warps=4, stages=1)
TILES = {("gemm", 8, kind): TILE for kind in KINDS}
ONE_TILE, MORE = (2, 3, 2), (17, 33, 2)


def _gather(module, world, memory, S, N, K):
    x, b = torch.randn(S, K, dtype=torch.float64), torch.randn(K, N, dtype=torch.float64)
    return module.gather_steps(x, b, memory, Epilogue()), (x, b)


def _scatter(module, owners, memory, S, N, K):
    a, b = torch.randn(owners * S, K, dtype=torch.float64), torch.randn(K, N, dtype=torch.float64)
    return module.scatter_steps(a, b, memory, Epilogue(), owners=owners, name="sums"), (a, b)


def _reduce(module, world, memory, S, N, K):
    return _scatter(module, 1, memory, S, N, K)


OPS = {"gather": (_gather, gather), "scatter": (_scatter, scatter), "reduce": (_reduce, scatter)}


def record(names, world, modules=None, sizes=ONE_TILE, *, beside=4, **options):
    """Record the programs of consecutive operations on every stream of `world` ranks, which may
    wait on `beside` multiprocessors."""
    many = CTAS + beside
    with pytest.MonkeyPatch.context() as patch:
        for module in (gather, *(modules or {}).values()):
            patch.setattr(module, "processors", lambda device: many, raising=False)
        return _recorded(names, world, modules, sizes, **options)


def _recorded(names, world, modules, sizes, streams=1, between=None):
    memories = local_memory(world, slots=4, capacity=1 << 14, polls=2)
    epochs = [[torch.zeros_like(m.epoch) for m in memories] for _ in range(streams)]
    recorder, kept = Recorder(apart=[m.error for m in memories]), []
    for name in names:
        build, module = OPS[name]
        module = (modules or {}).get(name, module)
        for stream in range(streams):
            own = [replace(m, epoch=e) for m, e in zip(memories, epochs[stream])]
            built = [build(module, world, memory, *sizes) for memory in own]
            kept.append(built)  # reused memory would look like a conflict
            left = {rank: steps for rank, (steps, _) in enumerate(built)}
            while left:
                for rank, step in [*left.items()]:
                    recorder.launch(rank, stream, own[rank].epoch.item() + 1)
                    try:
                        with recorder.recording(), pinned(TILES):
                            next(step)
                    except StopIteration as end:
                        kept.append(end.value)
                        del left[rank]
            if between is not None:
                between(own)
    return recorder.programs


@pytest.mark.parametrize(
    ("names", "world", "residents"),
    [
        *(((op,) * 3, 2, 9 if op == "gather" else 2) for op in OPS),
        (("gather", "scatter", "gather", "reduce"), 2, 2),
        *(((op,) * 3, 3, 1) for op in OPS),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_no_order_of_events_is_wrong(names, world, residents):
    programs = record(names, world)
    assert races(programs) == []
    found = explore(programs, residents=residents)
    print(names, world, residents, found.states)
    assert found.problems == []
    assert found.states > 100


@pytest.mark.parametrize("beside", [3, 5])
def test_programs_that_wait_leave_room_for_messages(beside):
    waiting = Counter(
        (op, p.stream, p.launch)
        for op in OPS
        for p in record([op], 2, beside=beside, sizes=MORE)
        if any(event.kind == "await" for event in p.events)
    )
    assert max(waiting.values()) == beside


@pytest.mark.parametrize("op", OPS)
def test_every_part_of_a_shard_is_waited_for_where_there_are_several(op):
    assert races(record([op], 2, sizes=MORE)) == []


# ---------------------------------------------------------------- faults


ROOM = ("signals", "gather", "scatter")  # a file imports from earlier ones


def planted(folder, *edits):
    """Load gather and scatter as new modules, with edits (file, old, new) of the room's files."""
    texts = {name: (Path(gather.__file__).parent / f"{name}.py").read_text() for name in ROOM}
    for file, old, new in edits:
        assert texts[file].count(old) >= 1, f"the plant is out of date: {old!r} in {file}"
        texts[file] = texts[file].replace(old, new)
    made = {}
    for name, text in texts.items():
        path = folder / f"planted_{name}.py"
        for other in ROOM:
            text = text.replace(
                f"warpweave.kernels.overlap.{other} import", f"planted_{other} import"
            )
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"planted_{name}", path)
        made[name] = importlib.util.module_from_spec(spec)
        sys.modules[f"planted_{name}"] = made[name]
        spec.loader.exec_module(made[name])
    return {name: made[module.__name__.split(".")[-1]] for name, (_, module) in OPS.items()}


@pytest.fixture
def clean_modules():
    """Remove a plant's imports."""
    yield
    for name in ROOM:
        sys.modules.pop(f"planted_{name}", None)


AWAIT = '    await_(flag, epoch, error_ptr, source, part, signature, POLLS, "sys")\n'
STORE = "            tl.store(there + tl.cast(rank, tl.int64) * S * N + at, y, live)\n"
BULK = """            block = tl.make_tensor_descriptor(
                there + tl.cast(rank, tl.int64) * S * N, [S, N], [N, 1], [BLOCK_M, BLOCK_N]
            )
            block.store([row.to(tl.int32), col.to(tl.int32)], y)
"""
BARRIER = "    tl.debug_barrier()\n    tl.atomic_xchg"
PUBLISH = '            publish(flag_of(addresses_ptr, owner, rank, slot, slots), epoch, "sys")\n'
SIGN = """            if SIGNED:
                word = signature_of(addresses_ptr, owner, rank, epoch, slot, slots, world)
                tl.store(word, signature)
"""
FAULTS = {
    "a wait removed": ("gather", "signals", AWAIT, ""),
    "no barrier before a release": ("gather", "signals", BARRIER, "    tl.atomic_xchg"),
    "a relaxed release": ("scatter", "signals", 'sem="release"', 'sem="relaxed"'),
    "a relaxed acquire": ("reduce", "signals", 'sem="acquire"', 'sem="relaxed"'),
    "no barrier after an acquire": (
        "scatter", "signals", "signature)\n    tl.debug_barrier()", "signature)",
    ),
    "the scope of one device": ("reduce", "signals", 'POLLS, "sys")', 'POLLS, "gpu")'),
    "no parity": ("scatter", "signals", "(epoch % 2)", "(epoch * 0)"),
    "one flag for all tiles": ("scatter", "signals", "slots + slot", "slots + slot * 0"),
    "an asynchronous store published": ("scatter", "scatter", STORE, BULK),
    "one signature for all epochs": ("gather", "signals", "(2 + epoch % 2)", "(2 + epoch * 0)"),
    "tiles that await no shard": ("gather", "gather", "if source != rank:", "if source < 0:"),
    "a signature after its flag": ("scatter", "scatter", SIGN + PUBLISH, PUBLISH + SIGN),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_clocks_and_by_search(name, tmp_path, clean_modules):
    op, *edit = FAULTS[name]
    sizes = MORE if "tiles" in name else (2, 4, 2)
    programs = record((op,) * 3, 2, planted(tmp_path, edit), sizes)
    assert races(programs)
    assert any("race" in problem for problem in explore(programs, residents=2).problems)


@pytest.mark.parametrize("op", OPS)
def test_two_streams_need_two_memories(op):
    programs = record((op,) * 2, 2, streams=2)
    assert races(programs)
    assert any("race" in problem for problem in explore(programs, residents=2).problems)


@pytest.mark.parametrize("op", OPS)
def test_an_epoch_that_a_replay_repeats_is_found(op):
    programs = record((op,) * 3, 2, between=lambda memories: [m.epoch.zero_() for m in memories])
    assert races(programs)
    assert any("race" in problem for problem in explore(programs, residents=2).problems)


COPIERS_LAST = (
    "gather",
    "tl.program_id(0)\n    if pid",
    "tl.num_programs(0) - 1 - tl.program_id(0)\n    if pid",
)


@pytest.mark.parametrize(("edits", "bound"), [([COPIERS_LAST], 200), ([], 100)])
def test_tiles_wait_twice_as_long_as_copiers_which_can_name_the_operation(
    edits, bound, tmp_path, clean_modules, monkeypatch
):
    """The interpreter runs one program after the other. The first to wait for a rank that never
    arrives waits until its bound, and later ones hardly at all."""
    module = planted(tmp_path, *edits)["gather"]
    memory, _ = local_memory(2, slots=4, capacity=1 << 14, polls=100)
    looks, atomic = [], interpreter_builder.create_atomic_rmw
    monkeypatch.setattr(
        interpreter_builder, "create_atomic_rmw", lambda *args: looks.append(0) or atomic(*args)
    )
    steps, _ = _gather(module, 2, memory, *ONE_TILE)
    with pinned(TILES):
        list(steps)
    assert bool(memory.error[4]) == (bound == 100), "the signature of who reported"
    assert bound < len(looks) < bound + 10


def test_copying_programs_that_start_last_deadlock_where_few_run_at_once(tmp_path, clean_modules):
    programs = record(("gather",), 2, planted(tmp_path, COPIERS_LAST))
    assert explore(programs, residents=9).problems == []
    assert explore(programs, residents=1).problems == ["deadlock"]
