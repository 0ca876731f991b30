"""Data: samples depend only on (seed, step, number); splits share no file; errors name files."""

import hashlib
import itertools
import json
import os
import time
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from refused import check, one_line

from warpweave.data import (
    IGNORE,
    DataError,
    Dataset,
    JsonTokenizer,
    boundaries,
    files,
    open_dataset,
    token_file,
    write_token_file,
)
from warpweave.data.split import Split


def folder_of(path: Path, count: int = 10, size: int = 300) -> Path:
    """Make files whose every byte identifies the file."""
    path.mkdir()
    for i in range(count):
        (path / f"{i:02d}.txt").write_bytes(bytes([65 + i]) * size)
    return path


# ---- samples -------------------------------------------------------------------------------------


def test_any_split_of_a_batch_over_ranks_is_the_same_batch(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "text")
    data = open_dataset(source, seq_len=31, seed=5)
    tokens, labels = data.batch(17, range(8))
    assert tokens.shape == labels.shape == (8, 31)
    assert tokens.dtype == labels.dtype == torch.int64
    for ranks in (1, 2, 4, 8):
        for r in range(ranks):
            part = open_dataset(source, seq_len=31, seed=5).batch(17, range(r, 8, ranks))
            assert torch.equal(part[0], tokens[r::ranks])
            assert torch.equal(part[1], labels[r::ranks])


def test_seed_step_and_number_each_change_the_sample() -> None:
    sets = [open_dataset(seq_len=16, seed=seed) for seed in (0, 1)]
    drawn = itertools.product(sets, range(3), range(3))
    assert len({(*data.batch(step, [n])[0][0].tolist(),) for data, step, n in drawn}) == 18


