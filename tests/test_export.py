"""A trained model loaded by transformers: its tokenizer, its stop tokens, and equal numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch
from close import relative_error
from refused import check
from test_init_from import _config, _trainer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from warpweave.checkpoint import open_latest, save_checkpoint
from warpweave.convert import ConvertError, from_hf, to_hf
from warpweave.convert.beside import (
    card,
    find_origin,
    keep_origin,
    special_tokens,
    tokenizer_config,
    tokenizer_of,
)
from warpweave.convert.source import find_tokenizer, other_tokenizer, read_stop_tokens
from warpweave.data import ByteTokenizer, JsonTokenizer
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.model.generate import Sampling, generate
from warpweave.model.gpt import GPT, GPTConfig
from warpweave.train import export, sample
from warpweave.train.chosen import ChosenCheckpoint
from warpweave.train.options import GPTOverrides

SMALL = GPTOverrides(seq_len=16, layers=1, width=8, heads=2)
TEXT = "17 4 <|endoftext|> 256"


def _words(path: Path, *special: str) -> Path:
    """Write a tokenizer of numbers that begins a prompt with <s>."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(97)} | {"?": 97}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<s>", *special])
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 98)])
    words.save(str(path))
    return path


def _run(folder: Path, **options):
    """Make a run's folder with one checkpoint, of the initial weights."""
    config = _config(
        folder, options.pop("init_from", None), overrides=SMALL, model="toy", **options
    )
    trainer = _trainer(config)
    trainer.step = 30
    _save(trainer)
    return config.out


def _save(trainer) -> None:
    trainer.save()
    trainer.saver.wait()


def _export(capfd, *words: object) -> tuple[int, dict, str]:
    """Return (exit code, the last line, stderr) of ``warpweave export``."""
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
    assert "without a tokenizer" not in err
    assert (result["folder"], result["checkpoint"]) == (str(tmp_path / "out"), str(saved.path))
    assert result["architecture"] == type(theirs).__name__
    assert result["files"] == sorted(result["files"])
    assert set(result["files"]) == {path.name for path in (tmp_path / "out").iterdir()}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "AutoTokenizer" in card
    assert "* Data: text\n* Steps: 30 (1,920 tokens)\n" in card
    assert str(run.parent) not in card


ENDS = ["</s>", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("special", "said", "separator", "eos"),
    [
        (["</s>"], {}, None, 99),
        (ENDS, {}, None, None),  # ambiguous, so neither is chosen
        (ENDS, {"eos_token": "<|endoftext|>"}, None, 100),
        (ENDS, {"eos_token": {"content": "<|endoftext|>", "special": True}}, 5, 100),
        (ENDS, {"eos_token": None}, 5, 5),
        (["</s>"], {}, 5, 5),
        (["</s>"], {"bos_token": "3"}, None, 99),
        (["</s>"], {}, 0, 0),  # the first token
        (["</s>"], {"eos_token": "0"}, None, 0),
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


CALLED = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "[BOS]", "<|startoftext|>"),
    "eos": ("</s>", "<eos>", "<|end_of_text|>", "[EOS]", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
}


@pytest.mark.parametrize("kind", CALLED)
def test_special_tokens_are_recognized_by_each_of_their_names(kind):
    for name in CALLED[kind]:
        for special in (True, False):
            words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
            (words.add_special_tokens if special else words.add_tokens)(["b", name])
            files = {"tokenizer.json": words.to_str().encode()}
            ids = special_tokens(files, GPTConfig(4, 8, 1, 8, 2), None)
            wanted = dict.fromkeys(f"{each}_token_id" for each in CALLED)
            assert ids == wanted | ({f"{kind}_token_id": 3} if special else {}), name


def test_what_is_written_beside_the_weights_says_the_models_own_numbers(tmp_path):
    config = GPTConfig(100, 48, 3, 32, 4)
    files = {"tokenizer.json": _words(tmp_path / "tokenizer.json", "</s>").read_bytes()}
    assert tokenizer_config(files, config, special_tokens(files, config, None)) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 48,
        "clean_up_tokenization_spaces": False, "bos_token": "<s>", "eos_token": "</s>",
    }  # fmt: skip
    trained = {"Data": "text", "Steps": "3"}
    assert "okenizer" not in card("mine", config, "SomeModel", trained, tokenizer=False)
    text = card("mine", config, "SomeModel", trained, tokenizer=True)
    facts = [line for line in text.splitlines() if line.startswith("* ")]
    assert facts[:3] == [
        "* SomeModel: 3 layers of width 32, 4 heads, vocabulary 100, sequences of 48 tokens",
        "* Data: text",
        "* Steps: 3",
    ]
    for auto in ("AutoModelForCausalLM", "AutoTokenizer"):
        assert f'{auto}.from_pretrained("mine")' in text
    assert "# mine" in text.splitlines()


