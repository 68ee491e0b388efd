"""Layers of values to one :class:`RunConfig`: precedence, derivation, rules, and the source of every value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mindspeed_llm.config.derive import derive, remarks
from mindspeed_llm.config.option import names
from mindspeed_llm.config.rules import RULES, Rule, broken_rules
from mindspeed_llm.config.run import SECTIONS, RunConfig
from mindspeed_llm.config.schema import FieldSpec, field_table
from mindspeed_llm.config.values import convert
from mindspeed_llm.errors import ConfigError

DERIVED = "derived"

# What decides the number, names or shapes of a model's tensors.
SHAPE_FIELDS = names(
    """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
    untie_embeddings_and_output_weights add_bias_linear add_qkv_bias gated_linear_unit normalization qk_layernorm
    position_embedding_type softmax_type pre_norm post_norm qk_norm_over_heads qk_norm_after_rotary
    embedding_layernorm multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    attention_output_gate num_moe_experts
    moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq
    moe_router_enable_expert_bias mtp_num_layers
    """
)


ARCHITECTURE_FIELDS = SHAPE_FIELDS + names(
    """rotary_base rotary_percent rotary_interleaved rope_scaling_type rope_scaling_factor
    rope_scaling_original_max_position_embeddings low_freq_factor high_freq_factor beta_fast beta_slow
    rope_scaling_truncate rope_scaling_mscale rope_scaling_mscale_all_dim rope_scaling_attention_factor
    layernorm_epsilon
    rotary_base_local long_factor short_factor no_rope_freq
    layernorm_zero_centered_gamma activation_func window_size window_attn_skip_freq softmax_scale
    embedding_multiplier residual_multiplier output_multiplier output_logit_softcapping attn_logit_softcapping
    normalize_output_weight activation_func_clamp_value glu_linear_offset
    moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_num_groups
    moe_router_group_topk moe_router_group_experts moe_router_topk_scaling_factor moe_apply_probs_on_input
    """
)
"""What decides what a model computes from its tensors; a resumed run cannot change it."""


@dataclass(frozen=True)
class Layer:
    """Values of one origin, by field name; raw text and plain Python values alike.

    Attributes:
        source: where they come from, as the start-up list shows it.
        values: by field name.
        binding: they describe weights that will be loaded, so a later layer cannot change shapes.
    """

    source: str
    values: Mapping[str, object]
    binding: bool = False


def from_values(values: Mapping[str, object], *, world_size: int = 1) -> RunConfig:
    """A configuration from flat field names, as Python code and tests give it.

    Raises:
        ConfigError: unknown names, values of the wrong type, or rules that do not hold; all of them together.
    """
    return resolve([Layer("python", values)], world_size=world_size)


def resolve(
    layers: Sequence[Layer],
    *,
    world_size: int = 1,
    notices: Sequence[str] = (),
    rules: Sequence[Rule] = RULES,
) -> RunConfig:
    """Merge ``layers``, lowest precedence first, derive what follows, and check the rules.

    Args:
        layers: values by field name, each layer with its source.
        world_size: number of processes of the run.
        notices: what start-up must say already, from reading the sources.
        rules: what must hold.

    Raises:
        ConfigError: all problems of values, or else all rules that do not hold, shown together.
    """
    merged = _Merge()
    for layer in layers:
        merged.add(layer)
    if merged.errors:
        raise ConfigError.collect(merged.errors)
    values = {name: spec.default for name, spec in field_table().items()} | merged.values
    values["world_size"] = world_size
    derived, reasons = derive(values, merged.values)
    said = [*notices, *merged.notices]
    for name, why in reasons.items():
        if name in merged.values:
            flag = field_table()[name].flag
            said.append(f"{flag}: {values[name]} ({merged.sources[name]}) becomes {derived[name]}: {why}")
    said += remarks(derived)
    config = assemble(derived, merged.sources | dict.fromkeys(reasons, DERIVED), tuple(said))
    errors = broken_rules(config, rules)
    if errors:
        raise ConfigError.collect(errors)
    return config


class _Merge:
    """The layers so far: values with their sources, what weights bind, errors and notices."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.bound: dict[str, str] = {}
        self.errors: list[ConfigError] = []
        self.notices: list[str] = []

    def add(self, layer: Layer) -> None:
        for name, raw in layer.values.items():
            spec = field_table().get(name)
            if spec is None or not spec.option.is_flag:
                self.errors.append(unknown_name(name, layer.source))
                continue
            try:
                value = convert(spec, raw)
            except ConfigError as error:
                self.errors.append(error)
                continue
            self._set(spec, value, layer)

    def _set(self, spec: FieldSpec, value: object, layer: Layer) -> None:
        name = spec.name
        changes = name in self.values and self.values[name] != value
        if changes and name in self.bound:
            self.errors.append(
                ConfigError(
                    f"{spec.flag} contradicts the weights that are loaded",
                    got=f"{value} ({layer.source})",
                    allowed=f"{self.values[name]} ({self.bound[name]})",
                    fix=f"leave out {spec.flag}, or load other weights",
                )
            )
            return
        if changes:
            self.notices.append(
                f"{spec.flag}: {self.values[name]} ({self.sources[name]}) is overridden by {value} ({layer.source})"
            )
        if layer.binding and name in SHAPE_FIELDS:
            self.bound[name] = layer.source
        self.values[name], self.sources[name] = value, layer.source


def unknown_name(name: str, source: str) -> ConfigError:
    """The error for a field name that no section has, with the nearest ones."""
    near = difflib.get_close_matches(name, field_table(), n=3)
    return ConfigError(f"{name} is not a known option ({source})", allowed=", ".join(near) or None)


def assemble(values: Mapping[str, Any], sources: Mapping[str, str], notices: tuple[str, ...]) -> RunConfig:
    """Flat values to sections."""
    by_section: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, spec in field_table().items():
        by_section[spec.section][name] = values[name]
    parts = {section: cls(**by_section[section]) for section, cls in SECTIONS.items()}
    return RunConfig(**parts, sources=MappingProxyType(dict(sources)), notices=notices)


@dataclass(frozen=True)
class Provenance:
    """One value that is not at its default, and who set it."""

    section: str
    name: str
    value: object
    source: str


def provenance(config: RunConfig) -> list[Provenance]:
    """Every value of ``config`` that differs from its default, in the order of the sections."""
    return [
        Provenance(spec.section, name, config.value(name), config.sources.get(name, "launcher"))
        for name, spec in field_table().items()
        if config.value(name) != spec.default
    ]


def format_non_default(config: RunConfig) -> str:
    """The values that are not at their default, one a line with its source, as start-up shows them."""
    rows = provenance(config)
    width = max((len(row.name) for row in rows), default=0)
    lines: list[str] = []
    for section in SECTIONS:
        members = [row for row in rows if row.section == section]
        if members:
            lines.append(f"[{section}]")
            lines += [f"  {row.name:<{width}} = {row.value}  ({row.source})" for row in members]
    return "\n".join(lines)
