"""The habits of this repository, read from its source.

Each rule looks at one parsed file and yields what it objects to; ``test_the_rules_can_fail`` feeds each a sample that
breaks it. Sizes alone may have exceptions: ``oversize.txt`` lists them with their present size, and may only shrink.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OVERSIZE = Path(__file__).with_name("oversize.txt")
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600
GENERATED = {"mindspeed_llm/config/mcore_flags.py"}
VAGUE_NAMES = {"utils", "util", "common", "helper", "helpers", "misc"}


@dataclass(frozen=True)
class Source:
    """One Python file: ``path`` relative to the root, with ``/``."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    def inside(self, *folders: str) -> bool:
        return any(self.path.startswith(f"mindspeed_llm/{folder}/") for folder in folders)

    @property
    def packaged(self) -> bool:
        return self.path.startswith("mindspeed_llm/")

    @property
    def is_script(self) -> bool:
        return "/" not in self.path


Finding = tuple[int, str]
Rule = Callable[[Source], Iterator[Finding]]


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of names, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return f"{start}.{node.attr}" if start else ""
    return ""


def calls(source: Source) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def keyword(call: ast.Call, name: str) -> object:
    """The constant given for a keyword, ``None`` when absent or not a constant."""
    for given in call.keywords:
        if given.arg == name and isinstance(given.value, ast.Constant):
            return given.value.value
    return None


