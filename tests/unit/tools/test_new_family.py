"""A family is drafted from those that there are, and proved against transformers, or what it lacks is listed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mindspeed_llm.checkpoint.names import compile_names
from mindspeed_llm.config.schema import field_table
from mindspeed_llm.errors import SuiteError
from mindspeed_llm.models.registry import families
from mindspeed_llm.tools.compare.sides import Side
from mindspeed_llm.tools.new_family import __main__ as tool
from mindspeed_llm.tools.new_family import proof
from mindspeed_llm.tools.new_family.drafting import Draft, draft_family
from mindspeed_llm.tools.new_family.folder import read_model
from mindspeed_llm.tools.new_family.library import known_families
from mindspeed_llm.tools.new_family.package import Work
from mindspeed_llm.tools.new_family.proof import registered, write_tiny
from mindspeed_llm.tools.new_family.writing import write_family
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.parity.layouts import parse_layout
from tests.parity.reference import compare, train

ROOT = Path(__file__).resolve().parents[3]
CASES = "tests.unit.tools.cases_new_family"
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
}
"""The shape of Granite 3 2B, which has no family here."""


def config_folder(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def draft(folder: Path, without: str) -> Draft:
    return draft_family(read_model(folder), known_families([without]), "drafted")


def sources() -> dict[Path, str]:
    """What stands in the families' folder and beside the tool."""
    paths = [path for part in ("models", "tools") for path in (ROOT / "mindspeed_llm" / part).rglob("*.py")]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "glm4", "phi3"])
def test_a_hidden_family_is_drafted_as_it_is(name: str) -> None:
    found, own = draft(hf_folder(name), name), families()[name]
    assert not found.left
    config = json.loads((hf_folder(name) / "config.json").read_text())
    values = own.config_to_values(config)
    assert found.family.config_to_values(config) == values
    # The same tensors, made in the same way.
    model = {each: spec.default for each, spec in field_table().items()} | values
    assert compile_names(found.family, model).entries == compile_names(own, model).entries


