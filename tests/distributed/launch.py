"""Whole runs of ``pretrain_gpt.py`` in the pool's ranks, and what transformers makes of the batches that they read."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed_llm.cli import preprocess
from mindspeed_llm.config.schema import field_table
from tests.distributed.pool import Pool
from tests.fixtures import tokenizer_folder
from tests.parity.layouts import parse_layout

EOD = 256
SEQUENCE = 32
GLOBAL_BATCH = 4

TINY: dict[str, Any] = {
    "--seq-length": SEQUENCE,
    "--micro-batch-size": 1,
    "--global-batch-size": GLOBAL_BATCH,
    "--train-iters": 3,
    "--lr": 1e-3,
    "--lr-decay-style": "constant",
    "--weight-decay": 0.1,
    "--adam-beta2": 0.95,
    "--clip-grad": 1.0,
    "--seed": 1234,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
    "--log-interval": 1,
    "--eval-iters": 0,
    "--num-workers": 0,
    "--split": "1,0,0",
    "--make-vocab-size-divisible-by": 1,
}


def write_corpus(folder: Path, documents: int = 300) -> str:
    """Texts of 1 to 25 letters as preprocess_data.py makes them; what --data-path takes."""
    draw = random.Random(7)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 25))) for _ in range(documents)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["--input", folder / "texts.jsonl", "--output-prefix", folder / "corpus", "--append-eod"]
    arguments += ["--tokenizer-name-or-path", tokenizer_folder(), "--workers", 1]
    assert preprocess.main([str(argument) for argument in arguments]) == 0
    return str(folder / "corpus_text_document")


def command_line(flags: dict[str, Any]) -> list[str]:
    """``{"--flag": value}`` as arguments; True is a switch, None leaves the flag out, a tuple is several values."""
    found: list[str] = []
    for flag, value in flags.items():
        if value is not None and value is not False:
            found.append(flag)
            found += [] if value is True else [str(v) for v in (value if isinstance(value, tuple) else (value,))]
    return found


def placed(flags: dict[str, Any], layout: str) -> tuple[int, list[str]]:
    """Number of processes and command line of ``layout``."""
    world, values = parse_layout(layout)
    return world, command_line({**flags, **{field_table()[name].flag: value for name, value in values.items()}})


def launch(pool: Pool, flags: dict[str, Any], layout: str = "one", timeout: float = 60) -> list[dict[str, Any]]:
    """Run the command line in the processes of ``layout`` (such as ``tp2+sp+dp2``); see ``cases_pretrain.command``."""
    world, argv = placed(flags, layout)
    target = "tests.distributed.cases_pretrain:command"
    return pool.run(target, world, timeout=timeout, process_group=False, argv=argv)


def succeed(pool: Pool, flags: dict[str, Any], layout: str = "one") -> list[dict[str, Any]]:
    """:func:`launch`, and every rank's exit status is 0."""
    results = launch(pool, flags, layout)
    assert [result["code"] for result in results] == [0] * len(results), results[0]["err"]
    return results


def read_rows(path: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The rows of one kind of a metrics file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def global_batches(results: Sequence[dict[str, Any]], passes: int) -> list[list[dict[str, torch.Tensor]]]:
    """Per step the micro-batches of all data-parallel ranks, each with ``passes`` of them in a step."""
    by_rank = {batch["dp"]: result["batches"] for result in results for batch in result["batches"][:1]}
    steps = len(by_rank[0]) // passes
    return [[batch for own in by_rank.values() for batch in own[s * passes : (s + 1) * passes]] for s in range(steps)]


@cache
def transformer(folder: Path) -> Any:
    """transformers' model in fp32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def token_losses(folder: Path, batch: dict[str, torch.Tensor], *, per_document: bool = False) -> torch.Tensor:
    """Loss of each token ``[b, s]``; with ``per_document`` transformers sees one document at a time."""
    model = transformer(folder)
    rows = []
    for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True):
        bounds = [0, len(tokens)]
        if per_document:
            inner = [i + 1 for i, token in enumerate(tokens.tolist()[:-1]) if token == EOD]
            bounds = [0, *inner, len(tokens)]
        parts = pairwise(bounds)
        logits = torch.cat([model(tokens[None, start:end]).logits[0] for start, end in parts])
        rows.append(F.cross_entropy(logits, labels, reduction="none"))
    return torch.stack(rows)


def reference(
    folder: Path, batches: Sequence[dict[str, torch.Tensor]], *, per_token: bool = True, per_document: bool = False
) -> tuple[float, float]:
    """Token mean of the loss, and norm of the gradient of it, or else of the mean of the micro-batches' means."""
    model = transformer(folder)
    model.zero_grad()
    total, count, means = torch.zeros(()), torch.zeros(()), []
    for batch in batches:
        losses = token_losses(folder, batch, per_document=per_document) * batch["loss_mask"]
        total, count = total + losses.sum(), count + batch["loss_mask"].sum()
        means.append(losses.sum() / batch["loss_mask"].sum().clamp(min=1))
    mean = total / count
    (mean if per_token else torch.stack(means).mean()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(mean.detach()), float(norm)
