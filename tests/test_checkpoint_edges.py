"""Checkpoints at their edges: every dtype, the last number accepted and the first rejected, steps
of nine digits, many files, invalid JSON and its place, disk errors."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from test_checkpoint import refused, rewrite
from threads import run_threads

from warpweave.checkpoint import (
    BackgroundSaver,
    CheckpointError,
    CheckpointWarning,
    background,
    config_digest,
    files,
    latest,
    open_checkpoint,
    open_latest,
    save_checkpoint,
)
from warpweave.checkpoint import manifest as manifests
from warpweave.checkpoint.steps import newest_first

ONE = [("a", torch.arange(5.0))]


def _save(folder: Path, step: int = 1, tensors=ONE, **options) -> Path:
    return save_checkpoint(folder, step, tensors, **{"config": {}, "state": {}} | options)


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("name", manifests.DTYPE_CODES)
def test_every_dtype_comes_back_bit_for_bit_in_our_reader_and_in_safetensors(
    tmp_path: Path, name: str
) -> None:
    dtype = getattr(torch, name)
    bits = torch.arange(24 * dtype.itemsize).mul(7).to(torch.uint8)
    bits = bits % 2 if dtype == torch.bool else bits
    whole = bits.view(dtype).view(3, 8)
    given = {"whole": whole, "column": whole[:, 3], "one": whole[1, 1], "none": whole[:0]}
    path = _save(tmp_path, tensors=given.items())
    reader = open_checkpoint(path)
    (shard,) = path.glob("*.safetensors")
    theirs = safetensors.torch.load_file(shard)
    assert reader.names == sorted(theirs) == sorted(given)
    for key, tensor in given.items():
        assert reader.dtype(key) == theirs[key].dtype == dtype
        assert reader.shape(key) == tensor.shape
        wanted = tensor.contiguous().reshape(-1).view(torch.uint8)
        for found in (reader.tensor(key), reader.mapped(key), theirs[key]):
            assert torch.equal(found.reshape(-1).view(torch.uint8), wanted)
    for index in ((slice(1, 3),), (slice(0, 2), slice(3, 8))):
        part = reader.tensor("whole", index).contiguous().view(torch.uint8)
        assert torch.equal(part, whole[index].contiguous().view(torch.uint8))


def test_the_manifest_says_what_the_files_are(tmp_path: Path) -> None:
    """With a dozen files. `latest` holds the step and the manifest's digest."""
    tensors = {f"t{i}": torch.zeros(i + 1, 2, requires_grad=i == 3) for i in range(12)}
    tensors |= {"half": torch.ones(3, dtype=torch.float16)}
    options = {"config": {"b": [1, (2, "x")], "a": None}, "state": {"n": 1.5}, "mesh": {"dp": 2}}
    path = _save(tmp_path, 123, tensors.items(), shard_bytes=1, **options)
    data = (path / "manifest.json").read_bytes()
    manifest = json.loads(data)
    shards, entries = manifest.pop("files"), manifest.pop("tensors")
    assert manifest == {
        "format": "warpweave-checkpoint", "schema": 1, "step": 123, "mesh": {"dp": 2},
        "config": {"a": None, "b": [1, [2, "x"]]}, "state": {"n": 1.5},
        "config_sha256": hashlib.sha256(b'{"a":null,"b":[1,[2,"x"]]}').hexdigest(),
    }  # fmt: skip
    assert sorted(shards) == [f"rank00000-{n:05d}.safetensors" for n in range(13)]
    for name, entry in shards.items():
        whole = (path / name).read_bytes()
        assert entry == {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    for number, (name, tensor) in enumerate(tensors.items()):
        dtype = "float16" if name == "half" else "float32"
        file = f"rank00000-{number:05d}.safetensors"
        assert entries[name] == {"file": file, "shape": [*tensor.shape], "dtype": dtype}
    digest = hashlib.sha256(data).hexdigest()
    assert (path / "manifest.sha256").read_text() == digest
    assert (tmp_path / "latest").read_text().split() == ["step_00000123", digest]
    reader = open_latest(tmp_path)
    assert (reader.config, reader.mesh) == ({"a": None, "b": [1, [2, "x"]]}, {"dp": 2})
    assert open_checkpoint(_save(tmp_path, 124)).mesh == {}
    assert config_digest({"b": (1,), "a": 2}) == hashlib.sha256(b'{"a":2,"b":[1]}').hexdigest()


def test_a_tensor_has_up_to_64_dimensions_and_fewer_than_2_62_elements(tmp_path: Path) -> None:
    path = _save(tmp_path, tensors=[("a", torch.ones([1] * 64)), ("b", torch.ones(0, 3))])
    assert open_checkpoint(path).tensor("a").ndim == 64
    for shape, fits in (
        ([2**62 - 1], True), ([2**62], False), ([2**62, 0], False), ([2**62 - 1, 0], True),
        ([2**31, 2**30], True), ([2**31, 2**31], False), ([1] * 64, True), ([1] * 65, False),
        ([], True), ([0], True), ([-1], False), ([2.0], False), ([True], False), ("", False),
    ):  # fmt: skip
        rewrite(path, lambda manifest, shape=shape: manifest["tensors"]["b"].update(shape=shape))
        if fits:
            manifests.read_manifest(path)
        else:
            refused(path, r"tensors?.*b.*(has an invalid file|must be)")


def test_a_manifest_is_read_up_to_its_limits_of_bytes_and_values(
    tmp_path: Path, monkeypatch
) -> None:
    data = b"," * 11_111  # 10,000 values are allowed, and one more per ten bytes
    manifests._count_values(data, tmp_path)
    words = "at most 11111 JSON values for its size, got 11112 bytes and 11112 values"
    with pytest.raises(CheckpointError, match=words):
        manifests._count_values(data + b",", tmp_path)
    monkeypatch.setattr(manifests, "_MAX_BYTES", 700)
    manifests._count_values(b"x" * 700, tmp_path)
    words = "at most 700 bytes, and .*, got 701 bytes and 0 values"
    with pytest.raises(CheckpointError, match=words):
        manifests._count_values(b"x" * 701, tmp_path)
    words = r"manifest\.json must .* got \d{3} bytes and \d\d values$"
    with pytest.raises(CheckpointError, match=words):
        _save(tmp_path, state={"a": "x" * 400})  # a checkpoint that cannot be read is not published
    assert not _steps(tmp_path)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(("name", "least"), [("step", 0), ("keep", 1), ("shard_bytes", 1)])
def test_numbers_are_refused_below_their_least(tmp_path: Path, name: str, least: int) -> None:
    given = {"step": 3} | {name: least}
    assert open_checkpoint(_save(tmp_path, **given)).step == given["step"]
    with pytest.raises(CheckpointError, match=rf"shard_bytes >= 1, got .*{name}={least - 1}\b"):
        _save(tmp_path / "other", **{"step": 3, name: least - 1})
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["", "__metadata__", 3, None])
def test_a_name_that_no_tensor_can_have_is_refused(tmp_path: Path, name) -> None:
    with pytest.raises(CheckpointError, match=f"string other than .__metadata__., got {name!r}"):
        _save(tmp_path, tensors=[("fine", torch.ones(1)), (name, torch.ones(1))])
    _save(tmp_path, tensors=[("__metadata", torch.ones(1)), (" ", torch.ones(1))])


