"""A layer's records: given whole, or field by field as keywords."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass

import pytest
import torch

from warpweave.layers.attention import Attention
from warpweave.layers.batch_norm import SyncBatchNorm
from warpweave.layers.block import TransformerBlock
from warpweave.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from warpweave.layers.keywords import fields_as_keywords
from warpweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from warpweave.layers.loss import VocabParallelCrossEntropy, VocabParallelLinearCrossEntropy
from warpweave.layers.mlp import MLP
from warpweave.layers.norm import ColumnParallelRMSNorm, LayerNorm, RMSNorm
from warpweave.layers.place import Place
from warpweave.layers.style import AttentionStyle, BlockStyle, MLPStyle
from warpweave.parallel.mesh import Mesh


@dataclass(frozen=True)
class Colour:
    hue: str = "red"
    bright: bool = False


@dataclass(frozen=True)
class Size:
    width: int = 1
    depth: int = 2
    height: int = 3


class Box:
    @fields_as_keywords("hue", unused=("depth",), colour=Colour, size=Size)
    def __init__(self, label: str, *, colour: Colour, size: Size, lid: bool = True) -> None:
        self.all = label, colour, size, lid


@pytest.mark.parametrize(
    ("box", "found"),
    [
        (Box("a"), ("a", Colour(), Size(), True)),
        (Box("a", "blue", height=5), ("a", Colour("blue"), Size(height=5), True)),
        (Box(label="a", hue="blue", lid=False), ("a", Colour("blue"), Size(), False)),
        (Box("a", size=Size(4, 5)), ("a", Colour(), Size(4, 5), True)),
        (Box("a", colour=Colour("blue", True), hue="red", size=Size(4, 5, 6), width=1),
         ("a", Colour("red", True), Size(1, 5, 6), True)),
    ],
)  # fmt: skip
def test_a_field_by_keyword_is_that_field_of_its_record(box, found):
    assert box.all == found


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((), {}, "missing a required argument: 'label'"),
        (("a",), {"shape": 1}, "got an unexpected keyword argument 'shape'"),
        (("a",), {"depth": 1}, "got an unexpected keyword argument 'depth'"),
        (("a", "blue"), {"hue": "red"}, "multiple values for argument 'hue'"),
        (("a", "blue", True), {}, "too many positional arguments"),
    ],
)
def test_another_keyword_is_refused_by_its_name(arguments, keywords, message):
    with pytest.raises(TypeError, match=rf"^Box.__init__\(\): {message}"):
        Box(*arguments, **keywords)


def test_the_signature_shows_the_fields_and_their_defaults():
    shown = {name: p.default for name, p in inspect.signature(Box).parameters.items()}
    assert shown == {
        "label": inspect.Parameter.empty, "hue": "red", "bright": False, "width": 1, "height": 3,
        "lid": True, "colour": None, "size": None,
    }  # fmt: skip
    kinds = {name: p.annotation for name, p in inspect.signature(Box).parameters.items()}
    assert kinds == {
        "label": "str", "hue": "str", "bright": "bool", "width": "int", "height": "int",
        "colour": "Colour | None", "size": "Size | None", "lid": "bool",
    }  # fmt: skip


LEAVES = {
    ColumnParallelLinear: (4, 8), RowParallelLinear: (4, 8), RMSNorm: (4,), LayerNorm: (4,),
    ColumnParallelRMSNorm: (4,), VocabParallelEmbedding: (4, 8),
    VocabParallelLinearCrossEntropy: (4,),
}  # fmt: skip


@pytest.mark.parametrize("layer", LEAVES)
def test_what_a_layer_has_no_use_for_is_no_keyword_of_it(layer):
    """But it accepts a whole place, which its neighbors in a block need."""
    sizes = LEAVES[layer]
    layer(*sizes, place=Place(strategy="ring", overlap="chunked", impl="torch"))
    with pytest.raises(TypeError, match="'strategy'"):
        layer(*sizes, strategy="ring")
    product = layer in (ColumnParallelLinear, RowParallelLinear)
    other = {"impl": "torch"} if product else {"recompute": "up"}
    if layer is not VocabParallelLinearCrossEntropy:  # its recompute is a separate one
        with pytest.raises(TypeError, match=f"'{next(iter(other))}'"):
            layer(*sizes, **other)


def test_records_and_keywords_make_the_same_block():
    style = {"norm": "rms", "activation": "swiglu", "num_kv_heads": 2, "window": 3, "bias": False}
    place = {"dtype": torch.float64, "device": "meta"}
    by_keyword = TransformerBlock(12, 6, 10, **style, **place)
    by_record = TransformerBlock(12, 6, 10, style=BlockStyle(**style), place=Place(**place))
    assert repr(by_keyword) == repr(by_record)
    assert {n: (p.shape, p.dtype, p.device) for n, p in by_keyword.named_parameters()} == {
        n: (p.shape, p.dtype, p.device) for n, p in by_record.named_parameters()
    }


def test_each_part_of_a_block_takes_the_record_of_the_block():
    fields = {field.name for field in dataclasses.fields(BlockStyle)}
    of_blocks = {"norm_place", "norm_bias"}  # attention's own norms are RMSNorms of heads
    for record, layer in ((AttentionStyle, Attention), (MLPStyle, MLP)):
        own = {field.name for field in dataclasses.fields(record)}
        assert own < fields
        assert own - set(inspect.signature(layer).parameters) == own & of_blocks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"impl": "cuda"}, 'impl must be None, "triton" or "torch"'),
        ({"overlap": "fast"}, "overlap must be one of"),
        ({"strategy": "rings"}, "strategy must be Links or one of"),
        ({"recompute": "all"}, "recompute must be one of"),
        ({"overlap": "fused", "impl": "torch"}, "overlap='fused' needs Triton's kernels"),
        ({"mesh": Mesh(tp=2)}, "mesh must be connected, .* has only sizes"),
    ],
)
def test_a_place_of_other_words_is_refused(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Place(**given)


def test_by_default_a_block_is_gpt2s() -> None:
    """All other options are off, or None: derived from others."""
    said = {"norm": "layer", "norm_eps": 1e-5, "norm_place": "pre", "bias": True, "causal": True,
            "activation": "gelu"}  # fmt: skip
    off = {"dropout": 0.0, "qk_norm": False, "qk_norm_whole": False, "sinks": False}
    plain = dataclasses.asdict(BlockStyle())
    assert plain == dict.fromkeys(plain) | off | said


def test_by_default_a_place_is_one_device_and_chooses_how() -> None:
    said = {"overlap": "bulk", "strategy": "auto", "sequence_parallel": False}
    plain = dataclasses.asdict(Place())
    assert plain == dict.fromkeys(plain) | said


HEADS = {"norm": "rms1p", "qk_norm": True, "sinks": True}
WITH_PARAMETERS = {layer: (sizes, {}) for layer, sizes in LEAVES.items()} | {
    TransformerBlock: ((12, 6, 10), {"norm_place": "sandwich", "activation": "geglu"} | HEADS),
    Attention: ((12, 6), {"qk_norm_whole": True} | HEADS),
    MLP: ((12, 10, "geglu"), {}),
    RMSNorm: ((12,), {"offset": True}),
    PositionEmbedding: ((12, 6), {}),
    SyncBatchNorm: ((12,), {}),
}
del WITH_PARAMETERS[VocabParallelLinearCrossEntropy]


@pytest.mark.parametrize("layer", WITH_PARAMETERS)
def test_every_parameter_has_the_given_device_and_dtype(layer):
    sizes, options = WITH_PARAMETERS[layer]
    for device in ("meta", "cpu"):
        for dtype in (torch.float64, torch.bfloat16, None):
            made = layer(*sizes, device=device, dtype=dtype, **options)
            found = {name: (p.device.type, p.dtype) for name, p in made.named_parameters()}
            assert found == dict.fromkeys(found, (device, dtype or torch.float32))
            assert found
            assert {b.device.type for b in made.buffers()} <= {device}


OWN = {  # arguments of a layer other than its sizes and records
    TransformerBlock: "site=1 out_init=0.02",
    Attention: "out_init=0.02",
    MLP: "out_init=0.02",
    RMSNorm: "eps=1e-06 offset=False",
    LayerNorm: "eps=1e-05 bias=True",
    ColumnParallelRMSNorm: "eps=1e-06 offset=False",
    ColumnParallelLinear: "bias=True gather_output=False init=0.02 matrices=(1,)",
    RowParallelLinear: "bias=True input_is_parallel=True init=0.02",
    VocabParallelEmbedding: "init=0.02",
    PositionEmbedding: "device=None dtype=None partial=False init=0.02",
    VocabParallelCrossEntropy: "label_smoothing=0.0 z_loss=0.0 mesh=None impl=None",
    VocabParallelLinearCrossEntropy: "label_smoothing=0.0 z_loss=0.0 recompute=None softcap=None",
    SyncBatchNorm: "eps=1e-05 momentum=0.1 affine=True track_running_stats=True device=None "
    "dtype=None mesh=None",
}


@pytest.mark.parametrize("layer", OWN)
def test_what_a_layer_does_by_default_is_written_here(layer) -> None:
    init = inspect.unwrap(layer.__init__)
    given = inspect.signature(init).parameters.values()
    found = " ".join(f"{p.name}={p.default}" for p in given if p.default is not p.empty)
    assert found == OWN[layer]
