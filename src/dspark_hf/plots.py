"""Pictures of a calibration and of a cost table. Needs matplotlib, which nothing else here does."""

import os
from pathlib import Path

from .calibration import Calibration
from .confidence_metrics import ConfidenceMetrics
from .throughput import ThroughputProfile

BEFORE, AFTER = "#9a9a9a", "#2463eb"


def plot_reliability(result: Calibration | ConfidenceMetrics, path: str | os.PathLike) -> Path:
    """Reliability diagram of the running product, one panel per slot: predicted against realized share.

    A point is a bin, its area the number of rounds in it; a calibrated head lies on the diagonal.

    Args:
        result (`Calibration` or `ConfidenceMetrics`): before and after, or one set of metrics.
        path (`str`): image to write, PNG by its suffix.

    Raises:
        ImportError: without matplotlib.
    """
    if isinstance(result, Calibration):
        layers = [("before", result.before, BEFORE), ("after", result.after, AFTER)]
    else:
        layers = [("measured", result, AFTER)]
    slots = len(layers[0][1].per_position)
    columns = min(4, slots)
    rows = -(-slots // columns)
    figure, axes = _figure(rows, columns, (2.6 * columns, 2.8 * rows))
    heaviest = max((b["weight"] for _, m, _ in layers for p in m.per_position for b in p.reliability), default=1.0)
    for k in range(rows * columns):
        axis = axes[k // columns][k % columns]
        if k >= slots:
            axis.axis("off")
            continue
        axis.plot([0, 1], [0, 1], color="#d0d0d0", linewidth=1, zorder=1)
        for label, metrics, color in layers:
            bins = metrics.per_position[k].reliability
            x, y = [b["avg_pred"] for b in bins], [b["avg_target"] for b in bins]
            axis.plot(x, y, color=color, linewidth=1, alpha=0.5, zorder=2)
            sizes = [4 + 90 * b["weight"] / heaviest for b in bins]
            axis.scatter(x, y, s=sizes, color=color, alpha=0.8, label=label, zorder=3, linewidths=0)
        errors = " → ".join(f"{metrics.per_position[k].ece:.3f}" for _, metrics, _ in layers)
        axis.set_title(f"slot {k + 1}: ECE {errors}", fontsize=9)
        axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        axis.tick_params(labelsize=7)
    axes[0][0].legend(fontsize=7, frameon=False, loc="upper left", markerscale=0.6)
    figure.supxlabel("predicted survival", fontsize=9)
    figure.supylabel("share of prefixes accepted", fontsize=9)
    return _save(figure, path)


def plot_profile(profile: ThroughputProfile, path: str | os.PathLike) -> Path:
    """Cost of verification by tokens, and tokens per second, one line per measured row count and context.

    Args:
        profile (`ThroughputProfile`): what was measured (points) and what the scheduler reads (lines).
        path (`str`): image to write, PNG by its suffix.

    Raises:
        ImportError: without matplotlib.
    """
    figure, axes = _figure(1, 2, (9, 3.6))
    cost, speed = axes[0]
    lines = sorted({(point.context, point.rows) for point in profile.verify_points})
    for context, rows in lines:
        points = [p for p in profile.verify_points if (p.context, p.rows) == (context, rows)]
        label = f"{rows} row{'s' * (rows > 1)}, context {context}"
        tokens = range(rows, max(p.tokens for p in points) + 1)
        seconds = [profile.verify_seconds(count, rows, context) for count in tokens]
        (line,) = cost.plot(tokens, [1e3 * value for value in seconds], linewidth=1, label=label)
        cost.scatter([p.tokens for p in points], [1e3 * p.seconds for p in points], s=14, color=line.get_color())
        speed.plot(tokens, [count / value for count, value in zip(tokens, seconds, strict=True)], linewidth=1)
    if profile.draft_points:
        block = max(p.tokens for p in profile.draft_points)
        whole = sorted((p.rows, 1e3 * p.seconds) for p in profile.draft_points if p.tokens == block)
        label = "draft of a block, by rows"
        cost.plot(*zip(*whole, strict=True), "x:", color="#555555", linewidth=1, markersize=5, label=label)
    cost.set(xlabel="tokens in the step (B)", ylabel="milliseconds", xscale="log", ylim=(0, None))
    speed.set(xlabel="tokens in the step (B)", ylabel="tokens verified per second", xscale="log", ylim=(0, None))
    cost.legend(fontsize=7, frameon=False)
    device = profile.fields.get("device")
    figure.suptitle("Cost of verification" + (f" on {device}" if device else ""), fontsize=10)
    return _save(figure, path)


def _figure(rows: int, columns: int, size: tuple[float, float]):
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    # Not pyplot: no global state and no display, so this works from any thread.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure, path: str | os.PathLike) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    return path
