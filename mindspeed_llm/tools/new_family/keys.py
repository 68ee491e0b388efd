"""Which rule reads which key of a config.json: rules of the families that there are, each proved on this one."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models import family as vocabulary
from mindspeed_llm.models import rules
from mindspeed_llm.models.family import Const, Expect, Ignore, Rename, Rule
from mindspeed_llm.tools.new_family.folder import Model
from mindspeed_llm.tools.new_family.library import Fragment, Known, Needs

Config = Mapping[str, Any]
PINNED = "pinned by the draft"
_TIES = "untie_embeddings_and_output_weights"

_SPELLED = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu2": "squared_relu",
}
"""transformers' names of non-linearities that megatron-core has here."""

_SIZE_NAMES: tuple[tuple[str, str], ...] = (
    ("num_layers", r"n_?layers?|num_(hidden_)?layers|n_blocks|depth"),
    ("hidden_size", r"n_embd|n_embed|d_model|(model_|hidden_|embed(ding)?_)?dim|hidden_size|embedding_size"),
    ("ffn_hidden_size", r"d_ff|n_inner|(ffn|mlp|intermediate|ffn_hidden|mlp_hidden)_(dim|size)"),
    ("vocab_size", r"(padded_)?vocab(ulary)?_size|n_vocab"),
    ("num_attention_heads", r"n_?heads?|num_(attention_)?heads|n_attention_heads"),
    ("max_position_embeddings", r"n_positions|n_ctx|max_(seq\w*|position\w*)|seq\w*_length|context_length|block_size"),
    ("layernorm_epsilon", r"(rms_|layer_?|ln_)*(norm_|ln_)?(eps|epsilon)"),
    ("init_method_std", r"init\w*_(range|std)"),
    ("attention_dropout", r"att(n|ention)_(pdrop|dropout)\w*"),
    ("hidden_dropout", r"(resid(ual)?|hidden)_(pdrop|dropout)\w*"),
)
"""Field -> what configurations call it; a size counts only where the tensors have it."""
_FACTOR_NAMES: Mapping[str, str] = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "softmax_scale",
    "logit_scale": "output_multiplier",
    "logits_scaling": "output_multiplier",
}
"""Factors by the names that transformers' classes give them."""
_DIVISORS = frozenset({"logits_scaling"})
_TRAINING = frozenset({"init_method_std", "attention_dropout", "hidden_dropout"})


_PERIODS = (2, 3, 4, 5, 6, 7, 8)
"""Layers from one of a kind to the next."""
_EPSILON = "rms_norm_eps"
_NEVER_LEFT_OUT = frozenset({"num_key_value_heads"})
"""Numbers of one model that classes have as their defaults, and that every config.json says."""


@dataclass
class Reading:
    """Rules for a config.json.

    Attributes:
        fragments: chosen, each key in one.
        values: fields that they give.
        left: keys that no rule reads, with what is known of them.
        pinned: keys that are held at their value.
        notes: where a rule and transformers differ on what a silent config.json means.
    """

    fragments: list[Fragment] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    pinned: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def keys(self) -> set[str]:
        """That have a rule."""
        return {key for fragment in self.fragments for key in fragment.keys}

    def take(self, fragment: Fragment, values: Mapping[str, Any]) -> None:
        """``fragment``, too."""
        self.fragments.append(fragment)
        self.values |= values