def test_offsets_are_uniform_and_reach_both_ends(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.bin", np.arange(20), vocab_size=20)
    data = open_dataset(tmp_path / "a.bin", seq_len=9, split="all")
    first = data.batch(3, range(11_000))[0][:, 0]
    counts = torch.bincount(first, minlength=12)
    assert counts[11] == 0  # the last window begins at 10: tokens 10..18, labels 11..19
    expected = 1000.0
    chi_squared = ((counts[:11] - expected) ** 2 / expected).sum().item()
    assert chi_squared < 29.6  # 10 degrees of freedom, p = 0.001


def test_labels_are_the_next_tokens_but_where_another_file_begins(tmp_path: Path) -> None:
    data = open_dataset(folder_of(tmp_path / "text", 4, 7), seq_len=20, split="all")
    joined = b"A" * 7 + b"B" * 7 + b"C" * 7 + b"D" * 7
    assert bytes(data.tokens) == joined
    tokens, labels = data.batch(0, range(50))
    offsets = [joined.index(bytes(row)) for row in tokens.tolist()]  # 20 bytes occur only once
    assert set(offsets) == set(range(28 - 20))
    for offset, row in zip(offsets, labels.tolist(), strict=True):
        following = range(offset + 1, offset + 21)
        assert row == [IGNORE if i % 7 == 0 else joined[i] for i in following]


def test_documents_end_where_files_and_separators_do(tmp_path: Path) -> None:
    tokens = np.array([5, 0, 6, 7, 0, 0, 8, 9, 1, 2, 3, 4])
    write_token_file(tmp_path / "a.bin", tokens, vocab_size=10)
    data = open_dataset(tmp_path / "a.bin", seq_len=6, split="all", separator=0)
    _, labels = data.fixed_batch(range(2), count=2)
    assert labels.tolist() == [[0, IGNORE, 7, 0, IGNORE, IGNORE], [IGNORE, 9, 1, 2, 3, 4]]
    assert boundaries(labels).tolist() == [[0, 2, 5, 6, 6], [0, 1, 6, 6, 6]]
    few = boundaries(labels[:, :5])  # five would be treated as the document of each of five tokens
    assert few.tolist() == [[0, 2, 5, 5], [0, 1, 5, 5]]
    assert boundaries(labels[:1, :4]).tolist() == [[0, 2, 4]]
    assert boundaries(labels[:1, 1:5]).tolist() == [[0, 1, 4, 4, 4]]
    plain = open_dataset(tmp_path / "a.bin", seq_len=6, split="all").fixed_batch(range(2), count=2)
    assert boundaries(plain[1]).tolist() == [[0, 6], [0, 6]]
    files = open_dataset(folder_of(tmp_path / "text", 4, 7), seq_len=20, split="all")
    text, labels = files.batch(0, range(50))
    for row, bounds in zip(text, boundaries(labels)):
        pieces = [set(row[a:b].tolist()) for a, b in pairwise(bounds) if a < b]
        assert all(len(piece) == 1 for piece in pieces)  # a file is one letter, seven times
        assert len(pieces) == len(row.unique())


def test_evaluation_samples_are_fixed_disjoint_and_spread_over_the_text(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.bin", np.arange(1000), vocab_size=1000)
    one = open_dataset(tmp_path / "a.bin", seq_len=9, seed=1, split="all")
    two = open_dataset(tmp_path / "a.bin", seq_len=9, seed=2, split="all")
    tokens, labels = one.fixed_batch(range(100), count=100)
    assert torch.equal(tokens, two.fixed_batch(range(100), count=100)[0])
    assert torch.equal(one.fixed_batch([7, 3], count=100)[1], labels[[7, 3]])
    assert (tokens[0, 0], labels[-1, -1]) == (0, 999)
    assert tokens.unique().numel() == tokens.numel()
    check(lambda: one.fixed_batch([4], count=4), r"\[0, 4\)", DataError)
    exact = open_dataset(tmp_path / "a.bin", seq_len=999, split="all")
    assert exact.fixed_batch([0], count=1)[0].shape == exact.batch(0, [0])[0].shape == (1, 999)


# ---- splits --------------------------------------------------------------------------------------


def test_train_and_validation_share_no_file_and_lose_none(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "text", 20)
    train = open_dataset(source, seq_len=8, validation_fraction=0.2)
    validation = open_dataset(source, seq_len=8, split="validation", validation_fraction=0.2)
    everything = open_dataset(source, seq_len=8, split="all")
    files = [set(bytes(d.tokens)) for d in (train, validation, everything)]
    assert not files[0] & files[1]
    assert files[0] | files[1] == files[2]
    assert len(files[1]) == 4
    moved = tmp_path / "elsewhere"
    source.rename(moved)  # paths are relative to the folder
    again = open_dataset(moved, seq_len=8, split="validation", validation_fraction=0.2)
    assert bytes(again.tokens) == bytes(validation.tokens)
    assert again.fingerprint == validation.fingerprint != train.fingerprint


def test_validation_has_the_nearest_number_of_files_at_least_one_never_all() -> None:
    for count, fraction, chosen in (
        *((30, 0.05, 2), (7, 0.25, 2), (7, 0.2, 1), (2, 0.9, 1)),
        *((3, 1e-9, 1), (3, 0.5, 2), (3, 0.99, 2)),
    ):
        files = [f"{i}.txt" for i in range(count)]
        mine, others = (Split(name, fraction).choose(files) for name in ("validation", "train"))
        assert (len(mine), sorted(mine + others)) == (chosen, sorted(files))


def test_one_file_is_cut_near_its_end(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(1, 101)))
    train = open_dataset(file, seq_len=4, validation_fraction=0.1)
    validation = open_dataset(file, seq_len=4, split="validation", validation_fraction=0.1)
    assert bytes(train.tokens) == bytes(range(1, 91))
    assert bytes(validation.tokens) == bytes(range(91, 101))
    assert train.starts.dtype == np.int64


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.3])
def test_the_validation_part_is_the_fraction_to_half_a_token(fraction: float) -> None:
    for size in range(120):
        low, high = Split("validation", fraction).cut(size)
        assert 0 <= low <= high == size
        assert high - low == 1 or abs(high - low - fraction * size) <= 0.5, size
        assert Split("train", fraction).cut(size) == (0, low)


