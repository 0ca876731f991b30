"""Text files: find them, read UTF-8, tokenize; the ids are cached for the next opening."""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import json
import os
import sysconfig
from pathlib import Path

import numpy as np

from warpweave.data.dataset import Corpus
from warpweave.data.files import DataError, read_whole, replace, sha256
from warpweave.data.split import Split
from warpweave.data.token_file import map_tokens, write_token_file
from warpweave.data.tokenizer import ByteTokenizer, JsonTokenizer

_LIBRARY_SKIPS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "ensurepip")
)


def open_text(
    path: Path | None,
    split: Split,
    tokenizer_path: str | Path | None,
    pattern: str,
    cache: str | Path | None,
) -> Corpus:
    """Open a file, a folder's files that match `pattern`, or (None) the standard library."""
    tokenizer = ByteTokenizer() if tokenizer_path is None else JsonTokenizer(tokenizer_path)
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        # _sysconfigdata* is generated and holds the paths of the machine that built Python.
        generated = ("_sysconfigdata", "config-")
        found = (f for f in _walk(root, _LIBRARY_SKIPS) if f.endswith(".py"))
        name = "the Python standard library"
        files = [file for file in found if not file.startswith(generated)]
    elif path.is_dir():
        root, name = path, str(path)
        files = [f for f in _walk(path) if fnmatch.fnmatch(f.rsplit("/", 1)[-1], pattern)]
    else:
        root, name, files = path.parent, str(path), [path.name]
    if not files:
        raise DataError(f"{root} has no file that matches {pattern!r}")

    if len(files) > 1:
        files = split.choose(files)
        texts = [_read_text(root / file) for file in files]
    else:
        text = _read_text(root / files[0])
        low, high = split.cut(len(text))
        if tokenizer_path is not None:  # don't cut inside a UTF-8 character
            low, high = (_character_start(text, i) for i in (low, high))
        texts = [text[low:high]]

    digest = hashlib.sha256(f"{tokenizer.fingerprint} {tokenizer.vocab_size}".encode())
    for text in texts:
        digest.update(b"%d " % len(text))
        digest.update(text)
    fingerprint = digest.hexdigest()

    cached = None if cache is None or tokenizer_path is None else Path(cache) / fingerprint[:32]
    if cached is not None and cached.with_suffix(".json").exists():
        tokens, starts = _read_cache(cached)
    else:
        parts = [tokenizer.encode(text) for text in texts]
        starts = np.cumsum([0] + [len(part) for part in parts[:-1]], dtype=np.int64)
        tokens = np.concatenate(parts)
        if cached is not None and len(tokens):
            _write_cache(cached, tokens, starts, tokenizer.vocab_size)
    return Corpus(
        tokens,
        starts,
        tokenizer.vocab_size,
        name=name,
        fingerprint=fingerprint,
        tokenizer=tokenizer,
    )


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> list[str]:
    """Return the relative paths of regular files below `root`, sorted, with "/" on every system,
    without hidden files and folders, folders named in `skip`, and links to folders (may be loops).
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in skip]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(found)


def _character_start(text: bytes, index: int) -> int:
    while 0 < index < len(text) and text[index] & 0xC0 == 0x80:
        index -= 1
    return index


def _read_text(path: Path) -> bytes:
    """Return a file of UTF-8 text; otherwise raise `DataError` with what it is and what to do."""
    data = read_whole(path)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"{path} is UTF-16 or UTF-32 text; convert it to UTF-8: iconv -f UTF-16 -t UTF-8 "
            "(or -f UTF-32)"
        )
    if (zero := data.find(0)) >= 0:
        raise DataError(
            f"{path} is binary, or UTF-16 without a byte-order mark: it has a zero byte at offset "
            f"{zero} of {len(data)}; leave it out, or convert it to UTF-8 or to a token file"
        )
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start} of "
            f"{len(data)}; convert it (Latin-1: iconv -f LATIN1 -t UTF-8), or leave it out"
        ) from None
    return data


# ---- cache of token ids --------------------------------------------------------------------------


def _write_cache(path: Path, tokens: np.ndarray, starts: np.ndarray, vocab_size: int) -> None:
    """Write `path`.bin, .bin.json, .starts, and last .json with the digests; only for the user."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_token_file(path.with_suffix(".bin"), tokens, vocab_size=vocab_size)
    replace(path.with_suffix(".starts"), lambda file: starts.astype("<i8").tofile(file))
    digests = {s: sha256(path.with_suffix(s)) for s in (".bin", ".starts")}
    replace(path.with_suffix(".json"), lambda file: file.write(json.dumps(digests).encode()))


def _read_cache(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a cache; a damaged or manipulated one raises an error, and is never used silently."""
    try:
        digests = json.loads(read_whole(path.with_suffix(".json")))
    except (ValueError, RecursionError):
        digests = {}
    for suffix in (".bin", ".starts"):
        file = path.with_suffix(suffix)
        if not isinstance(digests, dict) or digests.get(suffix) != sha256(file, path.parent):
            raise DataError(
                f"the token cache {file} is damaged (its SHA-256 differs); delete {path}.* to "
                "rebuild it"
            )
    tokens, _ = map_tokens(path.with_suffix(".bin"))
    return tokens, np.fromfile(path.with_suffix(".starts"), dtype="<i8")
