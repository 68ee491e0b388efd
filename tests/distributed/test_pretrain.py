"""Whole runs of ``pretrain_gpt.py``: what they report, how batches are cut, where documents end, what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import (
    EOD,
    GLOBAL_BATCH,
    SEQUENCE,
    TINY,
    global_batches,
    launch,
    read_rows,
    reference,
    succeed,
    write_corpus,
)
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.parity.reference import relative

Flags = dict[str, Any]

TRAIN_ROW = """kind iteration consumed_samples consumed_tokens lm_loss grad_norm learning_rate weight_decay loss_scale
    global_batch_size num_micro_batches skipped nan elapsed_ms tokens_per_s tflops_per_rank mfu max_memory_bytes"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def folder() -> Path:
    return hf_folder("q25")


@pytest.fixture
def flags(corpus: str, folder: Path, tmp_path: Path) -> Flags:
    return {**TINY, "--load": folder, "--data-path": corpus, "--metrics-file": tmp_path / "metrics.jsonl"}


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


# ------------------------------------------------------------------------------------------------------------- reports


def test_metrics_and_log_lines(pool: Pool, flags: Flags, metrics: Path) -> None:
    (result,) = succeed(pool, flags | {"--log-throughput": True, "--peak-tflops": 2.0})
    (start,) = read_rows(metrics, "start")
    assert (start["load"], start["iteration"], start["train_iters"], start["world_size"]) == ("hf", 0, 3, 1)
    rows = read_rows(metrics)
    assert [set(row) for row in rows] == [set(TRAIN_ROW.split())] * 3
    for number, row in enumerate(rows, start=1):
        assert (row["iteration"], row["consumed_samples"]) == (number, GLOBAL_BATCH * number)
        assert row["consumed_tokens"] == GLOBAL_BATCH * SEQUENCE * number
        assert (row["learning_rate"], row["weight_decay"], row["loss_scale"]) == (1e-3, 0.1, 1.0)
        assert (row["global_batch_size"], row["num_micro_batches"], row["skipped"], row["nan"]) == (4, 4, 0, 0)
        assert row["tokens_per_s"] == pytest.approx(GLOBAL_BATCH * SEQUENCE / row["elapsed_ms"] * 1000)
        assert row["mfu"] == pytest.approx(row["tflops_per_rank"] / 2.0)
    # The fields that people's scripts look for in Megatron-LM's line.
    line = next(line for line in result["out"].splitlines() if re.search(r"iteration\s+2/\s+3 \|", line))
    for name, value in {
        "consumed samples": "8",
        "learning rate": "1.000000E-03",
        "global batch size": "4",
        "lm loss": f"{rows[1]['lm_loss']:.6E}",
        "loss scale": "1.0",
        "grad norm": f"{rows[1]['grad_norm']:.3f}",
        "number of skipped iterations": "0",
        "number of nan iterations": "0",
        "elapsed time per iteration (ms)": f"{rows[1]['elapsed_ms']:.1f}",
    }.items():
        assert re.search(rf"\| ({re.escape(name)}): +{re.escape(value)} \|", line.replace("| ", "| | ")), name
    assert re.search(r"throughput per GPU \(TFLOP/s/GPU\): [0-9.]+ \| tokens per second: [0-9.]+ \| MFU", line)


def test_a_longer_log_interval_means_over_its_steps(pool: Pool, flags: Flags, metrics: Path, tmp_path: Path) -> None:
    succeed(pool, flags | {"--train-iters": 4})
    succeed(pool, flags | {"--train-iters": 4, "--log-interval": 2, "--metrics-file": tmp_path / "two.jsonl"})
    each, pairs = read_rows(metrics), read_rows(tmp_path / "two.jsonl")
    assert [row["iteration"] for row in pairs] == [2, 4]
    for number, row in enumerate(pairs):
        mean = sum(one["lm_loss"] for one in each[2 * number : 2 * number + 2]) / 2
        assert row["lm_loss"] == pytest.approx(mean, rel=1e-12)
        assert row["grad_norm"] == each[2 * number + 1]["grad_norm"]