@pytest.mark.parametrize("letter", ["\x01", '"', "\u20ac", "\U0001f600"])
def test_a_long_name_of_letters_of_many_bytes_is_read_again(tmp_path: Path, letter) -> None:
    given = torch.arange(5.0)
    path = _save(tmp_path, tensors=[(9000 * letter, given)])
    assert torch.equal(open_checkpoint(path).tensor(9000 * letter), given)


def test_a_step_is_opened_under_any_name_but_that_of_another_step(tmp_path: Path) -> None:
    path = _save(tmp_path, 3)
    for name in ("best", "step_3", "step_00000003", "step_000000003"):
        path = path.rename(tmp_path / name)
        assert open_checkpoint(path).step == 3
    for name in ("step_00000004", "step_00000030"):
        path = path.rename(tmp_path / name)
        refused(path, f"step is 3, but the folder is named {name}")


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex64)],
    ids=["sparse", "meta", "complex"],
)
def test_a_tensor_that_cannot_be_saved_is_named_with_what_it_is(tmp_path: Path, tensor) -> None:
    kind = f"{tensor.layout}, {tensor.device}, {str(tensor.dtype)[6:]}"
    with pytest.raises(CheckpointError, match=rf"'odd' must be a dense .*, got {kind}$"):
        _save(tmp_path, tensors=[("odd", tensor)])


