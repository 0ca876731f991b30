"""The formula and numbers behind each figure of a layout: ``warpweave plan --explain``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from warpweave.plan.choose import Chosen
from warpweave.plan.memory import (
    SIZES,
    block_activations,
    block_parameters,
    live_blocks,
    parameters_of,
)
from warpweave.plan.time import (
    Job,
    block_parts,
    context_bytes,
    gradient_sum,
    message,
    product_shapes,
    stage_work,
    tensor_pass,
    tensor_passes,
)

_GIB, _MS = 2**30, 1e3


def explained(chosen: Chosen) -> Iterator[str]:
    """Yield lines of text about a layout's time and memory."""
    yield ""
    yield from _block(chosen.job)
    yield from _step(chosen)
    yield from _memory_of(chosen)


def _block(job: Job) -> Iterator[str]:
    """Yield a block's work, part by part."""
    mesh, speed = job.mesh, job.hardware
    yield (
        f"one micro-batch in one block: T = {job.tokens} tokens per context rank, from {job.batch} "
        f"sequences; a tensor rank has {job.rows} rows of width {job.config.width}"
    )
    names = ("qkv", "output", "up", "down")
    for name, (M, N, K) in zip(names, product_shapes(job)):
        flops = 2 * M * N * K
        yield (
            f"  {name:7} 2 x {M} x {N} x {K} = {flops / 1e12:.4f} TFLOP / "
            f"({speed.device.half / 1e12:g} TFLOP/s x {speed.efficiency.product:g}) = "
            f"{flops / speed.products * _MS:.3f} ms"
        )
    if mesh.tp > 1:
        moved, seconds = tensor_pass(job)
        count = tensor_passes(job)
        both = "" if job.plan.sequence_parallel else " (an all-reduce counts as both)"
        yield (
            f"  tensor: {count[0]} all-gathers or reduce-scatters{both} in the forward and "
            f"{count[1]} in the backward, each {moved / 1e6:.2f} MB = T x width x bytes per "
            f"element x (tp - 1) / tp and {seconds * _MS:.3f} ms at "
            f"{speed.bandwidth(1, mesh.tp) / 1e9:.0f} GB/s; overlap {job.plan.overlap}"
        )
    if mesh.cp > 1:
        ahead, back = context_bytes(job)
        yield (
            f"  context: {ahead / 1e6:.2f} MB forward and {back / 1e6:.2f} MB backward at "
            f"{speed.bandwidth(mesh.tp, mesh.cp) / 1e9:.0f} GB/s, concurrent with attention"
        )
    yield "  exposed ms      forward  backward  (weight grad)"
    for name, work in block_parts(job).items():
        ahead, back, weights = (seconds * _MS for seconds in work)
        yield f"  {name:12} {ahead:10.3f} {back:9.3f} {weights:14.3f}"


def _step(chosen: Chosen) -> Iterator[str]:
    """Yield the step: its stages, its bubble, and what follows the pipeline."""
    job, time = chosen.job, chosen.time
    work, m = stage_work(job), job.plan.microbatches
    first, last = work[0], work[-1]
    yield (
        f"stages, forward + backward: first {first.forward * _MS:.2f} + "
        f"{first.backward * _MS:.2f} ms, last {last.forward * _MS:.2f} + "
        f"{last.backward * _MS:.2f} ms; one message between stages: "
        f"{message(job)[0] / 1e6:.2f} MB in {message(job)[1] * _MS:.3f} ms"
    )
    yield (
        f"pipeline: {m} micro-batches, {job.plan.schedule}, simulated: {time.pipeline:.4f} s, "
        f"{time.timeline.bubble:.1%} idle"
    )
    yield (
        f"gradients: {gradient_sum(job, 0):.4f} s to sum over {job.mesh.data} data ranks, exposed "
        f"{time.reduction:.4f} s; update and gather {time.update:.4f} s"
    )
    flops = job.config.step_flops(job.sequences * job.config.seq_len)
    peak = job.mesh.world * job.hardware.device.half
    yield (
        f"MFU: {flops:.4g} model FLOPs / ({time.seconds:.4f} s x {job.mesh.world} x "
        f"{job.hardware.device.half / 1e12:g} TFLOP/s = {time.seconds * peak:.4g}) = {time.mfu:.1%}"
    )


def _memory_of(chosen: Chosen) -> Iterator[str]:
    """Yield the fullest rank's memory."""
    job = chosen.job
    rank = max(range(job.mesh.pp), key=lambda r: chosen.memory[r].total)
    held = chosen.memory[rank]
    kept, size = block_activations(job)[0], SIZES[job.dtype]
    unfused = block_activations(job, fused=False)[0]
    yield (
        f"memory of pipeline rank {rank}: {parameters_of(job)[rank] / 1e6:.1f} M parameters "
        f"({block_parameters(job.config, job.mesh.tp) / 1e6:.1f} M per block); bytes per "
        f"parameter: {size} for the weight, {max(4, size)} for its gradient, and "
        f"{12 if size < 4 else 2 * size} for the optimizer; ZeRO {job.plan.zero} over "
        f"{job.mesh.size('shard')} ranks"
    )
    yield (
        f"  activations: {live_blocks(job.plan, job.mesh.pp, job.config)[rank]} blocks in "
        f"flight, {kept / 1e6:.1f} MB each without recomputation ({unfused / 1e6:.1f} MB in an "
        "implementation that also keeps dropout masks and attention scores, arXiv:2205.05198)"
    )
    for name, value in dataclasses.asdict(held).items():
        yield f"  {name:12} {value / _GIB:8.2f} GiB"
    yield f"  {'peak':12} {held.total / _GIB:8.2f} GiB of {job.hardware.capacity / _GIB:.1f}"
