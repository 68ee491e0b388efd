"""A recipe on several nodes: Slurm's and Kubernetes' templates, ssh, and a run over two network namespaces."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.launch import TINY, command_line, read_rows, succeed, write_corpus
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples" / "launch"
VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPUS_PER_NODE")
TELLING = f'#!/bin/bash\necho {" ".join(f"{name}=${name}" for name in VARIABLES)} "$@"\n'
"""A recipe that says what it was given."""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


# Slurm --------------------------------------------------------------------------------------------------------------

SBATCH = {"job-name", "nodes", "ntasks-per-node", "gres", "exclusive", "time", "output"}
"""Options of sbatch, by its manual, that a template may use."""


def test_directives_are_options_of_sbatch_before_the_first_command() -> None:
    lines = (LAUNCH / "slurm.sh").read_text().splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    # sbatch stops reading at the first line that is neither empty nor a comment.
    head = lines[: next(at for at, line in enumerate(lines) if line and not line.startswith("#"))]
    assert set(directives) <= set(head)
    found = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", "\n".join(directives), re.MULTILINE))
    assert len(found) == len(directives)
    assert set(found) <= SBATCH
    assert found["ntasks-per-node"] == "1", "torchrun starts the processes of a node"


def test_slurm_tells_each_node_where_it_is(tmp_path: Path) -> None:
    program(
        tmp_path / "bin/scontrol",
        '#!/bin/bash\n[[ "$*" == "show hostnames gpu[07-08]" ]] && printf "gpu07\\ngpu08\\n"\n',
    )
    program(
        tmp_path / "bin/srun",
        '#!/bin/bash\nwhile [[ $1 == --* ]]; do echo "$1"; shift; done\n'
        'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit; done\n',
    )
    recipe = program(tmp_path / "recipe.sh", TELLING)
    job = {"SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "2"}
    done = subprocess.run(
        ["bash", LAUNCH / "slurm.sh", recipe, "--seed", "a b"],
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **job},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if not line.startswith("--")]
    at = "MASTER_ADDR=gpu07 MASTER_PORT=23456 NPUS_PER_NODE= --seed a b"
    assert told == [f"NNODES=2 NODE_RANK={node} {at}" for node in (0, 1)]
    assert "--kill-on-bad-exit=1" in done.stdout


# Kubernetes ---------------------------------------------------------------------------------------------------------


def manifest() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())


def test_the_manifest_is_what_the_training_operator_takes() -> None:
    """Names, types and rules of kubeflow.org/v1 PyTorchJob and of its admission webhook."""
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", job["metadata"]["name"])
    assert set(job["spec"]) <= {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
    policy = {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy"}
    assert set(job["spec"]["runPolicy"]) <= policy | {"suspend"}
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert isinstance(job["spec"]["nprocPerNode"], str), "the field is a string"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    assert replicas["Worker"]["replicas"] >= 1
    for replica in replicas.values():
        assert set(replica) == {"replicas", "restartPolicy", "template"}
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = replica["template"]["spec"]
        (container,) = [one for one in pod["containers"] if one["name"] == "pytorch"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
        assert all(isinstance(one["value"], str) for one in container["env"])
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
        assert (ROOT / container["args"][0]).is_file()


@pytest.mark.parametrize(("kind", "node"), [("Master", 0), ("Worker", 1)])
def test_a_pod_tells_the_recipe_where_it_is(kind: str, node: int, tmp_path: Path) -> None:
    container = manifest()["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"]["containers"][0]
    recipe = program(tmp_path / "recipe.sh", TELLING)
    # What the operator adds to a pod's environment; its RANK and WORLD_SIZE count pods and processes.
    operator = {"MASTER_ADDR": "pretrain-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "16", "RANK": str(node)}
    operator |= {"PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": str(node), "PET_NNODES": "2"}
    done = subprocess.run(
        [*container["command"], recipe, "--seed", "a b"],
        env={"PATH": os.environ["PATH"], **operator},
        capture_output=True,
        text=True,
        timeout=20,
    )
    at = "MASTER_ADDR=pretrain-master-0 MASTER_PORT=23456 NPUS_PER_NODE=8 --seed a b"
    assert (done.stdout, done.stderr) == (f"NNODES=2 NODE_RANK={node} {at}\n", "")


# ssh ----------------------------------------------------------------------------------------------------------------

SSH = """#!/bin/bash
# As ssh does: options, the host, and the rest is a line for a shell there.
while [[ $1 == -o ]]; do shift 2; done
host=$1; shift
exec env -i PATH="$PATH" HOME="$HOME" {enter} sh -c "$*"
"""


class Ssh:
    """The launcher, with a stand-in for ssh."""

    def __init__(self, folder: Path, hosts: str, enter: str = "") -> None:
        self.folder, self.hosts, self.logs = folder, folder / "hosts", folder / "logs"
        program(folder / "bin/ssh", SSH.format(enter=enter))
        self.hosts.write_text(hosts)

    def start(self, *arguments: str | Path, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [LAUNCH / "ssh.sh", self.hosts, *arguments],
            env={**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "LOG_DIR": str(self.logs), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()


def wait_for(path: Path) -> str:
    """The content of a file that a recipe writes whole."""
    for _ in range(200):
        if path.exists():
            return path.read_text()
        time.sleep(0.05)
    raise TimeoutError(path)


def gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_ssh_tells_each_host_where_it_is(tmp_path: Path) -> None:
    ssh = Ssh(tmp_path, "me@gpu07  # the first\n\n# not this one\ngpu08\n")
    recipe = program(tmp_path / "a recipe.sh", TELLING)
    run = ssh.start("NPUS_PER_NODE=4", "EMPTY=", recipe, "--seed", "a 'b' $HOME", MASTER_PORT="7000")
    out, err = run.communicate(timeout=20)
    assert (run.returncode, err) == (0, "")
    assert out == f"started on 2 hosts; logs in {ssh.logs}\n"
    at = "MASTER_ADDR=gpu07 MASTER_PORT=7000 NPUS_PER_NODE=4 --seed a 'b' $HOME"
    assert [ssh.log("0-gpu07"), ssh.log("1-gpu08")] == [f"NNODES=2 NODE_RANK={node} {at}\n" for node in (0, 1)]
    assert sorted(path.name for path in ssh.logs.iterdir()) == ["0-gpu07.log", "1-gpu08.log"]


LASTING = """#!/bin/bash
trap 'echo told to end; exit 1' TERM
[[ $NODE_RANK == 1 && $1 == fail ]] && { until [[ -e $DIR/0 ]]; do sleep 0.05; done; echo no space; exit 7; }
sleep 60 & echo $$ $! >$DIR/.$NODE_RANK && mv $DIR/.$NODE_RANK $DIR/$NODE_RANK
wait
"""


def test_when_one_host_fails_all_stop(tmp_path: Path) -> None:
    ssh = Ssh(tmp_path, "gpu07\ngpu08\n")
    recipe = program(tmp_path / "recipe.sh", LASTING)
    run = ssh.start(f"DIR={tmp_path}", recipe, "fail")
    _, err = run.communicate(timeout=20)
    assert run.returncode == 7
    assert err.splitlines() == [
        f"error: exit status 7 of node 1 (gpu08), {ssh.logs}/1-gpu08.log; the others are stopped",
        "no space",
    ]
    assert ssh.log("0-gpu07") == "told to end\n"
    assert all(gone(int(pid)) for pid in (tmp_path / "0").read_text().split()), "with what the recipe started"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_when_the_launcher_ends_all_stop(how: signal.Signals, tmp_path: Path) -> None:
    ssh = Ssh(tmp_path, "gpu07\ngpu08\n")
    run = ssh.start(f"DIR={tmp_path}", program(tmp_path / "recipe.sh", LASTING), "last")
    pids = [int(pid) for node in ("0", "1") for pid in wait_for(tmp_path / node).split()]
    run.send_signal(how)
    run.communicate(timeout=20)
    assert run.returncode == (-how if how == signal.SIGKILL else 128 + how)
    if how != signal.SIGKILL:
        assert ssh.log("0-gpu07") + ssh.log("1-gpu08") == "told to end\n" * 2, "it waits for the recipes"
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("hosts", "arguments", "text"),
    [
        ("# none\n", ["recipe.sh"], "the list of hosts is empty"),
        ("gpu07\n", [], "usage: "),
        ("gpu07\n", ["A=1"], "usage: "),
        (None, ["recipe.sh"], "cannot read the list of hosts"),
    ],
)
def test_ssh_says_what_is_missing(hosts: str | None, arguments: list[str], text: str, tmp_path: Path) -> None:
    ssh = Ssh(tmp_path, hosts or "")
    if hosts is None:
        ssh.hosts.unlink()
    run = ssh.start(*arguments)
    assert (text in run.communicate(timeout=20)[1], run.returncode) == (True, 2)
    assert not ssh.logs.exists()


# Two hosts ----------------------------------------------------------------------------------------------------------

RECIPE = """#!/bin/bash
cd {root}
exec {python} -m torch.distributed.run --nnodes $NNODES --node_rank $NODE_RANK --nproc_per_node 1 \\
    --master_addr $MASTER_ADDR --master_port $MASTER_PORT pretrain_gpt.py "$@"
