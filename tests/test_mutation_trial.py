"""The mutation trial does not rot: every fault still has its place in the sources."""

import ast

from faults import FAULTS
from mutation_trial import ROOT, importers, mutated, suite_files


def test_every_fault_has_one_place_and_leaves_what_parses():
    for fault in FAULTS:
        assert fault.old != fault.new
        ast.parse(mutated(fault, (ROOT / fault.file).read_text()), fault.name)


def test_names_tell_the_faults_apart():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_fault_is_first_shown_to_the_tests_of_its_room():
    files = suite_files(ROOT / "tests")
    own = importers("warpweave.parallel.pipeline.transport", files)  # imported by its room only
    assert ROOT / "tests" / "test_pipeline.py" in own
    assert ROOT / "tests" / "test_rope.py" not in own
    assert importers("warpweave.kernels.rope.table", files)[0].name == "test_rope.py"
