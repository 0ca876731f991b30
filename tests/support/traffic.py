"""Counts of what kernels move and multiply, from runs in Triton's interpreter.

    with traffic() as t:
        norm.norm_fwd(x, w, layer=False, impl="triton")
    t.moved() / cost.norm(rows, E).bytes          # 1.00: everything once

The meter sees every load, store and atomic of every program with its addresses and its mask, every
`tl.dot` with its shape, and every torch operator around the kernels (a `.contiguous()`, a cast, a
sum of partial results) with its tensors. It needs no GPU and estimates nothing:

  * lanes that are masked off move nothing;
  * within one load (or store) of one program an address counts once: a warp's lanes share it;
  * between two loads, and between two programs, it counts again. That is DRAM traffic without any
    cache: an upper bound. Where a cache must help, the test names the argument in `resident` with
    the reason why it stays in L2, and then it counts once per launch;
  * tensors that a torch operator reads and writes count in full; views are free.

Given the views that virtual ranks have of their symmetric memory, the meter also separates accesses
of a launch to the rank's own segment from those to its peers', and flags from data.

It cannot see how lanes are grouped into transactions (128-bit loads are counted in
`test_compiles.py`), L2 hits that no test claims, and time.

`measures` lists the ops with the bytes they may move: from `kernels/cost.py`, or for attention from
the I/O model of FlashAttention (`attention_io`). `test_traffic.py` asserts them, and
``python -P tests/support/traffic.py`` prints the table.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

if __name__ == "__main__":  # read when a kernel is decorated, so set before any import of one
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from warpweave.kernels.overlap.symmetric import SymmetricMemory

# ---------------------------------------------------------------- the meter


@dataclass
class Flow:
    """The traffic of one launch with the memory behind one of its arguments, in bytes.

    `read` and `written` count each load and store, `read_once` and `written_once` each address.
    `atomic` counts bytes that are read and written at once.
    """

    read: int = 0
    written: int = 0
    atomic: int = 0
    read_once: int = 0
    written_once: int = 0

    @property
    def moved(self) -> int:
        return self.read + self.written + 2 * self.atomic

    @property
    def once(self) -> int:
        return self.read_once + self.written_once + 2 * self.atomic


@dataclass
class Launch:
    """One launch of a kernel: its arguments, and what it moved and multiplied.

    `flops` counts two for each multiply-add of its `tl.dot`s, of whole tiles.
    """

    kernel: str
    constants: dict[str, object]
    flows: dict[str, Flow]
    programs: int = 0
    flops: int = 0


@dataclass
class Operator:
    """A torch operator outside the kernels that moved bytes."""

    name: str
    moved: int


@dataclass
class Traffic:
    """All launches and all torch operators inside ``with traffic()``."""

    launches: list[Launch] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)

    @property
    def flops(self) -> int:
        """Return the FLOPs of the kernels' matrix products."""
        return sum(launch.flops for launch in self.launches)

    def moved(self, resident: Mapping[str, str] | None = None) -> int:
        """Return bytes read and written, each time; arguments in `resident` count once per launch.

        `resident` maps an argument's name to the reason why L2 holds it. Raises ValueError for a
        name that no launch has, so that no entry outlives its reason.
        """
        resident = resident or {}
        names = {name for launch in self.launches for name in launch.flows}
        if unknown := set(resident) - names:
            raise ValueError(f"resident names {sorted(unknown)}, the launches have {sorted(names)}")
        kernels = sum(
            flow.once if name in resident else flow.moved
            for launch in self.launches
            for name, flow in launch.flows.items()
        )
        return kernels + sum(operator.moved for operator in self.operators)

    @property
    def once(self) -> int:
        """Return bytes of every address that a launch touched, once each, and of the operators."""
        flows = (flow for launch in self.launches for flow in launch.flows.values())
        return sum(flow.once for flow in flows) + sum(op.moved for op in self.operators)


class _Memory:
    """The bytes of one or more arguments of a launch, and the subset that was touched."""

    def __init__(self, name: str, start: int, stop: int, flow: Flow | None = None) -> None:
        self.name, self.start, self.stop, self.flow = name, start, stop, flow or Flow()
        self.seen = {"read": np.zeros(stop - start, bool), "written": np.zeros(stop - start, bool)}

    def access(self, kind: str, addresses: np.ndarray, size: int) -> None:
        bytes_ = len(addresses) * size
        setattr(self.flow, kind, getattr(self.flow, kind) + bytes_)
        if kind != "atomic":
            at, seen = addresses - self.start, self.seen[kind]
            new = int(np.count_nonzero(~seen[at])) * size
            seen[at] = True
            setattr(self.flow, f"{kind}_once", getattr(self.flow, f"{kind}_once") + new)


