"""Small plots in a terminal, in characters: eighths of blocks, or hashes where those fail."""

import math
from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_HASHES = " ....::::#"[:9]
_NARROWEST = 40


def sketch(
    points: Sequence[tuple[float, float]],
    title: str,
    *,
    width: int = 60,
    height: int = 4,
    plain: bool = False,
) -> list[str]:
    """Draw y against x as bars, both on logarithmic scales; nothing if there is no room.

    `plain` keeps to ASCII. Points that are not positive and finite are left out.

    >>> for line in sketch([(1, 1), (10, 10), (100, 100)], "y by x", width=43, height=1):
    ...     print(line)
    y by x
        100 |           ▄▄▄▄▄▄▄▄▄▄▄███████████
          1 |1                             100
    """
    kept = [(x, y) for x, y in points if x > 0 and 0 < y < math.inf]
    if width < _NARROWEST or len(kept) < 2:
        return []
    xs, ys = ([math.log(point[axis]) for point in kept] for axis in (0, 1))
    low, high = min(ys), max(ys)
    each = (min(width, 72) - 9) // len(kept)
    marks = _HASHES if plain else _EIGHTHS
    full = [0.5 if high == low else (y - low) / (high - low) for y in ys]
    lines = [title]
    for row in range(height - 1, -1, -1):
        cells = [marks[round(8 * min(max(share * height - row, 0), 1))] * each for share in full]
        end = _short(math.exp(high)) if row == height - 1 else ""
        lines.append(f"{end:>7} |{''.join(cells)}".rstrip())
    first, last = _short(math.exp(xs[0])), _short(math.exp(xs[-1]))
    room = each * len(kept) - len(first)
    lines.append(f"{_short(math.exp(low)):>7} |{first}{last:>{max(1, room)}}")
    return lines


def _short(value: float) -> str:
    """Write a number in at most seven characters.

    >>> _short(1000.0), _short(0.0123456), _short(1234567.0)
    ('1,000', '0.0123', '1.2e+06')
    """
    if value >= 99.5 and round(value) < 100_000:
        return f"{round(value):,}"
    return f"{value:.3g}" if 1e-3 <= value < 1e5 else f"{value:.1e}"
