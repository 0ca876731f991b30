"""From modules to records: every parameter once, under its full name, sharded as it really is."""

from __future__ import annotations

import torch
from torch import nn

from warpweave.layers.block import TransformerBlock
from warpweave.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from warpweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from warpweave.layers.norm import RMSNorm
from warpweave.layers.records import collect_records
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.shard import ParamRecord

TP2 = Mesh(tp=2).seen_from(0)


def _block(**options) -> TransformerBlock:
    return TransformerBlock(8, 4, 12, device="meta", mesh=TP2, sinks=True, **options)


def test_names_and_order_are_those_of_named_parameters():
    block = _block()
    assert list(collect_records(block)) == [name for name, _ in block.named_parameters()]
    prefixed = collect_records(block, "blocks.3")
    assert list(prefixed) == [f"blocks.3.{name}" for name, _ in block.named_parameters()]
    assert all(record.name == name for name, record in prefixed.items())


def test_a_layer_by_itself_has_short_names():
    assert list(collect_records(RMSNorm(4))) == ["weight"]
    assert list(collect_records(RMSNorm(4), "norm")) == ["norm.weight"]


def test_every_local_shape_is_the_shape_of_the_parameter():
    for activation in ("gelu", "swiglu"):
        block = _block(activation=activation, num_kv_heads=2)
        for name, record in collect_records(block).items():
            assert record.local_shape == tuple(block.get_parameter(name).shape), name


def test_columns_are_cut_along_rows_and_rows_along_columns_and_norms_not():
    records = collect_records(_block())
    assert all(cut.axis == "tp" for record in records.values() for cut in record.cuts)
    dims = {n: r.cuts[0].dim if r.cuts else None for n, r in records.items()}
    assert dims == {
        "attention_norm.weight": None, "attention_norm.bias": None, "attention.sinks": 0,
        "attention.qkv.weight": 0, "attention.qkv.bias": 0,
        "attention.out.weight": 1, "attention.out.bias": None,
        "mlp_norm.weight": None, "mlp_norm.bias": None,
        "mlp.up.weight": 0, "mlp.up.bias": 0,
        "mlp.down.weight": 1, "mlp.down.bias": None,
    }  # fmt: skip


def test_uncut_parameters_are_partial_under_sequence_parallelism():
    assert not any(record.partial for record in collect_records(_block()).values())
    # Each rank normalizes its own heads, with or without sequence parallelism.
    of_heads = {"attention.q_norm.weight", "attention.k_norm.weight"}
    found = collect_records(_block(qk_norm=True))
    assert {name for name, record in found.items() if record.partial} == of_heads
    for heads in ({}, {"qk_norm": True}, {"qk_norm": True, "qk_norm_whole": True}):
        records = collect_records(_block(sequence_parallel=True, **heads))
        assert len(records) == 13 + 2 * bool(heads)
        for name, record in records.items():
            assert record.partial == (() if record.cuts else ("tp",)), name
    assert records["attention.q_norm.weight"].cuts  # a norm over all heads is sharded like them
    alone = TransformerBlock(8, 4, 12, device="meta", sequence_parallel=True)
    assert not any(record.partial for record in collect_records(alone).values())


def test_matrices_decay_and_biases_and_norms_do_not():
    for name, record in collect_records(_block()).items():
        assert record.decay == (len(record.shape) == 2), name


def test_only_the_projections_back_into_the_stream_take_out_init():
    inits = {name: record.init for name, record in collect_records(_block(out_init=0.01)).items()}
    assert {name for name, init in inits.items() if init == 0.01} == {
        "attention.out.weight", "mlp.down.weight",
    }  # fmt: skip
    assert {init for name, init in inits.items() if name.endswith(".bias")} == {"zeros"}
    assert inits["attention.sinks"] == "zeros"
    assert inits["attention_norm.weight"] == inits["mlp_norm.weight"] == "ones"
    assert inits["attention.qkv.weight"] == inits["mlp.up.weight"] == 0.02


def test_a_keyed_draw_takes_the_deviation_that_the_layer_was_given():
    for layer in (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
                  PositionEmbedding):  # fmt: skip
        for given in ({}, {"init": 0.5}):
            init = collect_records(layer(8, 8, device="meta", **given))["weight"].init
            assert init == given.get("init", 0.02), layer


def test_a_foreign_module_is_whole_on_every_rank():
    model = nn.Sequential(nn.Conv1d(2, 3, 5), ColumnParallelLinear(4, 4, mesh=TP2))
    records = collect_records(model)
    assert records["0.weight"] == ParamRecord("0.weight", (3, 2, 5))
    assert records["0.bias"] == ParamRecord("0.bias", (3,), decay=False)
    assert records["1.weight"].cut_axes == ("tp",)


def test_a_foreign_parameter_beside_ours_gets_a_record_too():
    layer = RowParallelLinear(4, 4, mesh=TP2)
    layer.scale = nn.Parameter(torch.ones(4))
    records = collect_records(layer)
    assert records["scale"] == ParamRecord("scale", (4,), decay=False)
    assert records["weight"].cuts[0].dim == 1


def test_a_shared_parameter_is_recorded_under_each_of_its_names():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    assert {"a.weight", "b.weight"} <= set(collect_records(model))


def test_a_weight_of_several_matrices_tells_the_rows_of_each():
    for activation, pairs in (("relu2", (1,)), ("geglu", (1, 1))):
        block = TransformerBlock(8, 4, 12, num_kv_heads=2, head_size=6, activation=activation,
                                 norm="rms", bias=False, device="meta", mesh=TP2)  # fmt: skip
        found = {name: record.matrices for name, record in collect_records(block).items()}
        one = dict.fromkeys(("attention.out.weight", "mlp.down.weight"), (1,))
        several = {"attention.qkv.weight": (12, 6, 6), "mlp.up.weight": pairs}
        assert found == dict.fromkeys(found, ()) | one | several
