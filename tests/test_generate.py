"""Decoding with a KV cache: the same tokens as transformers, on any mesh, for any batch."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from close import relative_error
from refused import check
from test_convert import _theirs
from threads import run_threads
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from warpweave.checkpoint import save_checkpoint
from warpweave.convert import from_hf
from warpweave.model import generate as module
from warpweave.model.engine import Engine
from warpweave.model.generate import Sampling, generate, kept
from warpweave.model.gpt import GPT, GPTConfig
from warpweave.model.plain import plain_gpt_logits
from warpweave.parallel.mesh import Mesh
from warpweave.prove.expected import plain_config
from warpweave.train import sample
from warpweave.train.sample_options import SampleConfig

GREEDY = Sampling(tokens=10, temperature=0.0)
PROMPTS = [[5, 7, 11], [3], [2, 9, 4, 8, 1, 30, 31, 7, 5]]
NAMES = ("gpt2", "llama3", "qwen2", "mistral", "qwen3", "gemma2", "gemma3", "olmo2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    for name in NAMES:
        _theirs(name).save_pretrained(root / name)
    return {name: root / name for name in NAMES}


def _continued(name: str, prompts: list[list[int]], tokens: int, *stop: int) -> list[list[int]]:
    """Return the continuation by transformers, prompt by prompt."""
    model, rows = _theirs(name), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            max_new_tokens=tokens, eos_token_id=[*stop] or None,
        )  # fmt: skip
        rows.append(out[0, len(prompt) :].tolist())
    return rows


@functools.cache
def _expected(name: str, *stop: int) -> list[list[int]]:
    return _continued(name, PROMPTS, GREEDY.tokens, *stop)


def _save(folder: Path, vocab_size: int, **state: object) -> None:
    """Write a checkpoint of initial weights."""
    config = GPTConfig(vocab_size, 32, 1, 8, 2)
    params = [(name, p.detach()) for name, p in GPT(config).named_parameters()]
    fields = dataclasses.asdict(config)
    save_checkpoint(folder / "checkpoints", 1, params, config=fields, state=state)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers_alone_and_in_a_batch(name, folders):
    found = from_hf(folders[name])
    gpt = found.load(GPT(found.config))
    expected = _expected(name)
    assert len({tuple(row) for row in expected}) == 3
    assert [generate(gpt, [prompt], GREEDY)[0] for prompt in PROMPTS] == expected
    assert generate(gpt, PROMPTS, GREEDY) == expected
    assert gpt.training


def test_a_text_ends_with_its_stop_token(folders):
    found = from_hf(folders["llama3"])
    gpt = found.load(GPT(found.config))
    whole = _expected("llama3")
    stop = whole[0][4]
    rows = generate(gpt, PROMPTS, Sampling(GREEDY.tokens, 0.0, stop=(stop, 52)))
    for row, full in zip(rows, whole, strict=True):
        ends = [i for i, token in enumerate(full) if token in (stop, 52)]
        assert row == (full[: ends[0] + 1] if ends else full)
    assert rows[0] == _expected("llama3", stop, 52)[0]
    with mock.patch.object(module, "_logits", wraps=module._logits) as calls:
        generate(gpt, PROMPTS[:1], Sampling(GREEDY.tokens, 0.0, stop=(stop,)))
    assert calls.call_count == whole[0].index(stop) + 1


def test_kept_keys_and_values_give_the_logits_of_the_whole_text():
    config = GPTConfig(
        33, 24, 3, 12, 6, 2, 10, "rope", norm="rms", activation="swiglu", bias=False, head_size=4,
        windows=(5, 0), qk_norm=True, sinks=True, tied=False,
    )  # fmt: skip
    gpt = GPT(config, dtype=torch.float64)
    with torch.no_grad():
        for param in gpt.parameters():
            param.add_(torch.randn_like(param) * 0.3)
    params = dict(gpt.named_parameters())
    seen, original = [], module._logits

    def noted(*args):
        seen.append(original(*args))
        return seen[-1]

    with mock.patch.object(module, "_logits", noted):
        rows = generate(gpt, PROMPTS, Sampling(12, 0.0))
    for b, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
        for step, logits in enumerate(seen):
            text = torch.tensor([prompt + row[:step]])
            plain = plain_gpt_logits(params, text, plain_config(config))[0, -1]
            assert relative_error(logits[b], plain) < 1e-12


def _on_ranks(rank: int, folders: dict[str, Path], expected: dict[str, list]) -> None:
    mesh = Mesh(tp=2, pp=2).connect()
    for name, rows in expected.items():
        found = from_hf(folders[name])
        gpt = found.load(GPT(found.config, mesh=mesh))
        assert generate(gpt, PROMPTS, GREEDY) == rows
        how = Sampling(8, 1.0, top_k=9, top_p=0.9, stop=tuple(range(0, 53, 5)), seed=4)
        alone = generate(found.load(GPT(found.config)), PROMPTS, how)
        assert generate(gpt, PROMPTS, how) == alone


def test_tensor_ranks_and_stages_write_the_same_text(folders):
    names = ("qwen2", "gemma3", "olmo2")
    run_threads(4, _on_ranks, folders, {name: _expected(name) for name in names})


def _left(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Return the logits that transformers' own warpers keep, in their order."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [TemperatureLogitsWarper(how.temperature)]
    warpers += [TopKLogitsWarper(how.top_k)] if how.top_k else []
    warpers += [TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
    for warper in warpers:
        logits = warper(None, logits)
    return logits


@pytest.mark.parametrize(
    ("k", "p"),
    [(0, 0.8), (5, 1.0), (7, 0.6), (1, 0.5), (40, 1e-9), (9, 0.9), (30, 1.0)],  # of 31
)
def test_what_may_be_drawn_is_what_transformers_leaves(k, p):
    logits = torch.randn(6, 31, dtype=torch.float64) * 3
    noise = torch.rand(6, 31, dtype=torch.float64) * 9
    plain = Sampling(temperature=1.0, top_k=k, top_p=p)
    assert torch.equal(kept(logits, plain), _left(logits, plain))
    for temperature in (0.3, 1.7):  # applied before top_p, which depends on it
        how = dataclasses.replace(plain, temperature=temperature)
        expected = (_left(logits, how) + noise).argmax(-1)
        assert torch.equal(module.choose_tokens(logits, noise, how), expected)


def test_the_fewest_tokens_that_have_just_top_p_are_enough():
    logits = torch.zeros(1, 8, dtype=torch.float64)  # exactly one eighth each
    for p, count in ((0.25, 2), (0.26, 3), (0.5, 4)):
        how = Sampling(temperature=1.0, top_p=p)
        for left in (kept(logits, how), _left(logits, how)):
            assert left.isfinite().sum() == count


def _plain_rows(gpt: GPT, prompts: list[list[int]], how: Sampling) -> list[list[int]]:
    """Recompute the whole text of each prompt for every token, without a batch, a cache or our
    choice of tokens. Only the noise is drawn as `generate` documents: for all rows, token by
    token."""
    params, config = dict(gpt.named_parameters()), plain_config(gpt.config)
    generator = torch.Generator().manual_seed(how.seed % 2**63)
    rows: list[list[int]] = [[] for _ in prompts]
    for _ in range(how.tokens):
        noise = torch.empty(len(prompts), gpt.config.vocab_size, dtype=torch.float64)
        noise.exponential_(generator=generator)
        for row, prompt, e in zip(rows, prompts, noise, strict=True):
            if row and row[-1] in how.stop:
                continue
            logits = plain_gpt_logits(params, torch.tensor([prompt + row]), config)[:, -1]
            best = _left(logits, how) - e.log() if how.temperature else logits
            row.append(int(best.argmax()))
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_any_options_at_once_give_the_texts_of_a_plain_loop(seed):
    draw = random.Random(seed)
    config = GPTConfig(
        31, 24, 1, 12, 6, draw.choice((2, 6)), 10, draw.choice(("rope", "learned")), norm="rms",
        activation="swiglu", bias=False, head_size=4, windows=draw.choice(((), (5,))), tied=False,
    )  # fmt: skip
    gpt = GPT(config, dtype=torch.float64, seed=seed)
    with torch.no_grad():
        for param in gpt.parameters():
            param.mul_(8)
    prompts = [[draw.randrange(31) for _ in range(draw.randint(1, 9))] for _ in range(3)]
    how = Sampling(
        tokens=draw.choice((1, 9, 9, 9)), temperature=draw.choice((0.0, 0.4, 1.0, 3.0, 9.0)),
        top_k=draw.choice((0, 1, 4, 40)), top_p=draw.choice((1.0, 0.9, 0.3)),
        stop=draw.choice(((), (3,), tuple(range(0, 31, 2)))), seed=draw.choice((5, 2**40, -1)),
    )  # fmt: skip
    with torch.no_grad():
        rows = _plain_rows(gpt, prompts, how)
        assert generate(gpt, prompts, how) == rows
        # Many stop tokens, none of them in the middle row: the others end early, and it continues.
        how = dataclasses.replace(how, stop=tuple(set(range(31)) - set(rows[1])))
        assert generate(gpt, prompts, how) == _plain_rows(gpt, prompts, how)


def test_draws_follow_the_softmax_of_the_logits_over_the_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64).expand(20000, 3)
    noise = -torch.empty(20000, 3, dtype=torch.float64).exponential_().log()
    drawn = module.choose_tokens(logits, noise, Sampling(temperature=2.0))
    shares = drawn.bincount(minlength=3) / 20000
    assert (shares - (logits[0] / 2).softmax(0)).abs().max() < 0.015


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 100), (torch.float16, 1000)])
def test_logits_of_few_bits_are_divided_by_the_temperature_in_float64(dtype, least):
    """In their own dtype some neighbors would be equally likely."""
    gpt, how = GPT(GPTConfig(53, 16, 1, 8, 2)), Sampling(40, 0.7, seed=3)
    logits = (least + torch.arange(53) / 2).to(dtype).expand(2, 53)
    generator, wanted = torch.Generator().manual_seed(3), []
    for _ in range(how.tokens):
        e = torch.empty(2, 53, dtype=torch.float64).exponential_(generator=generator)
        wanted.append((logits.double() / 0.7 - e.log()).argmax(-1))
    found = module.go_on(gpt, 2, how, lambda chosen: (logits, 0))
    assert found == torch.stack(wanted, 1).tolist()


def test_the_seed_decides_the_draws(folders):
    found = from_hf(folders["gpt2"])
    gpt = found.load(GPT(found.config))
    seeds = 1, 1, 1 + 2**65, 1 - 2**63, 2
    first, *again, other = (generate(gpt, PROMPTS, Sampling(10, 1.0, seed=s)) for s in seeds)
    assert again == [first] * 3  # its last 63 bits
    assert other != first


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_every_module_is_left_in_the_mode_that_it_was_in(fails):
    config = GPTConfig(53, 16, 2, 8, 2)
    gpt, engine = GPT(config), Engine(config, Mesh().connect())
    runs = {
        gpt: lambda: generate(gpt, [[1, 2]], Sampling(2)),
        engine.gpt: lambda: engine.generate(torch.tensor([1]), 2),
    }
    for model, run in runs.items():
        for mode in (True, False):
            model.train(mode)
            model.blocks["0"].train(not mode)
            before = [m.training for m in model.modules()]
            broken = mock.patch.object(model, "logits", side_effect=RuntimeError("out of memory"))
            with broken if fails else nullcontext(), suppress(RuntimeError):
                run()
            assert [m.training for m in model.modules()] == before


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "a prompt must have at least one token"),
        ([[1], [53]], r"tokens must lie in \[0, 53\), got \[53\]"),
        ([[1.5]], r"a prompt must be a sequence of integers, got \[1.5\]"),
        ({"input_ids": 1}, "a prompt must be a sequence of integers, got 'input_ids'"),
        ([[1] * 55], r"prompt and new tokens \(65\) exceed the model's sequence length \(64\)"),
    ],
)
def test_prompts_that_the_model_cannot_go_on_with_are_refused(prompts, message, folders):
    gpt = GPT(from_hf(folders["gpt2"]).config)
    check(lambda: generate(gpt, prompts, GREEDY), f"^{message}$")
    assert generate(gpt, [], GREEDY) == []
    rows = torch.tensor([[5, 7], [3, 2]])
    assert generate(gpt, rows, GREEDY) == generate(gpt, rows.tolist(), GREEDY)
    assert generate(gpt, [[1], [2]], Sampling(0)) == [[], []]


# ---------------------------------------------------------------- the command


def _sample(capfd, *words: str) -> tuple[int, list[str], str]:
    """Return (exit code, lines of stdout, stderr) of ``warpweave sample``, with bytes for a model
    that has no tokenizer."""
    code = 0
    if "--tokenizer" not in words and not (Path(words[0]) / "tokenizer.json").exists():
        words += ("--tokenizer", "bytes")
    try:
        sample.main(list(words))
    except SystemExit as caught:
        code = caught.code
    out = capfd.readouterr()
    return code, out.out.strip().splitlines(), out.err.strip()


def _with_words(folder: Path) -> None:
    """Make a tokenizer of numbers that begins a prompt with token 1."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(53)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("1 $A", special_tokens=[("1", 1)])
    words.save(str(folder / "tokenizer.json"))


