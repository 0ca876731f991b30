"""GPT: equal to the plain torch GPT, whole and in parts on every mesh; an ordinary module."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from close import assert_all_close, assert_close_f64, assert_same_bits, relative_error
from ranks import run_ranks
from refused import check
from threads import run_threads
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from warpweave.kernels.rope import RopeScaling
from warpweave.model.config import ParallelPlan
from warpweave.model.gpt import GPT, PRESETS, GPTConfig, _rounded
from warpweave.model.plain import plain_gpt_logits, plain_gpt_loss, plain_init, plain_shapes
from warpweave.parallel.context import Links
from warpweave.parallel.context.explain import explain
from warpweave.parallel.context.explain import table as cost_table
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.shard import ParamRecord
from warpweave.prove.expected import plain_config as _plain

RTOL = 1e-12
F64 = {"dtype": torch.float64}
SIZES = {"vocab_size": 37, "seq_len": 12, "layers": 3, "width": 12, "heads": 6}
LLAMA = {"positions": "rope", "norm": "rms", "activation": "swiglu", "bias": False, "tied": False}
CONFIGS = {
    "gpt2": GPTConfig(**SIZES, norm_eps=0.03),
    "llama": GPTConfig(**SIZES, **LLAMA, kv_heads=2, hidden=18, norm_eps=0.02, rope_theta=50.0),
    "between": GPTConfig(
        **SIZES, kv_heads=2, hidden=6, positions="rope", norm="rms", tied=True, rope_theta=9.0
    ),
    "qwen": GPTConfig(
        **SIZES, **LLAMA, kv_heads=2, hidden=6, norm_eps=0.02, rope_theta=50.0, head_size=4,
        qkv_bias=True, qk_norm=True, windows=(4, 0), rope_scaling=RopeScaling("yarn", 4.0, 8),
        sinks=True,
    ),
    "gemma": GPTConfig(
        **SIZES | LLAMA | {"norm": "rms1p", "activation": "geglu", "tied": True}, kv_heads=2,
        hidden=6, norm_eps=0.02, head_size=4, qk_norm=True, windows=(4, 0), norm_place="sandwich",
        attention_scale=0.7, softcap=1.5, logit_softcap=2.0, embedding_scale=3.3,
        rope_theta=50.0, local_rope_theta=9.0, rope_scaling=RopeScaling("linear", 3.0),
    ),
    "olmo": GPTConfig(
        **SIZES, **LLAMA, kv_heads=2, hidden=18, norm_eps=0.02, norm_place="post", qk_norm=True,
        qk_norm_whole=True,
    ),
    "primer": GPTConfig(**SIZES, kv_heads=2, hidden=6, norm_eps=0.02, activation="relu2"),
    "layer norm without bias": GPTConfig(**SIZES, hidden=6, norm_eps=0.02, norm_bias=False),
    "biases of norms alone": GPTConfig(**SIZES, hidden=6, bias=False, norm_bias=True),
}  # fmt: skip
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
DROPPED = {name: dataclasses.replace(c, dropout=0.2) for name, c in CONFIGS.items()}


def _tokens(B: int = 4, S: int = 12, valid: bool = False) -> tuple[Tensor, Tensor]:
    tokens, labels = torch.randint(0, 37, (2, B, S), generator=torch.Generator().manual_seed(5))
    if not valid:
        labels[0, 3:7] = -100
        labels[1] = -100
    return tokens, labels


def _scattered(config: GPTConfig, **options) -> tuple[GPT, dict[str, Tensor]]:
    """Return this rank's GPT with no parameter at its initial value, and whole parameters."""
    names = [field.name for field in dataclasses.fields(ParallelPlan) if field.name in options]
    plan = ParallelPlan(**{name: options.pop(name) for name in names})
    gpt, params = GPT(config, plan=plan, **F64 | options), {}
    for i, (name, shape) in enumerate(plain_shapes(_plain(config)).items()):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(i), **F64) * 0.3
        params[name] = (whole + name.endswith("norm.weight")).requires_grad_()
    records = gpt.parameter_records()
    with torch.no_grad():
        for name, p in gpt.named_parameters():
            p.copy_(records[name].slice(params[name], gpt.mesh.coords))
    return gpt, params


def _truth(config: GPTConfig, params: dict[str, Tensor], gpt: GPT, *batch: Tensor) -> list[Tensor]:
    """Return the plain model's mean loss and its gradients, in the order of those of `gpt`."""
    total, count = plain_gpt_loss(params, *batch, _plain(config))
    loss = total / max(count, 1)
    whole = [params[name] for name, _ in gpt.named_parameters()]
    return [loss.detach(), *torch.autograd.grad(loss, whole)]


