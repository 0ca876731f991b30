"""The command line: help, unknown commands, and the modules that implement the commands."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys

import pytest

import warpweave
from warpweave import __main__ as cli
from warpweave.cli.command_line import option_types, read_command_line
from warpweave.cli.toml import options_of
from warpweave.kernels.structure import alternatives
from warpweave.machine.doctor.options import DoctorConfig
from warpweave.machine.tune.options import TuneConfig
from warpweave.plan.options import PlanConfig
from warpweave.prove.options import ProveConfig
from warpweave.train.options import TrainConfig


def _run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["warpweave", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_every_command(monkeypatch, capsys, arguments):
    assert _run(monkeypatch, *arguments) == 0
    printed = capsys.readouterr().out
    assert all(f"  {command} " in printed for command in cli._COMMANDS)


@pytest.mark.parametrize(
    ("command", "program", "arguments"),
    [
        ("train", "train.command", ("--steps", "1")),
        ("prove", "prove.command", ("--world", "1")),
        ("doctor", "machine.doctor.command", ("--quick", "--ranks", "2")),
        ("sample", "train.sample", ("folder", "--prompt", "x", "--seed", "1")),
        ("tune", "machine.tune.command", ("--steps", "1")),
        ("export", "train.export", ("run", "out", "--dtype", "fp16")),
        ("plan", "plan.command", ("--model", "gpt2", "--gpus", "4", "--hw", "a100")),
        ("collectives", "machine.collectives.command", ("--ranks", "3")),
        ("replay", "train.server.replay", ("here",)),
    ],
)
def test_a_command_gets_its_arguments_and_ctrl_c_is_quiet(monkeypatch, command, program, arguments):
    given = []

    def run(config, processes):
        given.append(config)
        raise KeyboardInterrupt

    for _, other in cli._COMMANDS.values():
        monkeypatch.setattr(f"warpweave.{other}.run", None)  # another command's
    monkeypatch.setattr(f"warpweave.{program}.run", run)
    assert _run(monkeypatch, command, *arguments) == 130
    (config,) = given
    name = arguments[-2].lstrip("-") if len(arguments) > 1 else "run"
    found = getattr(config, name)
    assert arguments[-1] == str(found[0] if isinstance(found, tuple) else found)


@pytest.mark.parametrize(
    ("arguments", "early"),
    [
        (("train",), None),
        (("train", "--dp", "2"), "warpweave.train.command"),
        (("train", "--dp", "2", "--zero", "0", "--elastic", "1"), "warpweave.train.command"),
        (("collectives",), "warpweave.machine.collectives.command"),
        (("export", "run", "out"), None),
    ],
)
def test_commands_that_start_ranks_are_given_processes_forked_early(monkeypatch, arguments, early):
    """They are forked by program, and only for these commands."""
    given, asked = [], []
    monkeypatch.setattr(cli.Processes, "early", lambda program: asked.append(program) or program)
    monkeypatch.setattr(cli, "starting", lambda found: contextlib.nullcontext(found))
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("it has run"))
    for program in ("train.command", "machine.collectives.command", "train.export"):
        monkeypatch.setattr(f"warpweave.{program}.run", lambda config, ready: given.append(ready))
    assert _run(monkeypatch, *arguments) == 0
    assert asked == ([early] if early else [])
    assert given == [early]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["tune", "--bogus"], 2, "Unrecognized options: --bogus"),
        (["train", "--bogus"], 2, "Unrecognized options: --bogus"),
        (["train", "--help"], 0, "--overlap {none,bulk,chunked,fused}"),
        (["prove", "--cp-strategy", "rign"], 2, "rign"),
        (["prove", "--help"], 0, "--typecheck"),
        (["doctor", "--device", "tpu"], 2, "tpu"),
        (["sample"], 2, "Required options"),
        (["replay"], 2, "Required options"),
        (["export", "run", "out", "--dtype", "int8"], 2, "int8"),
        (["sample", "--help"], 0, "--top-k"),
        (["--version"], 0, warpweave.__version__),
        (["tune", "--steps", "many"], 2, "many"),
        (["tune", "--help"], 0, "--head-dims"),
        (["tarin", "--steps", "3"], 2, "unknown command 'tarin'"),
    ],
)
def test_what_is_not_understood_is_answered_without_torch(arguments, code, words):
    program = f"""
import sys
from warpweave.__main__ import main
sys.argv = ["warpweave", *{arguments!r}]
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code
    assert words in done.stdout + done.stderr
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("tarin", "train"),
        ("train --model llama8b", "llama-8b"),
        ("train --schedule 1F1B --pp 2", "1f1b"),
        ("train --layout=Balanced", "balanced"),
        ("train --activation swigul", "swiglu"),
        ("train --dtype bf61", "bf16"),
        ("prove --schedule zbv", "zb-v"),
        ("prove --style lama", "llama"),
        ("prove --typecheck --model llama8b", "llama-8b"),
        ("plan --model llama8b", "llama-8b"),
        ("plan --hw h10", "h100"),
        ("sample folder --prompt a --dtype fp23", "fp32"),
        ("export run out --dtype b16", "bf16"),
        ("doctor --device cda", "cuda"),
        ("collectives --device gcpu", "cpu"),
        ("tune --kernels gemm atention_fwd", "attention_fwd"),
    ],
)
def test_a_wrong_value_is_refused_with_the_nearest_one(monkeypatch, capsys, arguments, word):
    assert _run(monkeypatch, *arguments.split()) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"did you mean '{word}'?" in said


def test_a_value_that_resembles_nothing_is_refused_without_a_guess(monkeypatch, capsys):
    assert _run(monkeypatch, "train", "--model", "enormous") == 2
    said = capsys.readouterr().err
    assert "model must be one of toy, small, " in said
    assert "did you mean" not in said


SWITCHES = [
    (kind, name)
    for kind in (TrainConfig, ProveConfig, PlanConfig, DoctorConfig, TuneConfig)
    for name, option in option_types(kind).items()
    if alternatives(option) == (bool,)
]


@pytest.mark.parametrize(("kind", "name"), SWITCHES)
def test_a_switch_has_one_spelling_in_every_command(kind, name):
    """``--tied`` and ``--no-tied``; the other spelling of a value is accepted as well."""

    def read(*words: str) -> object:
        return options_of(read_command_line(kind, "x", None, words))[name]

    option = name.replace("_", "-")
    for value, words in {True: [f"--{option}"], False: [f"--no-{option}"]}.items():
        assert read(*words) is value
        assert read(f"--{option}", str(value)) is value
        assert read(f"--{name}={value}") is value
    for wrong in (f"--{option}=", f"--no-{option}=True"):
        with pytest.raises(SystemExit, match="2"):
            read(wrong)


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "--help")])
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(arguments, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # output is buffered until the end
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "warpweave", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_the_package_itself_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["warpweave", "--version"])
    monkeypatch.delitem(sys.modules, "warpweave.__main__")
    runpy.run_module("warpweave", run_name="__main__")
    assert capsys.readouterr().out == f"warpweave {warpweave.__version__}\n"


def test_a_preset_is_no_proof_model(monkeypatch, capsys):
    assert _run(monkeypatch, "prove", "--model", "llama-8b") == 2
    assert "needs --typecheck" in capsys.readouterr().err
