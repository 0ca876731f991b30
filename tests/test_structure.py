"""kernels/structure.py: parsed JSON and TOML against types."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import pytest

from warpweave.kernels.structure import Count, read_document, structure


class Point(NamedTuple):
    x: int
    y: Count = 0


@dataclass(frozen=True)
class Path2:
    points: tuple[Point, ...]
    color: Literal["red", "green"] | None = None


class Open(TypedDict):
    name: str
    size: NotRequired[float]


EVEN = Annotated[int, "an even number", lambda n: n % 2 == 0]
GOOD = [
    (int, 3, 3), (float, 3, 3.0), (bool, True, True), (str, "", ""), (Path, "a", Path("a")),
    (Any, [None], [None]), (int | None, None, None), (bool | Literal["auto"], "auto", "auto"),
    (tuple[int, ...], [], ()), (tuple[int, str], [1, "a"], (1, "a")), (list[float], [1], [1.0]),
    (dict[str, EVEN], {"a": 2}, {"a": 2}), (Point, {"x": 1}, Point(1)),
    (Path2, {"points": [{"x": 1, "y": 2}]}, Path2((Point(1, 2),))),
    (Open, {"name": "a", "more": 1}, {"name": "a", "more": 1}),
    (Open, {"name": "a", "size": 1}, {"name": "a", "size": 1.0}),
]  # fmt: skip
WRONG = [
    (int, True, "f must be an integer, got True"),
    (int, 3.0, "f must be an integer, got 3.0"),
    (float, 10**400, f"f must be a number, got 1{199 * '0'}"),
    (str, [10**5000], "f must be a string in quotes, got a value with a huge integer"),
    (str, None, "f must be a string in quotes, got None"),
    (int | str, None, "f must be an integer or a string in quotes, got None"),
    (Literal[0, 1], True, "f must be one of 0, 1, got True"),
    (Literal["red"], "rde", "f must be one of red, got 'rde'; did you mean 'red'?"),
    (tuple[int, int], [1], "f must be a list of 2 values, each an integer, got [1]"),
    (tuple[int, ...], [1, "a"], "f[1] must be an integer, got 'a'"),
    (tuple[int, ...] | bool, [1, "a"],
     "f must be a list, each an integer or true or false, got [1, 'a']"),
    (dict[str, EVEN], {"a\n": 1}, r"f['a\n'] must be an even number, got 1"),
    (EVEN, "a", "f must be an even number, got 'a'"),
    (Point, [], "f must be an object, got []"),
    (Point, {}, "f has no x"),
    (Point, {"x": 1, "z": 1}, "f has an unknown field 'z'; expected x, y"),
    (Path2, {"points": [{"x": 1}, {"x": 1, "y": -1}]},
     "f.points[1].y must be an integer >= 0, got -1"),
    (Path2, {"points": [], "colour": 1}, "f has an unknown field 'colour'; expected points, color; "
     "did you mean 'color'?"),
    (Open, {"size": 1}, "f has no name"),
    (Open, {"name": "a", "size": "1"}, "f.size must be a number, got '1'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "found"), GOOD)
def test_a_value_of_the_type_is_returned_converted(kind, value, found) -> None:
    assert structure(kind, value) == found
    assert type(structure(kind, value)) is type(found)


@pytest.mark.parametrize(("kind", "value", "says"), WRONG)
def test_a_wrong_value_is_refused_with_path_type_and_value(kind, value, says) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        structure(kind, value, "f")
    with pytest.raises(ValueError, match=r"^a\.json: x must be an integer, got None$"):
        structure(Point, {"x": None}, "a.json: ")
    with pytest.raises(ValueError, match=r"^it has no x$"):
        structure(Point, {})


@pytest.mark.parametrize(
    ("form", "text", "says"),
    [
        ("JSON", b"{", "is not JSON: Expecting"),
        ("JSON", b"[" * 100_000, "is not JSON: maximum recursion"),
        ("JSON", b'[{"a": 1, "b": 2, "a": 3}]', "is not JSON: duplicate key 'a'"),
        ("TOML", b"a = ", "is not TOML: Invalid value"),
        ("TOML", b"a = '\xff'", "is not TOML: 'utf-8' codec"),
        ("JSON", b'"\xed\xa0\x80"', "is not JSON: 'utf-8' codec"),  # half a surrogate pair
        ("JSON", None, "cannot be read: No such file"),
    ],
)
def test_a_document_that_cannot_be_parsed_is_one_line(tmp_path, form, text, says) -> None:
    path = tmp_path / "document"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ValueError, match=f"^{path} {says}.*$"):
        read_document(path, form)
    path.write_text("3" if form == "JSON" else "a = 3")
    assert read_document(path, form) == (3 if form == "JSON" else {"a": 3})