def _results(gpt: nn.Module, *batch: Tensor, run=None) -> list[Tensor]:
    """Return the loss and all gradients; earlier gradients are discarded."""
    gpt.zero_grad()
    loss = gpt(*batch, seed=0) if run is None else run(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in gpt.parameters())]


# ------------------------------------------------------------------- configurations


def test_unknown_recomputation_and_layout_are_refused():
    for given, words in (
        ({"recompute": "all"}, "^recompute must be one of none, selective, full, got 'all'$"),
        ({"layout": "spiral"}, "^layout must be one of .*, got 'spiral'$"),
    ):
        with pytest.raises(ValueError, match=words):
            GPT(CONFIGS["gpt2"], plan=ParallelPlan(**given))


def test_the_plans_words_arrive_in_every_block():
    plan = ParallelPlan(cp_strategy="gather", recompute="selective", overlap="chunked")
    full = ParallelPlan(recompute="full")
    expected = (
        (plan, "gather", "up", "chunked"), (ParallelPlan(), "auto", None, "bulk"),
        (full, "auto", None, "bulk"),
    )  # fmt: skip
    for chosen, strategy, recomputed, overlap in expected:
        gpt = GPT(CONFIGS["gpt2"], plan=chosen, device="meta")
        for block in gpt.blocks.values():
            assert (block.attention.strategy, block.mlp.recompute) == (strategy, recomputed)
            products = block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down
            assert all(layer.overlap == overlap for layer in (*products, gpt.loss))
        whole = GPT(CONFIGS["gpt2"], plan=chosen).segments()[0]
        assert [s.recompute for s in whole] == [False, *[chosen is full] * 3, False]
        told = mock.Mock(side_effect=InterruptedError)
        patched = mock.patch("warpweave.model.gpt.column_parallel_linear", told)
        with patched, pytest.raises(InterruptedError):
            gpt.logits(torch.empty(3, gpt.config.width, device="meta"), None)
        assert told.call_args.kwargs["overlap"] == overlap


def _measured(rank: int) -> None:
    plan, mesh = ParallelPlan(cp_strategy="measured"), Mesh(cp=2).connect()
    for links, name in ((Links(1e9, 1e8), "ring"), (Links(1e9, 1e20), "ulysses")):
        with mock.patch("warpweave.model.gpt.measure_links", return_value=links) as measured:
            gpt = GPT(CONFIGS["gpt2"], mesh=mesh, plan=plan, **F64)
        (group, x), _ = measured.call_args
        assert (group, x.shape, x.dtype) == (mesh.group("cp"), (1, 6, 6, 2), torch.float64)
        assert {block.attention.strategy for block in gpt.blocks.values()} == {links}
        rows = gpt.explain_context(3).splitlines()[2:]  # one for all layers, because they are equal
        assert [row.split()[0] for row in rows if "auto (least exposed time)" in row] == [name]


def _explained(rank: int) -> None:
    """Explain layers with and without a window, in separate rows, for this many samples."""
    plan, mesh, links = ParallelPlan(cp_strategy="measured"), Mesh(cp=2).connect(), Links(1e9, 1e10)
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 4, "itemsize": 8, "links": links}
    with mock.patch("warpweave.model.gpt.measure_links", return_value=links):
        gpt = GPT(CONFIGS["qwen"], mesh=mesh, plan=plan, **F64)
    for batch in (1, 3):
        of_layers = [
            next(c for c in explain(gpt.layout, **sizes, batch=batch, window=window) if c.auto)
            for window in (4, None)
        ]
        assert of_layers[0] != of_layers[1]
        lines = cost_table(of_layers).splitlines()
        assert gpt.explain_context(batch).splitlines()[1:] == lines


def test_the_costs_of_attention_are_told_of_each_kind_of_layer():
    run_ranks(2, _explained)


