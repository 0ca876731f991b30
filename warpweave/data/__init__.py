"""Token batches as pure functions of (seed, step, number), so that resuming needs only the step.

`source` selects the kind of data:

* ``None``: the source text of Python's own standard library (``*.py`` without tests), about 10 MB
  of real text that exists on every machine;
* a text file or a folder of text files, tokenized when opened and held in memory: as bytes (256
  ids, the default), or with any Hugging Face ``tokenizer.json``. Text must be UTF-8, with or
  without a byte-order mark, and must not contain a zero byte. UTF-16, Latin-1 and binary files are
  refused by name, whatever the tokenizer;
* a token file, memory-mapped and never copied: ``NAME.npy`` (one dimension, uint8, uint16 or
  uint32), or ``NAME.bin`` (the same numbers raw, little-endian) with a sidecar ``NAME.bin.json``:
  ``{"format": "warpweave-tokens", "version": 1, "dtype": "uint16", "tokens": 1234, "vocab_size":
  50257}``. An ``.npy`` may also have the sidecar; without it the vocabulary is the largest id plus
  one.

Training and validation never share a file: of n files, the max(1, round(fraction n)) whose relative
paths have the lowest hashes are for validation. A single file or a token file is cut near its end
instead.

A training sample is a window of S+1 tokens. Its offset is a hash of the counters (seed, step,
number), so each rank can fetch just its own samples, and every layout sees the same batch. The
label of the last token of a file, or of a `separator`, is ``IGNORE``: nothing in the text predicts
what comes next. `boundaries` splits a sample into documents there.

`source` opens any of them · `text` files and folders · `token_file` · `split` training and
validation · `tokenizer` · `dataset` samples and their order · `files` reading and writing.
"""

from warpweave.data.dataset import IGNORE, Dataset, boundaries
from warpweave.data.files import DataError
from warpweave.data.source import TOKEN_FILES, open_dataset
from warpweave.data.token_file import write_token_file
from warpweave.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

__all__ = [
    "IGNORE", "TOKEN_FILES", "ByteTokenizer", "DataError", "Dataset", "JsonTokenizer", "Tokenizer",
    "boundaries", "open_dataset", "write_token_file",
]  # fmt: skip
