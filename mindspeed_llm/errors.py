"""The errors that a user can act on.

Each says what is wrong, what was given, what is allowed and what to change. The command line prints them without a
traceback and exits with :attr:`SuiteError.exit_code`; anything else that reaches the top is a fault of ours.
"""

from __future__ import annotations

from collections.abc import Sequence


class SuiteError(Exception):
    """Base of every error that is the caller's to mend.

    Args:
        what: one sentence that says what is wrong.
        got: the offending value, in the caller's own words.
        allowed: what would have been accepted.
        fix: the flag to change or the command to run.
    """

    exit_code = 1

    def __init__(self, what: str, *, got: object = None, allowed: object = None, fix: str | None = None) -> None:
        self.what = what
        self.got = got
        self.allowed = allowed
        self.fix = fix
        parts = [what]
        for label, value in (("got", got), ("allowed", allowed), ("fix", fix)):
            if value is not None:
                parts.append(f"  {label}: {value}")
        super().__init__("\n".join(parts))


class ConfigError(SuiteError):
    """A flag, a YAML key or a combination of them that cannot work."""

    exit_code = 2

    @classmethod
    def collect(cls, errors: Sequence[ConfigError]) -> ConfigError:
        """One error that shows all of ``errors``, so that a command line is mended in one go."""
        if len(errors) == 1:
            return errors[0]
        body = "\n".join(f"{number}. {error}" for number, error in enumerate(errors, start=1))
        return cls(f"{len(errors)} problems in the configuration:\n{body}")


class PatchError(SuiteError):
    """A patch of megatron-core that does not fit the installed version, or clashes with another."""


class ConversionError(SuiteError):
    """Weights that do not map one to one between two formats."""


class CheckpointError(SuiteError):
    """A checkpoint that is missing, incomplete, or made for another layout."""


class DataError(SuiteError):
    """Training data that cannot be read or does not fit the run."""


class OpUnavailableError(SuiteError):
    """An op implementation that was asked for by name and cannot run here."""
