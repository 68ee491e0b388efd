"""A drafted family as the file that a person would have written."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from mindspeed_llm.models import blocks
from mindspeed_llm.models import family as vocabulary
from mindspeed_llm.models.family import Copy, Drop, ParamMap, Replicated, Shard, Transform, Weight
from mindspeed_llm.tools.new_family.drafting import Draft
from mindspeed_llm.tools.new_family.keys import PINNED
from mindspeed_llm.tools.new_family.library import Fragment, Needs, weight_blocks
from mindspeed_llm.tools.new_family.places import LAYER

WIDTH = 120
SAME = "as in the model that this was drafted from"
_ORDER = (
    "*SIZES",
    "*(rule",
    "BOOKKEEPING",
    "TOKENS",
    "*PLAIN",
    "heads",
    "rope",
    "SWIGLU",
    "GEGLU",
    "activation",
    "ROOT",
    "ties",
)
"""How the rules of a family are ordered, then ``plain``, and what is pinned or ignored at the end."""
_LAST = ("plain", "Const", "Preset", "Expect", "Ignore")


@dataclass(frozen=True)
class Node:
    """Text with parts that may stand on lines of their own."""

    head: str
    parts: Sequence[str | Node]
    tail: str

    def flat(self) -> str:
        """On one line."""
        inner = ", ".join(part if isinstance(part, str) else part.flat() for part in self.parts)
        comma = "," if self.head == "(" and len(self.parts) == 1 else ""
        return f"{self.head}{inner}{comma}{self.tail}"

    def lines(self, indent: int, before: int = 0) -> str:
        """On one line that begins at column ``indent``, ``before`` characters before it and a comma after it, or with
        each part on a line and a comma behind the last, which ruff leaves so."""
        flat = self.flat()
        return flat if indent + before + len(flat) < WIDTH else self.exploded(indent)

    def exploded(self, indent: int) -> str:
        """Each part on a line."""
        inner, outer = " " * (indent + 4), " " * indent
        parts = (part if isinstance(part, str) else part.lines(indent + 4) for part in self.parts)
        return f"{self.head}\n{inner}" + f",\n{inner}".join(parts) + f",\n{outer}{self.tail}"


def write_family(draft: Draft) -> str:
    """The text of the file."""
    family, needs = draft.family, Needs().of_names(vocabulary, "ModelFamily")
    config = [_rule(fragment, needs) for fragment in sorted(draft.reading.fragments, key=_place)]
    prefix = _layer_prefix(family.weights)
    weights = list(_weights(family.weights, prefix, needs))
    prefixed = any("_HF +" in each.flat() for each in weights if isinstance(each, Node))
    tiny = _literal(family.tiny)
    parts = [
        f'name="{family.name}"',
        f'hf_model_type="{family.hf_model_type}"',
        "hf_architectures=" + Node("(", [f'"{name}"' for name in family.hf_architectures], ")").flat(),
        "config=" + Node("(", config, ")").exploded(4),
        "weights=" + Node("(", weights, ")").lines(4, before=8),
        f'chat_template="{family.chat_template}"',
        "tiny=" + (tiny.exploded(4) if isinstance(tiny, Node) and tiny.parts else "{}"),
    ]
    title = f'"""{family.hf_architectures[0]}: a draft of mindspeed_llm.tools.new_family, after {draft.nearest}."""'
    blocks_of_text = [title, "from __future__ import annotations", *_imports(needs.imports)]
    if prefixed:
        blocks_of_text.append(f'_MCORE, _HF = "{LAYER}", "{prefix}"')
    definitions = list(dict.fromkeys(needs.definitions.values()))
    head = "\n\n".join([*blocks_of_text, *(text for text in definitions if not text.startswith(("def ", "class ")))])
    functions = [text for text in definitions if text.startswith(("def ", "class "))]
    tail = "\n".join([*_comments(draft), "FAMILY = " + Node("ModelFamily(", parts, ")").exploded(0)])
    return "\n\n\n".join([head, *functions, tail]) + "\n" if functions else f"{head}\n\n{tail}\n"


def _comments(draft: Draft) -> Iterator[str]:
    """What a person has to see to, above the family."""
    if draft.left:
        yield "# To be completed; each key of config.json belongs to one rule, each tensor to one ParamMap or Drop:"
        for line in draft.left:
            yield from _wrapped(line)


def _wrapped(line: str) -> Iterator[str]:
    words, current = line.split(), "# -"
    for word in words:
        if len(current) + 1 + len(word) > WIDTH:
            yield current
            current = "#  "
        current = f"{current} {word}"
    yield current


def _place(fragment: Fragment) -> tuple[int, int]:
    text = fragment.text
    for number, start in enumerate(_LAST):
        if text.startswith(start):
            return 2, number
    return (0, next((n for n, start in enumerate(_ORDER) if text.startswith(start)), len(_ORDER)))


def _rule(fragment: Fragment, needs: Needs) -> str | Node:
    needs.add(fragment.needs)
    text = fragment.text
    if text.startswith("Expect(") and PINNED not in text:
        # The reason is another family's.
        text = re.sub(r'why="[^"]*"', f'why="{SAME}"', text)
    if "\n" in text or len(text) + 9 <= WIDTH:
        return text
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call):
        return text
    parts = [_split(part, text) for part in (*call.args, *call.keywords)]
    return Node(text.partition("(")[0] + "(", parts, ")")


def _split(part: ast.AST, text: str) -> str | Node:
    if isinstance(part, ast.Dict | ast.List):
        return _literal(ast.literal_eval(part))
    return ast.get_source_segment(text, part) or ""


def _imports(imports: Mapping[str, str]) -> Iterator[str]:
    """Groups of import lines, in ruff's order."""
    by_module: dict[str, list[str]] = {}
    for name, module in imports.items():
        if module != "__future__":
            by_module.setdefault(module, []).append(name)
    ours = {module for module in by_module if module.startswith("mindspeed_llm")}
    for group in (sorted(by_module.keys() - ours), sorted(ours)):
        lines = []
        for module in group:
            names = sorted(
                by_module[module], key=lambda name: (0 if name.isupper() else 1 if name[0].isupper() else 2, name)
            )
            flat = f"from {module} import {', '.join(names)}"
            lines.append(flat if len(flat) <= WIDTH else f"from {module} import " + Node("(", names, ")").exploded(0))
        if lines:
            yield "\n".join(lines)


