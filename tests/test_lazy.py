"""Lazily imported names of a package, a model's options, and training mode in a context."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from warpweave.cli.lazy import names_of
from warpweave.layers.modes import in_mode
from warpweave.model.config import GPTConfig
from warpweave.train.option_kinds import overrides_of


def test_a_name_imports_its_own_module_alone_and_is_then_the_packages(
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

    def loaded() -> set[str]:
        return {name for name in sys.modules if name.startswith("lazy_made.")}

    assert (get("B"), loaded()) == ("second", {"lazy_made.second"})
    assert (package.__dict__["B"], "A" in package.__dict__) == ("second", False)
    assert (get("C"), get("A"), len(loaded())) == ("third", "first", 3)
    for other in ("D", "second", "__wrapped__", ""):  # the module has no D
        with pytest.raises(AttributeError, match=rf"has no attribute '{other}'"):
            get(other)
    for name in loaded():
        del sys.modules[name]


def test_model_options_are_its_fields_with_help_and_default_none() -> None:
    found = overrides_of(GPTConfig, "somewhere")
    names = {field.name for field in dataclasses.fields(GPTConfig)} - {"rope_scaling"}
    nothing = found()
    assert {field.name for field in dataclasses.fields(found)} == names
    assert set(vars(nothing).values()) == {None}
    assert (found.__module__, found.__name__) == ("somewhere", "GPTOverrides")
    with pytest.raises(dataclasses.FrozenInstanceError):
        nothing.layers = 3
    first = [field.name for field in dataclasses.fields(found)][:5]
    assert first == ["vocab_size", "seq_len", "layers", "width", "heads"]
    for name in names:
        assert f"\n    {name}: " in found.__doc__ or f", {name}" in found.__doc__, name


def test_nested_mode_contexts_restore_the_mode_of_each_module_after_an_error() -> None:
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
