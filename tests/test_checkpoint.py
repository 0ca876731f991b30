"""Checkpoints under attack: flipped bits are detected, crashes lose no good step, no code runs."""

import errno
import hashlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
import safetensors.torch
import torch
import torch.distributed as dist
from ranks import run_ranks
from refused import one_line

from warpweave.checkpoint import (
    CheckpointError,
    CheckpointWarning,
    latest,
    open_checkpoint,
    open_latest,
    save_checkpoint,
)
from warpweave.checkpoint import manifest as manifest_module
from warpweave.checkpoint import save as save_module
from warpweave.checkpoint.steps import publish_step
from warpweave.launch.processes import end_with_parent

CONFIG = {"width": 64, "layers": 3, "eps": 1e-6, "tied": True}
SHARD = "rank00000-00000.safetensors"
STATE = {"step": 7, "seed": 12345678901234567890, "loss_scale": 0.1 + 0.2, "note": None}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of every dtype a trainer has, of odd shapes, empty, of no dims, and views."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(13, 7, generator=g)
    return {
        "blocks.0.weight": base,
        "blocks.0.transposed": base.t(),
        "blocks.0.rows": base[3:5],
        "tied": base,
        "half": base.to(torch.bfloat16),
        "double": base.double() / 3,
        "step": torch.tensor(7.0),
        "empty": torch.empty(0, 5),
        "rng": torch.randint(0, 256, (101,), generator=g, dtype=torch.uint8),
        "ids": torch.arange(17),
    }


def save(folder: Path, step: int = 7, seed: int = 0, **options) -> Path:
    return save_checkpoint(
        folder, step, weights(seed).items(), config=CONFIG, state=STATE, **options
    )


def signed(step: Path, data: bytes) -> None:
    """Replace the manifest, with its digest, as a forger would."""
    (step / "manifest.json").write_bytes(data)
    (step / "manifest.sha256").write_text(hashlib.sha256(data).hexdigest())


def rewrite(step: Path, change) -> None:
    """Change fields of the manifest and update its digest."""
    manifest = json.loads((step / "manifest.json").read_text())
    change(manifest)
    signed(step, json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


def replace(shard: Path, data: bytes) -> None:
    """Replace a file of tensors, with its digest in the manifest."""
    shard.write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(shard.parent, lambda manifest: manifest["files"].update({shard.name: entry}))


def refused(path: Path, words: str | None = None) -> str:
    """Assert that a checkpoint is refused in one line with these words, and return the line."""
    with pytest.raises(CheckpointError, match=words) as error:
        open_checkpoint(path)
    return one_line(error)


# ---- round trip ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [1, 400, 1 << 30])
def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path, shard_bytes: int) -> None:
    path = save(tmp_path, shard_bytes=shard_bytes, mesh={"dp": 2})
    reader = open_checkpoint(path)
    expected = weights()
    assert path == tmp_path / "step_00000007"
    assert reader.names == sorted(expected)
    for name, tensor in expected.items():
        assert reader.shape(name) == tuple(tensor.shape)
        assert reader.dtype(name) == tensor.dtype
        assert torch.equal(reader.tensor(name), tensor), name
    assert (reader.step, reader.config, reader.state, reader.mesh) == (7, CONFIG, STATE, {"dp": 2})
    shards = len(list(path.glob("*.safetensors")))
    assert shards == {1: 10, 400: 7, 1 << 30: 1}[shard_bytes]


def test_safetensors_reads_what_was_saved_with_each_tensor_aligned(tmp_path: Path) -> None:
    tensors = weights() | {
        'Maße/日本 "\\\n': torch.arange(3, dtype=torch.int16),
        "odd": torch.ones(3, dtype=torch.bool),
    }
    path = save_checkpoint(tmp_path, 1, tensors.items(), config={}, state={})
    (shard,) = path.glob("*.safetensors")
    found = safetensors.torch.load_file(shard)
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    data = shard.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        assert (start + entry["data_offsets"][0]) % tensors[name].element_size() == 0, name
    assert torch.equal(open_checkpoint(path).tensor("odd"), tensors["odd"])


def test_a_file_holds_just_so_many_bytes(tmp_path: Path) -> None:
    each = [(name, torch.zeros(25)) for name in "abcd"]
    for most, files in ((199, 4), (200, 2), (299, 2), (400, 1)):
        path = save_checkpoint(tmp_path, 1, each, config={}, state={}, shard_bytes=most)
        assert len(list(path.glob("*.safetensors"))) == files


