"""Move: functions over ranks and plans of work; no parameters, no modules."""

if __name__ != "warpweave.parallel":
    raise ImportError(
        f"this folder is the package 'warpweave.parallel', but it was imported as {__name__!r}: "
        "import warpweave.parallel"
    )
