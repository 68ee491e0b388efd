"""Draft the family of a model that there is none for, and prove it.

FOLDER is a Hugging Face folder; config.json alone will do where transformers has the model's class. No weight is read
and no code from the folder runs. The package that holds the family is written to --output; when it is there already,
the family in it is proved as it stands. The exit status is 0 when everything has a place and is proved, 1 when there is
something left to do, 2 when there is no answer.
"""

from __future__ import annotations

import argparse
import keyword
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from mindspeed_llm.errors import ConfigError, SuiteError
from mindspeed_llm.tools.compare.__main__ import Run, spawning


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_llm.tools.new_family",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a Hugging Face folder")
    parser.add_argument("--name", help="of the family (default: model_type in config.json)")
    parser.add_argument("--output", type=Path, help="folder of the package (default: ./mindspeed_llm_NAME)")
    parser.add_argument("--no-proof", action="store_true", help="write the draft only")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run of the proof (default 600)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Draft, write, prove; the exit status."""
    given = build_parser().parse_args(argv)
    # Libraries tell of what is not installed, and of how far they are.
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    try:
        return new_family(given, spawning(given.timeout))
    except SuiteError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def new_family(given: argparse.Namespace, run: Run) -> int:
    """The work of :func:`main`.

    Raises:
        SuiteError: there is no answer.
    """
    from transformers.utils import logging

    from mindspeed_llm.tools.new_family.folder import read_model
    from mindspeed_llm.tools.new_family.package import Work

    logging.disable_progress_bar()

    model = read_model(given.folder)
    name = given.name or re.sub(r"\W", "_", str(model.config["model_type"])).lower()
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError("--name is no name of a family", got=name, allowed="letters, digits and _")
    output = given.output or Path(f"mindspeed_llm_{name}")
    work = Work(model, name, output, _say, run)
    if work.file.exists():
        _say(f"{work.file} is there: it stays as it is (delete it to draft anew)")
        left = 0
    else:
        left = work.draft()
    if left:
        _say(f"{left} things to do in {work.file}; then the same command proves it")
    elif not given.no_proof:
        left = work.prove()
    if not left:
        _say(
            f"next: pip install -e {output}, or copy the file to mindspeed_llm/models/{name}.py in a clone and run its"
        )
        _say(f"tests: pytest tests/unit/models tests/unit/checkpoint tests/distributed tests/parity -k {name}")
    return int(left > 0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
