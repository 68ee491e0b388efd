"""The flags of a run: fields and hand-written spellings to argparse, and a command line to a configuration."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mindspeed_llm.config.aliases import Alias
from mindspeed_llm.config.files import PREFIX, read_environment, read_yaml
from mindspeed_llm.config.help_texts import help_texts
from mindspeed_llm.config.no_effect import NoEffect
from mindspeed_llm.config.resolve import Layer, resolve
from mindspeed_llm.config.rules import PRETRAIN_RULES
from mindspeed_llm.config.run import SECTIONS, RunConfig
from mindspeed_llm.config.schema import FieldSpec
from mindspeed_llm.config.spelled import FieldFlag, Meaning, Reading, meanings, read_settings, unknown_flag
from mindspeed_llm.config.values import describe, members
from mindspeed_llm.errors import ConfigError

COMMAND_LINE = "command line"
ACCEPTED = "accepted without effect"

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")
FamilyValues = Callable[[Mapping[str, Any]], Layer | None]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the command line cannot be read: {message}", fix=f"{self.prog} --help lists every flag")


class _Record(argparse.Action):
    """Keeps a setting as it was written; meaning and type are decided in one place for all sources."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        raw = True if self.nargs == 0 else values
        namespace.settings.append((self.option_strings[0], raw))


def build_parser(prog: str, *, with_help: bool = False) -> argparse.ArgumentParser:
    """A parser of every accepted flag.

    Args:
        prog: name of the program.
        with_help: also read the help texts, from source files; not needed to parse.
    """
    parser = _Parser(prog=prog, allow_abbrev=False, add_help=False, usage="%(prog)s [--flag value ...]")
    parser.set_defaults(settings=[])
    parser.add_argument("-h", "--help", action="store_true", help="Show every flag and leave.")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags; environment and command line win over it."
    )
    groups = {name: parser.add_argument_group(name) for name in (*SECTIONS, ACCEPTED)}
    texts = help_texts() if with_help else {}
    for spelling, meaning in meanings().items():
        section = meaning.spec.section if isinstance(meaning, FieldFlag) else getattr(meaning, "section", ACCEPTED)
        _add(groups[section], spelling, meaning, _help(spelling, meaning, texts) if with_help else "")
    return parser


def add_section(parser: argparse.ArgumentParser, section: str) -> None:
    """Give another program's parser the flags of a section; :func:`read_section` reads them."""
    parser.set_defaults(settings=[])
    group = parser.add_argument_group(section)
    texts = help_texts()
    for spelling, meaning in meanings().items():
        if isinstance(meaning, FieldFlag) and meaning.spec.section == section:
            _add(group, spelling, meaning, _help(spelling, meaning, texts))


def read_section(namespace: argparse.Namespace, section: type[S]) -> S:
    """A section as the flags of :func:`add_section` give it.

    Raises:
        ConfigError: a value cannot be one of its field.
    """
    reading = read_settings(namespace.settings, COMMAND_LINE)
    if reading.errors:
        raise ConfigError.collect(reading.errors)
    mine = {field.name for field in dataclasses.fields(section)}
    return section(**{name: value for name, value in reading.values.items() if name in mine})


def _add(group: argparse._ArgumentGroup, spelling: str, meaning: Meaning, text: str) -> None:  # pyright: ignore[reportPrivateUsage]
    text = text.replace("%", "%%")
    group.add_argument(
        spelling, action=_Record, dest="settings", default=argparse.SUPPRESS, help=text, **_form(meaning)
    )


def _form(meaning: Meaning) -> dict[str, Any]:
    """How many values follow a spelling, and how --help shows them."""
    if not isinstance(meaning, FieldFlag):
        return {"metavar": "VALUE", "nargs": None if meaning.takes == 1 else meaning.takes}
    spec = meaning.spec
    if spec.is_bool:
        return {"nargs": 0}
    kinds = members(spec.annotation)
    literal = next((kind for kind in kinds if typing.get_origin(kind) is typing.Literal), None)
    if literal is not None:
        return {"metavar": "{" + ",".join(str(choice) for choice in typing.get_args(literal)) + "}"}
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        return {"nargs": spec.option.count or "*", "metavar": spec.name.upper()}
    return {"metavar": getattr(kinds[0], "__name__", "value").upper()}


