"""``pretrain_gpt.py``: a command line to a pretraining run."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings

from mindspeed_llm.cli.flags import parse_pretrain
from mindspeed_llm.cli.once import tell
from mindspeed_llm.config.resolve import format_non_default
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import ConfigError, SuiteError
from mindspeed_llm.models.registry import family_layer

PROGRAM = "pretrain_gpt.py"


def _set_up_logging(level: int | None) -> None:
    """The suite's own words on rank 0, warnings on the others; megatron-core's chatter only when it is asked for.

    Raw data is prepared by whichever rank comes first: that one tells of it, so that a long preparation is no silence.
    """
    rank = int(os.environ.get("RANK", "0"))
    chosen = level or (logging.INFO if rank == 0 else logging.WARNING)
    logging.basicConfig(level=chosen, format=f"[rank {rank}] %(message)s")
    if level is None:
        for module in ("raw", "prepare"):
            logging.getLogger(f"mindspeed_llm.data.{module}").setLevel(logging.INFO)
        logging.getLogger("megatron").setLevel(logging.WARNING)
        for module in ("megatron", "torch"):
            warnings.filterwarnings("ignore", module=rf"{module}\b.*")


def _validate(cfg: RunConfig) -> str:
    """What a run would be, after the checks that need no other process.

    Raises:
        SuiteError: what the run would stop at, as far as flags and files say it.
    """
    from mindspeed_llm.checkpoint.origin import find_origin
    from mindspeed_llm.data.inputs import check_inputs

    origin = find_origin(cfg)
    training = cfg.training
    if training.train_iters != 0 or training.skip_train:
        check_inputs(cfg)
    t, d = cfg.transformer, cfg.distributed
    lines = [
        "configuration, values that are not defaults:",
        format_non_default(cfg),
        *(f"note: {notice}" for notice in cfg.notices),
        f"valid: {d.world_size} processes, TP {t.tensor_model_parallel_size}, PP {t.pipeline_model_parallel_size} "
        f"(interleaved stages: {t.virtual_pipeline_model_parallel_size or 1}), DP {d.data_parallel_size}; "
        f"weights: {origin.kind} {origin.folder or ''}".rstrip(),
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 2 for a mistake in the configuration, 1 for other faults.

    Without ``argv`` it is the process's own command line, and a run that fails ends the process at once: what stops at
    exit to wait for threads or peers could wait for ever, or write after the FATAL line.
    """
    try:
        cfg = parse_pretrain(sys.argv[1:] if argv is None else argv, environ=os.environ, family_values=family_layer)
    except SuiteError as error:
        sys.stderr.write(tell(PROGRAM, str(error), os.environ))
        return error.exit_code
    _set_up_logging(cfg.logging.logging_level)
    if cfg.training.validate_only:
        try:
            sys.stdout.write(_validate(cfg))
        except SuiteError as error:
            # A path that is not there is a mistake in the flags: nothing else is looked at.
            sys.stderr.write(tell(PROGRAM, str(error), os.environ))
            return ConfigError.exit_code
        return 0
    from mindspeed_llm.training.pretrain import pretrain
    from mindspeed_llm.training.watchdog import Watchdog, last_collective

    limit = 60 * cfg.distributed.distributed_timeout_minutes
    with Watchdog(limit, cfg.checkpoint.save, os.environ) as watchdog:
        try:
            pretrain(cfg)
        except BaseException as error:
            ours = isinstance(error, SuiteError)
            unforeseen = f"{traceback.format_exc()}last collective: {last_collective()}\n"
            code = watchdog.fail(error, tell(PROGRAM, str(error), os.environ) if ours else unforeseen)
            if argv is None:
                # As long as the error holds what would complain when it is let go.
                os._exit(code)
            if not ours:
                raise
            return code
    return 0