@pytest.mark.parametrize(
    ("length", "tp", "rows", "heads"),
    [(6, 1, 3, 6), (6, 3, 3, 2), (4096, 2, 2048, 3), (9000, 1, 2048, 6)],
)
def test_links_are_measured_with_a_message_of_a_ranks_own_rows_and_heads(length, tp, rows, heads):
    """The message has at most 2048 rows."""
    part = mock.Mock(config=CONFIGS["qwen"], **{
        "mesh.device_mesh.device_type": "cpu", "mesh.group": str, "mesh.size": {"tp": tp}.get,
        "plan.cp_strategy": "measured", "layout.local_len": length // 2,
    })  # fmt: skip
    with mock.patch("warpweave.model.gpt.measure_links") as measured:
        GPT._strategy(part, torch.bfloat16)
    (group, x), _ = measured.call_args
    assert (group, x.shape, x.dtype) == ("cp", (1, rows, heads, 4), torch.bfloat16)


def test_a_plan_may_let_ranks_choose_by_their_measured_speeds():
    run_ranks(2, _measured)
    unasked = mock.patch("warpweave.model.gpt.measure_links", side_effect=InterruptedError)
    with unasked:  # a single rank has no links
        alone = GPT(CONFIGS["gpt2"], plan=ParallelPlan(cp_strategy="measured"), device="meta")
    assert alone.strategy == "auto"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200), ("llama-1b", 1_235_814_400), ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
    ],
)  # fmt: skip
def test_presets_have_the_published_number_of_parameters(name, count):
    records = GPT(PRESETS[name], device="meta").parameter_records()
    assert sum(math.prod(record.shape) for record in records.values()) == count


# ------------------------------------------------------------------- parameters


@EACH
def test_names_and_shapes_are_those_of_the_plain_model(config):
    gpt = GPT(config, device="meta")
    shapes = plain_shapes(_plain(config))
    assert {name: tuple(p.shape) for name, p in gpt.named_parameters()} == shapes
    assert {name: r.shape for name, r in gpt.parameter_records().items()} == shapes
    assert list(gpt.state_dict()) == [name for name, _ in gpt.named_parameters()]


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_initial_values_are_the_plain_models_whatever_was_drawn_before(config, dtype):
    torch.manual_seed(int(torch.randint(1000, ())))
    params = plain_init(_plain(config), 11, dtype)
    for name, p in GPT(config, seed=11, dtype=dtype).named_parameters():
        assert p.dtype == dtype
        assert torch.equal(p, params[name]), name


def test_parameters_without_data_are_not_drawn():
    """On the meta device, and fake tensors, also after their mode has ended."""
    meta = GPT(CONFIGS["gpt2"], device="meta")
    with FakeTensorMode():
        fake = GPT(CONFIGS["gpt2"])
    for gpt in (meta, fake):
        before = [(p, p.device) for p in gpt.parameters()]
        with mock.patch.object(ParamRecord, "draw", side_effect=AssertionError("drawn")):
            gpt.initialise(1)
        assert before == [(p, p.device) for p in gpt.parameters()]


@EACH
@pytest.mark.parametrize("sizes", [Mesh(tp=2, pp=3), Mesh(pp=2), Mesh(dp=2, cp=3, tp=2)])
def test_every_part_of_every_mesh_starts_as_its_slice_of_the_plain_model(config, sizes):
    params, held = plain_init(_plain(config), 11), set()
    for rank in range(sizes.world):
        mesh = sizes.seen_from(rank)
        gpt = GPT(config, mesh=mesh, seed=11)
        records = gpt.parameter_records()
        for name, p in gpt.named_parameters():
            assert torch.equal(p, records[name].slice(params[name], mesh.coords)), name
            held.add((name, mesh.index("tp")))
    assert held == {(name, i) for name in params for i in range(sizes.tp)}


