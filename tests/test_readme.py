"""README's programs run, one after another as a reader would."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_its_programs_run() -> None:
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    for program in programs[:2]:  # the third reads a checkpoint that `make train` leaves
        exec(program, names)
    assert names["y"].shape == names["q"].shape == (2, 16, 4, 16)
    assert names["loss"].isfinite()
    assert len(programs) == 3
    assert "open_checkpoint" in programs[2]
