"""Schedules written as text, and edits of them."""

from __future__ import annotations

from warpweave.parallel.schedule import Schedule, from_csv


def lists_of(*rows: str) -> Schedule:
    """Parse a rank's list from each row, such as ``"0F0 1F0 1B0 0B0"``."""
    return [from_csv(row.replace(" ", ","))[0] for row in rows]


def edit(lists: Schedule, old: str, *new: str) -> Schedule:
    """Return `lists` with the action written `old` replaced by the actions `new`."""
    put = lists_of(" ".join(new))[0] if new else []
    found = [[b for a in row for b in ([a] if str(a) != old else put)] for row in lists]
    assert found != lists
    return found


def swap(lists: Schedule, one: str, two: str) -> Schedule:
    """Return `lists` with these two actions swapped."""
    return edit(edit(edit(lists, one, "99F0"), two, one), "99F0", two)
