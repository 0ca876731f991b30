"""``python -m warpweave.train`` is the command ``warpweave train``."""

from warpweave.train.command import main

if __name__ == "__main__":
    main()
