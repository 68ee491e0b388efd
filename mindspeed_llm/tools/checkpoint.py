"""Look at checkpoints: inspect, verify, diff, average.

``python -m mindspeed_llm.tools.checkpoint inspect FOLDER`` and so on. A folder is that of ``--save`` (the newest save,
or ``--ckpt-step N``), one save in it, or a Hugging Face folder. Nothing in a folder is run, and no launcher is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mindspeed_llm.cli.table import write_table
from mindspeed_llm.errors import ConfigError, SuiteError

# torch takes seconds to import, and --help must not wait for it: the work is imported where it is done.

_STEP_HELP = "the save of this iteration (default: the one that a resume takes)"


def build_parser() -> argparse.ArgumentParser:
    """The four commands."""
    parser = argparse.ArgumentParser(prog="checkpoint", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="what it is, without reading its tensors", allow_abbrev=False)
    inspect.add_argument("folder", type=Path)
    inspect.add_argument("--ckpt-step", type=int, help=_STEP_HELP)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--json", action="store_true", help="one JSON object")
    inspect.set_defaults(run=_inspect)
    verify = commands.add_parser(
        "verify", help="read all of it; one line for each problem, exit status 1 if there is one", allow_abbrev=False
    )
    verify.add_argument("folder", type=Path)
    verify.add_argument(
        "--ckpt-step", type=int, help="the save of this iteration (default: the newest, and the tracker)"
    )
    verify.set_defaults(run=_verify)
    diff = commands.add_parser(
        "diff", help="compare two, of any layouts; exit status 0 equal, 1 different, 2 error", allow_abbrev=False
    )
    diff.add_argument("a", type=Path)
    diff.add_argument("b", type=Path)
    diff.add_argument("--ckpt-step", type=int, nargs=2, metavar=("A", "B"), help="the saves of these iterations")
    diff.add_argument("--only", choices=("weights", "optimizer"), help="leave out the rest")
    diff.add_argument("--atol", type=float, help="equal is |a - b| <= atol + rtol |b| (default: the same bits)")
    diff.add_argument("--rtol", type=float, help="see --atol")
    diff.set_defaults(run=_diff)
    average = commands.add_parser("average", help="the mean of Hugging Face models", allow_abbrev=False)
    average.add_argument("folders", type=Path, nargs="+")
    average.add_argument("--output", type=Path, required=True, help="a folder that is not there yet")
    average.add_argument("--weights", type=float, nargs="+", help="one for each folder (default: equal)")
    average.set_defaults(run=_average)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is that of its help text, or an error's own (of ``diff`` always 2)."""
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except SuiteError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if arguments.command == "diff" else error.exit_code
    except BrokenPipeError:
        # The reader of our output, such as head, has seen enough.
        sys.stderr.close()
        return 1


# inspect ------------------------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> int:
    from mindspeed_llm.checkpoint.summary import list_saves, summarize

    saves = list_saves(arguments.folder)
    try:
        found = summarize(arguments.folder, arguments.ckpt_step, listing=arguments.tensors)
        problem = None
    except SuiteError as error:
        if saves is None:
            raise
        # What there is can be told all the same.
        found, problem = None, error
    if arguments.json:
        sys.stdout.write(json.dumps({"saves": saves, "checkpoint": found}, indent=2, default=str) + "\n")
    else:
        if saves is not None:
            _show_saves(saves)
        if found is not None:
            _show_checkpoint(found)
    if problem is not None:
        raise problem
    return 0


def _show_saves(saves: dict[str, Any]) -> None:
    rows = [(save["name"], _bytes(save["bytes"]), "; ".join(save["problems"]) or "complete") for save in saves["saves"]]
    rows += [(draft["name"], _bytes(draft["bytes"]), "draft: not a save, never read") for draft in saves["drafts"]]
    write_table(
        f"{saves['folder']} (the tracker says: {saves['tracker'] or 'nothing'})", ("folder", "size", "state"), rows
    )


def _show_checkpoint(found: dict[str, Any]) -> None:
    plain = [
        (key.replace("_", " "), found[key])
        for key in ("kind", "iteration", "consumed_samples", "consumed_tokens")
        if found.get(key) is not None
    ]
    plain += [(key.replace("_", " "), value) for key, value in found.get("layout", {}).items()]
    if "optimizer" in found:
        form = found["optimizer"]
        plain.append(("optimizer", f"{form['form']}: {form['loads']}" if form else "none"))
    plain += [("tensors", found["tensors"]), ("parameters", f"{found['parameters']:,} (vocabulary padding included)")]
    plain += [(f"bytes of {group}", _bytes(size)) for group, size in found["bytes"].items()]
    for group, dtypes in found["dtypes"].items():
        plain.append((f"dtypes of {group}", ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())))
    write_table(found["folder"], ("", ""), plain)
    write_table("architecture", ("", ""), list(found["architecture"].items()))
    if "listing" in found:
        head = ("name", "shape", "dtype", "bytes", "pieces", "files")
        rows = [
            (row["name"], row["shape"], row["dtype"], row["bytes"], row["pieces"], ", ".join(row["files"]))
            for row in found["listing"]
        ]
        write_table("tensors", head, rows)


def _bytes(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


# The others ---------------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    from mindspeed_llm.checkpoint.verify import verify

    count = 0
    for problem in verify(arguments.folder, arguments.ckpt_step):
        sys.stdout.write(f"{problem}\n")
        count += 1
    sys.stdout.write(f"{arguments.folder}: {f'{count} problems' if count else 'whole'}\n")
    return 1 if count else 0


def _diff(arguments: argparse.Namespace) -> int:
    from mindspeed_llm.checkpoint.difference import compare
    from mindspeed_llm.checkpoint.survey import open_checkpoint

    exact = arguments.atol is None and arguments.rtol is None
    atol, rtol = arguments.atol or 0.0, arguments.rtol or 0.0
    if not (atol >= 0 and rtol >= 0):
        raise ConfigError("a tolerance is a number from 0", got=f"--atol {atol} --rtol {rtol}")
    steps = arguments.ckpt_step or (None, None)
    with ExitStack() as stack:
        a, b = (
            open_checkpoint(folder, step, stack) for folder, step in zip((arguments.a, arguments.b), steps, strict=True)
        )
        found = compare(a, b, group=arguments.only, atol=atol, rtol=rtol)
        for side, names in ((a, found.only_a), (b, found.only_b)):
            for name in names:
                sys.stdout.write(f"only in {side.folder}: {name}\n")
    differing = found.differing(exact=exact)
    if differing:
        rows = [
            (t.name, f"{t.max_abs:.3g}", f"{t.max_rel:.3g}", f"{t.same} of {t.numel}", t.beyond, t.reason or t.note)
            for t in differing
        ]
        head = ("tensor", "max abs", "max rel", "same bits", "beyond tolerance", "")
        write_table("differ", head, rows)
    for note in sorted({f"{t.name}: {t.note}" for t in found.tensors if t.note}):
        sys.stdout.write(f"compared {note}\n")
    bitwise = sum(not t.reason and t.same == t.numel for t in found.tensors)
    only = len(found.only_a) + len(found.only_b)
    sys.stdout.write(
        f"{len(found.tensors)} tensors in both, {bitwise} the same bit for bit, {len(differing)} differ;"
        f" {only} in one alone\n"
    )
    return 1 if differing or only else 0


def _average(arguments: argparse.Namespace) -> int:
    from mindspeed_llm.checkpoint.average import average

    average(arguments.folders, arguments.output, arguments.weights)
    sys.stdout.write(f"wrote {arguments.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
