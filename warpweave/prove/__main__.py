"""``python -m warpweave.prove`` is the command ``warpweave prove``."""

from warpweave.prove import main

if __name__ == "__main__":
    main()
