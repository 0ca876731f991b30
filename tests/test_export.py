"""A trained model as transformers loads it: its tokenizer, where texts end, the same numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from close import relative_error
from test_init_from import _config, _trainer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from warpweave import export
from warpweave.checkpoint import open_latest
from warpweave.convert import ConvertError, from_hf, to_hf
from warpweave.convert.beside import keep_origin, special_tokens
from warpweave.convert.source import find_tokenizer, read_stop_tokens
from warpweave.data import ByteTokenizer, JsonTokenizer
from warpweave.generate import Sampling, generate
from warpweave.gpt import GPT, GPTConfig
from warpweave.train_config import GPTOverrides

SMALL = GPTOverrides(seq_len=16, layers=1, width=8, heads=2)
TEXT = "17 4 <|endoftext|> 256"


def _words(path: Path, *special: str) -> Path:
    """A tokenizer of numbers, which begins a prompt with <s>."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(97)} | {"?": 97}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<s>", *special])
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 98)])
    words.save(str(path))
    return path


def _run(folder: Path, **options):
    """A run's folder with one checkpoint, of the weights that a training begins with."""
    config = _config(
        folder, options.pop("init_from", None), overrides=SMALL, model="toy", **options
    )
    trainer = _trainer(config)
    trainer.step = 3
    trainer.save()
    return config.out


def _export(capfd, *words: object) -> tuple[int, dict, str]:
    """(exit code, the last line, stderr) of ``warpweave export``."""
    code = 0
    try:
        export.main([str(word) for word in words])
    except SystemExit as caught:
        code = caught.code
    out = capfd.readouterr()
    return code, json.loads(out.out.splitlines()[-1]) if out.out else {}, out.err.strip()


