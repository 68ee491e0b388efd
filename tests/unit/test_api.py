"""The public functions: their names do not change unseen, and they work on live sharded models."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mindspeed_llm import api
from mindspeed_llm.errors import CheckpointError, ConfigError
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder

SNAPSHOT = Path(__file__).with_name("api.txt")
CASES = "tests.distributed.cases_api"


def test_names_and_signatures_are_those_of_the_snapshot() -> None:
    lines = [
        f"{name}{inspect.signature(value)}" if inspect.isfunction(value) else name
        for name, value in ((name, getattr(api, name)) for name in api.__all__)
    ]
    assert "\n".join(lines) + "\n" == SNAPSHOT.read_text(), f"mend {SNAPSHOT.name}, with a line in CHANGELOG.md"


def test_everything_public_is_documented() -> None:
    assert all(getattr(api, name).__doc__ for name in api.__all__)


@pytest.mark.parametrize("layout", ["one", "tp2+sp+pp2", "pp2+vpp2", "dp2+dist+reduce+gather"])
def test_weights_stream_from_a_live_model_before_and_after_training(pool: Pool, tmp_path: Path, layout: str) -> None:
    """What streams after a step is what transformers loads from the export, and what one process streams."""
    folder = hf_folder("q25tied")
    world = {"one": 1, "tp2+sp+pp2": 4}.get(layout, 2)
    replicas = 2 if "dp2" in layout else 1
    results: list[Any] = pool.run(f"{CASES}:stream", world, folder=folder, layout=layout, out=tmp_path / "out")
    before, after = results[0]
    assert [any(result) for result in results].count(True) == replicas, (
        "the first rank of each replica gets the weights"
    )
    original = load_file(folder / "model.safetensors")
    assert before.keys() == original.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in original.items())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert all(torch.equal(after[name], exported[name]) for name in original)
    ((_, alone),) = pool.run(f"{CASES}:stream", 1, folder=folder, layout="one", out=tmp_path / "alone")
    for name, tensor in alone.items():
        assert not torch.equal(tensor, original[name])
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=5e-5)  # of two steps of 1e-3


def test_runs_in_one_process_leave_no_threads_behind(pool: Pool) -> None:
    for layout in ("dp2+dist+reduce+gather", "pp2+vpp2"):
        target = f"{CASES}:threads_after_runs"
        results = pool.run(target, 2, process_group=False, folder=hf_folder("q25"), layout=layout, runs=4)
        # The first run starts threads that stay: torch's own.
        assert all(max(counts) <= counts[0] for counts in results), results


def test_flags_that_contradict_the_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradicts the weights"):
        api.load_hf(hf_folder("q25"), num_layers=3)
    with pytest.raises(CheckpointError, match="not a folder"):
        api.load_hf("/nowhere")


def test_train_refuses_what_the_command_line_refuses() -> None:
    with pytest.raises(ConfigError) as told:
        api.train({"hf-config": str(hf_folder("q25")), "micro_batch_size": 1, "no-such-flag": 3})
    assert "no-such-flag" in str(told.value)
    with pytest.raises(ConfigError, match="--lr"):
        api.train({"hf-config": str(hf_folder("q25")), "micro_batch_size": 1, "seq_length": 8, "train-iters": 1})


def test_train_is_a_whole_run(pool: Pool, tmp_path: Path) -> None:
    pool.run(f"{CASES}:train", 2, folder=hf_folder("q25"), out=tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