def test_the_command_computes_on_the_device_that_it_is_given(folders, tmp_path, capfd, monkeypatch):
    folder = Path(shutil.copytree(folders["llama3"], tmp_path / "llama3"))
    _with_words(folder)
    given = str(folder), "--prompt", "5", "--tokens", "1"
    code, _, err = _sample(capfd, *given, "--device", "cuda")
    assert (code, err.count("\n")) == (2, 0)
    assert "no GPU" in err
    asked = []

    def join(mesh, *, backend, **_):
        asked.append(backend)
        raise ValueError("far enough")

    monkeypatch.setattr(sample, "join", join)
    for words in ((), ("--device", "cpu"), ("--device", "cuda")):
        assert "far enough" in _sample(capfd, *given, *words)[2]
    assert asked == [None, "gloo", "nccl"]


@pytest.mark.parametrize("axes", [(), ("--tp", "2")], ids=["one", "two ranks"])
def test_the_command_writes_transformers_tokens(axes, folders, tmp_path, capfd):
    folder = Path(shutil.copytree(folders["llama3"], tmp_path / "llama3"))
    _with_words(folder)
    expected = _continued("llama3", [[1, 5, 7], [1, 11]], 12, 2)
    words = "--prompt", "5 7", "11", "--tokens", "12", "--temperature", "0", *axes
    code, lines, err = _sample(capfd, str(folder), *words)
    assert code == 0, err
    result = json.loads(lines[-1])
    assert result["tokens"] == expected
    assert result["texts"] == [" ".join(map(str, row)) for row in expected]
    assert sum(line.startswith(("---", "{")) for line in lines) == 3  # by one rank
    assert lines[0] == "--- '5 7'"


