"""``convert_ckpt.py``: checkpoints between Hugging Face's and megatron-core's formats, layouts and dtypes."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from mindspeed_llm.errors import ConfigError, SuiteError

if TYPE_CHECKING:
    from mindspeed_llm.checkpoint.convert.conversion import Plan, Settings
    from mindspeed_llm.checkpoint.convert.execution import Progress

# torch takes seconds to import, and --help must not wait for it: the work is imported where it is done.

NAMED = "tensors are named by the model family, whatever the implementation"
IN_CONFIG = "config.json, or what the checkpoint records, says it"
FROM_WEIGHTS = "tokens are counted by config.json, and the tokenizer's files are copied"
NO_EFFECT: Mapping[str, tuple[int | str, str]] = {
    "--use-mcore-models": (0, "all models are megatron-core's"),
    "--model-type": (1, "all models are decoders (GPT)"),
    "--loader": (1, "--load-model-type says what is read"),
    "--saver": (1, "--save-model-type says what is written"),
    "--megatron-path": (1, "megatron-core is an installed package"),
    "--spec": (2, NAMED),
    "--ckpt-cfg-path": (1, IN_CONFIG),
    "--load-hf-from-config": (0, IN_CONFIG),
    "--add-qkv-bias": (0, IN_CONFIG),
    "--add-dense-bias": (0, IN_CONFIG),
    "--embed-layernorm": (0, IN_CONFIG),
    "--post-norm": (0, IN_CONFIG),
    "--first-k-dense-replace": (1, IN_CONFIG),
    "--w-pack": (1, IN_CONFIG),
    "--tokenizer-model": (1, FROM_WEIGHTS),
    "--tokenizer-type": (1, FROM_WEIGHTS),
    "--vocab-file": (1, FROM_WEIGHTS),
    "--true-vocab-size": (1, FROM_WEIGHTS),
    "--max-queue-size": (1, "blocks are read ahead by --workers"),
    "--no-checking": (0, "nothing is written before all of it is proved"),
    "--load-checkpoint-loosely": (0, "empty places are no tensors that could be missing"),
    "--save-layer-by-layer": (0, "tensors are always streamed"),
}
"""Flags of both of MindSpeed-LLM's converters, and of Megatron-LM's, that change nothing: number of values, and why."""

LORA = "adapters are not supported yet; merge them with the library that trained them"
OLD = "models from before megatron-core are not read or written"
EXPERTS = "each expert is a tensor of its own, cut over the tensor-parallel ranks"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("--lora-load", "--lora-r", "--lora-alpha", "--lora-target-modules", "--save-lora-to-hf", "--qlora-nf4"), LORA
    ),
    **dict.fromkeys(("--load-from-legacy", "--save-to-legacy"), OLD),
    **dict.fromkeys(
        (
            "--moe-grouped-gemm",
            "--moe-tp-extend-ep",
            "--expert-tensor-parallel-size",
            "--mla-mm-split",
            "--mtp-num-layers",
        ),
        EXPERTS,
    ),
    **dict.fromkeys(
        (
            "--hidden-size",
            "--mamba-state-dim",
            "--mamba-num-groups",
            "--mamba-head-dim",
            "--input-tp-rank",
            "--input-pp-rank",
        ),
        "Mamba models are not supported yet",
    ),
    "--schedules-method": "the dualpipev schedule is not supported yet",
    "--add-output-layer-bias": "no model family has a bias there",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the command line cannot be read: {message}", fix=f"{self.prog} --help lists every flag")


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: numbers with commas between them")
    return tuple(int(word) for word in words)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: 1 or more")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The flags, named as in MindSpeed-LLM's converters."""
    parser = _Parser(prog="convert_ckpt.py", description=__doc__, allow_abbrev=False)
    group = parser.add_argument_group("what")
    kinds = {"choices": ("hf", "mg"), "help": "hf: a Hugging Face folder; mg: a megatron-core checkpoint"}
    group.add_argument("--load-model-type", default="hf", **kinds)
    group.add_argument("--save-model-type", default="mg", **kinds)
    group.add_argument("--load-dir", type=Path, required=True, metavar="DIR", help="folder to read")
    group.add_argument(
        "--save-dir", type=Path, required=True, metavar="DIR", help="folder to write: new, empty, or of a conversion"
    )
    group.add_argument(
        "--ckpt-step", type=_at_least_one, metavar="N", help="read the save of this iteration, not the newest"
    )
    group.add_argument("--model-type-hf", metavar="FAMILY", help="model family (default: that of config.json)")
    group.add_argument(
        "--hf-cfg-dir",
        type=Path,
        metavar="DIR",
        help="Hugging Face folder whose tokenizer is copied; its config.json describes a megatron-core checkpoint",
    )
    group.add_argument("--num-layers", type=_at_least_one, metavar="N", help="take only the first N layers")
    group = parser.add_argument_group("layout of a megatron-core checkpoint")
    for name in ("tensor", "pipeline", "expert"):
        group.add_argument(f"--target-{name}-parallel-size", type=_at_least_one, metavar="N", help="default 1")
    group.add_argument(
        "--num-layers-per-virtual-pipeline-stage", type=_at_least_one, metavar="N", help="layers of a virtual stage"
    )
    group.add_argument("--num-layer-list", type=_numbers, metavar="A,B,...", help="layers of each pipeline stage")
    group.add_argument("--noop-layers", type=_numbers, metavar="I,J,...", help="places that hold no layer, from 0")
    group.add_argument(
        "--make-vocab-size-divisible-by",
        type=_at_least_one,
        default=1,
        metavar="N",
        help="pad the vocabulary to a multiple of this times the tensor-parallel size (default 1)",
    )
    group = parser.add_argument_group("form")
    group.add_argument("--save-format", choices=("torch_dist", "legacy"), help="of --save-model-type mg")
    group.add_argument("--ckpt-format", choices=("torch_dist", "torch"), help="the same; torch is legacy")
    group.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default="local",
        help="whose tensor names the per-rank files of --save-format legacy have",
    )
    group.add_argument(
        "--params-dtype", choices=("fp32", "bf16", "fp16"), help="of the weights written (default: as they are)"
    )
    group = parser.add_argument_group("running")
    group.add_argument("--dry-run", action="store_true", help="plan and prove, print the plan, write nothing")
    group.add_argument(
        "--workers", type=_at_least_one, default=2, metavar="N", help="threads that read ahead (default 2)"
    )
    group = parser.add_argument_group("accepted without effect")
    for flag, (takes, reason) in NO_EFFECT.items():
        form: dict[str, Any] = {"nargs": takes, "metavar": "VALUE"} if takes else {"action": "store_true"}
        group.add_argument(flag, help=f"No effect: {reason}.", **form)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check a command line.

    Raises:
        ConfigError: a flag is unknown, refused, or does not go with another.
    """
    arguments, rest = build_parser().parse_known_args(argv)
    for word in rest:
        flag = word.partition("=")[0]
        if flag in REFUSED:
            raise ConfigError(f"{flag} is not available: {REFUSED[flag]}")
    if rest:
        raise ConfigError("Unknown flags.", got=" ".join(rest), fix="convert_ckpt.py --help lists every flag")
    if arguments.model_type is not None and arguments.model_type != ["GPT"]:
        raise ConfigError("only decoders are converted", got=f"--model-type {arguments.model_type[0]}", allowed="GPT")
    spelled = {"torch": "legacy", None: None}.get(arguments.ckpt_format, arguments.ckpt_format)
    if None not in (spelled, arguments.save_format) and spelled != arguments.save_format:
        raise ConfigError("--save-format and --ckpt-format differ", got=f"{arguments.save_format}, {spelled}")
    arguments.save_format = arguments.save_format or spelled
    if arguments.save_model_type == "hf" and arguments.save_format is not None:
        raise ConfigError("--save-format is about --save-model-type mg", got=arguments.save_format)
    if arguments.load_model_type == "hf" and arguments.ckpt_step is not None:
        raise ConfigError("--ckpt-step is about --load-model-type mg", got=arguments.ckpt_step)
    return arguments


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the flags ask for."""
    from mindspeed_llm.checkpoint.convert.conversion import Settings
    from mindspeed_llm.checkpoint.convert.streams import Target

    layout = {
        "tp": arguments.target_tensor_parallel_size,
        "pp": arguments.target_pipeline_parallel_size,
        "ep": arguments.target_expert_parallel_size,
        "layers_per_virtual_stage": arguments.num_layers_per_virtual_pipeline_stage,
        "layer_list": arguments.num_layer_list,
        "noop_layers": arguments.noop_layers,
    }
    given = {name: value for name, value in layout.items() if value is not None}
    return Settings(
        load=arguments.load_dir,
        save=arguments.save_dir,
        load_kind=arguments.load_model_type,
        save_kind=arguments.save_model_type,
        family=arguments.model_type_hf,
        hf_config=arguments.hf_cfg_dir,
        save_format=arguments.save_format or "torch_dist",
        target=Target(**given) if given else None,
        num_layers=arguments.num_layers,
        vocab_multiple=arguments.make_vocab_size_divisible_by,
        transformer_impl=arguments.transformer_impl,
        dtype=arguments.params_dtype,
        step=arguments.ckpt_step,
        workers=arguments.workers,
    )


