"""Go on with texts by a trained model, on one device or on tensor ranks and pipeline stages.

MODEL is a folder of transformers, the folder of a run of ``warpweave train``, or one checkpoint of
it. Several prompts are one batch. Exit codes: 0 done, 1 failed, 2 refused.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from warpweave.checkpoint import CheckpointError
from warpweave.convert.source import (
    find_tokenizer,
    open_model,
    read_model_config,
    read_stop_tokens,
)
from warpweave.data import ByteTokenizer, JsonTokenizer, Tokenizer
from warpweave.dtypes import DTYPES
from warpweave.generate import Sampling, check_prompts, generate
from warpweave.gpt import GPT
from warpweave.launch import join, launch, reported, under_torchrun
from warpweave.messages import one_line, say
from warpweave.parallel.mesh import Mesh


@dataclass(frozen=True)
class SampleConfig:
    """What to go on with, and how."""

    model: Annotated[Path, tyro.conf.Positional]
    """A folder of transformers, a run's folder, or a checkpoint in it."""
    prompt: tuple[str, ...]
    """The texts to go on with."""
    tokens: int = 100
    """New tokens of each, at most."""
    temperature: float = 0.8
    """Of the softmax that is drawn from; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the fewest of the likeliest tokens that have this probability together."""
    seed: int = 0
    """Of the draws."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizers JSON; default: the model's, or bytes if it has none."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline ranks."""
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Of parameters and activations."""
    impl: Literal["triton", "torch"] | None = None
    """What computes; default: the Triton kernels on a GPU, torch on the CPU."""
    timeout: float = 300.0
    """Seconds that any exchange between ranks may take."""

    @property
    def mesh(self) -> Mesh:
        """The mesh's sizes."""
        return Mesh(tp=self.tp, pp=self.pp)

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen; a text ends with the model's own end tokens."""
        return Sampling(
            self.tokens,
            self.temperature,
            self.top_k,
            self.top_p,
            read_stop_tokens(self.model),
            self.seed,
        )

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer of the prompts."""
        path = self.tokenizer if self.tokenizer is not None else find_tokenizer(self.model)
        return ByteTokenizer() if path is None else JsonTokenizer(path)

    def prompts(self) -> list[list[int]]:
        """The prompts' tokens."""
        tokenizer = self.open_tokenizer()
        return [tokenizer.prompt(text) for text in self.prompt]

    def check(self) -> None:
        """Raise a one-line error for what cannot work, before any rank is started."""
        config = read_model_config(self.model)
        config.check(self.mesh)
        check_prompts(config, self.prompts(), self.sampling)


def sample_rank(config: SampleConfig, port: int | None = None) -> None:
    """Generate as one rank; rank 0 prints the texts and the result's JSON line."""
    session = join(config.mesh, timeout=config.timeout, port=port)
    with reported(session, (CheckpointError,), refused=(ValueError, CheckpointError)):
        mesh = config.mesh.connect(session.device.type)
        source = open_model(config.model, mesh.group("world"))
        gpt = GPT(
            source.config, mesh=mesh, device="meta", dtype=DTYPES[config.dtype], impl=config.impl
        )
        source.load(gpt.to_empty(device=session.device))
        tokenizer, began = config.open_tokenizer(), time.perf_counter()
        found = generate(gpt, config.prompts(), config.sampling)
        seconds = time.perf_counter() - began
        session.close()
    if session.rank:
        return
    texts = [tokenizer.decode([t for t in row if t < tokenizer.vocab_size]) for row in found]
    for prompt, text in zip(config.prompt, texts, strict=True):
        print(f"--- {prompt!r}\n{text}")
    count = sum(map(len, found))
    rate = round(count / seconds, 1)
    print(json.dumps({"texts": texts, "tokens": found, "tokens_per_second": rate}), flush=True)


def main(argv: list[str] | None = None) -> None:
    """The command ``warpweave sample``."""
    config = tyro.cli(SampleConfig, prog="warpweave sample", description=__doc__, args=argv)
    try:
        if under_torchrun():
            raise ValueError("sample starts its own ranks, run it without torchrun")
        config.check()
        if config.mesh.world == 1:
            sample_rank(config)
        else:
            launch(sample_rank, (config,), config.mesh)
    except (ValueError, ImportError, OSError, CheckpointError) as error:
        say(one_line(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
