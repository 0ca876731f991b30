"""The files that a source reads and the data cached about them: names, vocabularies, hashes, and
the leftovers of a failed write. `test_data.py` covers samples, splits and invalid input."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sysconfig
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refused import check

from warpweave.data import (
    ByteTokenizer,
    DataError,
    JsonTokenizer,
    boundaries,
    files,
    open_dataset,
    write_token_file,
)
from warpweave.data.files import read_whole, replace, sha256
from warpweave.data.tokenizer import smallest_dtype

# ---------------------------------------------------------------- selecting files


def _tree(folder: Path, *names: str) -> Path:
    """Make files that hold their own names."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>")
    return folder


def _read(source: str | Path | None, **options) -> str:
    data = open_dataset(source, seq_len=1, split="all", **options)
    assert data.starts.tolist() == [i for i, b in enumerate(bytes(data.tokens)) if b == ord("<")]
    return bytes(data.tokens).decode().replace("><", " ").strip("<>")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", "a.md b/a2.txt b/c/a.md z.txt"), ("*.md", "a.md b/c/a.md"),
        ("a*", "a.md b/a2.txt b/c/a.md"), ("[z]*", "z.txt"),
    ],
)  # fmt: skip
def test_a_pattern_matches_file_names_in_any_visible_folder(tmp_path, pattern, names):
    _tree(tmp_path, "z.txt", "a.md", "b/a2.txt", "b/c/a.md", ".a.md", ".b/a.md")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert _read(tmp_path, pattern=pattern) == names


def test_an_empty_path_is_the_folder_at_hand(tmp_path, monkeypatch):
    monkeypatch.chdir(_tree(tmp_path, "b.md", "a.md"))
    for source in ("", ".", Path()):
        assert _read(source) == "a.md b.md"


def test_the_standard_library_is_read_without_tests_and_generated_files(tmp_path, monkeypatch):
    skipped = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__",
               "ensurepip", "lib/test", "lib/tests", ".hidden")  # fmt: skip
    _tree(
        tmp_path, "b.py", "a.py", "lib/tester.py", "lib/deep/x.py", "lib/test.py", "c.txt", "d.pyc",
        "_sysconfigdata_x86.py", "config-3.11/y.py", *(f"{folder}/no.py" for folder in skipped),
    )  # fmt: skip
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name / ".."))
    (tmp_path / "stdlib").mkdir()
    assert _read(None) == "a.py b.py lib/deep/x.py lib/test.py lib/tester.py"
    assert open_dataset(seq_len=1).name == "the Python standard library"


# ---------------------------------------------------------------- vocabularies


@pytest.mark.parametrize("kind", ["bin", "npy"])
@pytest.mark.parametrize("vocab_size", [7, 9, 300])
def test_the_vocabulary_is_the_sidecars_or_reaches_to_the_largest_token(tmp_path, kind, vocab_size):
    path, ids = tmp_path / f"a.{kind}", np.array([0, 6, 3, 5], dtype=smallest_dtype(vocab_size))
    write_token_file(tmp_path / "a.bin", ids, vocab_size=vocab_size)
    sidecar = tmp_path / "a.bin.json"
    header = json.loads(sidecar.read_text())
    assert header == {
        "format": "warpweave-tokens", "version": 1, "dtype": ids.dtype.name, "tokens": 4,
        "vocab_size": vocab_size,
    }  # fmt: skip
    if kind == "npy":
        np.save(path, ids)
        assert open_dataset(path, seq_len=1, split="all").vocab_size == 7
        sidecar.rename(tmp_path / "a.npy.json")
    data = open_dataset(path, seq_len=3, split="all")
    assert (data.vocab_size, data.tokens.dtype) == (vocab_size, ids.dtype)
    assert data.tokens.tolist() == [0, 6, 3, 5]
    assert (data.name, data.tokenizer_name, data.starts.tolist()) == (str(path), None, [0])
    for ids in ([5, 0, 11], torch.tensor([5, 0, 11]), np.array([5, 0, 11])):
        assert data.decode(ids) == "5 0 11"
    for wrong in ({"tokens": 5}, {"tokens": 3}, {"dtype": "uint32"}):
        (tmp_path / f"a.{kind}.json").write_text(json.dumps(header | wrong))
        with pytest.raises(DataError, match=rf"a\.{kind}\.json says"):
            open_dataset(path, seq_len=1)


