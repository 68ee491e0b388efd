"""Builds the C++ modules (``csrc/cpu``); everything else about the package is in pyproject.toml.

They are optional: without pybind11, or when the compiler is missing or fails, the installation goes on; the ops use
their reference in plain torch, tokenizers their library. torch itself is not needed to build.
"""

from __future__ import annotations

import logging
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

try:
    import pybind11
except ImportError:
    pybind11 = None

CSRC = Path("csrc")
# Runs on any processor of the architecture: wider instruction sets are picked at run time.
COMPILE_FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-g0", "-Wall", "-Wno-maybe-uninitialized"]
# Without contraction into fused multiply-adds every instruction set gives the same bits.
KERNEL_FLAGS = [*COMPILE_FLAGS, "-ffp-contract=off", "-fopenmp"]
# The module of tokenizers needs no OpenMP: it is loaded where torch is not.
BYTE_BPE_SOURCES = sorted(str(path) for path in (CSRC / "cpu").glob("byte_bpe*.cpp"))
KERNEL_SOURCES = sorted({str(path) for path in (CSRC / "cpu").glob("*.cpp")} - set(BYTE_BPE_SOURCES))


def warn_unbuilt(cause: object) -> None:
    """Says that the installation goes on without the C++ kernels, and why."""
    logging.getLogger("mindspeed_llm.setup").warning(
        "\nWARNING: the C++ CPU kernels were not built: %s\n"
        "         The installation goes on; ops fall back on their reference in plain torch and byte-level tokenizers\n"
        "         on their library, which are slower.\n"
        "         To build them: install g++ (C++17, OpenMP), then `python setup.py build_ext --inplace`.\n",
        cause,
    )


class OptionalBuildExt(build_ext):
    """``build_ext`` for which a failure is a warning, and leaves no older build behind to be taken for the new one."""

    def run(self) -> None:
        """Build, and note first whether the result goes beside the sources (setuptools clears that while it builds)."""
        self.beside_sources = bool(self.inplace)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Build one extension, or warn."""
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError, OSError) as error:
            warn_unbuilt(error)
            for folder in [self.build_lib, "."] if self.beside_sources else [self.build_lib]:
                (Path(folder) / self.get_ext_filename(ext.name)).unlink(missing_ok=True)


def extensions() -> list[Extension]:
    """The extension modules, or none without pybind11."""
    if pybind11 is None:
        warn_unbuilt("pybind11 is not installed")
        return []
    headers = sorted(str(path) for path in [*CSRC.glob("c*/*.h"), *CSRC.glob("c*/*.inc")])
    return [
        Extension(
            name,
            sources=sources,
            depends=headers,
            include_dirs=[pybind11.get_include()],
            language="c++",
            extra_compile_args=flags,
            extra_link_args=[*link_flags, "-s"],
            optional=True,
        )
        for name, sources, flags, link_flags in (
            ("mindspeed_llm.ops._cpu_kernels", KERNEL_SOURCES, KERNEL_FLAGS, ["-fopenmp"]),
            ("mindspeed_llm.data._byte_bpe", BYTE_BPE_SOURCES, COMPILE_FLAGS, []),
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuildExt})
