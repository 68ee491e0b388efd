"""The operations per token against what torch counts while transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.models.registry import family_by_name, family_for
from mindspeed_llm.training.flops import flops_per_token

BATCH, LENGTH = 2, 48


def configuration(family: str, **changes: Any) -> tuple[Any, Any]:
    """transformers' configuration and ours of a tiny model."""
    description = family_by_name(family)
    kind = description.hf_architectures[0].removesuffix("ForCausalLM")
    hf = getattr(transformers, f"{kind}Config")(**{**description.tiny, **changes})
    hf.architectures = list(description.hf_architectures)
    run = {"seq_length": LENGTH, "micro_batch_size": 1, "train_iters": 1, "lr": 1e-3, "make_vocab_size_divisible_by": 1}
    values = hf.to_dict()
    return hf, from_values({**family_for(values).config_to_values(values), **run}, world_size=1)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("llama", {}),
        ("llama", {"num_hidden_layers": 3, "num_key_value_heads": 4, "intermediate_size": 56}),
        ("llama", {"head_dim": 24, "num_key_value_heads": 1, "vocab_size": 136}),
        ("qwen2", {"tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_equals_what_torch_counts(family: str, changes: dict[str, Any]) -> None:
    hf, cfg = configuration(family, **changes)
    hf._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="eager").float()
    tokens = torch.randint(0, hf.vocab_size, (BATCH, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    head = cfg.transformer.kv_channels
    # Eager attention computes the half above the diagonal as well: two products over s / 2 more keys, and backward
    # twice that.
    above_diagonal = 3 * hf.num_hidden_layers * 2 * (2 * hf.num_attention_heads * head * LENGTH / 2)
    assert counter.get_total_flops() / (BATCH * LENGTH) == flops_per_token(cfg) + above_diagonal
