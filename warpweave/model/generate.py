"""Autoregressive generation, token by token.

`go_on` samples from the logits of a step of the model. The step of `generate` has a KV cache. The
step of `Engine.generate` recomputes the whole window for every token, on any mesh.

Prompts of different lengths are padded on the left, so they all end at the same position. The
padding is a separate document, which other tokens do not attend to. Learned positions count from a
prompt's first token (a rotary embedding depends only on distances).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.kernels.runtime.transfer import upload
from warpweave.layers.context import KVCache, TokenContext
from warpweave.layers.modes import in_mode
from warpweave.model.config import GPTConfig
from warpweave.model.gpt import GPT, MicroBatch
from warpweave.parallel.collectives import gather
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.pipeline import relay
from warpweave.parallel.pipeline.losses import split_losses

# Number of tokens between checks for the end of all texts. A check waits for the GPU; tokens that
# are sampled after the end of a text are cut off.
_STOP_EVERY = 16


@dataclass(frozen=True)
class Sampling:
    """Options for sampling the next tokens.

    Attributes:
        tokens: maximum number of new tokens.
        temperature: temperature of the softmax to sample from; 0 is greedy.
        top_k: sample from the k most likely tokens; 0 means all tokens.
        top_p: nucleus sampling: sample from the smallest set of most likely tokens with this total
            probability.
        stop: tokens that end a text.
        seed: seed of the random numbers.

    Examples:
        >>> Sampling(tokens=50, temperature=0.7, top_p=0.9).top_k
        0
    """

    tokens: int = 100
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.top_k < 0:
            raise ValueError(
                f"tokens and top_k must not be negative, got {self.tokens} and {self.top_k}"
            )
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


def generate(
    gpt: GPT, prompts: Iterable[Iterable[int]], sampling: Sampling = Sampling()
) -> list[list[int]]:
    """Generate tokens after each prompt (token ids), up to and including a stop token.

    Prompts may have different lengths and must not be padded. On a mesh of tensor ranks and
    pipeline stages, every rank must call this and gets the same result. Modules keep their training
    modes.

    Raises ``ValueError`` if a prompt is empty or does not consist of integers, its text would be
    longer than the model's sequence, a token is not in the vocabulary, or the mesh has data or
    context ranks, several stages on a rank, or sequence parallelism.

    Examples:
        >>> from warpweave import GPT, GPTConfig, Sampling
        >>> gpt = GPT(GPTConfig(vocab_size=256, seq_len=16, layers=2, width=64, heads=8))
        >>> tokens = generate(gpt, [[1, 2, 3]], Sampling(tokens=5))
        >>> len(tokens[0])
        5
    """
    _check_ranks(gpt)
    prompts = check_prompts(gpt.config, prompts, sampling)
    if not prompts:
        return []
    device = next(gpt.parameters()).device
    longest = max(map(len, prompts))
    pads = upload(torch.tensor([longest - len(prompt) for prompt in prompts]), device)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts):
        row[longest - len(prompt) :] = torch.tensor(prompt)
    tokens = upload(tokens, device)

    cache, documents = KVCache(longest + sampling.tokens), None
    if any(len(prompt) < longest for prompt in prompts):
        ends = torch.full_like(pads, cache.capacity)
        documents = torch.stack((torch.zeros_like(pads), pads, ends), 1)
    last = gpt.mesh.sizes.rank_at(pp=gpt.placement[-1])
    tables = gpt.rope_tables(torch.arange(cache.capacity, device=device))

    def step(chosen: Tensor | None) -> tuple[Tensor | None, int]:
        new = tokens if chosen is None else chosen[:, None]
        at = slice(cache.start, cache.start + new.shape[1])
        rows: Any = {name: (cos[at], sin[at]) for name, (cos, sin) in tables.items()}
        context = TokenContext(
            len(new), SequenceLayout(new.shape[1], 1), documents=documents, cache=cache, **rows
        )
        return _logits(gpt, new, pads, cache, context), last

    return go_on(gpt, len(prompts), sampling, step)


@torch.no_grad()
def go_on(
    gpt: GPT,
    count: int,
    sampling: Sampling,
    step: Callable[[Tensor | None], tuple[Tensor | None, int]],
) -> list[list[int]]:
    """Generate tokens after each of `count` texts.

    Every rank of the mesh must call this, and all get the same result.

    Args:
        gpt: the model. It runs in evaluation mode; its modules' modes are restored.
        step: one step of the model. Its argument is the tokens int64[count] sampled last (None at
            first). It returns the logits float[count, V] of the next tokens (None on a rank that
            does not have them), and the index of a rank that has them.
    """
    device = next(gpt.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed % 2**63)
    stop = upload(torch.tensor(sampling.stop, dtype=torch.int64), device)
    every = 1 if device.type == "cpu" else _STOP_EVERY
    done = torch.zeros(count, dtype=torch.bool, device=device)
    found: list[Tensor] = []
    with in_mode(gpt, training=False):
        for _ in range(sampling.tokens):
            logits, source = step(found[-1] if found else None)
            # Draw on every rank: the result then does not depend on which rank has the logits.
            noise = torch.empty(count, gpt.config.vocab_size, dtype=torch.float64)
            noise = -noise.exponential_(generator=generator).log()
            chosen = torch.zeros(count, dtype=torch.int64, device=device)
            if logits is not None:
                chosen = choose_tokens(logits.double(), upload(noise, device), sampling)
            if gpt.mesh.group("world") is not None:
                dist.broadcast(chosen, source)
            found.append(chosen)
            if sampling.stop:
                done |= torch.isin(chosen, stop)
                if len(found) % every == 0 and bool(done.all()):
                    break
    rows = torch.stack(found, 1).tolist() if found else [[] for _ in range(count)]
    return [_until(row, sampling.stop) for row in rows]


def choose_tokens(logits: Tensor, noise: Tensor, sampling: Sampling) -> Tensor:
    """The next tokens int64[B] from logits[B, V] and standard Gumbel noise[B, V].

    Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample from their softmax.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    return (kept(logits / sampling.temperature, sampling) + noise).argmax(-1)