@pytest.mark.parametrize("part", ["config", "state", "mesh"])
def test_what_is_not_json_is_told_with_its_place(tmp_path: Path, part: str) -> None:
    inf = float("inf")
    for value, says in (
        ({"a": {"b": [1, inf]}}, r"\.a\.b\[1\] is inf; JSON has only finite numbers"),
        ({"a": -inf}, r"\.a is -inf"),
        ({"a": (0, float("nan"))}, r"\.a\[1\] is nan"),
        ({"a": ({"b": {1}},)}, r"\.a\[0\]\.b is a set, which is not a JSON type"),
        ({"a": {"b": b"x"}}, r"\.a\.b is a bytes"),
        ({"a": {3: 1}}, r"\.a: JSON keys must be strings"),
        ({True: 1}, ": JSON keys must be strings"),
        ({"a": torch.ones(1)}, r"\.a is a Tensor"),
    ):
        with pytest.raises(CheckpointError, match=f"^{part}{says}"):
            _save(tmp_path, **{part: value})
    fine = {"a": [1, -1.5, 1e308, True, None, "x", {}], "b": {"c": []}, "large": 2**70}
    reader = open_checkpoint(_save(tmp_path, **{part: fine}))
    assert repr(getattr(reader, part)) == repr(fine)


@pytest.mark.parametrize(
    ("number", "full"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EFBIG, True), (errno.EIO, False)],
)
def test_a_disk_that_is_full_is_told_from_one_that_fails(
    tmp_path: Path, monkeypatch, number: int, full: bool
) -> None:
    """The message names the file and how much of it was written by then."""
    real, sizes = os.write, iter([100, 60])

    def write(file: int, data) -> int:
        size = next(sizes, None)
        if size is None:
            raise OSError(number, "planted")
        return real(file, data[:size])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(CheckpointError) as error:
        _save(tmp_path, tensors=[("a", torch.zeros(100))])
    said = r"rank 0: cannot write (\S+): planted after (\d+) of (\d+) bytes"
    path, done, size = re.match(said, str(error.value)).groups()
    assert Path(path).name == "rank00000-00000.safetensors"
    assert path.startswith(str(tmp_path / "step_00000001.tmp-"))
    header = 8 + 64  # of {"a":{"dtype":"F32","shape":[100],"data_offsets":[0,400]}}
    assert (int(done), int(size)) == (header + 60, header + 400)
    assert str(error.value).endswith("earlier checkpoints are intact") == full


def test_what_the_disk_takes_in_small_pieces_is_written_whole(tmp_path: Path, monkeypatch) -> None:
    """However few bytes it takes at a time, and however many are passed to it."""
    real, tensors = os.write, [("a", torch.arange(50.0)), ("b", torch.arange(9)), ("c", ONE[0][1])]
    most = itertools.cycle((1, 7, 100, 3))
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[: next(most)]))
    for chunk in (5, 8, 1 << 20):
        monkeypatch.setattr(files, "CHUNK", chunk)
        reader = open_checkpoint(_save(tmp_path / str(chunk), tensors=tensors))
        for name, tensor in tensors:
            assert torch.equal(reader.tensor(name), tensor)
        digest = hashlib.sha256((reader.path / "manifest.json").read_bytes()).hexdigest()
        assert (reader.path / "manifest.sha256").read_text() == digest


def test_a_config_is_compared_field_by_field_with_defaults_for_new_ones(tmp_path: Path) -> None:
    saved = {"a": 1, "b": [1, 2], "c": True, "d": None}
    reader = open_checkpoint(_save(tmp_path, config=saved))
    reader.require_config(saved)
    reader.require_config({**saved, "a": 1.0, "b": (1, 2)})
    reader.require_config({**saved, "new": 5}, {"new": 5})
    reader.require_config(saved, {"a": 99, "b": 7})  # a saved value takes precedence over a default
    for changed, defaults, says in (
        ({"new": 6}, {"new": 5}, "new: saved 5, now 6"),
        ({}, {"new": 5}, "new: saved 5, now 'nothing'"),
        ({"a": 99}, {"a": 99}, "a: saved 1, now 99"),
        ({"c": 1}, {}, "c: saved True, now 1"),
        ({"a": True}, {}, "a: saved 1, now True"),
        ({"d": 0}, {}, "d: saved None, now 0"),
        ({"d": "nothing", "z": None}, {}, "d: saved None, now 'nothing'; z: saved 'nothing', now"),
    ):
        with pytest.raises(CheckpointError, match=f"with a different config; {re.escape(says)}"):
            reader.require_config(saved | changed, defaults)
    for gone in saved:
        with pytest.raises(CheckpointError, match=f"{gone}: saved .*, now 'nothing'"):
            reader.require_config({name: saved[name] for name in saved if name != gone})


