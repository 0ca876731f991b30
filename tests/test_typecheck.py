"""The GPT typechecks on meshes of up to thousands of ranks, and not with one collective fewer.

Positive: both styles, sequence parallelism on and off, every stage, up to 5,120 ranks. Planted
faults: for every place where the GPT relies on a collective or on a record's flag, the program
without it is rejected, and the error names the faulty line.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plants import instead, planted
from refused import exits
from rules import rulecheck
from spmd_types import rules
from spmd_types.rulecheck import RuleCheckError

import warpweave.layers.attention
import warpweave.layers.embedding
import warpweave.layers.linear
import warpweave.layers.loss
import warpweave.layers.mlp
import warpweave.model.gpt
from warpweave.kernels import activation
from warpweave.kernels.activation import activate
from warpweave.kernels.attention import attention
from warpweave.kernels.cross_entropy import function as cross_entropy
from warpweave.kernels.cross_entropy import linear as linear_cross_entropy
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import local
from warpweave.kernels.mlp import function as mlp
from warpweave.kernels.norm import function as norm
from warpweave.kernels.norm import torch_path as norm_cpu
from warpweave.kernels.qkv import function as qkv
from warpweave.kernels.rope import rope_table, rotation
from warpweave.kernels.runtime import dispatch
from warpweave.layers.attention import Attention
from warpweave.layers.block import TransformerBlock
from warpweave.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from warpweave.layers.linear import RowParallelLinear
from warpweave.layers.loss import VocabParallelLinearCrossEntropy
from warpweave.layers.norm import LayerNorm, RMSNorm
from warpweave.model.gpt import GPT, PRESETS, GPTConfig
from warpweave.parallel import collectives, tensor
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.tensor import linear_loss
from warpweave.prove import main
from warpweave.prove.typecheck import typecheck

GPT2 = GPTConfig(50, 32, 2, 64, 8, dropout=0.1)
LLAMA = GPTConfig(
    50, 32, 2, 64, 16, 8, 96, positions="rope", norm="rms", activation="swiglu", bias=False,
    tied=False, dropout=0.1,
)  # fmt: skip
GEMMA = dataclasses.replace(
    LLAMA, norm="rms1p", activation="geglu", tied=True, norm_place="sandwich", qk_norm=True,
    head_size=6, softcap=2.0, logit_softcap=3.0, embedding_scale=8.0, windows=(7, 0),
    local_rope_theta=50.0,
)  # fmt: skip
OLMO = dataclasses.replace(LLAMA, norm_place="post", qk_norm=True, qk_norm_whole=True)
STYLES = {"gpt2": GPT2, "llama": LLAMA}
ONE_LAYER = {name: dataclasses.replace(config, layers=1) for name, config in STYLES.items()}


def refusal(fault: tuple, words: str, config: GPTConfig, mesh: Mesh, **options) -> str:
    """Return the error for a program in which a fault is planted: place, name, replacement."""
    with planted(instead(*fault)), pytest.raises(TypeError, match=words) as error:
        typecheck(config, mesh, **options)
    return str(error.value)


# ---------------------------------------------------------------- valid programs


@pytest.mark.parametrize(
    ("mesh", "sp_style"),  # the other style is checked with the opposite value
    [
        (Mesh(dp=64, cp=2, tp=8), "gpt2"),  # 1,024 ranks; K and V are gathered
        (Mesh(dp=16, cp=4, tp=8, pp=2), "llama"),  # 1,024; the ring, for gpt2
        (Mesh(tp=8), "gpt2"),
    ],
    ids=str,
)
@pytest.mark.parametrize("style", STYLES)
def test_the_gpt_typechecks(mesh: Mesh, style: str, sp_style: str) -> None:
    sp = style == sp_style
    typecheck(STYLES[style], mesh, sequence_parallel=sp, recompute="selective" if sp else "none")


@pytest.mark.parametrize("mesh", [Mesh(dp=512, cp=2), Mesh(dp=1024), Mesh(cp=4, pp=2)], ids=str)
def test_the_gpt_typechecks_without_a_tensor_axis(mesh: Mesh) -> None:
    typecheck(LLAMA, mesh)


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize("style", STYLES)
def test_the_gpt_typechecks_whoever_owns_which_token(style: str, layout: str) -> None:
    typecheck(ONE_LAYER[style], Mesh(dp=2, cp=4, tp=8), sequence_parallel=True, layout=layout)


@pytest.mark.parametrize("sp", [False, True])
def test_head_norms_typecheck_if_gradients_are_summed_over_tensor_ranks(sp: bool) -> None:
    config = dataclasses.replace(
        ONE_LAYER["llama"], head_size=6, qkv_bias=True, qk_norm=True, windows=(7,), sinks=True
    )
    mesh = Mesh(dp=2, cp=2, tp=8)
    typecheck(config, mesh, sequence_parallel=sp)
    wrong = GPT, "parameter_records", flipped("q_norm.weight")
    refusal(wrong, "in _turned", config, mesh, sequence_parallel=sp)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("config", [GEMMA, OLMO], ids=["gemma", "olmo"])
def test_norms_after_a_branch_and_caps_typecheck(config, sp: bool) -> None:
    typecheck(config, Mesh(dp=4, cp=2, tp=8, pp=2), sequence_parallel=sp)


def test_a_norm_over_all_heads_needs_the_sum_of_every_ranks_squares() -> None:
    alone = tensor.norm, "reduce_from", lambda x, group: x
    refusal(alone, "in _turned", dataclasses.replace(OLMO, layers=1), Mesh(dp=2, tp=8))


def test_stages_of_the_largest_model_typecheck_in_full_size() -> None:
    mesh = Mesh(dp=4, cp=4, tp=8, pp=40)  # 5,120 ranks
    typecheck(PRESETS["llama-70b"], mesh, stages=(0, 20, 39), sequence_parallel=True)


def test_no_memory_is_needed() -> None:
    huge = dataclasses.replace(PRESETS["llama-70b"], layers=1, hidden=2**26)  # 6 TB in float32
    typecheck(huge, Mesh(dp=2))


# ---------------------------------------------------------------- planted faults


def plain_row(x, w, b=None, *, group, sequence_parallel=False, **_):
    """Plant row-parallel without its sum."""
    y = F.linear(x, w)
    y = collectives.own_slice(y, group) if sequence_parallel else y
    return y if b is None else y + b


def row_bias_on_every_rank(x, w, b=None, *, group, sequence_parallel=False, **_):
    y = F.linear(x, w, b)
    sums = collectives.reduce_scatter if sequence_parallel else collectives.reduce_from
    return sums(y, group)


def row_summed_twice(x, w, b=None, *, group, sequence_parallel=False, **_):
    y = tensor.row_parallel_linear(x, w, b, group=group)
    return collectives.reduce_from(y, group)


def plain_column(x, w, b=None, *, group, sequence_parallel=False, **_):
    """Plant column-parallel without the sum of dx."""
    if sequence_parallel:
        x = collectives.gather(x, group)
    return F.linear(x, w, b)


def column_without_gather(x, w, b=None, *, group, sequence_parallel=False, **_):
    return tensor.column_parallel_linear(x, w, b, group=group)


def plain_embedding(ids, w, *, group, vocab_size, sequence_parallel=False):
    """Plant vocabulary-parallel lookup without its sum."""
    local, elsewhere = tensor.embedding._local_ids(ids, w.shape[0], group)
    y = F.embedding(local, w).masked_fill(elsewhere[:, None], 0)
    return collectives.own_slice(y, group) if sequence_parallel else y


def composed_mlp(column=tensor.column_parallel_linear, row=tensor.row_parallel_linear):
    """Compose the MLP of two linear layers, one of which may be faulty."""

    def apply(
        x, up, down, up_bias, down_bias, *, activation, group, sequence_parallel, residual, drop,
        recompute, impl, **_,
    ):  # fmt: skip
        cut = {"group": group, "sequence_parallel": sequence_parallel}
        up_bias = None if up_bias is None else up_bias.flatten()
        h = activate(column(x, up.flatten(0, -2), up_bias, **cut), activation)
        return residual + row(h, down, down_bias, **cut)

    return apply


def composed_qkv(column):
    """Compose the projection to heads with a faulty linear layer."""

    def apply(x, weight, bias, cos, sin, *, shape, group, sequence_parallel, impl, **_):
        _, slots, head_dim, _ = weight.shape
        flat = weight.flatten(0, 2), None if bias is None else bias.flatten()
        z = column(x, *flat, group=group, sequence_parallel=sequence_parallel)
        z = z.unflatten(0, (shape[0], -1)).unflatten(-1, (-1, slots, head_dim))
        q, k, v = z.split((slots - 2, 1, 1), dim=3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)

    return apply


def composed_head(column):
    """Compose the head with a faulty linear layer, then the loss of its logits."""

    def apply(x, weight, labels, *, group, vocab_size, sequence_parallel, **_):
        z = column(x, weight, group=group, sequence_parallel=sequence_parallel)
        cut = {"group": group, "vocab_size": vocab_size}
        return tensor.vocab_parallel_cross_entropy(z, labels, **cut).sum()

    return apply


def local_loss(x, weight, labels, *, group, vocab_size, sequence_parallel, **_):
    """Compute cross entropy over this rank's columns only."""
    z = tensor.column_parallel_linear(x, weight, group=group)
    return F.cross_entropy(z, labels.clamp(max=len(weight) - 1), reduction="sum")


