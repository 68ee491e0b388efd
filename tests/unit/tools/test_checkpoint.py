"""The checkpoint tool on real saves: what it tells, what it finds in damaged ones, differences and averages."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from mindspeed_llm.checkpoint.survey import Save
from mindspeed_llm.tools.checkpoint import main
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.parity.layouts import parse_layout
from tests.parity.reference import token_batches

TRACKER = "latest_checkpointed_iteration.txt"
#: 328 rows are 384 in one part, and 512 in two.
ONE, MANY = "dp2+dist+divisor128", "tp2+pp2+dist+divisor128"
QKV = "decoder.layers.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def saves(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``one`` with portable saves of steps 1 and 2, ``many`` with that of step 2 in other layouts, ``flat``."""
    root = tmp_path_factory.mktemp("saves")
    model = {"folder": str(hf_folder("q25")), "tokens": token_batches(vocab=328, seed=7, steps=2)}

    def run(case: str, layout: str, **arguments: Any) -> None:
        pool.run(case, parse_layout(layout)[0], timeout=120, layout=layout, **model, **arguments)

    train, again = "tests.distributed.cases_core:train_some", "tests.unit.tools.cases_checkpoint:save_again"
    one = str(root / "one")
    run(train, ONE, saves={1: [(one, True)], 2: [(one, True)]})
    run(again, MANY, load=one, step=2, root=str(root / "many"))
    # Quarters of the biases have 32 elements, which the flat buffers pad to 64.
    run(train, "tp4+dist", saves={2: [(str(root / "flat"), False)]})
    return root


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of several files, written by transformers."""
    import transformers

    folder = tmp_path_factory.mktemp("hf") / "model"
    shutil.copytree(hf_folder("q25"), folder)
    (folder / "model.safetensors").unlink()
    model = transformers.AutoModelForCausalLM.from_pretrained(hf_folder("q25"), dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def tool(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    """Exit status, lines of stdout, stderr."""
    code = main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return code, told.out.splitlines(), told.err


def tensors_of(save: Path) -> dict[str, torch.Tensor]:
    """All tensors of a save, by torch's own reader."""
    reader = dcp.FileSystemReader(save)
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(info.size, dtype=info.properties.dtype)
        for name, info in stored.items()
        if isinstance(info, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


# ------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_tells_what_a_save_is(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tool(capsys, "inspect", saves / "many", "--json", "--tensors")
    told = json.loads("\n".join(out))
    found = told["checkpoint"]
    assert code == 0
    assert (found["iteration"], found["consumed_samples"]) == (2, 2 * token_batches(vocab=9, seed=7, steps=2).shape[1])
    assert found["layout"]["tensor_model_parallel_size"] == found["layout"]["pipeline_model_parallel_size"] == 2
    assert found["layout"]["data_parallel_size"] == 1
    assert found["optimizer"]["form"] == "fully_reshardable"
    assert found["architecture"]["num_layers"] == 4
    stored = tensors_of(saves / "many" / "iter_0000002")
    assert {row["name"]: (tuple(row["shape"]), row["dtype"], row["bytes"]) for row in found["listing"]} == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        for name, tensor in stored.items()
    }
    weights = {name: tensor for name, tensor in stored.items() if not name.startswith("optimizer.")}
    assert found["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert found["dtypes"] == {"weights": {"float32": len(weights)}, "optimizer": {"float32": 3 * len(weights)}}
    # Every byte of the folder is in one of the groups.
    folder = saves / "many" / "iter_0000002"
    assert sum(found["bytes"].values()) == sum(path.stat().st_size for path in folder.iterdir())


def test_inspect_lists_saves_and_drafts(saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    shutil.copytree(saves / "one", root)
    (root / "iter_0000003.tmp").mkdir()
    (root / "iter_0000002" / "common.pt").unlink()
    code, out, err = tool(capsys, "inspect", root, "--json")
    told = json.loads("\n".join(out))["saves"]
    assert code == 1
    assert "common.pt" in err
    assert told["tracker"] == "2"
    assert [(save["name"], save["complete"]) for save in told["saves"]] == [
        ("iter_0000001", True),
        ("iter_0000002", False),
    ]
    assert [draft["name"] for draft in told["drafts"]] == ["iter_0000003.tmp"]
    code, out, _ = tool(capsys, "inspect", root, "--ckpt-step", 1)
    assert code == 0
    assert any("iter_0000003.tmp" in line and "never read" in line for line in out)
    assert any("fully_reshardable: loads at any layout" in line for line in out)


def test_inspect_of_a_hugging_face_folder(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tool(capsys, "inspect", shards, "--json", "--tensors")
    found = json.loads("\n".join(out))["checkpoint"]
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert code == 0
    assert {row["name"]: row["files"] for row in found["listing"]} == {k: [v] for k, v in index["weight_map"].items()}
    assert found["bytes"] == {"weights": index["metadata"]["total_size"]}
    assert found["architecture"]["model_type"] == "qwen2"


def test_a_flat_optimizer_says_where_it_loads(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = tool(capsys, "inspect", saves / "one" / "iter_0000002")
    assert any(line.split() == ["data", "parallel", "size", "2"] for line in out)
    _, out, _ = tool(capsys, "inspect", saves / "flat" / "iter_0000002")
    assert any("dp_reshardable: loads at the same tensor and pipeline layout" in line for line in out)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_checkpoint_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for folder, said in ((tmp_path, "is no checkpoint"), (tmp_path / "gone", "not a folder")):
        code, _, err = tool(capsys, command, folder)
        assert code == 1
        assert said in err


# -------------------------------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize("name", ["one", "many", "flat"])
def test_whole_saves_have_no_problem(saves: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert tool(capsys, "verify", saves / name)[:2] == (0, [f"{saves / name}: whole"])


def place_of(save: Path, name: str, which: int = 0) -> tuple[Path, int, int]:
    place = Save(save).tensors[name].pieces[which].place
    assert place is not None
    return save / place.file, place.start, place.length


def overwrite(save: Path, name: str, value: float, which: int = 0) -> None:
    """Put a piece filled with ``value`` in the place of one."""
    file, start, length = place_of(save, name, which)
    content = file.read_bytes()
    piece = torch.load(BytesIO(content[start : start + length]), weights_only=True)
    fresh = BytesIO()
    torch.save(torch.full_like(piece, value), fresh)
    assert len(fresh.getvalue()) == length
    file.write_bytes(content[:start] + fresh.getvalue() + content[start + length :])


def edit(save: Path, change: Callable[[Any], object]) -> None:
    """Change ``.metadata``."""
    path = save / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def index(metadata: Any, name: str, which: int = 0) -> MetadataIndex:
    return MetadataIndex(name, metadata.state_dict_metadata[name].chunks[which].offsets)


def flip_a_bit(save: Path) -> None:
    file, start, length = place_of(save, QKV)
    content = bytearray(file.read_bytes())
    content[start + length // 2] ^= 1
    file.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def drop_a_piece(metadata: Any) -> None:
    del metadata.storage_data[index(metadata, QKV)]
    del metadata.state_dict_metadata[QKV].chunks[0]


def move(metadata: Any, **changes: Any) -> None:
    key = index(metadata, QKV)
    place = metadata.storage_data[key]
    metadata.storage_data[key] = replace(place, **{name: place.offset + by for name, by in changes.items()})


class Poison:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("poisoned",)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is gone": (lambda save: place_of(save, QKV)[0].unlink(), ".distcp is missing"),
    "a file is cut off": (lambda save: truncate(place_of(save, QKV)[0]), " bytes: "),
    "a bit has turned": (flip_a_bit, f"{QKV} at (0, 0, 0) is damaged"),
    "no index": (lambda save: (save / ".metadata").unlink(), ".metadata"),
    "an index that runs code": (lambda save: (save / ".metadata").write_bytes(pickle.dumps(Poison())), "mkdir"),
    "a hole": (lambda save: edit(save, drop_a_piece), "8192 elements are in no piece"),
    "a piece twice": (
        lambda save: edit(
            save, lambda m: m.state_dict_metadata[QKV].chunks.append(m.state_dict_metadata[QKV].chunks[0])
        ),
        "8192 elements are in more than one piece",
    ),
    "a piece that is nowhere": (
        lambda save: edit(save, lambda m: m.storage_data.pop(index(m, QKV))),
        "does not say where 1 pieces are",
    ),
    "bytes behind the end": (lambda save: edit(save, lambda m: move(m, offset=10**9)), " bytes: "),
    "bytes of two": (lambda save: edit(save, lambda m: move(m, offset=100)), "where something else is"),
    "a smaller tensor": (
        lambda save: edit(save, lambda m: setattr(m.state_dict_metadata[QKV], "size", torch.Size([3, 128, 64]))),
        "1 pieces lie outside",
    ),
    "another dtype": (
        lambda save: edit(save, lambda m: setattr(m.state_dict_metadata[QKV].properties, "dtype", torch.int32)),
        "is not what .metadata says",
    ),
    "not a number": (lambda save: overwrite(save, QKV, float("nan")), f"{QKV} holds 8192 NaN and 0 infinite"),
    "infinite": (lambda save: overwrite(save, QKV, float("-inf"), 1), f"{QKV} holds 0 NaN and 8192 infinite"),
    "no counters": (lambda save: (save / "common.pt").unlink(), "common.pt"),
    "half of the counters": (lambda save: truncate(save / "common.pt"), "common.pt"),
    "odd counters": (
        lambda save: torch.save({"config": {"model": 3}}, save / "common.pt"),
        "config, model is not a mapping",
    ),
    "no mark": (lambda save: (save / "metadata.json").unlink(), "metadata.json cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damages_of_a_save_are_found(
    saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save = tmp_path / "iter_0000002"
    shutil.copytree(saves / "one" / "iter_0000002", save)
    harm, said = DAMAGES[damage]
    harm(save)
    code, out, _ = tool(capsys, "verify", save)
    assert code == 1
    # Each of the four pieces has the wrong dtype; all else is one problem.
    assert len(out) == (5 if damage == "another dtype" else 2), out
    assert said in out[0]
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000002"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3", "names iteration 3, of which there is no complete save"),
        ("1", "and there is a newer iter_0000002"),
        ("", "does not name an iteration"),
        (None, "is missing"),
    ],
)
def test_the_tracker_is_verified(
    saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    root = tmp_path / "root"
    shutil.copytree(saves / "one", root)
    tracker = root / TRACKER
    tracker.unlink() if text is None else tracker.write_text(text)
    code, out, _ = tool(capsys, "verify", root)
    assert code == 1
    assert len(out) == 2, out
    assert said in out[0]


def test_what_pads_flat_buffers_counts_for_nothing(
    saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "flat"
    shutil.copytree(saves / "flat", root)
    save = root / "iter_0000002"
    stored = next(t for t in Save(save).tensors.values() if t.name.endswith("bucket_idx_0.exp_avg"))
    padding = [number for number, piece in enumerate(stored.pieces) if stored.is_padding(piece)]
    sizes = [stored.pieces[number].box[1] for number in padding]
    # A quarter of the bias of q, k and v, once in each layer.
    assert sizes == [(32,)] * 4
    for number in padding:
        overwrite(save, stored.name, float("nan"), number)
    assert tool(capsys, "verify", root)[0] == 0
    assert tool(capsys, "diff", saves / "flat", root)[0] == 0
    overwrite(save, stored.name, float("nan"), padding[0] - 1)
    code, out, _ = tool(capsys, "verify", root)
    assert (code, len(out)) == (1, 2)
    assert "32 NaN" in out[0]
    assert tool(capsys, "diff", saves / "flat", root)[0] == 1


def rewrite_shard(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the first shard."""
    path = min(folder.glob("*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def swap_two(content: dict[str, Any]) -> None:
    placed = content["weight_map"]
    one = min(placed)
    placed[one] = next(file for file in placed.values() if file != placed[one])


HF_DAMAGES: dict[str, tuple[Callable[[Path], object], str, int]] = {
    "a shard is gone": (lambda folder: min(folder.glob("*.safetensors")).unlink(), "lacks shards", 1),
    "a shard is cut off": (lambda folder: truncate(min(folder.glob("*.safetensors"))), "cannot be read", 1),
    "a shard of nothing": (
        lambda folder: min(folder.glob("*.safetensors")).write_bytes(b"x" * 99),
        "cannot be read",
        1,
    ),
    "a tensor elsewhere": (lambda folder: edit_index(folder, swap_two), "and it is not", 2),
    "a tensor too many": (
        lambda folder: rewrite_shard(folder, lambda tensors: tensors.update(more=torch.ones(1))),
        "holds more, which",
        1,
    ),
    "a tensor too few": (lambda folder: rewrite_shard(folder, lambda tensors: tensors.popitem()), "and it is not", 1),
    "another size": (
        lambda folder: edit_index(folder, lambda content: content["metadata"].update(total_size=5)),
        "says 5 bytes in all",
        1,
    ),
    "an index that leaves the folder": (
        lambda folder: edit_index(folder, lambda c: c["weight_map"].update(x="../model.safetensors")),
        "not a file name beside the index",
        1,
    ),
    "not a number": (
        lambda folder: rewrite_shard(folder, lambda tensors: min(tensors.items())[1].view(-1)[:3].fill_(torch.nan)),
        "holds 3 NaN and 0 infinite values",
        1,
    ),
}


def test_a_whole_hugging_face_folder(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool(capsys, "verify", shards)[0] == 0
    assert tool(capsys, "verify", hf_folder("q25"))[0] == 0


@pytest.mark.parametrize("damage", HF_DAMAGES)
def test_damages_of_a_hugging_face_folder_are_found(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(shards, folder)
    harm, said, problems = HF_DAMAGES[damage]
    harm(folder)
    code, out, _ = tool(capsys, "verify", folder)
    assert code == 1
    assert len(out) == problems + 1, out
    assert any(said in line for line in out)


# ---------------------------------------------------------------------------------------------------------------- diff


@pytest.mark.parametrize("order", [("one", "many"), ("many", "one")])
def test_one_state_in_two_layouts_is_equal(
    saves: Path, capsys: pytest.CaptureFixture[str], order: tuple[str, str]
) -> None:
    code, out, _ = tool(capsys, "diff", *(saves / name for name in order))
    assert code == 0, out
    assert "40 tensors in both, 40 the same bit for bit, 0 differ; 0 in one alone" in out[-1]
    # Each embedding and its optimizer state, of which the rows that pad the vocabulary are left out.
    assert sum("the first 328 rows" in line for line in out) == 8


def test_differences_against_numpy(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = saves / "one"
    code, out, _ = tool(capsys, "diff", one, one, "--ckpt-step", 1, 2, "--only", "weights")
    assert code == 1
    a, b = (tensors_of(one / f"iter_000000{step}") for step in (1, 2))
    rows = {line.split()[0]: line.split() for line in out if line.startswith("  decoder.layers")}
    assert len(rows) == 7
    for name, row in rows.items():
        x, y = (side[name].double().numpy() for side in (a, b))
        same = int((a[name].numpy().view(np.int32) == b[name].numpy().view(np.int32)).sum())
        assert row[1] == f"{np.abs(x - y).max():.3g}"
        assert row[2] == f"{(np.abs(x - y) / np.abs(y)).max():.3g}"
        assert row[3:6] == [str(same), "of", str(x.size)]
        assert int(row[6]) == int((x != y).sum())


def test_tolerances_against_numpy(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = saves / "one"
    same_step = (one / "iter_0000001", one / "iter_0000002", "--only", "weights")
    a, b = (tensors_of(one / f"iter_000000{step}") for step in (1, 2))
    weights = [name for name in a if not name.startswith("optimizer.")]
    for atol, rtol in ((0.0, 1e-3), (5e-4, 0.0), (3e-4, 1e-2), (2e-3, 0.0)):
        far = [n for n in weights if not np.allclose(a[n].double(), b[n].double(), rtol=rtol, atol=atol)]
        code, out, _ = tool(capsys, "diff", *same_step, "--atol", atol, "--rtol", rtol)
        assert code == (1 if far else 0)
        assert f"{len(far)} differ" in out[-1]


def test_differences_of_special_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inf, nan = float("inf"), float("nan")
    pairs = {
        "equal": ([1.0, inf, nan, -inf], [1.0, inf, nan, -inf]),
        "a nan": ([1.0, nan], [1.0, 1.0]),
        "an infinity": ([1.0, 1.0], [1.0, inf]),
        "zeros": ([0.0], [-0.0]),
        "scalar": (3.0, 3.0),
    }
    for side in (0, 1):
        folder = tmp_path / str(side)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        tensors = {name: torch.tensor(values[side]) for name, values in pairs.items()}
        tensors["shape"] = torch.ones(2 + side)
        tensors["dtype"] = torch.ones(2, dtype=(torch.float32, torch.bfloat16)[side])
        tensors[f"only {side}"] = torch.ones(1)
        save_file(tensors, folder / "model.safetensors")
    code, out, _ = tool(capsys, "diff", tmp_path / "0", tmp_path / "1")
    told = "\n".join(out)
    assert code == 1
    assert out[:2] == [f"only in {tmp_path / '0'}: only 0", f"only in {tmp_path / '1'}: only 1"]
    for words in ("a nan inf inf 1 of 2 1", "an infinity inf inf 1 of 2 1", "zeros 0 0 0 of 1 0"):
        assert words in " ".join(told.split())
    assert "shape (2,), (3,)" in told
    assert "dtype float32, bfloat16" in told
    assert "7 tensors in both, 2 the same bit for bit, 5 differ; 2 in one alone" in out[-1]
    # Zeros are equal under a tolerance, whatever their signs.
    _, out, _ = tool(capsys, "diff", tmp_path / "0", tmp_path / "1", "--atol", 0)
    assert "4 differ" in out[-1]


def test_relative_is_to_the_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [tmp_path / name for name in "ab"]
    for folder, value in zip(sides, (1.0, 2.0), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_file({"x": torch.tensor([value])}, folder / "model.safetensors")
    assert np.isclose(1.0, 2.0, rtol=0.5, atol=0)
    assert tool(capsys, "diff", *sides, "--rtol", 0.5)[0] == 0
    assert not np.isclose(2.0, 1.0, rtol=0.5, atol=0)
    assert tool(capsys, "diff", *sides[::-1], "--rtol", 0.5)[0] == 1


def test_diff_of_a_model_in_one_file_and_in_several(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool(capsys, "diff", shards, hf_folder("q25"))[0] == 0
    assert tool(capsys, "diff", shards, hf_folder("q25", seed=1))[0] == 1


def test_diff_says_what_it_cannot_compare(saves: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for two, said in ((saves / "flat", "--only weights"), (shards, "--save-hf"), (saves / "gone", "not a folder")):
        code, out, err = tool(capsys, "diff", saves / "one", two)
        assert (code, out) == (2, [])
        assert said in err
    # Trained in another layout: near, and not the same.
    flat = (saves / "one", saves / "flat", "--only", "weights")
    assert tool(capsys, "diff", *flat)[0] == 1
    assert tool(capsys, "diff", *flat, "--atol", 1e-4)[0] == 0


# ------------------------------------------------------------------------------------------------------------- average


@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_average_against_numpy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: tuple[float, ...] | None, dtype: torch.dtype
) -> None:
    import transformers

    folders = [tmp_path / str(seed) for seed in range(3)]
    for seed, folder in enumerate(folders):
        shutil.copytree(hf_folder("q25", seed=seed), folder)
    first = {name: tensor.to(dtype) for name, tensor in load_file(folders[0] / "model.safetensors").items()}
    save_file(first, folders[0] / "model.safetensors", {"format": "pt"})
    given = () if weights is None else ("--weights", *weights)
    code, _, err = tool(capsys, "average", *folders, "--output", tmp_path / "mean", *given)
    assert code == 0, err
    loaded = [load_file(folder / "model.safetensors") for folder in folders]
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    assert mean.keys() == first.keys()
    # Half a unit in the last place of the dtype, and three sums in fp32.
    exact = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
    for name, tensor in mean.items():
        parts = np.stack([tensors[name].double().numpy() for tensors in loaded])
        expected = np.average(parts, axis=0, weights=weights)
        assert tensor.dtype == dtype
        scale = np.average(np.abs(parts), axis=0, weights=weights)
        assert (np.abs(tensor.double().numpy() - expected) <= exact * scale).all()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "mean")("ab")["input_ids"]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mean")
    assert tool(capsys, "verify", tmp_path / "mean")[0] == 0


def test_the_average_of_one_model_is_itself(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool(capsys, "average", shards, shards, "--output", tmp_path / "mean")[0] == 0
    assert tool(capsys, "diff", shards, tmp_path / "mean")[0] == 0


def test_average_refuses_what_has_no_mean(saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = hf_folder("q25"), tmp_path / "mean"
    taken = tmp_path / "taken"
    taken.mkdir()
    damaged, bad, half, large = (tmp_path / name for name in ("damaged", "bad", "half", "large"))
    for folder in (damaged, bad, half, large):
        shutil.copytree(model, folder)
    rewrite_shard(damaged, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    rewrite_shard(bad, lambda tensors: tensors["lm_head.weight"].__setitem__((3, 4), torch.nan))
    rewrite_shard(half, lambda tensors: tensors.update({name: t.half() for name, t in tensors.items()}))
    rewrite_shard(large, lambda tensors: tensors["lm_head.weight"].__setitem__((3, 4), 1e6))
    cases: list[tuple[tuple[object, ...], Path, str]] = [
        ((saves / "one", saves / "one"), output, "--save-hf"),
        ((model, model), taken, "is taken"),
        ((model, model), model, "is taken"),
        ((model, hf_folder("q25tied")), output, "tie_word_embeddings"),
        ((model, damaged), output, "has two shapes"),
        ((model, bad), output, f"lm_head.weight holds NaN or infinite values, and has no mean\n  got: {bad}"),
        ((bad, model, "--weights", 0, 1), output, "lm_head.weight holds NaN"),
        ((half, large), output, "the mean of lm_head.weight does not fit torch.float16"),
        ((model, model, "--weights", 1), output, "1 for 2 folders"),
        ((model, model, "--weights", 0, 0), output, "make no mean"),
        ((model, model, "--weights", 1, "nan"), output, "make no mean"),
    ]
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments, target, said in cases:
        code, _, err = tool(capsys, "average", *arguments, "--output", target)
        assert code != 0
        assert said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_average_that_fails_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindspeed_llm.checkpoint import hf_io

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_io, "copy_companions", full)
    code, _, err = tool(capsys, "average", hf_folder("q25"), hf_folder("q25"), "--output", tmp_path / "mean")
    assert code != 0
    assert "No space left" in err
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------- help


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom mindspeed_llm.tools.checkpoint import main\n"
        "for command in ([], ['diff']):\n"
        "    try:\n        main([*command, '--help'])\n    except SystemExit as end:\n        assert end.code == 0\n"
        "assert not {'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "exit status 0 equal, 1 different, 2 error" in " ".join(done.stdout.split())
