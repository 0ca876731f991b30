"""``python -m warpweave.tune`` is the command ``warpweave tune``."""

from warpweave.tune import main

if __name__ == "__main__":
    main()
