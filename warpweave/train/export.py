"""Run ``warpweave export``."""

from __future__ import annotations

import json

from warpweave.checkpoint import CheckpointError
from warpweave.cli.messages import refusing, say
from warpweave.convert import ConvertError, to_hf
from warpweave.convert.fields import read_json
from warpweave.convert.source import other_tokenizer, read_stop_tokens
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.launch.processes import Processes
from warpweave.train.chosen import choose_checkpoint
from warpweave.train.export_options import ExportConfig, parse


def main(argv: list[str] | None = None) -> None:
    """Run ``warpweave export`` with the options in `argv`."""
    run(parse(argv))


def run(config: ExportConfig, processes: Processes | None = None) -> None:
    """Run ``warpweave export``."""
    with refusing(ValueError, ImportError, OSError, CheckpointError):
        chosen = choose_checkpoint(config.run, best=config.best)
        if chosen is None:
            raise ConvertError(f"{config.run} is not a run or a checkpoint of warpweave train")
        dtype = None if config.dtype is None else NAMED_DTYPES[config.dtype]
        like, tokenizer = config.like, config.tokenizer
        folder = to_hf(chosen.path, config.out, like=like, tokenizer=tokenizer, dtype=dtype)
    say(chosen.describe())
    if line := other_tokenizer(config.run, config.tokenizer):
        say(line)
    fields = read_json(folder / "config.json")
    has_tokenizer = any((folder / f"tokenizer.{end}").is_file() for end in ("json", "model"))
    if not has_tokenizer:
        say("exported without a tokenizer; pass --tokenizer FILE or --tokenizer bytes to add one")
    result = {
        "folder": str(folder),
        **chosen.fields,
        "architecture": fields["architectures"][0],
        "dtype": fields["dtype"],
        "tokenizer": has_tokenizer,
        "eos_token_ids": read_stop_tokens(folder),
        "files": sorted(path.name for path in folder.iterdir()),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
