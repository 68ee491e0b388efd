"""Runs transformers' side of a comparison once, forward and backward."""

# pyright: basic
# transformers' models have no types.

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_llm.device import current
from mindspeed_llm.tools.compare.points import HEAD, points
from mindspeed_llm.tools.compare.recorder import RankFacts, Recorder
from mindspeed_llm.tools.compare.sides import Side


def capture(side: Side, tokens: Tensor, folder: Path) -> None:
    """Run ``side`` on ``tokens [sequences, s + 1]``.

    Args:
        side: transformers'.
        tokens: what it reads and is to predict.
        folder: gets what :class:`Recorder` leaves.
    """
    import transformers

    dtype = torch.bfloat16 if side.half else torch.float32
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(side.folder, dtype=dtype, trust_remote_code=False)
    model = loaded.eval().to(current().torch_device)
    # transformers gives the row of the padding token no gradient; here all tokens count.
    model.get_input_embeddings().padding_idx = None
    tokens = tokens.to(current().torch_device)
    known = points(side.names)
    (head,) = known[HEAD].hf
    wanted = {name for point in known.values() for name in point.hf} - {head}
    with Recorder(folder, 0) as recorder:
        recorder.watch(model.named_modules(), wanted)
        logits = model(tokens[:, :-1], use_cache=False).logits
        recorder.record(head, 0, logits, logits)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            recorder.save_gradient(name, parameter.grad)
    count = tokens[:, 1:].numel()
    recorder.save(RankFacts(0, 0, recorder.order, 1, 1.0, (loss.item() * count, count)))
