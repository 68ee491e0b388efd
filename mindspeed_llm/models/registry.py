"""Finds the family of a Hugging Face config. Families are the files of this package, and entry points of others."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import mindspeed_llm.models as package
from mindspeed_llm.config.resolve import Layer
from mindspeed_llm.errors import ConfigError, ConversionError
from mindspeed_llm.models.family import ModelFamily

ENTRY_POINT_GROUP = "mindspeed_llm.families"
CONFIG = "config.json"
CONFIGS = Path(__file__).with_name("configs")
"""A folder for each published model whose architecture ``--hf-config`` knows by name."""
_NOT_FAMILIES = frozenset({"blocks", "experts", "family", "latent", "registry", "rope", "rules", "windows"})


@functools.cache
def families() -> Mapping[str, ModelFamily]:
    """Every family by name: one per file here, then other packages' (entry points ``mindspeed_llm.families``)."""
    found: list[ModelFamily] = []
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in _NOT_FAMILIES:
            found.append(importlib.import_module(f"{package.__name__}.{module.name}").FAMILY)
    found.extend(point.load() for point in entry_points(group=ENTRY_POINT_GROUP))
    result: dict[str, ModelFamily] = {}
    for family in found:
        if family.name in result:
            raise ConversionError(f"two model families are called {family.name!r}", fix="uninstall one of the packages")
        result[family.name] = family
    return result


UPSTREAM_NAMES: Mapping[str, str] = {
    "llama2": "llama",
    "qwen25": "qwen2",
    "seed-oss": "seed_oss",
    "magistral": "mistral",
    "phi3.5": "phi3",
    "baichuan2": "baichuan",
    "chatglm3": "chatglm",
    "bloom_3b": "bloom",
}
"""What ``--model-type-hf`` calls a family in MindSpeed-LLM, where it is not the name here."""


def family_by_name(name: str) -> ModelFamily:
    """The family called ``name``, here or in MindSpeed-LLM; raises ConversionError with the list of names."""
    try:
        return families()[UPSTREAM_NAMES.get(name, name)]
    except KeyError:
        raise ConversionError("unknown model family", got=name, allowed=", ".join(sorted(families()))) from None


_CANNOT: Mapping[str, str] = {
    "PhiMoEForCausalLM": "its sparsemixer weighs each of a token's two experts by a softmax of its own",
    "PhimoeForCausalLM": "its sparsemixer weighs each of a token's two experts by a softmax of its own",
    "Llama4ForCausalLM": "its layers attend within chunks, and scale queries by their position",
    "Llama4ForConditionalGeneration": "its layers attend within chunks, and scale queries by their position",
    "MiniMaxForCausalLM": "most of its layers have linear attention",
    "MiniMaxText01ForCausalLM": "most of its layers have linear attention",
}
"""Why published architectures that are asked for have no family: what the layers here do not compute."""


def family_for(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family whose weights ``config.json`` announces: by ``architectures``, of several the one of its
    ``model_type``; else by ``model_type``.

    Raises:
        ConversionError: no family has it; the message lists those there are.
    """
    architectures: list[str] = hf_config.get("architectures") or []
    model_type = hf_config.get("model_type")
    found = [
        family
        for family in families().values()
        if any(name in family.hf_architectures for name in architectures)
        or (not architectures and model_type == family.hf_model_type)
    ]
    if found:
        return next((family for family in found if family.hf_model_type == model_type), found[0])
    reasons = [_CANNOT[name] for name in architectures if name in _CANNOT]
    known = (f"{name} ({', '.join(family.hf_architectures)})" for name, family in sorted(families().items()))
    raise ConversionError(
        "; ".join(["no model family for this config.json", *reasons]),
        got=", ".join(architectures) or f"model_type {model_type}",
        allowed="; ".join(known),
    )


def packaged_configs() -> Mapping[str, Path]:
    """Folders with the config.json of published models, by the model's name, in the order of the names."""
    return {path.parent.name: path.parent for path in sorted(CONFIGS.glob(f"*/{CONFIG}"))}


def hf_config_path(given: str) -> Path:
    """What ``--hf-config`` names: a folder or file that is there, else the folder of the published model of that name.

    Raises:
        ConfigError: neither is there; the message has the names that come near.
    """
    path = Path(given)
    if (path.suffix == ".json" and path.is_file()) or (path / CONFIG).is_file():
        return path
    known = packaged_configs()
    if given in known:
        return known[given]
    by_key = {name.lower(): name for name in known}
    near = difflib.get_close_matches(path.name.lower(), by_key, n=4, cutoff=0.5) or sorted(by_key)
    raise ConfigError(
        f"--hf-config: there is no {path / CONFIG if path.is_dir() else path}, and no published model of that name",
        allowed=f"a folder with {CONFIG}, such a file, or a name such as {', '.join(by_key[key] for key in near)}",
        fix="docs/generated/models.md lists the names",
    )


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def family_layer(given: Mapping[str, Any]) -> Layer | None:
    """What the Hugging Face configuration that the flags name says about the architecture.

    Args:
        given: field values of the other sources: ``load``, ``pretrained_checkpoint``, ``hf_config``, ``model_type_hf``.

    Returns:
        The layer, binding when weights come with it; None when neither field names a Hugging Face configuration.

    Raises:
        ConfigError: ``hf_config`` is missing, or ``load`` is and nothing else gives the architecture, or the file is
            not JSON.
        ConversionError: no family has it, or it cannot be computed with.
    """
    for flag, binding in (("load", True), ("pretrained_checkpoint", True), ("hf_config", False)):
        if given.get(flag) is None:
            continue
        path = hf_config_path(str(given[flag])) if flag == "hf_config" else Path(str(given[flag]))
        path = path / CONFIG if path.is_dir() else path
        if path.suffix != ".json" or not path.exists():
            others = ("num_layers", "hf_config", *(("pretrained_checkpoint",) if flag == "load" else ()))
            if not path.exists() and all(given.get(name) is None for name in others):
                spelled = f"--{flag.replace('_', '-')}"
                raise ConfigError(
                    f"{spelled}: there is no {path}, and nothing else says what the model is",
                    fix=f"correct {spelled}; random weights need --hf-config or the flags of an architecture",
                )
            continue
        try:
            hf_config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON", got=str(error)) from error
        named = given.get("model_type_hf")
        family = family_by_name(str(named)) if named else family_for(hf_config)
        values = {**family.config_to_values(hf_config), "model_type_hf": family.name}
        stored = _DTYPES.get(str(hf_config.get("dtype") or hf_config.get("torch_dtype")))
        if binding and stored is not None and not (given.get("bf16") or given.get("fp16")):
            # What comes back has the dtype of what came in, unless the run computes in another or is told otherwise.
            values["params_dtype"] = stored
        return Layer(f"{family.name} ({path})", values, binding=binding)
    return None
