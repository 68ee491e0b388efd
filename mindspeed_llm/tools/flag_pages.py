"""The pages about flags: which there are, and what share of upstream's recipes they cover.

``docs/upstream-flags.csv`` holds the facts: each flag of Megatron-LM core_v0.16.1 and of MindSpeed-LLM, the programs
that take it, and in how many of MindSpeed-LLM's pretraining and fine-tuning recipes it stands (those for megatron-core
of its branches 2.0.0, 2.2.0, 2.3.0 and master, one of each name).
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from mindspeed_llm.cli import convert, preprocess
from mindspeed_llm.config.aliases import ALIASES
from mindspeed_llm.config.exposed import EXPOSED, INTERNAL
from mindspeed_llm.config.files import PREFIX
from mindspeed_llm.config.help_texts import help_texts
from mindspeed_llm.config.no_effect import NO_EFFECT, NoEffect
from mindspeed_llm.config.refused import Refused, refusal
from mindspeed_llm.config.run import SECTIONS
from mindspeed_llm.config.schema import GENERATED_SECTIONS, FieldSpec, field_table
from mindspeed_llm.config.spelled import FieldFlag, Meaning, meaning_of, meanings
from mindspeed_llm.config.values import describe
from mindspeed_llm.tools.markdown import COMMAND, code, page, table
from mindspeed_llm.tools.source_tree import source_tree

TRAIN = "train"
PROGRAMS: Mapping[str, ModuleType] = {"preprocess": preprocess, "convert": convert}
"""Programs beside training that take flags of upstream's; each has ``build_parser``, ``NO_EFFECT`` and ``REFUSED``."""

TITLES: Mapping[str, str] = {
    TRAIN: "Training",
    "preprocess": "Preparing data: `preprocess_data.py`",
    "convert": "Converting checkpoints: `convert_ckpt.py`",
}
RECIPES: Mapping[str, int] = {"pretrain": 163, "fine_tune": 133}
"""How many recipes of each kind were counted."""


@dataclass(frozen=True)
class UpstreamFlag:
    """A row of ``docs/upstream-flags.csv``.

    Attributes:
        name: without dashes.
        megatron: programs of Megatron-LM that take it.
        mindspeed: programs of MindSpeed-LLM that take it.
        recipes: in how many recipes of each kind it stands.
    """

    name: str
    megatron: tuple[str, ...]
    mindspeed: tuple[str, ...]
    recipes: Mapping[str, int]


def upstream_flags() -> list[UpstreamFlag]:
    """Every flag of upstream's, in the order of the alphabet."""
    with (source_tree() / "docs" / "upstream-flags.csv").open(encoding="utf-8", newline="") as file:
        return [
            UpstreamFlag(
                row["flag"],
                tuple(row["megatron"].split()),
                tuple(row["mindspeed"].split()),
                {kind: int(row[kind] or 0) for kind in RECIPES},
            )
            for row in csv.DictReader(file)
        ]


