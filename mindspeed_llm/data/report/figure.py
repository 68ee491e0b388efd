"""The length histogram as a PNG."""
# pyright: basic
# matplotlib's annotations are partial.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise

from mindspeed_llm.data.report.statistics import DatasetStatistics, Histogram, Lengths
from mindspeed_llm.errors import DataError


@dataclass(frozen=True)
class Theme:
    """Colours of a figure, those of the page around it."""

    paper: str
    ink: str
    muted: str
    line: str
    bar: str


LIGHT = Theme(paper="#ffffff", ink="#1c2430", muted="#5a6675", line="#e1e5ea", bar="#2f6fb4")
DARK = Theme(paper="#1a1f27", ink="#e6eaf0", muted="#9aa6b4", line="#323a46", bar="#6aa5e3")


def require_matplotlib() -> None:
    """Fail before the long part of the work rather than after it.

    Raises:
        DataError: matplotlib is not installed.
    """
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise DataError("The data report draws with matplotlib.", got=error, fix="pip install matplotlib") from error


def draw_lengths(datasets: Mapping[str, DatasetStatistics], theme: Theme = LIGHT) -> bytes:
    """A row of two panels for each dataset: documents, and their tokens, by length.

    Returns:
        The PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 2.9 * len(datasets)), dpi=150, facecolor=theme.paper, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(datasets), 2, squeeze=False)
    for (key, dataset), panels in zip(datasets.items(), rows, strict=True):
        # The default font has no Chinese; a key without a glyph would be boxes.
        name = key.encode("ascii", "backslashreplace").decode() + ": " if len(datasets) > 1 else ""
        _draw_panel(panels[0], dataset, dataset.histogram.documents, theme, marks=True)
        _draw_panel(panels[1], dataset, dataset.histogram.tokens, theme, marks=False)
        for axes, title in zip(panels, ("share of documents", "share of tokens"), strict=True):
            axes.set_title(name + title, loc="left", fontsize=10, color=theme.ink, parse_math=False, pad=18)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_panel(axes, dataset: DatasetStatistics, values: tuple[int, ...], theme: Theme, *, marks: bool) -> None:
    axes.set_facecolor(theme.paper)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.muted)
    axes.tick_params(colors=theme.muted, labelsize=8, length=0)
    axes.grid(axis="y", color=theme.line, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("tokens in a document", fontsize=8.5, color=theme.muted)
    total = sum(values)
    if total == 0:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no tokens", transform=axes.transAxes, ha="center", color=theme.muted)
        return
    edges = dataset.histogram.edges
    axes.set_xscale("log", base=2)
    shares = [value / total for value in values]
    axes.bar(edges[:-1], shares, [high - low for low, high in pairwise(edges)], align="edge", color=theme.bar,
             edgecolor=theme.paper, linewidth=0.8)  # fmt: skip
    axes.set_xlim(*_visible(dataset.histogram))
    axes.xaxis.set_major_formatter(lambda value, _: _power_of_two(value))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.3g} %")
    if marks and dataset.lengths is not None:
        _mark(axes, dataset.lengths, theme)


def _visible(histogram: Histogram) -> tuple[int, int]:
    """The edges around the bins that are not empty."""
    filled = [number for number, documents in enumerate(histogram.documents) if documents]
    return histogram.edges[filled[0]], histogram.edges[filled[-1] + 1]


def _power_of_two(value: float) -> str:
    if value < 1024:
        return f"{value:g}"
    return f"{value / 1024:g}k" if value < 1024**2 else f"{value / 1024**2:g}M"


def _mark(axes, lengths: Lengths, theme: Theme) -> None:
    """Dashed lines at percentiles, named above the panel where there is room."""
    low, high = axes.get_xlim()
    crowded = lengths.p90 < lengths.median * (high / low) ** 0.1
    for name, value, side in (("median ", lengths.median, "right"), ("p90 ", lengths.p90, "right"),
                              (" p99", lengths.p99, "left")):  # fmt: skip
        if low <= value <= high:
            axes.axvline(value, color=theme.ink, linewidth=1, linestyle=(0, (3, 2)))
            if not (crowded and name == "p90 "):
                axes.annotate(name, (value, 1), xycoords=("data", "axes fraction"), xytext=(0, 3),
                              textcoords="offset points", ha=side, fontsize=8, color=theme.ink)  # fmt: skip