def test_every_byte_is_the_token_of_its_own_value():
    files, _ = tokenizer_of("bytes", None, [])
    level = Tokenizer.from_str(files["tokenizer.json"].decode())
    text = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000, 0x101))))
    assert set(text.encode()) == set(range(256)) - {0xC0, 0xC1, *range(0xF5, 256)}  # of UTF-8
    assert level.encode(text).ids == list(text.encode())
    assert level.decode(list(text.encode())) == text
    vocabulary = level.get_vocab()
    assert sorted(vocabulary.values()) == list(range(256))


def test_the_origin_is_found_from_a_run_or_its_checkpoint_by_any_path(tmp_path, monkeypatch):
    step = tmp_path / "run" / "checkpoints" / "step"
    (tmp_path / "run" / "origin").mkdir(parents=True)
    assert find_origin(tmp_path / "run") is None  # a folder that coincidentally has one
    step.mkdir(parents=True)
    origin = tmp_path / "run" / "origin"
    assert find_origin(tmp_path / "run") == find_origin(step) == origin
    assert find_origin(tmp_path) is None
    for here, name in ((tmp_path, "run"), (step.parent, "step"), (step, ".")):
        monkeypatch.chdir(here)
        assert find_origin(Path(name)).samefile(origin)


def test_a_run_keeps_what_its_last_beginning_had(source, tmp_path):
    def kept() -> set[str]:
        return {path.name for path in (tmp_path / "run" / "origin").iterdir()}

    one, other = (_words(tmp_path / name, "</s>") for name in ("tokenizer.json", "other.json"))
    (tmp_path / "merges.txt").touch()
    keep_origin(tmp_path / "run", None, other, "x", again=True)  # it has kept nothing yet
    assert kept() == {"tokenizer.json"}
    keep_origin(tmp_path / "run", None, one, "x", again=False)
    assert kept() == {"tokenizer.json", "merges.txt"}
    keep_origin(tmp_path / "run", None, None, "bytes", again=True)
    assert kept() == {"tokenizer.json", "merges.txt"}
    keep_origin(tmp_path / "run", None, other, "x", again=False)
    assert kept() == {"tokenizer.json"}
    keep_origin(tmp_path / "run", source, None, "x", again=False)
    assert kept() == {"config.json", "generation_config.json", *FILES}
    keep_origin(tmp_path / "run", None, None, "bytes", again=False)
    assert not kept()


SAID = {"model_type": "llama", "eos_token_id": 7, "pad_token_id": 1, "hidden_size": 3}
FILES = (
    "tokenizer.json", "merges.txt", "chat_template.jinja", "chat_template.json", "vocab.json",
    "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Return a folder of transformers with a model's files, except its weights."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "config.json").write_text(json.dumps(SAID))
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    _words(folder / "tokenizer.json", "</s>")
    for name in FILES[1:]:
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize("behind", ["a folder", "a run", "a checkpoint"])
@pytest.mark.parametrize(
    ("tokenizer", "record", "whole", "files"),
    [
        (None, "x", True, FILES),
        ("own", "x", True, FILES),
        (None, "bytes", False, ()),  # its texts used a tokenizer other than the source's
        ("other", "x", False, ("tokenizer.json",)),
    ],
)
def test_a_run_keeps_of_its_source_what_is_true_of_its_own_tokens(
    source, tokenizer, record, whole, files, behind, tmp_path
):
    beginning = source
    if behind != "a folder":
        beginning = tmp_path / "first"
        keep_origin(beginning, source, None, "x", again=False)
        (beginning / "checkpoints" / "step").mkdir(parents=True)
        source = beginning / "origin"
        beginning = beginning if behind == "a run" else beginning / "checkpoints" / "step"
    other = _words(tmp_path / "other.json", "<eos>")
    given = {None: None, "own": source / "tokenizer.json", "other": other}[tokenizer]
    keep_origin(tmp_path / "run", beginning, given, record, again=False)
    kept = tmp_path / "run" / "origin"
    names = {"config.json", *files, *(["generation_config.json"] if whole else [])}
    assert {path.name for path in kept.iterdir()} == names
    said = SAID if whole else {k: v for k, v in SAID.items() if not k.endswith("_token_id")}
    assert json.loads((kept / "config.json").read_text()) == said
    for name in files:
        wanted = source / name if whole else given
        assert (kept / name).read_bytes() == wanted.read_bytes()


