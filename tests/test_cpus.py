"""``make cpus``: a setting reaches the tests, and a test that fails under
it makes the command fail."""

import json
import sys

import cpus
import pytest

TEST = """
import os

def test_right():
    assert os.environ["ATEN_CPU_CAPABILITY"] == "avx2" and "MKL_CBWR" not in os.environ

def test_of_threads():
    assert os.environ["OMP_NUM_THREADS"] == "1"
"""


def test_a_setting_is_a_name_or_variables():
    assert cpus.setting("native") == ("native", {})
    assert cpus.setting("AVX2")[1]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert cpus.setting("A=1,B=x") == ("A=1,B=x", {"A": "1", "B": "x"})
    for wrong in ("avx3", "A=", "=1", "A=1,"):
        with pytest.raises(cpus.argparse.ArgumentTypeError, match="expected NAME=value"):
            cpus.setting(wrong)
    assert all((cpus.ROOT / "tests" / f"test_{name}.py").is_file() for name in cpus.TESTS)


def test_tests_run_under_a_setting_alone_and_failures_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # from the shell: not part of a setting
    (tmp_path / "pytest.ini").write_text("[pytest]")  # no settings of a parent folder
    (tmp_path / "test_it.py").write_text(TEST)
    given = {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"}
    row = cpus.run(given, [str(tmp_path / "test_it.py")], 1)
    assert (row["passed"], row["tests"]) == (False, 2)
    assert [name.rpartition("::")[2] for name in row["failed"]] == ["test_of_threads"]
    missing = cpus.run({}, [str(tmp_path / "test_missing.py")], 1)
    assert not missing["passed"]


@pytest.mark.parametrize("failed", [[], ["tests.test_x::test_y"]])
def test_it_ends_with_json_and_fails_if_a_test_did(monkeypatch, capsys, failed):
    def run(variables, tests, workers):
        found = failed if variables.get("MKL_CBWR") else []
        return {"passed": not found, "tests": 3, "skipped": 0, "failed": found, "seconds": 1}

    monkeypatch.setattr(cpus, "run", run)
    monkeypatch.setattr(cpus, "bits_under", lambda variables: str(sorted(variables)))
    monkeypatch.setattr(sys, "argv", ["cpus.py", "--settings", "native", "MKL_CBWR=AVX2"])
    with pytest.raises(SystemExit) as end:
        cpus.main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok     native: 3 tests, 0 skipped, 0 failed, 1 s, the same bits as native"
    assert lines[1].startswith(("FAILED" if failed else "ok    ") + " MKL_CBWR=AVX2: 3 tests, ")
    assert lines[1].endswith("different bits from native")
    assert [line.strip() for line in lines[2:]] == failed
    assert json.loads(last)["passed"] == (not failed)
    assert end.value.code == len(failed)
