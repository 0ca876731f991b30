"""``warpweave train`` with a planted fault: ``python -m faulty FAULT OPTIONS`` (`fault_acts`)."""

from warpweave.launch.processes import Processes, starting


def main() -> None:
    """Run a job with a fault."""
    with starting(Processes.early("fault_acts")) as processes:
        import fault_acts

        fault_acts.main(processes)


if __name__ == "__main__":
    main()
