"""`warpweave.hf.apply(model, mesh=...)`: random tiny models over tensor and context ranks, against
the untouched ones on one."""

import contextlib
import functools
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

transformers = pytest.importorskip("transformers", reason="an extra of its own")

from hf_models import V, assert_all_close, batch, computed, counted, perturbed  # noqa: E402
from ranks import run_ranks  # noqa: E402
from safetensors import safe_open  # noqa: E402

import warpweave.hf as ww  # noqa: E402
from warpweave.hf.changes import NAME  # noqa: E402
from warpweave.hf.loss import LossForm, fused_loss  # noqa: E402
from warpweave.hf.parallel import own_positions  # noqa: E402
from warpweave.layers.sharding import dtensor as shards  # noqa: E402
from warpweave.layers.sharding.dtensor import whole  # noqa: E402
from warpweave.parallel import collectives  # noqa: E402
from warpweave.parallel.context import Links  # noqa: E402
from warpweave.parallel.layout import SequenceLayout  # noqa: E402
from warpweave.parallel.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def spread(family: str, sizes: dict, options: dict, *, exact: bool = False) -> nn.Module:
    model = perturbed(family)
    model = model.double() if exact else model
    ww.apply(model, mesh=Mesh(**sizes).connect(), report=(report := ww.Report()), **options)
    assert report.replaced("loss")
    return model


def _spread_and_computed(cases: list[tuple]) -> list[tuple]:
    """Return the numbers of each case, and the counts of its run."""
    found = []
    for family, sizes, options, padding in cases:
        model = spread(family, sizes, options)
        found.append(counted(lambda model=model, padding=padding: computed(model, padding)))
    return found


FAMILIES = ("llama", "qwen3", "gpt2")
SEQUENCE = {"sequence_parallel": True}


# ---------------------------------------------------------------- 1. equal results


CHUNKED = {"overlap": "chunked", **SEQUENCE}
TWO = [
    ("llama", {"tp": 2}, {}, False), ("llama", {"tp": 2}, {"overlap": "none", **SEQUENCE}, False),
    ("llama", {"cp": 2}, {"strategy": "ring"}, True), ("qwen3", {"tp": 2}, CHUNKED, True),
    ("qwen3", {"cp": 2}, {"strategy": "ulysses"}, False), ("gpt2", {"tp": 2}, {}, True),
    ("gpt2", {"tp": 2}, CHUNKED, False), ("gpt2", {"cp": 2}, {}, True),
    ("gemma2", {"tp": 2}, SEQUENCE, True), ("gemma2", {"cp": 2}, {}, False),
    ("olmo2", {"tp": 2}, CHUNKED, True), ("gpt_oss", {"tp": 2}, SEQUENCE, False),
    ("gpt_oss", {"cp": 2}, {"strategy": "ring"}, True),  # sinks and their gradient
]  # fmt: skip
BOTH = {"tp": 2, "cp": 2}
FOUR = [("llama", BOTH, SEQUENCE, True), ("qwen3", BOTH, {}, False), ("gpt2", BOTH, SEQUENCE, True)]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    """Return each rank's results, by the test that needs them: transformers is imported once."""
    return run_ranks(2, _of_two, str(tmp_path_factory.mktemp("saved")))


def _of_two(rank: int, folder: str) -> dict:
    return {
        "numbers": _spread_and_computed(TWO),
        "without sums": _without_sums(rank),
        "lifetime": _lifetime(rank, folder),
        "refused": _refused(rank),
        "packed": _packed(rank),
        "messages": _messages_of_norms(),
        "odd": _loss_of_odd_tokens(),
        "float64": [float64(spread(*case, exact=True)) for case in EXACT],
        "lora": _lora(rank) if find_spec("peft") else None,
    }


def test_logits_loss_and_gradients_are_those_of_one_rank(two):
    """In float32, in which norms of transformers compute for any dtype."""
    for rank in two:
        assert_as_one_rank(TWO, rank["numbers"])


def _loss_of_odd_tokens() -> list[torch.Tensor]:
    spread = SimpleNamespace(mesh=Mesh(cp=2).connect())
    vocabulary = SimpleNamespace(group=None, size=9, spread=spread)
    draw = torch.Generator().manual_seed(2)
    x, w = (torch.randn(n, 4, generator=draw) for n in (7, 9))
    labels = torch.tensor([[3, 8, -100, 0, 1, 4, 2]])
    found = fused_loss(x[None], w, labels, LossForm(), vocabulary=vocabulary)
    return [found, torch.nn.functional.cross_entropy((x @ w.T)[:-1], labels[0, 1:])]