# Standing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """What becomes of a flag.

    Attributes:
        kind: supported, other spelling, without effect, in part, planned, later, refused, unknown.
        remark: how, when or why.
        comes: the step that brings it, or what is still missing of it; empty where nothing is to come.
    """

    kind: str
    remark: str
    comes: str = ""

    @property
    def is_implemented(self) -> bool:
        """Whether a recipe that carries the flag gets what it says."""
        return self.kind in ("supported", "other spelling", "without effect")


def _of_refused(row: Refused) -> Standing:
    kind = "later" if row.comes == "later" else "planned" if row.comes else "refused"
    return Standing(kind, f"{row.comes}: {row.reason}" if kind == "planned" else row.reason, row.comes)


def standing(name: str) -> Standing:
    """What ``pretrain_gpt.py`` makes of the flag ``name`` (without dashes)."""
    spelling, row = f"--{name}", refusal(name)
    meaning = meaning_of(spelling)
    if meaning is None:
        return _of_refused(row) if row else Standing("unknown", "")
    if row and row.comes:
        return Standing("in part", f"where it changes nothing; {row.comes}: {row.reason}", row.comes)
    if isinstance(meaning, NoEffect):
        return Standing("without effect", meaning.reason)
    return _of_accepted(spelling, meaning)


def _of_accepted(spelling: str, meaning: Meaning) -> Standing:
    if not isinstance(meaning, FieldFlag):
        return Standing("other spelling", getattr(meaning, "help", ""))
    flag = meaning.spec.flag
    if spelling == flag:
        return Standing("supported", "")
    return Standing("other spelling", f"turns {flag} off" if meaning.spec.is_bool and not meaning.means else flag)


def _standing_in(program: str, name: str) -> Standing:
    if program == TRAIN:
        return standing(name)
    module, spelling = PROGRAMS[program], f"--{name}"
    if spelling in module.NO_EFFECT:
        return Standing("without effect", module.NO_EFFECT[spelling][1])
    if spelling in module.REFUSED:
        return Standing("refused", module.REFUSED[spelling])
    parser: argparse.ArgumentParser = module.build_parser()
    known = any(spelling in action.option_strings for action in parser._actions)  # pyright: ignore[reportPrivateUsage]
    if known:
        return Standing("supported", "")
    row = refusal(name)
    return _of_refused(row) if row else Standing("unknown", "")


# docs/generated/flags.md --------------------------------------------------------------------------------------------


def _type(spec: FieldSpec) -> str:
    return "flag" if spec.is_bool else describe(spec.annotation, spec.option.count)


def _default(spec: FieldSpec) -> str:
    if spec.default is None or spec.default == ():
        return ""
    return ("on" if spec.default else "off") if spec.is_bool else f"`{spec.default}`"


def _flag_row(spec: FieldSpec, texts: Mapping[str, str]) -> Sequence[object]:
    primary, *others = (spelling for spelling in spec.spellings() if _belongs(spelling, spec))
    help_text = "see `--help`" if spec.section in GENERATED_SECTIONS else texts.get(spec.name, "")
    return (f"`{primary}`", code(others), _type(spec), _default(spec), help_text)


def _belongs(spelling: str, spec: FieldSpec) -> bool:
    """Whether the spelling is the field's: a hand-written meaning of the same spelling wins."""
    meaning = meanings()[spelling]
    return isinstance(meaning, FieldFlag) and meaning.spec.name == spec.name


def _section(name: str, texts: Mapping[str, str]) -> list[str]:
    counts = {0: "flag", 1: "one value", 2: "two values"}
    # Where a hand-written meaning takes a field's only spelling, its row stands for the field.
    specs = [
        spec
        for spec in field_table().values()
        if spec.section == name and spec.has_flag and any(_belongs(spelling, spec) for spelling in spec.spellings())
    ]
    aliases = [
        (f"`{spelling}`", "", counts[alias.takes], "", alias.help)
        for spelling, alias in ALIASES.items()
        if alias.section == name
    ]
    rows = [*(_flag_row(spec, texts) for spec in specs), *aliases]
    return [f"## {name}", "", *table(("flag", "other spellings", "takes", "default", "meaning"), rows)]


def _without_effect() -> list[str]:
    rows = [
        (f"`{name}`", code(entry.only) or ("any" if entry.takes else ""), entry.reason)
        for name, entry in sorted(NO_EFFECT.items())
    ]
    return ["## Accepted without effect", "", *table(("flag", "values", "why it changes nothing"), rows)]


def _inventory(flags: Sequence[UpstreamFlag], program: str) -> list[str]:
    rows: list[Sequence[object]] = []
    for flag in flags:
        owners = [
            owner
            for owner, programs in (("Megatron-LM", flag.megatron), ("MindSpeed-LLM", flag.mindspeed))
            if program in programs
        ]
        if owners:
            stands = _standing_in(program, flag.name)
            rows.append((f"`--{flag.name}`", ", ".join(owners), stands.kind, stands.remark))
    counts = Counter(row[2] for row in rows)
    return [
        f"### {TITLES[program]}",
        "",
        f"{len(rows)} flags: {', '.join(f'{count} {kind}' for kind, count in counts.most_common())}.",
        "",
        *table(("flag", "of", "here", "how, when or why"), rows),
    ]


