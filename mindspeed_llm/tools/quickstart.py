"""``make quickstart``: the main job on real text, from raw file to a model that transformers loads and continues.

Prepares the English and Chinese text of ``examples/quickstart``, pretrains a small Qwen2.5 on two gloo ranks (TP2,
sequence parallel, distributed optimizer), resumes from the middle and proves that the overlap is equal, exports a
Hugging Face folder from the portable checkpoint, and lets transformers repeat the validation loss and write a sentence.
Everything lands in ``out/quickstart``; a check that fails makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import SuiteError
from mindspeed_llm.tools.source_tree import source_tree

OUT = Path("out/quickstart")
EXAMPLE = Path("examples/quickstart")
TRAIN_ITERS = 300
HALF = TRAIN_ITERS // 2
OVERLAP = 3
"""Steps after the half-way save that both the first run and the resumed one take, and that must be equal."""
EVAL_SAMPLES = 48
SEQ_LENGTH = 256
EQUAL_FIELDS = ("iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate")
PROMPT = "JULIET:\n"


class Quickstart:
    """The stages of the run, their seconds and their findings."""

    def __init__(self, install_seconds: float | None) -> None:
        self.seconds: dict[str, float | None] = {"install": install_seconds}
        self.started = time.monotonic()
        self.failures: list[str] = []

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        """Time a stage and say that it runs."""
        sys.stdout.write(f"[quickstart] {name}: {what}\n")
        sys.stdout.flush()
        begin = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - begin, 1)

    def check(self, name: str, holds: bool) -> bool:
        """Record a check that does not hold."""
        if not holds:
            self.failures.append(name)
        return holds


def run(command: Sequence[str], log: Path, **environment: str) -> None:
    """Run ``command``, its output in ``log``.

    Raises:
        SuiteError: it failed; the end of the log is shown.
    """
    with log.open("w") as output:
        process = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}, check=False
        )
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise SuiteError(
            f"{' '.join(command[:4])} ... failed with status {process.returncode}:\n{tail}", fix=f"see {log}"
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def prepare() -> None:
    """Tokenise the two texts."""
    (OUT / "data").mkdir()
    for split in ("train", "valid"):
        command = [sys.executable, "preprocess_data.py", "--input", str(EXAMPLE / "text" / f"{split}.jsonl")]
        command += ["--output-prefix", str(OUT / "data" / split), "--tokenizer-type", "PretrainedFromHF"]
        command += ["--tokenizer-name-or-path", str(EXAMPLE / "model"), "--append-eod"]
        run(command, OUT / "logs" / f"prepare_{split}.log")


def train(log: str, *flags: str, processes: int = 2) -> None:
    """One start of the recipe, with more flags."""
    run(
        ["bash", str(EXAMPLE / "pretrain_quickstart.sh"), "--metrics-file", str(OUT / "metrics.jsonl"),
         "--tensorboard-dir", str(OUT / "tensorboard"), *flags],
        OUT / "logs" / log,
        PYTHON=sys.executable,
        TRAIN_ITERS=str(TRAIN_ITERS),
        NPROC_PER_NODE=str(processes),
    )  # fmt: skip


def export() -> None:
    """One process reads the portable save of two ranks and writes a Hugging Face folder."""
    train(
        "export.log",
        *("--load", str(OUT / "checkpoints"), "--no-load-optim", "--no-load-rng"),
        *("--tensor-model-parallel-size", "1", "--save-hf", str(OUT / "hf"), "--eval-iters", "0"),
        processes=1,
    )


def unigram_entropy() -> float:
    """Entropy in nats of the training tokens' frequencies: the loss of a model that learnt only these."""
    import numpy as np

    from mindspeed_llm.data.indexed import bin_path, read_index

    prefix = str(OUT / "data" / "train_text_document")
    counts = np.bincount(np.fromfile(bin_path(prefix), dtype=read_index(prefix).dtype))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def resumed_equally(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the steps that both runs took are equal text for text."""
    steps = [row for row in rows if row["kind"] == "train"]
    found: dict[int, list[str]] = {}
    for row in steps:
        found.setdefault(row["iteration"], []).append(json.dumps([row[name] for name in EQUAL_FIELDS]))
    twice = [texts for texts in found.values() if len(texts) == 2]
    return len(twice) == OVERLAP and all(first == second for first, second in twice)


def validation_samples() -> list[list[int]]:
    """The token ids, label of the last included, of the samples that the run evaluates on."""
    command = [
        sys.executable,
        "-m",
        "mindspeed_llm.tools.samples",
        "--data-path",
        str(OUT / "data/valid_text_document"),
    ]
    command += ["--seq-length", str(SEQ_LENGTH), "--count", str(EVAL_SAMPLES), "--print-split", "valid"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in printed.splitlines()]
    return [[*row["tokens"], row["labels"][-1]] for row in rows]


def ask_transformers() -> tuple[float, str]:
    """transformers' loss on the validation samples, and what it writes after :data:`PROMPT`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(OUT / "hf", dtype=torch.float32, trust_remote_code=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(OUT / "hf", trust_remote_code=False)
    samples = torch.tensor(validation_samples())
    with torch.no_grad():
        losses = [model(part, labels=part).loss.item() for part in samples.split(8)]
        prompt = tokenizer(PROMPT, return_tensors="pt")
        torch.manual_seed(0)
        written = model.generate(
            **prompt, max_new_tokens=40, do_sample=True, top_k=20, pad_token_id=tokenizer.eos_token_id
        )
    return sum(losses) / len(losses), tokenizer.decode(written[0], skip_special_tokens=True)


def draw(rows: Sequence[Mapping[str, Any]], entropy: float, path: Path) -> None:
    """Training and validation loss over the iterations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for kind, style in (("train", "-"), ("valid", "o")):
        points = {row["iteration"]: row["lm_loss"] for row in rows if row["kind"] == kind}
        axes.plot(list(points), list(points.values()), style, label=f"{kind} loss")
    axes.axhline(entropy, color="grey", linestyle="--", label="unigram entropy")
    axes.set_xlabel("iteration")
    axes.set_ylabel("nats per token")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install-seconds", type=float, help="how long the installation took, for the summary")
    job = Quickstart(parser.parse_args(argv).install_seconds)
    try:
        os.chdir(source_tree())
        shutil.rmtree(OUT, ignore_errors=True)
        (OUT / "logs").mkdir(parents=True)
        summary = _work(job)
    except SuiteError as error:
        sys.stderr.write(f"[quickstart] error: {error}\n")
        return error.exit_code
    (OUT / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _show(summary)
    for failure in job.failures:
        sys.stderr.write(f"[quickstart] FAILED: {failure}\n")
    return 1 if job.failures else 0


def _work(job: Quickstart) -> dict[str, Any]:
    with job.stage("prepare", "raw text to Megatron's .bin/.idx"):
        prepare()
    with job.stage("train", f"{HALF + OVERLAP} steps on two ranks, saved at {HALF}"):
        train("train.log", "--exit-interval", str(HALF + OVERLAP))
    with job.stage("resume", f"from {HALF} to {TRAIN_ITERS}"):
        train("resume.log", "--load", str(OUT / "checkpoints"), "--ckpt-step", str(HALF))
    with job.stage("export", "one process writes a Hugging Face folder from the checkpoint of two"):
        export()
    rows = read_metrics(OUT / "metrics.jsonl")
    valid = [row["lm_loss"] for row in rows if row["kind"] == "valid"]
    entropy = unigram_entropy()
    with job.stage("transformers", "reloads the folder, repeats the validation loss, writes a sentence"):
        theirs, sample = ask_transformers()
    draw(rows, entropy, OUT / "loss.png")
    equal = job.check("the resumed run repeats the first one's steps", resumed_equally(rows))
    job.check("the held-out loss ends below the unigram entropy", valid[-1] < entropy)
    job.check("transformers computes the same validation loss (1e-4)", math.isclose(theirs, valid[-1], rel_tol=1e-4))
    job.seconds["total"] = round(time.monotonic() - job.started + (job.seconds["install"] or 0.0), 1)
    return {
        "seconds": job.seconds,
        "unigram_entropy": entropy,
        "valid_loss_first": valid[0],
        "valid_loss_final": valid[-1],
        "valid_loss_transformers": theirs,
        "resume_equal": equal,
        "sample": sample,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "megatron-core", "transformers")},
        },
    }


def _show(summary: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="quickstart", show_header=False)
    for name, value in summary.items():
        shown = " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else repr(value)
        table.add_row(name, shown)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
