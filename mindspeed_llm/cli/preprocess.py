"""``preprocess_data.py``: text files -> Megatron's ``.bin`` and ``.idx``."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mindspeed_llm.cli.flags import add_section, read_section
from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.bad_rows import SKIP, STOP
from mindspeed_llm.data.merge import merge_groups, merge_shards
from mindspeed_llm.data.prepare import PrepareResult, PrepareSettings, make_parent, prepare
from mindspeed_llm.data.ray_job import prepare_on_ray
from mindspeed_llm.data.report import require_matplotlib, write_report
from mindspeed_llm.data.sources import resolve_inputs
from mindspeed_llm.data.tokenizer import Tokenizer, build_tokenizer
from mindspeed_llm.errors import ConfigError, DataError, SuiteError

ORDER_IS_KEPT = "documents keep the order of the input, whatever the number of workers"
STREAMED = "the input is always read as a stream, and nothing of it is cached"
NO_EFFECT: Mapping[str, tuple[int, str]] = {
    "--n-subs": (1, "the input needs no parts that are merged; across machines --shard does that"),
    "--partitions": (1, ORDER_IS_KEPT),
    "--keep-sequential-samples": (0, ORDER_IS_KEPT),
    "--streaming": (0, STREAMED),
    "--cache-dir": (1, STREAMED),
    "--overwrite-cache": (0, STREAMED),
    "--seed": (1, "nothing here is drawn by chance"),
    "--dataset-impl": (1, "files are always memory mapped"),
    "--script-data-dir": (1, "code of a dataset is never run"),
    "--datasets": (1, "--input names the files"),
    "--make-vocab-size-divisible-by": (1, "the model's rows are padded when it is built"),
    "--pad-vocab-size-to": (1, "the model's rows are padded when it is built"),
    "--vocab-extra-ids": (1, "the tokenizer's files say which ids it has"),
    "--tokenizer-not-use-fast": (0, "a tokenizer is always read by the fast implementation"),
    "--trust-remote-code": (0, "code from a tokenizer's folder is never run"),
}
"""Flags of Megatron-LM's and MindSpeed-LLM's tools that change nothing here: number of values, and why."""

INSTRUCTIONS = "this prepares pretraining data; instruction and preference data are not supported yet"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "--prompt-type",
            "--prompt-type-path",
            "--seq-length",
            "--pack",
            "--neat-pack",
            "--map-keys",
            "--enable-thinking",
            "--drop-thinking",
            "--reasoning-effort",
            "--dataset-additional-keys",
            "--dataset-dir",
            "--interleave-probs",
            "--mix-strategy",
            "--reward-tokens",
        ),
        INSTRUCTIONS,
    ),
    "--hf-datasets-params": "files are read without the datasets library",
    "--data-obfuscation": "it needs a library that is not public",
    "--obf-seed-content": "it needs a library that is not public",
}
_PRETRAIN_HANDLERS = ("", "GeneralPretrainHandler")


def build_parser() -> argparse.ArgumentParser:
    """The flags of the preparation, named as in Megatron-LM and MindSpeed-LLM."""
    parser = _Parser(prog="preprocess_data.py", description=__doc__, allow_abbrev=False)
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files (jsonl, json, txt, csv, parquet, arrow; also .gz and .zst), folders, patterns, or - for stdin",
    )
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="fields, one dataset each")
    group.add_argument("--handler-name", default="", metavar="NAME", help="GeneralPretrainHandler, the default")
    group.add_argument("--max-samples", type=_at_least(1), metavar="N", help="stop after this many documents")
    group.add_argument("--on-bad-row", choices=(SKIP, STOP), default=SKIP, help="what to do with a row without text")
    group.add_argument("--shard", type=_shard, metavar="I/N", help="prepare the I-th (from 0) of N parts of the input")

    group = parser.add_argument_group("documents")
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    group.add_argument("--split-sentences", action="store_true", help="make each sentence a sequence, with NLTK")
    group.add_argument("--keep-newlines", action="store_true", help="keep the white space between sentences")
    group.add_argument("--lang", default="english", metavar="LANGUAGE", help="of the sentences")
    group.add_argument(
        "--pad-to-multiple-of",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="pad each document to a multiple of N tokens",
    )

    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, help="datasets are PREFIX_KEY_document.bin and .idx")
    group.add_argument("--report", action="store_true", help="also write PREFIX.report.html, .json and .png")
    group.add_argument("--merge-shards", action="store_true", help="join what --shard 0/N to N-1/N wrote")
    group.add_argument(
        "--merge-group-keys",
        nargs="+",
        metavar="KEY",
        help="join the datasets of the folder --input whose names contain KEY into PREFIX_KEY",
    )

    group = parser.add_argument_group("running")
    group.add_argument(
        "--workers", type=_at_least(1), default=len(os.sched_getaffinity(0)), help="processes that encode"
    )
    group.add_argument("--ray", action="store_true", help="run each of the workers as a task of a Ray cluster")
    group.add_argument("--validate-only", action="store_true", help="only look at flags, tokenizer and input")
    group.add_argument("--log-interval", type=_at_least(1), default=1000, help="documents between two progress lines")
    group.add_argument(
        "--find-optimal-num-workers", action="store_true", help="only measure numbers of workers, and write nothing"
    )
    group.add_argument("--workers-to-check", nargs="+", type=_at_least(1), default=[16, 32, 64], metavar="N")
    group.add_argument("--max-documents", type=_at_least(1), default=100_000, help="documents of each measurement")

    add_section(parser, "tokenizer")
    parser.add_argument("--vocab-size", type=_at_least(1), metavar="N", help="of NullTokenizer and TikTokenizer")
    _add_without_effect(parser)
    return parser


def _add_without_effect(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("accepted without effect")
    for flag, (takes, reason) in NO_EFFECT.items():
        form: dict[str, Any] = {"metavar": "VALUE"} if takes else {"action": "store_true"}
        group.add_argument(flag, help=f"No effect: {reason}.", **form)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the command line cannot be read: {message}", fix=f"{self.prog} --help lists every flag")


def _at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"got {text!r}, allowed: {lowest} or more")
        return int(text)

    return number


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: 0/N to N-1/N")
    return int(number), int(count)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check a command line.

    Raises:
        ConfigError: a flag is unknown, refused, or does not go with another.
    """
    arguments, rest = build_parser().parse_known_args(argv)
    for word in rest:
        flag = word.partition("=")[0]
        if flag in REFUSED:
            raise ConfigError(f"{flag} is not available: {REFUSED[flag]}.")
    if rest:
        raise ConfigError("Unknown flags.", got=" ".join(rest), fix="preprocess_data.py --help lists every flag")
    if arguments.handler_name not in _PRETRAIN_HANDLERS:
        raise ConfigError(f"--handler-name {arguments.handler_name} is not available: {INSTRUCTIONS}.")
    if arguments.input is None and not arguments.merge_shards:
        raise ConfigError("There is no input.", fix="--input FILE ...")
    if len(set(arguments.json_keys)) < len(arguments.json_keys):
        raise ConfigError("A key is given twice.", got=" ".join(arguments.json_keys), fix="--json-keys")
    if arguments.shard and arguments.max_samples:
        raise ConfigError("A shard cannot know how many documents the others have.", fix="--max-samples or --shard")
    if arguments.keep_newlines and not arguments.split_sentences:
        raise ConfigError("--keep-newlines is about sentences.", fix="--split-sentences")
    if arguments.ray and (arguments.shard or arguments.max_samples):
        raise ConfigError("--ray makes shards of its own.", fix="--ray without --shard and --max-samples")
    if arguments.merge_group_keys and len(arguments.input or ()) != 1:
        raise ConfigError("Groups are merged from one folder.", fix="--input FOLDER")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """Prepare or merge what the arguments say and write the result to stdout.

    Raises:
        SuiteError: what the user can mend.
    """
    for flag, (_, reason) in NO_EFFECT.items():
        if getattr(arguments, flag[2:].replace("-", "_")) not in (None, False):
            sys.stderr.write(f"{flag} has no effect here: {reason}\n")
    if arguments.report:
        require_matplotlib()
    if arguments.merge_group_keys:
        for prefix, index in merge_groups(
            arguments.input[0], arguments.merge_group_keys, arguments.output_prefix
        ).items():
            sys.stdout.write(f"{prefix}: {len(index.boundaries) - 1} documents, {index.tokens} tokens\n")
        return
    if arguments.merge_shards and not arguments.report:
        _show(merge_shards(arguments.output_prefix))
        return
    named = read_section(arguments, TokenizerConfig)
    tokenizer = build_tokenizer(named, arguments.vocab_size)
    if arguments.merge_shards:
        result = merge_shards(arguments.output_prefix)
        _show(result)
        _report(result, arguments.output_prefix, tokenizer)
        return
    settings = PrepareSettings(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        keys=tuple(arguments.json_keys),
        append_eod=arguments.append_eod,
        workers=arguments.workers,
        log_interval=arguments.log_interval,
        on_bad_row=arguments.on_bad_row,
        pad_to_multiple_of=arguments.pad_to_multiple_of,
        split_sentences=arguments.split_sentences,
        keep_newlines=arguments.keep_newlines,
        lang=arguments.lang,
        max_samples=arguments.max_samples,
        shard=arguments.shard,
    )
    if arguments.validate_only:
        files = resolve_inputs(settings.inputs)
        sys.stdout.write(f"valid: {len(files)} files, a tokenizer with {tokenizer.vocab_size} ids\n")
        return
    if arguments.find_optimal_num_workers:
        _compare_workers(settings, tokenizer, arguments.workers_to_check, arguments.max_documents)
        return
    if arguments.ray:
        result = prepare_on_ray(settings, named, arguments.vocab_size)
    else:
        result = prepare(settings, tokenizer)
    _show(result)
    if arguments.report:
        _report(result, settings.prefix, tokenizer)