def test_tensorboard(pool: Pool, flags: Flags, metrics: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = {"--eval-iters": 1, "--split": "80,20,0", "--log-validation-ppl-to-tensorboard": True}
    succeed(pool, flags | more | {"--tensorboard-dir": tmp_path / "tb"}, "tp2")
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    rows, (valid,) = read_rows(metrics), read_rows(metrics, "valid")
    for tag, name in {"lm loss": "lm_loss", "grad-norm": "grad_norm", "learning-rate": "learning_rate"}.items():
        points = events.Scalars(tag)
        assert [point.step for point in points] == [1, 2, 3]
        assert [point.value for point in points] == pytest.approx([row[name] for row in rows], rel=1e-6)
    ppl = events.Scalars("lm loss validation ppl")[0].value
    assert ppl == pytest.approx(math.exp(valid["lm_loss"]), rel=1e-6)


def test_evaluations_are_over_the_same_samples(pool: Pool, flags: Flags, metrics: Path, folder: Path) -> None:
    ramp = {"--train-iters": None, "--train-samples": 10, "--rampup-batch-size": (2, 2, 6)}
    more = {"--eval-iters": 2, "--eval-interval": 1, "--split": "70,30,0", "--lr": 0.0}
    (result,) = succeed(pool, flags | ramp | more)
    rows = read_rows(metrics)
    assert [(row["iteration"], row["global_batch_size"]) for row in rows] == [(1, 2), (2, 2), (3, 2), (4, 4)]
    assert [row["consumed_samples"] for row in rows] == [2, 4, 6, 10]
    valid = read_rows(metrics, "valid")
    assert [row["iteration"] for row in valid] == [1, 2, 3, 4]
    # Two samples short of another batch: as Megatron-LM, only whole ones.
    succeed(pool, flags | ramp | {"--train-samples": 13, "--metrics-file": metrics.with_name("whole.jsonl")})
    assert [row["consumed_samples"] for row in read_rows(metrics.with_name("whole.jsonl"))] == [2, 4, 6, 10]
    # With a learning rate of 0 all are equal, if and only if the samples are: two batches of 4, also in the ramp-up.
    assert len({row["lm_loss"] for row in valid}) == 1
    assert len(result["batches"]) == 10 + 4 * 2 * GLOBAL_BATCH
    loss, _ = reference(folder, result["batches"][2 : 2 + 2 * GLOBAL_BATCH])
    assert relative(valid[0]["lm_loss"], loss) <= 1e-5


# ------------------------------------------------------------------------------------------------------ the loop's end


@pytest.mark.parametrize("unit", ["iterations", "samples"])
def test_schedules(pool: Pool, flags: Flags, metrics: Path, unit: str) -> None:
    more: Flags = {"--lr-decay-style": "cosine", "--lr": 1e-2, "--min-lr": 1e-3}
    more |= {"--start-weight-decay": 0.0, "--end-weight-decay": 0.2, "--weight-decay-incr-style": "linear"}
    if unit == "iterations":
        more |= {"--train-iters": 8, "--lr-warmup-iters": 2}
    else:
        more |= {"--train-iters": None, "--train-samples": 8 * GLOBAL_BATCH, "--lr-warmup-samples": 2 * GLOBAL_BATCH}
    succeed(pool, flags | more)
    rows = read_rows(metrics)
    # The values that step k + 1 uses are those of k steps.
    rates = [0.0, 5e-3, *(1e-3 + 9e-3 * (1 + math.cos(math.pi * (k - 2) / 6)) / 2 for k in range(2, 8))]
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates, rel=1e-12)
    assert [row["weight_decay"] for row in rows] == pytest.approx([0.2 * k / 8 for k in range(8)], rel=1e-12)


@pytest.mark.parametrize("layout", ["one", "tp2+dp2+dist", "pp2+vpp2"])
def test_exit_interval_saves_and_a_resume_goes_on(
    pool: Pool, flags: Flags, metrics: Path, tmp_path: Path, layout: str
) -> None:
    # Dropout, so that random states matter; evaluations, which are over the same samples before and after.
    flags |= {"--attention-dropout": 0.1, "--hidden-dropout": 0.1, "--train-iters": 6}
    flags |= {"--eval-interval": 2, "--eval-iters": 1, "--split": "70,30,0"}
    straight = tmp_path / "straight.jsonl"
    succeed(pool, flags | {"--save": tmp_path / "unused", "--metrics-file": straight}, layout)
    stopped = flags | {"--save": tmp_path / "saves"}
    succeed(pool, stopped | {"--exit-interval": 4}, layout)
    assert [row["iteration"] for row in read_rows(metrics)] == [1, 2, 3, 4]
    succeed(pool, stopped | {"--load": tmp_path / "saves", "--hf-config": flags["--load"]}, layout)
    told = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples", "consumed_tokens")
    one, two = read_rows(straight), read_rows(metrics)
    assert [[row[name] for name in told] for row in two] == [[row[name] for name in told] for row in one]
    assert read_rows(metrics, "valid") == read_rows(straight, "valid")
    assert len(read_rows(straight, "valid")) == 3


