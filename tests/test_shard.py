"""One record per parameter: sharding loses nothing, and the draw does not depend on it."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch
from threads import on_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from warpweave.model.engine import Engine
from warpweave.model.gpt import GPT, GPTConfig
from warpweave.model.plain import PlainConfig, plain_init
from warpweave.parallel import shard
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.parallel.shard import Cut, ParamRecord

LLAMA = {"positions": "rope", "norm": "rms", "bias": False, "tied": False}
SIZES = {"vocab_size": 37, "seq_len": 8, "layers": 3, "width": 16, "heads": 4, "hidden": 20}


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("shape", [(37, 3), (6, 5, 2), (1, 4), (3,)])
def test_slices_padded_with_zeros_assemble_to_the_whole(shape, parts):
    full = torch.randn(shape, dtype=torch.float64)
    for dim in range(len(shape)):
        record = ParamRecord("w", shape, (Cut("tp", dim, parts),))
        slices = [record.slice(full, {"tp": index}) for index in range(parts)]
        assert {tuple(s.shape) for s in slices} == {record.local_shape}
        assert torch.equal(record.assemble(slices[0], lambda x, axis, slices=slices: slices), full)


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 1)])
def test_a_parameter_sharded_over_two_axes_assembles_to_the_whole(dims):
    full, parts = torch.randn(7, 5, dtype=torch.float64), {"ep": 2, "tp": 3}
    record = ParamRecord("w", (7, 5), tuple(map(Cut, parts, dims, parts.values())))
    shards = {(e, t): record.slice(full, {"ep": e, "tp": t}) for e in range(2) for t in range(3)}

    def gather(x, axis):  # the ranks of the other axis after each has gathered over tp
        if axis == "tp":
            return [shards[0, t] for t in range(3)]
        joined = (torch.cat([shards[e, t] for t in range(3)], dims[1]) for e in range(2))
        return [own.narrow(dims[1], 0, x.shape[dims[1]]) for own in joined]

    assert torch.equal(record.assemble(shards[0, 0], gather), full)


@pytest.mark.parametrize("parts", [2, 3, 4, 7])
def test_every_rank_holds_its_own_rows_and_zeros_past_the_end(parts):
    full = torch.arange(1.0, 14.0)[:, None].expand(13, 2)
    record = ParamRecord("w", (13, 2), (Cut("tp", 0, parts),))
    rows = -(-13 // parts)
    for index in range(parts):
        expected = [i + 1.0 if i < 13 else 0.0 for i in range(index * rows, (index + 1) * rows)]
        assert record.slice(full, {"tp": index})[:, 0].tolist() == expected


def test_an_unsharded_parameter_is_the_same_on_every_rank():
    full = torch.randn(5, 3)
    record = ParamRecord("w", (5, 3))
    assert record.cut_axes == ()
    assert record.local_shape == (5, 3)
    assert all(torch.equal(record.slice(full, {"tp": index}), full) for index in range(4))
    assert torch.equal(record.assemble(full, lambda x, axis: [x] * 4), full)
    assert ParamRecord("w", (5, 3), (Cut("tp", 0, 1),)).cut_axes == ()
    assert ParamRecord("w", (5, 3), (Cut("tp", 0, 2),)).cut_axes == ("tp",)


def test_the_draw_depends_on_the_seed_and_the_name_alone():
    record = ParamRecord("blocks.3.up.weight", (37, 5), (Cut("tp", 0, 2),))
    first = record.draw(7)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    other = {"cuts": (Cut("ep", 1, 5),), "partial": ("tp",), "tied": (0, 3), "sum_over": "edp"}
    other_cut = dataclasses.replace(record, **other)
    assert torch.equal(other_cut.draw(7), first)
    assert torch.equal(torch.get_rng_state(), before), "the draw touched the global generator"
    assert not torch.equal(record.draw(8), first)
    assert not torch.equal(record.renamed("blocks.4.up.weight").draw(7), first)


class Largest(TorchDispatchMode):
    """A mode that tracks the most elements of a tensor that an operator has made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        sizes = (x.numel() for x in tree_leaves(out) if torch.is_tensor(x) and not x.is_meta)
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("piece", [1, 100, 1 << 22])
def test_a_rank_draws_its_own_shard_of_what_one_draw_of_the_whole_is(monkeypatch, piece):
    """It draws some rows at a time, for any number of rows, and no tensor much larger than that."""
    monkeypatch.setattr(shard, "_PIECE", piece)
    both = (Cut("ep", 0, 3), Cut("tp", 1, 2))
    for shape in ((1,), (13,), (200,), (31, 7), (64, 1), (49, 5, 3), (2, 9), (130, 16), (33, 0)):
        for cuts in ((), (Cut("tp", 0, 4),), both[: len(shape)], (Cut("ep", 0, 2), both[0])):
            record = ParamRecord("w", shape, cuts, init=0.3)
            digest = hashlib.sha256(b"5/w").digest()
            g = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") & (2**63 - 1))
            full = torch.randn(shape, generator=g) * 0.3
            assert torch.equal(record.draw(5), full), shape
            for at in ({"tp": t, "ep": e} for t in range(4) for e in range(3)):
                if any(at[cut.axis] >= cut.parts for cut in cuts):
                    continue
                with Largest() as made:
                    own = record.draw(5, at=at)
                assert torch.equal(own, record.slice(full, at)), (shape, cuts, at)
                assert made.elements <= max(own.numel(), piece + 31 * full[0].numel())
    ones = ParamRecord("w", (5,), (Cut("tp", 0, 4),), init="ones")
    assert [ones.draw(0, at={"tp": t}).tolist() for t in (1, 2, 3)] == [[1, 1], [1, 0], [0, 0]]


