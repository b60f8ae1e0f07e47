"""Every metric that examples/monitoring and the page `metrics` name is a series of /metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server import docs

FOLDER = Path(__file__).parents[3] / "examples" / "monitoring"
METRIC = re.compile(r"\b((?:vllm:|http_|process_)\w+)")
PANELS = [panel for panel in json.loads((FOLDER / "grafana.json").read_text())["panels"] if panel["type"] != "row"]
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in RULES]


@pytest.mark.asyncio(loop_scope="session")
async def test_every_metric_of_dashboard_alerts_and_page_is_exported(client):
    await client.chat(max_tokens=3)
    text = (await client.get("/metrics")).content.decode()
    families = list(text_string_to_metric_families(text))
    shown = {sample.name for family in families for sample in family.samples} | {family.name for family in families}
    page = docs.text("metrics")
    named = {name for query in [*QUERIES, page] for name in METRIC.findall(query)}
    assert len(named) > 30
    assert named <= shown | {"vllm:lora_requests_info"}  # only with --enable-lora: tests/server/routes/test_adapters.py


def test_queries_are_closed_and_rates_are_taken_of_counters_only():
    for query in QUERIES:
        assert all(query.count(left) == query.count(right) for left, right in ("()", "[]", "{}")), query
        for name in re.findall(r"(?:rate|increase)\(([\w:]+)", query):
            assert name.endswith(("_total", "_sum", "_count", "_bucket")), query
        if "histogram_quantile" in query:
            assert re.search(r"by \((?:instance, )?le\)", query), query


def test_the_scrape_names_the_rules_and_the_route():
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = scrape["scrape_configs"]
    assert all((FOLDER / name).is_file() for name in scrape["rule_files"])
    assert (job["job_name"], job["metrics_path"]) == ("omniloop", "/metrics")
    assert {rule["labels"]["severity"] for rule in RULES} == {"critical", "warning"}
    assert all(rule["annotations"]["summary"] and rule["annotations"]["description"] for rule in RULES)


def test_panels_lie_side_by_side_and_have_a_unit():
    taken = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + 8)}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["fieldConfig"]["defaults"]["unit"] in ("s", "short", "bytes", "percentunit")
