"""AdamW over flat shards against torch.optim.AdamW and the textbook formula in float64."""

from __future__ import annotations

import pytest
import torch
from close import assert_close_f64, assert_error_budget, relative_error
from traffic import traffic

from warpweave.kernels import adamw, cost, reference
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
        new = reference.adamw_step(
            state["master"], grad.double(), state["m"], state["v"],
            step=step, grad_scale=scale, **rates,
        )  # fmt: skip
        state = dict(zip(("master", "m", "v"), new))
    return state


@IMPLS
@pytest.mark.parametrize("n", [1, 7, 1024, 2500])
def test_steps_equal_the_textbook_in_float64(n, impl):
    state = _start(n)
    grads = [torch.randn(n, dtype=torch.float64) for _ in range(4)]
    truth = _textbook(state, grads, scale=0.37)
    scale = torch.tensor(0.37, dtype=torch.float64)
    for grad in grads:
        before = grad.clone()
        adamw_step(grad=grad, grad_scale=scale, impl=impl, **state, **RATES)
        assert torch.equal(grad, before)
    assert state["step"] == 4
    for name, expected in truth.items():
        assert_close_f64(state[name], expected, 1e-13)


@pytest.mark.parametrize("amount", [{}, {"weight_decay": 0.0}, {"beta1": 0.0}, {"eps": 1e-2}])
@IMPLS
def test_steps_equal_torch_optim(amount, impl):
    rates = {**RATES, **amount}
    state = _start(37)
    twin = state["master"].clone().requires_grad_(True)
    optimizer = torch.optim.AdamW(
        [twin],
        lr=rates["lr"],
        betas=(rates["beta1"], rates["beta2"]),
        eps=rates["eps"],
        weight_decay=rates["weight_decay"],
    )
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
    state, twin = _start(n, torch.float32), None
    twin = state["master"].clone().requires_grad_(True)
    optimizer = torch.optim.AdamW([twin], lr=RATES["lr"], betas=(0.9, 0.95), weight_decay=0.1)
    param = torch.zeros(n, dtype=low)
    grads = [torch.randn(n).to(low) for _ in range(3)]  # a low precision gradient is read as it is
    truth = _textbook(state, grads)
    for grad in grads:
        adamw_step(grad=grad, param=param, impl=impl, **state, **RATES)
        twin.grad = grad.float()
        optimizer.step()
        assert torch.equal(param, state["master"].to(low))
    assert_error_budget(state["master"], twin.detach(), truth["master"])


@IMPLS
@pytest.mark.parametrize("skip", [1.0, 3.0, True, float("inf")])
def test_a_skipped_step_leaves_everything_untouched(skip, impl):
    state = _start(11)
    adamw_step(grad=torch.randn(11, dtype=torch.float64), impl=impl, **state, **RATES)
    param = torch.randn(11).half()  # no copy of master: it must keep even that
    before = {k: x.clone() for k, x in (state | {"param": param}).items()}
    grad = torch.full((11,), float("nan"), dtype=torch.float64)
    scale = torch.tensor(float("inf"))
    adamw_step(
        grad=grad,
        param=param,
        skip=torch.tensor(skip),
        grad_scale=scale,
        impl=impl,
        **state,
        **RATES,
    )
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
    "fault",
    [
        {"lr": 0.013 * (1 + 1e-9)},  # what a learning rate rounded to float32 would do
        {"beta2": 0.9500001},
        {"eps": 1.001e-8},
        {"weight_decay": 0.1000001},
        {"scale": 1.0000001},
    ],
)
def test_the_comparison_sees_planted_faults(fault):
    state, grads = _start(50), [torch.randn(50, dtype=torch.float64) * 1e-6 for _ in range(3)]
    right, wrong = _textbook(state, grads), _textbook(state, grads, **fault)
    assert max(relative_error(wrong[k], right[k]) for k in right) > 1e-12


