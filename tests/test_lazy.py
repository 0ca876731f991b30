"""Names of a package that come from its modules when they are asked for, and options of a model."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType

import pytest

from warpweave.config import GPTConfig
from warpweave.lazy import names_of
from warpweave.modes import in_mode
from warpweave.option_kinds import overrides_of
from warpweave.train_config import parse


def test_a_name_is_taken_from_its_own_module_once_and_no_other_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_made").mkdir()
    for name in ("first", "second", "third"):
        (tmp_path / "lazy_made" / f"{name}.py").write_text(f"A = B = C = '{name}'")
    (tmp_path / "lazy_made" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    package = ModuleType("lazy_made")
    package.__path__ = [str(tmp_path / "lazy_made")]
    monkeypatch.setitem(sys.modules, "lazy_made", package)
    get = names_of("lazy_made", {"first": ("A",), "second": ("B", "D"), "third": ("C",)})
    loaded = lambda: {n for n in sys.modules if n.startswith("lazy_made.")}  # noqa: E731
    assert (get("B"), loaded()) == ("second", {"lazy_made.second"})
    assert (package.__dict__["B"], "A" in package.__dict__) == ("second", False)
    assert (get("C"), get("A"), len(loaded())) == ("third", "first", 3)
    for other in ("D", "second", "__wrapped__", ""):  # the module has no D
        with pytest.raises(AttributeError, match=rf"has no attribute '{other}'"):
            get(other)
    for name in loaded():
        del sys.modules[name]


def test_what_a_model_may_be_given_are_its_own_fields_and_none_is_not_given() -> None:
    found = overrides_of(GPTConfig, "somewhere")
    names = {field.name for field in dataclasses.fields(GPTConfig)} - {"rope_scaling"}
    nothing = found()
    assert {field.name for field in dataclasses.fields(found)} == names
    assert set(vars(nothing).values()) == {None}
    assert (found.__module__, found.__name__) == ("somewhere", "GPTOverrides")
    with pytest.raises(dataclasses.FrozenInstanceError):
        nothing.layers = 3
    first = [field.name for field in dataclasses.fields(found)][:5]
    assert first == ["vocab_size", "seq_len", "layers", "width", "heads"]  # sizes are first
    for name in names:  # each with its own help
        assert f"\n    {name}: " in found.__doc__ or f", {name}" in found.__doc__, name


def test_the_help_of_train_says_what_is_taken_where_an_option_is_not_given(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ended.value.code == 0
    fields = [f for f in dataclasses.fields(GPTConfig) if f.name != "rope_scaling"]
    for field in fields:
        assert f"--{field.name.replace('_', '-')} " in said
    assert said.count("(default: the preset's)") == len(fields) - 1
    assert said.count("(default: the larger of the preset's and the data's)") == 1
    assert "--resume [True|False|auto]" in said


def test_each_module_has_its_own_mode_back_however_nested_and_whatever_is_raised() -> None:
    from torch import nn

    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Linear(1, 1), nn.Dropout()))
    model[1].train(False)
    model[1][1].train(True)
    before = [module.training for module in model.modules()]
    assert len({*before}) == 2

    def fails() -> None:
        with in_mode(model, training=False):
            assert not any(module.training for module in model.modules())
            with in_mode(model, training=True):
                assert all(module.training for module in model.modules())
            assert not any(module.training for module in model.modules())
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    assert [module.training for module in model.modules()] == before
