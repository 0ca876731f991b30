"""Learning rates compared with those of torch and transformers, for schedules that they have."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from warpweave.train.lr_schedule import learning_rate, short_of_peak
from warpweave.train.options import TrainConfig

STEPS, WARMUP = 103, 7
CONFIG = TrainConfig(steps=STEPS, warmup=WARMUP, lr=0.5, min_lr=0.2, decay=0.3)


def _rates(**changes) -> list[float]:
    config = dataclasses.replace(CONFIG, **changes)
    return [learning_rate(config, step) for step in range(config.steps)]


def _of(make) -> list[float]:
    """Return the rates of one of torch's schedulers, from update 0 on."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=CONFIG.lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer makes no steps
        scheduler, found = make(optimizer), []
        for _ in range(STEPS):
            found.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return found


def _torch(name: str):
    lrs = torch.optim.lr_scheduler
    left, low = STEPS - WARMUP, CONFIG.min_lr

    def make(optimizer):
        after = {
            "cosine": lambda: lrs.CosineAnnealingLR(optimizer, left, eta_min=CONFIG.lr * low),
            "linear": lambda: lrs.LinearLR(optimizer, 1.0, low, left),
            "constant": lambda: lrs.ConstantLR(optimizer, 1.0),
        }[name]()
        # One step longer than from 1 / W to 1: ours peaks in the last warmup step, and in the one
        # after it.
        warmup = lrs.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
        return lrs.SequentialLR(optimizer, [warmup, after], [WARMUP])

    return make


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_rates_are_those_of_torchs_schedulers(name):
    assert _rates(lr_schedule=name) == pytest.approx(_of(_torch(name)), rel=1e-12)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_after_the_warm_up_rates_are_those_of_transformers(name):
    optimization = pytest.importorskip("transformers.optimization", reason="an extra of its own")
    decay = round(CONFIG.decay * STEPS)
    make = {
        "cosine": lambda o: optimization.get_cosine_with_min_lr_schedule_with_warmup(
            o, WARMUP, STEPS, min_lr_rate=CONFIG.min_lr
        ),
        "linear": lambda o: optimization.get_linear_schedule_with_warmup(o, WARMUP, STEPS),
        "wsd": lambda o: optimization.get_wsd_schedule(
            o, WARMUP, decay, STEPS, decay_type="linear", min_lr_ratio=CONFIG.min_lr
        ),
    }[name]
    ours = _rates(lr_schedule=name, min_lr=0.0 if name == "linear" else CONFIG.min_lr)
    assert ours[WARMUP:] == pytest.approx(_of(make)[WARMUP:], rel=1e-12)


def test_decay_longer_than_the_steps_after_warmup_is_linear_from_there():
    long = {"warmup": 90, "decay": 0.5}
    assert _rates(lr_schedule="wsd", **long) == _rates(lr_schedule="linear", **long)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"warmup": 0}, {"warmup": STEPS}, {"steps": 1, "warmup": 1}, {"decay": 0.0},
     {"decay": 1.0}, {"warmup": 90, "decay": 0.5}, {"min_lr": 0.0}, {"min_lr": 1.0}],
)  # fmt: skip
def test_rates_rise_to_the_peak_and_then_never_rise_again(name, changes):
    rates = _rates(lr_schedule=name, **changes)
    top = min(len(rates), max(1, changes.get("warmup", WARMUP))) - 1
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[top] == CONFIG.lr


def test_past_its_end_a_schedule_stays_where_it_came_to():
    for name, last in (("cosine", 0.1), ("linear", 0.1), ("wsd", 0.1), ("constant", 0.5)):
        config = dataclasses.replace(CONFIG, lr_schedule=name)
        assert [learning_rate(config, STEPS + i) for i in (0, 1, 99)] == pytest.approx([last] * 3)


def test_a_run_that_ends_within_its_warm_up_is_told_what_it_comes_to():
    assert short_of_peak(dataclasses.replace(CONFIG, warmup=STEPS)) is None
    assert short_of_peak(TrainConfig(warmup=5, steps=2, lr=0.5)) == (
        "warmup (5) is longer than the run (steps = 2): the learning rate reaches only "
        "0.2, not lr = 0.5"
    )
