"""A run that is killed while it saves loses nothing: the save before or the new one is there, whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.cases_kill_points import SCENARIOS, Trial
from tests.distributed.pool import Pool
from tests.session_report import commit_count

HERE = "tests.distributed.cases_kill_points"
#: Of all kills of two ranks one test run tries one in so many; make bench tries all.
SHARE = 40
ROUNDS = 12
RICHEST = "same again, half replaced"


def assert_nothing_lost(trials: list[Trial]) -> None:
    assert trials
    assert [(trial.operation, trial.fault) for trial in trials if trial.fault] == []


def test_killed_at_every_operation(pool: Pool, tmp_path: Path) -> None:
    """Writing, publishing, replacing and deleting, in the scenario that has all of them."""
    (trials,) = pool.run(
        f"{HERE}:sweep", 1, process_group=False, folder=str(tmp_path), name=RICHEST, world=1, after=False
    )
    assert_nothing_lost(trials)
    seen = {trial.operation.split()[1] for trial in trials}
    assert seen == {"mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir"}
    # The save before until the new one is visible, and then the new one.
    found = [trial.found for trial in trials]
    assert found == sorted(found)
    assert set(found) == {2, 3}


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in (RICHEST, "random")])
def test_killed_while_a_save_becomes_visible(pool: Pool, tmp_path: Path, name: str) -> None:
    (trials,) = pool.run(
        f"{HERE}:sweep", 1, process_group=False, folder=str(tmp_path), name=name, world=1, after=False, publishing=True
    )
    assert_nothing_lost(trials)
    earlier = len(SCENARIOS[name].before)
    assert {trial.found for trial in trials} == {earlier, earlier + 1}


def test_a_share_of_all_kills_of_two_ranks(pool: Pool, tmp_path: Path) -> None:
    """One rank dies, the other ends with an error within the time-out, and both take the run up again."""
    trials = []
    for number, name in enumerate(SCENARIOS):
        part = (commit_count() + number * 7) % SHARE
        folder = str(tmp_path / str(number))
        (some,) = pool.run(
            f"{HERE}:sweep", 1, process_group=False, folder=folder, name=name, world=2, part=part, of=SHARE
        )
        trials += some
        for trial in some:
            print(f"{name}: {trial.operation}")  # noqa: T201  which ones, if this fails
    assert_nothing_lost(trials)


@pytest.mark.parametrize("world", [1, 2])
def test_killed_again_and_again(pool: Pool, tmp_path: Path, world: int) -> None:
    seed = commit_count()
    (trials,) = pool.run(
        f"{HERE}:chain", 1, process_group=False, folder=str(tmp_path), world=world, seed=seed, rounds=ROUNDS
    )
    assert_nothing_lost(trials)
    assert len(trials) == ROUNDS


# ---------------------------------------------------------------------------------------- other states of a folder

TRACKER = "latest_checkpointed_iteration.txt"
NEWEST = "iter_0000002"


@pytest.fixture(scope="module")
def saves(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saves")
    pool.run(f"{HERE}:save_twice", 2, root=str(root))
    return root


def strangers(root: Path) -> None:
    """Files and folders that are not saves, or not whole ones."""
    for name in ("iter_abc", "iter_0000005", "iter_7", "iter_0000008.tmp", "iter_0000009.removed", "iter_best.tmp"):
        shutil.copytree(root / NEWEST, root / name)
    (root / "iter_0000005" / "metadata.json").unlink()
    (root / "iter_0000006").write_text("a file")
    (root / "notes.txt").write_text("mine")


def without_tracker(root: Path) -> None:
    strangers(root)
    (root / TRACKER).unlink()


def tracker_behind(root: Path) -> None:
    """A run was cut off after the rename and before the tracker."""
    (root / TRACKER).write_text("1")


def empty_tracker(root: Path) -> None:
    (root / TRACKER).write_text("")


def tracker_ahead(root: Path) -> None:
    (root / TRACKER).write_text("3")


def tracker_at_half_a_save(root: Path) -> None:
    (root / NEWEST / "metadata.json").unlink()


def shorter(name: str, cut: float) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        file = root / NEWEST / name
        content = file.read_bytes()
        file.write_bytes(content[: int(cut * len(content))])

    damage.__name__ = f"{name} cut to {cut}"
    return damage


def lacking(name: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / NEWEST / name).unlink()

    damage.__name__ = f"no {name}"
    return damage


FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt")


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (strangers, 2),
        (without_tracker, 2),
        (tracker_behind, 1),
        (empty_tracker, ("does not name an iteration", "--ckpt-step")),
        (tracker_ahead, ("names iteration 3", NEWEST, "--ckpt-step")),
        (tracker_at_half_a_save, (NEWEST, "not a complete", "metadata.json")),
        *((lacking(name), (f"{NEWEST}/{name}", "--ckpt-step")) for name in FILES),
        *((shorter(name, cut), (f"{NEWEST}/{name}", "--ckpt-step")) for name in FILES for cut in (0, 0.5, 0.99)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_else_may_lie_there(
    pool: Pool, saves: Path, tmp_path: Path, damage: Callable[[Path], None], found: int | tuple[str, ...]
) -> None:
    """The right save, or one error with a remedy on every rank; and the save before can be had."""
    root = tmp_path / "saves"
    shutil.copytree(saves, root)
    damage(root)
    for answer in pool.run(f"{HERE}:take_up", 2, root=str(root)):
        if isinstance(found, int):
            assert answer == found
        else:
            assert isinstance(answer, str), "it loaded"
            assert [word for word in found if word not in answer] == [], answer
    assert pool.run(f"{HERE}:take_up", 2, root=str(root), step=1) == [1, 1]


def test_a_save_leaves_strangers_alone(pool: Pool, saves: Path, tmp_path: Path) -> None:
    root = tmp_path / "saves"
    shutil.copytree(saves, root)
    strangers(root)
    before = {path.name for path in root.iterdir()}
    pool.run(f"{HERE}:save_and_retire", 2, root=str(root), iteration=3, limit=1)
    # Only what earlier saves have left goes, and the saves that need not be kept.
    gone = {"iter_0000001", NEWEST, "iter_0000008.tmp", "iter_0000009.removed"}
    assert {path.name for path in root.iterdir()} == before - gone | {"iter_0000003"}
    assert pool.run(f"{HERE}:take_up", 2, root=str(root)) == [3, 3]
