"""The proof of a family: its config.json both ways, its weights there and back, and every number against transformers.

The family is proved as users will have it: a module of a package that an entry point announces.
"""

# pyright: basic
# transformers' models have no types.

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from mindspeed_llm import api
from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.convert.conversion import Settings, plan
from mindspeed_llm.checkpoint.convert.execution import execute
from mindspeed_llm.checkpoint.convert.shapes import planned_shapes
from mindspeed_llm.checkpoint.convert.streams import Target
from mindspeed_llm.checkpoint.engine import plan_load
from mindspeed_llm.checkpoint.hf_io import TensorInfo
from mindspeed_llm.checkpoint.names import compile_names
from mindspeed_llm.config.resolve import Layer, resolve
from mindspeed_llm.errors import ConversionError, SuiteError
from mindspeed_llm.models.family import ModelFamily, values_of
from mindspeed_llm.models.registry import ENTRY_POINT_GROUP, families
from mindspeed_llm.tools.compare.__main__ import EXACT, Run, compare_sides
from mindspeed_llm.tools.compare.report import describe
from mindspeed_llm.tools.compare.sides import parse_side
from mindspeed_llm.tools.new_family.folder import Class, Model

LAYOUTS = ("one", "tp2+sp+pp2")
_SEQUENCES, _LENGTH = 4, 32


@contextmanager
def registered(folder: Path, module: str) -> Iterator[None]:
    """``FAMILY`` of ``module`` in ``folder`` is a family, in this process and those it starts."""
    with tempfile.TemporaryDirectory(prefix="mindspeed_llm.new_family.") as scratch:
        # By the name of the package: where that is installed already, this one stands before it.
        info = Path(scratch, f"{module}-0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{module} = {module}:FAMILY\n")
        paths = [scratch, str(folder)]
        before, env = list(sys.path), os.environ.get("PYTHONPATH")
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([env] if env else [])])
        try:
            _look_again()
            yield
        finally:
            sys.path[:] = before
            os.environ.pop("PYTHONPATH")
            if env:
                os.environ["PYTHONPATH"] = env
            _look_again()


def _look_again() -> None:
    importlib.invalidate_caches()
    families.cache_clear()


@torch.no_grad()
def write_tiny(kind: Class, family: ModelFamily, folder: Path) -> None:
    """A model of the family's tiny size with distinguishable weights, as ``save_pretrained`` writes it.

    Raises:
        ConversionError: the family has no tiny size, or transformers cannot build it.
    """
    if not family.tiny:
        raise ConversionError(f"{family.name} has no tiny size yet", fix="complete its rules, then its tiny")
    # Token ids are the tokenizer's, which this model has not.
    model = kind.build({**family.tiny, "bos_token_id": None, "eos_token_id": None}).float()
    generator = torch.Generator().manual_seed(1)
    for tensor in model.parameters():
        drawn = torch.randn(tensor.shape, generator=generator) * 0.05
        # Vectors stay around what they start from: a norm's 1, or 0 where the weight is a distance from 1.
        tensor.copy_(drawn + tensor.mean().round() if tensor.dim() == 1 else drawn)
    model.tie_weights()
    model.save_pretrained(folder)


def logit_error(tiny: Path) -> float:
    """Relative RMS between the logits of ours and of transformers, in this process; infinite where ours cannot be."""
    import transformers

    tokens = torch.randint(0, 300, (2, _LENGTH), generator=torch.Generator().manual_seed(2))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.float32, trust_remote_code=False
    ).eval()
    try:
        run = api.load_hf(tiny, seq_length=_LENGTH, hidden_dropout=0.0, attention_dropout=0.0)
    except SuiteError:
        return float("inf")
    try:
        with torch.no_grad():
            wanted = theirs(tokens).logits
            positions = torch.arange(_LENGTH).expand_as(tokens)
            got = run.chunks[0](tokens, positions, None)[..., : wanted.shape[-1]].float()
    finally:
        api.close()
    return ((got - wanted).square().mean() / wanted.square().mean()).sqrt().item()


