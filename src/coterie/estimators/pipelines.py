"""Which steps of a pipeline pool private data: what was fitted on everybody's rows is not covered.

A transformer that learns from the rows it is fitted on (means, ranges, vocabularies, directions)
carries something of every client to every other, without noise. This looks at the steps before
anything is fitted.
"""

from collections.abc import Iterator
from typing import Any

from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import FeatureUnion, Pipeline

from coterie.estimators.scalers import ConstantScaler, PerClientScaler

_OURS = (PerClientScaler, ConstantScaler)
_LEARN_NO_VALUES = (
    "AdditiveChi2Sampler",
    "FeatureHasher",
    "HashingVectorizer",
    "PolynomialFeatures",
    "PolynomialCountSketch",
)
"""Of scikit-learn: fitted on the number of columns alone."""
_DECLARED = {"OneHotEncoder": "categories", "OrdinalEncoder": "categories"}
"""Learn from rows unless this setting is declared."""
_INSTEAD = {
    "StandardScaler": "PerClientScaler() or ConstantScaler(center=..., scale=...)",
    "MinMaxScaler": "ConstantScaler with public bounds",
    "MaxAbsScaler": "ConstantScaler with public bounds",
    "RobustScaler": "PerClientScaler() or ConstantScaler(center=..., scale=...)",
    "OneHotEncoder": "OneHotEncoder(categories=[...]) with declared categories",
    "OrdinalEncoder": "OrdinalEncoder(categories=[...]) with declared categories",
    "CountVectorizer": "HashingVectorizer, or a public vocabulary with text='bag' of ct.load",
    "TfidfVectorizer": "HashingVectorizer, or a public vocabulary with text='bag' of ct.load",
    "SimpleImputer": "SimpleImputer(strategy='constant', fill_value=...)",
}
_USUALLY = "a step with public constants, or the same step fitted on public rows beforehand"


def check_pipeline(pipeline: Any) -> tuple[str, ...]:
    """Name the steps of a pipeline that learn from the rows of all clients together.

    Looks into nested pipelines, unions and column transformers. Steps of other packages are taken
    for pooling unless their tags say that they need no fit.

    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from coterie import CoterieRegressor
    >>> for step in check_pipeline(make_pipeline(StandardScaler(), CoterieRegressor())):
    ...     print(step)
    standardscaler: StandardScaler learns from the rows of all clients, which epsilon does not \
cover; use PerClientScaler() or ConstantScaler(center=..., scale=...)

    Returns:
        One sentence for each such step; () where there is none.
    """
    return tuple(
        f"{name}: {type(step).__name__} learns from the rows of all clients, which epsilon does "
        f"not cover; use {_INSTEAD.get(type(step).__name__, _USUALLY)}"
        for name, step in _transformers(pipeline, "", last=True)
        if not _is_public(step)
    )


def _transformers(step: Any, name: str, *, last: bool) -> Iterator[tuple[str, Any]]:
    """Walk over transformers with their paths; the last step of a pipeline predicts."""
    if isinstance(step, Pipeline):
        for at, (key, inner) in enumerate(step.steps):
            ends = last and at == len(step.steps) - 1
            yield from _transformers(inner, _path(name, key), last=ends)
    elif isinstance(step, FeatureUnion):
        for key, inner in step.transformer_list:
            yield from _transformers(inner, _path(name, key), last=False)
    elif isinstance(step, ColumnTransformer):
        for key, inner, _ in step.transformers:
            yield from _transformers(inner, _path(name, key), last=False)
        yield from _transformers(step.remainder, _path(name, "remainder"), last=False)
    elif isinstance(step, BaseEstimator) and not (last and not hasattr(step, "transform")):
        yield name or type(step).__name__.lower(), step


def _path(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_public(step: Any) -> bool:
    kind = type(step).__name__
    if isinstance(step, _OURS) or kind in _LEARN_NO_VALUES:
        return True
    if kind in _DECLARED:
        return not isinstance(getattr(step, _DECLARED[kind]), str)
    if kind == "SimpleImputer":
        return bool(step.strategy == "constant" and step.fill_value is not None)
    return not step.__sklearn_tags__().requires_fit