# Sizes at which float32, int32 and float64 lose integers.
@pytest.mark.parametrize("size", [2**24 + 7, 2**31 + 7, 2**53 + 7])
def test_samples_of_a_row_of_any_length_begin_where_whole_numbers_say(size, monkeypatch) -> None:
    tokens = np.broadcast_to(np.uint8(0), size)  # uses no memory
    starts = np.array([0, size - 3], dtype=np.int64)
    data = Dataset(tokens, starts, 256, "", "", None, seq_len=4, seed=1)
    assert data.batch(2**40, [2**33])[1].tolist() == [[0, 0, 0, 0]]
    last = data._windows([size - 5])[1]  # its third label would be the next file's
    assert last.tolist() == [[0, IGNORE, 0, 0]]
    begun: list[int] = []
    monkeypatch.setattr(Dataset, "_windows", lambda self, offsets: begun.extend(offsets))
    data.fixed_batch(range(7), count=7)
    data.batch(2**40, range(2**33, 2**33 + 500))
    assert begun[:7] == [Fraction(i * (size - 5), 6).__floor__() for i in range(7)]
    assert len(set(begun[7:])) == 500
    assert max(begun) == size - 5
    odd = sum(offset % 2 for offset in begun[7:])  # a float of 24 bits has no odd numbers here
    assert 200 < odd < 300


def test_the_default_text_is_the_standard_library() -> None:
    train = open_dataset(seq_len=64)
    validation = open_dataset(seq_len=64, split="validation")
    assert train.vocab_size == 256
    assert len(train) > 3_000_000
    assert 0.01 < len(validation) / len(train) < 0.3
    text = bytes(train.tokens)
    assert b"def __init__(self" in text
    assert b"build_time_vars = {" not in text  # generated, with paths of the build machine
    assert "self" in train.decode(train.tokens[:200_000].tolist())


# ---- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "width"), [(256, 1), (257, 2), (1 << 16, 2), (65537, 4)])
def test_a_token_takes_as_few_bytes_as_its_vocabulary_needs(tmp_path, vocab_size, width) -> None:
    ids = np.array([0, vocab_size - 1, 3])
    write_token_file(tmp_path / "a.bin", ids, vocab_size=vocab_size)
    assert (tmp_path / "a.bin").stat().st_size == 3 * width
    assert open_dataset(tmp_path / "a.bin", seq_len=1, split="all").tokens.tolist() == ids.tolist()


