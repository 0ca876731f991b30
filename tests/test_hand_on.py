"""All arguments of a layer's constructor and call reach the function that computes.

The functions are mocks that record their arguments. Every value here differs from the default, so
that a dropped argument shows. Add a value here for each new option.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
from threads import on_mesh
from told import check, told
from torch import nn

from warpweave.kernels.attention.options import AttentionOptions
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm.local import LOCAL
from warpweave.kernels.rope import RopeScaling
from warpweave.layers import attention, block, embedding, linear, loss, mlp, norm
from warpweave.layers.context import KVCache, TokenContext
from warpweave.layers.place import Place
from warpweave.layers.style import BlockStyle
from warpweave.parallel import tensor
from warpweave.parallel.collectives import Pending
from warpweave.parallel.context import Links
from warpweave.parallel.context import attention as context
from warpweave.parallel.context.explain import StrategyCost
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.mesh import AXES, ConnectedMesh, Mesh

GROUPS = {axis: f"the {axis} group" for axis in (*AXES, "data", "world", "ring", "ulysses")}
PLACE = ConnectedMesh(Mesh(tp=2), 1, GROUPS, None, _workspaces={"tp": "the workspace"})
OVER = {"mesh": PLACE, "sequence_parallel": True, "overlap": "chunked"}
RANKS = {"group": "the tp group", "sequence_parallel": True, "overlap": "chunked",
         "workspace": "the workspace"}  # fmt: skip
NORM = {"eps": 0.3, "impl": "torch"}

x, residual, ids = torch.randn(6, 4), torch.randn(6, 4), torch.arange(6)
DROP = Drop(0.5, 3, 1, ids)


def test_linear_layers() -> None:
    column = linear.ColumnParallelLinear(4, 8, **OVER)
    found = told(linear, "column_parallel_linear", lambda: column(x))
    check(found, {"x": x, "weight": column.weight, "bias": column.bias} | RANKS)
    row = linear.RowParallelLinear(8, 4, **OVER)
    own = {"x": x, "weight": row.weight} | RANKS
    check(told(linear, "row_parallel_linear", lambda: row(x)), own | {"bias": row.bias})
    found = told(linear, "row_parallel_linear", lambda: row(x, add_bias=False))
    check(found, own | {"bias": None})


@pytest.mark.parametrize("activation", ["relu2", "geglu"])
def test_an_mlp(activation: str) -> None:
    options = {"activation": activation, "recompute": "up", "impl": "torch"}
    layer = mlp.MLP(4, 8, **options, **OVER)
    up, bias = layer.up.weight, layer.up.bias
    if activation == "geglu":
        up, bias = up.unflatten(0, (-1, 2)), bias.unflatten(0, (-1, 2))
    given = {"x": x, "residual": residual, "drop": DROP}
    weights = {"up_weight": up, "up_bias": bias, "down_weight": layer.down.weight,
               "down_bias": layer.down.bias}  # fmt: skip
    check(told(mlp, "parallel_mlp", lambda: layer(**given)), given | weights | options | RANKS)


def test_parts_of_an_mlp_that_are_called_one_by_one() -> None:
    layer = mlp.MLP(4, 8, activation="relu2", impl="triton")
    layer.down = nn.Linear(8, 4)
    h = torch.randn(6, 8)
    found = told(mlp, "activate", lambda: layer(x, drop=DROP), h)
    check(found, {"x": layer.up(x), "activation": "relu2", "impl": "triton"})
    with mock.patch.object(mlp, "activate", return_value=h):
        found = told(mlp, "dropout", lambda: layer(x, residual, DROP), x)
    check(found, {"x": layer.down(h), "drop": DROP, "impl": "triton"})


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda **o: norm.RMSNorm(4, **o), "rms_norm"),
        (lambda **o: norm.RMSNorm(4, offset=True, **o), "rms_norm"),
        (lambda **o: norm.LayerNorm(4, **o), "layer_norm"),
        (lambda **o: norm.ColumnParallelRMSNorm(4, **o), "rms_norm"),
    ],
)
def test_norms(make, function: str) -> None:
    layer, given = make(**NORM), {"residual": residual, "x_bias": x[0], "drop": DROP}
    if isinstance(layer, norm.ColumnParallelRMSNorm):
        given = {}
    weights = {"weight": layer.weight + layer.offset}
    if function == "layer_norm":
        weights["bias"] = layer.bias
    check(told(norm, function, lambda: layer(x, **given)), {"x": x} | given | weights | NORM)


ROTATION = {"weight": residual, "bias": ids, "cos": residual[0], "sin": residual[1]}
UNITS = {"up_weight": x, "down_weight": residual, "up_bias": ids, "down_bias": x[0]}
UNITS |= {"x": x, "residual": residual, "drop": DROP}
UNITS |= {"activation": "relu2", "recompute": "up", "impl": "torch"}


@pytest.mark.parametrize("group", [None, "the tp group"])
def test_functions_over_ranks_tell_those_of_one_device(group: str | None) -> None:
    ranks = tensor.ranks.tensor_ranks(group, True, "chunked")
    over = {"group": group, "sequence_parallel": True, "overlap": "chunked"}
    found = told(tensor.mlp, "mlp", lambda: tensor.parallel_mlp(**UNITS, **over))
    check(found, UNITS | {"ranks": ranks})
    given = {"x": x} | ROTATION | {"shape": (4, 3) if group else (2, 3), "impl": "torch"}
    with mock.patch.object(tensor.qkv, "group_size", lambda group: 2 if group else 1):
        call = functools.partial(tensor.parallel_qkv_rope, **given, **over)
        found = told(tensor.qkv, "qkv_rope", call)
    if group is None:
        del given["shape"]
        check(found, given | {"x": x.view(2, 3, 4)})
    else:
        check(found, given | {"ranks": ranks})


def test_ranks_are_chosen_by_all_that_decides_whether_products_can_be_fused() -> None:
    over = RANKS | {"overlap": "fused"}
    asked = over | {"x": x, "impl": "torch"}
    with mock.patch.object(tensor.mlp, "mlp"):
        call = functools.partial(tensor.parallel_mlp, **UNITS, **over)
        check(told(tensor.mlp, "tensor_ranks", call, LOCAL), asked)
    call = functools.partial(tensor.parallel_qkv_rope, shape=(4, 3), **ROTATION, **asked)
    with (
        mock.patch.object(tensor.qkv, "group_size", return_value=2),
        mock.patch.object(tensor.qkv, "qkv_rope"),
    ):
        check(told(tensor.qkv, "tensor_ranks", call, LOCAL), asked)


def test_a_norm_of_features_that_are_cut() -> None:
    layer = norm.ColumnParallelRMSNorm(8, 0.3, offset=True, mesh=PLACE)
    expected = {"x": x, "weight": layer.weight + 1, "eps": 0.3, "group": "the tp group"}
    check(told(norm, "cut_rms_norm", lambda: layer(x)), expected)


def test_embedding_and_losses() -> None:
    of = {"group": "the tp group"}
    layer = embedding.VocabParallelEmbedding(7, 4, mesh=PLACE, sequence_parallel=True)
    found = told(embedding, "vocab_parallel_embedding", lambda: layer(ids))
    own = {"ids": ids, "weight": layer.weight, "vocab_size": 7, "sequence_parallel": True}
    check(found, own | of)
    of |= {"vocab_size": 7, "label_smoothing": 0.1, "z_loss": 0.2, "impl": "torch"}
    made = {name: of[name] for name in ("vocab_size", "label_smoothing", "z_loss", "impl")}
    plain = loss.VocabParallelCrossEntropy(**made, mesh=PLACE)
    total = torch.tensor(6.0)
    found = told(loss, "vocab_parallel_cross_entropy", lambda: plain(x, ids, 2), total)
    check(found, {"logits": x, "labels": ids} | of)
    more = {"recompute": True, "softcap": 3.0}
    head = loss.VocabParallelLinearCrossEntropy(**made, **more, **OVER)
    name, given = "vocab_parallel_linear_cross_entropy", {"x": x, "weight": x, "labels": ids}
    check(told(loss, name, lambda: head(x, x, ids, 2), total), given | of | more | RANKS)
    for normaliser in (2, torch.tensor(2.0), Pending(None, lambda: torch.tensor(2.0))):
        with mock.patch.object(loss, name, return_value=total):
            assert head(x, x, ids, normaliser) == 3


# ---------------------------------------------------------------- attention

HEADS = {"head_size": 6, "qk_norm": True, "norm_eps": 0.2, "attention_scale": 0.7,
         "rope_scaling": RopeScaling("linear", 3.0)}  # fmt: skip
MASK = {"causal": False, "window": 3, "softcap": 2.0, "impl": "torch"}


def _attention(**options: Any) -> attention.Attention:
    given = {"num_kv_heads": 2, "sinks": True, "rope_theta": 50.0} | HEADS | MASK
    return attention.Attention(4, 4, **given | options)


def test_projections_of_attention() -> None:
    layer = _attention(strategy="gather", out_init=0.5, **OVER)
    for one in (layer.qkv, layer.out):
        assert one.over_ranks == RANKS
    assert layer.out.records["weight"].init == 0.5
    for one in (layer.q_norm, layer.k_norm):
        assert (one.eps, one.impl, one.normalized_shape, one.offset) == (0.2, "torch", (6,), False)
        assert one.records["weight"].partial == ("tp",)
    q = torch.randn(2, 6, 2, 6)
    rope = torch.randn(2, 6, 3)
    layer.out = nn.Identity()
    with mock.patch.object(attention, "attention", return_value=q):
        found = told(
            attention, "parallel_qkv_rope",
            lambda: layer(x, TokenContext(2, rope=rope)), (q, q[:, :, :1], q[:, :, :1]),
        )  # fmt: skip
    # the norms come first
    expected = {"x": x, "cos": None, "sin": None, "shape": (2, 6), "impl": "torch"}
    qkv = {"weight": layer.qkv.weight, "bias": layer.qkv.bias}
    weights = {name: p.unflatten(0, (-1, 4, 6)) for name, p in qkv.items()}
    check(found, expected | weights | RANKS)


@pytest.mark.parametrize("ulysses", [1, 2])
def test_what_is_attended(ulysses: int) -> None:
    """This covers attention over ranks, and from a cache."""
    sizes = Mesh(cp=2, ulysses=ulysses)
    place = ConnectedMesh(sizes, 1, GROUPS | {"tp": None}, None)
    layer = _attention(strategy=Links(2.0, 3.0), mesh=place)
    layout, documents = SequenceLayout(12, 2, "striped"), torch.tensor([0, 5, 12])
    rope = torch.randn(6, 3), torch.randn(6, 3)
    heads, keys = torch.randn(1, 6, 4, 6), torch.randn(1, 6, 2, 6)
    made = {"q": heads, "k": keys, "v": keys, "scale": 0.7, "sinks": layer.sinks} | MASK

    def call(cache: KVCache | None) -> None:
        with mock.patch.object(layer, "_heads", return_value=(heads, keys, keys)):
            layer(x, TokenContext(1, layout, rope, documents=documents, cache=cache))

    found = told(attention, "context_attention", lambda: call(None), heads)
    pair = ("the ring group", "the ulysses group") if ulysses > 1 else "the cp group"
    over = {"layout": layout, "group": pair, "strategy": Links(2.0, 3.0), "documents": documents}
    check(found, made | over | {"buffers": layer.mesh.buffers})
    cache = KVCache(9, start=2)
    found = told(attention, "attention", lambda: call(cache), heads)
    for name in "kv":
        assert torch.equal(found.pop(name)[:, 2:], keys)
    del made["k"], made["v"]
    check(found, made | {"documents": documents, "q_runs": ((2, 6),)})


def test_a_rotation_that_no_product_fuses() -> None:
    q, k, table = torch.randn(1, 6, 4, 6), torch.randn(1, 6, 2, 6), (torch.randn(6, 3),) * 2
    layer = _attention(qk_norm=False, impl="triton")
    found = told(attention, "apply_rope_qk", lambda: layer._turned(q, k, table), (q, k))
    check(found, {"q": q, "k": k, "cos": table[0], "sin": table[1], "impl": "triton"})
    assert layer._turned(q, k, None) == (q, k)


def test_the_table_of_an_attention_without_a_context() -> None:
    layer, wide = _attention(), {"dtype": torch.float64}
    found = told(attention, "rope_table", lambda: layer._rope(3, x.double(), None))
    expected = {"positions": torch.arange(3), "rotary_dim": 6, "theta": 50.0}
    check(found, expected | {"scaling": HEADS["rope_scaling"]} | wide)


def test_a_layer_with_a_window_turns_by_the_local_table_and_no_other_does() -> None:
    whole, local = "the table", "the local one"
    for window, given, table in ((None, local, whole), (3, local, local), (3, None, whole)):
        layer = _attention(window=window)
        assert layer._rope(6, x, TokenContext(1, rope=whole, local_rope=given)) == table


@pytest.mark.parametrize("ulysses", [1, 2])
def test_what_a_layer_says_it_costs_is_what_its_call_weighs(ulysses: int) -> None:
    """This includes tensor ranks, which have some of the heads each."""
    layout, asked = SequenceLayout(12, 2), []

    def noted(*args, **sizes):
        asked.append((args, sizes))
        name = "hybrid" if ulysses > 1 else "gather"
        return (StrategyCost(name, 0, 0, 0, 0, 0.0, "least exposed time"),)

    def on_rank(mesh: ConnectedMesh) -> None:
        layer = attention.Attention(
            8, 8, num_kv_heads=4, window=3, causal=False, strategy=Links(2.0, 3.0), mesh=mesh,
            dtype=torch.float64,
        )  # fmt: skip
        layer.context_costs(layout, 3)
        layer(torch.randn(18, 8, dtype=torch.float64), TokenContext(3, layout))

    heard = mock.patch.object(attention, "explain", noted)
    with heard, mock.patch.object(context, "explain", noted):
        on_mesh(Mesh(cp=2, tp=2, ulysses=ulysses), on_rank)
    assert len(asked) == 8
    first = asked[0]
    assert first[1]["kv_heads"] == 2
    assert all(one == first for one in asked)


# ---------------------------------------------------------------- blocks


def _others(record: type, **known: Any) -> dict[str, Any]:
    """Return a value for each field of a record, none of them the default."""
    words = {"norm": "rms1p", "norm_place": "sandwich", "activation": "geglu", "device": "meta"}
    of = words | {"dtype": torch.float64, "overlap": "chunked", "strategy": "gather"} | known
    of |= {"recompute": "up", "impl": "torch", "mesh": PLACE, "num_kv_heads": 2, "head_size": 6}
    values = {}
    for number, field in enumerate(dataclasses.fields(record), 3):
        plain = not field.default if isinstance(field.default, bool) else number / 64
        values[field.name] = of.get(field.name, plain)
        assert values[field.name] != field.default
    return values


def test_a_block_hands_its_records_whole_to_its_parts() -> None:
    style = BlockStyle(**_others(BlockStyle, window=3))
    place = Place(**_others(Place))
    with (
        mock.patch.object(block, "make_norm", return_value=nn.Identity()) as norms,
        mock.patch.object(block, "Attention", return_value=nn.Identity()) as heads,
        mock.patch.object(block, "MLP", return_value=nn.Identity()) as hidden,
    ):
        made = block.TransformerBlock(4, 4, 8, style=style, place=place, site=7, out_init=0.5)
    assert (made.dropout, made.site, made.impl) == (style.dropout, 7, "torch")
    same = {"style": style, "place": place, "out_init": 0.5}
    assert heads.call_args_list == [mock.call(4, 4, **same)]
    assert hidden.call_args_list == [mock.call(4, 8, **same)]
    assert norms.call_args_list == [mock.call(style, 4, place)] * 4


def test_options_that_attention_checks_are_the_ones_it_attends_by() -> None:
    with mock.patch.object(attention, "check_numbers") as checked:
        _attention()
    masked = AttentionOptions(False, 3, scale=0.7, softcap=2.0, impl="torch")
    checked.assert_called_once_with(masked)


@pytest.mark.parametrize("place", ["sandwich", "post"])
def test_dropout_of_branches_that_no_product_fuses(place: str) -> None:
    made = block.TransformerBlock(
        4, 2, 8, norm="rms", norm_place=place, dropout=0.5, impl="triton", site=7
    )
    context = TokenContext(1, seed=3, token_ids=ids)
    keys = []

    def noted(y: torch.Tensor, drop: Drop, *, impl: str | None) -> torch.Tensor:
        keys.append((drop, impl))
        return y

    with mock.patch.object(block, "dropout", noted):
        made(x, context)
    last = Drop(0.5, 3, 8, ids), "triton"
    assert keys == ([last] if place == "sandwich" else [(Drop(0.5, 3, 7, ids), "triton"), last])
