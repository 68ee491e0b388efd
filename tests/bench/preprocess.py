"""``preprocess_data.py`` against the ``tokenizers`` library alone, on real text with Qwen2.5's tokenizer.

Ours is the whole command in a new process: start-up, reading, parsing, encoding, writing. The library gets rows that
are already parsed, encodes them in one call of ``encode_batch_fast`` on all cores, and hands out its ids; its start-up
is not counted. Texts and tokenizer come from ``make material``.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from tests.bench.harness import ROOT, AnonymousPeak, Figure, Figures, Machine, alternate, benchmark, run_python, seconds

MATERIAL = ROOT / ".cache" / "material"
TOKENIZER = MATERIAL / "tokenizers" / "qwen2_5"
MB = 10**6
CORPORA = {"en": 50 * MB, "zh": 16 * MB}

_LIBRARY = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
started = time.perf_counter()
ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
print(time.perf_counter() - started, sum(map(len, ids)))
"""


@benchmark
def preprocess(machine: Machine) -> Figures:
    """Rates in MB of jsonl a second, then peak anonymous memory at four times the text."""
    if not TOKENIZER.is_dir():
        raise SystemExit("error: there is no material; run `make material` first")
    figures: Figures = []
    with tempfile.TemporaryDirectory() as folder:
        for name, size in CORPORA.items():
            corpus = write_corpus(Path(folder, f"{name}.jsonl"), MATERIAL / "text" / f"{name}.jsonl", size)
            figures.append(
                alternate(
                    f"preprocess_data.py, {name}, {corpus.stat().st_size / MB:.0f} MB, 2 workers",
                    f"tokenizers {version('tokenizers')} encode_batch_fast on parsed rows, 2 threads",
                    rate(corpus, seconds(lambda path=corpus: prepare(path))),
                    rate(corpus, lambda path=corpus: library_seconds(path)),
                    unit="MB/s",
                    target=0.9,
                    turns=5,
                )
            )
        figures.append(memory(Path(folder)))
    return figures


def memory(folder: Path) -> Figure:
    """Peak anonymous memory of the command and its workers at 200 MB and at 50 MB."""
    source = MATERIAL / "text" / "en.jsonl"
    large = write_corpus(folder / "large.jsonl", source, 200 * MB)
    small = write_corpus(folder / "small.jsonl", source, 50 * MB)
    return alternate(
        "peak anonymous memory, 200 MB of text",
        "peak anonymous memory, 50 MB of text",
        lambda: peak_anonymous_mib(large),
        lambda: peak_anonymous_mib(small),
        unit="MiB",
        turns=3,
        warm_up=0,
    )


def write_corpus(path: Path, source: Path, size: int) -> Path:
    """The first ``size`` bytes of rows of ``source``, over and over if it has fewer."""
    lines = source.read_bytes().splitlines(keepends=True)
    written = 0
    with open(path, "wb") as stream:
        for line in itertools.cycle(lines):
            if written + len(line) > size:
                break
            written += stream.write(line)
    return path


def rate(corpus: Path, measure: Callable[[], float]) -> Callable[[], float]:
    """A measure in MB/s from one in seconds."""
    return lambda: corpus.stat().st_size / MB / measure()


@contextmanager
def command(corpus: Path) -> Iterator[list[str]]:
    """The preparation of a corpus into a folder that goes away."""
    with tempfile.TemporaryDirectory() as output:
        flags = ["--input", str(corpus), "--output-prefix", f"{output}/o", "--workers", "2"]
        flags += ["--tokenizer-name-or-path", str(TOKENIZER), "--append-eod", "--log-interval", "1000000"]
        yield ["preprocess_data.py", *flags]


def prepare(corpus: Path) -> None:
    """Run the preparation as a user does."""
    with command(corpus) as arguments:
        run_python(arguments)


def library_seconds(corpus: Path) -> float:
    """Seconds that the library takes to encode the rows of a corpus on two threads."""
    arguments = ["-c", _LIBRARY, str(TOKENIZER / "tokenizer.json"), str(corpus)]
    return float(run_python(arguments, environment={"RAYON_NUM_THREADS": "2"}).split()[0])


def peak_anonymous_mib(corpus: Path) -> float:
    """Peak of the preparation and its workers."""
    with command(corpus) as arguments:
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
        with AnonymousPeak(process.pid) as peak:
            process.wait()
    if process.returncode:
        raise RuntimeError(f"the preparation ended with {process.returncode}")
    return peak.bytes / 2**20
