"""A family of a model, put together from rules and weights of those that there are."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mindspeed_llm.config.schema import field_table
from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models import family as vocabulary
from mindspeed_llm.models import rules
from mindspeed_llm.models.family import Const, Copy, ModelFamily, Preset, QkvStacked
from mindspeed_llm.tools.new_family.folder import Model
from mindspeed_llm.tools.new_family.keys import Chooser, Reading
from mindspeed_llm.tools.new_family.library import Fragment, Known, Needs
from mindspeed_llm.tools.new_family.places import LAYER, Placing, place_tensors
from mindspeed_llm.tools.new_family.tiny import tiny_config

_QKV = LAYER + "self_attention.linear_qkv."
ROOT_SCALED, ROWS_BY_GROUP = "root_scaled_embeddings", "qkv_rows_by_group"
UNSAID = ("layernorm_zero_centered_gamma", "rotary_interleaved", ROOT_SCALED, ROWS_BY_GROUP)
"""What neither config.json nor a shape tells. It is taken as in the nearest family until the proof says otherwise."""


@dataclass(frozen=True)
class Draft:
    """A drafted family.

    Attributes:
        family: itself.
        model: that it was drafted from.
        nearest: the family that it is most like.
        reading: its rules.
        placing: its weights.
        unsaid: what was taken for granted.
        left: what a person has to see to: a line each.
    """

    family: ModelFamily
    model: Model
    nearest: str
    reading: Reading
    placing: Placing
    unsaid: Mapping[str, bool]
    left: list[str] = field(default_factory=list)


def nearest_first(model: Model, library: Sequence[Known]) -> list[Known]:
    """Families by how much of the model they know: names of tensors, keys of config.json, and the sound of its name."""
    templates, keys = set(model.templates), set(model.config)

    def nearness(known: Known) -> float:
        names = {name for weight in known.maps for name in weight.hf}
        sound = difflib.SequenceMatcher(None, known.family.hf_model_type, str(model.config.get("model_type"))).ratio()
        return len(templates & names) / len(templates | names) + len(keys & known.keys) / len(keys) + sound / 2

    return sorted(library, key=lambda known: (-nearness(known), known.family.name))


def draft_family(
    model: Model, library: Sequence[Known], name: str, unsaid: Mapping[str, bool] = MappingProxyType({})
) -> Draft:
    """The family of ``model``.

    Args:
        library: families to draw from.
        name: of the new one.
        unsaid: of :data:`UNSAID`, what is not as in the nearest family.

    Raises:
        ConversionError: there is nothing to draw from.
    """
    if not library or not model.templates:
        raise ConversionError("there is nothing to draft from", got=f"{len(model.templates)} tensors in {model.folder}")
    library = nearest_first(model, library)
    nearest = library[0]
    taken = {**_unsaid_of(nearest), **unsaid}
    refused: set[str] = set()
    while True:
        reading = Chooser(model, library, refused).choose()
        placing = place_tensors(model, _defaults() | reading.values, library)
        facts = _facts(placing)
        wrong = [
            fragment.text
            for fragment in reading.fragments
            for rule in fragment.rules
            if any(facts.get(n, v) != v for n, v in rule.to_values(model.config).items() if n in facts)
        ]
        if not wrong:
            break
        refused |= set(wrong)
    _turn_rows(placing, taken)
    left = _left(model, reading, placing)
    _complete(reading, placing, facts, taken, nearest, left)
    family = ModelFamily(
        name=name,
        hf_model_type=str(model.config.get("model_type", name)),
        hf_architectures=tuple(model.config.get("architectures") or ()),
        config=tuple(rule for fragment in reading.fragments for rule in fragment.rules),
        weights=(*placing.maps, *placing.drops),
        chat_template=nearest.family.chat_template,
        tiny={},
    )
    family = replace(family, tiny=tiny_config(family, model, reading))
    return Draft(family, model, nearest.family.name, reading, placing, taken, left)


def _defaults() -> dict[str, Any]:
    return {name: spec.default for name, spec in field_table().items()}


def _unsaid_of(nearest: Known) -> dict[str, bool]:
    constant: dict[str, Any] = {}
    for rule in nearest.family.config:
        if isinstance(rule, Const):
            constant |= rule.to_values({})
    found = {name: bool(constant.get(name, False)) for name in UNSAID}
    found[ROOT_SCALED] = rules.ROOT_SCALED_EMBEDDINGS in nearest.family.config
    qkv = next((weight for weight in nearest.maps if weight.mcore == _QKV + "weight"), None)
    found[ROWS_BY_GROUP] = qkv is not None and len(qkv.hf) == 1 and isinstance(qkv.transform, Copy)
    return found


def _turn_rows(placing: Placing, taken: dict[str, bool]) -> None:
    """The order of the rows of one matrix for queries, keys and values."""
    fused = [weight for weight in placing.maps if weight.mcore.startswith(_QKV) and len(weight.hf) == 1]
    if not fused:
        del taken[ROWS_BY_GROUP]
    for weight in fused:
        turned = replace(weight, transform=Copy() if taken[ROWS_BY_GROUP] else QkvStacked())
        placing.maps[placing.maps.index(weight)] = turned


def _facts(placing: Placing) -> dict[str, Any]:
    """Fields that the tensors tell."""
    has = {weight.mcore for weight in placing.maps}
    fc1, q_norm = (
        placing.map_of(LAYER + "mlp.linear_fc1.weight"),
        placing.map_of(LAYER + "self_attention.q_layernorm.weight"),
    )
    facts: dict[str, Any] = {
        "normalization": "LayerNorm" if "decoder.final_layernorm.bias" in has else "RMSNorm",
        "gated_linear_unit": fc1 is None or len(fc1.hf) == 2 or fc1.shard == vocabulary.Column(parts=2),
        "pre_norm": LAYER + "input_layernorm.weight" in has or LAYER + "post_attn_norm.weight" not in has,
        "post_norm": LAYER + "post_attn_norm.weight" in has,
        "embedding_layernorm": "embedding.norm.weight" in has,
        "qk_layernorm": q_norm is not None and q_norm.shard == vocabulary.Replicated(),
        "qk_norm_over_heads": q_norm is not None and q_norm.shard != vocabulary.Replicated(),
        "add_bias_linear": LAYER + "mlp.linear_fc2.bias" in has,
        "add_qkv_bias": _QKV + "bias" in has,
    }
    if "embedding.position_embeddings.weight" in has:
        facts["position_embedding_type"] = "learned_absolute"
    return facts


def _left(model: Model, reading: Reading, placing: Placing) -> list[str]:
    """What has no place, and what it would need."""
    templates = model.templates
    left = [f"key {key}: {what}" for key, what in reading.left.items()]
    left += [
        f"tensor {name} {list(templates[name])}: needs a ParamMap, or a Drop if nobody needs it"
        for name in placing.left
    ]
    left += [
        f"tensor {name}: not every layer has it, or not in one shape, which the weight table cannot say"
        for name in model.irregular
    ]
    left += [f"megatron-core's {name}: needs a ParamMap, and no tensor fits its shape" for name in placing.open]
    has = {weight.mcore for weight in placing.maps}
    proj, fc2 = (LAYER + f"{name}.bias" in has for name in ("self_attention.linear_proj", "mlp.linear_fc2"))
    if proj != fc2:
        left.append(
            "biases of attention's output and of the MLP: megatron-core has one switch (add_bias_linear) for both"
        )
    return left


def _complete(
    reading: Reading,
    placing: Placing,
    facts: Mapping[str, Any],
    taken: Mapping[str, bool],
    nearest: Known,
    left: list[str],
) -> None:
    """The constants, once everything else is known."""
    values = reading.values
    for name in (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "vocab_size",
        "num_attention_heads",
        "layernorm_epsilon",
    ):
        if name not in values:
            left.append(f"our {name}: no key of config.json says it in a way that a known rule reads")
    if taken.get(ROOT_SCALED) and "embedding_multiplier" not in values:
        rule = rules.ROOT_SCALED_EMBEDDINGS
        reading.fragments.append(
            Fragment("ROOT_SCALED_EMBEDDINGS", (rule,), Needs().of_names(rules, "ROOT_SCALED_EMBEDDINGS"))
        )
        values["embedding_multiplier"] = values.get("hidden_size", 1) ** 0.5
    plain = rules.plain().to_values({})
    told = {**facts, **{name: taken[name] for name in taken if name in plain}}
    others = [name for name in plain if name in values]
    changes = {name: told[name] for name in plain if name in told and name not in values and told[name] != plain[name]}
    text = ", ".join(
        [*(f'"{name}"' for name in others), *(f"{name}={_literal(value)}" for name, value in changes.items())]
    )
    reading.take(_constant(f"plain({text})", rules.plain(*others, **changes), rules), changes)
    constants = {name: facts[name] for name in ("add_bias_linear", "add_qkv_bias") if name not in values}
    if "position_embedding_type" not in values:
        if "position_embedding_type" in facts:
            constants["position_embedding_type"] = facts["position_embedding_type"]
        else:
            left.append("positions: neither config.json nor a tensor says of which kind they are")
    if "activation_func" not in values:
        left.append("the non-linearity of the MLP: no key of config.json says it")
    if constants:
        text = ", ".join(f"{name}={_literal(value)}" for name, value in constants.items())
        reading.take(_constant(f"Const({text})", Const(**constants), vocabulary), constants)
    silent = {name: 0.0 for name in ("attention_dropout", "hidden_dropout") if name not in values}
    if silent:
        text = ", ".join(f"{name}={value}" for name, value in silent.items())
        reading.take(_constant(f"Preset({text})", Preset(**silent), vocabulary), silent)


def _constant(text: str, rule: Any, module: Any) -> Fragment:
    return Fragment(text, (rule,), Needs().of_names(module, text.partition("(")[0]))


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
