"""Invalid arguments of attention, its halves and merges are rejected, each check alone."""

from __future__ import annotations

import re

import pytest
import torch
from refused import Rows, Table, check, ints, strided
from refused import zeros as z

from warpweave.kernels.attention import attention, attention_bwd, attention_delta, attention_fwd
from warpweave.kernels.attention.options import check_packed
from warpweave.kernels.merge import merge, merge_

NAN, INF = float("nan"), float("inf")
F16, F64, INT = torch.float16, torch.float64, torch.int64
FLOAT8 = torch.float8_e4m3fn

QKV = {"q": z(2, 8, 4, 4), "k": z(2, 8, 2, 4), "v": z(2, 8, 2, 4)}
NUMBERS: Rows = [
    ({}, None),
    ({"causal": 1}, None),
    ({"causal": None}, "causal must be a bool, got None"),
    ({"window": 1}, None),
    ({"window": 0}, "window must be None or at least 1, got 0"),
    ({"window": 10**30}, None),
    ({"window": 2.0}, "window must be an integer, got 2.0"),
    ({"window": (3, 0)}, r"window must be an integer, got \(3, 0\)"),
    ({"window": ints(3, 4)}, r"window must be an integer, got tensor\(\[3, 4\]\)"),
    *[
        ({name: value}, words and f"{name} must be {none}positive and finite, got {value}")
        for name, none in (("scale", ""), ("softcap", "None, or "))
        for value, words in ((1e-30, None), (0.0, "x"), (-1.0, "x"), (INF, "x"), (NAN, "x"))
    ],
    ({"scale": z()}, "scale must be a number"),
    ({"softcap": "x"}, "softcap must be a number, got 'x'"),
    ({"dropout": None}, "dropout must be a number, got None"),
    ({"dropout_seed": None}, "dropout_seed must be an integer, got None"),
    ({"impl": "cuda"}, 'impl must be None, "triton" or "torch"'),
    ({"dropout": 1 - 1e-9}, None),
    ({"dropout": 1.0}, "need 0 <= dropout < 1, got 1.0"),
    ({"dropout": -1e-9}, "need 0 <= dropout < 1, got -1e-09"),
    ({"dropout": NAN}, "need 0 <= dropout < 1, got nan"),
    ({"dropout_seed": 2**63 - 1}, None),
    ({"dropout_seed": 2**63}, "0 <= seed < 2"),
    ({"dropout_seed": -1}, r"0 <= seed < 2\*\*63 .* got -1 and 0 and 0$"),
    ({"dropout_origin": (2**32 - 1, 2**32 - 1)}, None),
    ({"dropout_origin": (2**32, 0)}, "0 <= sample, head < 2.* got 0 and 4294967296 and 0"),
    ({"dropout_origin": (0, 2**32)}, r"0 <= sample, head < 2\*\*32, got 0 and 0 and 4294967296$"),
    ({"dropout_origin": (-1, 0)}, "0 <= sample, head < 2"),
    ({"dropout_origin": (0,)}, r"must be \(sample, head\), got \(0,\)"),
    ({"dropout_origin": (0, 0, 0)}, r"must be \(sample, head\)"),
    # positions of the rows
    ({"q_runs": ((0, 8),)}, None),
    ({"q_runs": ((5, 3), (90, 5))}, None),
    ({"q_runs": ((0, 3), (3, 3), (6, 2))}, "at most two"),
    ({"q_runs": ((-1, 8),)}, "start >= 0"),
    ({"q_runs": ((0, 9), (9, -1))}, "length >= 0"),
    ({"q_runs": ((0, 8, 0),)}, "stripes >= 1"),
    ({"k_runs": ((0, 8, 1, 1),)}, r"stripes >= 1\]\), got \(\(0, 8, 1, 1\),\)"),
    ({"k_runs": ((8,),)}, r"stripes >= 1\]\), got \(\(8,\),\)"),
    ({"q_runs": ((0.5, 8.2),)}, r"q_runs must contain .* got \(\(0\.5, 8\.2\),\)"),
    ({"q_runs": (0, 8)}, r"q_runs must contain .* got \(0, 8\)"),
    ({"q_runs": ((0, 7),)}, r"the lengths in q_runs must add up to 8 rows, got \(\(0, 7\),\)"),
    ({"k_runs": ((0, 9),)}, "k_runs must add up to 8 rows"),
    *[
        ({"q_runs": runs}, r"numbers in q_runs must be below 2\*\*62, got")
        for runs in (((2**62, 8),), ((0, 2**62),), ((0, 8, 2**62),), ((0, 4), (2**62, 4)))
    ],
    ({"q_runs": ((2**62 - 1, 8),)}, "position plus window must be below"),
    ({"q_runs": ((0, 2**62 - 1),)}, "must add up to 8 rows"),
    ({"q_runs": ((0, 4, 2), (9, 4, 3))},
     r"both runs in q_runs must have the same number of stripes, got \(\(0, 4, 2\)"),
    ({"k_runs": ((0, 4, 2), (9, 4, 3))},
     "both runs in k_runs must have the same number of stripes"),
    ({"k_runs": ((0, 3), (3, 3), (6, 2))}, r"k_runs must contain at most two .*, got \(\(0, 3\), "),
    ({"q_runs": ((0, 8, 2), (9, 0, 3))}, None),
    ({"q_runs": ((0, 0, 2), (9, 8, 3))}, None),
    # boundaries
    ({"documents": [0, 8]},
     r"documents must be a tensor of cumulative boundaries \(cu_seqlens\), got \[0, 8\]"),
    ({"documents": ints(0, 8).to("meta")}, "one device, got cpu and meta"),
    ({"documents": ints(0.0, 8.0)}, "int32 or int64, got torch.float32"),
    ({"documents": torch.tensor(8)},
     r"\[2, n \+ 1\] or \[2, 2, n \+ 1\] for n documents, got \(\)"),
    ({"documents": ints(*[[[0, 8]] * 3] * 2)}, r"the shape .* got \(2, 3, 2\)"),
    ({"documents": z(0, dtype=INT)}, r"the shape .* got \(0,\)"),
    ({"documents": ints(0, 2**32), "q_runs": ((2**31, 8),)}, "be below 2147483646, got"),
    *[
        ({"q_runs": ((start, 8),), "window": window}, words)
        for start, window, words in (  # the last position and a window from it on
            (2**31 - 10, None, None),
            (2**31 - 9, None, "2147483646, got position 2147483646 and window None"),
            (2**30, 2**30 - 10, None),
            (2**30, 2**30 - 9, "got position 1073741831 and window 1073741815"),
        )
    ],
    ({"documents": ints(0, 3, 8)}, None),
    ({"documents": ints(0, 3, 8).int()}, None),
    ({"documents": ints(0, 3, 8).short()}, "int32 or int64, got torch.int16"),
    ({"documents": ints([0, 8], [0, 8])}, None),
    ({"documents": ints([0, 8])}, r"shape \[n \+ 1\] or \[2, n \+ 1\] or .* got \(1, 2\)"),
    ({"documents": ints([[0, 8], [1, 5]], [[0, 8], [0, 7]])}, None),
    ({"documents": ints([[0, 8], [0, 9]], [[0, 8], [0, 8]])}, "must not extend past the 8 keys"),
    ({"documents": ints([[0, 8], [-1, 8]], [[0, 8], [0, 8]])}, "ascend from 0"),
    ({"documents": ints([[0, 8], [5, 4]], [[0, 8], [0, 8]])}, "ascend from 0"),
    ({"documents": ints([[0, 8], [0, 8]], [[1, 8], [0, 8]])}, "ascend from 0"),
    ({"documents": ints(1, 8)}, r"ascend from 0, got \[1, 8\]"),
    ({"documents": ints(0, 5, 4, 8)}, r"ascend from 0, got \[0, 5, 4, 8\]"),
    ({"documents": ints(0, 7)}, r"documents must end at 8, the end .*, got \[0, 7\]"),
    ({"documents": ints(0, 9)}, "documents must end at 8, the end"),
    ({"documents": ints([0, 8], [0, 7])}, "documents must end at 8, the end"),
    ({"documents": ints([0, 8], [0, 9])}, "documents must end at 8, the end"),
    ({"documents": ints(0, 9), "q_runs": ((0, 8),)}, None),
    ({"documents": ints(0, 7), "k_runs": ((0, 8),)}, "documents must end at or after 8, the end"),
    ({"documents": ints(0, 0, 0, 1, 1, 2, 2, 2)}, "not one document id for each of the 8 tokens"),
    ({"documents": ints([0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 3, 4, 5, 6, 8])},  # the first sample
     r"not one document id for each of the 8 tokens, got \[2, 8\]"),
]  # fmt: skip
TWELVE = {"q": z(2, 8, 4, 4), "k": z(2, 12, 2, 4), "v": z(2, 12, 2, 4)}
OF_KEYS = ints(0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3)
FORWARD: Rows = [
    *NUMBERS,
    *[
        ({"q": q}, r"q must be \[B, S, H, D\], got shape \(")
        for q in (z(8, 4, 4), z(1, 2, 8, 4, 4))
    ],
    ({"k": z(8, 2, 4)}, r"k must be \[B, S, H, D\], got shape \(8, 2, 4\)"),
    ({"v": z(8, 2, 4)}, r"v must be \[B, S, H, D\], got shape \(8, 2, 4\)"),
    ({"q": z(1, 8, 4, 4)}, r"the same shape \[1, Sk"),
    ({"q": z(2, 9, 4, 4)}, None),
    ({"q": z(2, 8, 3, 4)}, "3 query heads are not divisible by 2 KV heads"),
    *[({"q": z(2, 8, 4, D)}, "the same shape") for D in (3, 5)],
    ({"k": z(2, 7, 2, 4)},
     r"\[2, Sk, Hkv, 4\] for q \(2, 8, 4, 4\), got \(2, 7, 2, 4\) and \(2, 8, 2, 4\)$"),
    ({"v": z(2, 8, 1, 4)}, "the same shape"),
    ({"v": z(2, 8, 2, 0)}, r"the same shape .* and \(2, 8, 2, 0\)$"),
    ({"v": z(2, 7, 2, 5)}, r"the same shape .* and \(2, 7, 2, 5\)$"),  # the shape as it was passed
    *[
        ({name: QKV[name].double()}, "the same floating dtype of at least 16 bits, got " + words)
        for name, words in (
            ("q", "torch.float64, torch.float32, torch.float32"),
            ("k", "torch.float32, torch.float64, torch.float32"),
            ("v", "torch.float32, torch.float32, torch.float64"),
        )
    ],
    ({n: x.long() for n, x in QKV.items()}, "the same floating dtype"),
    ({n: x.to(torch.float8_e4m3fn) for n, x in QKV.items()}, "at least 16 bits, got torch.float8"),
    ({"k": QKV["k"].to("meta")}, "one device, got cpu and meta"),
    ({"k": z(2, 8, 0, 4), "v": z(2, 8, 0, 4)}, "4 query heads are not divisible by 0 KV heads"),
    ({n: x.repeat(1, 1, 1, 64) for n, x in QKV.items()}, None),
    ({n: x.repeat(1, 1, 1, 65) for n, x in QKV.items()}, "1..256, got 260"),
    ({n: x[..., :1] for n, x in QKV.items()}, None),
    ({n: x[..., :0] for n, x in QKV.items()}, "1..256, got 0"),
    ({"sinks": z(4)}, None),
    ({"sinks": z(4, dtype=F16)}, None),
    ({"sinks": z(2)}, r"dtype and shape \(4,\), got torch.float32 \(2,\)"),
    ({"sinks": z(4, 1)}, r"dtype and shape \(4,\)"),
    ({"sinks": z(4, dtype=INT)}, r"sinks must have a float dtype .*, got torch.int64 \(4,\)"),
    ({"sinks": z(4).to("meta")}, "one device, got cpu and meta"),
    ({**TWELVE, "documents": ints(0, 12)}, None),
    ({**TWELVE, "documents": ints(0, 8)}, "documents must end at 12, the end"),
    ({**TWELVE, "documents": OF_KEYS}, "not one document id for each of the 12 tokens"),
    ({**TWELVE, "documents": ints([[0, 8], [0, 12]], [[0, 8], [3, 9]])}, None),
    ({**TWELVE, "documents": ints([[0, 8], [0, 12]], [[0, 8], [3, 13]])},
     r"documents must not extend past the 12 keys, got \[\[0, 12\], \[3, 13\]\]"),
]  # fmt: skip
O, LSE = z(2, 8, 4, 4), z(2, 4, 8)
HALF: Rows = [
    *FORWARD,
    ({"out_dtype": F64}, None),
    ({"out_dtype": INT}, "out_dtype must be a floating dtype"),
    ({"out_dtype": FLOAT8}, "out_dtype must be a floating dtype of at least 16 bits"),
    ({"into": (O, LSE)}, None),
    ({"into": (O, LSE), "sinks": z(4)}, "include sinks, initialize `into` with o = 0 and lse = si"),
    ({"into": (O, LSE), "out_dtype": torch.float32},
     "`into` cannot be combined with `sinks` or `out_dtype`"),
    ({"into": O}, r"`into` must be \(o, lse\)"),
    ({"into": (O,)}, r"`into` must be \(o, lse\), got tuple of 1"),
    ({"into": (O, LSE, LSE)}, r"`into` must be \(o, lse\), got tuple of 3"),
    ({"into": (O.to("meta"), LSE)}, "one device, got cpu and meta"),
    ({"into": (O, LSE.to("meta"))}, "one device, got cpu and meta"),
    (
        {"q": O[:, :0], "into": (torch.empty_strided((2, 0, 4, 4), (1, 1, 1, 2)), LSE[..., :0])},
        None,  # a tensor without elements may have any strides
    ),
    ({"into": (strided(O), LSE)}, "stride 1"),
    ({"into": (O[:, :7], LSE)}, "o to accumulate into must be"),
    ({"into": (O.half(), LSE)},
     r"o to accumulate into must be torch.float32 of shape \(2, 8, 4, 4"),
    ({"into": (O.clone().requires_grad_(), LSE)}, "must not require grad"),
    ({"into": (O[:, :, :1].expand_as(O), LSE)}, "elements must not share memory"),
    ({"into": (O, LSE[..., :7].contiguous())}, "lse to accumulate into must be"),
    ({"into": (O, LSE.double())}, "lse to accumulate into must be a contiguous torch.float32"),
    ({"into": (O, strided(LSE))}, "lse to accumulate into must be a contiguous"),
]  # fmt: skip
G, K = O.clone(), QKV["k"].clone()
BACKWARD: Rows = [
    *NUMBERS,
    *[
        ({name: x.to("meta"), "delta": None}, "one device, got cpu and meta")
        for name, x in (("do", O), ("o", O), ("lse", LSE))
    ],
    ({"delta": LSE.to("meta")}, "one device, got cpu and meta"),
    ({"do": z(2, 7, 4, 4)}, r"do must have the shape \(2, 8, 4, 4\) of q, got \(2, 7, 4, 4\)"),
    ({"o": z(2, 8, 4, 3)}, r"o must have the shape \(2, 8, 4, 4\) of q, got \(2, 8, 4, 3\)"),
    ({"lse": z(2, 8, 4)}, r"lse must be torch.float32 of shape \(2, 4, 8\), got .*32 \(2, 8, 4\)"),
    ({"lse": LSE.double()}, "lse must be torch.float32 of shape"),
    ({"lse": LSE.half()}, "lse must be torch.float32 of shape"),
    ({"delta": LSE}, None),
    ({"delta": LSE, "o": None}, None),
    ({"o": None}, "needs delta or o"),
    ({"delta": z(2, 8, 4)},
     r"delta must be torch.float32 of shape \(2, 4, 8\), got .* \(2, 8, 4\)"),
    ({"delta": LSE.double()}, "delta must be torch.float32 of shape"),
    ({"grad_dtype": F64}, None),
    ({"grad_dtype": INT}, "grad_dtype must be a floating dtype"),
    ({"grad_dtype": FLOAT8}, "grad_dtype must be a floating dtype of at least 16 bits"),
    ({"into": (G.to("meta"), None, None)}, "one device, got cpu and meta"),
    ({"into": (None, K, K.to("meta"))}, "one device, got cpu and meta"),
    ({"into": (G, None, None)}, None),
    ({"into": (None, K, K.clone())}, None),
    ({"into": (None, K, None)}, "both dk and dv, or neither"),
    ({"into": (None, None, K)}, "both dk and dv, or neither"),
    ({"into": (K, None, None)},
     r"dq to accumulate into must be .* \(2, 8, 4, 4\) .* \(2, 8, 2, 4\), strides"),
    ({"into": (None, G, K)},
     r"dk to accumulate into must be .* \(2, 8, 2, 4\) .* \(2, 8, 4, 4\), strides"),
    ({"into": (None, K, G)},
     r"dv to accumulate into must be .* \(2, 8, 2, 4\) .* \(2, 8, 4, 4\), strides"),
    ({"into": (G.double(), None, None)},
     "dq to accumulate into must be torch.float32 .* got torch.float64"),
    ({"into": (strided(G), None, None)}, "dq to accumulate into .* stride 1 in the last dim"),
]  # fmt: skip
DELTA: Rows = [
    ({}, None),
    ({"do": O.half()}, None),
    ({"do": O[:, :7]}, r"the same shape \[B, S, H, D\], got \(2, 8, 4, 4\) and \(2, 7, 4, 4\)"),
    ({"o": O[0], "do": O[0]}, r"the same shape \[B, S, H, D\]"),
    ({"dlse": z(2, 8, 4)}, r"dlse must have the shape \(2, 4, 8\), got \(2, 8, 4\)"),
]
PACKED: Rows = [  # documents of a model, whose keys have no separate boundaries
    ({"documents": None}, None),
    ({"documents": ints(0, 3, 8)}, None),
    ({"documents": ints([0, 8], [0, 8])}, None),
    ({"documents": ints([[0, 8], [0, 8]], [[0, 8], [0, 8]])}, "must have the shape"),
    ({"documents": ints(0, 7)}, "documents must end at 8, the end"),
]
MERGED: Rows = [
    ({}, None),
    ({"o_b": O[:, :7]}, r"the same shape .*, got \(2, 8, 4, 4\) and \(2, 7, 4, 4\)"),
    ({"o_a": O[0], "o_b": O[0]}, "the same shape"),
    ({"lse_a": z(2, 8, 4)}, r"= \(2, 4, 8\), got \(2, 8, 4\) and \(2, 4, 8\)"),
    ({"lse_b": z(2, 8, 4)}, r"= \(2, 4, 8\), got \(2, 4, 8\) and \(2, 8, 4\)"),
    ({"lse_b": LSE.double()}, r"all of the same dtype, got \['torch.float32', 'torch.float64'\]"),
    ({"o_a": O.double()}, "all of the same dtype"),
    ({n: x.half() for n, x in (("o_a", O), ("o_b", O), ("lse_a", LSE), ("lse_b", LSE))}, "float32"),
    ({"o_b": O.to("meta")}, r"one device, got \['cpu', 'meta'\]"),
    ({"lse_a": LSE.to("meta")}, r"one device, got \['cpu', 'meta'\]"),
]

