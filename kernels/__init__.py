"""Compute: tensors in, tensors out, on one device; no process group.

The public ops, grouped by import path. Each path also has the op's forward and backward halves:

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
    adamw                 adamw_step, begin_adamw, adamw_update, sum_of_squares
    muon                  orthogonalize, symmetric_product
    merge                 merge                     of partial attention results

`reference` defines each op in plain torch. `cost` counts its FLOPs and bytes. `sharding` says how
its tensors may be sharded. `runtime` holds what all kernels are built on.
"""

if __name__ != "warpweave.kernels":
    import sys

    _WHY = (
        f"this folder is the package 'warpweave.kernels', but it was imported as {__name__!r}; "
        "import warpweave.kernels, or, for the PyPI package 'kernels', keep the checkout off "
        "sys.path (python -P)"
    )
    # When transformers is imported, it imports any 'kernels' on sys.path to read its version, and
    # fails if that raises. So transformers gets an empty module without a version.
    _frame = sys._getframe()
    while _frame and _frame.f_globals.get("__name__") != "transformers.utils.import_utils":
        _frame = _frame.f_back
    if _frame is None:
        raise ImportError(_WHY)
    del __path__, _frame

    def __getattr__(name: str) -> object:
        special = name.startswith("__") and name.endswith("__")
        raise (AttributeError if special else ImportError)(_WHY)
