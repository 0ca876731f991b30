"""The command line: ``warpweave`` and one of its commands."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from warpweave import __version__
from warpweave.kernels.words import did_you_mean
from warpweave.launch.processes import Processes, import_for_good, starting

_USAGE = """usage: warpweave COMMAND [OPTIONS]

commands:
  train        train a GPT on text, on any mesh (warpweave train --help)
  prove        show that a mesh computes the same results as one device (warpweave prove --help)
  plan         find the fastest layouts of a model on given GPUs (warpweave plan --help)
  doctor       check this machine: kernels, GPU links, mesh axes (warpweave doctor --help)
  collectives  measure all-reduce algorithms (warpweave collectives --help)
  replay       repeat a parameter-server run bit for bit (warpweave replay --help)
  sample       generate text with a trained model (warpweave sample --help)
  export       write a trained model for Hugging Face transformers (warpweave export --help)
  tune         time kernel tiles on this GPU and write the best to a table (warpweave tune --help)

Every command prints its result as one JSON object on the last line."""

# Per command, the modules of its options, with `parse`, and of its program, with
# `run(config, processes)`: processes for its ranks if it starts them on the CPU, else None.
_COMMANDS = {
    "train": ("train.options", "train.command"),
    "prove": ("prove.options", "prove.command"),
    "plan": ("plan.options", "plan.command"),
    "doctor": ("machine.doctor.options", "machine.doctor.command"),
    "collectives": ("machine.collectives.options", "machine.collectives.command"),
    "replay": ("train.server.replay_config", "train.server.replay"),
    "sample": ("train.sample_options", "train.sample"),
    "export": ("train.export_options", "train.export"),
    "tune": ("machine.tune.options", "machine.tune.command"),
}


def main() -> None:
    """Entry point of the ``warpweave`` command.

    Exits quietly on Ctrl-C during the imports and on a closed pipe
    (``warpweave train --help | head``)."""
    try:
        try:
            _main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        sys.exit(128 + signal.SIGPIPE)


def _main() -> None:
    command, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command in _COMMANDS:
        options, program = (f"warpweave.{name}" for name in _COMMANDS[command])
        config = import_module(options).parse(rest)  # without torch, so that errors are immediate
        early = Processes.early(program) if getattr(config, "starts_ranks", False) else None
        with starting(early) as processes:
            import_for_good(program).run(config, processes)
    elif command in ("", "-h", "--help"):
        print(_USAGE)
    elif command == "--version":
        print(f"warpweave {__version__}")
    else:
        near = did_you_mean(command, _COMMANDS)
        print(f"warpweave: unknown command {command!r}{near}\n\n{_USAGE}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
