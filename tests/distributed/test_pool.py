"""The pool's own promises: results by rank, and failures that say which rank and why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import ROOT, CaseFailed, Pool

CASES = "tests.distributed.cases_pool"


def works(pool: Pool) -> None:
    results = pool.run(f"{CASES}:all_reduce", world_size=4, scale=0.5)
    assert [result["rank"] for result in results] == [0, 1, 2, 3]
    assert [result["environment"] for result in results] == ["0", "1", "2", "3"]
    for result in results:
        torch.testing.assert_close(result["total"], torch.full((3,), 5.0))
        # Seeds are reset for each case, in every rank alike.
        torch.testing.assert_close(result["random"], torch.rand(2, generator=torch.Generator().manual_seed(1234)))


def test_results_come_back_by_rank(pool: Pool) -> None:
    works(pool)


def test_ranks_live_on_between_cases(pool: Pool) -> None:
    first, second = ({r["pid"] for r in pool.run(f"{CASES}:all_reduce", world_size=2, scale=1)} for _ in range(2))
    assert first == second


def test_big_results(pool: Pool) -> None:
    results = pool.run(f"{CASES}:big_result", world_size=2, elements=4_000_000)
    assert [int(result[-1]) for result in results] == [3_999_999, 4_000_000]


def test_an_exception_carries_the_ranks_traceback_and_output(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match="rank 2: ValueError: seven is not a prime's square") as failure:
        pool.run(f"{CASES}:raise_on", world_size=4, rank=2)
    text = str(failure.value)
    assert "in raise_on" in text
    assert "rank 2 was here" in text
    assert "rank 0 was here" in text
    works(pool)


def test_a_hang_names_the_rank_and_prints_stacks(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match=r"rank 1: stuck at the deadline of 2 s") as failure:
        pool.run(f"{CASES}:hang_on", world_size=3, timeout=2, rank=1)
    text = str(failure.value)
    assert "rank 0: finished" in text
    assert "rank 2: finished" in text
    assert "_sleep_here_for_ever" in text
    assert text.count("most recent call first") >= 3
    works(pool)


def test_a_dead_rank_is_named_and_the_others_are_aborted(pool: Pool) -> None:
    started = time.monotonic()
    with pytest.raises(CaseFailed, match="rank 1: died, exit status 7"):
        pool.run(f"{CASES}:die_on", world_size=4, timeout=60, rank=1)
    assert time.monotonic() - started < 30, "the other ranks were waited for until the deadline"
    works(pool)


def test_a_leaked_group_fails_the_case(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match=r"1 process group\(s\) still open: forgotten"):
        pool.run(f"{CASES}:leak_group", world_size=2)
    pool.run(f"{CASES}:close_group", world_size=2)


def test_a_changed_torch_fails_the_case(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match=r"rank 1: .*torch\.cuda\.is_available replaced"):
        pool.run(f"{CASES}:leak_attribute", world_size=2, rank=1)
    works(pool)


def test_a_patch_that_stays_fails_the_case(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match=r"patches still applied: \['megatron.core.parallel_state:get_all_ranks'\]"):
        pool.run(f"{CASES}:leave_a_patch", world_size=1)
    works(pool)


def test_megatron_globals_are_reset(pool: Pool) -> None:
    for _ in range(2):
        assert pool.run(f"{CASES}:leave_megatron_initialised", world_size=2) == [0, 1]


def test_a_case_may_open_its_own_world(pool: Pool) -> None:
    assert pool.run(f"{CASES}:own_world", world_size=2, process_group=False) == [2, 2]


def test_environment_folder_and_default_dtype_are_restored(pool: Pool) -> None:
    pool.run(f"{CASES}:change_environment", world_size=1)
    assert pool.run(f"{CASES}:environment_and_dtype", world_size=1) == [(None, str(ROOT), torch.float32)]


def test_children_of_a_failed_rank_end_with_it(pool: Pool) -> None:
    with pytest.raises(CaseFailed) as failure:
        pool.run(f"{CASES}:start_child", world_size=1)
    found = re.search(r"ValueError: child (\d+)", str(failure.value))
    assert found is not None
    assert gone(int(found[1]))


def test_the_ranks_end_with_the_session() -> None:
    """A session that is killed outright closes nothing itself."""
    script = (
        "import os, sys\n"
        "from tests.distributed.pool import Pool\n"
        f"results = Pool().run('{CASES}:all_reduce', world_size=2, scale=1)\n"
        "sys.stdout.write(' '.join(str(result['pid']) for result in results))\n"
        "sys.stdout.flush()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == -9, done.stderr
    pids = [int(pid) for pid in done.stdout.splitlines()[-1].split()]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def gone(pid: int) -> bool:
    """Whether the process ends within ten seconds; a zombie that nobody reaps counts as ended."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if status == "Z":
            return True
        time.sleep(0.1)
    return False
