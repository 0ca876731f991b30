"""Tensor-parallel linear layers, embedding and loss: autocast, compilers, rejected arguments,
typing rules.

`test_sharded_ops.py` tests that they equal plain torch.
"""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from close import assert_close_f64
from ranks import run_ranks
from rules import over_group, rulecheck
from sharded import RTOL, Given, draw, world
from sharded_ops import NARROW, OPS, PADDED, VOCAB, WIDE, WIDTH, T
from spmd_types import I, R, S
from spmd_types.rulecheck import RuleCheckError
from threads import run_threads

from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.runtime.wgrad import WeightGradients, collect
from warpweave.parallel import tensor

E = WIDTH


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def test_the_gradient_of_a_computed_weight_is_never_deferred() -> None:
    scale, v, x = leaf(draw(1, NARROW, 1)), draw(2, NARROW, E), draw(3, T, E)
    for function in (tensor.column_parallel_linear, tensor.row_parallel_linear):
        (expected,) = torch.autograd.grad(F.linear(x, scale * v).sum(), scale)
        store = WeightGradients()
        with collect(store):
            (got,) = torch.autograd.grad(function(x, scale * v, group=None).sum(), scale)
        assert not len(store)
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("n", "k"), [(5, 0), (0, 5)])
def test_a_linear_layer_without_features_is_that_of_torch(n: int, k: int) -> None:
    for function in (tensor.column_parallel_linear, tensor.row_parallel_linear):
        x, w, b = leaf(draw(1, 2, 3, k)), leaf(draw(2, n, k)), leaf(draw(3, n))
        results = []
        for y in (F.linear(x, w, b), function(x, w, b, group=None)):
            results.append((y, *torch.autograd.grad(y.sum(), (x, w, b))))
        assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


# ---------------------------------------------------------------- low precision (test_sums.py)


def test_autocast_computes_in_its_dtype_and_keeps_fp32_weights() -> None:
    shapes = (T, NARROW), (WIDE, NARROW), (WIDE,)
    x, w, b = (leaf(draw(seed, *shape).float()) for seed, shape in enumerate(shapes, 1))
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(x, w, b)
        for linear in (tensor.column_parallel_linear, tensor.row_parallel_linear):
            y = linear(x, w, b, group=None)
            assert y.dtype == torch.bfloat16
            assert torch.equal(y, expected)
    y.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32
    assert_close_f64(w.grad, x.detach().bfloat16().float().sum(0).expand(WIDE, -1), 1e-6)
    for op in (OPS["column"], OPS["row"], OPS["embedding"]):  # float64 is requested explicitly
        whole = op.whole({})
        expected = op.on_ranks(Given(), False, **whole)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(op.on_ranks(Given(), False, **whole), expected)


def test_compiles_whole_without_a_group() -> None:
    ids, table, w, b = torch.arange(T), draw(1, VOCAB, E), draw(2, E, E), draw(3, E)
    labels = ids.flip(0)

    def model(table, w, b):
        x = tensor.vocab_parallel_embedding(ids, table, group=None, vocab_size=VOCAB)
        x = tensor.column_parallel_linear(x, w, b, group=None)
        x = tensor.row_parallel_linear(x.tanh(), w, b, group=None)
        z = x @ table.t()
        return tensor.vocab_parallel_cross_entropy(z, labels, group=None, vocab_size=VOCAB)

    outcomes = []
    for fn in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaves = leaf(table), leaf(w), leaf(b)
        losses = fn(*leaves)
        losses.sum().backward()
        outcomes.append([losses.detach(), *(x.grad for x in leaves)])
    for actual, truth in zip(*outcomes, strict=True):
        assert_close_f64(actual, truth, RTOL)


def _compiled(rank: int) -> None:
    x, w = draw(rank, 6, 4), draw(1, 8, 4)
    call = torch.compile(tensor.column_parallel_linear, backend="aot_eager")
    options = {"group": dist.group.WORLD, "sequence_parallel": True}
    expected = tensor.column_parallel_linear(x, w, **options)
    assert torch.equal(call(x, w, **options), expected)


def test_a_compiler_leaves_the_collectives_alone() -> None:
    run_ranks(2, _compiled)


# ---------------------------------------------------------------- errors come before any launch