LSES = {"lse_a": LSE, "lse_b": LSE}
TABLES = {
    "attention": Table(attention, QKV, FORWARD),
    "attention_fwd": Table(attention_fwd, QKV, HALF),
    "attention_bwd": Table(attention_bwd, {**QKV, "do": O, "o": O, "lse": LSE, "delta": None},
                           BACKWARD),
    "attention_delta": Table(attention_delta, {"o": O, "do": O}, DELTA),
    "packed": Table(check_packed, {"documents": None, "tokens": z(2, 8)}, PACKED),
    "merge": Table(merge, {"o_a": O, "o_b": O, **LSES}, MERGED),
    "merge_": Table(lambda o_a, lse_a, o_b, lse_b: merge_(o_a.clone(), lse_a.clone(), o_b, lse_b),
                    {"o_a": O, "o_b": O, **LSES}, MERGED),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_what_breaks_one_rule_is_refused_and_what_breaks_none_is_not(name) -> None:
    TABLES[name].check()


def test_one_of_many_is_not_broadcast() -> None:
    alone = {"attention": {("q", 1), ("v", 3)}, "attention_fwd": {("q", 1)}}
    alone |= {"packed": {("tokens", 0), ("tokens", 1)}}
    for name, table in TABLES.items():
        assert table.one_of_many() == alone.get(name, set()), name
    of_one = {"k": QKV["k"][:1], "v": QKV["v"][:1]}
    for call in (attention, attention_fwd):
        check(lambda call=call: call(**QKV | of_one), r"the same shape \[2, Sk, Hkv, 4\]")


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor_is_called_by_its_name(name) -> None:
    check(lambda: attention(**QKV | {name: None}), f"{name} must be a tensor, got None")


@pytest.mark.parametrize("name", ["wndow", "table"])  # the second is a field of the internal record
@pytest.mark.parametrize("call", [attention_fwd, attention_bwd])
def test_an_unknown_keyword_is_named_with_the_function(call, name) -> None:
    given = (O, O, O) if call is attention_fwd else (O, O, O, O, LSE, LSE)
    words = f"{call.__name__}() got an unexpected keyword argument {name!r}"
    with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
        call(*given, **{name: None})