def test_a_tokenizer_is_the_one_given_or_on_record_or_the_first_there_is(source, tmp_path):
    empty, second = tmp_path / "empty", tmp_path / "second"
    empty.mkdir()
    second.mkdir()
    mine = _words(second / "tokenizer.json", "<eos>").read_bytes()
    (second / "merges.txt").touch()
    places, digest = [empty, source, second], hashlib.sha256(mine).hexdigest()
    theirs, own = {n: (source / n).read_bytes() for n in FILES}, {"tokenizer.json": mine}
    beside = own | {"merges.txt": b""}
    assert tokenizer_of(None, None, places) == (theirs, source)
    assert tokenizer_of(None, digest, places) == (beside, second)
    assert tokenizer_of(None, None, [empty]) == tokenizer_of(None, None, []) == ({}, None)
    assert tokenizer_of(second / "tokenizer.json", "x", places) == (beside, None)
    other = second / "other.json"
    other.write_bytes(mine)
    assert tokenizer_of(other, None, places) == (own, None)
    found = tokenizer_of(None, "bytes", places)
    assert found == tokenizer_of("bytes", digest, [])
    level = Tokenizer.from_str(found[0]["tokenizer.json"].decode())
    assert level.encode("é \x00").ids == [195, 169, 32, 0]
    assert (set(found[0]), found[1]) == ({"tokenizer.json"}, None)
    with pytest.raises(ConvertError, match=rf"SHA-256 0{{12}}. is not in {empty} or"):
        tokenizer_of(None, "0" * 64, places)


def test_tokens_that_were_added_need_room_in_the_model_too(tmp_path):
    files = {"tokenizer.json": _words(tmp_path / "tokenizer.json", "</s>").read_bytes()}  # 98 + 2
    assert special_tokens(files, GPTConfig(100, 8, 1, 8, 2), None)["eos_token_id"] == 99
    with pytest.raises(ConvertError, match="has 100 tokens, but the model's vocab_size is 99"):
        special_tokens(files, GPTConfig(99, 8, 1, 8, 2), None)
    with pytest.raises(ConvertError, match=r"tokenizer.json is not a valid tokenizer"):
        special_tokens({"tokenizer.json": b"{}"}, GPTConfig(99, 8, 1, 8, 2), None)


