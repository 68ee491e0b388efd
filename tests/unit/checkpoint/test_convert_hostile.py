"""``convert_ckpt.py`` against what goes wrong around it: kills, other processes, links, records, values, flags."""

from __future__ import annotations

import csv
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_llm.checkpoint.convert import execution, torch_dist
from mindspeed_llm.checkpoint.convert.torch_dist import TorchDistSource
from mindspeed_llm.cli import convert
from tests.fixtures import hf_folder
from tests.unit.checkpoint.test_convert import VOCAB, assert_same, changed, config, run, to_hf, to_megatron, weights

ROOT = Path(__file__).resolve().parents[3]
MEGATRON = ("--load-model-type", "mg")
BACK = (*MEGATRON, "--save-model-type", "hf")
LEGACY = ("--save-format", "legacy")
KILLED = """
import os, signal, sys
from mindspeed_llm.checkpoint.convert import execution
from mindspeed_llm.cli import convert
execution.BLOCK_BYTES = 2**14
write = execution._write_megatron
execution._write_megatron = lambda plan, staging, progress: write(
    plan, staging, lambda nbytes: os.kill(os.getpid(), signal.SIGKILL)
)
convert.main(sys.argv[1:])
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def on_first_block(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """``action`` once, when the first block is written."""
    blocks, done = execution._blocks, list[bool]()

    def acting(*args: Any) -> Any:
        for block in blocks(*args):
            yield block
            if not done:
                done.append(True)
                action()

    monkeypatch.setattr(execution, "_blocks", acting)


def test_killed_in_the_middle_it_leaves_nothing_to_be_seen(tmp_path: Path) -> None:
    """The earlier conversion stays; the next one clears away what was cut off."""
    folder, out = hf_folder("q25", VOCAB), tmp_path / "mg"
    to_megatron(hf_folder("llama31", VOCAB), out)
    argv = [sys.executable, "-c", KILLED, "--load-dir", str(folder), "--save-dir", str(out)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert names(tmp_path) == [".mg.incomplete", "mg"]
    assert_same(weights(to_hf(out, tmp_path / "before")), weights(hf_folder("llama31", VOCAB)))
    to_megatron(folder, out)
    assert_same(weights(to_hf(out, tmp_path / "after")), weights(folder))
    assert names(tmp_path) == ["after", "before", "mg"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_in_the_middle_it_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    on_first_block(monkeypatch, lambda: signal.raise_signal(number))
    argv = ["--load-dir", str(hf_folder("q25", VOCAB)), "--save-dir", str(tmp_path / "mg"), *LEGACY]
    try:
        status: object = convert.main(argv)
    except SystemExit as left:
        status = left.code
    assert status == 128 + number
    assert names(tmp_path) == []


def test_two_conversions_do_not_write_into_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one is refused, and the first one is whole."""
    folder, statuses = hf_folder("q25", VOCAB), list[int]()
    argv = ["--load-dir", str(folder), "--save-dir", str(tmp_path / "mg")]
    on_first_block(monkeypatch, lambda: statuses.append(convert.main(argv)))
    run(*argv)
    assert statuses == [1]
    assert "another conversion writes there" in capsys.readouterr().err
    assert_same(weights(to_hf(tmp_path / "mg", tmp_path / "back")), weights(folder))