def tokenizer_file(path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = {**alphabet, "th": 256, "the": 257}
    tokenizer.model = models.BPE(vocabulary, [("t", "h"), ("th", "e")])
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_gives_its_own_ids_and_text_back(tmp_path: Path) -> None:
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    text = "the thé 漢字 other\n" * 20
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    data = open_dataset(tmp_path / "text.txt", seq_len=5, split="all", tokenizer=tokenizer)
    assert data.vocab_size == 258
    assert data.tokens.dtype == np.uint16
    assert (data.tokens == 257).sum() == 40
    assert data.decode(data.tokens.tolist()) == text


def test_a_cut_never_parts_a_character(tmp_path: Path) -> None:
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    for extra, fraction in itertools.product(range(4), (0.05, 1e-9, 0.015)):
        file = tmp_path / f"{extra}.txt"  # 150 bytes and more: the last byte, the last two
        file.write_text("x" * extra + "漢" * 50, encoding="utf-8")
        how = {"seq_len": 1, "tokenizer": tokenizer, "validation_fraction": fraction}
        parts = [open_dataset(file, split=split, **how) for split in ("train", "validation")]
        if fraction < 0.05:
            assert parts[1].decode(parts[1].tokens.tolist()) == "漢"
        whole = "".join(part.decode(part.tokens.tolist()) for part in parts)
        assert whole == file.read_text(encoding="utf-8")


TEXT = "Das Café am Ende der Straße, 漢字 and 🙂.\n"


@pytest.mark.parametrize("tokenizer", [None, "tokenizer.json"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_utf8_is_taken_as_it_is_with_or_without_a_mark(tmp_path, tokenizer, mark) -> None:
    file = tmp_path / "text.txt"
    file.write_text(mark + TEXT, encoding="utf-8")
    tokenizer = tokenizer and tokenizer_file(tmp_path / tokenizer)
    data = open_dataset(file, seq_len=4, split="all", tokenizer=tokenizer)
    assert data.decode(data.tokens.tolist()) == mark + TEXT


NO_TEXT = {
    "utf16": (TEXT.encode("utf-16"), "is UTF-16 or UTF-32 text; convert it to UTF-8: iconv -f"),
    "utf16be": (b"\xfe\xff" + TEXT.encode("utf-16-be"), "is UTF-16 or UTF-32 text; convert it"),
    "utf32": (TEXT.encode("utf-32"), "is UTF-16 or UTF-32 text; convert it to UTF-8"),
    "utf16 without mark": (TEXT.encode("utf-16-le"), "or UTF-16 .* a zero byte at offset 1 of 80;"),
    "binary": (b"\x7fELF\x02\x01\x01\0\0\0", "is binary.* a zero byte at offset 7 of 10;"),
    "zero at the end": (b"text" * 9 + b"\0", "is binary.* a zero byte at offset 36 of 37;"),
    "latin1": (b"caf\xe9 au lait", "is not UTF-8: byte 0xe9 at offset 3 of 12; convert it"),
    "cut inside a character": (TEXT.encode()[:8], "is not UTF-8: byte 0xc3 at offset 7 of 8"),
    "surrogate": (b"some \xed\xa0\x80 text", "is not UTF-8: byte 0xed at offset 5 of 13"),
}


@pytest.mark.parametrize("tokenizer", [None, "tokenizer.json"])
@pytest.mark.parametrize("kind", NO_TEXT)
def test_what_is_no_utf8_is_refused_by_name_alone_and_in_a_folder(tmp_path, kind, tokenizer):
    content, says = NO_TEXT[kind]
    tokenizer = tokenizer and tokenizer_file(tmp_path / tokenizer)
    folder = folder_of(tmp_path / "text", 3)
    (folder / "odd").write_bytes(content)
    for source in (folder, folder / "odd"):
        with pytest.raises(DataError, match=says) as error:
            open_dataset(source, seq_len=4, split="all", tokenizer=tokenizer)
        assert one_line(error).startswith(str(folder / "odd"))


def test_the_cache_gives_the_same_data_until_the_text_changes(tmp_path: Path) -> None:
    tokenizer, source = tokenizer_file(tmp_path / "tokenizer.json"), folder_of(tmp_path / "text")
    options = {"seq_len": 9, "tokenizer": tokenizer}
    cache = tmp_path / "cache"
    plain = open_dataset(source, **options)
    for _ in range(2):
        cached = open_dataset(source, cache=cache, **options)
        assert np.array_equal(cached.tokens, plain.tokens)
        assert np.array_equal(cached.starts, plain.starts)
    assert isinstance(cached.tokens, np.memmap)
    assert {file.stat().st_mode & 0o777 for file in cache.iterdir()} == {0o600}
    for file in source.iterdir():
        file.write_bytes(b"changed " * 40)
    changed = open_dataset(source, cache=cache, **options)
    assert "changed" in changed.decode(changed.tokens.tolist())
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="its train split has 0 tokens, but one sample needs"):
        open_dataset(tmp_path / "empty", cache=cache, **options)


def test_damage_to_any_file_of_a_cache_is_named(tmp_path: Path) -> None:
    tokenizer, source = tokenizer_file(tmp_path / "tokenizer.json"), folder_of(tmp_path / "text")
    options = {"seq_len": 9, "tokenizer": tokenizer, "cache": tmp_path / "cache"}
    open_dataset(source, **options)
    for suffix in (".bin", ".starts"):
        (file,) = (tmp_path / "cache").glob(f"*{suffix}")
        whole = file.read_bytes()
        for damage in (bytes([whole[0] ^ 1]) + whole[1:], whole[:-1]):
            file.write_bytes(damage)
            with pytest.raises(DataError, match=rf"\{suffix} is damaged") as error:
                open_dataset(source, **options)
            one_line(error)
        file.write_bytes(whole)
    open_dataset(source, **options)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"model": 1}')
    with pytest.raises(DataError, match=r"t.json is not a tokenizers JSON file") as error:
        JsonTokenizer(tmp_path / "t.json")
    one_line(error)


def test_the_fingerprint_is_of_texts_their_bounds_and_the_tokenizer(tmp_path: Path) -> None:
    def fingerprint(*texts: bytes, tokenizer: Path | None = None) -> str:
        folder = tmp_path / f"{number}"
        folder.mkdir()
        for i, text in enumerate(texts):
            (folder / f"{i}").write_bytes(text)
        return open_dataset(folder, seq_len=1, split="all", tokenizer=tokenizer).fingerprint

    number, seen = 0, []
    tokenizers = [None]
    for merges in ((), (("t", "h"),)):
        tokenizers.append(tokenizer_file(tmp_path / f"{len(merges)}.json"))
        kept = json.loads(tokenizers[-1].read_text())
        kept["model"]["merges"] = merges
        tokenizers[-1].write_text(json.dumps(kept))
    for texts in (
        (b"the", b"end"), (b"th", b"eend"), (b"theend",), (b"the", b"enD"), (b"the end", b"of"),
        (b"the", b"end of"), (b"the end of",),
    ):  # fmt: skip
        for tokenizer in tokenizers:
            seen.append(fingerprint(*texts, tokenizer=tokenizer))
            number += 1
            assert fingerprint(*texts, tokenizer=tokenizer) == seen[-1]
            number += 1
    tokens = np.arange(3 << 20) % 200
    for vocabulary, at in ((200, None), (201, None), (300, None), (200, 0), (200, -1)):
        changed = tokens.copy()
        if at is not None:
            changed[at] += 1
        write_token_file(tmp_path / "a.bin", changed, vocab_size=vocabulary)
        seen.append(open_dataset(tmp_path / "a.bin", seq_len=1, split="all").fingerprint)
    assert len(set(seen)) == len(seen) == 21 + 5


# ---- token files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "u1"), (50257, "<u2"), (70_000, "<u4")])
def test_token_files_come_back_memory_mapped(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    tokens = np.random.default_rng(0).integers(0, vocab_size, 5000)
    write_token_file(tmp_path / "a.bin", tokens, vocab_size=vocab_size)
    np.save(tmp_path / "b.npy", tokens.astype(dtype))
    assert (tmp_path / "a.bin").read_bytes() == tokens.astype(dtype).tobytes()
    a = open_dataset(tmp_path / "a.bin", seq_len=9)
    b = open_dataset(tmp_path / "b.npy", seq_len=9)
    assert isinstance(a.tokens, np.memmap)
    assert isinstance(b.tokens, np.memmap)
    assert a.vocab_size == vocab_size
    assert b.vocab_size == tokens.max() + 1
    assert torch.equal(a.batch(1, range(4))[0], b.batch(1, range(4))[0])
    assert len(open_dataset(tmp_path / "a.bin", seq_len=9, split="validation")) == 250


def test_a_token_file_whose_overwriting_was_cut_short_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "a.bin", token_file.replace
    write_token_file(path, np.arange(4), vocab_size=5)

    def die_at_sidecar(path: Path, fill: object) -> None:
        if path.suffix == ".json":
            raise KeyboardInterrupt
        write(path, fill)

    monkeypatch.setattr(token_file, "replace", die_at_sidecar)
    with pytest.raises(KeyboardInterrupt):
        write_token_file(path, np.array([4, 4, 4, 4]), vocab_size=5)
    check(lambda: open_dataset(path, seq_len=2), r"a\.bin\.json is missing", DataError)


def test_what_no_token_file_can_hold_is_not_written(tmp_path: Path) -> None:
    for tokens in (np.array([5]), np.array([-1]), np.array([0.5]), np.array([], dtype=int)):
        with pytest.raises(DataError, match="must"):
            write_token_file(tmp_path / "a.bin", tokens, vocab_size=5)
    with pytest.raises(DataError, match=r"must end in .bin"):
        write_token_file(tmp_path / "a.txt", np.array([1]), vocab_size=5)
    for tokens in ([1, 2], torch.tensor([1, 2])):
        words = f"must be a NumPy array of integers, got {type(tokens).__name__}; convert them with"
        with pytest.raises(DataError, match=words):
            write_token_file(tmp_path / "a.bin", tokens, vocab_size=5)
    assert list(tmp_path.iterdir()) == []


def test_token_outside_the_vocabulary_is_rejected_when_data_is_read(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.bin", np.arange(100), vocab_size=100)
    sidecar = tmp_path / "a.bin.json"
    sidecar.write_text(sidecar.read_text().replace('"vocab_size": 100', '"vocab_size": 50'))
    with pytest.raises(DataError, match=r"expected tokens < 50, got 99"):
        open_dataset(tmp_path / "a.bin", seq_len=98, split="all").batch(0, range(9))


class _Canary:
    touched = False

    def __reduce__(self):
        return (setattr, (_Canary, "touched", True))


def test_an_npy_file_is_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "evil.npy", np.array([_Canary()], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"evil.npy .* is not an array of numbers") as error:
        open_dataset(tmp_path / "evil.npy", seq_len=4)
    one_line(error)
    assert not _Canary.touched
    np.load(tmp_path / "evil.npy", allow_pickle=True)
    assert _Canary.touched  # the canary works


def sidecar(**changes) -> str:
    header = {"format": "warpweave-tokens", "version": 1, "dtype": "uint16", "tokens": 4}
    return json.dumps({**header, "vocab_size": 9, **changes})


@pytest.mark.parametrize(
    ("files", "source", "says"),
    [
        ({}, "absent", "absent does not exist"),
        ({"d/x": b""}, "d", "its train split has 0 tokens, but one sample needs seq_len \\+ 1 = 9"),
        ({"d/.x": b"hidden"}, "d", "has no file that matches"),
        ({"a.txt": b"12345678"}, "a.txt", "a.txt: its train split has 7 tokens"),
        ({"a.bin": b"12345678"}, "a.bin", "a.bin.json is missing"),
        ({"a.bin": b"1234567", "a.bin.json": sidecar()}, "a.bin", "7 bytes.* 4 tokens.* 8 bytes"),
        ({"a.bin": b"", "a.bin.json": "{"}, "a.bin", "is not JSON"),
        ({"a.bin": b"", "a.bin.json": "[]"}, "a.bin", r"a.bin.json must be an object, got \[\]"),
        ({"a.bin": b"", "a.bin.json": sidecar(version=2)}, "a.bin", "version must be 1, got 2"),
        ({"a.bin": b"", "a.bin.json": sidecar(dtype="O")}, "a.bin", "dtype must be one of uint8"),
        ({"a.bin": b"", "a.bin.json": sidecar(tokens=True)}, "a.bin", "tokens must be in .* True"),
        ({"a.npy": b"junk"}, "a.npy", "a.npy .4 bytes. is not an array"),
        ({"a.bin": b"12345678", "a.bin.json": sidecar(vocab_size=2**40)}, "a.bin", "got 1099"),
        ({"a.npy": b""}, "a.npy", "a.npy .0 bytes. is not an array"),
        ({"a.npy": b"PK\3\4cut short"}, "a.npy", "a.npy is an archive of arrays"),
        ({"a.npy/x": b""}, "a.npy", "a.npy .* is not an array of numbers: .*[Dd]irectory"),
    ],
)
def test_a_bad_source_is_one_line_with_the_path_and_the_sizes(
    tmp_path: Path, files: dict, source: str, says: str
) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=says) as error:
        open_dataset(tmp_path / source, seq_len=8)
    assert str(tmp_path) in one_line(error)


def test_an_npy_of_another_kind_or_that_its_sidecar_denies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for write, shape, dtype, words in (
        (np.save, (3, 4), np.uint16, r"has uint16\[3, 4\]"),
        (np.save, 5, np.float32, r"has float32\[5\]"),
        (np.savez, 5, np.uint16, "a.npy is an archive of arrays"),
        (np.save, 5, np.uint16, "'tokens': 5.*a.npy.json says"),
    ):
        with path.open("wb") as file:
            write(file, np.zeros(shape, dtype))
        if "json" in words:
            (tmp_path / "a.npy.json").write_text(sidecar())
        check(lambda: open_dataset(path, seq_len=1), words, DataError)


# ---- changes between two runs --------------------------------------------------------------------


def _age(path: Path) -> None:
    """Make the file look as if it had been written a while ago."""
    past = time.time_ns() - 10**10
    os.utime(path, ns=(past, past))
    while time.time_ns() - path.stat().st_ctime_ns < 1.1 * 10**9:
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["bin", "npy"])
def test_any_byte_of_a_token_file_is_in_its_fingerprint(tmp_path: Path, kind: str) -> None:
    """4 MiB, with one token changed at either end, in the middle, and halfway."""
    path, found = tmp_path / f"tokens.{kind}", set()
    for part in (slice(0), slice(1), slice(2**20, 2**20 + 1), slice(-1, None),
                 slice(2**19, 2**19 * 3)):  # fmt: skip
        tokens = (np.arange(2**21) * 7919 % 59999).astype(np.uint16)
        tokens[part] ^= 1
        if kind == "npy":
            np.save(path, tokens)
        else:
            write_token_file(path, tokens, vocab_size=60000)
        fingerprint = open_dataset(path, seq_len=4).fingerprint
        assert open_dataset(path, seq_len=4, split="validation").fingerprint == fingerprint
        found.add(fingerprint)
    assert len(found) == 5


@pytest.mark.parametrize("text", ["", "[]", "{", '{"NAME": 3}', '{"NAME": []}', "[" * 100_000])
def test_damaged_hashes_are_computed_anew(tmp_path: Path, text: str) -> None:
    path, kept = tmp_path / "file", tmp_path / "kept"
    path.write_bytes(b"some bytes")
    kept.mkdir()
    (kept / "digests.json").write_text(text.replace("NAME", str(path)))
    assert files.sha256(path, kept) == hashlib.sha256(b"some bytes").hexdigest()


def test_a_folder_that_cannot_keep_hashes_costs_time_only(tmp_path: Path) -> None:
    path, kept = tmp_path / "file", tmp_path / "kept"
    path.write_bytes(b"some bytes")
    _age(path)
    kept.touch()
    assert files.sha256(path, kept) == hashlib.sha256(b"some bytes").hexdigest()
    (tmp_path / "other" / "digests.json").mkdir(parents=True)
    assert files.sha256(path, tmp_path / "other") == hashlib.sha256(b"some bytes").hexdigest()
    assert [found.name for found in (tmp_path / "other").iterdir()] == ["digests.json"]
    check(lambda: files.sha256(tmp_path / "absent", kept), "cannot read", DataError)
