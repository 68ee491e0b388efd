"""The pages of documentation say what the code does: the generated ones, and what can be checked in those by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from mindspeed_llm.checkpoint.names import compile_names
from mindspeed_llm.cli import preprocess
from mindspeed_llm.config.mcore_source import SOURCES, class_body, wheel_folder
from mindspeed_llm.config.refused import refusal
from mindspeed_llm.config.spelled import meanings
from mindspeed_llm.models.registry import families
from mindspeed_llm.ops import registry
from mindspeed_llm.tools import docs, samples
from mindspeed_llm.tools.flag_pages import upstream_flags
from tests.oracles import ORACLES

ROOT = Path(__file__).resolve().parents[3]
GUIDES = tuple(path.stem for path in sorted((ROOT / "docs").glob("*.md")))
BY_HAND = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{name}.md" for name in GUIDES))
INVENTORY = "Flags of Megatron-LM and MindSpeed-LLM"
TORCHRUN = {"--nproc_per_node"}
PYTEST = {"--slow", "--report"}


@cache
def page(name: str) -> str:
    return docs.PAGES[name]()


def section(text: str, title: str) -> str:
    """What stands under the heading ``## title``."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def cells(text: str) -> list[list[str]]:
    """Cells of every table row of a page, heads and rules included."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


# Generated pages ----------------------------------------------------------------------------------------------------


def test_check_finds_a_page_that_is_out_of_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check"], folder=tmp_path) == 1
    assert not list(tmp_path.iterdir())
    assert docs.main([], folder=tmp_path) == 0
    assert docs.main(["--check"], folder=tmp_path) == 0
    changed = tmp_path / "models.md"
    changed.write_text(changed.read_text() + "more\n")
    capsys.readouterr()
    assert docs.main(["--check"], folder=tmp_path) == 1
    assert capsys.readouterr().err == f"{changed} is out of date: run python -m mindspeed_llm.tools.docs\n"


@pytest.mark.parametrize("name", docs.PAGES)
def test_rows_of_a_table_have_equal_length(name: str) -> None:
    blocks = re.split(r"\n\n", page(name))
    for block in blocks:
        if block.startswith("|"):
            assert len({len(row) for row in cells(block)}) == 1, block


def test_every_upstream_flag_is_on_the_page() -> None:
    shown = {row[0].strip("`"): row for row in cells(page("flags.md").partition(f"## {INVENTORY}")[2]) if len(row) == 4}
    lacking = [flag.name for flag in upstream_flags() if f"--{flag.name}" not in shown]
    assert lacking == []
    assert [flag for flag, row in shown.items() if row[2] == "unknown"] == []


def test_every_accepted_spelling_is_shown_once() -> None:
    shown = [
        spelling
        for row in cells(page("flags.md").partition(f"## {INVENTORY}")[0])
        for cell in row[:2]
        for spelling in re.findall(r"`(--[A-Za-z0-9_-]+)`", cell)
    ]
    assert sorted(shown) == sorted(meanings())


def test_no_text_of_megatron_core_is_in_the_repository() -> None:
    texts = [
        " ".join(node.value.value.split())
        for sources in SOURCES.values()
        for source in sources
        for node in class_body(wheel_folder(), source)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    assert len(texts) > 150
    assert [text for text in texts if len(text) > 40 and text[:40] in page("flags.md")] == []


@pytest.mark.parametrize("family", families())
def test_weights_on_the_page_are_those_that_transformers_saves(family: str) -> None:
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    described = families()[family]
    architecture = described.hf_architectures[0]
    with torch.device("meta"):
        if family in ORACLES:
            model = ORACLES[family].build(described.tiny)
            own = dict(model.named_parameters()) | {k: b for k, b in model.named_buffers() if k in model.state_dict()}
            saved = set(ORACLES[family].relay(own, described.tiny))
        else:
            kind = getattr(transformers, architecture)
            model = kind(kind.config_class(**described.tiny, pad_token_id=None))
            saved = set(revert_weight_conversion(model, model.state_dict()))
    rows = [row for row in cells(section(page("models.md"), family)) if len(row) == 5 and row[0].startswith("`")]
    values = described.config_to_values(described.tiny)
    entries = compile_names(described, values).entries
    places = [("", ""), *product(range(values["num_layers"]), range(values["num_moe_experts"] or 1))]
    shown = {
        _placed(name, *place)
        for row in rows
        for place in places
        if _placed(row[0].strip("`"), *place) in entries
        # An expert can be a part of a tensor.
        for name in (whole.partition("[")[0] for whole in re.findall(r"`([^`]+)`", row[1]))
    }
    # A tied output layer is on the page, and stands in some state dicts.
    assert shown | {"lm_head.weight"} == saved | {"lm_head.weight"}


def _placed(name: str, layer: object, expert: object) -> str:
    return name.replace("{l}", str(layer)).replace("{e}", str(expert))


def test_ops_say_where_they_never_ran() -> None:
    rows = {(row[0].strip("`"), row[1].strip("`")): row for row in cells(page("ops.md")) if len(row) == 5}
    known = [(spec.name, impl) for spec in registry().specs() for impl in registry().impls(spec.name)]
    assert len(rows) == len(known) + 2  # head and rule
    for op, impl in known:
        assert not impl.tested_on or (ROOT / "tests" / "unit" / "ops" / f"test_{op}.py").exists(), op
        untested = sorted(set(impl.devices) - set(impl.tested_on))
        row = rows[op, impl.name]
        assert row[4].endswith(f"unchecked on {', '.join(untested)}" if untested else "-tested")
        assert (f"`{op}={impl.name}`" in page("ops.md")) == ("npu" in untested)


# Pages by hand ------------------------------------------------------------------------------------------------------


@cache
def written(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", BY_HAND)
def test_plain_text(name: str) -> None:
    assert written(name).isascii()
    long = [line for line in written(name).splitlines() if len(line) > 120 and not line.startswith("|")]
    assert long == []


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as the usual renderers make them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", BY_HAND)
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", written(name)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def names_of_tests() -> set[str]:
    return {
        found
        for path in (ROOT / "tests").rglob("test_*.py")
        for found in re.findall(r"def (test_\w+)", path.read_text())
    }


@pytest.mark.parametrize("name", BY_HAND)
def test_files_and_tests_that_are_named_exist(name: str) -> None:
    for word in re.findall(r"`([\w./-]+)`", written(name)):
        if "granite" in word:  # a family that the reader adds
            continue
        if re.fullmatch(r"test_\w+", word):
            assert word in names_of_tests(), word
        elif word.split("/")[0] in ("tests", "docs", "examples", "csrc", "mindspeed_llm") and "<" not in word:
            assert (ROOT / word).exists(), word
        elif re.fullmatch(r"\w+/[\w/]+\.py", word):
            assert (ROOT / "mindspeed_llm" / word).exists(), word


@pytest.mark.parametrize("name", BY_HAND)
def test_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", written("Makefile"), re.MULTILINE))
    named = re.findall(r"(?:`| {4})make ([a-z]+(?:\|[a-z]+)*)", written(name))
    assert {target for group in named for target in group.split("|")} <= targets


def accepted_by_a_command() -> set[str]:
    parsers = (preprocess.build_parser(), samples.build_parser())
    spelled = {spelling for parser in parsers for action in parser._actions for spelling in action.option_strings}
    return {*spelled, *meanings(), "--config", "--check", "--only", *TORCHRUN, *PYTEST}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_flags_of_the_guides_exist(name: str) -> None:
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9_-]+)", written(name))) <= accepted_by_a_command()


def features() -> Iterator[tuple[str, list[str], str]]:
    """Name, flags and status of each row of the feature map."""
    for row in cells(written("docs/feature-map.md")):
        if len(row) == 4 and row[0] not in ("feature", "---"):
            yield row[0], re.findall(r"`(--[^`]+)`", row[1]), row[2]


def test_the_feature_map_is_what_the_flags_do() -> None:
    seen = 0
    for feature, flags, status in features():
        assert re.fullmatch(r"done|planned, step ([1-9]|10)|later|out of scope", status), feature
        for flag in flags:
            seen += 1
            assert (flag in meanings()) == (status == "done"), f"{feature}: {flag}"
            row = refusal(flag)
            assert status == "done" or row is not None, f"{feature}: {flag} is refused without a reason"
            if status.startswith("planned") or (row and row.comes.startswith("step")):
                assert status == f"planned, {row and row.comes}", f"{feature}: {flag}"
    assert seen > 100


@pytest.mark.parametrize("name", [f"docs/moving-from-{suite}.md" for suite in ("megatron", "mindspeed-llm")])
def test_what_the_pages_about_moving_call_refused_is(name: str) -> None:
    seen = 0
    for row in cells(section(written(name), "Flags that are refused")):
        for flag, above in re.findall(r"`(--[\w-]+)(?: [^`]*)?`( above 1)?", row[0]):
            seen += 1
            reason = refusal(flag)
            assert reason is not None, flag
            assert (flag in meanings()) == bool(above), flag
            if step := re.match(r"(step \d+|later)\b", row[1]):
                assert reason.comes == step[1], flag
            if "computes the same" in row[1]:
                assert reason.trains_alike, flag
    assert seen > 10


def dictionaries(path: str) -> Iterator[dict[str, ast.expr]]:
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict):
            yield {key.value: value for key, value in zip(node.keys, node.values, strict=True)
                   if isinstance(key, ast.Constant) and isinstance(key.value, str)}  # fmt: skip


def test_metrics_are_described_field_by_field() -> None:
    described = {
        row[0].strip("`"): re.findall(r"[a-z_]+", re.sub(r"\([^)]*\)", "", row[1]))
        for row in cells(section(written("docs/architecture.md"), "metrics.jsonl"))
    }
    rows = {
        kind.value: [name for name in row if name != "kind"]
        for row in dictionaries("mindspeed_llm/training/report.py")
        if isinstance(kind := row.get("kind"), ast.Constant)
    }
    assert described["train"] == rows["train"]
    assert described["valid"] == rows["valid"]
    (start,) = [row for row in dictionaries("mindspeed_llm/training/pretrain.py") if "versions" in row]
    assert described["start"] == list(start)