def test_a_full_disk_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of output, when the system refuses in the middle of it."""
    resource = pytest.importorskip("resource")
    folder = hf_folder("q25", VOCAB)
    mg = to_megatron(folder, tmp_path / "mg")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        run("--load-dir", folder, "--save-dir", tmp_path / "a", code=1)
        run("--load-dir", folder, "--save-dir", tmp_path / "b", *LEGACY, code=1)
        run(*BACK, "--load-dir", mg, "--save-dir", tmp_path / "c", code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == ["mg"]


def test_a_link_and_the_current_folder_are_places_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real = hf_folder("q25", VOCAB), tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    for _ in range(2):
        to_megatron(folder, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same(weights(to_hf(real, tmp_path / "back")), weights(folder))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    to_megatron(folder, Path())
    assert names(tmp_path) == ["back", "here", "link", "real"]
    assert (tmp_path / "here" / "iter_0000001").is_dir()
    copy = shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "again").symlink_to(copy)
    run("--load-dir", copy, "--save-dir", tmp_path / "again", code=1)
    assert names(copy) == names(folder)


def test_records_that_no_conversion_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mg = to_megatron(hf_folder("q25", VOCAB), tmp_path / "mg")
    path = mg / "iter_0000001" / "conversion.json"
    written = json.loads(path.read_text())
    for content in ([], {"a": 1}, written | {"words": 7}, written | {"hf_config": "x"}):
        path.write_text(json.dumps(content))
        run(*BACK, "--load-dir", mg, "--save-dir", tmp_path / "out", code=1)
        assert str(path) in capsys.readouterr().err
    assert names(tmp_path) == ["mg"]


def test_a_tensor_in_another_shard_than_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "hf"
    AutoModelForCausalLM.from_pretrained(hf_folder("q25", VOCAB)).save_pretrained(folder, max_shard_size="200KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    named = index["weight_map"]
    name = next(name for name in named if named[name] != named["model.norm.weight"])
    named[name] = named["model.norm.weight"]
    path.write_text(json.dumps(index))
    run("--load-dir", folder, "--save-dir", tmp_path / "out", code=1)
    assert f"in another shard than named: {name} (1 in all)" in capsys.readouterr().err


def test_a_weight_beyond_the_dtype_is_not_made_infinite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hf_folder("q25", VOCAB)
    big = load_file(folder / "model.safetensors")["model.norm.weight"]
    big[7] = 7e4
    high = changed(folder, tmp_path / "hf", {"model.norm.weight": big})
    for form in LEGACY[1], "torch_dist":
        run("--load-dir", high, "--save-dir", tmp_path / "mg", "--save-format", form, "--params-dtype", "fp16", code=1)
        said = capsys.readouterr().err
        assert "decoder.final_layernorm.weight is too large for float16" in said
        assert "7e+04" in said
    assert names(tmp_path) == ["hf"]
    run("--load-dir", high, "--save-dir", tmp_path / "mg", "--params-dtype", "bf16")


def test_elements_are_aligned_wherever_they_stand(tmp_path: Path) -> None:
    """Ours in the file, so that they are read without a copy; those of other writers, at any byte, by one."""
    source = TorchDistSource(to_megatron(hf_folder("q25", VOCAB), tmp_path / "mg") / "iter_0000001")
    assert {source.read(name).data_ptr() % 64 for name in source.tensors if "embedding" not in name} == {0}
    expected = torch.arange(9, dtype=torch.float32)
    path = tmp_path / "file"
    path.write_bytes(b"?" + expected.numpy().tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = torch_dist._mapped(mapped, 1, 9, torch.float32)
    assert torch.equal(found, expected)
    assert found.data_ptr() % 4 == 0


def test_flags_that_change_nothing_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hf_folder("q25", VOCAB)
    mg = to_megatron(folder, tmp_path / "mg", "--transformer-impl", "transformer_engine")
    assert "--transformer-impl has no effect here" in capsys.readouterr().err
    more = ("--make-vocab-size-divisible-by", "128", "--target-tensor-parallel-size", "8")
    assert_same(weights(to_hf(mg, tmp_path / "back", *more)), weights(folder))
    said = capsys.readouterr().err
    assert "--make-vocab-size-divisible-by has no effect here" in said
    assert "torch_dist files have no layout" in said
    run("--load-dir", folder, "--save-dir", tmp_path / "a", "--ckpt-step", "3", code=2)
    run("--load-dir", folder, "--save-dir", tmp_path / "a", "--hf-cfg-dir", tmp_path / "none", code=1)
    assert "--hf-cfg-dir is not a folder" in capsys.readouterr().err
    assert names(tmp_path) == ["back", "mg"]


@pytest.mark.parametrize("layout", ["2 0,1,2,3", "3 0,1", "2 1,4", "2 4,5"])
@pytest.mark.parametrize("name", ["q25", "q25tied"])
def test_stages_without_a_layer(tmp_path: Path, name: str, layout: str) -> None:
    """Case 14: layer i is the i-th place that is not empty, on whatever stage, and the model has four layers."""
    stages, noop = layout.split()
    folder = hf_folder(name, VOCAB)
    flags = ("--target-pipeline-parallel-size", stages, "--noop-layers", noop)
    back = to_hf(to_megatron(folder, tmp_path / "mg", *LEGACY, *flags), tmp_path / "back")
    assert_same(weights(back), weights(folder))
    assert config(back)["num_hidden_layers"] == 4


@pytest.mark.parametrize(("heads", "kv", "tp", "works"), [(4, 2, 4, True), (4, 1, 2, True), (6, 3, 2, False)])
def test_fewer_kv_heads_than_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], heads: int, kv: int, tp: int, works: bool
) -> None:
    """Case 19: cut as megatron-core cuts them, or refused with the numbers."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": 16 * heads}
    folder = hf_folder("q25", vocab=VOCAB, **sizes)
    out, flags = tmp_path / "mg", (*LEGACY, "--target-tensor-parallel-size", str(tp))
    if not works:
        run("--load-dir", folder, "--save-dir", out, *flags, code=1)
        assert f"{heads} heads, {kv} KV heads, target-tensor-parallel-size {tp}" in capsys.readouterr().err
        return
    back = to_hf(to_megatron(folder, out, *flags), tmp_path / "back")
    assert_same(weights(back), weights(folder))


def test_a_folder_that_is_not_writable_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    run("--load-dir", hf_folder("q25", VOCAB), "--save-dir", tmp_path / "file" / "mg", code=1)
    assert "cannot be written" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["file"]


def test_every_flag_of_the_other_converters_is_known() -> None:
    """Accepted, accepted with a notice, or refused by name with a reason."""
    with (ROOT / "docs" / "upstream-flags.csv").open(encoding="utf-8", newline="") as file:
        rows = [[name, *scripts] for name, *scripts in csv.reader(file)]
    theirs = {f"--{row[0]}" for row in rows if any("convert" in cell.split() for cell in row[1:])}
    accepted = {flag for action in convert.build_parser()._actions for flag in action.option_strings}
    assert len(theirs) > 50
    assert theirs - accepted - convert.REFUSED.keys() == set()


def test_a_terminal_sees_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf_folder("q25", VOCAB)
    to_megatron(folder, tmp_path / "a")
    assert "kB" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    to_megatron(folder, tmp_path / "b")
    found = re.findall(r"([\d.]+)/([\d.]+) kB", capsys.readouterr().err)
    assert found[-1][0] == found[-1][1]
