"""Tables of invalid calls: each row breaks exactly one rule of a check, or none.

A check of two conditions that is only tested with both broken passes its tests with `and` in place
of `or`. So a row changes as little as possible of a valid call. It gives the words of the error, or
None for a call that is valid although it comes close.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

Rows = list[tuple[dict[str, Any], str | None]]


def check(
    call: Callable[[], object], words: str | None, error: type[Exception] = ValueError
) -> None:
    """Assert that `call` raises an error with these words, or (None) that it is valid."""
    if words is None:
        call()
    else:
        with pytest.raises(error, match=words):
            call()


def rows(cases: list[tuple[Callable[..., object], str | None]]):
    """Parametrize a test by rows, each identified by its line."""
    numbers = [f"line{call.__code__.co_firstlineno}" for call, _ in cases]
    return pytest.mark.parametrize(("call", "words"), cases, ids=numbers)


def one_line(error: pytest.ExceptionInfo) -> str:
    """Return the message of an error, which must be one line."""
    message = str(error.value)
    assert "\n" not in message
    return message


def exits(call: Callable[[], object], capsys: pytest.CaptureFixture, code: int = 2) -> str:
    """Return what `call` prints to stderr as it ends the process with this exit status."""
    with pytest.raises(SystemExit) as end:
        call()
    assert end.value.code == code
    return capsys.readouterr().err.strip()


class Table(NamedTuple):
    """A valid call with these keywords; `rows` change some of them."""

    call: Callable[..., object]
    base: dict[str, Any]
    rows: Rows

    def check(self) -> None:
        """Assert that every row is rejected with its words, or is valid."""
        wrong = []
        for change, words in self.rows:
            said = None
            try:
                self.call(**self.base | change)
            except ValueError as error:
                said = str(error)
            if (words is None) != (said is None) or (words and not re.search(words, said)):
                wrong.append(f"{change} is to be refused with {words!r} and says {said!r}")
        assert not wrong, "\n".join(wrong)

    def elsewhere(self, more: dict[str, Any] | None = None) -> None:
        """Assert that the call with `more` is valid, but not with any one of its
        tensors on another device."""
        given = self.base | (more or {})
        self.call(**given)
        moved = {}
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                moved[name] = value.to("meta")
            elif hasattr(value, "tokens"):  # the record of dropout, whose token ids are a tensor
                moved[name] = value._replace(tokens=value.tokens.to("meta"))
        if len(moved) == 1:  # there is no other tensor to differ from
            return
        for name, value in moved.items():
            with pytest.raises(ValueError, match="all tensors must be on one device"):
                self.call(**given | {name: value})

    def one_of_many(self, more: dict[str, Any] | None = None) -> set[tuple[str, int]]:
        """List tensors, by name, with dims in which a single element is also passed: a dim that
        must be as long as that of another tensor would otherwise be broadcast."""
        given, taken = self.base | (more or {}), set()
        for name, value in given.items():
            x = getattr(value, "tokens", value)
            for dim in range(x.ndim) if isinstance(x, torch.Tensor) else ():
                one = x.narrow(dim, 0, 1).contiguous()
                changed = one if x is value else value._replace(tokens=one)
                try:
                    self.call(**given | {name: changed})
                except (ValueError, RuntimeError):  # torch's own product has its own messages
                    continue
                taken |= {(name, dim)} if x.shape[dim] > 1 else set()
        return taken


def zeros(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_(grad)


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Return the same values at twice the distances."""
    return torch.stack((x, x), -1)[..., 0]
