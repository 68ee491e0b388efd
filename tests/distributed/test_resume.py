"""A run that is stopped and taken up again is the run that was never stopped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.checkpoint.folders import complete_iterations
from mindspeed_llm.checkpoint.trusted import read_common
from tests.distributed.launch import GLOBAL_BATCH, SEQUENCE, TINY, launch, read_rows, succeed, write_corpus
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.parity.reference import relative

Flags = dict[str, Any]

DROPOUT: Flags = {"--attention-dropout": 0.1, "--hidden-dropout": 0.1}
#: Measured, not computed.
MEASURED = ("elapsed_ms", "tokens_per_s", "tflops_per_rank", "mfu", "max_memory_bytes")
STEPS = 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """So small that a run of 8 steps of 4 is in its third epoch."""
    prefix = write_corpus(tmp_path_factory.mktemp("corpus"), documents=32)
    tokens = Path(f"{prefix}.bin").stat().st_size // 2
    assert 2 * 0.7 * tokens < (STEPS - 2) * GLOBAL_BATCH * SEQUENCE
    return prefix


@pytest.fixture
def flags(corpus: str) -> Flags:
    more: Flags = {"--train-iters": STEPS, "--lr-decay-style": "cosine", "--lr-warmup-iters": 2}
    return {**TINY, **more, "--data-path": corpus, "--load": hf_folder("q25")}


def resumed(flags: Flags, saves: Path, **more: Any) -> Flags:
    """The command line that goes on from ``saves``."""
    return flags | {"--load": saves, "--hf-config": hf_folder("q25"), **more}


def computed(metrics: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [{name: v for name, v in row.items() if name not in MEASURED} for row in read_rows(metrics, kind)]


def logged(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the last rank about steps and evaluations, without times."""
    lines = [line for line in results[-1]["out"].splitlines() if " | " in line]
    return [re.sub(r"^ *\[[^]]*\]| elapsed time[^|]*\||throughput[^|]*\|", "", line) for line in lines]


def assert_same_save(one: Path, other: Path) -> None:
    """Weights, optimizer and generators bit for bit; counters and schedule."""
    shards = sorted(path.name for path in one.glob("*.distcp"))
    assert shards
    assert shards == sorted(path.name for path in other.glob("*.distcp"))
    assert [name for name in shards if (one / name).read_bytes() != (other / name).read_bytes()] == []
    common, others = read_common(one / "common.pt"), read_common(other / "common.pt")
    # --exit-interval is part of it.
    assert common.pop("config").keys() == others.pop("config").keys()
    assert same(common, others)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


# ------------------------------------------------------------------------------------------------------------- exact

OVERFLOWS: Flags = {"--fp16": True, "--initial-loss-scale": 2.0**18, "--hysteresis": 1, "--loss-scale-window": 4}
RAMP_UP: Flags = {"--train-iters": None, "--lr-warmup-iters": None, "--lr-warmup-samples": 6}
RAMP_UP |= {"--train-samples": 28, "--rampup-batch-size": (2, 2, 8)}
#: Layout, flags, and per part of the stopped run its own flags: the first is stopped, then it is taken up twice.
COURSES: dict[str, tuple[str, Flags, list[Flags]]] = {
    "batch ramp-up": ("one", RAMP_UP, [{"--exit-interval": 3}, {"--exit-interval": 3}, {}]),
    "overflows, saves in the background": (
        "dp2+dist+reduce+gather",
        OVERFLOWS | {"--async-save": True, "--save-interval": 2},
        # From what was written in the background, not from the save at the stop.
        [{"--exit-interval": 5}, {"--exit-interval": 7, "--ckpt-step": 4}, {"--ckpt-step": 6}],
    ),
    "interleaved stages": (
        "pp2+vpp2+dp2+dist",
        {"--dist-ckpt-optim-fully-reshardable": True},
        [{"--exit-interval": 3}, {"--exit-interval": 3}, {}],
    ),
}


