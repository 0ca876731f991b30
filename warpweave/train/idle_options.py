"""Options that have no effect in combination with others: one table per command.

An option that differs from its default but cannot change the run is never ignored silently: the
command prints one of the `idle_lines`, or the row is `refused` and `refuse_idle` raises. A value
that turns something off has no row if that is off anyway (``--zero 0`` on one rank,
``--no-sequence-parallel`` without tensor ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any

from warpweave.cli.toml import options_of
from warpweave.parallel.schedule import find_family


@dataclass(frozen=True)
class Idle:
    """A condition, a function of a command's record, under which `options` have no effect.

    An option counts only if its value is not the default. In the reason `because`, ``{name}`` is
    the value of an option. If `refused`, the command raises an error instead of printing a line.
    """

    options: tuple[str, ...]
    when: Callable[[Any], bool]
    because: str
    refused: bool = False


def _windows(config: Any) -> list[int | None]:
    """The sliding window of every layer; None if it is as long as the sequence or there is none."""
    model = config.model_config(1)
    found = [model.window(layer) for layer in range(model.layers)]
    return [None if window is None or window >= model.seq_len else window for window in found]


def _one_document(config: Any) -> bool:
    """True if the training data is a single document; the default data is many files."""
    if config.data is None:
        return False
    data = config.open_data("train")
    return len(data.starts) < 2 and not data.has_separator


TRAIN = (
    Idle(("model",), lambda c: c.init_from is not None, "--init-from {init_from} is used"),
    Idle(("separator",), lambda c: not c.packed, "it needs --packed", True),
    Idle(("separator",), lambda c: not c.open_data("train").has_separator,
         "no token of the training data has this id"),
    Idle(("packed",), _one_document,
         "{data} is one document; pass --separator with the id of the token that ends each "
         "document, or pass --data with a folder of several files"),
    # ---- the model
    Idle(("rope_theta",), lambda c: c.model_config(1).positions != "rope",
         "the model's positions are learned; pass --positions rope to use it"),
    Idle(("rope_theta",), lambda c: c.model_config(1).local_rope_theta and None not in _windows(c),
         "every layer has a window and uses local_rope_theta"),
    Idle(("local_rope_theta",), lambda c: not any(_windows(c)),
         "no layer has a window shorter than the sequence"),
    Idle(("windows",), lambda c: any(c.overrides.windows) and not any(_windows(c)),
         "no layer has a window shorter than the sequence"),
    Idle(("norm_bias",), lambda c: c.model_config(1).norm != "layer",
         "the model's norm is RMSNorm, which has no bias; pass --norm layer to use one"),
    # ---- the ranks
    Idle(("sample", "eval_every", "check_every"), lambda c: c.server,
         "a --server run evaluates only at the end, and neither samples nor compares workers"),
    Idle(("check_collectives",), lambda c: c.server, "--server workers use no collectives"),
    Idle(("timeout", "check_every", "check_collectives"),
         lambda c: c.mesh.world == 1 and not c.server, "there is only one rank"),
    Idle(("zero",), lambda c: c.plan.zero >= 2 and c.mesh.size("shard") == 1,
         "dp x cp (or dp_shard x cp) is 1, so there is only one rank to shard over"),
    Idle(("overlap",), lambda c: c.plan.overlap != "none" and c.tp == 1, "tp is 1"),
    Idle(("chunks", "schedule"), lambda c: c.pp == 1 and not c.plan.asynchronous,
         "pp is 1, so it can change only activation memory"),
    Idle(("layout", "cp_strategy"), lambda c: c.cp == 1, "cp is 1"),
    # The first outer step comes after the warm-up, an interval of a fragment, and the delay.
    Idle(("outer_every",),
         lambda c: c.outer_warmup + c.outer_every // c.fragments + c.outer_delay > c.steps,
         "the run ends after {steps} steps, before the first outer step"),
    # ---- the optimizer
    Idle(("momentum",), lambda c: c.optimizer in ("adamw", "nadamw"),
         "optimizer = {optimizer} uses --betas"),
    Idle(("betas", "eps"), lambda c: c.optimizer == "sgd", "optimizer = sgd uses --momentum"),
    Idle(("lr_schedule", "min_lr", "decay"), lambda c: c.warmup >= c.steps,
         "the warm-up ({warmup} steps) is as long as the run ({steps} steps) or longer"),
    Idle(("decay",), lambda c: c.lr_schedule != "wsd", "only --lr-schedule wsd has a decay phase"),
    Idle(("min_lr",), lambda c: c.lr_schedule == "constant",
         "lr_schedule = constant does not decay"),
    Idle(("min_lr",), lambda c: c.lr_schedule == "wsd" and not round(c.decay * c.steps),
         "decay = {decay} of {steps} steps rounds to 0 steps, so lr_schedule = wsd does not decay"),
    # ---- what is written and when
    Idle(("early_stop",), lambda c: not c.eval_every,
         "it counts evaluations during the run, but eval_every is 0; pass --eval-every", True),
    Idle(("early_stop",), lambda c: c.eval_every >= c.steps,
         "the run ends after {steps} steps and the first evaluation is due after {eval_every}"),
    Idle(("save_every",), lambda c: c.save_every > c.steps, "the run ends after {steps} steps"),
    Idle(("eval_every",), lambda c: c.eval_every > c.steps, "the run ends after {steps} steps"),
    Idle(("check_every",), lambda c: c.check_every > c.steps, "the run ends after {steps} steps"),
    Idle(("keep",), lambda c: not (c.save_every or c.save_minutes or c.early_stop or c.resume),
         "only the last step is saved; pass --save-every or --save-minutes to save more"),
    Idle(("tiles",), lambda c: c.impl == "torch" or (c.impl is None and c.device == "cpu"),
         "torch ops are used, not the Triton kernels"),
)  # fmt: skip


def _proves_no_schedule(c: Any) -> bool:
    """Return True if no layout of the proof has a pipeline or an asynchronous schedule."""
    return not (c.pp > 1 or c.all or c.random or find_family(c.schedule).asynchronous)


PROVE = (Idle(("schedule",), _proves_no_schedule, "pp is 1"),)


def _vocabulary(config: Any) -> int:
    from warpweave.convert.source import read_model_config

    return read_model_config(config.model).vocab_size


SAMPLE = (
    Idle(("top_k", "top_p", "seed"), lambda c: c.temperature == 0,
         "temperature = 0 picks the most likely token (greedy)"),
    Idle(("temperature", "top_p", "seed"), lambda c: c.top_k == 1,
         "top_k = 1 picks the most likely token (greedy)"),
    Idle(("top_k",), lambda c: c.top_k >= _vocabulary(c),
         "the model's vocabulary has no more than {top_k} tokens"),
    Idle(("timeout",), lambda c: c.mesh.world == 1, "there is only one rank"),
)  # fmt: skip


def idle_lines(rows: tuple[Idle, ...], config: Any) -> list[str]:
    """One line for each option in `config`, a command's record, that has no effect."""
    found: dict[str, str] = {}
    for name, row in _found(rows, config):
        found.setdefault(name, _line(row, name, config))
    return list(found.values())


def refuse_idle(rows: tuple[Idle, ...], config: Any) -> None:
    """Raise ``ValueError`` for the first option that has no effect in a row that is `refused`."""
    for name, row in _found(tuple(row for row in rows if row.refused), config):
        raise ValueError(_line(row, name, config))


def _found(rows: tuple[Idle, ...], config: Any) -> Iterator[tuple[str, Idle]]:
    """Pairs (option, row) for every option that is not the default and every row that applies."""
    needed = [f.name for f in fields(config) if f.default is f.default_factory is MISSING]
    defaults = type(config)(**{name: getattr(config, name) for name in needed})
    now, usual = options_of(config), options_of(defaults)
    for row in rows:
        given = [name for name in row.options if now[name] != usual[name]]
        if given and row.when(config):
            yield from ((name, row) for name in given)


def _line(row: Idle, name: str, config: Any) -> str:
    options = options_of(config)
    return f"{name} = {options[name]} has no effect: {row.because.format_map(options)}"
