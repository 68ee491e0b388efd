"""The command line of the doctor, and how it tells what it found."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_llm.config.distributed import DistributedConfig
from mindspeed_llm.config.files import read_environment
from mindspeed_llm.tools.doctor import machine, network, ranks, software, storage, variables
from mindspeed_llm.tools.doctor.finding import (
    SEVERITIES,
    Check,
    Finding,
    Surroundings,
    examine,
    problem,
    run_probe,
)

CHECKS: Mapping[str, tuple[Check, ...]] = {
    "software": software.CHECKS,
    "machine": machine.CHECKS,
    "network": network.CHECKS,
    "variables": variables.CHECKS,
    "storage": storage.CHECKS,
}
_STYLES = {"problem": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
_SECONDS_FOR_RANK_0 = 5.0


@dataclass(frozen=True)
class Told:
    """A finding, and the ranks that have it."""

    finding: Finding
    ranks: list[int]


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="doctor",
        description="Looks for what would hurt a run on this machine, or, started by torchrun, on these nodes. "
        "Each finding has a severity, its consequence and a remedy. The exit status is 1 if there is a problem.",
        allow_abbrev=False,
    )
    parser.add_argument("--save", type=Path, help="the run's --save; it is tried with small files")
    parser.add_argument("--data-path", nargs="+", default=(), help="the run's --data-path")
    parser.add_argument(
        "--distributed-timeout-minutes",
        type=float,
        default=_timeout_minutes(os.environ),
        help="the run's; times of HCCL are compared with it",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _timeout_minutes(environ: Mapping[str, str]) -> float:
    """That of a run which is not given the flag: the environment's, else the default."""
    default = DistributedConfig().distributed_timeout_minutes
    given = read_environment(environ).values.get("distributed_timeout_minutes", default)
    return float(str(given))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 1 if there is a problem."""
    arguments = build_parser().parse_args(argv)
    surroundings = Surroundings(
        environ=dict(os.environ),
        probe=run_probe(os.environ),
        save=arguments.save,
        data=tuple(arguments.data_path),
        timeout_minutes=arguments.distributed_timeout_minutes,
    )
    findings = examine(CHECKS, surroundings)
    launched = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)
    if launched and surroundings.probe.failed is None:
        return _among_ranks(surroundings, findings, as_json=arguments.json)
    return tell([ranks.report(surroundings, findings)], as_json=arguments.json)


def _among_ranks(surroundings: Surroundings, findings: list[Finding], *, as_json: bool) -> int:
    rank = int(os.environ["RANK"])
    try:
        reports = ranks.meet(surroundings, findings)
    except RuntimeError as error:
        lost = problem(
            f"rank {rank} cannot talk to the others: {str(error).strip().splitlines()[0]}",
            "no run over these nodes begins",
            "MASTER_ADDR, GLOO_SOCKET_IFNAME and firewalls: see the network findings of each node",
            "ranks.meet",
        )
        code = tell([ranks.report(surroundings, [*findings, lost])], as_json=as_json, whole=rank == 0)
        # The launcher ends every process when the first one fails; rank 0 may not have told yet.
        time.sleep(_SECONDS_FOR_RANK_0 if rank else 0)
        return code
    if rank == 0:
        tell(reports, as_json=as_json)
    ranks.part()
    return int(any(one.severity == "problem" for report in reports for one in report.findings))


def tell(reports: Sequence[ranks.Report], *, as_json: bool, whole: bool = True) -> int:
    """Write what the ranks found; equal findings are told once.

    Args:
        reports: of the ranks.
        as_json: one JSON object instead of lines.
        whole: also what is well.

    Returns:
        The exit status.
    """
    where: dict[Finding, list[int]] = defaultdict(list)
    for report in reports:
        for finding in report.findings:
            where[finding].append(report.rank)
    order = [*CHECKS, "ranks"]
    told = [Told(finding, found) for finding, found in where.items()]
    told.sort(key=lambda one: order.index(one.finding.check.partition(".")[0]))
    counts = Counter(one.finding.severity for one in told)
    if as_json:
        rows = [{**asdict(one.finding), "ranks": one.ranks} for one in told]
        hosts = {report.rank: report.host for report in reports}
        counted = {severity: counts[severity] for severity in SEVERITIES}
        sys.stdout.write(json.dumps({"counts": counted, "hosts": hosts, "findings": rows}, indent=2) + "\n")
    else:
        _show([one for one in told if whole or one.finding.severity == "problem"], len(reports))
        plural = [f"{counts[one]} {one}{'s' if counts[one] != 1 and one != 'ok' else ''}" for one in SEVERITIES]
        _line(", ".join(plural), "bold")
    sys.stdout.flush()
    return int(counts["problem"] > 0)


def _show(told: Sequence[Told], world: int) -> None:
    section = ""
    for one in told:
        finding = one.finding
        if finding.check.partition(".")[0] != section:
            section = finding.check.partition(".")[0]
            _line(f"{section}", "bold")
        place = f" [rank {ranks.spans(one.ranks)}]" if len(one.ranks) < world and section != "ranks" else ""
        _line(f"  {finding.severity:<8} {finding.what}{place}", _STYLES[finding.severity])
        if finding.severity != "ok":
            _line(f"{'':11}why: {finding.why}")
            _line(f"{'':11}do:  {finding.remedy}")


def _line(text: str, style: str | None = None) -> None:
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        Console(soft_wrap=True).print(Text(text, style=style or ""))
    else:
        sys.stdout.write(f"{text}\n")
