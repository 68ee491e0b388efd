"""Patches apply, revert to exactly what was there, and are refused when they clash."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mindspeed_llm.errors import PatchError
from mindspeed_llm.patching import (
    Patch,
    applied_patches,
    apply,
    fingerprint_of,
    patch,
    plan,
    resolve_target,
    stale_copies,
)
from tests.unit.patching import holder, targets

HERE = targets.__name__


def change(target: str, kind: Any = "wrap", **fields: Any) -> Patch:
    return Patch(target=f"{HERE}:{target}", kind=kind, **{"why": "a test", "remove_when": "the test ends", **fields})


def plus_one(original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def more(*args: int) -> int:
        return original(*args) + 1

    return more


def adds(word: str) -> Callable[..., Any]:
    return lambda original: lambda: [word, *original()]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Every test leaves targets and the list of patches as they were."""
    before = dict(vars(targets)), dict(vars(targets.Shape)), dict(vars(holder)), applied_patches()
    code = inspect.unwrap(targets.kind_of).__code__
    yield
    assert (dict(vars(targets)), dict(vars(targets.Shape)), dict(vars(holder)), applied_patches()) == before
    assert inspect.unwrap(targets.kind_of).__code__ is code


def test_wrap_and_revert() -> None:
    original = targets.double
    with apply([change("double", new=plus_one)]):
        assert targets.double(4) == 9
        assert targets.double.__name__ == "double"
    assert targets.double is original


def test_replace_and_revert() -> None:
    with apply([change("double", "replace", new=str), change("LIMIT", "replace", new=7)]) as applied:
        assert targets.double(4) == "4"
        assert targets.LIMIT == 7
        applied.revert()
        assert targets.double(4) == 8
        assert targets.LIMIT == 3


def test_methods_of_every_kind() -> None:
    def louder(original: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(original)
        def loud(*args: Any) -> str:
            return original(*args).upper()

        return loud

    patches = [
        change("Shape.area", new=plus_one),
        change("Shape.sides", new=plus_one),
        change("Shape.name", new=louder),
    ]
    with apply(patches):
        assert targets.Shape().area(3) == 10
        assert (targets.Shape.sides(3), targets.Shape().sides(3)) == (4, 4)
        assert (targets.Shape.name(), targets.Shape().name()) == ("SHAPE", "SHAPE")


def test_an_inherited_method_is_inherited_again() -> None:
    with apply([change("Shape.inherited", "replace", new=lambda self: "own")]):
        assert targets.Shape().inherited() == "own"
        assert targets.Base().inherited() == "inherited by Base"
    assert "inherited" not in vars(targets.Shape)


def test_recode_changes_literals_and_names_at_every_depth() -> None:
    class Host:
        def cpu(self) -> str:
            return "moved"

    function = targets.kind_of
    with apply([change("kind_of", "recode", constants={"cuda": "npu"}, names={"cuda": "cpu"})]):
        assert targets.kind_of is function
        assert targets.kind_of("npu") == "accelerator"
        assert targets.kind_of("host") == "npu"
        assert targets.kind_of(Host()) == "moved"
    assert targets.kind_of("cuda") == "accelerator"


def test_recode_that_finds_nothing_is_refused_and_nothing_stays() -> None:
    patches = [change("double", new=plus_one), change("kind_of", "recode", constants={"hip": "npu"})]
    with pytest.raises(PatchError, match="finds none of its literals"):
        apply(patches)
    assert targets.double(4) == 8


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no.such.module:x", "cannot be imported"),
        (f"{HERE}:triple", "has no triple"),
        (f"{HERE}:Circle.area", "has no Circle"),
        (f"{HERE}:Shape.volume", "has no volume"),
    ],
)
def test_a_target_that_does_not_resolve(target: str, says: str) -> None:
    good = change("double", new=plus_one)
    bad = Patch(target=target, kind="replace", new=None, why="a test", remove_when="now")
    with pytest.raises(PatchError, match=says):
        apply([good, bad])


def test_two_replacements_of_one_target() -> None:
    first, second = change("double", "replace", new=str, why="this"), change("double", "replace", new=int, why="that")
    with pytest.raises(PatchError, match=r"2 patches replace .*double") as caught:
        plan([first, second])
    assert caught.value.got == ["this", "that"]
    with pytest.raises(PatchError, match="2 patches replace"):
        plan([change("kind_of", "replace", new=str), change("kind_of", "recode", constants={"cuda": "npu"})])
    # Also when they come one after the other.
    with apply([first]), pytest.raises(PatchError, match="2 patches replace"):
        apply([second])
    with apply([first]), pytest.raises(PatchError, match="2 patches replace"):
        apply([first])


