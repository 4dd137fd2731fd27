"""Prometheus' text format 0.0.4, written from lines of which only the numbers change.

A page has hundreds of samples whose names and labels stay the same from scrape to scrape. They are
put together once (`compile`); a scrape only writes numbers behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from prometheus_client.utils import floatToGoString

from caudal.metrics.instruments import Histogram

Labels = tuple[tuple[str, str], ...]
"""(name, value) pairs that all samples of a page have."""
Writer = Callable[[object], str]
"""Writes a family of samples from whatever its paths lead into."""

_PLAIN = 1e6
"""Up to here Go's and Python's shortest forms of a number agree."""


class Family(Protocol):
    """Samples of one name."""

    @property
    def name(self) -> str:
        """As on the page."""

    def compile(self, labels: Labels) -> Writer:
        """What writes the samples, each with `labels`."""


@dataclass(frozen=True, slots=True)
class Value:
    """One number: `path` is where it is, in dots; the page shows `scale` times that."""

    kind: str
    """`counter` or `gauge`."""
    name: str
    help: str
    path: str
    scale: float = 1.0

    def compile(self, labels: Labels) -> Writer:
        """A line."""
        start = _head(self.name, self.kind, self.help) + sample(self.name, labels)
        read, scale = attrgetter(self.path), self.scale
        return lambda scrape: f"{start}{number(read(scrape) * scale)}\n"


@dataclass(frozen=True, slots=True)
class ByLabel:
    """A number for each value of one label; those of `known` are there in any case."""

    kind: str
    name: str
    help: str
    label: str
    path: str
    """To a mapping from the label's value."""
    known: tuple[str, ...] = ()
    scale: float = 1.0

    def compile(self, labels: Labels) -> Writer:
        """A line per value; one that has not come before costs a little more."""
        head, read, scale = (
            _head(self.name, self.kind, self.help),
            attrgetter(self.path),
            self.scale,
        )
        zeros = dict.fromkeys(self.known, 0.0)
        starts: dict[str, str] = {}

        def write(scrape: object) -> str:
            lines = [head]
            for value, amount in {**zeros, **read(scrape)}.items():
                start = starts.get(value)
                if start is None:
                    start = starts[value] = sample(self.name, (*labels, (self.label, value)))
                lines.append(f"{start}{number(amount * scale)}\n")
            return "".join(lines)

        return write


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram: cumulative buckets, count and sum."""

    name: str
    help: str
    path: str

    def compile(self, labels: Labels) -> Writer:
        """A line per bucket, and two; they are made when the histogram is first seen."""
        read = attrgetter(self.path)
        template = ""

        def write(scrape: object) -> str:
            nonlocal template
            histogram: Histogram = read(scrape)
            template = template or self._template(histogram.bounds, labels)
            totals = histogram.cumulative_counts()
            # Most buckets of a histogram are like their neighbours.
            texts = {total: number(total) for total in totals}
            numbers = [texts[total] for total in totals]
            return template % (*numbers, numbers[-1], number(histogram.sum))

        return write

    def _template(self, bounds: tuple[str, ...], labels: Labels) -> str:
        buckets = [sample(f"{self.name}_bucket", (*labels, ("le", bound))) for bound in bounds]
        starts = [
            *buckets,
            sample(f"{self.name}_count", labels),
            sample(f"{self.name}_sum", labels),
        ]
        lines = "".join(start.replace("%", "%%") + "%s\n" for start in starts)
        return _head(self.name, "histogram", self.help) + lines


@dataclass(frozen=True, slots=True)
class Info:
    """Labels without a number of their own; its value is 1."""

    name: str
    help: str
    path: str
    """To a mapping of labels."""

    def compile(self, labels: Labels) -> Writer:
        """A line, made anew when the labels change."""
        head, read = _head(self.name, "gauge", self.help), attrgetter(self.path)
        made: dict[Labels, str] = {}

        def write(scrape: object) -> str:
            found: Mapping[str, str] = read(scrape)
            key = tuple(found.items())
            if key not in made:
                made.clear()
                made[key] = f"{head}{sample(self.name, (*labels, *key))}1.0\n"
            return made[key]

        return write


@dataclass(frozen=True, slots=True)
class Names:
    """Makes families whose names begin alike."""

    prefix: str

    def histogram(self, name: str, text: str, field: str) -> Family:
        """Of ServerMetrics."""
        return Distribution(f"{self.prefix}{name}", text, f"metrics.{field}")

    def counter(self, name: str, text: str, path: str) -> Family:
        """Its name ends with `_total` on the page."""
        return Value("counter", f"{self.prefix}{name}_total", text, path)

    def gauge(self, name: str, text: str, path: str, scale: float = 1.0) -> Family:
        """A number that goes up and down."""
        return Value("gauge", f"{self.prefix}{name}", text, path, scale)

    def reasons(
        self, name: str, text: str, path: str, label: str = "reason", known: tuple[str, ...] = ()
    ) -> Family:
        """Counters by the values of a label."""
        return ByLabel("counter", f"{self.prefix}{name}_total", text, label, path, known)


def number(value: float) -> str:
    """A sample's value as Prometheus' own clients write it."""
    if -_PLAIN < value < _PLAIN:
        return repr(float(value))
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def sample(name: str, labels: Labels) -> str:
    """All of a sample's line but its number; labels in the order of their names."""
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels))
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
