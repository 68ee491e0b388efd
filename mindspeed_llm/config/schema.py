"""The fields of all sections as one table: owner, type, default and spellings of the flag."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from types import MappingProxyType

from mindspeed_llm.config.exposed import EXPOSED
from mindspeed_llm.config.option import OPTION_KEY, Option
from mindspeed_llm.config.run import SECTIONS

# Defaults of ours, and of Megatron-LM's training script, that differ from megatron-core's own.
SUITE_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        # TransformerEngine exists on CUDA alone; the local implementation runs on every device.
        "transformer_impl": "local",
        "min_lr": 0.0,
        "check_for_nan_in_grad": True,
        "deallocate_pipeline_outputs": True,
    }
)


GENERATED_SECTIONS = frozenset({"transformer", "optimizer", "ddp"})


@dataclasses.dataclass(frozen=True)
class FieldSpec:
    """One field of one section.

    Attributes:
        section: name of the owning section.
        name: field name.
        annotation: resolved type, such as ``int | None``.
        default: the value when nobody gives another.
        option: spellings and form of its flag.
    """

    section: str
    name: str
    annotation: typing.Any
    default: typing.Any
    option: Option

    @property
    def has_flag(self) -> bool:
        """Whether the command line, YAML and the environment can give the value."""
        if self.section in GENERATED_SECTIONS:
            return self.name in EXPOSED
        return self.option.is_flag

    @property
    def is_bool(self) -> bool:
        """Whether the value is True or False."""
        return self.annotation is bool or self.annotation == bool | None

    @property
    def flag(self) -> str:
        """The spelling that follows from the name."""
        return "--" + self.name.replace("_", "-")

    def spellings(self) -> dict[str, bool]:
        """Each spelling of the flag, and for a boolean what giving it means."""
        extra = self.option.flags
        if not self.is_bool:
            return dict.fromkeys((self.flag, *extra), True)
        negative = "--" + self.flag[5:] if self.flag.startswith("--no-") else "--no-" + self.flag[2:]
        spelled = {self.flag: True, negative: False}
        if self.default is True:
            spelled["--disable-" + self.flag[2:]] = False
        for flag in extra:
            means = not self.default
            spelled[flag] = means
            if not flag.startswith(("--no-", "--disable-")):
                spelled["--no-" + flag[2:]] = not means
        return spelled


@functools.cache
def field_table() -> Mapping[str, FieldSpec]:
    """Every field by name.

    Raises:
        ValueError: two sections claim one name (a fault of ours).
    """
    table: dict[str, FieldSpec] = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in table:
                raise ValueError(f"{field.name} is in {section} and in {table[field.name].section}")
            default = SUITE_DEFAULTS.get(field.name, field.default)
            form = field.metadata.get(OPTION_KEY, Option())
            table[field.name] = FieldSpec(section, field.name, hints[field.name], default, form)
    return MappingProxyType(table)