def test_a_rank_reads_only_its_slice_and_owns_it(tmp_path: Path) -> None:
    reader = open_checkpoint(save(tmp_path))
    part = reader.tensor("blocks.0.weight", (slice(4, 9), slice(1, 3)))
    assert torch.equal(part, weights()["blocks.0.weight"][4:9, 1:3])
    assert part.untyped_storage().nbytes() == 5 * 2 * 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_of_a_mapped_tensor_only_what_is_copied_is_loaded(tmp_path: Path) -> None:
    whole = torch.arange(2**22, dtype=torch.float32).view(4096, 1024)  # 16 MiB
    reader = open_checkpoint(save_checkpoint(tmp_path, 1, [("a", whole)], config={}, state={}))
    mapped = reader.mapped("a")
    assert torch.equal(mapped.narrow(0, 1000, 10).clone(), whole[1000:1010])
    areas = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (ours,) = [area for area in areas if str(tmp_path) in area]
    assert int(re.search(r"Rss: +(\d+) kB", ours)[1]) < 8192
    assert torch.equal(mapped, whole)


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = save(tmp_path / "runs" / "a")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    assert stat.S_IMODE((path.parent / "latest").stat().st_mode) == 0o600


@pytest.mark.parametrize(("names", "options"), [("aa", {}), ("aba", {"shard_bytes": 8})])
def test_a_name_given_twice_is_refused_and_leaves_nothing(tmp_path: Path, names, options) -> None:
    tensors = [(name, torch.ones(2)) for name in names]
    with pytest.raises(CheckpointError, match="'a' must be saved only once, but rank 0") as error:
        save_checkpoint(tmp_path, 1, tensors, config={}, state={}, **options)
    one_line(error)
    assert list(tmp_path.iterdir()) == []


# ---- retained steps ------------------------------------------------------------------------------


def test_the_newest_k_stay_and_foreign_files_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step_00000001" / "plot.png").write_text("mine too")
    save(tmp_path, 3)
    words = "step_00000001 is not a folder that contains only checkpoint files"
    with pytest.warns(CheckpointWarning, match=words):
        save(tmp_path, 4, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest", "notes.txt", "step_00000001", "step_00000003", "step_00000004",
    ]  # fmt: skip
    assert (tmp_path / "step_00000001" / "plot.png").read_text() == "mine too"


def test_latest_follows_the_pointer_and_does_without_it(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None
    assert open_latest(tmp_path) is None
    save(tmp_path, 9)
    save(tmp_path, 4)
    assert latest(tmp_path).name == "step_00000004"
    (tmp_path / "latest").write_text("step_00000004 " + "0" * 64)
    assert latest(tmp_path).name == "step_00000009"
    (tmp_path / "latest").unlink()
    assert latest(tmp_path).name == "step_00000009"


def test_resaved_step_is_replaced_and_a_crash_between_renames_is_repaired(tmp_path: Path) -> None:
    save(tmp_path, 7, seed=0)
    save(tmp_path, 7, seed=1)
    assert torch.equal(open_latest(tmp_path).tensor("rng"), weights(1)["rng"])
    aside = tmp_path / ("step_00000007.old-" + "ab" * 8)
    os.rename(tmp_path / "step_00000007", aside)
    (tmp_path / ("latest.tmp-" + "cd" * 8)).write_text("half a poin")
    assert latest(tmp_path) == aside
    assert open_latest(tmp_path).step == 7
    save(tmp_path, 8)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest", "step_00000007", "step_00000008",
    ]  # fmt: skip


def test_a_folder_in_the_way_that_is_no_checkpoint_stays(tmp_path: Path) -> None:
    (tmp_path / "step_00000007").mkdir()
    (tmp_path / "step_00000007" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="only checkpoint files; move it elsewhere"):
        save(tmp_path)
    assert (tmp_path / "step_00000007" / "thesis.tex").read_text() == "years of work"


# ---- damage --------------------------------------------------------------------------------------