"""


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a wire between them: 10.77.0.1 and 10.77.0.2, each as eth0."""
    names = (f"mindspeed-{os.getpid()}-a", f"mindspeed-{os.getpid()}-b")
    if shutil.which("ip") is None or ip("netns", "add", names[0]).returncode:
        pytest.skip("network namespaces cannot be made here")
    try:
        ip("netns", "add", names[1])
        wire = ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        if wire.returncode:
            pytest.skip("network namespaces cannot be made here")
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def test_two_hosts_train_as_one_does(
    pool: Pool, namespaces: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path)
    flags = {**TINY, "--load": hf_folder("q25"), "--data-path": corpus}
    succeed(pool, {**flags, "--metrics-file": tmp_path / "one.jsonl"}, "dp2")

    ssh = Ssh(
        tmp_path,
        "10.77.0.1\n10.77.0.2\n",
        enter="ip netns exec $([[ $host == *.1 ]] && echo {} || echo {})".format(*namespaces),
    )
    recipe = program(tmp_path / "recipe.sh", RECIPE.format(root=ROOT, python=sys.executable))
    settings = ("MINDSPEED_LLM_DEVICE=cpu", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0")
    run = ssh.start(*settings, recipe, *command_line({**flags, "--metrics-file": tmp_path / "two.jsonl"}))
    _, err = run.communicate(timeout=100)
    assert run.returncode == 0, err + ssh.log("0-10.77.0.1") + ssh.log("1-10.77.0.2")
    one, two = (
        [(row["lm_loss"], row["grad_norm"]) for row in read_rows(tmp_path / f"{name}.jsonl")] for name in ("one", "two")
    )
    assert len(one) == 3
    assert one == two
