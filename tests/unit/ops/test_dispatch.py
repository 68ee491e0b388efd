"""The table of ops: what is chosen, what is refused, what is said."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mindspeed_llm import ops
from mindspeed_llm.errors import OpUnavailableError
from mindspeed_llm.ops import cpu_kernels


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


SPEC = ops.OpSpec("double", double, {torch.float32: 0.0}, lambda shape, dtype, _: (torch.ones(shape, dtype=dtype),))
FAST = ops.Impl("double", "fast", ("cpu", "npu"), (torch.float32,), twice, lambda: None, ("cpu",))


def registry(*impls: ops.Impl) -> ops.OpRegistry:
    known = ops.OpRegistry()
    known.add(SPEC, *impls)
    return known


def chosen(known: ops.OpRegistry, choices: dict[str, str] | None = None, **where: object) -> ops.OpRow:
    (row,) = ops.choose(known, **{"device": "cpu", "dtype": torch.float32} | where, choices=choices).rows()  # type: ignore
    return row


def test_the_device_default_comes_before_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    table = ops.choose(registry(FAST), device="cpu", dtype=torch.float32)
    assert table["double"] is twice
    assert table.rows() == (ops.OpRow("double", "fast", "default on cpu", "cpu-tested, unchecked on npu"),)
    assert not caplog.records


def test_the_first_registered_that_can_run_is_preferred() -> None:
    broken = replace(FAST, name="broken", available=lambda: "no library")
    second = replace(FAST, name="second")
    assert chosen(registry(broken, FAST, second)).impl == "fast"


def test_asking_wins_over_the_default() -> None:
    row = chosen(registry(FAST), {"double": "reference"})
    assert (row.impl, row.reason) == ("reference", "asked for with --op")


def test_a_fallback_is_one_warning_and_a_row(caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(FAST, available=lambda: "libfast.so is missing")
    with caplog.at_level(logging.WARNING):
        row = chosen(registry(broken))
    assert (row.impl, row.reason) == ("reference", "fallback: libfast.so is missing")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "libfast.so is missing" in caplog.text


def test_a_dtype_without_kernel_falls_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert "fast computes float32, not float64" in chosen(registry(FAST), dtype=torch.float64).reason
    assert len(caplog.records) == 1


def test_the_reference_where_there_is_nothing_else_is_no_fallback(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(registry(FAST), device="cuda").reason == "nothing else on cuda"
    assert not caplog.records


@pytest.mark.parametrize(
    ("choices", "where", "parts"),
    [
        ({"triple": "fast"}, {}, ["triple", "double"]),
        ({"double": "quick"}, {}, ["double=quick", "double=fast, double=broken, double=reference"]),
        ({"double": "fast"}, {"device": "cuda"}, ["not on cuda", "double=reference"]),
        ({"double": "fast"}, {"dtype": torch.bfloat16}, ["not bfloat16"]),
        ({"double": "broken"}, {}, ["libfast.so is missing", "double=fast"]),
    ],
)
def test_what_is_asked_for_and_missing_is_an_error(
    choices: dict[str, str], where: dict[str, object], parts: list[str]
) -> None:
    broken = replace(FAST, name="broken", available=lambda: "libfast.so is missing")
    with pytest.raises(OpUnavailableError) as raised:
        chosen(registry(FAST, broken), choices, **where)
    for part in parts:
        assert part in str(raised.value)


def test_choices_are_parsed() -> None:
    assert ops.parse_choices(["a=b", "c=d", "a=b"]) == {"a": "b", "c": "d"}
    for wrong in (["a"], ["=b"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(OpUnavailableError):
            ops.parse_choices(wrong)


def test_registering_twice_or_for_nothing_is_refused() -> None:
    known = registry(FAST)
    for impl in (FAST, replace(FAST, name="reference"), replace(FAST, op="triple")):
        with pytest.raises(ValueError, match=r"double|triple"):
            known.add_impl(impl)
    with pytest.raises(ValueError, match="twice"):
        known.add(SPEC)


def test_every_op_is_its_reference_until_a_table_is_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_llm.ops._Active.table", None)
    assert {row.impl for row in ops.active().rows()} == {"reference"}
    table = ops.choose(registry(FAST), device="cpu", dtype=torch.float32)
    ops.activate(table)
    assert ops.active() is table


def test_without_the_compiled_module_the_suite_says_so_and_works() -> None:
    """In a process where its import fails, as on a machine without compiler."""
    code = (
        "import sys, logging, torch; logging.basicConfig(stream=sys.stdout)\n"
        f"sys.modules[{cpu_kernels._MODULE!r}] = None\n"  # pyright: ignore[reportPrivateUsage]
        "from mindspeed_llm import ops\n"
        "table = ops.choose(ops.registry(), device='cpu', dtype=torch.float32)\n"
        "sys.stdout.write(str(table.rows()) + str(table['rms_norm'](torch.ones(2, 3), torch.ones(3), 0.0).sum()))\n"
        "try: ops.choose(ops.registry(), device='cpu', dtype=torch.float32, choices={'rms_norm': 'cpp'})\n"
        "except ops.dispatch.OpUnavailableError as error: sys.stdout.write(f'refused: {error}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "WARNING" in done.stdout
    assert "impl='reference', reason=\"fallback: the C++ kernels are not built" in done.stdout
    assert "tensor(6.)" in done.stdout
    assert "refused: the implementation asked for cannot run here: the C++ kernels are not built" in done.stdout


def test_a_module_of_another_interface_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = type(sys)(cpu_kernels._MODULE)  # pyright: ignore[reportPrivateUsage]
    stale.INTERFACE = -1  # type: ignore
    monkeypatch.setitem(sys.modules, cpu_kernels._MODULE, stale)  # pyright: ignore[reportPrivateUsage]
    cpu_kernels._load.cache_clear()  # pyright: ignore[reportPrivateUsage]
    try:
        assert "other sources" in str(cpu_kernels.unavailable())
    finally:
        cpu_kernels._load.cache_clear()  # pyright: ignore[reportPrivateUsage]