def misfits(family: ModelFamily, model: Model) -> Iterator[str]:
    """What of the folder's names and shapes is not as the family plans them: a line each."""
    try:
        values = values_of(resolve([Layer(family.name, family.config_to_values(model.config))]))
        table = compile_names(family, values)
        shapes = planned_shapes(table, {**values, "padded_vocab_size": values["vocab_size"]})
        turned = set(table.turned())
        stored = {
            name: TensorInfo(shape[::-1] if name in turned else shape, torch.float32)
            for name, shape in model.shapes.items()
        }
        plan_load(table, shapes, stored, values, 1)
    except SuiteError as error:
        yield from str(error).splitlines()


def prove(family: ModelFamily, tiny: Path, run: Run) -> Iterator[tuple[str, list[str]]]:
    """Each part of the proof on the tiny model, with what is wrong.

    Args:
        family: registered.
        tiny: of :func:`write_tiny`.
        run: runs a side of a comparison.
    """
    yield "config.json both ways", list(_config_faults(family, tiny))
    yield "weights there and back, bitwise, TP1 PP1 and TP2 PP2", list(_round_trip_faults(family, tiny))
    tokens = torch.randint(0, 300, (_SEQUENCES, _LENGTH + 1), generator=torch.Generator().manual_seed(3))
    for layout in LAYOUTS:
        faults = list(_number_faults(tiny, layout, tokens, run))
        yield f"loss and every gradient against transformers, {layout}", faults
        if faults:
            # Another layout would say the same of the same fault.
            return


def _number_faults(tiny: Path, layout: str, tokens: torch.Tensor, run: Run) -> Iterator[str]:
    """Factors stand before a module's output on one side and behind it on the other, so what counts is what comes of
    all modules; where that differs, the first module that does is named."""
    try:
        found = compare_sides(parse_side(f"ours:{tiny},{layout}"), parse_side(f"hf:{tiny}"), tokens, run)
    except SuiteError as error:
        yield from str(error).splitlines()
        return
    (ours, theirs), worst = found.loss, [row for row in found.parameters if row.beyond(EXACT)]
    if worst or not abs(ours - theirs) <= EXACT * abs(theirs) or found.left_out:
        yield from describe(found, EXACT, everything=False)


def _config_faults(family: ModelFamily, tiny: Path) -> Iterator[str]:
    config = json.loads((tiny / hf_io.CONFIG).read_text(encoding="utf-8"))
    try:
        values = values_of(resolve([Layer("tiny", family.config_to_values(config))]))
        again = values_of(
            resolve([Layer("again", family.config_to_values(family.values_to_config(values, "float32")))])
        )
    except SuiteError as error:
        yield from str(error).splitlines()
        return
    for name, value in values.items():
        if again[name] != value:
            yield f"{name}: {value!r}, written and read again {again[name]!r}"


def _round_trip_faults(family: ModelFamily, tiny: Path) -> Iterator[str]:
    for size in (1, 2):
        with tempfile.TemporaryDirectory(prefix="mindspeed_llm.new_family.") as scratch:
            there, back = Path(scratch, "mg"), Path(scratch, "hf")
            target = Target(tp=size, pp=size)
            try:
                _convert(Settings(tiny, there, "hf", "mg", family.name, save_format="legacy", target=target))
                _convert(Settings(there, back, "mg", "hf", family.name))
            except SuiteError as error:
                yield from str(error).splitlines()
                continue
            before = {name: t for path in tiny.glob("*.safetensors") for name, t in load_file(path).items()}
            after = {name: t for path in back.glob("*.safetensors") for name, t in load_file(path).items()}
            for name in sorted(before.keys() | after.keys()):
                if name not in before or name not in after or not torch.equal(before[name], after[name]):
                    yield f"{name} is another, or not there, after TP{size} PP{size}"


def _convert(settings: Settings) -> None:
    with ExitStack() as stack:
        execute(plan(settings, stack))
