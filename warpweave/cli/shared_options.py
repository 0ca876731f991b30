"""Options that several commands have: the type and the help of each, declared once."""

from __future__ import annotations

from typing import Annotated, Literal

from tyro.conf import arg

TensorParallel = Annotated[int, arg(help="Tensor-parallel degree.")]
PipelineParallel = Annotated[int, arg(help="Pipeline-parallel degree.")]
ContextParallel = Annotated[
    int, arg(help="Context-parallel degree: ranks over which the sequence is sharded.")
]
UlyssesDegree = Annotated[int, arg(
    help="Ulysses degree: number of adjacent context ranks that exchange sequence shards for head "
    "shards by all-to-all. There are (cp / ulysses) such groups, and a ring runs over them. With "
    "1, there is only a ring."
)]  # fmt: skip
ShardingDegree = Annotated[int | None, arg(
    help="Sharding degree (hybrid sharding): number of adjacent data-parallel ranks that ZeRO "
    "shards over; each of the (dp / dp_shard) groups holds a full set of the shards. Default: all "
    "data-parallel ranks."
)]  # fmt: skip
Device = Annotated[
    Literal["cpu", "cuda"] | None,
    arg(help="Device: cuda (one GPU per rank) or cpu; default: cuda if there are GPUs."),
]
Implementation = Annotated[Literal["triton", "torch"] | None, arg(
    help="Implementation of the ops; default: the Triton kernels on a GPU, torch on the CPU. On "
    "the CPU, triton needs TRITON_INTERPRET=1 and is slow."
)]  # fmt: skip
Timeout = Annotated[
    float, arg(help="Timeout in seconds for any collective or message between ranks.")
]
