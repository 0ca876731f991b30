"""Run ``warpweave sample`` on one device, or over tensor ranks and pipeline stages."""

from __future__ import annotations

import dataclasses
import json
import time

from warpweave.checkpoint import CheckpointError
from warpweave.cli.messages import refusing, say
from warpweave.convert.source import open_model, other_tokenizer
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.launch.devices import BACKENDS, choose_backend
from warpweave.launch.processes import Processes, under_torchrun
from warpweave.launch.ranks import launch
from warpweave.launch.session import join, reported
from warpweave.model.generate import generate
from warpweave.model.gpt import GPT
from warpweave.train import idle_options
from warpweave.train.chosen import choose_checkpoint
from warpweave.train.sample_options import SampleConfig, parse


def sample_rank(config: SampleConfig, port: int | None = None) -> None:
    """Generate as one rank; rank 0 prints the texts and the result's JSON line."""
    backend = BACKENDS.get(config.device)
    session = join(config.mesh, timeout=config.timeout, backend=backend, port=port)
    with reported(session, (CheckpointError,), refused=(ValueError, CheckpointError)):
        mesh = config.mesh.connect(session.device.type)
        source = open_model(config.model, mesh.group("world"))
        dtype = NAMED_DTYPES[config.dtype]
        gpt = GPT(source.config, mesh=mesh, device="meta", dtype=dtype, impl=config.impl)
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
    result = {"texts": texts, "tokens": found, "tokens_per_second": rate}
    chosen = choose_checkpoint(config.model, best=False)
    print(json.dumps(result | ({} if chosen is None else chosen.fields)), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run ``warpweave sample`` with the options in `argv`."""
    run(parse(argv))


def run(config: SampleConfig, processes: Processes | None = None) -> None:
    """Run ``warpweave sample``."""
    with refusing(ValueError, ImportError, OSError, CheckpointError):
        if under_torchrun():
            raise ValueError("sample starts its own ranks; run it without torchrun")
        chosen = choose_checkpoint(config.model, best=config.best)
        if chosen is not None:  # every rank opens this one, even if a run saves a newer one
            config = dataclasses.replace(config, model=chosen.path)
        config.check()
        if chosen is not None:
            say(chosen.describe())
        for line in idle_options.idle_lines(idle_options.SAMPLE, config):
            say(line)
        if line := other_tokenizer(config.model, config.tokenizer):
            say(line)
        if config.mesh.world == 1:
            sample_rank(config)
        else:
            backend = choose_backend(config.mesh.world, BACKENDS.get(config.device))
            launch(sample_rank, (config,), config.mesh, backend=backend, processes=processes)


if __name__ == "__main__":
    main()
