"""Wrappers around a model after `warpweave.hf.apply`: Trainer, peft, DDP, FSDP2. The truth is the
untouched model in the same wrapper."""

import contextlib
import functools
import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
from torch import nn
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip("transformers", reason="an extra of its own")
accelerate = pytest.importorskip("accelerate", reason="an extra of its own, which Trainer asks for")

from hf_models import V, make  # noqa: E402
from ranks import run_ranks  # noqa: E402
from refused import one_line  # noqa: E402

import warpweave.hf as ww  # noqa: E402
from warpweave.hf import options  # noqa: E402
from warpweave.layers.sharding.dtensor import whole  # noqa: E402
from warpweave.parallel.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
STEPS, FEWER = 20, 8


def rows(count: int, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Return samples with different numbers of labels, one of them without any."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for n in range(count):
        ids = torch.randint(3, V, (length,), generator=generator)
        labels = ids.clone()
        labels[: (n * 5) % (length + 1)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def curve(model: nn.Module, folder, steps: int = STEPS, **options) -> list[float]:
    """Return the losses of a Trainer, step after step."""
    transformers.logging.set_verbosity_error()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=steps, learning_rate=3e-3,
        logging_steps=1, report_to=[], disable_tqdm=True, seed=3,
        **{"per_device_train_batch_size": 4, "save_strategy": "no", **options},
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows(48))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def worst(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) > 1
    return max(abs(a - b) for a, b in zip(ours, theirs))


# ---------------------------------------------------------------- 1. Trainer


@functools.cache
def plain_curve(family: str, folder, *options) -> list[float]:
    return curve(make(family), folder, **dict(options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


ACCUMULATION = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
SHORT = ACCUMULATION | {"steps": FEWER}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "options",
    [{}, SHORT, {"gradient_checkpointing": True, "steps": FEWER}],
    ids=["plain", "accumulation", "checkpointing"],
)
def test_a_trainer_goes_the_same_way(folder, family, options):
    theirs = plain_curve(family, folder, *options.items())
    ours = make(family)
    ww.apply(ours)
    found = curve(ours, folder, **options)
    assert worst(found, theirs) <= 1e-5
    assert "steps" in options or sum(found[:5]) - sum(found[-5:]) > 5 * 0.1  # it learns


def test_the_curve_would_show_a_wrong_number_of_labels(folder):
    """If accumulation divides by each batch's own labels, the result is far outside the bound."""
    theirs = plain_curve("llama", folder, *SHORT.items())
    ours = make("llama")
    ww.apply(ours)
    fused = ours.loss_function

    def loss_function(*args, num_items_in_batch=None, **kwargs):
        return fused(*args, **kwargs) / 3

    ours.loss_function = loss_function
    assert worst(curve(ours, folder, **SHORT), theirs) > 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_under_autocast_a_trainer_stays_as_near_to_float32(folder, family):
    """Both round to bfloat16 in different places. Each is compared with the float32 curve, and ours
    may have twice the error of theirs, plus half a last place of the loss."""
    exact, plain, dtypes = plain_curve(family, folder), make(family), set()
    plain.lm_head.register_forward_hook(lambda module, args, y: dtypes.add(y.dtype))
    theirs = worst(curve(plain, folder, bf16=True), exact)
    assert dtypes == {torch.bfloat16}
    ours = make(family)
    ww.apply(ours)
    found = curve(ours, folder, bf16=True)
    assert worst(found, exact) <= 2 * theirs + torch.finfo(torch.bfloat16).eps / 2


def test_a_trainer_goes_the_same_way_with_lora_also_on_the_head(folder):
    peft = pytest.importorskip("peft", reason="an extra of its own")
    curves = []
    for applied in (False, True):
        model = make("llama")
        if applied:
            ww.apply(model)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"])
        model = peft.get_peft_model(model, config)
        curves.append(curve(model, folder, **ACCUMULATION))
        if applied:
            batch = rows(3)[2]
            out = model.train()(**{name: row[None] for name, row in batch.items()})
            assert out.logits is None  # it was fused, also with LoRA
    assert worst(*curves) <= 1e-5
    assert curves[0][0] - curves[0][-1] > 0.01


# ---------------------------------------------------------------- 2. several ranks


def _trainer_of_two(rank: int, folder: str) -> dict:
    # accelerate requires these, although the ranks are connected already
    here = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_PORT": 0}
    os.environ.update({name: str(n) for name, n in here.items()}, MASTER_ADDR="127.0.0.1")
    model = make("llama")
    ww.apply(model)
    found = {"data": curve(model, folder, per_device_train_batch_size=2, ddp_backend="gloo")}
    model = make("llama")
    ww.apply(model, mesh=Mesh(tp=2).connect(), sequence_parallel=True)
    words = "only on GPUs; on CPUs, write your own training loop"
    with pytest.raises(ValueError, match=words) as refused:
        curve(model, folder, 1, ddp_backend="gloo")
    one_line(refused)
    # As on GPUs, for which accelerate requires only the number of processes.
    options.Replicas.dp_size = 1
    accelerate.ParallelismConfig._validate_accelerator = lambda *_: None
    for axis, more in (("tp", {"save_strategy": "steps", "save_only_model": True}), ("cp", {})):
        accelerate.state.AcceleratorState._reset_state(True)
        model = make("llama")
        ww.apply(model, mesh=Mesh(**{axis: 2}).connect())
        here = f"{folder}/{axis}"
        how = {**ACCUMULATION, **more, "save_steps": 4}
        found[axis] = curve(model, here, 4, ddp_backend="gloo", **how)
        if more:
            found["saved"] = {n: whole(p) for n, p in model.state_dict().items()}
    return found


def test_a_trainer_of_two_ranks_goes_the_way_of_one_without_us(folder):
    """This covers data ranks, and tensor and context ranks, which get equal tokens."""
    theirs = plain_curve("llama", folder)
    shorter = plain_curve("llama", folder, ("steps", 4), *ACCUMULATION.items())
    for found in run_ranks(2, _trainer_of_two, str(folder)):
        assert worst(found["data"], theirs) <= 1e-5
        for axis in ("tp", "cp"):
            assert worst(found[axis], shorter) <= 1e-5
        saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/tp/checkpoint-4")
        for name, x in saved.state_dict().items():
            assert torch.equal(found["saved"][name], x)


def test_a_trainer_refuses_data_ranks_beside_tensor_ranks():
    with pytest.raises(ValueError, match="fully_shard the model over") as refused:
        options.Replicas(2, 2, "cuda").dp_size  # noqa: B018
    one_line(refused)


def batch_of(labels: str) -> dict[str, torch.Tensor]:
    """Return eight samples whose labels are one of `LABELS`."""
    batch = {name: torch.stack([row[name] for row in rows(8)]) for name in rows(1)[0]}
    if labels == "a micro-batch without":
        batch["labels"][6:] = -100
    elif labels == "a rank without":
        batch["labels"][4:] = -100
    return batch


def accumulated(model: nn.Module, labels: str, accumulate: int, rank: int, world: int, group=None):
    """Return loss and gradients of a rank's samples, in this many steps, divided by all ranks'
    labels.

    DDP averages over ranks, so Trainer multiplies the loss by their number.
    """
    batch = batch_of(labels)
    items = (batch["labels"][:, 1:] != -100).sum()
    parts = {n: x.chunk(world)[rank].chunk(accumulate) for n, x in batch.items()}
    model.train().zero_grad()
    total = torch.zeros(())
    for step in range(accumulate):
        part = {n: x[step] for n, x in parts.items()}
        last = step == accumulate - 1
        with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            loss = model(**part, num_items_in_batch=items).loss
            (loss * world).backward()
        total += loss.detach()
    if world > 1:
        dist.all_reduce(total, group=group)
    grads = {n.removeprefix("module."): whole(p.grad).clone() for n, p in model.named_parameters()}
    return total, grads


LABELS = ("ragged", "a micro-batch without", "a rank without")
TABLE = [(LABELS[0], 1), (LABELS[0], 4), (LABELS[1], 2), (LABELS[1], 4), (LABELS[2], 2)]


def _table_of_two(rank: int) -> list[tuple]:
    model = make("llama")
    ww.apply(model)
    model = nn.parallel.DistributedDataParallel(model)
    return [accumulated(model, *row, rank, 2) for row in TABLE]


def _of_four(rank: int, folder: str) -> dict:
    """Run two replicas: each over two context ranks under DDP, or over two
    tensor ranks under FSDP2."""
    mesh = Mesh(dp=2, cp=2).connect()
    model = make("llama")
    ww.apply(model, mesh=mesh)
    where = mesh.index("dp"), 2, mesh.group("dp")
    model = nn.parallel.DistributedDataParallel(model, process_group=mesh.group("dp"))
    found = {"table": [accumulated(model, *row, *where) for row in TABLE]}
    mesh = Mesh(dp=2, tp=2).connect()
    for family in ("llama", "gpt2"):
        model = make(family)
        ww.apply(model, mesh=mesh, sequence_parallel=True)
        with pytest.raises(RuntimeError, match=r"DTensor|sharded"):
            nn.parallel.DistributedDataParallel(model, process_group=mesh.group("dp"))
        layers = model.model.layers if family == "llama" else model.transformer.h
        for part in (*layers, model):
            fully_shard(part, mesh=mesh.device_mesh["dp"])
        steps = [accumulated(model, "ragged", 2, mesh.index("dp"), 2, mesh.group("dp"))]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        steps.append(accumulated(model, "ragged", 1, mesh.index("dp"), 2, mesh.group("dp")))
        model.save_pretrained(f"{folder}/{family}")
        held = sum(p.to_local().numel() for p in model.parameters())
        found[family] = steps, norm.full_tensor(), held
    with pytest.raises(ValueError, match="blocks of rows") as refused:
        ww.apply(make("phi3", num_hidden_layers=1, num_key_value_heads=4), mesh=mesh)
    found["refused"] = str(refused.value)
    return found


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> tuple:
    """Return the results of each of four ranks, and where they saved."""
    folder = tmp_path_factory.mktemp("four")
    return run_ranks(4, _of_four, str(folder)), folder


def test_blocks_of_rows_over_tensor_ranks_are_refused_beside_data_ranks(four):
    """FSDP2 would reassemble them in a different order."""
    for rank in four[0]:
        assert rank["refused"].startswith("model.layers.0.self_attn.qkv_proj: 3 blocks of rows")
        assert "\n" not in rank["refused"]


def assert_as_one(found: tuple, wanted: tuple) -> None:
    (loss, grads), (wanted_loss, wanted_grads) = found, wanted
    assert (loss - wanted_loss).abs() <= 1e-6 * wanted_loss
    assert grads.keys() == wanted_grads.keys()
    for name, g in wanted_grads.items():
        assert (grads[name] - g).abs().max() <= 1e-5 * g.abs().max(), name


def test_every_label_counts_once_for_any_accumulation_and_number_of_ranks(four):
    """The table combines num_items_in_batch, accumulation, DP, CP and samples without labels; the
    truth is one step with all samples."""
    theirs, ours = make("llama"), make("llama")
    ww.apply(ours)
    truth = {labels: accumulated(theirs, labels, 1, 0, 1) for labels in LABELS}
    assert len({loss.item() for loss, _ in truth.values()}) == len(LABELS)
    columns = [[accumulated(ours, *row, 0, 1) for row in TABLE], *run_ranks(2, _table_of_two)]
    columns += [rank["table"] for rank in four[0]]
    for column in columns:
        for (labels, _), found in zip(TABLE, column, strict=True):
            assert_as_one(found, truth[labels])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_fsdp_around_a_model_over_tensor_ranks_is_one_rank(four, family):
    """Compares loss, gradients, their norm and a step; the saved model is whole."""
    model = make(family)
    wanted = [accumulated(model, "ragged", 1, 0, 1)]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    wanted.append(accumulated(model, "ragged", 1, 0, 1))
    ranks, folder = four
    for rank in ranks:
        (first, second), found_norm, held = rank[family]
        assert_as_one(first, wanted[0])
        assert_as_one(second, wanted[1])
        torch.testing.assert_close(found_norm, norm)
        assert held < 0.3 * sum(p.numel() for p in model.parameters())
    saved = type(model).from_pretrained(folder / family)
    assert saved.config.architectures == [type(model).__name__]
    for name, x in model.state_dict().items():
        assert (saved.state_dict()[name] - x).abs().max() <= 1e-5 * x.abs().max(), name


def _sharded(rank: int) -> tuple:
    """Run under FSDP2, with units for each layer and the rest. Return a step's gathers by size, the
    loss, and gradients."""
    model = make("llama")
    ww.apply(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    gathered: Counter[int] = Counter()
    gather = collectives._get_param_all_gather_inputs

    def counted(params):
        gathered[sum(p._orig_size.numel() for p in params)] += 1
        return gather(params)

    collectives._get_param_all_gather_inputs = counted
    batch = {n: x.chunk(2)[rank] for n, x in batch_of("ragged").items()}
    items = (batch_of("ragged")["labels"][:, 1:] != -100).sum()
    model.train()
    out = model(**batch, num_items_in_batch=items)
    (out.loss * 2).backward()
    loss = out.loss.detach().clone()
    dist.all_reduce(loss)
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    return out.logits is None, dict(gathered), loss, grads


def test_fsdp_gathers_the_head_once_per_step_and_its_loss_is_fused():
    model = make("llama")
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    rest = sum(p.numel() for p in model.parameters()) - 2 * layer  # including the head
    wanted, wanted_grads = accumulated(model, "ragged", 1, 0, 1)
    for fused, gathered, loss, grads in run_ranks(2, _sharded):
        assert fused
        assert gathered == {rest: 1, layer: 4}  # layers again in the backward pass
        assert (loss - wanted).abs() <= 1e-6 * wanted
        for name, g in wanted_grads.items():
            assert (grads[name] - g).abs().max() <= 1e-5 * g.abs().max(), name