@pytest.mark.parametrize(("layers", "stages"), [(3, 2), (7, 4), (5, 5), (10, 3), (4, 1)])
def test_uneven_stages_hold_every_layer_once_and_in_order(layers, stages):
    config = GPTConfig(8, 4, layers, 4, 1)
    meshes = [Mesh(pp=stages).seen_from(rank) for rank in range(stages)]
    parts = [GPT(config, mesh=mesh, device="meta") for mesh in meshes]
    blocks = [int(i) for part in parts for i in part.blocks]
    assert blocks == list(range(layers))
    sizes = [len(part.blocks) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert [part.first for part in parts] == [True] + [False] * (stages - 1)


def test_nothing_on_meta_but_after_to_empty_the_seed_gives_all():
    gpt = GPT(CONFIGS["llama"], device="meta", seed=3)
    assert all(p.is_meta for p in gpt.parameters())
    gpt.to_empty(device="cpu").initialise(4)
    assert_same_bits(list(gpt.parameters()), list(GPT(CONFIGS["llama"], seed=4).parameters()))


# ------------------------------------------------------------------- one device


@EACH
@pytest.mark.parametrize("length", [12, 7, 1])
def test_logits_loss_and_gradients_are_the_plain_models(config, length):
    gpt, params = _scattered(config)
    tokens, labels = _tokens(S=length)
    assert_close_f64(gpt(tokens), plain_gpt_logits(params, tokens, _plain(config)), RTOL)
    results = _results(gpt, tokens, labels)
    assert results[0].shape == ()
    assert_all_close(results, _truth(config, params, gpt, tokens, labels))


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "gelu_erf"}, {"windows": (0, 5, 3)}, {"norm": "rms1p"}, {"softcap": 1.0},
        {"attention_scale": 0.3}, {"sinks": True}, {"logit_softcap": 0.5}, {"embedding_scale": 1.5},
        {"rope_scaling": RopeScaling("linear", 4.0)},
        {"rope_scaling": RopeScaling("ntk", 4.0)},
        {"rope_scaling": RopeScaling("llama3", 4.0, 16, low=0.5, high=2.0)},
        {"rope_scaling": RopeScaling("yarn", 4.0, 8, truncate=False)},
        {"rope_scaling": RopeScaling("yarn", 4.0, 8, attention_factor=0.7)},
    ],
    ids=lambda change: str(*change.values()),
)  # fmt: skip
def test_every_style_that_a_model_may_have_is_the_plain_models_and_counts(change):
    base = dataclasses.replace(CONFIGS["between"], head_size=6)
    config = dataclasses.replace(base, **change)
    gpt, params = _scattered(config)
    tokens, _ = _tokens()
    logits = plain_gpt_logits(params, tokens, _plain(config))
    assert_close_f64(gpt(tokens), logits, RTOL)
    assert relative_error(plain_gpt_logits(params, tokens, _plain(base)), logits) > 1e-6


def test_a_layer_with_a_window_turns_by_the_local_base():
    config = dataclasses.replace(CONFIGS["gemma"], local_rope_theta=None)
    gpt, params = _scattered(CONFIGS["gemma"])
    tokens, _ = _tokens()
    other = plain_gpt_logits(params, tokens, _plain(config))
    assert relative_error(gpt(tokens), other) > 1e-3
    assert CONFIGS["gemma"].rope(local=True) == (9.0, None)
    x, block = torch.randn(2, 12, 12, **F64), gpt.blocks["0"]  # alone it makes a separate table
    context = gpt.micro_batch(tokens[:2], tokens[:2], torch.ones(())).context
    assert_close_f64(block(x).flatten(0, 1), block(x.flatten(0, 1), context), RTOL)


def test_a_config_comes_back_from_json_and_old_ones_have_the_defaults():
    for config in CONFIGS.values():
        assert GPTConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
        now = dataclasses.fields(config)  # a newer field may be missing
        added = {f.name for f in now if getattr(config, f.name) == f.default}
        old = {k: v for k, v in dataclasses.asdict(config).items() if k not in added}
        assert len(old) < len(now)
        assert GPTConfig(**old) == config


@pytest.mark.parametrize("config", DROPPED.values(), ids=DROPPED.keys())
def test_training_drops_what_the_plain_model_drops_and_eval_nothing(config):
    gpt, params = _scattered(config)
    batch = _tokens()
    truth = _truth(config, params, gpt, *batch)
    assert_all_close(_results(gpt, *batch), truth)
    gpt.eval()
    still, *_ = _truth(dataclasses.replace(config, dropout=0.0), params, gpt, *batch)
    assert_close_f64(gpt(*batch), still, RTOL)
    assert relative_error(truth[0], still) > 1e-5
    gpt.train()
    assert_close_f64(gpt(*batch, seed=0), truth[0], RTOL)


def test_dropout_needs_a_seed_and_follows_it_and_the_samples():
    gpt, _ = _scattered(DROPPED["gpt2"])
    batch = _tokens()
    check(lambda: gpt(*batch), "^dropout = 0.2 needs a seed; pass a different one in every step")
    ids = torch.arange(len(batch[0])) + 100
    losses = [gpt(*batch, seed=0), gpt(*batch, seed=1), gpt(*batch, seed=0, sample_ids=ids)]
    assert len({loss.item() for loss in losses}) == 3
    assert gpt(*batch, seed=1) == losses[1]
    gpt.eval()
    gpt(*batch)


