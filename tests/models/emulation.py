"""CUDA kernels on the CPU: compiled as C++ against emulated.h, one coroutine for each thread."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from coterie.core.nvrtc import Long

COMPILES = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
_KERNEL = re.compile(r"KERNEL\([^)]*\) (\w+)\(([^)]*)\)", re.DOTALL)


class Emulated:
    """A module as of `core.nvrtc`; kernels whose names are keys of `needs` need a constant."""

    def __init__(self, source, constants, folder, needs=()):
        lines = ['#include "emulated.h"']
        lines += [f"#define {name} {size}" for name, size in constants.items()]
        lines.append(f'#include "{source}"')
        for name, parameters in _KERNEL.findall(source.read_text()):
            if dict(needs).get(name) in (None, *constants):
                passed = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
                lines.append(
                    f'extern "C" int launch_{name}(int blocks, int threads, int bytes, '
                    f"{parameters}) {{ return emulated::run(blocks, threads, bytes, "
                    f"[=] {{ {name}({passed}); }}); }}"
                )
        main = folder / f"{len(list(folder.iterdir()))}.cpp"
        main.write_text("\n".join(lines))
        made = str(main.with_suffix(".so"))
        line = ["g++", "-O1", "-std=c++17", "-w", "-fpermissive", "-shared", "-fPIC"]
        line += [f"-I{Path(__file__).parent}", str(main), "-o", made]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
        self._library = ctypes.CDLL(made)

    def launch(self, name, blocks, threads, shared, given):
        values = [
            ctypes.c_void_p(None if each is None else each.data_ptr())
            if each is None or isinstance(each, torch.Tensor)
            else (ctypes.c_longlong if isinstance(each, Long) else ctypes.c_int)(each)
            for each in given
        ]
        launch = getattr(self._library, f"launch_{name}")
        assert launch(blocks, threads, shared, *values) == 0, name

    def numbers(self, name):
        try:
            return list((ctypes.c_int * 4).in_dll(self._library, name))
        except ValueError:
            return []
