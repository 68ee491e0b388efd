"""Numbers that go bad: what is skipped and counted, and what a run says that ends for them."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.cli import preprocess
from mindspeed_llm.tools import samples
from tests.distributed.launch import GLOBAL_BATCH, SEQUENCE, TINY, command_line, launch, placed, read_rows, succeed
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder, tokenizer_folder

Flags = dict[str, Any]
RARE = ord("z") - ord("!")
"""The id of z: the tokenizer numbers bytes from the first that can be seen."""
LAYOUTS = ["one", "tp2", "pp2", "dp2", "dp2+dist", "pp2+vpp2"]


def crossed(layouts: Sequence[str], others: Sequence[Any], *always: set[str]) -> list[Any]:
    """Every layout with every other value; with each of these only the layouts in its set in every session."""
    return [
        pytest.param(layout, other, marks=() if layout in chosen else pytest.mark.slow)
        for other, chosen in zip(others, always, strict=True)
        for layout in layouts
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Texts of which a few hold the rare letter."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(7)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(5, 25))) for _ in range(300)]
    for number in (50, 250):
        texts[number] += "z"
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["--input", folder / "texts.jsonl", "--output-prefix", folder / "corpus", "--append-eod"]
    arguments += ["--tokenizer-name-or-path", tokenizer_folder(), "--workers", 1]
    assert preprocess.main([str(argument) for argument in arguments]) == 0
    return str(folder / "corpus_text_document")


@pytest.fixture
def flags(corpus: str, tmp_path: Path) -> Flags:
    found = {**TINY, "--load": hf_folder("q25"), "--data-path": corpus, "--metrics-file": tmp_path / "metrics.jsonl"}
    return found | {"--train-iters": 20}


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def spoiled(folder: Path, tensor: str, row: int) -> Path:
    """The model with one value that is not a number."""
    shutil.copytree(hf_folder("q25"), folder)
    weights = load_file(folder / "model.safetensors")
    weights[tensor][row, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def told(results: list[dict[str, Any]], what: str) -> dict[str, str]:
    """What the error says, which is the same on every rank, and none of them succeeds."""
    assert [result["code"] for result in results] == [1] * len(results)
    pattern = rf"the {what} of iteration (?P<iteration>\d+) is not a number: ranks? (?P<rank>[\d ]+), "
    pattern += r"module (?P<module>\S+), parameter (?P<parameter>.+), samples (?P<samples>[\d ]+)\n"
    matches = [re.search(pattern, result["err"]) for result in results]
    assert len({match and match.groups() for match in matches}) == 1
    match = matches[0]
    assert match, results[0]["err"]
    return match.groupdict()


# ---------------------------------------------------------------------------------------------------- where it started


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_weight(pool: Pool, flags: Flags, tmp_path: Path, layout: str) -> None:
    folder = spoiled(tmp_path / "hf", "model.layers.2.mlp.down_proj.weight", 0)
    found = told(launch(pool, flags | {"--load": folder}, layout), "loss")
    # Interleaved stages take the layers in turns.
    rank = {"pp2": "1", "pp2+vpp2": "0"}.get(layout, "0")
    name = "decoder.layers.2.mlp.linear_fc2"
    assert found == {"iteration": "1", "rank": rank, "module": name, "parameter": f"{name}.weight", "samples": "0"}


@pytest.mark.parametrize("row", [RARE, 300])
def test_the_tensor_parallel_rank_that_holds_a_bad_row(pool: Pool, flags: Flags, tmp_path: Path, row: int) -> None:
    folder = spoiled(tmp_path / "hf", "lm_head.weight", row)
    found = told(launch(pool, flags | {"--load": folder}, "tp2"), "loss")
    assert (found["module"], found["parameter"]) == ("output_layer", "output_layer.weight")
    assert found["rank"] == ("0" if row < 164 else "1")


@pytest.mark.parametrize(
    ("layout", "loader"), crossed(LAYOUTS, ["single", "cyclic"], {"one", "pp2", "dp2+dist"}, {"tp2", "dp2", "pp2+vpp2"})
)
def test_bad_for_some_samples_only(
    pool: Pool, flags: Flags, tmp_path: Path, layout: str, loader: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sample that is named is the first to hold the token whose embedding is bad."""
    folder = spoiled(tmp_path / "hf", "model.embed_tokens.weight", RARE)
    flags |= {"--seed": {"single": 1234, "cyclic": 3}[loader]}
    results = launch(pool, flags | {"--load": folder, "--dataloader-type": loader}, layout)
    found = told(results, "loss")
    assert (found["module"], found["parameter"]) == ("embedding.word_embeddings", "embedding.word_embeddings.weight")
    number = int(found["samples"])
    rows = every_sample(flags, capsys)
    assert RARE in rows[number]["tokens"]
    step = int(found["iteration"])
    assert step > 1, "the bad row is used at once: no test of the place"
    per_rank = GLOBAL_BATCH // (2 if "dp2" in layout else 1)
    own = results[int(found["rank"])]["batches"][(step - 1) * per_rank : step * per_rank]
    assert rows[number]["tokens"] in [batch["tokens"][0].tolist() for batch in own]
    before = [batch for result in results for batch in result["batches"][: (step - 1) * per_rank] if "tokens" in batch]
    assert before
    assert not any(RARE in batch["tokens"] for batch in before)