def test_a_hundred_random_bit_flips_are_all_found(tmp_path: Path) -> None:
    path = save(tmp_path, shard_bytes=400)
    files = sorted(path.iterdir())
    assert len(files) == 9
    draw = random.Random(0)
    for trial in range(100):
        # Cover every file in turn, so that manifest, digest, headers and data are all tested.
        file = files[trial % len(files)]
        good = file.read_bytes()
        bad = bytearray(good)
        offset, bit = draw.randrange(len(good)), draw.randrange(8)
        bad[offset] ^= 1 << bit
        file.write_bytes(bad)
        assert str(path) in refused(path), (file, offset, bit)
        file.write_bytes(good)
    open_checkpoint(path)


def test_each_missing_or_truncated_file_is_named_with_its_sizes(tmp_path: Path) -> None:
    path = save(tmp_path, shard_bytes=400)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        file.write_bytes(good[:-1])
        said = refused(path, file.name.split(".")[0])
        if file.suffix == ".safetensors":
            assert f"{len(good) - 1} bytes, but the manifest says {len(good)}" in said
        file.unlink()
        refused(path, file.name)
        file.write_bytes(good)
    open_checkpoint(path)


@pytest.mark.parametrize("swapped", [True, False], ids=["swapped", "overwritten"])
def test_a_file_changed_after_verification_is_noticed(tmp_path: Path, swapped: bool) -> None:
    path = save(tmp_path)
    reader = open_checkpoint(path)
    shard = next(path.glob("*.safetensors"))
    before, data = shard.stat(), bytearray(shard.read_bytes())
    data[-1] ^= 1
    if swapped:
        shard.unlink()
    shard.write_bytes(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + (not swapped)))
    with pytest.raises(CheckpointError, match="changed after it was verified; open the checkpoint"):
        reader.tensor("rng")