def test_a_replacement_does_not_drop_a_wrap_in_force() -> None:
    with apply([change("double", new=plus_one)]), pytest.raises(PatchError, match="would drop"):
        apply([change("double", "replace", new=str)])
    # In one go the replacement comes first, however they are given.
    with apply([change("double", new=plus_one), change("double", "replace", new=lambda x: 5 * x)]):
        assert targets.double(2) == 11


def test_wraps_go_in_the_stated_order() -> None:
    inner, middle, outer = (
        change("order", name="inner", new=adds("inner")),
        change("order", name="middle", new=adds("middle"), after=("inner",)),
        change("order", name="outer", new=adds("outer"), after=("inner", "middle", "absent")),
    )
    for given in ([inner, middle, outer], [outer, middle, inner], [middle, outer, inner]):
        with apply(given):
            assert targets.order() == ["outer", "middle", "inner", "original"]


def test_wraps_without_an_order() -> None:
    with pytest.raises(PatchError, match="have no order") as caught:
        plan([change("order", name="a", new=adds("a")), change("order", name="b", new=adds("b"))])
    assert caught.value.got == ["a", "b"]
    with pytest.raises(PatchError, match="have no order"):
        plan([change("order", new=adds("a")), change("order", new=adds("b"))])


def test_wraps_that_wait_for_each_other() -> None:
    a = change("order", name="a", new=adds("a"), after=("b",))
    b = change("order", name="b", new=adds("b"), after=("a",))
    with pytest.raises(PatchError, match="wait for each other"):
        plan([a, b])


def test_reverting_twice_does_nothing() -> None:
    applied = apply([change("double", new=plus_one)])
    applied.revert()
    with apply([change("double", "replace", new=str)]):
        applied.revert()
        assert targets.double(4) == "4"


def test_applied_patches_are_listed_in_order() -> None:
    before = applied_patches()
    patches = [change("double", new=plus_one), change("LIMIT", "replace", new=1)]
    with apply(patches):
        assert applied_patches() == (*before, *patches)


def test_a_changed_source_is_named_in_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = change("double", new=plus_one)
    known = {wrapped.target: fingerprint_of(wrapped.target)}
    monkeypatch.setattr("mindspeed_llm.patching.planner.known_fingerprints", lambda: known)
    with caplog.at_level(logging.WARNING, logger="mindspeed_llm.patching"):
        with apply([wrapped]):
            assert caplog.records == []
            # What is in force is not what is compared.
            with apply([change("double", new=plus_one)]):
                assert caplog.records == []
        known[wrapped.target] = "0" * 16
        with apply([wrapped]):
            pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{HERE}:double is not that of megatron-core 0.16.1" in caplog.text


def test_fingerprints_follow_source_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("double", "order", "Shape", "Shape.area", "Shape.sides", "Shape.name", "kind_of", "LIMIT")
    prints = {name: fingerprint_of(f"{HERE}:{name}") for name in names}
    assert len(set(prints.values())) == len(names)
    assert {name: fingerprint_of(f"{HERE}:{name}") for name in names} == prints
    monkeypatch.setattr(targets, "LIMIT", 4)
    assert fingerprint_of(f"{HERE}:LIMIT") != prints["LIMIT"]


def test_stale_copies_are_found_and_rebound() -> None:
    wrapped = change("double", new=plus_one)
    originals = {wrapped.target: resolve_target(wrapped.target)[2]}
    with apply([wrapped]):
        assert holder.double(4) == 8
        assert stale_copies([wrapped], originals, HERE.rpartition(".")[0]) == [
            f"{holder.__name__}.double still holds {wrapped.target}"
        ]
    rebound = change("double", new=plus_one, rebind=(holder.__name__,))
    with apply([rebound]):
        assert holder.double(4) == 9
        assert stale_copies([rebound], originals, HERE.rpartition(".")[0]) == []


def test_every_field_that_a_reader_needs_is_demanded() -> None:
    with pytest.raises(TypeError, match="remove_when"):
        Patch(target=f"{HERE}:double", kind="wrap", why="a test")  # type: ignore[call-arg]
    assert patch.Patch is Patch
