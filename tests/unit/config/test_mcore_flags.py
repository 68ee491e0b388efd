"""The committed table of megatron-core's fields against megatron-core itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.config.mcore_flags import DdpFlags, OptimizerFlags, TransformerFlags
from mindspeed_llm.tools import mcore_flags

TABLES = {
    "TransformerConfig": TransformerFlags,
    "OptimizerConfig": OptimizerFlags,
    "DistributedDataParallelConfig": DdpFlags,
}


@pytest.fixture(scope="module")
def megatron() -> dict[str, dict[str, tuple[str, Any]]]:
    """Type and default of every field of megatron-core's own dataclasses."""
    import mindspeed_llm.core  # noqa: F401  brings megatron-core in behind its seam

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {
        cls.__name__: {
            field.name: (
                str(field.type),
                field.default_factory() if callable(field.default_factory) else field.default,
            )
            for field in dataclasses.fields(cls)
        }
        for cls in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    }


def test_the_committed_table_is_what_the_wheel_says() -> None:
    assert mcore_flags.main(["--check"]) == 0


def test_check_notices_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "mcore_flags.py"
    text = mcore_flags.TARGET.read_text()
    stale.write_text(text.replace("hidden_dropout: float = 0.1", "hidden_dropout: float = 0.2"))
    monkeypatch.setattr(mcore_flags, "TARGET", stale)
    assert mcore_flags.main(["--check"]) == 1


@pytest.mark.parametrize("name", TABLES)
def test_defaults_are_megatrons(name: str, megatron: dict[str, dict[str, tuple[str, Any]]]) -> None:
    ours = {field: getattr(TABLES[name](), field) for field in vars(TABLES[name]())}
    theirs = {field: default for field, (_, default) in megatron[name].items() if field in ours}
    assert {field: [] if value == () else value for field, value in ours.items()} == theirs


@pytest.mark.parametrize("name", TABLES)
def test_only_what_a_flag_cannot_say_is_left_out(name: str, megatron: dict[str, dict[str, tuple[str, Any]]]) -> None:
    elsewhere = {field for table in TABLES.values() for field in vars(table())} | mcore_flags.OWNED_BY_US
    left_out = {field: kind for field, (kind, _) in megatron[name].items() if field not in elsewhere}
    unsayable = ("Callable", "dtype", "AttnBackend", "RecipeConfig", "ContextManager", "CudaGraphScope")
    assert {field: kind for field, kind in left_out.items() if not any(word in kind for word in unsayable)} == {}
