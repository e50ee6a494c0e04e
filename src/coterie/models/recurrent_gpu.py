"""LSTM and GRU layers of a stack of clients on a GPU, in Triton: all time steps in one launch.

With gates in torch's order, of client c at time t, from rows x and the state before:

    LSTM: (i, f, g, o) = W x_t + b + U h + b';  c_t = sig(f) c + sig(i) tanh(g)
          h_t = sig(o) tanh(c_t)
    GRU:  (r, z, n) = W x_t + b;  (r', z', n') = U h + b';  m = tanh(n + sig(r + r') n')
          h_t = m + sig(z + z') (h - m)

A program computes some rows of one client; its state never leaves the chip. W x and the gradients
of W and U are batched products of torch. Sums have a fixed order, so results repeat, and a client's
bits do not depend on the other clients. With `low`, factors of products are bfloat16, sums and
cells float32.

Imported only on a GPU. `usable` compares with the steps of `coterie.models.layers` before the first
use of a width on a device. Tests: tests/models/test_recurrent.py, without a GPU in Triton's
interpreter.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Widths whose weights fit on the chip, by `low`. Wider layers take a launch per time step.
WIDEST = {False: 64, True: 128}
_ROWS = 16  # of a program, the least that Triton multiplies
_TILE = 1024  # entries of a program that multiplies nothing
_NEAR = {False: 1e-4, True: 5e-2}  # relative errors that a check allows, by `low`
# mode, backwards, (time, rows, inputs), weights, biases, *start -> outputs, and the last cells
Steps = Callable[..., tuple[Tensor, ...]]


class Kind(NamedTuple):
    """What a kernel is compiled for."""

    mode: str
    hidden: int
    low: bool
    device: torch.device


_CHECKED: dict[Kind, bool] = {}
_SPLIT: set[Kind] = set()  # kinds that take a launch per time step although they are narrow


def _is_whole(kind: Kind) -> bool:
    # Whether one launch computes all time steps.
    return kind.hidden <= WIDEST[kind.low] and kind not in _SPLIT


def usable(kind: Kind, steps: Steps) -> bool:
    """Return whether kernels compute a layer as `steps` does; compile and compare at first use."""
    if kind not in _CHECKED:
        if torch.cuda.is_current_stream_capturing():
            return False
        _CHECKED[kind] = _agrees(kind, steps)
    return _CHECKED[kind]


def _agrees(kind: Kind, steps: Steps) -> bool:
    why = _difference(kind, steps)
    if why and _is_whole(kind):  # a smaller chip
        _SPLIT.add(kind)
        why = _difference(kind, steps)
    if why:
        warnings.warn(
            f"{kind.mode} of width {kind.hidden} runs step by step on {kind.device}: {why}",
            stacklevel=2,
        )
    return not why


def _difference(kind: Kind, steps: Steps) -> str:
    try:
        apart = max(_apart(kind, steps, backwards) for backwards in (False, True))
    except Exception as error:  # no compiler, an old GPU: the steps compute the same
        return f"{type(error).__name__}: {error}"
    return "" if apart <= _NEAR[kind.low] else f"the relative error of its kernel is {apart:.1e}"


@torch.enable_grad()
def _apart(kind: Kind, steps: Steps, backwards: bool) -> float:
    """Return the largest relative error of outputs and gradients, on random numbers."""
    draws, hidden = torch.Generator().manual_seed(0), kind.hidden
    lines = hidden * (4 if kind.mode == "LSTM" else 3)
    shapes = [(3, 17, 5), (lines, 5), (lines, hidden), (lines,), (lines,), (17, hidden)]
    shapes += [(17, hidden)] * (kind.mode == "LSTM")
    leaves = [
        torch.randn(2, *shape, generator=draws).mul(0.3).to(kind.device).requires_grad_()
        for shape in shapes
    ]
    x, *weights = leaves[:5]
    sides = []
    with torch.autocast(kind.device.type, enabled=False):
        wanted = torch.func.vmap(lambda *given: steps(kind.mode, backwards, *given))(*leaves)
        found = recurrence(kind, backwards, x, weights, tuple(leaves[5:]))
        pulls = [torch.randn(part.shape, generator=draws).to(kind.device) for part in wanted]
        for made in (wanted, found):
            grads = torch.autograd.grad(
                made, leaves, [p.to(m) for p, m in zip(pulls, made, strict=True)]
            )
            sides.append([*made, *grads])
    return max(
        float((ours.float() - theirs).detach().norm() / theirs.detach().norm())
        for theirs, ours in zip(*sides, strict=True)
    )


def recurrence(
    kind: Kind,
    backwards: bool,
    x: Tensor,
    weights: Sequence[Tensor | None],
    start: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Return outputs (c, time, rows, hidden), and the last cells of an LSTM.

    Args:
        kind: What the kernels are compiled for.
        backwards: Whether time runs backwards.
        x: Rows (c, time, rows, inputs).
        weights: W (c, gates, inputs), U (c, gates, hidden), b and b' (c, gates) or None.
        start: State before the first step, each (c, rows, hidden); empty for zeros.
    """
    given = (*weights, *start, *[None] * (2 - len(start)))
    keeps = torch.is_grad_enabled() and any(
        part is not None and part.requires_grad for part in (x, *given)
    )
    made: tuple[Tensor, ...] = _Recurrence.apply(x, *given, kind, backwards, keeps)
    return made


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
        w, u, b, b2, h, c, kind, backwards, keeps = given
        ctx.set_materialize_grads(False)
        low = torch.bfloat16 if kind.low else torch.float32
        clients, times, rows, _ = x.shape
        flat, w = x.reshape(clients, times * rows, -1).to(low), w.to(low)
        mapped = torch.bmm(flat, w.mT)
        u, h, c = u.contiguous(), _whole(h), _whole(c)
        shape = (clients, times + 1, rows, kind.hidden)
        hidden = x.new_empty(shape, dtype=low)
        cells = x.new_empty(shape, dtype=torch.float32) if kind.mode == "LSTM" else mapped
        gates = mapped.new_empty(clients, times, rows, 4 * kind.hidden) if keeps else mapped
        facts = (times, rows, backwards, keeps, b is not None, b2 is not None, h is not None)
        given = (_whole(b), _whole(b2), h, c, hidden, cells, gates, *facts)
        kernel = _lstm_forward if kind.mode == "LSTM" else _gru_forward
        if _is_whole(kind):
            _launch(kernel, kind, u, rows, mapped, u, *given, 0, times)
        else:
            _put_start(hidden, h, backwards)
            if kind.mode == "LSTM":
                _put_start(cells, c, backwards)
            turned = u.to(low).mT
            for step in range(times):
                before = times - step if backwards else step
                recalled = torch.bmm(hidden[:, before], turned)
                _launch(kernel, kind, u, rows, mapped, recalled, *given, step, step + 1)
        if keeps:
            ctx.save_for_backward(flat, w, u, hidden, cells, gates)
        ctx.how = kind, backwards, x.shape, h is not None
        made, last = _after(hidden, backwards), 0 if backwards else -1
        return (made, cells[:, last]) if kind.mode == "LSTM" else (made,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        flat, w, u, hidden, cells, gates = ctx.saved_tensors
        kind, backwards, shape, started = ctx.how
        out, cell = grads[0], _whole(grads[1]) if len(grads) > 1 else None
        clients, times, rows = shape[:3]
        if out is None:
            out = hidden.new_zeros(1).expand(clients, times, rows, kind.hidden)
        out = out if out.stride(-1) == 1 else out.contiguous()
        mapped = gates.new_empty(clients, times, rows, u.shape[1])
        recalled = mapped if kind.mode == "LSTM" else torch.empty_like(mapped)
        # With respect to the first state, of outputs and cells.
        first = cells.new_empty(2, clients, rows, kind.hidden, dtype=torch.float32)
        facts = (times, rows, backwards, *out.stride()[:3], cell is not None, started)
        given = (hidden, cells, gates, mapped, recalled, first, *facts)
        kernel = _lstm_backward if kind.mode == "LSTM" else _gru_backward
        if _is_whole(kind):
            _launch(kernel, kind, u, rows, out, cell, u, *given, 0, times)
        else:
            first[0], first[1] = 0, 0 if cell is None else cell
            back, factors = first[0], u.to(hidden.dtype)
            for step in range(times):
                _launch(kernel, kind, u, rows, out, back, u, *given, step, step + 1)
                back = torch.bmm(recalled[:, step if backwards else times - 1 - step], factors)
            first[0] = back + first[1] if kind.mode == "GRU" else back
        mapped, recalled = mapped.flatten(1, 2), recalled.flatten(1, 2)
        before = hidden[:, 1:] if backwards else hidden[:, :-1]
        needs = ctx.needs_input_grad
        x_grad = torch.bmm(mapped, w).reshape(shape) if needs[0] else None
        b_grad = mapped.sum(dim=1, dtype=torch.float32) if needs[3] or needs[4] else None
        own = kind.mode == "GRU" and needs[4]
        b2_grad = recalled.sum(dim=1, dtype=torch.float32) if own else b_grad
        return (
            x_grad,
            _product(mapped, flat) if needs[1] else None,
            _product(recalled, before.reshape(clients, times * rows, -1)) if needs[2] else None,
            b_grad if needs[3] else None,
            b2_grad if needs[4] else None,
            first[0] if needs[5] else None,
            first[1] if needs[6] else None,
            *[None] * 3,
        )  # fmt: skip


def _put_start(states: Tensor, start: Tensor | None, backwards: bool) -> None:
    states[:, -1 if backwards else 0] = 0 if start is None else start


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _after(hidden: Tensor, backwards: bool) -> Tensor:
    return hidden[:, :-1] if backwards else hidden[:, 1:]


def _product(left: Tensor, right: Tensor) -> Tensor:
    # Of float32 also where the factors are bfloat16: without a launch that converts the sums.
    if left.dtype == torch.float32 or not left.is_cuda:
        return torch.bmm(left.mT, right)
    return torch.bmm(left.mT, right, out_dtype=torch.float32)


def _launch(kernel: Any, kind: Kind, u: Tensor, rows: int, *given: Any) -> None:
    wide, inside = max(16, triton.next_power_of_2(kind.hidden)), _is_whole(kind)
    high = _ROWS if inside else max(1, _TILE // wide)
    # A missing tensor is not read: any pointer of its type will do.
    given = tuple(u if part is None else part for part in given)
    given = tuple(int(part) if isinstance(part, bool) else part for part in given)
    if len(u) and rows:
        how = tuning(wide, kind.low) if inside else {"num_warps": 4, "HOLD": False}
        with torch.cuda.device_of(u):
            kernel[len(u), triton.cdiv(rows, high)](
                *given, H=kind.hidden, WIDE=wide, ROWS=high, LOW=kind.low, INSIDE=inside, **how
            )


def tuning(wide: int, low: bool) -> dict[str, Any]:
    """Return settings of a launch: warps, and whether weights are held from step to step.

    Measured on an H200, for 100 clients with 10 rows and 20 steps.
    """
    warps = (4 if low else 2) if wide <= 32 else (8 if low else 4)
    return {"num_warps": warps, "HOLD": low or wide <= 32}


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    # A series near 0, where the difference would lose digits.
    s = x * x
    near = x * (1 + s * (-0.33333333 + s * (0.13333334 + s * (-0.05396825 + s * 0.021869488))))
    return tl.where(tl.abs(x) < 0.25, near, 2 / (1 + tl.exp(-2 * x)) - 1)


@triton.jit
def _times(left, right, total, LOW: tl.constexpr):
    if LOW:
        total = tl.dot(left.to(tl.bfloat16), right, total)
    else:
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _weights(u, gate: tl.constexpr, down, along, H: tl.constexpr, LOW: tl.constexpr):
    # The entries U[gate, down, along], 0 outside.
    at = u + (gate * H + down) * H + along
    tile = tl.load(at, mask=(down < H) & (along < H), other=0.0)
    if LOW:
        tile = tile.to(tl.bfloat16)
    return tile


@triton.jit
def _turned(u, gate: tl.constexpr, j, H: tl.constexpr, LOW: tl.constexpr):
    # The transpose of U[gate], read along its rows.
    return tl.trans(_weights(u, gate, j[:, None], j[None, :], H, LOW))


@triton.jit
def _back(left, u, gate: tl.constexpr, total, down, along, H: tl.constexpr, LOW: tl.constexpr):
    return _times(left, _weights(u, gate, down, along, H, LOW), total, LOW)


@triton.jit
def _bias(b, b2, has, has2, gate: tl.constexpr, j, H: tl.constexpr):
    at = gate * H + j[None, :]
    first = tl.load(b + at, mask=(j < H)[None, :] & (has != 0), other=0.0)
    return first + tl.load(b2 + at, mask=(j < H)[None, :] & (has2 != 0), other=0.0)


@triton.jit
def _read(at, ok, H: tl.constexpr):
    # The numbers of four gates, side by side.
    i = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    f = tl.load(at + H, mask=ok, other=0.0).to(tl.float32)
    g = tl.load(at + 2 * H, mask=ok, other=0.0).to(tl.float32)
    o = tl.load(at + 3 * H, mask=ok, other=0.0).to(tl.float32)
    return i, f, g, o


@triton.jit
def _read_three(at, ok, H: tl.constexpr):
    r = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    z = tl.load(at + H, mask=ok, other=0.0).to(tl.float32)
    n = tl.load(at + 2 * H, mask=ok, other=0.0).to(tl.float32)
    return r, z, n


@triton.jit
def _write(at, i, f, g, o, ok, H: tl.constexpr):
    tl.store(at, i, mask=ok)
    tl.store(at + H, f, mask=ok)
    tl.store(at + 2 * H, g, mask=ok)
    tl.store(at + 3 * H, o, mask=ok)


@triton.jit
def _write_three(at, r, z, n, ok, H: tl.constexpr):
    tl.store(at, r, mask=ok)
    tl.store(at + H, z, mask=ok)
    tl.store(at + 2 * H, n, mask=ok)


@triton.jit
def _begun(states, slot, given, at, ok, started, INSIDE: tl.constexpr):
    # The state before the first step of a launch, which a launch of all steps also writes.
    if INSIDE:
        x = tl.load(given + at, mask=ok & (started != 0), other=0.0).to(tl.float32)
        tl.store(states + slot, x, mask=ok)
    else:
        x = tl.load(states + slot, mask=ok, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["turned", "keeps", "has", "has2", "started", "begin", "end"])
def _lstm_forward(
    mapped, u, b, b2, h0, c0, hidden, cells, gates, times, rows, turned, keeps, has, has2, started,
    begin, end,
    H: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr, HOLD: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDE)
    unit = j[None, :]
    ok = (r < rows)[:, None] & (unit < H)
    row = client * rows + r[:, None]
    b, b2 = b + client * 4 * H, b2 + client * 4 * H
    u += client * 4 * H * H if INSIDE else row * 4 * H + unit
    if HOLD:
        ui, uf = _turned(u, 0, j, H, LOW), _turned(u, 1, j, H, LOW)
        ug, uo = _turned(u, 2, j, H, LOW), _turned(u, 3, j, H, LOW)
    bi, bf = _bias(b, b2, has, has2, 0, j, H), _bias(b, b2, has, has2, 1, j, H)
    bg, bo = _bias(b, b2, has, has2, 2, j, H), _bias(b, b2, has, has2, 3, j, H)
    before = begin + turned * (times - 2 * begin)
    slot = ((client * (times + 1) + before) * rows + r[:, None]) * H + unit
    h = _begun(hidden, slot, h0, row * H + unit, ok, started, INSIDE)
    c = _begun(cells, slot, c0, row * H + unit, ok, started, INSIDE)
    for s in range(begin, end):
        t = s + turned * (times - 1 - 2 * s)
        at = ((client * times + t) * rows + r[:, None]) * 4 * H + unit
        i, f, g, o = _read(mapped + at, ok, H)
        i, f, g, o = i + bi, f + bf, g + bg, o + bo
        if not INSIDE:
            ui, uf, ug, uo = _read(u, ok, H)
            i, f, g, o = i + ui, f + uf, g + ug, o + uo
        elif HOLD:
            i, f = _times(h, ui, i, LOW), _times(h, uf, f, LOW)
            g, o = _times(h, ug, g, LOW), _times(h, uo, o, LOW)
        else:
            i = _times(h, _turned(u, 0, j, H, LOW), i, LOW)
            f = _times(h, _turned(u, 1, j, H, LOW), f, LOW)
            g = _times(h, _turned(u, 2, j, H, LOW), g, LOW)
            o = _times(h, _turned(u, 3, j, H, LOW), o, LOW)
        i, f, g, o = _sigmoid(i), _sigmoid(f), _tanh(g), _sigmoid(o)
        c = f * c + i * g
        h = o * _tanh(c)
        _write(gates + at, i, f, g, o, ok & (keeps != 0), H)
        slot = ((client * (times + 1) + t + 1 - turned) * rows + r[:, None]) * H + unit
        tl.store(hidden + slot, h, mask=ok)
        tl.store(cells + slot, c, mask=ok)


@triton.jit(do_not_specialize=["turned", "with_cell", "started", "begin", "end"])
def _lstm_backward(
    out, cell, u, hidden, cells, gates, mapped, recalled, first, times, rows, turned,
    by_client, by_time, by_row, with_cell, started, begin, end,
    H: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr, HOLD: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDE)
    down, along, unit = j[:, None], j[None, :], j[None, :]
    ok = (r < rows)[:, None] & (unit < H)
    u += client * 4 * H * H
    if HOLD:
        ui, uf = _weights(u, 0, down, along, H, LOW), _weights(u, 1, down, along, H, LOW)
        ug, uo = _weights(u, 2, down, along, H, LOW), _weights(u, 3, down, along, H, LOW)
    start = (client * rows + r[:, None]) * H + unit
    later = first + tl.num_programs(0).to(tl.int64) * rows * H + start
    if INSIDE:
        dc = tl.load(cell + start, mask=ok & (with_cell != 0), other=0.0).to(tl.float32)
        dh = tl.zeros((ROWS, WIDE), tl.float32)
    else:
        dc = tl.load(later, mask=ok, other=0.0)
        dh = tl.load(cell + start, mask=ok, other=0.0).to(tl.float32)
    for s in range(begin, end):
        t = times - 1 - s + turned * (2 * s - times + 1)
        pull = out + client * by_client + t * by_time + r[:, None] * by_row + unit
        dh += tl.load(pull, mask=ok, other=0.0).to(tl.float32)
        at = ((client * times + t) * rows + r[:, None]) * 4 * H + unit
        i, f, g, o = _read(gates + at, ok, H)
        after = ((client * (times + 1) + t + 1 - turned) * rows + r[:, None]) * H + unit
        before = ((client * (times + 1) + t + turned) * rows + r[:, None]) * H + unit
        e = _tanh(tl.load(cells + after, mask=ok, other=0.0))
        do, dc = dh * e * o * (1 - o), dc + dh * o * (1 - e * e)
        df = dc * tl.load(cells + before, mask=ok, other=0.0) * f * (1 - f)
        di, dg = dc * g * i * (1 - i), dc * i * (1 - g * g)
        _write(mapped + at, di, df, dg, do, ok, H)
        dc, dh = dc * f, tl.zeros((ROWS, WIDE), tl.float32)
        if HOLD:
            dh = _times(df, uf, _times(di, ui, dh, LOW), LOW)
            dh = _times(do, uo, _times(dg, ug, dh, LOW), LOW)
        elif INSIDE:
            dh = _back(df, u, 1, _back(di, u, 0, dh, down, along, H, LOW), down, along, H, LOW)
            dh = _back(do, u, 3, _back(dg, u, 2, dh, down, along, H, LOW), down, along, H, LOW)
    if INSIDE:
        tl.store(first + start, dh, mask=ok & (started != 0))
    tl.store(later, dc, mask=ok)


@triton.jit(do_not_specialize=["turned", "keeps", "has", "has2", "started", "begin", "end"])
def _gru_forward(
    mapped, u, b, b2, h0, c0, hidden, cells, gates, times, rows, turned, keeps, has, has2, started,
    begin, end,
    H: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr, HOLD: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDE)
    unit = j[None, :]
    ok = (r < rows)[:, None] & (unit < H)
    row = client * rows + r[:, None]
    b, b2 = b + client * 3 * H, b2 + client * 3 * H
    u += client * 3 * H * H if INSIDE else row * 3 * H + unit
    if HOLD:
        ur, uz = _turned(u, 0, j, H, LOW), _turned(u, 1, j, H, LOW)
        un = _turned(u, 2, j, H, LOW)
    br, bz = _bias(b, b2, has, has2, 0, j, H), _bias(b, b2, has, has2, 1, j, H)
    bn, bm = _bias(b, b2, has, 0, 2, j, H), _bias(b, b2, 0, has2, 2, j, H)
    before = begin + turned * (times - 2 * begin)
    slot = ((client * (times + 1) + before) * rows + r[:, None]) * H + unit
    h = _begun(hidden, slot, h0, row * H + unit, ok, started, INSIDE)
    for s in range(begin, end):
        t = s + turned * (times - 1 - 2 * s)
        now = (client * times + t) * rows + r[:, None]
        at = now * 3 * H + unit
        reset, z, n = _read_three(mapped + at, ok, H)
        reset, z, n, m = reset + br, z + bz, n + bn, tl.zeros((ROWS, WIDE), tl.float32) + bm
        if not INSIDE:
            ur, uz, un = _read_three(u, ok, H)
            reset, z, m = reset + ur, z + uz, m + un
        elif HOLD:
            reset = _times(h, ur, reset, LOW)
            z = _times(h, uz, z, LOW)
            m = _times(h, un, m, LOW)
        else:
            reset = _times(h, _turned(u, 0, j, H, LOW), reset, LOW)
            z = _times(h, _turned(u, 1, j, H, LOW), z, LOW)
            m = _times(h, _turned(u, 2, j, H, LOW), m, LOW)
        reset, z = _sigmoid(reset), _sigmoid(z)
        n = _tanh(n + reset * m)
        h = n + z * (h - n)
        _write(gates + now * 4 * H + unit, reset, z, n, m, ok & (keeps != 0), H)
        slot = ((client * (times + 1) + t + 1 - turned) * rows + r[:, None]) * H + unit
        tl.store(hidden + slot, h, mask=ok)


@triton.jit(do_not_specialize=["turned", "with_cell", "started", "begin", "end"])
def _gru_backward(
    out, cell, u, hidden, cells, gates, mapped, recalled, first, times, rows, turned,
    by_client, by_time, by_row, with_cell, started, begin, end,
    H: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr, HOLD: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDE)
    down, along, unit = j[:, None], j[None, :], j[None, :]
    ok = (r < rows)[:, None] & (unit < H)
    u += client * 3 * H * H
    if HOLD:
        ur, uz = _weights(u, 0, down, along, H, LOW), _weights(u, 1, down, along, H, LOW)
        un = _weights(u, 2, down, along, H, LOW)
    start = (client * rows + r[:, None]) * H + unit
    later = first + tl.num_programs(0).to(tl.int64) * rows * H + start
    if INSIDE:
        dh = tl.zeros((ROWS, WIDE), tl.float32)
    else:
        dh = tl.load(later, mask=ok, other=0.0)
        dh += tl.load(cell + start, mask=ok, other=0.0).to(tl.float32)
    for s in range(begin, end):
        t = times - 1 - s + turned * (2 * s - times + 1)
        pull = out + client * by_client + t * by_time + r[:, None] * by_row + unit
        dh += tl.load(pull, mask=ok, other=0.0).to(tl.float32)
        row = (client * times + t) * rows + r[:, None]
        reset, z, n, m = _read(gates + row * 4 * H + unit, ok, H)
        before = ((client * (times + 1) + t + turned) * rows + r[:, None]) * H + unit
        h = tl.load(hidden + before, mask=ok, other=0.0).to(tl.float32)
        dn = dh * (1 - z) * (1 - n * n)
        dz = dh * (h - n) * z * (1 - z)
        dm, dr = dn * reset, dn * m * reset * (1 - reset)
        _write_three(mapped + row * 3 * H + unit, dr, dz, dn, ok, H)
        _write_three(recalled + row * 3 * H + unit, dr, dz, dm, ok, H)
        dh = dh * z
        if HOLD:
            dh = _times(dm, un, _times(dz, uz, _times(dr, ur, dh, LOW), LOW), LOW)
        elif INSIDE:
            dh = _back(dr, u, 0, dh, down, along, H, LOW)
            dh = _back(dz, u, 1, dh, down, along, H, LOW)
            dh = _back(dm, u, 2, dh, down, along, H, LOW)
    if INSIDE:
        tl.store(first + start, dh, mask=ok & (started != 0))
    else:
        tl.store(later, dh, mask=ok)
