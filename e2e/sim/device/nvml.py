"""Builds the simulated driver library, once per content of its source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
#: The name under which every reader of NVML looks for the driver's library.
LIBRARY = "libnvidia-ml.so.1"


class NoCompiler(RuntimeError):
    """There is no C compiler, so there is no simulated driver."""


def build(folder: Path) -> Path:
    """The directory to put into LD_LIBRARY_PATH; built below ``folder`` unless it is there. NoCompiler, or the
    compiler's own error.
    """
    source = SOURCE.read_bytes()
    target = folder / f"nvml-{hashlib.sha256(source).hexdigest()[:16]}"
    if (target / LIBRARY).exists():
        return target
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("cc, gcc or clang is needed to build the simulated driver library")
    target.mkdir(parents=True, exist_ok=True)
    temporary = target / f"{LIBRARY}.{os.getpid()}"
    command = [
        compiler,
        "-std=gnu11",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-format-truncation",
        "-shared",
        "-fPIC",
    ]
    subprocess.run([*command, "-o", str(temporary), str(SOURCE)], check=True, capture_output=True)
    temporary.rename(target / LIBRARY)
    return target