def test_a_file_is_read_up_to_so_many_bytes_and_an_error_names_a_path(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert files.read_at_most(path, 5) == files.read_at_most(path, 6) == b"12345"
    with pytest.raises(CheckpointError, match="file has more than 4 bytes"):
        files.read_at_most(path, 4)
    with pytest.raises(CheckpointError, match=f"{tmp_path} is not a regular file"):
        files.read_at_most(tmp_path, 9)

    def fails(error: Exception) -> None:
        raise error

    own = OSError(5, "planted", "/its/own")
    for error, says in (
        (own, "/its/own: planted"), (OSError(5, "planted"), f"{path}: planted"),
        (OSError("two\nlines"), f"{path}: two lines"), (CheckpointError("as it is"), "as it is"),
    ):  # fmt: skip
        assert files.attempt(path, fails, error) == {"error": says}
    assert files.attempt(path, lambda: None) == {}
    assert files.attempt(path, lambda x: {"x": x}, 3) == {"x": 3}
    with pytest.raises(ArithmeticError):
        files.attempt(path, fails, ArithmeticError())
    before = files.stamp(path.stat())
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    after = files.stamp(path.stat())
    path.chmod(0o640)
    assert len({before, after, files.stamp(path.stat())}) == 3


# ---------------------------------------------------------------- steps


def test_steps_are_ordered_by_number_however_many_digits_they_have(tmp_path: Path) -> None:
    numbers = (9, 10, 99_999_999, 100_000_000, 1_000_000_000)
    for step in (numbers[3], numbers[0], numbers[4], numbers[1], numbers[2]):
        path = _save(tmp_path, step, keep=9)
        assert path.name == f"step_{step:08d}"
        assert latest(tmp_path) == path
        assert open_latest(tmp_path).step == step
    order = [int(path.name[5:]) for path in newest_first(tmp_path)]
    assert order == [99_999_999, 1_000_000_000, 100_000_000, 10, 9]  # the last saved one first
    (tmp_path / "latest").unlink()
    order = [int(path.name[5:]) for path in newest_first(tmp_path)]
    assert order == sorted(numbers, reverse=True)
    os.rename(tmp_path / "step_100000000", tmp_path / f"step_100000000.old-{'ab' * 8}")
    names = [path.name.partition(".")[0] for path in newest_first(tmp_path)]
    assert names[1] == "step_100000000"
    _save(tmp_path, 7, keep=3, spare=9)
    assert _steps(tmp_path) == [7, 9, 100_000_000, 1_000_000_000]
    _save(tmp_path, 8, keep=2, spare=100_000_000)
    assert _steps(tmp_path) == [8, 100_000_000, 1_000_000_000]
    _save(tmp_path, 8, keep=1, spare=8)
    assert _steps(tmp_path) == [8]


@pytest.mark.parametrize(("keep", "spare"), [(1, 2), (2, 0), (5, 2)])
def test_the_newest_steps_stay_and_the_spared_one_beside_them(
    tmp_path: Path, keep: int, spare: int
) -> None:
    for step in range(8):
        _save(tmp_path, step, keep=12)
    _save(tmp_path, 8, keep=keep, spare=spare)
    others = [spare, *range(9 - keep, 9)]
    assert _steps(tmp_path) == others
    _save(tmp_path, 3, keep=keep)  # the newest, although lower than most others
    assert _steps(tmp_path) == sorted({3, *others[len(others) - keep + 1 :]})


def test_a_step_put_aside_is_not_listed_beside_its_replacement(tmp_path: Path) -> None:
    """After a crash between the renames and the cleanup, the next save removes it."""
    for step in (6, 7):
        _save(tmp_path, step)
    os.rename(_save(tmp_path / "other", 6), tmp_path / f"step_00000006.old-{'ab' * 8}")
    assert [path.name for path in newest_first(tmp_path)] == ["step_00000007", "step_00000006"]
    _save(tmp_path, 8)
    assert {path.name for path in tmp_path.glob("step*")} == {f"step_0000000{n}" for n in (6, 7, 8)}


def test_each_damaged_step_is_warned_of_and_the_error_names_the_last(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _save(tmp_path, step)
    for step, name in ((3, "manifest.json"), (2, "manifest.sha256")):
        (tmp_path / f"step_0000000{step}" / name).unlink()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert open_latest(tmp_path).step == 1
    assert [str(w.message).split("/")[-2:] for w in told] == [
        ["step_00000003", "manifest.json: No such file or directory"],
        ["step_00000002", "manifest.sha256: No such file or directory"],
    ]
    assert all(w.category is CheckpointWarning for w in told)
    (tmp_path / "step_00000001" / "rank00000-00000.safetensors").unlink()
    says = r"3 steps, none of them valid; the last error: .*/rank00000-00000.safetensors is mis"
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match=says):
        open_latest(tmp_path)


def _opens(rank: int, folder: str) -> object:
    """Return the step that is opened, or the error."""
    try:
        return open_latest(f"{folder}/{rank}", group=dist.group.WORLD).step
    except CheckpointError as error:
        return str(error)


def test_ranks_go_back_to_the_same_step_though_one_alone_sees_the_damage(tmp_path: Path) -> None:
    """Each rank has its own folder. Rank 0 lists the steps, and warns."""
    for step, rank in itertools.product((1, 2, 3), (0, 1)):
        _save(tmp_path / f"{rank}", step, tensors=[(f"t{i}", torch.ones(1)) for i in range(3)],
              shard_bytes=4)  # fmt: skip
    shard = "step_00000003/rank00000-00001.safetensors"  # the file that rank 1 hashes
    (tmp_path / "1" / shard).unlink()
    with pytest.warns(CheckpointWarning) as told:
        assert run_threads(2, _opens, str(tmp_path)) == [2, 2]
    (one,) = told
    assert str(one.message).endswith("rank00000-00001.safetensors is missing")
    for step in (1, 2):
        (tmp_path / "1" / f"step_0000000{step}" / "manifest.json").unlink()
    with pytest.warns(CheckpointWarning) as told:
        found = run_threads(2, _opens, str(tmp_path))
    assert len(told) == 3
    for words in found:
        assert "has 3 steps, none of them valid; the last error: " in str(words)


def test_an_unknown_tensor_is_told_with_the_folder_and_how_many_there_are(tmp_path: Path) -> None:
    reader = open_checkpoint(_save(tmp_path, tensors=[(f"t{i}", torch.ones(1)) for i in range(12)]))
    words = "step_00000001 has no tensor named 'x' .it has 12 in all"
    for read in (reader.tensor, reader.mapped, reader.shape, reader.dtype):
        with pytest.raises(CheckpointError, match=words):
            read("x")


def test_a_file_that_cannot_be_read_any_more_is_an_error_of_its_checkpoint(
    tmp_path: Path, monkeypatch
) -> None:
    """It was deleted after verification, or the library that reads it rejects it."""
    reader = open_checkpoint(_save(tmp_path))
    file = reader.path / "rank00000-00000.safetensors"
    refuses = mock.Mock(side_effect=SafetensorError("planted\nin two lines"))
    monkeypatch.setattr("warpweave.checkpoint.read.safe_open", refuses)
    for says in ("planted in two lines", ".*No such file.*"):
        for read in (reader.tensor, reader.mapped):
            with pytest.raises(CheckpointError, match=rf"^cannot read 'a' from {file}: {says}$"):
                read("a")
        monkeypatch.undo()
        file.unlink(missing_ok=True)


def test_an_old_step_that_cannot_be_removed_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch
) -> None:
    """This holds if it cannot be renamed, and if its files cannot be unlinked."""
    for step in (1, 2):
        _save(tmp_path, step)
    rename, unlink, planted = os.rename, Path.unlink, OSError(errno.EACCES, "planted")

    def no_rename(old: Path, new: Path) -> None:
        if Path(old).name == "step_00000001":
            raise planted
        rename(old, new)

    def no_unlink(path: Path, **options: bool) -> None:
        if path.parent.name.startswith(("step_00000001", "step_00000002")):
            raise planted
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", no_rename)
        with pytest.warns(CheckpointWarning) as told:
            _save(tmp_path, 3, keep=2)
    (words,) = (str(w.message) for w in told)
    assert words == f"{tmp_path}/step_00000001: planted; not removed"
    assert _steps(tmp_path) == [1, 2, 3]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", no_unlink)
        with pytest.warns(CheckpointWarning) as told:
            _save(tmp_path, 4, keep=2)
    words = sorted(str(w.message) for w in told)
    for step, line in zip((1, 2), words, strict=True):
        aside = rf"{tmp_path}/step_0000000{step}\.tmp-[0-9a-f]{{16}}"
        assert re.fullmatch(f"{aside}: planted, not removed", line)
    _save(tmp_path, 5, keep=3)  # removes the leftovers
    assert _steps(tmp_path) == [3, 4, 5]


