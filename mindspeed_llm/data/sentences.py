"""Documents cut into sentences (``--split-sentences``), by NLTK's Punkt as Megatron-LM's tool cuts them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from mindspeed_llm.errors import DataError

Splitter = Callable[[str], list[str]]

_PIECE = 1_000_000
"""Characters that Punkt sees at once, which is Megatron's number: a document that is longer is cut there first."""


def sentence_splitter(language: str = "english", *, keep_newlines: bool = False) -> Splitter:
    """A function from a text to its sentences.

    Args:
        language: the name of a Punkt model.
        keep_newlines: leave the white space between two sentences at the end of the first.

    Raises:
        DataError: NLTK or its model is not installed.
    """
    try:
        from nltk.tokenize.punkt import PunktTokenizer  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise DataError("Sentences are split by NLTK, which is not installed.", fix="pip install nltk") from error
    try:
        punkt = PunktTokenizer(language)
    except (LookupError, OSError) as error:
        raise DataError(
            "NLTK's model of sentences is not installed.",
            got=f"language {language!r}",
            allowed="a folder tokenizers/punkt_tab/LANGUAGE under one of the folders of NLTK_DATA",
            fix="python -m nltk.downloader punkt_tab, or another --lang",
        ) from error
    if keep_newlines:
        punkt._lang_vars = _language_variables()  # pyright: ignore[reportPrivateUsage] - as Megatron does, no setter

    def split(text: str) -> list[str]:
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        return [sentence for piece in pieces for sentence in punkt.tokenize(piece)]

    return split


@cache
def _language_variables() -> Any:
    """Punkt's notion of where a sentence may end, with the white space that follows taken along."""
    from nltk.tokenize.punkt import PunktLanguageVars  # pyright: ignore[reportMissingTypeStubs]

    class KeepWhiteSpace(PunktLanguageVars):
        # Punkt leaves the white space after an end to its look-ahead, and so to nobody; here it is part of the match.
        _period_context_fmt = r"""
            %(SentEndChars)s       # what may end a sentence
            \s*                    # and the white space after it
            (?=(?P<after_tok>
                %(NonWord)s
                |
                (?P<next_tok>\S+)
            ))"""

    return KeepWhiteSpace()