def _help(spelling: str, meaning: Meaning, texts: Mapping[str, str]) -> str:
    if isinstance(meaning, Alias):
        return meaning.help
    if isinstance(meaning, NoEffect):
        return f"No effect: {meaning.reason}."
    spec = meaning.spec
    if spelling != spec.flag:
        negated = spec.is_bool and not meaning.means
        return f"Turns {spec.flag} off." if negated else f"Same as {spec.flag}."
    return f"{texts[spec.name]} {_default(spec)}".strip()


def _default(spec: FieldSpec) -> str:
    if spec.default is None or spec.default == ():
        return f"({describe(spec.annotation, spec.option.count)})"
    return f"({describe(spec.annotation, spec.option.count)}; default {spec.default})"


def read_command_line(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[Reading, argparse.Namespace]:
    """The settings of ``argv``; flags that are refused or unknown are among the errors of the reading.

    Raises:
        ConfigError: a flag lacks its value.
    """
    namespace, rest = parser.parse_known_args(list(argv), argparse.Namespace(settings=[]))
    reading = read_settings(namespace.settings, COMMAND_LINE)
    foreign = [token.partition("=")[0] for token in rest if token.startswith("--")]
    reading.errors += [unknown_flag(spelling, COMMAND_LINE) for spelling in dict.fromkeys(foreign)]
    if rest and not foreign:
        # Beside an unknown flag, bare words are its values.
        reading.errors.append(ConfigError("there is text that belongs to no flag", got=" ".join(rest)))
    return reading, namespace


def parse_pretrain(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    family_values: FamilyValues | None = None,
    prog: str = "pretrain_gpt.py",
) -> RunConfig:
    """The configuration of a pretraining run from its command line; prints help and leaves when asked to.

    Args:
        argv: arguments after the program's name.
        environ: environment variables: flags as ``MINDSPEED_LLM_<FLAG_IN_CAPS>``, and the launcher's ``WORLD_SIZE``.
        family_values: answers with the layer that a model family gives, from the field values that the other
            sources gave (``load``, ``hf_config``, ``model_type_hf``, ...); its layer has the lowest precedence. It may
            raise :class:`ConfigError`.
        prog: name shown in help and errors.

    Raises:
        ConfigError: everything that is wrong with the flags, or else with their combination, in one error.
        SystemExit: after ``--help``.
    """
    parser = build_parser(prog)
    line, namespace = read_command_line(parser, argv)
    if namespace.help:
        sys.stdout.write(build_parser(prog, with_help=True).format_help())
        raise SystemExit(0)
    path = namespace.config or environ.get(PREFIX + "CONFIG")
    readings = [read_yaml(path)] if path else []
    readings += [read_environment(environ), line]
    errors = [error for reading in readings for error in reading.errors]
    if errors:
        raise ConfigError.collect(errors)
    layers = [reading.layer() for reading in readings]
    if family_values is not None:
        given = {name: value for layer in layers for name, value in layer.values.items()}
        family = family_values(given)
        layers = [family, *layers] if family else layers
    notices = [notice for reading in readings for notice in reading.notices]
    return resolve(layers, world_size=world_size_of(environ), notices=notices, rules=PRETRAIN_RULES)


def world_size_of(environ: Mapping[str, str]) -> int:
    """Number of processes that the launcher announces in ``WORLD_SIZE``; 1 without it.

    Raises:
        ConfigError: it is not a positive whole number.
    """
    text = environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("WORLD_SIZE must be the number of processes", got=repr(text), fix="start with torchrun")
    return int(text)
