"""deploy/prometheus: rules, dashboard and configuration, checked by promtool and against what motet really shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from motet.cluster.exposition.node_page import UP
from motet.router.exposition.families import text_of
from motet.tests.rigs.made_metrics_tables import example_gang, example_router, renewed
from motet.tests.rigs.prometheus_binaries import ROOT, promtool

FOLDER = ROOT / "deploy" / "prometheus"
PAGE = ROOT / "docs" / "metrics.md"
RULES = FOLDER / "motet.rules.yaml"
FROM_PROMETHEUS = {"up", "ALERTS"}
FROM_PROCESSES = {"process_resident_memory_bytes"}
FROM_NODES = {UP}


def shown() -> set[str]:
    """Names of all series that routers and gangs show."""
    text = text_of(example_router()).decode() + text_of(example_gang()).decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def names_in(query: str) -> set[str]:
    """Of the series that a query reads. Raises ValueError if it is none."""
    found: set[str] = set()
    _collect(promql_parser.parse(query), found)
    return found


def _collect(node: Any, found: set[str]) -> None:
    if isinstance(node, promql_parser.VectorSelector):
        found.add(str(node.name))
    for part in ("expr", "lhs", "rhs", "param", "vector_selector"):
        if getattr(node, part, None) is not None:
            _collect(getattr(node, part), found)
    for argument in getattr(node, "args", None) or ():
        _collect(argument, found)


def queries_of_the_dashboard() -> Iterator[str]:
    board = json.loads((FOLDER / "dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m")


def test_promtool_accepts_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", RULES)


def test_the_rules_alert_when_they_should() -> None:
    """A gang that vanishes, two routers, a router that starts anew, and each alert: silent when it should be."""
    assert "SUCCESS" in promtool("test", "rules", FOLDER / "rules.test.yaml")


def test_a_rule_that_alerts_otherwise_is_found(tmp_path: Path) -> None:
    """The test of the rules can fail."""
    broken = RULES.read_text().replace("(motet_connected_gangs) == 0\n", "(motet_connected_gangs) == 3\n")
    (tmp_path / RULES.name).write_text(broken)
    (tmp_path / "rules.test.yaml").write_text((FOLDER / "rules.test.yaml").read_text())
    with pytest.raises(AssertionError, match="MotetNoGang"):
        promtool("test", "rules", tmp_path / "rules.test.yaml")


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    text = (FOLDER / "prometheus.yaml").read_text()
    (tmp_path / "key").write_text("a key")
    config = tmp_path / "prometheus.yaml"
    config.write_text(text.replace("/run/secrets/motet/operator-key", str(tmp_path / "key")))
    (tmp_path / RULES.name).write_text(RULES.read_text())
    assert "is valid prometheus config file" in promtool("check", "config", config)


def test_what_is_for_gateways_alone_is_not_kept() -> None:
    """Its labels are lists that change: each would be a series of its own."""
    (job,) = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    monitor = yaml.safe_load((ROOT / "deploy/kustomize/components/prometheus/pod-monitor.yaml").read_text())
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    rules_of = [("source_labels", job["metric_relabel_configs"])]
    rules_of += [("sourceLabels", endpoint["metricRelabelings"]) for endpoint in endpoints]
    for labels, (rule,) in rules_of:
        assert (rule["action"], rule[labels]) == ("drop", ["__name__"])
        dropped = {name for name in shown() if re.fullmatch(rule["regex"], name)}
        assert dropped == {"vllm:lora_requests_info", "vllm:lora_adapter_loaded"}
    requested = [
        job["authorization"],
        job["http_sd_configs"][0]["authorization"],
        *(e["authorization"] for e in endpoints),
    ]
    assert {authorization["type"] for authorization in requested} == {"Bearer"}


@pytest.mark.parametrize("page", [example_router, example_gang])
def test_promtool_finds_no_fault_with_names_and_help(page: Any) -> None:
    # vLLM's names are not as Prometheus would have them: gateways look for them all the same.
    text = re.sub(r"^.*vllm:.*\n", "", text_of(page()).decode(), flags=re.MULTILINE)
    promtool("check", "metrics", text=text)


def test_rules_read_what_is_there() -> None:
    read = {name for rule in rules() for name in names_in(rule["expr"])}
    assert read <= shown() | recorded() | FROM_PROMETHEUS | FROM_NODES
    assert recorded() & read, "no alert reads a recording"


def groupings_in(query: str) -> Iterator[set[str]]:
    """The labels of each `by`."""
    yield from ({one.strip() for one in found.split(",")} for found in re.findall(r"by \(([^)]*)\)", query))


def test_a_rule_never_mixes_two_releases() -> None:
    """Two motets of one name, in two namespaces or two clusters, are two in every rule and on the dashboard."""
    for rule in rules():
        assert rule["expr"].count("by (") == len([*groupings_in(rule["expr"])])
        for labels in groupings_in(rule["expr"]):
            assert {"cluster", "namespace", "job"} <= labels, rule
    for query in queries_of_the_dashboard():
        selectors = re.findall(r"\{([^{}]*)\}", query)
        assert selectors, query
        for selector in selectors:
            assert 'cluster=~"$cluster", namespace=~"$namespace", job="$job"' in selector, query


def test_each_alert_fires_and_is_silent_in_a_test_of_its_rule() -> None:
    tests = yaml.safe_load((FOLDER / "rules.test.yaml").read_text())["tests"]
    reported = [case for test in tests for case in test.get("alert_rule_test", ())]
    counted = [
        sample["labels"] for test in tests for one in test.get("promql_expr_test", ()) for sample in one["exp_samples"]
    ]
    for name in (rule["alert"] for rule in rules() if "alert" in rule):
        assert any(one["alertname"] == name and not one.get("exp_alerts") for one in reported), (
            f"{name} is never silent"
        )
        fires = any(one["alertname"] == name and one.get("exp_alerts") for one in reported)
        assert fires or f'{{alertname="{name}"}}' in counted, f"{name} never fires"


def test_the_dashboard_reads_what_is_there() -> None:
    queries = [*queries_of_the_dashboard()]
    assert len(queries) > 20
    assert {name for query in queries for name in names_in(query)} <= shown() | FROM_PROCESSES


@pytest.mark.parametrize("query", ["sum(rate(motet_nonsense[5m])", "motet_requests_total{route=}"])
def test_a_query_that_is_none_is_found(query: str) -> None:
    with pytest.raises(ValueError):
        names_in(query)


def test_each_alert_has_its_line_in_the_docs() -> None:
    page = PAGE.read_text()
    for rule in rules():
        if "alert" in rule:
            path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
            assert path == "docs/metrics.md"
            assert anchor == rule["alert"].lower()
            assert f"### {rule['alert']}\n" in page
            assert rule["annotations"]["summary"]
            assert rule["labels"]["severity"] in ("page", "warning")


def test_the_page_lists_what_is_there() -> None:
    assert renewed(PAGE.read_text()) == PAGE.read_text(), "run the command that the page names"
    histograms = {name.removesuffix("_bucket") for name in shown()}
    reported = set(re.findall(r"`(motet_\w+[a-z]|vllm:\w+)`", PAGE.read_text()))
    assert reported - shown() - histograms - _renamed() == FROM_NODES


def _renamed() -> set[str]:
    """Old names, which the page lists beside the new ones."""
    table = PAGE.read_text().partition("## Names that changed")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))


def test_kubernetes_gets_the_same_rules_and_dashboard() -> None:
    """Neither kustomize nor helm reads outside of its folder, so each has copies."""
    component = ROOT / "deploy" / "kustomize" / "components" / "prometheus"
    chart = ROOT / "deploy" / "helm" / "motet" / "prometheus"
    assert yaml.safe_load((component / "prometheus-rule.yaml").read_text())["spec"] == yaml.safe_load(RULES.read_text())
    for copy in (chart / RULES.name, chart / "dashboard.json", component / "dashboard.json"):
        assert copy.read_bytes() == (FOLDER / copy.name).read_bytes(), copy
