"""Mistakes that a first user made, each one clear error before a model is built."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_llm.checkpoint.origin import find_origin
from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.data.batches import _outlive_sigterm
from mindspeed_llm.data.manifest import Manifest, check_tokenizer, write_manifest
from mindspeed_llm.data.tokenizer import NullTokenizer
from mindspeed_llm.device import Device
from mindspeed_llm.errors import CheckpointError, ConfigError, DataError
from mindspeed_llm.models.registry import family_layer
from mindspeed_llm.training.initialize import backend_of
from mindspeed_llm.training.save_load import _require_architecture, _require_number_format
from mindspeed_llm.training.weights import check_outputs
from tests.fixtures import hf_folder

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 328, "max_position_embeddings": 64}


def saved(**changes: Any) -> dict[str, Any]:
    """What a checkpoint records of its model."""
    cfg = from_values({**MODEL, **changes})
    return {"config": {name: vars(getattr(cfg, name)) for name in ("model", "transformer")}}


@pytest.mark.parametrize("change", [{"rotary_base": 777.0}, {"add_bias_linear": False}, {"num_layers": 4}], ids=str)
def test_a_save_of_another_model_is_refused(change: dict[str, Any]) -> None:
    run: Any = SimpleNamespace(cfg=from_values(MODEL))
    _require_architecture(run, Path("save"), saved())
    with pytest.raises(CheckpointError, match=f"(?s)another model.*{next(iter(change))}"):
        _require_architecture(run, Path("save"), saved(**change))


@pytest.mark.parametrize(
    ("flag", "field"),
    [("--save", "save"), ("--metrics-file", "metrics_file"), ("--tensorboard-dir", "tensorboard_dir")],
)
def test_an_output_below_a_file_is_refused(tmp_path: Path, flag: str, field: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"{flag}: the folder cannot be written to"):
        check_outputs(from_values({**MODEL, field: str(tmp_path / "file" / "below" / "it")}))
    check_outputs(from_values({**MODEL, field: str(tmp_path / "new" / "it")}))


def test_metrics_go_into_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--metrics-file is a folder"):
        check_outputs(from_values({**MODEL, "metrics_file": str(tmp_path)}))


def test_saving_into_the_folder_that_is_loaded_is_refused() -> None:
    folder = str(hf_folder("q25"))
    with pytest.raises(CheckpointError, match="is the Hugging Face folder that --load reads"):
        find_origin(from_values({**MODEL, "load": folder, "save": folder}))


def test_a_missing_folder_is_named_when_nothing_else_says_what_the_model_is(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    with pytest.raises(Exception, match="nowhere"):
        family_layer({"load": missing})
    assert family_layer({"load": missing, "num_layers": 2}) is None


def test_exports_keep_the_dtype_of_the_folder_unless_the_run_has_another() -> None:
    folder = str(hf_folder("q25"))
    layer = family_layer({"load": folder})
    assert layer is not None
    assert layer.values["params_dtype"] == "fp32"
    layer = family_layer({"load": folder, "bf16": True})
    assert layer is not None
    assert "params_dtype" not in layer.values


def test_a_null_tokenizer_may_not_look_for_ends_that_are_another_id(tmp_path: Path) -> None:
    made = Manifest("t", "text", "folder", "h", 328, 256, True, "uint16", documents=1, tokens=1, bad_rows=0, sources=())
    write_manifest(tmp_path / "data", made)
    check_tokenizer(tmp_path / "data", NullTokenizer(327))
    with pytest.raises(DataError, match=r"(?s)another id.*327.*256"):
        check_tokenizer(tmp_path / "data", NullTokenizer(327), needs_eod=True)


def test_data_workers_outlive_a_schedulers_sigterm() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        _outlive_sigterm(0)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_hccl_is_for_npus() -> None:
    cpu = Device("cpu", "gloo", 0, None)
    with pytest.raises(ConfigError, match="HCCL is the library of Ascend NPUs; this is cpu"):
        backend_of(from_values({**MODEL, "distributed_backend": "hccl"}), cpu)
    asked = {"hccl": Device("npu", "hccl", 0, None), "nccl": cpu, "gloo": Device("cuda", "nccl", 0, None)}
    got = [backend_of(from_values({**MODEL, "distributed_backend": name}), device) for name, device in asked.items()]
    assert got == ["hccl", "gloo", "gloo"]


def test_the_optimizer_state_of_another_number_format_is_refused() -> None:
    run: Any = SimpleNamespace(cfg=from_values({**MODEL, "bf16": True}))
    _require_number_format(run, Path("save"), saved(bf16=True))
    with pytest.raises(CheckpointError, match=r"(?s)another number format.*got: bf16.*allowed: fp32.*--no-load-optim"):
        _require_number_format(run, Path("save"), saved())
    with pytest.raises(CheckpointError, match=r"(?s)got: bf16.*allowed: fp16.*fix: --fp16"):
        _require_number_format(run, Path("save"), saved(fp16=True))


def test_a_file_in_place_of_a_folder_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="got: a file"):
        find_origin(from_values({**MODEL, "load": str(tmp_path / "file")}))


@pytest.mark.parametrize("content", [b"\xff\xfe4\0", 5000 * b"9", "\u0664".encode(), b"-4", b"", None])
def test_a_tracker_that_is_no_number_is_named(tmp_path: Path, content: bytes | None) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    if content is None:
        tracker.mkdir()
    else:
        tracker.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not name an iteration") as error:
        find_origin(from_values({**MODEL, "load": str(tmp_path)}))
    assert len(str(error.value)) < 1000


def test_a_save_of_other_software_is_called_so() -> None:
    run: Any = SimpleNamespace(cfg=from_values(MODEL))
    with pytest.raises(CheckpointError, match="other software"):
        _require_architecture(run, Path("save"), {"args": {}, "iteration": 3})


def test_a_tracker_whose_save_is_gone_is_named_with_it(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration.txt names iteration 7.*iter_0000007"):
        find_origin(from_values({**MODEL, "load": str(tmp_path)}))