@IMPLS
def test_operators_pass_opcheck_and_compile_whole(impl):
    state = _start(9, torch.float32)
    grad, param = torch.randn(9), torch.zeros(9, dtype=torch.bfloat16)
    zero, half = torch.tensor(0.0), torch.tensor(0.5)
    arguments = (state["master"], grad, state["m"], state["v"], state["step"])
    op, rates = torch.ops.warpweave.adamw_step.default, RATES.values()
    for mask in (None, torch.arange(9) % 2 == 0):
        options = (param, half, zero, mask, *rates, 1, 2**40, 3, impl)
        torch.library.opcheck(op, (*arguments, *options))
    torch.library.opcheck(torch.ops.warpweave.sum_of_squares.default, (grad, impl))

    def update(grad, low, **state):
        scale = 1 / (1 + sum_of_squares(grad, impl=impl).sqrt())
        adamw_step(grad=grad, grad_scale=scale, impl=impl, **state, **RATES)
        pure = {"master": low, "m": state["m"], "v": state["v"], "step": state["step"]}
        random = {"stochastic_rounding": True, "start": 5, "decay_mask": grad > 0}
        adamw_step(grad=grad, **pure, **RATES, **random, impl=impl)

    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
    twin = {k: x.clone() for k, x in state.items()}
    low, low_twin = param.clone(), param.clone()
    update(grad, low, **state)
    with torch.autocast("cpu", torch.bfloat16):  # which has nothing to do here
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


