"""Our layers as styles of torch's `parallelize_module` and as words of transformers' `tp_plan`:
random Hugging Face models over two ranks, against the untouched ones on one."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

transformers = pytest.importorskip("transformers", reason="an extra of its own")

from hf_models import assert_all_close, batch, computed, counted, perturbed  # noqa: E402
from ranks import run_ranks  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, MixtralConfig  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

import warpweave.hf as ww  # noqa: E402
from warpweave.layers.sharding.styles import ColwiseParallel, RowwiseParallel, SequenceParallel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
MORE = {"attention_bias": True, "mlp_bias": True}
CASES = ((False, "chunked"), (True, "none"), (True, "chunked"))


def torch_plan(sequence: bool, overlap: str) -> dict:
    """Return the plan of a Llama, as written with torch's own styles."""
    tokens = Shard(1) if sequence else Replicate()
    column = ColwiseParallel(input_layouts=tokens, overlap=overlap)
    row = RowwiseParallel(output_layouts=tokens, overlap=overlap)
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
    plan = dict.fromkeys([f"model.layers.*.{name}" for name in (*parts, "mlp.up_proj")], column)
    plan |= {f"model.layers.*.{n}": row for n in ("self_attn.o_proj", "mlp.down_proj")}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate(), overlap=overlap)
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), overlap=overlap)
    if sequence:
        plan |= {
            "model.layers.0": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=tokens, use_local_output=True
            ),
            "model.layers.*.input_layernorm": SequenceParallel(),
            "model.layers.*.post_attention_layernorm": SequenceParallel(use_local_output=True),
            "model.norm": PrepareModuleInput(
                input_layouts=tokens, desired_input_layouts=Replicate(), use_local_output=True
            ),
        }
    return plan


def _of_two(rank: int, folder: str) -> dict:
    transformers.logging.set_verbosity_error()
    mesh = init_device_mesh("cpu", (2,))
    found = {"torch": {}, "words": {}}
    for sequence, overlap in CASES:
        model = perturbed("llama", **MORE)
        if rank == 1:  # values come from the mesh's first rank
            nn.init.zeros_(model.lm_head.weight)
            nn.init.zeros_(model.model.layers[1].self_attn.q_proj.weight)
        parallelize_module(model, mesh, torch_plan(sequence, overlap))
        found["torch"][sequence, overlap] = counted(lambda model=model: computed(model))
    for family in ("llama", "qwen3"):
        for sequence in (False, True):
            overlap = "chunked" if sequence else "none"
            config = AutoConfig.from_pretrained(f"{folder}/{family}")
            how = DistributedConfig(tp_size=2, enable_sequence_parallel=sequence)
            how = ww.planned(how, config, overlap=overlap)
            model = AutoModelForCausalLM.from_pretrained(
                f"{folder}/{family}", distributed_config=how, attn_implementation="eager"
            )
            found["words"][family, sequence] = counted(lambda model=model: computed(model))
            model.save_pretrained(f"{folder}/{family} saved {sequence}")
            if not sequence:
                ids = batch()["input_ids"][:, :8]
                found["tokens", family] = generated(model.eval(), ids)
    example = {"input_ids": batch()["input_ids"]}
    report = ww.Report()
    cut = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
    ww.apply(model, only=["norm", "attention"], example=example, report=report)
    found["applied"] = (len(report.replaced()), computed(model))
    ww.revert(model)
    still = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
    found["reverted"] = (cut, still, computed(model))
    found["said"] = _refused(mesh, model)
    found["layouts"] = _layouts(mesh)
    found["frozen"] = [
        p.requires_grad
        for style in (ColwiseParallel(), RowwiseParallel(), SequenceParallel())
        for p in parallelize_module(_frozen(style), mesh, style).parameters()
    ]
    found["tuples"] = _layers_of_tuples(mesh)
    found["sequences"] = [_sequence(rank, mesh, *case) for case in SEQUENCES]
    found["more"] = [
        *_outputs_of_dtensors(mesh), *_whose_values(rank, mesh), *_uneven_and_padded(mesh),
        _more_arguments(rank, mesh), _norms_inside(rank, mesh),
    ]  # fmt: skip
    found["told"] = [_told(*case) for case in TOLD]
    return found


