"""The new recipe: the old text with what changes changed in place, and a comment above each place.

A flag is changed where it is written, be it in the command, a string or an array. The result is read again and held
against what was meant, so an edit that went wrong is an error and never a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_llm.errors import ConfigError
from mindspeed_llm.tools.migrate.evaluate import Command, Word, evaluate, python_commands
from mindspeed_llm.tools.migrate.judge import DROPPED, RENAMED, SCRIPTS, Verdict
from mindspeed_llm.tools.migrate.syntax import parse, starts_of

MARK = "# migrate:"
VALUE = re.compile(r"""(?:\\\n|[ \t\r])+((?:\$\{[^}]*\}|\$\([^)]*\)|'[^']*'|"[^"]*"|[^\s"')|;&#\\])+)""")
"""A word behind a flag, in the text."""


@dataclass(frozen=True)
class Edit:
    """``text[begin:end]`` becomes ``new``; ``why`` goes above the statement."""

    begin: int
    end: int
    new: str
    why: str


def rewrite(
    text: str,
    judged: Sequence[tuple[Command, int, Sequence[Verdict]]],
    arguments: Sequence[str],
    environ: Mapping[str, str],
) -> str:
    """The new text of a recipe.

    Args:
        text: the old one.
        judged: its commands, each with the index of the script's word and the verdicts.
        arguments: what the recipe is started with.
        environ: the environment that it was read in.

    Raises:
        ConfigError: a flag that has to change is not written in one place of the text.
    """
    edits: dict[int, Edit] = {}
    for command, script, verdicts in judged:
        for edit in (*_program(command, script), *(_edit(text, verdict) for verdict in verdicts if _changes(verdict))):
            edits[edit.begin] = edit
    new = _apply(text, list(edits.values()))
    new = _log_folders(new, [command for command, _, _ in judged])
    _prove(new, judged, arguments, environ)
    return new


def _changes(verdict: Verdict) -> bool:
    return verdict.kind in (DROPPED, RENAMED)


def _program(command: Command, script: int) -> list[Edit]:
    word = command.words[script]
    name = word.text.rpartition("/")[2]
    ours = SCRIPTS.get(name, (name, None))[0]
    if ours == name or word.at is None:
        return []
    begin = word.at + len(word.text) - len(name)
    return [Edit(begin, begin + len(name), ours, f"{name} is {ours} here")]


def _edit(text: str, verdict: Verdict) -> Edit:
    begin = verdict.word.at
    if begin is None or text[begin : begin + len(verdict.word.text)] != verdict.word.text:
        raise ConfigError(
            f"{verdict.flag} is not written in one place of the recipe and cannot be changed there",
            got=verdict.written,
            fix=f"change it by hand: {verdict.remark}",
        )
    end = begin + len(verdict.flag)
    if verdict.kind == RENAMED:
        return Edit(begin, end, verdict.becomes, f"{verdict.flag} is {verdict.becomes} here")
    end = begin + len(verdict.word.text)
    for _ in verdict.values:
        value = VALUE.match(text, end)
        end = value.end() if value else end
    return Edit(begin, end, "", f"without {' '.join(text[begin:end].split())}: {verdict.remark}")


def _apply(text: str, edits: Sequence[Edit]) -> str:
    """``text`` with the edits made, and their reasons above the statements."""
    starts = [0, *starts_of(parse(text))]
    reasons: dict[int, list[str]] = {}
    for edit in edits:
        line = text.rfind("\n", 0, max(start for start in starts if start <= edit.begin)) + 1
        reasons.setdefault(line, []).append(edit.why)
    # From the end, so that places before stay what they are.
    for edit in sorted(edits, key=lambda edit: edit.begin, reverse=True):
        for line in sorted((line for line in reasons if line > edit.begin), reverse=True):
            text = _explained(text, line, reasons.pop(line))
        begin, end = (edit.begin, edit.end) if edit.new else _with_its_line(text, edit.begin, edit.end)
        text = text[:begin] + edit.new + text[end:]
    for line in sorted(reasons, reverse=True):
        text = _explained(text, line, reasons[line])
    return text


def _explained(text: str, line: int, reasons: Sequence[str]) -> str:
    """``text`` with the reasons above the line that begins at ``line``, as far in as that."""
    blank = text[line : len(text) - len(text[line:].lstrip(" \t"))]
    return text[:line] + "".join(f"{blank}{MARK} {why}\n" for why in reasons) + text[line:]


def _with_its_line(text: str, begin: int, end: int) -> tuple[int, int]:
    """The span with its whole line when nothing else stands there, and the space before it otherwise."""
    line = text.rfind("\n", 0, begin) + 1
    stop = text.find("\n", end)
    stop = len(text) if stop < 0 else stop
    rest = text[end:stop].strip()
    if text[line:begin].strip() or rest not in ("", "\\"):
        return len(text[:begin].rstrip(" \t")) if text[line:begin].strip() else begin, end
    before = text[:line].rstrip(" \t\r\n")
    if not rest and before.endswith("\\") and line:
        # The last line of a continued command: no backslash is left to continue into nothing.
        return len(before) - 1, stop
    return line, min(stop + 1, len(text))


def _log_folders(text: str, commands: Sequence[Command]) -> str:
    """``mkdir`` for the folders of the logs that a recipe pipes into, where it does not make them itself."""
    for command in commands:
        words = [word.text for word in command.piped_to]
        folders = sorted({word.rpartition("/")[0] for word in words[1:] if "/" in word} if words[:1] == ["tee"] else ())
        for folder in folders:
            if re.search(rf"mkdir[^\n]*{re.escape(folder)}", text) or "$" in folder:
                continue
            found = re.search(r"^[ \t]*(?:\w+=\S+ )*(?:torchrun|python3?)\b", text, re.MULTILINE)
            at = found.start() if found else 0
            text = f"{text[:at]}{MARK} tee does not make its folder\nmkdir -p {folder}\n{text[at:]}"
    return text


def _prove(
    text: str,
    judged: Sequence[tuple[Command, int, Sequence[Verdict]]],
    arguments: Sequence[str],
    environ: Mapping[str, str],
) -> None:
    """Read the new recipe again: its flags are the old ones with the changes, and nothing else.

    Raises:
        ConfigError: they are not.
    """
    found = list(python_commands(evaluate(text, arguments, environ)))
    wanted = [
        [
            word
            for verdict in verdicts
            if verdict.kind != DROPPED
            for word in [*(verdict.becomes or verdict.word.text).split(" "), *_texts(verdict.values)]
        ]
        for _, _, verdicts in judged
    ]
    got = [_texts(command.words[script + 1 :]) for command, script in found]
    if got != wanted:
        lost = next(((a, b) for a, b in zip(wanted, got, strict=False) if a != b), (wanted, got))
        raise ConfigError(
            "the recipe cannot be rewritten: read again, its flags would not be those that were meant",
            got=" ".join(map(str, lost[1])),
            allowed=" ".join(map(str, lost[0])),
            fix="change it by hand",
        )


def _texts(words: Sequence[Word]) -> list[str]:
    return [word.text for word in words if not word.is_unset]