def test_errors_name_the_constraint_and_the_values() -> None:
    x, w, b = draw(1, 4, 6), draw(2, 5, 6), draw(3, 5)
    for linear in (tensor.column_parallel_linear, tensor.row_parallel_linear):
        with pytest.raises(ValueError, match=r"x torch.float32, weight torch.float64"):
            linear(x.float(), w, b, group=None)
    ids = torch.tensor([0, VOCAB])
    with pytest.raises(RuntimeError, match=r"an id is outside \[0, 13\)"):
        tensor.vocab_parallel_embedding(ids, draw(1, VOCAB, E), group=None, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="13"):
        tensor.vocab_parallel_cross_entropy(draw(1, 2, VOCAB), ids, group=None, vocab_size=VOCAB)


def _refused(rank: int) -> None:
    """Test that errors come before any collective: otherwise ranks would wait for each other."""
    group, _, ranks = world()
    labels = torch.zeros(T, dtype=torch.int64)
    for padded in (None, PADDED):  # logits that were gathered already: loss + log(R) if accepted
        size = padded or -(-VOCAB // ranks) * ranks
        words = rf"rank {rank}: {size} logits columns on each of {ranks}"
        with pytest.raises(ValueError, match=words):
            tensor.vocab_parallel_cross_entropy(
                draw(1, T, size), labels, group=group, vocab_size=VOCAB, padded_vocab_size=padded
            )


def test_gathered_logits_are_refused() -> None:
    run_threads(2, _refused)


def _implementations(rank: int) -> None:
    """Test that an unavailable implementation reaches the check of what would run."""
    for name in ("loss", "linear loss", "mlp", "qkv"):
        op = OPS[name]
        for sequence in (False,) if name == "loss" else (False, True):
            mine = op.mine(op.whole({}), sequence)
            with pytest.raises(ValueError, match="got 'cuda'"):
                op.on_ranks(Given({}, {"impl": "cuda"}), sequence, **mine)


def _dropped_by(rank: int, impl: str) -> None:
    mine = OPS["mlp"].mine(OPS["mlp"].whole({}), False)
    OPS["mlp"].on_ranks(Given({"dropped": True}, {"impl": impl}), False, **mine)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_implementation_that_is_asked_for_is_handed_on(ranks: int) -> None:
    _implementations(0) if ranks == 1 else run_threads(ranks, _implementations)
    for impl in ("torch", "triton") if ranks > 1 else ():
        with mock.patch.object(tensor.ranks, "dropout", wraps=tensor.ranks.dropout) as dropped:
            run_threads(ranks, _dropped_by, impl)
        assert [call.kwargs["impl"] for call in dropped.call_args_list] == [impl] * ranks


# ---------------------------------------------------------------- typing rules

IDS = torch.tensor([0, 3, 2, 1, 4, 2])
VOCABULARY = Vocabulary(0, 7, -100, 0.1, 0.0, "torch")
RANKED = (
    tensor.linear._ColumnParallelLinear,
    tensor.linear._RowParallelLinear,
    tensor.loss.CrossEntropy,
)
COLUMN, ROW, LOSS = map(over_group, RANKED)
EMBEDDING, TABLE = tensor.embedding._VocabParallelEmbedding, (IDS, draw(1, 8, 5), "tp", 7)
GIVEN = draw(1, 6, 4), draw(2, 10, 4), draw(3, 10), torch.float64, "tp"
CASES = {
    "column": (COLUMN, (*GIVEN, False), {"x": I, "weight": S(0), "bias": S(0)}),
    "column, sequence": (COLUMN, (*GIVEN, True), {"x": S(0), "weight": S(0), "bias": S(0)}),
    "row": (ROW, (*GIVEN, False), {"x": S(1), "weight": S(1), "bias": I}),
    "row, sequence": (ROW, (*GIVEN, True), {"x": S(1), "weight": S(1), "bias": R}),
    "embedding": (EMBEDDING, (*TABLE, False), {"ids": R, "weight": S(0)}),
    "embedding, sequence": (EMBEDDING, (*TABLE, True), {"ids": R, "weight": S(0)}),
    "loss": (LOSS, (draw(1, 6, 8), IDS, VOCABULARY, "tp", False), {"logits": S(1), "labels": R}),
}


@pytest.mark.parametrize("name", CASES)
def test_typing_rules_hold_numerically(name: str) -> None:
    """The documented types are accepted and the derived type is correct; so is every other one."""
    function, args, documented = CASES[name]
    rulecheck(function, args, {k: {"tp": v} for k, v in documented.items()}, mesh={"tp": 2})
    # Without the bias, because placements that mix S with I are not enumerated.
    args = [None if tuple(getattr(a, "shape", ())) == (10,) else a for a in args]
    report = rulecheck(function, args)
    assert report.checked
    assert report.rejected


def test_typing_rules_hold_on_a_mesh_of_two_axes() -> None:
    function, args, documented = CASES["row, sequence"]
    placements = {k: {"dp": R, "tp": v} for k, v in documented.items()}
    placements["x"]["dp"] = S(0)
    args = (draw(1, 12, 6), draw(2, 10, 6), *args[2:])
    rulecheck(function, args, placements, mesh={"dp": 2, "tp": 3})


def test_every_function_has_a_rule() -> None:
    functions = {
        f
        for module in (tensor.linear, tensor.embedding, tensor.loss)
        for _, f in inspect.getmembers(module, inspect.isclass)
        if issubclass(f, torch.autograd.Function)
    }
    cases = {function for function, _, _ in CASES.values()}
    assert functions == cases - {COLUMN, ROW, LOSS} | {*RANKED}


class _BiasOnEveryRank(tensor.linear._RowParallelLinear):
    @staticmethod
    def forward(ctx, x, weight, bias, dtype, ranks):
        return ranks.start_sum(F.linear(x, weight, bias)).wait()


def test_a_planted_fault_breaks_the_rule() -> None:
    _, args, documented = CASES["row"]
    placements = {k: {"tp": v} for k, v in documented.items()}
    with pytest.raises(RuleCheckError, match="differs from the reference"):
        rulecheck(over_group(_BiasOnEveryRank), args, placements, mesh={"tp": 2})


def test_a_norm_of_cut_features_is_on_one_rank_the_plain_one() -> None:
    x, w = torch.randn(3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    wanted = torch.nn.functional.rms_norm(x, (7,), w, 1e-5)
    assert_close_f64(tensor.cut_rms_norm(x, w, 1e-5, group=None), wanted, 1e-14)
    assert tensor.cut_rms_norm(x.half(), w.half(), group=None).dtype == torch.float16
    small = x * 1e-3  # its squares are as large as the default eps
    wanted = torch.nn.functional.rms_norm(small, (7,), w, 1e-6)
    assert_close_f64(tensor.cut_rms_norm(small, w, group=None), wanted, 1e-14)
    other = tensor.cut_rms_norm(small, w, group=None, out_dtype=torch.float32)
    assert torch.equal(other, tensor.cut_rms_norm(small, w, group=None).float())
    with pytest.raises(ValueError, match=r"expected weight\[7\] for x\[3, 7\], got weight\[6\]"):
        tensor.cut_rms_norm(x, w[:6], group=None)


OVER_RANKS = "sequence_parallel=False overlap=bulk workspace=None"
LOSS_OPTIONS = "ignore_index=-100 label_smoothing=0.0 z_loss=0.0"
BY_DEFAULT = {
    "column_parallel_linear": f"bias=None {OVER_RANKS}",
    "row_parallel_linear": f"bias=None {OVER_RANKS}",
    "cut_rms_norm": "eps=1e-06 out_dtype=None",
    "parallel_mlp": "up_bias=None down_bias=None sequence_parallel=False residual=None drop=None "
    "recompute=None overlap=bulk workspace=None impl=None",
    "parallel_qkv_rope": f"{OVER_RANKS} impl=None",
    "vocab_parallel_cross_entropy": f"{LOSS_OPTIONS} padded_vocab_size=None impl=None",
    "vocab_parallel_embedding": "sequence_parallel=False padded_vocab_size=None",
    "vocab_parallel_linear_cross_entropy": f"sequence_parallel=False {LOSS_OPTIONS} reduction=sum "
    "recompute=None softcap=None padded_vocab_size=None overlap=bulk workspace=None impl=None",
}


def test_what_a_function_does_by_default_is_written_here() -> None:
    assert sorted(BY_DEFAULT) == sorted(tensor.__all__)
    for name, wanted in BY_DEFAULT.items():
        given = inspect.signature(getattr(tensor, name)).parameters.values()
        shown = " ".join(f"{p.name}={p.default}" for p in given if p.default is not p.empty)
        assert shown == wanted, name
