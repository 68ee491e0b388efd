"""Tiny Hugging Face models and a byte tokenizer, made on the spot and kept for the session.

Every weight is drawn anew (norms around 1, the rest N(0, 0.05)), so that a tensor that is dropped, swapped or
transposed cannot go unseen. Vocabulary 328 needs no padding at the usual test settings; 323 is odd on purpose.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

SPECIAL = ("<|im_end|>", "<|pad|>", "<|endoftext|>", "<|im_start|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}


def _rope(rope_type: str = "default", theta: float = 1e6, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **more}}


_LLAMA3 = _rope(
    "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "q25": ("Qwen2", {**_rope(), "tie_word_embeddings": False}),
    "q25tied": ("Qwen2", {**_rope(), "tie_word_embeddings": True}),
    # Layers 2 and 3 see eight tokens.
    "q25window": (
        "Qwen2",
        {
            **_rope(),
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "tie_word_embeddings": False,
        },
    ),
    "llama31": ("Llama", {**_LLAMA3, "head_dim": 16, "tie_word_embeddings": False}),
    "llama32tied": ("Llama", {**_LLAMA3, "head_dim": 32, "tie_word_embeddings": True}),
    "llamalin": ("Llama", {**_rope("linear", 1e4, factor=8.0), "tie_word_embeddings": False}),
    "llamayarn": (
        "Llama",
        {**_rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=128), "tie_word_embeddings": False},
    ),
    "llamabias": (
        "Llama",
        {**_rope("default", 1e4), "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
}
"""Name -> transformers family, and what differs from the common sizes."""


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


def hf_folder(name: str, vocab: int = 328, **changes: Any) -> Path:
    """A folder as save_pretrained writes it, with tokenizer, for model ``name`` of :data:`MODELS`.

    Args:
        vocab: rows of the embedding.
        changes: config values other than the model's own.
    """
    return _hf_folder(name, vocab, tuple(sorted(changes.items())))


@functools.cache
def _hf_folder(name: str, vocab: int, changes: tuple[tuple[str, Any], ...]) -> Path:
    import transformers

    family, differs = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, "vocab_size": vocab, **differs, **dict(changes)})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    redraw(model)
    folder = _root() / "-".join([name, str(vocab), *(f"{key}={value}" for key, value in changes)])
    model.save_pretrained(folder)
    shutil.copytree(tokenizer_folder(), folder, dirs_exist_ok=True)
    return folder


@torch.no_grad()
def redraw(model: Any, seed: int = 0) -> None:
    """Fresh values for every stored tensor of a transformers model."""
    generator = torch.Generator().manual_seed(seed)
    stored = set(model.state_dict())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in stored and tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=generator) * 0.05
            tensor.copy_(drawn + 1.0 if "norm" in name and tensor.dim() == 1 else drawn)
    model.tie_weights()
