"""Whether a layout can hold a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_llm.checkpoint.convert.streams import Target
from mindspeed_llm.checkpoint.engine import check_heads
from mindspeed_llm.errors import ConfigError


def check_target(target: Target, values: Mapping[str, Any]) -> None:
    """Refuses a layout that would drop layers or cannot cut the tensors.

    Args:
        target: sizes of at least 1.
        values: fields of the run configuration that describe the model.

    Raises:
        ConfigError: all that is wrong, with the numbers and the flags.
        ConversionError: heads that cannot be cut.
    """
    check_heads(values, target.tp, "--target-tensor-parallel-size")
    errors = [*_layers(target, values["num_layers"])]
    if values["ffn_hidden_size"] % target.tp:
        errors.append(
            ConfigError(
                "the feed-forward block cannot be cut over the tensor-parallel ranks",
                got=f"ffn_hidden_size {values['ffn_hidden_size']}, --target-tensor-parallel-size {target.tp}",
            )
        )
    experts = values["num_moe_experts"] or 0
    if target.ep > 1 and (not experts or experts % target.ep):
        errors.append(
            ConfigError(
                "experts do not divide over the expert-parallel ranks",
                got=f"{experts or 'no'} experts, --target-expert-parallel-size {target.ep}",
            )
        )
    if errors:
        raise ConfigError.collect(errors)


def _layers(target: Target, layers: int) -> list[ConfigError]:
    """What is wrong with how layers are placed on stages; rules of MindSpeed-LLM's converter."""
    errors: list[ConfigError] = []
    noop = target.noop_layers
    places = layers + len(noop)
    if len(set(noop)) < len(noop) or any(not 0 <= place < places for place in noop):
        errors.append(
            ConfigError(
                "--noop-layers does not name places of the model",
                got=",".join(map(str, noop)),
                allowed=f"different numbers from 0 to {places - 1}: {layers} layers and {len(noop)} empty places",
            )
        )
    if target.layer_list is not None:
        return errors + _layer_list(target, target.layer_list, layers)
    if places % target.pp:
        errors.append(
            ConfigError(
                "layers do not divide over the pipeline stages",
                got=f"{places} layers, --target-pipeline-parallel-size {target.pp}",
                fix="another size, --num-layer-list, or --noop-layers",
            )
        )
    elif (chunk := target.layers_per_virtual_stage) is not None:
        stage = places // target.pp
        if chunk >= stage or stage % chunk:
            errors.append(
                ConfigError(
                    "layers of a pipeline stage do not divide into virtual stages",
                    got=f"{stage} layers a stage, --num-layers-per-virtual-pipeline-stage {chunk}",
                    allowed=f"a divisor of {stage} below it",
                )
            )
    return errors


def _layer_list(target: Target, given: tuple[int, ...], layers: int) -> list[ConfigError]:
    errors: list[ConfigError] = []
    clash = {
        "--num-layers-per-virtual-pipeline-stage": target.layers_per_virtual_stage is not None,
        "--noop-layers": bool(target.noop_layers),
    }
    errors += [ConfigError(f"--num-layer-list does not go with {flag}") for flag, on in clash.items() if on]
    if len(given) != target.pp or sum(given) != layers or min(given, default=0) < 1:
        errors.append(
            ConfigError(
                "--num-layer-list does not place every layer",
                got=f"{','.join(map(str, given))}: {len(given)} stages, {sum(given)} layers",
                allowed=f"--target-pipeline-parallel-size {target.pp} numbers above 0 that make {layers}",
            )
        )
    return errors
