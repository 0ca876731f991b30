"""Run ``warpweave replay``."""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from warpweave.checkpoint import CheckpointError
from warpweave.cli.messages import refusing, say
from warpweave.cli.toml import read_options
from warpweave.launch.processes import Processes
from warpweave.parallel.server.replay import replay
from warpweave.train.options import CONFIG, FORMERLY, UPDATES, TrainConfig
from warpweave.train.server.log import read_log, staleness_of
from warpweave.train.server.replay_config import ReplayConfig
from warpweave.train.server.roles import ServedModel


def run(config: ReplayConfig, processes: Processes | None = None) -> None:
    """Run ``warpweave replay``."""
    with refusing(ValueError, OSError, CheckpointError):
        found = read_options(config.run / CONFIG, TrainConfig(), ("config",), FORMERLY)
        head, rows = read_log(config.run / UPDATES)
        if found.server_plan is None or found.server != head["servers"]:
            raise ValueError(
                f"{config.run}: the update log is from {head['servers']} parameter servers, but "
                f"config.toml has server = {found.server}"
            )
        torch.set_num_threads(head["threads"])  # the number decides the order of sums
        device = torch.device(found.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        served = ServedModel(dataclasses.replace(found, out=config.run), device.type)
        reader = served.open_run()
        gpt = served.make_gpt(device)
        shards = [served.shard(k) for k in range(found.server)]
        rows = rows[: reader.step]
        if (logged := len(rows)) != reader.step:
            raise ValueError(f"{reader.path} has {reader.step} updates, but the log has {logged}")
        replay(rows, found.server_plan, shards, lambda number: served.gradient(gpt, number))
    tensors = ((name, x) for shard in shards for name, x in shard.read())
    differing = [name for name, x in tensors if not torch.equal(x, reader.mapped(name))]
    if differing:
        count = f"{len(differing)} tensor{'s' * (len(differing) > 1)}"
        say(f"the replay differs from {reader.path} in {count}; the first is {differing[0]}")
    result = {
        "equal": not differing,
        "updates": len(rows),
        "workers": sorted({term["worker"] for row in rows for term in row["terms"]}),
        **staleness_of(rows),
        "checkpoint": str(reader.path),
        "torch": [head["torch"], torch.__version__],
    }
    print(json.dumps(result), flush=True)
    sys.exit(1 if differing else 0)