def test_context_ranks_share_a_loss_of_tokens_that_they_do_not_divide(two):
    for rank in two:
        torch.testing.assert_close(*rank["odd"])


@pytest.fixture(scope="module")
def four() -> list[dict]:
    return run_ranks(4, _of_four)


def _of_four(rank: int) -> dict:
    try:
        ww.apply(make_unseeded(rank == 3), mesh=Mesh(**BOTH).connect())
    except ValueError as error:
        return {"numbers": _spread_and_computed(FOUR), "unseeded": str(error)}
    return {}


def test_on_tensor_and_context_ranks_at_once_too(four):
    for rank in four:
        assert_as_one_rank(FOUR, rank["numbers"])


def test_every_rank_is_told_of_another_that_holds_other_numbers(four):
    """Rank 0 shares neither the tensor nor the context axis with rank 3."""
    for rank in four:
        assert "model.embed_tokens.weight: the ranks hold different" in rank["unseeded"]


def assert_as_one_rank(cases: list[tuple], rank: list[tuple]) -> None:
    for case, (found, _) in zip(cases, rank, strict=True):
        assert_all_close(found, computed(perturbed(case[0]), padding=case[3]))


EXACT = (
    ("gpt2", {"tp": 2}, CHUNKED),
    ("gpt2", {"cp": 2}, {"strategy": "ring"}),
    ("starcoder2", {"tp": 2}, SEQUENCE),
    ("starcoder2", {"cp": 2}, {"strategy": Links(1e9, 1e20)}),
)


def float64(model: nn.Module) -> dict:
    """Return logits and gradients of their squares: the loss of transformers is float32."""
    logits = model.train()(batch()["input_ids"], use_cache=False).logits
    logits.square().mean().backward()
    return {"logits": logits.detach()} | {n: whole(p.grad) for n, p in model.named_parameters()}


def test_where_transformers_computes_in_float64_so_do_ranks(two):
    for rank in two:
        for (family, *_), found in zip(EXACT, rank["float64"], strict=True):
            wanted = float64(perturbed(family).double())
            assert all(x.dtype == torch.float64 for x in found.values())
            assert_all_close(found, wanted, 1e-11)


CUT = ("gather_product", "product_scatter")  # products that hide messages of sharded tokens
SENDS = {"ring": "start_batch", "ulysses": "start_all_to_all", "gather": "start_all_gather"}


def test_overlap_and_strategy_reach_products_and_attention(two):
    """In an evaluating and in a training forward; a row's gradients are gathered."""
    forwards, rows = 2, 2
    for rank in two:
        for (family, sizes, options, _), (_, calls) in zip(TWO, rank["numbers"], strict=True):
            hidden = {name: n for name, n in calls.items() if name in CUT}
            layers = 3 if family == "qwen3" else 2
            columns = 1 if family == "gpt2" else 0  # the only one of its module
            gathers = layers * (forwards * columns + rows)
            sums = {"product_scatter": forwards * layers * rows}
            chunked = options.get("overlap") == "chunked"
            assert hidden == ({"gather_product": gathers} | sums if chunked else {})
            sent = [way for way, name in SENDS.items() if calls[name]]
            assert len(sent) == ("cp" in sizes)
            assert options.get("strategy") in (None, *sent)


def _without_sums(rank: int) -> list[dict]:
    models = [spread("qwen3", {"tp": 2}, SEQUENCE), spread("llama", {"cp": 2}, {})]
    with mock.patch.object(shards, "copy_to", lambda x, group: x):
        return [computed(model) for model in models]


def test_a_gradient_of_a_part_of_the_tokens_or_heads_would_be_seen(two):
    for family, found in zip(("qwen3", "llama"), two[0]["without sums"]):
        wanted = computed(perturbed(family))
        wrong = {n for n, x in wanted.items() if (found[n] - x).abs().max() > 0.1 * x.abs().max()}
        assert "model.layers.0.input_layernorm.weight" in wrong
        assert "model.embed_tokens.weight" not in wrong
        if family == "qwen3":
            assert "model.layers.1.self_attn.q_norm.weight" in wrong


