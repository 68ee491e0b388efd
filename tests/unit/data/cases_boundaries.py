"""What a rank runs to show what packed documents attend to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.data.batches import build_data_iterator, get_batch
from mindspeed_llm.data.datasets import build_datasets
from mindspeed_llm.data.tokenizer import NullTokenizer
from mindspeed_llm.training.objective import pretraining
from tests.distributed.cases_hf_weights import configuration, load


def outputs(folder: Path, prefix: str, eod: int, samples: int, variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Per variant of the data flags: the batches, and the logits and losses of the loaded model on each."""
    common: dict[str, Any] = {"data_path": (prefix,), "split": "1,0,0", "seq_length": 8, "num_workers": 0}
    model = load(folder, configuration(folder, **common))[0].eval()
    found: dict[str, Any] = {}
    for name, flags in variants.items():
        cfg = configuration(folder, **common, **flags)
        train = build_datasets(cfg, NullTokenizer(eod), [samples, 0, 0], shuffle=False)[0]
        iterator = build_data_iterator(train, cfg, 0)
        found[name] = []
        for _ in range(samples // (cfg.training.micro_batch_size or 1)):
            batch: dict[str, Any] = get_batch(iterator, cfg, eod=eod)
            with torch.no_grad():
                losses, _ = pretraining(iter([batch]), model)
                logits, _ = pretraining(iter([{**batch, "labels": None}]), model)
            found[name].append({**batch, "losses": losses, "logits": logits})
    return found
