"""Poisoned files of every kind run nothing, and what saves really hold is read."""

from __future__ import annotations

import argparse
import builtins
import enum
import json
import os
import pickle
import random
import shutil
import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from mindspeed_llm.checkpoint import hf_io, trusted
from mindspeed_llm.checkpoint.convert.megatron_saves import is_megatron_save
from mindspeed_llm.checkpoint.hf_io import read_config
from mindspeed_llm.checkpoint.trusted import (
    Inert,
    read_common,
    read_legacy,
    read_metadata,
    read_object,
    read_tensors,
    read_with_stand_ins,
)
from mindspeed_llm.data.tokenizer.build import load_tokenizer
from mindspeed_llm.errors import CheckpointError, ConversionError, DataError
from mindspeed_llm.models.registry import family_for
from tests.fixtures import hf_folder, tokenizer_folder


class Poison:
    """Calls ``function`` when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


#: What a file could run, and how errors call it. Each leaves a file "ran" in the current folder.
POISONS = {
    "posix.system": Poison(os.system, "touch ran"),
    "eval": Poison(builtins.eval, "open('ran', 'w')"),
    "io.open": Poison(open, "ran", "w"),
    "pathlib.Path.touch": Poison(Path.touch, Path("ran")),
}


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = set(torch.serialization.get_safe_globals())
    yield
    assert not (tmp_path / "ran").exists()
    # Parts of torch add theirs when they are first imported.
    after = set(torch.serialization.get_safe_globals())
    assert before <= after
    assert not [entry for entry in after if isinstance(entry, tuple)]


def index_of(*names: object) -> Metadata:
    """The index of a save of one object in each of the files ``names``."""
    entries = {MetadataIndex(f"object{i}"): filesystem._StorageInfo(name, 0, 9) for i, name in enumerate(names)}  # pyright: ignore[reportArgumentType]
    return Metadata({key.fqn: BytesStorageMetadata() for key in entries}, storage_data=entries)


def error_of(read: Callable[[Path], object], path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert path.name in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- poisoned files


def test_the_poisons_work(tmp_path: Path) -> None:
    for poison in POISONS.values():
        pickle.loads(pickle.dumps(poison))
        (tmp_path / "ran").unlink()


@pytest.mark.parametrize("name", POISONS)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_poisoned_index_runs_nothing(tmp_path: Path, name: str, protocol: int) -> None:
    path = tmp_path / ".metadata"
    for poisoned in (POISONS[name], index_of(POISONS[name]), {"a": [POISONS[name]]}):
        path.write_bytes(pickle.dumps(poisoned, protocol))
        text = error_of(read_metadata, path)
        assert "without running code" in text
        # Before protocol 4, pathlib.Path.touch is getattr(pathlib.Path, "touch").
        assert name.split(".")[0] in text or "getattr" in text


@pytest.mark.parametrize("name", POISONS)
@pytest.mark.parametrize("read", [read_common, read_tensors, read_legacy, lambda path: read_object(path, path)])
def test_a_poisoned_file_of_torch_runs_nothing(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    path = tmp_path / "model_optim_rng.pt"
    for poisoned in (POISONS[name], {"model": {"weight": torch.ones(2), "more": POISONS[name]}}):
        torch.save(poisoned, path)
        text = error_of(read, path)
        assert "without running code" in text
        # pathlib.Path.touch is written as getattr(pathlib.Path, "touch").
        assert name in text or "getattr" in text


def test_a_variable_of_the_environment_does_not_open_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"a": POISONS["posix.system"]}, tmp_path / "common.pt")
    for read in (read_common, read_tensors, read_legacy):
        assert "posix.system" in error_of(read, tmp_path / "common.pt")


def test_what_others_allow_is_not_allowed_here(tmp_path: Path) -> None:
    torch.save({"a": POISONS["eval"]}, tmp_path / "common.pt")
    with torch.serialization.safe_globals([eval]):
        assert "eval" in error_of(read_common, tmp_path / "common.pt")


def test_pytorch_model_bin_and_its_shards_run_nothing(tmp_path: Path) -> None:
    torch.save({"model.norm.weight": POISONS["posix.system"]}, tmp_path / "shard.bin")
    (tmp_path / hf_io.BIN_INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "shard.bin"}}))
    with ExitStack() as stack, pytest.raises(CheckpointError, match=r"shard\.bin(.|\n)*posix\.system"):
        hf_io.open_tensors(tmp_path, stack)


def test_an_index_cannot_change_a_class(tmp_path: Path) -> None:
    # GLOBAL of the class, then BUILD with a slot state, which sets attributes of whatever it is given.
    poisoned = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x06\x00\x00\x00extrasK\x01s\x86b."
    (tmp_path / ".metadata").write_bytes(poisoned)
    try:
        assert "changes a class" in error_of(read_metadata, tmp_path / ".metadata")
    finally:
        del Metadata.extras  # pyright: ignore[reportAttributeAccessIssue]


def test_getattr_takes_members_of_enumerations_only(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    header = b"\x80\x02cbuiltins\ngetattr\n"
    path.write_bytes(header + b"ctorch.distributed.checkpoint.planner\nWriteItemType\nX\x05\x00\x00\x00SHARD\x86R.")
    assert "got: WriteItemType" in error_of(read_metadata, path)
    path.write_bytes(header + b"ctorch\nSize\nX\x05\x00\x00\x00count\x86R.")
    assert "Can only take members of an enumeration" in error_of(read_metadata, path)


@pytest.mark.parametrize("known", [True, False], ids=["a known model", "an unknown model"])
def test_code_beside_a_model_is_not_run(tmp_path: Path, known: bool) -> None:
    """auto_map, in both files where it stands, names code that transformers would run if it were trusted."""
    folder = tmp_path / "model"
    shutil.copytree(hf_folder("q25"), folder)
    shutil.copytree(tokenizer_folder(), folder, dirs_exist_ok=True)
    (folder / "code.py").write_text("open('ran', 'w')\nclass Config: ...\nclass Tokenizer: ...\n")
    config = {**read_config(folder), "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    settings: dict[str, Any] = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}
    if not known:
        config |= {"architectures": ["UnknownForCausalLM"], "model_type": "unknown"}
        (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if known:
        assert family_for(read_config(folder)).name == "qwen2"
        assert load_tokenizer(folder).encode("abc")
        with ExitStack() as stack:
            assert hf_io.open_tensors(folder, stack).tensors
    else:
        with pytest.raises(ConversionError, match="UnknownForCausalLM"):
            family_for(read_config(folder))
        with pytest.raises(DataError, match="model"):
            load_tokenizer(folder)


# ----------------------------------------------------------------------------------------------- files that lie outside


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/a", "a/b", "..", ".", "", "a\0b", 7, ["a"]])
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, name: object) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(index_of("__0_0.distcp", name)))
    error_of(read_metadata, path)
    with pytest.raises(CheckpointError, match="not a file name beside the index"):
        trusted.file_beside(path, name)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.distcp").touch()
    save = tmp_path / "save"
    save.mkdir()
    (save / "own.distcp").touch()
    (save / "inside.distcp").symlink_to("own.distcp")
    (save / "outside.distcp").symlink_to("../elsewhere.distcp")
    (save / "loop.distcp").symlink_to("loop.distcp")
    linked = tmp_path / "linked"
    linked.symlink_to(save)
    for folder in (save, linked):
        (folder / ".metadata").write_bytes(pickle.dumps(index_of("own.distcp", "inside.distcp")))
        assert len(read_metadata(folder / ".metadata").storage_data) == 2
        for name, message in (("outside", "leads out of its folder"), ("loop", "cannot be followed")):
            (folder / ".metadata").write_bytes(pickle.dumps(index_of("own.distcp", f"{name}.distcp")))
            with pytest.raises(CheckpointError, match=message):
                read_metadata(folder / ".metadata")


def test_the_cache_of_huggingface_hub_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    revision, blobs = tmp_path / "models--a--b/snapshots/1234", tmp_path / "models--a--b/blobs"
    revision.mkdir(parents=True)
    blobs.mkdir()
    save_file({"w": torch.ones(2)}, blobs / "feed")
    (revision / "model-00001-of-00001.safetensors").symlink_to("../../blobs/feed")
    (revision / hf_io.SAFE_INDEX).write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    with ExitStack() as stack:
        assert hf_io.open_tensors(revision, stack).read("w").tolist() == [1, 1]
    (blobs / "feed").rename(tmp_path / "feed")
    (revision / "model-00001-of-00001.safetensors").unlink()
    (revision / "model-00001-of-00001.safetensors").symlink_to(tmp_path / "feed")
    with ExitStack() as stack, pytest.raises(CheckpointError, match="leads out of its folder"):
        hf_io.open_tensors(revision, stack)


# ----------------------------------------------------------------------------------------------- what is read as it was


@pytest.mark.parametrize("size", [0, 1, 40, 200])
def test_cut_files_are_damaged(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(pickle.dumps(index_of("__0_0.distcp"))[:size])
    assert "is damaged" in error_of(read_metadata, path)
    torch.save({"a": torch.ones(9)}, path)
    os.truncate(path, size)
    for read in (read_common, read_tensors, read_legacy):
        assert "is damaged" in error_of(read, path)
    for read in (read_metadata, read_common, read_tensors, read_legacy):
        assert "FileNotFoundError" in error_of(read, tmp_path / "nowhere")


@pytest.mark.parametrize("content", [7, [1], None])
def test_something_else_is_named(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x")
    for read in (read_common, read_tensors, read_legacy):
        assert "not a mapping" in error_of(read, tmp_path / "x")
    (tmp_path / "x").write_bytes(pickle.dumps(content))
    assert "not the index" in error_of(read_metadata, tmp_path / "x")


def test_states_of_generators_come_back(tmp_path: Path) -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "scalars": (np.float32(1.5), np.int64(3), np.bool_(True)),
    }
    torch.save(state, tmp_path / "x")
    found = read_object(tmp_path / "x", "x")
    assert found["python"] == state["python"]
    assert found["scalars"] == state["scalars"]
    assert torch.equal(found["torch"], state["torch"])
    np.testing.assert_equal(found["numpy"], state["numpy"])


def test_indices_come_back(tmp_path: Path) -> None:
    index = index_of("__0_0.distcp", "__1_0.distcp")
    index.all_local_plans = [SavePlan([])]  # pyright: ignore[reportAttributeAccessIssue]  as megatron-core does
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    found = read_metadata(tmp_path / ".metadata")
    assert (found, vars(found)["all_local_plans"]) == (index, [SavePlan([])])


def put(patch: pytest.MonkeyPatch, module: str, name: str, value: Any) -> Any:
    """Makes ``value`` the ``name`` of a made-up module for as long as ``patch`` lasts: it is gone when it is read."""
    packages = module.split(".")
    for end in range(1, len(packages) + 1):
        package = ".".join(packages[:end])
        if package not in sys.modules:
            patch.setitem(sys.modules, package, types.ModuleType(package))
    patch.setattr(value, "__module__", module)
    patch.setattr(sys.modules[module], name, value, raising=False)
    return value


class Backend(enum.Enum):
    """Made one of torch_npu's by the test."""

    FLASH = 3


