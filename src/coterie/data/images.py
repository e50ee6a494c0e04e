"""Images as rows: RGB, channels first, 0 to 1, all of one size.

LEAF's CelebA names its images; tables hold a name, the bytes of a file, or both. Pillow reads them
and is imported only here. Resizing is bicubic, as by Pillow's default.
"""

import importlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.columns import Fail
from coterie.data.federated import DataError

_DEEP = ("I", "F")  # modes of more than 8 bits a pixel, beside I;16
STEP = 256  # images held together


@dataclass(frozen=True)
class Images:
    """Where images are, and the size they get.

    Attributes:
        folder: What names are relative to; None where rows hold the images themselves.
        height: Rows of pixels.
        width: Columns of pixels.
    """

    folder: Path | None
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return (3, self.height, self.width)

    def encode(self, values: Sequence[Any], fail: Fail) -> NDArray[np.float32]:
        """Read images; None is a gap and becomes NaN.

        Args:
            values: For each row a name, bytes, {"bytes": ..., "path": ...} or an opened image.
            fail: Makes the error for (row, what was found and what to do).
        """
        x = np.empty((len(values), *self.shape), dtype=np.float32)
        for row, value in enumerate(values):
            if value is None:
                x[row] = np.nan
                continue
            try:
                x[row] = self._pixels(self._open(value))
            except DataError as error:
                raise fail(row, str(error)) from error
            except Exception as error:  # a damaged file can trip a decoder anywhere
                raise fail(
                    row,
                    f"image {_name(value)} could not be read ({error}); it is truncated, damaged "
                    "or no image: fetch it again, or take the row out",
                ) from error
        return x

    def _open(self, value: Any) -> Any:
        if hasattr(value, "convert") and hasattr(value, "resize"):
            return value
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return _pillow().open(io.BytesIO(value))
        if not isinstance(value, str):
            raise DataError(
                f"found {str(value)[:60]!r} where an image or its name belongs; correct the row"
            )
        return _pillow().open(self._path(value))

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name)
        if self.folder is None:
            raise DataError(
                f"image {name!r} is named, not stored; give the folder it is in with images="
            )
        if parts.is_absolute() or ".." in parts.parts:
            raise DataError(f"image {name!r} lies outside of {self.folder}; name it from there")
        path = self.folder / parts
        if not path.is_file():
            raise DataError(
                f"image {path} is missing; fetch it, correct images= (the folder), or take the "
                "row out"
            )
        return path

    def _pixels(self, image: Any) -> NDArray[np.float32]:
        with image:
            if image.mode in _DEEP or image.mode.startswith("I;16"):
                return self._deep(image)
            sized = image.convert("RGB").resize((self.width, self.height))
        pixels = np.asarray(sized, dtype=np.float32) / np.float32(255)
        return pixels.transpose(2, 0, 1)

    def _deep(self, image: Any) -> NDArray[np.float32]:
        """Read greys of 16 bits, which Pillow's conversion would cut off at 255."""
        if not image.mode.startswith("I;16") and not (image.mode == "I" and image.format == "PNG"):
            raise DataError(
                f"found an image of mode {image.mode!r}, whose brightest value is not known; save "
                "it with 8 or 16 bits a channel"
            )
        grey = np.asarray(image, dtype=np.float32) / np.float32(65535)
        sized = _pillow().fromarray(grey).resize((self.width, self.height))
        # bicubic resizing overshoots at edges; with 8 bits Pillow cuts this off itself
        pixels = np.clip(np.asarray(sized, dtype=np.float32), 0, 1)
        return np.broadcast_to(pixels, self.shape)


def _name(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("path") or "given as bytes"
    return repr(value) if isinstance(value, str) else "given as bytes"


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DataError(
            "reading images needs Pillow, which is not installed; pip install pillow"
        ) from error
