"""A whole load looks up no name without asking, and whatever is poisoned in a save, every rank refuses it."""

from __future__ import annotations

import os
import pickle
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.checkpoint.trusted import read_metadata
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.parity.layouts import parse_layout
from tests.parity.reference import token_batches

VOCAB = 328
DISTRIBUTED = "tp2+dp2+dist"


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    return {"folder": str(hf_folder("q25", vocab=VOCAB)), "tokens": token_batches(vocab=VOCAB, seed=7, steps=1)}


def run(pool: Pool, case: str, layout: str, **arguments: Any) -> list[Any]:
    module, _, function = case.partition(":")
    world = parse_layout(layout)[0]
    return pool.run(f"tests.distributed.{module}:{function}", world, timeout=150, layout=layout, **arguments)


@pytest.fixture(scope="module")
def saved(pool: Pool, model: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A portable save, a periodic one, and one of a single rank in bf16."""
    root = tmp_path_factory.mktemp("saves")
    saves = {1: [(str(root / "portable"), True), (str(root / "periodic"), False)]}
    run(pool, "cases_core:train_some", DISTRIBUTED, saves=saves, **model)
    run(pool, "cases_core:train_some", "one", saves={1: [(str(root / "bf16"), False)]}, bf16=True, **model)
    return root


@pytest.mark.parametrize(
    ("name", "layout", "more"),
    [
        ("portable", DISTRIBUTED, {}),
        ("portable", "one+dist", {}),
        ("periodic", DISTRIBUTED, {}),
        ("bf16", "one", {"bf16": True}),
    ],
    ids=str,
)
def test_a_load_looks_up_nothing(
    pool: Pool, saved: Path, model: dict[str, Any], name: str, layout: str, more: dict[str, Any]
) -> None:
    found = run(pool, "cases_trusted:looked_up", layout, load=str(saved / name), step=1, **more, **model)
    assert found == [[]] * len(found)


def test_the_ear_hears_what_megatron_core_looks_up(pool: Pool, saved: Path, model: dict[str, Any]) -> None:
    (found,) = run(
        pool, "cases_trusted:looked_up", "one", load=str(saved / "bf16"), step=1, stock=True, bf16=True, **model
    )
    assert "torch.distributed.checkpoint.metadata.Metadata" in found
    assert "numpy._core.multiarray._reconstruct" in found


class Poison:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


def poison(save: Path, where: str, content: Poison) -> str:
    """Put ``content`` somewhere into a save; the name of the file."""
    index = save / ".metadata"
    if where == "index":
        index.write_bytes(pickle.dumps({"state_dict_metadata": content}))
        return index.name
    if where == "common":
        torch.save({**torch.load(save / "common.pt", weights_only=True), "config": content}, save / "common.pt")
        return "common.pt"
    metadata = read_metadata(index)
    wanted = "rng_state" if where == "object" else "decoder.final_layernorm.weight"
    entries = [entry for key, entry in metadata.storage_data.items() if key.fqn.startswith(wanted)]
    assert entries
    bytes_ = BytesIO()
    torch.save([content], bytes_)
    for entry in entries:
        with (save / entry.relative_path).open("ab") as file:
            entry.offset, entry.length = file.tell(), len(bytes_.getvalue())
            file.write(bytes_.getvalue())
    index.write_bytes(pickle.dumps(metadata))
    return ".distcp"


@pytest.mark.parametrize("where", ["index", "common", "object", "tensor"])
def test_a_poisoned_save_is_refused_on_every_rank(
    pool: Pool, saved: Path, model: dict[str, Any], tmp_path: Path, where: str
) -> None:
    shutil.copytree(saved / "periodic", tmp_path / "save")
    file = poison(tmp_path / "save/iter_0000001", where, Poison(tmp_path / "ran"))
    errors = run(pool, "cases_core:refused_load", DISTRIBUTED, load=str(tmp_path / "save"), step=1, **model)
    for error in errors:
        assert "cannot be read without running code from it" in error
        assert "posix.system" in error
        assert file in error
    assert len(errors) == 4
    assert not (tmp_path / "ran").exists()


def test_an_index_that_points_elsewhere_is_refused_on_every_rank(
    pool: Pool, saved: Path, model: dict[str, Any], tmp_path: Path
) -> None:
    save = tmp_path / "save/iter_0000001"
    shutil.copytree(saved / "periodic", save.parent)
    metadata = read_metadata(save / ".metadata")
    for entry in metadata.storage_data.values():
        entry.relative_path = str(saved / "periodic/iter_0000001" / entry.relative_path)
    (save / ".metadata").write_bytes(pickle.dumps(metadata))
    for error in run(pool, "cases_core:refused_load", DISTRIBUTED, load=str(save.parent), step=1, **model):
        assert "not a file name beside the index" in error
