"""A model between Hugging Face's and megatron-core's formats, against a copy of its folder.

The memory of a copy is not measured: what stands as the peer's is the limit for ours.
``CONVERT_LAYERS=4`` makes a smaller model than the default of 3B parameters.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.durable import sync_path
from mindspeed_llm.checkpoint.names import compile_names
from mindspeed_llm.models.registry import family_by_name
from tests.bench.harness import ROOT, AnonymousPeak, Figure, Figures, Machine, benchmark, figure

LAYERS = int(os.environ.get("CONVERT_LAYERS", "36"))
TURNS = 3
MEMORY = 1_500_000_000
"""Bytes that a conversion may take above imports."""
FORMS = {
    "torch_dist": (),
    "legacy": ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"),
}
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""Sizes of Qwen2.5-3B."""
_CLI = [str(ROOT / "convert_ckpt.py")]
_IMPORTS = "import mindspeed_llm.checkpoint.convert.execution, time; time.sleep(1)"
_PEER = """
import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16")
model.save_pretrained(sys.argv[2])
"""
"""What transformers does with the same folder."""


@benchmark
def convert(machine: Machine) -> Figures:
    """Each way, its input read from the disk (cold) or from memory (warm), to the disk on both sides."""
    del machine
    with tempfile.TemporaryDirectory(prefix="mindspeed_llm.bench.") as scratch:
        root = Path(scratch)
        _make_model(root / "hf")
        _, imports = _run(["-c", _IMPORTS])
        figures: Figures = []
        for form, layout in FORMS.items():
            there = ["--load-dir", str(root / "hf"), "--save-format", form, *layout]
            back = ["--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", str(root / form)]
            figures += [
                _pair(f"HF -> {form}", there, root / "hf", root / "new", cold, imports) for cold in (True, False)
            ]
            _run([*_CLI, *there, "--save-dir", str(root / form)])
            figures += [
                _pair(f"{form} -> HF", back, root / form, root / "new", cold, imports) for cold in (True, False)
            ]
            shutil.rmtree(root / form)
        figures.append(_against_transformers(root, imports))
    return figures


def _make_model(folder: Path) -> None:
    folder.mkdir()
    (folder / hf_io.CONFIG).write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    hidden, ffn = 2048, 11008
    family = family_by_name("qwen2")
    values = {"num_layers": LAYERS, "untie_embeddings_and_output_weights": False}
    shapes = {
        "embed_tokens.weight": (151936, hidden),
        "q_proj.weight": (hidden, hidden),
        "k_proj.weight": (256, hidden),
        "v_proj.weight": (256, hidden),
        "o_proj.weight": (hidden, hidden),
        "q_proj.bias": (hidden,),
        "k_proj.bias": (256,),
        "v_proj.bias": (256,),
        "gate_proj.weight": (ffn, hidden),
        "up_proj.weight": (ffn, hidden),
        "down_proj.weight": (hidden, ffn),
    }
    names = compile_names(family, family.config_to_values(CONFIG) | values).hf_names()
    tensors = {
        name: hf_io.TensorInfo(shapes.get(".".join(name.split(".")[-2:]), (hidden,)), torch.bfloat16) for name in names
    }
    plans = [plan for _, plan in hf_io.plan_shards(tensors, dict.fromkeys(tensors, 0))]
    writer = hf_io.ShardWriter(folder, plans, tensors)
    for name, info in tensors.items():
        writer.write(name, torch.empty(info.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator))
    writer.finish()
    hf_io.write_index(folder, plans, tensors)


def _pair(setting: str, arguments: list[str], source: Path, out: Path, cold: bool, imports: int) -> Figure:
    """Our rate and that of a copy, in turns."""
    size = _size(source) / 1e6
    ours, copies, peaks = list[float](), list[float](), list[int]()

    def convert() -> float:
        seconds, peak = _run([*_CLI, *arguments, "--save-dir", str(out)])
        peaks.append(peak - imports)
        return seconds

    sides: list[tuple[list[float], Callable[[], float]]] = [(ours, convert), (copies, lambda: _copy(source, out))]
    for turn in range(TURNS):
        for number in range(2):
            _prepare(source, cold)
            rates, work = sides[(turn + number) % 2]
            rates.append(size / work())
            shutil.rmtree(out)
    label = f"{setting}, {LAYERS} layers, with start-up, {'cold' if cold else 'warm'}"
    return figure(label, "cp, fsync", ours, copies, unit="MB/s", target=0.5, memory=(max(peaks), MEMORY))


def _against_transformers(root: Path, imports: int) -> Figure:
    """HF -> HF, where transformers can do the same."""
    size = _size(root / "hf") / 1e6
    rates: tuple[list[float], list[float]] = ([], [])
    peaks: tuple[list[int], list[int]] = ([], [])
    commands = (
        [*_CLI, "--load-dir", str(root / "hf"), "--save-model-type", "hf", "--save-dir", str(root / "new")],
        ["-c", _PEER, str(root / "hf"), str(root / "new")],
    )
    for turn in range(TURNS):
        for number in range(2):
            side = (turn + number) % 2
            _prepare(root / "hf", False)
            seconds, peak = _run(commands[side])
            rates[side].append(size / seconds)
            peaks[side].append(peak - imports)
            shutil.rmtree(root / "new")
    peer = f"transformers {version('transformers')} from_pretrained + save_pretrained"
    return figure(f"HF -> HF, {LAYERS} layers, warm", peer, *rates, unit="MB/s", memory=(max(peaks[0]), max(peaks[1])))


def _run(arguments: list[str]) -> tuple[float, int]:
    """Seconds and peak anonymous bytes of this Python with ``arguments``."""
    started = time.perf_counter()
    with (
        subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process,
        AnonymousPeak(process.pid) as peak,
    ):
        _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(said.decode())
    return time.perf_counter() - started, peak.bytes


def _copy(source: Path, out: Path) -> float:
    started = time.perf_counter()
    shutil.copytree(source, out)
    for path in _files(out):
        sync_path(path)
    return time.perf_counter() - started


def _prepare(source: Path, cold: bool) -> None:
    """The disk is done with what came before, and memory holds all of the source, or nothing of it."""
    os.sync()
    for path in _files(source):
        with path.open("rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(2**24):
                    pass


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))
