"""Saves: the background writes what the foreground does, a failure is every rank's, and only what may go is deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mindspeed_llm.core  # noqa: F401  the seam comes first
from mindspeed_llm.checkpoint.folders import complete_iterations, latest_iteration
from mindspeed_llm.checkpoint.in_use import NAME
from mindspeed_llm.checkpoint.origin import Origin
from mindspeed_llm.training.failure import RECORD
from tests.distributed.cases_saving import ELSEWHERE
from tests.distributed.launch import TINY, placed, read_rows, write_corpus
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.parity.layouts import parse_layout
from tests.parity.reference import token_batches

HERE = "tests.distributed.cases_saving"
VOCAB = 328


@pytest.fixture(scope="module")
def folder() -> str:
    return str(hf_folder("q25", vocab=VOCAB))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(pool: Pool, case: str, layout: str, folder: str, steps: int, **arguments: Any) -> list[Any]:
    tokens = token_batches(vocab=VOCAB, seed=3, steps=steps)[:, :4, :17]
    ranks = parse_layout(layout)[0]
    return pool.run(f"{HERE}:{case}", ranks, timeout=150, folder=folder, layout=layout, tokens=tokens, **arguments)


@pytest.mark.parametrize(
    ("layout", "portable"),
    [("one", False), ("dp2+dist", False), ("dp2+dist", True), ("tp2+pp2", False)],
)
def test_a_save_in_the_background_is_that_of_its_step(
    pool: Pool, tmp_path: Path, folder: str, layout: str, portable: bool
) -> None:
    found = run(pool, "both_ways", layout, folder, 3, root=str(tmp_path), portable=portable)
    assert len(found[0]["sync"]) >= len(found) + 3
    for rank in found:
        assert not rank["early"], "training must not have waited for the files"
        assert rank["waited"]
        # .metadata holds the names of plans, not of tensors: its bytes depend on the order of a set.
        for name in rank["sync"].keys() - {".metadata"}:
            assert rank["async"][name] == rank["sync"][name], name
        assert rank["async"].keys() == rank["sync"].keys()


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("where", ["shard", "memory", "metadata", "publish"])
def test_a_full_disk_is_every_ranks_error_and_costs_no_save(
    pool: Pool, tmp_path: Path, folder: str, where: str, background: bool
) -> None:
    found = run(pool, "failing", "dp2", folder, 3, root=str(tmp_path), where=where, background=background)
    for rank in found:
        assert "No space left on device" in rank["message"]
        assert f"rank {1 if where in ('shard', 'memory') else 0} on" in rank["message"]
        assert rank["after"] == 1
        assert rank["left"] == ["iter_0000001", "latest_checkpointed_iteration.txt"]
        assert rank["then"] == 3


@pytest.mark.parametrize(("where", "rank"), [("shard", 2), ("config", 0)])
def test_a_full_disk_while_exporting_is_every_ranks_error(
    pool: Pool, tmp_path: Path, folder: str, corpus: str, where: str, rank: int
) -> None:
    """Of a stage that others wait for, and of the first rank when the weights are there."""
    export = tmp_path / "hf"
    flags = {**TINY, "--load": folder, "--data-path": corpus, "--train-iters": 1, "--save": tmp_path / "saves"}
    _, argv = placed({**flags, "--save-hf": export}, "pp2+dp2")
    arguments: Any = {"argv": argv, "rank": rank, "where": where}
    for result in pool.run(f"{HERE}:failing_export", 4, process_group=False, **arguments):
        assert result["code"] == 1
        assert f"the Hugging Face folder {export} cannot be written" in result["err"]
        assert f"rank {rank} on" in result["err"]
        assert "No space left on device" in result["err"].splitlines()[-1]
        assert "Traceback" not in result["err"]
    assert [path.name for path in tmp_path.iterdir()] == ["saves"]
    assert latest_iteration(tmp_path / "saves") == 1


@pytest.mark.parametrize("how", ["deleted", "taken"])
def test_a_folder_that_goes_away_during_a_run(pool: Pool, tmp_path: Path, folder: str, corpus: str, how: str) -> None:
    """A run whose saves were deleted saves again and says so; from one that another run has begun it keeps off."""
    saves = tmp_path / "saves"
    more = {"--save": saves, "--save-interval": 2, "--train-iters": 5}
    world, argv = placed({**TINY, "--load": folder, "--data-path": corpus, **more}, "dp2")
    target = f"{HERE}:disturbed"
    results = pool.run(target, world, process_group=False, argv=argv, save=str(saves), how=how)
    if how == "deleted":
        assert [result["code"] for result in results] == [0, 0]
        assert f"--save {saves} was deleted" in results[0]["err"]
        assert sorted(path.name for path in saves.iterdir()) == [
            "iter_0000004", "iter_0000005", "latest_checkpointed_iteration.txt", "metrics.jsonl",
        ]  # fmt: skip
        assert [row["iteration"] for row in read_rows(saves / "metrics.jsonl")] == [3, 4, 5]
    else:
        for result in results:
            assert result["code"] == 1
            assert f"another run writes to --save {saves}" in result["err"]
            assert "Traceback" not in result["err"]
        assert json.loads((saves / NAME).read_text()) == ELSEWHERE
        assert complete_iterations(saves) == [2]
        assert not (saves / RECORD).exists()


def test_a_mark_may_be_watched_for_longer_than_a_collective_may_last(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps(ELSEWHERE))
    assert pool.run(f"{HERE}:watching", 2, process_group=False, root=str(tmp_path)) == [True, True]


def test_a_folder_that_cannot_be_made_is_every_ranks_error(pool: Pool, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("in the way")
    for message in run(pool, "unwritable", "dp2", folder, 1, root=str(tmp_path / "file")):
        assert "cannot be made" in message
        assert "--save" in message


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]),
        ({"save_total_limit": 2}, [[1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]),
        ({"save_retain_interval": 3}, [[1], [2], [3], [3, 4], [3, 5], [3, 6]]),
    ],
    ids=["all", "limit", "interval"],
)
def test_what_is_kept(
    pool: Pool, tmp_path: Path, folder: str, limits: dict[str, int], expected: list[list[int]]
) -> None:
    for rank in run(pool, "kept", "dp2", folder, 6, root=str(tmp_path), **limits):
        assert rank == expected
    assert not list(tmp_path.glob("*.removed"))


def test_of_saves_that_are_not_persistent_the_newest_is_kept(pool: Pool, tmp_path: Path, folder: str) -> None:
    for rank in run(pool, "newest_only", "one", folder, 4, root=str(tmp_path)):
        assert rank["persistent"] == [[], [2], [2], [2]]
        assert rank["other"] == [[1], [1], [3], [4]]


def test_storage_that_is_not_shared_is_refused(pool: Pool, tmp_path: Path) -> None:
    for message in pool.run(f"{HERE}:not_shared", 2, root=str(tmp_path)):
        assert "not the same folder on all nodes" in message
        assert "rank 1" in message


def test_ranks_that_find_unlike_saves_take_the_first_ones(pool: Pool, tmp_path: Path) -> None:
    """While another run saves in the folder that --load names."""
    (tmp_path / "iter_0000003").mkdir()
    found = pool.run(f"{HERE}:agreed", 2, kinds=["checkpoint"] * 2, iterations=[3, 4], root=str(tmp_path))
    assert found == 2 * [Origin("checkpoint", tmp_path, 3)]


@pytest.mark.parametrize("kinds", [("checkpoint", "checkpoint"), ("checkpoint", "random"), ("random", "checkpoint")])
def test_ranks_that_do_not_see_the_same_are_refused(pool: Pool, tmp_path: Path, kinds: tuple[str, str]) -> None:
    for message in pool.run(f"{HERE}:agreed", 2, kinds=kinds, iterations=[3, 3], root=str(tmp_path)):
        assert "is not the same for all ranks" in message
        assert "rank 1 on" in message