def _outputs_of_dtensors(mesh) -> list[tuple[str, bool]]:
    """Test that an output requested as a DTensor has its layout, and is the whole one's part."""
    found = []
    for kind in (ColwiseParallel, RowwiseParallel, SequenceParallel):
        for out in (Shard(0), Shard(1), Shard(-1), Replicate()):
            torch.manual_seed(3)
            x = torch.randn(2, 4, 6)
            if kind is SequenceParallel:
                if out in (Shard(-1), Replicate()):
                    continue
                module, style = nn.LayerNorm(6), kind(sequence_dim=out.dim, use_local_output=False)
            else:
                module = nn.Linear(6, 8)
                style = kind(output_layouts=out, use_local_output=False)
            wanted = module(x)
            parallelize_module(module, mesh, style)
            y = module(DTensor.from_local(x, mesh, [Replicate()], run_check=False))
            layout = Shard(out.dim % 3) if isinstance(out, Shard) else out
            same = isinstance(y, DTensor) and y.placements == (layout,)
            same = same and torch.allclose(y.full_tensor(), wanted, rtol=1e-4, atol=1e-5)
            found.append((f"{kind.__name__} {out} as a DTensor", same))
    return found


def _whose_values(rank: int, mesh) -> list[tuple[str, bool]]:
    """Parameters are those of the requested rank; without one, each rank keeps its own."""
    found = []
    for source, wanted in ((0, 1.0), (1, 2.0), (None, rank + 1.0)):
        for style, module in (
            (ColwiseParallel(), nn.Linear(4, 6)), (RowwiseParallel(), nn.Linear(4, 6)),
            (SequenceParallel(), nn.LayerNorm(4)), (ColwiseParallel(), nn.Embedding(4, 6)),
        ):  # fmt: skip
            for p in module.parameters():
                nn.init.constant_(p, rank + 1.0)
            parallelize_module(module, mesh, style, src_data_rank=source)
            held = [p.to_local().unique().tolist() for p in module.parameters()]
            same = all(h == [wanted] for h in held)
            found.append((f"{type(style).__name__} from {source}", same))
    return found


def _uneven_and_padded(mesh) -> list[tuple[str, bool]]:
    """Shard seven features or words over two ranks; a padding token never has a gradient."""
    found = []
    ids = torch.tensor([[3, 1, 6, 3], [0, 3, 3, 5]])
    for padding in (None, 3, 6):
        for kind in (ColwiseParallel, RowwiseParallel):
            for out in (Replicate(), Shard(0), Shard(1), Shard(-1)):
                torch.manual_seed(4)
                module, whole = nn.Embedding(7, 6, padding), nn.Embedding(7, 6, padding)
                whole.load_state_dict(module.state_dict())
                style = kind(input_layouts=Replicate(), output_layouts=out, use_local_output=False)
                parallelize_module(module, mesh, style)
                y, wanted = module(ids), whole(ids)
                dy = torch.arange(float(wanted.numel())).cos().view(wanted.shape)
                y.backward(DTensor.from_local(dy, mesh, [Replicate()]).redistribute(mesh, [out]))
                wanted.backward(dy)
                same = torch.allclose(y.full_tensor(), wanted)
                grad = module.weight.grad.full_tensor()
                same &= torch.allclose(grad, whole.weight.grad, atol=1e-6)
                found.append((f"{kind.__name__} {out}, padding {padding}", same))
    for bias in (True, False):
        module, x = nn.Linear(4, 7, bias), torch.randn(3, 4)
        wanted = module(x)
        parallelize_module(module, mesh, ColwiseParallel(output_layouts=Replicate()))
        y = module(x)
        same = y.shape == wanted.shape and torch.allclose(y, wanted, rtol=1e-4, atol=1e-5)
        found.append((f"7 features, bias {bias}", same))
    for options in ({"scale_grad_by_freq": True}, {"sparse": True}, {"max_norm": 1.0}):
        for style in (ColwiseParallel(), RowwiseParallel()):
            module = nn.Embedding(4, 6, **options)
            said = raised(lambda m=module, s=style: parallelize_module(m, mesh, s))
            words = "an embedding with max_norm, scale_grad_by_freq or sparse cannot be sharded"
            found.append((f"{options}", said == f"{type(style).__name__}: {words}"))
    return found


def _more_arguments(rank: int, mesh) -> tuple[str, bool]:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, by: float, plus: float = 0.0) -> torch.Tensor:
            return x * by + plus

    module = parallelize_module(Scaled(), mesh, SequenceParallel(use_local_output=True))
    x = torch.arange(12.0).view(1, 4, 3).chunk(2, 1)[rank]
    same = torch.equal(module(x, 2.0, plus=1.0), x * 2 + 1)
    return "more arguments of a module on a sequence", same


