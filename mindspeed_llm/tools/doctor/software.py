"""Python, packages, compiled modules, ops, patches, and what hides behind the names of packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from mindspeed_llm.tools.doctor.finding import PACKAGE, Check, Finding, Surroundings, note, ok, problem, warning
from mindspeed_llm.tools.doctor.probe import NATIVE

ROOT = PACKAGE.parent
"""The checkout, where the package is not in site-packages."""
_BUILD = "make build, or python setup.py build_ext --inplace"
_NEEDED_AFTER = {
    "torch": "reinstall torch: pip install --force-reinstall torch==VERSION of requirements/runtime.txt",
    "device": "unset MINDSPEED_LLM_DEVICE, or mend the driver of the device",
    "native": f"build the compiled modules for this machine: {_BUILD}",
    "megatron-core": "pip install megatron-core==0.16.1, and look at software.names below",
}


def python(_: Surroundings) -> Iterator[Finding]:
    """The version of Python, and which one it is."""
    what = f"Python {sys.version.split()[0]} at {sys.executable}"
    if sys.version_info[:2] == (3, 11):
        yield ok(what)
    else:
        yield warning(what, "the tests run with Python 3.11", "make PYTHON=python3.11 venv")


def imports(s: Surroundings) -> Iterator[Finding]:
    """That torch, the compiled modules and megatron-core can be imported as a run does."""
    if s.probe.failed is None:
        yield ok("what a run imports can be imported")
        return
    yield problem(
        f"{s.probe.failed} fails: {' '.join(s.probe.cause.split())}",
        "every run fails as this does",
        _NEEDED_AFTER.get(s.probe.failed, f"{sys.executable} -m mindspeed_llm.tools.doctor.probe shows the traceback"),
    )


def packages(_: Surroundings) -> Iterator[Finding]:
    """Installed versions against what the package allows, and against those that the tests ran with."""
    unmet = [found for requirement in _required() if (found := _unmet(requirement))]
    for found in unmet:
        yield problem(found[0], "the package does not work without", f"pip install '{found[1]}'")
    pins = _pins(ROOT / "requirements" / "runtime.txt")
    known = {one for _, one in unmet}
    other = [found[0] for pin in pins if (found := _unmet(pin)) and str(pin) not in known]
    if other:
        yield warning(
            "not what the tests ran with: " + "; ".join(other),
            "results and behaviour may differ from what is documented",
            f"pip install -r {ROOT / 'requirements' / 'runtime.txt'}",
        )
    if not unmet and not other:
        main = ", ".join(f"{name} {installed(name)}" for name in ("torch", "megatron-core", "transformers", "numpy"))
        yield ok(main + (", as pinned" if pins else ", as required"))


def _required() -> list[Requirement]:
    try:
        lines = importlib.metadata.requires("mindspeed-llm") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    requirements = [Requirement(line) for line in lines]
    return [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]


def _pins(path: Path) -> list[Requirement]:
    found: list[Requirement] = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(Requirement(line.partition("#")[0]))
        except InvalidRequirement:
            continue
    return found


def installed(name: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unmet(requirement: Requirement) -> tuple[str, str] | None:
    """What is wrong, and the requirement as pip takes it; None where it is met."""
    version = installed(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed", str(requirement)
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, not {requirement.specifier}", str(requirement)
    return None


def names(_: Surroundings) -> Iterator[Finding]:
    """Other folders on Python's path that bear the names of our packages."""
    clean = True
    for folder in _named("mindspeed_llm"):
        if folder != PACKAGE:
            clean = False
            yield warning(
                f"{folder} is another mindspeed_llm (this one is {PACKAGE})",
                "which of them a command gets depends on the folder it is started in; their flags and modules differ",
                f"take {folder.parent} out of PYTHONPATH, or pip uninstall the other",
            )
    core = [folder for folder in _named("megatron") if (folder / "core" / "__init__.py").is_file()]
    whole = [folder for folder in _named("megatron") if (folder / "__init__.py").is_file()]
    wheel = _wheel_folder()
    for folder in dict.fromkeys([*whole, *core]):
        if folder == wheel:
            continue
        clean = False
        # A folder with __init__.py comes before every one without, wherever it is on the path.
        first = folder in whole or wheel not in core or core.index(folder) < core.index(wheel)
        say = problem if first else warning
        yield say(
            f"{folder} is another megatron (the wheel's is {wheel})",
            "it is imported in place of megatron-core 0.16.1, which the patches are made for"
            if first
            else "it is one entry of the path away from being imported in place of megatron-core",
            f"take {folder.parent} out of PYTHONPATH, or pip uninstall it",
        )
    if clean:
        yield ok("no other mindspeed_llm or megatron on Python's path")