def test_micro_batches_with_sample_ids_and_a_seed_add_up_to_the_plain_batch():
    config = DROPPED["gpt2"]
    gpt, params = _scattered(config)
    tokens, labels = _tokens(S=7)  # shorter than seq_len, by which tokens are numbered
    ids = torch.tensor([9, 2, 2**33, 5])
    total, count = plain_gpt_loss(params, tokens, labels, _plain(config), seed=6, sample_ids=ids)
    loss = torch.zeros((), **F64)
    for i in range(4):
        given = tokens[i : i + 1], labels[i : i + 1], torch.tensor(count)
        batch = gpt.micro_batch(*given, sample_ids=ids[i : i + 1], seed=6)
        x = gpt.embed(None, batch)
        for block in gpt.blocks.values():
            x = block(x, batch.context)
        loss = loss + gpt.head_loss(x, batch)
    assert_close_f64(loss, total / count, RTOL)


def test_a_balanced_plan_cuts_every_micro_batch_by_its_documents():
    """Seen from each of three context ranks without their groups: a micro-batch needs none."""
    tokens, labels = _tokens()
    plan, sizes = ParallelPlan(layout="balanced", sequence_parallel=False), Mesh(cp=3)
    documents = torch.tensor([[0, 8, 12]]).expand(len(tokens), -1).clone()
    shards = []
    for rank in range(3):
        mesh = sizes.seen_from(rank)
        gpt = GPT(CONFIGS["llama"], mesh=mesh, plan=plan, device="meta")
        batch = gpt.micro_batch(tokens, labels, torch.ones(()), documents=documents)
        layout = batch.context.layout
        assert layout == gpt.layout.for_documents(documents) != gpt.layout
        assert gpt.micro_batch(tokens, labels, torch.ones(())).context.layout == gpt.layout
        assert torch.equal(batch.positions[:4], layout.positions(rank) % 8)
        shards.append(batch.tokens.view(len(tokens), -1))
    assert torch.equal(layout.unshard(shards, 1), tokens)
    assert max(layout.pairs(documents)) < 0.7 * max(gpt.layout.pairs(documents))


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped", "balanced"])
def test_a_layer_drops_by_the_number_of_the_token_wherever_it_lies(kind):
    """For any cut and any documents of its sample, a token's mask depends only on its number."""
    tokens, labels = _tokens()
    plan = ParallelPlan(layout=kind, sequence_parallel=False)
    config = dataclasses.replace(CONFIGS["gpt2"], dropout=0.1)
    ids = torch.tensor([2**40, 3, 1, 7])
    wanted = ids[:, None] * 12 + torch.arange(12)
    each = torch.tensor([[0, 5, 5, 12], [0, 1, 12, 12], [0, 0, 4, 12], [0, 12, 12, 12]])
    for documents, sizes in ((None, Mesh(cp=3)), (each, Mesh(cp=3)), (each, Mesh(cp=2))):
        shards = []
        for rank in range(sizes.cp):
            mesh = sizes.seen_from(rank)
            gpt = GPT(config, mesh=mesh, plan=plan, device="meta")
            given = {"sample_ids": ids, "documents": documents}
            context = gpt.micro_batch(tokens, labels, torch.ones(()), **given).context
            shards.append(context.token_ids.view(4, -1))
        assert torch.equal(context.layout.unshard(shards, 1), wanted)


@EACH
def test_packed_documents_are_each_computed_as_if_alone(config):
    """Logits and gradients; boundaries of one or of every sample, including empty documents."""
    gpt, _ = _scattered(config)
    tokens, labels = _tokens()
    bounds = torch.tensor(
        [[0, 5, 5, 9, 12], [0, 1, 7, 12, 12], [0, 12, 12, 12, 12], [0, 0, 4, 6, 12]]
    )
    for documents in (bounds, bounds[1]):
        each = documents.expand(len(tokens), -1)
        logits = gpt(tokens, documents=documents)
        for row, ends in enumerate(each.tolist()):
            for a, b in pairwise(ends):
                if a < b:
                    alone = gpt(tokens[row : row + 1, a:b])[0]
                    assert_close_f64(logits[row, a:b], alone, RTOL)
    loss = gpt(tokens, labels, documents=bounds)
    valid, sums = int((labels != -100).sum()), torch.zeros((), **F64)
    for row, ends in enumerate(bounds.tolist()):
        for a, b in pairwise(ends):
            here = labels[row : row + 1, a:b]
            if (count := int((here != -100).sum())) > 0:
                sums = sums + gpt(tokens[row : row + 1, a:b], here) * count / valid
    assert_close_f64(loss, sums, RTOL)
    assert_all_close(*(torch.autograd.grad(x, [*gpt.parameters()]) for x in (loss, sums)))
    apart = torch.stack((bounds, bounds), 1)  # keys: their positions count from those of queries
    for wrong, shape in ((bounds[:3], r"\(3, 5\)"), (apart, r"\(4, 2, 5\)")):
        with pytest.raises(ValueError, match=rf"or \[4, n \+ 1\] for n documents, got {shape}"):
            gpt(tokens, documents=wrong)
    with pytest.raises(ValueError, match=r"documents must end at 12, the end .* got \[0, 5, 48\]"):
        gpt.micro_batch(tokens, labels, valid, documents=torch.tensor([0, 5, 48]))