@pytest.mark.parametrize("course", COURSES)
def test_stopped_twice_is_as_never_stopped(pool: Pool, flags: Flags, tmp_path: Path, course: str) -> None:
    layout, more, parts = COURSES[course]
    flags |= DROPOUT | {"--eval-interval": 2, "--eval-iters": 1, "--split": "70,30,0"} | more
    straight, saves = tmp_path / "straight", tmp_path / "saves"
    wanted = succeed(pool, flags | {"--save": straight, "--metrics-file": tmp_path / "straight.jsonl"}, layout)
    steps, evaluations = (computed(tmp_path / "straight.jsonl", kind) for kind in ("train", "valid"))
    lines = logged(wanted)
    assert len(lines) >= len(steps)
    at = 0
    for number, part in enumerate(parts):
        metrics = tmp_path / f"{number}.jsonl"
        own = {"--save": saves, "--metrics-file": metrics, "--num-workers": (0, 2, 1)[number], **part}
        results = succeed(pool, (resumed(flags, saves) if number else flags) | own, layout)
        rows = computed(metrics)
        start = part.get("--ckpt-step", at)
        at = rows[-1]["iteration"]
        assert rows == steps[start:at]
        assert computed(metrics, "valid") == [row for row in evaluations if start < row["iteration"] <= at]
        assert [line for line in logged(results) if line not in lines] == []
        assert number == len(parts) - 1 or at < len(steps)
    assert at == len(steps)
    last = f"iter_{len(steps):07d}"
    assert_same_save(straight / last, saves / last)
    if "--fp16" in flags:
        # Halved by an overflow before the stop; doubled after it, by a count of steps that began before it.
        assert [row["skipped"] for row in steps[:5]] == [1, 0, 0, 0, 0]
        assert [row["loss_scale"] for row in steps[:6]] == [2.0**18, *[2.0**17] * 4, 2.0**18]


# ------------------------------------------------------------------------------------------------------ other layouts


def test_other_layouts_go_on(pool: Pool, flags: Flags, tmp_path: Path) -> None:
    """From the save at a stop in any layout, from one on the way with other numbers of data-parallel ranks; each goes
    on as one process does that is not stopped."""
    flags |= {"--train-iters": 5}
    saves, metrics = tmp_path / "saves", tmp_path / "straight.jsonl"
    succeed(pool, flags | {"--metrics-file": metrics}, "one+dist")
    succeed(pool, flags | {"--save": saves, "--save-interval": 2, "--exit-interval": 3}, "tp2+dp2+dist")
    assert complete_iterations(saves) == [2, 3]
    wanted = read_rows(metrics)
    for step, layout in ((3, "one+dist"), (3, "pp2+vpp2+dp2+dist"), (3, "tp4+sp+dist"), (2, "tp2+dist")):
        metrics = tmp_path / f"{layout}.jsonl"
        succeed(pool, resumed(flags, saves) | {"--ckpt-step": step, "--metrics-file": metrics}, layout)
        rows = read_rows(metrics)
        assert [row["iteration"] for row in rows] == list(range(step + 1, 6)), layout
        for row, expected in zip(rows, wanted[step:], strict=True):
            assert relative(row["lm_loss"], expected["lm_loss"]) <= 1e-5, layout
            assert relative(row["grad_norm"], expected["grad_norm"]) <= 1e-4, layout
            assert row["learning_rate"] == expected["learning_rate"]
            assert row["consumed_samples"] == expected["consumed_samples"]
    for layout in ("dp2+dist", "pp2+dist"):
        for result in launch(pool, resumed(flags, saves) | {"--ckpt-step": 2}, layout):
            assert result["code"] == 1
            assert "loads only at the layout that saved it" in result["err"]
            assert "'tensor_model_parallel_size': 2" in result["err"]
            assert "Traceback" not in result["err"]
            assert not result["batches"]


# -------------------------------------------------------------------------------------------- what is left out of it


