"""The mutation trial does not rot: every fault still has its place in the sources."""

import ast

from faults import FAULTS
from mutation_trial import ROOT, mutated


def test_every_fault_has_one_place_and_leaves_what_parses():
    for fault in FAULTS:
        assert fault.old != fault.new
        ast.parse(mutated(fault, (ROOT / fault.file).read_text()), fault.name)


def test_names_tell_the_faults_apart():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
