"""Functions over ranks and plans of work: everything that moves data; no parameters, no modules."""

if __name__ != "warpweave.parallel":
    raise ImportError(
        f"this folder is the package 'warpweave.parallel', but it was imported as {__name__!r}; "
        "use 'import warpweave.parallel'"
    )
