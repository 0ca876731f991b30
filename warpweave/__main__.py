"""``python -m warpweave`` is the command ``warpweave``."""

from warpweave.cli import main

if __name__ == "__main__":
    main()
