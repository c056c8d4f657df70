"""The build hook of pyproject.toml: compiles gpuaug's C++ for the wheel, if the machine has a compiler.

The wheel then has each library once for each level of processors in `gpuaug.native.build.LEVELS`, and its tag names the
platform. Without a compiler, or on other systems than Linux, the wheel has none: gpuaug compiles at first use.
"""

import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from gpuaug.augment.ops.codes import as_cpp  # noqa: E402
from gpuaug.native import build  # noqa: E402

FINITE = (*build.FLAGS, "-ffinite-math-only")
SOURCES = {  # file: arguments, as its module gives them to `build.load`
    "augment/fused/cpu.cpp": {"name": "augment", "flags": FINITE, "definitions": as_cpp()},
    "decode/resize.cpp": {"name": "resize"},
    "targets/masks.cpp": {"name": "masks"},
    "random/keyed.cpp": {"name": "draw"},
    "augment/patch_masks.cpp": {"name": "patch_masks"},
    "augment/gather.cpp": {"name": "gather"},
}


class Libraries(BuildHookInterface):
    """Adds the libraries to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile them into a temporary folder."""
        levels = build.LEVELS.get(platform.machine(), {}) if sys.platform == "linux" else {}
        if version == "editable" or not levels:
            return
        if (compiler := build.find_compiler()) is None:
            self.app.display_warning(
                "No C++ compiler found: this wheel has no libraries. gpuaug needs g++ at first use."
            )
            return
        self.folder = tempfile.TemporaryDirectory(prefix="gpuaug-")  # deleted when the hook is
        jobs = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for source, arguments in SOURCES.items():
                text, file = build.source_text(source, **arguments)
                for level, (march, _) in levels.items():
                    path = Path(self.folder.name, level, file)
                    path.parent.mkdir(exist_ok=True)
                    flags = [*arguments.get("flags", build.FLAGS), *march.split()]
                    jobs[path] = pool.submit(build.compile_file, compiler, flags, text, path)
        try:
            for job in jobs.values():
                job.result()
        except subprocess.CalledProcessError as error:  # for example, g++ before version 11 does not know the levels
            self.app.display_warning(f"This wheel has no libraries, because the compiler failed: {error.stderr}")
            return
        folder = build.INSTALLED.relative_to(ROOT)
        build_data["force_include"] |= {str(p): str(folder / p.relative_to(self.folder.name)) for p in jobs}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
