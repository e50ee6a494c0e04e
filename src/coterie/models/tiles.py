"""Shapes of convolutions on a GPU, and how their kernels divide the work (see convolve.cu)."""

from dataclasses import dataclass

_POOL = 8  # the widest windows
_THREADS = 224  # of a block of the forward kernel
_SHARED = 75 << 10  # bytes of shared memory per block, so that a processor has three
_MOST = 110 << 10  # and two
_ALONE = 48  # sums of a thread, for images with one channel


@dataclass(frozen=True)
class Layer:
    """A convolution of one channel count and size, with stride 1.

    Attributes:
        channels: Of the images.
        height: Of the images.
        width: Of the images.
        filters: Of the convolution.
        kernel: Side of the filters.
        pool: Side of the windows of maxima.
        padding: Zeros on each side of the images.
        relu: Whether outputs are rectified.
    """

    channels: int
    height: int
    width: int
    filters: int
    kernel: int
    pool: int = 1
    padding: int = 0
    relu: bool = True

    @property
    def convolved(self) -> tuple[int, int]:
        """Height and width before maxima are taken."""
        more = 2 * self.padding - self.kernel + 1
        return self.height + more, self.width + more

    @property
    def pooled(self) -> tuple[int, int]:
        """Height and width of the outputs."""
        height, width = self.convolved
        return height // self.pool, width // self.pool

    @property
    def inputs(self) -> int:
        """Weights of a filter."""
        return self.channels * self.kernel**2

    @property
    def turned(self) -> "Layer":
        """The layer that computes the gradient of the images from that of the convolution."""
        height, width = self.convolved
        around = self.kernel - 1 - self.padding
        return Layer(self.filters, height, width, self.channels, self.kernel, 1, around, relu=False)

    @property
    def constants(self) -> dict[str, int]:
        """The layer as constants of the source."""
        return {
            "C": self.channels, "H": self.height, "W": self.width, "O": self.filters,
            "K": self.kernel, "P": self.pool, "PAD": self.padding, "RELU": int(self.relu),
        }  # fmt: skip


def tiles_of(layer: Layer, tf32: bool = False) -> dict[str, int]:
    """Return the tiles of the kernels of a layer; raise ValueError if it has none.

    With `tf32` products of the forward pass round their factors, where that kernel can.
    """
    if layer.pool > _POOL or layer.kernel > 7 or min(layer.pooled) < 1:
        raise ValueError(
            f"expected filters of at most 7 x 7 and windows of at most {_POOL} x {_POOL}"
        )
    if not 0 <= layer.padding < layer.kernel:
        raise ValueError(f"padding: given {layer.padding}; expected less than the side of filters")
    few = layer.channels <= 8 and layer.inputs <= 100
    found = _forward(layer) | (_few(layer) if few else _filters(layer))
    return found | _images(layer) | (_rounded(layer) if tf32 else {})


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _even(rows: int, most: int) -> int:
    # As few bands as possible, as even as possible.
    return _up(rows, _up(rows, min(rows, max(1, most))))


