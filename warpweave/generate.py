"""Going on with texts, token by token: `go_on` draws what a step of the model makes likely.

The step of `generate` keeps the keys and values of what was read; that of `Engine.generate` runs
the whole window again, on any mesh.

A batch of prompts of several lengths is padded on the left, so that all of them end at the same
place: the padding is a document of its own, across whose end no token looks, and learned positions
count from a prompt's first token (a rotary embedding only knows distances).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.config import GPTConfig
from warpweave.gpt import GPT, MicroBatch
from warpweave.layers.context import KVCache, TokenContext
from warpweave.modes import in_mode
from warpweave.parallel.collectives import gather
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.pipeline.losses import split_losses


@dataclass(frozen=True)
class Sampling:
    """How the next tokens are chosen.

    Attributes:
        tokens: how many, at most.
        temperature: of the softmax that is drawn from; 0 takes the likeliest token.
        top_k: draw from so many of the likeliest tokens; 0 from all.
        top_p: draw from the fewest of the likeliest tokens that have this probability together.
        stop: tokens that end a text.
        seed: of the draws.
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
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


def generate(
    gpt: GPT, prompts: Iterable[Iterable[int]], sampling: Sampling = Sampling()
) -> list[list[int]]:
    """The tokens after each of the prompts (token ids), with the token that ended it if one did.

    Prompts are of their own lengths, without padding. On a mesh of tensor ranks and pipeline stages
    every rank calls it and gets the same. Modules are left in the modes that they were in.

    Raises ``ValueError``: a prompt is empty or no whole numbers, or its text would be longer than
    the model's sequence, a token is none of the vocabulary, or the mesh has data or context ranks,
    several stages on a rank, or sequence parallelism.
    """
    _check_ranks(gpt)
    prompts = check_prompts(gpt.config, prompts, sampling)
    if not prompts or not sampling.tokens:
        return [[] for _ in prompts]
    device = next(gpt.parameters()).device
    longest = max(map(len, prompts))
    pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts):
        row[longest - len(prompt) :] = torch.tensor(prompt)
    tokens = tokens.to(device)

    cache, documents = KVCache(longest + sampling.tokens), None
    if any(len(prompt) < longest for prompt in prompts):
        ends = torch.full_like(pads, cache.capacity)
        documents = torch.stack((torch.zeros_like(pads), pads, ends), 1)
    last = gpt.mesh.sizes.rank_at(pp=gpt.placement[-1])

    def step(chosen: Tensor | None) -> tuple[Tensor | None, int]:
        new = tokens if chosen is None else chosen[:, None]
        return _logits(gpt, new, pads, documents, cache), last

    return go_on(gpt, len(prompts), sampling, step)


@torch.no_grad()
def go_on(
    gpt: GPT,
    count: int,
    sampling: Sampling,
    step: Callable[[Tensor | None], tuple[Tensor | None, int]],
) -> list[list[int]]:
    """The tokens after each of `count` texts; every rank of the mesh calls it and gets the same.

    Args:
        gpt: is evaluated, and left in the modes that it was in.
        step: runs the model one token further. It is given the tokens int64[count] that were chosen
            last (None at first) and returns the logits float[count, V] of the next, or None on a
            rank that does not have them, and a rank that has.
    """
    device = next(gpt.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed % 2**63)
    stop = torch.tensor(sampling.stop, dtype=torch.int64, device=device)
    done = torch.zeros(count, dtype=torch.bool, device=device)
    found: list[Tensor] = []
    with in_mode(gpt, training=False):
        for _ in range(sampling.tokens):
            logits, source = step(found[-1] if found else None)
            # Drawn on every rank, so that it is the same wherever the logits are.
            noise = torch.empty(count, gpt.config.vocab_size, dtype=torch.float64)
            noise = -noise.exponential_(generator=generator).log()
            chosen = torch.zeros(count, dtype=torch.int64, device=device)
            if logits is not None:
                chosen = choose_tokens(logits.double(), noise.to(device), sampling)
            if gpt.mesh.group("world") is not None:
                dist.broadcast(chosen, source)
            found.append(chosen)
            if sampling.stop:
                done |= torch.isin(chosen, stop)
                if bool(done.all()):  # waits for the device, so only where a text may end
                    break
    rows = torch.stack(found, 1).tolist() if found else [[] for _ in range(count)]
    return [_until(row, sampling.stop) for row in rows]


