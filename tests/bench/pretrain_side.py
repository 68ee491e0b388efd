"""One side of the pretraining benchmark, in a process of its own.

``python -m tests.bench.pretrain_side SIDE MICRO_BATCH`` builds the model, then takes a step for each line on its
standard input and answers with the seconds of the step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 8,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
}
"""Qwen2.5-0.5B with 8 layers and a 32,000 word vocabulary: 150M parameters."""
LENGTH = 1024
GLOBAL_BATCH = 8
THREADS = 2

Step = Callable[[], float]


def token_ids() -> torch.Tensor:
    """``[GLOBAL_BATCH, LENGTH + 1]``."""
    return torch.randint(0, SHAPE["vocab_size"], (GLOBAL_BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))


def ours(micro_batch: int) -> Step:
    """The suite: bf16 compute, fp32 main weights, distributed optimizer over one rank."""
    from mindspeed_llm.config.resolve import from_values
    from mindspeed_llm.models.registry import family_for
    from mindspeed_llm.training.initialize import initialize
    from mindspeed_llm.training.objective import Batch, pretraining
    from mindspeed_llm.training.setup import setup
    from mindspeed_llm.training.step import train_step

    values = {
        "seq_length": LENGTH,
        "micro_batch_size": micro_batch,
        "global_batch_size": GLOBAL_BATCH,
        "train_iters": 1000,
        "lr": 1e-4,
        "lr_decay_style": "constant",
        "weight_decay": 0.1,
        "bf16": True,
        "use_distributed_optimizer": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "make_vocab_size_divisible_by": 1,
    }
    cfg = from_values({**family_for(SHAPE).config_to_values(SHAPE), **values})
    initialize(cfg)
    run = setup(cfg)
    ids = token_ids()

    def batches() -> Iterator[Batch]:
        while True:
            for part in ids.split(micro_batch):
                yield {
                    "tokens": part[:, :-1].contiguous(),
                    "labels": part[:, 1:].contiguous(),
                    "loss_mask": torch.ones(part.shape[0], LENGTH),
                    "position_ids": torch.arange(LENGTH).expand(part.shape[0], -1),
                }

    stream = [batches()]
    return lambda: train_step(run, pretraining, stream).loss


def transformers_side(micro_batch: int, *, pure_bf16: bool = False) -> Step:
    """transformers: fp32 weights and autocast to bf16, or everything in bf16; torch's fused AdamW."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {key: value for key, value in SHAPE.items() if key not in ("model_type", "architectures")}
    model: Any = Qwen2ForCausalLM(Qwen2Config(**shape)).train()
    if pure_bf16:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids = token_ids()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in ids.split(micro_batch):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not pure_bf16):
                logits = model(part[:, :-1]).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())
            (loss * micro_batch / GLOBAL_BATCH).backward()
            total += loss.item() * micro_batch / GLOBAL_BATCH
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def imports_only(micro_batch: int) -> Step:
    """What both sides import, and nothing built: the baseline of their memory."""
    import transformers  # noqa: F401
    from transformers import Qwen2ForCausalLM  # noqa: F401

    import mindspeed_llm.training.setup  # noqa: F401

    return lambda: 0.0


SIDES: dict[str, Callable[[int], Step]] = {
    "ours": ours,
    "autocast": transformers_side,
    "bf16": lambda micro_batch: transformers_side(micro_batch, pure_bf16=True),
    "imports": imports_only,
}


def main() -> None:
    torch.set_num_threads(THREADS)
    step = SIDES[sys.argv[1]](int(sys.argv[2]))
    for _ in sys.stdin:
        started = time.perf_counter()
        loss = step()
        sys.stdout.write(f"step {time.perf_counter() - started} {loss}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