def every_sample(flags: Flags, capsys: pytest.CaptureFixture[str]) -> list[dict[str, list[int]]]:
    """The training samples by number, as the samples tool prints them."""
    count = flags["--train-iters"] * GLOBAL_BATCH
    arguments = {"--data-path": flags["--data-path"], "--seq-length": SEQUENCE, "--count": count, "--split": "1,0,0"}
    arguments |= {"--tokenizer-name-or-path": tokenizer_folder(), "--seed": flags["--seed"]}
    capsys.readouterr()
    assert samples.main(command_line(arguments)) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def injected(pool: Pool, flags: Flags, layout: str, parameter: str, *, once: bool = False) -> list[dict[str, Any]]:
    """Runs with a bad gradient in step 2, micro-batch 1, of the last data-parallel rank."""
    world, argv = placed(flags, layout)
    replicas = 2 if "dp2" in layout else 1
    arguments = {"parameter": parameter, "per_step": GLOBAL_BATCH // replicas, "data": replicas - 1, "once": once}
    target = "tests.distributed.cases_numbers:bad_gradient"
    return pool.run(target, world, timeout=60, process_group=False, argv=argv, **arguments)


@pytest.mark.parametrize(
    ("layout", "once"), crossed(LAYOUTS, [False, True], {"one", "pp2", "dp2", "pp2+vpp2"}, {"tp2", "dp2+dist"})
)
def test_a_bad_gradient_before_it_reaches_the_weights(pool: Pool, flags: Flags, layout: str, once: bool) -> None:
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    two = "dp2" in layout
    results = injected(pool, flags, layout, name, once=once)
    found = told(results, "gradient")
    assert (found["iteration"], found["parameter"]) == ("2", name)
    assert found["module"] == name.removesuffix(".weight")
    if once:
        # Sums of gradients do not tell whose part was bad.
        assert "did not happen again" in results[0]["err"]
        assert found["samples"] == "4 5 6 7"
        assert found["rank"] == {"dp2": "0 1", "tp2": "0 1", "pp2+vpp2": "1"}.get(layout, found["rank"])
    else:
        # Micro-batch 1 of data-parallel rank 1 of 2, or of all.
        assert found["samples"] == ("7" if two else "5")
        assert found["rank"] == {"dp2": "1", "dp2+dist": "1", "pp2+vpp2": "1"}.get(layout, "0")
    one = succeed(pool, flags | {"--train-iters": 1}, layout)
    for stopped, trained in zip(results, one, strict=True):
        assert stopped["weights"].keys() == trained["weights"].keys()
        assert all(torch.equal(value, trained["weights"][key]) for key, value in stopped["weights"].items())


@pytest.mark.parametrize("layout", ["one", "dp2", "pp2"])
def test_a_loss_that_was_bad_once(pool: Pool, flags: Flags, layout: str) -> None:
    world, argv = placed(flags, layout)
    at = {"dp2": 2}.get(layout, 4)
    target = "tests.distributed.cases_numbers:bad_output"
    for result in pool.run(target, world, timeout=60, process_group=False, argv=argv, at=at):
        assert result["code"] == 1
        assert "the loss of iteration 2 is not a number: no module or parameter found, samples 4 5 6 7" in result["err"]
        assert "did not happen again" in result["err"]


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("one", {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1}),
        ("dp2+dist", {"--overlap-grad-reduce": True, "--overlap-param-gather": True, "--num-workers": 1}),
        ("tp2+sp+pp2", {"--bf16": True, "--reset-attention-mask": True, "--reset-position-ids": True}),
    ],
)
def test_the_step_is_repeated_as_it_was(pool: Pool, flags: Flags, layout: str, more: Flags) -> None:
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    results = injected(pool, flags | more, layout, name)
    found = told(results, "gradient")
    assert (found["parameter"], found["samples"]) == (name, "7" if "dp2" in layout else "5")
    for result in results:
        assert not result["reports"][0] or result["reports"][2] == result["reports"][1] != result["reports"][0]


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2+vpp2", "dp2+dist"])
def test_the_same_elements_are_dropped_again(pool: Pool, flags: Flags, layout: str) -> None:
    flags |= {"--attention-dropout": 0.3, "--hidden-dropout": 0.3, "--seed": 5}
    results = injected(pool, flags, layout, "decoder.layers.1.mlp.linear_fc1.weight")
    reports = [result["reports"] for result in results if result["reports"][0]]
    assert reports
    for first, failed, again in reports:
        assert again == failed
        assert first != failed