def choose_tokens(logits: Tensor, noise: Tensor, sampling: Sampling) -> Tensor:
    """The next tokens int64[B] of logits[B, V]; noise[B, V] is standard Gumbel.

    The largest of logits plus Gumbel noise is a draw from their softmax.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    return (kept(logits / sampling.temperature, sampling) + noise).argmax(-1)


def kept(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits[B, V] with -inf for the tokens that top_k and then top_p leave out."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        share = ordered.softmax(-1)
        beyond = share.cumsum(-1) - share >= sampling.top_p  # the likelier ones have it already
        out = torch.zeros_like(beyond).scatter(-1, order, beyond)
        logits = logits.masked_fill(out, -math.inf)
    return logits


def _logits(
    gpt: GPT, tokens: Tensor, pads: Tensor, documents: Tensor | None, cache: KVCache
) -> Tensor | None:
    """Run tokens[B, n] after those in the cache; logits[B, V] of the last, on the last stage."""
    B, n = tokens.shape
    mesh, device = gpt.mesh, tokens.device
    positions = torch.arange(cache.start, cache.start + n, device=device)
    context = TokenContext(
        B, SequenceLayout(n, 1), documents=documents, cache=cache, **gpt.rope_tables(positions)
    )
    own = (positions - pads[:, None]).clamp(min=0).flatten()
    ids = tokens.flatten()
    batch = MicroBatch(ids, ids, own, context, torch.ones((), device=device))
    here, group = mesh.index("pp"), mesh.group("pp")
    if gpt.first:
        x = gpt.embed(None, batch)
    else:
        like = next(gpt.parameters())
        x = like.new_empty(B * n, gpt.config.width)
        dist.recv(x, group_src=here - 1, group=group)
    for block in gpt.blocks.values():
        x, _ = split_losses(block(x, context))
    cache.start += n
    if not gpt.last:
        dist.send(x.contiguous(), group_dst=here + 1, group=group)
        return None
    last = x.unflatten(0, (B, n))[:, -1].contiguous()
    return gather(gpt.logits(last, batch), mesh.group("tp"), dim=-1)[:, : gpt.config.vocab_size]


def check_prompts(
    config: GPTConfig, prompts: Iterable[Iterable[int]], sampling: Sampling
) -> list[list[int]]:
    """The prompts as lists; raises ``ValueError`` for what a model cannot go on with."""
    rows = [_whole_numbers(prompt) for prompt in prompts]
    if not all(rows):
        raise ValueError("a prompt must have at least one token")
    length = max(map(len, rows), default=0) + sampling.tokens
    if length > config.seq_len:
        raise ValueError(
            f"prompt and new tokens are {length}, the model's sequence is {config.seq_len}"
        )
    for row in rows:
        if not 0 <= min(row) <= max(row) < config.vocab_size:
            raise ValueError(f"tokens must lie in [0, {config.vocab_size}), got {row}")
    return rows


def _whole_numbers(prompt: Iterable[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise ValueError(f"a prompt is a row of whole numbers, got {prompt!r}") from None


def _check_ranks(gpt: GPT) -> None:
    sizes, stages = gpt.mesh.sizes, len(gpt.placement)
    if sizes.dp * sizes.cp > 1 or stages > sizes.pp or gpt.sequence_parallel:
        raise ValueError(
            "generate runs on tensor ranks and pipeline stages, one on each rank, without sequence "
            f"parallelism; got {sizes} with {stages} stages"
        )


def _until(row: list[int], stop: tuple[int, ...]) -> list[int]:
    """A row up to its first token that ends it, with it."""
    ends = [i for i, token in enumerate(row) if token in stop]
    return row[: ends[0] + 1] if ends else row
