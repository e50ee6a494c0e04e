"""Synthetic handwriting from the fonts that matplotlib ships: no download, no client's rows.

Every character of every font is thinned to its skeleton (Zhang and Suen, "A fast parallel algorithm
for thinning digital patterns", CACM 1984) and stored as a field of distances of pixels to it. An
image samples this field on a grid that is rotated, sheared, stretched and bent at random. A pixel
is ink if the distance is below half the pen's width. A few images use the font's outline instead.

`normalise` fits the ink of any image into a box, as MNIST and EMNIST do. It is part of the public
map, so nothing here depends on how the clients' images are framed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor
from torch.nn import functional

CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""In LEAF's order."""
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Oblique", "DejaVuSansMono-Bold"),
    *("DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSerif-Bold"),
    *("STIXGeneral", "STIXGeneralItalic", "STIXGeneralBol", "STIXGeneralBolIta"),
    *("cmr10", "cmss10", "cmtt10", "cmti10", "cmmi10", "cmb10"),
)
SIDE = 28
_FIELD = 64  # pixels of a side of a field
_LETTER = 36  # points of a letter there
_CAP = 13.5  # half the height of a capital there, about
_BENDS = ((3, 0.22), (5, 0.12), (8, 0.04))  # cells a side, and how far they move, of half a glyph


@dataclass(frozen=True)
class Fields:
    """Distance fields of all characters of all fonts, (fonts, classes, side, side).

    Attributes:
        bone: Distance to the skeleton.
        ink: Distance to the printed ink, negative inside it.
        middle: Middle of the skeleton's box, (fonts, classes, 2): down and across.
        half: Half of the longer side of that box, (fonts, classes).
    """

    bone: Tensor
    ink: Tensor
    middle: Tensor
    half: Tensor


@dataclass(frozen=True)
class Style:
    """How images are drawn, one entry for each: a hand, a pen and a size."""

    font: Tensor
    turn: Tensor
    slant: Tensor
    stretch: Tensor
    pen: Tensor
    bend: Tensor
    size: Tensor
    soft: Tensor
    printed: Tensor

    @classmethod
    def draw(cls, images: int, generator: torch.Generator) -> "Style":
        """Draw styles at random."""

        def normal(deviation: float) -> Tensor:
            return torch.randn(images, generator=generator) * deviation

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(images, generator=generator)

        return cls(
            font=torch.randint(len(FONTS), (images,), generator=generator),
            turn=normal(0.10),
            slant=normal(0.25),
            stretch=normal(0.18),
            pen=uniform(0, 1),
            bend=uniform(0.3, 1.3),
            size=uniform(0, 1),
            soft=uniform(0.5, 1.0),
            printed=uniform(0, 1) < 0.15,
        )


def font_files() -> list[Path]:
    """Find the fonts' files."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return [folder / f"{name}.ttf" for name in FONTS]


@cache
def fields() -> Fields:
    """Draw and thin all characters: a few seconds, once."""
    prints = np.stack([_print(path) for path in font_files()])
    flat = prints.reshape(-1, _FIELD, _FIELD)
    bones = thin(flat)
    away = ndimage.distance_transform_edt
    bone = np.stack([away(~one) for one in bones])
    ink = np.stack([away(~one) - 0.5 * away(one) for one in flat])
    boxes = np.stack([[*_ends(one.any(axis=1)), *_ends(one.any(axis=0))] for one in bones])
    middle = (boxes[:, 0::2] + boxes[:, 1::2]) / 2
    half = (boxes[:, 1::2] - boxes[:, 0::2]).max(axis=1) / 2

    def shaped(array: NDArray[np.float64]) -> Tensor:
        whole = array.reshape(*prints.shape[:2], *array.shape[1:])
        return torch.from_numpy(whole.astype(np.float32))

    return Fields(shaped(bone), shaped(ink), shaped(middle), shaped(half))


def _print(path: Path) -> NDArray[np.bool_]:
    """Render the characters of a font large, and shrink them."""
    from PIL import Image, ImageDraw, ImageFont

    large = 4
    font = ImageFont.truetype(str(path), _LETTER * large)
    found = []
    for character in CLASSES:
        image = Image.new("L", (_FIELD * large, _FIELD * large), 0)
        place = (_FIELD * large / 2, _FIELD * large * 0.72)
        ImageDraw.Draw(image).text(place, character, fill=255, font=font, anchor="ms")
        small = image.resize((_FIELD, _FIELD), Image.Resampling.BOX)
        found.append(np.asarray(small) > 127)
    return np.stack(found)


def _ends(along: NDArray[np.bool_]) -> tuple[int, int]:
    places = np.flatnonzero(along)
    return int(places[0]), int(places[-1])


def thin(prints: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Thin images to lines of one pixel, all at once (Zhang and Suen)."""
    ink = np.pad(prints, ((0, 0), (1, 1), (1, 1))).astype(np.int8)
    steps = ((1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1), (0, 1), (1, 1))
    while True:
        before = ink
        for corners in (((0, 2, 4), (2, 4, 6)), ((0, 2, 6), (0, 4, 6))):
            near = [np.roll(ink, step, axis=(1, 2)) for step in steps]
            count = np.sum(near, axis=0)
            turns = sum((near[at] < near[(at + 1) % 8]).astype(np.int8) for at in range(8))
            open_ = [near[a] * near[b] * near[c] == 0 for a, b, c in corners]
            gone = (ink == 1) & (count >= 2) & (count <= 6) & (turns == 1) & open_[0] & open_[1]
            ink = np.where(gone, 0, ink).astype(np.int8)
        if np.array_equal(before, ink):
            return ink[:, 1:-1, 1:-1].astype(bool)


