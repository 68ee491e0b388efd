"""Writes the pages of ``docs/generated``: ops, model families, flags and measurements.

``python -m mindspeed_llm.tools.docs`` rewrites the pages; ``--check`` says which of them are out of date and fails if
any is. Help texts of megatron-core's own fields are not copied into the repository: ``--help`` reads them from the
installed wheel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_llm.core.transformer.attention import IMPLEMENTATIONS
from mindspeed_llm.errors import ConfigError, ConversionError
from mindspeed_llm.models.family import Const, Drop, Expect, Ignore, ModelFamily, ParamMap, Preset, Values, Weight
from mindspeed_llm.models.registry import CONFIG, families, family_for, packaged_configs
from mindspeed_llm.ops import registry
from mindspeed_llm.ops.dispatch import DEVICES
from mindspeed_llm.tools.flag_pages import coverage_page, flags_page, lowered
from mindspeed_llm.tools.markdown import COMMAND, code, page, table
from mindspeed_llm.tools.source_tree import source_tree

FOLDER = Path("docs", "generated")
BENCH = Path("docs", "bench.json")

PROBES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("a key that no rule knows", {"a_new_key": 1}),
    ("quantised weights", {"quantization_config": {"quant_method": "fp8"}}),
    ("another activation", {"hidden_act": "gelu"}),
    ("rotation of a part of each head", {"partial_rotary_factor": 0.5}),
    ("rope settings per kind of layer", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    ("longrope", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0}}),
    ("biases of attention alone", {"attention_bias": True, "mlp_bias": False}),
    ("positions of several axes", {"use_mrope": True}),
    ("an encoder beside the decoder", {"is_encoder_decoder": True}),
)
"""Changes of the tiny config.json that someone may meet, put to every family to see whether it refuses them."""


# Ops ----------------------------------------------------------------------------------------------------------------


def ops_page() -> str:
    """Every op with its implementations, and the rows of the core attention."""
    rows: list[Sequence[object]] = []
    unchecked: list[str] = []
    for spec in registry().specs():
        for impl in registry().impls(spec.name):
            dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in impl.dtypes)
            rows.append((f"`{spec.name}`", f"`{impl.name}`", ", ".join(impl.devices), dtypes, impl.status))
            unchecked += [f"`{spec.name}={impl.name}`" for d in impl.devices if d == "npu" and d not in impl.tested_on]
    attention = [
        (
            f"`{row.name}`",
            ", ".join(sorted(row.devices)) if row.devices else "any",
            "yes" if row.softcap else "no",
            "yes" if row.dropout else "no",
        )
        for row in IMPLEMENTATIONS
    ]
    return page(
        "Ops",
        [
            "A run takes the implementation that `--op OP=IMPL` asks for, else the first of the table that the device",
            "can run, else the reference, which is the definition. The start-up log shows the choice.",
            "",
            *table(("op", "implementation", "devices", "dtypes", "status"), rows),
            f"Devices: {', '.join(DEVICES)}. A status names the devices on which this project's tests have run an",
            "implementation.",
            "",
            f"**Never ran on an Ascend device**: {', '.join(unchecked) or 'none'}.",
            "",
            "## Core attention",
            "",
            "The first row that can run a call does. CUDA and NPU have no row of their own; what runs there is the",
            "reference, which has never run on an Ascend device.",
            "",
            *table(("implementation", "devices", "soft-cap", "dropout"), attention),
        ],
    )


# Models -------------------------------------------------------------------------------------------------------------


def _layout(weight: ParamMap) -> str:
    shard = type(weight.shard).__name__.lower()
    parts = getattr(weight.shard, "parts", 1)
    return f"{shard} ({parts} parts)" if parts > 1 else shard


def _condition(weight: ParamMap) -> str:
    if weight.tied_to:
        return "untied; else a copy of the embedding"
    return f"`{weight.when}`" if weight.when else ""


def _weight_row(weight: Weight) -> Sequence[object]:
    if isinstance(weight, Drop):
        return ("(none)", f"`{weight.hf}`", "dropped", "", weight.why)
    return (
        f"`{weight.mcore}`",
        code(weight.hf),
        type(weight.transform).__name__,
        _layout(weight),
        _condition(weight),
    )


def _answers(family: ModelFamily) -> list[Sequence[object]]:
    """What the family says to each of :data:`PROBES`, in its own words."""
    rows: list[Sequence[object]] = []
    for what, change in PROBES:
        try:
            family.config_to_values({**family.tiny, **change})
        except ConversionError as error:
            reason = str(error).partition("\n")[2]
            rows.append((what, f"`{json.dumps(change)}`", reason))
    return rows


def _expected(family: ModelFamily) -> list[Sequence[object]]:
    """Keys that may have certain values only, and what the family says of others."""
    rows: list[Sequence[object]] = []
    for rule in family.config:
        if isinstance(rule, Expect):
            (key,) = rule.hf_keys
            try:
                rule.to_values({key: object()})
            except ConversionError as error:
                rows.append((f"`{key}`", f"`{error.allowed}`", error.what))
    return rows


def _constants(family: ModelFamily, kind: type[Const] | type[Preset]) -> str:
    values = {k: v for rule in family.config if isinstance(rule, kind) for k, v in rule.to_values({}).items()}
    return code(f"{name}={value}" for name, value in values.items())


def _family_section(family: ModelFamily) -> list[str]:
    ignored = [rule for rule in family.config if isinstance(rule, Ignore)]
    kinds = (Ignore, Expect)
    read = sorted({key for rule in family.config if not isinstance(rule, kinds) for key in rule.hf_keys})
    return [
        f"## {family.name}",
        "",
        f"- Hugging Face: `model_type` `{family.hf_model_type}`, architectures {code(family.hf_architectures)}.",
        f"- Chat template: `{family.chat_template}`.",
        f"- Keys of config.json that are read: {code(read)}.",
        f"- Fixed for the family; a run that changes one cannot be exported as it: {_constants(family, Const)}.",
        f"- Set by the family; a run may change it: {_constants(family, Preset)}.",
        *(f"- Kept but not read ({rule.why}): {code(rule.hf_keys)}." for rule in ignored),
        "",
        "The tiny model of the parity tests:",
        "",
        "```json",
        json.dumps(dict(family.tiny), indent=2),
        "```",
        "",
        "Keys that may be absent or have these values only:",
        "",
        *table(("key", "allowed", "of anything else it says"), _expected(family)),
        "Refused, tried on the tiny model:",
        "",
        *table(("what", "change of config.json", "answer"), _answers(family)),
        "Weights:",
        "",
        *table(
            ("megatron-core", "Hugging Face", "transform", "over tensor-parallel ranks", "when"),
            map(_weight_row, family.weights),
        ),
    ]


def _positions(values: Values) -> str:
    """How a model knows positions: the base of the rotation and how far it is stretched, else the kind."""
    kind = values["position_embedding_type"]
    if kind != "rope":
        return str(kind)
    local, scaling = values.get("rotary_base_local"), values.get("rope_scaling_type")
    return ", ".join(
        [
            f"rope {values['rotary_base']:g}",
            *([f"{local:g} in windows"] if local else ()),
            *([f"{scaling} x{values['rope_scaling_factor']:g}"] if scaling else ()),
        ]
    )


def _published() -> Iterable[Sequence[object]]:
    for name, folder in packaged_configs().items():
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        family = family_for(config)
        values = family.config_to_values(config)
        yield (
            f"`{name}`",
            family.name,
            values["num_layers"],
            values["hidden_size"],
            values["ffn_hidden_size"],
            f"{values['num_attention_heads']} / {values['num_query_groups']}",
            values["vocab_size"],
            _positions(values),
            f"{values['layernorm_epsilon']:g}",
            "no" if values["untie_embeddings_and_output_weights"] else "yes",
            values["max_position_embeddings"],
        )


def models_page() -> str:
    """Every model family: what it reads, what it refuses, its tiny size, its weights; and the published models."""
    known = [family for _, family in sorted(families().items())]
    overview = [
        (f"[{f.name}](#{f.name})", code(f.hf_architectures), f"`{f.hf_model_type}`", f.chat_template) for f in known
    ]
    return page(
        "Model families",
        [
            *table(("family", "architectures", "model_type", "chat template"), overview),
            "A key of config.json that no rule of the family knows is refused, as it could change the model.",
            "",
            "## Published models",
            "",
            "`--hf-config NAME` takes the architecture of one of these, without weights and without a tokenizer.",
            "",
            *table(
                (
                    "name",
                    "family",
                    "layers",
                    "hidden",
                    "feed-forward",
                    "heads / KV",
                    "vocabulary",
                    "positions",
                    "norm eps",
                    "tied",
                    "longest",
                ),
                _published(),
            ),
            *(line for family in known for line in _family_section(family)),
        ],
    )


# Bench --------------------------------------------------------------------------------------------------------------


def _bench_row(row: Mapping[str, Any]) -> Sequence[object]:
    values = (f"{statistics.median(row[side]):.4g}" for side in ("ours", "peer"))
    target = "" if row["target"] is None else f"{row['target']:g}: {'holds' if row['holds'] else '**missed**'}"
    memory = "" if row["mem_ratio"] is None else f"{row['mem_ratio']:.3f}"
    return (
        row["name"],
        row["setting"],
        row["peer_version"],
        row["unit"],
        *values,
        f"{row['ratio']:.3f}",
        target,
        memory,
    )


def bench_page() -> str:
    """The measurements that stand in ``docs/bench.json``, in the form in which ``make bench`` writes them."""
    results = json.loads((source_tree() / BENCH).read_text(encoding="utf-8"))
    machine = results["machine"]
    head = ("benchmark", "setting", "peer", "unit", "ours", "peer's", "ratio", "target", "memory ratio")
    return page(
        "Measurements",
        [
            f"From [docs/bench.json](../bench.json): {machine['cpu']}, {machine['threads']} threads,",
            f"torch {machine['torch']}, commit {machine['commit']}; copy {machine['copy_gb_s']:g} GB/s,",
            f"bf16 matmul {machine['matmul_bf16_tflops']:g} TFLOP/s. `make bench` measures anew.",
            "",
            "Processors differ: read the ratios, of medians of both sides measured in turns. Of a rate (`/s`) more is",
            "better, of a cost less. Memory: peak anonymous bytes above those of a process that only imports.",
            "",
            *table(head, map(_bench_row, results["rows"])),
        ],
    )


COVERAGE = "flag-coverage.txt"
PAGES: Mapping[str, Callable[[], str]] = {
    "ops.md": ops_page,
    "models.md": models_page,
    "flags.md": flags_page,
    "bench.md": bench_page,
    COVERAGE: coverage_page,
}


def main(argv: Sequence[str] | None = None, *, folder: Path | None = None) -> int:
    """Write the pages, or with ``--check`` only compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    check = parser.parse_args(argv).check
    try:
        folder = folder or source_tree() / FOLDER
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    wanted = {folder / name: write() for name, write in PAGES.items()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    floor = folder / COVERAGE
    if floor in stale and floor.exists() and (fallen := lowered(floor.read_text(encoding="utf-8"), wanted[floor])):
        sys.stderr.write(
            f"{floor} states a higher share of {', '.join(fallen)}: support what was dropped, or say why\n"
        )
        return 1
    for path in stale:
        if check:
            sys.stderr.write(f"{path} is out of date: run {COMMAND}\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
