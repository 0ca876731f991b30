"""``warpweave train`` with one of `faults`: ``python -m warpweave.trials.faulty FAULT OPTIONS``."""

from contextlib import nullcontext

from warpweave.processes import Processes


def main() -> None:
    """A job with a fault."""
    with Processes.early("warpweave.trials.faults") or nullcontext() as processes:
        from warpweave.trials import faults

        faults.main(processes)


if __name__ == "__main__":
    main()
