"""Whatever happens to one rank, the others end, soon, and say where they stood."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.training.failure import RECORD, read_record
from tests.distributed.failing import Case, Result
from tests.distributed.launch import TINY, command_line, read_rows, succeed, write_corpus
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder, tokenizer_folder

REPOSITORY = Path(__file__).parents[2]
SECONDS = 6.0
"""``--distributed-timeout-minutes``, where it should not matter."""
SECONDS_OF_THE_STOPPED = 2.0
"""Where it ends the run. They run by themselves, since the machine has two cores."""
FATAL = re.compile(r"FATAL rank=(\d+) host=(\S+) step=(\d+) phase=(\w+) cause=(\S.*)")

FAULTS = (
    ("raise", "optimizer", 0),
    ("refuse", "data", 1),
    ("term", "forward", 1),
    ("kill", "collective", 0),
    ("kill", "save", 1),
    ("stop", "forward", 1),
    ("stop", "prepare", None),
)
MORE_FAULTS = (
    ("raise", "forward", 1),
    ("raise", "evaluate", 1),
    ("raise", "save", 0),
    ("refuse", "prepare", None),
    ("kill", "forward", 1),
    ("kill", "prepare", None),
    ("stop", "collective", 1),
    ("stop", "save", 0),
)


def run_cases(cases: list[Case], timeout: float) -> dict[str, Result]:
    """Those that are stopped after the others, else all at once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in [name for name in environment if name.startswith("TORCHELASTIC")]:
        del environment[name]
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.failing"],
        cwd=REPOSITORY,
        env=environment,
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {result["name"]: Result(**result) for result in json.loads(done.stdout)}


def case(fault: str, place: str, rank: int | None, folder: Path, flags: dict[str, Any]) -> Case:
    name = f"{fault}-{place}"
    seconds = SECONDS_OF_THE_STOPPED if fault == "stop" else SECONDS
    more: dict[str, Any] = {"--save": folder / name, "--distributed-timeout-minutes": seconds / 60}
    if place == "prepare":
        raw = folder / f"{name}.jsonl"
        shutil.copy(Path(flags["--data-path"]).with_name("texts.jsonl"), raw)
        more |= {"--data-path": raw, "--tokenizer-name-or-path": tokenizer_folder()}
    return Case(name, fault, place, rank, command_line({**flags, **more}), str(folder))


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    more = {"--train-iters": 4, "--save-interval": 2, "--eval-interval": 2, "--eval-iters": 1, "--split": "70,30,0"}
    return {**TINY, **more, "--hf-config": hf_folder("q25"), "--data-path": corpus, "--use-distributed-optimizer": True}


@pytest.fixture(scope="module")
def runs(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    """Those of every session."""
    folder = tmp_path_factory.mktemp("failures")
    asked = {**flags, "--save-interval": None, "--exit-signal-handler": True, "--exit-signal": "SIGUSR1"}
    leaving = case("leave", "forward", 1, folder, asked)
    return folder, run_cases([leaving, *(case(*fault, folder, flags) for fault in FAULTS)], timeout=150)


def check(save: Path, result: Result, fault: str, rank: int | None) -> None:
    """All ended in failure; those that could told it, as the last they said, and the record says the same."""
    said = f"{save.name}: {result}"
    assert None not in result.codes, said
    assert 0 not in result.codes, said
    if fault == "kill":
        killed = [number for number, code in enumerate(result.codes) if code == -signal.SIGKILL]
        assert killed == ([rank] if rank is not None else killed[:1]), said
    record = {entry["rank"]: entry for entry in read_record(save)}
    for number, text in enumerate(result.errors):
        if result.codes[number] == -signal.SIGKILL:
            continue
        last = text.splitlines()[-1]
        told = FATAL.fullmatch(last)
        assert told is not None, said
        assert int(told[1]) == number
        entry = record.pop(number)
        assert "FATAL rank={rank} host={host} step={step} phase={phase} cause={cause}".format(**entry) == last
    assert record == {}, said


@pytest.mark.parametrize(("fault", "place", "rank"), FAULTS)
def test_one_rank_fails_and_all_end(
    runs: tuple[Path, dict[str, Result]], fault: str, place: str, rank: int | None
) -> None:
    check(runs[0] / f"{fault}-{place}", runs[1][f"{fault}-{place}"], fault, rank)


@pytest.mark.slow
def test_one_rank_fails_elsewhere_and_all_end(flags: dict[str, Any], tmp_path: Path) -> None:
    results = run_cases([case(*fault, tmp_path, flags) for fault in MORE_FAULTS], timeout=150)
    for fault, place, rank in MORE_FAULTS:
        check(tmp_path / f"{fault}-{place}", results[f"{fault}-{place}"], fault, rank)


def test_a_signal_to_one_rank_saves_and_leaves(runs: tuple[Path, dict[str, Result]]) -> None:
    folder, result = runs[0] / "leave-forward", runs[1]["leave-forward"]
    assert result.codes == [0, 0], result.errors
    assert [path.name for path in folder.glob("iter_*")] == ["iter_0000002"]
    assert not (folder / RECORD).exists()


def test_a_launcher_that_restarts_goes_on_from_the_last_save(pool: Pool, flags: dict[str, Any], tmp_path: Path) -> None:
    """The losses are those of a run without a fault; the same save is then taken up by another number of ranks."""
    told = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples")
    straight, again = tmp_path / "straight.jsonl", tmp_path / "again.jsonl"
    flags = {**flags, "--train-iters": 6, "--save-interval": 2}
    succeed(pool, {**flags, "--metrics-file": straight}, "dp2")
    saves = tmp_path / "saves"
    restarting = {**flags, "--save": saves, "--load": saves, "--metrics-file": again}
    # Before there is a save, in a save, and after one.
    kills = [[0, "data", 1], [1, "save", 4], [1, "optimizer", 5]]
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.restarting", json.dumps(kills), *command_line(restarting)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    record = [(entry["restart"], entry["rank"]) for entry in read_record(saves)]
    assert record == [(0, 1), (1, 0), (2, 0)]
    one, two = read_rows(straight), read_rows(again)
    # Steps 3 and 4 were taken twice, since the save of step 4 was cut off; nobody reported the first step 5.
    assert [row["iteration"] for row in two] == [1, 2, 3, 4, 3, 4, 5, 6]
    expected = [one[row["iteration"] - 1] for row in two]
    assert [[row[name] for name in told] for row in two] == [[row[name] for name in told] for row in expected]
    # From the save of step 4, by one rank: the sums of gradients are in another order.
    (saves / "latest_checkpointed_iteration.txt").write_text("4")
    alone = tmp_path / "alone.jsonl"
    succeed(pool, {**restarting, "--metrics-file": alone}, "one")
    rows = read_rows(alone)
    assert [row["iteration"] for row in rows] == [5, 6]
    assert [row["lm_loss"] for row in rows] == pytest.approx([row["lm_loss"] for row in one[4:]], rel=1e-5)
