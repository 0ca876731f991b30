"""Remember: modules that own parameters, their initialization and their shard maps."""

if __name__ != "warpweave.layers":
    raise ImportError(
        f"this folder is the package 'warpweave.layers', but it was imported as {__name__!r}; "
        "import warpweave.layers"
    )