def render(labels: Tensor, style: Style, generator: torch.Generator, fields: Fields) -> Tensor:
    """Draw characters, (n, 28, 28), 0 for paper and 1 for ink.

    Args:
        labels: Numbers of classes.
        style: How; around it each image varies a little.
        generator: Coins.
        fields: The fonts.
    """
    images = len(labels)

    def vary(deviation: float) -> Tensor:
        return torch.randn(images, generator=generator) * deviation

    half = fields.half[style.font, labels]
    size = (5 + 6.5 * style.size) * vary(0.08).exp()
    pixel = torch.maximum(_CAP / size, half.clamp_min(4) / 12.5)  # of the field, for one drawn
    across, down = _bent(style, half, pixel, vary, generator)
    middle = fields.middle[style.font, labels]
    across, down = across + middle[:, 1, None, None], down + middle[:, 0, None, None]
    grid = torch.stack([across, down], dim=-1) / ((_FIELD - 1) / 2) - 1
    which = style.printed[:, None, None]
    field = torch.where(which, fields.ink[style.font, labels], fields.bone[style.font, labels])
    away = _look_up(field, grid, "border")
    outside = ((grid.abs() - 1).clamp_min(0) * ((_FIELD - 1) / 2)).amax(dim=-1)
    pen = (0.45 + 1.15 * style.pen**1.5) * (size / 8.5).sqrt() * vary(0.08).exp()
    pen = torch.where(style.printed, pen - 0.6, pen)
    depth = pen[:, None, None] - (away + outside) / pixel[:, None, None]
    return torch.sigmoid(depth / (0.3 * style.soft[:, None, None]))


def _bent(
    style: Style,
    half: Tensor,
    pixel: Tensor,
    vary: Callable[[float], Tensor],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Rotate, shear, stretch and bend the grid of an image, in pixels of the field."""
    line = torch.arange(SIDE) - (SIDE - 1) / 2
    down, across = (
        part * pixel[:, None, None] for part in torch.meshgrid(line, line, indexing="ij")
    )
    turn = (style.turn + vary(0.08))[:, None, None]
    slant, stretch = style.slant + vary(0.08), (style.stretch + vary(0.10)).exp()
    down, across = (
        turn.sin() * across + turn.cos() * down,
        turn.cos() * across - turn.sin() * down,
    )
    across = (across + slant[:, None, None] * down) * stretch[:, None, None]
    reach = (style.bend * half.clamp_min(6))[:, None, None]
    for cells, far in _BENDS:
        moves = torch.randn(len(half), 2, cells + 1, cells + 1, generator=generator) * far
        moves = functional.interpolate(moves, size=(SIDE, SIDE), mode="bicubic", align_corners=True)
        across, down = across + moves[:, 0] * reach, down + moves[:, 1] * reach
    return across, down


def normalise(ink: Tensor, inner: int = 20) -> tuple[Tensor, Tensor]:
    """Fit ink into a box of `inner` of 28 pixels, its aspect kept; row by row.

    Returns:
        Images (n, 28, 28), the darkest ink 1, and the logs of the box's height and width, (n, 2),
        less about their usual values.
    """
    peak = ink.flatten(1).amax(dim=1).clamp_min(1e-3)[:, None, None]
    dark = ink > 0.35 * peak
    (top, bottom), (left, right) = _span(dark.any(dim=2)), _span(dark.any(dim=1))
    half = (torch.maximum(bottom - top, right - left) + 1).clamp_min(6) / 2
    line = (torch.arange(SIDE, device=ink.device) - (SIDE - 1) / 2) / (inner / 2)
    down = (top + bottom)[:, None] / 2 + line * half[:, None]
    across = (left + right)[:, None] / 2 + line * half[:, None]
    shape = (len(ink), SIDE, SIDE)
    grid = torch.stack([across[:, None, :].expand(shape), down[:, :, None].expand(shape)], dim=-1)
    fitted = _look_up(ink, grid / ((ink.shape[-1] - 1) / 2) - 1, "zeros") / peak
    return fitted, torch.stack([(bottom - top + 1).log() - 2.7, (right - left + 1).log() - 2.5], 1)


def _span(dark: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and last dark position of every row; the whole row if none is dark."""
    places = torch.arange(dark.shape[1], device=dark.device, dtype=torch.float32)
    dark = dark | ~dark.any(dim=1, keepdim=True)
    first = torch.where(dark, places, dark.shape[1]).amin(dim=1)
    return first, torch.where(dark, places, -1).amax(dim=1)


def _look_up(images: Tensor, grid: Tensor, outside: str) -> Tensor:
    found = functional.grid_sample(
        images[:, None], grid, mode="bilinear", padding_mode=outside, align_corners=True
    )
    return found[:, 0]
