"""Write ``mindspeed_llm/config/mcore_flags.py`` from the source of the installed megatron-core.

Importing megatron-core costs seconds and brings torch; a command line must not wait for it. So the fields of its
configuration dataclasses are a committed table, made here by reading the wheel's source with :mod:`ast`. Nothing of
megatron-core is imported.

Usage: ``python -m mindspeed_llm.tools.mcore_flags`` writes the file, ``--check`` only compares.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import logging
import subprocess
import sys
from pathlib import Path

from mindspeed_llm.config.mcore_source import SOURCES, class_body, wheel_folder

logger = logging.getLogger(__name__)

TARGET = Path(__file__).resolve().parent.parent / "config" / "mcore_flags.py"

# Written by hand in a section of ours, under the same name.
OWNED_BY_US = {"deterministic_mode"}

# Spellings of Megatron-LM 0.16.1 (facts of its argument list) that no argparse_meta gives.
HISTORICAL = {
    "num_moe_experts": ("--num-experts",),
    "num_layers_in_first_pipeline_stage": ("--decoder-first-pipeline-num-layers",),
    "num_layers_in_last_pipeline_stage": ("--decoder-last-pipeline-num-layers",),
    "overlap_p2p_comm": ("--overlap-p2p-communication",),
    "bucket_size": ("--ddp-bucket-size",),
    "pad_buckets_for_high_nccl_busbw": ("--ddp-pad-buckets-for-high-nccl-busbw",),
    "reduce_scatter_with_fp32_accumulation": ("--ddp-reduce-scatter-with-fp32-accumulation",),
    "average_in_collective": ("--ddp-average-in-collective",),
    "grad_reduce_in_fp32": ("--accumulate-allreduce-grads-in-fp32",),
}

# Literal sets that megatron-core states only in its code or its training script.
CHOICES = {"optimizer": "Literal['adam', 'sgd']"}

RENAMED_TYPES = {"List": "tuple", "list": "tuple", "Tuple": "tuple"}


@dataclasses.dataclass(frozen=True)
class McoreField:
    """One field: its annotation and default as source text, and extra spellings of its flag."""

    name: str
    annotation: str
    default: str
    flags: tuple[str, ...]


def expressible(node: ast.expr) -> str | None:
    """The annotation in plain Python types, or None when no flag can give such a value."""
    if isinstance(node, ast.Constant):
        return "None" if node.value is None else None
    if isinstance(node, ast.Name):
        return node.id if node.id in {"int", "float", "bool", "str"} else None
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)):
        return None
    head, inner = node.value.id, node.slice
    if head == "Literal":
        return ast.unparse(node)
    if head == "Optional":
        text = expressible(inner)
        return f"{text} | None" if text else None
    members = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    texts = [expressible(member) for member in members]
    if head == "Union":
        # A custom class beside plain types only says that megatron-core also takes the finished object.
        known = [text for text in texts if text]
        return " | ".join(dict.fromkeys(known)) or None
    if head in RENAMED_TYPES and all(texts):
        ending = "" if head == "Tuple" else ", ..."
        return f"tuple[{', '.join(text for text in texts if text)}{ending}]"
    return None


def literal_default(node: ast.expr) -> str | None:
    """The default as source text, computed where it is arithmetic; None when it is not plain data."""
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        pass
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant):
        left, right = node.left.value, node.right.value
        if isinstance(left, int) and isinstance(right, int):
            return repr(left**right if isinstance(node.op, ast.Pow) else left * right)
    return "()" if isinstance(node, ast.Name) and node.id == "list" else None


def read_field(statement: ast.AnnAssign) -> McoreField | None:
    """The field that one annotated assignment declares, or None when a flag cannot give its value."""
    if not isinstance(statement.target, ast.Name) or statement.value is None:
        return None
    name, value, flags = statement.target.id, statement.value, HISTORICAL.get(statement.target.id, ())
    annotation = CHOICES.get(name) or expressible(statement.annotation)
    if isinstance(value, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        value = keywords.get("default") or keywords["default_factory"]
        if "metadata" in keywords:
            meta = ast.literal_eval(keywords["metadata"])["argparse_meta"]
            flags = (*flags, *meta.get("arg_names", ()))
    default = literal_default(value)
    if annotation is None or default is None or name.startswith("_") or name in OWNED_BY_US:
        return None
    if default == "None" and "None" not in annotation:
        annotation += " | None"
    return McoreField(name, annotation, default, flags)


def read_sections(folder: Path) -> dict[str, dict[str, McoreField]]:
    """Fields of each section, each name in the first section that declares it."""
    owned: set[str] = set()
    sections: dict[str, dict[str, McoreField]] = {}
    for section, sources in SOURCES.items():
        found: dict[str, McoreField] = {}
        for source in sources:
            for statement in class_body(folder, source):
                if isinstance(statement, ast.AnnAssign) and (field := read_field(statement)):
                    known = found.get(field.name)
                    merged = (*(known.flags if known else ()), *field.flags)
                    found[field.name] = dataclasses.replace(field, flags=tuple(dict.fromkeys(merged)))
        sections[section] = {name: field for name, field in found.items() if name not in owned}
        owned |= set(found)
    return sections


def render(sections: dict[str, dict[str, McoreField]]) -> str:
    """The Python source of the table, before formatting."""
    lines = [
        '"""Generated by mindspeed_llm.tools.mcore_flags from the installed megatron-core: do not edit."""',
        "from __future__ import annotations\n",
        "from dataclasses import dataclass",
        "from typing import Literal\n",
        "from mindspeed_llm.config.option import option",
    ]
    for section, fields in sections.items():
        origin = " and ".join(source.qualname for source in SOURCES[section])
        lines += ["@dataclass(frozen=True)", f"class {section}:"]
        lines.append(f'    """Fields of megatron-core\'s {origin} that plain values can give."""')
        for field in fields.values():
            extra = tuple(flag for flag in field.flags if flag != "--" + field.name.replace("_", "-"))
            value = f"option({field.default}, flags={extra!r})" if extra else field.default
            lines.append(f"    {field.name}: {field.annotation} = {value}")
    return "\n".join(lines) + "\n"


def formatted(source: str) -> str:
    """``source`` as ``ruff format`` writes it."""
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "--stdin-filename", TARGET.name, "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def main(argv: list[str] | None = None) -> int:
    """Write the table, or with ``--check`` return 1 when the committed one differs."""
    parser = argparse.ArgumentParser(description="Write config/mcore_flags.py from megatron-core.")
    parser.add_argument("--check", action="store_true", help="compare with the committed file; write nothing")
    check = parser.parse_args(argv).check
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    source = formatted(render(read_sections(wheel_folder())))
    if not check:
        TARGET.write_text(source, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == source:
        return 0
    logger.error("%s is out of date: run python -m mindspeed_llm.tools.mcore_flags", TARGET)
    return 1


if __name__ == "__main__":
    sys.exit(main())
