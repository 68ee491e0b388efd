"""Find the first module, forward or backward, at which two ways of running a model differ.

A and B are ``hf:FOLDER[,bf16]``, which transformers runs, or ``ours:FOLDER[,LAYOUT][,FLAG][,FLAG=VALUE]...``, which
this suite runs with as many processes as the layout has. Both take the same tokens through one forward and backward
pass without dropout; outputs and gradients are put together from all ranks, and compared module by module under the
names of the family's weight table. The exit status is 0 where all are equal, 1 where not, 2 where there was no answer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from mindspeed_llm.data.indexed import bin_path, read_index
from mindspeed_llm.data.tokenizer import load_tokenizer
from mindspeed_llm.errors import ConfigError, DataError, SuiteError
from mindspeed_llm.tools.compare import layouts, sides
from mindspeed_llm.tools.compare.differences import Comparison, compare
from mindspeed_llm.tools.compare.launch import launch
from mindspeed_llm.tools.compare.report import describe
from mindspeed_llm.tools.compare.sides import Side, parse_side

EXACT, HALF = 1e-5, 5e-2
"""Relative RMS that counts as equal: in fp32, and where a side computes in 16 bits."""

Run = Callable[[Side, torch.Tensor, Path], None]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_llm.tools.compare",
        description=__doc__,
        epilog=f"LAYOUT: {layouts.GRAMMAR}. FLAG: any of pretrain_gpt.py, without its dashes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help=sides.GRAMMAR)
    parser.add_argument("b", metavar="B", help="likewise; differences are relative to it")
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument("--text", help="what the models read, by A's tokenizer; repeated until it is long enough")
    tokens.add_argument("--data-path", metavar="PREFIX", help="a prepared dataset, from its beginning")
    parser.add_argument("--seed", type=int, default=1234, help="of random tokens, when nothing else gives them")
    parser.add_argument("--sequences", type=int, default=4, help="in the global batch (default 4)")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens in each sequence (default 64)")
    parser.add_argument(
        "--tolerance", type=float, help=f"relative RMS that counts as equal (default {EXACT:g}; {HALF:g} in 16 bits)"
    )
    parser.add_argument("--all", action="store_true", help="list every module and every parameter")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each side (default 1800)")
    return parser


def tokens_of(given: argparse.Namespace, a: Side, b: Side) -> torch.Tensor:
    """``[sequences, seq_length + 1]`` ids, below the vocabulary of both sides.

    Raises:
        DataError: there is no text, no tokenizer or no dataset, or it has other ids.
    """
    wanted = given.sequences * (given.seq_length + 1)
    vocab = min(side.values["vocab_size"] for side in (a, b))
    if given.text is not None:
        ids = torch.tensor(load_tokenizer(a.folder).encode(given.text), dtype=torch.int64)
    elif given.data_path is not None:
        dtype = read_index(given.data_path).dtype
        ids = torch.from_numpy(np.fromfile(bin_path(given.data_path), dtype=dtype, count=wanted).astype(np.int64))
    else:
        ids = torch.randint(0, vocab, (wanted,), generator=torch.Generator().manual_seed(given.seed))
    if not len(ids) or int(ids.max()) >= vocab:
        raise DataError("the models cannot read these tokens", got=f"{len(ids)} tokens", allowed=f"some, below {vocab}")
    return ids.repeat(-(-wanted // len(ids)))[:wanted].view(given.sequences, -1)


def compare_sides(a: Side, b: Side, tokens: torch.Tensor, run: Run) -> Comparison:
    """Let ``run`` run both sides, each into a folder of its own, and compare.

    Raises:
        ConfigError: a side cannot be.
        SuiteError: a side failed.
    """
    for side in (a, b):
        side.check(tokens.shape[0], tokens.shape[1] - 1)
    with tempfile.TemporaryDirectory(prefix="mindspeed_llm.compare.") as scratch:
        folders = Path(scratch, "a"), Path(scratch, "b")
        for side, folder in zip((a, b), folders, strict=True):
            folder.mkdir()
            run(side, tokens, folder)
        return compare(a, b, *folders, tokens.shape[1] - 1)


def spawning(timeout: float) -> Run:
    """Runs a side in processes of its own.

    Args:
        timeout: seconds for a side.
    """

    def run(side: Side, tokens: torch.Tensor, folder: Path) -> None:
        (folder / "side.txt").write_text(side.text)
        (folder / "timeout.txt").write_text(str(timeout))
        save_file({"tokens": tokens}, folder / "tokens.safetensors")
        command = ["-m", "mindspeed_llm.tools.compare.rank", str(folder)]
        launch(command, side.world, folder, what=side.text, timeout=timeout)

    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and print what was found; the exit status."""
    given = build_parser().parse_args(argv)
    try:
        a, b = parse_side(given.a), parse_side(given.b)
        if min(given.sequences, given.seq_length) < 1:
            raise ConfigError("--sequences and --seq-length are 1 or more")
        tolerance = given.tolerance if given.tolerance is not None else HALF if a.half or b.half else EXACT
        tokens = tokens_of(given, a, b)
        found = compare_sides(a, b, tokens, spawning(given.timeout))
    except SuiteError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"A: {a.text}\nB: {b.text}\n")
    sys.stdout.write(f"{tokens.shape[0]} sequences of {tokens.shape[1] - 1} tokens; relative RMS up to {tolerance:g}\n")
    for line in describe(found, tolerance, everything=given.all):
        sys.stdout.write(line + "\n")
    return int(found.differs(tolerance))


if __name__ == "__main__":
    sys.exit(main())
