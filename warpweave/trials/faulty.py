"""``warpweave train`` with one of `faults`: ``python -m warpweave.trials.faulty FAULT OPTIONS``."""

from warpweave.launch.processes import Processes, starting


def main() -> None:
    """A job with a fault."""
    with starting(Processes.early("warpweave.trials.faults")) as processes:
        from warpweave.trials import faults

        faults.main(processes)


if __name__ == "__main__":
    main()