def imports(source: Source) -> Iterator[tuple[str, int]]:
    """Every imported module, late ones too, with its line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def no_global_arguments(source: Source) -> Iterator[Finding]:
    for call, name in calls(source):
        if name.rpartition(".")[2] in ("get_args", "set_args") and not name.startswith("typing."):
            yield call.lineno, f"{name}(): configuration is passed, not looked up (typing.get_args needs its prefix)"


def no_print(source: Source) -> Iterator[Finding]:
    for call, name in calls(source):
        if name == "print" and source.packaged:
            yield call.lineno, "print: use logging; cli and tools write to sys.stdout"


def no_broad_except(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler) or not source.packaged:
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {"" if kind is None else dotted(kind) for kind in caught}
        reraised = any(isinstance(inner, ast.Raise) for statement in node.body for inner in ast.walk(statement))
        if "" in names and node.type is None:
            yield node.lineno, "bare except"
        elif names & {"Exception", "BaseException"} and not reraised:
            yield node.lineno, "except Exception that does not raise again"


def no_sys_modules_writes(source: Source) -> Iterator[Finding]:
    if source.inside("patching", "device"):
        return
    for node in ast.walk(source.tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript) and dotted(target.value) == "sys.modules":
                yield target.lineno, "sys.modules is written in patching/ and device/ only"
    for call, name in calls(source):
        if name in {f"sys.modules.{method}" for method in ("pop", "update", "setdefault", "clear", "popitem")}:
            yield call.lineno, "sys.modules is written in patching/ and device/ only"


def no_torch_cuda(source: Source) -> Iterator[Finding]:
    if not source.packaged or source.inside("device", "ops"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in ("torch.cuda", "torch.npu"):
            yield node.lineno, f"{dotted(node)} is used in device/ and ops/ only"
    for name, line in imports(source):
        if re.match(r"torch\.(cuda|npu)\b", name):
            yield line, "torch.cuda is imported in device/ and ops/ only"


def no_command_line(source: Source) -> Iterator[Finding]:
    if not source.packaged or source.inside("cli", "tools"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node) == "sys.argv":
            yield node.lineno, "sys.argv is read in cli/ and tools/ only"
    for name, line in imports(source):
        if name.partition(".")[0] == "argparse":
            yield line, "argparse is used in cli/ and tools/ only"


def asserts_say_why(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert) and node.msg is None and source.packaged:
            yield node.lineno, "assert without a message"


def no_unsafe_loading(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
            yield node.value.lineno, "trust_remote_code: nothing untrusted runs"
    for call, name in calls(source):
        if source.packaged and name in ("pickle.load", "pickle.loads"):
            yield call.lineno, "pickles are read in checkpoint/trusted.py only, by a list of names"
        if source.packaged and name.startswith("dist_checkpointing.load") and not source.path.endswith("/mcore_io.py"):
            yield call.lineno, "megatron-core's loads unpickle anything: use checkpoint.mcore_io"
        if source.packaged and name.endswith(".from_pretrained") and keyword(call, "trust_remote_code") is not False:
            yield call.lineno, "from_pretrained asks at the terminal whether to run code: trust_remote_code=False"
        if name == "torch.load" and keyword(call, "weights_only") is not True:
            yield call.lineno, "torch.load without weights_only=True"
        if keyword(call, "shell") is True or name in ("os.system", "os.popen"):
            yield call.lineno, "a shell is started: pass a list of arguments"


def todos_have_an_issue(source: Source) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", token.string):
            yield token.start[0], "TODO without an issue: write TODO(#12)"


def megatron_comes_after_the_seam(source: Source) -> Iterator[Finding]:
    if not source.packaged or source.inside("core"):
        return
    imported = dict(imports(source))
    megatron = [line for name, line in imported.items() if name.partition(".")[0] == "megatron"]
    packages = {f"{parent.as_posix()}/__init__.py" for parent in Path(source.path).parents}
    behind = [other for other in sources() if other.path in packages]
    if megatron and not any(
        name.startswith("mindspeed_llm.core") for file in (source, *behind) for name, _ in imports(file)
    ):
        yield min(megatron), "megatron-core without the device seam: import mindspeed_llm.core here or in the package"


def scripts_are_thin(source: Source) -> Iterator[Finding]:
    if source.is_script and source.path != "setup.py" and len(source.text.splitlines()) > 15:
        yield 1, "a script at the root has at most 15 lines; its work belongs into mindspeed_llm.cli"


def names_say_something(source: Source) -> Iterator[Finding]:
    if set(Path(source.path).with_suffix("").parts) & VAGUE_NAMES:
        yield 1, "a file is named for the one thing in it"


RULES: dict[Rule, tuple[str, str]] = {
    # Each with a path and a text that it must object to.
    no_global_arguments: ("mindspeed_llm/training/x.py", "args = get_args()"),
    no_print: ("mindspeed_llm/training/x.py", "print(1)"),
    no_broad_except: ("mindspeed_llm/x.py", "try:\n    f()\nexcept (OSError, Exception):\n    g()"),
    no_sys_modules_writes: ("tests/unit/x.py", "sys.modules['a'] = None"),
    no_torch_cuda: ("mindspeed_llm/training/x.py", "torch.cuda.synchronize()"),
    no_command_line: ("mindspeed_llm/config/x.py", "import argparse"),
    asserts_say_why: ("mindspeed_llm/x.py", "assert x"),
    no_unsafe_loading: ("mindspeed_llm/x.py", "torch.load(f, weights_only=False)"),
    todos_have_an_issue: ("mindspeed_llm/x.py", "# TODO: later"),
    megatron_comes_after_the_seam: ("mindspeed_llm/tools/x.py", "def f():\n    from megatron.core import x"),
    scripts_are_thin: ("pretrain_gpt.py", "\n" * 20),
    names_say_something: ("mindspeed_llm/utils/x.py", ""),
}


@cache
def sources() -> tuple[Source, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = [path for path in listed.split("\0") if path and (ROOT / path).is_file()]
    return tuple(Source(path, (ROOT / path).read_text(encoding="utf-8")) for path in sorted(paths))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps(rule: Rule) -> None:
    found = [f"{source.path}:{line}: {message}" for source in sources() for line, message in rule(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rules_can_fail(rule: Rule) -> None:
    assert list(rule(Source(*RULES[rule])))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("mindspeed_llm/x.py", "try:\n    f()\nexcept Exception as error:\n    raise X from error"),
        ("mindspeed_llm/patching/x.py", "sys.modules['a'] = None"),
        ("mindspeed_llm/device/x.py", "torch.cuda.synchronize()"),
        ("mindspeed_llm/cli/x.py", "import argparse, sys\nsys.argv"),
        ("mindspeed_llm/x.py", "torch.load(f, weights_only=True)\nassert x, 'why'\nsubprocess.run(['a'])"),
        ("mindspeed_llm/x.py", "# TODO(#12): later"),
        ("mindspeed_llm/x.py", "typing.get_args(kind)"),
    ],
)
def test_the_rules_allow(path: str, text: str) -> None:
    assert [finding for rule in RULES for finding in rule(Source(path, text))] == []


def sizes(source: Source) -> dict[str, int]:
    """Lines over the limits, by ``path`` and ``path:function``."""
    found: dict[str, int] = {}
    if (lines := len(source.text.splitlines())) > MAX_FILE_LINES:
        found[source.path] = lines
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found[f"{source.path}:{node.name}"] = lines
    return found


def test_functions_and_files_stay_small() -> None:
    allowed = {name: int(lines) for name, lines in (line.split() for line in OVERSIZE.read_text().splitlines())}
    found = {
        name: lines for source in sources() if source.path not in GENERATED for name, lines in sizes(source).items()
    }
    grown = {name: lines for name, lines in found.items() if lines > allowed.get(name, 0)}
    assert not grown, f"over {MAX_FUNCTION_LINES} lines a function or {MAX_FILE_LINES} a file: {grown}"
    loose = {
        name: f"{lines} listed, {found.get(name, 'none')} now"
        for name, lines in allowed.items()
        if lines != found.get(name)
    }
    assert not loose, f"tests/unit/oversize.txt may only shrink, and now can: {loose}"


def test_sizes_are_measured() -> None:
    long_function = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert sizes(Source("mindspeed_llm/x.py", long_function)) == {"mindspeed_llm/x.py:f": MAX_FUNCTION_LINES + 1}
    assert sizes(Source("mindspeed_llm/x.py", "\n" * (MAX_FILE_LINES + 1))) == {
        "mindspeed_llm/x.py": MAX_FILE_LINES + 1
    }


def test_pins_are_exact_and_installed_once() -> None:
    """Every requirement is pinned, and no two files pin one package differently."""
    pins: dict[str, str] = {}
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for line in path.read_text().splitlines():
            line = line.partition("#")[0].strip()
            if not line or line.startswith("-r "):
                continue
            name, exact, version = line.partition("==")
            assert exact, f"{path.name}: {line!r} is not pinned with =="
            assert pins.setdefault(name.lower(), version) == version, f"{path.name}: {name} is pinned twice"
