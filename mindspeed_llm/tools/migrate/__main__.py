"""Reads a recipe of Megatron-LM or MindSpeed-LLM and says what becomes of each flag.

``python -m mindspeed_llm.tools.migrate old.sh`` reports; ``--write new.sh`` writes the recipe as it has to be here,
``--run`` runs the old one as it is when nothing of it has to change. Reading runs nothing: assignments, arrays, tests
and loops are evaluated by this program, the output of commands and sourced files is not known to it, and it says so.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_llm.errors import ConfigError, SuiteError
from mindspeed_llm.tools.migrate.evaluate import Command, Outcome, evaluate, lines_of, python_commands
from mindspeed_llm.tools.migrate.judge import (
    ABSENT,
    DROPPED,
    KEPT,
    NEEDS_VALUE,
    PRETRAIN,
    REFUSED,
    RENAMED,
    SCRIPTS,
    UNKNOWN,
    WITHOUT_EFFECT,
    Verdict,
    judge,
    together,
)
from mindspeed_llm.tools.migrate.ours import counterpart
from mindspeed_llm.tools.migrate.rewrite import rewrite
from mindspeed_llm.tools.source_tree import source_tree

TITLES: Mapping[str, str] = {
    NEEDS_VALUE: "need a value",
    REFUSED: "refused: the run would not be the same without them",
    UNKNOWN: "unknown",
    DROPPED: "left out by --write: the run trains alike without them",
    RENAMED: "renamed by --write",
    WITHOUT_EFFECT: "without effect here, and accepted",
}
TO_DO = (NEEDS_VALUE, REFUSED, UNKNOWN)
Judged = tuple[Command, int, list[Verdict]]


def build_parser() -> argparse.ArgumentParser:
    """The flags of this command."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_llm.tools.migrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, help="the old recipe")
    parser.add_argument("arguments", nargs="*", help="what the recipe is started with: its $1, $2, ...")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="NEW", help="write the new recipe to this file")
    action.add_argument("--run", action="store_true", help="run the old recipe, unless something of it has to change")
    return parser


def _report(text: str, outcome: Outcome, judged: Sequence[Judged]) -> list[str]:
    """The lines of the report."""
    line = lines_of(text)
    lines: list[str] = []
    for command, script, verdicts in judged:
        name = _script(command, script)
        counts = {kind: sum(verdict.kind == kind for verdict in verdicts) for kind in (KEPT, *TITLES)}
        said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        lines.append(f"line {line(command.at)}: {name}, {len(verdicts)} flags: {said}")
        wrong = _amiss(command, script, verdicts)
        if name not in SCRIPTS:
            lines.append(f"  {wrong}; its flags are judged as those of {PRETRAIN}")
        for kind, title in TITLES.items():
            chosen = [verdict for verdict in verdicts if verdict.kind == kind]
            if chosen:
                lines += ["", f"  {title}:", *(f"    {_row(verdict, text, outcome)}" for verdict in chosen)]
        kept = " ".join(verdict.flag for verdict in verdicts if verdict.kind == KEPT)
        lines += ["", *textwrap.wrap(f"  kept: {kept}", 118, subsequent_indent="    ", break_on_hyphens=False)]
        if name in SCRIPTS and wrong:
            lines += ["", "  together:", *(f"    {each}" for each in wrong.splitlines())]
    if lost := _unpassed(text, judged):
        lines += ["", f"written, but passed to no command: {' '.join(lost)}"]
    lines += ["", *(f"line {line(at)}: {note}" for at, note in sorted(set(outcome.notes)))] if outcome.notes else []
    return lines


def _unpassed(text: str, judged: Sequence[Judged]) -> list[str]:
    """Flags that stand in the text and that no command gets: of a group that is not used, behind a lost backslash."""
    code = re.sub(r"(?m)(^|\s)#.*$", "", text)
    passed = {word.text.partition("=")[0] for command, _, _ in judged for word in command.words}
    return [flag for flag in dict.fromkeys(re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", code)) if flag not in passed]


def _row(verdict: Verdict, text: str, outcome: Outcome) -> str:
    line = lines_of(text)
    where = outcome.defined.get(verdict.remark.removeprefix("set ")) if verdict.kind == NEEDS_VALUE else verdict.word.at
    place = f" (line {line(where)})" if where is not None else ""
    return f"{verdict.written}: {verdict.remark}{place}"


def _script(command: Command, script: int) -> str:
    return command.words[script].text.rpartition("/")[2]


def _amiss(command: Command, script: int, verdicts: Sequence[Verdict]) -> str:
    """What is wrong with a command beyond its single flags; empty if nothing."""
    name = _script(command, script)
    if name not in SCRIPTS:
        return f"{name} is not here: {ABSENT.get(name, 'it is no script of this project')}"
    return together(command, script, verdicts) if name == PRETRAIN else ""


def _runnable(judged: Sequence[Judged]) -> None:
    """Check that the old recipe can be run as it is.

    Raises:
        ConfigError: something of it has to change first.
    """
    errors: list[ConfigError] = []
    for command, script, verdicts in judged:
        name = _script(command, script)
        ours = SCRIPTS.get(name, (name,))[0]
        if ours != name:
            errors.append(ConfigError(f"{name} is {ours} here", fix="--write NEW"))
        if wrong := _amiss(command, script, verdicts):
            errors.append(ConfigError(wrong))
        errors += [
            ConfigError(f"{verdict.flag}: {verdict.kind}", got=verdict.written, fix=verdict.remark)
            for verdict in verdicts
            if verdict.kind not in (KEPT, WITHOUT_EFFECT)
        ]
    if errors:
        raise ConfigError.collect(errors)


def _run(recipe: Path, arguments: Sequence[str]) -> int:
    """Run the recipe in the project's root, where its scripts are; the status is bash's."""
    root = source_tree()
    (root / "logs").mkdir(exist_ok=True)  # recipes pipe into tee logs/...
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = ["bash", "-o", "pipefail", str(recipe.resolve()), *arguments]
    return subprocess.run(command, cwd=root, env=environ, check=False).returncode


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the recipe cannot be read", got=f"{path}: {error}") from None


def _migrate(arguments: argparse.Namespace) -> int:
    recipe: Path = arguments.recipe
    text = _read(recipe)
    outcome = evaluate(text, arguments.arguments, os.environ)
    judged = [(command, script, judge(command, script)) for command, script in python_commands(outcome)]
    if not judged:
        raise ConfigError("the recipe starts no Python script that can be seen without running it", got=recipe)
    sys.stdout.write("\n".join(_report(text, outcome, judged)) + "\n")
    if ours := counterpart(recipe.stem):
        sys.stdout.write(f"\nThe recipe of this project for it: {ours}\n")
    if arguments.run:
        _runnable(judged)
        return _run(recipe, arguments.arguments)
    if arguments.write:
        new = rewrite(text, judged, arguments.arguments, os.environ)
        try:
            arguments.write.write_text(new, encoding="utf-8")
        except OSError as error:
            raise ConfigError("the new recipe cannot be written", got=f"{arguments.write}: {error}") from None
        arguments.write.chmod(0o755)
        sys.stdout.write(f"\nwritten: {arguments.write}\n")
    left = [verdict for _, _, verdicts in judged for verdict in verdicts if verdict.kind in TO_DO]
    amiss = [command for command, script, verdicts in judged if _amiss(command, script, verdicts)]
    return 1 if left or amiss else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0: the recipe runs here, or the written one does; 1: something is left to do; 2: a mistake."""
    try:
        return _migrate(build_parser().parse_intermixed_args(argv))
    except SuiteError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
