"""Compute: tensors in, tensors out, on one device; no process group.

The public ops, each under its import path, with its halves beside it:

    attention             attention                 causal, window, documents, GQA, sinks, softcap
    norm                  rms_norm, layer_norm      of residual + dropout(x + bias)
    rope                  apply_rope, rope_table    rotary embedding and its tables
    qkv                   qkv_rope                  projection and rotation in one
    mlp                   mlp, gelu_mlp, swiglu_mlp up, activation, down in two kernels
    activation            activate                  GELU, ReLU^2, SwiGLU, GeGLU
    gemm                  gemm, gemm_into, fused_gemm
    overlap               all_gather_gemm, gemm_reduce_scatter, gemm_all_reduce
    cross_entropy         cross_entropy, linear_cross_entropy
    dropout               dropout                   keyed by global token numbers
    adamw                 adamw_step, sum_of_squares
    muon                  orthogonalize, symmetric_product
    merge                 merge                     of partial attention results

`reference` says in plain torch what each means, `cost` what it must compute and move, `sharding`
how it may be cut; `runtime` is what all kernels stand on.
"""

if __name__ != "warpweave.kernels":
    import sys

    _WHY = (
        f"this folder is the package 'warpweave.kernels', but it was imported as {__name__!r}: "
        "import warpweave.kernels; where PyPI's kernels is wanted, keep the checkout off sys.path "
        "(python -P)"
    )
    # While it is imported, transformers imports any 'kernels' on sys.path to read its version, and
    # fails if that raises. So it finds a module that has no version and nothing in it.
    _frame = sys._getframe()
    while _frame and _frame.f_globals.get("__name__") != "transformers.utils.import_utils":
        _frame = _frame.f_back
    if _frame is None:
        raise ImportError(_WHY)
    del __path__, _frame

    def __getattr__(name: str) -> object:
        special = name.startswith("__") and name.endswith("__")
        raise (AttributeError if special else ImportError)(_WHY)
