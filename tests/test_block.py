"""The block: torch's own on one device, sharded over tensor ranks, and an ordinary module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from close import assert_all_close, assert_close_f64, assert_error_budget, assert_same_bits
from einops import rearrange
from every_rank import every_rank
from ranks import run_ranks
from sharded import MESHES, RTOL, check_layer, draw
from threads import run_threads
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from warpweave.kernels import reference
from warpweave.kernels.rope import rope_table
from warpweave.layers.attention import Attention
from warpweave.layers.block import TransformerBlock
from warpweave.layers.context import TokenContext
from warpweave.layers.loss import VocabParallelCrossEntropy, VocabParallelLinearCrossEntropy
from warpweave.layers.mlp import MLP
from warpweave.layers.norm import LayerNorm, RMSNorm
from warpweave.parallel.mesh import Mesh

F64 = {"dtype": torch.float64}
E, HEADS, HIDDEN = 12, 6, 10
GPT2 = {}
LLAMA = {"num_kv_heads": 2, "norm": "rms", "activation": "swiglu", "bias": False,
         "rope_theta": 100.0}  # fmt: skip
GEMMA = LLAMA | {"norm": "rms1p", "activation": "geglu", "norm_place": "sandwich", "softcap": 2.0,
                 "qk_norm": True, "norm_eps": 0.1, "attention_scale": 0.4}  # fmt: skip
OLMO = LLAMA | {"norm_place": "post", "qk_norm": True, "qk_norm_whole": True, "norm_eps": 0.1}
ALL = {"gpt2": GPT2, "llama": LLAMA, "gemma": GEMMA, "olmo": OLMO}
STYLES = pytest.mark.parametrize("style", ALL.values(), ids=ALL.keys())


def _block(style: dict, **options) -> TransformerBlock:
    block = TransformerBlock(E, HEADS, HIDDEN, **(F64 | style | options))
    with torch.no_grad():
        for i, p in enumerate(block.parameters()):
            p.copy_(draw(60 + i, *p.shape) / 2)
    return block


def _results(block: nn.Module, x: Tensor, run=None) -> list[Tensor]:
    """Return output and all gradients; earlier gradients are discarded."""
    block.zero_grad()
    leaf = x.detach().requires_grad_()
    y = block(leaf) if run is None else run(leaf)
    y.backward(draw(9, *y.shape, dtype=y.dtype))
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in block.parameters())]


def _twin_of_torch(dtype: torch.dtype) -> tuple[nn.TransformerEncoderLayer, TransformerBlock]:
    theirs = nn.TransformerEncoderLayer(
        E, HEADS, HIDDEN, 0.0, lambda x: F.gelu(x, approximate="tanh"),
        batch_first=True, norm_first=True, dtype=dtype,
    )  # fmt: skip
    with torch.no_grad():
        for i, p in enumerate(theirs.parameters()):
            p.copy_(draw(30 + i, *p.shape) / 2)

    def grouped(rows: Tensor) -> Tensor:
        return rearrange(rows, "(qkv h d) ... -> (h qkv d) ...", qkv=3, h=HEADS)

    names = {"norm1": "attention_norm", "self_attn.out_proj": "attention.out", "norm2": "mlp_norm",
             "linear1": "mlp.up", "linear2": "mlp.down"}  # fmt: skip
    state = {}
    for kind in ("weight", "bias"):
        state |= {f"{our}.{kind}": theirs.state_dict()[f"{n}.{kind}"] for n, our in names.items()}
        state[f"attention.qkv.{kind}"] = grouped(getattr(theirs.self_attn, f"in_proj_{kind}").data)
    ours = TransformerBlock(E, HEADS, HIDDEN, dtype=dtype)
    ours.load_state_dict(state, strict=True)
    return theirs, ours


def _encoder(theirs: nn.Module, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return theirs(x, src_mask=mask)


def test_it_computes_as_torchs_encoder_layer_with_the_norm_first():
    theirs, ours = _twin_of_torch(torch.float64)
    wide = draw(1, 2, 7, 2 * E)
    for x in (wide[..., ::2], wide[:1, :1, :E], wide[..., :E].transpose(0, 1)):
        expected = _results(theirs, x, lambda x: _encoder(theirs, x))
        assert_all_close(_results(ours, x)[:2], expected[:2])
        assert_close_f64(ours.mlp.up.weight.grad, theirs.linear1.weight.grad, RTOL)
        assert_close_f64(ours.attention_norm.bias.grad, theirs.norm1.bias.grad, RTOL)


def test_autocast_is_as_exact_as_with_torchs_encoder_layer():
    theirs, ours = _twin_of_torch(torch.float32)
    x = draw(1, 4, 7, E, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = _results(theirs, x, lambda x: _encoder(theirs, x))
        mine = _results(ours, x)
    theirs.double()
    truth = _results(theirs, x.double(), lambda x: _encoder(theirs, x))
    for a, b, t in list(zip(mine, expected, truth))[:2]:
        assert a.dtype == torch.float32
        assert_error_budget(a.bfloat16(), b.bfloat16(), t)
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())


@STYLES
def test_an_empty_batch_has_empty_output_and_zero_gradients(style):
    y, dx, *grads = _results(_block(style), torch.zeros(0, 5, E, **F64))
    assert y.shape == dx.shape == (0, 5, E)
    assert not any(g.any() for g in grads)


# ------------------------------------------------------------------- recomputation and dropout


def _context(dropout_key: int = 3) -> TokenContext:
    """Make a context of two samples of six tokens whose indices in the
    global batch are not 0, 1, ..."""
    rope = rope_table(torch.arange(6), E // HEADS, theta=100.0, dtype=torch.float64)
    return TokenContext(2, None, rope, dropout_key, torch.arange(12) * 7 + 2**33)


@STYLES
def test_recomputing_the_hidden_activations_changes_no_bit_but_keeps_less(style):
    results, kept = [], []
    for recompute in (None, "up"):
        block = _block(style, recompute=recompute, dropout=0.3)

        def keep(t: Tensor) -> Tensor:
            kept[-1] += t.numel()
            return t

        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = block(draw(1, 12, E), _context())
        del y
        results.append(_results(block, draw(1, 12, E), lambda x, b=block: b(x, _context())))
    assert_same_bits(*results)
    assert kept[1] < kept[0]


@STYLES
def test_checkpointing_the_whole_block_changes_no_bit(style):
    block = _block(style, dropout=0.3)
    x = draw(1, 12, E)
    again = _results(block, x, lambda x: checkpoint(block, x, _context(), use_reentrant=False))
    assert_same_bits(again, _results(block, x, lambda x: block(x, _context())))


def test_dropout_is_keyed_by_seed_and_token_and_only_while_training():
    block, x = _block(GPT2, dropout=0.3), draw(1, 12, E)
    one, same, other = (block(x, _context(key)) for key in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    block.eval()
    assert torch.equal(block(x, _context()), _block(GPT2)(x, _context()))
    block.train()
    assert torch.equal(block(x, _context()), one)


def test_both_branches_are_dropped_by_masks_of_their_own():
    block, x = _block(GPT2, dropout=0.5, site=5), torch.zeros(12, E, **F64)
    with torch.no_grad():
        for linear in (block.attention.out, block.mlp.down):
            linear.weight.zero_()
            linear.bias.copy_(torch.ones(E) if linear is block.mlp.down else 3 * torch.ones(E))
    # 6 for the elements that attention's dropout keeps, plus 2 for those that the MLP's keeps
    values = block(x, _context())
    assert set(values.unique().tolist()) == {0.0, 2.0, 6.0, 8.0}


@pytest.mark.parametrize("context", [None, TokenContext(2)])
def test_dropout_without_token_ids_is_refused(context):
    x = draw(1, 2, 6, E) if context is None else draw(1, 12, E)
    missing = "context.token_ids is missing; pass a TokenContext with token_ids"
    with pytest.raises(ValueError, match=rf"^dropout = 0.1 needs .* {missing}$"):
        _block(GPT2, dropout=0.1)(x, context)


def _norms(block: TransformerBlock) -> list[nn.Module]:
    """Return the norms before and after attention and before and after the MLP."""
    names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    return [getattr(block, name) or nn.Identity() for name in names]


def test_norms_stand_where_they_are_told_to():
    x, y = draw(1, 2, 6, E), []
    for place in ("pre", "sandwich", "post"):
        block = _block(LLAMA | {"norm_place": place})
        a, b, c, d = _norms(block)
        h = x + b(block.attention(a(x)))
        y.append(h + d(block.mlp(c(h))))
        assert_close_f64(block(x), y[-1], 1e-12)
        names = {name.split(".")[0] for name, _ in block.named_parameters() if "norm" in name}
        assert len(names) == (4 if place == "sandwich" else 2)
    assert len({tensor.sum().item() for tensor in y}) == 3


@pytest.mark.parametrize("place", ["pre", "sandwich", "post"])
def test_each_branch_has_a_dropout_site_of_its_own_wherever_norms_stand(place):
    block = _block(LLAMA | {"norm_place": place}, dropout=0.4, site=5)
    x, context = draw(1, 12, E), _context()
    a, b, c, d = _norms(block)

    def dropped(y: Tensor, site: int) -> Tensor:
        key = {"seed": context.seed, "site": site, "tokens": context.token_ids}
        return reference.dropout(y, 0.4, **key)

    h = x + dropped(b(block.attention(a(x), context)), 5)
    assert_close_f64(block(x, context), h + dropped(d(block.mlp(c(h))), 6), 1e-12)
    block.eval()
    h = x + b(block.attention(a(x), context))
    assert_close_f64(block(x, context), h + d(block.mlp(c(h))), 1e-12)


# ------------------------------------------------------------------- an ordinary module


COMPILED = {"gemma": GEMMA, "olmo": OLMO, "selective": GPT2 | {"recompute": "up"}}


# test_gpt.py tests a block of GPT-2.
@pytest.mark.parametrize("style", COMPILED.values(), ids=COMPILED.keys())
def test_it_compiles_without_a_graph_break(style):
    block, x = _block(style, dropout=0.3), draw(1, 12, E)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    mine = _results(block, x, lambda x: compiled(x, _context()))
    assert_all_close(mine, _results(block, x, lambda x: block(x, _context())))


@STYLES
def test_copies_and_loaded_states_compute_the_same(style):
    block, x = _block(style), draw(1, 2, 6, E)
    expected = _results(block, x)
    twin = copy.deepcopy(block)
    late = TransformerBlock(E, HEADS, HIDDEN, **F64, **style, device="meta").to_empty(device="cpu")
    late.load_state_dict(block.state_dict(), strict=True)
    assert_same_bits(_results(late, x), expected)
    with torch.no_grad():
        for p in block.parameters():
            p.zero_()
    assert_same_bits(_results(twin, x), expected)


@STYLES
def test_every_module_inside_can_be_drawn_again_after_meta(style):
    torch.manual_seed(5)
    expected = TransformerBlock(E, HEADS, HIDDEN, **style)
    late = TransformerBlock(E, HEADS, HIDDEN, **style, device="meta").to_empty(device="cpu")
    torch.manual_seed(5)
    for module in late.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.reset_parameters()
    assert_same_bits(list(late.parameters()), list(expected.parameters()))


def test_halves_of_a_batch_accumulate_to_the_gradient_of_the_whole():
    block, x = _block(LLAMA), draw(1, 4, 6, E)
    block(x).square().sum().backward()
    whole = [p.grad for p in block.parameters()]
    block.zero_grad()
    for half in x.chunk(2):
        block(half).square().sum().backward()
    assert_all_close([p.grad for p in block.parameters()], whole)


def test_the_arguments_after_the_sizes_are_keywords():
    parameters = list(inspect.signature(TransformerBlock).parameters.values())
    assert [p.name for p in parameters[:3]] == ["embed_dim", "num_heads", "hidden_dim"]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[3:])


# ------------------------------------------------------------------- several ranks


def _on_tensor_ranks(rank: int, sizes: Mesh) -> None:
    mesh, tp = sizes.connect(), sizes.tp
    x = draw(1, 12, E)
    gpt2, llama = {"dropout": 0.3}, LLAMA | {"num_kv_heads": 6, "recompute": "up"}
    for style in (gpt2, llama) if tp < 4 else ({"num_kv_heads": 4},):
        heads, hidden = (12, 12) if tp == 4 else (HEADS, 6)

        def make(mesh, sp=False, style=style, heads=heads, hidden=hidden):
            options = {"mesh": mesh, "sequence_parallel": sp}
            return TransformerBlock(E, heads, hidden, **F64, **options, **style)

        def run(block, x):
            whole = _context()
            n, index = len(x), block.attention.mesh.index("tp")  # 0 on one device
            ids = whole.token_ids if n == 12 else whole.token_ids[index * n : (index + 1) * n]
            return block(x, TokenContext(2, None, whole.rope, whole.seed, ids))

        check_layer(make, x, mesh, run=run)
        check_layer(lambda mesh, make=make: make(mesh, True), x, mesh, cut_in=0, cut_out=0, run=run)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_it_equals_one_device_on_tensor_ranks_dropout_included(sizes):
    run_threads(sizes.world, _on_tensor_ranks, sizes)


def _train(block: nn.Module, x: Tensor) -> list[Tensor]:
    """Return parameters and losses of three steps; the second accumulates two backward passes."""
    # A large eps: the gradients of key biases are only rounding errors, which Adam would amplify.
    optimizer, losses = torch.optim.AdamW(block.parameters(), lr=0.01, eps=0.01), []
    for key in (0, 1, 2):
        for half in x.chunk(2) if key == 1 else (x,):
            loss = (block(half) - 0.5).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    parameters = [p.detach() for p in block.parameters()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return [torch.stack(losses), *whole]


def _train_alike(rank: int, style: dict, *wraps: Callable[[nn.Module], nn.Module]) -> None:
    """Assert that two data ranks train each wrapped block as one device trains the plain one."""
    x = draw(1, 4, 6, E)
    order = rearrange(x, "(half rank) s e -> (rank half) s e", rank=2)  # each rank's half
    losses, *expected = _train(_block(style), order)
    for wrap in wraps:
        mine, *parameters = _train(wrap(_block(style)), x.chunk(2)[rank])
        torch.distributed.all_reduce(mine)
        assert_all_close([mine / 2, *parameters], [losses, *expected])


@every_rank(2, run_ranks)
def test_ddp_and_fsdp2_train_it_as_one_device_does(rank: int) -> None:
    for style in (GPT2, LLAMA | {"recompute": "up"}):
        _train_alike(rank, style, DistributedDataParallel, fully_shard)


# ------------------------------------------------------------------- parts that were replaced


class _LoRA(nn.Module):
    """An adapter as users write them: the layer's own result plus a low-rank one."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, (n, k) = base, base.weight.shape
        self.a, self.b = (nn.Parameter(draw(i, *s) / 4) for i, s in ((80, (2, k)), (81, (n, 2))))
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


