"""``make parity``: the parity cases on anyone's model, layouts and seed.

Each layout trains three steps in fp32 beside transformers and torch's AdamW. Prints a line per layout and writes
``out/parity.jsonl``, a row per step. Exits with 1 when a difference is beyond its limit, else with 2 when a layout
cannot be.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.config.resolve import Layer, resolve
from mindspeed_llm.errors import ConfigError, SuiteError
from mindspeed_llm.models.registry import family_layer
from mindspeed_llm.tools.compare.layouts import GRAMMAR
from tests.distributed.pool import CaseFailed, Pool
from tests.fixtures import hf_folder
from tests.parity.layouts import FAMILIES, SPECIAL, THOROUGH, parse_layout, training_values
from tests.parity.reference import Comparison, Reference, compare, train

OUT = Path(__file__).resolve().parents[2] / "out" / "parity.jsonl"
#: For a model of one's own, when none are named.
USUAL = "one tp2 tp2+sp pp2 dp2+dist"
#: Seconds for a layout: a model of one's own may be large.
TIMEOUT = 1800.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: the tiny models of every family")
    parser.add_argument("--layouts", help=f"layouts separated by spaces, each of {GRAMMAR}; such as 'tp2 tp2+sp+pp2'")
    parser.add_argument("--seed", type=int, default=7, help="of the data, and of the tiny models' weights")
    return parser.parse_args()


def models(given: argparse.Namespace) -> Iterator[tuple[str, Path, Sequence[str]]]:
    """Name, folder and layouts."""
    if given.model is not None:
        layer = family_layer({"load": given.model})
        if layer is None:
            raise ConfigError("this is no Hugging Face folder", got=given.model, fix="MODEL=<folder with config.json>")
        yield str(layer.values["model_type_hf"]), given.model, (given.layouts or USUAL).split()
        return
    # Named layouts are for what every family can do.
    for name, model in (THOROUGH | FAMILIES | ({} if given.layouts else SPECIAL)).items():
        yield name, hf_folder(model.name, seed=given.seed, **model.changes), (given.layouts or model.layouts).split()


def check_possible(folder: Path, layout: str, tokens: torch.Tensor) -> int:
    """The layout's number of processes; raises ConfigError, as a run would, before a process starts on it."""
    world, _ = parse_layout(layout)
    given = {"load": str(folder), **training_values(layout, tokens)}
    family = family_layer(given)
    resolve([*([family] if family else []), Layer("layout", given)], world_size=world)
    return world


def run(pool: Pool, reference: Reference, layout: str) -> list[Comparison]:
    """Three steps in ``layout`` beside the reference."""
    world = check_possible(reference.folder, layout, reference.tokens)
    # What the ranks said matters only when they fail, and is in the exception then.
    with contextlib.redirect_stdout(io.StringIO()):
        ranks = pool.run("tests.parity.case:train", world, timeout=TIMEOUT, reference=reference, layout=layout)
    return compare(ranks, reference)


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def heading(family: str, layout: str) -> str:
    return f"{family:<24} {layout:<38}"


def report(family: str, layout: str, rows: list[Comparison]) -> bool:
    """Print the worst of each; whether all is within the limits."""
    faults = [fault for row in rows for fault in row.faults()]
    loss, norm = max(row.loss_rel for row in rows), max(row.grad_norm_rel for row in rows)
    figures = f"{loss:>9.1e} {norm:>9.1e} {rows[0].worst_param_rel:>9.1e}  {rows[0].worst_param}"
    say(heading(family, layout), figures, "FAILED" if faults else "")
    for fault in faults:
        say(f"    {fault}")
    return not faults


def write_rows(rows: list[dict[str, Any]]) -> None:
    OUT.parent.mkdir(exist_ok=True)
    OUT.with_suffix(".tmp").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(OUT.with_suffix(".tmp"), OUT)


def run_all(given: argparse.Namespace, pool: Pool) -> int:
    """The exit status."""
    say(heading("family", "layout"), f"{'loss':>9} {'norm':>9} {'gradient':>9}  worst parameter")
    failed = impossible = 0
    written: list[dict[str, Any]] = []
    for family, folder, layouts in models(given):
        with tempfile.TemporaryDirectory() as scratch:
            reference = train(folder, given.seed, Path(scratch) / "gradients")
            for layout in layouts:
                try:
                    rows = run(pool, reference, layout)
                except ConfigError as error:
                    impossible += 1
                    say(heading(family, layout), f"cannot be: {error}")
                except CaseFailed as error:
                    failed += 1
                    say(heading(family, layout), f"FAILED: {error}")
                else:
                    failed += not report(family, layout, rows)
                    written += [{"family": family, "layout": layout, "dtype": "fp32", **asdict(row)} for row in rows]
                    write_rows(written)
    say(f"{len(written)} rows in {OUT}; failed: {failed}, impossible: {impossible}")
    return 1 if failed else 2 if impossible else 0


def main() -> int:
    given = arguments()
    pool = Pool()
    try:
        return run_all(given, pool)
    except SuiteError as error:
        sys.stderr.write(f"python -m tests.parity: error: {error}\n")
        return error.exit_code
    finally:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())