@pytest.mark.parametrize("read", [read_legacy, read_common])
def test_files_of_megatron_are_read_without_their_software(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], dict[str, Any]]
) -> None:
    model = {"weight": torch.arange(6.0).reshape(2, 3).t(), "bias": torch.ones(2, dtype=torch.bfloat16)}
    rng = [{"np_rng_state": np.random.get_state(), "random_rng_state": random.getstate()}]
    path = tmp_path / "model_optim_rng.pt"
    with monkeypatch.context() as patch:
        tokenizer = put(patch, "mindspeed_llm_old.tokenizer", "OldTokenizer", type("OldTokenizer", (), {}))()
        config = put(patch, "megatron.training.old", "OldConfig", type("OldConfig", (), {}))()
        put(patch, "torch_npu.old", "Backend", Backend)
        tokenizer.vocab = ["a"]
        arguments = argparse.Namespace(
            hidden_size=8, params_dtype=torch.bfloat16, stop=signal.SIGTERM, backend=Backend.FLASH, tokenizer=tokenizer
        )
        torch.save({"args": arguments, "model": model, "iteration": 5, "rng_state": rng, "more": config}, path)

    found = read(path)
    assert found["iteration"] == 5
    assert all(torch.equal(found["model"][name], value) for name, value in model.items())
    settings = vars(found["args"])
    assert (settings["hidden_size"], settings["params_dtype"], settings["stop"]) == (8, torch.bfloat16, signal.SIGTERM)
    np.testing.assert_equal(found["rng_state"], rng)
    for stand_in in (settings["backend"], settings["tokenizer"], found["more"]):
        assert isinstance(stand_in, Inert)
    assert settings["backend"].args == (3,)
    assert settings["tokenizer"].state == {"vocab": ["a"]}
    assert repr(found["more"]) == "<megatron.training.old.OldConfig, not loaded>"
    assert not {"torch_npu", "mindspeed_llm_old", "megatron.training.old"} & set(sys.modules)


