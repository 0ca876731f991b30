"""Attention of `warpweave.hf`: rejected calls, dropout, and masks that only a GPU uses, for one
query whose keys are found without reading a number."""

from __future__ import annotations

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers", reason="an extra of its own")

from refused import check  # noqa: E402
from sharded import draw  # noqa: E402

from warpweave.hf import attention, mask  # noqa: E402
from warpweave.hf.patch import ours_always  # noqa: E402

functions = transformers.masking_utils
B, HEADS, KV, D, DV = 3, 4, 2, 6, 5


def inputs(queries: int = 8, keys: int = 8) -> list[torch.Tensor]:
    return [draw(0, B, HEADS, queries, D), draw(1, B, KV, keys, D), draw(2, B, KV, keys, DV)]


def attend(*qkv: torch.Tensor, **options) -> torch.Tensor:
    return attention.attention_forward(nn.Tanh(), *qkv, options.pop("mask", None), **options)[0]


# ---------------------------------------------------------------- rejected arguments


UNKNOWN = ("position_bias", "indices", "block_indices", "sinks", "cache", "of_a_new_version")


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_argument_that_the_kernel_does_not_know_is_refused_by_name(name):
    wanted = attend(*inputs())
    assert torch.equal(attend(*inputs(), **{name: None}), wanted)
    for value in (torch.zeros(1), 0, False):  # any value
        words = f"^Tanh: warpweave attention does not support {name}$"
        check(partial(attend, *inputs(), **{name: value}), words)


def test_every_unknown_argument_is_named_and_neutral_ones_are_ignored():
    more = {"output_attentions": False, "position_ids": torch.arange(8), "use_cache": True}
    assert torch.equal(attend(*inputs(), **more, sliding_window=2), attend(*inputs()))
    asked = dict.fromkeys(UNKNOWN, 1) | {"output_attentions": True}
    words = rf"does not support {', '.join(UNKNOWN)}, output_attentions \("
    check(lambda: attend(*inputs(), **asked), words)


def test_an_argument_of_a_mask_that_is_not_known_is_refused_by_name():
    sizes = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    assert mask.make_mask(**sizes, use_vmap=False, of_a_new_version=None) is None
    words = "mask does not support query_start, which transformers"
    check(lambda: mask.make_mask(**sizes, query_start=0), words)


@pytest.mark.parametrize("name", ["attentions", "cross_attentions", "hidden_states"])
def test_attention_weights_that_transformers_collects_are_refused(name):
    collector = transformers.utils.output_capturing._active_collector
    token = collector.set({name: []})
    try:
        words = None if name == "hidden_states" else "does not support output_attentions"
        check(lambda: attend(*inputs()), words)
    finally:
        collector.reset(token)


@pytest.mark.parametrize(("queries", "keys"), [(8, 7), (7, 8), (1, 8), (8, 9)])
@pytest.mark.parametrize("always", [True, False])
def test_a_mask_of_other_sizes_than_the_call_is_refused_with_both(queries, keys, always):
    padded = torch.ones(B, 8, dtype=torch.bool)
    padded[0, :2] = False
    made = mask.make_mask(B, 8, 8, attention_mask=padded)
    words = (
        f"Tanh: warpweave attention got {queries} queries and {keys} keys, but a mask for "
        "8 queries and 8 keys"
    )
    with pytest.raises(ValueError, match=f"^{words}$"), torch.set_grad_enabled(always):
        attend(*inputs(queries, keys), mask=made)
    made = mask.make_mask(B, 3, 8, 5, attention_mask=padded)
    words = "got 8 queries and 8 keys, but a mask for 3 queries and 8 keys"
    check(lambda: attend(*inputs(), mask=made), words)
    assert attend(*inputs(3, 8), mask=made).shape == (B, 3, HEADS, DV)


# ---------------------------------------------------------------- dropout, and observers


@pytest.mark.parametrize("grad", [True, False])
def test_dropout_is_drawn_from_torchs_generator_and_nothing_is_without_it(grad):
    with torch.set_grad_enabled(grad):
        torch.manual_seed(3)
        state = torch.get_rng_state()
        whole = attend(*inputs())
        assert torch.equal(torch.get_rng_state(), state)
        dropped = attend(*inputs(), dropout=0.5)
        assert not torch.equal(torch.get_rng_state(), state)
        other = attend(*inputs(), dropout=0.5)
        torch.manual_seed(3)
        assert torch.equal(attend(*inputs(), dropout=0.5), dropped)
        assert (dropped - whole).abs().mean() > 0.05
        assert not torch.equal(dropped, other)
        mean = sum(attend(*inputs(), dropout=0.25) for _ in range(150)) / 150
        assert (mean - whole).abs().mean() < 0.06  # 150 draws, always the same ones


@pytest.mark.parametrize(("given", "passed"), [({}, False), ({"deterministic": True}, True)])
def test_a_request_for_determinism_reaches_the_kernel(monkeypatch, given, passed):
    seen = mock.Mock(side_effect=attention.attention)
    monkeypatch.setattr(attention, "attention", seen)
    attend(*inputs(), softcap=2.0, **given)
    assert seen.call_args.kwargs["deterministic"] is passed


