"""Record steps of an engine on the paths of a GPU, whose kernels compile but do not run, and print
what a CUDA graph would repeat wrongly: one line of JSON."""

import dataclasses
import json

import torch
from host_time import NARROW, pretended_gpu

from warpweave.model.config import PRESETS, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.model.engine_graph import as_tensors
from warpweave.parallel.data.optimizer import AdamW, Muon, Rule
from warpweave.parallel.mesh import Mesh
from warpweave.prove import graph_safe
from warpweave.prove.recording import PretendedGraph

CASES = {
    "gpt2 bf16": ("gpt2", torch.bfloat16, AdamW()),
    "llama fp16": ("llama-1b", torch.float16, Muon(dtype=torch.float16)),
}


def check(preset: str, dtype: torch.dtype, rule: Rule, *, numbers: bool = False) -> list[str]:
    """The differences of two steps with dropout and two micro-batches; with `numbers`, the learning
    rate and the dropout key are passed as numbers, which is wrong in a graph."""
    base = PRESETS[preset]
    grouped = {"kv_heads": 1, "hidden": 256} if base.kv_heads is not None else {}
    config = dataclasses.replace(base, **NARROW, **grouped, layers=2, dropout=0.1)
    plan = ParallelPlan(microbatches=2)
    engine = Engine(config, Mesh().connect(), plan, dtype=dtype, rule=rule)
    engine.use_graphs(PretendedGraph)
    tokens = torch.zeros((2, 1, config.seq_len), dtype=torch.int64)
    batch = {"tokens": tokens, "labels": tokens, "sample_ids": tokens[..., 0]}
    every = [batch | {"lr": 0.1 * n, "key": n, "interrupted": float(n)} for n in range(2)]
    examples = [(inputs if numbers else as_tensors(inputs),) for inputs in every]
    return [*map(str, graph_safe(lambda inputs: engine.graphs.step(**inputs), *examples))]


def main() -> None:
    with pretended_gpu():
        found = {name: check(*case) for name, case in CASES.items()}
        found["numbers"] = check(*CASES["gpt2 bf16"], numbers=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