def test_generation_config_alone_decides_the_stop_tokens_if_it_exists(source, tmp_path):
    from transformers import GenerationConfig

    keep_origin(tmp_path / "run", source, None, "x", again=False)
    step = tmp_path / "run" / "checkpoints" / "step"
    step.mkdir(parents=True)
    for folder in (source, tmp_path / "run", step):
        assert read_stop_tokens(folder) == (5,)
        kept = source if folder is source else tmp_path / "run" / "origin"
        assert find_tokenizer(folder) == kept / "tokenizer.json"
    assert read_stop_tokens(tmp_path) == ()
    assert find_tokenizer(tmp_path) is None
    there = {"config_file_name": "config.json", "_from_model_config": True}
    for fields, ends in (
        ({}, ()), ({"eos_token_id": None}, ()), ({"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": [7, 8]}, (7, 8)), ({"eos_token_id": 0}, (0,)),
    ):  # fmt: skip
        said = fields.get("eos_token_id")  # transformers reads the same
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | fields))
        assert read_stop_tokens(tmp_path) == ends
        assert GenerationConfig.from_pretrained(tmp_path, **there).eos_token_id == said
        (tmp_path / "config.json").write_text(json.dumps(SAID))
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
        assert read_stop_tokens(tmp_path) == ends
        assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == said
        (tmp_path / "generation_config.json").unlink()
    for odd in ("7", [7, None], True):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": odd}))
        with pytest.raises(ConvertError, match="is not a token id"):
            read_stop_tokens(tmp_path)
    for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json"):
        (tmp_path / name).touch()
        with pytest.raises(ConvertError, match=f"has {name} but no tokenizer.json"):
            find_tokenizer(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("tokenizer", [None, "tokenizer.json", "tokenizer.model"])
def test_export_command_lists_the_files_and_warns_of_a_missing_tokenizer(
    tokenizer, tmp_path, capfd, monkeypatch
):
    given = []
    names = {"z.txt", "config.json", "a.txt"} | ({tokenizer} if tokenizer else set())

    def write(step, out, **options):
        given.append((step, out, options))
        (tmp_path / "there").mkdir()
        for name in names:
            (tmp_path / "there" / name).touch()
        fields = {"architectures": ["First", "Second"], "dtype": "float16", "eos_token_id": [4, 2]}
        (tmp_path / "there" / "config.json").write_text(json.dumps(fields))
        return tmp_path / "there"

    chosen = ChosenCheckpoint(tmp_path / "step_7", 7, 2.5)
    monkeypatch.setattr(export, "choose_checkpoint", lambda run, *, best: chosen)
    monkeypatch.setattr(export, "to_hf", write)
    words = ("--dtype", "bf16", "--like", "x", "--tokenizer", "y")
    code, result, err = _export(capfd, tmp_path, tmp_path / "out", *words)
    how = {"like": Path("x"), "tokenizer": Path("y"), "dtype": torch.bfloat16}
    assert given == [(tmp_path / "step_7", tmp_path / "out", how)]
    assert (code, ("exported without a tokenizer" in err)) == (0, tokenizer is None)
    assert result == {
        "folder": str(tmp_path / "there"), "checkpoint": str(tmp_path / "step_7"), "step": 7,
        "val_loss": 2.5,
        "architecture": "First", "dtype": "float16", "tokenizer": tokenizer is not None,
        "eos_token_ids": [4, 2], "files": sorted(names),
    }  # fmt: skip


@pytest.mark.parametrize("name", [*NAMED_DTYPES])
def test_weights_may_be_asked_for_in_any_dtype(name, tmp_path, capfd, monkeypatch):
    given = []
    chosen = ChosenCheckpoint(tmp_path, 7, None)
    monkeypatch.setattr(export, "choose_checkpoint", lambda run, *, best: chosen)

    def write(*_, dtype, **__):
        given.append(dtype)
        raise ValueError("that will do")

    monkeypatch.setattr(export, "to_hf", write)
    assert _export(capfd, tmp_path, tmp_path / "out", "--dtype", name)[0] == 2
    assert given == [NAMED_DTYPES[name]]


def test_what_a_user_has_is_not_written_over(bytes_run, tmp_path, capfd):
    out, link = tmp_path / "out", tmp_path / "link"
    out.mkdir()
    (out / "thesis").touch()
    link.symlink_to("nowhere")
    for run, there, said in (
        (bytes_run, out, f"{out} already exists"), (bytes_run, link, f"{link} already exists"),
        (tmp_path, tmp_path / "new", f"{tmp_path} is not a run or a checkpoint of warpweave train"),
    ):  # fmt: skip
        assert _export(capfd, run, there) == (2, {}, f"warpweave: {said}")
    assert {path.name for path in tmp_path.iterdir()} == {"link", "out"}
    assert [path.name for path in out.iterdir()] == ["thesis"]


def test_every_option_of_the_command_changes_what_is_written(words_run, tmp_path, capfd):
    like = to_hf(GPT(GPTConfig(256, 32, 1, 8, 2)), tmp_path / "like")
    (like / "chat_template.jinja").write_text("{{ messages }}")
    fields = json.loads((like / "config.json").read_text()) | {"eos_token_id": 5, "more": 1}
    (like / "config.json").write_text(json.dumps(fields))
    saved, other = open_latest(words_run / "checkpoints").path, tmp_path / "b.json"
    _words(other, "x", "</s>")
    for number, (words, seen) in enumerate((
        ((), lambda r: (r["dtype"], r["eos_token_ids"]) == ("float32", [99])),
        (("--dtype", "bf16"), lambda r: r["dtype"] == "bfloat16"),
        (("--tokenizer", "bytes"), lambda r: r["tokenizer"] and not r["eos_token_ids"]),
        (("--like", like), lambda r: from_hf(r["folder"]).config.seq_len == 16),
        (("--like", like), lambda r: from_hf(r["folder"]).fields["more"] == 1),
        (("--like", like, "--tokenizer", other), lambda r: r["eos_token_ids"] == [100]),
        (("--like", like, "--tokenizer", "bytes"), lambda r: r["eos_token_ids"] == []),
        (("--tokenizer", other), lambda r: r["eos_token_ids"] == [100]),
    )):  # fmt: skip
        code, result, err = _export(capfd, saved, tmp_path / str(number), *words)
        assert code == 0, err
        assert seen(result), result
    code, _, err = _export(capfd, saved, tmp_path / "no", "--tokenizer", tmp_path / "no.json")
    said = f"warpweave: cannot read {tmp_path / 'no.json'}: No such file or directory"
    assert (code, err) == (2, said)


def test_another_tokenizer_than_the_trainings_is_never_exported(words_run, bytes_run, tmp_path):
    kept, out = words_run / "origin/tokenizer.json", tmp_path / "out"
    mine, large = kept.read_bytes(), tmp_path / "large.json"
    try:
        _words(kept, "</s>")
        words = "^the tokenizer that the model was trained with .* is not in .*origin"
        check(lambda: to_hf(words_run, out), words, ConvertError)
    finally:
        kept.write_bytes(mine)
    words = {str(i): i for i in range(300)}
    Tokenizer(models.WordLevel(words, unk_token="0")).save(str(large))
    said = "^the tokenizer has 300 tokens, but the model's vocab_size is 256$"
    check(lambda: to_hf(bytes_run, out, tokenizer=large), said, ConvertError)
    assert not (tmp_path / "out").exists()


def test_both_commands_say_that_a_tokenizer_is_not_the_trainings(
    words_run, bytes_run, tmp_path, capfd
):
    mine, other = words_run / "origin" / "tokenizer.json", _words(tmp_path / "b.json", "</s>")
    sha256 = hashlib.sha256(mine.read_bytes()).hexdigest()[:12]
    step, words = open_latest(words_run / "checkpoints").path, f"SHA-256 {sha256}"
    for number, (run, given, trained) in enumerate((
        (words_run, "bytes", words), (step, other, words), (words_run, mine, None),
        (bytes_run, other, "bytes"), (bytes_run, "bytes", None), (words_run, None, None),
    )):  # fmt: skip
        said = (
            f"warpweave: --tokenizer {given} is not the tokenizer that the model was trained with "
            f"({trained}), so the same token ids have different meanings"
        )
        said = [] if trained is None else [said]
        option = [] if given is None else ["--tokenizer", given]
        err = _export(capfd, run, tmp_path / str(number), *option)[2]
        sample.main([*map(str, (run, "--prompt", "3", "--tokens", 1, *option))])
        for lines in (err, capfd.readouterr().err):
            used, *rest = filter(None, lines.split("\n"))
            assert used.startswith("warpweave: using step 30 (not evaluated), ")
            assert rest == said
    exported = tmp_path / "0"  # transformers' own: none is recorded
    assert other_tokenizer(exported, other) is None


# Validation losses by step; best loss and its step in the newest checkpoint's progress; the step
# and the loss that each command uses; the hint's step and end; the same with --best, or a part of
# the error.
CHOICES = (
    ({10: 3.0, 20: 2.5, 30: 2.75}, (2.5, 20), (30, 2.75), (20, "pass --best to use it"), (20, 2.5)),
    ({10: 3.0, 20: 2.5, 30: 2.25}, (2.5, 20), (30, 2.25), (), (30, 2.25)),  # the end comes last
    ({10: 2.5, 20: 2.5}, (2.5, 10), (30, None), (10, "pass --best to use it"), (10, 2.5)),
    # the metrics are missing
    ({}, (2.5, 20), (30, None), (20, "pass --best to use it"), (20, 2.5)),
    (
        {10: 3.0, 15: 2.5}, (2.5, 15), (30, None), (15, "not kept"),
        "kept the checkpoints of steps [10, 20, 30], but not the one of step 15, which has the "
        "lowest validation loss, 2.5000; train with --early-stop",
    ),
    ({}, (None, 0), (30, None), (), "has no validation loss; leave out --best"),
)  # fmt: skip


def _three_checkpoints(folder: Path, losses: dict[int, float], best: tuple) -> dict[int, GPT]:
    """Make a run's folder with steps 10, 20 and 30, and their models."""
    models = {step: GPT(GPTConfig(256, 32, 1, 8, 2), seed=step) for step in (10, 20, 30)}
    for step, gpt in models.items():
        params = [(name, p.detach()) for name, p in gpt.named_parameters()]
        progress = {"best": best[0], "best_step": best[1]}
        save_checkpoint(
            folder / "checkpoints", step, params, config=dataclasses.asdict(gpt.config),
            state={"progress": progress, "data": {"tokenizer": "bytes"}},
        )  # fmt: skip
    rows = [{"step": step, "val_loss": loss} for step, loss in losses.items()]
    text = "".join(json.dumps(row) + "\n" for row in ({"step": 5, "loss": 1.0}, *rows))
    (folder / "metrics.jsonl").write_text(text if losses else "")
    return models


@pytest.mark.parametrize(("losses", "progress", "newest", "hint", "best"), CHOICES)
def test_export_and_sample_name_their_checkpoint_and_best_is_the_lowest(
    losses, progress, newest, hint, best, tmp_path, capfd
):
    run = tmp_path / "run"
    models = _three_checkpoints(run, losses, progress)
    for words, expected in (([], newest), (["--best"], best)):
        out = tmp_path / f"out{len(words)}"
        code, result, err = _export(capfd, run, out, *words)
        with contextlib.suppress(SystemExit):
            sample.main([str(run), "--prompt", "ab", "--tokens", "9", "--temperature", "0", *words])
        sampled = capfd.readouterr()
        if isinstance(expected, str):
            assert (code, result, sampled.out) == (2, {}, "")
            assert expected in err
            assert expected in sampled.err
            continue
        step, loss = expected
        about = {"checkpoint": f"{run}/checkpoints/step_{step:08d}", "step": step, "val_loss": loss}
        shown = json.loads(sampled.out.splitlines()[-1])
        assert about.items() <= result.items()
        assert about.items() <= shown.items()
        known = "not evaluated" if loss is None else f"validation loss {loss:.4f}"
        line = f"warpweave: using step {step} ({known}), {about['checkpoint']}"
        if hint and not words:
            line += "; it is the newest, but step {} has the lowest validation loss, 2.5000 ({})"
            line = line.format(*hint)
        assert line == err.split("\n")[0] == sampled.err.strip().split("\n")[0]
        saved = from_hf(out).load(GPT(GPTConfig(256, 32, 1, 8, 2)))
        for found, wanted in zip(saved.parameters(), models[step].parameters(), strict=True):
            assert torch.equal(found, wanted)
        prompt = ByteTokenizer().prompt("ab")
        assert shown["tokens"] == generate(models[step], [prompt], Sampling(9, 0.0))


def test_best_is_refused_for_a_folder_that_is_not_a_run(tmp_path, capfd):
    run = tmp_path / "run"
    models = _three_checkpoints(run, {20: 2.5}, (2.5, 20))
    step, theirs = run / "checkpoints" / "step_00000020", to_hf(models[10], tmp_path / "theirs")
    _, result, err = _export(capfd, step, tmp_path / "out")
    assert (result["step"], result["val_loss"], "--best" in err) == (20, 2.5, False)
    for folder, what in ((step, "a single checkpoint"), (theirs, "not a run of warpweave train")):
        said = f"--best requires a run's folder, but {folder} is {what}"
        code, _, err = _export(capfd, folder, tmp_path / "out2", "--best")
        assert (code, err) == (2, f"warpweave: {said}")
        with pytest.raises(SystemExit, match="2"):
            sample.main([str(folder), "--prompt", "a", "--tokens", "1", "--best"])
        assert capfd.readouterr().err.strip() == f"warpweave: {said}"


def test_what_stands_beside_a_tokenizer_that_is_given_is_carried_along(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    _words(mine / "tokenizer.json", "</s>")
    gpt = GPT(GPTConfig(128, 8, 1, 8, 2))
    alone = to_hf(gpt, tmp_path / "alone", tokenizer=mine / "tokenizer.json")
    made = json.loads((alone / "tokenizer_config.json").read_text())
    assert (made["eos_token"], made["model_max_length"]) == ("</s>", 8)
    (mine / "tokenizer_config.json").write_text('{"eos_token": "7", "own": 1}')
    out = to_hf(gpt, tmp_path / "out", tokenizer=mine / "tokenizer.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (mine / name).read_bytes()
    assert from_hf(out).fields["eos_token_id"] == 7
    assert read_stop_tokens(out) == (7,)


def test_what_a_source_without_a_tokenizer_says_of_tokens_is_kept(tmp_path):
    gpt = GPT(GPTConfig(256, 8, 1, 8, 2))
    like = to_hf(gpt, tmp_path / "like")
    fields = json.loads((like / "config.json").read_text()) | {"eos_token_id": 5}
    (like / "config.json").write_text(json.dumps(fields))
    (like / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    other = _words(tmp_path / "other.json", "</s>")
    for tokenizer, eos, stops in ((None, 5, (5, 7)), ("bytes", None, ()), (other, 99, (99,))):
        out = to_hf(gpt, tmp_path / f"{eos}", like=like, tokenizer=tokenizer)
        assert from_hf(out).fields["eos_token_id"] == eos
        assert read_stop_tokens(out) == stops


@pytest.mark.parametrize("separator", [None, 32, 0])
def test_the_separator_of_a_training_ends_the_texts_of_its_model(separator, tmp_path):
    run = _run(tmp_path, packed=True, separator=separator)
    out = to_hf(run, tmp_path / "out")
    assert from_hf(out).fields["eos_token_id"] == separator
    assert read_stop_tokens(out) == (() if separator is None else (separator,))
    said = json.loads((out / "tokenizer_config.json").read_text())
    assert said.get("eos_token") == {None: None, 32: "\u0120", 0: "\u0100"}[separator]


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
    _save(_trainer(config))
    assert read_stop_tokens(config.out) == (7,)
    step = open_latest(config.out / "checkpoints").path
    assert find_tokenizer(step).parent == config.out / "origin"
    back = to_hf(config.out, tmp_path / "back")
    assert from_hf(back).fields == from_hf(source).fields
    kept = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
    for name in (*kept, "generation_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    # An explicit folder takes precedence over the run's origin.
    like = to_hf(config.out, tmp_path / "like")
    (like / "config.json").write_text(json.dumps(from_hf(like).fields | {"more": 1}))
    assert from_hf(to_hf(config.out, tmp_path / "third", like=like)).fields["more"] == 1
    # A tokenizer other than the model's, and a run that continues from the run.
    own = _words(tmp_path / "own.json", "</s>")
    again = {"tokenizer": own, "init_from": config.out, "out": tmp_path / "second"}
    _save(_trainer(dataclasses.replace(config, **again)))
    other = to_hf(again["out"], tmp_path / "other")
    assert (other / "tokenizer.json").read_bytes() == own.read_bytes()
    assert not (other / "chat_template.jinja").exists()
    assert from_hf(other).fields["model_type"] == "mistral"
    assert (from_hf(other).fields["eos_token_id"], read_stop_tokens(other)) == (99, (99,))
    # A new run in the same folder: the earlier one is moved together with the files it needs.
    _save(_trainer(dataclasses.replace(config, init_from=None, overrides=SMALL, model="toy")))
    moved = to_hf(config.out / "earlier-1", tmp_path / "moved")
    assert from_hf(moved).fields == from_hf(source).fields