def local_mean(self, x, weight, labels, normaliser):
    """Divide by each context rank's own number of tokens."""
    total = linear_loss.vocab_parallel_linear_cross_entropy(
        x, weight, labels, group=self.mesh.group("tp"), vocab_size=self.vocab_size
    )
    return total / (labels != -100).sum()


def local_attention(q, k, v, *, layout, group, causal, strategy, impl, **_):
    return attention(q, k, v, causal=causal)


def attention_of_gathered_keys(q, k, v, *, layout, group, causal, strategy, impl, **_):
    """Gather K and V for work that is assumed equal on every rank: dK and dV are not summed."""
    k, v = (collectives.gather(x, group, dim=1) for x in (k, v))
    return attention(q, k, v, causal=causal)


def local_angles(self, length, x, context):
    positions = torch.arange(length)
    return rope_table(positions, self.head_dim, theta=self.style.rope_theta)


def local_drop(self, site, context):
    return Drop(self.dropout, context.seed, site, torch.arange(len(context.token_ids)))


def flipped(ending: str) -> Callable:
    """Return records in which the `partial` flag of parameters with this ending is wrong."""
    original = GPT.parameter_records

    def records(self):
        return {
            name: dataclasses.replace(r, partial=() if r.partial else ("tp",))
            if name.endswith(ending)
            else r
            for name, r in original(self).items()
        }

    return records