@IMPLS
def test_a_mask_of_what_decays_equals_two_groups_of_torch_optim(impl):
    n, steps = 2503, 3
    mask, grads = torch.rand(n) < 0.5, torch.randn(steps, n, dtype=torch.float64)
    state = _start(n)
    first = {k: x.clone() for k, x in state.items()}
    groups = [
        {"params": [state["master"][at].clone().requires_grad_(True)], "weight_decay": rate}
        for at, rate in ((mask, RATES["weight_decay"]), (~mask, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATES["lr"], betas=(0.9, 0.95), eps=RATES["eps"])
    scale, skip = torch.tensor(0.37, dtype=torch.float64), torch.tensor(0.0)
    param, more = torch.empty(n, dtype=torch.bfloat16), {"decay_mask": mask, "impl": impl}
    for grad in grads:
        for group, at in zip(groups, (mask, ~mask)):
            group["params"][0].grad = 0.37 * grad[at]
        optimizer.step()
        adamw_step(grad=grad, grad_scale=scale, skip=skip, param=param, **more, **state, **RATES)
    truth = torch.empty(n, dtype=torch.float64)
    for group, at in zip(groups, (mask, ~mask)):
        truth[at] = group["params"][0].detach()
    assert_close_f64(state["master"], truth, 1e-13)
    assert_close_f64(_textbook(first, grads, 0.37, decay_mask=mask)["master"], truth, 1e-13)
    assert torch.equal(param, state["master"].bfloat16())
    for fault in (~mask, None):  # inverted, ignored
        wrong = {k: x.clone() for k, x in first.items()}
        wrong |= {"decay_mask": fault, "grad_scale": scale}
        for grad in grads:
            adamw_step(grad=grad, impl=impl, **wrong, **RATES)
        assert relative_error(wrong["master"], truth) > 1e-4
    before = {k: x.clone() for k, x in state.items()}
    adamw_step(grad=grads[0], skip=torch.tensor(1.0), param=param, **more, **state, **RATES)
    assert all(torch.equal(state[k], before[k]) for k in state)


@IMPLS
@pytest.mark.parametrize("kind", ["float32", "copy", "bfloat16 masters"])
def test_a_mask_chooses_between_the_steps_with_and_without_decay(kind, impl):
    n = 1009 + 2**16 * (impl == "torch" and kind != "float32")  # torch: more than a chunk
    dtype = torch.bfloat16 if kind == "bfloat16 masters" else torch.float32
    first = {"master": torch.randn(n).to(dtype), "m": torch.randn(n), "v": torch.rand(n)}
    grad, mask = torch.randn(n).bfloat16(), torch.rand(n) < 0.5

    def stepped(decay_mask, weight_decay=RATES["weight_decay"]):
        state = {k: x.clone() for k, x in first.items()}
        param = torch.empty(n, dtype=torch.bfloat16) if kind == "copy" else None
        adamw_step(
            grad=grad, param=param, step=torch.zeros(()), decay_mask=decay_mask, impl=impl,
            stochastic_rounding=kind != "float32", seed=SEED, start=7,
            **state, **{**RATES, "weight_decay": weight_decay},
        )  # fmt: skip
        return state["master"] if param is None else param

    with_decay, without = stepped(None), stepped(None, weight_decay=0.0)
    expected = torch.where(mask, with_decay, without)
    right, all_true = stepped(mask), stepped(torch.ones(n, dtype=torch.bool))
    if impl == "triton":
        assert torch.equal(right, expected)
        assert torch.equal(all_true, with_decay)
    elif kind == "float32":
        assert_close_f64(right, expected.double(), 1e-7)
    else:  # torch rounds some products otherwise: few neighbours change
        assert (right != expected).float().mean() < 0.01
    for wrong in (stepped(~mask), with_decay, without):
        assert relative_error(wrong, expected) > 1e-4
        assert (wrong != expected).float().mean() > 0.05


# ------------------------------------------------------------------- stochastic rounding

SEED = 2**40 + 77


def _rounded(x, *, seed=SEED, start=0, step=1, impl=None):
    """x after a step that does not change it (the number `step`), as it was rounded to bfloat16."""
    n, still = len(x), {**RATES, "lr": 0.0}
    zeros = torch.zeros(n, dtype=x.dtype if x.dtype == torch.float64 else torch.float32)
    state = {"master": x.clone(), "m": zeros, "v": zeros.clone(), "step": torch.tensor(step - 1.0)}
    param = torch.empty(n, dtype=torch.bfloat16)
    adamw_step(
        grad=zeros.clone(), param=param, stochastic_rounding=True, seed=seed, start=start,
        impl=impl, **state, **still,
    )  # fmt: skip
    assert torch.equal(state["master"], x) or x.isnan().any()
    return param


def _neighbours(x):
    """The bfloat16 numbers towards zero and away from it."""
    bits = x.float().view(torch.int32)
    down = (bits & -65536).view(torch.float32)
    up = ((bits & -65536) + 65536).view(torch.float32)
    return down.bfloat16(), up.bfloat16()


@IMPLS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_are_philox_of_seed_step_and_global_index(dtype, impl):
    n, start, step = 1501 + 2**16 * (impl == "torch"), 2**34 + 7, 5  # torch: more than a chunk
    x = torch.randn(n).to(dtype)
    index = torch.arange(n) + start
    counter = (index // 4 & 0xFFFFFFFF, index // 4 >> 32, torch.full_like(index, step), 0x41646D57)
    words = torch.stack(reference.philox(counter, (SEED & 0xFFFFFFFF, SEED >> 32)))
    word = words.gather(0, (index % 4)[None])[0] & 0xFFFF
    down, up = _neighbours(x)
    goes_up = (x.float().view(torch.int32) & 0xFFFF) + word >= 65536
    expected = torch.where(goes_up, up, down)
    assert torch.equal(_rounded(x, start=start, step=step, impl=impl), expected)
    assert 0.4 < goes_up.float().mean() < 0.6
    for other in ({"seed": SEED + 1}, {"seed": SEED + 2**32}, {"step": 6}, {"start": start + 4}):
        again = _rounded(x, **{"start": start, "step": step, **other}, impl=impl)
        assert 0.2 < (again != expected).float().mean() < 0.8, other


@IMPLS
def test_the_mean_is_that_of_what_was_rounded(impl):
    n = 40_000
    for part in (1 / 65536, 0.1, 0.5, 0.9):
        x = torch.full((n,), -(1 + part / 128))  # -1 or -1 - 1/128
        low = _rounded(x, impl=impl)
        assert set(low.tolist()) <= {-1.0, -1 - 1 / 128}
        sigma = (part * (1 - part) / n) ** 0.5
        up = (low != -1).double().mean()
        assert abs(up - part) < 5 * sigma
    share = (x.bfloat16() != -1).double().mean()  # nearest: off by a hundred sigma
    assert abs(share - 0.9) > 50 * sigma


@IMPLS
def test_numbers_of_bfloat16_stay_and_others_go_to_a_neighbour(impl):
    inf, nan = float("inf"), float("nan")
    x = torch.cat((torch.randn(64).bfloat16().float(), torch.tensor([0.0, -0.0, inf, -inf])))
    assert torch.equal(_rounded(x, impl=impl), x.bfloat16())
    assert _rounded(torch.full((9,), nan), impl=impl).isnan().all()
    x = torch.randn(500) * 2.0 ** torch.randint(-140, 120, (500,))
    low, (down, up) = _rounded(x, impl=impl), _neighbours(x)
    assert ((low == down) | (low == up)).all()
    assert (low == down).any()
    assert (low == up).any()


@IMPLS
@pytest.mark.parametrize("pure", [False, True], ids=["copy", "bfloat16 masters"])
def test_shards_round_as_the_whole_does(pure, impl):
    n, start = 1500, 10
    dtype = torch.bfloat16 if pure else torch.float32
    whole = {"master": torch.randn(n).to(dtype), "m": torch.randn(n), "v": torch.rand(n)}
    grad, low = torch.randn(n).bfloat16(), None if pure else torch.empty(n, dtype=torch.bfloat16)
    random = {"stochastic_rounding": True, "seed": SEED, "impl": impl}
    pieces = [
        {k: x[a:b].clone() for k, x in whole.items()}
        | {"param": None if pure else low[a:b].clone(), "start": start + a, "grad": grad[a:b]}
        for a, b in _CUTS
    ]
    step = {"step": torch.zeros(())}
    adamw_step(grad=grad, param=low, start=start, **whole, **step, **random, **RATES)
    for piece in pieces:
        adamw_step(step=torch.zeros(()), **piece, **random, **RATES)
    for name in ("master", "m", "v", *([] if pure else ["param"])):
        joined, expected = torch.cat([p[name] for p in pieces]), {**whole, "param": low}[name]
        if impl == "triton":
            assert torch.equal(joined, expected)
        else:  # torch rounds the last few elements of a buffer otherwise: few neighbours change
            assert (joined != expected).float().mean() < 0.01
    wrong = {**pieces[-1], "start": 0}  # a shard that does not know where it lies
    before = (wrong["master"] if pure else wrong["param"]).clone()
    adamw_step(step=torch.zeros(()), **wrong, **random, **{**RATES, "lr": 0.0})
    changed = ((wrong["master"] if pure else wrong["param"]) != before).float().mean()
    assert pure or changed > 0.2


@IMPLS
def test_bfloat16_masters_follow_the_float32_ones_where_nearest_stands_still(impl):
    n, steps, rates = 4000, 40, {**RATES, "lr": 1e-4, "weight_decay": 0.0}
    state = {"master": torch.ones(n), "m": torch.zeros(n), "v": torch.zeros(n)}
    low = {k: x.clone() for k, x in state.items()} | {"master": torch.ones(n).bfloat16()}
    steps_of = [torch.zeros(()), torch.zeros(())]
    for _ in range(steps):
        grad = torch.rand(n) + 0.5
        adamw_step(grad=grad, step=steps_of[0], impl="torch", **state, **rates)
        adamw_step(
            grad=grad, step=steps_of[1], stochastic_rounding=True, seed=SEED, impl=impl, **low,
            **rates,
        )  # fmt: skip
    moved = 1 - state["master"].double().mean()
    assert moved < 1 / 256  # the next number below 1: nearest would have returned to 1 each time
    assert abs((1 - low["master"].double().mean()) / moved - 1) < 0.1
    assert_close_f64(low["m"], state["m"], 1e-6)


@IMPLS
def test_a_skipped_step_does_not_round(impl):
    master = torch.randn(9).bfloat16()
    state = {"master": master.clone(), "m": torch.zeros(9), "v": torch.zeros(9)}
    step = torch.zeros(())
    adamw_step(
        grad=torch.full((9,), float("nan")), step=step, skip=torch.tensor(1.0), impl=impl,
        stochastic_rounding=True, **state, **RATES,
    )  # fmt: skip
    assert torch.equal(state["master"], master)
    assert not step
    assert not state["m"].any()


@pytest.mark.parametrize("masked", [0, 1])
def test_bfloat16_masters_move_22_bytes_per_element_and_one_of_a_mask(masked):
    n, one, scale = 20_000, torch.tensor(1.0), torch.tensor(0.5)
    low, grad = torch.randn(2, n).bfloat16()
    m, v, mask = torch.zeros(n), torch.zeros(n), torch.rand(n) < 0.5 if masked else None
    state = (low, grad, m, v, None, one, scale, None)
    with traffic() as t:
        adamw._adamw_triton(*state, *RATES.values(), (SEED, 3), mask)
    least = cost.adamw(n, grad_size=2, master_size=2, mask_size=masked).bytes
    assert least == (22 + masked) * n
    scalars = dict.fromkeys(("step_ptr", "grad_scale_ptr"), "one number")
    assert 0.99 * least <= t.moved(scalars) <= 1.01 * least


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
    if n > 1:  # the last element, in a tile of its own, is not lost
        assert relative_error(sum_of_squares(x[:-1], impl=impl), y) > 1e-3


@pytest.mark.filterwarnings("ignore:overflow")
@IMPLS
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e30])
def test_sum_of_squares_tells_of_what_is_not_finite(bad, impl):
    x = torch.ones(2000)
    x[1999] = bad
    assert not sum_of_squares(x, impl=impl).isfinite()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"grad": torch.zeros(5)}, r"grad .*\[6\].*\[5\]"),
        ({"m": torch.zeros(2, 3)}, "m must be flat"),
        ({"v": torch.zeros(12)[::2]}, r"strides \(2,\)"),
        ({"m": torch.zeros(6, dtype=torch.float64)}, "m has dtype torch.float64"),
        ({"master": torch.zeros(6).half()}, "master must be float32"),
        ({"master": torch.zeros(6).bfloat16()}, "or bfloat16 with stochastic rounding, got"),
        ({"stochastic_rounding": True}, "needs a bfloat16 param or master, got param None"),
        ({"stochastic_rounding": True, "param": torch.zeros(6).half()}, "got param torch.float16"),
        (
            {"stochastic_rounding": True, "master": torch.zeros(6).bfloat16()}
            | {"param": torch.zeros(6).bfloat16()},
            "param must be None",
        ),
        (
            {"stochastic_rounding": True, "master": torch.zeros(6).bfloat16()}
            | {"m": torch.zeros(6).bfloat16()},
            "m has dtype torch.bfloat16",
        ),
        ({"seed": -1}, "0 <= seed, start"),
        ({"start": 2**63 - 6}, "0 <= seed, start"),
        ({"step": torch.zeros(1)}, "step must be a 0-dim"),
        ({"step": torch.tensor(1)}, "step must be float32 or float64, got torch.int64"),
        ({"step": torch.tensor(1.0).bfloat16()}, "step must be float32 .* got torch.bfloat16"),
        ({"beta2": 1.0}, "betas 0.9, 1.0"),
        ({"grad": torch.zeros(6, dtype=torch.int32)}, "int32"),
        ({"decay_mask": torch.ones(6)}, "must be bool .* got torch.float32"),
        ({"decay_mask": torch.ones(6, dtype=torch.uint8)}, "must be bool .* got torch.uint8"),
        ({"decay_mask": torch.ones(5).bool()}, r"like master\[6\], got torch.bool \[5\]"),
        ({"decay_mask": torch.ones(2, 3).bool()}, r"got torch.bool \[2, 3\]"),
        ({"decay_mask": torch.ones(12).bool()[::2]}, r"strides \(2,\)"),
        ({"decay_mask": torch.ones(6, device="meta").bool()}, "one device"),
    ],
)
def test_what_does_not_fit_is_refused(change, match):
    arguments = {**_start(6, torch.float32), "grad": torch.zeros(6), **RATES, **change}
    with pytest.raises(ValueError, match=match):
        adamw_step(**arguments)