def _norms_inside(rank: int, mesh) -> tuple[str, bool]:
    """Test norms within the module on a sequence, one without parameters: equal to one device."""

    def made() -> nn.Module:
        torch.manual_seed(5)
        norms = nn.Sequential(nn.LayerNorm(6), nn.Sequential(nn.LayerNorm(6, bias=False)))
        return norms.append(nn.LayerNorm(6, elementwise_affine=False)).double()

    module, whole = made(), made()
    x = torch.arange(48.0).double().cos().view(2, 4, 6)
    style = SequenceParallel(use_local_output=True)
    y, wanted = parallelize_module(module, mesh, style)(x.chunk(2, 1)[rank]), whole(x)
    for out in (y, wanted):
        (out.pow(3) + out).sum().backward()
    same = torch.allclose(y, wanted.chunk(2, 1)[rank], rtol=1e-12)
    for p, truth in zip(module.parameters(), whole.parameters(), strict=True):
        same &= torch.allclose(p.grad.full_tensor(), truth.grad, rtol=1e-9, atol=1e-12)
    return "norms within a module on a sequence", same


TOLD = (
    ("llama", {"tp": 2}, {}), ("llama", {"cp": 2}, {}), ("gpt2", {"tp": 2}, {}),
    ("llama", {"tp": 2}, {"hidden_act": "tanh"}), ("gemma3", {"tp": 2}, {}),
)  # fmt: skip


def _told(family: str, sizes: dict, more: dict) -> tuple:
    """Return the report of a model over two ranks, what transformers is told of it, the number of
    hooks before and after each of two calls, its results, and what `revert` leaves."""
    from warpweave.parallel.mesh import Mesh

    model, report = perturbed(family, **more), ww.Report()
    ww.apply(model, mesh=Mesh(**sizes).connect(), report=report)
    said = {e.name: (e.module, e.replaced, e.why) for e in report.entries if e.kind == "parallel"}
    told = model._tp_size, tuple(model.config.distributed_config)
    hooks = [len(model._forward_pre_hooks)]
    with torch.no_grad():
        for _ in range(2):
            model(batch()["input_ids"])
            hooks.append(len(model._forward_pre_hooks))
    numbers = computed(model)
    ww.revert(model)
    return said, told, hooks, numbers, vars(model.config).get("distributed_config")


def _layouts(mesh) -> list[str | None]:
    """Run some cases of `benchmarks/hf_styles.py`: every input layout, every output layout."""
    sys.path.insert(0, str(BENCHMARKS))
    import hf_styles

    found = []
    for _, group in itertools.groupby(hf_styles.cases(3), lambda case: case[:3]):
        group = list(group)
        ins, outs = (list(dict.fromkeys(each)) for each in zip(*(case[3:5] for case in group)))
        for n in range(len(outs)):
            at = ins[n % len(ins)], outs[(n + 1) % len(outs)]
            alike = [case for case in group if case[3:5] == at]
            found.append(hf_styles.difference(alike[3 * n % len(alike)], mesh))
    return found


def _frozen(style) -> nn.Module:
    module = nn.LayerNorm(4) if isinstance(style, SequenceParallel) else nn.Linear(4, 6)
    return module.requires_grad_(False)


