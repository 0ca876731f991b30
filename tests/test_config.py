"""The records of the model and the plan: each of their fields is an option of the same name."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import itertools
import re
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from warpweave.cli.command_line import read_command_line
from warpweave.convert.families import canonical, read_config
from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.model.gpt import GPT
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.schedule import FAMILIES
from warpweave.prove.layouts import STYLES
from warpweave.train import command as train
from warpweave.train import options as train_options
from warpweave.train.option_kinds import overrides_of
from warpweave.train.options import TrainConfig


def _help(capsys, record: type) -> str:
    """Return the help on a record's options, with runs of blanks and box drawing as one blank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")  # if wider, options are printed in two columns
        with pytest.raises(SystemExit) as caught:
            read_command_line(record, "train", None, ["--help"])
    assert caught.value.code == 0
    return re.sub(r"[\s│]+", " ", capsys.readouterr().out)


def _another(kind: object, value: object) -> object:
    """Return a value of a field's type, other than `value`."""
    if get_origin(kind) is tuple:
        return (4, 0)
    kinds = [k for k in get_args(kind) if k is not type(None)]
    if kinds and get_origin(kinds[0]) is Literal:  # or a path
        kind = kinds[0]
    if get_origin(kind) is Literal:
        return next(word for word in get_args(kind) if word != value)
    kind = kinds[0] if kinds else kind
    return not value if kind is bool else kind((value or 7) * 2)


def _words(name: str, value: object, *, switch: bool) -> list[str]:
    option = name.replace("_", "-")
    if switch and isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", *map(str, value if isinstance(value, tuple) else [value])]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ParallelPlan)])
def test_every_field_of_the_plan_is_an_option(name):
    now = getattr(ParallelPlan(), name)
    other = _another(get_type_hints(ParallelPlan)[name], now)
    config = train_options.parse(_words(name, other, switch=True))
    assert config == TrainConfig(plan=ParallelPlan(**{name: other}))
    assert config != TrainConfig()


@pytest.mark.parametrize(
    "name", [f.name for f in dataclasses.fields(GPTConfig) if f.name != "rope_scaling"]
)
def test_every_field_of_the_model_is_an_option_that_overrides_the_preset(name):
    preset = PRESETS["toy"]
    other = _another(get_type_hints(GPTConfig)[name], getattr(preset, name))
    other = {"dropout": 0.5, "kv_heads": 2}.get(name, other)
    needs = {"local_rope_theta": {"positions": "rope"}, "qk_norm_whole": {"qk_norm": True}}
    preset = dataclasses.replace(preset, **(more := needs.get(name, {})))
    words = [w for k, v in {**more, name: other}.items() for w in _words(k, v, switch=False)]
    model = train_options.parse(["--model", "toy", *words]).model_config(1)
    assert model == dataclasses.replace(preset, **{name: other})
    assert model != preset


def test_a_field_that_is_added_is_an_option_with_its_help(capsys):
    @dataclasses.dataclass(frozen=True)
    class Config:
        """A model.

        Attributes:
            layers: Transformer blocks.
            window: Tokens that each token sees.
        """

        layers: int
        window: int | None = None

    overrides = overrides_of(Config, __name__)
    assert read_command_line(overrides, "train", None, ["--window", "3"]) == overrides(window=3)
    assert "Tokens that each token sees. (default: the preset's)" in _help(capsys, overrides)


