"""What becomes of each flag of a command line."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import get_origin

from mindspeed_llm.cli import convert, preprocess
from mindspeed_llm.cli.flags import parse_pretrain
from mindspeed_llm.config.no_effect import NoEffect
from mindspeed_llm.config.refused import refusal
from mindspeed_llm.config.spelled import FieldFlag, meaning_of, meanings, read_settings
from mindspeed_llm.config.values import members
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.tools.migrate.evaluate import Command, Word

KEPT, RENAMED, WITHOUT_EFFECT = "kept", "renamed", "without effect"
DROPPED, REFUSED, NEEDS_VALUE, UNKNOWN = "dropped", "refused", "needs a value", "unknown"

PRETRAIN = "pretrain_gpt.py"
SCRIPTS: Mapping[str, tuple[str, ModuleType | None]] = {
    PRETRAIN: (PRETRAIN, None),
    "preprocess_data.py": ("preprocess_data.py", preprocess),
    "convert_ckpt.py": ("convert_ckpt.py", convert),
    "convert_ckpt_v2.py": ("convert_ckpt.py", convert),
}
"""Scripts of upstream's: the one here, and the module with its flags; None for the flags of training."""

ABSENT: Mapping[str, str] = {
    "posttrain_gpt.py": "instruction tuning is planned, step 8",
    "inference.py": "inference is wanted, later; transformers generates from what --save-hf writes",
    "evaluation.py": "evaluation is wanted, later",
    "pretrain_mamba.py": "state-space models are wanted, later",
    "pretrain_deepseek4.py": "sparse attention is wanted, later",
    "train_fsdp2.py": "fully sharded data parallelism is planned, step 10",
    "rlhf_gpt.py": "reinforcement learning is wanted, later",
}
"""Scripts of upstream's that are not here, and what comes of them."""

RENAMES: Mapping[str, str] = {
    "--batch-size": "--micro-batch-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations",
    "--rotary-seq-len-interpolation-factor": "--rope-scaling-type linear --rope-scaling-factor",
}
"""Flags that are refused because another says the same, with what is written instead, before the same value."""

PLACEHOLDER = re.compile(r"\byour\b|<[^<>]+>|path/to|\bxxx+\b|/PATH\b|^$", re.IGNORECASE)
"""Text that stands for a value which the user is to fill in."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of one flag.

    Attributes:
        kind: one of the constants above.
        flag: as it is written.
        values: the words behind it.
        word: the flag's word, for its place.
        remark: why, or what to do.
        becomes: what is written instead of the flag, where it is renamed.
    """

    kind: str
    flag: str
    values: tuple[Word, ...]
    word: Word
    remark: str = ""
    becomes: str = ""

    @property
    def written(self) -> str:
        """The flag with its values."""
        return " ".join([self.flag, *(word.text for word in self.values)])


def judge(command: Command, script: int) -> list[Verdict]:
    """A verdict on each flag behind the word number ``script``, which names the program."""
    name = command.words[script].text.rpartition("/")[2]
    module = SCRIPTS.get(name, (name, None))[1]
    accepted = _accepted_by(module) if module else None
    return [
        _verdict(word, _passed(word, values, accepted), module, accepted)
        for word, values in _flags(command.words[script + 1 :])
    ]


def _passed(word: Word, values: tuple[Word, ...], accepted: Mapping[str, int | None] | None) -> tuple[Word, ...]:
    """The words behind a flag without variables that are set nowhere and stand behind as many values as it takes: a
    group that a recipe passes and does not have, of which bash makes nothing."""
    flag, equals, _ = word.text.partition("=")
    takes = 0 if equals else _takes(flag) if accepted is None else accepted.get(flag)
    if takes is None:
        return values
    return (*values[:takes], *(value for value in values[takes:] if not value.is_unset))


def _takes(flag: str) -> int | None:
    """How many values a flag of training takes, at most one if it is refused; None for any number."""
    meaning = meaning_of(flag)
    if meaning is None:
        return 1
    if not isinstance(meaning, FieldFlag):
        return meaning.takes
    if meaning.spec.is_bool:
        return 0
    several = any(get_origin(kind) is tuple for kind in members(meaning.spec.annotation))
    return meaning.spec.option.count if several else 1


def _flags(words: Sequence[Word]) -> Iterator[tuple[Word, tuple[Word, ...]]]:
    """Each flag with the words behind it; text before the first flag comes with the flag ``""``."""
    start = 0
    while start < len(words):
        end = start + 1
        while end < len(words) and not words[end].text.startswith("--"):
            end += 1
        yield words[start], tuple(words[start + 1 : end])
        start = end


