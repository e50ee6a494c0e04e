"""Recurrent layers and attention that can be stacked over clients: explicit loops and products.

torch's own are single calls into libraries, which know no stack of weights and draw their own
dropout; these keep its parameters, their names, its order of gates and its arguments.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.models.layers import Coins, dropped

# From what the input adds, what the last output adds and the last state to the state; its first
# part is the output.
Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def _lstm(given: Tensor, recalled: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    let_in, forget, new, let_out = (given + recalled).chunk(4, -1)
    kept = torch.sigmoid(forget) * state[1] + torch.sigmoid(let_in) * torch.tanh(new)
    return torch.sigmoid(let_out) * torch.tanh(kept), kept


def _gru(given: Tensor, recalled: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (reset, update, new), (by_reset, by_update, by_new) = given.chunk(3, -1), recalled.chunk(3, -1)
    fresh = torch.tanh(new + torch.sigmoid(reset + by_reset) * by_new)
    return (fresh + torch.sigmoid(update + by_update) * (state[0] - fresh),)


def _tanh(given: Tensor, recalled: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.tanh(given + recalled),)


def _relu(given: Tensor, recalled: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (functional.relu(given + recalled),)


_CELLS: Mapping[str, Cell] = {"LSTM": _lstm, "GRU": _gru, "RNN_TANH": _tanh, "RNN_RELU": _relu}


def _run(layer: Any, x: Tensor, start: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    # Over (time, rows, inputs), from states (layers x directions, rows, hidden).
    directions = 2 if layer.bidirectional else 1
    lasts: list[tuple[Tensor, ...]] = []
    for number in range(layer.num_layers):
        sides = []
        for direction in range(directions):
            state = tuple(part[number * directions + direction] for part in start)
            ending = f"l{number}" + "_reverse" * direction
            outputs, last = _run_one(layer, x, state, ending)
            sides.append(outputs)
            lasts.append(last)
        x = sides[0] if directions == 1 else torch.cat(sides, -1)
        if number < layer.num_layers - 1:
            x = dropped(x, layer.dropout, layer._coins)
    return x, tuple(torch.stack(parts) for parts in zip(*lasts, strict=True))


def _run_one(
    layer: Any, x: Tensor, state: tuple[Tensor, ...], ending: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    cell, weight = _CELLS[layer.mode], getattr(layer, f"weight_hh_{ending}")
    given = functional.linear(
        x, getattr(layer, f"weight_ih_{ending}"), getattr(layer, f"bias_ih_{ending}", None)
    )
    bias = getattr(layer, f"bias_hh_{ending}", None)
    backwards = ending.endswith("_reverse")
    outputs = []
    for now in reversed(given.unbind(0)) if backwards else given.unbind(0):
        state = cell(now, functional.linear(state[0], weight, bias), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _sequence(layer: Any, input: Any, hx: Any, parts: int) -> tuple[Tensor, Any]:
    if not isinstance(input, Tensor) or input.dim() != 3:
        shape = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
        raise ValueError(
            f"given {shape}; expected (rows, time, inputs) with batch_first=True, padded to one "
            "length (a packed sequence cannot be stacked over clients)"
        )
    x = input.transpose(0, 1) if layer.batch_first else input
    if hx is None:
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        hx = (x.new_zeros(count, x.shape[1], layer.hidden_size),) * parts
    outputs, last = _run(layer, x, (hx,) if isinstance(hx, Tensor) else tuple(hx))
    outputs = outputs.transpose(0, 1) if layer.batch_first else outputs
    return outputs, last[0] if parts == 1 else last


class LSTM(nn.LSTM):
    """torch.nn.LSTM, step by step."""

    _coins: Coins

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, Any]:  # type: ignore[override]
        """Return the outputs, and the last output and state of each layer."""
        return _sequence(self, input, hx, 2)


class GRU(nn.GRU):
    """torch.nn.GRU, step by step."""

    _coins: Coins

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, Any]:  # type: ignore[override]
        """Return the outputs, and the last output of each layer."""
        return _sequence(self, input, hx, 1)


class RNN(nn.RNN):
    """torch.nn.RNN, step by step."""

    _coins: Coins

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, Any]:  # type: ignore[override]
        """Return the outputs, and the last output of each layer."""
        return _sequence(self, input, hx, 1)


def _one_step(layer: Any, cell: Cell, x: Tensor, hx: Any, parts: int) -> tuple[Tensor, ...]:
    if hx is None:
        hx = (x.new_zeros(*x.shape[:-1], layer.hidden_size),) * parts
    state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    given = functional.linear(x, layer.weight_ih, layer.bias_ih)
    return cell(given, functional.linear(state[0], layer.weight_hh, layer.bias_hh), state)


class LSTMCell(nn.LSTMCell):
    """torch.nn.LSTMCell by plain products."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Return the next output and state."""
        return _one_step(self, _lstm, input, hx, 2)


class GRUCell(nn.GRUCell):
    """torch.nn.GRUCell by plain products."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next output."""
        return _one_step(self, _gru, input, hx, 1)[0]


class RNNCell(nn.RNNCell):
    """torch.nn.RNNCell by plain products."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next output."""
        cell = _tanh if self.nonlinearity == "tanh" else _relu
        return _one_step(self, cell, input, hx, 1)[0]


class Attention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention by plain products, its dropout by the client's coin."""

    _coins: Coins

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mixed values, and the weights if they are asked for."""
        if query.dim() != 3:
            raise ValueError(
                f"given {tuple(query.shape)}; expected (rows, time, {self.embed_dim}) with "
                "batch_first=True"
            )
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True without attn_mask; expected both, as in torch")
        given = (query, key, value)
        if not self.batch_first:
            given = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        asked, found, mixed = self._projected(*given)
        scores = asked @ found.mT / math.sqrt(self.head_dim)
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.reshape(-1, self.num_heads, *attn_mask.shape[1:])
            scores = _masked(scores, attn_mask)
        if key_padding_mask is not None:
            scores = _masked(scores, key_padding_mask[:, None, None, :])
        weights = dropped(scores.softmax(-1), self.dropout, self._coins)
        heads = (weights @ mixed).transpose(1, 2).flatten(2)
        outputs = functional.linear(heads, self.out_proj.weight, self.out_proj.bias)
        outputs = outputs if self.batch_first else outputs.transpose(0, 1)
        if not need_weights:
            return outputs, None
        return outputs, weights.mean(dim=1) if average_attn_weights else weights

    def _projected(self, *given: Tensor) -> tuple[Tensor, ...]:
        # Each (rows, heads, time, numbers of a head).
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        biases: Any = (None, None, None)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(3)
        made = map(functional.linear, given, weights, biases)
        return tuple(
            part.reshape(*part.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)
            for part in made
        )


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill(mask, float("-inf"))
    return scores + mask.to(scores.dtype)


REPLACED: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
    nn.MultiheadAttention: Attention,
}
