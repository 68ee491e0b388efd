"""The patches of every run, looked at without running anything; tests/distributed/test_core.py shows what each does."""

from __future__ import annotations

import contextlib
import importlib
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.core import patches
from mindspeed_llm.patching import (
    Patch,
    applied_patches,
    fingerprint_of,
    known_fingerprints,
    resolve_target,
    stale_copies,
)
from mindspeed_llm.tools import patch_audit

PACKAGES = (
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.common",
    "megatron.core.transformer",
    "megatron.core.dist_checkpointing",
)
MEANT = {
    # The CPU half of optimizer offloading is torch's own AdamW on purpose.
    "megatron.core.optimizer.CPUAdam still holds megatron.core.optimizer:Adam",
}


@pytest.fixture
def reverted() -> Iterator[None]:
    patches.revert()
    yield
    patches.apply_once()


@pytest.fixture
def originals(reverted: None) -> dict[str, Any]:
    """Every target as megatron-core has it; the patches are in force again."""
    found = {patch.target: resolve_target(patch.target)[2] for patch in patches.every_run()}
    patches.apply_once()
    return found


def in_force() -> list[Patch]:
    targets = {patch.target for patch in patches.every_run()}
    return [patch for patch in applied_patches() if patch.target in targets]


def test_applying_again_does_nothing() -> None:
    before = applied_patches()
    patches.apply_once()
    assert applied_patches() == before
    assert len(in_force()) == len(patches.every_run())


def test_revert_puts_megatron_core_back(caplog: pytest.LogCaptureFixture) -> None:
    patched = {patch.target: resolve_target(patch.target)[2] for patch in patches.every_run()}
    count = len(applied_patches())
    patches.revert()
    try:
        assert len(applied_patches()) == count - len(patched)
        assert {target: fingerprint_of(target) for target in patched} == known_fingerprints()
        for patch in patches.every_run():
            now = resolve_target(patch.target)[2]
            assert now != patched[patch.target] or patch.kind == "recode"
    finally:
        with caplog.at_level(logging.WARNING):
            patches.apply_once()
    assert not caplog.records, "a fingerprint does not fit the installed megatron-core"


def test_no_module_holds_a_copy_from_before(originals: dict[str, Any]) -> None:
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        for info in pkgutil.walk_packages(path, package + ".", onerror=lambda name: None):
            # Some need triton; test_seam.py lists them.
            with contextlib.suppress(ImportError):
                importlib.import_module(info.name)
    assert set(stale_copies(in_force(), originals)) == MEANT
    assert stale_copies(in_force(), originals, "mindspeed_llm") == []


def test_audit_is_up_to_date(reverted: None) -> None:
    assert patch_audit.main(["--check"]) == 0


def test_audit_sees_a_stale_page_and_writes_it(
    reverted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patch_audit, "FINGERPRINTS", tmp_path / "fingerprints.json")
    assert patch_audit.main(["--check"], root=tmp_path) == 1
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.count("is out of date") == 2
    assert patch_audit.main([], root=tmp_path) == 0
    assert patch_audit.main(["--check"], root=tmp_path) == 0
    page = (tmp_path / patch_audit.PAGE).read_text()
    assert all(page.count(f"| `{patch.target}` |") == 1 for patch in patches.every_run())