def test_a_fixed_loss_scale_that_overflows(pool: Pool, flags: Flags) -> None:
    found = told(launch(pool, flags | {"--fp16": True, "--loss-scale": 2.0**40}), "gradient")
    assert found["iteration"] == "1"


@pytest.mark.parametrize("layout", ["one", "tp2+pp2"])
def test_a_dynamic_loss_scale_does_not_skip_for_ever(pool: Pool, flags: Flags, tmp_path: Path, layout: str) -> None:
    folder = spoiled(tmp_path / "hf", "model.layers.2.mlp.down_proj.weight", 0)
    found = told(launch(pool, flags | {"--load": folder, "--fp16": True}, layout), "loss")
    assert (found["iteration"], found["parameter"]) == ("1", "decoder.layers.2.mlp.linear_fc2.weight")


# -------------------------------------------------------------------------------------------------- skipped and counted


@pytest.mark.parametrize("layout", ["one", pytest.param("tp2+pp2", marks=pytest.mark.slow), "dp2+dist"])
def test_fp16_counts_its_overflows(pool: Pool, flags: Flags, metrics: Path, layout: str) -> None:
    more = {"--fp16": True, "--initial-loss-scale": 2.0**24, "--hysteresis": 1, "--train-iters": 12}
    more |= {"--lr-decay-style": "linear"}
    results = succeed(pool, flags | more, layout)
    rows = read_rows(metrics)
    skipped = [row["skipped"] for row in rows]
    assert 2 <= sum(skipped) <= 11
    scale, done = 2.0**24, 0
    lines = [line for line in results[-1]["out"].splitlines() if "number of skipped iterations" in line]
    for number, (row, line) in enumerate(zip(rows, lines, strict=True), start=1):
        assert row["loss_scale"] == scale
        assert row["learning_rate"] == pytest.approx(1e-3 * (1 - done / 12))
        assert row["consumed_samples"] == GLOBAL_BATCH * number
        assert (row["grad_norm"] is None, row["lm_loss"] is None, row["nan"]) == (row["skipped"], row["skipped"], 0)
        assert re.search(rf"number of skipped iterations: +{row['skipped']} \|", line)
        scale /= 1 + row["skipped"]
        done += 1 - row["skipped"]


