"""The plots of `coterie plan --plot`: epsilon against rounds, noise of a mean against clients.

By Vega-Altair, from the extra `report`: .html holds all it needs and opens from disk, .svg and .png
are pictures.
"""

from pathlib import Path
from typing import Any

from coterie.cli.outputs import check_file
from coterie.cli.plan_words import Found
from coterie.plan.advice import ERROR
from coterie.plan.curves import Points

_KINDS = (".html", ".svg", ".png")


def draw(found: Found, paths: list[str]) -> None:
    """Write the plots to each of these files.

    Raises:
        ValueError: If a file is of another kind, there is nothing to plot, or Altair is missing.
    """
    for path in paths:
        if Path(path).suffix.lower() not in _KINDS:
            raise ValueError(f"--plot {path}: expected a name that ends in {', '.join(_KINDS)}")
        check_file(Path(path), "--plot")
    chart = _chart(found)
    for path in paths:
        if Path(path).suffix.lower() == ".html":
            chart.save(path, inline=True)
        else:
            chart.save(path, **({"ppi": 144} if path.lower().endswith(".png") else {}))


def _chart(found: Found) -> Any:
    try:
        import altair as alt
        import vl_convert  # noqa: F401  # pictures, and pages that need no network
    except ImportError as error:
        raise ValueError(
            f"--plot needs {error.name}, which is not installed: pip install 'coterie[report]'"
        ) from error
    if found.outline is None or found.outlook is None:
        raise ValueError(
            "--plot: there is nothing to plot, as this plan posts no mean with one Gaussian noise "
            "for all rounds; leave out --plot"
        )
    by_rounds, by_clients = Found(outline=found.outline, outlook=found.outlook, full=True).curves()
    outline, outlook = found.outline, found.outlook
    epsilon = _panel(
        by_rounds,
        (outline.rounds, outlook.epsilon),
        ("rounds", f"epsilon of one client ({outlook.relation}), for {outlook.view}"),
        f"Epsilon against rounds at noise multiplier {outlook.noise_multiplier:.4g}",
    )
    noise = _panel(
        by_clients,
        (outline.clients, outlook.error),
        ("clients", "noise of a posted mean over the clip"),
        f"Noise against clients, {outline.numbers:,} numbers posted",
    )
    limit = alt.Chart(_values(((1.0, ERROR),))).mark_rule(strokeDash=[4, 4])
    return alt.hconcat(epsilon, noise + limit.encode(y=alt.Y("y:Q")))


def _panel(points: Points, here: tuple[float, float], axes: tuple[str, str], title: str) -> Any:
    """Draw a line on logarithmic scales, with the plan itself as a point on it."""
    import altair as alt

    across, up = axes
    x = alt.X("x:Q", title=across, scale=alt.Scale(type="log"))
    y = alt.Y("y:Q", title=up, scale=alt.Scale(type="log"))
    shown = [
        alt.Tooltip("x:Q", title=across, format=","),
        alt.Tooltip("y:Q", title=up, format=".3"),
    ]
    line = alt.Chart(_values(points)).mark_line(point=True)
    dot = alt.Chart(_values((here,))).mark_point(size=160, filled=True, color="#d62728")
    both = line.encode(x=x, y=y, tooltip=shown) + dot.encode(x=x, y=y, tooltip=shown)
    return both.properties(width=340, height=240, title=title)


def _values(points: Points) -> Any:
    import altair as alt

    return alt.InlineData(values=[{"x": x, "y": y} for x, y in points])
