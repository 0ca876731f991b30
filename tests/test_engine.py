"""The engine: the same run on any mesh, training in low precision, and
early errors for wrong shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from refused import check, one_line
from threads import run_threads
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from warpweave.kernels.devices import CTAS
from warpweave.kernels.gemm import cpu as gemm_cpu
from warpweave.kernels.gemm import mainloop
from warpweave.kernels.rope import rope_table
from warpweave.kernels.runtime import dispatch
from warpweave.kernels.runtime.tile_table import GemmTile
from warpweave.model import gpt
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.model.generate import Sampling, generate
from warpweave.model.plain import PlainConfig, plain_gpt_logits, plain_gpt_loss, plain_init
from warpweave.parallel.mesh import Mesh, single

SAMPLES, SEQ_LEN, VOCAB = 8, 16, 37
SIZES = {"vocab_size": VOCAB, "seq_len": SEQ_LEN, "layers": 3, "width": 16, "heads": 4}
CONFIG = GPTConfig(**SIZES, hidden=20, dropout=0.1)
LLAMA = GPTConfig(**SIZES, kv_heads=2, hidden=24, positions="rope", norm="rms",
                  activation="swiglu", bias=False, tied=False, dropout=0.1)  # fmt: skip
MESHES = {  # mesh, sequence parallelism, ZeRO stage, schedule, recomputation
    "tp2pp2": (Mesh(tp=2, pp=2), True, 0, "1f1b", "full"),
    "cp2dp2": (Mesh(cp=2, dp=2), False, 3, "1f1b", "none"),
    "cp2pp2": (Mesh(cp=2, pp=2), False, 2, "gpipe", "selective"),
    "dp2tp2": (Mesh(dp=2, tp=2), True, 1, "1f1b", "none"),
    "cp2tp2": (Mesh(cp=2, tp=2), True, 3, "1f1b", "none"),
    "pp3": (Mesh(pp=3), False, 0, "1f1b", "none"),
}


def _engine(config: GPTConfig, mesh, **options) -> Engine:
    dp = mesh.size("dp")
    own = {"micro_batch_size": SAMPLES // dp // 2, "dtype": torch.float64, "seed": 3}
    names = [field.name for field in dataclasses.fields(ParallelPlan) if field.name in options]
    plan = ParallelPlan(**{"microbatches": 2} | {name: options.pop(name) for name in names})
    return Engine(config, mesh, plan, **own | options)


def _data(key: int, mesh, count: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this replica's (tokens, labels, sample ids); every sample has a
    different number of labels."""
    generator = torch.Generator().manual_seed(key)
    tokens, labels = torch.randint(0, VOCAB, (2, SAMPLES, SEQ_LEN), generator=generator)
    labels[torch.rand(SAMPLES, SEQ_LEN, generator=generator)
           < torch.linspace(0, 1, SAMPLES)[:, None]] = -100  # fmt: skip
    parts = (mesh.size("dp"), count, -1, SEQ_LEN)
    ids = torch.arange(SAMPLES).view(parts[:3]) + SAMPLES * key
    mine = mesh.index("dp")
    return tokens.view(parts)[mine], labels.view(parts)[mine], ids[mine]


def _story(engine: Engine, mesh) -> dict:
    """Run three steps, an evaluation before and after, and three texts, one past the window's end.

    Two texts are sampled almost at random, because the model is small; the third is greedy.
    """
    held_out = _data(99, mesh)[:2]
    before = float(engine.evaluate(*held_out))
    results = [engine.step(*_data(key, mesh), lr=0.02, key=key) for key in range(3)]
    texts = [
        engine.generate(torch.tensor(prompt), n, temperature=t, seed=5).tolist()
        for prompt, n, t in (([1], 6, 0.8), (list(range(12)), 7, 1.5), ([30], 2, 0.0))
    ]
    after = float(engine.evaluate(*held_out))
    reported = [float(x) for r in results for x in (r.loss, r.norm)]
    return {"numbers": [before, after, *reported], "texts": texts}