def _layers_of_tuples(mesh) -> tuple[torch.Tensor, str]:
    """Return results of layers with outputs besides hidden states and sharded tokens between."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    class Layer(nn.Module):
        def forward(self, hidden_states, more=""):
            return hidden_states + hidden_states.shape[1], f"{more}x"

    layers = nn.ModuleList([Layer(), Layer()])
    ALL_PARALLEL_STYLES["warpweave_sequence"].install_forward(layers, mesh)
    x = torch.arange(12.0).view(1, 4, 3)
    return layers[1](*layers[0](hidden_states=x))


SEQUENCES = ((2, 0), (2, -2), (3, 1), (3, 0), (4, -2), (4, 1))  # dims of x, and the sharded one


def _sequence(rank: int, mesh, ndim: int, dim: int) -> bool:
    norm, style = nn.LayerNorm(6), SequenceParallel(sequence_dim=dim, use_local_output=True)
    wanted = nn.LayerNorm(6)
    x = torch.arange(48.0).cos().view((-1, *(2,) * (ndim - 2), 6))
    whole_y = wanted(x)
    whole_y.pow(3).sum().backward()
    parallelize_module(norm, mesh, style)
    y = norm(x.chunk(2, dim)[rank])
    y.pow(3).sum().backward()
    grad = norm.weight.grad.full_tensor()
    close = torch.allclose(grad, wanted.weight.grad, rtol=1e-4, atol=1e-5)
    return close and torch.equal(y, whole_y.chunk(2, dim)[rank])


def generated(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)


def _refused(mesh, model: nn.Module) -> list[str]:
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    x = torch.ones(3, 4)
    uneven = DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
    odd = DTensor.from_local(torch.ones(2, 5), mesh, [Replicate()])  # features
    own = type("Own", (nn.Linear,), {})(4, 6)
    look_up = type("Own", (nn.Embedding,), {})(4, 6)
    colwise, rowwise = (ALL_PARALLEL_STYLES[f"warpweave_sequence_{w}wise"] for w in ("col", "row"))

    def on(module: nn.Module, style) -> nn.Module:
        return parallelize_module(module, mesh, style)

    return [
        raised(lambda: parallelize_module(nn.Linear(4, 6), mesh, ColwiseParallel(overlap="much"))),
        raised(lambda: parallelize_module(nn.Linear(4, 7), mesh, ColwiseParallel())),
        raised(lambda: parallelize_module(nn.Linear(5, 6), mesh, RowwiseParallel())),
        raised(lambda: parallelize_module(nn.Linear(4, 1), mesh, ColwiseParallel())),
        raised(lambda: parallelize_module(nn.Linear(1, 6), mesh, RowwiseParallel())),
        raised(lambda: parallelize_module(nn.Embedding(4, 1), mesh, ColwiseParallel())),
        raised(lambda: parallelize_module(nn.LayerNorm(4), mesh, ColwiseParallel())),
        raised(lambda: ColwiseParallel(output_layouts=Partial())),
        raised(lambda: on(nn.Linear(4, 6), ColwiseParallel(input_layouts=Shard(2)))(x)),
        raised(lambda: on(nn.Linear(4, 6), RowwiseParallel(output_layouts=Shard(-3)))(x)),
        raised(lambda: on(nn.Linear(4, 6), RowwiseParallel(output_layouts=Shard(0)))(x[:, :2])),
        raised(lambda: on(nn.Linear(4, 6), ColwiseParallel(input_layouts=Shard(0)))(uneven)),
        raised(lambda: on(nn.Linear(5, 6), ColwiseParallel(input_layouts=Shard(-1)))(odd)),
        raised(lambda: on(own, ColwiseParallel())),
        raised(lambda: on(look_up, RowwiseParallel())),
        raised(lambda: on(nn.Embedding(4, 6, max_norm=1.0), RowwiseParallel())),
        raised(lambda: on(nn.LayerNorm(4), SequenceParallel())(x)),
        raised(lambda: on(nn.LayerNorm(4), SequenceParallel(sequence_dim=2))(x)),
        raised(lambda: colwise.style.compute(nn.Linear(4, 6), x, None)),
        raised(lambda: rowwise.style.compute(nn.Linear(4, 6), x, None)),
        raised(lambda: model(input_ids=torch.ones(1, 5, dtype=torch.int64))),
    ]


def raised(run) -> str:
    with pytest.raises(ValueError, match=r"\w") as error:
        run()
    return str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("styles")
    for family in ("llama", "qwen3"):
        perturbed(family, attention_bias=True).save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="module")
def two(folder) -> list[dict]:
    """Return the results of each of two ranks: transformers is imported once."""
    return run_ranks(2, _of_two, str(folder))


# ---------------------------------------------------------------- 1. torch


def test_parallelize_module_with_our_styles_computes_what_one_rank_does(two):
    wanted = computed(perturbed("llama", **MORE))
    for rank in two:
        for found, _ in rank["torch"].values():
            assert_all_close(found, wanted)


LAYERS, COLUMNS, ROWS = 2, 5, 2


def test_the_overlap_of_a_style_reaches_its_products(two):
    """In a forward that evaluates, and in one that trains."""
    for rank in two:
        calls = {case: counts for case, (_, counts) in rank["torch"].items()}
        assert not calls[True, "none"]
        assert calls[False, "chunked"]["product_reduce"] == 2 * LAYERS * ROWS
        assert calls[True, "chunked"]["product_scatter"] == 2 * LAYERS * ROWS
        # and the backward of each row gathers its gradients
        gathers = calls[True, "chunked"]["gather_product"]
        assert gathers == LAYERS * (2 * COLUMNS + ROWS)


def test_a_layout_means_what_it_means_to_torch_whatever_the_number_of_dims(two):
    """Compare with torch's styles and one device, in float64 with all gradients."""
    for rank in two:
        assert len(rank["layouts"]) == 2 * (3 + 5 + 7) + 2 * (5 + 7 + 9)
        assert not any(rank["layouts"]), next(filter(None, rank["layouts"]))


