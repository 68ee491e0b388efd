"""The part of bash's syntax that recipes use, as data with places in the text.

Understood: assignments of strings and arrays, also behind ``export``; quotes, line continuations, comments;
``$X ${X} ${X:-default} ${X[@]} $((...)) $(...)``; pipes, lists, groups, ``if`` and ``for``; redirections and here
documents (skipped). Functions, ``while`` and ``case`` are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mindspeed_llm.errors import ConfigError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?(\+?)=")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
OPERATOR = re.compile(r"&&|\|\||;;|[;&|()\n]")
REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|&>>?|>>|>&|<&|>\||[<>])")
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
RESERVED = frozenset(
    ("if", "then", "elif", "else", "fi", "for", "in", "do", "done", "while", "until", "case", "{", "}")
)


@dataclass(frozen=True)
class Literal:
    """Text as it stands at ``at``; ``quoted`` text is not split into words."""

    text: str
    at: int
    quoted: bool


@dataclass(frozen=True)
class Variable:
    """``$name`` with an operator such as ``:-`` and its argument; ``all`` for ``[@]`` and ``[*]``."""

    name: str
    quoted: bool
    source: str
    operator: str = ""
    argument: tuple[Part, ...] = ()
    all: bool = False
    index: str | None = None
    length: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """``$((text))``."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class Substitution:
    """The output of a command, which is not run; ``source`` is how it is written."""

    source: str
    quoted: bool


Part = Literal | Variable | Arithmetic | Substitution
Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """``name=value`` or ``name=(items)``, with ``append`` for ``+=``."""

    name: str
    append: bool
    value: Parts = ()
    items: tuple[Parts, ...] | None = None


@dataclass(frozen=True)
class Simple:
    """A command with the assignments before it; ``at`` and ``end`` span it in the text."""

    at: int
    end: int
    assignments: tuple[Assignment, ...]
    words: tuple[Parts, ...]
    then: str = ""
    """The operator behind it: ``&&``, ``||``, ``|`` or empty."""


@dataclass(frozen=True)
class If:
    """Conditions with their bodies; the last condition is empty for ``else``."""

    clauses: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]


@dataclass(frozen=True)
class For:
    """A loop over words."""

    name: str
    words: tuple[Parts, ...]
    body: tuple[Node, ...]


@dataclass(frozen=True)
class Skipped:
    """What is passed over: a function, ``while``, ``case``."""

    at: int
    what: str


Node = Simple | If | For | Skipped


def parse(text: str) -> tuple[Node, ...]:
    """The statements of a script.

    Raises:
        ConfigError: a quote or a bracket is not closed.
    """
    return _Parser(text).statements(())