# ---------------------------------------------------------------- 2. other uses of a model


def _lifetime(rank: int, folder: str) -> dict:
    """Save, clip, train, generate with and revert models on two ranks."""
    found = {}
    for family, sizes in (("llama", {"tp": 2}), ("gpt2", {"tp": 2}), ("qwen3", {"cp": 2})):
        model = spread(family, sizes, SEQUENCE)
        wanted = perturbed(family)
        model.save_pretrained(f"{folder}/{family}")
        if rank == 0:  # on others transformers writes nothing
            wanted.save_pretrained(f"{folder}/one {family}")
            files = [f"{folder}/{kind}{family}/model.safetensors" for kind in ("", "one ")]
            with safe_open(files[0], "pt") as ours, safe_open(files[1], "pt") as theirs:
                assert [*ours.keys()] == [*theirs.keys()]  # tied weights once
        again = type(wanted).from_pretrained(f"{folder}/{family}").state_dict()
        saved = all(torch.equal(again[n], x) for n, x in wanted.state_dict().items())
        if family == "gpt2":  # of its arguments
            given = {n: 2 * x for n, x in model.state_dict().items()}
            model.save_pretrained(f"{folder}/double", state_dict=given)
            again = type(wanted).from_pretrained(f"{folder}/double").state_dict()
            saved &= all(torch.equal(again[n], 2 * x) for n, x in wanted.state_dict().items())
        local = sum(shards.local(p).numel() for p in model.parameters())
        how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 6}
        prompt = batch()["input_ids"][:, :8]
        tokens = [m.eval().generate(prompt, **how) for m in (model, wanted)]
        norms = []
        for m in (model, wanted):
            optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
            m.train()(**batch()).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            optimizer.step()
            optimizer.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        trained = computed(model), computed(wanted)
        frozen = {n for i, (n, p) in enumerate(model.named_parameters()) if i % 3 == 0}
        for n in frozen:
            model.get_parameter(n).requires_grad_(False)
        ww.revert(model)
        plain = all(type(p) is nn.Parameter for p in model.parameters())
        plain &= frozen == {n for n, p in model.named_parameters() if not p.requires_grad}
        model.requires_grad_()
        traces = [n for m in model.modules() for n in vars(m) if n == NAME]
        each = [m._forward_pre_hooks | m._forward_hooks for m in model.modules()]
        hooks = [h for own in each for h in own.values() if "warpweave" in h.__module__]
        found[family] = {
            "saved": saved, "local": local, "tokens": tokens, "norms": norms, "trained": trained,
            "reverted": (plain, traces, hooks, computed(model)),
        }  # fmt: skip
    return found


def test_a_spread_model_saves_clips_trains_generates_and_is_put_back(two):
    for rank in two:
        for family, found in rank["lifetime"].items():
            assert found["saved"]  # under transformers' names, bit for bit
            whole = sum(p.numel() for p in perturbed(family).parameters())
            assert found["local"] < (1.01 if family == "qwen3" else 0.55) * whole  # cp cuts none
            assert torch.equal(*found["tokens"])
            torch.testing.assert_close(*found["norms"], rtol=1e-5, atol=0)
            assert_all_close(*found["trained"], limit=1e-4)  # after a step of AdamW
            *traces, numbers = found["reverted"]
            assert traces == [True, [], []]
            assert_all_close(numbers, found["trained"][1], limit=1e-4)