PROJECTIONS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


@STYLES
@pytest.mark.parametrize("name", PROJECTIONS)
def test_an_adapter_in_place_of_a_projection_is_called(style, name):
    """It acts as if its product had been added to the weight, for outputs
    and for its own gradients."""
    block, x = _block(style, dropout=0.3), draw(1, 12, E)
    adapter = _LoRA(block.get_submodule(name))
    merged = copy.deepcopy(block)
    with torch.no_grad():
        merged.get_submodule(name).weight += adapter.b @ adapter.a
    truth = merged(x, _context())
    truth.backward(draw(9, *truth.shape))
    block.set_submodule(name, adapter)
    y = block(x, _context())
    y.backward(draw(9, *y.shape))
    assert_close_f64(y, truth, RTOL)
    whole = merged.get_submodule(name).weight.grad
    assert_close_f64(adapter.a.grad, adapter.b.t() @ whole, RTOL)
    assert_close_f64(adapter.b.grad, whole @ adapter.a.t(), RTOL)


@STYLES
@pytest.mark.parametrize("name", [*PROJECTIONS, "attention"])
def test_a_part_that_became_a_subclass_is_called(style, name):
    """FSDP2 and parametrizations do this: the module object stays, but its class changes."""
    block, x, seen = _block(style), draw(1, 12, E), []
    expected = _results(block, x, lambda x: block(x, _context()))
    part = block.get_submodule(name)

    class Wrapped(type(part)):
        def forward(self, *args, **options):
            seen.append(name)
            return super().forward(*args, **options)

    part.__class__ = Wrapped
    assert_all_close(_results(block, x, lambda x: block(x, _context())), expected)
    assert seen == [name]


