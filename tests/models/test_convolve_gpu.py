"""Kernels of convolutions: emulated on the CPU, and on CUDA compared with torch."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from coterie.models import convolve_gpu
from coterie.models.convolve_gpu import Kernels, Long, agrees
from coterie.models.tiles import Layer, tiles_of

CPU = torch.device("cpu")
# Signatures of launchers: T tensor, I int, L long.
LAUNCHES = {
    "pack": "TT", "forward": "TTTTTI", "filters": "TTTTTII", "few": "TTTTTI", "total": "TTTTI",
    "images": "TTTTI", "spread": "TTTL",
}  # fmt: skip
CODES = {("forward", 4), ("filters", 2), ("few", 2), ("images", 1), ("spread", 1)}
NEEDS = {"forward": "F_TO", "filters": "D_FW", "few": "E_NW", "images": "X_NR"}


class Emulated(Kernels):
    """The kernels compiled as C++, one coroutine for each thread."""

    def __init__(self, layer, folder, forward_only=False, **other):
        tiles = tiles_of(layer) | other
        dense = None
        if "X_NR" not in tiles and forward_only is False:
            dense = Emulated(layer.turned, folder, forward_only=True)
        if forward_only:
            tiles = {tile: size for tile, size in tiles.items() if tile.startswith("F_")}
        self.library = build(layer, tiles, folder)
        facts = {}
        for name, tile in NEEDS.items():
            if tile in tiles:
                facts[name] = list((ctypes.c_int * 4).in_dll(self.library, f"facts_{name}"))
        super().__init__(layer, facts, dense)

    def run(self, name, blocks, threads, shared, *given):
        values = [
            ctypes.c_void_p(each.data_ptr() if isinstance(each, torch.Tensor) else None)
            if each is None or isinstance(each, torch.Tensor)
            else (ctypes.c_longlong if isinstance(each, Long) else ctypes.c_int)(each)
            for each in given
        ]
        launch = getattr(self.library, f"launch_{name}")
        assert launch(blocks, threads, shared, *values) == 0, name


def build(layer, tiles, folder):
    kinds = {"T": "void*", "I": "int", "L": "long long"}
    defines = [f"#define {name} {size}" for name, size in (layer.defines | tiles).items()]
    lines = ['#include "emulated.h"', *defines, '#include "convolve.cu"']
    for name, kinds_of in LAUNCHES.items():
        if NEEDS.get(name, "F_TO") not in tiles or (name == "spread" and layer.pool == 1):
            continue
        signed = ", ".join(f"{kinds[kind]} a{i}" for i, kind in enumerate(kinds_of))
        passed = ", ".join(
            ("(u8*)" if (name, i) in CODES else "(float*)") * (kind == "T") + f"a{i}"
            for i, kind in enumerate(kinds_of)
        )
        lines.append(
            f'extern "C" int launch_{name}(int blocks, int threads, int bytes, {signed}) {{'
            f"return emulated::run(blocks, threads, bytes, [=] {{ {name}({passed}); }}); }}"
        )
    main = folder / f"k{len(list(folder.iterdir()))}.cpp"
    main.write_text("\n".join(lines))
    made = main.with_suffix(".so")
    folders = (Path(convolve_gpu.__file__).parent, Path(__file__).parent)
    line = ["g++", "-O1", "-std=c++17", "-w", "-fpermissive", "-shared", "-fPIC"]
    line += [*(f"-I{each}" for each in folders), str(main), "-o", str(made)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(made))


LAYERS = {
    "small": Layer(1, 10, 9, 5, 3, 2, 1),
    "deep": Layer(9, 8, 8, 6, 3, 2),
    "femnist_cnn 1": Layer(1, 28, 28, 32, 5, 2),
    "femnist_cnn 2": Layer(32, 12, 12, 64, 5, 2),
    "femnist_leaf 1": Layer(1, 28, 28, 32, 5, 2, 2),
    "femnist_leaf 2": Layer(32, 14, 14, 64, 5, 2, 2),
    "celeba_cnn 1": Layer(3, 84, 84, 32, 3, 1, 1, relu=False),
    "celeba_cnn 4": Layer(32, 10, 10, 32, 3, 1, 1, relu=False),
    "windows of 3": Layer(33, 13, 11, 7, 3, 3, 1),
    "one": Layer(10, 7, 7, 3, 1, 2),
    "even": Layer(12, 9, 10, 5, 4, 2, 1),
    "no windows": Layer(12, 9, 10, 37, 5, 1, 2),
    "large": Layer(12, 40, 33, 6, 3, 2, 1),
    "few and large": Layer(3, 40, 33, 6, 5, 3, 1),
    "windows of 5": Layer(2, 31, 32, 5, 7, 5, 6),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", LAYERS)
def test_emulated_kernels_equal_torch(name, tmp_path):
    assert agrees(Emulated(LAYERS[name], tmp_path), CPU)