def test_tensors_of_an_npu_are_read_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rebuild() -> None: ...

    rebuild.__qualname__ = rebuild.__name__ = "_rebuild_npu_tensor"
    arguments = (torch.arange(6.0)._typed_storage(), 1, (2, 2), (2, 1), False, {}, 29)
    with monkeypatch.context() as patch:
        put(patch, "torch_npu.utils.storage", "_rebuild_npu_tensor", rebuild)
        torch.save({"weight": Poison(rebuild, *arguments)}, tmp_path / "model_optim_rng.pt")
    assert read_legacy(tmp_path / "model_optim_rng.pt")["weight"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("module", ["megatronx.evil", "not_mindspeed.evil", "xmegatron", "mindspeed", "mindspeed_x.y"])
def test_only_whole_names_of_packages_are_inert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    with monkeypatch.context() as patch:
        torch.save({"a": put(patch, module, "Kind", type("Kind", (), {}))()}, tmp_path / "x.pt")
    for read in (read_legacy, read_common):
        if module.startswith("mindspeed"):
            assert isinstance(read(tmp_path / "x.pt")["a"], Inert)
        else:
            assert f"got: {module}.Kind" in error_of(read, tmp_path / "x.pt")


@pytest.mark.parametrize("name", POISONS)
def test_poisoned_arguments_run_nothing(tmp_path: Path, name: str) -> None:
    """Whose save it is is seen without reading it; then it is refused like any other."""
    for args in (argparse.Namespace(lr=POISONS[name]), argparse.Namespace(**{"a": [{"b": POISONS[name]}]})):
        torch.save({"args": args, "iteration": 1}, tmp_path / "common.pt")
        assert is_megatron_save(tmp_path)
        assert "without running code" in error_of(read_common, tmp_path / "common.pt")
        with (tmp_path / "common.pt").open("rb") as file, pytest.raises(CheckpointError, match="without running code"):
            read_with_stand_ins(file, "common.pt")


@pytest.mark.parametrize("size", [0, 1, 40, 300])
def test_whose_save_a_damaged_one_is_is_not_known(tmp_path: Path, size: int) -> None:
    assert not is_megatron_save(tmp_path)
    torch.save({"args": argparse.Namespace(lr=1)}, tmp_path / "common.pt")
    os.truncate(tmp_path / "common.pt", size)
    assert not is_megatron_save(tmp_path)
    (tmp_path / "common.pt").unlink()
    (tmp_path / "common.pt").mkdir()
    assert not is_megatron_save(tmp_path)
