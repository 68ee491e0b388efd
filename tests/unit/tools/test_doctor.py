"""The doctor: each fault is made, and found by its check; a machine without faults has no problem."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.config.distributed import DistributedConfig
from mindspeed_llm.tools.doctor import command, network, ranks, variables
from mindspeed_llm.tools.doctor.finding import Check, Finding, Surroundings, examine
from tests.unit.tools.doctor_faults import FAULTS, NPU, Fault, Scene, given, on_cpu

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def restore_limits() -> Iterator[None]:
    limits = {what: resource.getrlimit(what) for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, 4)}
    yield
    for what, limit in limits.items():
        resource.setrlimit(what, limit)


def check_called(name: str) -> Check:
    section, _, function = name.partition(".")
    return next(check for check in command.CHECKS[section] if check.__name__ == function)


def test_another_encoding_is_found() -> None:
    """In a process of its own: Python decides it as it starts."""
    code = (
        "from mindspeed_llm.tools.doctor.machine import text_encoding as t\nfor f in t(None): print(f.severity, f.what)"
    )
    bare = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told = [
        subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True).stdout
        for env in (bare, {"PATH": os.environ["PATH"], "PYTHONUTF8": "1"})
    ]
    assert told[0].startswith("warning")
    assert "ASCII" in told[0].upper() or "ANSI" in told[0]
    assert told[1].startswith("ok")


def test_interfaces_are_those_of_the_kernel() -> None:
    there = {interface.name: interface for interface in network.interfaces()}
    assert set(there) == set(os.listdir("/sys/class/net"))
    assert there["lo"] == network.Interface("lo", True, "127.0.0.1")
    # What a UDP socket would send from, says the kernel; a machine without a way out has no such address.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))
        except OSError:
            return
        assert asking.getsockname()[0] in {interface.address for interface in there.values() if interface.up}


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [  # The examples of NCCL's and CANN's references.
        ("eth", ["eth0", "eth1", "eth01"]),
        ("eth,enp", ["eth0", "eth1", "enp0", "eth01"]),
        ("^eth,enp", ["lo", "docker0"]),
        ("=eth0", ["eth0"]),
        ("=eth0,enp0", ["eth0", "enp0"]),
        ("^=eth0,enp0", ["lo", "eth1", "eth01", "docker0"]),
        ("^docker", ["lo", "eth0", "eth1", "enp0", "eth01"]),
    ],
)
def test_interfaces_are_matched_as_the_libraries_do(pattern: str, taken: list[str]) -> None:
    assert network.match_interfaces(pattern, ["lo", "eth0", "eth1", "enp0", "eth01", "docker0"]) == taken


def test_another_node_that_answers_or_refuses_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "1", "MASTER_PORT": str(listening.getsockname()[1])}
        assert next(found.what for found in network.meeting_point(given(**there))).endswith("answers")
    assert [found.severity for found in network.meeting_point(given(**there))] == ["ok"]


def test_values_of_recipes_are_well() -> None:
    recipe = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "3600",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2],max_split_size_mb:128",
    }
    seen = Surroundings({**recipe, "LOCAL_WORLD_SIZE": "8"}, NPU, timeout_minutes=61)
    found = [one for check in variables.CHECKS if check is not variables.ascend for one in check(seen)]
    assert {one.severity for one in found} == {"ok"}


def test_what_the_recipes_set_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"source {ROOT}/examples/_shared/environment.sh; env"
    bash = ["env", "-i", "bash", "-c", script]
    told = subprocess.run(bash, capture_output=True, text=True, check=True, timeout=20).stdout
    environ = dict(line.split("=", 1) for line in told.splitlines())
    monkeypatch.setattr(os, "environ", environ)
    minutes = command.build_parser().parse_args([]).distributed_timeout_minutes
    assert minutes > DistributedConfig().distributed_timeout_minutes
    seen = Surroundings({**environ, "NNODES": "2"}, NPU, timeout_minutes=minutes)
    checks = (variables.suite, variables.timeouts, variables.connections, variables.allocator)
    assert {one.severity for check in checks for one in check(seen)} == {"ok"}


def test_the_default_timeout_is_that_of_a_run() -> None:
    default = DistributedConfig().distributed_timeout_minutes
    assert Surroundings({}).timeout_minutes == default
    assert command.build_parser().parse_args([]).distributed_timeout_minutes == default


@pytest.mark.parametrize(("check", "severity", "text", "make"), FAULTS, ids=[f"{f[0]}: {f[2][:30]}" for f in FAULTS])
def test_a_fault_is_found(
    check: str, severity: str, text: str, make: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surroundings = make(Scene(monkeypatch, tmp_path))
    found = examine({check.partition(".")[0]: (check_called(check),)}, surroundings)
    hits = [one for one in found if one.severity == severity and text in f"{one.what} {one.remedy}"]
    monkeypatch.undo()
    assert len(hits) == 1, found
    assert all(one.check == check for one in found)
    assert hits[0].why
    assert hits[0].remedy
    assert not any(path.name.startswith(".doctor") for path in tmp_path.iterdir())


def test_each_check_has_a_fault() -> None:
    """The rest is shown by runs of the whole below."""
    elsewhere = {"machine.text_encoding", "software.op_table", "software.patches", "variables.internet"}
    every = {f"{section}.{check.__name__}" for section, checks in command.CHECKS.items() for check in checks}
    assert {name for name, *_ in FAULTS} | elsewhere == every


def test_what_a_check_cannot_look_at_is_a_problem() -> None:
    def check(_: Surroundings) -> Iterator[Finding]:
        raise PermissionError(13, "Permission denied", "/proc/x")
        yield

    (found,) = examine({"machine": (check,)}, given())
    assert (found.severity, found.check) == ("problem", "machine.check")
    assert "/proc/x" in found.what


def report(rank: int, **changes: Any) -> ranks.Report:
    same = {
        "host": f"node{rank}",
        "kernel": str(rank),
        "python": "3.11",
        "versions": dict.fromkeys(ranks._COMPARED, "1"),
        "source": "abc",
        "device": "npu",
        "variables": {"HCCL_BUFFSIZE": "200"},
        "clock": 1e9 + rank / 1000,
        "findings": [],
    }
    return ranks.Report(rank=rank, **{**same, **changes})


@pytest.mark.parametrize(
    ("changes", "severity", "text"),
    [
        ({}, "ok", "4 ranks on 4 hosts"),
        (
            {"versions": {**dict.fromkeys(ranks._COMPARED, "1"), "torch": "2"}},
            "problem",
            "torch differs: 1 on rank 0-2; 2",
        ),
        ({"python": "3.12"}, "problem", "Python differs: 3.11 on rank 0-2; 3.12 on rank 3"),
        ({"source": "def"}, "problem", "the source of mindspeed_llm differs"),
        ({"device": "cpu"}, "problem", "the device differs: npu on rank 0-2; cpu on rank 3"),
        ({"variables": {}}, "warning", "HCCL_BUFFSIZE differs: 200 on rank 0-2; not set on rank 3"),
        ({"clock": 1e9 + 90}, "warning", "clocks differ by 90 s"),
        ({"host": "node0"}, "warning", "several machines are called node0"),
    ],
)
def test_ranks_that_differ_are_found(changes: dict[str, Any], severity: str, text: str) -> None:
    (found,) = ranks.compare([report(0), report(1), report(2), report(3, **changes)])
    assert (found.severity, text in found.what) == (severity, True), found


def run_doctor(
    arguments: tuple[str, ...], environ: dict[str, str], *, cwd: Path = ROOT, wrap: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    kept = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "LC_ALL": "C.UTF-8", **environ}
    line = [*wrap, sys.executable, "-m", "mindspeed_llm.tools.doctor", *arguments]
    return subprocess.Popen(line, cwd=cwd, env=kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def grave(told: dict[str, Any], *severities: str) -> set[str]:
    return {one["check"] for one in told["findings"] if one["severity"] in severities}


def test_a_broken_installation_is_seen_as_a_whole(tmp_path: Path) -> None:
    """Another megatron-core on the path, with one function changed, and compiled modules that do not load."""
    shutil.copytree(
        ROOT / "mindspeed_llm", tmp_path / "mindspeed_llm", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (tmp_path / f"mindspeed_llm/ops/_cpu_kernels{suffix}").write_bytes(b"\x7fELF, and no more")
    wheel = Path(str(importlib.metadata.distribution("megatron-core").locate_file("megatron")))
    shutil.copytree(wheel / "core", tmp_path / "megatron/core", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "megatron/core/tensor_parallel/mappings.py"
    text = changed.read_text()
    assert "def _reduce(" in text
    changed.write_text(text.replace("def _reduce(", "@(lambda f: f)\ndef _reduce("))
    done = run_doctor(("--json",), {}, cwd=tmp_path)
    out, err = done.communicate(timeout=100)
    assert done.returncode == 1, err
    told = json.loads(out)
    assert grave(told, "problem") == {"software.names", "software.patches"}, out
    assert {"software.compiled", "software.op_table"} <= grave(told, "warning"), out
    found = "\n".join(f"{one['what']}" for one in told["findings"])
    assert "mappings:_reduce" in found
    assert "rms_norm: reference (fallback: the C++ kernels do not load" in found
    assert told["counts"]["problem"] == 2


def test_two_ranks_meet_and_a_healthy_machine_has_no_problem(tmp_path: Path) -> None:
    """Rank 1 has another variable and, where the kernel lets us, a --save of its own behind the same name."""
    own = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    mounted = f'mount -t tmpfs none {tmp_path} && exec "$0" "$@"'
    apart = subprocess.run([*own, mounted, "true"], capture_output=True).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    # As torchrun has it: rank 0 need not try the port, which rank 1 may have been quick to wait for.
    meeting |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RUN_ID": "none"}
    arguments = ("--json", "--save", str(tmp_path / "save"))
    first = run_doctor(arguments, {**meeting, "RANK": "0"})
    other = {**meeting, "RANK": "1", "LOCAL_RANK": "1", "HCCL_BUFFSIZE": "100"}
    second = run_doctor(arguments, other, wrap=(*own, mounted) if apart else ())
    out, err = first.communicate(timeout=100)
    assert (second.communicate(timeout=100)[0], second.returncode) == ("", first.returncode), err
    told = json.loads(out)
    assert grave(told, "problem") == ({"ranks.storage"} if apart else set()), out
    assert first.returncode == int(apart)
    assert {one["what"] for one in told["findings"] if one["check"] == "ranks.compare"} == {
        "HCCL_BUFFSIZE differs: not set on rank 0; 100 on rank 1"
    }
    assert [one["severity"] for one in told["findings"] if one["check"] == "ranks.all_reduce"] == ["ok"]
    assert not list(tmp_path.iterdir())


def test_a_rank_that_does_not_come_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def alone(*_: Any) -> None:
        raise RuntimeError("connection to 10.0.0.1 timed out\nand a stack")

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1025"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "run_probe", lambda environ: on_cpu())
    monkeypatch.setattr(ranks, "meet", alone)
    assert command.main([]) == 1
    told = capsys.readouterr().out
    assert "problem  rank 0 cannot talk to the others: connection to 10.0.0.1 timed out" in told
    assert "do:  MASTER_ADDR, GLOO_SOCKET_IFNAME" in told
    assert told.splitlines()[-1].startswith("1 problem, ")


def test_the_meeting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    meeting = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in meeting.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "_MEETING", datetime.timedelta(seconds=1))
    with pytest.raises(RuntimeError):
        ranks.meet(given(**meeting), [])


def test_equal_findings_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    mine = [Finding("warning", "slow", "w", "d", "machine.x"), Finding("ok", "rank", check="network.x")]
    theirs = [mine[0], Finding("problem", "gone", "w", "d", "network.y")]
    assert command.tell(
        [report(0, findings=mine), report(1, findings=theirs), report(2, findings=theirs)], as_json=False
    )
    assert capsys.readouterr().out.splitlines() == [
        "machine",
        "  warning  slow",
        "           why: w",
        "           do:  d",
        "network",
        "  ok       rank [rank 0]",
        "  problem  gone [rank 1-2]",
        "           why: w",
        "           do:  d",
        "1 problem, 1 warning, 0 notes, 1 ok",
    ]
    assert command.tell([report(0, findings=mine)], as_json=False) == 0


def test_modules_need_no_torch_to_be_imported() -> None:
    code = (
        "import sys, mindspeed_llm.tools.doctor.command\nsys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