@pytest.mark.parametrize("layout", ["tp2", "tp2+dp2+dist", "tp2+pp2"])
def test_replicated_weights_stay_equal_under_dropout(pool: Pool, flags: Flags, layout: str) -> None:
    """Tensor-parallel ranks drop the same elements of hidden states, though one of them alone reads data."""
    more = {"--attention-dropout": 0.1, "--hidden-dropout": 0.1, "--eval-interval": 1, "--eval-iters": 1}
    results = succeed(pool, flags | more | {"--split": "70,30,0"}, layout)
    for one, other in zip(results[::2], results[1::2], strict=True):
        replicated = [name for name in one["weights"] if "norm" in name or name.endswith("linear_proj.bias")]
        assert len(replicated) >= 4
        assert [name for name in replicated if not torch.equal(one["weights"][name], other["weights"][name])] == []


def test_exit_duration_stops_every_rank_together(pool: Pool, flags: Flags, metrics: Path) -> None:
    (refused,) = launch(pool, flags | {"--exit-duration-in-mins": 0})
    assert refused["code"] == 2
    assert "--exit-duration-in-mins" in refused["err"]
    # One rank's clock is ahead: all stop, at the same step.
    succeed(pool, flags | {"--exit-duration-in-mins": 1})
    assert len(read_rows(metrics)) == 3
    target = "tests.distributed.cases_pretrain:must_stop"
    assert pool.run(target, 2, limit=2, minutes=[1.9, 2.1]) == [True, True]
    assert pool.run(target, 2, limit=2, minutes=[1.9, 0.0]) == [False, False]


@pytest.mark.parametrize("layout", ["one", "tp2+pp2", "dp2+dist"])
def test_a_loss_that_is_no_number_stops_the_run_on_every_rank(
    pool: Pool, flags: Flags, metrics: Path, tmp_path: Path, layout: str
) -> None:
    poisoned = flags | {"--load": poison(flags["--load"], tmp_path / "poisoned"), "--save": tmp_path / "saves"}
    for result in launch(pool, poisoned, layout):
        assert result["code"] == 1
        assert "the loss of iteration 1 is not a number" in result["err"]
        assert "--no-check-for-nan-in-loss-and-grad" in result["err"]
        assert "Traceback" not in result["err"]
    assert not list((tmp_path / "saves").glob("iter_*"))
    succeed(pool, poisoned | {"--no-check-for-nan-in-loss-and-grad": True}, layout)
    assert [(row["lm_loss"], row["nan"]) for row in read_rows(metrics)] == [(None, 1)] * 3


@pytest.mark.parametrize("layout", ["one", "tp2+dp2+dist"])
def test_the_gradient_norm_without_clipping(pool: Pool, flags: Flags, metrics: Path, folder: Path, layout: str) -> None:
    results = succeed(pool, flags | {"--clip-grad": 0.0, "--train-iters": 1}, layout)
    (row,) = read_rows(metrics)
    _, norm = reference(folder, global_batches(results, row["num_micro_batches"])[0])
    assert relative(row["grad_norm"], norm) <= 1e-4


def poison(folder: Path, target: Path) -> Path:
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


# ------------------------------------------------------------------------------------------------------ number formats


@pytest.mark.parametrize("layout", ["one", "tp2+sp+pp2", "dp2+dist"])
def test_fp16_skips_overflows_and_halves_the_scale(
    pool: Pool, flags: Flags, metrics: Path, tmp_path: Path, layout: str
) -> None:
    more = {"--fp16": True, "--initial-loss-scale": 2.0**26, "--hysteresis": 1, "--train-iters": 14}
    more |= {"--save-hf": tmp_path / "hf", "--save-hf-interval": 1, "--lr-decay-style": "linear"}
    succeed(pool, flags | more, layout)
    rows = read_rows(metrics)
    skipped = [row["skipped"] for row in rows]
    first = skipped.index(0)
    assert 2 <= first < 13
    assert [row["loss_scale"] for row in rows[: first + 1]] == [2.0 ** (26 - k) for k in range(first + 1)]
    assert skipped[:first] == [1] * first
    # Nothing moves in a skipped step, the schedule neither; the data does.
    assert {row["learning_rate"] for row in rows[: first + 1]} == {1e-3}
    assert [row["consumed_samples"] for row in rows] == [GLOBAL_BATCH * k for k in range(1, 15)]
    given = {name: t.half() for name, t in load_file(flags["--load"] / "model.safetensors").items()}
    name = "model.layers.0.mlp.up_proj.weight"
    for step in range(1, first + 1):
        assert torch.equal(exported(tmp_path / "hf", step)[name], given[name])
    assert not torch.equal(exported(tmp_path / "hf", first + 1)[name], given[name])
    assert rows[-1]["lm_loss"] < rows[first]["lm_loss"]


