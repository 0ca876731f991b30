"""The dtype an op computes in: its operands', or autocast's, which leaves float64 unchanged."""

import pytest
import torch
from op_cases import CASES

from warpweave.kernels.attention import attention
from warpweave.kernels.cases import cases
from warpweave.kernels.runtime.dtypes import no_autocast, operand_dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_operands_of_one_dtype_are_computed_in_it(dtype):
    x, bias = torch.zeros(2, 3, dtype=dtype), torch.zeros(3, dtype=dtype)
    assert operand_dtype("op", x, {"weight": x, "bias": bias, "none": None}) == dtype


def test_autocast_chooses_for_all_but_float64():
    x, wide = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert operand_dtype("op", x, {"weight": x.half()}) == torch.bfloat16
        for low in (x.half(), x.bfloat16()):  # 16 bits already
            assert operand_dtype("op", low, {"weight": x}) == torch.bfloat16
        assert operand_dtype("op", wide, {"weight": wide}) == torch.float64
        with pytest.raises(ValueError, match=r"dtypes differ: x torch.*64, weight torch.*32"):
            operand_dtype("op", wide, {"weight": x})
        with no_autocast(x):
            assert (x @ x.t()).dtype == torch.float32
        assert (x @ x.t()).dtype == torch.bfloat16


def test_operands_of_several_dtypes_are_refused_by_name():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"op: dtypes differ: x torch.float32, bias torch.float16"):
        operand_dtype("op", x, {"weight": None, "bias": x.half()})
    for low in ({"weight": x, "bias": x.half()}, {"weight": x.half(), "bias": x}):
        with pytest.raises(ValueError, match=r"weight torch.float\d\d, bias torch.float\d\d$"):
            operand_dtype("op", x, {**low, "up_bias": None})


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("op", [name for name in CASES if "gemm" not in name])
def test_under_autocast_float64_changes_no_bit_in_any_op_there_and_back(op, impl):
    _, shapes, function, *_ = CASES[op]
    given = [torch.randn(s, dtype=torch.float64) for s in shapes]

    def run(*, backward_too: bool, on: bool) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in given]
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            y = function(*leaves, impl=impl)
            total = sum(t.sin().sum() for t in (y if isinstance(y, tuple) else (y,)))
            if backward_too:
                total.backward()
        if not backward_too:
            total.backward()
        return [total.detach(), *(t.grad for t in leaves)]

    plain = run(backward_too=True, on=False)
    assert all(t.dtype == torch.float64 for t in plain)
    for backward_too in (True, False):
        assert all(map(torch.equal, plain, run(backward_too=backward_too, on=True)))


def test_attention_of_what_is_nowhere_has_shapes_without_an_autocast():
    q = torch.empty(1, 5, 2, 8, device="meta", requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(q, q, q)
    assert (o.is_meta, o.shape, o.dtype) == (True, q.shape, q.dtype)


ON_META = [case for case in cases(torch.device("meta"), 6) if case.differentiable]


@pytest.mark.parametrize("case", ON_META, ids=lambda case: case.name)
def test_meta_tensors_ignore_autocast_and_give_shapes_and_dtypes(case):
    given = [torch.empty(s, device="meta", requires_grad=True) for s in case.shapes]
    with torch.autocast("cpu", torch.bfloat16), no_autocast(given[0]):
        assert torch.is_autocast_enabled("cpu")
        found = case.ours(*given, impl=None)
    found = found if isinstance(found, tuple) else (found,)
    assert all(t.is_meta and t.dtype == torch.float32 for t in found)
    grads = torch.autograd.grad(sum(t.sum() for t in found), given)
    assert [g.shape for g in grads] == [t.shape for t in given]
