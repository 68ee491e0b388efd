"""Which recipe of this project is the one of MindSpeed-LLM's that a name belongs to."""

from __future__ import annotations

import re

from mindspeed_llm.tools.recipes import RECIPES

PRETRAIN = re.compile(r"pretrain_([a-z0-9]+)_(\d+(?:point\d+)?b)(?:_|$)(.*)", re.IGNORECASE)
DATA = re.compile(r"data_convert_([a-z0-9]+)_pretrain", re.IGNORECASE)
LONG = 32768


def counterpart(name: str) -> str:
    """The command of ours for a recipe's file name without its ending; empty where there is none.

    What MindSpeed-LLM says in a name, such as the length and the machine, is a variable here.
    """
    if data := DATA.match(name):
        model = data.group(1).lower()
        known = any(recipe.model == model for recipe in RECIPES)
        return f"examples/{model}/data_{model}_pretrain.sh" if known else ""
    found = PRETRAIN.match(name)
    if found is None:
        return ""
    model, size, rest = (text.lower() for text in found.groups())
    length = re.search(r"(?:^|_)(\d+)k(?:_|$)", rest)
    asked = int(length.group(1)) * 1024 if length else None
    fitting = [recipe for recipe in RECIPES if (recipe.model, recipe.size) == (model, size)]
    if not fitting:
        return ""
    long = [recipe for recipe in fitting if (recipe.seq_length == LONG) == (asked == LONG)]
    recipe = (long or fitting)[0]
    variables = [f"SEQ_LENGTH={asked}"] if asked not in (None, recipe.seq_length) else []
    if re.search(r"(?:^|_)a3(?:_|$)", rest):
        variables.append("NODE_TYPE=Snt9b23")
    return " ".join([*variables, f"examples/{model}/{recipe.name}.sh"])