def exported(folder: Path, step: int) -> dict[str, torch.Tensor]:
    files = (folder / f"iter_{step:07d}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("more", "scale", "tolerance"),
    [
        ({"--bf16": True}, 1.0, 2e-2),
        ({"--fp16": True, "--loss-scale": 128.0}, 128.0, 4e-3),
        ({"--fp16": True, "--initial-loss-scale": 256.0}, 256.0, 4e-3),
    ],
    ids=["bf16", "constant scale", "dynamic scale"],
)
@pytest.mark.parametrize("layout", ["one", "tp2+sp+pp2"])
def test_sixteen_bits_stay_near_transformers_in_fp32(
    pool: Pool, flags: Flags, metrics: Path, folder: Path, layout: str, more: Flags, scale: float, tolerance: float
) -> None:
    results = succeed(pool, flags | more, layout)
    row = read_rows(metrics)[0]
    loss, norm = reference(folder, global_batches(results, 4)[0])
    assert (row["loss_scale"], row["skipped"]) == (scale, 0)
    assert relative(row["lm_loss"], loss) <= tolerance
    assert relative(row["grad_norm"], norm) <= tolerance


# ----------------------------------------------------------------------------------------------------- cuts of a batch


@pytest.mark.parametrize("layout", ["mbs4", "mbs2", "one", "mbs2+dp2+dist+reduce", "dp4", "pp2+dp2"])
@pytest.mark.parametrize("per_token", [True, False], ids=["per token", "per micro-batch"])
def test_loss_and_gradient_of_a_batch_with_uneven_masks(
    pool: Pool, flags: Flags, metrics: Path, folder: Path, layout: str, per_token: bool
) -> None:
    more = {"--eod-mask-loss": True, "--calculate-per-token-loss": per_token, "--train-iters": 1}
    results = succeed(pool, flags | more, layout)
    (row,) = read_rows(metrics)
    (batches,) = global_batches(results, row["num_micro_batches"])
    samples = torch.cat([batch["tokens"] for batch in batches])
    assert len(samples) == GLOBAL_BATCH
    masked = torch.cat([batch["loss_mask"] for batch in batches]) == 0
    assert torch.equal(masked, samples == EOD)
    assert len({int(row) for row in masked.sum(1)}) > 1, "the masks are even: the test shows nothing"
    loss, norm = reference(folder, batches, per_token=per_token)
    assert relative(row["lm_loss"], loss) <= 1e-5
    assert relative(row["grad_norm"], norm) <= 1e-4
    if not per_token and "mbs4" not in layout:
        # The two meanings can be told apart on this batch.
        assert relative(reference(folder, batches)[1], norm) > 1e-4


# ----------------------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize(
    ("layout", "in_loader", "positions"),
    [
        *((layout, True, False) for layout in ("one", "tp2+sp", "pp2+vpp2", "pp4+mbs2")),
        *((layout, False, False) for layout in ("one", "mbs2", "tp2+sp", "pp2+vpp2", "tp2+pp2+full")),
        ("mbs2", True, True),
        ("pp2", False, True),
    ],
)
def test_documents_do_not_see_each_other(
    pool: Pool, flags: Flags, metrics: Path, folder: Path, layout: str, in_loader: bool, positions: bool
) -> None:
    more = {"--reset-attention-mask": True, "--reset-position-ids": positions, "--train-iters": 1}
    more["--no-create-attention-mask-in-dataloader"] = not in_loader
    results = succeed(pool, flags | more, layout)
    (row,) = read_rows(metrics)
    (batches,) = global_batches(results[:1], row["num_micro_batches"])
    assert sum(int((batch["tokens"][:, :-1] == EOD).sum()) for batch in batches) > 2
    loss, norm = reference(folder, batches, per_document=True)
    assert relative(row["lm_loss"], loss) <= 1e-5
    assert relative(row["grad_norm"], norm) <= 1e-4
    assert relative(reference(folder, batches)[0], loss) > 1e-4


