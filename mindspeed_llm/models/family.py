"""What a model family is: plain data that says how a Hugging Face config and its weights map to megatron-core.

Nothing here imports torch. ``config`` rules translate ``config.json`` to our field names and back; ``weights`` name
every tensor on both sides, how one is made of the others and how it is cut over tensor-parallel ranks. ``checkpoint/``
executes what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import ConversionError

Values = Mapping[str, Any]
"""Field names of the run configuration (megatron-core's own names) to values."""


class _Required:
    """Marks a key without which a config cannot be read."""


REQUIRED = _Required()


class Rule:
    """How some keys of config.json and some fields of ours say the same thing.

    Attributes:
        hf_keys: the keys of config.json that belong to this rule, and to no other.
        depends: further fields that :meth:`to_hf` reads: when one of them changed, the keys are written anew.
        recipe: the fields steer training only: an export keeps what the source config says.
    """

    hf_keys: tuple[str, ...]
    depends: tuple[str, ...]
    recipe: bool

    def to_values(self, hf_config: Values) -> dict[str, Any]:
        """Our fields for a config.json. Raises ConversionError for what we cannot compute with."""
        raise NotImplementedError

    def to_hf(self, values: Values) -> dict[str, Any]:
        """Keys of config.json for our fields. Raises ConversionError for what the family cannot express."""
        raise NotImplementedError


class Rename(Rule):
    """One Hugging Face key is one field of ours.

    ``default`` is what transformers takes when the key is absent or null.
    """

    def __init__(self, hf: str, ours: str, *, default: Any = REQUIRED, recipe: bool = False) -> None:
        self.hf_keys, self.depends, self.recipe = (hf,), (), recipe
        self._hf, self._ours, self._default = hf, ours, default

    def to_values(self, hf_config: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        value = hf_config.get(self._hf)
        if value is None and isinstance(self._default, _Required):
            raise ConversionError(f"config.json lacks {self._hf!r}")
        return {self._ours: self._default if value is None else value}

    def to_hf(self, values: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {self._hf: values[self._ours]}


class Const(Rule):
    """Fields that are the same for every model of the family. A run that differs cannot be written as this family."""

    def __init__(self, **ours: Any) -> None:
        self.hf_keys, self.depends, self.recipe = (), (), False
        self._ours = ours

    def to_values(self, hf_config: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        return dict(self._ours)

    def to_hf(self, values: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        for name, expected in self._ours.items():
            if values[name] != expected:
                raise ConversionError(
                    f"{name} has no place in this family's config.json", got=values[name], allowed=expected
                )
        return {}


class Preset(Rule):
    """Fields that the family sets and a run may change, of which config.json knows nothing (Megatron's dropout)."""

    def __init__(self, **ours: Any) -> None:
        self.hf_keys, self.depends, self.recipe = (), (), True
        self._ours = ours

    def to_values(self, hf_config: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        return dict(self._ours)

    def to_hf(self, values: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {}


class Derived(Rule):
    """Several keys and several fields that only make sense together: two functions."""

    def __init__(
        self,
        *hf_keys: str,
        to_values: Callable[[Values], dict[str, Any]],
        to_hf: Callable[[Values], dict[str, Any]],
        depends: tuple[str, ...] = (),
    ) -> None:
        self.hf_keys, self.depends, self.recipe = hf_keys, depends, False
        self._to_values, self._to_hf = to_values, to_hf

    def to_values(self, hf_config: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        return self._to_values(hf_config)

    def to_hf(self, values: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        return self._to_hf(values)


class Expect(Rule):
    """A key that is left out, or has one of the values ``allowed``. It is not written, only kept."""

    def __init__(self, hf: str, *allowed: Any, why: str) -> None:
        self.hf_keys, self.depends, self.recipe = (hf,), (), True
        self._allowed, self._why = allowed, why

    def to_values(self, hf_config: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        (key,) = self.hf_keys
        if key in hf_config and hf_config[key] not in self._allowed:
            raise ConversionError(
                f"config.json: {key} is not supported for this family ({self._why})",
                got=hf_config[key],
                allowed=" or ".join(map(repr, self._allowed)),
            )
        return {}

    def to_hf(self, values: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {}


class Ignore(Rule):
    """Keys that change nothing of what we compute, and why."""

    def __init__(self, *hf_keys: str, why: str) -> None:
        self.hf_keys, self.depends, self.recipe = hf_keys, (), True
        self.why = why

    def to_values(self, hf_config: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {}

    def to_hf(self, values: Values) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {}


@dataclass(frozen=True)
class Copy:
    """The tensor is the same on both sides."""


@dataclass(frozen=True)
class QkvByGroup:
    """q, k, v rows in KV-group order, as megatron-core's ``linear_qkv``: ``[q heads of group 0, k 0, v 0, q ...]``."""


@dataclass(frozen=True)
class GateUp:
    """gate rows, then up rows, as megatron-core's gated ``linear_fc1``."""


@dataclass(frozen=True)
class QkvStacked:
    """One Hugging Face tensor of all q rows, then all k rows, then all v rows; megatron-core has KV-group order."""


Transform = Copy | QkvByGroup | QkvStacked | GateUp


@dataclass(frozen=True)
class Replicated:
    """Every tensor-parallel rank holds all of it."""


@dataclass(frozen=True)
class Column:
    """Cut over dim 0. With ``parts`` the tensor is that many equal stacks, each cut by itself (gate and up)."""

    parts: int = 1


@dataclass(frozen=True)
class Row:
    """Cut over dim 1."""


@dataclass(frozen=True)
class Vocab:
    """Cut over dim 0 after the vocabulary was padded with zero rows at its end."""


Shard = Replicated | Column | Row | Vocab


@dataclass(frozen=True)
class ParamMap:
    """One megatron-core tensor and the Hugging Face tensors it is made of. ``{l}`` is the layer, ``{e}`` the expert,
    counted from 0 over the whole model.

    Args:
        when: a field that must be true (or not None, not 0) for the tensor to exist.
        unless: a field that must not be.
        transposed: the Hugging Face tensors stand as ``[in, out]`` (GPT-2's Conv1D), megatron-core's as ``[out, in]``.
        tied_to: with tied embeddings the tensor is no weight of its own but a copy of this one.
        trained: it gets a gradient.
        experts: the tensor is in layers with a mixture of experts alone, or in the others alone; None: in every layer.
    """

    mcore: str
    hf: tuple[str, ...]
    transform: Transform = Copy()
    shard: Shard = Replicated()
    when: str | None = None
    unless: str | None = None
    transposed: bool = False
    tied_to: str | None = None
    experts: bool | None = None
    trained: bool = True


@dataclass(frozen=True)
class Drop:
    """A tensor that some checkpoints carry and nobody needs."""

    hf: str
    why: str


Weight = ParamMap | Drop


@dataclass(frozen=True)
class ModelFamily:
    """Everything the suite knows about a family of models.

    Args:
        name: as ``--model-family`` and the docs call it; Hugging Face's ``model_type`` in most cases.
        hf_model_type: ``model_type`` in config.json.
        hf_architectures: the ``architectures`` whose weights this table describes; the first is written on export.
        config: rules; each key of config.json belongs to one of them.
        weights: the weight table.
        chat_template: name of the chat template that goes with the family.
        tiny: config.json values of a model small enough for the parity tests.
    """

    name: str
    hf_model_type: str
    hf_architectures: tuple[str, ...]
    config: tuple[Rule, ...]
    weights: tuple[Weight, ...]
    chat_template: str
    tiny: Mapping[str, Any]

    def config_to_values(self, hf_config: Values) -> dict[str, Any]:
        """Our fields for a ``config.json``.

        Raises:
            ConversionError: a key is missing, has a value we cannot compute with, or is not known at all; every problem
                is in the one error.
        """
        problems: list[str] = []
        values: dict[str, Any] = {}
        known = {key for rule in self.config for key in rule.hf_keys}
        unknown = sorted(key for key in hf_config if key not in known)
        if unknown:
            problems.append(
                f"keys of config.json unknown for {self.name} (they could change the model): {', '.join(unknown)}"
            )
        for rule in self.config:
            try:
                values.update(rule.to_values(hf_config))
            except ConversionError as error:
                problems.append(str(error))
        if problems:
            raise ConversionError(f"config.json cannot be read as {self.name}:\n" + "\n".join(problems))
        return values

    def values_to_config(self, values: Values, dtype: str, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """``config.json`` for a run.

        Keys of ``source`` (the config the run started from) stay as they are wherever they still say the same, so that
        a round trip changes nothing and token ids survive.

        Args:
            dtype: of the weights beside it, as torch spells it (``bfloat16``). Written as ``dtype`` and as
                ``torch_dtype``, which transformers before 4.56 reads.

        Raises:
            ConversionError: the run has a value that the family's config.json cannot express.
        """
        result = dict(source or {})
        before = self.config_to_values(source) if source else {}
        problems: list[str] = []
        for rule in self.config:
            if source and _unchanged(rule, source, before, values):
                continue
            try:
                written = rule.to_hf(values)
            except ConversionError as error:
                problems.append(str(error))
                continue
            for key in rule.hf_keys:
                result.pop(key, None)
            result.update(written)
        if problems:
            raise ConversionError(f"the run cannot be written as {self.name}:\n" + "\n".join(problems))
        result.setdefault("architectures", [self.hf_architectures[0]])
        result["model_type"] = self.hf_model_type
        result["dtype"] = result["torch_dtype"] = dtype
        return dict(sorted(result.items()))


def _unchanged(rule: Rule, source: Values, before: Values, values: Values) -> bool:
    """Whether the keys of ``rule`` in ``source`` still describe the run."""
    if rule.recipe:
        return True
    if isinstance(rule, Const):
        return False
    same = all(values[name] == value for name, value in rule.to_values(source).items())
    return same and all(values[name] == before[name] for name in rule.depends)


def values_of(cfg: RunConfig) -> dict[str, Any]:
    """The fields of a run that describe the model, in one flat mapping."""
    return {**vars(cfg.model), **vars(cfg.transformer)}