def flags_page() -> str:
    """Every accepted flag by section, flags without effect, and each flag of upstream's with what becomes of it."""
    texts, flags = help_texts(), upstream_flags()
    hidden = sorted(
        name
        for name, spec in field_table().items()
        if spec.section in GENERATED_SECTIONS and name not in EXPOSED and name not in INTERNAL
    )
    accepted = sum(spec.has_flag for spec in field_table().values())
    return page(
        "Flags",
        [
            f"{accepted} fields have a flag. Each can also be given in a YAML file (`--config FILE`, keys without",
            f"dashes) and as an environment variable (`{PREFIX}<FLAG_IN_CAPS>`). Fields of megatron-core's own",
            "dataclasses (sections transformer, optimizer, ddp) are described by the installed wheel: see",
            "`pretrain_gpt.py --help`. What becomes of a flag of Megatron-LM or MindSpeed-LLM:",
            "[below](#flags-of-megatron-lm-and-mindspeed-llm).",
            "",
            *(line for name in SECTIONS for line in _section(name, texts)),
            *_without_effect(),
            "## Fields of megatron-core without a flag",
            "",
            f"Derived, or set by a model family: {code(sorted(INTERNAL))}.",
            "",
            f"Kept at their defaults, and refused by name: {code(hidden)}.",
            "",
            "## Flags of Megatron-LM and MindSpeed-LLM",
            "",
            "Megatron-LM is core_v0.16.1. *In part*: accepted where it changes nothing, such as",
            "`--context-parallel-size 1`. *Planned*: refused by name until the step of",
            "[feature-map.md](../feature-map.md) comes. *Later*: wanted, in no step yet. *Refused*: not to come, or",
            "there is another way.",
            "",
            *(line for program in TITLES for line in _inventory(flags, program)),
        ],
    )


# docs/generated/flag-coverage.txt -----------------------------------------------------------------------------------


def coverage_page() -> str:
    """The share of flag occurrences in upstream's recipes that are implemented, and the flags that lack."""
    flags = [flag for flag in upstream_flags() if any(flag.recipes.values())]
    stands = {flag.name: standing(flag.name) for flag in flags}
    totals = {kind: sum(flag.recipes[kind] for flag in flags) for kind in RECIPES}
    have = {kind: sum(flag.recipes[kind] for flag in flags if stands[flag.name].is_implemented) for kind in RECIPES}
    lacking = sorted(
        (flag for flag in flags if not stands[flag.name].is_implemented),
        key=lambda flag: (-sum(flag.recipes.values()), flag.name),
    )
    lines = [
        "How much of MindSpeed-LLM's recipes is implemented, in occurrences of flags: a flag that stands in 50 recipes",
        "counts 50 times. Implemented: it does here what it says, or there is truly nothing for it to change.",
        f"Generated by {COMMAND}, which refuses to lower a share.",
        "",
        *(f"{kind}: {_share(have[kind], totals[kind])}, in {RECIPES[kind]} recipes" for kind in RECIPES),
        "",
        *_steps(lacking, stands, have, totals),
        "",
        "What is missing, by occurrences:",
        "",
        f"{'pretrain':>9} {'fine_tune':>9}  {'comes':8} flag",
        *(
            f"{flag.recipes['pretrain']:9} {flag.recipes['fine_tune']:9}  {stands[flag.name].comes or 'never':8} "
            f"--{flag.name}"
            for flag in lacking
        ),
    ]
    return "\n".join(lines) + "\n"


def _share(count: int, total: int) -> str:
    return f"{count} of {total} ({100 * count / total:.2f} %)"


def _steps(
    lacking: Iterable[UpstreamFlag],
    stands: Mapping[str, Standing],
    have: Mapping[str, int],
    totals: Mapping[str, int],
) -> list[str]:
    """What the shares become as the steps come in, one after the other."""
    brings: dict[int, Counter[str]] = {}
    for flag in lacking:
        step = stands[flag.name].comes.removeprefix("step ")
        if step.isdecimal():
            brings.setdefault(int(step), Counter()).update(flag.recipes)
    lines, sums = ["With the steps to come:"], Counter(have)
    for step, counts in sorted(brings.items()):
        sums.update(counts)
        lines.append(f"  step {step:2}: " + "; ".join(f"{kind} {_share(sums[kind], totals[kind])}" for kind in RECIPES))
    return lines


def shares(text: str) -> dict[str, float]:
    """The shares that a page of :func:`coverage_page` states, by kind of recipe."""
    found = re.findall(r"^(\w+): (\d+) of (\d+) \(", text, re.MULTILINE)
    return {kind: int(count) / int(total) for kind, count, total in found}


def lowered(before: str, after: str) -> list[str]:
    """The kinds of recipes whose share fell between two pages."""
    old, new = shares(before), shares(after)
    return [kind for kind, share in old.items() if new.get(kind, 0.0) < share]
