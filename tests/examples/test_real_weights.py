"""A published model, SmolLM2-135M-Instruct, through both converters and by three names: same text, same loss.

``shakespeare.txt`` is the beginning of the plays (public domain) as "tinyshakespeare" has them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.cli.convert import main as convert
from tests.get_material import MATERIAL

GGUF = "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).with_name("shakespeare.txt")
TOKENS = 1024
#: Nats per token that transformers gives these weights, known beforehand.
LOSS = 3.709
pytestmark = pytest.mark.material(GGUF)

Tensors = dict[str, torch.Tensor]


def _as_llama(config: dict[str, Any], tensors: Tensors) -> None:
    del config, tensors


def _as_qwen2(config: dict[str, Any], tensors: Tensors) -> None:
    """The same with biases of zero on queries, keys and values."""
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    for key in ("attention_bias", "mlp_bias", "pretraining_tp", "head_dim"):
        config.pop(key, None)
    for name in [
        name for name in tensors if "self_attn" in name and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
    ]:
        tensors[name.replace("weight", "bias")] = torch.zeros(tensors[name].shape[0], dtype=tensors[name].dtype)


def _as_mistral(config: dict[str, Any], tensors: Tensors) -> None:
    """The same by another name, without a window."""
    del tensors
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    for key in ("attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(key, None)


HOMES: dict[str, Callable[[dict[str, Any], Tensors], None]] = {
    "llama": _as_llama,
    "qwen2": _as_qwen2,
    "mistral": _as_mistral,
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published file, de-quantised to bf16, as a Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, path = tmp_path_factory.mktemp("smollm2"), MATERIAL / GGUF
    read = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.bfloat16, **read)
    # transformers adds where it read from, and how.
    added = ("quantization_config", "_model_name_or_path")
    config = {key: value for key, value in model.config.to_dict().items() if key not in added}
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(path.parent, **read).save_pretrained(folder)
    return folder


def rehome(published: Path, home: str, folder: Path) -> Path:
    shutil.copytree(published, folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    HOMES[home](config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("home", HOMES)
def test_a_published_model_survives_both_converters(home: str, published: Path, tmp_path: Path) -> None:
    """Through per-rank trees at TP3 PP2: it has nine heads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given, back = rehome(published, home, tmp_path / "given"), tmp_path / "back"
    layout = ["--target-tensor-parallel-size", "3", "--target-pipeline-parallel-size", "2", "--save-format", "legacy"]
    to_mg = ["--load-model-type", "hf", "--save-model-type", "mg", "--load-dir", str(given)]
    assert convert([*to_mg, "--save-dir", str(tmp_path / "mg"), *layout]) == 0
    to_hf = ["--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", str(tmp_path / "mg")]
    assert convert([*to_hf, "--save-dir", str(back)]) == 0
    before, after = load_file(given / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model: Any = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
    # By the name of its new home, transformers would split words as that family does.
    tokenizer = AutoTokenizer.from_pretrained(published)
    ids = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[:, :TOKENS]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
        prompt = tokenizer("The capital of France is", return_tensors="pt")
        said = tokenizer.decode(model.generate(**prompt, max_new_tokens=1, do_sample=False)[0])
    assert ids.shape[1] == TOKENS
    assert loss == pytest.approx(LOSS, abs=5e-4)
    assert said.endswith(" Paris")