# ------------------------------------------------------------------------------------------------------------ refusals

ARCHITECTURE = {
    "--num-layers": 4,
    "--hidden-size": 64,
    "--ffn-hidden-size": 128,
    "--num-attention-heads": 4,
    "--group-query-attention": True,
    "--num-query-groups": 2,
    "--max-position-embeddings": 512,
    "--vocab-size": 328,
}


@pytest.mark.parametrize(
    ("layout", "more", "words"),
    [
        ("tp2+sp", {"--seq-length": 31}, ("31", "2", "--seq-length")),
        ("pp2", {"--num-layers": 5}, ("5 layers", "2 pipeline ranks")),
        (
            "pp4",
            {"--num-layers": 10, "--num-layers-per-virtual-pipeline-stage": 1},
            ("10 layers", "4 pipeline ranks", "1 layers per interleaved stage"),
        ),
        ("tp2", {"--num-attention-heads": 6, "--num-query-groups": 3, "--hidden-size": 96}, ("3 groups", "2 ranks")),
        ("one", {"--reset-atention-mask": True}, ("--reset-atention-mask", "--reset-attention-mask")),
        ("one", {"--micro-batch-size": 3}, ("--global-batch-size 4", "micro-batch 3")),
        ("one", {"--data-path": None}, ("there is no data", "--data-path")),
        ("pp2+vpp2", {"--global-batch-size": 3}, ("3 micro-batches", "2 pipeline ranks")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_work_is_refused_before_time_is_spent(
    pool: Pool, flags: Flags, metrics: Path, layout: str, more: Flags, words: tuple[str, ...]
) -> None:
    for result in launch(pool, flags | {"--load": None} | ARCHITECTURE | more, layout):
        assert result["code"] == 2
        assert [word for word in words if word not in result["err"]] == [], result["err"]
        assert "Traceback" not in result["err"]
        assert not result["weights"], "a model was built"
    assert not metrics.exists()


def test_data_of_another_tokenizer_is_refused(pool: Pool, flags: Flags, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(flags["--load"], other)
    vocabulary = (other / "tokenizer.json").read_text()
    assert '"a"' in vocabulary
    swapped = vocabulary.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
    (other / "tokenizer.json").write_text(swapped)
    for result in launch(pool, flags | {"--load": other}, "tp2+pp2"):
        assert result["code"] == 1
        assert "made with another tokenizer" in result["err"]
        assert flags["--data-path"] in result["err"]
        assert not result["batches"]


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_ids_beyond_the_vocabulary_are_refused(pool: Pool, flags: Flags, layout: str) -> None:
    # Bare ids, as Megatron's own tool leaves them: nothing says beforehand how high they go.
    more = {"--load": None, **ARCHITECTURE, "--vocab-size": 100, "--tokenizer-type": "NullTokenizer"}
    for result in launch(pool, flags | more, layout):
        assert result["code"] == 1
        assert "has no row" in result["err"]
        assert "Traceback" not in result["err"]


# ------------------------------------------------------------------------------------------------------- other recipes


def test_flags_that_recipes_carry_change_nothing(pool: Pool, flags: Flags, metrics: Path, tmp_path: Path) -> None:
    carried: Flags = {
        "--no-shared-storage": True,
        "--distributed-backend": "nccl",
        "--use-mcore-models": True,
        "--transformer-impl": "local",
        "--use-flash-attn": True,
        "--use-fused-rmsnorm": True,
        "--use-fused-rotary-pos-emb": True,
        "--no-gradient-accumulation-fusion": True,
        "--no-masked-softmax-fusion": True,
        "--attention-softmax-in-fp32": True,
        "--ckpt-format": "torch_dist",
        "--distributed-timeout-minutes": 120,
        "--num-workers": 2,
        "--tokenizer-type": "PretrainedFromHF",
        "--tokenizer-name-or-path": flags["--load"],
    }
    succeed(pool, flags, "tp2+dp2")
    results = succeed(pool, flags | carried | {"--metrics-file": tmp_path / "carried.jsonl"}, "tp2+dp2")
    plain, got = read_rows(metrics), read_rows(tmp_path / "carried.jsonl")
    assert [row["lm_loss"] for row in got] == [row["lm_loss"] for row in plain]
    assert "--use-flash-attn" in results[0]["err"], "what has no effect is said once"