def test_the_command_goes_on_by_a_checkpoint_of_ours(tmp_path, capfd):
    _save(tmp_path, 256)
    for k in ("2", "1"):
        words = "--prompt", "ab", "--tokens", "3", "--top-k", k, "--seed", "5"
        code, lines, err = _sample(capfd, str(tmp_path), *words)
        assert code == 0, err
        assert [len(row) for row in json.loads(lines[-1])["tokens"]] == [3]
        assert ("warpweave: seed = 5 has no effect: top_k = 1 picks" in err) == (k == "1")


def test_tokens_that_are_no_text_are_left_out_of_the_commands(folders, capfd, monkeypatch):
    monkeypatch.setattr(sample, "generate", lambda *_: [[65, 256, 300, 66]])
    _, lines, _ = _sample(capfd, str(folders["llama3"]), "--prompt", "\x05", "--tokens", "4")
    result = json.loads(lines[-1])
    assert (result["texts"], result["tokens"]) == (["AB"], [[65, 256, 300, 66]])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--tp", "3"], r"kv_heads \(2\) is not divisible by tp \(3\)"),
        ([""], "a prompt must have at least one token"),
        (["a", "--tokens", "5"], r"tokens must lie in \[0, 53\), got \[97\]"),
        (["\x05", "--tokens", "64"], r"prompt and new tokens \(65\) exceed the model's"),
        (["\x05", "--top-p", "2"], r"top_p must be in \(0, 1\], got 2.0"),
        (["\x05", "--tokenizer", "nowhere"], "cannot read nowhere: No such file"),
    ],
)
def test_the_command_refuses_in_one_line(words, message, folders, capfd):
    code, _, err = _sample(capfd, str(folders["llama3"]), "--prompt", *words)
    assert code == 2
    assert re.match(f"warpweave: {message}", err)
    assert "\n" not in err


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ((), {}), (("--tokens", "3"), {"tokens": 3}), (("--seed", "7"), {"seed": 7}),
        (("--temperature", "0.5"), {"temperature": 0.5}), (("--top-k", "4"), {"top_k": 4}),
        (("--top-p", "0.5"), {"top_p": 0.5}), (("--dtype", "bf16"), {"dtype": torch.bfloat16}),
        (("--impl", "torch"), {"impl": "torch"}), (("--timeout", "9"), {"timeout": 9.0}),
        (("--tp", "2"), {"mesh": Mesh(tp=2)}), (("--pp", "3"), {"mesh": Mesh(pp=3)}),
        (("--tokenizer", "TOKENIZER"), {"prompts": [[1, 0]]}),
    ],
)  # fmt: skip
def test_every_option_of_the_command_arrives(words, seen, folders, tmp_path, capfd):
    _with_words(tmp_path)
    tokenizer = str(tmp_path / "tokenizer.json")
    words = [tokenizer if word == "TOKENIZER" else word for word in words]
    got = {}

    def start(entry, args, mesh, **_):
        got["mesh"] = mesh
        raise ValueError("not here")

    def go_on(gpt, prompts, sampling):
        param = next(gpt.parameters())
        got.update(dataclasses.asdict(sampling), prompts=prompts, dtype=param.dtype)
        return [[] for _ in prompts]

    built, joined = mock.Mock(wraps=GPT), mock.Mock(wraps=sample.join)
    with (
        mock.patch.object(sample, "launch", start), mock.patch.object(sample, "generate", go_on),
        mock.patch.object(sample, "GPT", built), mock.patch.object(sample, "join", joined),
    ):  # fmt: skip
        few = () if "--tokens" in words else ("--tokens", "5")
        _sample(capfd, str(folders["llama3"]), "--prompt", "\x05", *words, *few)
    if "mesh" not in seen:
        got |= {"impl": built.call_args.kwargs["impl"], **joined.call_args.kwargs}
        usual = {
            "tokens": 5, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 0, "stop": (2,),
            "dtype": torch.float32, "impl": None, "timeout": 300.0, "prompts": [[5]],
        }  # fmt: skip
        seen = usual | seen
    assert {name: got[name] for name in seen} == seen


