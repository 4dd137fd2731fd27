"""Panels stacked into one picture, as SVG and PNG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from caudal.bench.charts import FONT, Panel, resolve_colours
from caudal.bench.figures import TIMELINE_SIZE, curve_panels, timeline_panels
from caudal.bench.page import readable
from caudal.bench.suite import Report
from caudal.bench.text_report import search_outcome
from caudal.errors import CaudalError

GAP = 10
ZOOM = 2


def check_available() -> None:
    """Raises CaudalError if pictures cannot be rendered."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        raise CaudalError(
            "--png: needs the package resvg-py (pip install 'caudal[bench]'); --html needs nothing"
        ) from None


def report_rows(report: Report) -> list[list[Panel]]:
    """The curves, then the timeline of the last level."""
    rows = [curve_panels(report)]
    if report.levels:
        rows += [[panel] for panel in timeline_panels(report.levels[-1], report.plan.objective)]
    return [row for row in rows if row]


def compose(title: str, lines: Sequence[str], rows: Sequence[Sequence[Panel]]) -> str:
    """One SVG in the light palette: a title, lines of text, and rows of panels."""
    width = TIMELINE_SIZE[0] + 2 * GAP
    top = 40 + 16 * len(lines)
    parts = [_text(GAP + 8, 28, title, 17, "--text", 600)]
    parts += [
        _text(GAP + 8, 48 + 16 * number, line, 12, "--muted", 400)
        for number, line in enumerate(lines)
    ]
    for row in rows:
        left = GAP
        for panel in row:
            parts.append(panel.svg(f'x="{left}" y="{top}"'))
            left += panel.width + GAP
        top += max(panel.height for panel in row) + GAP
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
        f'viewBox="0 0 {width} {top}"><rect width="100%" height="100%" fill="var(--page)"/>'
        + "".join(parts)
        + "</svg>"
    )
    return resolve_colours(svg)


def _text(x: int, y: int, words: str, size: int, colour: str, weight: int) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" '
        f'font-family="{escape(FONT)}" fill="var({colour})">{escape(words)}</text>'
    )


def write_png(svg: str, path: Path) -> None:
    """Render at twice the size. Raises CaudalError without the renderer, OSError."""
    check_available()
    import resvg_py

    path.write_bytes(bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=ZOOM)))


def report_svg(report: Report) -> str:
    """The curves and the last level's timeline."""
    title = report.plan.label or f"{report.target.model} under load"
    lines = [f"{report.workload} · {readable(report.started)} · {report.machine['cpu']}"]
    if outcome := search_outcome(report):
        lines.append(outcome)
    if report.levels:
        lines.append(f"Below the curves: {report.levels[-1].load}")
    return compose(title, lines, report_rows(report))
