"""Figure 1 of the paper: what the hypernetwork sees of each client, in two dimensions."""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flowdup.errors import DataError
from flowdup.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Color = str | int | float
Points = NDArray[np.float64]

# Okabe and Ito's colours without yellow, which is lost on white.  Seven colours and nine markers
# have no common factor: 63 groups look different, and the first nine also without colour.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#333333")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "h")
MOST_GROUPS = 12  # numbers with more distinct values get a colour bar
MOST_LEGEND = 24
INK, FAINT = "#333333", "#C8C8C8"

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "flowdup",  # element ids that do not change from run to run
    "svg.fonttype": "path",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "figure.constrained_layout.wspace": 0.04,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def embedding_figure(
    embeddings: NDArray[np.float32], colors: Sequence[Color], label: str, out: Path
) -> dict[str, float]:
    """Draw r(X) of every client by PCA and by t-SNE, coloured by a trait called `label`.

    embeddings is [clients, e]; colors has one value per client.  Writes `out` as .png and as .svg;
    the same input gives the same SVG bytes.  Returns the silhouette of the embeddings (in all e
    dimensions) under the colour groups, or nothing if the colours are not 2 to clients - 1 groups.
    """
    x = _checked(embeddings, colors, label)
    groups = _groups(colors)
    pca, tsne = _project(x)
    for kind, content in _draw({"PCA": pca, "t-SNE": tsne}, colors, groups, label).items():
        write_atomic(out.with_suffix(f".{kind}"), content)
    return _silhouette(x, colors, groups)


def _checked(embeddings: NDArray[np.float32], colors: Sequence[Color], label: str) -> Points:
    x = np.asarray(embeddings, dtype=np.float64)
    if x.ndim != 2 or x.shape[1] < 2:
        raise DataError(f"embeddings have shape {x.shape}: give [clients, e] with e of at least 2")
    if len(x) < 3:
        raise DataError(f"an embedding figure needs at least 3 clients, not {len(x)}: add clients")
    if len(colors) != len(x):
        raise DataError(
            f"{len(colors)} values of '{label}' for {len(x)} clients: give one for each"
        )
    if not np.isfinite(x).all():
        raise DataError("embeddings hold NaN or infinite values: use an earlier checkpoint")
    if any(isinstance(c, float) and not np.isfinite(c) for c in colors):
        raise DataError(f"'{label}' is NaN or infinite for a client: give it a value or a name")
    return x


def _groups(colors: Sequence[Color]) -> list[Color]:
    """The distinct values in order; none if they are too many numbers to tell apart by marker."""
    if any(isinstance(c, str) for c in colors):
        return sorted(set(colors), key=str)
    distinct = sorted({c for c in colors if not isinstance(c, str)})
    return list(distinct) if len(distinct) <= MOST_GROUPS else []


def _project(x: Points) -> tuple[Points, Points]:
    from sklearn.decomposition import PCA  # noqa: PLC0415
    from sklearn.manifold import TSNE  # noqa: PLC0415
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415

    if float(np.ptp(x, axis=0).max()) < 1e-12:  # all clients look alike: nothing to spread out
        return np.zeros((len(x), 2)), np.zeros((len(x), 2))
    # One thread: sums over threads come in any order, and t-SNE would amplify their rounding.
    with threadpool_limits(limits=1):
        pca: Points = PCA(2, svd_solver="full").fit_transform(x)
        start = pca / pca[:, 0].std() * 1e-4
        perplexity = min(30.0, max(1.0, (len(x) - 1) / 3))
        tsne: Points = TSNE(perplexity=perplexity, init=start, random_state=0).fit_transform(x)
    return pca, tsne


def _silhouette(x: Points, colors: Sequence[Color], groups: Sequence[Color]) -> dict[str, float]:
    if not 2 <= len(groups) < len(x):
        return {}
    from sklearn.metrics import silhouette_score  # noqa: PLC0415

    return {"silhouette": float(silhouette_score(x, [groups.index(c) for c in colors]))}


def _draw(
    panels: dict[str, Points], colors: Sequence[Color], groups: Sequence[Color], label: str
) -> dict[str, bytes]:
    """The figure as png and as svg."""
    import matplotlib  # noqa: PLC0415
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.7), facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axes = list(figure.subplots(1, 2))
        for ax, (caption, points) in zip(axes, panels.items(), strict=True):
            _scatter(ax, points, colors, groups)
            _clean(ax, caption)
        if groups:
            _legend(figure, axes[0], groups, label)
        else:
            bar = figure.colorbar(axes[1].collections[0], ax=axes, aspect=32, pad=0.02)
            bar.set_label(_wrapped(label, 56))
            bar.outline.set_visible(False)
        return {kind: _render(figure, kind) for kind in ("png", "svg")}


def _scatter(ax: "Axes", points: Points, colors: Sequence[Color], groups: Sequence[Color]) -> None:
    size = float(np.clip(6000 / len(points), 18, 64))
    edge: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.6, "s": size}
    if not groups:
        ax.scatter(
            points[:, 0], points[:, 1], c=np.asarray(colors, dtype=float), cmap="viridis", **edge
        )
    for i, group in enumerate(groups):
        x, y = points[[c == group for c in colors]].T
        color, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
        ax.scatter(x, y, c=color, marker=marker, label=_short(group), **edge)


def _clean(ax: "Axes", caption: str) -> None:
    """Neither projection has units: no ticks, only a frame to tell the panels apart."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.margins(0.08)
    ax.spines[:].set_color(FAINT)
    ax.set_xlabel(caption, labelpad=6)


def _legend(figure: "Figure", ax: "Axes", groups: Sequence[Color], label: str) -> None:
    handles, names = ax.get_legend_handles_labels()
    if not names:  # clients have no trait: one colour, and nothing to say about it
        return
    shown = f" ({MOST_LEGEND} of {len(groups)})" if len(groups) > MOST_LEGEND else ""
    title = _wrapped(label, 96) + shown
    legend = figure.legend(
        handles[:MOST_LEGEND],
        names[:MOST_LEGEND],
        title=title,
        loc="outside upper center",
        ncols=min(len(groups), max(1, 80 // (6 + max(map(len, names))))),
        frameon=False,
        handletextpad=0.2,
        columnspacing=1.4,
    )
    for handle in legend.legend_handles:
        handle.set_sizes([48])  # type: ignore[union-attr]


def _short(text: Color) -> str:
    shown = text if isinstance(text, str) else f"{text:g}"
    return shown if len(shown) <= 32 else shown[:31] + "…"


def _wrapped(text: str, width: int) -> str:
    """The whole text in lines that fit the figure; only one of several hundred letters is cut."""
    return textwrap.fill(text, width, break_on_hyphens=False, max_lines=6, placeholder=" …")


def _render(figure: "Figure", kind: str) -> bytes:
    buffer = io.BytesIO()
    unsaid = {"Software": None} if kind == "png" else dict.fromkeys(("Date", "Creator"))
    figure.savefig(buffer, format=kind, dpi=200, metadata=unsaid)
    return buffer.getvalue()