def _memories(arguments: Mapping[str, object]) -> list[_Memory]:
    """Return the spans of all tensor arguments. Overlapping ones are one, `a_ptr+b_ptr`."""
    spans = []
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), name))
    merged: list[tuple[int, int, str]] = []
    for start, stop, name in sorted(spans):
        if merged and start < merged[-1][1]:
            before = merged.pop()
            start, stop, name = before[0], max(stop, before[1]), f"{before[2]}+{name}"
        merged.append((start, stop, name))
    return [_Memory(name, start, stop) for start, stop, name in merged]


SEGMENTS = ("own flags", "own data", "peer flags", "peer data")


def _segments(memory: SymmetricMemory) -> list[_Memory]:
    """Return the flags and data of all ranks, as seen by this one. Those of its peers are one."""
    flows, found = {name: Flow() for name in SEGMENTS}, []
    for rank, segment in enumerate(memory.segments):
        whose, start = "own" if rank == memory.rank else "peer", segment.data_ptr()
        data, stop = start + memory.data_offset, start + segment.numel()
        for name, first, last in ((f"{whose} flags", start, data), (f"{whose} data", data, stop)):
            found.append(_Memory(name, first, last, flows[name]))
    return found


class _Meter(TorchDispatchMode):
    """A mode that sees the torch operators, and holds the launch that is running."""

    FREE = ("empty", "new_empty", "detach", "alias", "_unsafe_view", "set_", "lift_fresh")

    def __init__(self, symmetric: Sequence[SymmetricMemory]) -> None:
        super().__init__()
        self.found, self.symmetric = Traffic(), symmetric
        self.launch: Launch | None = None
        self.memories: list[_Memory] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if self.launch is None and not func.is_view and not name.startswith(self.FREE):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
            moved = sum(x.numel() * x.element_size() for x in leaves if torch.is_tensor(x))
            self.found.operators.append(Operator(name, moved))
        return result

    def begin(self, kernel: str, arguments: dict[str, object]) -> None:
        self.memories = _memories(arguments)
        if self.symmetric and "addresses_ptr" in arguments:
            self.memories += _segments(self.symmetric[arguments["rank"]])
        constants = {n: v for n, v in arguments.items() if isinstance(v, (bool, int, float))}
        flows = {memory.name: memory.flow for memory in self.memories}
        self.launch = Launch(kernel, constants, flows)
        self.found.launches.append(self.launch)

    def access(self, kind: str, pointers, mask) -> None:
        addresses, live = pointers.data, True if mask is None else getattr(mask, "data", mask)
        if isinstance(live, memoryview):  # the mask of a descriptor is an array, not a handle
            live = mask
        addresses = addresses[np.broadcast_to(live, addresses.shape)].astype(np.int64)
        if len(addresses) == 0 or self.launch is None:
            return
        if not (np.diff(addresses) > 0).all():
            addresses = np.unique(addresses)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        while len(addresses):
            memory = next((m for m in self.memories if m.start <= addresses[0] < m.stop), None)
            assert memory, f"{self.launch.kernel}: an access outside all of its arguments"
            inside = np.searchsorted(addresses, memory.stop)
            if inside < len(addresses) and "flags" not in memory.name:  # of all ranks at once
                raise AssertionError(f"{self.launch.kernel}: an access leaves {memory.name}")
            memory.access(kind, addresses[:inside], size)
            addresses = addresses[inside:]


