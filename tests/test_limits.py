"""The limits of user arguments in the top layer: just within is accepted, just beyond is rejected.

As in `test_refusals`, each row breaks exactly one rule; a row without words is valid but as close
to the limit as possible. A `<` in place of a `<=`, a bound with another number, or a lost condition
makes one row fail.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from test_refusals import rows

from warpweave.checkpoint import open_checkpoint, save_checkpoint
from warpweave.checkpoint.files import CheckpointError
from warpweave.checkpoint.manifest import dump, parse_manifest
from warpweave.data import Dataset, open_dataset, write_token_file
from warpweave.data.split import Split
from warpweave.data.text import open_text
from warpweave.data.token_file import open_token_file
from warpweave.kernels.rope_scaling import RopeScaling
from warpweave.launch.session import join
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.generate import Sampling, _check_ranks, check_prompts
from warpweave.model.gpt import GPT
from warpweave.model.plain import PlainConfig
from warpweave.parallel.mesh import Mesh
from warpweave.plan.fits import check_memory
from warpweave.plan.memory import TrainingStep, estimate
from warpweave.prove.layouts import Layout
from warpweave.prove.options import ProveConfig
from warpweave.prove.typecheck import typecheck
from warpweave.train.lr_schedule import short_of_peak
from warpweave.train.options import GPTOverrides, TrainConfig
from warpweave.train.resume import Progress, check_run

NAN, INF = math.nan, math.inf
ODD = (-1e-9, INF, NAN)


def check(call: Callable[[], object], words: str | None) -> None:
    """Assert that `call` raises a one-line error with these words, or (None) that it is valid."""
    if words is None:
        call()
        return
    with pytest.raises((ValueError, CheckpointError), match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


SIZES = {"vocab_size": 11, "seq_len": 8, "layers": 2, "width": 12, "heads": 6}


# ---------------------------------------------------------------- models and plans


def _gpt(**change) -> GPTConfig:
    return GPTConfig(**SIZES | change)


def _cut(mesh: Mesh, plan: ParallelPlan = ParallelPlan(), **change) -> None:
    _gpt(**change).check(mesh, plan)


ROPE = {"positions": "rope"}
TWICE = ParallelPlan(schedule="interleaved", chunks=2, microbatches=2)


@rows(
    [
        *((lambda n=n: _gpt(**{n: 0}), f"{n} must be at least 1, got 0") for n in SIZES),
        (lambda: _gpt(**dict.fromkeys(SIZES, 1)), None),
        (lambda: _gpt(kv_heads=0), "kv_heads and hidden must be at least 1, got 0 and None"),
        (lambda: _gpt(hidden=0), "kv_heads and hidden must be at least 1, got None and 0"),
        (lambda: _gpt(kv_heads=1, hidden=1), None),
        (lambda: _gpt(head_size=0), "head_size must be at least 1, got 0"),
        (lambda: _gpt(head_size=1), None),
        (lambda: _gpt(heads=5), r"width \(12\) is not divisible by heads \(5\)"),
        (lambda: _gpt(heads=5, head_size=3), None),
        (lambda: _gpt(kv_heads=4), r"heads \(6\) is not divisible by kv_heads \(4\)"),
        (lambda: _gpt(heads=4, **ROPE), "rope needs an even head size, got 3"),
        (lambda: _gpt(heads=4), None),
        (lambda: _gpt(dropout=1.0), "dropout must be in"),
        (lambda: _gpt(dropout=-1e-9), "dropout must be in"),
        (lambda: _gpt(dropout=NAN), "dropout must be in"),
        (lambda: _gpt(dropout=1 - 1e-9), None),
        (lambda: _gpt(windows=(0, -1)), "windows must be non-negative integers"),
        (lambda: _gpt(windows=(0, 1.0)), "must be an integer, got 1.0"),
        (lambda: _gpt(windows=[0, 1]), None),
        *(
            (lambda n=n, x=x: _gpt(**{n: x}), f"{n} must be positive and finite")
            for n in ("attention_scale", "softcap", "logit_softcap", "embedding_scale")
            for x in (0.0, -1.0, INF, NAN)
        ),
        (lambda: _gpt(softcap=1e-9, attention_scale=1e9), None),
        *(
            (lambda n=n: _gpt(**{n: "odd"}), f"{n} must be one of .*, got 'odd'")
            for n in ("positions", "norm", "activation", "norm_place")
        ),
        (lambda: _gpt(local_rope_theta=9.0), "local_rope_theta needs positions = 'rope'"),
        (lambda: _gpt(rope_scaling=RopeScaling("ntk", 2.0)), "rope_scaling needs positions"),
        (lambda: _gpt(local_rope_theta=9.0, **ROPE), None),
        (lambda: _gpt(qk_norm_whole=True), "qk_norm_whole is a variant of qk_norm; set"),
        (lambda: ParallelPlan(microbatches=0).make_schedule(1), "microbatches must be at least 1"),
        (lambda: ParallelPlan(chunks=2).placement(2), "schedule 1f1b requires chunks = 1"),
        (lambda: ParallelPlan(chunks=2, schedule="gpipe").placement(2), "gpipe requires chunks"),
        (lambda: ParallelPlan(chunks=1, microbatches=1).placement(2), None),
        (lambda: _cut(Mesh(tp=4)), r"kv_heads \(6\) is not divisible by tp \(4\)"),
        (lambda: _cut(Mesh(tp=3), kv_heads=2), r"kv_heads \(2\) is not divisible by tp \(3\)"),
        (lambda: _cut(Mesh(tp=2), hidden=7), r"hidden \(7\) is not divisible by tp \(2\)"),
        (lambda: _cut(Mesh(tp=3), hidden=3), None),
        (lambda: _cut(Mesh(pp=3)), r"the number of pipeline stages \(3\), got 2"),
        (lambda: _cut(Mesh(pp=2)), None),
        (lambda: _cut(Mesh(pp=2), TWICE), r"the number of pipeline stages \(4\), got 2"),
        (lambda: _cut(Mesh(pp=2), TWICE, layers=4), None),
        (lambda: _cut(Mesh(), TWICE), None),
        (lambda: _cut(Mesh(cp=4, ulysses=2), ParallelPlan(cp_strategy="measured")),
         "'measured' needs ulysses = 1, got 2, which leaves only one strategy; use 'hybrid'"),
        (lambda: _cut(Mesh(cp=2), ParallelPlan(cp_strategy="measured")), None),
    ]
)  # fmt: skip
def test_models_plans_and_how_they_are_cut(call, words) -> None:
    check(call, words)


def test_every_field_of_a_model_and_a_plan_accepts_only_its_own_types() -> None:
    """A whole number is valid for a float; True is not a number, and a number is neither a boolean
    nor a word. None is valid only for fields that have it."""
    odd = {bool: True, int: 2, float: 0.5, str: "none", type(None): None}
    for record in (GPTConfig(**SIZES), ParallelPlan()):
        for name, kind in get_type_hints(type(record)).items():
            kinds = set(get_args(kind) or (kind,)) if get_origin(kind) is not tuple else set()
            for given, value in odd.items() if kinds & {bool, int, float} else ():
                if given not in kinds and not (given is int and float in kinds):
                    with pytest.raises(ValueError, match=f"^{name} must be .*, got {value!r}$"):
                        dataclasses.replace(record, **{name: value})
    whole = {"norm_eps": 1, "rope_theta": 7, "dropout": 0, "softcap": 2, "embedding_scale": 3}
    assert dataclasses.asdict(_gpt(**whole)).items() >= whole.items()


def _plain(**change) -> PlainConfig:
    return PlainConfig(**SIZES | {"kv_heads": 6, "hidden": 4} | change)


@rows(
    [
        (lambda: _plain(positions="alibi"), "positions must be one of"),
        (lambda: _plain(norm="batch"), "norm must be one of"),
        (lambda: _plain(activation="relu"), "activation must be one of"),
        (lambda: _plain(norm_place="middle"), "norm_place must be one of"),
        (lambda: _plain(heads=5, kv_heads=5), "width must be divisible by heads"),
        (lambda: _plain(heads=5, kv_heads=5, head_size=3), None),
        (lambda: _plain(kv_heads=4), "and heads by kv_heads"),
        (lambda: _plain(heads=4, kv_heads=4, **ROPE), "rope needs an even head size, got 3"),
        (lambda: _plain(heads=4, kv_heads=4), None),
        (lambda: _plain(dropout=1.0), "dropout must be in"),
        (lambda: _plain(dropout=-1e-9), "dropout must be in"),
    ]
)
def test_plain_models(call, words) -> None:
    check(call, words)


# ---------------------------------------------------------------- runs


def _run(**change) -> None:
    TrainConfig(**change).check()


def _of_length(seq_len: int, **change) -> None:
    _run(overrides=GPTOverrides(seq_len=seq_len), **change)


NO_SP = ParallelPlan(sequence_parallel=False)


POSITIVE = ("steps", "batch", "keep", "eval_batches")
COUNTS = (
    "warmup", "save_every", "max_restarts", "eval_every", "check_every", "early_stop", "sample",
    "seed",
)  # fmt: skip
NOWHERE = Path("no/such/run")
REALS = ("lr", "min_lr", "eps", "weight_decay", "clip", "save_minutes")


@pytest.fixture
def no_data(monkeypatch):
    data = SimpleNamespace(vocab_size=256)
    monkeypatch.setattr(TrainConfig, "open_data", lambda config, split: data)


@rows(
    [
        *((lambda n=n: _run(**{n: 0}), f"{n} must be at least 1, got 0") for n in POSITIVE),
        (lambda: _run(**dict.fromkeys(POSITIVE, 1)), None),
        *((lambda n=n: _run(**{n: -1}), f"{n} must be at least 0, got -1") for n in COUNTS),
        (lambda: _run(**dict.fromkeys(COUNTS, 0)), None),
        *(
            (lambda n=n, x=x: _run(**{n: x}), f"{n} must be at least 0 and finite, got {x}")
            for n in REALS for x in ODD
        ),
        (lambda: _run(**dict.fromkeys(REALS, 0.0)), None),
        *((lambda x=x: _run(decay=x), "decay must be a fraction") for x in (-1e-9, 1 + 1e-9, NAN)),
        (lambda: _run(decay=0.0), None),
        (lambda: _run(decay=1.0), None),
        *((lambda x=x: _run(timeout=x), "timeout must be in") for x in (0.0, -1.0, 86401.0, NAN)),
        (lambda: _run(timeout=86400.0), None),
        *((lambda x=x: _run(betas=x), "betas must be in") for x in ((1.0, 0.5), (0.5, 1.0))),
        *((lambda x=x: _run(betas=x), "betas must be in") for x in ((-0.1, 0.5), (0.5, NAN))),
        (lambda: _run(betas=(0.0, 0.0)), None),
        (lambda: _run(early_stop=1, eval_every=0),
         "early_stop = 1 has no effect: it counts evaluations during the run, but "
         "eval_every is 0; pass --eval-every"),
        (lambda: _run(early_stop=1, eval_every=1), None),
        (lambda: _run(separator=0), "separator = 0 has no effect: it needs --packed"),
        (lambda: _run(separator=0, packed=True), None),
        (lambda: _of_length(17, tp=2, batch=1), r"\(17\) is not div"),
        (lambda: _of_length(17, tp=2, batch=1, plan=NO_SP), None),
        (lambda: _of_length(20, tp=2, cp=2, batch=1), None),
        (lambda: _of_length(17, tp=2, batch=2), None),
        # Each of four context ranks has room for 2 x 9 of 65 tokens, or for 16 of 63.
        (lambda: _of_length(65, tp=4, cp=4, batch=1),
         r"batch x seq_len / cp \(18\) is not divisible by tp \(4\)"),
        (lambda: _of_length(65, tp=4, cp=4, batch=2), None),
        (lambda: _of_length(63, tp=2, cp=4, batch=1, plan=ParallelPlan(layout="contiguous")), None),
        (lambda: _run(tp=3), r"kv_heads \(4\) is not divisible by tp \(3\)"),
        (lambda: _run(overrides=GPTOverrides(vocab_size=256)), None),
        (lambda: _run(overrides=GPTOverrides(vocab_size=255)),
         "vocab_size = 255 is smaller than the data's 256"),
        (lambda: _run(resume=True, out=NOWHERE), "nothing to resume from: no checkpoint in no/"),
        (lambda: _run(resume="auto", out=NOWHERE), None),
        (lambda: TrainConfig(tp=2, pp=2).for_ranks(6), "has 4 ranks, but 6 were started"),
        (lambda: TrainConfig(tp=2, pp=2).for_ranks(2), "has 4 ranks, but 2 were started"),
        (lambda: TrainConfig(tp=2, pp=2).for_ranks(12), None),
        (lambda: TrainConfig(dp=1, tp=2).for_ranks(4), "has 2 ranks, but 4 were started"),
        (lambda: TrainConfig().model_config(257), None),
        (lambda: TrainConfig(overrides=GPTOverrides(vocab_size=256)).model_config(257),
         "vocab_size = 256 is smaller than the data's 257"),
        (lambda: TrainConfig(overrides=GPTOverrides(vocab_size=256)).model_config(256), None),
        *(
            (lambda m=m: join(m), f"^the mesh needs {m.world} ranks, but 1 process is running$")
            for m in (Mesh(dp=2), Mesh(tp=2, cp=3), Mesh(pp=5))
        ),
        (lambda: join(Mesh()), None),
    ]
)  # fmt: skip
@pytest.mark.usefixtures("no_data")
def test_runs(call, words) -> None:
    check(call, words)


def test_where_a_run_stops_and_from_what_it_goes_on() -> None:
    assert not Progress(since=9).stops_early(0)
    assert [Progress(since=n).stops_early(2) for n in (1, 2, 3)] == [False, True, True]
    for step, why in ((5, "has completed all 5 steps"), (4, "stopped early at step 4")):
        assert Progress(best=1.0).why(step, 5).startswith(why)
    assert short_of_peak(TrainConfig(warmup=3, steps=3)) is None
    assert short_of_peak(TrainConfig(warmup=4, steps=3)) is not None
    state = {"seed": 3, "settings": {}, "data": {"fingerprint": "a", "name": "x"}}
    reader = SimpleNamespace(path="p", state=state)
    for seed, print_, words in (
        (3, "a", None),
        (4, "a", "with seed 3, but this run has seed 4"),
        (3, "b", "different data"),
    ):
        data = SimpleNamespace(fingerprint=print_, name="y", tokenizer_name=None)
        check(partial(check_run, reader, TrainConfig(seed=seed), data), words)


def _memory(free: float, device_type: str = "cpu", ranks: int = 1, **mesh: int) -> None:
    """Return free memory as a multiple of what the most demanding rank needs, or of what `ranks`
    need together."""
    config, plan, sizes = GPTConfig(300, 64, 3, 64, 4), ParallelPlan(microbatches=2), Mesh(**mesh)
    step = TrainingStep(config, sizes, plan, 2, "fp32", device_type)
    each = [rank.total for rank in estimate(step)]
    assert len(set(each)) == sizes.pp
    need = max(each) if ranks == 1 else sum(each) * ranks / len(each)
    check_memory(step, free=math.floor(need * free), ranks=ranks)


@rows(
    [
        (lambda: _memory(1.0), None),
        (lambda: _memory(0.999), "training needs about"),
        (lambda: _memory(1.0, "cuda", pp=2), None),
        (lambda: _memory(0.999, "cuda", pp=2), r"GiB \(per rank: .* this GPU has"),
        (lambda: _memory(1.0, ranks=4, pp=2, dp=2), None),
        (lambda: _memory(0.999, ranks=4, pp=2, dp=2), "GiB for 4 ranks .* this machine has"),
    ]
)
def test_memory_that_is_just_enough_is(call, words) -> None:
    check(call, words)


# ---------------------------------------------------------------- generated texts


def _prompt(*tokens: object, new: int = 3) -> None:
    check_prompts(_gpt(), [[1], tokens], Sampling(new))


def _generating(stages: int = 1, sp: bool = False, **mesh: int) -> None:
    order = "interleaved" if stages > 1 else "1f1b"
    plan = ParallelPlan(schedule=order, chunks=stages, microbatches=2, sequence_parallel=sp)
    place = Mesh(**mesh).seen_from(0)
    _check_ranks(GPT(_gpt(layers=4), mesh=place, plan=plan, device="meta"))


@rows(
    [
        (lambda: Sampling(tokens=-1), "tokens and top_k must not be negative, got -1 and 0"),
        (lambda: Sampling(top_k=-1), "tokens and top_k must not be negative, got 100 and -1"),
        *((lambda x=x: Sampling(temperature=x), "temperature must be finite and at") for x in ODD),
        *((lambda x=x: Sampling(top_p=x), "top_p must be in") for x in (0.0, 1 + 1e-9, -1, NAN)),
        (lambda: Sampling(tokens=0, temperature=0.0, top_k=0, top_p=1.0), None),
        (lambda: _prompt(0, 1, 2, 3, 10), None),  # up to the sequence's last place, for any token
        (lambda: _prompt(0, 1, 2, 3, 4, 5), r"prompt and new tokens \(9\) exceed the model\'s"),
        (lambda: _prompt(11), r"tokens must lie in \[0, 11\), got \[11\]"),
        (lambda: _prompt(-1), r"tokens must lie in \[0, 11\), got \[-1\]"),
        (lambda: _prompt(), "a prompt must have at least one token"),
        (lambda: _prompt(1.0), "a prompt must be a sequence of integers"),
        (lambda: _prompt(np.int64(1)), None),
        (lambda: _generating(tp=2, pp=2), None),
        (lambda: _generating(dp=2), "generate needs dp = 1, cp = 1, .* got .*dp=2"),
        (lambda: _generating(cp=2), "generate needs dp = 1, cp = 1, .* got .*cp=2"),
        (lambda: _generating(2, pp=2), "one stage per pipeline rank, .* stages = 4, "),
        (lambda: _generating(2), "one stage per pipeline rank, .* stages = 2, "),
        (lambda: _generating(sp=True, tp=2), "no sequence parallelism, .*sequence_parallel = True"),
        (lambda: _generating(sp=True), None),
    ]
)
def test_generation(call, words) -> None:
    check(call, words)


# ---------------------------------------------------------------- data


def _tokens(folder, size: int = 20, split: str = "all", **options) -> Dataset:
    write_token_file(folder / "a.bin", np.arange(size) % 9, vocab_size=9)
    return open_dataset(folder / "a.bin", split=split, **options)


def _header(folder, **changes) -> None:
    _tokens(folder, 4, seq_len=1)
    header = {"format": "warpweave-tokens", "version": 1, "dtype": "uint8", "tokens": 4}
    (folder / "a.bin.json").write_text(json.dumps(header | {"vocab_size": 9} | changes))
    open_token_file(folder / "a.bin")


def _written(tokens, vocab_size: int = 9, name: str = "b.bin"):
    return lambda at: write_token_file(at / name, np.array(tokens), vocab_size=vocab_size)


@rows(
    [
        (lambda at: _tokens(at, seq_len=19), None),
        (lambda at: _tokens(at, seq_len=20), r"20 tokens, but one sample needs seq_len \+ 1 = 21"),
        (lambda at: _tokens(at, seq_len=1), None),
        (lambda at: _tokens(at, seq_len=0), "seq_len must be at least 1"),
        (lambda at: _tokens(at, seq_len=1, split="valid"), "split must be"),
        (
            lambda at: _tokens(at, seq_len=1, tokenizer=at / "t"),
            "the tokenizer .* does not apply; pass --tokenizer None",
        ),
        (lambda at: _tokens(at, seq_len=1).fixed_batch([0, 3], count=4), None),
        (lambda at: _tokens(at, seq_len=1).fixed_batch([4], count=4), r"must be in \[0, 4\)"),
        (lambda at: _tokens(at, seq_len=1).fixed_batch([-1], count=4), r"must be in \[0, 4\)"),
        (lambda at: _tokens(at, seq_len=1).fixed_batch([], count=0), r"must be in \[0, 0\)"),
        *((lambda at, x=x: Split("all", x), r"must lie in \(0, 1\)") for x in (0.0, 1.0, NAN)),
        (_written([0, 8]), None),
        (_written([0, 9]), r"must lie in \[0, 9\), got 0..9$"),
        (_written([-1, 8]), r"must lie in \[0, 9\), got -1..8$"),
        (_written([[0]]), r"must be a non-empty 1-D array of integers, got int64\[1, 1\]"),
        (_written([0.0]), r"must be a non-empty 1-D array of integers, got float64"),
        (_written([True]), r"must be a non-empty 1-D array of integers, got bool"),
        (_written(np.zeros(0, int)), r"must be a non-empty 1-D array of integers, got int64\[0\]"),
        (_written([0], name="b.npy"), "a token file's name must end in .bin"),
        (_header, None),
        (lambda at: _header(at, vocab_size=2**32), None),
        (lambda at: _header(at, vocab_size=2**32 + 1), "vocab_size must be in 1"),
        (lambda at: _header(at, vocab_size=0), "vocab_size must be in 1"),
        (lambda at: _header(at, vocab_size=9.0), "vocab_size must be in 1"),
        (lambda at: _header(at, tokens=0), "tokens must be in 1"),
        (lambda at: _header(at, dtype="int8"), "dtype must be one of"),
        (lambda at: _header(at, version=2), "version must be 1, got 2"),
        (lambda at: _header(at, format="tokens"), "format must be .warpweave-tokens"),
        (lambda at: _header(at, tokens=5), "has 4 bytes, but .* says 5 tokens"),
        (lambda at: _header(at, tokens=3), "has 4 bytes, but .* says 3 tokens"),
        (lambda at: _header(at, tokens=2, dtype="uint16"), None),
        (lambda at: open_dataset(at / "none", seq_len=1), "does not exist"),
        (lambda at: open_text(at, Split("all", 0.1), None, "*.md", None), "has no file that"),
    ]
)
def test_data(call, words, tmp_path) -> None:
    check(lambda: call(tmp_path), words)


# ---------------------------------------------------------------- checkpoints


NOT_JSON = (b"NaN", b"[Infinity]", b"-Infinity")


def _saved(at, *names: object, step: int = 1, **options) -> None:
    tensors = [(name, torch.zeros(2)) for name in names]
    path = save_checkpoint(at, step, tensors, **{"config": {}, "state": {}} | options)
    assert open_checkpoint(path).names == sorted(names)


@rows(
    [
        (lambda at: _saved(at, "a", step=0, keep=1, shard_bytes=1), None),
        (lambda at: _saved(at, step=-1), "expected step >= 0"),
        (lambda at: _saved(at, keep=0), "keep >= 1"),
        (lambda at: _saved(at, shard_bytes=0), "shard_bytes >= 1"),
        (lambda at: _saved(at, ""), "name must be a non-empty string .*, got ''"),
        (lambda at: _saved(at, 3), "name must be a non-empty string .*, got 3"),
        (lambda at: _saved(at, "__metadata__"), "name must be .* other than .__metadata__., got"),
        *(
            (lambda at, x=x: _saved(at, state={"a": [0.5, {"b": x}]}), r"state\.a\[1\]\.b is")
            for x in (INF, -INF, NAN, {1}, torch.zeros(()), b"x")
        ),
        (lambda at: _saved(at, state={"a": [None, 1e308, -0.0, 2**70, "é", True, (1,)]}), None),
        *(
            (
                lambda at, part=part: _saved(at, **{part: {"x": {1: 2}}}),
                rf"{part}\.x: JSON keys must be strings, got 1",
            )
            for part in ("state", "config", "mesh")
        ),
        (
            lambda at: parse_manifest(b'{"a": {"b": 1, "b": 1}}'),
            "names in a JSON object must be unique, got 1 dup",
        ),
        *((lambda at, x=x: parse_manifest(x), "is not JSON") for x in NOT_JSON),
        (lambda at: parse_manifest(dump({"a": [1, 2.5, None]}, "x")), None),
    ]
)
def test_checkpoints(call, words, tmp_path) -> None:
    check(lambda: call(tmp_path), words)
    assert words is None or list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- proofs


def _proof(**change) -> None:
    ProveConfig(**{"dtype": "fp64"} | change).layouts()


def _types(**mesh: int) -> None:
    typecheck(_gpt(layers=2), Mesh(**mesh), stages=range(0))


@rows(
    [
        (lambda: Layout(Mesh(), count=12), None),
        (lambda: Layout(Mesh(), count=5), r"12 samples are not divisible by .* \(1 x 5\)"),
        (lambda: Layout(Mesh(dp=2), count=12), r"12 samples are not divisible by .* \(2 x 12\)"),
        (lambda: _proof(model="toy"), "model = 'toy' needs --typecheck"),
        (lambda: _proof(tp=2, overlap="fused"), "pass --impl triton"),
        (lambda: _proof(all=True, dp=2), "choose the layouts"),
        (lambda: _proof(random=1, zero=2), "choose the layouts"),
        (lambda: _proof(all=True, random=1), "choose the layouts"),
        (lambda: _proof(all=True, world=1), None),
        (lambda: _proof(random=1, seed=3), None),
        (lambda: _proof(all=True, world=0), "expected world >= 1 and random >= 0, got 0 and 0"),
        (lambda: _proof(random=-1), "expected world >= 1 and random >= 0, got 4 and -1"),
        (lambda: _proof(world=3), "--world requires --all"),
        (lambda: _proof(seed=1), "--seed requires --random"),
        (lambda: _proof(tp=2, schedule="interleaved", microbatches=3), None),
        (lambda: _types(cp=4, ulysses=2), "ulysses must be 1, got 2: the typechecker has"),
        (lambda: _types(tp=4), r"kv_heads \(6\) is not divisible by tp \(4\)"),
        (lambda: _types(dp=2, tp=2), None),
    ]
)
def test_proofs(call, words) -> None:
    check(call, words)
