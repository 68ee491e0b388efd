"""The rules of a test run, seen from outside: a session of its own over three small tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session_report import ROOT, SHARDS, commit_count, is_listed, listed_skips

CONFTEST = "from tests.conftest import pytest_addoption, pytest_configure\n"


def session(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_sample.py").write_text(f"import pytest\n{tests}")
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    slow\n    material(paths)\n    area(name)\npythonpath = " + str(ROOT)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    return subprocess.run([*command, str(folder)], cwd=folder, capture_output=True, text=True, timeout=100)


def test_an_unlisted_skip_fails_the_run(tmp_path: Path) -> None:
    done = session(tmp_path, "def test_a(): pass\n@pytest.mark.skip(reason='no such device')\ndef test_b(): pass\n")
    assert done.returncode == 1
    assert "skip not listed with a reason in tests/skips.txt: test_sample.py::test_b" in done.stdout


def test_the_report_counts_by_area(tmp_path: Path) -> None:
    tests = (
        "@pytest.mark.area('ops')\ndef test_a(): pass\n"
        "@pytest.mark.area('ops')\ndef test_b(): raise ValueError\n"
        "def test_c(): pytest.skip('no such device')\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "@pytest.mark.area('ops')\ndef test_d(broken): pass\n"
    )
    target = tmp_path / "report.json"
    assert session(tmp_path, tests, "--report", str(target)).returncode == 1
    rows = {row["area"]: row for row in json.loads(target.read_text())}
    assert set(rows["ops"]) == {"area", "seconds", "budget", "passed", "failed", "skipped"}
    assert (rows["ops"]["passed"], rows["ops"]["failed"]) == (1, 2)
    assert rows["unit"]["skipped"] == [{"id": "test_sample.py::test_c", "reason": "no such device"}]


def test_slow_tests_run_by_shard(tmp_path: Path) -> None:
    tests = "@pytest.mark.slow\n@pytest.mark.parametrize('n', range(64))\ndef test_a(n): pass\n"
    shard, everything = session(tmp_path, tests), session(tmp_path, tests, "--slow", "all")
    assert "64 passed" in everything.stdout
    assert f"shard {commit_count() % SHARDS} of {SHARDS}" in shard.stdout
    assert "deselected" in shard.stdout
    assert shard.returncode == 0


def test_a_listed_skip_needs_a_reason() -> None:
    listed = listed_skips("# a comment\n\ntests/a.py::test_b[npu*]: needs an Ascend device\n")
    assert listed == [("tests/a.py::test_b[npu*]", "needs an Ascend device")]
    assert is_listed("tests/a.py::test_b[npu-bf16]", listed)
    assert not is_listed("tests/a.py::test_b[cpu]", listed)
    with pytest.raises(pytest.UsageError, match=r"skips\.txt:1"):
        listed_skips("tests/a.py::test_b\n")


def test_tests_without_their_material_are_counted_and_named(tmp_path: Path) -> None:
    tests = (
        "pytestmark = pytest.mark.material('nowhere/a')\n"
        "def test_a(): pass\n@pytest.mark.material('nowhere/b')\ndef test_b(): pass\n"
    )
    done = session(tmp_path, f"{tests}")
    assert "tests on real material: 0 of 2 ran; make material fetches what the others need: nowhere/a, nowhere/b" in (
        done.stdout
    )
    assert "2 deselected" in done.stdout