@contextmanager
def traffic(symmetric: Sequence[SymmetricMemory] = ()) -> Iterator[Traffic]:
    """Measure every kernel that is interpreted, and every torch operator that runs, in the block.

    With the views of virtual ranks, launches that take a table of their segments also have the
    flows `SEGMENTS`. Call the raw halves of an op (`norm_fwd`, ...): the meter does not see torch
    operators inside a `custom_op`, but it does see the kernels.
    """
    from triton.runtime import interpreter

    meter = _Meter(symmetric)
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    plain = {name: getattr(builder, name) for name in (*names, "create_dot")}
    call = executor.__call__

    def masked_load(self, ptrs, mask, *rest, **options):
        meter.access("read", ptrs, mask)
        return plain["create_masked_load"](self, ptrs, mask, *rest, **options)

    def masked_store(self, ptrs, value, mask, *rest, **options):
        meter.access("written", ptrs, mask)
        return plain["create_masked_store"](self, ptrs, value, mask, *rest, **options)

    def atomic_rmw(self, op, ptr, val, mask, *rest):
        meter.access("atomic", ptr, mask)
        return plain["create_atomic_rmw"](self, op, ptr, val, mask, *rest)

    def atomic_cas(self, ptr, *rest):
        meter.access("atomic", ptr, None)
        return plain["create_atomic_cas"](self, ptr, *rest)

    def dot(self, a, b, *rest):
        if meter.launch is not None:
            meter.launch.flops += 2 * a.data.size * b.data.shape[-1]
        return plain["create_dot"](self, a, b, *rest)

    def launch(self, *args, **options):
        own = {name: value for name, value in options.items() if name in self.arg_names}
        bound = inspect.signature(self.fn).bind(*args, **own)
        bound.apply_defaults()
        meter.begin(self.fn.__name__, dict(bound.arguments))
        try:
            call(self, *args, **options)
            grid = interpreter.interpreter_builder.grid_dim
            meter.launch.programs = grid[0] * grid[1] * grid[2]
        finally:
            meter.launch = None

    patched = dict(zip(names, (masked_load, masked_store, atomic_rmw, atomic_cas)), create_dot=dot)
    with patch.multiple(builder, **patched), patch.object(executor, "__call__", launch), meter:
        yield meter.found


# ---------------------------------------------------------------- bounds of ops


def attention_io(
    B: int, S: int, H: int, D: int, tile: int, *, kv_heads: int, causal: bool = True, size: int = 2
) -> int:
    """Return the bytes of a FlashAttention forward with tiles of `tile` queries, without any cache.

    q, o and lse move once. For every tile of queries of every head, the keys and values that its
    last row sees move again. (Dao et al. 2022, arXiv:2205.14135, Theorem 2, counts the same
    accesses as Theta(S^2 D^2 / M) with M the on-chip memory, which sets the tile; the loop over
    queries outside is Dao 2023, arXiv:2307.08691, section 3.1.) kv_heads do not matter here: if the
    heads of a group find their keys in L2, that is luck and not guaranteed by the kernel.
    """
    del kv_heads
    ends = [min(S, start + tile) if causal else S for start in range(0, S, tile)]
    return B * H * (2 * S * D * size + 4 * S + 2 * sum(ends) * D * size)


def attention_backward_io(
    B: int, S: int, H: int, D: int, dkdv: int, dq: int, *, kv_heads: int, causal: bool = True,
    size: int = 2,
) -> int:  # fmt: skip
    """Return the bytes of the backward kernels: delta; dk, dv by tiles of `dkdv` keys; dq by `dq`.

    delta: o, do in, delta out. dk and dv: k, v in, dk, dv out, once; and per tile of keys and head
    of the group the rows of q, do, lse and delta that see its first key. dq: q, do, lse, delta in,
    dq out, once; and per tile of queries k and v.
    """
    row, heads = D * size, B * H
    delta = heads * S * (2 * row + 4)
    seen = sum(S - start if causal else S for start in range(0, S, dkdv))
    keys = B * kv_heads * S * 4 * row + heads * seen * (2 * row + 8)
    ends = sum(min(S, start + dq) if causal else S for start in range(0, S, dq))
    return delta + keys + heads * (S * (3 * row + 8) + 2 * ends * row)


def visible_tiles(S: int, q: int, k: int, causal: bool = True) -> int:
    """Count the tiles of `q` queries by `k` keys that hold at least one visible pair."""
    return sum(
        not causal or start_k < min(S, start_q + q)
        for start_q in range(0, S, q)
        for start_k in range(0, S, k)
    )


def gemm_io(M: int, N: int, K: int, m: int, n: int, *, size: int = 2) -> int:
    """Return the bytes of a product in m by n tiles: c once; per tile its rows of a, columns of b.

    Tiles that run one after another share operands in L2; this is not assumed here.
    """
    operands = sum(min(m, M - i) + min(n, N - j) for i in range(0, M, m) for j in range(0, N, n))
    return (operands * K + M * N) * size