def test_parts_of_a_run(pool: Pool, flags: Flags, tmp_path: Path) -> None:
    """--no-load-rng, --no-load-optim, --finetune and --no-save-optim."""
    flags |= DROPOUT | {"--train-iters": 4, "--lr-decay-style": "linear", "--lr-warmup-iters": 1}
    saves, bare = tmp_path / "saves", tmp_path / "bare"

    def rows(more: Flags, name: str) -> list[dict[str, Any]]:
        succeed(pool, flags | more | {"--metrics-file": tmp_path / f"{name}.jsonl"})
        return computed(tmp_path / f"{name}.jsonl")

    straight = rows({}, "straight")
    rows({"--save": saves, "--exit-interval": 2}, "saves")
    rows({"--save": bare, "--exit-interval": 2, "--no-save-optim": True}, "bare")
    told = ("iteration", "consumed_samples", "learning_rate")

    def shown(rows: list[dict[str, Any]], *names: str) -> list[list[Any]]:
        return [[row[name] for name in names] for row in rows]

    # Other elements are dropped; the rest goes on.
    other = rows(resumed({}, saves) | {"--no-load-rng": True}, "no-load-rng")
    assert shown(other, *told) == shown(straight[2:], *told)
    assert other[0]["lm_loss"] != straight[2]["lm_loss"]
    assert relative(other[0]["lm_loss"], straight[2]["lm_loss"]) <= 0.05
    # Weights, generators and data go on; Adam and the schedule start anew.
    fresh = rows(resumed({}, saves) | {"--no-load-optim": True}, "no-load-optim")
    assert shown(fresh, "iteration", "consumed_samples") == shown(straight[2:], "iteration", "consumed_samples")
    assert shown(fresh, "learning_rate") == shown(straight[:2], "learning_rate")
    assert shown(fresh[:1], "lm_loss", "grad_norm") == shown(straight[2:3], "lm_loss", "grad_norm")
    # The weights alone.
    tuned = rows(resumed({}, saves) | {"--finetune": True}, "finetune")
    assert shown(tuned, *told) == shown(straight, *told)
    assert tuned[0]["lm_loss"] < straight[0]["lm_loss"]
    # A save without optimizer is one that --no-load-optim takes up, and nothing else does.
    for result in launch(pool, flags | resumed({}, bare)):
        assert result["code"] == 1
        assert "holds no optimizer state" in result["err"]
        assert "--no-load-optim" in result["err"]
        assert "Traceback" not in result["err"]
    assert rows(resumed({}, bare) | {"--no-load-optim": True}, "bare-resumed") == fresh
    whole, parts = (sum(path.stat().st_size for path in root.rglob("*.distcp")) for root in (saves, bare))
    assert parts < whole / 2


@pytest.mark.parametrize("layout", ["one", "dp2+dist"])
def test_whose_schedule_it_is(pool: Pool, flags: Flags, tmp_path: Path, layout: str) -> None:
    saves = tmp_path / "saves"
    flags |= {"--train-iters": 4, "--lr-decay-style": "linear", "--lr-warmup-iters": 1, "--min-lr": 1e-4}

    def rates(more: Flags, name: str) -> list[float]:
        succeed(pool, flags | more | {"--metrics-file": tmp_path / f"{name}.jsonl"}, layout)
        return [row["learning_rate"] for row in read_rows(tmp_path / f"{name}.jsonl")]

    straight = rates({}, "straight")
    rates({"--save": saves, "--exit-interval": 2}, "saves")
    # Peak and end are other ones now.
    other = {"--lr": 5e-3, "--min-lr": 2e-3}
    risen = rates(other, "risen")
    assert risen[2] > 2 * straight[2]
    assert rates(resumed(other, saves) | {"--use-checkpoint-opt-param-scheduler": True}, "theirs") == straight[2:]
    assert rates(resumed(other, saves) | {"--override-opt-param-scheduler": True}, "ours") == risen[2:]
