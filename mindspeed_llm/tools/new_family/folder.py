"""What a Hugging Face folder says of its model without a tensor being read: configuration, names, shapes, its class.

Only classes of the installed transformers are asked. Code that comes with a folder never runs.
"""

# pyright: basic
# transformers' classes have no types.

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.errors import CheckpointError, ConversionError

Shape = tuple[int, ...]
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_PLAIN = re.compile(r"[\w.-]+")
_LARGEST = {"num_hidden_layers": 1000, "hidden_size": 10**6, "vocab_size": 10**7, "num_attention_heads": 10**5}
"""Beyond these a model whose weights are not there is not described by its class."""
_REFUSALS = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError)
"""What transformers' classes raise on configurations that they do not take."""


class Class:
    """The class that transformers has for a model; false where it has none.

    Args:
        name: as config.json's ``architectures`` has it.
    """

    def __init__(self, name: str) -> None:
        import transformers

        found = getattr(transformers, name, None)
        self._kind: Any = found if hasattr(found, "config_class") else None
        self._filled: dict[str, dict[str, Any] | None] = {}
        self.name = name

    def __bool__(self) -> bool:
        return self._kind is not None

    def _read(self, config: Mapping[str, Any]) -> Any:
        from transformers.utils import logging

        # No padding token: its default id may be beyond a small vocabulary.
        plain = {"pad_token_id": None, **json.loads(json.dumps(config))}
        # It warns of configurations that only answer a question here.
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            return self._kind.config_class.from_dict(plain)
        finally:
            logging.set_verbosity(verbosity)

    def filled(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """``config`` as transformers reads it, its defaults filled in; None where it refuses it or has no class."""
        if not self:
            return None
        from huggingface_hub.errors import StrictDataclassError

        text = json.dumps(config, sort_keys=True)
        if text not in self._filled:
            try:
                self._filled[text] = self._read(config).to_dict()
            except (StrictDataclassError, *_REFUSALS):
                self._filled[text] = None
        return self._filled[text]

    @cached_property
    def silent(self) -> dict[str, Any]:
        """What an empty config.json means."""
        return self.filled({}) or {}

    def build(self, config: Mapping[str, Any]) -> Any:
        """A model with random weights.

        Raises:
            ConversionError: transformers cannot make one.
        """
        from huggingface_hub.errors import StrictDataclassError

        try:
            return self._kind(self._read(config))
        except (StrictDataclassError, *_REFUSALS) as error:
            raise ConversionError(
                f"transformers cannot build {self.name} from this config.json", got=str(error).strip().splitlines()[-1]
            ) from error

    def shapes(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        """Of the tensors that ``save_pretrained`` writes for ``config``; no memory is taken.

        Raises:
            ConversionError: transformers cannot make such a model, or its sizes are beyond reason.
        """
        import torch

        read = self._read(config) if self.filled(config) is not None else None
        for name, most in _LARGEST.items():
            size = getattr(read, name, None)
            if read is not None and not (isinstance(size, int) and 0 < size <= most):
                raise ConversionError(f"config.json: {name} is no size of a model", got=size, allowed=f"1 to {most}")
        with torch.device("meta"):
            model = self.build(config)
        tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


@dataclass(frozen=True)
class Model:
    """A model to draft a family of.

    Attributes:
        folder: where it is.
        config: its config.json.
        kind: transformers' class.
        shapes: of each tensor.
    """

    folder: Path
    config: Mapping[str, Any]
    kind: Class
    shapes: Mapping[str, Shape]

    @cached_property
    def full(self) -> Mapping[str, Any]:
        """config.json as transformers reads it, or as it is."""
        return self.kind.filled(self.config) or self.config

    @cached_property
    def layers(self) -> int:
        """Layers that the tensors' names count."""
        return len({match[0] for name in self.shapes if (match := _LAYER.search(name))})

    @cached_property
    def templates(self) -> dict[str, Shape]:
        """Shapes by name, the layer's number written ``{l}``: tensors that every layer has alike, and those outside."""
        found: dict[str, Shape] = {}
        counted: Counter[str] = Counter()
        for name, shape in self.shapes.items():
            template = _LAYER.sub("{l}", name, count=1)
            counted[template] += found.setdefault(template, shape) == shape
        return {
            template: shape
            for template, shape in found.items()
            if counted[template] == (self.layers if "{l}" in template else 1)
        }

    @cached_property
    def irregular(self) -> list[str]:
        """Templates of tensors that only some layers have, or that differ between layers."""
        return sorted({_LAYER.sub("{l}", name, count=1) for name in self.shapes} - set(self.templates))


def read_model(folder: Path) -> Model:
    """The model in ``folder``: config.json, and the headers of its weights; where there are none, transformers' class
    says names and shapes.

    Raises:
        CheckpointError: it is none, or its weights cannot be read and transformers has no class for it.
        ConversionError: config.json holds what no model's does.
    """
    try:
        config = hf_io.read_config(folder)
    except RecursionError:
        raise CheckpointError(f"{folder / hf_io.CONFIG} is nested too deeply to be a model's") from None
    _check(config)
    kind = Class(config["architectures"][0])
    try:
        with ExitStack() as stack:
            shapes = {name: info.shape for name, info in hf_io.open_tensors(folder, stack).tensors.items()}
    except CheckpointError:
        if not kind or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
            raise
        shapes = kind.shapes(config)
    _check_names("tensors", shapes)
    return Model(folder, config, kind, shapes)


def _check(config: Mapping[str, Any]) -> None:
    """Refuse values that no config.json of a model has; names go into source code."""
    _check_names("keys of config.json", config)
    architectures, kind = config.get("architectures"), config.get("model_type")
    if not (isinstance(architectures, list) and architectures and all(isinstance(name, str) for name in architectures)):
        raise ConversionError("config.json: architectures is a list of names", got=repr(architectures)[:80])
    if not isinstance(kind, str):
        raise ConversionError("config.json: model_type is a name", got=repr(kind)[:80])
    _check_names("architectures and model_type", [kind, *architectures])
    wild = [key for key, value in config.items() if any(map(_is_wild, _leaves(value)))]
    if wild:
        raise ConversionError("config.json has numbers or texts that no model has", got=", ".join(sorted(wild)[:8]))


def _check_names(what: str, names: Any) -> None:
    strange = [name for name in names if not _PLAIN.fullmatch(name)]
    if strange:
        raise ConversionError(
            f"{what} have names that are none", got=repr(strange[0])[:80], allowed="letters, digits and . _ -"
        )


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _is_wild(value: object) -> bool:
    # A NaN is not below anything.
    return (isinstance(value, int | float) and not abs(value) < 2**63) or (isinstance(value, str) and len(value) > 9999)
