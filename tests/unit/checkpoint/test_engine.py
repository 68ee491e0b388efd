"""Planning refuses everything that does not fit, in one message; loading cuts as megatron-core does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mindspeed_llm.checkpoint import export, hf_io
from mindspeed_llm.checkpoint.engine import live_tensors, load_hf_weights
from mindspeed_llm.checkpoint.export import ParallelGroups, iter_hf_weights, save_hf
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import CheckpointError, ConversionError
from mindspeed_llm.models.family import ModelFamily
from tests.fixtures import hf_folder
from tests.unit.checkpoint.shards import chunk, dense_chunk, dense_shapes, family_and_config, with_values

VOCAB = 323


def copy_with(folder: Path, to: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """``folder`` again, with tensors set or (None) removed."""
    shutil.copytree(folder, to)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def grouped_qkv(hf: dict[str, torch.Tensor], layer: int, kind: str, groups: int) -> torch.Tensor:
    """linear_qkv by its definition: for each group its q heads, its k head, its v head."""
    q, k, v = (hf[f"model.layers.{layer}.self_attn.{name}_proj.{kind}"].chunk(groups) for name in "qkv")
    return torch.cat([torch.cat(group) for group in zip(q, k, v, strict=True)])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_gets_its_rows(tp: int) -> None:
    folder = hf_folder("q25", VOCAB)
    hf = load_file(folder / "model.safetensors")
    family, cfg = family_and_config(folder)
    for rank in range(tp):
        model = dense_chunk(cfg, tp=tp)
        load_hf_weights([model], family, folder, tp_rank=rank, tp_size=tp, cfg=cfg)
        live = live_tensors([model])
        for layer in range(4):
            at, hf_at = f"decoder.layers.{layer}", f"model.layers.{layer}"
            for kind in ("weight", "bias"):
                expected = grouped_qkv(hf, layer, kind, groups=2).chunk(tp)[rank]
                assert torch.equal(live[f"{at}.self_attention.linear_qkv.{kind}"], expected)
            gate, up = (hf[f"{hf_at}.mlp.{name}_proj.weight"].chunk(tp)[rank] for name in ("gate", "up"))
            assert torch.equal(live[f"{at}.mlp.linear_fc1.weight"], torch.cat([gate, up]))
            down = hf[f"{hf_at}.mlp.down_proj.weight"].chunk(tp, dim=1)[rank]
            assert torch.equal(live[f"{at}.mlp.linear_fc2.weight"], down)
        padded = 384 if tp == 1 else 128 * tp * (2 if tp == 2 else 1)
        table = torch.zeros(padded, 64)
        table[:VOCAB] = hf["model.embed_tokens.weight"]
        assert torch.equal(live["embedding.word_embeddings.weight"], table.chunk(tp)[rank])


def test_layers_are_counted_over_the_whole_model() -> None:
    folder = hf_folder("q25", VOCAB)
    hf = load_file(folder / "model.safetensors")
    family, cfg = family_and_config(folder)
    chunks = [dense_chunk(cfg, first=False, last=False, layers=[1]), dense_chunk(cfg, first=False, layers=[3])]
    load_hf_weights(chunks, family, folder, tp_rank=0, tp_size=1, cfg=cfg)
    found = chunks[1].get_parameter("decoder.layers.0.input_layernorm.weight")
    assert torch.equal(found, hf["model.layers.3.input_layernorm.weight"])
    assert "decoder.layers.3.input_layernorm.weight" in live_tensors(chunks)


def test_the_last_stage_of_a_tied_model_holds_a_copy_and_does_not_export_it() -> None:
    folder = hf_folder("q25tied", VOCAB)
    family, cfg = family_and_config(folder)
    stages = [dense_chunk(cfg, last=False, layers=[0, 1]), dense_chunk(cfg, first=False, layers=[2, 3])]
    load_hf_weights(stages, family, folder, tp_rank=0, tp_size=1, cfg=cfg)
    live = live_tensors(stages)
    assert torch.equal(live["output_layer.weight"], live["embedding.word_embeddings.weight"])
    out = dict(iter_hf_weights(stages, family, cfg, groups=ParallelGroups()))
    assert out.keys() == load_file(folder / "model.safetensors").keys()


def test_all_misfits_stand_in_one_table(tmp_path: Path) -> None:
    base = hf_folder("q25", VOCAB)
    folder = copy_with(
        base,
        tmp_path / "broken",
        {
            "model.layers.2.mlp.up_proj.weight": None,
            "model.layers.7.mlp.up_proj.weight": torch.zeros(2),
            "model.norm.weight": torch.ones(65),
            "model.layers.0.self_attn.o_proj.weight": torch.zeros(64, 64, dtype=torch.float8_e4m3fn),
        },
    )
    family, cfg = family_and_config(folder)
    shapes = dense_shapes(cfg, layers=range(4), first=True, last=True)
    shapes["decoder.layers.1.self_attention.q_layernorm.weight"] = (16,)
    del shapes["decoder.layers.3.self_attention.linear_qkv.bias"]
    model = chunk(shapes, range(4))
    with pytest.raises(ConversionError) as caught:
        load_hf_weights([model], family, folder, tp_rank=0, tp_size=1, cfg=cfg)
    text = str(caught.value)
    assert "1  missing in the checkpoint: model.layers.2.mlp.up_proj.weight" in text
    assert "1  in the checkpoint, but not in the model: model.layers.7.mlp.up_proj.weight" in text
    assert "1  in the model, but made of nothing: decoder.layers.1.self_attention.q_layernorm.weight" in text
    assert "1  in the family's table, but not in the model: decoder.layers.3.self_attention.linear_qkv.bias" in text
    assert "model.norm.weight [65] (model: [64])" in text
    assert "model.layers.0.self_attn.o_proj.weight torch.float8_e4m3fn" in text
    assert all(torch.isnan(p).all() for p in model.parameters()), "nothing may be written before the plan holds"


def test_a_checkpoint_with_more_layers_than_the_model_is_refused() -> None:
    folder = hf_folder("q25", VOCAB)
    family, cfg = family_and_config(folder, num_layers=3)
    with pytest.raises(ConversionError, match=r"12  in the checkpoint, but not in the model.*and 8 more"):
        load_hf_weights([dense_chunk(cfg)], family, folder, tp_rank=0, tp_size=1, cfg=cfg)


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "fits"), [(6, 3, 2, False), (4, 1, 2, True), (6, 3, 3, True), (4, 4, 3, False)]
)
def test_kv_heads_and_tensor_parallelism(heads: int, groups: int, tp: int, fits: bool) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 96, "intermediate_size": 96}
    folder = hf_folder("llama31", VOCAB, **sizes)
    family, cfg = family_and_config(folder)
    if not fits:
        with pytest.raises(ConversionError, match=f"{heads} heads, {groups} KV heads, tensor-model-parallel-size {tp}"):
            load_hf_weights([nn.Module()], family, folder, tp_rank=0, tp_size=tp, cfg=cfg)
        return
    hf = load_file(folder / "model.safetensors")
    rows: list[torch.Tensor] = []
    for rank in range(tp):
        model = dense_chunk(cfg, tp=tp)
        load_hf_weights([model], family, folder, tp_rank=rank, tp_size=tp, cfg=cfg)
        rows.append(live_tensors([model])["decoder.layers.3.self_attention.linear_qkv.weight"])
    assert torch.equal(torch.cat(rows), grouped_qkv(hf, 3, "weight", groups))


def test_a_tie_on_disk_must_be_one(tmp_path: Path) -> None:
    base = hf_folder("q25tied", VOCAB)
    family, cfg = family_and_config(base)
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    same = copy_with(base, tmp_path / "same", {"lm_head.weight": embedding.clone()})
    load_hf_weights([dense_chunk(cfg)], family, same, tp_rank=0, tp_size=1, cfg=cfg)
    other = copy_with(base, tmp_path / "other", {"lm_head.weight": embedding + 1})
    with pytest.raises(ConversionError, match="two different tensors"):
        load_hf_weights([dense_chunk(cfg)], family, other, tp_rank=0, tp_size=1, cfg=cfg)


def test_stored_rotary_frequencies_are_no_weights(tmp_path: Path) -> None:
    base = hf_folder("llama31", VOCAB)
    family, cfg = family_and_config(base)
    old = copy_with(base, tmp_path / "old", {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_hf_weights([dense_chunk(cfg)], family, old, tp_rank=0, tp_size=1, cfg=cfg)


def test_a_wrapped_low_precision_model_keeps_its_dtype() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    folder = hf_folder("q25", VOCAB)
    family, cfg = family_and_config(folder)
    model = Wrapper(Wrapper(dense_chunk(cfg).bfloat16()))
    load_hf_weights([model], family, folder, tp_rank=0, tp_size=1, cfg=cfg)
    hf = load_file(folder / "model.safetensors")
    for name, tensor in iter_hf_weights([model], family, cfg, groups=ParallelGroups()):
        assert torch.equal(tensor, hf[name].bfloat16()), name


def test_an_incomplete_model_is_not_exported(tmp_path: Path) -> None:
    folder = hf_folder("q25", VOCAB)
    family, cfg = family_and_config(folder)
    model = dense_chunk(cfg, layers=[0, 1, 2])
    with pytest.raises(ConversionError, match=r"7  on no pipeline stage: decoder.layers.3"):
        save_hf([model], family, cfg, tmp_path / "out", dtype=torch.float32, groups=ParallelGroups(), source=folder)
    assert not (tmp_path / "out").exists()


def loaded(folder: Path) -> tuple[nn.Module, ModelFamily, RunConfig]:
    family, cfg = family_and_config(folder)
    model = dense_chunk(cfg)
    load_hf_weights([model], family, folder, tp_rank=0, tp_size=1, cfg=cfg)
    return model, family, cfg


@pytest.mark.parametrize("name", ["q25", "q25tied", "llama31"])
def test_down_to_bf16_and_back_up(tmp_path: Path, name: str) -> None:
    """fp32 -> bf16 -> fp32: the dtype is as asked in both places, values are the rounded ones, transformers agrees."""
    from transformers import AutoModelForCausalLM

    folder = hf_folder(name, VOCAB)
    family, cfg = family_and_config(folder)
    hf = load_file(folder / "model.safetensors")
    at = folder
    for dtype, word in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        model = dense_chunk(cfg)
        load_hf_weights([model], family, at, tp_rank=0, tp_size=1, cfg=cfg)
        out = tmp_path / word
        save_hf([model], family, cfg, out, dtype=dtype, groups=ParallelGroups(), source=at)
        config = json.loads((out / "config.json").read_text())
        assert config["dtype"] == config["torch_dtype"] == word
        stored = load_file(out / "model.safetensors")
        assert stored.keys() == hf.keys()
        assert all(torch.equal(stored[key], hf[key].bfloat16().to(dtype)) for key in hf)
        at = out
    loading: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16", output_loading_info=True)
    model, info = loading
    assert not any(info.values())
    assert model.dtype == torch.bfloat16
    names = {path.name for path in at.iterdir()}
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert wanted <= names


def test_padding_is_cut_to_the_vocabulary_not_to_the_tokenizer(tmp_path: Path) -> None:
    folder = hf_folder("q25", VOCAB)  # the tokenizer has 260 tokens, the embedding 323 rows, the model 384
    model, family, cfg = loaded(folder)
    with torch.no_grad():
        model.get_parameter("embedding.word_embeddings.weight")[VOCAB:] = 9.0
    save_hf([model], family, cfg, tmp_path / "out", dtype=torch.float32, groups=ParallelGroups(), source=folder)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.embed_tokens.weight"].shape[0] == stored["lm_head.weight"].shape[0] == VOCAB
    assert hf_io.read_config(tmp_path / "out")["vocab_size"] == VOCAB


def test_where_an_export_may_go(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(hf_folder("q25", VOCAB), folder)
    model, family, cfg = loaded(folder)

    def save(out: Path, change: float = 0.0) -> None:
        with torch.no_grad():
            model.get_parameter("decoder.final_layernorm.weight").add_(change)
        save_hf([model], family, cfg, out, dtype=torch.float32, groups=ParallelGroups(), source=folder)

    for place in (folder, folder / "..", tmp_path / "x" / ".." / "in"):
        with pytest.raises(CheckpointError, match="overwrite its input"):
            save(place)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="not an earlier export"):
        save(foreign)
    with pytest.raises(CheckpointError, match="is a file"):
        save(foreign / "thesis.tex")
    assert (foreign / "thesis.tex").read_text() == "mine"
    out = tmp_path / "out"
    out.mkdir()
    save(out)
    before = load_file(out / "model.safetensors")["model.norm.weight"]
    save(out, change=1.0)
    assert torch.equal(load_file(out / "model.safetensors")["model.norm.weight"], before + 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "in", "out"]


def test_a_run_with_a_tokenizer_of_its_own_exports_that_one(tmp_path: Path) -> None:
    folder, other = hf_folder("q25", VOCAB), tmp_path / "words"
    model, family, cfg = loaded(folder)
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    out, groups = tmp_path / "out", ParallelGroups()
    save_hf([model], family, cfg, out, dtype=torch.float32, groups=groups, source=folder, tokenizer=other)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    assert not (out / "chat_template.jinja").exists()


def test_an_interrupted_export_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_folder("q25", VOCAB)
    model, family, cfg = loaded(folder)
    out = tmp_path / "out"

    def save() -> None:
        save_hf([model], family, cfg, out, dtype=torch.float32, groups=ParallelGroups(), source=folder)

    save()
    before = (out / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        write = hf_io.ShardWriter.write

        def fail_late(self: hf_io.ShardWriter, name: str, tensor: torch.Tensor) -> None:
            if name == "lm_head.weight":
                raise OSError("disk full")
            write(self, name, tensor)

        patch.setattr(hf_io.ShardWriter, "write", fail_late)
        with pytest.raises(CheckpointError, match="disk full"):
            save()
    assert (out / "model.safetensors").read_bytes() == before
    # What is half written takes up room.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_plan_reads_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_folder("q25", VOCAB)
    family, cfg = family_and_config(folder, num_layers=3)

    def forbidden(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(hf_io, "_cut", forbidden)
    with pytest.raises(ConversionError):
        load_hf_weights([dense_chunk(cfg)], family, folder, tp_rank=0, tp_size=1, cfg=cfg)


def test_values_that_the_family_cannot_say_are_found_before_anything_is_written(tmp_path: Path) -> None:
    folder = hf_folder("q25", VOCAB)
    family, cfg = family_and_config(folder)
    other = with_values({**vars(cfg.model), "normalization": "LayerNorm"})
    with pytest.raises(ConversionError, match="normalization has no place"):
        export.check_export(family, other, tmp_path / "out", dtype=torch.float32, source=folder)
