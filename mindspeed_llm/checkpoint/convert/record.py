"""Which model a checkpoint is of: from its config.json, from what it records, or both.

Beside the files of a converted checkpoint stands ``conversion.json``. It keeps the config.json of the model, so that
the way back needs no other folder, and it says that these are weights to start from: there is no optimizer state.
"""

# pyright: basic
# Configurations on disk have no types.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.folders import CONVERSION
from mindspeed_llm.checkpoint.trusted import read_common
from mindspeed_llm.config.resolve import ARCHITECTURE_FIELDS, Layer, resolve
from mindspeed_llm.config.schema import field_table
from mindspeed_llm.errors import CheckpointError, ConversionError
from mindspeed_llm.models.family import ModelFamily, values_of
from mindspeed_llm.models.registry import family_by_name, family_for

COMMON, ORIGIN = "common.pt", "origin"
"""Where a run's saves keep the config.json that the run started from, and the folder of its tokenizer."""
SECTIONS = ("model", "transformer")
"""Sections of the run configuration that describe a model."""


@dataclass(frozen=True)
class Record:
    """The content of ``conversion.json``.

    Args:
        source: folder that was converted.
        family: name of its model family.
        hf_config: the config.json of the model, where there was one.
        words: the folder of its tokenizer.
    """

    source: str
    family: str
    hf_config: dict[str, Any] | None = None
    words: str | None = None

    def write(self, folder: Path) -> None:
        """Into an ``iter_*`` folder."""
        hf_io.write_json(folder / CONVERSION, asdict(self))


def origin_of(folder: Path) -> tuple[dict[str, Any] | None, str | None] | None:
    """The config.json of a checkpoint's model and the folder of its tokenizer, as far as an ``iter_*`` folder says.

    Raises:
        CheckpointError: a record is there and cannot be read.
    """
    path = folder / CONVERSION
    if not path.is_file():
        common = read_common(folder / COMMON) if (folder / COMMON).is_file() else {}
        saved = common.get(ORIGIN)
        return (saved["hf_config"], saved["words"]) if saved else None
    try:
        record = Record(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read", got=error) from error
    if not isinstance(record.hf_config, dict | None) or not isinstance(record.words, str | None):
        raise CheckpointError(f"{path} is not what a conversion writes", got=(record.hf_config, record.words))
    return record.hf_config, record.words


def sections(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Flat values as a save keeps them in ``common.pt``: by section."""
    found: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, spec in field_table().items():
        if spec.section in found:
            found[spec.section][name] = values[name]
    return found


def described_model(
    hf_config: Mapping[str, Any], family_name: str | None, source: Path
) -> tuple[ModelFamily, dict[str, Any]]:
    """The family of a config.json, and the model as fields of the run configuration.

    Raises:
        ConversionError: no family knows it, or it cannot be computed with.
    """
    family = family_by_name(family_name) if family_name else family_for(hf_config)
    layer = Layer(str(source), {**family.config_to_values(hf_config), "model_type_hf": family.name})
    return family, values_of(resolve([layer]))


def shortened(hf_config: Mapping[str, Any], family: ModelFamily, layers: int, keep: int) -> dict[str, Any]:
    """A config.json with the first ``keep`` of ``layers`` layers.

    Raises:
        ConversionError: there are not as many.
    """
    if not 0 < keep <= layers:
        raise ConversionError("--num-layers takes the first layers of a model", got=keep, allowed=f"1 to {layers}")
    depths = {key for rule in family.config for key in rule.hf_keys if "num_layers" in rule.to_values(hf_config)}
    return {
        key: keep if key in depths else value[:keep] if isinstance(value, list) and len(value) == layers else value
        for key, value in hf_config.items()
    }


def recorded_model(
    recorded: Mapping[str, Any], hf_config: Mapping[str, Any] | None, family_name: str | None, folder: Path
) -> tuple[ModelFamily, dict[str, Any]]:
    """The model that a megatron-core checkpoint records, or else a config.json describes.

    Args:
        recorded: fields of the run configuration; any of them may be missing.
        hf_config: where there is one.
        family_name: ``--model-type-hf``.
        folder: the checkpoint, for errors.

    Raises:
        CheckpointError: what is recorded contradicts the config.json.
        ConversionError: nothing says which model it is.
    """
    known = {name: value for name, value in recorded.items() if name in _model_fields()}
    family_name = family_name or known.get("model_type_hf")
    if hf_config is not None:
        family, values = described_model(hf_config, family_name, folder)
        differs = [
            name for name in sorted(ARCHITECTURE_FIELDS & known.keys()) if _plain(known[name]) != _plain(values[name])
        ]
        if differs:
            raise CheckpointError(
                f"{folder} is not of the model that config.json describes",
                got=", ".join(f"{name} {known[name]}" for name in differs),
                allowed=", ".join(f"{name} {values[name]}" for name in differs),
                fix="--hf-cfg-dir with the folder of the model",
            )
        return family, {**values, **known, "model_type_hf": family.name}
    if family_name is None or None in (known.get("num_layers"), known.get("vocab_size")):
        raise ConversionError(
            f"{folder} does not say which model it is of",
            fix="--hf-cfg-dir with the Hugging Face folder of the model (config.json is enough)",
        )
    family = family_by_name(family_name)
    defaults = {name: spec.default for name, spec in field_table().items() if name in _model_fields()}
    return family, {**defaults, **known, "model_type_hf": family.name}


def _model_fields() -> set[str]:
    return {name for name, spec in field_table().items() if spec.section in SECTIONS}


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
