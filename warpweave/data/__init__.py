"""Text as token batches that are pure functions of (seed, step, number), so resume needs the step.

Sources, chosen by what `source` is:

* ``None``: the source text of Python's own standard library (``*.py`` without tests), about 10 MB
  of real text that is on every machine;
* a text file or a folder of them, tokenised at opening and held in memory: bytes as they are (256
  ids, the default), or any Hugging Face ``tokenizer.json``. Text is UTF-8, with or without a
  byte-order mark, and holds no zero byte: what is UTF-16, Latin-1 or binary is refused by name,
  whatever the tokenizer;
* a token file, memory-mapped and never copied: ``NAME.npy`` (one dimension, uint8, uint16 or
  uint32), or ``NAME.bin`` (the same numbers raw, little-endian) with ``NAME.bin.json`` beside it:
  ``{"format": "warpweave-tokens", "version": 1, "dtype": "uint16", "tokens": 1234, "vocab_size":
  50257}``. An ``.npy`` may have the sidecar too; without it the vocabulary is the largest id plus
  one.

Train and validation never share a file: of n files those max(1, round(fraction n)) whose relative
paths hash lowest are validation. One file alone, or a token file, is cut near its end instead.

A training sample is a window of S+1 tokens. Its offset is a hash of the counters (seed, step,
number), so every rank can fetch just its own samples and any layout sees the same batch. The label
of the last token of a file, or of a `separator`, is ``IGNORE``: nothing in the text foretells what
comes next, and there `boundaries` cuts a sample into documents.

`source` opens any of them · `text` files and folders · `token_file` · `split` training and
validation · `tokenizer` · `dataset` samples and their order · `files` what that stands on.
"""

from warpweave.data.dataset import IGNORE, Dataset, boundaries
from warpweave.data.files import DataError
from warpweave.data.source import TOKEN_FILES, open_dataset
from warpweave.data.token_file import write_token_file
from warpweave.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

__all__ = [
    "IGNORE",
    "TOKEN_FILES",
    "ByteTokenizer",
    "DataError",
    "Dataset",
    "JsonTokenizer",
    "Tokenizer",
    "boundaries",
    "open_dataset",
    "write_token_file",
]