def _on_mesh(rank: int, name: str, config: GPTConfig) -> dict:
    sizes, sp, zero, schedule, recompute = MESHES[name]
    mesh = sizes.connect()
    options = {"zero": zero, "schedule": schedule, "recompute": recompute}
    return _story(_engine(config, mesh, sequence_parallel=sp, **options), mesh)


@functools.cache
def _alone(config: GPTConfig) -> dict:
    return _story(_engine(config, single()), single())


@pytest.mark.parametrize("name", MESHES)
def test_loss_evaluation_and_generated_text_agree_on_every_mesh(name):
    config = LLAMA if name == "cp2pp2" else CONFIG
    if MESHES[name][0].tp > 1:  # tokens that the second tensor rank holds
        assert min(_alone(config)["texts"][-1]) > VOCAB // 2
    for story in run_threads(MESHES[name][0].world, _on_mesh, name, config):
        assert story["numbers"] == pytest.approx(_alone(config)["numbers"], rel=1e-12)
        assert story["texts"] == _alone(config)["texts"]


def _early_and_late(rank: int, zero: int) -> None:
    mesh, stories = Mesh(pp=2, dp=2).connect(), []
    for early in (True, False):
        engine = _engine(CONFIG, mesh, zero=zero, early_gradients=early)
        split = any(a.op == "I" for actions in engine.passes.lists for a in actions)
        assert split == (early and zero < 2)  # sharded gradients are freed segment by segment
        for key in range(2):
            engine.step(*_data(key, mesh), lr=0.02, key=key)
        stories.append([t for _, t, _ in engine.read("param")])
        dist.barrier()
    assert all(torch.equal(a, b) for a, b in zip(*stories, strict=True))


def test_gradients_that_leave_early_are_the_same_to_the_bit():
    for zero in (0, 1, 2):
        run_threads(4, _early_and_late, zero)


def test_evaluation_is_the_plain_models_loss_without_dropout():
    plain = PlainConfig(**SIZES, kv_heads=4, hidden=20, dropout=0.1)
    tokens, labels, _ = _data(1, single())
    params = plain_init(plain, 3, torch.float64)
    batch = tokens.flatten(0, 1), labels.flatten(0, 1)
    total, valid = plain_gpt_loss(params, *batch, plain, dropout=0.0)
    engine = _engine(CONFIG, single())
    assert float(engine.evaluate(tokens, labels)) == pytest.approx(float(total / valid), rel=1e-13)
    assert float(engine.evaluate(tokens, torch.full_like(labels, -100))) == 0.0


def test_generation_at_temperature_zero_picks_the_argmax_of_the_plain_model():
    plain = PlainConfig(**SIZES, kv_heads=4, hidden=20)
    # to get varied text
    params = {n: 10 * p for n, p in plain_init(plain, 3, torch.float64).items()}
    text, differs = [4, 7], 0
    for _ in range(20):  # past the end of the window
        window = torch.tensor(text[-SEQ_LEN:])[None]
        *_, before, last = plain_gpt_logits(params, window, plain)[0].argmax(-1).tolist()
        differs += len(text) >= SEQ_LEN and before != last
        text.append(last)
    assert differs, "the last position does not show"
    engine = _engine(CONFIG, single())
    engine.load("param", lambda record: params[record.name])
    assert engine.generate(torch.tensor([4, 7]), 20, temperature=0.0).tolist() == text