def _named(name: str) -> list[Path]:
    """Folders of this name on Python's path, in its order."""
    folders = [Path(entry or ".", name).resolve() for entry in sys.path]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir() and any(folder.glob("**/*.py"))]


def _wheel_folder() -> Path | None:
    try:
        return Path(str(importlib.metadata.distribution("megatron-core").locate_file("megatron"))).resolve()
    except importlib.metadata.PackageNotFoundError:
        return None


def neighbours(_: Surroundings) -> Iterator[Finding]:
    """Packages that change megatron-core or pretend to be another."""
    clean = True
    if importlib.util.find_spec("apex") is not None and importlib.util.find_spec("amp_C") is None:
        clean = False
        yield warning(
            "apex is installed without its kernels (amp_C): PyPI's package of that name is not NVIDIA's",
            "megatron-core imports apex where it finds it",
            "pip uninstall apex",
        )
    if importlib.util.find_spec("mindspeed") is not None:
        clean = False
        yield warning(
            "mindspeed (MindSpeed core) is installed",
            "this suite does not use it; whatever imports its adaptor patches the same functions of megatron-core",
            "pip uninstall mindspeed, or keep it in an environment of its own",
        )
    torch, npu = installed("torch"), installed("torch_npu")
    if torch and npu and torch.split(".")[:2] != npu.split(".")[:2]:
        clean = False
        yield problem(
            f"torch_npu {npu} is made for another torch than {torch}",
            "torch_npu loads only with the torch of its own version",
            f"pip install 'torch=={'.'.join(npu.split('.')[:2])}.*'",
        )
    if clean:
        yield ok("no package that changes megatron-core")


def compiled(s: Surroundings) -> Iterator[Finding]:
    """The C++ modules: built, loadable, made from the present sources."""
    found = s.probe.stages.get("native")
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    for name, module in NATIVE.items():
        cause = found.get(name) if found is not None else None
        files = list(PACKAGE.joinpath(*module.split(".")[1:-1]).glob(f"{module.rpartition('.')[2]}*.so"))
        if cause is not None:
            yield warning(
                f"the C++ module of {name} is not there: {cause}",
                "the ops run as their reference in plain torch, tokenizers as their library: both are slower",
                _BUILD,
            )
        newer = [path for path in sources if files and path.stat().st_mtime > max(f.stat().st_mtime for f in files)]
        if newer:
            yield warning(
                f"the C++ module of {name} is older than {newer[0].relative_to(ROOT)}",
                "it computes what the sources said earlier",
                _BUILD,
            )
        elif cause is None and found is not None:
            yield ok(f"the C++ module of {name} loads")
    header = Path(sysconfig.get_path("include"), "Python.h")
    lacking = [name for name, there in (("g++", shutil.which("g++")), ("Python.h", header.is_file())) if not there]
    if lacking:
        yield note(
            f"no {' and no '.join(lacking)}",
            "the C++ modules cannot be built here",
            "apt-get install g++ python3.11-dev, or what provides them",
        )


def op_table(s: Surroundings) -> Iterator[Finding]:
    """Which implementation of each op a bf16 run on this device takes, and why."""
    for op, row in s.probe.stages.get("ops", {}).items():
        what = f"{op}: {row['impl']} ({row['reason']}; {row['status']})"
        if row["reason"].startswith("fallback"):
            yield warning(what, "the reference in plain torch is slower", _BUILD)
        else:
            yield ok(what)


def patches(s: Surroundings) -> Iterator[Finding]:
    """That the functions of megatron-core which are patched are those of 0.16.1."""
    seen = s.probe.stages.get("megatron-core")
    if seen is None:
        return
    if seen["strange"]:
        yield problem(
            f"{len(seen['strange'])} of {seen['count']} patched functions of megatron-core are not those of 0.16.1: "
            + ", ".join(seen["strange"]),
            "the patches may not fit: wrong results without an error",
            "pip install --force-reinstall --no-deps megatron-core==0.16.1",
        )
    else:
        yield ok(f"{seen['count']} patches of megatron-core fit")


CHECKS: tuple[Check, ...] = (python, imports, packages, names, neighbours, compiled, op_table, patches)
