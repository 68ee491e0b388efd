"""What the core does between ranks: patches, the split loss, dropout, saves and resumes, scaled rotary frequencies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import mindspeed_llm.core  # noqa: F401  the seam comes first
from mindspeed_llm.core import patches
from mindspeed_llm.models.registry import family_by_name
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder, redraw
from tests.parity.layouts import parse_layout
from tests.parity.reference import relative, token_batches

HERE = "tests.distributed.cases_core"
VOCAB = 37
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


MODEL_VOCAB = 328


@pytest.fixture(scope="module")
def folder() -> str:
    return str(hf_folder("q25", vocab=MODEL_VOCAB))


@pytest.fixture(scope="module")
def tied() -> str:
    return str(hf_folder("q25tied", vocab=MODEL_VOCAB))


def run(pool: Pool, case: str, layout: str, **arguments: Any) -> list[Any]:
    return pool.run(f"{HERE}:{case}", parse_layout(layout)[0], timeout=150, layout=layout, **arguments)


# --------------------------------------------------------------------------------------------------- one split softmax


def logits_of_a_padded_vocabulary(width: int, dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    logits = (4 * torch.randn(rows, width, generator=generator)).to(dtype)
    # Whatever stands in the padding.
    logits[:, VOCAB:] = torch.tensor([torch.inf, torch.nan, 1e4, -torch.inf, 0.0]).repeat(width)[: width - VOCAB]
    return logits, torch.randint(0, VOCAB, (rows,), generator=generator), torch.rand(rows, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    # 128 columns on four ranks: the last two hold nothing but padding.
    ("ranks", "width"),
    [(2, 40), (2, 74), (4, 40), (4, 128)],
)
def test_split_loss_equals_float64(pool: Pool, ranks: int, width: int, dtype: torch.dtype) -> None:
    logits, target, weight = logits_of_a_padded_vocabulary(width, dtype, rows=300)
    parts = pool.run(f"{HERE}:cross_entropy", ranks, logits=logits, labels=target, weight=weight, vocab=VOCAB)
    wide = logits[:, :VOCAB].double().requires_grad_()
    wanted = F.cross_entropy(wide, target, reduction="none")
    (gradient,) = torch.autograd.grad(wanted, wide, weight.double())
    for part in parts:
        torch.testing.assert_close(part["loss"].double(), wanted, rtol=1e-6, atol=2e-6)
    got = torch.cat([part["gradient"] for part in parts], -1)
    assert got.dtype == dtype
    assert (got[:, VOCAB:] == 0).all()
    atol = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(got[:, :VOCAB].double(), gradient, rtol=0, atol=atol)


# -------------------------------------------------------------------------------------------------------------- rotary


ROTARY: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("scheme", ROTARY)
def test_logits_with_scaled_rotary_frequencies(pool: Pool, tmp_path: Path, scheme: str) -> None:
    trained = 32 if scheme == "dynamic" else 96
    rope = {**ROTARY[scheme], "rope_theta": 1e4}
    path = str(tmp_path / "model")
    config = {**family_by_name("llama").tiny, "rope_parameters": rope, "max_position_embeddings": trained}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    redraw(made)
    made.save_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.config.rope_parameters["rope_type"] == ROTARY[scheme]["rope_type"]
    tokens = token_batches(vocab=MODEL_VOCAB, seed=3)[0][:2].repeat(1, 2)[:, :48]
    lengths = [24, 48, 24]
    got = pool.run(f"{HERE}:logits_of_lengths", 1, folder=path, tokens=tokens, lengths=lengths)[0]
    for length, ours in zip(lengths, got, strict=True):
        with torch.no_grad():
            wanted = model(tokens[:, :length]).logits
        assert (ours[..., : wanted.shape[-1]] - wanted).abs().max() <= 2e-5 * max(1.0, float(wanted.abs().max()))


# ------------------------------------------------------------------------------------------------------------- dropout


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(x, y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("layout", ["tp2", "tp2+sp"])
def test_dropout_between_tensor_parallel_ranks(pool: Pool, folder: str, layout: str) -> None:
    first, second = run(pool, "dropout_masks", layout, folder=folder, tokens=token_batches(vocab=MODEL_VOCAB, seed=7))
    layers = family_by_name("qwen2").tiny["num_hidden_layers"]
    assert len(first["attention"]) == layers
    # Behind the embedding, the attention and the MLP of each layer.
    assert len(first["hidden"]) == 1 + 2 * layers
    for mask in first["hidden"] + first["attention"]:
        assert 0.05 < mask.float().mean() < 0.15
    # Heads are split, so each rank draws its own.
    assert not any(same(first["attention"], second["attention"]))
    # Hidden states are split along the sequence, or replicated.
    split = "sp" in layout.split("+")
    assert same(first["hidden"], second["hidden"]) == [not split] * len(first["hidden"])
    assert not any(torch.equal(a, b) for a, b in zip(first["hidden"], first["hidden"][1:], strict=False))


def test_dropout_between_data_parallel_ranks(pool: Pool, folder: str) -> None:
    tokens = token_batches(vocab=MODEL_VOCAB, seed=7)
    replicas = run(pool, "dropout_masks", "dp2", folder=folder, tokens=tokens)
    # As in Megatron-LM, replicas share their generators.
    assert all(same(replicas[0]["hidden"], replicas[1]["hidden"]))


@pytest.mark.parametrize("layout", ["one", "tp2+sp"])
def test_a_seed_fixes_a_run(pool: Pool, folder: str, layout: str) -> None:
    arguments = {"folder": folder, "tokens": token_batches(vocab=MODEL_VOCAB, seed=7, steps=2), **DROPOUT}
    first = run(pool, "train_some", layout, **arguments)
    again = run(pool, "train_some", layout, **arguments)
    other = run(pool, "train_some", layout, **arguments, seed=1)
    for a, b, c in zip(first, again, other, strict=True):
        assert_same_run(a, b)
        assert a["losses"] != c["losses"]


@pytest.mark.parametrize("layout", ["one", "tp2", "tp2+sp"])
def test_recomputation_with_dropout_changes_nothing(pool: Pool, folder: str, layout: str) -> None:
    arguments = {"folder": folder, "tokens": token_batches(vocab=MODEL_VOCAB, seed=7, steps=2), **DROPOUT}
    plain = run(pool, "train_some", layout, **arguments)
    for how in ("full", "block", "selective"):
        recomputed = run(pool, "train_some", f"{layout}+{how}", **arguments)
        for a, b in zip(plain, recomputed, strict=True):
            assert_same_run(a, b)


def assert_same_run(a: dict[str, Any], b: dict[str, Any], last: int | None = None) -> None:
    """Bitwise: losses and gradient norms of the ``last`` steps of ``a``, and the final weights."""
    since = 0 if last is None else -last
    assert a["losses"][since:] == b["losses"]
    assert a["norms"][since:] == b["norms"]
    assert a["rates"][since:] == b["rates"]
    assert a["weights"].keys() == b["weights"].keys()
    for name, value in a["weights"].items():
        assert torch.equal(value, b["weights"][name]), name


# ------------------------------------------------------------------------------------------------------ save and resume


@pytest.mark.parametrize(
    ("layout", "more", "portable"),
    [
        # The two forms differ with the distributed optimizer only.
        ("one", {}, False),
        ("one", {"bf16": True}, False),
        ("tp2+sp+dist+dp2", {}, False),
        ("tp2+sp+dist+dp2", {"bf16": True}, False),
        ("tp2+sp+dist+dp2", {"bf16": True}, True),
        ("dp2+dist+reduce+gather", {"bf16": True}, False),
        ("dp2+dist+reduce+gather", {}, True),
        ("pp2+vpp2+p2p", {}, False),
        ("tp2+sp+pp2", {"bf16": True}, False),
    ],
    ids=str,
)
def test_a_resumed_run_repeats_the_straight_one(
    pool: Pool, folder: str, tmp_path: Path, layout: str, more: dict[str, Any], portable: bool
) -> None:
    root = str(tmp_path / "save")
    arguments = {
        "folder": folder,
        "tokens": token_batches(vocab=MODEL_VOCAB, seed=7, steps=4),
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 1,
        **DROPOUT,
        **more,
    }
    straight = run(pool, "train_some", layout, saves={2: [(root, portable)]}, **arguments)
    resumed = run(pool, "train_some", layout, first=2, load=root, **arguments)
    for a, b in zip(straight, resumed, strict=True):
        assert len(b["losses"]) == 2
        assert b["start"]["iteration"] == 2
        assert b["start"]["consumed_samples"] == 2 * arguments["tokens"].shape[1]
        assert_same_run(a, b, last=2)
        assert a["children"] == b["children"] == 0


def test_saving_does_not_move_a_run(pool: Pool, folder: str, tmp_path: Path) -> None:
    layout = "tp2+sp+dist+dp2"
    arguments = {"folder": folder, "tokens": token_batches(vocab=MODEL_VOCAB, seed=7, steps=3), "bf16": True, **DROPOUT}
    saves = {1: [(str(tmp_path / "a"), False), (str(tmp_path / "b"), True)]}
    saved = run(pool, "train_some", layout, saves=saves, **arguments)
    for a, b in zip(saved, run(pool, "train_some", layout, **arguments), strict=True):
        assert_same_run(a, b)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_portable_save_loads_in_other_layouts(pool: Pool, folder: str, tmp_path: Path, bf16: bool) -> None:
    root = str(tmp_path / "save")
    arguments = {"folder": folder, "tokens": token_batches(vocab=MODEL_VOCAB, seed=7, steps=4), "bf16": bf16}
    straight = run(pool, "train_some", "tp2+sp+dp2+dist", saves={2: [(root, True)]}, **arguments)[0]
    tolerance = 2e-3 if bf16 else 1e-5
    for layout in ("pp2+dist", "one+dist", "tp2+dp2+dist", "pp2+vpp2+nop2p+dist"):
        resumed = run(pool, "train_some", layout, first=2, load=root, **arguments)[0]
        assert relative(resumed["losses"][0], straight["losses"][2]) <= tolerance, layout
        # The second loss is right only if the optimizer's state came along.
        assert relative(resumed["losses"][1], straight["losses"][3]) <= tolerance, layout
        assert resumed["rates"] == straight["rates"][2:]


@pytest.mark.parametrize("layout", ["one+dist", "dp4+dist"])
def test_a_periodic_save_loads_at_any_data_parallel_size(pool: Pool, folder: str, tmp_path: Path, layout: str) -> None:
    root = str(tmp_path / "save")
    arguments = {"folder": folder, "tokens": token_batches(vocab=MODEL_VOCAB, seed=7, steps=4)}
    straight = run(pool, "train_some", "dp2+dist", saves={2: [(root, False)]}, **arguments)[0]
    resumed = run(pool, "train_some", layout, first=2, load=root, **arguments)[0]
    for got, wanted in zip(resumed["losses"], straight["losses"][2:], strict=True):
        assert relative(got, wanted) <= 1e-5


def test_loads_that_do_not_fit_are_refused(pool: Pool, folder: str, tmp_path: Path) -> None:
    periodic, plain = str(tmp_path / "periodic"), str(tmp_path / "plain")
    arguments = {"folder": folder, "tokens": token_batches(vocab=MODEL_VOCAB, seed=7, steps=2)}
    run(pool, "train_some", "tp2+dist", saves={1: [(periodic, False)]}, **arguments)
    run(pool, "train_some", "one", saves={1: [(plain, False)]}, **arguments)
    for layout in ("one+dist", "pp2+dist"):
        for error in run(pool, "refused_load", layout, load=periodic, step=1, **arguments):
            assert "loads only at the layout that saved it" in error
            assert "--no-load-optim" in error
    for error in run(pool, "refused_load", "one+dist", load=plain, step=1, **arguments):
        assert "without the distributed optimizer" in error
    for error in run(pool, "refused_load", "tp2", load=periodic, step=1, **arguments):
        assert "saved with the distributed optimizer" in error
    for error in run(pool, "refused_load", "one", load=plain, step=7, **arguments):
        assert "no checkpoint of iteration 7" in error
        assert "iter_0000001" in error
    # Its weights load anywhere.
    for layout in ("one+dist", "pp2+dist", "one"):
        ranks = run(pool, "loaded_weights", layout, load=periodic, step=1, no_load_optim=True, **arguments)
        assert [rank["progress"]["iteration"] for rank in ranks] == [1] * len(ranks)


@pytest.mark.parametrize("how", ["truncated", "missing", "overwritten", "described"])
def test_a_damaged_save_is_one_error_with_a_remedy(pool: Pool, folder: str, tmp_path: Path, how: str) -> None:
    root = tmp_path / "save"
    arguments = {"folder": folder, "tokens": token_batches(vocab=MODEL_VOCAB, seed=7, steps=2)}
    run(pool, "train_some", "dp2+dist", saves={1: [(str(root), False)]}, **arguments)
    shard = root / "iter_0000001" / "__0_0.distcp"
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:1000])
    elif how == "missing":
        shard.unlink()
    elif how == "overwritten":
        content = shard.read_bytes()
        shard.write_bytes(content[:1000] + bytes(len(content) - 1000))
    else:
        (root / "iter_0000001" / "metadata.json").write_text("[]")
    for error in run(pool, "refused_load", "dp2+dist", load=str(root), step=1, **arguments):
        assert "damaged" in error
        assert ("metadata.json" if how == "described" else "__0_0.distcp") in error
        assert "--ckpt-step" in error


def test_finetune_takes_the_weights_only(pool: Pool, folder: str, tmp_path: Path) -> None:
    root = str(tmp_path / "save")
    arguments = {"folder": folder, "tokens": token_batches(vocab=MODEL_VOCAB, seed=7, steps=2)}
    trained = run(pool, "train_some", "one", saves={2: [(root, False)]}, **arguments)[0]
    tuned = run(pool, "loaded_weights", "one", load=root, step=2, finetune=True, **arguments)[0]
    assert tuned["progress"]["iteration"] == 0
    assert tuned["rate"] == 0
    assert all(torch.equal(value, tuned["weights"][name]) for name, value in trained["weights"].items())
    resumed = run(pool, "loaded_weights", "one", load=root, step=2, **arguments)[0]
    assert resumed["progress"]["iteration"] == 2
    assert resumed["rate"] == 2 * arguments["tokens"].shape[1]


# ------------------------------------------------------------------------------------------------------------- patches


def test_a_non_contiguous_tensor_is_reduced(pool: Pool) -> None:
    for got, wanted in pool.run(f"{HERE}:reduce_non_contiguous", 2):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("function", ["_p2p_ops", "_batched_p2p_ops"])
def test_what_is_sent_outlives_the_senders_tensor(pool: Pool, function: str) -> None:
    sender, receiver = pool.run(f"{HERE}:send_then_swap", 2, function=function)
    assert not sender["gone"]
    assert receiver["intact"]


BF16 = {"bf16": True}
OPTIMIZER = "megatron.core.optimizer"
DISTRIBUTED = f"{OPTIMIZER}.distrib_optimizer"
CLASS = f"{DISTRIBUTED}:DistributedOptimizer"
P2P = "megatron.core.pipeline_parallel.p2p_communication"
LANGUAGE = "megatron.core.models.common.language_module.language_module:LanguageModule"
#: Patch -> the case of cases_core.py that goes wrong without it, its layout and more arguments.
NEEDED: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{OPTIMIZER}:Adam": ("build", "one", {}),
    f"{OPTIMIZER}:USING_PYTORCH_OPTIMIZER": ("save_and_resume", "one+dist", {}),
    f"{DISTRIBUTED}:Adam": ("build", "one+dist", {}),
    f"{DISTRIBUTED}:HAVE_APEX_OR_TE": ("save_and_resume", "one+dist", {}),
    f"{CLASS}._set_main_param_and_optimizer_states": ("save_and_resume", "one+dist", {"portable": False}),
    f"{CLASS}.get_parameter_state_dp_zero": ("save_and_resume", "dp2+dist", BF16),
    f"{CLASS}._build_model_and_main_param_groups": ("build", "one+dist", {}),
    f"{OPTIMIZER}.optimizer:Float16OptimizerWithFloat16Params.__init__": ("build", "one", BF16),
    f"{OPTIMIZER}.clip_grads:clip_grad_by_total_norm_fp32": ("build", "one", {}),
    f"{LANGUAGE}.setup_embeddings_and_output_layer": ("build", "pp2", {}),
    "megatron.core.tensor_parallel.mappings:_reduce": ("reduce_non_contiguous", "dp2", {}),
    "megatron.core.tensor_parallel.mappings:_gather_along_first_dim": ("uneven_gather", "dp2", {}),
    "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu": ("sizes_on_the_host", "one", {}),
    "megatron.core.dist_checkpointing.strategies.filesystem_async:_get_write_results_queue": (
        "save_and_resume",
        "one",
        {},
    ),
    "megatron.core.dist_checkpointing.exchange_utils:exchange_loaded_tensors_broadcast": ("exchange", "one", {}),
    f"{OPTIMIZER}.grad_scaler:DynamicGradScaler.load_state_dict": ("save_and_resume", "one", {"fp16": True}),
    f"{P2P}:_p2p_ops": ("send_then_swap", "dp2", {"function": "_p2p_ops", "transfer": False}),
    f"{P2P}:_batched_p2p_ops": ("send_then_swap", "dp2", {"function": "_batched_p2p_ops", "transfer": False}),
}


@pytest.mark.parametrize("patch", [patch.target for patch in patches.every_run()])
def test_each_patch_is_needed(pool: Pool, tied: str, tmp_path: Path, patch: str) -> None:
    """Also says when a patch can go."""
    case, layout, more = NEEDED[patch]
    world = parse_layout(layout)[0]
    arguments: dict[str, Any] = {"case": case, **more}
    if case in ("build", "save_and_resume"):
        arguments |= {"folder": tied, "layout": layout, "tokens": token_batches(vocab=MODEL_VOCAB, seed=7, steps=2)}
    for left_out in (None, patch):
        if case == "save_and_resume":
            arguments["root"] = str(tmp_path / ("without" if left_out else "with"))
        results = pool.run(f"{HERE}:without", world, timeout=90, patch=left_out, **arguments)
        assert is_right(case, results) == (left_out is None), results


def is_right(case: str, results: list[Any]) -> bool:
    """Whether a case ended as it should, on every rank."""
    if any(isinstance(result, str) for result in results):
        return False
    if case == "reduce_non_contiguous":
        return all(torch.equal(*result) for result in results)
    if case == "send_then_swap":
        return results[0]["gone"] is False
    if case in ("exchange", "uneven_gather", "sizes_on_the_host"):
        return all(results)
    if case == "save_and_resume":
        return all(result["same"] and result["children"] == 0 for result in results)
    return all(len(result["losses"]) == 1 for result in results)