def test_a_batch_without_labels_has_loss_zero():
    gpt, _ = _scattered(CONFIGS["gpt2"])
    tokens, labels = _tokens()
    loss, *grads = _results(gpt, tokens, torch.full_like(labels, -100))
    assert loss == 0
    assert not any(g.any() for g in grads)


def test_inputs_that_do_not_fit_are_refused():
    gpt, ids = GPT(CONFIGS["gpt2"]), torch.zeros(2, 3, dtype=torch.int64)
    check(lambda: gpt(torch.full((1, 3), 37)), r"an id is outside \[0, 37\)", RuntimeError)
    zeros, floats = ids.new_zeros, torch.tensor([0.0, 3.0])
    for given, words in (
        ({"tokens": zeros(1, 13)}, "^a sequence has 13 tokens, but the model's limit is 12$"),
        ({"tokens": ids.float()}, "tokens must be an int64 or int32 tensor, got torch.float32"),
        ({"tokens": [[1, 2]]}, "tokens must be a tensor of integers, got list"),
        ({"tokens": ids[0]}, r"tokens must have shape \[batch, sequence\], got \[3\]"),
        ({"labels": ids.double()}, "labels must be an int64 or int32 tensor, got torch.float64"),
        ({"labels": zeros(2, 4)}, r"labels must have the tokens' shape \[2, 3\], got \[2, 4\]"),
        ({"labels": ids.view(6)}, r"labels must have the tokens' shape \[2, 3\], got \[6\]"),
        (
            {"sample_ids": ids[:, 0].half()},
            "sample_ids must be an int64 or int32 tensor, got torch.float16",
        ),
        (
            {"sample_ids": zeros(1)},
            r"sample_ids must have shape \[2\], one per sequence, got \[1\]",
        ),
        ({"documents": floats}, "documents must be int32 or int64"),
    ):
        check(lambda given=given: gpt(**{"tokens": ids} | given), words)
    part = GPT(CONFIGS["gpt2"], mesh=Mesh(pp=2).seen_from(0))
    check(lambda: part(ids), "^forward needs the whole model")
    cut, plain = (GPT(CONFIGS["gpt2"], mesh=Mesh(tp=2).seen_from(1), **more)
                  for more in ({"plan": ParallelPlan()}, {}))  # fmt: skip
    assert (plain.own_rows(8), cut.own_rows(8)) == (slice(0, 8), slice(4, 8))
    check(lambda: cut.own_rows(7), r"7 tokens of a micro-batch are not divisible by tp \(2\)")


# ------------------------------------------------------------------- an ordinary module


@pytest.mark.parametrize("config", DROPPED.values(), ids=DROPPED.keys())
def test_recomputing_or_checkpointing_changes_no_bit(config):
    batch = _tokens()
    gpt, _ = _scattered(config)
    expected = _results(gpt, *batch)
    assert_same_bits(_results(_scattered(config, recompute="selective")[0], *batch), expected)
    again = _results(gpt, *batch, run=lambda *b: checkpoint(gpt, *b, use_reentrant=False, seed=0))
    assert_same_bits(again, expected)


# inductor compiles a llama; test_block.py compiles blocks with recomputation.
def test_it_compiles_without_a_graph_break():
    gpt, _ = _scattered(dataclasses.replace(DROPPED["gpt2"], layers=1))
    compiled = torch.compile(gpt, fullgraph=True, backend="aot_eager")
    found = _results(gpt, *_tokens(), run=lambda *b: compiled(*b, seed=0))
    assert_all_close(found, _results(gpt, *_tokens()))


