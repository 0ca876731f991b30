"""A training step on one rank, compared with Hugging Face transformers' GPT-2 (same weights, work).

Both do forward, backward, clipping by the global norm and AdamW (decay on matrices only) in fp32,
without dropout. Ours is `Engine.step`, which the trainer runs. The baseline is the best that we
know for transformers on a CPU: `attn_implementation="sdpa"`, torch's fused AdamW, gradients set to
None, and torch's own tanh GELU. "as published" has GPT-2's `gelu_new`, which transformers spells
out in elementwise operations. On a non-Intel CPU with AVX-512, most of the difference comes from
`kernels.gemm`, which multiplies with oneDNN where torch uses MKL. On an Intel CPU both use MKL.

The shape is a reduced GPT-2 small: heads of 64, hidden 4 x width, tied embedding. The first
vocabulary is small, so that the blocks take most of the time, as in the real model (12 layers of
width 768). With the second, GPT-2's 50257 tokens, the head and the loss do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from harness import (
    Check,
    Report,
    assert_equal,
    header,
    interleave,
    parser,
    results_folder,
    torch_adamw,
)
from torch import Tensor, nn

from warpweave.model.engine import Engine
from warpweave.model.gpt import GPTConfig
from warpweave.parallel.data.optimizer import AdamW
from warpweave.parallel.mesh import single
from warpweave.parallel.shard import ParamRecord

CLAIM = "On an AMD Zen 4 a training step takes no longer than that of transformers' GPT-2."
LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
NAMES = {
    "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip
LOSS_LIMIT, GRAD_LIMIT = 1e-5, 1e-4


def their_name(name: str) -> str:
    """Return transformers' name of our parameter."""
    special = {
        "embedding.weight": "transformer.wte.weight",
        "positions.weight": "transformer.wpe.weight",
    }
    if name in special:
        return special[name]
    if name.startswith("final_norm."):
        return name.replace("final_norm", "transformer.ln_f")
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"transformer.h.{layer}.{NAMES[module]}.{kind}"


def to_theirs(name: str, ours: Tensor, heads: int) -> Tensor:
    """Return our tensor in transformers' format: Conv1D weights (in, out); q, k, v as blocks."""
    if ".qkv." in name:  # rows are (head, q|k|v, head_dim), theirs (q|k|v, head, head_dim)
        ours = ours.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    is_linear = any(part in name for part in (".qkv.", ".out.", ".up.", ".down."))
    return ours.t() if is_linear and ours.ndim == 2 else ours


class Theirs:
    """transformers' GPT-2 and torch's optimizer."""

    def __init__(self, config: GPTConfig, weights: dict[str, Tensor], activation: str) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=config.vocab_size, n_positions=config.seq_len, n_embd=config.width,
                n_layer=config.layers, n_head=config.heads, activation_function=activation,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                attn_implementation="sdpa",
            )
        )  # fmt: skip
        self.params: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.items():
                self.params[their_name(name)].copy_(to_theirs(name, tensor, config.heads))
        assert len(weights) == len(self.params)
        self.optimizer = torch_adamw(self.params.values(), LR, BETAS, EPS, DECAY)
        self.model.train()

    def backward(self, tokens: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(input_ids=tokens, labels=tokens).loss  # it shifts the labels itself
        loss.backward()
        return loss.detach()

    def step(self, tokens: Tensor) -> Tensor:
        loss = self.backward(tokens)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss


class Ours:
    """The engine on one rank."""

    def __init__(self, config: GPTConfig, batch: int) -> None:
        self.engine = Engine(
            config, single(), micro_batch_size=batch, rule=AdamW(BETAS, EPS, DECAY), clip=CLIP
        )  # fmt: skip
        self.ids = torch.arange(batch).unsqueeze(0)

    def step(self, tokens: Tensor, lr: float | None = LR) -> Tensor:
        labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)
        return self.engine.step(tokens[None], labels[None], self.ids, lr=lr).loss

    def read(self, kind: str) -> Iterator[tuple[ParamRecord, Tensor]]:
        return ((record, tensor) for record, tensor, _ in self.engine.read(kind))


def check(ours: Ours, theirs: Theirs, config: GPTConfig, draw: Callable[[], Tensor]) -> list[Check]:
    """Compare the losses of four steps and the gradients of the first.

    Weights are not compared: AdamW turns rounding noise in tiny gradients into whole steps.
    """
    tokens = draw()
    losses = [(ours.step(tokens, lr=None), theirs.backward(tokens))]
    pairs = {
        r.name: (to_theirs(r.name, t, config.heads), theirs.params[their_name(r.name)].grad)
        for r, t in ours.read("grad")
    }
    gradients = assert_equal("gradients", pairs, GRAD_LIMIT)
    ours.engine.optimizer.step(LR)
    nn.utils.clip_grad_norm_(theirs.model.parameters(), CLIP)
    theirs.optimizer.step()
    for _ in range(3):
        tokens = draw()
        losses.append((ours.step(tokens), theirs.step(tokens)))
    return [
        gradients,
        assert_equal(
            "losses of 4 steps", {f"step {i}": pair for i, pair in enumerate(losses)}, LOSS_LIMIT
        ),
    ]


def compare(
    report: Report, config: GPTConfig, batch: int, *, threads: int, rounds: int, both: bool
) -> None:
    """Check, then time, one shape with one number of threads."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randint(config.vocab_size, (batch, config.seq_len), generator=generator)

    ours = Ours(config, batch)
    weights = {record.name: tensor.clone() for record, tensor in ours.read("param")}
    best = Theirs(config, weights, "gelu_pytorch_tanh")
    report.checks += check(ours, best, config, draw)
    tokens = draw()
    variants: dict[str, Callable[[], object]] = {
        "warpweave": lambda: ours.step(tokens),
        "transformers": lambda: best.step(tokens),
    }
    if both:
        published = Theirs(config, weights, "gelu_new")
        variants["transformers as published"] = lambda: published.step(tokens)
    times = interleave(variants, rounds=rounds)
    shape = (
        f"L{config.layers} E{config.width} V{config.vocab_size} S{config.seq_len} B{batch} "
        f"{threads} thread{'s' * (threads > 1)}"
    )
    report.add(times, list(variants)[1:], shape=shape, dtype="float32", tokens=tokens.numel())


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(CLAIM).parse_args(argv)
    import transformers

    report = Report("train_step", CLAIM, header(transformers=transformers.__version__))
    if options.quick:
        config = GPTConfig(101, 16, 2, 32, 2)
        compare(report, config, 2, threads=1, rounds=options.rounds or 1, both=False)
    else:
        small = GPTConfig(8192, 256, 4, 384, 6)
        rounds = options.rounds or 12
        compare(report, small, 4, threads=1, rounds=rounds, both=True)
        compare(report, small, 4, threads=2, rounds=rounds, both=False)
        head = GPTConfig(50257, 256, 4, 256, 4)
        compare(report, head, 4, threads=1, rounds=max(1, rounds * 2 // 3), both=False)
    report.finish(results_folder(options))


if __name__ == "__main__":
    main()
