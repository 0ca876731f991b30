"""Measure what a ring's tiles cost the attention kernels: all ranks' tiles in sequence on one GPU,
compared with one call for the whole sequence.

Causal attention over 8 emulated ranks in zig-zag order, forward and backward. A rank's tiles merge
in the forward's epilogue, and add up to dq in the backward's and to the dK‖dV that would travel, as
in `parallel/context/ring.py`; nothing is sent. Both variants compute the same pairs of queries and
keys, so the ratio is the cost of smaller launches, fp32 partial results and their sums. Outputs are
compared first; on a CPU (``--device cpu``, small and untimed) with float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from harness import Report, assert_equal, header, parser, results_folder
from torch import Tensor

from warpweave.kernels import reference
from warpweave.kernels.attention import attention_bwd, attention_delta, attention_fwd
from warpweave.machine.tune.timing import CudaTimer, interleave
from warpweave.parallel.layout import SequenceLayout

CLAIM = (
    "The kernels of 8 emulated ranks (zig-zag, causal), run in sequence, take at most 1.12 times "
    "as long as one kernel over the whole sequence."
)
PARTS, LIMITS = 8, {torch.float32: 1e-5, torch.bfloat16: 2e-2}
NAMES = ("o", "dq", "dk", "dv")


def full_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, lse) from one call."""
    return attention_fwd(q, k, v, causal=True)


def full_backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor, o: Tensor, lse: Tensor) -> Sequence:
    """Return (dq, dk, dv) from one call."""
    return attention_bwd(do, q, k, v, lse, attention_delta(o, do), causal=True)


def ring_forward(layout: SequenceLayout, *shards: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's (o, lse), from q, k and v of all ranks."""
    found, (q, k, v) = [], shards
    for rank in range(layout.parts):
        into = None
        for at in range(layout.parts):
            block = (rank - at) % layout.parts
            runs = {"q_runs": layout.runs(rank), "k_runs": layout.runs(block)}
            into = attention_fwd(
                q[rank], k[block], v[block], causal=True, **runs,
                **({"out_dtype": torch.float32} if into is None else {"into": into}),
            )  # fmt: skip
        o, lse = into
        found.append((o.to(q[rank].dtype), lse))
    return found


def ring_backward(
    layout: SequenceLayout, *shards: Sequence[Tensor], results: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, ...]]:
    """Return each rank's (dq, dk, dv), from all ranks' q, k, v, do and forward results."""
    dqs, (q, k, v, do) = [], shards
    dkv: list = [(None, None)] * layout.parts
    for rank, (o, lse) in enumerate(results):
        dq, delta = None, attention_delta(o, do[rank])
        for at in range(layout.parts):
            block = (rank - at) % layout.parts
            dq, *tile = attention_bwd(
                do[rank], q[rank], k[block], v[block], lse, delta, causal=True,
                q_runs=layout.runs(rank), k_runs=layout.runs(block),
                grad_dtype=torch.float32, into=(dq, None, None),
            )  # fmt: skip
            dkv[block] = [x if own is None else own.add_(x) for own, x in zip(dkv[block], tile)]
        dqs.append(dq)
    every = zip(dqs, *zip(*dkv))
    return [tuple(x.to(q[0].dtype) for x in grads) for grads in every]


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(CLAIM)
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = options.parse_args(argv)
    if given.device == "cuda" and not torch.cuda.is_available():
        options.exit(2, "context_kernels times a CUDA device and there is none: --device cpu\n")
    device, gpu = torch.device(given.device), given.device == "cuda"
    dtype, heads, dim = (torch.bfloat16, 16, 128) if gpu else (torch.float32, 2, 16)
    tokens = PARTS * (8192 if gpu and not given.quick else 32)
    layout = SequenceLayout(tokens, PARTS)
    torch.manual_seed(0)
    whole = [torch.randn(1, tokens, heads, dim, device=device, dtype=dtype) for _ in range(4)]
    shards = [[layout.shard(x, r, 1).contiguous() for r in range(PARTS)] for x in whole]

    o, lse = full_forward(*whole[:3])
    expected = [o, *full_backward(*whole, o, lse)]
    results = ring_forward(layout, *shards[:3])
    ranks = [
        (o, *grads)
        for (o, _), grads in zip(results, ring_backward(layout, *shards, results=results))
    ]
    found = [layout.unshard(x, 1) for x in zip(*ranks)]
    name = torch.cuda.get_device_name(device) if gpu else "CPU"
    extra = {"kind": name.lower().replace(" ", "-"), "device": name} if gpu else {}
    report = Report("context_kernels", CLAIM, header(**extra))
    limit = LIMITS[dtype]
    report.checks.append(assert_equal("ranks", dict(zip(NAMES, zip(found, expected))), limit))
    if not gpu:
        leaves = [x.double().requires_grad_() for x in whole[:3]]
        o, _ = reference.attention(*leaves, causal=True)
        truth = [o.detach(), *torch.autograd.grad(o, leaves, whole[3].double())]
        for which, got in (("ranks", found), ("whole", expected)):
            pairs = dict(zip(NAMES, zip(got, truth)))
            report.checks.append(assert_equal(f"{which} and float64", pairs, limit))
    else:
        calls = {
            "forward, 8 ranks": partial(ring_forward, layout, *shards[:3]),
            "forward, whole": partial(full_forward, *whole[:3]),
            "backward, 8 ranks": partial(ring_backward, layout, *shards, results=results),
            "backward, whole": partial(full_backward, *whole, expected[0], lse),
        }
        times = interleave(calls, CudaTimer(device), rounds=given.rounds or 20)
        for way in ("both", "forward", "backward"):
            mine, one = (
                [sum(x) for x in zip(times[f"forward, {of}"], times[f"backward, {of}"])]
                if way == "both" else times[f"{way}, {of}"]
                for of in ("8 ranks", "whole")
            )  # fmt: skip
            report.add(
                {f"{way}, 8 ranks": mine, f"{way}, whole": one}, [f"{way}, whole"],
                shape=f"B1 S{tokens} H{heads} D{dim} causal", dtype=str(dtype)[6:], tokens=tokens,
            )  # fmt: skip
    report.finish(results_folder(given) if gpu else given.results)


if __name__ == "__main__":
    main()