def test_next_older_good_step_is_opened_with_a_warning_naming_the_bad_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shard = next(save(tmp_path, 2).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.warns(CheckpointWarning, match=r"step_00000002/rank00000-00000.safetensors has"):
        reader = open_latest(tmp_path)
    assert reader.step == 1
    with pytest.raises(CheckpointError, match="step_00000002"):
        open_latest(tmp_path, fallback=False)


def test_a_run_folder_is_refused_with_the_step_to_open(tmp_path: Path) -> None:
    steps = tmp_path / "checkpoints"
    assert open_latest(tmp_path) is None
    step = [save(steps, number) for number in (1, 2)][-1]
    for folder in (tmp_path, steps):
        refused(folder, f"^{folder} is a run's folder.*open {step},")
    with pytest.raises(CheckpointError, match=rf"open_latest\('{steps}'\)"):
        open_latest(tmp_path)
    assert open_latest(steps).step == open_checkpoint(step).step == 2


# ---- hostility -----------------------------------------------------------------------------------


def test_links_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    (path / "extra.safetensors").write_bytes(b"")
    refused(path, "extra.safetensors is not listed in the manifest")
    (path / "extra.safetensors").unlink()
    for file in sorted(path.iterdir()):
        away = tmp_path / "away"
        shutil.move(file, away)
        file.symlink_to(away)
        refused(path, "links are rejected")
        file.unlink()
        os.mkfifo(file)
        refused(path, f"{file} is not a regular file")
        file.unlink()
        shutil.move(away, file)
    os.mkfifo(path / "pipe")
    refused(path, "pipe is not listed in the manifest")
    (path / "pipe").unlink()
    (tmp_path / "link").symlink_to(path)
    refused(tmp_path / "link", "links are rejected")
    open_checkpoint(path)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".hidden.safetensors",
     "a\0b"],
)  # fmt: skip
def test_a_file_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)
    shutil.copy(next(path.glob("*.safetensors")), tmp_path / "secret.safetensors")

    def change(manifest: dict) -> None:
        manifest["files"] = {name: next(iter(manifest["files"].values()))}
        for entry in manifest["tensors"].values():
            entry["file"] = name

    rewrite(path, change)
    refused(path, "is not of the form")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(schema=2), "schema must be 1, got 2"),
        (lambda m: m.update(schema=True), "schema must be 1, got True"),
        (lambda m: m.update(schema=1.0), "schema must be 1, got 1.0"),
        (lambda m: m.update(schema="1" * 9999), "schema must be 1, got '1{100,400}$"),
        (lambda m: m.update(step=7.0), "step must be an integer >= 0, got 7.0"),
        (lambda m: m.update(step="7"), "step must be an integer >= 0, got '7'"),
        (lambda m: m.update(mesh=[]), "mesh must be an object"),
        (lambda m: m["files"][SHARD].update(bytes=True), "bytes must be .*, got True"),
        (lambda m: m["files"][SHARD].update(bytes=float(m["files"][SHARD]["bytes"])),
         "bytes must be"),
        (lambda m: m["files"][SHARD].update(bytes=-1), "bytes must be an integer >= 0, got -1"),
        (lambda m: m["files"][SHARD].update(sha256=int("1" * 64)), "sha256 must be 64 hex"),
        (lambda m: m["tensors"]["rng"].update(shape=[101.0]), "got 101.0"),
        (lambda m: m["tensors"]["rng"].update(shape=["101"]), r"\['rng'\]\.shape\[0\] must be "),
        (lambda m: m["tensors"]["rng"].update(shape=[True]), "got True"),
        (lambda m: m.update({f"key{i}": 0 for i in range(3000)}), r"unknown field 'key0'.{,400}$"),
        (lambda m: m.update(format="other"), "format must be .warpweave-checkpoint., got 'other'"),
        (lambda m: m.update(surprise=1), "surprise"),
        (lambda m: m.pop("state"), "state"),
        (lambda m: m.update(step=8), "step is 8, but the folder is named"),
        (lambda m: m.update(step=True), "step must be an integer >= 0, got True"),
        (lambda m: m["config"].update(width=65), "config_sha256"),
        (lambda m: m["tensors"]["rng"].update(shape=[-1]), "got -1"),
        (lambda m: m["tensors"]["rng"].update(shape=[10**300] * 50), "has an invalid file"),
        (lambda m: m["tensors"]["rng"].update(shape=[2**61] * 60), "has an invalid file"),
        (lambda m: m["tensors"]["rng"].update(shape=[2] * 2000), "has an invalid file"),
        (lambda m: m["tensors"]["rng"].update(dtype="object"),
         "dtype must be one of .* got 'object'"),
        (lambda m: m["tensors"]["rng"].update(file="rank00009-00000.safetensors"),
         "has an invalid file"),
        (lambda m: m["tensors"]["rng"].update(shape=[100]), "of tensor 'rng' must be"),
        (lambda m: m["tensors"]["rng"].update(dtype="int8"), "of tensor 'rng' must be"),
        (lambda m: m["tensors"].pop("rng"), r"the manifest lists for it, but differs in \['rng'\]"),
        (lambda m: m["tensors"].update(more=m["tensors"]["rng"]),
         r"the manifest lists for it, but differs in \['more'\]"),
    ],
)  # fmt: skip
def test_a_forged_manifest_with_a_right_digest_is_still_checked(
    tmp_path: Path, change, says: str
) -> None:
    path = save(tmp_path)
    rewrite(path, change)
    refused(path, says)


@pytest.mark.parametrize(
    "text",
    ['{"format": 1, "format": 2}', '{"step": NaN}', "[" * 11_000, "\xff", "[]", "", "[1e999]"],
)
def test_a_manifest_that_is_no_strict_json_is_refused(tmp_path: Path, text: str) -> None:
    path = save(tmp_path)
    signed(path, text.encode("latin-1"))
    refused(path, r"manifest.json: (not JSON|it must be an object)")