@pytest.mark.parametrize("more", [0, 1, 300])
def test_added_tokens_count_in_vocabulary_and_are_inserted_only_in_prompts(tmp_path, more):
    """None is inserted in text, but one that is written there is recognized."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({"?": 0, "one": 1, "two": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    added = [AddedToken(f"<{i}>", special=True) for i in range(more)]
    words.add_special_tokens(added)
    if more:
        words.post_processor = processors.TemplateProcessing("<0> $A", special_tokens=[("<0>", 3)])
    words.save(str(tmp_path / "t.json"))
    found = JsonTokenizer(tmp_path / "t.json")
    assert found.vocab_size == 3 + more
    ids = found.encode(b"one two three")
    assert (ids.tolist(), ids.dtype) == ([1, 2, 0], smallest_dtype(3 + more))
    assert found.prompt("two") == [*[3] * bool(more), 2]
    assert found.fingerprint == hashlib.sha256((tmp_path / "t.json").read_bytes()).hexdigest()
    if more:
        assert found.encode(b"one <0>").tolist() == [1, 3]
        assert found.decode([3, 1, 2 + more]) == f"<0> one <{more - 1}>"
    (tmp_path / "text").write_text("one two " * 9)
    data = open_dataset(tmp_path / "text", seq_len=2, split="all", tokenizer=tmp_path / "t.json")
    assert (data.vocab_size, data.tokens.tolist()) == (3 + more, [1, 2] * 9)
    assert data.tokenizer_name == found.fingerprint


def test_bytes_are_a_tokenizer_of_256():
    found = ByteTokenizer()
    every = bytes(range(256))
    assert (found.encode(every).tolist(), found.encode(every).dtype) == ([*every], np.uint8)
    assert found.prompt("aé") == [97, 0xC3, 0xA9]
    assert found.decode([97, 0xC3, 0xA9, 0xC3]) == "aé\ufffd"
    assert (found.vocab_size, found.fingerprint) == (256, "bytes")


def test_bytes_are_tokens_already_and_are_not_kept(tmp_path):
    _tree(tmp_path / "text", "b.md", "a.md")
    assert _read(tmp_path / "text", cache=tmp_path / "cache") == "a.md b.md"
    assert not (tmp_path / "cache").exists()


def test_boundaries_of_no_samples_and_of_labels_everywhere():
    assert boundaries(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 2)
    assert boundaries(torch.zeros(2, 5, dtype=torch.int64)).tolist() == [[0, 5]] * 2


# ---------------------------------------------------------------- cached hashes

TRUTH = hashlib.sha256(b"some bytes").hexdigest()


@pytest.fixture
def later(monkeypatch) -> None:
    """Move the clock long past all writes."""
    monkeypatch.setattr(files, "time", SimpleNamespace(time_ns=lambda: 2**62))


@pytest.mark.usefixtures("later")
def test_a_kept_hash_is_believed_until_size_times_inode_or_device_change(tmp_path):
    path, kept = tmp_path / "file", tmp_path / "kept"
    path.write_bytes(b"some bytes")
    assert sha256(path, kept) == TRUTH
    memory = kept / "digests.json"
    ((name, (*stamp, digest)),) = json.loads(memory.read_text()).items()
    status = path.stat()
    assert stamp == [
        status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev
    ]  # fmt: skip
    assert (name, digest, memory.stat().st_mode & 0o777) == (str(path), TRUTH, 0o600)
    assert kept.stat().st_mode & 0o777 == 0o700
    other = tmp_path / "other"
    other.write_bytes(b"others")
    memory.write_text(json.dumps({name: [*stamp, "believed"]}))
    assert sha256(path, kept) == sha256(kept / ".." / "file", kept) == "believed"
    assert sha256(path) == TRUTH
    assert sha256(other, kept) == hashlib.sha256(b"others").hexdigest()
    assert json.loads(memory.read_text()).keys() == {name, str(other)}  # both are kept
    for at in range(5):
        changed = [value + (i == at) for i, value in enumerate(stamp)]
        memory.write_text(json.dumps({name: [*changed, "believed"]}))
        assert sha256(path, kept) == TRUTH, at
        assert json.loads(memory.read_text()) == {name: [*stamp, TRUTH]}


@pytest.mark.parametrize("seconds", [0, 0.9, 1.1, 100])
def test_hash_of_a_file_changed_in_the_last_second_is_not_cached(tmp_path, monkeypatch, seconds):
    path, kept = tmp_path / "file", tmp_path / "kept"
    path.write_bytes(b"some bytes")
    os.utime(path, ns=(10**18, 10**18))  # an old mtime, but a new ctime
    changed = path.stat().st_ctime_ns
    clock = SimpleNamespace(time_ns=lambda: changed + round(seconds * 10**9))
    monkeypatch.setattr(files, "time", clock)
    assert sha256(path, kept) == TRUTH
    assert kept.exists() == (seconds > 1)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("changes", [False, True])
def test_the_hash_of_a_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path, monkeypatch, changes
):
    path, kept, chunks = tmp_path / "file", tmp_path / "kept", []
    path.write_bytes(b"some bytes")

    class Sha:
        def update(self, chunk: bytes) -> None:
            chunks.append(chunk)
            if changes and len(chunks) == 2:
                os.utime(path, ns=(10**18, 10**18))

        def hexdigest(self) -> str:
            return TRUTH

    monkeypatch.setattr(files, "_CHUNK", 4)
    monkeypatch.setattr(files, "hashlib", SimpleNamespace(sha256=Sha))
    assert sha256(path, kept) == TRUTH
    assert chunks == [b"some", b" byt", b"es"]
    assert kept.exists() == (not changes)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("kind", ["bin", "npy"])
def test_the_hash_of_a_token_file_is_kept_in_the_cache_of_its_dataset(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    write_token_file(tmp_path / "a.bin", np.arange(9), vocab_size=9)
    np.save(tmp_path / "a.npy", np.arange(9, dtype=np.uint8))
    data = open_dataset(path, seq_len=2, cache=tmp_path / "cache")
    plain = open_dataset(path, seq_len=2)
    kept = json.loads((tmp_path / "cache" / "digests.json").read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert {name: found[-1] for name, found in kept.items()} == {str(path): digest}
    assert data.fingerprint == plain.fingerprint
    assert data.fingerprint.startswith("whole:")


# ---------------------------------------------------------------- writing and reading whole


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path, other, here = tmp_path / "file", tmp_path / "other", re.escape(str(tmp_path))
    other.write_text("mine")
    path.symlink_to(other)
    old = os.umask(0o022)
    try:
        for mode, found in ((None, 0o600), (0o666, 0o644), (0o640, 0o640)):
            given = () if mode is None else (mode,)
            replace(path, lambda file: file.write(b"new"), *given)
            assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", found)
    finally:
        os.umask(old)
    assert other.read_text() == "mine"
    assert not path.is_symlink()

    def fails(file) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    words = rf"^cannot write {here}/file: No space left on device$"
    check(lambda: replace(path, fails), words, DataError)
    assert path.read_bytes() == b"new"
    assert sorted(tmp_path.iterdir()) == [path, other]
    with pytest.raises(DataError, match=rf"^cannot write {here}/none/file: No such file"):
        replace(tmp_path / "none" / "file", lambda file: None)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    here = re.escape(str(tmp_path))
    assert read_whole(_tree(tmp_path, "a") / "a") == b"<a>"
    for call in (read_whole, sha256):
        none = partial(call, tmp_path / "none")
        check(none, rf"^cannot read {here}/none: No such file or dir", DataError)
        check(partial(call, tmp_path), rf"^cannot read {here}: Is a directory$", DataError)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "[" * 100_000], ids="{:.2}".format)
def test_a_cache_whose_digests_are_damaged_is_refused_by_name(tmp_path, text):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "t.json"))
    (tmp_path / "text").write_text("a b " * 9)
    options = {"seq_len": 2, "split": "all", "tokenizer": tmp_path / "t.json"}
    cache = tmp_path / "cache"
    data = open_dataset(tmp_path / "text", cache=cache, **options)
    kept = cache / data.fingerprint[:32]
    names = [".bin", ".bin.json", ".json", ".starts"]
    assert sorted(path.name for path in cache.iterdir()) == [kept.name + name for name in names]
    kept.with_suffix(".json").write_text(text)
    words = f"{kept}.bin is damaged (its SHA-256 differs); delete {kept}.* to rebuild it"
    with pytest.raises(DataError, match=f"^the token cache {re.escape(words)}$"):
        open_dataset(tmp_path / "text", cache=cache, **options)
    for path in cache.iterdir():
        path.unlink()
    again = open_dataset(tmp_path / "text", cache=cache, **options)
    assert again.tokens.tolist() == data.tokens.tolist() == [1, 0] * 9