@STYLES
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_projections_are_called_and_change_no_number(style, kind):
    block, x, seen = _block(style, recompute="up"), draw(1, 12, E), []
    expected = _results(block, x, lambda x: block(x, _context()))
    for name in PROJECTIONS:
        register = getattr(block.get_submodule(name), f"register_{kind}_hook")
        register(lambda *_, name=name: seen.append(name))
    assert_all_close(_results(block, x, lambda x: block(x, _context())), expected)
    assert set(seen) == set(PROJECTIONS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_gradients_of_biases_and_norms_are_summed_as_wide_as_they_are_wanted(dtype, impl):
    """64 tokens of 2048 overflow in float16, and are rounded in bfloat16."""
    block = TransformerBlock(8, 2, 8, dtype=dtype, impl=impl, sinks=True)
    for p in block.parameters():
        p.grad_dtype = torch.float32
    y = block(torch.ones(1, 64, 8, dtype=dtype) * torch.linspace(-1, 1, 8).to(dtype))
    y.backward(torch.full_like(y, 2048.0))
    for name, p in block.named_parameters():
        assert p.grad.dtype == torch.float32, name
        assert p.grad.isfinite().all(), name
    wide = block.attention.out.bias.grad, block.mlp_norm.weight.grad, block.attention.sinks.grad
    assert all(not torch.equal(g, g.to(dtype).float()) for g in wide)
    assert block.attention.out.bias.grad.abs().max() > 1e5


@every_rank(2, run_ranks)
def test_fsdp2_may_shard_submodules(rank: int) -> None:
    def wrap(names: tuple[str, ...], block: nn.Module) -> nn.Module:
        for name in names:
            fully_shard(block.get_submodule(name))
        return fully_shard(block)

    each = (("attention", "mlp"), PROJECTIONS, ("attention",), ("mlp.up",))
    _train_alike(rank, GPT2, *(partial(wrap, names) for names in each))


BLOCK = partial(TransformerBlock, 8, 2, 16)
LAYERS = (
    partial(Attention, 8, 2), partial(MLP, 8, 16), partial(RMSNorm, 8), partial(LayerNorm, 8),
    partial(VocabParallelLinearCrossEntropy, 8), partial(VocabParallelCrossEntropy, 8), BLOCK,
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        *((make, {"impl": "cuda"}, r'None, "triton" or "torch", got \'cuda\'$') for make in LAYERS),
        (BLOCK, {"strategy": "rings"}, "Links or one of .*, got 'rings'$"),
        (BLOCK, {"norm": "batch"}, "'layer', 'rms' or 'rms1p', got 'batch'$"),
        (BLOCK, {"norm_place": "before"}, "'pre', 'sandwich' or 'post', got 'before'$"),
    ],
)
def test_an_unknown_word_is_refused_when_a_layer_is_made(make, options, words) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must be {words}"):
        make(**options)
