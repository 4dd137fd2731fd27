"""Names are documented once; boards and alerts query only series that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from caudal.metrics.exposition import Exposition
from caudal.metrics.server_metrics import ServerMetrics

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = {"up"}
"""Series that Prometheus itself makes."""
WORDS = frozenset(
    (
        *("sum", "min", "max", "rate", "increase", "deriv", "histogram_quantile", "label_values"),
        *("by", "on", "ignoring", "group_left", "and", "or", "unless"),
        *("instance", "part", "reason", "target", "job", "le"),
    )
)


class Gauges:
    """An engine that has done nothing."""

    def __getattr__(self, name: str) -> object:
        return {} if name in ("num_rejected", "num_finished", "step_ms", "cpu_ms") else 0


class Source:
    """A server that has done nothing."""

    metrics = ServerMetrics()
    batch_metrics = ServerMetrics()
    engine_gauges = Gauges()
    is_engine_ready = False
    num_preparing = 0
    targets_ms: Mapping[str, float] = {"ttft": 500.0, "tpot": 50.0}
    model_labels: Mapping[str, str] = {"model_name": "m", "architecture": "a", "quantization": "q"}
    cache_labels: Mapping[str, str] = {
        "block_size": "16",
        "num_gpu_blocks": "4",
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
    }


def families(compat: str = "vllm") -> dict[str, tuple[str, frozenset[str], frozenset[str]]]:
    """By name as documented: type, labels, names of the samples."""
    found = {}
    text = Exposition(Source(), compat).render().decode()
    for family in text_string_to_metric_families(text):
        labels = frozenset(label for s in family.samples for label in s.labels) - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, labels, frozenset(s.name for s in family.samples))
    return found


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z_:0-9]+)` \| (\w+) \| ([^|]*) \| [^|]+ \|$", text, re.MULTILINE)
    names = [name for name, _, _ in rows]
    assert len(names) == len(set(names)), "a name is documented twice"
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_document_lists_exactly_what_is_exposed() -> None:
    exposed = {
        name: (kind, labels)
        for name, (kind, labels, _) in families().items()
        if not name.startswith("process_")
    }
    assert documented() == exposed


def test_other_names_come_only_when_asked_for() -> None:
    assert not [name for name in families("none") if name.startswith("vllm:")]
    extra = families("vllm").keys() - families("none").keys()
    assert extra
    assert all(name.startswith("vllm:") for name in extra)


def test_every_series_has_a_help_text_and_a_unit_in_its_name() -> None:
    text = Exposition(Source()).render().decode()
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert not family.name.endswith(("_ms", "_milliseconds")), family.name


def board_queries() -> Iterator[str]:
    board = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text("utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def alert_queries() -> Iterator[str]:
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text("utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"]
            yield rule["expr"]


def series_of(query: str) -> set[str]:
    """Names in a query: all words but PromQL's own, label names, values and durations."""
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", query)
    words = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare))
    return words - WORDS - FOREIGN


def labels_of(query: str) -> Iterator[tuple[str, str, str]]:
    for name, matchers in re.findall(r"([a-z_:]+){([^}]*)}", query):
        for label, value in re.findall(r'(\w+)="([^"]*)"', matchers):
            yield name, label, value


QUERIES = [*board_queries(), *alert_queries()]


@pytest.mark.parametrize("query", QUERIES)
def test_boards_and_alerts_query_only_series_that_exist(query: str) -> None:
    exposed = families("none")
    samples = set().union(*(names for _, _, names in exposed.values()))
    names = series_of(query)
    assert names - samples == set()
    assert names or "up{" in query


@pytest.mark.parametrize("query", QUERIES)
def test_boards_and_alerts_match_only_label_values_that_exist(query: str) -> None:
    text = Exposition(Source()).render().decode()
    known = {
        (s.name, label, value)
        for family in text_string_to_metric_families(text)
        for s in family.samples
        for label, value in s.labels.items()
    }
    wanted = {each for each in labels_of(query) if each[0] not in FOREIGN}
    assert wanted - known == set()


@pytest.mark.parametrize("query", QUERIES)
def test_parentheses_of_queries_are_balanced(query: str) -> None:
    depth = 0
    for character in query:
        depth += (character in "([{") - (character in ")]}")
        assert depth >= 0
    assert depth == 0


def test_scrape_configuration_loads_the_rules() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text("utf-8"))
    assert all((ROOT / "deploy" / name).exists() for name in config["rule_files"])
    assert config["scrape_configs"][0]["job_name"] == "caudal"
