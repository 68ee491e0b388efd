"""Written values to typed ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_llm.config.option import Option
from mindspeed_llm.config.schema import FieldSpec, field_table
from mindspeed_llm.config.values import convert
from mindspeed_llm.errors import ConfigError


def spec(annotation: Any, count: int | None = None) -> FieldSpec:
    return FieldSpec("training", "some_field", annotation, None, Option(count=count))


@given(st.integers())
def test_whole_numbers_survive_text(number: int) -> None:
    assert convert(spec(int), str(number)) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_text(number: float) -> None:
    assert convert(spec(float), repr(number)) == number


@given(st.lists(st.integers(), max_size=6))
def test_lists_survive_as_words_and_as_one_text(numbers: list[int]) -> None:
    kind = spec(tuple[int, ...])
    assert convert(kind, [str(number) for number in numbers]) == tuple(numbers)
    assert convert(kind, str(numbers)) == tuple(numbers)
    assert convert(kind, ",".join(map(str, numbers))) == tuple(numbers)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_numbers_are_finite(text: str) -> None:
    with pytest.raises(ConfigError, match="--some-field must be finite"):
        convert(spec(float | None), text)
    with pytest.raises(ConfigError, match="--some-field must be finite"):
        convert(spec(float), float(text))


def test_one_number_or_several() -> None:
    kind = spec(int | tuple[int, ...] | None)
    assert convert(kind, ["2"]) == convert(kind, "2") == 2
    assert convert(kind, ["1", "0"]) == (1, 0)
    assert convert(kind, ["[1]*2"]) == (1, 1)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 5))
def test_layer_patterns_mean_what_python_means(ones: int, zeros: int, times: int) -> None:
    text = f"([1]*{ones}+[0]*{zeros})*{times}"
    assert convert(spec(int | tuple[int, ...] | None), text) == tuple(eval(text))


@pytest.mark.parametrize("word", ["1", "true", "TRUE", "yes", "on", True, 1])
def test_words_for_yes(word: object) -> None:
    assert convert(spec(bool), word) is True


@pytest.mark.parametrize("word", ["0", "false", "no", "off", False, 0])
def test_words_for_no(word: object) -> None:
    assert convert(spec(bool), word) is False


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (int, "1.5"),
        (int, 1.5),
        (int, True),
        (int, None),
        (float, "fast"),
        (float, True),
        (bool, "perhaps"),
        (bool, 2),
        (str, ["a"]),
        (tuple[int, int], "1,2,3"),
        (tuple[int, ...], "[1]*999999999"),
        (tuple[int, ...], "__import__('os')"),
        (tuple[int, ...], "[1"),
    ],
)
def test_what_does_not_fit_is_refused(kind: Any, raw: object) -> None:
    with pytest.raises(ConfigError, match="--some-field does not take this value"):
        convert(spec(kind), raw)


def test_the_error_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="allowed: constant, linear, cosine, inverse-square-root, WSD"):
        convert(field_table()["lr_decay_style"], "polynomial")


def test_none_is_a_value_only_where_it_may_be_missing() -> None:
    assert convert(spec(int | None), "None") is None
    assert convert(spec(int | None), None) is None


def test_window_as_megatron_writes_it() -> None:
    window = field_table()["window_size"]
    assert convert(window, "(128,0)") == convert(window, "128, 0") == convert(window, [128, 0]) == (128, 0)


def test_a_whole_number_given_as_float_stays_whole() -> None:
    value = convert(spec(int), 4.0)
    assert value == 4
    assert isinstance(value, int)