def test_a_step_that_cannot_be_published_leaves_the_one_of_its_number(
    tmp_path: Path, monkeypatch
) -> None:
    """If there was none, there is none. A pointer that cannot be replaced leaves no file behind."""
    before = open_checkpoint(_save(tmp_path, 1)).path
    rename, content = os.rename, {path.name for path in tmp_path.iterdir()}

    def fails(old: Path, new: Path) -> None:
        if ".tmp-" in Path(old).name:
            raise OSError(errno.EIO, "planted", str(old))
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        for step in (1, 2):
            with pytest.raises(CheckpointError, match=rf"step_0000000{step}\.tmp-\w+: planted$"):
                _save(tmp_path, step, [("a", torch.zeros(2))])
            assert {path.name for path in tmp_path.iterdir()} == content
    assert torch.equal(open_checkpoint(before).tensor("a"), ONE[0][1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(CheckpointError, match=r"latest\.tmp-\w+: planted$"):
            _save(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == content | {"step_00000002"}


# ---------------------------------------------------------------- in the background


def test_a_save_that_failed_is_told_once_and_the_next_one_is_saved(tmp_path: Path) -> None:
    saver = BackgroundSaver(None)
    assert (saver.path, saver.busy, saver.failed, saver.wait()) == (None, False, False, None)
    given = {"config": {}, "state": {}}
    saver.save(tmp_path, 1, ONE, **given)
    first = saver.wait()
    assert first == saver.path == tmp_path / "step_00000001"
    for error in (CheckpointError("planted"), KeyboardInterrupt()):
        with mock.patch.object(background, "save_checkpoint", side_effect=error):
            saver.save(tmp_path, 2, ONE, **given)
            saver._thread.join()
        assert (saver.busy, saver.failed, saver.path) == (False, True, first)
        with pytest.raises(type(error)):
            saver.wait()
        assert (saver.failed, saver.wait(), saver.path) == (False, first, first)
    saver.save(tmp_path, 3, ONE, **given)
    saver._thread.join()
    assert (saver.busy, saver.failed, saver.path) == (False, False, first)
    assert saver.wait() == saver.wait() == tmp_path / "step_00000003"


def test_a_tensor_of_another_shape_or_dtype_is_saved_as_it_is(tmp_path: Path) -> None:
    """Under a name that had another shape or dtype in the previous save."""
    double = torch.full((3,), 0.1, dtype=torch.float64)
    shapes = (torch.ones(3), double, torch.tensor(2.0), double.expand(2, 3))
    with BackgroundSaver(None) as saver:
        for step, tensor in enumerate(shapes):
            saver.save(tmp_path, step, [("a", tensor)], config={}, state={}, keep=9)
    for step, tensor in enumerate(shapes):
        found = open_checkpoint(tmp_path / f"step_{step:08d}").tensor("a")
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)


@mock.patch.object(background, "save_checkpoint", mock.Mock(side_effect=CheckpointError("save")))
def test_an_error_of_the_block_is_raised_and_not_that_of_its_save(tmp_path: Path) -> None:
    def block(error: Exception | None) -> None:
        with BackgroundSaver(None) as saver:
            saver.save(tmp_path, 1, ONE, config={}, state={})
            if error is not None:
                raise error

    for error, wanted in ((None, CheckpointError), (ArithmeticError(), ArithmeticError)):
        with pytest.raises(wanted):
            block(error)
