"""The run that every layout must reproduce: its batches, and the plain model's training on them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from warpweave.model.gpt import GPTConfig
from warpweave.model.plain import (
    PlainConfig,
    plain_adamw_step,
    plain_gpt_logits,
    plain_gpt_loss,
    plain_init,
    plain_shapes,
)
from warpweave.prove.layouts import Sizes

STEPS = 3
# eps is as large as the gradients. Otherwise an update would be the mere sign of a gradient, which
# rounding may flip.
ADAMW = {"eps": 1e-2, "weight_decay": 0.1}
MUON = {"momentum": 0.8, "weight_decay": 0.1}
PLAIN_SGD = {"momentum": 0.8, "weight_decay": 0.1}
CLIP = 1.2
RATES = (0.01, 0.004, 0.02)  # the learning rate of each step
KEY = 3 << 32  # dropout key of the first step: both of its 32-bit words are used


@lru_cache(maxsize=8)
def batch(sizes: Sizes, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels [samples, seq_len] and sample ids of a step; some ranks have no labels.

    Steps from STEPS on are evaluations.
    """
    n, length = sizes.samples, sizes.seq_len
    generator = torch.Generator().manual_seed(1000 * (1 + sizes.seed) + step)
    tokens = torch.randint(0, sizes.vocab, (n, length), generator=generator)
    labels = torch.randint(0, sizes.vocab, (n, length), generator=generator)
    drop = torch.rand(n, length, generator=generator)
    labels[drop < torch.linspace(0.0, 0.8, n)[:, None]] = -100
    quarter = -(-length // 4)
    if step % 3 == 0:  # the second of four data ranks has no loss
        labels[n // 4 : n // 2] = -100
    elif step % 3 == 1:  # the first of two (or four) zigzag context ranks has no loss
        labels[:, :quarter] = -100
        labels[:, length - quarter :] = -100
    else:  # likewise one of two contiguous context ranks, and half of the samples
        labels[:, length // 2 :] = -100
        labels[-(-n // 2) :] = -100
    first = 2**32 // length - n  # the second step's token indices exceed 32 bits
    return tokens, labels, first + step * n + torch.arange(n)


@lru_cache(maxsize=8)
def documents(sizes: Sizes, step: int) -> Tensor | None:
    """Return the document boundaries [samples, n + 1] of a step; None for one document per sample.

    Boundaries differ between samples, and some documents are empty. The last document takes the
    rest.
    """
    if sizes.documents == 1:
        return None
    generator = torch.Generator().manual_seed(sizes.seed + step)
    shape = (sizes.samples, sizes.documents)
    ends = torch.randint(0, sizes.seq_len + 1, shape, generator=generator).sort(1).values
    if sizes.documents + 2 == sizes.seq_len:  # would be read as a document number per token
        ends = torch.cat((ends, ends[:, -1:]), 1)
    ends = torch.nn.functional.pad(ends, (0, 1), value=sizes.seq_len)
    return torch.nn.functional.pad(ends, (1, 0))


def _numbers(sizes: Sizes, step: int) -> Tensor | None:
    """Return each token's document number [samples, seq_len], the plain model's format."""
    bounds, position = documents(sizes, step), torch.arange(sizes.seq_len)
    return None if bounds is None else (bounds[:, :, None] <= position).sum(1)


def prompt(sizes: Sizes, step: int) -> Tensor:
    """Return the prompt of a step: one token, half a window, or more than a window."""
    generator = torch.Generator().manual_seed(sizes.seed + step)
    length = (1, sizes.seq_len // 2, sizes.seq_len + 1)[step]
    return torch.randint(0, sizes.vocab, (length,), generator=generator)


@dataclass(frozen=True)
class Delayed:
    """The delayed update rule of an asynchronous pipeline schedule, as in its paper, without lists
    of actions.

    Update t of a stage uses the gradient at w(t - delay). The gradient is that of one micro-batch
    of every data replica (PipeDream, arXiv:1806.03377), or of a whole step (2BW, arXiv:2006.09503).
    The delay of stage s of p is p - 1 - s (pipedream), p - 1 (vertical sync) or 1 (2BW). Weights
    before w(0) are w(0).

    Attributes:
        schedule: "pipedream", "pipedream-vs" or "pipedream-2bw".
        stages, replicas, microbatches: as in the layout.
    """

    schedule: str
    stages: int
    replicas: int
    microbatches: int

    def updates(self, samples: int) -> list[Tensor]:
        """Return the samples of each update in a step, as indices in the step's batch."""
        every = torch.arange(samples).view(self.replicas, self.microbatches, -1)
        if self.schedule == "pipedream-2bw":
            return [every.flatten()]
        return [every[:, mb].flatten() for mb in range(self.microbatches)]

    def delay(self, name: str, layers: int) -> int:
        """Return the delay of a parameter, given by its stage; blocks are spread evenly."""
        kind, number, *_ = [*name.split("."), ""]
        ends = [layers * (s + 1) // self.stages for s in range(self.stages)]
        stage = 0 if kind in ("embedding", "positions") else self.stages - 1
        if kind == "blocks":
            stage = next(s for s, end in enumerate(ends) if int(number) < end)
        vertical, last = self.stages - 1, self.stages - 1 - stage
        return {"pipedream": last, "pipedream-vs": vertical, "pipedream-2bw": 1}[self.schedule]


def plain_config(config: GPTConfig) -> PlainConfig:
    """Return the plain model's configuration of the same GPT."""
    sizes = {"kv_heads": config.num_kv_heads, "hidden": config.num_hidden}
    return PlainConfig(**dataclasses.asdict(config) | sizes)


def moments_of(optimizer: str) -> dict[str, str]:
    """Return the optimizer's states: the plain optimizer's names -> ours."""
    return {"m": "momentum"} if optimizer == "sgd" else {"m": "exp_avg", "v": "exp_avg_sq"}


def compared(
    config: PlainConfig, optimizer: str = "adamw"
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return each compared value's name -> parameter ("" if it belongs to none) -> shape."""
    params = plain_shapes(config)
    one: dict[str, tuple[int, ...]] = {"": ()}
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for step in range(STEPS):
        found[f"loss of step {step}"] = found[f"norm of step {step}"] = one
        found[f"gradient of {{}} at step {step}"] = found[f"{{}} after step {step}"] = params
        found[f"evaluation after step {step}"] = one
        found[f"logits after step {step}"] = {"": (config.vocab_size,)}
    return found | {f"{kind} of {{}}": params for kind in moments_of(optimizer).values()}


def execution_order(model: GPTConfig, optimizer: str = "adamw") -> dict[str, int]:
    """Return the name of each compared tensor -> its place in the order of execution.

    The order in a step: its loss, the gradients from the last parameter to the first, and their
    norm; the new weights (after the last step also the moments); then the evaluation and the text.
    """
    names, words = [*plain_shapes(plain_config(model))], []
    for step in range(STEPS):
        words += [f"loss of step {step}"]
        words += [f"gradient of {name} at step {step}" for name in reversed(names)]
        words += [f"norm of step {step}"] + [f"{name} after step {step}" for name in names]
        if step == STEPS - 1:
            words += [f"{m} of {name}" for m in moments_of(optimizer).values() for name in names]
        words += [f"evaluation after step {step}", f"text after step {step}"]
    return {what: place for place, what in enumerate(words)}


def _sgd_step(
    params: dict[str, Tensor],
    grads: dict[str, Tensor],
    state: dict[str, dict[str, Tensor]],
    lr: float,
    clip: float = math.inf,
) -> Tensor:
    """Take a `plain_adamw_step` with the arithmetic of ``torch.optim.SGD``; return the norm."""
    norm = torch.sqrt(sum((g * g).sum() for g in grads.values()))
    scale = min(1.0, clip / (norm.item() + 1e-6))
    for name, param in params.items():
        g, b = grads[name] * scale, state.setdefault(name, {"m": torch.zeros_like(param)})["m"]
        if name.endswith(".weight") and param.ndim >= 2:
            g = g + PLAIN_SGD["weight_decay"] * param
        b.copy_(PLAIN_SGD["momentum"] * b + g)
        param.sub_(lr * b)
    return norm


def _moved(params: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return the weights, each changed by about one unit in the last place, with random signs."""
    generator = torch.Generator().manual_seed(number)

    def signs(p: Tensor) -> Tensor:
        return torch.randint(2, p.shape, generator=generator).mul_(2).sub_(1)

    return {name: p + torch.finfo(p.dtype).eps * p * signs(p) for name, p in params.items()}


def _on(device: torch.device | str, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.to(device) for x in tensors]


def last_logits(params: dict[str, Tensor], tokens: Tensor, config: PlainConfig) -> Tensor:
    """Return the logits [V] of the token after `tokens`."""
    window = tokens[None, -config.seq_len :]
    return plain_gpt_logits(params, window, config, dropout=0.0)[0, -1]


@lru_cache(maxsize=16)
def train(
    model: GPTConfig,
    sizes: Sizes,
    dtype: torch.dtype = torch.float64,
    moved: int = 0,
    device: torch.device | str = "cpu",
    optimizer: str = "adamw",
    delayed: Delayed | None = None,
) -> dict[str, Tensor]:
    """Train the plain model on `device` for STEPS steps; return all that `compared` names, on CPU.

    With `delayed`, train by that rule without clipping. A step's loss is then the mean over its
    updates, its norm their root mean square, and its gradient that of its last update. In float64
    the result is the truth. With `moved` > 0 the initial weights are first changed by one unit in
    the last place of `dtype`, in a pattern seeded by `moved`. Low-precision dtypes have float32
    masters.
    """
    config = plain_config(model)
    wide = torch.promote_types(dtype, torch.float32)
    masters = plain_init(config, sizes.seed, wide)
    if moved:
        masters = _moved(masters, moved)
    masters = {name: p.to(device) for name, p in masters.items()}
    moments: dict[str, dict[str, Tensor]] = {}
    muon: Any = {"muon": config, "momentum": MUON["momentum"]} if optimizer == "muon" else {}
    values: dict[str, Tensor] = {}
    history = [masters]
    every = [torch.arange(sizes.samples)]
    delays = dict.fromkeys(masters, 0)
    if delayed is not None:
        every = delayed.updates(sizes.samples)
        delays = {name: delayed.delay(name, model.layers) for name in masters}
    for step in range(STEPS):
        losses, norms = [], []
        for part in every:
            given = (*batch(sizes, step), _numbers(sizes, step))
            parts = [None if x is None else x[part] for x in given]
            tokens, labels, ids, packed = _on(device, *parts)
            t = len(history) - 1
            old = {name: history[max(0, t - delay)][name] for name, delay in delays.items()}
            params = {n: p.to(dtype, copy=True).requires_grad_() for n, p in old.items()}
            total, valid = plain_gpt_loss(
                params, tokens, labels, config,
                seed=KEY + step, sample_ids=ids, document=packed,
            )  # fmt: skip
            loss = total / max(valid, 1)
            found = torch.autograd.grad(loss, list(params.values()))
            grads = {name: grad.to(wide) for name, grad in zip(params, found)}
            masters = {name: p.clone() for name, p in masters.items()}
            clip = {"clip": CLIP} if delayed is None else {}
            if optimizer == "sgd":
                norm = _sgd_step(masters, grads, moments, lr=RATES[step], **clip)
            else:
                norm = plain_adamw_step(
                    masters, grads, moments, len(history), lr=RATES[step], **clip, **ADAMW, **muon
                )
            history.append(masters)
            losses.append(loss.detach())
            norms.append(norm)
        values[f"loss of step {step}"] = torch.stack(losses).mean()
        rms = norms[0] if len(norms) == 1 else torch.stack(norms).square().mean().sqrt()
        values[f"norm of step {step}"] = rms
        values |= {f"gradient of {name} at step {step}": grad for name, grad in grads.items()}
        values |= {f"{name} after step {step}": p for name, p in masters.items()}
        at = STEPS + step
        tokens, labels, _, packed = _on(device, *batch(sizes, at), _numbers(sizes, at))
        params = {name: p.to(dtype) for name, p in masters.items()}
        total, valid = plain_gpt_loss(params, tokens, labels, config, dropout=0.0, document=packed)
        values[f"evaluation after step {step}"] = total / max(valid, 1)
        start = prompt(sizes, step).to(device)
        values[f"logits after step {step}"] = last_logits(params, start, config)
    for name, of in moments.items():
        values |= {f"{kind} of {name}": of[m] for m, kind in moments_of(optimizer).items()}
    return {what: value.cpu() for what, value in values.items()}