class _Largest(TorchDispatchMode):
    """A mode that tracks the most elements of a tensor that an operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = (
            [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in (args, out)
        )
        old = {x.untyped_storage().data_ptr() for x in given}
        new = (x.numel() for x in made if x.untyped_storage().data_ptr() not in old)
        self.elements = max(self.elements, *new, 0)
        return out


def _largest(rank: int) -> list[int]:
    mesh = Mesh(tp=2, pp=2).connect() if dist.is_initialized() else single()
    config = GPTConfig(vocab_size=6000, seq_len=256, layers=2, width=8, heads=2)
    engine = Engine(config, mesh, ParallelPlan(zero=0, sequence_parallel=True), micro_batch_size=4)
    found = []
    for prompt in ([1, 2], [3] * 200):
        with _Largest() as largest:
            engine.generate(torch.tensor(prompt), 2)
        found.append(largest.elements)
    return found


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_sampled_token_costs_one_sequence_and_one_row_of_logits(ranks):
    """It does not cost a micro-batch of whole sequences with the logits of all their tokens."""
    every = run_threads(ranks, _largest) if ranks > 1 else [_largest(0)]
    for short, long in every:  # a row of logits is 6,000; 128 and 256 tokens have 32 features less
        assert short <= 6000
        assert long <= 256 * 32


def test_sampling_follows_the_models_chances_and_the_seed():
    engine = _engine(GPTConfig(5, 4, 1, 8, 2), single())
    engine.load("param", lambda r: r.draw(0, dtype=torch.float64) * 4)
    batch = engine.gpt.micro_batch(torch.zeros(1, 4, dtype=torch.int64),
                                   torch.full((1, 4), -100), torch.ones(()))  # fmt: skip
    logits = engine.stages[0].evaluate(None, batch, engine.gpt.logits)[0][0]
    prompt = torch.tensor([0])
    drawn = [int(engine.generate(prompt, 1, temperature=2.0, seed=s)[1]) for s in range(600)]
    shares = torch.bincount(torch.tensor(drawn), minlength=5) / 600
    chances = torch.softmax(logits / 2, -1)
    assert chances.max() < 0.9
    assert (shares - chances).abs().max() < 0.07  # more than three standard deviations
    first, again = (engine.generate(prompt, 9, seed=1).tolist() for _ in range(2))
    assert first == again


# -------------------------------------------------------------------------- low precision


def _programs(engine: Engine) -> set[int]:
    """Count the programs of the forward's and the backward's products of a step."""
    found: dict[str, int] = {}

    def spy(name, real, *args):
        tile = GemmTile(128, 256, 64, 8, 1, 8, 3)
        (found[name],) = mainloop.grid(tile, 8192, 8192, torch.device("cpu"))
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mainloop, "processors", lambda device: 132)
        for name in ("product", "product_into"):
            real = getattr(gemm_cpu, name)
            patch.setattr(gemm_cpu, name, functools.partial(spy, name, real))
        engine.step(*_data(0, engine.mesh), lr=None)
    assert len(found) == 2
    return {*found.values()}


def test_products_on_one_device_leave_no_room() -> None:
    assert _programs(_engine(CONFIG, single())) == {132}


def _falls(rank: int) -> list[tuple[str, list[float], float]]:
    mesh, found = Mesh(dp=2).connect(), []
    assert _programs(_engine(CONFIG, mesh)) == {132 - CTAS}
    for dtype, zero in ((torch.bfloat16, 2), (torch.float16, 3), (torch.float16, 1)):
        engine = _engine(GPTConfig(**SIZES), mesh, dtype=dtype, zero=zero)
        tokens, labels, ids = _data(0, mesh)
        results = [engine.step(tokens, labels, ids, lr=0.02) for _ in range(15)]
        losses = [float(result.loss) for result in results]
        assert {x.dtype for r in results for x in (r.loss, r.norm)} == {torch.float32}
        assert engine.evaluate(tokens, labels).dtype == torch.float32
        found.append((str(dtype), losses, float(engine.optimizer.count)))
        assert {unit.parameters.flat.dtype for unit in engine.units} == {dtype}
        assert {unit.state.master.dtype for unit in engine.units} == {torch.float32}
    return found


def test_bf16_and_fp16_train_on_two_ranks():
    for first, second in zip(*run_threads(2, _falls), strict=True):
        assert first == second
        _, losses, count = first
        assert count == 15
        assert all(b < a for a, b in itertools.pairwise(losses))
        assert losses[-1] < 0.7 * losses[0]


def test_an_fp16_overflow_skips_the_step_and_halves_the_scale():
    engine = _engine(GPTConfig(**SIZES), single(), dtype=torch.float16)
    engine.optimizer.loss_scale.value.fill_(2.0**40)
    before = [unit.state.master.clone() for unit in engine.units]
    result = engine.step(*_data(0, single()), lr=0.01)
    assert result.loss.isfinite()
    assert not result.norm.isfinite()
    assert all(torch.equal(a, unit.state.master) for a, unit in zip(before, engine.units))
    assert engine.optimizer.loss_scale.value <= 2.0**24
    assert engine.not_finite_ranks() == [0]


def test_valid_tokens_are_counted_beyond_what_float32_counts():
    labels = torch.zeros(1, dtype=torch.int64).expand(2**24 + 1)
    assert int(_engine(CONFIG, single())._count_valid(labels).wait()) == 2**24 + 1


def test_rotary_tables_are_made_once_a_step_and_once_a_text():
    """They are not made for every micro-batch or every token, packed or not."""
    engine = _engine(LLAMA, single(), microbatches=4, micro_batch_size=2)
    with mock.patch.object(gpt, "rope_table", wraps=rope_table) as made:
        data = _data(0, single(), 4)
        engine.step(*data, lr=0.01)
        assert made.call_count == 1
        documents = torch.tensor([0, 5, SEQ_LEN]).expand(4, 2, -1)
        engine.step(*data, lr=0.01, documents=documents)
        assert made.call_count == 2
        generate(engine.gpt, [[1, 2], [3]], Sampling(5))
        assert made.call_count == 3


# -------------------------------------------------------------------------- one-line errors


REFUSED = {
    "schedule must be one of": (CONFIG, Mesh(), {"schedule": "2f1b"}),
    "zero must be one of 0, 1, 2, 3, got 7": (CONFIG, Mesh(), {"zero": 7}),
    "microbatches must be at least 1, got 0": (CONFIG, Mesh(), {"microbatches": 0}),
    "micro_batch_size must be at least 1, got 0": (CONFIG, Mesh(), {"micro_batch_size": 0}),
    "clip must be positive, or None": (CONFIG, Mesh(), {"clip": 0.0}),
    "recompute must be one of none, selective, full": (CONFIG, Mesh(), {"recompute": "all"}),
    "layout must be one of": (CONFIG, Mesh(), {"layout": "spiral"}),
    "impl must be None, .triton. or .torch., got 'cuda'": (CONFIG, Mesh(), {"impl": "cuda"}),
    r"kv_heads \(4\) is not divisible by tp \(3\)": (CONFIG, Mesh(tp=3), {}),
    r"kv_heads \(2\) is not divisible by tp \(4\)": (LLAMA, Mesh(tp=4), {}),
    r"hidden \(21\) is not divisible by tp \(2\)": (GPTConfig(**SIZES, hidden=21), Mesh(tp=2), {}),
    r"layers must be at least the number of pipeline stages \(4\), got 3":
    (CONFIG, Mesh(pp=4), {}),
    r"17 tokens of a micro-batch are not divisible by tp \(2\)":
    (GPTConfig(37, 17, 3, 16, 4), Mesh(tp=2), {"micro_batch_size": 1}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line_before_anything_is_sent(message):
    config, mesh, options = REFUSED[message]
    with pytest.raises(ValueError, match=message) as caught:
        _engine(config, mesh.seen_from(0), **options)  # a rank without process groups
    one_line(caught)


def test_kernels_that_cannot_run_here_are_refused_before_the_first_step(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRET", False)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before importing") as caught:
        _engine(CONFIG, single(), impl="triton")
    one_line(caught)


def test_wrong_arguments_of_a_step_are_refused(monkeypatch):
    engine = _engine(CONFIG, single())
    tokens, labels, ids = _data(0, single())
    step, shape = functools.partial(engine.step, lr=0.1), r"must have shape \(2, 4, 16\), got"
    odd_shapes = tokens[:1], tokens[:, :3], tokens[..., :-1], tokens[0]
    for given, words in (
        *(((wrong, wrong, ids), shape) for wrong in odd_shapes),
        ((tokens, labels[..., :-1], ids), shape),
        ((tokens, labels, ids[:, :3]), r"sample_ids must have shape \(2, 4\), got \(2, 3\)"),
        ((tokens, labels, ids.T), r"sample_ids must have shape \(2, 4\), got \(4, 2\)"),
        ((tokens, labels, ids.float()), r"sample_ids must be int64, got torch\.float32"),
        ((tokens, labels.tolist(), ids), "labels must be int64, got list"),
        ((tokens.int(), labels, ids), "must be int64, got"),
        ((tokens.double(), labels, ids), "must be int64, got"),
    ):
        check(functools.partial(step, *given), words)
    for lr in (math.nan, math.inf, -0.1):
        words = f"lr must be finite and at least 0, got {lr}"
        check(functools.partial(engine.step, tokens, labels, ids, lr=lr), words)
    for given, words in (
        ((tokens[:, :3], tokens[:, :3]), r"must have shape \[n >= 1, 4, 16\], got"),
        ((tokens[:0], tokens[:0]), r"must have shape \[n >= 1, 4, 16\], got"),
        ((tokens, tokens.int()), "must be int64, got"),
        ((tokens, tokens.double()), "must be int64, got"),
    ):
        check(functools.partial(engine.evaluate, *given), words)
    monkeypatch.setattr(engine, "_count_valid", lambda _: pytest.fail("it was sent already"))
    short = torch.tensor([[[0, 16, 16]] * 4, [[0, 3, 16], [0, 3, 15]] * 2])
    for documents in (tokens[..., :0], tokens[0], tokens.double(), short):
        check(functools.partial(step, tokens, labels, ids, documents=documents), "documents must ")
        check(functools.partial(engine.evaluate, tokens, labels, documents), "documents must ")
    cold = functools.partial(engine.generate, torch.tensor([1]), 3, temperature=-1.0)
    check(cold, "temperature must be finite and at least 0, got -1")
    for prompt, words in (
        (torch.tensor([1.0]), "be int64, got torch.float32"),
        (torch.tensor([[1]]), r"have shape \[n >= 1\], got \[1, 1\]"),
        (torch.zeros(0).long(), r"have shape \[n >= 1\], got \[0\]"),
        ([1], "be int64, got"),
    ):
        check(functools.partial(engine.generate, prompt, 3), f"^prompt must {words}")


def test_a_step_without_a_rate_keeps_weights_and_gradients():
    engine = _engine(CONFIG, single())
    before = [unit.parameters.flat.clone() for unit in engine.units]
    result = engine.step(*_data(0, single()), lr=None)
    assert all(torch.equal(a, unit.parameters.flat) for a, unit in zip(before, engine.units))
    squares = sum(float((g * g).sum()) for _, g, _ in engine.read("grad"))
    assert squares**0.5 == pytest.approx(float(result.norm), rel=1e-13)


def _after_idle_steps(rank: int, zero: int) -> list[float]:
    engine = _engine(CONFIG, Mesh(dp=2).connect(), zero=zero)
    for key, lr in ((0, None), (1, None), (2, 0.1), (3, 0.1)):
        result = engine.step(*_data(key, engine.mesh), lr=lr)
    return [float(result.loss), float(result.norm)]


def test_a_step_does_not_add_to_what_a_step_without_a_rate_left():
    alone = _engine(CONFIG, single())
    for key in (2, 3):
        result = alone.step(*_data(key, single()), lr=0.1)
    expected = pytest.approx([float(result.loss), float(result.norm)], rel=1e-12)
    for zero in range(4):
        assert run_threads(2, _after_idle_steps, zero) == [expected, expected]


def test_a_step_does_not_add_to_what_a_failed_one_left():
    tokens, labels, ids = _data(0, single())
    wrong = labels.clone()
    wrong[1, 0, 0] = VOCAB  # in the second micro-batch: the first has run backward by then
    engine, fresh = _engine(CONFIG, single()), _engine(CONFIG, single())
    check(lambda: engine.step(tokens, wrong, ids, lr=0.1), f"got {VOCAB}")
    norms = [e.step(tokens, labels, ids, lr=0.1).norm for e in (engine, fresh)]
    assert norms[0] == norms[1]


def test_a_frozen_parameter_is_refused_rather_than_decayed():
    engine = _engine(CONFIG, single())
    engine.gpt.blocks["1"].mlp.requires_grad_(False)
    with pytest.raises(ValueError, match=r"blocks.1.mlp.up.weight does not require grad"):
        engine.step(*_data(0, single()), lr=0.1)


def test_seeds_may_have_any_number_of_bits():
    engine = _engine(CONFIG, single(), seed=2**70)
    texts = [engine.generate(torch.tensor([1]), 4, seed=seed).tolist() for seed in (2**70, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_interrupts_are_counted_and_results_travel_as_one_tensor():
    engine = _engine(CONFIG, single())
    for interrupted in (False, True):
        result = engine.step(*_data(0, single()), lr=0.0, interrupted=interrupted)
        assert result.all().tolist() == [result.loss, result.norm, float(interrupted), False]


def _state_dicts(rank: int) -> None:
    for zero in (0, 1, 2):
        mesh = Mesh(dp=2).connect()
        engine = _engine(CONFIG, mesh, zero=zero)
        engine.step(*_data(0, mesh), lr=0.02)
        held = engine.gpt.state_dict()  # the gather of the step may still be in flight
        for record, tensor, _ in engine.read("param"):
            assert torch.equal(held[record.name], tensor), (zero, record.name)
    engine = _engine(CONFIG, Mesh(dp=2).connect(), zero=3)
    words = "ZeRO 3 keeps only a shard of .*; instead of state_dict, use Engine.read, which gives"
    check(engine.gpt.state_dict, words, RuntimeError)


def test_a_state_dict_waits_for_its_parameters_and_refuses_freed_ones():
    run_threads(2, _state_dicts)


def _written(rank: int) -> list[list[str]]:
    names = []
    for sizes in (Mesh(tp=2, pp=2), Mesh(dp=2, pp=2), Mesh(dp=2, cp=2)):
        engine = _engine(CONFIG, sizes.connect(), zero=3)
        names.append([record.name for record, _, mine in engine.read("param") if mine])
    return names


def test_every_tensor_of_a_checkpoint_belongs_to_exactly_one_rank():
    model = _engine(CONFIG, single())
    every = sorted(record.name for record, _, _ in model.read("param"))
    for ranks in zip(*run_threads(4, _written), strict=True):
        assert sorted(name for names in ranks for name in names) == every
        assert all(ranks), "a rank writes nothing"


# -------------------------------------------------------------------------- one rank, one step


def _one_is_interrupted(rank: int) -> list[float]:
    engine = _engine(CONFIG, Mesh(tp=2, pp=2).connect())
    data = _data(0, engine.mesh)
    return [
        float(engine.step(*data, lr=0.0, interrupted=rank == asked).interrupts)
        for asked in (*range(4), None)
    ]


def test_every_rank_hears_of_a_stop_that_any_one_rank_was_asked_for():
    assert run_threads(4, _one_is_interrupted) == [[1.0] * 4 + [0.0]] * 4


def test_an_evaluation_between_steps_changes_neither_them_nor_itself():
    """Dropout is on in a step after an evaluation, and off in an evaluation after a step."""
    evaluated, plain = _engine(CONFIG, single()), _engine(CONFIG, single())
    held_out = _data(99, single())[:2]
    for key in range(2):
        evaluated.evaluate(*held_out)
        evaluated.gpt.eval()  # a user may do this: a step trains all the same
        results = [e.step(*_data(key, single()), lr=0.02, key=key) for e in (evaluated, plain)]
        assert torch.equal(*(result.loss for result in results))
    weights = {record.name: tensor for record, tensor, _ in plain.read("param")}
    fresh = _engine(dataclasses.replace(CONFIG, dropout=0.0), single())
    fresh.load("param", lambda record: weights[record.name])
    assert torch.equal(evaluated.evaluate(*held_out), fresh.evaluate(*held_out))