def test_a_sequence_may_be_any_dim_but_the_features(two):
    for rank in two:
        assert all(rank["sequences"])


def test_outputs_sources_uneven_parts_and_padding_are_those_of_one_device(two):
    for rank in two:
        assert [what for what, same in rank["more"] if not same] == []
        assert len(rank["more"]) == 10 + 12 + 24 + 2 + 6 + 2


def test_what_is_frozen_stays_so_and_what_layers_give_besides_goes_on(two):
    for rank in two:
        assert not any(rank["frozen"])
        x, more = rank["tuples"]
        assert torch.equal(x, torch.arange(12.0).view(1, 4, 3) + 2 + 2)  # two tokens each
        assert more == "xx"


# ---------------------------------------------------------------- 2. transformers


def test_a_tp_plan_of_our_words_loads_computes_saves_and_generates(two, folder):
    for family in ("llama", "qwen3"):
        model = AutoModelForCausalLM.from_pretrained(folder / family)
        wanted, state = computed(model), model.state_dict()
        tokens = generated(model.eval(), batch()["input_ids"][:, :8])
        for sequence in (False, True):
            saved = folder / f"{family} saved {sequence}"
            again = AutoModelForCausalLM.from_pretrained(saved).state_dict()
            assert again.keys() == state.keys()
            assert all(torch.equal(again[name], x) for name, x in state.items())
            for rank in two:
                found, calls = rank["words"][family, sequence]
                assert_all_close(found, wanted)
                # sequences are sharded, by the reserved word, and their messages hidden
                rows = ROWS * model.config.num_hidden_layers
                hidden = {"product_scatter": 2 * rows, "gather_product": rows}
                assert calls.items() >= hidden.items() if sequence else not calls
        for rank in two:
            assert torch.equal(rank["tokens", family], tokens)