def expected_skips(losses: list[float], factor: float) -> list[int]:
    """Which steps go beyond the mean of those before that did not."""
    kept: list[float] = []
    skips = []
    for loss in losses:
        skips.append(int(bool(kept) and loss > factor * sum(kept) / len(kept)))
        if not skips[-1]:
            kept.append(loss)
    return skips


def telling_stop(losses: list[float]) -> tuple[float, int, list[int]]:
    """A factor, a step to stop at, and the skips: some on either side, and others by a mean that began anew there."""
    for factor in (1.02, 1.01, 1.005, 1.002, 1.001):
        skips = expected_skips(losses, factor)
        for stop in range(2, len(losses) - 1):
            anew = expected_skips(losses[stop:], factor)
            if any(skips[:stop]) and any(skips[stop:]) and anew != skips[stop:]:
                return factor, stop, skips
    raise AssertionError(losses)


@pytest.mark.parametrize("layout", ["one", pytest.param("tp2+pp2", marks=pytest.mark.slow), "dp2+dist"])
def test_spikes_are_skipped_across_a_resume(pool: Pool, flags: Flags, tmp_path: Path, layout: str) -> None:
    # The weights hardly move, so that the losses are those of the run without the flag.
    more = {"--lr": 1e-9, "--lr-decay-style": "linear", "--train-iters": 12}
    free, straight, resumed = (tmp_path / f"{name}.jsonl" for name in ("free", "straight", "resumed"))
    succeed(pool, flags | more | {"--metrics-file": free}, layout)
    losses = [row["lm_loss"] for row in read_rows(free)]
    factor, stop, skips = telling_stop(losses)
    more |= {"--loss-spike-factor": factor}
    succeed(pool, flags | more | {"--metrics-file": straight, "--save": tmp_path / "unused"}, layout)
    rows = read_rows(straight)
    assert [row["skipped"] for row in rows] == skips
    done = 0
    for number, row in enumerate(rows, start=1):
        assert row["learning_rate"] == pytest.approx(1e-9 * (1 - done / 12))
        assert row["consumed_samples"] == GLOBAL_BATCH * number
        assert (row["lm_loss"] is None) == row["skipped"]
        done += 1 - row["skipped"]
    again = flags | more | {"--metrics-file": resumed, "--save": tmp_path / "saves"}
    succeed(pool, again | {"--exit-interval": stop}, layout)
    succeed(pool, again | {"--load": tmp_path / "saves", "--hf-config": flags["--load"]}, layout)
    names = ("iteration", "lm_loss", "grad_norm", "learning_rate", "skipped", "consumed_samples")
    assert [[row[name] for name in names] for row in read_rows(resumed)] == [[row[n] for n in names] for row in rows]


def test_a_skipped_spike_leaves_the_weights(pool: Pool, flags: Flags, metrics: Path) -> None:
    more = {"--train-iters": 12, "--lr": 1e-5}
    succeed(pool, flags | more)
    losses = [row["lm_loss"] for row in read_rows(metrics)]
    above = [loss * number / sum(losses[:number]) for number, loss in enumerate(losses) if number]
    spike = above.index(max(above)) + 2
    more |= {"--loss-spike-factor": (max(above) + max([1.0, *above[: spike - 2]])) / 2}
    (before,) = succeed(pool, flags | more | {"--train-iters": spike - 1})
    metrics.unlink()
    (after,) = succeed(pool, flags | more | {"--train-iters": spike})
    assert [row["skipped"] for row in read_rows(metrics)] == [0] * (spike - 1) + [1]
    assert f"iteration {spike} is skipped" in after["err"]
    assert all(torch.equal(value, after["weights"][name]) for name, value in before["weights"].items())
