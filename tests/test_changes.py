"""The record of changes to a module of another library: each change can be
undone alone, or all of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from torch import nn

from warpweave.hf.changes import NAME, Changes, changes_of, forget, known, note, undo


@dataclass
class _Size:
    value: int


@dataclass
class _Shape:
    value: int


def test_attributes_of_several_owners_are_restored_one_by_one_or_together() -> None:
    """This restores earlier values, including falsy ones and None, and missing attributes, however
    often an attribute was set in between."""
    owners = [SimpleNamespace(a=0, b="b"), SimpleNamespace(a=None), SimpleNamespace()]
    before = [dict(vars(owner)) for owner in owners]
    changes = Changes()
    for time in (1, 2):
        for owner in owners:
            changes.set(owner, "a", time)
            changes.set(owner, "b", -time)
    changes.remember(owners[0], "c")
    assert [vars(owner) for owner in owners] == [{"a": 2, "b": -2}] * 3
    assert len(changes.before) == 7
    changes.restore(owners[1], "a")
    changes.restore(owners[1], "a")  # there is nothing left to restore
    assert [owner.a for owner in owners] == [2, None, 2]
    changes.set(owners[1], "a", 3)
    changes.restore(owners[2], "b")
    assert vars(owners[2]) == {"a": 2}
    owners[0].c = 5
    changes.undo()
    assert [vars(owner) for owner in owners] == before
    assert changes.before == []


def test_undoing_removes_every_hook_and_the_record() -> None:
    module, ran = nn.Linear(2, 2), []
    for number in range(3):
        handle = module.register_forward_pre_hook(lambda *_, n=number: ran.append(n))
        changes_of(module).hooks.append(handle)
    changes_of(module).set(module, "forward", lambda x: "changed")
    assert module(0) == "changed"
    undo(module)
    assert NAME not in vars(module)
    assert "forward" not in vars(module)
    assert not module._forward_pre_hooks
    assert ran == [0, 1, 2]
    undo(module)  # there is none left to undo
    assert NAME not in vars(module)


@pytest.mark.parametrize("changed", ["nothing", "attribute", "hook", "fact"])
def test_one_fact_per_class_is_kept_and_forgetting_it_leaves_other_changes(changed) -> None:
    module = nn.Linear(2, 2)
    assert known(module, _Size) is None
    forget(module, _Size)
    assert NAME not in vars(module)
    if changed == "attribute":
        changes_of(module).set(module, "out_features", 7)
    if changed == "hook":
        changes_of(module).hooks.append(module.register_forward_hook(lambda *_: None))
    if changed == "fact":
        note(module, _Shape(4))
    note(module, _Size(1))
    note(module, _Size(2))
    assert known(module, _Size) == _Size(2)
    assert known(module, _Shape) == (_Shape(4) if changed == "fact" else None)
    twin = copy.deepcopy(module)
    forget(module, _Size)
    assert known(module, _Size) is None
    assert known(twin, _Size) == _Size(2)
    assert (NAME in vars(module)) == (changed != "nothing")
    forget(module, _Size)
    forget(module, _Shape)
    assert (NAME in vars(module)) == (changed in ("attribute", "hook"))
    undo(module)
    assert module.out_features == 2
