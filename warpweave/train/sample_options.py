"""Generate text with a trained model, on one device or over tensor ranks and pipeline stages.

PATH is a transformers model folder, the folder of a ``warpweave train`` run, or a single
checkpoint. A run's newest checkpoint is used or, with --best, the one with the lowest validation
loss. Several prompts form one batch. Exit codes: 0 done, 1 failed, 2 refused.
"""

# The options of `warpweave.train.sample`; they are checked before torch is imported.

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from warpweave.cli import shared_options as shared
from warpweave.cli.command_line import read_command_line
from warpweave.parallel.mesh import Mesh

if TYPE_CHECKING:
    from warpweave.data import Tokenizer
    from warpweave.model.generate import Sampling


@dataclass(frozen=True)
class SampleConfig:
    """Options of ``warpweave sample``: model, prompts, and sampling."""

    model: Annotated[Path, tyro.conf.Positional]
    """Model: a transformers model folder, a run's folder, or a checkpoint in it."""
    prompt: tuple[str, ...]
    """Prompts: the texts to continue."""
    best: bool = False
    """Use the checkpoint with the lowest validation loss in a run's folder instead of the newest
    one."""
    tokens: int = 100
    """Maximum number of new tokens per prompt."""
    temperature: float = 0.8
    """Temperature of the softmax to sample from; 0 picks the most likely token (greedy)."""
    top_k: int = 0
    """Top-k sampling: draw from this many of the most likely tokens; 0 draws from all."""
    top_p: float = 1.0
    """Top-p (nucleus) sampling: draw from the smallest set of most likely tokens whose total
    probability reaches this value."""
    seed: int = 0
    """Random seed for sampling."""
    tokenizer: Path | None = None
    """Tokenizer: a JSON file of the Hugging Face tokenizers library (tokenizer.json), or 'bytes';
    default: the model's, or bytes if the model was trained on bytes or has a vocabulary of 256."""
    tp: shared.TensorParallel = 1
    pp: shared.PipelineParallel = 1
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Precision of parameters and activations."""
    device: shared.Device = None
    impl: shared.Implementation = None
    timeout: shared.Timeout = 300.0

    @property
    def mesh(self) -> Mesh:
        """The mesh's sizes."""
        return Mesh(tp=self.tp, pp=self.pp)

    @property
    def sampling(self) -> Sampling:
        """The sampling settings; a text ends at the model's end-of-text tokens."""
        from warpweave.convert.source import read_stop_tokens
        from warpweave.model.generate import Sampling

        stop = read_stop_tokens(self.model)
        return Sampling(self.tokens, self.temperature, self.top_k, self.top_p, stop, self.seed)

    def open_tokenizer(self) -> Tokenizer:
        """Open the tokenizer for the prompts; ``ValueError`` if the model has none."""
        from warpweave.convert.source import find_tokenizer, is_of_bytes
        from warpweave.data import ByteTokenizer, JsonTokenizer

        path = self.tokenizer if self.tokenizer is not None else find_tokenizer(self.model)
        if path is None and not is_of_bytes(self.model):
            raise ValueError(f"found no tokenizer for {self.model}; pass --tokenizer")
        return ByteTokenizer() if path in (None, Path("bytes")) else JsonTokenizer(path)

    def prompts(self) -> list[list[int]]:
        """The prompts' tokens."""
        tokenizer = self.open_tokenizer()
        return [tokenizer.prompt(text) for text in self.prompt]

    def check(self) -> None:
        """Raise a one-line error for options that cannot work, before any rank is started."""
        from warpweave.convert.source import read_model_config
        from warpweave.model.generate import check_prompts

        config = read_model_config(self.model)
        config.check(self.mesh)
        check_prompts(config, self.prompts(), self.sampling)


parse = partial(read_command_line, SampleConfig, "sample", __doc__)
