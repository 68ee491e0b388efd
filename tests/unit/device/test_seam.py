"""torch stays as it is, and every megatron-core module sees the device through its own ``torch``."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mindspeed_llm.core  # noqa: F401  the seam comes first
from mindspeed_llm.device import cpu, current
from mindspeed_llm.device.seam import install

import megatron.core.utils

ROOT = Path(__file__).resolve().parents[3]
TRITON = "triton"
NOT_IMPORTABLE = {
    # Module -> the package that it needs and a CPU machine lacks.
    "megatron.core.inference.contexts.fused_kv_append_kernel": TRITON,
    "megatron.core.models.mamba.mamba_layer_specs": TRITON,
    "megatron.core.post_training.modelopt.mamba.model_specs": TRITON,
    "megatron.core.ssm.mamba_mixer": TRITON,
    "megatron.core.ssm.triton_cache_manager": TRITON,
    "megatron.core.transformer.custom_layers.batch_invariant_kernels": TRITON,
}
FACTORIES = {
    "arange": (3,),
    "as_tensor": ([1.0],),
    "empty": (2,),
    "empty_like": (torch.ones(2),),
    "empty_strided": ((2, 2), (2, 1)),
    "eye": (2,),
    "full": ((2,), 1.0),
    "full_like": (torch.ones(2), 1.0),
    "linspace": (0, 1, 3),
    "ones": (2,),
    "ones_like": (torch.ones(2),),
    "rand": (2,),
    "rand_like": (torch.ones(2),),
    "randint": (0, 5, (2,)),
    "randn": (2,),
    "randn_like": (torch.ones(2),),
    "randperm": (4,),
    "tensor": ([1.0],),
    "zeros": (2,),
    "zeros_like": (torch.ones(2),),
}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MINDSPEED_LLM_DEVICE": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=110,
    )


def walk(first: str) -> dict[str, Any]:
    done = run("-m", "tests.unit.device.walk_megatron", first)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return walk("mindspeed_llm.core")


def test_torch_is_the_same_afterwards(found: dict[str, Any]) -> None:
    assert found["after_core"] == {name: [] for name in found["after_core"]}
    assert found["after_all"] == {name: [] for name in found["after_all"]}
    assert found["torch_is_torch"]


def test_every_module_that_can_be_imported_is(found: dict[str, Any]) -> None:
    assert len(found["walked"]) > 300
    assert found["failed"].keys() == NOT_IMPORTABLE.keys()
    for name, package in NOT_IMPORTABLE.items():
        assert package in found["failed"][name]


def test_no_module_holds_the_real_torch(found: dict[str, Any]) -> None:
    assert found["real"] == []
    assert len(found["proxied"]) > 150


def test_modules_loaded_before_the_seam_are_rebound() -> None:
    found = walk("megatron.core.tensor_parallel.layers")
    assert "megatron.core.tensor_parallel.layers.torch" in found["unseamed"]
    assert found["real"] == []
    assert found["after_all"] == {name: [] for name in found["after_all"]}


@pytest.fixture
def seamed() -> Any:
    """``torch`` as megatron-core sees it."""
    proxy = vars(megatron.core.utils)["torch"]
    assert proxy is not torch
    return proxy


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)], ids=str)
@pytest.mark.parametrize("factory", FACTORIES)
def test_factories_create_on_the_device(seamed: Any, factory: str, device: Any) -> None:
    made = getattr(seamed, factory)(*FACTORIES[factory], device=device)
    assert made.device == torch.device("cpu")


@pytest.mark.parametrize("factory", ["empty", "zeros", "empty_like", "tensor", "full"])
def test_pinned_memory_is_not_asked_for(seamed: Any, factory: str) -> None:
    # Off CUDA torch refuses to pin.
    assert getattr(seamed, factory)(*FACTORIES[factory], pin_memory=True, device="cpu").device.type == "cpu"


def test_other_devices_are_left_alone(seamed: Any) -> None:
    assert seamed.empty(2, device="meta").device.type == "meta"
    assert seamed.device("meta").type == "meta"
    assert seamed.zeros(2, dtype=torch.float64).dtype == torch.float64


def test_devices_are_devices(seamed: Any) -> None:
    for made in (
        seamed.device("cuda"),
        seamed.device("cuda", 3),
        seamed.device("cuda:1"),
        seamed.device(torch.device("cuda")),
        seamed.device(f"cuda:{seamed.cuda.current_device()}"),
    ):
        assert made == torch.device("cpu")
        assert isinstance(made, seamed.device)
        assert isinstance(made, torch.device)
    assert isinstance(torch.device("meta"), seamed.device)
    assert not isinstance("cuda", seamed.device)


def test_the_rest_is_torch(seamed: Any) -> None:
    for name in ("Tensor", "nn", "distributed", "float32", "autograd", "matmul", "no_grad"):
        assert getattr(seamed, name) is getattr(torch, name)
    # Submodules that torch imports lazily are found too.
    assert seamed.utils.checkpoint is importlib.import_module("torch.utils.checkpoint")
    with pytest.raises(AttributeError):
        _ = seamed.no_such_thing


def test_autocast_for_cuda_is_that_of_the_device(seamed: Any) -> None:
    with seamed.autocast("cuda", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_streams_can_be_entered_again_while_entered() -> None:
    namespace = cpu.NAMESPACE
    stream = namespace.Stream()
    context = namespace.stream(stream)
    with context, context:
        namespace.current_stream().wait_stream(stream)
    with context:
        pass
    with stream, stream:
        event = stream.record_event()
    event.wait()
    assert event.query()
    assert event.elapsed_time(namespace.Event(enable_timing=True)) == 0.0
    with namespace.device(0):
        assert namespace.current_device() == torch.device("cpu")


def test_generator_state_is_torchs_own() -> None:
    torch.manual_seed(3)
    state = cpu.NAMESPACE.get_rng_state()
    first = torch.rand(4)
    cpu.NAMESPACE.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    cpu.NAMESPACE.manual_seed(3)
    assert torch.equal(torch.rand(4), first)


def test_memory_is_counted_in_bytes() -> None:
    before = cpu.NAMESPACE.memory_allocated()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    grown = cpu.NAMESPACE.memory_allocated() - before
    assert abs(grown - held.numel()) < 8 << 20
    assert cpu.NAMESPACE.max_memory_allocated() >= before + held.numel() - (8 << 20)


def test_tensor_types_are_spelled_as_torch_spells_them() -> None:
    assert f"{current().tensor_type_prefix}BFloat16Tensor" == torch.ones(1, dtype=torch.bfloat16).type()


def test_a_second_install_does_nothing() -> None:
    finders = list(sys.meta_path)
    proxy = vars(megatron.core.utils)["torch"]
    install()
    assert sys.meta_path == finders
    assert vars(megatron.core.utils)["torch"] is proxy


@pytest.mark.parametrize("kind", ["tpu", "cuda" if not torch.cuda.is_available() else "npu"])
def test_an_unknown_or_absent_device_is_an_error(kind: str) -> None:
    done = run("-c", "import mindspeed_llm.core", MINDSPEED_LLM_DEVICE=kind)
    assert done.returncode != 0
    assert f"ConfigError: device {kind} is not available" in done.stderr
    assert "MINDSPEED_LLM_DEVICE" in done.stderr