def test_a_watcher_gets_heads_in_the_layout_of_the_kernel():
    (q, k, v), heard, sinks = inputs(), [], draw(5, HEADS)
    module = nn.Tanh()
    for given in (sinks, None):
        watching = attention.watched(module, lambda *each: heard.append(each))
        with ours_always(), watching, torch.enable_grad():
            o, _ = attention.attention_forward(module, q, k, v, None, s_aux=given, softcap=2.0)
        who, *seen, of = heard.pop()
        assert who is module
        assert of is given
        for x, y in zip(seen, (q, k, v), strict=False):
            assert torch.equal(x, y.transpose(1, 2))
        assert seen[3] is o
    assert not heard


# ---------------------------------------------------------------- the mask of one query


PACKED = torch.tensor([[0] * 9, [0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 2, 3, 3, 3, 3, 4]])
ONE = {
    "causal": functions.causal_mask_function,
    "window": functions.sliding_window_causal_mask_function(3),
    "wide": functions.sliding_window_causal_mask_function(20),
    "both sides": functions.sliding_window_bidirectional_mask_function(2),
    "all": functions.bidirectional_mask_function,
    "chunks": functions.chunked_causal_mask_function(4, torch.tensor([0, 3, 1])),
    "packed": functions.and_masks(
        functions.packed_sequence_mask_function(PACKED), functions.causal_mask_function
    ),
}
RUNS = ((0, 9), (2, 7), (3, 4))  # of keys: first key and count


@pytest.mark.parametrize("name", ONE)
def test_the_keys_that_one_query_sees_are_found_on_the_device(name):
    for (first, keys), number, hides in itertools.product(RUNS, range(9), (False, True)):
        if not first <= number < first + keys:  # its own key is included
            continue
        hidden = None
        if hides:
            hidden = torch.ones(B, 9, dtype=torch.bool)
            hidden[1, :2] = hidden[2, : number + 1] = hidden[0, 8:] = False
        how = {"batch_size": B, "q_length": 1, "kv_length": keys, "q_offset": number}
        how |= {"kv_offset": first, "mask_function": ONE[name], "attention_mask": hidden}
        wanted = functions.sdpa_mask(**how, allow_is_causal_skip=False)
        like = torch.empty(()).expand(B, 1, 1, keys)
        for at in (number, torch.tensor(number)):
            made = mask._mask_of_one(ONE[name], hidden, at, first, like)
            assert (made.shape, made.dtype) == (like.shape, like.dtype)
            assert made.isnan().all()
            found = made.visible.written_out(torch.device("cpu"))
            assert torch.equal(found, wanted.expand_as(found)), (first, keys, number, hides)


def test_padding_in_the_middle_of_what_one_query_sees_is_an_assertion():
    hidden = torch.ones(B, 9, dtype=torch.bool)
    hidden[1, 4] = False
    like = torch.empty(()).expand(B, 1, 1, 9)
    with pytest.raises(RuntimeError, match="needs padding at the ends of a sample"):
        mask._mask_of_one(ONE["causal"], hidden, 8, 0, like)
    mask._mask_of_one(ONE["causal"], hidden, 3, 0, like)  # the masked key is behind the query
    mask._mask_of_one(ONE["window"], hidden, 7, 0, like)  # before its window


# ---------------------------------------------------------------- masks passed on


def test_a_mask_is_as_large_as_what_it_is_made_for_wherever_queries_begin():
    """It is None exactly if queries and keys have the same positions, or
    one query sees every key."""
    for q_offset, kv_offset, queries, keys in (
        (0, 0, 4, 4), (4, 4, 4, 4), (4, 0, 4, 8), (2, 0, 4, 8), (7, 0, 1, 8), (6, 0, 1, 8),
        (7, 3, 1, 5), (7, 3, 1, 6), (6, 0, 2, 8),
    ):  # fmt: skip
        how = {"batch_size": 2, "q_length": queries, "kv_length": keys}
        how |= {"q_offset": q_offset, "kv_offset": kv_offset}
        made, wanted = mask.make_mask(**how), functions.sdpa_mask(**how, allow_is_causal_skip=False)
        decodes = queries == 1 and q_offset + 1 == kv_offset + keys
        assert (made is None) == ((q_offset, queries) == (kv_offset, keys) or decodes)
        if made is None:
            assert wanted.all() or not decodes
            continue
        assert made.shape == (2, 1, queries, keys)
        assert torch.equal(made.visible.written_out(torch.device("cpu")).expand_as(wanted), wanted)
    for window in (3, 4):  # of 4 keys
        function = functions.sliding_window_causal_mask_function(window)
        assert (mask.make_mask(2, 4, 4, mask_function=function) is None) == (window == 4)
    assert mask.make_mask(2, 3, 5, mask_function=functions.bidirectional_mask_function) is None