def test_given_tokenizer_overrides_the_model_and_every_prompt_is_checked(folders, tmp_path):
    folder = Path(shutil.copytree(folders["llama3"], tmp_path / "llama3"))
    config = SampleConfig(folder, ("\x05", "\x06\x07"), tokens=4, tokenizer=Path("bytes"))
    assert config.prompts() == [[5], [6, 7]]
    config.check()
    _with_words(folder)
    config = dataclasses.replace(config, tokenizer=None)
    other = Tokenizer(models.WordLevel({"5": 2, "7": 9, "6": 4, "?": 0}, unk_token="?"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    other.save(str(tmp_path / "other.json"))
    config = dataclasses.replace(config, prompt=("5", "6 7", "8"))
    assert config.prompts() == [[1, 5], [1, 6, 7], [1, 8]]
    config = dataclasses.replace(config, tokenizer=tmp_path / "other.json")
    assert config.prompts() == [[2], [4, 9], [0]]
    config.check()
    for prompt in (("5 " * 61, "5"), ("5", "5 " * 61), ("5", "5 " * 61, "7")):
        words = r"new tokens \(65\) exceed the model's sequence length \(64\)$"
        check(dataclasses.replace(config, prompt=prompt).check, words)
    dataclasses.replace(config, prompt=("5", "5 " * 60)).check()


def test_tokens_that_the_tokenizer_has_not_are_left_out_of_the_text(tmp_path, capfd):
    _save(tmp_path, 300)
    with mock.patch.object(sample, "generate", return_value=[[97, 256, 0, 255, 299, 98]]):
        _, lines, _ = _sample(capfd, str(tmp_path), "--prompt", "ab", "--tokens", "6")
    assert json.loads(lines[-1])["texts"] == ["a\0\ufffdb"]


def test_sample_command_prints_each_text_and_new_tokens_per_second(folders, capfd, monkeypatch):
    """Three texts have different lengths; on this clock the generation takes half a second."""
    now = iter([10.0, 10.5])
    monkeypatch.setattr(sample, "time", mock.Mock(perf_counter=lambda: next(now)))
    rows = [[65, 66, 67, 68], [], [69]]
    monkeypatch.setattr(sample, "generate", lambda *_: rows)
    words = "--prompt", "\x05", "\x06\x07", "\x08", "--tokens", "4"
    code, lines, _ = _sample(capfd, str(folders["llama3"]), *words)
    result = {"texts": ["ABCD", "", "E"], "tokens": rows, "tokens_per_second": 10.0}
    assert (code, json.loads(lines[-1])) == (0, result)
    assert lines[:-1] == ["--- '\\x05'", "ABCD", "--- '\\x06\\x07'", "", "--- '\\x08'", "E"]


def test_the_command_starts_its_own_ranks_on_the_device_that_it_is_given(
    folders, capfd, monkeypatch
):
    given = str(folders["llama3"]), "--prompt", "\x05", "--tokens", "1"
    asked = []

    def choose(ranks: int, backend: str | None, **more: object) -> str:
        asked.append((ranks, backend))
        raise ValueError("far enough")

    monkeypatch.setattr(sample, "choose_backend", choose)
    for device in ((), ("--device", "cpu"), ("--device", "cuda")):
        assert "far enough" in _sample(capfd, *given, "--tp", "2", "--pp", "2", *device)[2]
    assert asked == [(4, None), (4, "gloo"), (4, "nccl")]
    for axis in ("--tp", "--pp"):  # either alone
        assert "far enough" in _sample(capfd, *given, axis, "2")[2]
        assert asked.pop() == (2, None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, lines, err = _sample(capfd, *given)
    assert (code, lines) == (2, [])
    assert err == "warpweave: sample starts its own ranks; run it without torchrun"


def test_the_command_refuses_a_folder_without_a_model(tmp_path, capfd):
    words = f"warpweave: {tmp_path} is not a transformers model: it has no config.json"
    assert _sample(capfd, str(tmp_path), "--prompt", "a") == (2, [], words)


def test_text_is_bytes_only_for_a_model_of_bytes(folders, tmp_path, capfd):
    """For a run, its training data decides; otherwise the vocabulary size does."""
    for vocab, name, good in (
        (256, None, True), (257, None, False), (255, None, False),
        (300, "bytes", True), (256, "0123abc", False),
    ):  # fmt: skip
        out = tmp_path / f"{vocab} {name}"
        _save(out, vocab, **{} if name is None else {"data": {"tokenizer": name}})
        given = SampleConfig(out, ("ab",))
        if good:
            assert given.prompts() == [[97, 98]]
        else:
            check(given.prompts, "^found no tokenizer for .*; pass --tokenizer")
        assert dataclasses.replace(given, tokenizer=Path("bytes")).prompts() == [[97, 98]]
    check(SampleConfig(folders["llama3"], ("a",)).check, "found no tokenizer")
