"""The registrar of operators: records as arguments, gradients, and the
dispatch modes that see them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from close import assert_close_f64
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from well_formed import well_formed

from warpweave.kernels.runtime.op import Op, flatten, unflatten


class Inner(NamedTuple):
    start: int
    name: str | None


class Scale(NamedTuple):
    factor: float
    flags: tuple
    offset: torch.Tensor | None
    dtype: torch.dtype | None = None


RECORDS = (Scale, Inner)


@pytest.mark.parametrize(
    "record",
    [
        None,
        Scale(-0.0, (), None),
        Scale(1e-300, (True, 1, False, 0, None), None, torch.bfloat16),
        Scale(1.0, ("two words", "", Inner(0, "")), None),
        Scale(float("inf"), (Inner(-(2**62), "a"), (Inner(0, None), (3,)), "b"), None),
        (Inner(1, "x"), 2.5, Inner(2, "y")),
    ],
    ids=str,
)
def test_what_is_flattened_comes_out_as_it_went_in(record) -> None:
    _, *flat = flatten(record, RECORDS)
    found = unflatten(*flat, RECORDS)
    assert repr(found) == repr(record)  # 1 is not True, and a record is not the tuple of its fields


def test_records_that_differ_anywhere_are_flattened_differently() -> None:
    values = (None, False, True, 0, 1, 0.0, 1.0, "0", torch.float32, torch.float64, (), (None,))
    made = [Scale(1.0, (value,), None) for value in (*values, Inner(0, None), (0, None))]
    assert len({repr(flatten(record, RECORDS)) for record in made}) == len(made)


def test_symbols_of_a_shape_cross_the_border_as_they_are() -> None:
    """Tracers other than dynamo pass them as types of torch's own."""
    (n,) = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(5)).shape
    half = n / 2
    assert (type(n), type(half)) == (torch.SymInt, torch.SymFloat)
    _, *flat = flatten(Scale(half, (n, Inner(n, "a")), None), RECORDS)
    found = unflatten(*flat, RECORDS)
    assert found.factor is half
    assert found.flags[0] is found.flags[1].start is n


def test_what_no_operator_can_hold_is_refused() -> None:
    class Other(NamedTuple):
        n: int

    for value in (Other(1), {1, 2}, b"x"):
        with pytest.raises((ValueError, TypeError)):
            flatten(Scale(1.0, (value,), None), RECORDS)


# ---------------------------------------------------------------- operators

seen: list[str] = []


def _run(x: torch.Tensor, scale: Scale, y: torch.Tensor | None) -> torch.Tensor:
    seen.append(type(x).__name__)
    z = x * scale.factor if scale.offset is None else x * scale.factor + scale.offset
    return z.clone() if y is None else z + y


def _save(ctx, inputs, output) -> None:
    _, ctx.scale, ctx.y = inputs[0], inputs[1]._replace(offset=None), inputs[2] is not None


def _backward(ctx, dz):
    return dz * ctx.scale.factor, None, dz.clone() if ctx.y else None


def _fake(x, scale, y):
    return torch.empty_like(x)


AFFINE = Op("test_affine", _run, _fake, records=RECORDS, gradient=(_save, _backward))
DIRECT = Op("test_direct", _run, _fake, records=RECORDS, direct=True)


def test_gradients_come_through_records_with_tensors_in_them() -> None:
    x, y = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    offsets = (None, torch.randn(3, dtype=torch.float64))
    for offset, other in itertools.product(offsets, (None, y)):
        z = AFFINE(x, Scale(2.5, (Inner(0, "a"),), offset), other)
        parts = [x * 2.5, *(t for t in (offset, other) if t is not None)]
        assert_close_f64(z, sum(parts), 1e-15)
        (dx,) = torch.autograd.grad(z.sum(), x)
        assert_close_f64(dx, torch.full_like(x, 2.5), 1e-15)


def test_compilers_see_one_operator_and_the_numbers_of_a_record_stay_symbols() -> None:
    class Shift(NamedTuple):
        by: int

    def add(x: torch.Tensor, shift: Shift) -> torch.Tensor:
        return x + shift.by

    add.__annotations__ = {"x": torch.Tensor, "shift": Shift, "return": torch.Tensor}
    op = Op("test_shift", add, lambda x, shift: torch.empty_like(x), records=(Shift,))
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    compiled = torch.compile(lambda x, n: op(x, Shift(n)), backend=backend, fullgraph=True)
    for n in (3, 4, 5, 6):
        assert compiled(torch.zeros(2), n).tolist() == [n, n]
    assert len(graphs) == 2  # the first, and one for every n
    packet = torch.ops.warpweave.test_shift
    assert packet.default in graphs[-1] or packet in graphs[-1]