@pytest.mark.parametrize("name", ["causal", "window", "both sides", "all", "chunks"])
def test_padding_at_either_end_and_of_any_length_is_masked_correctly(name):
    """A mask for fewer keys than exist hides the rest. Beyond what any
    query sees, it may have holes."""
    for first, own, queries, keys in itertools.product((0, 2), (0, 3), (1, 3), (4, 6)):
        q_offset = first + own
        if own + queries > keys:
            continue
        ends = (first + keys, first + keys - 1, q_offset + queries, first + 2)
        for left, end, length in itertools.product((0, 1, first + 1), ends, (first + 1, 8)):
            hidden = torch.zeros(B, length, dtype=torch.bool)
            hidden[:, left:end] = hidden[0] = True
            if name == "causal":
                hidden[1, q_offset + queries :: 2] = False
            how = {"batch_size": B, "q_length": queries, "kv_length": keys, "q_offset": q_offset}
            how |= {"kv_offset": first, "mask_function": ONE[name], "attention_mask": hidden}
            wanted = functions.sdpa_mask(**how, allow_is_causal_skip=False)
            made = mask.make_mask(**how)
            if made is None:  # all keys, or all up to a row's own
                found = torch.ones_like(wanted)
                found = found if name == "all" or queries == 1 else found.tril()
            else:
                found = made.visible.written_out("cpu")
            assert torch.equal(found.expand_as(wanted), wanted), how


def test_chunks_of_packed_documents_begin_where_padding_ends():
    positions = torch.tensor([[*range(5), *range(8)], [*range(13)]])
    padding = torch.tensor([0, 2])
    chunked = functions.chunked_causal_mask_function(3, padding)
    apart = functions.and_masks(
        functions.packed_sequence_mask_function(functions.find_packed_sequence_indices(positions)),
        functions.remap_positions_for_packed_sequence(chunked, positions),
    )
    how = {"batch_size": 2, "q_length": 13, "kv_length": 13, "mask_function": apart}
    made = mask.make_mask(**how)
    wanted = functions.sdpa_mask(**how, allow_is_causal_skip=False)
    assert torch.equal(made.visible.written_out(torch.device("cpu")), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mask_is_nan_of_the_dtype_asked_for_and_moves_with_what_it_says(dtype):
    """A model that computes with its mask gets NaN, never a number."""
    made = mask.make_mask(2, 3, 5, q_offset=1, dtype=dtype)
    other = torch.float16
    for found, of in (
        (made, dtype), (made.detach(), dtype), (made.contiguous(), dtype), (made.clone(), dtype),
        (made.to(other), other), (made.to("cpu", other), other), (made.to(dtype=other), other),
    ):  # fmt: skip
        assert (found.shape, found.dtype, found.device.type) == ((2, 1, 3, 5), of, "cpu")
        assert found.visible is made.visible
        assert found.isnan().all()
        assert found.untyped_storage().nbytes() == found.element_size()  # a single number
        assert isinstance(found, mask.Mask)
        for changed in (found + 1, found[:, :, :2], found.expand(2, 2, 3, 5)):
            assert type(changed) is torch.Tensor
            assert changed.isnan().all()


def test_masks_compose_in_any_order():
    causal, window = functions.causal_mask_function, functions.sliding_window_overlay(3)
    documents = functions.packed_sequence_mask_function(PACKED)
    padded = F.pad(torch.ones(B, 7, dtype=torch.bool), (2, 0))
    for parts in itertools.permutations((causal, window, documents)):
        how = {"batch_size": B, "q_length": 9, "kv_length": 9, "attention_mask": padded,
               "mask_function": functions.and_masks(*parts)}  # fmt: skip
        made = mask.make_mask(**how)
        wanted = functions.sdpa_mask(**how, allow_is_causal_skip=False)
        assert torch.equal(made.visible.written_out(torch.device("cpu")), wanted)


# ---------------------------------------------------------------- observed calls


class _Attends(nn.Module):
    def forward(self, *qkv: torch.Tensor, **options) -> torch.Tensor:
        return attention.attention_forward(self, *qkv, None, **options)[0]


@pytest.mark.parametrize("fails", [False, True])
def test_calls_are_watched_of_a_models_own_modules_and_of_none_afterwards(fails):
    """This includes a module that has since been removed from the model."""
    model, other, seen = nn.ModuleList([_Attends(), _Attends()]), _Attends(), []
    first, second = model
    sinks = draw(3, HEADS)

    def call_all():
        with ours_always():
            for module in (first, other, second):
                module(*inputs(), s_aux=sinks if module is second else None)

    try:
        with attention.watched(model, lambda *of: seen.append(of)):
            model[1] = other
            call_all()
            if fails:
                raise LookupError
    except LookupError:
        pass
    call_all()
    assert [module for module, *_ in seen] == [first, second]
    for (_, *given, o, told), wanted in zip(seen, (None, sinks), strict=True):
        assert all(torch.equal(x, y.transpose(1, 2)) for x, y in zip(given, inputs(), strict=True))
        assert o.shape == (B, 8, HEADS, DV)
        assert told is wanted
