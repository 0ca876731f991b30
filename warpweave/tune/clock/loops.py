"""Natural loops of a function: a block that dominates another which jumps back to it, and all that
lies between (Aho, Lam, Sethi and Ullman, "Compilers", section 9.6).

What the compiler laid outside a loop's own addresses is left out: the waits of barriers that have
failed once, which come back into the loop and are not its usual path.
"""

from __future__ import annotations

from warpweave.tune.clock.disassembly import Instruction

_ENDS = ("BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "BREAK", "BSYNC")
_LEAVES = ("EXIT", "RET", "BRX", "JMP")  # without a target in this function


def natural_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """The instructions of every loop in the order of their addresses, loops by their headers."""
    blocks = _blocks(code)
    after = _successors(blocks)
    bodies: dict[int, set[int]] = {}
    last: dict[int, int] = {}  # the block that jumps back
    for number, dominators in enumerate(_dominators(after)):
        for header in after[number] & dominators:
            bodies.setdefault(header, {header}).update(_body(header, number, after))
            last[header] = max(last.get(header, header), number)
    return [
        [i for block in sorted(body) if header <= block <= last[header] for i in blocks[block]]
        for header, body in sorted(bodies.items())
    ]


def _blocks(code: list[Instruction]) -> list[list[Instruction]]:
    """Cut before every target and after every branch."""
    targets = {i.target for i in code}
    blocks: list[list[Instruction]] = [[]]
    for i in code:
        if blocks[-1] and (i.address in targets or blocks[-1][-1].base in _ENDS):
            blocks.append([])
        blocks[-1].append(i)
    return blocks


def _successors(blocks: list[list[Instruction]]) -> list[set[int]]:
    """The blocks that may follow each."""
    at = {block[0].address: number for number, block in enumerate(blocks) if block}
    found = []
    for number, block in enumerate(blocks):
        end = block[-1] if block else None
        after = set()
        if end is None or not _always(end):
            after |= {number + 1} & set(range(len(blocks)))
        # ptxas also leaves a loop for far away by a call that nothing returns from.
        if end is not None and end.base in ("BRA", "CALL") and end.target in at:
            after.add(at[end.target])
        found.append(after)
    return found


def _always(end: Instruction) -> bool:
    """Whether control never goes on behind an instruction. A branch may stand under a predicate in
    front of it or, if uniform, among its operands."""
    conditional = end.predicate not in ("", "@PT") or "UP" in end.operands.partition("`")[0]
    return end.base in (*_LEAVES, "BRA") and not conditional


def _dominators(after: list[set[int]]) -> list[set[int]]:
    """For each block those that every way to it passes; none for what no way leads to."""
    before: list[set[int]] = [set() for _ in after]
    for number, following in enumerate(after):
        for other in following:
            before[other].add(number)
    everything = set(range(len(after)))
    found = [{0}, *(set(everything) for _ in after[1:])]
    changed = True
    while changed:
        changed = False
        for number in range(1, len(after)):
            ways = [found[other] for other in before[number]]
            new = {number} | (set.intersection(*ways) if ways else everything)
            changed |= new != found[number]
            found[number] = new
    unreached = _unreached(after)
    return [set() if number in unreached else found[number] for number in range(len(after))]


def _unreached(after: list[set[int]]) -> set[int]:
    seen, todo = {0}, [0]
    while todo:
        todo += (new := after[todo.pop()] - seen)
        seen |= new
    return set(range(len(after))) - seen


def _body(header: int, back: int, after: list[set[int]]) -> set[int]:
    """The blocks from which `back` is reached without passing `header`."""
    body, todo = {header, back}, [back] if back != header else []
    while todo:
        inside = todo.pop()
        for number, following in enumerate(after):
            if inside in following and number not in body:
                body.add(number)
                todo.append(number)
    return body
