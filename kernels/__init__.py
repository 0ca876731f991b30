"""Compute: tensors in, tensors out, on one device; no process group."""

if __name__ != "warpweave.kernels":
    raise ImportError(
        f"this folder is the package 'warpweave.kernels', but it was imported as {__name__!r}: "
        "install the project (pip install -e .), import warpweave.kernels, and keep the repository "
        "root off sys.path (run pytest rather than python -m pytest, or use python -P)"
    )
