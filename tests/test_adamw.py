"""AdamW over flat shards against torch.optim.AdamW and the textbook formula in float64."""

from __future__ import annotations

import pytest
import torch
from close import assert_close_f64, assert_error_budget, relative_error
from well_formed import told_right, well_formed

from warpweave.kernels import adamw, reference
from warpweave.kernels.adamw import adamw_step, sum_of_squares

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
RATES = {"lr": 0.013, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def _start(n: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    state = {"master": torch.randn(n), "m": torch.zeros(n), "v": torch.zeros(n)}
    return {k: x.to(dtype) for k, x in state.items()} | {"step": torch.zeros(())}


def _textbook(state, grads, scale=1.0, **rates) -> dict[str, torch.Tensor]:
    state = {k: x.double() for k, x in state.items()}
    rates = {**RATES, **rates}
    for step, grad in enumerate(grads, 1):
        own = (state["master"], grad, state["m"], state["v"])
        new = reference.adamw_step(*own, step=step, grad_scale=scale, **rates)
        state = dict(zip(("master", "m", "v"), new))
    return state


@IMPLS
@pytest.mark.parametrize("n", [1, 7, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_steps_equal_the_textbook_in_float64_whatever_gradients_arrive_in(dtype, n, impl):
    state = _start(n)
    grads = [torch.randn(n).to(dtype) for _ in range(4)]
    truth = _textbook(state, grads, scale=0.37)
    scale = torch.tensor(0.37, dtype=torch.float64)
    for grad in grads:
        before = grad.clone()
        adamw_step(grad=grad, grad_scale=scale, impl=impl, **state, **RATES)
        assert torch.equal(grad, before)
    assert state["step"] == 4
    for name, expected in truth.items():
        assert_close_f64(state[name], expected, 1e-13)


@pytest.mark.parametrize(
    "amount", [{}, {"weight_decay": 0.0}, {"beta1": 0.0}, {"beta2": 0.0}, {"eps": 1e-2}]
)
@IMPLS
def test_steps_equal_torch_optim(amount, impl):
    rates = {**RATES, **amount}
    state = _start(37)
    twin = state["master"].clone().requires_grad_(True)
    own = {name: rates[name] for name in ("lr", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW([twin], betas=(rates["beta1"], rates["beta2"]), **own)
    for _ in range(3):
        grad = torch.randn(37, dtype=torch.float64)
        adamw_step(grad=grad, impl=impl, **state, **rates)
        twin.grad = grad
        optimizer.step()
        assert_close_f64(state["master"], twin, 1e-13)


def test_a_million_and_three_elements_in_chunks():
    n = 1_000_003
    state = _start(n, torch.float32)
    param = torch.empty(n, dtype=torch.bfloat16)
    grads = [torch.randn(n) for _ in range(2)]
    truth = _textbook(state, grads, scale=0.5)
    for grad in grads:
        adamw_step(grad=grad, grad_scale=torch.tensor(0.5), param=param, **state, **RATES)
    for name, expected in truth.items():
        assert_close_f64(state[name], expected, 1e-6)
    assert torch.equal(param, state["master"].bfloat16())


@IMPLS
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_float32_stays_within_the_error_budget_and_the_copy_is_exact(low, impl):
    n = 777
    state = _start(n, torch.float32)
    twin = state["master"].clone().requires_grad_(True)
    optimizer = torch.optim.AdamW([twin], lr=RATES["lr"], betas=(0.9, 0.95), weight_decay=0.1)
    param = torch.zeros(n, dtype=low)
    grads = [torch.randn(n).to(low) for _ in range(3)]  # a low-precision gradient is used as it is
    truth = _textbook(state, grads)
    for grad in grads:
        adamw_step(grad=grad, param=param, impl=impl, **state, **RATES)
        twin.grad = grad.float()
        optimizer.step()
        assert torch.equal(param, state["master"].to(low))
    assert_error_budget(state["master"], twin.detach(), truth["master"])


@IMPLS
@pytest.mark.parametrize("skip", [1.0, 3.0, -1.0, True, float("inf"), float("nan")])
def test_a_skipped_step_leaves_everything_untouched(skip, impl):
    state = _start(11)
    adamw_step(grad=torch.randn(11, dtype=torch.float64), impl=impl, **state, **RATES)
    param = torch.randn(11).half()  # not a copy of master: it must stay unchanged as well
    before = {k: x.clone() for k, x in (state | {"param": param}).items()}
    given = {"grad": torch.full((11,), float("nan"), dtype=torch.float64), "param": param}
    given |= {"skip": torch.tensor(skip), "grad_scale": torch.tensor(float("inf"))}
    adamw_step(**given, impl=impl, **state, **RATES)
    for name, x in (state | {"param": param}).items():
        assert torch.equal(x, before[name]), name
    adamw_step(grad=before["m"], skip=torch.tensor(0.0), impl=impl, **state, **RATES)
    assert state["step"] == 2
    assert not torch.equal(state["master"], before["master"])


@IMPLS
def test_shards_of_a_buffer_step_as_the_whole_does(impl):
    whole, grad = _start(1500), torch.randn(1500, dtype=torch.float64)
    pieces = [{k: x[a:b].clone() for k, x in whole.items() if x.ndim} for a, b in _CUTS]
    adamw_step(grad=grad, impl=impl, **whole, **RATES)
    for (a, b), piece in zip(_CUTS, pieces):
        adamw_step(grad=grad[a:b], step=torch.zeros(()), impl=impl, **piece, **RATES)
    joined = torch.cat([p["master"] for p in pieces])
    if impl == "triton":
        assert torch.equal(joined, whole["master"])
    assert_close_f64(joined, whole["master"], 1e-15)


_CUTS = [(0, 3), (3, 3), (3, 1100), (1100, 1500)]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("lr", 0.013 * (1 + 1e-9)), ("beta2", 0.9500001), ("eps", 1.001e-8),
     ("weight_decay", 0.1000001), ("scale", 1.0000001)],
)  # fmt: skip
def test_the_comparison_sees_planted_faults(name, wrong):
    """The first is the effect of a learning rate rounded to float32."""
    state, grads = _start(50), [torch.randn(50, dtype=torch.float64) * 1e-6 for _ in range(3)]
    right, found = _textbook(state, grads), _textbook(state, grads, **{name: wrong})
    assert max(relative_error(found[k], right[k]) for k in right) > 1e-12


@IMPLS
def test_operators_pass_opcheck_and_compile_whole(impl):
    state = _start(9, torch.float32)
    grad, param = torch.randn(9), torch.zeros(9, dtype=torch.bfloat16)
    zero, half = torch.tensor(0.0), torch.tensor(0.5)
    arguments = (state["master"], grad, state["m"], state["v"])
    step = adamw.begin_adamw(torch.tensor(1.0), impl=impl, **RATES)
    well_formed(adamw._adamw_update, *arguments, param, step, half, zero, True, impl)
    for rate in (None, torch.tensor(0.1, dtype=torch.float64)):
        well_formed(adamw._adamw_scalars, torch.tensor(3.0), rate, 0.1, 0.9, 0.95, 0.1, impl)
    well_formed(adamw._sum_of_squares, [grad, grad[:3].clone()], impl)
    for dtype in (torch.bfloat16, torch.float64):
        told_right(adamw._sum_of_squares, [grad.to(dtype)], impl)

    def update(grad, low, **state):
        scale = 1 / (1 + sum_of_squares(grad, impl=impl).sqrt())
        adamw_step(grad=grad, grad_scale=scale, param=low, impl=impl, **state, **RATES)

    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
    twin = {k: x.clone() for k, x in state.items()}
    low, low_twin = param.clone(), param.clone()
    update(grad, low, **state)
    with torch.autocast("cpu", torch.bfloat16):  # which has no effect here
        compiled(grad, low_twin, **twin)
    assert all(torch.equal(state[k], twin[k]) for k in state)
    assert torch.equal(low, low_twin)
    assert low.any()


@IMPLS
def test_ranges_with_and_without_decay_are_calls_of_their_own(impl):
    state, grad = _start(50), torch.randn(50, dtype=torch.float64)
    decay = torch.arange(50) < 17
    truth, mask = _textbook(state, [grad]), _textbook(state, [grad], weight_decay=0.0)
    for part, rate in ((slice(0, 17), 0.1), (slice(17, 50), 0.0)):
        piece = {k: x[part] for k, x in state.items() if x.ndim}
        rates = {**RATES, "weight_decay": rate}
        adamw_step(grad=grad[part], step=torch.zeros(()), impl=impl, **piece, **rates)
    expected = torch.where(decay, truth["master"], mask["master"])
    assert_close_f64(state["master"], expected, 1e-13)
    assert relative_error(truth["master"], expected) > 1e-4


# ------------------------------------------------------------------- sum of squares


@pytest.mark.parametrize(
    ("impl", "n"),
    [("triton", n) for n in (0, 1, 65537)] + [("torch", n) for n in (0, 1, 1_000_003)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sum_of_squares_is_accurate_and_repeats(dtype, n, impl):
    x = (torch.randn(n, dtype=torch.float64) + 2).to(dtype)
    x[-1:] = 100.0
    y = sum_of_squares(x, impl=impl)
    assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert y.ndim == 0
    assert_close_f64(y, x.double().square().sum(), 1e-13 if dtype == torch.float64 else 2e-7)
    assert torch.equal(y, sum_of_squares(x, impl=impl))
    if n > 1:  # the last element, in a separate tile, is not lost
        assert relative_error(sum_of_squares(x[:-1], impl=impl), y) > 1e-3


@pytest.mark.filterwarnings("ignore:overflow")
@IMPLS
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e30])
def test_sum_of_squares_tells_of_what_is_not_finite(bad, impl):
    x = torch.ones(2000)
    x[1999] = bad
    assert not sum_of_squares(x, impl=impl).isfinite()


def test_rows_of_squares_are_added_in_float64():
    """A float32 sum that has reached 2**24 no longer grows by ones."""
    x = torch.zeros(1023 * 1024 + 5)
    x[::1024], x[0], x[-1] = 1.0, 2.0**12, 3.0
    assert sum_of_squares(x, impl="torch") == 2**24 + 1023 + 9


@IMPLS
def test_autograd_records_no_step_on_leaves_that_require_gradients(impl):
    state, param = _start(9, torch.float32), torch.zeros(9, dtype=torch.bfloat16)
    plain = {k: x.clone() for k, x in state.items()}
    grad = torch.randn(9)
    adamw_step(grad=grad, impl=impl, **plain, **RATES)
    for x in (state["master"], param, grad):
        x.requires_grad_()
    adamw_step(grad=grad, param=param, impl=impl, **state, **RATES)
    assert state["master"].is_leaf
    assert param.is_leaf
    assert not any(x.requires_grad for name, x in state.items() if name != "master")
    assert all(torch.equal(x, plain[name]) for name, x in state.items())