def _verdict(
    word: Word, values: tuple[Word, ...], module: ModuleType | None, accepted: Mapping[str, int | None] | None
) -> Verdict:
    flag, equals, inner = word.text.partition("=")
    texts = [inner] if equals else [value.text for value in values]
    if not flag.startswith("--"):
        return Verdict(UNKNOWN, word.text, values, word, "it belongs to no flag; a backslash with a space behind it?")
    if lacking := _lacking((word, *values) if equals else values, texts):
        return Verdict(NEEDS_VALUE, word.text, values, word, lacking)
    if module is not None:
        return _of_program(Verdict(KEPT, flag, values, word), module, accepted or {})
    return _of_training(Verdict(KEPT, flag, values, word), texts)


def _lacking(words: Sequence[Word], texts: Sequence[str]) -> str:
    """What to set, when a value is not known or stands for one that the user fills in."""
    missing = [name for word in words for name in word.missing]
    if not missing and (not texts or not PLACEHOLDER.search(" ".join(texts))):
        return ""
    via = next((name for word in words for name in word.via), "")
    if via and f"${via}" not in missing:
        return f"set {via}"
    return f"set {', '.join(missing)}" if missing else "give a value"


def _of_training(verdict: Verdict, texts: list[str]) -> Verdict:
    flag = verdict.flag
    if flag in RENAMES:
        return _as(verdict, RENAMED, f"to {RENAMES[flag]}", RENAMES[flag])
    meaning, row = meaning_of(flag), refusal(flag)
    if meaning is None and row is not None:
        if row.trains_alike:
            return _as(verdict, DROPPED, row.told)
        return _as(verdict, REFUSED, row.told)
    if meaning is None:
        near = difflib.get_close_matches(flag, meanings(), n=1)
        return _as(verdict, UNKNOWN, f"nobody knows this flag{f'; {near[0]}?' if near else ''}")
    takes_none = meaning.spec.is_bool if isinstance(meaning, FieldFlag) else meaning.takes == 0
    raw: object = True if takes_none else texts if len(texts) != 1 else texts[0]
    if takes_none and texts:
        return _as(verdict, UNKNOWN, f"it takes no value, and {' '.join(texts)} belongs to no flag")
    reading = read_settings([(flag, raw)], "the recipe")
    if reading.errors:
        return _as(verdict, REFUSED, " ".join(str(reading.errors[0]).replace(" (the recipe)", "").split()))
    if isinstance(meaning, NoEffect):
        return _as(verdict, WITHOUT_EFFECT, meaning.reason)
    return verdict


def _of_program(verdict: Verdict, module: ModuleType, accepted: Mapping[str, int | None]) -> Verdict:
    flag = verdict.flag
    if flag in module.NO_EFFECT:
        return _as(verdict, WITHOUT_EFFECT, module.NO_EFFECT[flag][1])
    if flag in module.REFUSED:
        return _as(verdict, REFUSED, module.REFUSED[flag])
    if flag not in accepted:
        row = refusal(flag)
        return _as(verdict, REFUSED, row.told) if row else _as(verdict, UNKNOWN, "nobody knows this flag")
    return verdict


def _as(verdict: Verdict, kind: str, remark: str, becomes: str = "") -> Verdict:
    return Verdict(kind, verdict.flag, verdict.values, verdict.word, remark, becomes)


def _accepted_by(module: ModuleType) -> Mapping[str, int | None]:
    """The flags of a program, each with how many values it takes; None for any number."""
    build: Callable[[], argparse.ArgumentParser] = module.build_parser
    return {
        spelling: 1 if action.nargs is None else action.nargs if isinstance(action.nargs, int) else None
        for action in build()._actions  # pyright: ignore[reportPrivateUsage]
        for spelling in action.option_strings
    }


def together(command: Command, script: int, verdicts: Sequence[Verdict]) -> str:
    """What is wrong with the flags of a pretraining run together, once the dropped ones are gone; empty if nothing."""
    argv: list[str] = []
    for verdict in verdicts:
        if verdict.kind in (KEPT, WITHOUT_EFFECT, RENAMED, NEEDS_VALUE):
            argv += (verdict.becomes or verdict.word.text).split()
            argv += [value.text for value in verdict.values] if verdict.kind != NEEDS_VALUE else []
            if verdict.kind == NEEDS_VALUE and "=" not in verdict.word.text:
                argv.append("a-value-to-come")
    try:
        parse_pretrain(argv, environ={"WORLD_SIZE": str(_processes(command.words[:script]))})
    except ConfigError as error:
        return str(error)
    return ""


def _processes(words: Sequence[Word]) -> int:
    """Processes of the run that the launcher's words ask for."""
    asked = {"nproc_per_node": 1, "nnodes": 1}
    for word, behind in zip(words, [*words[1:], None], strict=True):
        name, equals, value = word.text.lstrip("-").replace("-", "_").partition("=")
        value = value if equals else behind.text if behind else ""
        if name in asked and value.isdecimal():
            asked[name] = int(value)
    return asked["nproc_per_node"] * asked["nnodes"]