def test_kernels_go_into_a_model_that_a_tp_plan_cut(two, folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    for rank in two:
        replaced, found = rank["applied"]
        assert replaced == 5 * model.config.num_hidden_layers + 1  # norms, attention
        assert_all_close(found, computed(model))
        cut, still, found = rank["reverted"]  # it stays as the tp_plan sharded it
        assert still == cut != []
        assert_all_close(found, computed(model))


# ---------------------------------------------------------------- 3. apply, over a mesh


def _said(family: str, sizes: dict, more: dict) -> dict:
    """Return the expected report for each module that ranks share, or cannot."""
    kind = {"llama": "Llama", "gpt2": "GPT2", "gemma3": "Gemma3"}[family]
    columns, said = (1, 1) if family == "gpt2" else (3, 2), {}
    names = ("attn", "mlp") if family == "gpt2" else ("self_attn", "mlp")
    base, layers = ("transformer", "h") if family == "gpt2" else ("model", "layers")
    for layer in range(LAYERS):
        words = "column-parallel + 1 row-parallel layers over 2 ranks"
        ways = (f"{n} {words}" if "tp" in sizes else "tokens" for n in columns)
        for name, suffix, how in zip(names, ("Attention", "MLP"), ways):
            said[f"{base}.{layers}.{layer}.{name}"] = f"{kind}{suffix}", True, how
        if "hidden_act" in more:
            why = "it has several activations, or one that warpweave does not support"
            said[f"{base}.{layers}.{layer}.mlp"] = f"{kind}MLP", False, why
    if "tp" in sizes and family != "gemma3":  # its embedding does more than look up
        embedding = f"{base}.wte" if family == "gpt2" else f"{base}.embed_tokens"
        said[embedding] = "Embedding", True, "embedding, rows over tp"
        said["lm_head"] = "Linear", True, "head, rows over tp"
    return said


def test_model_over_ranks_reports_its_sharding_and_compares_inputs_once(two):
    for rank in two:
        for (family, sizes, more), found in zip(TOLD, rank["told"], strict=True):
            said, told, hooks, numbers, left = found
            assert said == _said(family, sizes, more)
            assert told == (2, (2, 1, "cpu", 1, 1, 1))
            assert hooks == [hooks[0], hooks[0] - 1, hooks[0] - 1]
            assert_all_close(numbers, computed(perturbed(family, **more)))
            assert left is None


# ---------------------------------------------------------------- 4. errors


def test_what_a_style_cannot_do_is_one_line(two):
    wanted = (
        "overlap must be one of",
        "ColwiseParallel: 7 output features are not divisible by 2 ranks",
        "RowwiseParallel: 5 input features are not divisible by 2 ranks",
        "ColwiseParallel: 1 output features are not divisible by 2 ranks",
        "RowwiseParallel: 1 input features are not divisible by 2 ranks",
        "ColwiseParallel: 1 output features are not divisible by 2 ranks",
        "ColwiseParallel shards Linear or Embedding, not LayerNorm",
        "ColwiseParallel: output_layouts cannot be P(sum)",
        "ColwiseParallel: input_layouts S(2) is out of range for a tensor with 2 dims",
        "RowwiseParallel: output_layouts S(-3) is out of range for a tensor with 2 dims",
        "3 tokens (dim 0 of x) are not divisible by the 2 tensor-parallel ranks",
        "ColwiseParallel: input_layouts S(0): dim size 3 is not divisible by 2 ranks",
        "ColwiseParallel: input_layouts S(-1): dim size 5 is not divisible by 2 ranks",
        "ColwiseParallel shards Linear or Embedding, not Own",
        "RowwiseParallel shards Linear or Embedding, not Own",
        "an embedding with max_norm, scale_grad_by_freq or sparse cannot be sharded",
        "SequenceParallel: S(1) shards the feature dim of a tensor with 2 dims",
        "SequenceParallel: sequence_dim S(2) is out of range for a tensor with 2 dims",
        "Linear: x[3, 4] has 2 dims, but sequences are sharded along dim 1 of a 3-D",
        "Linear: x[3, 4] has 2 dims, but sequences are sharded along dim 1 of a 3-D",
        "the number of tokens must be divisible by 2 for sequence parallelism, got 5",
    )
    for rank in two:
        for said, words in zip(rank["said"], wanted, strict=True):
            assert words in said
            assert "\n" not in said


@pytest.mark.parametrize(
    ("overlap", "end"), [("bulk", ""), ("none", "_none"), ("chunked", "_chunked")]
)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_plan_is_the_models_own_in_our_words(sequence, overlap, end):
    config = perturbed("qwen3").config
    how = DistributedConfig(tp_size=2, enable_sequence_parallel=sequence)
    found = ww.planned(how, config, overlap=overlap)
    cut = "warpweave_sequence_" if sequence else "warpweave_"
    layer, inside = "model.layers.*.", "warpweave_inside_colwise"
    wanted = {
        "lm_head": f"warpweave_gather_colwise{end}",
        "model.embed_tokens": "warpweave_embedding_rowwise",
        **{f"{layer}{module}": f"{cut}input" for module in ("self_attn", "mlp")},
        **{f"{layer}self_attn.{x}_proj": inside for x in "qkv"},
        **{f"{layer}mlp.{x}_proj": inside for x in ("gate", "up")},
        **{f"{layer}self_attn.{x}_norm": "warpweave_replicated" for x in "qk"},
        f"{layer}self_attn.o_proj": f"{cut}rowwise{end}",
        f"{layer}mlp.down_proj": f"{cut}rowwise{end}",
        **({"model.layers": "warpweave_sequence"} if sequence else {}),
    }
    assert found.tp_plan == wanted
    assert (found.tp_size, found.enable_sequence_parallel) == (2, sequence)


def test_a_model_whose_plan_cannot_be_said_is_refused():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11}
    mixtral = MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    how = DistributedConfig(tp_size=2, enable_sequence_parallel=True)
    assert "has no tp_plan" in raised(lambda: ww.planned(how, GPT2Config()))
    assert "has no counterpart among warpweave's styles" in raised(lambda: ww.planned(how, mixtral))
    assert "overlap must be one of" in raised(lambda: ww.planned(how, mixtral, overlap="fused"))
    kept = ww.planned(DistributedConfig(tp_size=2), mixtral).tp_plan
    assert kept["model.layers.*.self_attn.o_proj"] == "warpweave_rowwise"
    assert not any("experts" in name for name in kept)
    own = DistributedConfig(tp_size=2, tp_plan={"lm_head": "colwise_gather_output"})
    assert ww.planned(own, mixtral).tp_plan["lm_head"] == "colwise_gather_output"
