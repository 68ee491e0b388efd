"""The rules and the report of a test run, as a pytest plugin.

Tests are counted in areas with budgets. A skip that ``tests/skips.txt`` does not list with a reason fails the run. Of
the tests marked ``slow`` one shard runs each time, chosen by the number of commits, so that a run can be repeated.
Tests on real material run where ``make material`` has fetched it; how many of them did is printed.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SKIPS = ROOT / "tests" / "skips.txt"
CHECK_REPORT = ROOT / "out" / "check-report.json"
SHARDS = 8
#: Seconds on two cores, printed and kept in mind; no test asserts a time.
BUDGETS = {
    "check": 120,
    "unit": 180,
    "models": 240,
    "parallel": 240,
    "ops": 180,
    "post-training": 180,
    "examples": 120,
}
#: Longest prefix wins.
FOLDERS = {
    "tests/unit": "unit",
    "tests/bench": "unit",
    "tests/unit/models": "models",
    "tests/unit/checkpoint": "models",
    "tests/parity": "models",
    "tests/distributed": "parallel",
    "tests/unit/ops": "ops",
    "tests/unit/posttrain": "post-training",
    "tests/unit/evaluation": "post-training",
    "tests/unit/inference": "post-training",
    "tests/examples": "examples",
}


@dataclass
class Area:
    """One row of the report; ``seconds`` and ``budget`` in seconds."""

    area: str
    seconds: float = 0.0
    budget: int = 0
    passed: int = 0
    failed: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)


def area_of(item: pytest.Item) -> str:
    """The area that a test counts in: its ``area`` mark, else its folder."""
    mark = item.get_closest_marker("area")
    if mark is not None:
        name = mark.args[0]
        if name not in BUDGETS:
            raise pytest.UsageError(f"{item.nodeid}: area {name!r} is unknown; allowed: {', '.join(BUDGETS)}")
        return name
    matches = [folder for folder in FOLDERS if item.nodeid.startswith(f"{folder}/")]
    return FOLDERS[max(matches, key=len)] if matches else "unit"


def missing_material(item: pytest.Item) -> list[str]:
    """What the ``material`` marks of a test name and ``.cache/material/`` lacks."""
    folder = ROOT / ".cache" / "material"
    named = [name for mark in item.iter_markers("material") for name in mark.args]
    return [name for name in named if not (folder / name).exists()]


def listed_skips(text: str) -> list[tuple[str, str]]:
    """``(pattern of test ids, reason)`` for each line ``pattern: reason`` of ``tests/skips.txt``."""
    listed: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        pattern, found, reason = line.partition(": ")
        if not found or not reason.strip():
            raise pytest.UsageError(f"tests/skips.txt:{number}: a line is 'test id or pattern: reason', got {line!r}")
        listed.append((pattern.strip(), reason.strip()))
    return listed


def is_listed(nodeid: str, listed: list[tuple[str, str]]) -> bool:
    """Whether a pattern covers ``nodeid``; brackets of parametrised ids are literal."""
    return any(fnmatch.fnmatchcase(nodeid, pattern.replace("[", "[[]")) for pattern, _ in listed)


class SessionReport:
    """Collects what happened and says whether the run keeps the rules."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.areas = {name: Area(name, budget=budget) for name, budget in BUDGETS.items()}
        self.area_by_test: dict[str, str] = {}
        self.unlisted: list[str] = []
        self.notes: list[str] = []
        self.listed = listed_skips(SKIPS.read_text())

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, left_out = self._slow_shard(items)
        kept, without_material = self._material(kept)
        items[:] = kept
        if left_out or without_material:
            config.hook.pytest_deselected(items=left_out + without_material)
        for item in items:
            self.area_by_test[item.nodeid] = area_of(item)

    def _slow_shard(self, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        slow = [item for item in items if item.get_closest_marker("slow") is not None]
        # A test that was asked for by name runs.
        if not slow or self.config.getoption("slow") == "all" or any("::" in str(a) for a in self.config.args):
            return list(items), []
        shard = commit_count() % SHARDS
        left_out = {id(item) for item in slow if zlib.crc32(item.nodeid.encode()) % SHARDS != shard}
        self.notes.append(f"slow tests: {len(slow) - len(left_out)} of {len(slow)} ran, shard {shard} of {SHARDS}")
        return [i for i in items if id(i) not in left_out], [i for i in slow if id(i) in left_out]

    def _material(self, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        marked = [item for item in items if item.get_closest_marker("material") is not None]
        if not marked:
            return items, []
        missing = {item.nodeid: missing_material(item) for item in marked}
        left_out = [item for item in marked if missing[item.nodeid]]
        note = f"tests on real material: {len(marked) - len(left_out)} of {len(marked)} ran"
        if left_out:
            names = sorted({name for item in left_out for name in missing[item.nodeid]})
            note += f"; make material fetches what the others need: {', '.join(names)}"
        self.notes.append(note)
        return [item for item in items if not missing.get(item.nodeid)], left_out

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        area = self.areas[self.area_by_test[report.nodeid]]
        area.seconds += report.duration
        if report.failed:
            area.failed += 1
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(getattr(report, "wasxfail", ""))
            self._skip(area, report.nodeid, reason)
        elif report.when == "call":
            area.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._skip(self.areas["unit"], report.nodeid, reason)

    def _skip(self, area: Area, nodeid: str, reason: str) -> None:
        area.skipped.append({"id": nodeid, "reason": reason.removeprefix("Skipped: ")})
        if not is_listed(nodeid, self.listed):
            self.unlisted.append(nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if self.unlisted and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        path = self.config.getoption("report")
        if path:
            target = ROOT / path
            target.parent.mkdir(parents=True, exist_ok=True)
            rows = [asdict(area) | {"seconds": round(area.seconds, 1)} for area in self._rows()]
            temporary = target.with_suffix(".tmp")
            temporary.write_text(json.dumps(rows, indent=2) + "\n")
            os.replace(temporary, target)
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("areas", sep="-")
        write(f"{'area':<14} {'seconds':>8} {'budget':>7} {'passed':>7} {'failed':>7} {'skipped':>8}")
        for row in self._rows():
            over = "  over budget" if row.seconds > row.budget else ""
            counts = f"{row.passed:>7} {row.failed:>7} {len(row.skipped):>8}"
            write(f"{row.area:<14} {row.seconds:>8.1f} {row.budget:>7} {counts}{over}")
        for note in self.notes:
            write(note)
        for nodeid in self.unlisted:
            write(f"FAILED skip not listed with a reason in tests/skips.txt: {nodeid}")

    def _rows(self) -> list[Area]:
        if CHECK_REPORT.exists():
            steps = json.loads(CHECK_REPORT.read_text())
            check = self.areas["check"]
            check.seconds = sum(step["seconds"] for step in steps)
            check.passed = sum(step["passed"] for step in steps)
            check.failed = len(steps) - check.passed
        return [row for row in self.areas.values() if row.seconds or row.passed or row.failed or row.skipped]


def commit_count() -> int:
    """Commits behind the checkout, 0 outside of git."""
    done = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0
