"""Natural loops of a function: a block that dominates another which jumps back to it, and all
blocks between them (Aho, Lam, Sethi and Ullman, "Compilers", section 9.6).

Code that the compiler placed outside a loop's own addresses is left out. These are the waits of
barriers that have failed once, which return into the loop and are not its usual path.
"""

from __future__ import annotations

from clock.disassembly import Instruction

_ENDS = ("BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "BREAK", "BSYNC")
_LEAVES = ("EXIT", "RET", "BRX", "JMP")  # without a target in this function


def natural_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """The instructions of every loop in the order of their addresses; loops by their headers."""
    blocks = _blocks(code)
    after = _successors(blocks)
    before = [{n for n, next_ in enumerate(after) if block in next_} for block in range(len(after))]
    entered, found = _reached(0, after), []
    for header in sorted(entered):
        around = _reached(0, after, without=header)  # blocks that it does not dominate
        if backs := (before[header] & entered) - around:  # the blocks that jump back to it
            body = {header}.union(*(_reached(back, before, without=header) for back in backs))
            inside = [block for block in sorted(body) if header <= block <= max(header, *backs)]
            found.append([i for block in inside for i in blocks[block]])
    return found


def _reached(start: int, after: list[set[int]], without: int | None = None) -> set[int]:
    """The blocks on paths that do not pass `without`, including `start`."""
    seen = {start} - {without}
    todo = [*seen]
    while todo:
        todo += (new := after[todo.pop()] - seen - {without})
        seen |= new
    return seen


def _blocks(code: list[Instruction]) -> list[list[Instruction]]:
    """The basic blocks: cut before every target and after every branch."""
    targets = {i.target for i in code}
    blocks: list[list[Instruction]] = [[]]
    for i in code:
        if blocks[-1] and (i.address in targets or blocks[-1][-1].base in _ENDS):
            blocks.append([])
        blocks[-1].append(i)
    return blocks


def _successors(blocks: list[list[Instruction]]) -> list[set[int]]:
    """The blocks that may follow each block."""
    at = {block[0].address: number for number, block in enumerate(blocks)}
    found = []
    for number, block in enumerate(blocks, 1):
        end = block[-1]
        after = set() if _always(end) or number == len(blocks) else {number}
        # ptxas also leaves a loop for a distant place by a call from which nothing returns.
        if end.base in ("BRA", "CALL") and end.target in at:
            after.add(at[end.target])
        found.append(after)
    return found


def _always(end: Instruction) -> bool:
    """Return True if control never continues after an instruction.

    A branch may have a predicate before it or, if uniform, among its operands.
    """
    conditional = end.predicate not in ("", "@PT") or "UP" in end.operands.partition("`")[0]
    return end.base in (*_LEAVES, "BRA") and not conditional
