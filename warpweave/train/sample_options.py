"""Generate text with a trained model, on one device or on tensor ranks and pipeline stages.

PATH is a folder of transformers, the folder of a run of ``warpweave train`` (its newest checkpoint,
or with --best the one with the lowest validation loss), or one checkpoint of it. Several prompts
are one batch. Exit codes: 0 done, 1 failed, 2 refused.
"""

# The options of `warpweave.train.sample`: a wrong one is answered before torch is imported.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from warpweave.cli.command_line import read_command_line
from warpweave.parallel.mesh import Mesh

if TYPE_CHECKING:
    from warpweave.data import Tokenizer
    from warpweave.model.generate import Sampling


@dataclass(frozen=True)
class SampleConfig:
    """Which model, which prompts, and how to sample."""

    model: Annotated[Path, tyro.conf.Positional]
    """Model: a folder of transformers, a run's folder, or a checkpoint in it."""
    prompt: tuple[str, ...]
    """Prompts: the texts to continue."""
    best: bool = False
    """Use the checkpoint with the lowest validation loss of a run's folder, instead of the
    newest."""
    tokens: int = 100
    """Largest number of new tokens of each prompt."""
    temperature: float = 0.8
    """Temperature of the softmax that is sampled from; 0 takes the likeliest token (greedy)."""
    top_k: int = 0
    """Top-k sampling: draw from so many of the likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Top-p (nucleus) sampling: draw from the fewest of the likeliest tokens that have this
    probability together."""
    seed: int = 0
    """Random seed of the sampling."""
    tokenizer: Path | None = None
    """Tokenizer: a Hugging Face tokenizers JSON, or bytes; default: the model's, or bytes if it was
    trained on bytes or has a vocabulary of 256."""
    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline-parallel degree."""
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Precision of parameters and activations."""
    device: Literal["cpu", "cuda"] | None = None
    """Device that computes; default: GPUs where there are any, one for each rank."""
    impl: Literal["triton", "torch"] | None = None
    """Implementation that computes; default: the Triton kernels on a GPU, torch on the CPU."""
    timeout: float = 300.0
    """Timeout in seconds of any message between ranks."""

    @property
    def mesh(self) -> Mesh:
        """The mesh's sizes."""
        return Mesh(tp=self.tp, pp=self.pp)

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen; a text ends with the model's own end tokens."""
        from warpweave.convert.source import read_stop_tokens
        from warpweave.model.generate import Sampling

        return Sampling(
            self.tokens,
            self.temperature,
            self.top_k,
            self.top_p,
            read_stop_tokens(self.model),
            self.seed,
        )

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer of the prompts; ``ValueError`` if none is known for the model."""
        from warpweave.convert.source import find_tokenizer, is_of_bytes
        from warpweave.data import ByteTokenizer, JsonTokenizer

        path = self.tokenizer if self.tokenizer is not None else find_tokenizer(self.model)
        if path is None and not is_of_bytes(self.model):
            raise ValueError(f"no tokenizer is known for {self.model}: give --tokenizer")
        return ByteTokenizer() if path in (None, Path("bytes")) else JsonTokenizer(path)

    def prompts(self) -> list[list[int]]:
        """The prompts' tokens."""
        tokenizer = self.open_tokenizer()
        return [tokenizer.prompt(text) for text in self.prompt]

    def check(self) -> None:
        """Raise a one-line error for what cannot work, before any rank is started."""
        from warpweave.convert.source import read_model_config
        from warpweave.model.generate import check_prompts

        config = read_model_config(self.model)
        config.check(self.mesh)
        check_prompts(config, self.prompts(), self.sampling)


def parse(argv: list[str] | None = None) -> SampleConfig:
    """The options of the command line; a wrong one ends the process with 2."""
    return read_command_line(SampleConfig, "sample", __doc__, argv)
