"""The dtype an op computes in: its operands', or autocast's, which leaves float64 alone."""

import pytest
import torch

from warpweave.kernels.runtime.dtypes import no_autocast, operand_dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_operands_of_one_dtype_are_computed_in_it(dtype):
    x, bias = torch.zeros(2, 3, dtype=dtype), torch.zeros(3, dtype=dtype)
    assert operand_dtype("op", x, {"weight": x, "bias": bias, "none": None}) == dtype


def test_autocast_chooses_for_all_but_float64():
    x, wide = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert operand_dtype("op", x, {"weight": x.half()}) == torch.bfloat16
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
