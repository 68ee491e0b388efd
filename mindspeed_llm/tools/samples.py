"""Print the samples that training would see, one JSON object a line.

``python -m mindspeed_llm.tools.samples --data-path PREFIX --seq-length 8 --count 4`` takes the data flags of training
and prints ``tokens, labels, loss_mask, position_ids`` of samples 0, 1, ... in the order of training, and with
``--reset-attention-mask`` also ``cu_seqlens``, where the documents within the sample begin.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mindspeed_llm.cli.flags import add_section, read_section
from mindspeed_llm.config.data import DataConfig
from mindspeed_llm.config.run import SECTIONS, RunConfig
from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.batches import document_boundaries
from mindspeed_llm.data.datasets import build_datasets, prepare_raw
from mindspeed_llm.data.manifest import read_manifest
from mindspeed_llm.data.tokenizer import NULL_TYPE, NullTokenizer, Tokenizer, build_tokenizer
from mindspeed_llm.errors import DataError, SuiteError

SPLITS = ("train", "valid", "test")


def build_parser() -> argparse.ArgumentParser:
    """The data flags of training, and which samples to print."""
    parser = argparse.ArgumentParser(prog="samples", description=__doc__, allow_abbrev=False)
    parser.add_argument("--print-split", choices=SPLITS, default="train", help="which of them to print")
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--count", type=int, required=True, help="samples to print")
    parser.add_argument(
        "--train-samples", type=int, help="samples of the whole run, which decides its epochs (default: --count)"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--no-shuffle", action="store_true", help="keep the order of the file")
    parser.add_argument("--vocab-size", type=int, help="for NullTokenizer")
    add_section(parser, "data")
    add_section(parser, "tokenizer")
    return parser


def run_config(arguments: argparse.Namespace) -> RunConfig:
    """A configuration with the data of the arguments and nothing else set."""
    data = read_section(arguments, DataConfig)
    if data.split is None and not data.mock_data:
        # All of the data, whichever part of a run is looked at.
        data = replace(data, split=",".join("1" if name == arguments.print_split else "0" for name in SPLITS))
    cfg = RunConfig(**{name: section() for name, section in SECTIONS.items()})
    return replace(
        cfg,
        training=replace(cfg.training, seq_length=arguments.seq_length, seed=arguments.seed),
        data=data,
        tokenizer=read_section(arguments, TokenizerConfig),
    )


def find_tokenizer(cfg: RunConfig, vocab_size: int | None) -> Tokenizer:
    """The tokenizer of the arguments, or else an end of document as the manifest of the first dataset has it.

    Raises:
        DataError: when the flags need the end of document and nothing says which id it is.
    """
    named, data = cfg.tokenizer, cfg.data
    if named.tokenizer_name_or_path or named.tokenizer_type:
        return build_tokenizer(named, vocab_size)
    if data.mock_data:
        return build_tokenizer(replace(named, tokenizer_type=NULL_TYPE), vocab_size)
    paths = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    manifests = [read_manifest(word) for words in paths for word in words or ()]
    eod = next((manifest.eod for manifest in manifests if manifest is not None), None)
    if eod is not None:
        return NullTokenizer(eod)
    if data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss:
        raise DataError("Nothing says which id ends a document.", fix="--tokenizer-name-or-path")
    return NullTokenizer(np.iinfo(np.int32).max)


def samples(arguments: argparse.Namespace, cache: str) -> Iterator[dict[str, list[int] | list[float]]]:
    """The samples as lists.

    Raises:
        SuiteError: what the user can mend.
    """
    cfg = run_config(arguments)
    tokenizer = find_tokenizer(cfg, arguments.vocab_size)
    sizes = [0, 0, 0]
    which = SPLITS.index(arguments.print_split)
    sizes[which] = max(arguments.train_samples or arguments.count, arguments.count)
    cfg = prepare_raw(cfg, tokenizer, sizes)
    cfg = replace(cfg, data=replace(cfg.data, data_cache_path=cache))
    dataset = build_datasets(cfg, tokenizer, sizes, shuffle=not arguments.no_shuffle)[which]
    if dataset is None:
        raise DataError("There are no samples.", got=f"--count {arguments.count}", allowed="1 or more")
    for number in range(arguments.count):
        sample = dataset[number]
        row = {name: sample[name].tolist() for name in ("tokens", "labels", "loss_mask", "position_ids")}
        if cfg.data.reset_attention_mask:
            row["cu_seqlens"] = document_boundaries(sample["tokens"][None], tokenizer.eod).tolist()
        yield row


def main(argv: Sequence[str] | None = None) -> int:
    """Print the samples; the exit status is 0, or the error's own."""
    arguments = build_parser().parse_args(argv)
    try:
        # Looking must leave nothing behind, so the indices go where they are forgotten. What is prepared from raw files
        # takes long, and stays for the training that comes next.
        with tempfile.TemporaryDirectory() as cache:
            for row in samples(arguments, cache):
                sys.stdout.write(json.dumps(row) + "\n")
    except SuiteError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