def test_the_help_says_what_each_option_is_and_its_default(capsys):
    shown = _help(capsys, TrainConfig)
    for line in (
        "--layers {None}|INT Number of transformer blocks. (default: the preset's)",
        "--vocab-size {None}|INT Size of the vocabulary. (default: the larger of the preset's and "
        "the data's)",
        "--zero {0,1,2,3} ZeRO stage, sharded over the dp x cp ranks (hybrid: dp_shard x cp). "
        "(default: 1)",
        f"--schedule {{{','.join(FAMILIES)}}}|STR Pipeline schedule: the order of the "
        "micro-batches. You can also pass the path of a .csv file with a schedule in torch's "
        "notation, one row per pipeline rank. "
        "(default: 1f1b)",
        "--batch INT Micro-batch size: sequences per micro-batch. (default: 8)",
        "--resume [True|False|auto] ",
        "--ulysses INT Ulysses degree: ",
        "--cp-strategy {auto,ring,gather,stream,ulysses,hybrid,measured} Context-parallel "
        "attention: ",
    ):
        assert line.replace(" ", "") in shown.replace(" ", "")
    for record in (GPTConfig, ParallelPlan):
        for name in set(get_type_hints(record)) - {"rope_scaling"}:
            option = f"--{name.replace('_', '-')}"
            said = re.search(rf"{option}(, --\S+)? ({{\S+}}|{{None}}\|\S+|INT)? ?(.*?)\(def", shown)
            assert said, name
            assert len(said[3]) > 10, name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "two"], "Error parsing --layers"),
        (["--zero", "4"], "invalid choice '4' for argument '--zero'"),
        (["--norm", "batch"], "norm must be one of layer, .*, got 'batch'"),
        (["--layer", "2"], "Unrecognized options: --layer"),
        (["--plan.zero", "2"], "Unrecognized options: --plan.zero"),
    ],
)
def test_a_wrong_word_or_option_is_refused_by_its_name(capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        train.main(words)
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["zero", "recompute", "layout", "cp_strategy", "schedule"])
def test_a_plan_of_other_words_is_refused(name):
    words = ", ".join(map(str, get_args(get_type_hints(ParallelPlan)[name])))
    words = words if name != "schedule" else ".*gpipe, .*1f1b.* or a path ending in .csv"
    with pytest.raises(ValueError, match=f"^{name} must be one of {words}, got 'most'$"):
        ParallelPlan(**{name: "most"})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ParallelPlan(microbatches=0), "microbatches must be at least 1, got 0"),
        (ParallelPlan(chunks=2), "schedule 1f1b requires chunks = 1 stages per rank, got 2"),
        (ParallelPlan(schedule="interleaved", chunks=0), ".*needs c >= 1 stages per rank.*c=0"),
        (ParallelPlan(schedule="interleaved", chunks=2),
         r"layers must be at least the number of pipeline stages \(4\), got 2"),
    ],
)  # fmt: skip
def test_a_plan_that_the_model_cannot_follow_is_refused(plan, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        PRESETS["toy"].check(Mesh(pp=2), plan)


@pytest.mark.parametrize(
    ("mesh", "strategy", "message"),
    [
        (Mesh(cp=8), "ulysses", "Ulysses over 8 ranks needs .*, got 4"),
        (Mesh(tp=4, cp=2), "ulysses", "Ulysses over 2 ranks needs .*, got 1"),
        (Mesh(cp=4), "hybrid",
         r"strategy 'hybrid' needs a pair of process groups \(ring, Ulysses\), got one"),
        (Mesh(cp=4, ulysses=2), "ring", "strategy 'ring' needs one process group, got a pair"),
        (Mesh(cp=4, ulysses=2), "measured",
         "cp_strategy = 'measured' needs ulysses = 1, got 2, which leaves only one strategy; "
         "use 'hybrid'"),
    ],
)  # fmt: skip
def test_a_context_that_the_mesh_cannot_follow_is_refused(mesh, strategy, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        PRESETS["toy"].check(mesh, ParallelPlan(cp_strategy=strategy))


def test_the_mesh_of_a_run_has_its_neighbours():
    assert TrainConfig(cp=4, ulysses=2).mesh == Mesh(cp=4, ulysses=2)
    assert TrainConfig(dp=4, dp_shard=2).mesh == Mesh(dp=4, dp_shard=2)


def test_shards_over_neighbours_need_a_zero_stage_that_has_shards():
    PRESETS["toy"].check(Mesh(dp=4, dp_shard=2), ParallelPlan(zero=1))
    with pytest.raises(ValueError, match=r"^dp_shard = 2 needs ZeRO 1 to 3, got zero = 0$"):
        PRESETS["toy"].check(Mesh(dp=4, dp_shard=2), ParallelPlan(zero=0))


def test_ordered_reduction_is_refused_with_replicas_of_shards():
    plan = ParallelPlan(reduce="ordered", zero=1)
    PRESETS["toy"].check(Mesh(dp=4), plan)
    for sizes in ({"dp": 4, "dp_shard": 2}, {"outer": 2}, {"outer": 2, "dp": 2}):
        mesh = Mesh(**sizes)
        given = f"dp_shard = {mesh.dp_shard}, outer = {mesh.outer}"
        words = f"^reduce = 'ordered' does not support .*, got {given}$"
        with pytest.raises(ValueError, match=words):
            PRESETS["toy"].check(mesh, plan)


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_an_asynchronous_schedule_needs_untied_ends_over_several_stages(pp):
    plan = ParallelPlan(schedule="pipedream", microbatches=4, zero=2)
    apart = dataclasses.replace(PRESETS["small"], tied=False)
    apart.check(Mesh(pp=pp, dp=2), plan)
    plan.check_update(None, False, False)
    plan.check_update(0.0, False, False)
    ParallelPlan().check_update(1.0, True, True)
    if pp == 1:
        PRESETS["small"].check(Mesh(), plan)
        return
    words = f"tied must be False with schedule pipedream: .* {pp - 1} micro-batches apart"
    with pytest.raises(ValueError, match=words):
        PRESETS["small"].check(Mesh(pp=pp), plan)


@pytest.mark.parametrize(("replicas", "m", "size"), [(1, 3, 2), (2, 3, 4), (3, 2, 1), (4, 1, 2)])
def test_samples_are_dealt_to_replicas_in_blocks_or_in_turn(replicas, m, size):
    """In turn: micro-batch i of replica r is the whole step's micro-batch i * replicas + r."""
    for reduce in ("library", "ordered"):
        found = ParallelPlan(microbatches=m, reduce=reduce).deal(replicas, size).tolist()
        for r, i in itertools.product(range(replicas), range(m)):
            first = size * (i * replicas + r if reduce == "ordered" else r * m + i)
            assert found[r][i] == [*range(first, first + size)]


def test_stages_lie_where_the_schedule_has_them():
    assert ParallelPlan().placement(3) == [0, 1, 2]
    assert ParallelPlan(schedule="interleaved", chunks=2).placement(2) == [0, 1, 0, 1]


LLAMA3 = {
    "model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}  # fmt: skip


def _llama3(layers: int, width: int, heads: int, hidden: int, **more: object) -> dict:
    own = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return LLAMA3 | own | {"intermediate_size": hidden} | more


def _gpt2(layers: int, width: int, heads: int) -> dict:
    own = {"n_layer": layers, "n_embd": width, "n_head": heads}
    return own | {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
                  "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}  # fmt: skip


PUBLISHED = {  # from the config.json of each; Llama 3.2's without its rope_scaling
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-1b": _llama3(16, 2048, 32, 8192, tie_word_embeddings=True),
    "llama-8b": _llama3(32, 4096, 32, 14336),
    "llama-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
}


TOYS = {  # layers, width, heads, kv_heads, hidden, vocabulary, sequence
    "toy": (2, 128, 4, 4, 512, 256, 128),
    "small": (4, 128, 4, 4, 512, 256, 128),
    "toy-llama": (2, 128, 4, 2, 352, 256, 128),
    "gpt3-175b": (96, 12288, 96, 96, 49152, 50257, 2048),  # Brown et al. 2020, table 2.1
}


def test_presets_without_a_published_config_have_these_sizes():
    assert {*TOYS, *PUBLISHED} == {*PRESETS}
    for name, sizes in TOYS.items():
        c = PRESETS[name]
        own = c.layers, c.width, c.heads, c.num_kv_heads, c.num_hidden, c.vocab_size, c.seq_len
        assert own == sizes, name
        llama = name == "toy-llama"
        style = c.positions, c.norm, c.activation, c.bias, c.tied
        expected = ("rope", "rms", "swiglu", False, False)
        assert style == (expected if llama else ("learned", "layer", "gelu", True, True)), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_model_that_was_published_under_its_name(name):
    assert canonical(PRESETS[name]) == read_config(PUBLISHED[name])[1]


@pytest.mark.parametrize("style", STYLES)
def test_step_flops_count_matmul_parameters_and_the_visible_half_of_scores(style):
    config = GPTConfig(53, 24, 3, 20, 10, 5, 14, head_size=6, tied=False, **STYLES[style])
    named = GPT(config, device="meta").named_parameters()
    looked_up = ("embedding", "positions")
    weights = sum(p.numel() for n, p in named if p.dim() > 1 and not n.startswith(looked_up))
    reach = [config.window(layer) or config.seq_len for layer in range(config.layers)]
    keys = sum(w - w * w / (2 * config.seq_len) for w in reach)  # of one token, over the layers
    scores = 2 * 2 * config.heads * config.head_dim * keys
    assert config.step_flops(48) == 3 * 48 * (2 * weights + scores)


@pytest.mark.parametrize(
    "module",
    ["train.options", "train.sample_options", "train.export_options", "prove.options",
     "machine.tune.options"],
)  # fmt: skip
def test_the_help_of_an_option_begins_with_what_it_is(module):
    """It begins with a noun or a verb, such as "Ulysses degree", not with part of a sentence."""
    source = importlib.import_module(f"warpweave.{module}").__file__
    records = [
        node
        for node in ast.parse(Path(source).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Options"))
    ]
    helps = {
        field.target.id: text.value.value
        for record in records
        for field, text in pairwise(record.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert len(helps) > 4
    for name, text in helps.items():
        assert text[0].isupper(), name
        assert not re.match(r"(Of|What|With|How|Which|It|This|That|And|From|To)\b", text), name
