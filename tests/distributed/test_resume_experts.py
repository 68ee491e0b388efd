"""Runs with experts go on where they stopped, in the same and in other layouts, and are exported whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import TINY, launch, read_rows, succeed, write_corpus
from tests.distributed.pool import Pool
from tests.distributed.test_resume import assert_same_save, computed
from tests.fixtures import hf_folder
from tests.parity.reference import relative

Flags = dict[str, Any]
STEPS, STOP = 4, 2
NAMES = ("load_balancing_loss", "global_load_balancing_loss", "z_loss")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def flags(corpus: str) -> Flags:
    more: Flags = {"--train-iters": STEPS, "--lr-decay-style": "cosine", "--lr-warmup-iters": 1}
    more |= {"--moe-router-load-balancing-type": ("aux_loss", "global_aux_loss"), "--moe-z-loss-coeff": 0.01}
    more |= {"--moe-aux-loss-coeff": (0.01, 0.02), "--moe-per-layer-logging": True}
    return {**TINY, **more, "--data-path": corpus, "--load": hf_folder("mixtral")}


def resumed(flags: Flags, saves: Path) -> Flags:
    """The command line that goes on from ``saves``."""
    return flags | {"--load": saves, "--hf-config": flags["--load"]}


@pytest.mark.parametrize("layout", ["dp2+ep2+alltoall", "tp2+sp+dp2+ep2+dist", "pp2+dp2+ep2+dist"])
def test_stopped_is_as_never_stopped(pool: Pool, flags: Flags, tmp_path: Path, layout: str) -> None:
    flags |= {"--attention-dropout": 0.1, "--hidden-dropout": 0.1, "--moe-input-jitter-eps": 0.1}
    straight, saves = tmp_path / "straight", tmp_path / "saves"
    results = succeed(pool, flags | {"--save": straight, "--metrics-file": tmp_path / "straight.jsonl"}, layout)
    succeed(pool, flags | {"--save": saves, "--exit-interval": STOP}, layout)
    succeed(pool, resumed(flags, saves) | {"--save": saves, "--metrics-file": tmp_path / "rest.jsonl"}, layout)
    rows = computed(tmp_path / "straight.jsonl")
    assert computed(tmp_path / "rest.jsonl") == rows[STOP:]
    assert all(row[name] > 0 and f"| {name}: {row[name]:.6E} |" in results[-1]["out"] for row in rows for name in NAMES)
    assert [len(row["experts"]["tokens"]) for row in rows] == [4] * STEPS
    assert_same_save(straight / f"iter_{STEPS:07d}", saves / f"iter_{STEPS:07d}")


@pytest.mark.parametrize("form", ["", "+dist"])
def test_other_layouts_go_on(pool: Pool, flags: Flags, tmp_path: Path, form: str) -> None:
    """With other numbers of expert-parallel ranks; one rank, or a stage without experts, has one optimizer for all."""
    # Losses that balance depend on the micro-batch; layouts do not agree on those of a whole batch.
    flags |= {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 0.01}
    flags |= {"--load": hf_folder("q3moelate")}
    metrics = tmp_path / "straight.jsonl"
    succeed(pool, flags | {"--metrics-file": metrics}, f"dp2+ep2{form}")
    wanted = read_rows(metrics)[STOP:]
    apart, joined = tmp_path / "apart", tmp_path / "joined"
    succeed(pool, flags | {"--save": apart, "--exit-interval": STOP}, f"pp2+dp2+ep2{form}")
    succeed(pool, flags | {"--save": joined, "--exit-interval": STOP}, f"dp2{form}")
    for saves, layout in ((apart, "one"), (apart, "dp4+ep4"), (apart, "tp2+sp+dp2+ep4+etp1"), (joined, "dp2+ep2")):
        metrics = tmp_path / f"{saves.name}-{layout}.jsonl"
        succeed(pool, resumed(flags, saves) | {"--metrics-file": metrics}, layout + form)
        rows = read_rows(metrics)
        assert [row["iteration"] for row in rows] == [row["iteration"] for row in wanted], layout
        for row, expected in zip(rows, wanted, strict=True):
            assert relative(row["lm_loss"], expected["lm_loss"]) <= 1e-5, layout
            assert relative(row["grad_norm"], expected["grad_norm"]) <= 1e-4, layout
            assert row["learning_rate"] == expected["learning_rate"]


def test_a_save_on_the_way_is_of_its_layout(pool: Pool, flags: Flags, tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    flags |= {"--save-interval": STOP, "--exit-interval": STOP + 1}
    succeed(pool, flags | {"--save": saves}, "dp2+ep2+dist")
    for result in launch(pool, resumed(flags, saves) | {"--ckpt-step": STOP}, "dp2+dist"):
        assert result["code"] == 1
        assert "loads only at the layout that saved it" in result["err"]
        assert "'expert_model_parallel_size': 2" in result["err"]


@pytest.mark.parametrize("layout", ["dp2+ep2", "tp2+sp+dp2+ep4+etp1+dist"])
def test_the_export_is_the_whole_model(pool: Pool, flags: Flags, tmp_path: Path, layout: str) -> None:
    flags |= {"--train-iters": 0, "--lr-warmup-iters": None, "--save-hf": tmp_path / "hf"}
    succeed(pool, flags, layout)
    found = {name: one for file in (tmp_path / "hf").glob("*.safetensors") for name, one in load_file(file).items()}
    wanted = load_file(hf_folder("mixtral") / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert [name for name, one in wanted.items() if not torch.equal(found[name], one)] == []
