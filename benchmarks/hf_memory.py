"""Peak memory of a causal model's loss, and of its gradients, before and after `apply`.

Each side runs in a separate process: a model with one narrow layer and a head of 128,256 rows takes
a small step, so that everything is loaded, and then the measured step, during which the operating
system records the process's peak resident memory (Linux). Writes
``benchmarks/results/hf/memory.json``.

    python benchmarks/hf_memory.py [--vocabulary 128256] [--tokens 256 512 1024 2048]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results" / "hf"
SIDES = ("transformers", "warpweave.hf")
MiB = 2**20


def measured(side: str, vocabulary: int, tokens: int) -> dict[str, float]:
    """Return the step's loss, the peak MiB that it added, and the MiB of the gradients, which
    stay allocated."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, tie_word_embeddings=True,
        )
    ).train()  # fmt: skip
    if side == "warpweave.hf":
        import warpweave.hf

        warpweave.hf.apply(model)
    ids = torch.randint(3, vocabulary, (1, tokens))
    model(ids[:, :8], labels=ids[:, :8]).loss.backward()
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters())
    model.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _resident("VmRSS")
    loss = model(ids, labels=ids).loss
    loss.backward()
    return {
        "loss": loss.item(),
        "added_mib": (_resident("VmHWM") - before) / MiB,
        "gradients_mib": gradients / MiB,
    }


def _resident(what: str) -> int:
    """Return this process's resident bytes, now ("VmRSS") or at the peak ("VmHWM")."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == what:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {what}")


def measured_apart(side: str, vocabulary: int, tokens: int) -> dict[str, float]:
    """Run `measured` in a separate process."""
    command = [sys.executable, "-P", __file__, "--side", side]
    command += ["--vocabulary", str(vocabulary), "--tokens", str(tokens)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return json.loads(out.stdout.splitlines()[-1])


def compared(vocabulary: int, tokens: int, measure: Callable[..., dict] = measured_apart) -> dict:
    """Measure both sides, and the ratio of the memory that they added."""
    found = {side: measure(side, vocabulary, tokens) for side in SIDES}
    theirs, ours = (found[side] for side in SIDES)
    if abs(ours["loss"] - theirs["loss"]) > 1e-5 * theirs["loss"]:
        raise SystemExit(f"the losses differ: {ours['loss']} and {theirs['loss']}")
    return {"sides": found, "ratio": ours["added_mib"] / theirs["added_mib"]}


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--side", choices=SIDES, help="measure only this side, in this process")
    options = parser.parse_args(arguments)
    if options.side:
        print(json.dumps(measured(options.side, options.vocabulary, *options.tokens)))
        return {}
    import torch
    import transformers

    report = {
        "machine": platform.machine(), "torch": torch.__version__,
        "transformers": transformers.__version__, "vocabulary": options.vocabulary,
        "dtype": "float32", "tokens": {n: compared(options.vocabulary, n) for n in options.tokens},
    }  # fmt: skip
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "memory.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main()
