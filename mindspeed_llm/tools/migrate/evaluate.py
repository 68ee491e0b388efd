"""What a recipe would start, found without running anything.

The values of variables keep, piece by piece, where in the text they are written, so a flag of the command line can be
changed there. Tests hold the result against bash's own.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_llm.tools.migrate.syntax import (
    Arithmetic,
    Assignment,
    For,
    If,
    Literal,
    Node,
    Part,
    Parts,
    Simple,
    Skipped,
    Substitution,
    Variable,
    parse,
)

LOOP_LIMIT = 1000
"""Words of a loop that are gone through."""


@dataclass(frozen=True)
class Piece:
    """Text of a value.

    Attributes:
        text: the characters.
        at: where the first of them stands in the script; None for what is computed.
        via: the variables that it came through, the innermost first.
        missing: what would have given the text and is not known: ``$1``, an unset variable, a command's output.
        protected: it is not split into words.
    """

    text: str
    at: int | None = None
    via: tuple[str, ...] = ()
    missing: str = ""
    protected: bool = False


@dataclass(frozen=True)
class Word:
    """A word of a command line, made of pieces."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The whole of it."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def at(self) -> int | None:
        """Where it is written, if it is written in one place."""
        written = [piece for piece in self.pieces if piece.text]
        return written[0].at if len(written) == 1 else None

    @property
    def missing(self) -> tuple[str, ...]:
        """What of it is not known."""
        return tuple(piece.missing for piece in self.pieces if piece.missing)

    @property
    def is_unset(self) -> bool:
        """Whether it is nothing but variables that are not set, of which bash makes no word."""
        return not self.text and bool(self.missing)

    @property
    def via(self) -> tuple[str, ...]:
        """The variables that it came through, the innermost first."""
        return tuple(dict.fromkeys(name for piece in self.pieces for name in piece.via))


@dataclass(frozen=True)
class Command:
    """A command that the script would start: its place and its words."""

    at: int
    end: int
    words: tuple[Word, ...]
    piped_to: tuple[Word, ...] = ()


@dataclass
class Outcome:
    """What a script does.

    Attributes:
        commands: in their order.
        defined: where each variable was last given a value.
        notes: what was passed over, with the place.
    """

    commands: list[Command] = field(default_factory=list)
    defined: dict[str, int] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)


Value = tuple[Piece, ...]


