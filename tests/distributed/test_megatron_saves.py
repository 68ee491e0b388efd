"""``torch_dist`` saves of Megatron-LM: their weights are converted and trained from, and nothing in them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.checkpoint import verify
from mindspeed_llm.checkpoint.convert.torch_dist import TorchDistSource
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.unit.checkpoint.test_convert import assert_same, assert_same_config, config, run, to_hf, weights

SAVE = "tests.distributed.cases_megatron_saves:save"
RUN = "tests.distributed.cases_pretrain:command"
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUT = {TP: 2, PP: 2}


def save(pool: Pool, folder: Path, out: Path, *, fused: bool = True, **more: Any) -> Path:
    pool.run(SAVE, 4, folder=folder, out=out, fused=fused, **{"sharding": "dp_reshardable", **LAYOUT, **more})
    return out


@pytest.mark.parametrize(
    ("model", "fused", "more"),
    [
        ("q25", True, {"sharding": "fully_reshardable"}),
        ("q25", False, {}),
        ("q25tied", True, {"release": True, "bf16": True}),
        ("qwen3", True, {"make_vocab_size_divisible_by": 128}),
    ],
)
def test_their_weights_become_a_model(
    pool: Pool, tmp_path: Path, model: str, fused: bool, more: dict[str, Any]
) -> None:
    folder = hf_folder(model, 323)
    saves = save(pool, folder, tmp_path / "megatron", fused=fused, **more)
    expected = weights(folder)
    if "bf16" in more:
        expected = {name: tensor.bfloat16() for name, tensor in expected.items()}
    back = to_hf(saves, tmp_path / "back", "--hf-cfg-dir", folder)
    assert_same(weights(back), expected)
    assert list(verify.verify(saves, None)) == []


def started(pool: Pool, ranks: int, *argv: object) -> dict[str, Any]:
    """What the first rank of a run without steps says."""
    return pool.run(RUN, ranks, argv=[str(word) for word in (*argv, "--train-iters", 0)])[0]


@pytest.mark.parametrize(
    ("how", "ranks", "flags"),
    [
        (("--load",), 1, ()),
        (("--finetune", "--load"), 4, ("--tensor-model-parallel-size", 1, "--pipeline-model-parallel-size", 4)),
        (("--pretrained-checkpoint",), 2, ("--tensor-model-parallel-size", 2, "--bf16", "--params-dtype", "fp32")),
    ],
)
def test_a_run_starts_from_their_weights_in_another_layout(
    pool: Pool, tmp_path: Path, how: tuple[str, ...], ranks: int, flags: tuple[object, ...]
) -> None:
    folder = hf_folder("q25tied", 323)
    saves = save(pool, folder, tmp_path / "megatron")
    found = started(pool, ranks, *how, saves, "--hf-config", folder, "--save-hf", tmp_path / "out", *flags)
    assert found["code"] == 0, found["err"]
    assert ranks > 1 or "the weights alone are read; these are weights to start from: the run begins" in found["err"]
    expected = weights(folder)
    if "--bf16" in flags:
        expected = {name: tensor.bfloat16().float() for name, tensor in expected.items()}
    assert_same(weights(tmp_path / "out"), expected)


def test_their_folder_goes_on_from_where_it_is(pool: Pool, tmp_path: Path) -> None:
    """The recipe as it was, with flags of the model and ``--load`` the same as ``--save``, says what to change; what
    is of another model says so, and one save is named by --ckpt-step or by its own folder."""
    folder = hf_folder("q25", 323)
    saves = save(pool, folder, tmp_path / "megatron")
    model = ("--load", saves, "--hf-config", folder)
    for flags, says in (
        (("--save", saves), "save elsewhere; to go on from there, --load that folder and --pretrained-checkpoint this"),
        (("--rotary-base", 5000), "rotary_base 5000.0"),
        (("--ckpt-step", 6), "no checkpoint of iteration 6"),
        (("--hf-config", hf_folder("q25tied", 323)), "untie_embeddings_and_output_weights True"),
    ):
        found = started(pool, 1, *model, *flags)
        assert found["code"] != 0
        assert says in found["err"]
    for named in (("--ckpt-step", 7), ("--load", saves / "iter_0000007")):
        found = started(pool, 1, *model, *named, "--save-hf", tmp_path / named[0])
        assert found["code"] == 0, found["err"]
        assert_same(weights(tmp_path / named[0]), weights(folder))


def test_their_weights_in_other_forms(pool: Pool, tmp_path: Path) -> None:
    """mg -> mg, and back without another folder."""
    folder = hf_folder("q25", 323)
    saves = save(pool, folder, tmp_path / "megatron")
    tree = tmp_path / "tree"
    more = ("--save-format", "legacy", "--target-pipeline-parallel-size", "2", "--hf-cfg-dir", folder)
    run("--load-model-type", "mg", "--load-dir", saves, "--save-dir", tree, *more)
    back = to_hf(tree, tmp_path / "back")
    assert_same(weights(back), weights(folder))
    assert_same_config(back, folder)
    source = TorchDistSource(saves / "iter_0000007")
    assert source.values["num_layers"] == 4
    # What the arguments say of the model is compared with config.json.
    said = ("--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", saves, "--save-dir", tmp_path / "no")
    run(*said, "--hf-cfg-dir", hf_folder("q25tied", 323), code=1)
    run(*said, code=1)


def test_flags_of_the_model_are_enough(pool: Pool, tmp_path: Path) -> None:
    """As the recipe that saved has them; --model-type-hf says how to name what is exported."""
    folder = hf_folder("q25", 323)
    saves = save(pool, folder, tmp_path / "megatron")
    size = config(folder)
    flags = {
        "--num-layers": size["num_hidden_layers"],
        "--hidden-size": size["hidden_size"],
        "--ffn-hidden-size": size["intermediate_size"],
        "--num-attention-heads": size["num_attention_heads"],
        "--num-query-groups": size["num_key_value_heads"],
        "--max-position-embeddings": size["max_position_embeddings"],
        "--norm-epsilon": size["rms_norm_eps"],
        "--rotary-base": 1000000,
        "--vocab-size": 323,
        "--seq-length": 32,
    }
    switches = ("--group-query-attention", "--swiglu", "--disable-bias-linear", "--add-qkv-bias")
    words = ["--untie-embeddings-and-output-weights", "--normalization", "RMSNorm", *switches]
    words += [str(word) for flag in flags.items() for word in flag]
    words += ["--position-embedding-type", "rope", "--load", saves]
    found = started(pool, 1, *words)
    assert found["code"] != 0
    assert "--model-type-hf" in found["err"]
    found = started(pool, 1, *words, "--model-type-hf", "qwen2", "--save-hf", tmp_path / "out")
    assert found["code"] == 0, found["err"]
    assert_same(weights(tmp_path / "out"), weights(folder))
