"""The functions of `warpweave.hf` one by one, without a model: attention, masks, the loss over
ranks and their arguments, each against its formula with all options at once."""

from __future__ import annotations

import contextlib
import copy
import itertools
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers", reason="an extra of its own")

from refused import check  # noqa: E402
from threads import on_mesh  # noqa: E402

from warpweave.hf import attention, changes, loss, mask, plan, probe, seen, structure  # noqa: E402
from warpweave.hf.options import HeadVocabulary, Replicas, Spread  # noqa: E402
from warpweave.hf.parallel import _Entrance, tokens_of  # noqa: E402
from warpweave.hf.patch import is_patched, original, ours_always, patch, unpatch  # noqa: E402
from warpweave.hf.plan import Tokens, hidden_states  # noqa: E402
from warpweave.hf.report import Report  # noqa: E402
from warpweave.parallel.layout import SequenceLayout  # noqa: E402
from warpweave.parallel.mesh import Mesh  # noqa: E402

functions = transformers.masking_utils
B, HEADS, KV, S, D, DV = 3, 4, 2, 8, 6, 5


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


# ---------------------------------------------------------------- attention


def eager(q, k, v, visible, scaling=None, softcap=None, s_aux=None) -> torch.Tensor:
    """Compute o[B, S, H, Dv] of q[B, H, S, D]: 0 where a query sees no key."""
    k, v = (x.repeat_interleave(HEADS // KV, 1) for x in (k, v))
    scores = q @ k.mT * (D**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -1e300)
    if s_aux is not None:
        sinks = s_aux[None, :, None, None].expand(len(q), -1, q.shape[2], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights.masked_fill(~visible, 0.0) @ v).transpose(1, 2)


def padded(*ends: tuple[int, int], length: int = S) -> torch.Tensor:
    found = torch.zeros(len(ends), length, dtype=torch.bool)
    for row, (first, stop) in zip(found, ends):
        row[first:stop] = True
    return found


PACKED = torch.tensor([[0] * 8, [0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 2, 3, 3, 3, 3]])
MASKS = {  # for queries at the end of S keys
    "causal": (S, functions.causal_mask_function, None),
    "left": (S, functions.causal_mask_function, padded((0, 8), (3, 8), (5, 8))),
    "right": (S, functions.causal_mask_function, padded((0, 8), (0, 6), (0, 1))),
    "window": (S, functions.sliding_window_causal_mask_function(3), padded((0, 8), (2, 8), (1, 7))),
    "encoder": (S, functions.bidirectional_mask_function, padded((0, 8), (1, 8), (2, 7))),
    "both sides": (S, functions.sliding_window_bidirectional_mask_function(2), None),
    "packed": (S, functions.and_masks(
        functions.packed_sequence_mask_function(PACKED), functions.causal_mask_function), None),
    "a step": (1, functions.sliding_window_causal_mask_function(5), padded(*[(1, 8)] * B)),
    "a draft": (3, functions.causal_mask_function, padded((0, 8), (2, 8), (4, 8))),
}  # fmt: skip
OPTIONS = [
    dict(zip(("scaling", "softcap", "s_aux"), values))
    for values in itertools.product((None, 0.7), (None, 1.3), (None, draw(HEADS, seed=9)))
]


def called(name: str, inputs: list[torch.Tensor], options: dict) -> tuple:
    """Return (ours, theirs) for one mask and one set of options."""
    length, function, hidden = MASKS[name]
    q, k, v = inputs[0][:, :, -length:], *inputs[1:]
    how = {"batch_size": B, "q_length": length, "kv_length": S, "q_offset": S - length,
           "mask_function": function, "attention_mask": hidden}  # fmt: skip
    visible = functions.sdpa_mask(**how, allow_is_causal_skip=False)
    found, _ = attention.attention_forward(nn.Module(), q, k, v, mask.make_mask(**how), **options)
    return found, eager(q, k, v, visible, **options)


@pytest.mark.parametrize("way", ["few", "many", "gradients"])
@pytest.mark.parametrize("name", MASKS)
def test_attention_obeys_every_mask_and_option_on_every_way_through(name, way):
    grad = way == "gradients"
    for options in OPTIONS[:: len(OPTIONS) - 1] if grad else OPTIONS:
        inputs = [draw(B, HEADS, S, D), draw(B, KV, S, D, seed=1), draw(B, KV, S, DV, seed=2)]
        inputs = [x.requires_grad_(grad) for x in inputs]
        with torch.set_grad_enabled(grad), ours_always() if way == "many" else NOTHING:
            found, wanted = called(name, inputs, options)
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        if grad:
            weights = draw(*wanted.shape, seed=3)
            both = [torch.autograd.grad((o * weights).sum(), inputs) for o in (found, wanted)]
            for x, y in zip(*both):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


NOTHING = contextlib.nullcontext()


def test_who_watches_a_model_hears_its_calls_no_others_and_none_afterwards():
    inputs = [draw(B, HEADS, S, D), draw(B, KV, S, D, seed=1), draw(B, KV, S, DV, seed=2)]
    model, other = nn.Sequential(nn.Module(), nn.Module()), nn.Module()
    before = [dict(vars(m)) for m in model.modules()]
    with attention.callers(model) as found:
        for module in (model[1], other):
            attention.attention_forward(module, *inputs, None)
    assert [dict(vars(m)) for m in model.modules()] == before
    attention.attention_forward(model[0], *inputs, None)
    assert list(found) == [model[1]]


@pytest.mark.parametrize("own", [None, True, False])
@pytest.mark.parametrize("said", [None, True, False])
def test_without_a_mask_the_is_causal_argument_overrides_the_module(own, said):
    module, inputs = nn.Module(), [draw(B, n, S, D, seed=n) for n in (HEADS, KV, KV)]
    if own is not None:
        module.is_causal = own
    causal = said if said is not None else own is not False
    visible = torch.ones(S, S, dtype=torch.bool)
    for grad, one in itertools.product((False, True), repeat=2):
        q, k, v = (x.requires_grad_(grad) for x in inputs)
        q = q[:, :, -1:] if one else q  # it sees all keys, at any position
        with torch.set_grad_enabled(grad):
            found, _ = attention.attention_forward(module, q, k, v, None, is_causal=said)
        wanted = eager(q, k, v, visible[-1:] if one else visible.tril() if causal else visible)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def _over_ranks(mesh, name: str, options: dict) -> torch.Tensor:
    inputs = [draw(B, n, S, d, seed=n + d) for n, d in ((HEADS, D), (KV, D), (KV, DV))]
    layout, module = SequenceLayout(S, mesh.size("cp")), nn.Module()
    changes.note(module, attention.Across(layout, mesh.context, "gather"))
    own = [layout.shard(x, mesh.index("cp"), dim=2) for x in inputs]
    _, function, hidden = MASKS[name]
    made = mask.make_mask(B, S, S, mask_function=function, attention_mask=hidden)
    o, _ = attention.attention_forward(module, *own, made, **options)
    visible = functions.sdpa_mask(B, S, S, mask_function=function, attention_mask=hidden,
                                  allow_is_causal_skip=False)  # fmt: skip
    wanted = layout.shard(eager(*inputs, visible, **options), mesh.index("cp"), dim=1)
    torch.testing.assert_close(o, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["causal", "left", "window", "both sides", "packed"])
def test_over_context_ranks_attention_obeys_the_same(name):
    for options in (OPTIONS[0], OPTIONS[-1]):
        on_mesh(Mesh(cp=2), _over_ranks, name, options)


@pytest.mark.parametrize("offset", [0, 3, 6])
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("window", [None, 2, 4])
def test_keys_that_begin_later_are_hidden_where_they_stand(offset, short, window):
    """For example in a cache that rolled, or became larger than the known padding."""
    function = functions.causal_mask_function
    if window:
        function = functions.sliding_window_causal_mask_function(window)
    for q_offset, q_length in ((offset, 5), (offset + 2, 3), (offset + 4, 1)):
        for first in range(offset + 3):
            length = q_offset + q_length if short else offset + 9
            hidden = padded((0, length), (first, length), length=length)
            how = {"batch_size": 2, "q_length": q_length, "kv_length": 9, "q_offset": q_offset,
                   "kv_offset": offset, "mask_function": function}  # fmt: skip
            wanted = functions.sdpa_mask(
                **how, attention_mask=F.pad(hidden, (0, offset + 9 - length)),
                allow_is_causal_skip=False,
            )  # fmt: skip
            made = mask.make_mask(**how, attention_mask=hidden)
            if made is None:  # all keys, or all up to a row's own
                assert q_length == 1 or (q_offset, q_length) == (offset, 9)
                assert wanted[..., : q_offset + q_length - offset].all()
            else:
                assert torch.equal(made.visible.written_out("cpu").expand_as(wanted), wanted)


@pytest.mark.parametrize("offset", [0, 3, 6])
def test_padding_after_the_last_query_needs_no_documents(offset):
    """For example in a cache with room for more tokens than there are."""
    causal = functions.causal_mask_function
    for q_offset, q_length in ((offset, 5), (offset + 2, 3), (offset + 4, 1)):
        for end in range(q_offset + q_length - 1, offset + 10):
            how = {"batch_size": 2, "q_length": q_length, "kv_length": 9, "q_offset": q_offset,
                   "kv_offset": offset, "mask_function": causal}  # fmt: skip
            hidden = padded((0, end), (0, end), length=offset + 9)
            made = mask.make_mask(**how, attention_mask=hidden)
            hides = made is not None and made.visible.documents is not None
            assert hides == (end < q_offset + q_length), (q_offset, q_length, end)


# ---------------------------------------------------------------- the loss over ranks

V, E = 13, 6
LABELS = torch.randint(V, (3, 7), generator=torch.Generator().manual_seed(5))
LABELS[0, 2:5], LABELS[1, -1] = -100, 4
LOSSES = {  # further arguments of the loss
    "mean": {}, "items": {"num_items_in_batch": 11}, "ignored": {"ignore_index": 4},
    "counted": {"num_items_in_batch": torch.tensor(5)}, "shifted": {"shift_labels":
    LABELS.roll(2, 1)},
    "flat": {"shift_labels": LABELS.roll(3, 1).flatten(), "ignore_index": 7},
}  # fmt: skip
FORMS = [loss.LossForm(), loss.LossForm(0.3), loss.LossForm(softcap=1.5)]


def theirs(logits: torch.Tensor, form: loss.LossForm, more: dict) -> torch.Tensor:
    logits = logits * form.factor
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    ignored = more.get("ignore_index", -100)
    labels = LABELS.masked_fill(LABELS == -100, ignored)
    labels = more.get("shift_labels", F.pad(labels, (0, 1), value=ignored)[:, 1:]).flatten()
    labels = labels.masked_fill(labels == -100, ignored)
    total = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=ignored, reduction="sum")
    return total / more.get("num_items_in_batch", (labels != ignored).sum())


def _loss(mesh, cut: bool) -> None:
    vocabulary = HeadVocabulary(V, cut, Spread(mesh))
    tp, at = mesh.size("tp"), mesh.index("tp")
    rows = -(-V // tp)
    for form, (name, more) in zip(2 * FORMS, LOSSES.items()):
        x, whole, lora, bias = (
            draw(*shape, seed=n).requires_grad_()
            for n, shape in enumerate(((3, 7, E), (V, E), (V, 2), (V,)))
        )
        ignored = more.get("ignore_index", -100)
        given = dict(more)
        if "shift_labels" in more:
            labels = more["shift_labels"]
            given["shift_labels"] = labels.masked_fill(labels == -100, ignored)
        head = nn.Linear(E, V, bias=False)
        own = whole.detach()[at * rows : (at + 1) * rows] if cut else whole.detach()
        head.weight = nn.Parameter(own.clone())
        changes.note(head, vocabulary)
        columns = [(x[..., :2], lora), (torch.ones_like(x[..., :1]), bias[:, None])]
        wide = loss._with_columns(x, head, columns)
        labels = LABELS.masked_fill(LABELS == -100, ignored)
        found = loss.fused_loss(*wide, labels, form, **given, vocabulary=vocabulary)
        grads = torch.autograd.grad(found, [x, lora, bias, head.weight])
        logits = x @ whole.T + x[..., :2] @ lora.T + bias
        wanted = theirs(logits, form, more)
        truth = [*torch.autograd.grad(wanted, [x, lora, bias, whole])]
        truth[3] = truth[3][at * rows : (at + 1) * rows] if cut else truth[3]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0, msg=name)
        for ours, each in zip(grads, truth, strict=True):
            torch.testing.assert_close(ours, each, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("mesh", "cut"),
    [(Mesh(), False), (Mesh(tp=2), True), (Mesh(cp=2), False), (Mesh(tp=3, cp=2), True)],
)
def test_the_loss_over_ranks_is_that_of_all_logits_under_every_option(mesh, cut):
    """With an odd vocabulary and 21 tokens, and with a bias and an adapter on the head."""
    on_mesh(mesh, _loss, cut)


# ---------------------------------------------------------------- arguments for ranks


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_length_is_taken_wherever_every_rank_has_as_many_tokens(sequence_parallel):
    """In two blocks each over context ranks, in zigzag layout, cut once more over tp."""
    for tp, cp in itertools.product((1, 2, 3), (1, 2, 4)):
        mesh = SimpleNamespace(group={"tp": tp, "cp": cp}.get)
        tokens = tokens_of(Spread(mesh, sequence_parallel))
        cut = tp if sequence_parallel else 1
        fits = [n for n in range(1, 49) if n % (cp * cut * (2 if cp > 1 else 1)) == 0]
        with mock.patch.object(plan, "group_size", int):
            assert [n for n in range(1, 49) if n % tokens.divisor == 0] == fits


def test_replicas_on_gpus_are_one_data_rank_and_others_are_refused():
    assert Replicas(4, 1, "cuda").dp_size == 1
    assert Replicas(4, 1, "cuda")[3:] == (1, 1, 1)
    check(lambda: Replicas(2, 3, "cuda").dp_size, "does not support Mesh.dp=3")
    check(lambda: Replicas(2, 1, "cpu").dp_size, "lets 2 ranks share a model only on GPUs")


def _through_layers(mesh, sequence_parallel: bool) -> None:
    """Shard tokens before the first layer and gather them after the last."""
    tokens = Tokens(mesh.group("tp"), mesh.group("cp"), sequence_parallel=sequence_parallel)
    layer, n = nn.Module(), tokens.divisor
    parts = mesh.size("cp") * (mesh.size("tp") if sequence_parallel else 1)
    for length, learns, cached, as_tuple, name in itertools.product(
        (n, 3 * n, n + 1), (True, False), (True, False), (True, False), ("past_key_values", "new")
    ):
        x = draw(2, length, 3).requires_grad_(learns)
        kwargs = {name: transformers.DynamicCache() if cached else None, "more": 5}
        with torch.set_grad_enabled(learns):
            if learns and length % n:
                words = f"must be divisible by {n} for this mesh, got {length}; "
                check(lambda x=x, kwargs=kwargs: tokens.cut(layer, (x,), kwargs), words)
                continue
            cut = tokens.cut(layer, (), {"hidden_states": x, **kwargs})
            whole = length % n or (cached and not learns)
            assert (cut is None) == bool(whole)
            if whole:
                assert tokens.join(layer, (), x) is None
                continue
            (own, args), more = (cut[1].pop("hidden_states"), cut[0]), cut[1]
            assert (own.shape, args, more) == ((2, length // parts, 3), (), kwargs)
            out = own * own
            y = tokens.join(layer, (), (out, "b") if as_tuple else out)
            y, *rest = y if as_tuple else (y,)
            assert rest == ["b"] * as_tuple
            assert torch.equal(y, x * x)
        if learns:
            (g,) = torch.autograd.grad((y * y.detach()).sum(), x)
            torch.testing.assert_close(g, 2 * x.detach() ** 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(cp=2), Mesh(tp=2, cp=2)])
def test_tokens_are_cut_where_ranks_can_share_them_and_whole_behind(mesh, sequence_parallel):
    if mesh.cp > 1 or sequence_parallel:
        on_mesh(mesh, _through_layers, sequence_parallel)


def test_hidden_states_are_found_by_place_or_name_and_the_rest_goes_on():
    x, y = draw(2, 3), draw(3, 2)
    for args, kwargs in (((x, 1), {"more": 2}), ((), {"more": 2, "hidden_states": x})):
        found, put = hidden_states(nn.Tanh(), args, kwargs)
        assert found is x
        new_args, new_kwargs = put(y)
        assert (new_args[0] if args else new_kwargs.pop("hidden_states")) is y
        assert (new_args[1:], new_kwargs) == (args[1:], {"more": 2})
    for args, kwargs in (((), {}), ((1,), {}), ((), {"hidden_states": None})):
        words = "Tanh: its forward got no hidden_states"
        check(partial(hidden_states, nn.Tanh(), args, kwargs), words)


def test_a_module_whose_wide_norm_or_cut_layer_changed_is_not_entered():
    module, x = nn.Module(), draw(2, 3)
    module.norm, module.up = nn.RMSNorm(3, 1e-5), nn.Linear(3, 3)
    seen.look(module.norm, ("eps",))
    part = structure.CutPart("mlp", module, {module.up: 1}, module.up, (module.norm,))
    groups = {"tp": object(), "cp": None}
    spread = SimpleNamespace(mesh=SimpleNamespace(group=groups.get))
    watch = SimpleNamespace(adapt=lambda found: False)
    enter = _Entrance(part, Tokens(None, None, sequence_parallel=False), spread, None, watch)
    assert enter(module, (x,), {"a": 1}) == ((x,), {"a": 1})
    module.norm.eps = 2e-5  # read in every call
    assert enter(module, (x,), {}) == ((x,), {})
    module.norm.weight = None
    words = "a norm whose features are sharded over ranks was changed"
    check(lambda: enter(module, (x,), {}), words)
    module.up = nn.Linear(3, 3)
    check(lambda: enter(module, (x,), {}), r"Module\.up: a layer that is sharded over ranks")


# ---------------------------------------------------------------- agreement, and detected changes

X = draw(3, 4).float()
NEAR, FAR = X * (1 + 8e-6), X * (1 + 2e-5)
HALF = X.bfloat16()
AGREE = {  # and the narrowest dtype involved
    "itself": (X, X, None, True), "rounded": (X, NEAR, None, True), "far": (X, FAR, None, False),
    "far, but half on the way": (X, FAR, torch.bfloat16, True),
    "float64 on the way": (X, FAR, torch.float64, False),
    "another dtype": (X, X.double(), None, False), "another shape": (X, X[:2], None, False),
    "halves": (HALF, HALF * 1.008, None, True), "other halves": (HALF, HALF * 1.04, None, False),
    "nothing": (0 * X, 0 * X, None, False),
    "infinite": (X.where(X.max() > X, torch.inf), X, None, False),
    "both infinite": (X / 0, X / 0, None, False), "NaN": (X, X * torch.nan, None, False),
    "NaN first": (X * torch.nan, X, None, False),
    "one element": (X, X.index_fill(1, torch.tensor(2), 0.0), None, False),
}  # fmt: skip


@pytest.mark.parametrize("name", AGREE)
def test_two_results_agree_if_they_differ_by_rounding_only(name):
    a, b, rounded, same = AGREE[name]
    assert probe.agree(a, b, rounded=rounded) is same


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called, self.bypassed = nn.Linear(2, 2), nn.Sequential(nn.Tanh())
        self.number, self.live, self.words = 3, 5.0, ["a"]
        self.bias = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


@pytest.mark.parametrize("kind", HOOKS)
def test_every_hook_of_a_module_that_is_called_no_more_is_seen_and_no_other(kind):
    holder = Holder()
    seen.look(holder, ("called", "live"))
    assert not seen.changed(holder)
    for name, counts in (("", False), ("called", False), ("bypassed", True), ("bypassed.0", True)):
        part = holder.get_submodule(name)
        assert not seen.has_hooks(part)
        hook = getattr(part, f"register_{kind}")(lambda *_: None)
        assert seen.has_hooks(part)
        assert bool(seen.changed(holder)) is counts
        hook.remove()
        assert not seen.changed(holder)


OTHER_CONFIG = transformers.PretrainedConfig(hidden_size=4, vocab_size=5)
CHANGES = {  # whether the replaced forward would not follow
    "a number": (lambda m: setattr(m, "number", 4), True),
    "its kind": (lambda m: setattr(m, "number", 3.0), True),
    "the same": (lambda m: setattr(m, "number", 3), False),
    "no more": (lambda m: delattr(m, "number"), True),
    "in place": (lambda m: m.words.append("b"), True),
    "what it reads": (lambda m: setattr(m, "live", 6.0), False),
    "a child it calls": (lambda m: setattr(m, "called", nn.Linear(2, 3)), False),
    "another child": (lambda m: setattr(m, "bypassed", nn.Sequential(nn.Tanh())), True),
    "a child's child": (lambda m: m.bypassed.__setitem__(0, nn.Tanh()), True),
    "a child's number": (lambda m: setattr(m.bypassed[0], "more", 1), False),
    "a child's forward": (lambda m: setattr(m.bypassed[0], "forward", len), True),
    "a weight": (lambda m: m.bias.data.mul_(2), False),
    "no weight": (lambda m: setattr(m, "bias", None), True),
    "a note": (lambda m: setattr(m, "_is_hooked", True), False),
    "a field": (lambda m: setattr(m.config, "hidden_size", 7), True),
    "a field of a field": (lambda m: setattr(m.config.text_config, "eps", 2.0), True),
    "a field that nobody read": (lambda m: setattr(m.config, "vocab_size", 7), False),
    "an equal configuration": (lambda m: setattr(m, "config", copy.deepcopy(m.config)), False),
    "another one": (lambda m: setattr(m, "config", OTHER_CONFIG), True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_replaced_forward_would_not_follow_is_seen_and_no_other(name):
    holder, (change, counts) = Holder(), CHANGES[name]
    holder.config = transformers.PretrainedConfig(hidden_size=3, vocab_size=5)
    holder.config.text_config = transformers.PretrainedConfig(eps=1.0)
    before = holder.config
    with seen.noted(holder) as fields:
        assert holder.config.hidden_size == 3
        assert holder.config.get_text_config().eps == 1.0
    assert holder.config is before
    assert {("hidden_size",): 3, ("text_config", "eps"): 1.0}.items() <= fields.items()
    assert ("vocab_size",) not in fields
    seen.look(holder, ("called", "live"), tuple(fields.items()))
    assert not seen.changed(holder)
    change(holder)
    assert bool(seen.changed(holder)) is counts
    changes.forget(holder, seen.Seen)
    assert not seen.changed(holder)


# ---------------------------------------------------------------- head positions, and the report


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_blocks_of_a_column_are_found_by_what_makes_each_ranks_heads(blocks, ranks):
    y = draw(2, 5, blocks * ranks * 2 * D).requires_grad_()
    heads = tuple(x.unflatten(-1, (2 * ranks, D)) for x in y.mul(1.0).chunk(blocks, -1))
    others = (draw(2, 5, ranks, D),) * (3 - blocks)  # made from other columns
    assert structure._blocks_of_heads(y, heads + others, ranks) == blocks
    shuffled = y[..., torch.arange(y.shape[-1]).roll(D)].unflatten(-1, (-1, D))
    for odd, words in (
        (shuffled, "must form one, two or three blocks of equal width"),
        (shuffled.cumsum(2), "is used by heads on several ranks"),
    ):
        check(lambda odd=odd: structure._blocks_of_heads(y, (odd,), ranks), words)


def test_a_report_is_added_to_and_told_by_kind():
    report = Report()
    for name, kind, replaced in (("a", "norm", True), ("b", "norm", False), ("c", "mlp", True),
                                 ("d", "norm", True)):  # fmt: skip
        report.add(name, kind, nn.Tanh(), "why", replaced=replaced)

    def names(entries):
        return "".join(e.name for e in entries)

    assert (names(report.replaced()), names(report.kept())) == ("acd", "b")
    assert (names(report.replaced("norm")), names(report.kept("norm"))) == ("ad", "b")
    assert (names(report.replaced("mlp")), names(report.kept("mlp"))) == ("c", "")
    report.add("e", "norm", nn.Tanh(), "another reason")
    report.add("f", "norm", nn.GELU(), "why", replaced=False)
    report.add("g", "mlp", nn.Tanh(), ("a", "form"))
    assert str(report).splitlines() == [
        "2 x Tanh  norm  replaced  why",
        "1 x Tanh  norm  kept      why",
        "1 x Tanh  mlp   replaced  why",
        "1 x Tanh  norm  kept      another reason",
        "1 x GELU  norm  kept      why",
        "1 x Tanh  mlp   replaced  ('a', 'form')",
    ]
    assert str(Report()) == ""


def test_unpatching_leaves_a_module_as_it_was_also_with_a_forward_of_its_own():
    module, x = nn.Tanh(), torch.randn(3)
    form = SimpleNamespace(forward=lambda self, x: x + 1, live=(), fields=())
    for before in (None, lambda x: x - 1):
        if before is not None:
            module.forward = before
        module.number = 0
        attributes, plain = dict(module.__dict__), module(x)
        patch(module, form)
        assert is_patched(module)
        assert torch.equal(module(x), x + 1)
        patch(module, SimpleNamespace(forward=lambda self, x: x + 2, live=(), fields=()))
        assert torch.equal(module(x), x + 2)  # by a different form in its place
        assert torch.equal(original(module)(x), plain)
        module.number = 1  # changed since then
        assert torch.equal(module(x), plain)
        module.number = 0
        unpatch(module)
        assert torch.equal(module(x), plain)
        assert not is_patched(module)
        assert changes.known(module, seen.Seen) is None
        assert {k: v for k, v in module.__dict__.items() if k in attributes} == attributes
