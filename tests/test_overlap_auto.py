"""`overlap="auto"`: by a table of measured times, near ones alone, and it says what it does."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from close import relative_error
from ranks import run_ranks
from sharded import draw, part
from threads import Group, on_threads

from warpweave.kernels.devices import find_device
from warpweave.layers.block import TransformerBlock
from warpweave.layers.mlp import MLP
from warpweave.layers.overlap import explain_overlap
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor import (
    column_parallel_linear,
    overlap,
    overlap_table,
    parallel_mlp,
    parallel_qkv_rope,
    row_parallel_linear,
)
from warpweave.parallel.tensor.chunked import ChunkedRanks
from warpweave.parallel.tensor.fused import FusedRanks
from warpweave.parallel.tensor.overlap import choose_way
from warpweave.parallel.tensor.overlap_model import Product, predict
from warpweave.parallel.tensor.overlap_table import (
    Measured,
    Place,
    nearest,
    read_measured,
    write_measured,
)

CPU = Place("CPU", "gloo", 2, "float32")
NONE, CHUNKED, FUSED = ({"none": 9.0, "chunked": 9.0, "fused": 9.0, way: 5.0} for way in
                        ("none", "chunked", "fused"))  # fmt: skip


def row(M=1024, N=256, K=512, moves="gather", place=CPU, us=CHUNKED) -> Measured:
    return Measured(place, moves, M, N, K, us)


@pytest.fixture
def table(tmp_path):
    """Write rows as a table and load it; forgotten afterwards."""

    def use(*rows: Measured) -> Path:
        write_measured(tmp_path / "table.json", rows)
        overlap_table.load(tmp_path / "table.json")
        return tmp_path / "table.json"

    yield use
    overlap_table.load(None)


# ---------------------------------------------------------------- the table


def test_the_nearest_size_is_taken_and_none_that_is_far(table):
    large = row(M=4096, us=FUSED)
    assert read_measured(table(row(), large, row(N=100))) == [row(), large, row(N=100)]

    def near(M, N=256, K=512, moves="gather", ranks=2):
        return nearest(Product(M, N, K, ranks, moves), CPU._replace(ranks=ranks))

    assert near(1024) == near(1025) == near(512) == near(2000, 512) == row()
    assert near(4000) == near(2100) == near(8192) == large
    assert near(1024, 130) == row(N=100)
    assert near(1024, K=1024) == row()
    for far in ((511,), (8193,), (1024, 513), (1024, 256, 255), (0,)):
        assert near(*far) is None, far
    assert near(1024, moves="scatter") is near(1024, ranks=3) is None
    product = Product(1024, 256, 512, 2, "gather")
    for elsewhere in ({"dtype": "bfloat16"}, {"link": "network"}, {"device": "NVIDIA H100"}):
        assert nearest(product, CPU._replace(**elsewhere)) is None


def test_what_is_shipped_was_measured_and_not_made_up():
    """Nobody has had several GPUs yet, and two ranks of one busy CPU agree on nothing."""
    assert overlap_table.shipped() == ()


GOOD = {**CPU._asdict(), "moves": "gather", "M": 8, "N": 4, "K": 2, "us": dict(CHUNKED)}
BROKEN = {
    "dtype must be one of float64, float32, bfloat16, float16, got 'int8'": {"dtype": "int8"},
    "link must be one of gloo, nvlink, network, got ['gloo']": {"link": ["gloo"]},
    "moves must be one of gather, scatter, reduce, got None": {"moves": None},
    "device must be a device's name, got ''": {"device": ""},
    "ranks must be an integer >= 2, got 1": {"ranks": 1},
    "M must be an integer >= 1, got True": {"M": True},
    "K must be an integer >= 1, got 2.0": {"K": 2.0},
    "us must have none and at least one of chunked, fused, got {'chunked': 1}": {
        "us": {"chunked": 1}
    },
    "us must have none and at least one of chunked, fused, got {'none': 1, 'magic': 1}": {
        "us": {"none": 1, "magic": 1}
    },
    "us of fused must be microseconds, got NaN": {"us": {"none": 1, "fused": float("nan")}},
    "us of none must be microseconds, got 0": {"us": {"none": 0, "fused": 1}},
    "it must have ['K', 'M', 'N',": {"more": 1},
    "there is one for": {"M": 7},
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_broken_row_is_one_line_that_names_file_and_row(words, tmp_path):
    path = tmp_path / "broken.json"
    rows = [{**GOOD, "M": 7}, {**GOOD, **BROKEN[words]}]
    path.write_text(json.dumps({"format": overlap_table.FORMAT, "rows": rows}))
    with pytest.raises(ValueError, match="cannot be used") as raised:
        overlap_table.load(path)
    said = str(raised.value)
    words = words.replace("NaN", "nan")
    assert said.startswith(f"the overlap table {path} cannot be used: row 2: {words}")
    assert "\n" not in said
    assert not overlap_table._loaded


def test_what_is_no_table_is_refused(tmp_path):
    path = tmp_path / "table.json"
    for text in ("", "[]", '{"format": "warpweave tiles 1", "rows": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"the overlap table .*table\.json cannot be used"):
            read_measured(path)
    path.write_text(json.dumps({"format": overlap_table.FORMAT, "rows": [3]}))
    with pytest.raises(ValueError, match="row 1: it must have"):
        read_measured(path)


# ---------------------------------------------------------------- the choice


def _choices(rank: int, path: Path) -> None:
    group, x = dist.group.WORLD, torch.empty(0)
    memory = Workspace(group)
    gather, scatter = (Product(1024, 256, 512, 2, moves) for moves in ("gather", "scatter"))

    def take(rows, products=(gather,), workspace=memory, impl="triton"):
        write_measured(path.with_suffix(f".{rank}"), rows)
        overlap_table.load(path.with_suffix(f".{rank}"))
        return choose_way(products, x, group, workspace, impl)

    for way, us in (("none", NONE), ("chunked", CHUNKED), ("fused", FUSED)):
        assert take([row(us=us)]).overlap == way
    assert take([row(us={"none": 10.0, "chunked": 9.9})]).overlap == "none"  # within noise
    assert take([row(us={"none": 10.0, "chunked": 9.7})]).overlap == "chunked"
    assert take([]) == ("none", "nothing was measured within 2 x of its sizes on 2 x CPU over gloo "
                        "in float32", (None,))  # fmt: skip
    assert take([row()], ()).why == "nothing moves in its forward that was measured"
    # what cannot be fused here takes the next best, and says so
    second = {"none": 9.0, "chunked": 6.0, "fused": 5.0}
    refused = take([row(us=second)], impl="torch")
    assert refused.overlap == "chunked"
    assert "measured, none 9, chunked 6, fused 5 us (not fused here: overlap='fused' is within" in (
        refused.why
    )
    assert refused.why.endswith(": 1.50 x none")
    assert take([row(us=second)], workspace=None).overlap == "chunked"
    assert take([row(us=FUSED)], impl="torch").overlap == "none"
    # two products in one are added up, and both must have been measured
    both = (
        row(us={"none": 9.0, "chunked": 5.0}),
        row(moves="scatter", us={"none": 9.0, "chunked": 14.0, "fused": 1.0}),
    )
    assert take(both, (gather, scatter)).overlap == "none"
    assert take(both, (scatter,)).overlap == "fused"
    assert take(both[:1], (gather, scatter)).overlap == "none"


def test_it_takes_what_was_measured_to_be_fastest(tmp_path):
    run_ranks(2, _choices, tmp_path / "table")


def _called(**methods):
    """Calls of these methods of the three kinds of ranks, counted."""
    return {
        name: mock.patch.object(kind, method, autospec=True, side_effect=getattr(kind, method))
        for name, (kind, method) in methods.items()
    }


def _layers(rank: int, path: Path) -> None:
    """Linear layers, MLP and qkv on two ranks run the way of the table, with the result of none."""
    group, E, F, T = dist.group.WORLD, 8, 16, 12
    x, w, v = (draw(i, *shape).float() for i, shape in enumerate(((T, E), (F, E), (E, F))))
    mesh = Mesh(tp=2).connect()
    options = {"group": group, "sequence_parallel": True, "workspace": Workspace(group)}
    torch.manual_seed(0)
    mlp = MLP(E, F, mesh=mesh, sequence_parallel=True, impl="triton")
    hidden, own = draw(5, T, F).float(), part(x, 0)

    def results() -> list[torch.Tensor]:
        y = column_parallel_linear(own, part(w, 0), **options)
        z = row_parallel_linear(part(hidden, 1), part(v, 1), **options)
        leaf = own.clone().requires_grad_()
        h = mlp(leaf)
        return [y, z, h.detach(), *torch.autograd.grad(h.sum(), [leaf, *mlp.parameters()])]

    found = {}
    for way, us in (("none", NONE), ("chunked", CHUNKED), ("fused", FUSED)):
        rows = [row(T, F // 2, E, us=us), row(T, E, F // 2, "scatter", us=us)]
        write_measured(path.with_suffix(f".{rank}.{way}"), rows)
        overlap_table.load(path.with_suffix(f".{rank}.{way}"))
        patches = _called(
            gathered=(ChunkedRanks, "column_product"), summed=(ChunkedRanks, "sum_product"),
            fused_column=(FusedRanks, "column_product"), fused_row=(FusedRanks, "row_product"),
        )  # fmt: skip
        counts = {name: patch.start() for name, patch in patches.items()}
        found[way] = results()
        said = explain_overlap(mlp, T)
        mock.patch.stopall()
        chunked, fused = 2 * (way == "chunked"), 2 * (way == "fused")
        expected = {"gathered": chunked, "summed": chunked, "fused_column": fused}
        expected["fused_row"] = fused
        assert {name: call.call_count for name, call in counts.items()} == expected, way
        assert said.startswith(f": overlap {way}, measured, none ")
    for way in ("chunked", "fused"):
        for a, b in zip(found[way], found["none"], strict=True):
            assert relative_error(a, b) < 1e-5, way


def test_layers_of_two_ranks_run_the_way_of_the_table(tmp_path):
    run_ranks(2, _layers, tmp_path / "table")


def _whole(rank: int, path: Path) -> None:
    """Without sequence parallelism a row-parallel product is a "reduce", and what a column-parallel
    one sums in its backward is no matter of the table."""
    group = dist.group.WORLD
    write_measured(path.with_suffix(f".{rank}"), [row(12, 8, 4, "reduce"), row(12, 8, 4)])
    overlap_table.load(path.with_suffix(f".{rank}"))
    with mock.patch.object(ChunkedRanks, "sum_product", autospec=True) as called:
        row_parallel_linear(draw(0, 2, 6, 4).float(), draw(1, 8, 4).float(), group=group)
        assert called.call_count == 1
        row_parallel_linear(draw(0, 2, 6, 4), draw(1, 8, 4), group=group)  # float64 was not
        row_parallel_linear(draw(0, 5, 4).float(), draw(1, 8, 4).float(), group=group)
        assert called.call_count == 1
        with torch.autocast("cpu", torch.bfloat16):
            row_parallel_linear(draw(0, 2, 6, 4).float(), draw(1, 8, 4).float(), group=group)
        assert called.call_count == 1
    with mock.patch.object(ChunkedRanks, "column_product", autospec=True) as called:
        column_parallel_linear(draw(0, 12, 4).float(), draw(1, 8, 4).float(), group=group)
        assert called.call_count == 0


def test_sums_without_sequence_parallelism_are_products_of_their_own(tmp_path):
    run_ranks(2, _whole, tmp_path / "table")


def _looked_up(group: Group, cut: bool) -> None:
    """By one call of each layer of 12 tokens; where they are cut a rank is given its own."""
    own = {"group": group, "sequence_parallel": cut}
    x, h = torch.zeros(6 if cut else 12, 4), torch.zeros(12, 3)
    column_parallel_linear(x, torch.zeros(10, 4), **own)
    row_parallel_linear(h, torch.zeros(5, 3), **own)
    parallel_mlp(x, torch.zeros(6, 2, 4), torch.zeros(4, 6), activation="swiglu", **own)
    parallel_qkv_rope(x, torch.zeros(2, 3, 4, 4), None, None, None, shape=(2, 6), **own)


@pytest.mark.parametrize("cut", [False, True])
def test_what_is_looked_up_are_the_tokens_of_all_ranks_and_the_sizes_of_one(cut):
    """For what moves in the forward alone."""
    gathers = [Product(12, n, 4, 2, "gather", 4) for n in (10, 12, 24)]
    column, up, qkv = ((product,) if cut else () for product in gathers)
    moves = "scatter" if cut else "reduce"
    row, down = (Product(12, n, k, 2, moves, 4) for n, k in ((5, 3), (4, 6)))
    none = overlap.Choice("none", "")
    with mock.patch.object(overlap, "choose_way", return_value=none) as asked:
        on_threads(2, _looked_up, cut)
    found = [tuple(call.args[0]) for call in asked.call_args_list]
    assert Counter(found) == Counter(2 * [column, (row,), (*up, down), qkv])


def test_products_run_in_the_dtype_of_autocast_but_for_float64():
    def places(group: Group) -> list[Place]:
        given = [torch.zeros(1, dtype=t) for t in (torch.float32, torch.float16, torch.float64)]
        plain = [overlap.place_of(x, group) for x in given]
        with torch.autocast("cpu", torch.bfloat16):
            return [*plain, *(overlap.place_of(x, group) for x in given)]

    names = "float32", "float16", "float64", "bfloat16", "bfloat16", "float64"
    assert on_threads(3, places) == [[Place("CPU", "gloo", 3, name) for name in names]] * 3


def test_times_of_two_products_are_added_up(table):
    """Of which the slower one alone would say the opposite."""
    first = row(us={"none": 10.0, "chunked": 9.0})
    table(first, row(moves="scatter", us={"none": 10.0, "chunked": 10.5}))
    products = [Product(1024, 256, 512, 2, moves) for moves in ("gather", "scatter")]

    def take(group: Group) -> str:
        return choose_way(products, torch.empty(0), group, None, "triton").why

    said = "measured, none 20, chunked 20 us: 1.03 x none"
    assert on_threads(2, take) == [said] * 2


def _compiled(rank: int) -> None:
    x, w = draw(rank, 6, 4), draw(1, 8, 4)
    call = torch.compile(column_parallel_linear, backend="aot_eager")
    options = {"group": dist.group.WORLD, "sequence_parallel": True}
    assert torch.equal(call(x, w, **options), column_parallel_linear(x, w, **options))


def test_a_compiler_makes_the_choice_no_worse() -> None:
    run_ranks(2, _compiled)


# ---------------------------------------------------------------- what it says


def _explained(rank: int, path: Path) -> list[str]:
    mesh = Mesh(tp=2).connect()
    write_measured(path.with_suffix(f".{rank}"), [row(12, 8, 8, "scatter", us=FUSED)])
    overlap_table.load(path.with_suffix(f".{rank}"))
    block = TransformerBlock(16, 2, 32, mesh=mesh, sequence_parallel=True)
    asked = MLP(8, 8, mesh=mesh, overlap="chunked")
    return [explain_overlap(block, 12), explain_overlap(asked, 12)]


def test_it_says_of_every_product_what_and_whether_it_was_measured(tmp_path):
    where = "within 2 x of its sizes on 2 x CPU over gloo in float32"
    nothing = f"overlap none, nothing was measured {where}"
    unknown = "no PREDICTION, the model knows nothing of CPU over gloo"
    for block, asked in run_ranks(2, _explained, tmp_path / "table"):
        assert block.splitlines() == [
            f"attention.qkv: {nothing}",
            f"  gather around [12, 16] [16, 24]: not measured; {unknown}",
            "attention.out: overlap fused, measured, none 9, chunked 9, fused 5 us: 1.80 x none",
            f"  scatter around [12, 8] [8, 16]: measured at [12, 8] [8, 8]; {unknown}",
            f"mlp: {nothing}",
            f"  gather around [12, 16] [16, 16]: not measured; {unknown}",
            f"  scatter around [12, 16] [16, 16]: measured at [12, 8] [8, 8]; {unknown}",
        ]
        assert asked == ": overlap chunked, asked for"
    assert explain_overlap(MLP(8, 8), 12) == ": one rank, nothing moves"


def test_what_the_model_expects_is_said_to_be_a_prediction(monkeypatch):
    """Beside a choice that it has no part in."""
    place = Place("NVIDIA H100 80GB HBM3", "nvlink", 8, "bfloat16")
    monkeypatch.setattr(overlap, "place_of", lambda x, group: place)
    product = Product(8192, 3584, 8192, 8, "gather")
    given = [product], torch.empty(0), object(), None
    choice, line = overlap.explain("up", *given)
    assert choice == (
        "up: overlap none, nothing was measured within 2 x of its sizes on 8 x NVIDIA H100 80GB "
        "HBM3 over nvlink in bfloat16"
    )
    p = predict(product, find_device("H100"), symmetric=True)
    assert line == (
        "  gather around [8192, 8192] [8192, 3584]: not measured; PREDICTION by H100's bandwidths, "
        f"processors and tiles: chunked {p.whole / p.chunked:.2f} x none, fused "
        f"{p.whole / p.fused:.2f} x none"
    )
    place = place._replace(link="network")
    assert "fused" not in overlap.explain("up", *given)[1]
    place = place._replace(device="Some GPU")
    assert overlap.explain("up", *given)[1].endswith(
        "no PREDICTION, the model knows nothing of Some GPU over network"
    )


def test_gpus_are_peers_only_where_the_launcher_says_that_they_share_a_machine(monkeypatch):
    ranks = [4, 5, 6, 7]
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: ranks)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert overlap._link("cuda", object()) == "network"
    for local, link in (("8", "nvlink"), ("4", "nvlink"), ("6", "network"), ("2", "network")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert overlap._link("cuda", object()) == link
    assert overlap._link("cpu", object()) == "gloo"


def test_a_record_of_a_measurement_survives_its_file(tmp_path):
    rows = [row(), dataclasses.replace(row(), place=CPU._replace(ranks=8), us=NONE)]
    write_measured(tmp_path / "a" / "t.json", rows)
    assert read_measured(tmp_path / "a" / "t.json") == rows
