"""A client's model outside coterie: one torch program, or one ONNX graph, from raw rows to outputs.

The program takes rows as the data's owner has them, (rows, features) or (rows, *shape) in the order
of the file's columns, and does what reading and training did before the network saw them: the
declared constants, then the client's own means and deviations. Outputs are as `coterie predict`
calls them: values in the target's own units, or a decision value for each class.
"""

import copy
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.data.scaling import LIMIT
from coterie.data.tables import feature_constants, target_constants
from coterie.exports import ClientModel, metadata
from coterie.models.base import squeezed
from coterie.models.module import Networked, assembled
from coterie.privacy.files import write_atomically

_TRIED = 3  # rows of the example that a program is traced with


class Predictor(nn.Module):
    """One client's model, raw rows in, outputs out.

    Args:
        model: The client's model.
    """

    def __init__(self, model: ClientModel) -> None:
        super().__init__()
        kind, width = model.kind, model.kind.spec.features
        self._shape, self._model = kind.spec.shape, kind.model
        self._clip = kind.source.clip
        self._target = target_constants(kind.source, kind.columns)
        centers, scales = feature_constants(kind.source, kind.columns, width)
        self._declared = bool((centers != 0).any() or (scales != 1).any())
        self._own = model.moments is not None
        own = (np.zeros(width), np.ones(width)) if model.moments is None else model.moments
        for name, numbers in zip(
            ("center", "scale", "own_center", "own_scale"), (centers, scales, *own), strict=True
        ):
            self.register_buffer(name, torch.from_numpy(np.array(numbers, dtype=np.float64)))
        self._network: nn.Module | None = None
        if isinstance(kind.model, Networked):
            self._network = assembled(kind.model, kind.spec, model.params)
        else:
            self._leaves = {name: f"leaf{at}" for at, name in enumerate(model.params)}
            for name, place in self._leaves.items():
                self.register_buffer(place, model.params[name].clone())

    def forward(self, rows: Tensor) -> Tensor:
        """Predict rows."""
        outputs = self._answer(self._scaled(rows.flatten(1)).reshape(-1, *self._shape))
        center, scale = self._target
        # By a factor of 1 nothing is multiplied: programs stay as short as the model.
        return outputs if (center, scale) == (0.0, 1.0) else outputs * scale + center

    def _scaled(self, rows: Tensor) -> Tensor:
        # In float64, as rows are read: float32 would move what lies far from zero.
        x: Any = rows
        if self._declared:
            x = (x.double() - self.center) / self.scale
        if self._clip is not None:
            x = x.clamp(-float(self._clip), float(self._clip))
        x = x.float()
        if self._own:
            x = ((x.double() - self.own_center) / self.own_scale).clamp(-LIMIT, LIMIT).float()
        found: Tensor = x
        return found

    def _answer(self, x: Tensor) -> Tensor:
        if self._network is not None:
            outputs: Tensor = self._network(x)
            return squeezed(outputs) if outputs.dim() > 1 else outputs
        params = {name: self.get_buffer(place) for name, place in self._leaves.items()}
        return self._model.apply(params, x)


def save_torch(path: Path, model: ClientModel) -> None:
    """Write a program of `torch.export`: `torch.export.load(path).module()(rows)`."""
    buffer, told = io.BytesIO(), json.dumps(metadata(model))
    with _quiet():
        torch.export.save(_program(model), buffer, extra_files={"coterie.json": told})
    write_atomically(path, buffer.getvalue())


def save_onnx(path: Path, model: ClientModel) -> None:
    """Write an ONNX graph with one input, rows, and one output.

    Raises:
        ValueError: If the packages that write it are not installed.
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"format onnx needs {' and '.join(missing)}: install coterie[onnx], or choose "
            "--format torch or safetensors"
        )
    # The exporter writes to a path of its own; what is kept appears whole or not at all.
    with TemporaryDirectory() as place, _quiet():
        made = Path(place) / "model.onnx"
        found: Any = torch.onnx.export(
            _program(model), input_names=["rows"], output_names=["outputs"], dynamo=True
        )
        found.model.metadata_props.update(metadata(model))
        found.save(made)
        write_atomically(path, made.read_bytes())


def _program(model: ClientModel) -> Any:
    """Trace a model for any number of rows.

    Raises:
        ValueError: If torch cannot write it as one program.
    """
    predictor = copy.deepcopy(Predictor(model)).eval()
    example = torch.zeros(_TRIED, *model.kind.spec.shape)
    rows = torch.export.Dim("rows", min=1)
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(predictor, (example,), dynamic_shapes=({0: rows},))
    except Exception as error:  # a user's module can fail to be traced in any way
        told = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{type(model.kind.model).__name__} cannot be written as one program ({told}); choose "
            "--format safetensors, and load its parameters into the module by hand"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Let torch's exporters work without their remarks: results go to stdout, and are ours."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
