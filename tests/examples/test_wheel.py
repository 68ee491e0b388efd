"""The package as others install it: a wheel in an environment of its own, run from a folder that knows no source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.fixtures import tokenizer_folder

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sysconfig.get_path("purelib")
FOLDER = ROOT / "mindspeed_llm" / "tools"
TOOLS = sorted(
    f"mindspeed_llm.tools.{path.relative_to(FOLDER).parts[0].removesuffix('.py')}"
    for path in [*FOLDER.glob("*.py"), *FOLDER.glob("*/__main__.py")]
    if 'if __name__ == "__main__":' in path.read_text()
)
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

ASK_FOR_HELP = """
import contextlib, importlib, io, runpy, sys
tools, compiled = (words.split() for words in sys.argv[1:])
for name in tools:
    sys.argv = [name, "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        assert not ended.code, name
        assert said.getvalue().startswith("usage:"), name
    else:
        raise SystemExit(f"{name} --help did not leave")
for name in compiled:
    importlib.import_module(name)
loaded = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "mindspeed_llm" and m.__file__]
print(*loaded, sep="\\n")
"""


def run(*command: object, cwd: Path, ok: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert not ok or done.returncode == 0, done.stdout + done.stderr
    return done


def sources(*folders: str) -> list[str]:
    """Files that git knows or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


def libraries() -> list[str]:
    """The compiled modules, as they lie beside the sources."""
    return [str(path.relative_to(ROOT)) for path in (ROOT / "mindspeed_llm").rglob("*.so")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from nothing but the sources; what is compiled already is not compiled again."""
    folder = tmp_path_factory.mktemp("wheel")
    built = folder / "source" / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    copies = [(name, folder / "source" / name) for name in sources("mindspeed_llm", "csrc", "*.*", "LICENSE")]
    # Last, so that they are newer than what they are made of.
    copies += [(name, built / name) for name in libraries()]
    for name, target in copies:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*command, "--wheel-dir", folder, folder / "source", cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The ``bin`` of a new environment with the wheel; what it depends on is borrowed from this one."""
    environment = wheel.parent / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=wheel.parent)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(PACKAGES + "\n")
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--no-compile", wheel, cwd=wheel.parent)
    return python.parent


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    wanted = {name for name in sources("mindspeed_llm") if not name.endswith(".md")}
    assert names == wanted | set(libraries())


def test_every_command_says_what_it_does(installed: Path, tmp_path: Path) -> None:
    for script in SCRIPTS:
        assert run(installed / script, "--help", cwd=tmp_path).stdout.startswith("usage:")
    compiled = [name.partition(".")[0].replace("/", ".") for name in libraries()]
    words = [" ".join(TOOLS), " ".join(compiled)]
    done = run(installed / "python", "-W", "ignore", "-c", ASK_FOR_HELP, *words, cwd=tmp_path)
    loaded = done.stdout.split()
    assert len(loaded) > len(TOOLS)
    assert [path for path in loaded if not path.startswith(str(installed.parent))] == []
    assert list(tmp_path.iterdir()) == []


def test_it_prepares_data(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "some text"}\n' * 3)
    flags = ["--input", "texts.jsonl", "--output-prefix", "out", "--tokenizer-name-or-path", tokenizer_folder()]
    run(installed / "mindspeed-llm-preprocess-data", *flags, "--append-eod", cwd=tmp_path)
    assert (tmp_path / "out_text_document.bin").stat().st_size == 3 * (len("some text") + 1) * 2
    samples = ["-m", "mindspeed_llm.tools.samples", "--data-path", "out_text_document", "--seq-length", "4"]
    assert run(installed / "python", *samples, "--count", "1", cwd=tmp_path).stdout.startswith('{"tokens": [')


ON_THE_SOURCE = """
import runpy, sys
for name in ("docs", "patch_audit", "quickstart", "recipes"):
    sys.argv = [name]
    try:
        runpy.run_module(f"mindspeed_llm.tools.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        print(name, ended.code)
"""


def test_what_works_on_the_source_says_so(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "python", "-W", "ignore", "-c", ON_THE_SOURCE, cwd=tmp_path)
    assert done.stdout.split() == ["docs", "2", "patch_audit", "2", "quickstart", "2", "recipes", "2"]
    assert done.stderr.count("error: this command works on a clone of the repository") == 4
    assert list(tmp_path.iterdir()) == []
