"""Text of a model on any mesh: every token recomputes the whole window through all stages."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from warpweave.kernels.runtime.transfer import upload
from warpweave.model.engine_checks import check_int64
from warpweave.model.generate import Sampling, go_on
from warpweave.model.gpt import GPT, MicroBatch
from warpweave.parallel.collectives import gather

_STEP = 128  # tokens by which the window grows

Final = Callable[[Tensor | None, MicroBatch], Tensor]
Forward = Callable[[MicroBatch, Final], Tensor | None]


def check_prompt(prompt: Tensor) -> None:
    """Raise ValueError unless `prompt` is int64 [n] and not empty."""
    check_int64(prompt=prompt)
    if prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"prompt must have shape [n >= 1], got {[*prompt.shape]}")


def continue_text(gpt: GPT, forward: Forward, prompt: Tensor, sampling: Sampling) -> Tensor:
    """Continue `prompt` (int64 [n]) as `sampling` says; see ``Engine.generate``.

    forward: runs a micro-batch through all stages, and returns the result of its second argument on
    the last stage, otherwise None.
    """
    tokens = [upload(prompt, next(gpt.parameters()).device)]

    def step(chosen: Tensor | None) -> tuple[Tensor | None, int]:
        tokens.extend([] if chosen is None else [chosen])
        return _next_logits(gpt, forward, torch.cat(tokens))

    (row,) = go_on(gpt, 1, sampling, step)
    return torch.tensor(prompt.tolist() + row)


def _next_logits(gpt: GPT, forward: Forward, tokens: Tensor) -> tuple[Tensor | None, int]:
    """The logits [1, V] after tokens[n], on the ranks that hold the last token, and the index of
    one of these ranks.

    One sequence passes through the stages (with sequence parallelism, as many copies as tensor
    ranks can share evenly), and one of its tokens through the head.
    """
    size, layout, mesh = gpt.config.seq_len, gpt.layout, gpt.mesh
    window, tp = tokens[-size:], mesh.size("tp")
    if layout.parts == 1:  # it may be shorter; grow in steps to limit the kernels' shapes
        size = min(size, -(-len(window) // _STEP) * _STEP)
    local = size if layout.parts == 1 else layout.local_len
    copies = tp // math.gcd(tp, local) if gpt.sequence_parallel else 1
    padded = F.pad(window, (0, size - len(window))).expand(copies, size)
    ones = torch.ones((), device=tokens.device)
    batch = gpt.micro_batch(padded, torch.full_like(padded, -100), ones)
    at = len(window) - 1
    owner = layout.owner(at)
    here = mesh.index("cp") == owner
    row = layout.positions(owner).tolist().index(at) if here else 0

    def final(x: Tensor | None, batch: MicroBatch) -> Tensor:
        if gpt.sequence_parallel:
            x = gather(x, mesh.group("tp"))
        # With sequence parallelism, the head expects a token per tensor rank: pass this to all.
        logits = gpt.logits(x[row : row + 1], batch)[:1]
        return gather(logits, mesh.group("tp"), dim=-1)[:, : gpt.config.vocab_size]

    logits = forward(batch, final)
    return (logits if here else None), mesh.sizes.rank_at(cp=owner, pp=gpt.placement[-1])
