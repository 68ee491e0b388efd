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
from pathlib import Path

import numpy as np

from mindspeed_llm.config.run import SECTIONS, RunConfig
from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.batches import document_boundaries
from mindspeed_llm.data.datasets import build_datasets, prepare_raw
from mindspeed_llm.data.manifest import manifest_path
from mindspeed_llm.data.tokenizer import HF_TYPES, NULL_TYPE, NullTokenizer, Tokenizer, build_tokenizer, load_tokenizer
from mindspeed_llm.errors import DataError, SuiteError

SPLITS = ("train", "valid", "test")


def build_parser() -> argparse.ArgumentParser:
    """The data flags of training, and which samples to print."""
    parser = argparse.ArgumentParser(prog="samples", description=__doc__, allow_abbrev=False)
    parser.add_argument("--data-path", nargs="+", help="prefix or raw file, or weights and these in turn")
    parser.add_argument("--data-cache-path", help="where training keeps what it prepares from raw files")
    parser.add_argument("--json-key", "--json-keys", default="text", help="field of the text in raw files")
    parser.add_argument("--mock-data", action="store_true", help="megatron-core's made-up data")
    parser.add_argument(
        "--split", help="shares of training, validation and test data (default: all for the one printed)"
    )
    parser.add_argument("--print-split", choices=SPLITS, default="train", help="which of them to print")
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--count", type=int, required=True, help="samples to print")
    parser.add_argument(
        "--train-samples", type=int, help="samples of the whole run, which decides its epochs (default: --count)"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--no-shuffle", action="store_true", help="keep the order of the file")
    parser.add_argument("--reset-position-ids", action="store_true")
    parser.add_argument("--reset-attention-mask", action="store_true")
    parser.add_argument("--eod-mask-loss", action="store_true")
    parser.add_argument("--tokenizer-type", choices=(*HF_TYPES, NULL_TYPE))
    parser.add_argument("--tokenizer-name-or-path", "--tokenizer-model", help="default: the one that made the data")
    parser.add_argument("--vocab-size", type=int, help="for NullTokenizer")
    return parser


def run_config(arguments: argparse.Namespace) -> RunConfig:
    """A configuration with the data of the arguments and nothing else set."""
    cfg = RunConfig(**{name: section() for name, section in SECTIONS.items()})
    whole = ",".join("1" if name == arguments.print_split else "0" for name in SPLITS)
    return replace(
        cfg,
        training=replace(cfg.training, seq_length=arguments.seq_length, seed=arguments.seed),
        data=replace(
            cfg.data,
            data_path=tuple(arguments.data_path) if arguments.data_path else None,
            data_cache_path=arguments.data_cache_path,
            json_key=arguments.json_key,
            mock_data=arguments.mock_data,
            split=None if arguments.mock_data else arguments.split or whole,
            reset_position_ids=arguments.reset_position_ids,
            reset_attention_mask=arguments.reset_attention_mask,
            eod_mask_loss=arguments.eod_mask_loss,
        ),
    )


def find_tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """The tokenizer of the arguments, or else what the manifest of the first dataset says.

    Raises:
        DataError: when the flags need the end of document and nothing says which id it is.
    """
    if arguments.tokenizer_name_or_path or arguments.tokenizer_type or arguments.mock_data:
        kind = arguments.tokenizer_type or (HF_TYPES[0] if arguments.tokenizer_name_or_path else NULL_TYPE)
        return build_tokenizer(TokenizerConfig(kind, arguments.tokenizer_name_or_path), arguments.vocab_size)
    prefixes = [word for word in arguments.data_path or () if manifest_path(word).is_file()]
    if prefixes:
        manifest = json.loads(manifest_path(prefixes[0]).read_text(encoding="utf-8"))
        if Path(manifest["tokenizer"]).exists():
            return load_tokenizer(manifest["tokenizer"])
        if manifest["eod"] is not None:
            return NullTokenizer(manifest["eod"])
    if arguments.reset_position_ids or arguments.reset_attention_mask or arguments.eod_mask_loss:
        raise DataError("Nothing says which id ends a document.", fix="--tokenizer-name-or-path")
    return NullTokenizer(np.iinfo(np.int32).max)


def samples(arguments: argparse.Namespace, cache: str) -> Iterator[dict[str, list[int] | list[float]]]:
    """The samples as lists.

    Raises:
        SuiteError: what the user can mend.
    """
    tokenizer = find_tokenizer(arguments)
    sizes = [0, 0, 0]
    which = SPLITS.index(arguments.print_split)
    sizes[which] = max(arguments.train_samples or arguments.count, arguments.count)
    cfg = prepare_raw(run_config(arguments), tokenizer, sizes)
    cfg = replace(cfg, data=replace(cfg.data, data_cache_path=cache))
    dataset = build_datasets(cfg, tokenizer, sizes, shuffle=not arguments.no_shuffle)[which]
    if dataset is None:
        raise DataError("There are no samples.", got=f"--count {arguments.count}", allowed="1 or more")
    for number in range(arguments.count):
        sample = dataset[number]
        row = {name: sample[name].tolist() for name in ("tokens", "labels", "loss_mask", "position_ids")}
        if arguments.reset_attention_mask:
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