def read_values(made: Iterable[Rule], config: Config) -> dict[str, Any] | None:
    """Fields for a config.json; None where it is not one of these rules."""
    values: dict[str, Any] = {}
    try:
        for rule in made:
            values |= rule.to_values(config)
    except (ConversionError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None
    return values


class Chooser:
    """Chooses rules for one model.

    Args:
        model: whose.
        library: families, the nearest first.
        refused: texts of rules that the tensors contradict.
    """

    def __init__(self, model: Model, library: Sequence[Known], refused: Collection[str] = ()) -> None:
        self._model, self._kind, self._library, self._refused = model, model.kind, library, refused
        self._raw, self._full = model.config, model.full
        self._known: dict[str, tuple[Fragment, dict[str, Any], list[str]] | None] = {}

    def choose(self) -> Reading:
        """Rules that together read every key once, as far as there are any."""
        found = Reading()
        keys = set(self._raw) | set(self._full)
        candidates = list(self._fragments())
        while True:
            # The rule that explains most, most truly, of the nearest family.
            ranked = sorted(self._ranked(candidates, found, keys), key=lambda each: each[0])
            if not ranked:
                break
            (_, fragment, values, notes) = ranked[0]
            found.take(fragment, values)
            found.notes += notes
        for key in sorted(keys - found.keys):
            self._by_name(key, found)
        for key in sorted(keys - found.keys):
            self._by_itself(key, found)
        return found

    def _ranked(
        self, candidates: Iterable[tuple[int, Fragment]], found: Reading, keys: set[str]
    ) -> Iterator[tuple[tuple[int, ...], Fragment, dict[str, Any], list[str]]]:
        covered = found.keys
        for place, fragment in candidates:
            if fragment.keys & covered or fragment in found.fragments or fragment.text in self._refused:
                continue
            judged = self._judged(fragment)
            if judged is None:
                continue
            fragment, values, notes = judged
            # Whether embedding and output layer are one matters also where config.json is silent.
            gain = len(fragment.keys & keys) + (_TIES in values and _TIES not in found.values)
            if gain and not values.keys() & found.values.keys():
                rank = (-gain, self._blind(fragment, values), len(notes), len(fragment.keys - keys), place)
                yield rank, fragment, values, notes

    def _judged(self, fragment: Fragment) -> tuple[Fragment, dict[str, Any], list[str]] | None:
        """The rule, or the same with other numbers in it, that means the same as transformers; None where it cannot
        read the configuration."""
        if fragment.text not in self._known:
            best: tuple[Fragment, dict[str, Any], list[str]] | None = None
            for variant in itertools.chain(self._tuned(fragment), [fragment]):
                values = read_values(variant.rules, self._raw)
                if values is None or self._misread(variant, values):
                    continue
                notes = list(self._differences(variant, values))
                if best is None or len(notes) < len(best[2]):
                    best = variant, values, notes
                if not notes:
                    break
            self._known[fragment.text] = best
        return self._known[fragment.text]

    def _tuned(self, fragment: Fragment) -> Iterator[Fragment]:
        """The rule with numbers that transformers' class takes where config.json is silent."""
        call = ast.parse(fragment.text.removeprefix("*"), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return
        name, star = call.func.id, "*" * fragment.text.startswith("*")
        make: Any = getattr(importlib.import_module(fragment.needs.imports[name]), name)
        if not inspect.isfunction(make):
            return
        given = inspect.signature(make).parameters
        if any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in given.values()):
            return
        if not self._kind:
            # Nobody says what a silent config.json means: what most families take.
            if all(one.default is not one.empty for one in given.values()):
                made = make()
                yield Fragment(f"{star}{name}()", made if star else (made,), fragment.needs)
            return
        said = {value for key in fragment.keys for value in _scalars(self._kind.silent.get(key))}
        for chosen in itertools.product(*(_choices(one, said) for one in given.values())):
            words, arguments = list[str](), dict[str, Any]()
            for one, value in zip(given.values(), chosen, strict=True):
                if value != one.default:
                    arguments[one.name] = value
                    bare = one.default is one.empty and one.kind is not one.KEYWORD_ONLY
                    words.append(repr(value) if bare else f"{one.name}={value!r}")
            made = make(**arguments)
            yield Fragment(f"{star}{name}({', '.join(words)})", made if star else (made,), fragment.needs)

    def _misread(self, fragment: Fragment, values: Mapping[str, Any]) -> bool:
        """Whether transformers means something else by this config.json, or the tensors have other sizes."""
        full = read_values(fragment.rules, self._full)
        return (full is not None and full != values) or not all(
            self._fits(name, values[name], values) for name in values
        )

    def _blind(self, fragment: Fragment, values: Mapping[str, Any]) -> int:
        """Numbers under the keys of ``fragment`` that could be others without its noticing."""
        return sum(
            read_values(fragment.rules, {**self._raw, key: other}) == values
            for key in sorted(fragment.keys & self._raw.keys())
            for other in _perturbed(self._raw[key])
        )

    def _fragments(self) -> Iterator[tuple[int, Fragment]]:
        """Every rule of the library that says something by itself, with the place of its family."""
        seen: set[str] = set()
        ignored = self._ignored()
        for place, known in enumerate(self._library):
            for fragment in known.fragments:
                if fragment.text in seen or any(isinstance(rule, Const) for rule in fragment.rules):
                    continue
                if len(fragment.rules) == 1 and isinstance(fragment.rules[0], Ignore) and not fragment.text.isupper():
                    # What one family's code does not read, another's may: only where all agree.
                    for key in sorted(fragment.keys & ignored.keys()):
                        if key not in seen:
                            seen.add(key)
                            yield (
                                place,
                                _made(f'Ignore("{key}", why={_quoted(ignored[key])})', Ignore(key, why=ignored[key])),
                            )
                    continue
                seen.add(fragment.text)
                yield place, self._without_epsilon(fragment)

    def _without_epsilon(self, fragment: Fragment) -> Fragment:
        """``*SIZES`` for a model that gives its epsilon another name."""
        if fragment.text != "*SIZES" or _EPSILON in self._full:
            return fragment
        text = f'*(rule for rule in SIZES if "{_EPSILON}" not in rule.hf_keys)'
        return Fragment(text, tuple(rule for rule in fragment.rules if _EPSILON not in rule.hf_keys), fragment.needs)

    def _ignored(self) -> dict[str, str]:
        """Keys that every family which has them ignores, and why."""
        whys: dict[str, set[str | None]] = {}
        for rule in (rule for known in self._library for rule in known.family.config):
            for key in rule.hf_keys:
                whys.setdefault(key, set()).add(rule.why if isinstance(rule, Ignore) else None)
        return {key: sorted(map(str, why))[0] for key, why in whys.items() if None not in why}

    def _differences(self, fragment: Fragment, values: Mapping[str, Any]) -> Iterator[str]:
        """Where transformers means something else than ``fragment`` when a key is left out."""
        if not self._kind or all(rule.recipe for rule in fragment.rules):
            return
        for key in sorted(fragment.keys & self._raw.keys() - _NEVER_LEFT_OUT):
            without = {name: value for name, value in self._raw.items() if name != key}
            ours = read_values(fragment.rules, without)
            filled = self._kind.filled(without)
            theirs = read_values(fragment.rules, filled) if filled and ours is not None else None
            if ours is not None and theirs is not None and ours != theirs:
                yield f"where config.json lacks {key}, transformers takes another value: {_changed(ours, theirs)}"

    def _by_name(self, key: str, found: Reading) -> None:
        """A size, an epsilon or the non-linearity under a name that no family has."""
        value = self._full.get(key)
        if isinstance(value, str) and value in _SPELLED and "activation_func" not in found.values:
            made = rules.activation(key, **{value: _SPELLED[value]})
            text = f'activation("{key}", {value}="{_SPELLED[value]}")'
            found.take(_made(text, made), {"activation_func": _SPELLED[value]})
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if "drop" in key and "hidden_dropout" in found.values:
            why = "dropout is the run's: --hidden-dropout, --attention-dropout"
            found.take(_made(f'Ignore("{key}", why={_quoted(why)})', Ignore(key, why=why)), {})
            return
        name = _FACTOR_NAMES.get(key)
        if name is not None and name not in found.values:
            make: Any = rules.divisor if key in _DIVISORS else Rename
            more = f", default={silent!r}" if (silent := self._kind.silent.get(key)) is not None else ""
            rule = make(key, name, default=silent) if more else make(key, name)
            found.take(_made(f'{make.__name__}("{key}", "{name}"{more})', rule), rule.to_values(self._full))
            return
        for name, pattern in _SIZE_NAMES:
            if name not in found.values and re.fullmatch(pattern, key) and self._fits(name, value):
                recipe = name in _TRAINING
                silent = self._kind.silent.get(key)
                more = (f", default={silent!r}" if silent is not None else "") + (", recipe=True" if recipe else "")
                default = {"default": silent} if silent is not None else {}
                rule = Rename(key, name, recipe=recipe, **default)
                found.take(_made(f'Rename("{key}", "{name}"{more})', rule), {name: value})
                return

    def _fits(self, name: str, value: Any, values: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Whether the tensors have such a size."""
        inside = {size for template, shape in self._model.templates.items() if "{l}" in template for size in shape}
        outside = {size for template, shape in self._model.templates.items() if "{l}" not in template for size in shape}
        if name == "num_layers":
            return value == self._model.layers
        if name in ("hidden_size", "ffn_hidden_size"):
            return bool({value, 2 * value} & inside)
        if name == "vocab_size":
            return value in outside
        if name == "kv_channels" and value and "num_attention_heads" in values:
            heads = values["num_attention_heads"]
            groups = values.get("num_query_groups") or heads
            return bool({heads * value, (heads + 2 * groups) * value} & inside)
        return True

    def _by_itself(self, key: str, found: Reading) -> None:
        """A key that nothing reads: held at its value where a proof can tell whether that is right."""
        value = self._full.get(key)
        if not self._kind:
            found.left[key] = f"{value!r:.60}; nobody can tell what it does: transformers has no class for the model"
        elif isinstance(value, list) and len(value) == self._model.layers > 1:
            found.left[key] = f"{value!r:.60}; says something of each layer, which no known rule does"
        elif isinstance(value, str) and not re.fullmatch(r"[ \w./:-]{,60}", value):
            found.left[key] = f"{value!r:.60}; no known rule has it"
        else:
            rule = Expect(key, value, why=PINNED)
            found.take(_made(f'Expect("{key}", {_literal(value)}, why={_quoted(PINNED)})', rule), {})
            found.pinned.append(key)


def _made(text: str, rule: Rule) -> Fragment:
    """A rule that no family has in these words."""
    name = text.partition("(")[0]
    module = vocabulary if hasattr(vocabulary, name) else rules
    return Fragment(text, (rule,), Needs().of_names(module, name))


def _quoted(text: str) -> str:
    return '"' + text.replace('"', "'") + '"'


def _literal(value: object) -> str:
    return _quoted(value) if isinstance(value, str) else repr(value).replace("'", '"')


def _choices(parameter: inspect.Parameter, said: Iterable[float]) -> list[Any]:
    """Values that an argument of a rule could have."""
    kind = str(parameter.annotation)
    if kind == "bool":
        return [True, False]
    none = [None] if "None" in kind else []
    own = [] if parameter.default is parameter.empty else [parameter.default]
    # How often a kind of layer comes is said nowhere.
    return list(dict.fromkeys([*own, *none, *sorted(said), *(_PERIODS if kind == "int" else ())]))


def _scalars(value: object) -> Iterator[float]:
    """The numbers in a value."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _scalars(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _perturbed(value: object) -> Iterator[object]:
    """``value`` with one of its numbers changed, for each of them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from ({**value, key: other} for other in _perturbed(inner))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield 2 * value + 1


def _changed(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    names = [name for name in ours if ours[name] != theirs.get(name)]
    return ", ".join(f"{name} {theirs.get(name)!r}, not {ours[name]!r}" for name in names)
