"""docs/metrics.md lists exactly the metrics of a router."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from motet.router.metrics import Metrics
from motet.workers.wire.engine_load import EngineLoad

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_the_page_names_every_metric_and_no_other() -> None:
    text = Metrics().exposition(EngineLoad(), 0, 0, {}, is_registry_connected=True).decode()
    told = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in text_string_to_metric_families(text)
    }
    assert set(re.findall(r"motet_\w+", PAGE.read_text())) == told


def test_faults_are_told_before_there_are_any() -> None:
    text = Metrics().exposition(None, 0, 0, {"engine": 2}, is_registry_connected=True).decode()
    assert 'motet_gang_faults_total{kind="engine"} 2.0' in text
    assert 'motet_gang_faults_total{kind="connection"} 0.0' in text


def test_help_is_a_sentence_of_its_own() -> None:
    text = Metrics().exposition(EngineLoad(), 0, 0, {}, is_registry_connected=True).decode()
    told = {family.name: family.documentation for family in text_string_to_metric_families(text)}
    assert told["motet_engine_disk_pages"] == "Pages of KV on disk."
    assert len(set(told.values())) == len(told)
    for name, documentation in told.items():
        assert re.fullmatch(r"[A-Z1].*\w\.", documentation), (name, documentation)
