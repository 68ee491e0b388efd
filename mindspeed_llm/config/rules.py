"""What must hold between values: small functions, each of one concern, whose failures are shown together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mindspeed_llm.config.expert_rules import EXPERT_RULES, EXPERT_TRAINING_RULES
from mindspeed_llm.config.latent import latent_attention_is_whole
from mindspeed_llm.config.layout_rules import LAYOUT_RULES
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.config.run_rules import RUN_RULES, TRAINING_RULES
from mindspeed_llm.errors import ConfigError

Rule = Callable[[RunConfig], Iterator[ConfigError]]

RULES: tuple[Rule, ...] = (*RUN_RULES, *LAYOUT_RULES, *EXPERT_RULES, latent_attention_is_whole)

# A pretraining run also has a length, data, a learning rate. Other uses of a model need none of them.
PRETRAIN_RULES: tuple[Rule, ...] = (RULES[0], *TRAINING_RULES, *RULES[1:], *EXPERT_TRAINING_RULES)


def broken_rules(cfg: RunConfig, rules: Sequence[Rule] = RULES) -> list[ConfigError]:
    """What is wrong with ``cfg``, from every rule that it breaks."""
    return [error for rule in rules for error in rule(cfg)]