@pytest.mark.parametrize("part", [b"[],", b"{},", b"0,", b'"' + b"x" * 61 + b'",'])
def test_a_manifest_is_counted_before_it_is_parsed(
    tmp_path: Path, monkeypatch, part: bytes
) -> None:
    """60 MiB that cost a parser a minute and gigabytes, and 1 MiB of it, except for long names."""
    path = save(tmp_path)
    monkeypatch.setattr(manifest_module, "parse_manifest", None)
    for size in (60, 1) if len(part) < 9 else (60,):
        signed(path, b"[" + part * (size * 2**20 // len(part)) + b"0]")
        began = time.process_time()
        refused(path, r"manifest.json (must have at most|has) .* bytes")
        assert time.process_time() - began < 2.0


@pytest.mark.parametrize(("name", "shape"), [("t{}", [1, 2, 3, 4]), ("exp_avg_sq/layer.{}.w", [9])])
def test_a_manifest_of_120000_tensors_is_read(tmp_path: Path, name: str, shape: list[int]) -> None:
    entry = {"dtype": "float32", "file": SHARD, "shape": shape}
    tensors = {name.format(i): entry for i in range(120_000)}
    data = json.dumps({"tensors": tensors}, separators=(",", ":")).encode()
    manifest_module._count_values(data, tmp_path)
    words = r"at most .* JSON values for its size, got .* bytes and .* values"
    with pytest.raises(CheckpointError, match=words):
        manifest_module._count_values(data * 2, tmp_path)


class Evil:
    """An object that creates a file when it is unpickled: the canary that must never appear."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (os.mkdir, (str(self.canary),))


def test_a_pickle_in_any_place_runs_nothing(tmp_path: Path) -> None:
    path = save(tmp_path)
    canary = tmp_path / "canary"
    evil = pickle.dumps(Evil(canary))
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        file.write_bytes(evil)
        if file.suffix == ".safetensors":  # with the manifest forged to match
            replace(file, evil)
        refused(path)
        file.write_bytes(good)
        assert not canary.exists()
    pickle.loads(evil)
    assert canary.exists()  # the canary does appear when it is unpickled


def header(entries: object) -> bytes:
    data = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return len(data).to_bytes(8, "little") + data


def entry(begin: int, end: int, dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": [4], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((1 << 63).to_bytes(8, "little") + b"{}", "header of 9223372036854775808 bytes is not"),
        (b"\x01", "header of 1 bytes is not plausible"),
        (header({"a": entry(0, 4), "b": entry(2, 6)}) + b"\0" * 8, "of tensor 'b' must be"),
        (header({"a": entry(0, 4), "b": entry(6, 10)}) + b"\0" * 10, "of tensor 'b' must be"),
        (header({"a": entry(0, 4), "b": entry(4, 1 << 62)}) + b"\0" * 8, "of tensor 'b' must be"),
        (header({"a": entry(0, 4), "b": entry(4, 8)}) + b"\0" * 9,
         "bytes, but its header declares"),
        (header({"a": entry(0, 4), "b": entry(4, 8)}) + b"\0" * 7,
         "bytes, but its header declares"),
        (header({"a": entry(0, 4, "F32"), "b": entry(4, 8)}) + b"\0" * 8, "of tensor 'a' must be"),
        (header({"a": entry(0, 4)}) + b"\0" * 4, r"but differs in \['b'\]"),
        (header({"a": entry(0, 4), "b": entry(4, 8), "__metadata__": {}}) + b"\0" * 8, "header"),
        ((10**8).to_bytes(8, "little") + b"{" + b" " * 10**6, "header of 100000000 bytes is"),
        (header(b"{" + b" " * 10**6 + b"}"), "header of 1000002 bytes is not plausible for 2"),
        (header([1, 2]) + b"\0" * 8, "bad safetensors header"),
        (header({"a": {"dtype": "U8", "shape": 4, "data_offsets": 7}}), "bad safetensors header"),
        (header(b"[" * 4000), "bad safetensors header"),
        (header({"a": entry(False, 4), "b": entry(4, 8)}) + b"\0" * 8, "of tensor 'a' must be"),
        (header({"a": entry(0, 4.0), "b": entry(4, 8)}) + b"\0" * 8, "of tensor 'a' must be"),
        (header({"a": entry(0, 4) | {"shape": [4.0]}, "b": entry(4, 8)}) + b"\0" * 8,
         "of tensor 'a' must be"),
        (header({"a": entry(0, 4) | {"more": 1}, "b": entry(4, 8)}) + b"\0" * 8,
         "of tensor 'a' must be"),
        (header({"a": entry(0, 4) | {"data_offsets": "04"}, "b": entry(4, 8)}), "header"),
        (header(b'{"a": 1, "a": 2}'), "bad safetensors header"),
    ],
)  # fmt: skip
def test_a_hostile_safetensors_header_is_refused_at_once(
    tmp_path: Path, data: bytes, says: str
) -> None:
    pair = {name: torch.zeros(4, dtype=torch.uint8) for name in "ab"}
    path = save_checkpoint(tmp_path, 1, pair.items(), config={}, state={})
    replace(path / SHARD, data)
    begin = time.perf_counter()
    said = refused(path, says)
    assert time.perf_counter() - begin < 0.5
    assert len(said) < 1000


# ---- crashes -------------------------------------------------------------------------------------


def test_a_full_disk_is_one_clear_error_and_older_steps_are_intact(tmp_path: Path) -> None:
    save(tmp_path, 1)
    drained = []

    def big() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("small", "big", "later", "last"):
            yield name, torch.ones((1 << 18) + 1 if name == "big" else 5)
            drained.append(name)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"after 1048576 of \d+ bytes") as error:
            save_checkpoint(tmp_path, 2, big(), config={}, state={}, shard_bytes=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert str(tmp_path / "step_00000002") in one_line(error)
    assert "earlier checkpoints are intact" in str(error.value)
    assert drained == ["small", "big", "later", "last"]  # peers may wait in its collectives
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]
    assert open_latest(tmp_path).step == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "lose", "manifest"])
def test_a_step_that_the_disk_did_not_take_costs_no_older_one(
    tmp_path: Path, monkeypatch, damage: str
) -> None:
    """The disk reports success without having stored the data."""
    save(tmp_path, 1)
    save(tmp_path, 2)

    def publish(temporary: Path, step: Path, digest: str) -> None:
        publish_step(temporary, step, digest)
        path = step / ("manifest.json" if damage == "manifest" else SHARD)
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.unlink()
        if damage != "lose":
            path.write_bytes(data[:-1] if damage == "cut" else data)

    monkeypatch.setattr(save_module, "publish_step", publish)
    words = "was written but failed verification: .*older checkpoints are kept"
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path, 3, keep=1)
    monkeypatch.undo()
    assert {path.name[-1] for path in tmp_path.glob("step_*")} == {"1", "2", "3"}
    with pytest.warns(CheckpointWarning, match="skipped: .*step_00000003"):
        assert open_latest(tmp_path).step == 2
    save(tmp_path, 3, keep=1)
    assert [path.name[-1] for path in tmp_path.glob("step_*")] == ["3"]


CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir")


@pytest.mark.parametrize("call", CALLS)
def test_step_is_entirely_old_or_new_whichever_system_call_fails(
    tmp_path: Path, monkeypatch, call: str
) -> None:
    """Save a step again, with the first, second, ... call of this kind failing, until none does."""
    original, outcomes = getattr(os, call), []
    for number in range(100):
        folder, calls = tmp_path / f"{number}", iter(range(100))
        save(folder, 6, seed=2)
        save(folder, 7, seed=0)

        def fails(*args, calls=calls, number=number, **options):
            if next(calls) == number:
                raise OSError(errno.EIO, "planted", str(args[0]))
            return original(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fails)
            try:
                save(folder, 7, seed=1)
                outcomes.append("saved")
            except CheckpointError as error:
                outcomes.append(str(error))
        if next(calls) <= number:
            break
        assert open_latest(folder).step == 7
        found = open_checkpoint(folder / "step_00000007").tensor("rng")
        new = torch.equal(found, weights(1)["rng"])
        assert new or ("planted" in outcomes[-1] and torch.equal(found, weights(0)["rng"]))
        save(folder, 8)  # cleans up leftovers, and loses nothing
        names = {path.name for path in folder.iterdir()}
        assert names == {"latest", *(f"step_0000000{step}" for step in (6, 7, 8))}
    assert len(set(outcomes)) > 1
    assert outcomes[-1] == "saved"


def test_an_error_of_the_iterable_itself_leaves_no_trace(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise ArithmeticError("planted")

    with pytest.raises(ArithmeticError, match="planted"):
        save_checkpoint(tmp_path, 2, broken(), config={}, state={})
    assert list(tmp_path.iterdir()) == []


def _save_for_ever(folder: str) -> None:
    end_with_parent()
    for step in range(1, 10_000):
        tensors = {f"t{i}": torch.full((50,), float(step)) for i in range(8)}
        save_checkpoint(
            folder, step % 5 + 1, tensors.items(), config={}, state={"round": step},
            shard_bytes=100, keep=2,
        )  # fmt: skip


def test_kill_9_at_any_instant_leaves_the_last_good_step(tmp_path: Path) -> None:
    context, draw, seen_partial = ranks._context(), random.Random(1), 0
    for trial in range(8):
        folder = tmp_path / str(trial % 2)
        process = context.Process(target=_save_for_ever, args=(str(folder),))
        process.start()
        deadline = time.monotonic() + 30
        while latest(folder) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.12))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        process.close()
        seen_partial += any(".tmp-" in p.name or ".old-" in p.name for p in folder.iterdir())
        reader = open_latest(folder)  # a warning would be an error here: no visible step is bad
        values = {reader.tensor(name).unique().item() for name in reader.names}
        assert values == {reader.state["round"]}, "never a mixture of two steps"
    assert seen_partial > 0, "no kill came in the middle of a save, so nothing was tried"
    save(tmp_path / "0")
    assert not [p for p in (tmp_path / "0").iterdir() if "." in p.name]


# ---- ranks ---------------------------------------------------------------------------------------


def _mine(rank: int, world: int) -> dict[str, torch.Tensor]:
    return {name: t for i, (name, t) in enumerate(weights().items()) if i % world == rank}


def _save_and_read(rank: int, folder: str) -> tuple:
    group, world = dist.group.WORLD, dist.get_world_size()

    def gathering() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _mine(rank, world).items():
            dist.all_reduce(torch.ones(1))  # like a real source: collectives between the tensors
            yield name, tensor
        if len(_mine(rank, world)) < len(_mine(0, world)):
            dist.all_reduce(torch.ones(1))

    config = {"a": 1} if rank == 0 else {}
    path = save_checkpoint(
        folder, 5, gathering(), config=config, state={}, group=group, shard_bytes=200
    )
    reader = open_latest(folder, group=group)
    same = all(torch.equal(reader.tensor(n), t) for n, t in weights().items())
    return path.name, reader.names == sorted(weights()), same, reader.config


def test_ranks_write_their_own_files_of_one_checkpoint(tmp_path: Path) -> None:
    results = run_ranks(3, _save_and_read, str(tmp_path))
    assert results == [("step_00000005", True, True, {"a": 1})] * 3
    writers = {p.name[:9] for p in (tmp_path / "step_00000005").glob("*.safetensors")}
    assert writers == {"rank00000", "rank00001", "rank00002"}
    reader = open_checkpoint(tmp_path / "step_00000005")  # and one process reads what three wrote
    assert all(torch.equal(reader.tensor(name), t) for name, t in weights().items())


def _fail_together(rank: int, folder: str, fault: str) -> str:
    group = dist.group.WORLD
    tensors = {f"t{rank}": torch.ones(1 << 10)}
    if fault == "twice":
        tensors = {"t": torch.ones(3)}
    elif fault == "full" and rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, resource.RLIM_INFINITY))
    elif fault == "closed":
        folder = folder + "/latest/below"  # a file is in the way
    try:
        save_checkpoint(folder, 6, tensors.items(), config={}, state={}, group=group)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("fault", "says"),
    [("twice", "'t' must be saved by one rank only, got ranks 0 and 1"),
     ("full", "rank 1: cannot write"), ("closed", "Not a directory")],
)  # fmt: skip
def test_one_rank_that_fails_is_everyones_error(tmp_path: Path, fault: str, says: str) -> None:
    save(tmp_path, 5)
    messages = run_ranks(2, _fail_together, str(tmp_path), fault)
    assert messages[0] == messages[1]
    assert says in messages[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000005"]


def _open_damaged(rank: int, folder: str) -> str:
    try:
        open_checkpoint(folder, group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return "opened"


def _open_own(rank: int, folder: str) -> str:
    return _open_damaged(rank, f"{folder}/{rank}/step_00000007")


def test_ranks_that_see_other_folders_under_one_name_all_refuse(tmp_path: Path) -> None:
    for rank, seed in enumerate((0, 0, 1)):
        save(tmp_path / f"{rank}", seed=seed)
    assert run_ranks(2, _open_own, str(tmp_path)) == ["opened"] * 2
    for message in run_ranks(3, _open_own, str(tmp_path)):
        assert message.endswith("step_00000007 is not the same folder on all 3 ranks")


def test_every_rank_reports_a_damaged_file_although_hashing_is_shared(tmp_path: Path) -> None:
    path = save(tmp_path, shard_bytes=400)
    shard = sorted(path.glob("*.safetensors"))[3]
    data = bytearray(shard.read_bytes())
    data[-2] ^= 4
    shard.write_bytes(data)
    messages = run_ranks(2, _open_damaged, str(path))
    assert messages[0] == messages[1]
    assert f"{shard} is damaged" in messages[0]