@pytest.fixture(scope="module")
def bytes_run(tmp_path_factory) -> Path:
    return _run(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def words_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    return _run(folder, tokenizer=_words(folder / "mine.json", "<|endoftext|>", "<pad>"))


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_a_run_is_exported_with_its_own_tokenizer(kind, request, tmp_path, capfd):
    run = request.getfixturevalue(f"{kind}_run")
    code, result, err = _export(capfd, run, tmp_path / "out")
    assert code == 0, err
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    auto = AutoTokenizer.from_pretrained(tmp_path / "out")
    mine = ByteTokenizer() if kind == "bytes" else JsonTokenizer(find_tokenizer(run))
    for text in (TEXT, "a ,b\n\t 's ünïcödé 😀 <s>", "\x00  ."):
        assert auto(text)["input_ids"] == mine.prompt(text)
        assert auto.decode(mine.prompt(text)) == mine.decode(mine.prompt(text))
    saved = open_latest(run / "checkpoints")
    gpt = GPT(GPTConfig(**saved.config))
    gpt.load_state_dict({n: saved.tensor(n) for n in saved.names if "/" not in n})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.tensor([[5, 7, 11, 3]])
    assert relative_error(gpt(tokens), theirs(tokens).logits) < 1e-5
    ends = {"bytes": (None, None, None), "words": (98, 99, 100)}[kind]
    there = GenerationConfig.from_pretrained(tmp_path / "out")
    for said in (there, auto, theirs.config):
        assert (said.bos_token_id, said.eos_token_id, said.pad_token_id) == ends
    sampling = Sampling(6, 0.0, stop=read_stop_tokens(tmp_path / "out"))
    out = theirs.generate(tokens, do_sample=False, max_new_tokens=6, pad_token_id=0)
    assert generate(gpt, tokens, sampling)[0] == out[0, 4:].tolist()
    assert result["eos_token_ids"] == [e for e in ends[1:2] if e is not None]
    assert result["tokenizer"]
    assert set(result["files"]) == {path.name for path in (tmp_path / "out").iterdir()}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "* Data: text\n* Steps: 3 (192 tokens)\n" in card
    assert str(run.parent) not in card


ENDS = ["</s>", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("special", "said", "separator", "eos"),
    [
        (["</s>"], {}, None, 99),
        (ENDS, {}, None, None),  # which of the two is not guessed
        (ENDS, {"eos_token": "<|endoftext|>"}, None, 100),
        (ENDS, {"eos_token": {"content": "<|endoftext|>", "special": True}}, 5, 100),
        (ENDS, {"eos_token": None}, 5, 5),
        (["</s>"], {}, 5, 5),
        (["</s>"], {"bos_token": "3"}, None, 99),
        ([], {}, None, None),
    ],
)
def test_what_ends_a_text_is_said_then_the_separator_then_called_so(
    special, said, separator, eos, tmp_path
):
    files = {
        "tokenizer.json": _words(tmp_path / "tokenizer.json", *special).read_bytes(),
        "tokenizer_config.json": json.dumps(said).encode(),
    }
    ids = special_tokens(files, GPTConfig(256, 8, 1, 8, 2), separator)
    bos = 3 if "bos_token" in said else 98
    assert ids == {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": None}


def test_a_run_keeps_what_its_last_beginning_had(tmp_path):
    def kept() -> set[str]:
        return {path.name for path in (tmp_path / "run" / "origin").iterdir()}

    one, other = (_words(tmp_path / name, "</s>") for name in ("tokenizer.json", "other.json"))
    (tmp_path / "merges.txt").touch()
    keep_origin(tmp_path / "run", None, one, "x", again=False)
    assert kept() == {"tokenizer.json", "merges.txt"}
    keep_origin(tmp_path / "run", None, None, "bytes", again=True)
    assert kept() == {"tokenizer.json", "merges.txt"}
    keep_origin(tmp_path / "run", None, other, "x", again=False)
    assert kept() == {"tokenizer.json"}
    keep_origin(tmp_path / "run", None, None, "bytes", again=False)
    assert kept() == set()


def test_what_a_user_has_is_not_written_over(bytes_run, tmp_path, capfd):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis").touch()
    assert _export(capfd, bytes_run, tmp_path / "out") == (
        2, {}, f"warpweave: {tmp_path / 'out'} exists already",
    )  # fmt: skip
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis"]
    code, _, err = _export(capfd, tmp_path, tmp_path / "new")
    assert (code, err) == (
        2,
        f"warpweave: {tmp_path} is no run and no checkpoint of warpweave train",
    )


def test_every_option_of_the_command_changes_what_is_written(words_run, tmp_path, capfd):
    like = to_hf(GPT(GPTConfig(256, 32, 1, 8, 2)), tmp_path / "like")
    (like / "chat_template.jinja").write_text("{{ messages }}")
    saved, other = open_latest(words_run / "checkpoints").path, tmp_path / "b.json"
    _words(other, "x", "</s>")
    for number, (words, seen) in enumerate((
        ((), lambda r: (r["dtype"], r["eos_token_ids"]) == ("float32", [99])),
        (("--dtype", "bf16"), lambda r: r["dtype"] == "bfloat16"),
        (("--tokenizer", "bytes"), lambda r: r["tokenizer"] and not r["eos_token_ids"]),
        (("--like", like), lambda r: from_hf(r["folder"]).config.seq_len == 16),
        (("--tokenizer", other), lambda r: r["eos_token_ids"] == [100]),
    )):  # fmt: skip
        code, result, err = _export(capfd, saved, tmp_path / str(number), *words)
        assert code == 0, err
        assert seen(result), result
    code, _, err = _export(capfd, saved, tmp_path / "no", "--tokenizer", tmp_path / "no.json")
    assert (code, err) == (
        2,
        f"warpweave: cannot read {tmp_path / 'no.json'}: No such file or directory",
    )


def test_another_tokenizer_than_the_trainings_is_never_exported(words_run, bytes_run, tmp_path):
    kept = words_run / "origin" / "tokenizer.json"
    mine = kept.read_bytes()
    try:
        _words(kept, "</s>")
        with pytest.raises(
            ConvertError, match=r"^the tokenizer of the training .* is not in .*origin"
        ):
            to_hf(words_run, tmp_path / "out")
    finally:
        kept.write_bytes(mine)
    large = Tokenizer(models.WordLevel({str(i): i for i in range(300)}, unk_token="0"))
    large.save(str(tmp_path / "large.json"))
    with pytest.raises(ConvertError, match=r"^the tokenizer has 300 tokens, the model 256$"):
        to_hf(bytes_run, tmp_path / "out", tokenizer=tmp_path / "large.json")
    assert not (tmp_path / "out").exists()


def test_a_run_that_began_with_a_model_of_transformers_goes_back_as_that(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    source = tmp_path / "mistral"
    MistralForCausalLM(MistralConfig(
        vocab_size=128, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        sliding_window=None, eos_token_id=7, bos_token_id=98, pad_token_id=None,
    )).save_pretrained(source)  # fmt: skip
    _words(source / "tokenizer.json", "<|endoftext|>")
    (source / "tokenizer_config.json").write_text('{"eos_token": "7"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    config = _config(tmp_path, source)
    _trainer(config).save()
    assert read_stop_tokens(config.out) == (7,)
    assert (
        find_tokenizer(open_latest(config.out / "checkpoints").path).parent == config.out / "origin"
    )
    back = to_hf(config.out, tmp_path / "back")
    assert from_hf(back).fields == from_hf(source).fields
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    # Another tokenizer than the model's, and a run that goes on from the run.
    own = _words(tmp_path / "own.json", "</s>")
    second = dataclasses.replace(
        config, tokenizer=own, init_from=config.out, out=tmp_path / "second"
    )
    _trainer(second).save()
    other = to_hf(second.out, tmp_path / "other")
    assert (other / "tokenizer.json").read_bytes() == own.read_bytes()
    assert not (other / "chat_template.jinja").exists()
    assert from_hf(other).fields["model_type"] == "mistral"
    assert (from_hf(other).fields["eos_token_id"], read_stop_tokens(other)) == (99, (99,))
    # A new run in the same folder: the earlier one is moved with what it needs.
    _trainer(dataclasses.replace(config, init_from=None, overrides=SMALL, model="toy")).save()
    moved = to_hf(config.out / "earlier-1", tmp_path / "moved")
    assert from_hf(moved).fields == from_hf(source).fields
