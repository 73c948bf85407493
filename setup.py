"""Package layout and the CPU kernels.

`features/` and `recipes/` stand at the top of the repository and are imported as `mindspeed_lowp.features`
and `mindspeed_lowp.recipes`. The kernels are a shared library with a plain C interface, loaded with ctypes:
no torch and no Python headers are needed to build it. Where there is no compiler the package installs without
it and falls back to PyTorch.
"""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

CSRC = "mindspeed_lowp/csrc"
FLAGS = ["-std=c++17", "-O3", "-g0", "-pthread", "-fvisibility=hidden"]
FLAGS += ["-ffp-contract=off"]  # the same bits from every compiler and level
FLAGS += ["-fno-trapping-math"]  # lets loops with float selects be vectorized; values stay the same
# The kernels are compiled once for each level and chosen at run time. "base" is whatever the compiler targets
# by default.
LEVELS = {"base": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS |= {"v3": ["-march=x86-64-v3"], "v4": ["-march=x86-64-v4"]}


class BuildKernels(build_ext):
    """Compiles kernels.cpp once for each level, side by side; one unknown to the compiler is left out."""

    def build_extension(self, ext):
        with ThreadPoolExecutor() as pool:
            objects = {level: pool.submit(self.compile_level, level, ext.depends) for level in LEVELS}
        for level, compiled in objects.items():
            try:
                ext.extra_objects += compiled.result()
                ext.define_macros.append((f"LOWP_HAVE_{level}", "1"))
            except CompileError:
                if level == "base":
                    raise
        super().build_extension(ext)

    def compile_level(self, level, depends):
        return self.compiler.compile(
            [f"{CSRC}/kernels.cpp"],
            output_dir=os.path.join(self.build_temp, level),
            macros=[("LOWP_LEVEL", level)],
            extra_postargs=FLAGS + LEVELS[level],
            depends=depends,
        )


setup(
    packages=[
        "mindspeed_lowp",
        "mindspeed_lowp.emulator",
        "mindspeed_lowp.export",
        "mindspeed_lowp.features",
        "mindspeed_lowp.hosts",
        "mindspeed_lowp.layers",
        "mindspeed_lowp.megatron",
        "mindspeed_lowp.mindspeed",
        "mindspeed_lowp.ops",
        "mindspeed_lowp.ops.kernels",
        "mindspeed_lowp.ops.npu",
        "mindspeed_lowp.ops.reference",
        "mindspeed_lowp.qat",
        "mindspeed_lowp.recipes",
        "mindspeed_lowp.runtime",
    ],
    package_dir={
        "mindspeed_lowp": "mindspeed_lowp",
        "mindspeed_lowp.features": "features",
        "mindspeed_lowp.recipes": "recipes",
    },
    ext_modules=[
        Extension(
            "mindspeed_lowp.ops._kernels",
            sources=sorted(glob(f"{CSRC}/dispatch*.cpp")),
            depends=[f"{CSRC}/kernels.cpp", *sorted(glob(f"{CSRC}/*.h"))],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