def test_inductor_gives_the_same_numbers():
    """Torch's default backend, in float32, forward and backward. It writes C++ and raises if there
    is no compiler, in this test as well."""
    # No worker outlives the test; no search for the widest vectors of this CPU by compiling.
    # Unoptimized C++ compiles faster.
    options = {"compile_threads": 1, "cpp.vec_isa_ok": False, "aot_inductor.debug_compile": True}
    config = dataclasses.replace(CONFIGS["llama"], layers=1)
    gpt, params = _scattered(config, dtype=torch.float32)
    batch = _tokens(S=7)
    with fresh_cache(), inductor.patch(options):  # compiled here, not cached
        compiled = _results(gpt, *batch, run=torch.compile(gpt, fullgraph=True))
    for results in (compiled, _results(gpt, *batch)):
        assert_all_close(results, _truth(config, params, gpt, *batch), 1e-5)


def test_copies_and_loaded_states_compute_the_same():
    for config in CONFIGS.values():
        gpt, params = _scattered(config)
        expected = _results(gpt, *_tokens())
        twin, late = copy.deepcopy(gpt), GPT(config, **F64, device="meta").to_empty(device="cpu")
        late.load_state_dict({name: p.detach() for name, p in params.items()}, strict=True)
        with torch.no_grad():
            for p in gpt.parameters():
                p.zero_()
        assert_same_bits(_results(twin, *_tokens()), expected)
        assert_same_bits(_results(late, *_tokens()), expected)


