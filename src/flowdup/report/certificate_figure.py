"""A figure of bounds: against how many clients were set aside, and against p."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowdup.certificate import pac_bayes
from flowdup.certificate.held_out_clients import mean_error_bound
from flowdup.certificate.pac_bayes import Clients
from flowdup.errors import CertificateError
from flowdup.files import write_atomic
from flowdup.report.embedding import PALETTE, STYLE

_COUNTS = (10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)
_TICKS = (10, 30, 100, 300, 1000)
_FRACTIONS = tuple(percent / 100 for percent in range(5, 100, 5))


def certificate_figure(rows: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    """Draw what the rows of a certificate would be with other numbers of clients, at the same
    measured risks and norms; writes `out` as .png and .svg.
    """
    import matplotlib  # noqa: PLC0415  (slow to import)
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for color, (name, points) in zip(PALETTE, by_clients(rows).items(), strict=False):
            left.plot(*zip(*points, strict=True), color=color, label=name)
        left.set(xscale="log", xlabel="clients set aside", ylabel="error at most", ylim=(0, 1))
        left.set_xticks(_TICKS, [f"{tick:,}" for tick in _TICKS])  # no mathematical notation
        left.minorticks_off()
        left.legend()
        for color, (name, points) in zip(PALETTE, by_fraction(rows).items(), strict=False):
            right.plot(*zip(*points, strict=True), color=color, label=name)
        right.axhline(1, color="#C8C8C8", linewidth=1)
        right.set(xlabel="p, share of clients with labels", ylabel="bound (above 1: vacuous)")
        if by_fraction(rows):
            right.set_ylim(0, 1.5 * right.get_ylim()[1])  # room for the legend
            right.legend(loc="upper right")
        files = []
        for kind in ("png", "svg"):
            content = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else {}
            figure.savefig(content, format=kind, dpi=150, metadata=metadata)
            write_atomic(path := out.with_suffix(f".{kind}"), content.getvalue())
            files.append(path)
    return files


def by_clients(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Bounds of routes with clients set aside, if so many had the same mean error."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        risk, delta = row.get("empirical_risk"), row["delta"]
        if row["route"] == "held-out-clients" and risk is not None:
            found["held-out clients"] = [
                (float(n), mean_error_bound([risk] * n, delta)) for n in _COUNTS
            ]
        if row["route"] == "pac-bayes-held-out" and risk is not None:
            start, share = row["terms"]["risk"], 0.9 * delta
            found["PAC-Bayes, the same clients"] = [
                (float(n), pac_bayes.inductive_bound(start, 0.0, n, share).bound) for n in _COUNTS
            ]
    return found


def by_fraction(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """The paper's bound at other p, with the same risk, norms and number of clients."""
    row = next((r for r in rows if r["route"] == "pac-bayes-plain" and r["bound"]), None)
    if row is None:
        return {}
    terms, found = row["terms"], {}
    share = 0.8 * row["delta"] / terms["choices"]
    for name, divergence, complexity in (
        ("theorem 1, plain", terms["divergence"], terms["complexity"]),
        ("the same without the divergence of psi_h", 0.0, terms["complexity"]),
        ("the same without any complexity", 0.0, 0.0),
    ):
        points = []
        for p in _FRACTIONS:
            clients = Clients(round(p * terms["n"]), terms["n"], terms["m"])
            try:
                bound = pac_bayes.theorem_a1(
                    terms["risk"], divergence, [complexity], clients, share
                ).bound
            except CertificateError:  # too few with labels, or without
                continue
            if math.isfinite(bound):
                points.append((p, bound))
        if points:
            found[name] = points
    return found