class _Heard(TorchDispatchMode):
    """A mode that notes the operators it sees."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Counted(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Sub(torch.Tensor):
    pass


def test_modes_and_subclasses_see_the_operator_and_autograd_its_function() -> None:
    x, scale = torch.ones(2, requires_grad=True), Scale(2.0, (), None)
    z = AFFINE(x, scale, None)
    assert type(z.grad_fn).__name__ == "test_affineBackward"  # ours, not torch.library's
    with torch.no_grad():
        assert AFFINE(x, scale, None).grad_fn is None
    name = "warpweave.test_affine"
    for mode in (_Heard(), _Counted()):
        seen.clear()
        with mode:
            assert AFFINE(x, scale, None).tolist() == [2.0, 2.0]
        assert any(name in each for each in seen), mode
    traced = torch.jit.trace(lambda x: AFFINE(x, scale, None), x.detach())
    assert "warpweave::test_affine" in str(traced.graph)
    meta = AFFINE(torch.ones(2, device="meta"), scale, None)
    assert meta.device.type == "meta"  # computed by `fake`; `run` is not called
    sub = AFFINE(x.detach().as_subclass(_Sub), scale, None)
    assert type(sub) is _Sub
    grown = AFFINE(x.detach(), scale, x.detach().as_subclass(_Sub))
    assert type(grown) is _Sub
    seen.clear()
    with pytest.raises(RuntimeError, match="with functorch transforms"):
        torch.func.grad(lambda x: AFFINE(x, scale, None).sum())(x.detach())
    with torch.no_grad():  # one call per sample, because no kernel accepts a tensor of samples
        torch.func.vmap(lambda x: AFFINE(x, scale, None))(torch.ones(3, 2))
    assert seen == ["Tensor"] * 3


def test_an_operator_without_a_gradient_says_so_where_one_is_wanted() -> None:
    plain = Op("test_no_gradient", _run, _fake, records=RECORDS)
    x, scale = torch.ones(2, requires_grad=True), Scale(2.0, (), None)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        plain(x, scale, None).sum().backward()
    with torch.no_grad():
        assert plain(x, scale, None).tolist() == [2.0, 2.0]
    assert plain(x.detach(), scale, None).tolist() == [2.0, 2.0]


def _sum_of(parts: list[torch.Tensor], scale: Scale | None, y: torch.Tensor | None) -> torch.Tensor:
    seen.append("sum")
    total = sum(parts) * (1.0 if scale is None else scale.factor)
    return total if y is None else total + y


OF_LISTS = Op("test_of_lists", _sum_of, lambda parts, *_: parts[0] + 0, records=RECORDS)


def test_tensors_in_lists_and_records_are_seen_and_a_record_may_be_none() -> None:
    x, y, offset = torch.ones(2), torch.full((2,), 5.0), torch.zeros(2)
    scales = (None, Scale(3.0, (), None), Scale(3.0, (), offset))
    for scale, other in itertools.product(scales, (None, y)):
        given = [x, y], scale, other
        assert OF_LISTS.nested(OF_LISTS.flattened(given)) == list(given)
        flat = OF_LISTS.operator(*OF_LISTS.flattened(given))
        assert torch.equal(flat, OF_LISTS(*given))
        assert torch.equal(flat, 6 * (1 if scale is None else 3) * x + (5 if other is y else 0))
    wanted = torch.ones(2, requires_grad=True)
    of_each = (([x, wanted], None, None), ([x], Scale(3.0, (), wanted), None), ([x], None, wanted))
    for given in of_each:
        with pytest.raises(RuntimeError, match="no autograd formula"):
            OF_LISTS(*given).sum().backward()
    seen.clear()
    nowhere = torch.ones(2, device="meta")
    assert OF_LISTS([nowhere, nowhere], None, None).is_meta
    assert OF_LISTS([x.to("meta")], Scale(1.0, (), nowhere), None).is_meta
    assert not seen, "`fake` answers"


def test_a_direct_op_is_a_plain_call_but_for_compilers() -> None:
    x, scale = torch.ones(2), Scale(2.0, (), None)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert AFFINE(fake, scale, None).shape == (2,)  # `fake` answers; `run` is not called
    seen.clear()
    assert DIRECT(x, scale, None).tolist() == [2.0, 2.0]
    assert seen == ["Tensor"]
    called = []

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(lambda x: DIRECT(x, scale, None), backend=backend, fullgraph=True)
    assert compiled(x).tolist() == [2.0, 2.0]
    assert [name for name in called if "test_direct" in name] == called != []


def test_an_operator_copies_outputs_that_are_views_of_one_result() -> None:
    """A direct call returns the views. Compilers may not be given outputs that share memory."""

    def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return *torch.cat((x, -x), 1).chunk(2, 1), x.sum(1)

    def fake(x):
        return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(len(x))

    op = Op("test_halves", halves, fake, direct=True)
    x = torch.randn(3, 4)
    well_formed(op, x)
    left, right, _ = op(x)
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    compiled = torch.compile(lambda x: op(x * 1), fullgraph=True, backend="aot_eager")(x)
    assert all(map(torch.equal, compiled, (x, -x, x.sum(1))))
    assert all(y.is_contiguous() for y in compiled)
    assert len({y.untyped_storage().data_ptr() for y in compiled}) == 3


def test_a_call_and_its_backward_import_no_compiler() -> None:
    """The import takes two seconds and 60 MB of memory in every process that never compiles."""
    code = (
        "import sys, torch\n"
        "from warpweave.kernels.attention import attention\n"
        "q, k, v = torch.randn(3, 1, 4, 2, 8, requires_grad=True)\n"
        "attention(q, k, v, causal=True, impl='torch').sum().backward()\n"
        "assert torch.ops.warpweave\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
