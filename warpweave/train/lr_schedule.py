"""Learning-rate schedules: the learning rate as a function of the step alone.

A resumed run therefore continues the schedule if `steps` and the other values are unchanged.
"""

from __future__ import annotations

import math

from warpweave.train.options import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of update `step`, counted from 0.

    With the peak lr, m = `min_lr`, W = `warmup`, and N = `steps`:

        warm-up     lr (step + 1) / W                                 step < W, in every schedule
        cosine      lr (m + (1 - m) (1 + cos(pi t)) / 2)              t = (step - W) / (N - W)
        linear      lr (m + (1 - m) (1 - t))
        constant    lr
        wsd         lr, and in the last D steps linear                t = (step - N + D) / D

    with D = round(`decay` N), at most N - W. Cosine is from SGDR (arXiv:1608.03983). wsd is the
    warm-up-stable-decay schedule of MiniCPM (arXiv:2404.06395) with linear decay
    (arXiv:2405.18392 compares forms of decay). After the warm-up, which starts at 0 in
    transformers, they equal its `get_cosine_with_min_lr_schedule_with_warmup`,
    `get_wsd_schedule`, and so on. Update N would use lr m, and later updates keep it.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.lr_schedule == "constant":
        return config.lr
    begin = config.warmup
    if config.lr_schedule == "wsd":
        begin = max(begin, config.steps - round(config.decay * config.steps))
    done = min(1.0, max(0.0, (step - begin) / max(1, config.steps - begin)))
    high = 0.5 * (1 + math.cos(math.pi * done)) if config.lr_schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr + (1 - config.min_lr) * high)


def short_of_peak(config: TrainConfig) -> str | None:
    """A warning if the run ends during its warm-up; None if it reaches `lr`."""
    if config.warmup <= config.steps:
        return None
    return (
        f"warmup ({config.warmup}) is longer than the run (steps = {config.steps}): the learning "
        f"rate reaches only {learning_rate(config, config.steps - 1):.3g}, not lr = {config.lr:g}"
    )