def evaluate(text: str, arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Outcome:
    """The commands of the script ``text``, started with ``arguments`` in the environment ``environ``.

    Raises:
        ConfigError: the text is not bash.
    """
    run = _Run(dict(environ or {}), list(arguments))
    run.nodes(parse(text))
    return run.outcome


_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError("not a sum of whole numbers")


class _Run:
    """The state of a script: variables and positional arguments."""

    def __init__(self, environ: Mapping[str, str], arguments: list[str]) -> None:
        self.scalars: dict[str, Value] = {name: (Piece(text),) for name, text in environ.items()}
        self.arrays: dict[str, list[Value]] = {"@": [(Piece(text),) for text in arguments]}
        for number, text in enumerate(arguments, start=1):
            self.scalars[str(number)] = (Piece(text),)
        self.outcome = Outcome()

    # Statements -----------------------------------------------------------------------------------------------------

    def nodes(self, nodes: Sequence[Node]) -> None:
        skip = False
        for number, node in enumerate(nodes):
            if isinstance(node, Simple):
                done = None if skip else self.simple(node, nodes[number + 1 :])
                # [ ... ] && X=1: what a test decides is known, what a command answers is not: it succeeds.
                skip = (skip and node.then == "&&") or (
                    not skip and ((node.then == "&&" and done is False) or (node.then == "||" and done is not False))
                )
                continue
            skip = False
            if isinstance(node, If):
                self.conditional(node)
            elif isinstance(node, For):
                words = [word for parts in node.words for word in self.expand(parts)]
                for word in words[:LOOP_LIMIT]:
                    self.scalars[node.name] = word.pieces
                    self.nodes(node.body)
            else:
                self.note(node)

    def note(self, node: Skipped) -> None:
        self.outcome.notes.append((node.at, f"{node.what} is passed over"))

    def conditional(self, node: If) -> None:
        for condition, body in node.clauses:
            if not condition:
                self.nodes(body)
                return
            if self.holds(condition):
                self.nodes(body)
                return

    def holds(self, nodes: Sequence[Node]) -> bool:
        """Whether a condition is met; one that cannot be told is taken as not met, and noted."""
        answer: bool | None = None
        previous = ""
        for node in nodes:
            test = self.test(node) if isinstance(node, Simple) else None
            if test is None:
                at = node.at if isinstance(node, Simple | Skipped) else 0
                self.outcome.notes.append((at, "the condition is taken as not met"))
                test = False
            answer = test if answer is None else (answer and test if previous == "&&" else answer or test)
            previous = node.then if isinstance(node, Simple) else ""
        return bool(answer)

    def test(self, node: Simple) -> bool | None:
        """The answer of ``[ ... ]`` or ``[[ ... ]]``; None for anything else and for what files decide."""
        words = [word for parts in node.words for word in self.expand(parts, split=False)]
        texts = [word.text for word in words]
        if not texts or texts[0] not in ("[", "[[", "test"):
            return None
        texts = [text for text in texts[1:] if text not in ("]", "]]")]
        if any("$(" in missing or "`" in missing for word in words for missing in word.missing):
            return None
        negated = texts[:1] == ["!"]
        answer = _test(texts[1:] if negated else texts)
        return None if answer is None else answer != negated

    def simple(self, node: Simple, rest: Sequence[Node]) -> bool | None:
        words = [word for parts in node.words for word in self.expand(parts)]
        if not words or words[0].text in ("export", "declare", "local", "readonly", "typeset"):
            for assignment in node.assignments:
                self.assign(assignment, node.at)
            return True
        if words[0].text in ("[", "[[", "test"):
            return self.test(node)
        if words[0].text in ("source", "."):
            self.outcome.notes.append((node.at, f"what {' '.join(w.text for w in words[1:])} sets is not read"))
            return None
        piped: tuple[Word, ...] = ()
        if node.then == "|" and rest and isinstance(rest[0], Simple):
            piped = tuple(word for parts in rest[0].words for word in self.expand(parts))
        self.outcome.commands.append(Command(node.at, node.end, tuple(words), piped))
        return None

    def assign(self, assignment: Assignment, at: int) -> None:
        name = assignment.name
        self.outcome.defined[name] = at
        if assignment.items is not None:
            items = [_stored(word.pieces, name) for parts in assignment.items for word in self.expand(parts)]
            self.arrays[name] = [*self.arrays.get(name, []), *items] if assignment.append else items
            self.scalars.pop(name, None)
            return
        value = _stored(self.flat(assignment.value), name)
        if assignment.append:
            value = (*self.scalars.get(name, ()), *value)
        self.scalars[name] = value
        self.arrays.pop(name, None)

    # Expansion ------------------------------------------------------------------------------------------------------

    def flat(self, parts: Parts) -> Value:
        """The pieces of a word that is not split, as on the right of an assignment."""
        pieces: list[Piece] = []
        for part in parts:
            for number, value in enumerate(self.part(part)):
                pieces += [Piece(" "), *value] if number else value
        return tuple(pieces)

    def expand(self, parts: Parts, *, split: bool = True) -> list[Word]:
        """The words that a word of the script becomes."""
        words: list[list[Piece]] = [[]]
        # An empty word in quotes is a word; that of an array without elements is none.
        solid = any(isinstance(part, Literal) and part.quoted for part in parts) and not any(
            isinstance(part, Variable) and part.all for part in parts
        )
        for part in parts:
            values = self.part(part)
            keep = part.quoted or isinstance(part, Literal) or not split
            for number, value in enumerate(values):
                if number:
                    words.append([])
                if keep:
                    words[-1] += [replace(piece, protected=True) for piece in value]
                else:
                    self.split_into(words, value)
        return [
            word
            for word in (Word(tuple(pieces)) for pieces in words)
            if word.text or word.missing or (word.pieces and (solid or not split))
        ]

    @staticmethod
    def split_into(words: list[list[Piece]], value: Value) -> None:
        """Add ``value`` to the last of ``words``, beginning a new one at each white space."""
        for piece in value:
            if not piece.text or piece.missing:
                words[-1].append(piece)
                continue
            for found in re.finditer(r"\s+|\S+", piece.text):
                if found.group().isspace():
                    words.append([])
                else:
                    at = None if piece.at is None else piece.at + found.start()
                    words[-1].append(replace(piece, text=found.group(), at=at))

    def part(self, part: Part) -> list[Value]:
        """The values of a part: one, or one for each element of an array."""
        if isinstance(part, Literal):
            return [(Piece(part.text, part.at),)]
        if isinstance(part, Substitution):
            return [(Piece(part.source, missing=part.source),)]
        if isinstance(part, Arithmetic):
            return [(self.arithmetic(part.text),)]
        return self.variable(part)

    def arithmetic(self, text: str) -> Piece:
        def number(found: re.Match[str]) -> str:
            value = self.scalars.get(found.group(1) or found.group(2) or found.group(3), ())
            return "".join(piece.text for piece in value) or "0"

        filled = re.sub(r"\$\{(\w+)\}|\$(\w+)|\b([A-Za-z_]\w*)\b", number, text)
        try:
            return Piece(str(_number(ast.parse(filled.strip(), mode="eval").body)))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return Piece(f"$(({text}))", missing=f"$(({text}))")

    def variable(self, part: Variable) -> list[Value]:
        if part.name == "*":
            part = replace(part, name="@")
        if part.length or part.name in ("#", "?", "$", "!", "-", "0"):
            if part.length and part.all:
                return [(Piece(str(len(self.arrays.get(part.name, [])))),)]
            return [(Piece(part.source, missing=part.source),)]
        if part.name in self.arrays:
            items = [_through(item, part.name) for item in self.arrays[part.name]]
            if part.all and (items or not part.operator):
                return items
            chosen = int(part.index) if part.index and part.index.isdecimal() else 0
            value = items[chosen] if chosen < len(items) else None
        else:
            found = self.scalars.get(part.name)
            value = None if found is None else _through(found, part.name)
        return [self.operated(part, value)]

    def operated(self, part: Variable, value: Value | None) -> Value:
        """The value with ``:-`` and its like applied."""
        empty = value is None or (part.operator.startswith(":") and not any(p.text or p.missing for p in value))
        if part.operator in (":-", "-", ":=", "="):
            if not empty:
                return value or ()
            given = self.flat(part.argument)
            if "=" in part.operator:
                self.scalars[part.name] = given
            return _through(given, part.name)
        if part.operator in (":+", "+"):
            return () if empty else self.flat(part.argument)
        if part.operator not in ("", ":?", "?"):
            return (Piece(part.source, missing=part.source, via=(part.name,)),)
        return (Piece("", missing=f"${part.name}", via=(part.name,)),) if value is None else value


def _through(value: Value, name: str) -> Value:
    return tuple(piece if name in piece.via else replace(piece, via=(*piece.via, name)) for piece in value)


def _stored(value: Value, name: str) -> Value:
    """The pieces as they pass into the variable ``name``: quotes no longer protect them."""
    return _through(tuple(replace(piece, protected=False) for piece in value), name)


def _test(texts: Sequence[str]) -> bool | None:
    if len(texts) == 1:
        return bool(texts[0])
    if len(texts) == 2 and texts[0] in ("-n", "-z"):
        return bool(texts[1]) == (texts[0] == "-n")
    if len(texts) == 3 and texts[1] in ("=", "==", "!="):
        return (texts[0] == texts[2]) == (texts[1] != "!=")
    compared = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt}
    compared["-le"] = operator.le
    if len(texts) == 3 and texts[1] in compared:
        try:
            return bool(compared[texts[1]](int(texts[0] or 0), int(texts[2] or 0)))
        except ValueError:
            return None
    return None


def lines_of(text: str) -> Callable[[int], int]:
    """The function from a place in ``text`` to the number of its line, from 1."""
    return lambda at: text.count("\n", 0, at) + 1


def python_commands(outcome: Outcome) -> Iterator[tuple[Command, int]]:
    """The commands that start a Python script, each with the index of the script's word."""
    for command in outcome.commands:
        for number, word in enumerate(command.words):
            if word.text.endswith(".py"):
                yield command, number
                break
