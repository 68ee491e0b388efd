"""Run by test_seam.py in a process of its own: what importing megatron-core behind the seam does, as JSON on stdout."""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import sys
import types

import torch

# Importing this part of torch replaces torch.manual_seed, and some megatron-core modules bring it in.
import torch._dynamo

TORCH_CUDA = torch.cuda


def changes(module: types.ModuleType | type, before: dict[str, object]) -> list[str]:
    """Attributes of ``module`` that are not what they were; a submodule that was imported since may be added."""
    now = vars(module)
    changed = [name for name, value in before.items() if now.get(name) is not value]
    added = [
        name
        for name, value in now.items()
        if name not in before and getattr(value, "__name__", None) != f"{module.__name__}.{name}"
    ]
    return changed + added


def bindings(value: object) -> list[str]:
    """``module.name`` of every global of megatron-core that is ``value``."""
    return [
        f"{name}.{key}"
        for name, module in sorted(sys.modules.items())
        if name.startswith("megatron.core")
        for key, held in vars(module).items()
        if held is value
    ]


def cuda_of(module: types.ModuleType) -> object:
    """What the module finds under ``torch.cuda``."""
    return getattr(vars(module).get("torch"), "cuda", None)


def main(first: str) -> dict[str, object]:
    """``first`` is the module that brings megatron-core in."""
    watched = (torch, torch.cuda, torch.distributed, torch.nn, torch.Tensor)
    before = [(module, dict(vars(module))) for module in watched]
    factories = (torch.device, torch.empty, torch.zeros, torch.tensor, torch.autocast)
    importlib.import_module(first)
    unseamed = bindings(torch)
    import mindspeed_llm.core  # noqa: F401  here, since importing it is what is looked at

    after_core = {module.__name__: changes(module, held) for module, held in before}

    import megatron.core

    failed: dict[str, str] = {}
    walked: list[str] = []
    for info in pkgutil.walk_packages(megatron.core.__path__, "megatron.core.", onerror=walked.append):
        walked.append(info.name)
        try:
            importlib.import_module(info.name)
        except ImportError as error:
            failed[info.name] = str(error)
    tensors = {f"{name}Tensor" for name in ("Float", "Half", "BFloat16")}
    return {
        "unseamed": unseamed,
        "after_core": after_core,
        "after_all": {module.__name__: changes(module, held) for module, held in before},
        "walked": walked,
        "failed": failed,
        "real": [name for value in (torch, TORCH_CUDA, *factories) for name in bindings(value)],
        "proxied": [
            name
            for name, module in sys.modules.items()
            if name.startswith("megatron.core") and tensors <= set(dir(cuda_of(module)))
        ],
        "torch_is_torch": sys.modules["torch"] is torch and torch.cuda is TORCH_CUDA,
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = main(sys.argv[1])
    sys.stdout.write(json.dumps(found))