def _made_by_an_engine(mesh: ConnectedMesh, config: GPTConfig) -> int:
    with Largest() as largest:
        engine = Engine(config, mesh)
        engine.gpt.initialise(1)
    return largest.elements


def test_no_rank_of_a_mesh_makes_a_whole_tensor_to_initialise_its_shard(monkeypatch):
    monkeypatch.setattr(shard, "_PIECE", 1 << 10)
    config = GPTConfig(vocab_size=4096, seq_len=8, layers=1, width=32, heads=4)
    for most in on_mesh(Mesh(tp=4), _made_by_an_engine, config):
        assert most <= 4096 * 32 / 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_starts_from_the_same_numbers(dtype):
    for init in (0.02, 1.0, "ones", "zeros"):
        record = ParamRecord("w", (11, 3), init=init)
        drawn = record.draw(1, dtype=dtype)
        assert drawn.dtype == dtype
        assert torch.equal(drawn, record.draw(1).to(dtype))


def test_the_draw_has_the_standard_deviation_it_names():
    drawn = ParamRecord("w", (400, 500), init=0.3).draw(0)
    assert abs(drawn.std().item() / 0.3 - 1) < 0.01
    assert abs(drawn.mean().item()) < 0.003
    assert ParamRecord("w", (3,), init="ones").draw(0).tolist() == [1.0] * 3
    assert ParamRecord("w", (3,), init="zeros").draw(0).tolist() == [0.0] * 3


def _place(sizes: Mesh, rank: int) -> ConnectedMesh:
    """Make a rank's place without its process groups: enough to build a model."""
    return sizes.seen_from(rank)


@pytest.mark.parametrize("style", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(pp=3), Mesh(tp=4, pp=2)], ids=str)
def test_every_mesh_starts_from_the_plain_models_parameters(mesh, style):
    activation = {"activation": "swiglu"} if style else {}
    expected = plain_init(PlainConfig(**SIZES, kv_heads=4, **style, **activation), 3)
    shards: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    records: dict[str, ParamRecord] = {}
    for rank in range(mesh.world):
        model = GPT(GPTConfig(**SIZES, **style, **activation), mesh=_place(mesh, rank), seed=3)
        records |= model.parameter_records()
        at = mesh.coordinates(rank)
        for name, param in model.named_parameters():
            shards.setdefault(name, {})[at["pp"], at["tp"]] = param.detach()
    assert sorted(shards) == sorted(expected)
    for name, held in shards.items():
        for stage in {pp for pp, _ in held}:  # the tied embedding is on two stages
            parts = [held[stage, tp] for tp in range(mesh.tp)]
            whole = records[name].assemble(parts[0], lambda x, axis, parts=parts: parts)
            assert torch.equal(whole, expected[name]), (name, stage)


def test_a_tensor_of_another_shape_is_refused_by_name():
    with pytest.raises(ValueError, match=r"w: expected logical shape \(5, 3\), got \(3, 5\)"):
        ParamRecord("w", (5, 3), (Cut("tp", 0, 2),)).slice(torch.zeros(3, 5), {"tp": 0})
