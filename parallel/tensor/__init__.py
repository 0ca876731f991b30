"""Tensor parallelism: linear layers, embedding and loss with weights cut over the ranks of a group.

Column-parallel cuts a weight's output features, row-parallel its input features; one after the
other they need one sum over the ranks in each direction (Shoeybi et al. 2019, arXiv:1909.08053).
With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) the activations between such
pairs are cut along their tokens, and each all-reduce becomes a reduce-scatter here and an
all-gather there. The vocabulary's embedding and loss are cut along the vocabulary.

Types are those of ``collectives``: R replicated with a partial gradient, I invariant, S(d) sharded,
P partial. R ranks in the group; T tokens (any leading dims where sequence parallelism is off), K
input and N output features, V the vocabulary padded to a multiple of R. ``group=None`` is an axis
of size 1.

Sums over ranks are re-associated, everything else is exact: with one rank less, the same numbers.
In bf16 and fp16 the terms of such a sum are fp32 (the GEMM's accumulators), rounded once after the
sum. Gradients of weights are made in ``weight.grad_dtype``: fp32 if the parameter says so. They go
through ``wgrad``, so that a pipeline schedule can have them made later; the collectives that they
need are then called at that time, and every rank of the group must make them in the same order. The
Functions keep the parameters themselves besides what they save: a saved tensor may come back as a
copy (checkpointing detaches it), which knows no grad_dtype and whose .grad nobody reads.

Under autocast the linear layers compute in its dtype; weights stay as they are. ``torch.compile``
traces the Functions with group=None only; a compiled backward defers no weight gradient.

`ranks` what moves around a column- and a row-parallel product, `chunked` under chunks of it, both
chosen by a word · `linear` the two · `embedding`, `loss` over a cut
vocabulary · `linear_loss` head and loss in one · `mlp`, `qkv` two products, or one with its
rotation, fused · `norm` of features that are cut.
"""

from warpweave.parallel.tensor.embedding import vocab_parallel_embedding
from warpweave.parallel.tensor.linear import column_parallel_linear, row_parallel_linear
from warpweave.parallel.tensor.linear_loss import vocab_parallel_linear_cross_entropy
from warpweave.parallel.tensor.loss import vocab_parallel_cross_entropy
from warpweave.parallel.tensor.mlp import parallel_mlp
from warpweave.parallel.tensor.norm import cut_rms_norm
from warpweave.parallel.tensor.qkv import parallel_qkv_rope

__all__ = [
    "column_parallel_linear",
    "cut_rms_norm",
    "parallel_mlp",
    "parallel_qkv_rope",
    "row_parallel_linear",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
]