@dataclass(frozen=True)
class Measure:
    """An op, with bounds on what it may move and multiply.

    Attributes:
        call: the call, raw halves, impl="triton".
        least: bytes, from the recorded launches (they choose the tiles).
        limit: how many times `least` it may move.
        resident: arguments that L2 holds, with the reason.
        products: FLOPs that its products may take, from the recorded launches.
    """

    name: str
    call: Callable[[], object]
    least: Callable[[Traffic], int]
    limit: float = 1.02
    resident: Mapping[str, str] = field(default_factory=dict)
    products: Callable[[Traffic], int] | None = None


@dataclass(frozen=True)
class Measured:
    """The outcome of a `Measure`."""

    name: str
    moved: int
    once: int
    least: int
    limit: float
    flops: int
    products: int

    @property
    def ratio(self) -> float:
        return self.moved / self.least

    def failures(self) -> list[str]:
        """Return one line for each bound that does not hold."""
        wrong = []
        if self.ratio > self.limit:
            wrong.append(
                f"{self.name} moves {self.moved} bytes, {self.ratio:.3f} times the {self.least} "
                f"it may (limit {self.limit})"
            )
        if self.flops > self.products:
            wrong.append(f"{self.name} multiplies {self.flops} FLOPs, it may {self.products}")
        return wrong


def measure(op: Measure) -> Measured:
    """Run the op once and compare."""
    with traffic() as t:
        op.call()
    return Measured(
        op.name, t.moved(op.resident), t.once, op.least(t), op.limit, t.flops,
        op.products(t) if op.products else 0,
    )  # fmt: skip


_VECTOR = "E elements, read by every program, a few kilobytes"
_TABLE = "S x D/2 float32 angles, read for every head and batch: 2 MB at S = 8192, D = 128"
_SCALAR = "one number"


def _norms() -> list[Measure]:
    from warpweave.kernels import cost, norm
    from warpweave.kernels.norm import backward

    half, triton = torch.bfloat16, {"impl": "triton"}
    T, E = 1024, 128
    x, dy, ds = (torch.randn(T, E).to(half) for _ in range(3))
    few, r = x[:512], ds[:512]
    (w, b), (rstd, mean) = torch.randn(2, E).to(half), torch.rand(2, T)
    # Every program leaves a partial row of dw: at most four rows of E floats per multiprocessor,
    # which L2 holds until torch adds them. Here one multiprocessor, so that there are few.
    few_programs = patch.object(backward, "processors", lambda device: 1)
    weight = {"weight_ptr": _VECTOR}
    both = {**weight, "bias_ptr": _VECTOR}

    def least(rows: int, **sizes: bool) -> Callable[[Traffic], int]:
        return lambda t: cost.norm(rows, E, **sizes).bytes

    return [
        Measure("rms_norm fwd", lambda: norm.norm_fwd(few, w, layer=False, **triton), least(512),
                resident=weight),
        Measure("rms_norm fwd + residual",
                lambda: norm.norm_fwd(few, w, layer=False, residual=r, **triton),
                least(512, residual=True), resident=weight),
        Measure("layer_norm fwd", lambda: norm.norm_fwd(few, w, b, layer=True, **triton),
                least(512, layer=True), resident=both),
        Measure("layer_norm fwd + residual",
                lambda: norm.norm_fwd(few, w, b, layer=True, residual=r, **triton),
                least(512, layer=True, residual=True), resident=both),
        Measure("rms_norm bwd", few_programs(lambda: norm.norm_bwd(dy, x, w, None, rstd, **triton)),
                least(T, backward=True), resident=weight),
        Measure(
            "layer_norm bwd + residual",
            few_programs(lambda: norm.norm_bwd(dy, x, w, mean, rstd, ds=ds, bias=True, **triton)),
            least(T, layer=True, residual=True, backward=True),
            resident=weight,
        ),
    ]  # fmt: skip


