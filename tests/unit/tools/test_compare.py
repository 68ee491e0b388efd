"""The comparison finds transformers and every layout equal, and names exactly the module that a fault is planted in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.data.indexed import IndexedWriter, token_dtype
from mindspeed_llm.errors import ConfigError, SuiteError
from mindspeed_llm.tools.compare import __main__ as tool
from mindspeed_llm.tools.compare.differences import Comparison
from mindspeed_llm.tools.compare.launch import launch
from mindspeed_llm.tools.compare.report import describe, verdict
from mindspeed_llm.tools.compare.sides import Side, parse_side
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder

CASES = "tests.distributed.cases_compare"
SEQUENCES, LENGTH = 4, 16


def compare(pool: Pool, a: str, b: str, fault: str | None = None) -> Comparison:
    """A against B; ``fault`` is planted in A."""
    sides = parse_side(a), parse_side(b)
    given = tool.build_parser().parse_args([a, b, f"--sequences={SEQUENCES}", f"--seq-length={LENGTH}"])

    def run(side: Side, tokens: torch.Tensor, folder: Path) -> None:
        planted = fault if side is sides[0] else None
        pool.run(f"{CASES}:capture", side.world, side=side.text, tokens=tokens, folder=folder, fault=planted)

    return tool.compare_sides(*sides, tool.tokens_of(given, *sides), run)


def answer(found: Comparison) -> str:
    return verdict(found, tool.EXACT)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("q25", "tp2+sp+pp2"),
        ("q25tied", "pp2+vpp2+nop2p+dp2+dist+reduce+gather"),
        ("llamabias", "tp2+full+mbs2"),
        ("llamayarn", "tp4+sp+divisor128"),
        ("qwen3", "tp2+sp"),  # norms of each head
        ("gemma2", "dp2"),  # caps on scores and logits
    ],
)
def test_every_module_equals_transformers(pool: Pool, model: str, layout: str) -> None:
    folder = hf_folder(model)
    found = compare(pool, f"ours:{folder},{layout}", f"hf:{folder}")
    assert answer(found) == "EQUAL", "\n".join(describe(found, tool.EXACT, everything=True))
    assert found.loss[0] == pytest.approx(found.loss[1], rel=1e-6)
    stored = set(load_file(folder / "model.safetensors"))
    assert {row.hf for row in found.parameters} == stored
    # The modules with weights, what two of each layer's are given, its attention, its MLP, itself; and the angles.
    modules = {name.rpartition(".")[0] for name in stored} | {"lm_head", "model.rotary_emb"}
    for layer in range(4):
        name = f"model.layers.{layer}"
        modules |= {name, f"{name}.self_attn", f"{name}.mlp"}
        modules |= {f"input of {name}.self_attn.o_proj", f"input of {name}.mlp.down_proj"}
    assert {row.hf for row in found.forward} == modules
    assert {row.hf for row in found.backward} == modules - {"model.rotary_emb"}
    assert not found.left_out


@pytest.fixture
def perturbed(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the model in which one element of the named weight is another."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(hf_folder("q25"), folder)
        tensors = load_file(folder / "model.safetensors")
        tensors[name].view(-1)[5] += 0.05
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize(
    ("weight", "module"),
    [
        ("model.layers.2.self_attn.k_proj.weight", "decoder.layers.2.self_attention.linear_qkv"),
        ("model.layers.3.mlp.down_proj.weight", "decoder.layers.3.mlp.linear_fc2"),
        ("lm_head.weight", "output_layer"),
    ],
)
def test_a_weight_that_differs(pool: Pool, perturbed: Callable[[str], Path], weight: str, module: str) -> None:
    found = compare(pool, f"ours:{perturbed(weight)},pp2", f"hf:{hf_folder('q25')}")
    assert answer(found) == f"FIRST DIFFERENCE: forward {module}"
    first = next(row for row in found.forward if row.beyond(tool.EXACT))
    assert first.hf == weight.removesuffix(".weight")


@pytest.mark.parametrize(
    ("flags", "fault", "module"),
    [
        ("tp2,rotary-base=5000", None, "forward rotary_pos_emb"),
        ("tp2+sp,op=rms_norm=planted", "epsilon", "forward decoder.layers.0.input_layernorm"),
        ("tp2,op=rms_norm=reference", "shard", "forward decoder.layers.1.mlp.linear_fc1"),
        ("one,op=rms_norm=planted", "backward", "backward from decoder.final_layernorm to decoder.layers.3"),
    ],
)
def test_a_planted_fault_is_named(pool: Pool, flags: str, fault: str | None, module: str) -> None:
    folder = hf_folder("q25")
    found = compare(pool, f"ours:{folder},{flags}", f"ours:{folder},dp2", fault)
    assert answer(found) == f"FIRST DIFFERENCE: {module}"


def test_the_same_twice_is_the_same_bit_for_bit(pool: Pool) -> None:
    side = f"ours:{hf_folder('q25')},tp2"
    found = compare(pool, side, side)
    assert verdict(found, 0.0) == "EQUAL"


def test_the_command_starts_its_processes(perturbed: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    changed = perturbed("model.norm.weight")
    argv = [f"ours:{changed},tp2", f"hf:{hf_folder('q25')}", "--seq-length", "8", "--timeout", "100", "--all"]
    assert tool.main([*argv, "--text", "A text that is short."]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FIRST DIFFERENCE: forward decoder.final_layernorm"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{model}", "cannot be read"),
        ("hf:{model},tp2", "takes no such option"),
        ("ours:/nowhere,tp2", "no Hugging Face folder"),
        ("ours:{model},tp2+zz", "part of the layout"),
        ("ours:{model},rotary-bass=3", "not a known option"),
        ("ours:{model},rotary-base=x", "does not take this value"),
    ],
)
def test_sides_that_cannot_be_read(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_side(text.format(model=hf_folder("q25")))


def test_a_layout_that_cannot_be_is_refused_before_a_process_starts(capsys: pytest.CaptureFixture[str]) -> None:
    folder = hf_folder("q25")
    assert tool.main([f"ours:{folder},tp3", f"hf:{folder}"]) == 2
    assert "--tensor-model-parallel-size" in capsys.readouterr().err


def test_tokens_are_those_given_over_and_over(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = parse_side(f"hf:{hf_folder('q25')}")
    wanted = AutoTokenizer.from_pretrained(model.folder)("some text", add_special_tokens=False)["input_ids"]
    prefix = str(tmp_path / "corpus")
    with IndexedWriter(prefix, token_dtype(328)) as writer:
        ids = np.array(wanted, dtype=writer.dtype)
        writer.add_documents(ids.tobytes(), np.array([len(ids)], dtype=np.int32).tobytes())
        writer.commit()
    for given in (["--text", "some text"], ["--data-path", prefix]):
        namespace = tool.build_parser().parse_args(["A", "B", *given, "--sequences", "3", "--seq-length", "11"])
        tokens = tool.tokens_of(namespace, model, model)
        assert tokens.shape == (3, 12)
        assert tokens.flatten().tolist() == wanted * 4


# Starting processes -------------------------------------------------------------------------------------------------

STUCK = """
import faulthandler, os, sys, time
sys.path.insert(0, {folder!r})
faulthandler.register(10, file=open(os.path.join({folder!r}, "stack-" + os.environ["RANK"]), "w"))
open(os.path.join({folder!r}, "progress-" + os.environ["RANK"]), "w").write("forward embedding")
if os.environ["RANK"] == "1":
    def stubborn():
        time.sleep(60)
    stubborn()
from torch.distributed import waiting
"""


def test_a_stuck_rank_is_named(tmp_path: Path) -> None:
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "waiting.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(SuiteError) as raised:
        launch(["-c", STUCK.format(folder=str(tmp_path))], 2, tmp_path, what="B", timeout=1.0)
    lines = str(raised.value).splitlines()
    assert lines[0] == "B did not end in 1 s"
    assert lines[1].startswith("rank 0 waits for others in ")
    assert lines[2].startswith("rank 1 is stuck in stubborn (")
    assert lines[2].endswith(", after forward embedding")


def test_a_failed_rank_is_named(tmp_path: Path) -> None:
    code = "import os, sys, time; sys.exit('no such op') if os.environ['RANK'] == '1' else time.sleep(0.2)"
    with pytest.raises(SuiteError, match=r"B: 1 of 2 processes failed\nrank 1: no such op"):
        launch(["-c", code], 2, tmp_path, what="B", timeout=30.0)
