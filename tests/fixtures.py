"""Tiny Hugging Face models and a byte tokenizer, made on the spot and kept for the session.

Every weight is drawn anew (vectors around where they start, the rest N(0, 0.05)), so that a tensor that is dropped,
swapped or transposed cannot go unseen. Vocabulary 328 needs no padding at the usual test settings; 323 is odd on
purpose.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mindspeed_llm.models.registry import families, family_by_name
from tests.oracles import ORACLES

ORACLE = "oracle.safetensors"
SPECIAL = ("<|im_end|>", "<|pad|>", "<|endoftext|>", "<|im_start|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Ids that differ from transformers' defaults, so that an export which forgets them is seen.
_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257}


def _rope(rope_type: str = "default", theta: float = 1e6, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **more}}


_YARN = _rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=128)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in families()},
    "q25": ("qwen2", {}),
    "q25tied": ("qwen2", {"tie_word_embeddings": True}),
    # Layers 2 and 3 see eight tokens.
    "q25window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "llama31": ("llama", {}),
    "llama32tied": ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "llamalin": ("llama", _rope("linear", 1e4, factor=8.0)),
    "llamayarn": ("llama", _YARN),
    "llamadyn": ("llama", {**_rope("dynamic", 1e4, factor=4.0), "max_position_embeddings": 16}),
    "baichuan13": ("baichuan", {"max_position_embeddings": None}),
    "llamaplain": ("llama", _rope("default", 1e4)),
    # Of two pipeline stages the first has no experts.
    "q3moelate": ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
    "llamabias": ("llama", {**_rope("default", 1e4), "attention_bias": True, "mlp_bias": True}),
}
"""Name -> family, and what differs from the family's tiny model; each family stands here under its own name, too."""


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="mindspeed_llm_fixtures."))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def tokenizer_folder() -> Path:
    """A byte-level tokenizer: ids 0 to 255 are bytes, then end-of-turn, pad, end-of-text, start-of-turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL),
    )
    tokenizer.chat_template = CHATML
    folder = _root() / "tokenizer"
    tokenizer.save_pretrained(folder)
    return folder


def hf_folder(name: str, vocab: int = 328, seed: int = 0, **changes: Any) -> Path:
    """A folder as save_pretrained writes it, with tokenizer, for model ``name`` of :data:`MODELS`.

    Args:
        vocab: rows of the embedding.
        seed: of the weights.
        changes: config values other than the model's own.
    """
    return _hf_folder(name, seed, tuple(sorted({"vocab_size": vocab, **changes}.items())))


@functools.cache
def _hf_folder(name: str, seed: int, changes: tuple[tuple[str, Any], ...]) -> Path:
    family_name, differs = MODELS[name]
    family = family_by_name(family_name)
    config = {**family.tiny, **_TOKENS, **differs, **dict(changes)}
    folder = _root() / "-".join([name, str(seed), *(f"{key}={value}" for key, value in changes)])
    if family_name in ORACLES:
        _relaid_folder(folder, family_name, config, seed)
    else:
        import transformers

        kind = getattr(transformers, family.hf_architectures[0])
        model = kind(kind.config_class(**config)).float().eval()
        redraw(model, seed)
        model.save_pretrained(folder)
    shutil.copytree(tokenizer_folder(), folder, dirs_exist_ok=True)
    return folder


def _relaid_folder(folder: Path, family_name: str, config: dict[str, Any], seed: int) -> None:
    """A folder of a family that transformers has no class for; ``oracle.safetensors`` are its oracle's own weights."""
    family = family_by_name(family_name)
    if "padded_vocab_size" in config:
        config["padded_vocab_size"] = config.pop("vocab_size", config["padded_vocab_size"])
    oracle = ORACLES[family_name]
    model = oracle.build(config).float().eval()
    redraw(model, seed)
    folder.mkdir()
    described = {"architectures": list(family.hf_architectures[:1]), "model_type": family.hf_model_type, **config}
    (folder / "config.json").write_text(json.dumps({**described, "torch_dtype": "float32"}))
    own = {name: tensor.contiguous() for name, tensor in stored_tensors(model).items()}
    save_file(own, folder / ORACLE)
    relaid = {name: tensor.contiguous() for name, tensor in oracle.relay(own, config).items()}
    save_file(relaid, folder / "model.safetensors", {"format": "pt"})


def stored_tensors(model: Any) -> dict[str, torch.Tensor]:
    """What is saved of a transformers model: parameters, of tied ones the first, and persistent buffers."""
    stored = set(model.state_dict())
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in stored}
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | buffers


@torch.no_grad()
def redraw(model: Any, seed: int = 0) -> None:
    """Fresh values for every stored tensor of a transformers model."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in stored_tensors(model).values():
        if tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=generator) * 0.05
            # Vectors stay around what they start from: norms 1, or 0 where the weight is a distance from 1; biases 0.
            tensor.copy_(drawn + tensor.mean().round() if tensor.dim() == 1 else drawn)
    model.tie_weights()
