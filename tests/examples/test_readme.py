"""What the guides tell a reader to type works: their blocks of code are found, read as a shell would, and tried.

In a block marked ``bash`` every line is a command; in a block without a mark, the lines that begin with a program of
ours. Of a command with ``...`` only the flags are looked up: it leaves something to the reader. One that needs what a
test does not have (Slurm, another host, minutes) stands in a block with the comment ``# not run by the tests: <why>``,
which the reader sees as well. A block marked ``text`` is what the command before it prints, but for its numbers.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from mindspeed_llm.cli import convert, preprocess
from mindspeed_llm.config.spelled import meanings
from tests.fixtures import hf_folder

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ("README.md", "CONTRIBUTING.md", "mindspeed_llm/ops/README.md")
PAGES = (*GUIDES, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
NOT_RUN = re.compile(r"^# not run by the tests: \w+", re.MULTILINE)
ABRIDGED = "..."
VARIABLE = re.compile(r"([A-Z_0-9]+)=\S*")
OURS = re.compile(rf"\s*({VARIABLE.pattern} +)*(\S*python|torchrun|make|bash|examples/\S+)( |$)")
SHELL = ("source", "cd", "mkdir", "export", "cat", "ls", "tail", "grep")
"""Commands of the shell itself and of every system, which need no trying."""
MODELS = ("MODEL", "DIR", "Qwen2.5-0.5B", "out/first/hf")
"""Folders that the guides speak of: each is the same tiny model here."""
TEXTS = ("corpus.jsonl", "more/a.jsonl", "corpus/a.jsonl", "data/corpus/a.jsonl")
TREE = "ckpt/tree"
"""A checkpoint of per-rank files."""
SAMPLES = "mindspeed_llm.tools.samples"
QUICKSTART = "docs/quickstart.md"


class Block(NamedTuple):
    """A block of code: where it is, the language that it is marked with, its text."""

    page: str
    line: int
    language: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """The fenced and the indented blocks of a page, in order."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        begin = at
        if lines[at].startswith("```"):
            at = next(i for i in range(at + 1, len(lines)) if lines[i].startswith("```"))
            yield Block(page, begin + 1, lines[begin][3:].strip(), "\n".join(lines[begin + 1 : at]))
        elif lines[at].startswith("    ") and not (at and lines[at - 1]):
            at = next((i for i in range(at, len(lines)) if lines[i] and not lines[i].startswith("    ")), len(lines))
            yield Block(page, begin + 1, "", "\n".join(line[4:] for line in lines[begin:at]))
            continue
        at += 1


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a block, variables that are set for it first."""
    if block.language not in ("", "bash") or NOT_RUN.search(block.text):
        return
    for line in re.sub(r"\\\n", " ", block.text).splitlines():
        words = shlex.split(line, comments=True) if block.language or OURS.match(line) else []
        if words:
            yield words


ALL = [block for page in PAGES for block in blocks(page)]
COMMANDS = [pytest.param(words, id=f"{b.page}:{b.line}") for b in ALL for words in commands(b)]
PYTHON = [pytest.param(b.text, id=f"{b.page}:{b.line}") for b in ALL if b.language == "python"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the files that the guides speak of exist."""
    folder = tmp_path_factory.mktemp("guides")
    for name in ("examples", *(path.name for path in ROOT.glob("*.py"))):
        (folder / name).symlink_to(ROOT / name)
    for name in MODELS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(hf_folder("q25tied", max_position_embeddings=8192))
    for name in TEXTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "To be, or not to be, that is the question"}\n' * 500)
    for prefix in ("data/corpus", "out/data/train"):
        source = ["--input", str(folder / "corpus.jsonl"), "--tokenizer-name-or-path", str(folder / "MODEL")]
        made = ["--output-prefix", str(folder / prefix), "--append-eod", "--workers", "1"]
        assert preprocess.main(source + made) == 0
    tree = ["--save-dir", str(folder / TREE), "--save-format", "legacy", "--target-tensor-parallel-size", "2"]
    assert convert.main(["--load-dir", str(folder / "MODEL"), *tree]) == 0
    return folder


def flags_of(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.match("--[a-z]", word)}


def status_of(program: str, argv: Sequence[str]) -> int:
    """The exit status of a script of the root or of a module, in this process."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'mindspeed_llm.* found in sys.modules", RuntimeWarning)
        patch.setattr(sys, "argv", [program, *argv])
        try:
            if program.endswith(".py"):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__")
        except SystemExit as left:
            return int(left.code or 0)
    return 0


def flags_in_help(program: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The flags that the help of a program names, and that of its sub-command if it has one."""
    subcommand = [word for word in argv[:1] if not word.startswith("-")]
    for asked in (["--help"], [*subcommand, "--help"]):
        assert status_of(program, asked) == 0
    return set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out))