# Weights ------------------------------------------------------------------------------------------------------------


def _layer_prefix(weights: Sequence[Weight]) -> str:
    names = [name for weight in weights if isinstance(weight, ParamMap) for name in weight.hf if "{l}" in name]
    return names[0].partition("{l}.")[0] + "{l}." if names else ""


def _weights(weights: Sequence[Weight], prefix: str, needs: Needs) -> Iterator[str | Node]:
    """Groups that have a name, then the others one by one."""
    inside: dict[ParamMap, str] = {}
    groups = weight_blocks()
    maps = [weight for weight in weights if isinstance(weight, ParamMap)]
    for name, group in sorted(groups.items(), key=lambda each: -len(each[1])):
        members = [weight for weight in group if isinstance(weight, ParamMap)]
        if members and all(weight in maps and weight not in inside for weight in members):
            inside |= dict.fromkeys(members, name)
    named = list(dict.fromkeys(inside[weight] for weight in maps if weight in inside))
    for weight in maps:
        name = inside.get(weight)
        if name is None:
            yield _map(weight, prefix, needs)
        elif name in named:
            named.remove(name)
            needs.of_names(blocks, name)
            yield f"*{name}" if len(groups[name]) > 1 else name
    dropped = {weight.hf for name in set(inside.values()) for weight in groups[name] if isinstance(weight, Drop)}
    for weight in weights:
        if isinstance(weight, Drop) and weight.hf not in dropped:
            needs.of_names(vocabulary, "Drop")
            yield Node("Drop(", [_name(weight.hf, prefix, "_HF"), f'"{weight.why}"'], ")")


def _map(weight: ParamMap, prefix: str, needs: Needs) -> Node:
    needs.of_names(vocabulary, "ParamMap")
    parts: list[str | Node] = [
        _name(weight.mcore, LAYER, "_MCORE"),
        Node("(", [_name(name, prefix, "_HF") for name in weight.hf], ")"),
    ]
    if weight.transform != Copy():
        parts.append(_call(weight.transform, needs))
    if weight.shard != Replicated():
        parts.append(("" if weight.transform != Copy() else "shard=") + _call(weight.shard, needs))
    if weight.when is not None:
        parts.append(f'when="{weight.when}"')
    if weight.transposed:
        parts.append("transposed=True")
    if weight.tied_to is not None:
        parts.append(f'tied_to="{weight.tied_to}"')
    return Node("ParamMap(", parts, ")")


def _name(name: str, prefix: str, spelled: str) -> str:
    return f'{spelled} + "{name.removeprefix(prefix)}"' if prefix and name.startswith(prefix) else f'"{name}"'


def _call(value: Transform | Shard, needs: Needs) -> str:
    needs.of_names(vocabulary, type(value).__name__)
    given = [f"{f.name}={getattr(value, f.name)!r}" for f in fields(value) if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(given)})"


def _literal(value: object, head: str = "") -> str | Node:
    """``value`` in Python, behind ``head``."""
    if isinstance(value, Mapping):
        items = [_literal(inner, f'"{key}": ') for key, inner in value.items()]
        return Node(head + "{", items, "}")
    if isinstance(value, list | tuple):
        return Node(head + "[", [_literal(inner) for inner in value], "]")
    return head + (json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value))