@dataclass
class _Parser:
    text: str
    at: int = 0
    here_documents: list[str] = field(default_factory=list)

    # Words ----------------------------------------------------------------------------------------------------------

    def fail(self, what: str, at: int) -> ConfigError:
        return ConfigError(f"the recipe cannot be read: {what}", got=f"line {self.text.count(chr(10), 0, at) + 1}")

    def blanks(self) -> None:
        """Skip spaces, continuations and a comment."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def word(self, stop: str = " \t\r\n;&|()<>") -> Parts:
        """The parts of the word at the current place, up to an unquoted character of ``stop``."""
        parts: list[Part] = []
        plain = ""
        begin = self.at

        def flush() -> None:
            nonlocal plain
            if plain:
                parts.append(Literal(plain, begin, quoted=False))
                plain = ""

        while self.at < len(self.text):
            char = self.text[self.at]
            if char in stop:
                break
            if not plain:
                begin = self.at
            if char == "\\":
                flush()
                escaped = self.text[self.at + 1 : self.at + 2]
                if escaped not in ("\n", ""):
                    parts.append(Literal(escaped, self.at, quoted=True))
                self.at += 2
            elif char in "'\"" or self.text.startswith("$'", self.at):
                flush()
                parts += self.quoted()
            elif char in "$`":
                flush()
                parts.append(self.expansion(quoted=False))
            else:
                plain += char
                self.at += 1
        flush()
        return tuple(parts)

    def quoted(self) -> list[Part]:
        """The parts of a quoted string."""
        begin = self.at
        if self.text[self.at] != '"':
            self.at += 2 if self.text[self.at] == "$" else 1
            end = self.text.find("'", self.at)
            if end < 0:
                raise self.fail("a quote is not closed", begin)
            part = Literal(self.text[self.at : end], self.at, quoted=True)
            self.at = end + 1
            return [part]
        self.at += 1
        parts: list[Part] = [Literal("", self.at, quoted=True)]
        plain, start = "", self.at
        while self.at < len(self.text) and self.text[self.at] != '"':
            pair = self.text[self.at : self.at + 2]
            if pair == "\\\n" or pair in ('\\"', "\\$", "\\`", "\\\\") or pair[0] in "$`":
                parts.append(Literal(plain, start, quoted=True))
                plain = ""
                if pair[0] in "$`":
                    parts.append(self.expansion(quoted=True))
                else:
                    parts.append(Literal(pair[1].strip("\n"), self.at + 1, quoted=True))
                    self.at += 2
                start = self.at
            else:
                plain += pair[0]
                self.at += 1
        if self.at >= len(self.text):
            raise self.fail("a quote is not closed", begin)
        self.at += 1
        return [*parts, Literal(plain, start, quoted=True)]

    def expansion(self, *, quoted: bool) -> Part:
        """What stands behind a dollar sign, or between backquotes."""
        text, begin = self.text, self.at
        if text[begin] == "`":
            end = text.find("`", begin + 1)
            if end < 0:
                raise self.fail("a backquote is not closed", begin)
            self.at = end + 1
            return Substitution(text[begin : self.at], quoted)
        if text.startswith("$((", begin):
            end = text.find("))", begin)
            if end < 0:
                raise self.fail("$(( is not closed", begin)
            self.at = end + 2
            return Arithmetic(text[begin + 3 : end], quoted)
        if text.startswith("$(", begin):
            self.at = self.closing(begin + 1)
            return Substitution(text[begin : self.at], quoted)
        if text.startswith("${", begin):
            return self.braced(quoted=quoted)
        name = NAME.match(text, begin + 1)
        if name is None:
            self.at += 1
            return Literal("$", begin, quoted)
        self.at = name.end()
        whole = name.group() in "@*"
        return Variable(name.group(), quoted, text[begin : self.at], all=whole)

    def closing(self, at: int) -> int:
        """The place behind the bracket that closes the one at ``at``."""
        depth = 0
        for place in range(at, len(self.text)):
            depth += {"(": 1, ")": -1}.get(self.text[place], 0)
            if depth == 0:
                return place + 1
        raise self.fail("a bracket is not closed", at)

    def braced(self, *, quoted: bool) -> Variable:
        """``${...}``."""
        begin = self.at
        self.at += 2
        length = self.text.startswith("#", self.at) and not self.text.startswith("#}", self.at)
        self.at += length
        name = NAME.match(self.text, self.at)
        if name is None:
            raise self.fail("${ without a name", begin)
        self.at = name.end()
        index = re.compile(r"\[([^\]]*)\]").match(self.text, self.at)
        if index:
            self.at = index.end()
        operator = re.compile(r":?[-=+?]|[^}]?").match(self.text, self.at)
        self.at = operator.end() if operator else self.at
        argument = self.word(stop="}") if operator and operator.group() else ()
        if self.at >= len(self.text):
            raise self.fail("${ is not closed", begin)
        self.at += 1
        chosen = index.group(1) if index else None
        whole = chosen in ("@", "*") or (chosen is None and name.group() in ("@", "*"))
        return Variable(
            name.group(),
            quoted,
            self.text[begin : self.at],
            operator.group() if operator else "",
            argument,
            all=whole,
            index=None if whole else chosen,
            length=bool(length),
        )

    # Commands -------------------------------------------------------------------------------------------------------

    def statements(self, ends: tuple[str, ...]) -> tuple[Node, ...]:
        """Statements up to one of the reserved words ``ends``, which is not taken."""
        nodes: list[Node] = []
        while True:
            self.separators()
            if self.at >= len(self.text):
                if ends:
                    raise self.fail(f"{' or '.join(ends)} is missing", self.at)
                return tuple(nodes)
            here = self.reserved()
            if here and here in ends:
                return tuple(nodes)
            nodes += self.statement(here)

    def separators(self) -> None:
        while True:
            self.blanks()
            found = OPERATOR.match(self.text, self.at)
            if found is None or found.group() in "()":
                return
            self.at = found.end()
            if found.group() == "\n":
                self.skip_here_documents()

    def skip_here_documents(self) -> None:
        for word in self.here_documents:
            end = re.compile(rf"^\t*{re.escape(word)}$", re.MULTILINE).search(self.text, self.at)
            self.at = end.end() if end else len(self.text)
        self.here_documents.clear()

    def reserved(self) -> str:
        """The reserved word at the current place, or nothing."""
        if self.text[self.at] in "()":
            return self.text[self.at]
        found = re.compile(r"[a-z]+|[{}]").match(self.text, self.at)
        if found is None or found.group() not in RESERVED:
            return ""
        behind = self.text[found.end() : found.end() + 1]
        return found.group() if not behind or behind in " \t\r\n;()" else ""

    def take(self, word: str) -> None:
        self.separators()
        if self.at >= len(self.text) or self.reserved() != word:
            raise self.fail(f"{word} is missing", self.at)
        self.at += len(word)

    def statement(self, here: str) -> list[Node]:
        begin = self.at
        if here == "if":
            return [self.conditional()]
        if here == "for":
            return [self.loop()]
        if here in ("{", "("):
            self.at += 1
            body = self.statements(("}" if here == "{" else ")",))
            self.at += 1
            return list(body)
        if here in ("while", "until"):
            self.at += len(here)
            self.statements(("do",))
            self.take("do")
            self.statements(("done",))
            self.take("done")
            return [Skipped(begin, here)]
        if here == "case":
            end = re.compile(r"\besac\b").search(self.text, self.at)
            self.at = end.end() if end else len(self.text)
            return [Skipped(begin, "case")]
        function = re.compile(r"(?:function\s+[\w-]+\s*(?:\(\s*\))?|[\w-]+\s*\(\s*\))\s*\{").match(self.text, self.at)
        if function:
            self.at = function.end()
            self.statements(("}",))
            self.at += 1
            return [Skipped(begin, "function")]
        if here:
            raise self.fail(f"{here} out of place", begin)
        return [self.simple()]

    def conditional(self) -> If:
        clauses: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
        word = "if"
        while word != "fi":
            self.take(word)
            condition: tuple[Node, ...] = ()
            if word != "else":
                condition = self.statements(("then",))
                self.take("then")
            clauses.append((condition, self.statements(("elif", "else", "fi"))))
            word = self.reserved()
        self.take("fi")
        return If(tuple(clauses))

    def loop(self) -> For | Skipped:
        begin = self.at
        self.take("for")
        self.blanks()
        name = re.compile(r"[A-Za-z_]\w*").match(self.text, self.at)
        words: list[Parts] = []
        if name:
            self.at = name.end()
            self.blanks()
            if self.reserved() == "in":
                self.at += 2
                words = list(self.arguments())
        else:  # for ((...))
            self.at = self.closing(self.at)
        self.take("do")
        body = self.statements(("done",))
        self.take("done")
        return For(name.group(), tuple(words), body) if name else Skipped(begin, "for ((")

    def simple(self) -> Simple:
        begin = self.at
        assignments: list[Assignment] = []
        words: list[Parts] = []
        if self.text.startswith("((", self.at):
            self.at = self.closing(self.at)
        while self.more():
            found = ASSIGNMENT.match(self.text, self.at)
            declared = bool(words) and _plain(words[0]) in DECLARING
            if found and (not words or declared):
                assignments.append(self.assignment(found))
            else:
                before = self.at
                words.append(self.word())
                if self.at == before:
                    raise self.fail(f"{self.text[before]} out of place", before)
        end = self.at
        behind = OPERATOR.match(self.text, self.at)
        then = behind.group() if behind and behind.group() in ("&&", "||", "|") else ""
        return Simple(begin, end, tuple(assignments), tuple(words), then)

    def arguments(self) -> list[Parts]:
        words: list[Parts] = []
        while self.more():
            words.append(self.word())
        return words

    def more(self) -> bool:
        """Whether the command goes on; redirections are skipped."""
        while True:
            self.blanks()
            found = REDIRECTION.match(self.text, self.at)
            if found is None:
                break
            self.at = found.end()
            self.blanks()
            stop = " \t\r\n;|" if "&" in found.group() else " \t\r\n;&|()<>"
            target = _plain(self.word(stop))
            if found.group().lstrip("0123456789") in ("<<", "<<-"):
                self.here_documents.append(target)
        return self.at < len(self.text) and OPERATOR.match(self.text, self.at) is None

    def assignment(self, found: re.Match[str]) -> Assignment:
        self.at = found.end()
        name, append = found.group(1), bool(found.group(2))
        if not self.text.startswith("(", self.at):
            return Assignment(name, append, self.word())
        begin = self.at
        self.at += 1
        items: list[Parts] = []
        while True:
            self.blanks()
            if self.at >= len(self.text):
                raise self.fail("an array is not closed", begin)
            if self.text[self.at] == "\n":
                self.at += 1
            elif self.text[self.at] == ")":
                self.at += 1
                return Assignment(name, append, items=tuple(items))
            else:
                items.append(self.word(" \t\r\n)"))


def _plain(parts: Parts) -> str:
    return "".join(part.text if isinstance(part, Literal) else "$" for part in parts)


def starts_of(nodes: Sequence[Node]) -> Iterator[int]:
    """Where the simple commands begin, those inside others too."""
    for node in nodes:
        if isinstance(node, Simple):
            yield node.at
        elif isinstance(node, If):
            for condition, body in node.clauses:
                yield from starts_of((*condition, *body))
        elif isinstance(node, For):
            yield from starts_of(node.body)