def _show(result: PrepareResult) -> None:
    for key, prefix in result.prefixes.items():
        sys.stdout.write(f"{prefix}: {result.documents} documents, {result.tokens[key]} tokens\n")
    if result.bad_rows:
        sys.stdout.write(f"{result.bad_rows} bad rows skipped, listed in {result.bad_rows_path}\n")


def _report(result: PrepareResult, output: str, tokenizer: Tokenizer) -> None:
    page = write_report(
        result.prefixes,
        tokenizer,
        bad_rows=result.bad_reasons,
        text_bytes=result.text_bytes,
        truncated=0,
        output=output,
    )
    sys.stdout.write(f"{page}: the report\n")


def _compare_workers(settings: PrepareSettings, tokenizer: Tokenizer, numbers: Sequence[int], documents: int) -> None:
    """Prepare the first documents with each number of workers, beside the output, and say which was fastest."""
    make_parent(settings.output_prefix)
    folder = Path(f"{settings.output_prefix}_").parent
    rates: dict[int, float] = {}
    for number in numbers:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            started = time.monotonic()
            trial = replace(settings, output_prefix=f"{scratch}/trial", workers=number, max_samples=documents)
            rates[number] = prepare(trial, tokenizer).documents / (time.monotonic() - started)
        sys.stdout.write(f"{number} workers: {rates[number]:.0f} documents a second\n")
    sys.stdout.write(f"The fastest is --workers {max(rates, key=rates.__getitem__)}.\n")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the preparation; the exit status is 0, or the error's own."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a terminal need not have the letters of a name
    # A batch system stops a job with SIGTERM: unwinding the stack removes what is half made.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        run(parse(argv))
    except SuiteError as error:
        return _fail(error)
    except OSError as error:
        # Of what is read, data turns these into errors of its own.
        place = error.filename2 or error.filename
        return _fail(
            DataError(
                "What is prepared cannot be written.",
                got=": ".join(filter(None, (place and os.fsdecode(place), error.strerror or str(error)))),
                allowed="a folder to write to, with room for two or four bytes a token",
                fix="--output-prefix",
            )
        )
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was written\n")
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _fail(error: SuiteError) -> int:
    sys.stderr.write(f"error: {error}\n")
    return error.exit_code