def kept(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits[B, V] with -inf for the tokens that top_k and then top_p exclude."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        share = ordered.softmax(-1)
        beyond = share.cumsum(-1) - share >= sampling.top_p  # more likely tokens already reach it
        out = torch.zeros_like(beyond).scatter(-1, order, beyond)
        logits = logits.masked_fill(out, -math.inf)
    return logits


def _logits(
    gpt: GPT, tokens: Tensor, pads: Tensor, cache: KVCache, context: TokenContext
) -> Tensor | None:
    """Run tokens[B, n] after those in the cache; the last stage returns logits[B, V] of the last
    token, other stages None."""
    B, n = tokens.shape
    mesh, device = gpt.mesh, tokens.device
    positions = torch.arange(cache.start, cache.start + n, device=device)
    own = (positions - pads[:, None]).clamp(min=0).flatten()
    ids = tokens.flatten()
    batch = MicroBatch(ids, ids, own, context, torch.ones((), device=device))
    dtype = next(gpt.parameters()).dtype

    def forward(stage: int, x: Tensor | None) -> Tensor:
        x = gpt.embed(None, batch) if gpt.first else x
        for block in gpt.blocks.values():
            x, _ = split_losses(block(x, context))
        return x

    message = (B * n, gpt.config.width), dtype, device
    x = relay(forward, [mesh.index("pp")], gpt.placement, mesh.group("pp"), lambda _: message)
    cache.start += n
    if not gpt.last:
        return None
    last = x.unflatten(0, (B, n))[:, -1].contiguous()
    return gather(gpt.logits(last, batch), mesh.group("tp"), dim=-1)[:, : gpt.config.vocab_size]


def check_prompts(
    config: GPTConfig, prompts: Iterable[Iterable[int]], sampling: Sampling
) -> list[list[int]]:
    """Return the prompts as lists; raise ``ValueError`` if the model cannot continue one."""
    rows = [_whole_numbers(prompt) for prompt in prompts]
    if not all(rows):
        raise ValueError("a prompt must have at least one token")
    length = max(map(len, rows), default=0) + sampling.tokens
    if length > config.seq_len:
        raise ValueError(
            f"prompt and new tokens ({length}) exceed the model's sequence length "
            f"({config.seq_len})"
        )
    for row in rows:
        if not 0 <= min(row) <= max(row) < config.vocab_size:
            raise ValueError(f"tokens must lie in [0, {config.vocab_size}), got {row}")
    return rows


def _whole_numbers(prompt: Iterable[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise ValueError(f"a prompt must be a sequence of integers, got {prompt!r}") from None


def _check_ranks(gpt: GPT) -> None:
    sizes, stages = gpt.mesh.sizes, len(gpt.placement)
    if sizes.dp * sizes.cp > 1 or stages > sizes.pp or gpt.sequence_parallel:
        raise ValueError(
            "generate needs dp = 1, cp = 1, one stage per pipeline rank, and no sequence "
            f"parallelism, got {sizes}, stages = {stages}, and "
            f"sequence_parallel = {gpt.sequence_parallel}"
        )


def _until(row: list[int], stop: tuple[int, ...]) -> list[int]:
    """The row up to and including its first stop token."""
    ends = [i for i, token in enumerate(row) if token in stop]
    return row[: ends[0] + 1] if ends else row