def _refused(rank: int) -> list[str]:
    said = []

    def refuse(run) -> None:
        try:
            run()
        except ValueError as error:
            said.append(str(error))

    mesh, other = Mesh(tp=2).connect(), Mesh(cp=2).connect()
    for family, more in (
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"intermediate_size": 57}),
        ("phi3", {"num_key_value_heads": 4, "intermediate_size": 57}),
        ("llama", {"attention_dropout": 0.1}),
        ("gpt2", {"resid_pdrop": 0.1}),
    ):
        model = perturbed(family, **more)
        refuse(lambda model=model: ww.apply(model, mesh=mesh))
        assert model.config._attn_implementation != "warpweave"
        assert not any("forward" in vars(m) for m in model.modules())
    for sp in (False, True):
        model = opt()
        refuse(lambda model=model, sp=sp: ww.apply(model, mesh=mesh, sequence_parallel=sp))
        assert not any("forward" in vars(m) for m in model.modules())
    refuse(lambda: ww.apply(make_unseeded(rank), mesh=mesh))
    refuse(lambda: ww.apply(perturbed("llama"), mesh=mesh, only=["norm"]))
    refuse(lambda: ww.apply(perturbed("llama"), mesh=mesh, overlap="much"))
    model = perturbed("llama")
    ww.apply(model, mesh=other)
    inputs = {name: x[:, :14] for name, x in batch().items()}
    refuse(lambda: model.train()(**inputs))
    model.set_attn_implementation("sdpa")  # over this rank's tokens only
    refuse(lambda: model.train()(**batch()))
    model = perturbed("gpt2")
    ww.apply(model, mesh=other)
    model.transformer.h[1].mlp.dropout.p = 0.1
    refuse(lambda: model.train()(**batch()))
    model = perturbed("llama")
    ww.apply(model, mesh=mesh)
    refuse(lambda: model(**{name: x.roll(rank, 1) for name, x in batch().items()}))
    model.model.layers[1].self_attn.attention_dropout = 0.1
    refuse(lambda: model.train()(**batch()))
    model.model.layers[1].self_attn.attention_dropout = 0.0
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 56)
    refuse(torch.no_grad()(lambda: model.eval()(**batch())))
    model = perturbed("llama")
    ww.apply(model, mesh=other)
    own = model.model.layers[1].self_attn
    model.model.layers[1].self_attn = perturbed("llama").model.layers[1].self_attn
    refuse(lambda: model.train()(**batch()))
    model.model.layers[1].self_attn = own
    model.model.layers[1] = perturbed("llama").model.layers[1]
    refuse(lambda: model.train()(**batch()))
    return said


def opt() -> nn.Module:
    """OPT's attention counts all heads, not those it receives."""
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=61, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4,
            word_embed_proj_dim=32, dropout=0.0, max_position_embeddings=32,
        )
    )  # fmt: skip


def make_unseeded(seed: int) -> nn.Module:
    config = perturbed("llama").config
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config)


REFUSED = (
    "model.layers.0.self_attn: 1 key heads are not divisible by tp (2)",
    "model.layers.0.mlp: 57 hidden units are not divisible by tp (2)",
    "model.layers.0.mlp: 57 hidden units are not divisible by tp (2)",
    "model.layers.0.self_attn: attention dropout is not supported with apply(mesh=...)",
    "transformer.h.0.attn.resid_dropout: dropout 0.1 is not supported with apply(mesh=...)",
    "(it may need all heads): shape '[3, -1, 4, 8]' is invalid for input of size 240",
    "its forward fails once the model is sharded (it may need all heads): OPTAttention: warpweave "
    "attention",
    "model.embed_tokens.weight: the ranks hold different values",
    "with a mesh, `only` must include attention, got norm",
    "overlap must be one of",
    "the number of tokens must be divisible by 4 for this mesh, got 14",
    "LlamaAttention: with apply(mesh=...), attn_implementation must be warpweave, got sdpa",
    "transformer.h.1.mlp.dropout: dropout 0.1 is not supported with apply(mesh=...)",
    "the ranks of tp and cp received different tokens",
    "LlamaAttention: attention dropout is not supported with apply(mesh=...)",
    "LlamaMLP.up_proj: a layer that is sharded over ranks was replaced",
    "LlamaAttention: an attention module was replaced after apply(mesh=...)",
    "LlamaModel.layers: layers were replaced or moved, but tokens stay sharded over ranks from the "
    "first to the last of the 2 layers",
)


def test_what_cannot_be_spread_is_refused_by_name(two):
    for rank in two:
        for message, wanted in zip(rank["refused"], REFUSED, strict=True):
            assert wanted in message
            assert "\n" not in message
            spread = "OPTForCausalLM cannot be spread over Mesh(dp=1, cp=1, tp=2, "
            assert message.startswith(spread) or "it may need" not in message


# ---------------------------------------------------------------- 3. rows that no rank holds whole


def _packed(rank: int) -> list[torch.Tensor]:
    """Run two packed documents with a window, over two context ranks."""
    model = mistral()
    ww.apply(model, mesh=Mesh(cp=2).connect())
    ids = batch()["input_ids"][:1]
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    logits = model.train()(ids, position_ids=positions, use_cache=False).logits
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


