"""What is compared: a model run by transformers, or by this suite in some layout and with some flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.names import NameTable, compile_names
from mindspeed_llm.config.resolve import Layer, resolve
from mindspeed_llm.config.schema import field_table
from mindspeed_llm.config.spelled import as_flag, read_settings
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.family import ModelFamily
from mindspeed_llm.models.registry import family_by_name, family_layer
from mindspeed_llm.tools.compare.layouts import is_layout, parse_layout

GRAMMAR = "hf:FOLDER[,bf16] or ours:FOLDER[,LAYOUT][,FLAG][,FLAG=VALUE], such as ours:model,tp2+sp,rotary-base=5000"


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        text: as the user wrote it.
        kind: who runs the model.
        folder: a Hugging Face folder.
        world: number of processes.
        flags: of ours, fields of the configuration by name.
        half: it computes in 16 bits.
    """

    text: str
    kind: Literal["hf", "ours"]
    folder: Path
    world: int = 1
    flags: Mapping[str, Any] = field(default_factory=dict)
    half: bool = False

    @cached_property
    def layer(self) -> Layer:
        """What the folder's config.json says.

        Raises:
            ConfigError: there is none.
        """
        layer = family_layer({"load": self.folder})
        if layer is None:
            raise ConfigError(f"{self.text}: this is no Hugging Face folder", got=self.folder)
        return layer

    @property
    def family(self) -> ModelFamily:
        """The model's family."""
        return family_by_name(str(self.layer.values["model_type_hf"]))

    @property
    def values(self) -> dict[str, Any]:
        """Fields of the configuration that describe the model."""
        return {name: spec.default for name, spec in field_table().items()} | dict(self.layer.values)

    @property
    def names(self) -> NameTable:
        """Its weights under both names."""
        return compile_names(self.family, self.values)

    def run_values(self, sequences: int, length: int) -> dict[str, Any]:
        """Flags of a run of one step over ``sequences`` of ``length`` tokens, without dropout."""
        return {
            "load": str(self.folder),
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_length": length,
            "micro_batch_size": 1,
            "global_batch_size": sequences,
            "train_iters": 0,
            **self.flags,
        }

    def check(self, sequences: int, length: int) -> None:
        """Refuse what a run would refuse, before a process starts.

        Raises:
            ConfigError: the layout or a flag cannot be.
        """
        if self.kind == "ours":
            layers = [self.layer, Layer(self.text, self.run_values(sequences, length))]
            cfg = resolve(layers, world_size=self.world)
            if cfg.transformer.context_parallel_size > 1:
                raise ConfigError(
                    f"{self.text}: parts of sequences are not put together here", fix="context-parallel-size=1"
                )
        else:
            hf_io.read_config(self.folder)


def parse_side(text: str) -> Side:
    """A side from its text, see :data:`GRAMMAR`.

    Raises:
        ConfigError: the text is not one, or names a flag that there is not.
    """
    kind, colon, rest = text.partition(":")
    path, *parts = rest.split(",")
    if not colon or not path or kind not in ("hf", "ours"):
        raise ConfigError("a side of the comparison cannot be read", got=text, allowed=GRAMMAR)
    folder = Path(path)
    if not hf_io.is_hf_folder(folder):
        raise ConfigError(
            f"{text}: this is no Hugging Face folder", got=folder, fix="a folder with config.json and weights"
        )
    if kind == "hf":
        if set(parts) - {"bf16"}:
            raise ConfigError(f"{text}: transformers' side takes no such option", got=parts, allowed="bf16")
        return Side(text, "hf", folder, half="bf16" in parts)
    world, values = 1, {}
    if parts and is_layout(parts[0]):
        world, values = parse_layout(parts.pop(0))
    values |= _read_flags(text, parts)
    return Side(text, "ours", folder, world, values, half=bool(values.get("bf16") or values.get("fp16")))


def _read_flags(text: str, parts: list[str]) -> dict[str, Any]:
    """Field values of ``flag`` and ``flag=value``; a flag given twice is a list."""
    given: dict[str, Any] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            given[as_flag(name)] = True
        else:
            given.setdefault(as_flag(name), []).append(value)
    settings = [(flag, raw[0] if isinstance(raw, list) and len(raw) == 1 else raw) for flag, raw in given.items()]
    reading = read_settings(settings, text)
    if reading.errors:
        raise ConfigError.collect(reading.errors)
    return reading.values