@EACH
def test_autocast_computes_in_bf16_and_keeps_float32_gradients(config):
    gpt = GPT(config)
    tokens, labels = _tokens()
    truth = _results(gpt, tokens, labels)
    with torch.autocast("cpu", torch.bfloat16):
        assert gpt(tokens).dtype == torch.bfloat16
        low = _results(gpt, tokens, labels)
    assert low[0].dtype == torch.float32
    for a, b in zip(low, truth, strict=True):
        assert a.dtype == torch.float32
        error = (a - b).norm() / b.norm().clamp(min=1e-4)  # key biases have no gradient
        assert error < 0.03
    assert not torch.equal(low[0], truth[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_angles_are_never_rounded_to_the_models_dtype(dtype):
    gpt, (tokens, labels) = GPT(CONFIGS["llama"], dtype=dtype), _tokens()
    for table in gpt.micro_batch(tokens, labels, torch.ones(())).context.rope:
        assert table.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_factor_is_rounded_as_a_tensor_of_its_dtype(dtype):
    draws = torch.rand(300, generator=torch.Generator().manual_seed(1), **F64)
    for x in (2 ** (16 * draws - 8)).tolist() + [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.3, 45.25]:
        assert _rounded(x, dtype) == torch.tensor(x, dtype=dtype).item()


def test_rotary_tables_are_taken_from_a_micro_batch_of_the_same_length_alone():
    gpt, (tokens, labels) = GPT(CONFIGS["gemma"], **F64), _tokens()
    ones = torch.ones(())
    first = gpt.micro_batch(tokens, labels, ones)
    again = gpt.micro_batch(tokens[:2], labels[:2], ones, like=first)
    short = gpt.micro_batch(tokens[:, :7], labels[:, :7], ones, like=first)
    for name in ("rope", "local_rope"):
        tables = [getattr(batch.context, name) for batch in (first, again, short)]
        assert tables[0] is tables[1]
        for whole, part in zip(tables[0], tables[2], strict=True):
            assert torch.equal(whole[:7], part)


def test_gemma_embedding_scale_is_rounded_to_the_embedding_dtype():
    gpt, (tokens, labels) = GPT(CONFIGS["gemma"], dtype=torch.bfloat16).eval(), _tokens()
    x = gpt.embed(None, gpt.micro_batch(tokens, labels, torch.ones(())))
    factor = torch.tensor(CONFIGS["gemma"].embedding_scale, dtype=torch.bfloat16)
    assert torch.equal(x, gpt.embedding.weight[tokens.flatten()] * factor)


@EACH
def test_autocast_leaves_a_float64_model_alone(config):
    gpt, (tokens, labels) = GPT(config, **F64), _tokens()
    truth = _results(gpt, tokens, labels)
    with torch.autocast("cpu", torch.bfloat16):
        found = _results(gpt, tokens, labels)
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sizes", [Mesh(), Mesh(pp=2)], ids=("whole", "cut"))
def test_each_parameter_is_in_one_unit_however_many_digits_its_block_has(sizes, tied):
    config = dataclasses.replace(CONFIGS["gpt2"], layers=24, tied=tied)
    for rank in range(sizes.world):
        gpt = GPT(config, mesh=sizes.seen_from(rank))
        chains = gpt.segments().values()
        units = {id(u): u for chain in chains for segment in chain for u in segment.units}
        found = [record.name for unit in units.values() for record, _ in unit.params]
        assert sorted(found) == sorted(name for name, _ in gpt.named_parameters())


# ------------------------------------------------------------------- several ranks


def _check_mesh(sizes: Mesh, config: GPTConfig, sp: bool) -> None:
    """Compare loss shares, logits and gradients of this rank with the plain model."""
    mesh = sizes.connect()
    gpt, params = _scattered(config, mesh=mesh, sequence_parallel=sp)
    tokens, labels = _tokens(B=3)  # a tensor rank's rows end within a sample
    loss, *grads = _truth(config, params, gpt, tokens, labels)
    logits = plain_gpt_logits(params, tokens, _plain(config))
    share, *_ = _results(gpt, tokens, labels)
    if mesh.group("cp") is not None:
        dist.all_reduce(share, group=mesh.group("cp"))
    assert_close_f64(share, loss, RTOL)
    records, index = gpt.parameter_records(), mesh.index("tp")
    for (name, p), grad in zip(gpt.named_parameters(), grads, strict=True):
        if mesh.group("cp") is not None:
            dist.all_reduce(p.grad, group=mesh.group("cp"))
        if records[name].partial:
            dist.all_reduce(p.grad, group=mesh.group("tp"))
        assert_close_f64(p.grad, records[name].slice(grad, mesh.coords), RTOL)
    mine = gpt.layout.shard(logits, mesh.index("cp"), 1)
    columns = gpt(tokens, seed=0)
    start = index * columns.shape[-1]
    mine = mine[..., start : start + columns.shape[-1]]
    assert_close_f64(columns[..., : mine.shape[-1]], mine, RTOL)


def _on_ranks(rank: int, world: int) -> None:
    gpt2, llama = DROPPED["gpt2"], DROPPED["llama"]
    if world == 2:
        _check_mesh(Mesh(tp=2), gpt2, True)
        _check_mesh(Mesh(tp=2), llama, False)
        _check_mesh(Mesh(cp=2), gpt2, False)
    elif world == 3:
        _check_mesh(Mesh(tp=3), gpt2, False)
        _check_mesh(Mesh(tp=3), dataclasses.replace(llama, kv_heads=3), True)
        _check_mesh(Mesh(cp=3), llama, False)
    else:
        _check_mesh(Mesh(tp=2, cp=2), llama, True)


def _train(gpt: nn.Module, tokens: Tensor, labels: Tensor) -> list[Tensor]:
    """Return losses of three AdamW steps (each of two halves), then whole parameters."""
    optimizer, losses = torch.optim.AdamW(gpt.parameters(), lr=0.01, eps=0.01), []
    for _ in range(3):
        for half in range(2):
            loss = gpt(tokens[half::2], labels[half::2], seed=0)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    parameters = [p.detach() for p in gpt.parameters()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return [torch.stack(losses), *whole]


def _train_on_data_ranks(rank: int) -> None:
    """Train under DDP and FSDP2 with a shard per block: averages of equal halves are the whole."""
    for config in (CONFIGS["gpt2"], CONFIGS["llama"]):
        batch = _tokens(B=8, valid=True)
        losses, *expected = _train(_scattered(config)[0], *batch)
        sharded = _scattered(config)[0]
        for block in sharded.blocks.values():
            fully_shard(block)
        for wrapped in (DistributedDataParallel(_scattered(config)[0]), fully_shard(sharded)):
            mine, *parameters = _train(wrapped, *(t.chunk(2)[rank] for t in batch))
            dist.all_reduce(mine)
            assert_all_close([mine / 2, *parameters], [losses, *expected])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_of_any_mesh_equal_one_device(world):
    run_threads(world, _on_ranks, world)


def test_data_ranks_of_any_wrapper_equal_one_device():
    run_ranks(2, _train_on_data_ranks)


@EACH
def test_no_sample_and_no_token_have_no_logits_and_loss_zero(config):
    model = GPT(config)
    for shape in ((0, config.seq_len), (2, 0)):
        tokens = torch.zeros(shape, dtype=torch.int64)
        assert model(tokens).shape == (*shape, config.vocab_size)
        model.zero_grad()
        loss = model(tokens, labels=tokens)
        loss.backward()
        assert loss == 0
        assert not any(p.grad.any() for p in model.parameters())
