"""Every field has one owner, one meaning for each spelling, and a text for --help."""

from __future__ import annotations

import dataclasses
from collections import Counter

from mindspeed_llm.config.exposed import EXPOSED, INTERNAL
from mindspeed_llm.config.help_texts import help_texts
from mindspeed_llm.config.no_effect import NO_EFFECT
from mindspeed_llm.config.refused import refusal
from mindspeed_llm.config.run import SECTIONS, RunConfig
from mindspeed_llm.config.schema import GENERATED_SECTIONS, SUITE_DEFAULTS, field_table
from mindspeed_llm.config.spelled import FieldFlag, meanings


def test_no_name_is_owned_twice() -> None:
    owners = Counter(field.name for cls in SECTIONS.values() for field in dataclasses.fields(cls))
    assert [name for name, count in owners.items() if count > 1] == []


def test_run_config_has_every_section() -> None:
    names = {field.name for field in dataclasses.fields(RunConfig)}
    assert set(SECTIONS) <= names


def test_no_spelling_means_two_fields() -> None:
    claims = Counter(spelling for spec in field_table().values() if spec.has_flag for spelling in spec.spellings())
    assert [spelling for spelling, count in claims.items() if count > 1] == []


def test_every_flag_has_a_help_text() -> None:
    texts = help_texts()
    assert [name for name, spec in field_table().items() if spec.has_flag and not texts.get(name, "").strip()] == []


def test_every_megatron_field_has_a_flag_or_a_reason() -> None:
    silent = [
        name
        for name, spec in field_table().items()
        if spec.section in GENERATED_SECTIONS and name not in INTERNAL and not spec.has_flag
        if not refusal(spec.flag) and spec.flag not in NO_EFFECT
    ]
    assert silent == []


def test_tables_name_fields_that_exist() -> None:
    assert {*EXPOSED, *INTERNAL, *SUITE_DEFAULTS} - set(field_table()) == set()
    assert set(EXPOSED) & set(INTERNAL) == set()


def test_sections_are_frozen() -> None:
    assert [name for name, cls in SECTIONS.items() if not cls.__dataclass_params__.frozen] == []


def test_megatrons_negative_spellings_turn_off() -> None:
    # argparse_meta of megatron-core: a boolean that is on by default is spelled by what turns it off.
    for spelling, name in (
        ("--disable-bias-linear", "add_bias_linear"),
        ("--no-initialization", "perform_initialization"),
    ):
        meaning = meanings()[spelling]
        assert isinstance(meaning, FieldFlag)
        assert (meaning.spec.name, meaning.means) == (name, False)
