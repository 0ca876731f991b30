"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) with sequence parallelism (Korthikanti
et al. 2022, arXiv:2205.05198): weights and activations sharded over the ranks of a group.

A column-parallel linear layer shards the output features of its weight; a row-parallel one shards
the input features. A pair of them needs one all-reduce forward and one backward. With sequence
parallelism, activations outside the pair are sharded along the tokens, and each all-reduce becomes
an all-gather and a reduce-scatter. Embedding and loss are sharded along the vocabulary.

    four ranks, MLP y = act(x W1^T) W2^T, W1[F, E] in four blocks of rows, W2[E, F] of columns

                        tensor parallel                    with sequence parallelism
    x                   [T, E] on every rank               [T/4, E] per rank
                        no collective                      all-gather of x
    h = act(x W1r^T)    [T, F/4] per rank                  [T, F/4] per rank
    h W2r^T             [T, E], partial sums               [T, E], partial sums
                        all-reduce                         reduce-scatter
    y                   [T, E] on every rank               [T/4, E] per rank

    backward            all-reduce of dx                   all-gather of dy, reduce-scatter of dx,
                                                           all-gather of x again, for dW1

Types are those of ``collectives``: R replicated with a partial gradient, I invariant, S(d) sharded
along dim d, P partial. The group has R ranks. T is the number of tokens (any leading dims if
sequence parallelism is off), K and N the numbers of input and output features, and V the vocabulary
padded to a multiple of R. ``group=None`` is an axis of size 1.

Sums over ranks are re-associated; everything else is exact. In bf16 and fp16 the terms of such a
sum are fp32 (the GEMM's accumulators), rounded once after the sum. Weight gradients have the dtype
``weight.grad_dtype``: fp32 if the parameter says so. They go through ``wgrad``, so a pipeline
schedule can defer them. The collectives that they need are deferred with them, and every rank of
the group must compute them in the same order. In addition to what they save, the Functions keep the
parameters themselves: a saved tensor may come back as a copy (checkpointing detaches it), which has
no grad_dtype and whose .grad is never read.

Under autocast the linear layers compute in its dtype; weights keep theirs. ``torch.compile`` traces
the Functions only with group=None; a compiled backward does not defer weight gradients.

`ranks` the collectives around a column- and a row-parallel product and the values of `overlap`,
`chunked` collectives overlapped with chunks of the product · `linear` the two layers · `embedding`,
`loss` sharded over the vocabulary · `linear_loss` head and loss in one function · `mlp` both
products, fused · `qkv` one product and its rotary embedding, fused · `norm` over sharded features.
"""

from warpweave.parallel.tensor.embedding import vocab_parallel_embedding
from warpweave.parallel.tensor.linear import column_parallel_linear, row_parallel_linear
from warpweave.parallel.tensor.linear_loss import vocab_parallel_linear_cross_entropy
from warpweave.parallel.tensor.loss import vocab_parallel_cross_entropy
from warpweave.parallel.tensor.mlp import parallel_mlp
from warpweave.parallel.tensor.norm import cut_rms_norm
from warpweave.parallel.tensor.qkv import parallel_qkv_rope

__all__ = [
    "column_parallel_linear", "cut_rms_norm", "parallel_mlp", "parallel_qkv_rope",
    "row_parallel_linear", "vocab_parallel_cross_entropy", "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
]  # fmt: skip