def try_python(words: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script of the root, or ``-m`` and a module, as far as it goes without training or writing."""
    program, *argv = words[1:] if words[0] == "-m" else words
    argv = [re.sub("^/(?=data/)", f"{place}/", word) for word in argv]
    whole = ABRIDGED not in argv and "--merge-shards" not in argv  # shards are there when others have written them
    if whole and program in ("pretrain_gpt.py", "preprocess_data.py"):
        assert status_of(program, [*argv, "--validate-only"]) == 0, capsys.readouterr().err
    elif whole and program == "convert_ckpt.py" and Path(argv[argv.index("--load-dir") + 1]).is_dir():
        assert status_of(program, [*argv, "--dry-run"]) == 0, capsys.readouterr().err
    elif whole and program == SAMPLES:
        assert status_of(program, argv) == 0, capsys.readouterr().err
    elif program in ("pretrain_gpt.py", "pytest"):
        assert flags_of(argv) <= {*meanings(), "--slow"}
    else:
        assert flags_of(argv) <= flags_in_help(program, argv, capsys)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_works(
    words: list[str], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    scripts = [word for word in words if word.startswith("examples/") and word.endswith(".sh")]
    variables = [found[1] for word in words if (found := VARIABLE.fullmatch(word))]
    if scripts:
        read = "".join(path.read_text() for path in (*map(Path, scripts), *Path("examples/_shared").glob("*.sh")))
        assert [name for name in variables if not re.search(rf"\b{name}\b", read)] == []
        return
    program, *rest = (word for word in words if not VARIABLE.fullmatch(word))
    if program == "torchrun":
        at = next(i for i, word in enumerate(rest) if word.endswith(".py"))
        sizes = {name.lstrip("-").replace("-", "_"): value for name, value in pairwise(rest[:at])}
        world = int(sizes.get("nproc_per_node", 1)) * int(sizes.get("nnodes", 1))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        try_python(rest[at:], place, capsys)
    elif program.endswith("python"):
        try_python([word.replace("$SLURM_ARRAY_TASK_ID", "0") for word in rest], place, capsys)
    else:  # targets of make are in tests/unit/tools/test_docs.py
        assert program in ("make", *SHELL), "neither known to the test nor marked as not run by it"


@pytest.mark.parametrize("code", PYTHON)
def test_python_runs(code: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    exec(compile(code, "guide", "exec"), {})


def test_blocks_are_found_and_most_of_them_are_tried() -> None:
    assert {"README.md", QUICKSTART, "docs/data.md"} <= {block.page for block in ALL if list(commands(block))}
    assert {block.language for block in ALL} <= {"", "bash", "python", "text", "yaml", "mermaid", "json"}
    fenced = [block for block in ALL if block.language == "bash"]
    assert sum(bool(NOT_RUN.search(block.text)) for block in fenced) < len(fenced) / 2


def typed(code: str, folder: Path, program: Sequence[str] = ("bash", "-euo", "pipefail", "-c")) -> str:
    """What is printed when a block is typed in ``folder``."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([*program, code], cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def as_pattern(line: str) -> str:
    """A shown line, with any number for its numbers, any spaces for its spaces, anything for ``...``."""
    number = r"-?\d[\d.:e+-]*"
    parts = re.split(rf"(\.\.\.|\s+|{number})", line, flags=re.IGNORECASE)
    kinds = {"...": ".*", "": ""}
    return "".join(
        kinds[part]
        if part in kinds
        else r"\s*"
        if part.isspace()
        else f"(?i:{number})"
        if part[-1].isdigit()
        else re.escape(part)
        for part in parts
    )


def folder_like_a_clone(folder: Path) -> Path:
    """``folder`` with the scripts, the examples and the environment of the project."""
    for name in ("examples", "pretrain_gpt.py", "preprocess_data.py"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_quickstart_page_can_be_typed_from_top_to_bottom(tmp_path: Path) -> None:
    folder = folder_like_a_clone(tmp_path)
    printed = ""
    for block in blocks(QUICKSTART):
        if block.language == "bash":
            printed = typed(block.text, folder)
        elif block.language == "python":
            printed = typed(block.text, folder, (sys.executable, "-c"))
        elif block.language == "text":
            for line in block.text.splitlines():
                assert re.search(as_pattern(line), printed), f"not printed: {line}\n{printed}"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_training_command_of_the_readme_trains(place: Path) -> None:
    (command,) = [block.text for block in blocks("README.md") if "torchrun" in block.text]
    printed = typed(f"{command} --train-iters 2 --seq-length 32 --eval-iters 1 --global-batch-size 4", place)
    assert "saved checkpoint checkpoints/iter_0000002" in printed
    assert (place / "trained" / "model.safetensors").is_file()