LINEAR, EMBEDDING = warpweave.layers.linear, warpweave.layers.embedding
LAYER, LOSS, MLP = warpweave.layers.attention, warpweave.layers.loss, warpweave.layers.mlp
# target, replacement; styles; with sequence parallelism or not; the function that is named
FAULTS = {
    "row: no sum": (
        (LINEAR, "row_parallel_linear", plain_row), "llama", False, RMSNorm.forward),
    "row: no sum, biases": (
        (LINEAR, "row_parallel_linear", plain_row), "gpt2", False, LayerNorm.forward),
    "row: no reduce-scatter": (
        (LINEAR, "row_parallel_linear", plain_row), "gpt2", True, RowParallelLinear.forward),
    "row: bias on every rank": (
        (MLP, "parallel_mlp", composed_mlp(row=row_bias_on_every_rank)), "gpt2", False,
        MLP.MLP.forward),
    "row: summed twice": (
        (LINEAR, "row_parallel_linear", row_summed_twice), "llama", False,
        RowParallelLinear.forward),
    "mlp: no sum": (
        (MLP, "parallel_mlp", composed_mlp(row=plain_row)), "llama", False, MLP.MLP.forward),
    "mlp: no sum of dx": (
        (MLP, "parallel_mlp", composed_mlp(column=plain_column)), "gpt2", False,
        MLP.MLP.forward),
    "mlp: no gather": (
        (MLP, "parallel_mlp", composed_mlp(column=column_without_gather)), "gpt2", True,
        MLP.MLP.forward),
    "qkv: no sum of dx": (
        (LAYER, "parallel_qkv_rope", composed_qkv(plain_column)), "gpt2", False,
        Attention._heads),
    "qkv: no reduce-scatter of dx": (
        (LAYER, "parallel_qkv_rope", composed_qkv(plain_column)), "llama", True,
        Attention._heads),
    "qkv: no gather": (
        (LAYER, "parallel_qkv_rope", composed_qkv(column_without_gather)), "gpt2", True,
        Attention._heads),
    "head: no sum of dx": (
        (LOSS, "vocab_parallel_linear_cross_entropy", composed_head(plain_column)), "gpt2", False,
        VocabParallelLinearCrossEntropy.forward),
    "head: no gather": (
        (LOSS, "vocab_parallel_linear_cross_entropy", composed_head(column_without_gather)),
        "llama", True, VocabParallelLinearCrossEntropy.forward),
    "embedding: no sum": (
        (EMBEDDING, "vocab_parallel_embedding", plain_embedding), "gpt2", False,
        VocabParallelEmbedding.forward),
    "embedding: no reduce-scatter": (
        (EMBEDDING, "vocab_parallel_embedding", plain_embedding), "llama", True,
        VocabParallelEmbedding.forward),
    "loss: local vocabulary": (
        (LOSS, "vocab_parallel_linear_cross_entropy", local_loss), "gpt2", False,
        VocabParallelLinearCrossEntropy.forward),
    "loss: local mean": (
        (VocabParallelLinearCrossEntropy, "forward", local_mean), "gpt2", False, GPT.head_loss),
    "attention: local": (
        (LAYER, "context_attention", local_attention), "gpt2", False, Attention.forward),
    "attention: no sum of dK, dV": (
        (LAYER, "context_attention", attention_of_gathered_keys), "gpt2", True,
        Attention.forward),
    "rope: local positions": (
        (Attention, "_rope", local_angles), "llama", False, Attention.forward),
    "dropout: local tokens": (
        (TransformerBlock, "_drop", local_drop), "gpt2", False, LayerNorm.forward),
    "flag: LayerNorm weight, sp": (
        (GPT, "parameter_records", flipped("attention_norm.weight")), "gpt2", True,
        LayerNorm.forward),
    "flag: LayerNorm bias": (
        (GPT, "parameter_records", flipped("attention_norm.bias")), "gpt2", False,
        LayerNorm.forward),
    "flag: RMSNorm weight, sp": (
        (GPT, "parameter_records", flipped("final_norm.weight")), "llama", True, RMSNorm.forward),
    "flag: RMSNorm weight": (
        (GPT, "parameter_records", flipped("mlp_norm.weight")), "llama", False, RMSNorm.forward),
    "flag: positions, sp": (
        (GPT, "parameter_records", flipped("positions.weight")), "gpt2", True,
        PositionEmbedding.forward),
    "flag: positions": (
        (GPT, "parameter_records", flipped("positions.weight")), "gpt2", False, GPT.embed),
    "flag: row bias, sp": (
        (GPT, "parameter_records", flipped("out.bias")), "gpt2", True, LayerNorm.forward),
    "flag: row bias": (
        (GPT, "parameter_records", flipped("out.bias")), "gpt2", False, LayerNorm.forward),
    "flag: bias of the MLP, sp": (
        (GPT, "parameter_records", flipped("down.bias")), "gpt2", True, MLP.MLP.forward),
    "flag: bias of the MLP": (
        (GPT, "parameter_records", flipped("down.bias")), "gpt2", False, MLP.MLP.forward),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_one_collective_or_flag_less_is_refused_at_its_line(fault: str) -> None:
    plant, style, sp, where = FAULTS[fault]
    mesh, code = Mesh(dp=64, cp=2, tp=8), where.__code__
    error = refusal(plant, "stage 0 of Mesh", ONE_LAYER[style], mesh, sequence_parallel=sp)
    found = re.findall(rf"{re.escape(code.co_filename)}:(\d+) in {code.co_name}", error)
    assert {int(line) for line in found} & {line for *_, line in code.co_lines()}, error
    assert not dist.is_initialized()


def test_context_ranks_alone_are_checked_too() -> None:
    local = LAYER, "context_attention", local_attention
    error = refusal(local, "stage 0 of Mesh", ONE_LAYER["gpt2"], Mesh(cp=2))
    places = re.findall(r"([^/]+\.py):\d+ in (\w+)(?=, from /|: [A-Z])", error)
    here = places.index((Path(__file__).name, "local_attention"))  # innermost first
    assert places[here:][1:] == [("attention.py", "forward"), ("block.py", "forward")]
    assert (here > 0, error.count("\n")) == (True, 0)


def test_an_error_names_the_axis_of_the_mesh_that_is_checked() -> None:
    """This holds for any earlier check, in which these ranks were tensor ranks."""
    typecheck(ONE_LAYER["gpt2"], Mesh(dp=2, tp=2))
    local = LAYER, "context_attention", local_attention
    refusal(local, r"on axis mesh_cp$", ONE_LAYER["gpt2"], Mesh(dp=2, cp=2))


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        raise TypeError("the way back was checked")

    @staticmethod
    def spmd_typecheck(*, y):
        return y


def test_the_backward_pass_runs_too() -> None:
    def row(*args, **options):
        return _NoWayBack.apply(tensor.row_parallel_linear(*args, **options))

    fault = LINEAR, "row_parallel_linear", row
    refusal(fault, "the way back was checked", ONE_LAYER["gpt2"], Mesh(tp=2))


def test_what_a_stage_hands_on_is_held_to_what_the_next_one_takes() -> None:
    """Covers a later stage's own fault, and an output of a type other than the stream's; of the
    requested stages."""
    mesh, gathered = Mesh(tp=2, pp=2), []

    class Gathered(TransformerBlock):
        def forward(self, x, context=None):
            gathered.append(True)
            return collectives.gather(super().forward(x, context), self.attention.mesh.group("tp"))

    fault = warpweave.model.gpt, "TransformerBlock", Gathered
    refusal(fault, "between the stage and its neighbors", GPT2, mesh, sequence_parallel=True)
    assert gathered
    fault = LINEAR, "row_parallel_linear", plain_row
    refusal(fault, "stage 1 of Mesh", GPT2, mesh, stages=range(1, 2))
    with planted(instead(*fault)):
        typecheck(GPT2, mesh, stages=())


# ---------------------------------------------------------------- rules of the local Functions

T64 = {"dtype": torch.float64}
VOCABULARY = Vocabulary(0, 6, -100, 0.1, 0.01, "torch")


def _linear_loss() -> tuple:
    x, weight, labels = torch.randn(4, 8, **T64), torch.randn(6, 8, **T64), [0, -100, 3, 5]
    return x, weight, torch.tensor(labels), VOCABULARY, torch.float64, local.LOCAL


LOCAL = {
    norm._TorchNorm: lambda: (
        torch.randn(4, 6, 8, **T64), torch.randn(8, **T64), torch.randn(8, **T64),
        norm.NormOptions(True, 1e-5, torch.float64),
    ),
    norm_cpu._AddBias: lambda: (torch.randn(4, 6, 8, **T64), torch.randn(8, **T64)),
    rotation._Rope: lambda: (torch.randn(2, 4, 6, 8, **T64), torch.randn(4, 4), torch.randn(4, 4)),
    activation._Gated: lambda: (torch.randn(4, 6, 8, **T64),),
    cross_entropy.CrossEntropy: lambda: (
        torch.randn(4, 6, **T64), torch.tensor([0, -100, 3, 5]), VOCABULARY, local.LOCAL,
    ),
    linear_cross_entropy._Recomputed: lambda: _linear_loss(),
    linear_cross_entropy._InForward: lambda: _linear_loss(),
    mlp._MLP: lambda: (
        *(torch.randn(*s, **T64) for s in ((4, 6), (8, 6), (8,), (6, 8), (6,), (4, 6))),
        mlp.MLPOptions("gelu", impl="torch", dtype=torch.float64), True, local.LOCAL,
    ),
    qkv._QKV: lambda: (
        *(torch.randn(*s, **T64) for s in ((2, 4, 6), (4, 3, 4, 6), (4, 3, 4))),
        torch.randn(4, 2, **T64), torch.randn(4, 2, **T64),
        qkv.QKVOptions(None, (3, 4), torch.float64), local.LOCAL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", LOCAL, ids=lambda f: f.__name__)
def test_typing_rules_of_local_functions_hold(function: type) -> None:
    report = rulecheck(function, LOCAL[function]())
    assert len(report.checked) > 1
    assert report.rejected


def test_every_local_function_has_a_rule() -> None:
    functions = {
        f
        for name, module in list(sys.modules.items())
        if name.startswith("warpweave.kernels.")
        for _, f in inspect.getmembers(module, inspect.isclass)
        if issubclass(f, torch.autograd.Function)
    }
    assert functions - {dispatch._Final} == set(LOCAL)  # it only passes gradients on


class _Halves(activation._Gated):
    """Gates first, then ups: a shard of the input holds no matching pairs."""

    @staticmethod
    def forward(ctx, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class _NormOfShards(norm._TorchNorm):
    """A rule as if a shard of E could be normalized alone."""

    @staticmethod
    def spmd_typecheck(*, s, weight, bias):
        return rules.einsum("...e,e->...e", rules.einsum("...e,e->...e", s, weight), bias)


class _LossOfShards(cross_entropy.CrossEntropy):
    """A rule as if losses over shards of the vocabulary could be added."""

    @staticmethod
    def spmd_typecheck(*, logits, labels, ranks):
        return rules.einsum("nv,n->n", logits, labels)


@pytest.mark.parametrize("wrong", [_Halves, _NormOfShards, _LossOfShards])
def test_a_wrong_typing_rule_is_seen(wrong: type) -> None:
    with pytest.raises(RuleCheckError):
        rulecheck(wrong, LOCAL[wrong.__base__]())


# ---------------------------------------------------------------- user functions


def test_nothing_is_left_behind() -> None:
    fault = LINEAR, "row_parallel_linear", plain_row
    refusal(fault, "stage 0 of Mesh", ONE_LAYER["llama"], Mesh(dp=3, tp=8))
    assert not dist.is_initialized()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1]
        with pytest.raises(RuntimeError, match="creates its own process group"):
            typecheck(GPT2, Mesh(tp=2))
    finally:
        dist.destroy_process_group()
    test_typing_rules_of_local_functions_hold(activation._Gated)
    typecheck(ONE_LAYER["gpt2"], Mesh(dp=3, tp=2))
    typecheck(GPT2, Mesh())
    assert not dist.is_initialized()


def test_what_cannot_be_cut_and_what_is_missing_is_said_in_one_line() -> None:
    single = "^ulysses must be 1, got 2: the typechecker has a single context axis"
    for mesh, words in (
        (Mesh(cp=2, ulysses=2), single),  # over all of the axis
        (Mesh(cp=4, ulysses=2), single),  # over a part of it
        (Mesh(tp=3), r"kv_heads \(8\) is not divisible by tp \(3\)"),
        (Mesh(pp=3), r"number of pipeline stages \(3\), got 2"),
    ):
        with pytest.raises(ValueError, match=words):
            typecheck(GPT2, mesh)
    with (
        mock.patch.dict(sys.modules, {"spmd_types.types": None}),
        pytest.raises(ImportError, match="needs spmd_types; install the extra `typecheck`"),
    ):
        typecheck(GPT2, Mesh(tp=2))


def prove_typecheck(capsys: pytest.CaptureFixture, *options: str) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as exit:
        main(["--typecheck", *options])
    return exit.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_line(capsys: pytest.CaptureFixture) -> None:
    options = ("--style", "llama", "--dp", "8", "--tp", "16", "--pp", "2")
    code, result = prove_typecheck(capsys, *options)
    assert code == 0
    assert result.pop("seconds") < 60
    assert result == {"typechecked": 2, "ranks": 256, "passed": True}
    with planted(instead(warpweave.layers.linear, "row_parallel_linear", plain_row)):
        code, result = prove_typecheck(capsys, *options)
    assert code == 1
    assert result["passed"] is False
    assert result["typechecked"] == 0
    assert "block.py:" in result["error"]
    error = exits(lambda: main(["--typecheck", "--model", "gpt5"]), capsys)
    assert "model must be one of toy, small" in error
