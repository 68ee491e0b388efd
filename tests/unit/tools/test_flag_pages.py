"""The share of upstream's recipes that is implemented is counted from facts, and never falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_llm.tools import docs
from mindspeed_llm.tools.flag_pages import RECIPES, coverage_page, lowered, shares, standing, upstream_flags


def test_flags_that_every_recipe_carries_are_counted_in_each() -> None:
    """Checked by hand against the recipes: no pretraining run is without these, and no fine-tuning without a stage."""
    recipes = {flag.name: flag.recipes for flag in upstream_flags()}
    for name in ("num-layers", "hidden-size", "seq-length", "train-iters", "micro-batch-size", "lr"):
        assert recipes[name] == RECIPES, name
    assert recipes["stage"] == {"pretrain": 0, "fine_tune": RECIPES["fine_tune"]}
    assert all(count <= RECIPES[kind] for counts in recipes.values() for kind, count in counts.items())


def test_no_flag_is_listed_twice_and_each_has_an_owner() -> None:
    flags = upstream_flags()
    assert len({flag.name for flag in flags}) == len(flags) > 1000
    assert [flag.name for flag in flags if not flag.megatron and not flag.mindspeed] == []


@pytest.mark.parametrize(
    ("name", "kind", "comes"),
    [
        ("hidden-size", "supported", ""),
        ("disable-bias-linear", "other spelling", ""),
        ("swiglu", "other spelling", ""),
        ("use-mcore-models", "without effect", ""),
        # Only its value 1 is accepted: a recipe that carries it may ask for what does not exist yet.
        ("context-parallel-size", "in part", "step 7"),
        ("num-experts", "other spelling", ""),
        ("lora-r", "later", "later"),
        ("load-checkpoint-loosely", "refused", ""),
        ("barrier-with-L1-time", "later", "later"),
        ("a-new-flag", "unknown", ""),
    ],
)
def test_where_a_flag_stands(name: str, kind: str, comes: str) -> None:
    found = standing(name)
    assert (found.kind, found.comes) == (kind, comes)
    assert found.is_implemented == (kind in ("supported", "other spelling", "without effect"))


def test_the_shares_are_the_sums_of_the_counts() -> None:
    page = coverage_page()
    lacking = {line.split("--")[1] for line in page.partition("by occurrences:")[2].splitlines() if " --" in line}
    for kind, share in shares(page).items():
        counts = {flag.name: flag.recipes[kind] for flag in upstream_flags()}
        total = sum(counts.values())
        assert share == (total - sum(counts[name] for name in lacking)) / total
    assert set(shares(page)) == set(RECIPES)


def test_a_lower_share_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main([], folder=tmp_path) == 0
    floor = tmp_path / docs.COVERAGE
    text = floor.read_text()
    assert lowered(text, text) == []
    line = next(line for line in text.splitlines() if line.startswith("pretrain: "))
    higher = text.replace(line, "pretrain: 12121 of 12121 (100.00 %), in 163 recipes")
    floor.write_text(higher)
    capsys.readouterr()
    for argv in ([], ["--check"]):
        assert docs.main(argv, folder=tmp_path) == 1
        assert "states a higher share of pretrain" in capsys.readouterr().err
    assert floor.read_text() == higher
    # A share that rises is simply written.
    floor.write_text(text.replace(line, "pretrain: 1 of 12121 (0.01 %), in 163 recipes"))
    assert docs.main([], folder=tmp_path) == 0
    assert floor.read_text() == text
