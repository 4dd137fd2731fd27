"""A measurement as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from caudal.bench.charts import COLOURS, Panel
from caudal.bench.figures import curve_panels, timeline_panels
from caudal.bench.suite import Level, Report
from caudal.bench.text_report import (
    SWEEP_HEAD,
    heading,
    level_table,
    notes,
    search_outcome,
    sweep_rows,
)

_DARK = {
    "--page": "#14181d",
    "--text": "#e6eaee",
    "--muted": "#98a4b0",
    "--grid": "#2a3138",
    "--main": "#66aef5",
    "--other": "#6f7b87",
    "--bad": "#ff7a6e",
    "--target": "#e0b050",
    "--soft": "#66aef526",
}
_STYLE = """
* { box-sizing: border-box }
body { margin: 0 auto; padding: 24px 20px 48px; max-width: 1160px; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 18px; margin: 32px 0 8px }
p.sub { margin: 0 0 20px; color: var(--muted) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px }
.tile { border: 1px solid var(--grid); border-radius: 8px; padding: 10px 12px }
.tile b { display: block; font-size: 21px; font-variant-numeric: tabular-nums }
.tile span { color: var(--muted); font-size: 13px }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 8px }
.scroll { overflow-x: auto } svg { display: block; width: 100%; height: auto }
.wide svg { min-width: 820px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--grid);
  white-space: nowrap }
th { color: var(--muted); font-weight: 500 } th:first-child, td:first-child { text-align: left }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0 }
dt { color: var(--muted) } dd { margin: 0; overflow-wrap: anywhere }
.call { border-left: 4px solid var(--main); padding: 8px 14px; background: var(--soft) }
.warn { border-left: 4px solid var(--target); padding: 6px 14px; margin: 8px 0 }
details { border-top: 1px solid var(--grid); padding: 8px 0 }
summary { cursor: pointer; font-weight: 600; padding: 4px 0 }
pre { overflow-x: auto; font-size: 13px; line-height: 1.4 }
@media (max-width: 560px) { dl { grid-template-columns: 1fr } dd { margin-bottom: 6px } }
"""


def _variables(colours: dict[str, str]) -> str:
    return ";".join(f"{name}:{colour}" for name, colour in colours.items())


def readable(moment: str) -> str:
    """An ISO moment as people write it."""
    return moment[:16].replace("T", " ") + " UTC"


def page(title: str, body: str) -> str:
    """A complete document in both palettes."""
    style = (
        f":root{{color-scheme:light dark;{_variables(COLOURS)}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}{_STYLE}"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{body}</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself on a narrow screen."""
    head_cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head_cells}</tr>{body}</table></div>'


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """(number, what it is) side by side."""
    made = "".join(
        f'<div class="tile"><b>{escape(number)}</b><span>{escape(name)}</span></div>'
        for number, name in pairs
    )
    return f'<div class="tiles">{made}</div>'


def figures(panels: Iterable[Panel], css_class: str) -> str:
    """Panels in a grid (`curves`) or one below the other (`wide`)."""
    made = "".join(f'<div class="scroll">{panel.svg()}</div>' for panel in panels)
    return f'<div class="{css_class}">{made}</div>'


def report_page(report: Report) -> str:
    """The page of a measurement."""
    title = report.plan.label or f"{report.target.model} under load"
    parts = [
        f'<h1>{escape(title)}</h1><p class="sub">{escape(report.workload)} · '
        f"{escape(readable(report.started))}</p>"
    ]
    if outcome := search_outcome(report):
        parts.append(f'<p class="call">{escape(outcome)}</p>')
    if len(report.levels) == 1:
        parts.append(tiles(_tiles(report.levels[0])))
    elif report.levels:
        parts.append("<h2>Throughput and latency</h2>" + figures(curve_panels(report), "curves"))
        parts.append(
            "<h2>Levels</h2><p>Latencies in milliseconds, from the intended send time.</p>"
        )
        parts.append(table(SWEEP_HEAD, sweep_rows(report)))
    parts.append("<h2>Over time</h2>")
    last = len(report.levels) - 1
    parts += [
        _level(report, level, is_open=index == last) for index, level in enumerate(report.levels)
    ]
    parts.append("<h2>Conditions</h2>" + _conditions(report))
    return page(title, "".join(parts))


def _tiles(level: Level) -> list[tuple[str, str]]:
    summary = level.summary
    found = [
        (f"{summary.output_throughput:.1f}", "output tok/s"),
        (f"{summary.request_throughput:.2f}", "requests/s"),
    ]
    if summary.ttft_ms.count:
        found.append((f"{summary.ttft_ms.p50:.0f} ms", "TTFT p50"))
        found.append((f"{summary.ttft_ms.p95:.0f} ms", "TTFT p95"))
    if summary.tpot_ms.count:
        found.append((f"{summary.tpot_ms.p95:.1f} ms", "TPOT p95"))
    found.append((f"{summary.e2e_ms.p95 / 1e3:.2f} s", "end to end p95"))
    if summary.good_share is not None:
        found.append((f"{summary.good_share:.1%}", "good answers"))
    found.append(
        (f"{summary.num_failed}", f"failed of {summary.num_completed + summary.num_failed}")
    )
    return found


def _level(report: Report, level: Level, *, is_open: bool) -> str:
    warnings = "".join(f'<p class="warn">{escape(text)}</p>' for text in notes(report, level))
    drawn = figures(timeline_panels(level, report.plan.objective), "wide")
    text = f"<details><summary>All numbers</summary><pre>{escape(level_table(report, level))}</pre>"
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(str(level.load))}</summary>"
        f"{warnings}{drawn}{text}</details></details>"
    )


def _conditions(report: Report) -> str:
    rows = []
    for line in heading(report):
        name, _, value = line.partition(":")
        rows.append(f"<dt>{escape(name)}</dt><dd>{escape(value.strip())}</dd>")
    return f"<dl>{''.join(rows)}</dl>"


def write_page(report: Report, path: Path) -> None:
    """Raises OSError."""
    path.write_text(report_page(report), encoding="utf-8")
