"""Which tensor of a model is which of megatron-core's: by its name in a known family, else by shape and place."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_llm.checkpoint.convert.shapes import whole_shape
from mindspeed_llm.checkpoint.transforms import part_rows
from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Column, Drop, GateUp, ParamMap, Replicated, Vocab
from mindspeed_llm.models.registry import families
from mindspeed_llm.tools.new_family.folder import Model, Shape
from mindspeed_llm.tools.new_family.library import Known

LAYER = "decoder.layers.{l}."
_WORD_EMBEDDINGS, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_NEAREST, _EXACT, _TAIL, _WORDS, _SHAPE = 6, 5, 4, 3, 1
"""How well a name fits: it stands in the nearest family's table, in another's, ends like one, or says the word."""

_PRE = (LAYER + "input_layernorm.weight", LAYER + "pre_mlp_layernorm.weight")
_POST = (LAYER + "post_attn_norm.weight", LAYER + "post_mlp_layernorm.weight")
_QK_NORMS = (LAYER + "self_attention.q_layernorm.weight", LAYER + "self_attention.k_layernorm.weight")
_GROUPS: tuple[tuple[tuple[str, ...], ...], ...] = (
    ((_WORD_EMBEDDINGS,),),
    (("embedding.position_embeddings.weight",),),
    (("embedding.norm.weight",),),
    ((_HEAD,),),
    ((LAYER + "self_attention.linear_qkv.weight",),),
    ((LAYER + "self_attention.linear_proj.weight",),),
    (_QK_NORMS,),
    ((LAYER + "mlp.linear_fc1.weight",),),
    ((LAYER + "mlp.linear_fc2.weight",),),
    (_PRE, (*_PRE, *_POST), _POST),
    (("decoder.final_layernorm.weight",),),
)
"""Tensors that come together, and the ways in which they may: those that fill a way belong to it."""
_OPTIONAL = frozenset({"embedding.position_embeddings.weight", "embedding.norm.weight", *_QK_NORMS})

_WORDS_OF: Mapping[str, tuple[str, ...]] = {
    "embedding.word_embeddings": (r"\b(embed\w*|wte|tok\w*)\b",),
    "embedding.position_embeddings": (r"\b(wpe|pos\w*)\b",),
    "embedding.norm": (r"\b(embed\w*|wte)\b.*(norm|\bln\b)",),
    "output_layer": (r"\b(lm )?head\b|\boutput\b|\bunembed",),
    "decoder.final_layernorm": (r"norm|\bln\b",),
    LAYER + "input_layernorm": (r"^(?!.*\bpost\b).*\b(input|pre|attn|attention|mixer|1)\b.*(norm|ln)|(ln|norm) ?1\b",),
    LAYER + "pre_mlp_layernorm": (r"^(?!.*\bpost (mlp|ffn)\b).*\b(mlp|ffn|feed ?forward)\b.*(norm|ln)|(ln|norm) ?2\b",),
    LAYER + "post_attn_norm": (r"\bpost (self )?(attn|attention|mixer)\b",),
    LAYER + "post_mlp_layernorm": (r"\bpost (mlp|ffn|feed ?forward)\b",),
    LAYER + "self_attention.linear_qkv": (r"\bw?(q|query)\b", r"\bw?(k|key)\b", r"\bw?(v|value)\b"),
    LAYER + "self_attention.linear_proj": (r"\bw?(o|out|output|dense|proj)\b",),
    LAYER + "self_attention.q_layernorm": (r"\b(q|query)\b",),
    LAYER + "self_attention.k_layernorm": (r"\b(k|key)\b",),
    LAYER + "mlp.linear_fc1": (r"\b(gate|w1)\b", r"\b(up|w3)\b"),
    LAYER + "mlp.linear_fc2": (r"\b(down|w2|fc2|out|proj)\b",),
}
_FUSED_WORDS: Mapping[str, str] = {
    LAYER + "self_attention.linear_qkv": r"qkv|\bquery key value\b|\bpack\b|\bin proj\b",
    LAYER + "mlp.linear_fc1": r"\bgate up\b|\bin\b|\bup\b|\bfc1?\b|\bw13\b",
}
"""Where one tensor is all parts."""

_ORDER = (
    "embedding.word_embeddings",
    "embedding.position_embeddings",
    "embedding.norm",
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.linear_proj",
    "post_attn_norm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "post_mlp_layernorm",
    "decoder.final_layernorm",
    "output_layer",
)
"""The order in which they are computed."""


@dataclass
class Placing:
    """What was found.

    Attributes:
        maps: the weight table.
        drops: tensors that nobody needs.
        left: templates that have no place.
        open: megatron-core tensors that nothing fits.
        guesses: what only shape or words said.
    """

    maps: list[ParamMap] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)

    def map_of(self, mcore: str) -> ParamMap | None:
        """The weight that is called so."""
        return next((weight for weight in self.maps if weight.mcore == mcore), None)


@dataclass(frozen=True)
class _Fit:
    """Weights that could be, each with how well the names of its parts fit."""

    chosen: tuple[tuple[ParamMap, list[int]], ...]

    @property
    def score(self) -> float:
        """The mean over all names."""
        scores = [score for _, parts in self.chosen for score in parts]
        return sum(scores) / len(scores)

    @property
    def by_shape(self) -> bool:
        """Whether some name says nothing."""
        return any(_SHAPE in parts for _, parts in self.chosen)


def place_tensors(model: Model, values: Mapping[str, Any], library: Sequence[Known]) -> Placing:
    """The weight table of a model: with its matrices as ``[out, in]``, or all as ``[in, out]``, whatever explains more.

    Args:
        values: fields of the run configuration that config.json gives.
        library: families, the nearest first.
    """
    values = {**values, "ffn_hidden_size": values.get("ffn_hidden_size") or 4 * (values.get("hidden_size") or 0)}
    found = [_Placer(model, values, library, turned).place() for turned in (False, True)]
    return min(found, key=lambda placing: (len(placing.open) + len(placing.left), len(placing.guesses)))


class _Placer:
    """Places the tensors of one model."""

    def __init__(self, model: Model, values: Mapping[str, Any], library: Sequence[Known], turned: bool) -> None:
        self._shapes = dict(model.templates)
        self._values = values
        self._library = library
        self._turned = turned
        self._free = set(self._shapes)

    def place(self) -> Placing:
        """The table of the model."""
        found = Placing()
        for known in self._library:
            for weight in known.family.weights:
                if isinstance(weight, Drop) and weight.hf in self._free:
                    found.drops.append(weight)
                    self._free.discard(weight.hf)
        waiting: list[tuple[tuple[str, ...], ...]] = []
        for group in _GROUPS:
            if not self._take(group, found, _WORDS):
                waiting.append(group)
        for group in waiting:
            # Everything that has a name is placed: what is left fits by its shape or not at all.
            if not self._take(group, found, _SHAPE) and not self._is_optional(group):
                found.open += group[0]
        if found.map_of(_HEAD) is None and _HEAD not in found.open:
            # Tied, so that no tensor shows its name: transformers' usual one.
            found.maps.append(ParamMap(_HEAD, ("lm_head.weight",), shard=Vocab(), tied_to=_WORD_EMBEDDINGS))
        for weight in list(found.maps):
            self._bias(weight, found)
        found.maps.sort(key=lambda weight: _ORDER.index(weight.mcore.rpartition(".")[0].removeprefix(LAYER)))
        found.left = sorted(self._free)
        return found

    def _is_optional(self, group: tuple[tuple[str, ...], ...]) -> bool:
        tied = not self._values.get("untie_embeddings_and_output_weights", True)
        return set(group[0]) <= _OPTIONAL or (tied and group[0] == (_HEAD,))

    def _take(self, group: tuple[tuple[str, ...], ...], found: Placing, least: int) -> bool:
        fits = [fit for names in group if (fit := self._best(names, least)) is not None]
        if not fits:
            return False
        # More tensors explained is better; then the better names.
        best = max(fits, key=lambda fit: (len(fit.chosen), fit.score))
        for weight, scores in best.chosen:
            found.maps.append(weight)
            self._free -= set(weight.hf)
            if min(scores) < _TAIL:
                how = "its words" if min(scores) == _WORDS else "its shape"
                found.guesses.append(f"{', '.join(weight.hf)} is {weight.mcore}, by {how}")
        return True

    def _best(self, names: tuple[str, ...], least: int) -> _Fit | None:
        """The best way to make all of ``names`` of free tensors, each used once."""
        options = [list(self._options(name, least)) for name in names]
        fits: list[_Fit] = []
        for chosen in itertools.product(*options):
            used = [name for weight, _ in chosen for name in weight.hf]
            if len(used) == len(set(used)):
                fits.append(_Fit(chosen))
        best = max(fits, key=lambda fit: fit.score, default=None)
        if best is not None and best.by_shape and sum(fit.score == best.score for fit in fits) > 1:
            return None
        return best

    def _options(self, mcore: str, least: int) -> Iterator[tuple[ParamMap, list[int]]]:
        """Each way to make ``mcore`` of free tensors, with how well each name fits."""
        for way in self._ways(mcore):
            try:
                shapes = self._parts(way)
            except (ConversionError, KeyError, TypeError):
                # Nothing in config.json says the sizes.
                continue
            candidates = [
                [
                    (name, score)
                    for name in sorted(self._free)
                    if self._shapes[name] == shape and ("{l}" in name) == ("{l}" in mcore) and name[-5:] != ".bias"
                    if (score := self.fit(name, way, part)) >= least
                ]
                for part, shape in enumerate(shapes)
            ]
            for chosen in itertools.product(*candidates):
                hf = tuple(name for name, _ in chosen)
                if len(set(hf)) == len(hf):
                    yield replace(way, hf=hf), [score for _, score in chosen]

    def _ways(self, mcore: str) -> list[ParamMap]:
        """How weight tables make ``mcore``, each way once."""
        ways: dict[tuple[Any, ...], ParamMap] = {}
        for weight in (weight for family in families().values() for weight in family.weights):
            if not isinstance(weight, ParamMap) or weight.mcore != mcore:
                continue
            key = (weight.transform, weight.shard, len(weight.hf))
            ways.setdefault(key, replace(weight, when=None, transposed=self._turned and "linear_" in mcore))
        return list(ways.values())

    def _parts(self, way: ParamMap) -> list[Shape]:
        """Shapes of the tensors that ``way`` is made of."""
        gated = isinstance(way.transform, GateUp) or (isinstance(way.shard, Column) and way.shard.parts == 2)
        values = {
            **self._values,
            "gated_linear_unit": gated,
            "qk_norm_over_heads": isinstance(way.shard, Column),
            "padded_vocab_size": self._values["vocab_size"],
        }
        whole = whole_shape(way.mcore, values)
        shapes = [(rows, *whole[1:]) for rows in part_rows(way.transform, whole[0], values)]
        return [shape[::-1] for shape in shapes] if way.transposed else shapes

    def fit(self, name: str, way: ParamMap, part: int) -> int:
        """How well the name of a tensor fits part ``part`` of ``way``."""
        best = _SHAPE
        for number, known in enumerate(self._library):
            for weight in known.maps:
                same = (weight.mcore, weight.transform, weight.transposed) == (way.mcore, way.transform, way.transposed)
                if not same or len(weight.hf) != len(way.hf):
                    continue
                if weight.hf[part] == name:
                    best = max(best, _EXACT if number else _NEAREST)
                elif _tail(weight.hf[part]) == _tail(name):
                    best = max(best, _TAIL)
        module = way.mcore.removesuffix(".weight").removesuffix(".bias")
        pattern = _WORDS_OF[module][part] if len(way.hf) > 1 or module not in _FUSED_WORDS else _FUSED_WORDS[module]
        said = re.search(pattern, _spoken(name)) is not None
        return max(best, _WORDS) if said else best

    def _bias(self, weight: ParamMap, found: Placing) -> None:
        """The biases that stand beside the tensors of ``weight``."""
        hf = tuple(name.removesuffix(".weight") + ".bias" for name in weight.hf)
        if isinstance(weight.shard, Vocab) or not set(hf) <= self._free:
            return
        when = None
        if "linear_" in weight.mcore:
            when = "add_qkv_bias" if "linear_qkv" in weight.mcore else "add_bias_linear"
        shard = weight.shard if isinstance(weight.shard, Column) else Replicated()
        found.maps.append(ParamMap(weight.mcore.removesuffix(".weight") + ".bias", hf, weight.transform, shard, when))
        self._free -= set(hf)


def _tail(name: str) -> tuple[str, ...]:
    """The last words of a name: those within a layer, or the last two."""
    inside = name.partition("{l}.")[2]
    return tuple((inside or name).split(".")[-3:]) if inside else tuple(name.split(".")[-2:])


def _spoken(name: str) -> str:
    """The words of a tensor's name, within its layer where it is in one."""
    inside = name.partition("{l}.")[2] or name
    return re.sub(r"[._]+", " ", re.sub(r"([a-z])([A-Z])", r"\1 \2", inside)).lower()