def _elementwise() -> list[Measure]:
    from warpweave.kernels import activation, adamw, cost, dropout, rope

    half, triton = torch.bfloat16, {"impl": "triton"}
    T, E = 512, 128
    x, dy, narrow_dy = (torch.randn(T, n).to(half) for n in (E, E, E // 2))
    flat = [torch.rand(20_000) for _ in range(4)]
    low, one, zero = torch.empty(20_000, dtype=half), torch.ones(()), torch.zeros(())
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    tokens, heads = torch.arange(T), torch.randn(2, 64, 4, 32).to(half)
    cos, sin = rope.rope_table(torch.arange(64), 32)
    begun = adamw.begin_adamw(one, **rates, impl="triton")
    step = {"scalars_ptr": _SCALAR, "grad_scale_ptr": _SCALAR, "skip_ptr": _SCALAR}
    return [
        Measure("rope", lambda: rope.rope_fwd(heads, cos, sin, **triton),
                lambda t: cost.rope(*heads.shape).bytes,
                resident={"cos_ptr": _TABLE, "sin_ptr": _TABLE}),
        Measure("gelu fwd", lambda: activation.activation_fwd(x, "gelu", **triton),
                lambda t: cost.activation(x.numel()).bytes),
        Measure("gelu bwd", lambda: activation.activation_bwd(dy, x, "gelu", **triton),
                lambda t: cost.activation(x.numel(), backward=True).bytes),
        Measure("swiglu fwd", lambda: activation.activation_fwd(x, "swiglu", **triton),
                lambda t: cost.activation(x.numel() // 2, gated=True).bytes),
        Measure("swiglu bwd", lambda: activation.activation_bwd(narrow_dy, x, "swiglu", **triton),
                lambda t: cost.activation(x.numel() // 2, gated=True, backward=True).bytes),
        Measure("dropout", lambda: dropout.dropout_fwd(x, dropout.Drop(0.1, 7, 3, tokens)),
                lambda t: cost.dropout(T, E).bytes),
        Measure("adamw", lambda: adamw._adamw_triton(*flat, low, begun, one, zero, True),
                lambda t: cost.adamw(20_000, param_size=2).bytes, resident=step),
        Measure("sum_of_squares", lambda: adamw._sum_of_squares_triton([flat[0]]),
                lambda t: flat[0].numel() * 4),
    ]  # fmt: skip


def _losses() -> list[Measure]:
    from warpweave.kernels import cost
    from warpweave.kernels.cross_entropy import backward, forward
    from warpweave.kernels.cross_entropy.vocabulary import Vocabulary

    N, V = 6, 5003
    z, labels = torch.randn(N, V).bfloat16(), torch.arange(N)
    lse, dloss = torch.logsumexp(z.float(), 1), torch.rand(N)
    vocabulary = Vocabulary(0, V, label_smoothing=0.1)
    return [
        Measure("cross_entropy fwd", lambda: forward._fwd_triton(z, labels, vocabulary, False),
                lambda t: cost.cross_entropy(N, V).bytes),
        Measure("cross_entropy bwd",
                lambda: backward._bwd_triton(dloss, z, labels, lse, vocabulary),
                lambda t: cost.cross_entropy(N, V, backward=True).bytes),
    ]  # fmt: skip


def _mlp() -> list[Measure]:
    """The fused MLP: among its intermediates, z is written once and read once, h is written once,
    and the gradient of h never leaves the registers. One more trip of any would be 14 % or more."""
    from warpweave.kernels import dropout, mlp
    from warpweave.kernels.gemm import fused as gemm

    T, E, F = 128, 64, 128
    half = torch.bfloat16
    found = []
    x, dy, w2 = (torch.randn(*shape).to(half) for shape in ((T, E), (T, E), (E, F)))

    def tiles(t: Traffic) -> tuple[int, int]:
        """Return BLOCK_M, BLOCK_N of the only launch, or BLOCK_T, BLOCK_F of the gradient's."""
        (launch,) = t.launches
        of = launch.constants
        return of.get("BLOCK_M", of.get("BLOCK_T")), of.get("BLOCK_N", of.get("BLOCK_F"))

    def product(t: Traffic, M: int, N: int, K: int) -> int:
        return gemm_io(M, N, K, *tiles(t)) - 2 * M * N  # without c

    for activation, gated in (("gelu", 1), ("swiglu", 2)):
        w1, z = torch.randn(gated * F, E).to(half), torch.randn(T, gated * F).to(half)
        wide, how = 2 * T * gated * F, {"activation": activation, "impl": "triton"}
        found += [
            Measure(f"mlp hidden fwd {activation}: z and h written once",
                    partial(mlp.hidden_fwd, x, w1, **how, save_z=True),
                    lambda t, g=gated, wide=wide: product(t, T, g * F, E) + wide + 2 * T * F,
                    products=lambda t, g=gated: 2 * T * g * F * E),
            Measure(f"mlp hidden bwd {activation}: z read, dz and h written once",
                    partial(mlp.hidden_bwd, dy, w2, z, **how, want_hidden=True),
                    lambda t, wide=wide: product(t, T, F, E) + 2 * wide + 2 * T * F,
                    products=lambda t: 2 * T * F * E),
        ]  # fmt: skip
    h, residual, b = torch.randn(T, F).to(half), torch.randn(T, E).to(half), torch.randn(E).to(half)
    drop = dropout.Drop(0.1, 7, 3, torch.arange(T))
    bias = {"bias_ptr": _VECTOR, "tokens_ptr": "T indices, read for every column of tiles"}
    return [
        *found,
        Measure("mlp down + bias + dropout + residual",
                partial(gemm.fused_gemm, h, w2.t(), b, drop=drop, residual=residual, impl="triton"),
                lambda t: product(t, T, E, F) + 2 * 2 * T * E + 2 * E + 8 * T,
                resident=bias, products=lambda t: 2 * T * E * F),
    ]  # fmt: skip


def _attention() -> list[Measure]:
    from warpweave.kernels.attention import function as attention

    found = []
    for causal, S, H, kv in ((True, 256, 2, 1), (True, 227, 1, 1), (False, 131, 2, 2)):
        B, D = 1, 64
        q, k, v = (torch.randn(B, S, h, D).bfloat16() for h in (H, kv, kv))
        o, lse = attention.attention_fwd(q, k, v, causal=causal, impl="torch")
        what = f"B={B} S={S} H={H}/{kv} D={D} {'causal' if causal else 'full'}"
        sizes, how = {"kv_heads": kv, "causal": causal}, {"causal": causal, "impl": "triton"}

        def tiles(t: Traffic, kernel: str) -> tuple[int, int]:
            """Return BLOCK_M, BLOCK_N of the launch: BLOCK_N is the key tile of a dkdv kernel."""
            (launch,) = (x for x in t.launches if kernel in x.kernel)
            return launch.constants["BLOCK_M"], launch.constants["BLOCK_N"]

        def forward(t, S=S, H=H, sizes=sizes) -> int:
            return attention_io(1, S, H, 64, tiles(t, "fwd")[0], **sizes)

        def backward(t, S=S, H=H, sizes=sizes) -> int:
            dkdv, dq = tiles(t, "dkdv")[1], tiles(t, "dq_")[0]
            return attention_backward_io(1, S, H, 64, dkdv, dq, **sizes)

        def products(t, kernel, count, S=S, H=H, causal=causal) -> int:
            """Count `count` products for every tile that holds a visible pair, and for no other."""
            m, n = tiles(t, kernel)
            return H * visible_tiles(S, m, n, causal) * count * 2 * m * n * 64

        found += [
            Measure(f"attention fwd {what}", partial(attention.attention_fwd, q, k, v, **how),
                    forward, limit=1.15, products=lambda t, p=products: p(t, "fwd", 2)),
            Measure(f"attention bwd {what}",
                    partial(attention.attention_bwd, o, q, k, v, lse, None, o=o, **how),
                    backward, limit=1.15,
                    products=lambda t, p=products: p(t, "dkdv", 4) + p(t, "dq_", 3)),
        ]  # fmt: skip
    return found


def measures() -> list[Measure]:
    """List every op whose traffic is bounded."""
    torch.manual_seed(0)
    return [*_norms(), *_elementwise(), *_losses(), *_mlp(), *_attention()]


def main() -> None:
    """Print the table."""
    print(
        f"{'op':46} {'moved':>10} {'may move':>10} {'ratio':>6} {'limit':>6} "
        f"{'each once':>10} {'FLOPs of its products':>22} {'allowed':>10}"
    )
    for op in measures():
        m = measure(op)
        print(
            f"{m.name:46} {m.moved:10} {m.least:10} {m.ratio:6.3f} {m.limit:6} {m.once:10} "
            f"{m.flops:22} {m.products:10}"
        )


if __name__ == "__main__":
    main()
