"""Plans of transformers' models in the styles of `warpweave.hf.styles`, on made-up models with all
kinds of modules and styles; and the options and parts of a model that is spread over ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="an extra of its own")

from threads import on_mesh  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

import warpweave.hf as ww  # noqa: E402
from warpweave.hf import parallel, plan, structure, styles  # noqa: E402
from warpweave.hf.mlp import MLPForm  # noqa: E402
from warpweave.hf.options import HeadVocabulary, Spread  # noqa: E402
from warpweave.parallel.mesh import Mesh  # noqa: E402

SIZES = {
    "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj")


class Layer(nn.Module):
    """Attention of three columns, a feed-forward layer of one, a norm, and optional parts."""

    def __init__(self, **more: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.attn = nn.ModuleDict({n: nn.Linear(2, 2) for n in ("q", "k", "v", "o")})
        self.mlp = nn.ModuleDict({n: nn.Linear(2, 2) for n in ("up", "down")})
        for name, module in more.items():
            self.attn[name] = module


class Model(nn.Module):
    def __init__(self, layers: int = 2, **more: nn.Module) -> None:
        super().__init__()
        self.base = nn.Module()
        self.base.embed = nn.Embedding(4, 2)
        self.base.layers = nn.ModuleList([Layer(**more) for _ in range(layers)])
        self.head = nn.Linear(2, 4)
        self.tp_plan = {
            "base.embed": "embedding_rowwise", "head": "colwise_gather_output",
            **{f"base.layers.*.attn.{n}": "colwise" for n in "qkv"},
            "base.layers.*.attn.o": "rowwise", "base.layers.*.mlp.up": "colwise",
            "base.layers.*.mlp.down": "rowwise",
        }  # fmt: skip


def wanted(sequence: bool, ending: str) -> dict[str, str]:
    cut = "warpweave_sequence_" if sequence else "warpweave_"
    return {
        "base.embed": "warpweave_embedding_rowwise",
        "head": f"warpweave_gather_colwise{ending}",
        "base.layers.*.attn": f"{cut}input",
        **{f"base.layers.*.attn.{n}": "warpweave_inside_colwise" for n in "qkv"},
        "base.layers.*.attn.o": f"{cut}rowwise{ending}",
        "base.layers.*.mlp.up": f"{cut}colwise{ending}",
        "base.layers.*.mlp.down": f"{cut}rowwise{ending}",
        **({"base.layers": "warpweave_sequence"} if sequence else {}),
    }


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ending", ["", "_none", "_chunked"])
def test_a_plan_is_translated_into_registered_styles(sequence, ending):
    found = styles._words(Model(), sequence, ending)
    assert found == wanted(sequence, ending)
    assert set(found.values()) <= set(styles.ALL_PARALLEL_STYLES._global_mapping)


def test_older_names_of_transformers_styles_mean_the_same():
    model = Model()
    model.tp_plan["head"] = "colwise_rep"
    assert styles._words(model, False, "") == wanted(False, "")
    model.tp_plan["base.layers.*.attn.q_norm"] = "replicated_with_grad_allreduce"
    for layer in model.base.layers:
        layer.attn["q_norm"] = nn.LayerNorm(2)
    said = {"base.layers.*.attn.q_norm": "warpweave_replicated"}
    for sequence in (False, True):
        assert styles._words(model, sequence, "") == wanted(sequence, "") | said


OTHERS = {  # one more word, of a module or parameter that may not exist, and the error message
    "a column outside": ("head", "colwise", "head: colwise has no counterpart", True),
    "a row outside": ("base.embed", "rowwise", "base.embed: rowwise has no counterpart", True),
    "experts' own": ("base.layers.*.mlp.experts", "moe_tp_experts", "has no counterpart", False),
    "a parameter": ("base.layers.*.mlp.w", "colwise",
                    "w: the tp_plan shards a single parameter, ", False),
    "packed": ("base.layers.*.mlp.w", "packed_colwise", "packed_colwise has no counte", False),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_unknown_styles_stay_those_of_transformers_unless_tokens_are_sharded(name):
    module, word, words, always = OTHERS[name]
    model = Model()
    model.tp_plan[module] = word
    with pytest.raises(ValueError, match=words):
        styles._words(model, True, "")
    if always:
        with pytest.raises(ValueError, match=words):
            styles._words(model, False, "")
    else:
        assert styles._words(model, False, "") == wanted(False, "")


def test_parameters_inside_a_sharded_module_must_be_in_the_plan():
    model, many = Model(q_norm=nn.LayerNorm(2)), Model(12)
    many.base.layers[11].attn["q_norm"] = nn.LayerNorm(2)  # in a single layer of many
    for wrong in (model, many):
        words = r"^base.layers.\*.attn.q_norm: the tp_plan has no entry"
        with pytest.raises(ValueError, match=words):
            styles._words(wrong, False, "")
    assert styles._words(Model(drop=nn.Dropout()), False, "") == wanted(False, "")
    beside = Model()
    for layer in beside.base.layers:
        layer.attn_norm = nn.LayerNorm(2)  # a name that begins with the module's
    assert styles._words(beside, False, "") == wanted(False, "")
    for empty in ({}, None):
        model.tp_plan = empty
        with pytest.raises(ValueError, match=r"^Model has no tp_plan; use warpweave.hf.apply"):
            styles._words(model, False, "")


def test_layers_with_direct_parameters_are_rejected_with_sharded_tokens():
    layers = Model(3).base.layers
    assert len(styles._without_style(layers)) == 3 * (1 + 4 + 2)
    styles._STYLES["inside_colwise"].install_forward(layers[1].attn["q"], None)
    styles._STYLES["input"].install_forward(layers[2].norm, None)
    found = styles._without_style(layers)
    assert len(found) == 3 * 7 - 2
    assert layers[1].attn["q"] not in found
    layers[2].scale = nn.Parameter(torch.ones(2))
    words = r"^Layer: a layer must have parameters only in its submodules$"
    with pytest.raises(ValueError, match=words):
        styles._without_style(layers)
    styles._STYLES["input"].install_forward(layers[2], None)
    assert len(styles._without_style(layers)) == 3 * 7 - 2


CONFIGS = {
    "starcoder2": transformers.Starcoder2Config(**SIZES, num_hidden_layers=11),
    "phi3": transformers.Phi3Config(**SIZES, num_hidden_layers=2),
}


@pytest.mark.parametrize("overlap", ["none", "bulk", "chunked"])
def test_models_with_single_or_gathered_columns_are_planned(overlap):
    end = {"none": "_none", "bulk": "", "chunked": "_chunked"}[overlap]
    how, layer = DistributedConfig(tp_size=2), "model.layers.*."
    outside = {"lm_head": f"warpweave_gather_colwise{end}",
               "model.embed_tokens": "warpweave_embedding_rowwise"}  # fmt: skip
    found = ww.planned(how, CONFIGS["starcoder2"], overlap=overlap).tp_plan
    assert found == outside | {
        f"{layer}self_attn": "warpweave_input",
        **{f"{layer}self_attn.{n}": "warpweave_inside_colwise" for n in ATTENTION},
        f"{layer}self_attn.o_proj": f"warpweave_rowwise{end}",
        f"{layer}mlp.c_fc": f"warpweave_colwise{end}",
        f"{layer}mlp.c_proj": f"warpweave_rowwise{end}",
    }
    found = ww.planned(how, CONFIGS["phi3"], overlap=overlap).tp_plan
    gathered = ("self_attn.qkv_proj", "mlp.gate_up_proj")
    wanted = outside | {layer + n: f"warpweave_gather_colwise{end}" for n in gathered}
    assert found == wanted
    mine = {"lm_head": "colwise_gather_output", "more": "rowwise"}
    own = DistributedConfig(tp_size=2, tp_plan=mine)
    assert ww.planned(own, CONFIGS["phi3"], overlap=overlap).tp_plan == wanted | mine
    auto = DistributedConfig(tp_size=2, tp_plan="auto")
    assert ww.planned(auto, CONFIGS["phi3"], overlap=overlap).tp_plan == wanted
    assert how.tp_plan is None  # the given plan is unchanged
    cut = DistributedConfig(tp_size=2, enable_sequence_parallel=True)
    with pytest.raises(ValueError, match="rowwise_split_input has no counterpart"):
        ww.planned(cut, CONFIGS["phi3"], overlap=overlap)


# ---------------------------------------------------------------- options of a spread model


@pytest.mark.parametrize("ending", ["", "_none", "_chunked"])
@pytest.mark.parametrize("word", ["", "sequence_"])
def test_plan_word_rejects_layers_of_indivisible_size_or_wrong_kind(word, ending):
    """Two ranks, with features that three would not divide either."""
    two = SimpleNamespace(size=lambda: 2)
    made = [
        (f"{word}colwise{ending}", nn.Linear(4, 5), "5 output features"),
        (f"{word}rowwise{ending}", nn.Linear(5, 4), "5 input features"),
        (f"{word}colwise{ending}", nn.Bilinear(2, 2, 2), "not Bilinear"),
        ("inside_colwise", nn.Linear(4, 5), "5 output features"),
        ("embedding_rowwise", nn.Embedding(5, 4, max_norm=1.0), "an embedding with max_norm"),
    ]
    for name, module, said in made:
        style = styles.ALL_PARALLEL_STYLES[styles.WORD + name]
        with pytest.raises(ValueError, match=said):
            style.shard_param(module, "weight", two)


def test_modules_that_own_parameters_are_named_with_stars_for_numbers():
    inner = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Sequential(nn.Linear(1, 1)))
    model = nn.ModuleDict({"layers": nn.ModuleList([inner]), "up2": nn.Linear(1, 1)})
    assert styles._parametrised(model) == {"layers.*.*", "layers.*.*.*", "up2"}


def test_only_fused_overlap_gets_a_workspace():
    mesh = SimpleNamespace(workspace=lambda axis: f"workspace of {axis}")
    for overlap in ("none", "bulk", "chunked", "fused"):
        workspace = "workspace of tp" if overlap == "fused" else None
        options = Spread(mesh, overlap=overlap).options
        assert options == {"overlap": overlap, "workspace": workspace}


def _rows(mesh) -> None:
    for size in (5, 6, 7):
        vocabulary = HeadVocabulary(size, True, Spread(mesh))
        whole, at = torch.arange(1.0, 2 * size + 1).view(size, 2), mesh.index("tp")
        each = -(-size // mesh.size("tp"))
        full = torch.cat((whole, torch.zeros(each * mesh.size("tp") - size, 2)))
        own = full[at * each : (at + 1) * each]
        assert torch.equal(vocabulary.own_rows(whole), own)
        assert torch.equal(vocabulary.padded(whole[at * each : (at + 1) * each]), own)
        assert vocabulary.group is mesh.group("tp")
        assert vocabulary._replace(cut=False).group is None
        for other in (size - 1, size + 1, each):
            words = (
                f"^the bias or LoRA weight of the sharded head must have {size} rows, got {other}$"
            )
            with pytest.raises(ValueError, match=words):
                vocabulary.own_rows(torch.ones(other, 2))


@pytest.mark.parametrize("tp", [2, 3])
def test_a_rank_holds_its_rows_of_the_vocabulary_padded_with_zeros(tp):
    on_mesh(Mesh(tp=tp), _rows)


def test_part_is_as_wide_as_its_narrowest_column_and_columns_share_input():
    up, gate, down = nn.Linear(4, 12), nn.Linear(4, 6), nn.Linear(6, 4)
    for kind, columns, width, once in (
        ("mlp", {up: 1}, 12, False), ("mlp", {up: 2}, 6, False), ("mlp", {up: 1, gate: 1}, 6, True),
        ("attention", {up: 3}, 4, True), ("attention", {gate: 1, up: 3}, 4, True),
        ("attention", {transformers.pytorch_utils.Conv1D(18, 4): 3}, 6, True),
    ):  # fmt: skip
        part = structure.CutPart(kind, nn.Tanh(), columns, down)
        assert (part.width, part.takes_once) == (width, once)


def test_sharded_tokens_need_hidden_states_of_three_dims():
    whole = plan.Tokens(None, None, sequence_parallel=False)
    cut = plan.Tokens(None, None, sequence_parallel=True, always=True)
    for ndim in (2, 3, 4):
        x = torch.ones((2,) * ndim)
        assert whole.dim(nn.Tanh(), x) is None
        if ndim == 3:
            assert cut.dim(nn.Tanh(), x) == 1
            continue
        with pytest.raises(ValueError, match=rf"^Tanh: x\[2(, 2)+\] has {ndim} dims, but sequ"):
            cut.dim(nn.Tanh(), x)


def test_layers_are_the_list_with_all_attention_and_some_in_every_item():
    def block(n: int) -> nn.Module:
        return nn.ModuleDict({f"attn{i}": nn.Tanh() for i in range(n)} | {"mlp": nn.ReLU()})

    def found(model: nn.Module) -> list[nn.Module]:
        calling = [m for m in model.modules() if isinstance(m, nn.Tanh)]
        mlps = [m for m in model.modules() if isinstance(m, nn.ReLU)]
        parts = [structure.CutPart("attention", m, {}, m) for m in calling]
        parts += [structure.CutPart("mlp", m, {}, m) for m in mlps]
        return parallel._layers(model, parts)

    layers = nn.ModuleList([block(1), block(2), block(1)])
    experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    for others in ({}, {"empty": nn.ModuleList()}, {"experts": experts}):
        model = nn.ModuleDict({**others, "layers": layers})
        assert found(model) == list(layers)
    assert found(nn.ModuleDict({"all": nn.ModuleList([layers])})) == [layers]  # the outer one
    for apart in (
        {"layers": layers, "more": nn.ModuleList([block(1)])},  # an encoder and a decoder
        {"layers": nn.ModuleList([block(1), block(0)])},
        {"layers": nn.ModuleList([block(1)]), "attn": nn.Tanh()},
        {"attn": nn.Tanh()},
    ):
        with pytest.raises(ValueError, match="ModuleDict: no list of layers contains all of its"):
            found(nn.ModuleDict(apart))


def test_only_attention_of_warpweave_and_known_feed_forwards_are_sharded(monkeypatch):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_hidden_layers=1))
    inputs = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM: no warpweave attention to shard"):
        structure.find_parts(model, inputs, 2)
    ww.apply(model, report=ww.Report())
    parts, kept = structure.find_parts(model, inputs, 2)
    assert [part.kind for part in parts] == ["attention", "mlp"]
    assert not kept
    # of rows, each sharded separately
    for fused, blocks in (("", 1), ("gate, up", 2), ("up, gate", 2)):
        form = MLPForm("swiglu", "up_proj", "down_proj", fused=fused)
        monkeypatch.setattr(structure.mlp, "find_mlp_form", lambda module, form=form: form)
        (_, part), _ = structure.find_parts(model, inputs, 2)
        assert part.columns == {model.model.layers[0].mlp.up_proj: blocks}
    monkeypatch.undo()
    model.config.hidden_act = "tanh"
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    parts, kept = structure.find_parts(model, inputs, 2)
    assert [part.kind for part in parts] == ["attention"]
    assert kept == {
        "model.layers.0.mlp": "it has several activations, or one that warpweave does not support"
    }
    assert [part.kind for part in structure.find_parts(model, inputs, 1)[0]] == ["attention"]
    words = r"layers.0.self_attn: 2 query heads are not divisible by tp"
    with pytest.raises(ValueError, match=words):
        structure.find_parts(model, inputs, 3)