def _forward(layer: Layer) -> dict[str, int]:
    height, width = (side * layer.pool for side in layer.pooled)
    high = layer.pool if layer.pool > 1 else min(2, height)
    wide, each = _patch(layer, width, high)
    across, down = _up(width, wide), _up(height, high)
    padded = _up(layer.filters, 4) * 4
    block = min(padded, 64)
    while (
        across * down * block // each > _THREADS and block % (2 * max(4, each)) == 0 and block > 16
    ):
        block //= 2
    groups = block // each
    rows = _even(down, _THREADS // (across * groups))
    images = 2 if across * rows * groups <= 96 and rows == down else 1
    plane = (rows * high + layer.kernel - 1) * (across * wide + layer.kernel + 2)
    chunk = _chunk(layer, layer.kernel**2 * block + images * plane)
    stages = min(3, layer.channels // chunk)
    threads = _up(groups * images * rows * across, 32) * 32
    registers = 128 if wide * high * each > _ALONE else 80
    return {
        "F_TO": each, "F_RX": wide, "F_RY": high, "F_IM": images, "F_OB": block, "F_BY": rows,
        "F_CK": chunk, "F_NST": stages, "F_MIN": max(1, 65536 // (threads * registers)),
    }  # fmt: skip


def _patch(layer: Layer, width: int, high: int) -> tuple[int, int]:
    # Width and filters of a thread: few idle pixels, and many products per number loaded.
    # With one channel no copy hides behind products: many threads must, so each has few sums, and
    # patches side by side that are read by 16 bytes meet in the banks of shared memory.
    alone = layer.channels == 1
    most = max(_ALONE, high * layer.pool) if alone else 64

    def cost(wide: int, each: int) -> float:
        vector = 4 if wide % 4 == 0 else 2 if wide % 2 == 0 else 1
        vector = 2 if alone and vector == 4 and wide < width else vector
        loads = layer.kernel * _up(each, 4) + _up(wide + layer.kernel - 1, vector)
        products = layer.kernel * wide * high * each
        idle = _up(width, wide) * wide / width
        return idle * (1 + 4 * loads / products)

    padded = _up(layer.filters, 4) * 4
    pairs = [
        (wide, each)
        for wide in range(layer.pool, 17, layer.pool)
        for each in (1, 2, 4, 8)
        if wide * high * each <= most and padded % each == 0
    ]
    return min(pairs, key=lambda pair: cost(*pair))


def _chunk(layer: Layer, size: int) -> int:
    fits = [
        chunk
        for chunk in range(1, layer.channels + 1)
        if layer.channels % chunk == 0
        and chunk * layer.kernel**2 <= 50
        and 12 * chunk * size <= _SHARED
    ]
    return max(fits, default=1)


def _filters(layer: Layer) -> dict[str, int]:
    each = 4 if layer.kernel <= 3 else 2 if layer.kernel <= 5 else 1
    warps = min(8, _up(layer.filters, each))
    chunk = 4 if layer.pool <= 2 else 2
    height, width = layer.pooled
    wide = _up(width, chunk) * chunk

    def size(rows: int) -> int:
        plane = (rows * layer.pool + layer.kernel - 1) * (wide * layer.pool + layer.kernel)
        return 8 * (32 * (plane + 3) + rows * wide * (each * warps * 5 // 4 + 4))

    rows = _even(height, sum(size(rows) <= _MOST for rows in range(1, height + 1)))
    return {
        "D_FW": each, "D_NW": warps, "D_CW": chunk, "D_BR": rows,
        "D_MIN": max(1, 65536 // (32 * warps * 128)),
    }  # fmt: skip


def _few(layer: Layer) -> dict[str, int]:
    height, width = layer.pooled

    def size(rows: int, images: int) -> int:
        line = (width + 3) * layer.pool + layer.kernel
        plane = layer.channels * (rows * layer.pool + layer.kernel - 1) * line
        return images * (4 * plane + 32 * 5 * (rows * (width + 3) + 4))

    images = 2 if size(height, 2) <= _SHARED else 1
    rows = _even(height, sum(size(rows, images) <= _SHARED for rows in range(1, height + 1)))
    return {"E_NW": 4, "E_IM": images, "E_BR": rows, "E_MIN": 4}


def _rounded(layer: Layer) -> dict[str, int]:
    height, width = layer.pooled
    chunk = 16 if layer.channels % 16 == 0 else 8
    block = max(1, min(8 if layer.pool <= 2 else 4, layer.filters // 8))
    warps = _up(height * width, 32 if layer.pool == 1 else 8)
    images = 2 if warps <= 3 else 1
    plane = (layer.height + 2 * layer.padding) * (layer.width + 2 * layer.padding) + 32
    size = 8 * images * chunk * plane + 12 * chunk * (8 * block + 8)
    odd = layer.channels % 8 or layer.pool not in (1, 2, 4) or layer.kernel == 1
    if odd or warps * images > 16 or size > _SHARED:
        return {}
    return {"M_NT": block, "M_IM": images, "M_CK": chunk}


def _images(layer: Layer) -> dict[str, int]:
    # Without tiles the gradient is computed as a convolution.
    height, width = layer.pooled
    if layer.pool == 1:
        return {}
    long = width if width <= 5 else 4
    high = 2 if layer.kernel <= 3 and height > 1 else 1
    down, along = _up(height, high), _up(width, long)
    tall = layer.kernel - 1 + layer.pool * high
    sums = tall * (layer.kernel - 1 + layer.pool * long)
    most = 16 if sums + layer.kernel**2 <= 105 else 8
    images = 2 if 2 * down * along <= min(most, 8) else 1
    plane = (down * high * layer.pool + layer.kernel) * (along * long * layer.pool + layer.kernel)
    if images * down * along > most or 128 * images * plane > _MOST:
        return {}
    threads = 32 * images * down * along
    return {
        "X_NR": high, "X_TW": long, "X_OC": 8, "X_IM": images,
        "X_MIN": max(1, 65536 // (threads * 128)),
    }  # fmt: skip