def run(arguments: argparse.Namespace) -> None:
    """Plan, say what was planned, and do it.

    Raises:
        SuiteError: what the user can mend.
    """
    from mindspeed_llm.checkpoint.convert.conversion import plan
    from mindspeed_llm.checkpoint.convert.execution import check_destination, execute

    for flag, reason in _without_effect(arguments):
        sys.stderr.write(f"{flag} has no effect here: {reason}\n")
    settings = settings_of(arguments)
    check_destination(settings)
    with ExitStack() as stack:
        planned = plan(settings, stack)
        for notice in planned.notices:
            sys.stderr.write(f"{notice}\n")
        if arguments.dry_run:
            _show(planned)
            return
        with _progress(planned.nbytes) as progress:
            execute(planned, progress)
    sys.stdout.write(f"{settings.save}: {len(planned.tensors)} tensors of {planned.family.name}\n")


def _without_effect(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Flags that are given and change nothing, and why."""
    for flag, (_, reason) in NO_EFFECT.items():
        if getattr(arguments, flag[2:].replace("-", "_")) not in (None, False):
            yield flag, reason
    if arguments.transformer_impl != "local" and arguments.save_format != "legacy":
        yield "--transformer-impl", "only what --save-format legacy writes depends on it; what is read is recognised"
    if arguments.make_vocab_size_divisible_by != 1 and arguments.save_model_type == "hf":
        yield "--make-vocab-size-divisible-by", "a Hugging Face folder has the vocabulary without padding"


def _show(planned: Plan) -> None:
    """A table of what would be written."""
    from mindspeed_llm.cli.table import write_table

    dtypes = {name: str(info.dtype).removeprefix("torch.") for name, info in planned.tensors.items()}
    rows = [(name, " x ".join(map(str, info.shape)), dtypes[name]) for name, info in planned.tensors.items()]
    write_table("plan", ("tensor", "shape", "dtype"), rows)
    sys.stdout.write(
        f"{planned.settings.save}: {len(rows)} tensors of {planned.family.name}, {planned.nbytes / 1e9:.2f} GB; each "
        "tensor on either side is used exactly once; nothing was written (--dry-run)\n"
    )


@contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """A bar on a terminal."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("convert", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; the exit status is 0, or the error's own: 2 for a mistake in the flags, 1 for others."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # A batch system stops a job with SIGTERM: unwinding the stack removes what is half made.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        run(parse(argv))
    except SuiteError as error:
        sys.stderr.write(f"convert_ckpt.py: error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was written\n")
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0