def mistral() -> nn.Module:
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=V, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
            sliding_window=4, pad_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def test_packed_documents_under_a_window_over_context_ranks_are_those_apart(two):
    model = mistral()
    parts = batch()["input_ids"][:1].split((7, 9), 1)
    logits = torch.cat([model.train()(part).logits for part in parts], 1)
    logits.square().sum().backward()
    wanted = [logits.detach(), *(p.grad for p in model.parameters())]
    for rank in two:
        for x, y in zip(rank["packed"], wanted, strict=True):
            assert (x - y).abs().max() <= 1e-5 * y.abs().max()


def _messages_of_norms() -> list[list[tuple[str, int]]]:
    """Return the messages, with their sizes, in the forward and backward of a norm with sharded
    tokens, and of one with sharded features."""
    model, sent = spread("olmo2", {"tp": 2}, SEQUENCE), []
    spied = [(dist, "all_reduce"), (dist, "all_to_all_single"), (collectives, "all_gather_into")]
    spied.append((collectives, "reduce_scatter_into"))

    def spy(name, function):
        def called(x, *args, **options):
            sent.append((name, x.numel()))
            return function(x, *args, **options)

        return called

    layer, found = model.model.layers[0], []
    with contextlib.ExitStack() as patched:
        for where, name in spied:
            spying = mock.patch.object(where, name, spy(name, getattr(where, name)))
            patched.enter_context(spying)
        shapes = ((2, 8, 32), (2, 16, 16))
        for norm, shape in zip((layer.post_attention_layernorm, layer.self_attn.q_norm), shapes):
            y = norm(torch.ones(shape, requires_grad=True))
            found.append(sent[:])
            sent.clear()
            y.square().sum().backward()
            found.append(sent[:])
            sent.clear()
    return found


def test_norms_of_cut_tokens_or_features_gather_nothing(two):
    """For sharded tokens the weight gradient is summed. For sharded features, all heads of a query
    at once, a number per token is sent in each direction. Results are compared above."""
    number_per_token = [("all_reduce", 2 * 16)]
    for rank in two:
        of_tokens, of_features = rank["messages"][:2], rank["messages"][2:]
        assert of_tokens == [[], [("all_reduce", 32)]]
        assert of_features == [number_per_token, number_per_token]


def test_an_attention_that_reads_positions_is_given_its_own():
    layout = SequenceLayout(8, 2)
    positions, pair = torch.arange(8)[None], (torch.randn(1, 8, 4), torch.randn(1, 8, 4))
    own = functools.partial(own_positions, layout=layout, rank=1)
    assert own("position_ids", positions).tolist() == [layout.positions(1).tolist()]
    for kind in (tuple, list):
        found = own("position_embeddings", kind(pair))
        assert type(found) is tuple
        for x, y in zip(found, pair, strict=True):
            assert torch.equal(x, layout.shard(y, 1, dim=1))
    assert own("position_embeddings", None) is None
    several = torch.arange(48).view(3, 2, 8)  # of images: three numbers per token
    assert torch.equal(own("position_ids", several), several[..., layout.positions(1)])
    assert own("position_ids", None) is None
    assert own("attention_mask", positions) is positions


def with_lora(model: nn.Module, target: str = "lm_head") -> nn.Module:
    import peft

    torch.manual_seed(4)
    config = peft.LoraConfig(r=3, target_modules=[target], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def _lora(rank: int) -> tuple:
    mesh, model = Mesh(tp=2).connect(), with_lora(perturbed("llama"))
    ww.apply(model.get_base_model(), mesh=mesh, sequence_parallel=True)
    out = model.train()(**batch())
    out.loss.backward()
    grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return out.logits is None, out.loss.detach(), grads


def test_lora_on_the_head_is_in_the_loss_over_a_cut_vocabulary(two):
    pytest.importorskip("peft", reason="an extra of its own")
    model = with_lora(perturbed("llama"))
    loss = model.train()(**batch()).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(grads) == 2
    for rank in two:
        fused, found, found_grads = rank["lora"]
        assert fused
        assert_all_close({"loss": found, **found_grads}, {"loss": loss.detach(), **grads})
