"""Fixtures of every test, and the rules of a run: the report, listed skips, the shard of slow tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool
from tests.session_report import SessionReport

# Unit tests compare numbers, not speed; with several threads the small matmuls of tests only get slower.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing outside the project is read.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mindspeed_llm")
    group.addoption("--report", metavar="FILE", help="write seconds and counts per area to this JSON file")
    group.addoption("--slow", choices=("shard", "all"), default="shard", help="which slow tests run (default: shard)")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SessionReport(config), "mindspeed_llm-report")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo ranks for the whole session; see :mod:`tests.distributed.pool`."""
    ranks = Pool()
    yield ranks
    ranks.close()