def test_a_new_family_joins_through_an_entry_point(
    tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granite from its config.json alone: drafted, proved and trained in a folder outside ours."""
    # Training below runs the other one.
    monkeypatch.setattr(proof, "LAYOUTS", ("one",))
    before, output = sources(), tmp_path / "package"
    lines: list[str] = []

    def run(side: Side, tokens: torch.Tensor, captured: Path) -> None:
        where = {"folder": output, "module": work.module}
        pool.run(f"{CASES}:capture", side.world, side=side.text, tokens=tokens, captured=captured, **where)

    def measure(folder: Path, module: str, tiny: Path) -> float:
        (error,) = pool.run(f"{CASES}:measure", 1, folder=folder, module=module, tiny=tiny)
        return error

    work = Work(read_model(config_folder(tmp_path / "hf", GRANITE)), "granite", output, lines.append, run, measure)
    assert work.draft() == 0, lines
    assert work.prove() == 0, lines
    assert [line.split(":")[0] for line in lines[-5:]] == ["  proved"] * 5
    with registered(output, work.module):
        family = families()["granite"]
        values = family.config_to_values(GRANITE)
        factors = ("embedding_multiplier", "residual_multiplier", "output_multiplier", "softmax_scale")
        assert [values[name] for name in factors] == [12.0, 0.22, 1 / 8, 0.015625]
        tiny = tmp_path / "tiny"
        write_tiny(work.model.kind, family, tiny)
    assert "granite" not in families()
    wanted = train(tiny, 7, tmp_path / "gradients")
    layout = "tp2+sp+pp2"
    world, _ = parse_layout(layout)
    ranks = pool.run(f"{CASES}:train", world, folder=output, module=work.module, reference=wanted, layout=layout)
    assert not [fault for row in compare(ranks, wanted) for fault in row.faults()]

    # As people would have written it, and light to import.
    for command in (["check"], ["format", "--check"]):
        config = f"--config={ROOT / 'pyproject.toml'}"
        subprocess.run([sys.executable, "-m", "ruff", *command, config, str(work.file)], check=True, timeout=60)
    light = f"import sys, {work.module}; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", light], check=True, cwd=output, timeout=60)
    assert {path.name for path in output.iterdir() if path.suffix} == {work.file.name, "pyproject.toml"}
    assert sources() == before

    # What is there stays, and what is known is not drafted again.
    text = work.file.read_text()
    assert tool.main([str(tmp_path / "hf"), "--output", str(output), "--no-proof"]) == 0
    assert "stays as it is" in capsys.readouterr().out
    assert work.file.read_text() == text
    assert tool.main([str(hf_folder("llama")), "--name", "new", "--output", str(tmp_path / "no")]) == 2
    assert "there is a family for this model" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_wrong_family_is_not_proved(tmp_path: Path, pool: Pool) -> None:
    """A factor that config.json names and the family does not compute is seen."""
    folder = tmp_path / "package"
    found = draft(config_folder(tmp_path / "hf", GRANITE), "")
    text = write_family(dataclasses.replace(found, family=dataclasses.replace(found.family, name="granite")))
    wrong = text.replace(
        'divisor("logits_scaling", "output_multiplier", default=1.0)', 'Ignore("logits_scaling", why="")'
    )
    wrong = wrong.replace("Const(", "Const(output_multiplier=1.0, ").replace(
        "import annotations\n", "import annotations\nfrom mindspeed_llm.models.family import Ignore\n"
    )
    assert wrong != text
    folder.mkdir()
    (folder / "wrong_granite.py").write_text(wrong)
    tiny = tmp_path / "tiny"
    write_tiny(found.model.kind, found.family, tiny)
    (error,) = pool.run(f"{CASES}:measure", 1, folder=folder, module="wrong_granite", tiny=tiny)
    assert error > 0.1


def test_what_has_no_place_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No class of transformers, keys that no rule reads, a tensor that no block has."""
    folder = tmp_path / "strange"
    shutil.copytree(hf_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["StrangeForCausalLM"],
        "model_type": "strange",
        "swirl": 3,
        "layer_swirls": [1, 2, 3, 4],
    }
    config_folder(folder, config)
    weights = safetensors_of(folder)
    weights["model.layers.0.self_attn.swirl.weight"] = torch.zeros(3, 5)
    weights |= {f"model.layers.{layer}.self_attn.swirl.weight": torch.zeros(3, 5) for layer in range(4)}
    weights["model.once.weight"] = torch.zeros(7)
    save(weights, folder)
    assert tool.main([str(folder), "--output", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().out
    todo = [line.split(": ", 1)[1] for line in told.splitlines() if line.startswith("  TO DO: ")]
    assert [line.split(":")[0].split(" [")[0] for line in todo] == [
        "key layer_swirls",
        "key swirl",
        "tensor model.layers.{l}.self_attn.swirl.weight",
        "tensor model.once.weight",
    ]
    text = (tmp_path / "out" / "mindspeed_llm_strange.py").read_text()
    assert "# To be completed" in text
    assert "model.once.weight" in text
    # The same command goes on where the file was left.
    assert tool.main([str(folder), "--output", str(tmp_path / "out")]) == 1
    assert "transformers has no class for the model" in capsys.readouterr().out


def safetensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def save(weights: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is no size"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"hidden_size": "wide"}, "cannot build GraniteForCausalLM"),
        ({"hidden_size": -64}, "hidden_size is no size"),
        ({"num_attention_heads": 0}, "num_attention_heads is no size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": [float("inf")]}, "rope_theta"),
        ({"architectures": "GraniteForCausalLM"}, "architectures is a list of names"),
        ({"architectures": ["os"]}, "has no weights"),
        ({"model_type": 7}, "model_type is a name"),
        ({'x"; import os  #': 1}, "names that are none"),
        ({"model_type": 'a"""\nimport os'}, "names that are none"),
    ],
)
def test_poison_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], what: str
) -> None:
    folder = config_folder(tmp_path / "hf", GRANITE | changes)
    assert tool.main([str(folder), "--name", "poison", "--output", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: "), told
    assert what in told
    assert not (tmp_path / "out").exists()


def test_nesting_without_end_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(SuiteError, match="nested too deeply"):
        read_model(folder)


def test_shapes_of_a_config_are_those_that_save_pretrained_writes() -> None:
    model = read_model(hf_folder("q25tied"))
    assert model.kind.shapes(model.config) == model.shapes
    assert "lm_head.weight" not in model.shapes
    assert transformers.Qwen2ForCausalLM.__name__ == model.kind.name
