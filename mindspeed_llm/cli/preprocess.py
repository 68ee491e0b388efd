"""``preprocess_data.py``: text files -> Megatron's ``.bin`` and ``.idx``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.prepare import SKIP, STOP, PrepareSettings, prepare
from mindspeed_llm.data.tokenizer import HF_TYPES, TextTokenizer, build_tokenizer
from mindspeed_llm.errors import ConfigError, SuiteError


def build_parser() -> argparse.ArgumentParser:
    """The flags of the preparation, named as in Megatron-LM and MindSpeed-LLM."""
    parser = argparse.ArgumentParser(prog="preprocess_data.py", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="FILE", help="jsonl, or txt with a document a line"
    )
    parser.add_argument("--output-prefix", required=True, help="datasets are PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="fields, one dataset each")
    parser.add_argument("--tokenizer-type", choices=HF_TYPES, default="PretrainedFromHF")
    parser.add_argument("--tokenizer-name-or-path", metavar="DIR", help="Hugging Face folder, or a tokenizer.json")
    parser.add_argument("--tokenizer-model", metavar="FILE", help="a tokenizer.json")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes that encode")
    parser.add_argument("--log-interval", type=int, default=1000, help="documents between two progress lines")
    parser.add_argument("--on-bad-row", choices=(SKIP, STOP), default=SKIP, help="what to do with a row without text")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Prepare what the arguments say and write the result to stdout.

    Raises:
        SuiteError: what the user can mend.
    """
    if arguments.workers < 1:
        raise ConfigError("There must be a worker.", got=f"--workers {arguments.workers}", allowed="1 or more")
    if len(set(arguments.json_keys)) < len(arguments.json_keys):
        raise ConfigError("A key is given twice.", got=" ".join(arguments.json_keys), fix="--json-keys")
    path = arguments.tokenizer_name_or_path or arguments.tokenizer_model
    tokenizer = build_tokenizer(TokenizerConfig(arguments.tokenizer_type, path))
    if not isinstance(tokenizer, TextTokenizer):
        raise ConfigError("Text needs a tokenizer of text.", got=arguments.tokenizer_type, allowed=", ".join(HF_TYPES))
    result = prepare(
        PrepareSettings(
            inputs=tuple(arguments.input),
            output_prefix=arguments.output_prefix,
            keys=tuple(arguments.json_keys),
            append_eod=arguments.append_eod,
            workers=arguments.workers,
            log_interval=arguments.log_interval,
            on_bad_row=arguments.on_bad_row,
        ),
        tokenizer,
    )
    for key, prefix in result.prefixes.items():
        sys.stdout.write(f"{prefix}: {result.documents} documents, {result.tokens[key]} tokens\n")
    if result.bad_rows:
        sys.stdout.write(f"{result.bad_rows} bad rows skipped, listed in {result.bad_rows_path}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the preparation; the exit status is 0, or the error's own."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run(arguments)
    except SuiteError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0
