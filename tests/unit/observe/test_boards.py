"""The committed boards and rules, by the rules of grafana/dashboard-linter and some of our own.

Of the linter's fourteen rules those for templates (data source, label_values, reload with the time range),
panels (data source, title and description, unit, targets) and targets (PromQL, rate interval, counters) are
here, and that a board is not editable. Not kept are its four for `job` and `instance`: `job` belongs to
Prometheus, and a run is known by `namespace` and `run`, which every query must match instead.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from kit import boards
from kit.boards import BOARDS, GPU_ONLY_ALERTS, GPU_ONLY_PANELS, OF_SOME_PANELS, ROOT, RULES

from mlpipe._core.mfu import utilization_query
from mlpipe.observe.series import EXPERT_METRICS, FLEET_METRICS, GPU_METRICS, METRICS, SOME_METRICS

pytestmark = pytest.mark.unit
RUNBOOKS = ROOT / "docs" / "runbooks"
# ids of Grafana's value formats (@grafana/data, valueFormats/categories), as far as they are used
UNITS = {"bytes", "celsius", "currencyUSD", "none", "percentunit", "s", "sci", "short", "watt"}
SERIES = {
    f"{metric.name}{suffix}"
    for metric in (*METRICS, *EXPERT_METRICS, *SOME_METRICS, *GPU_METRICS, *FLEET_METRICS)
    for suffix in (("_bucket", "_sum", "_count") if metric.type == "histogram" else ("",))
}
COUNTERS = {name for name in SERIES if name.endswith(("_total", "_bucket", "_sum", "_count"))}
RECORDED = {rule["record"] for rule in boards.rules() if "record" in rule}
BY_QUERY = [pytest.param(one, id=f"{one.board}: {one.panel}: {one.legend}") for one in boards.queries()]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not on PATH: install prometheus")
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=300, check=False)


def test_the_boards_are_what_their_python_says():
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        pytest.skip("grafana-foundation-sdk is missing: pip install grafana-foundation-sdk==0.0.21")
    done = subprocess.run(
        [sys.executable, ROOT / "grafana" / "generate.py", "--check"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", BOARDS)
def test_a_board(name):
    board = boards.load(name)
    assert board["uid"] == f"mlpipe-{name}"
    assert board["editable"] is False
    assert "id" not in board or board["id"] is None
    source, *others = board["templating"]["list"]
    assert (source["type"], source["name"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert source["label"] == "Data source"
    assert {"namespace", "run"} <= {one["name"] for one in others}
    for variable in others:
        assert variable["datasource"]["uid"] == "$datasource"
        assert variable["refresh"] == 2, "of the time range"
    events = board["annotations"]["list"]
    assert {"Alert", "Checkpoint", "Start or restart"} <= {one["name"] for one in events}
    assert {one["datasource"]["uid"] for one in events} == {"$datasource"}
    found = list(boards.panels(board))
    rows = [panel["id"] for panel in board["panels"] if panel["type"] == "row"]
    assert len({*rows, *(panel["id"] for panel in found)}) == len(found) + len(rows), "ids are unique"
    titles = Counter(panel["title"] for panel in found)
    assert titles.most_common(1)[0][1] == 1, titles.most_common(1)


@pytest.mark.parametrize("name", BOARDS)
def test_panels_lie_beside_each_other(name):
    taken: set[tuple[int, int]] = set()
    for panel in boards.load(name)["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize(
    "panel",
    [
        pytest.param(panel, id=f"{name}: {panel['title']}")
        for name in BOARDS
        for panel in boards.panels(boards.load(name))
    ],
)
def test_a_panel(panel):
    assert panel["title"]
    assert panel["description"]
    assert panel["datasource"]["uid"] == "$datasource"
    assert "Good: " in panel["description"], "a description says what good looks like"
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"] in UNITS
    assert defaults["thresholds"]["steps"][0].get("value") is None
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "$datasource"
        assert target["legendFormat"]
    for override in panel["fieldConfig"]["overrides"]:
        for found in override["properties"]:
            assert found["id"] != "unit" or found["value"] in UNITS
    for page in re.findall(r"docs/runbooks/\S+", panel["description"]):
        assert (ROOT / page).exists(), page


@pytest.mark.parametrize("query", BY_QUERY)
def test_a_query(query):
    for name in re.findall(r"\b(mlpipe_\w+)\b", query.expr):
        assert name in SERIES, f"{name} is exported by nobody"
    for counter in COUNTERS & set(re.findall(r"\bmlpipe_\w+", query.expr)):
        for before in re.findall(rf"(\S+?\(){counter}\b", query.expr):
            assert before.endswith(("rate(", "increase(")), f"{counter} outside of rate and increase"
    for window in re.findall(r"\brate\(.*?\[(.*?)\]\)", query.expr):
        assert window == "$__rate_interval"
    if "ALERTS" not in query.expr:
        assert 'namespace=~"$namespace"' in query.expr
        assert 'run=~"$run"' in query.expr or "mlpipe_fleet_" in query.expr
    assert query.gpu_only == bool(re.search(r"DCGM_|mlpipe_train_gpu_|mlpipe_gpu_", query.expr))
    assert query.of_some == bool(
        re.search(r"mlpipe_train_(experts?|replicas|loss_scale|skipped|exchanged)", query.expr)
    )


def test_the_rules_divide_as_the_boards_do():
    recorded = {rule["record"]: rule["expr"] for rule in boards.rules() if "record" in rule}
    for window in ("5m", "1h"):
        query = utilization_query(by="namespace, run, stage", window=window)
        assert " ".join(recorded[f"run:mlpipe_train_mfu:ratio_rate{window}"].split()) == query


def test_what_is_declared_gpu_only_or_of_some_is_there():
    panels = {(query.board, query.panel) for query in boards.queries()}
    assert panels >= GPU_ONLY_PANELS | OF_SOME_PANELS
    assert {alert["alert"] for alert in boards.alerts()} >= GPU_ONLY_ALERTS


def test_every_query_parses(tmp_path):
    every = boards.queries() + boards.events() + boards.variables()
    group = [{"record": f"query:{i}", "expr": query.filled()} for i, query in enumerate(every)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": group}]}))
    done = promtool("check", "rules", "--lint=none", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(every)} rules found" in done.stdout


def test_the_rules_parse():
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", boards.rules(), ids=lambda rule: rule.get("alert") or rule.get("record"))
def test_a_rule(rule):
    names = set(re.findall(r"(?<![\w:])(?:run:|rank:)?mlpipe_[\w:]+", rule["expr"]))
    assert names <= SERIES | RECORDED
    if "record" in rule:
        assert re.fullmatch(r"run:mlpipe_\w+:\w+", rule["record"])
        return
    assert rule["labels"]["severity"] in {"critical", "warning"}
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert notes["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"
    page = (ROOT / notes["runbook_url"]).read_text()
    assert page.startswith(f"# {rule['alert']}\n")
    assert {"**Why it matters.**", "**Look.**", "**Mend.**"} <= set(re.findall(r"\*\*[\w ]+\.\*\*", page))


def test_every_runbook_is_of_an_alert_and_listed():
    alerts = {alert["alert"]: alert for alert in boards.alerts()}
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {*alerts, "README"}
    rows = re.findall(
        r"^\| \[(\w+)\]\(\1\.md\) \| (\w+) \|", (RUNBOOKS / "README.md").read_text(), flags=re.M
    )
    assert dict(rows) == {name: alert["labels"]["severity"] for name, alert in alerts.items()}


def test_every_alert_fires_and_stays_quiet_by_promtool(tmp_path):
    cases = Path(__file__).with_name("rules_test.yaml").read_text().replace("RULES", str(RULES))
    fires, quiet = set(), set()
    for test in yaml.safe_load(cases)["tests"]:
        for case in test["alert_rule_test"]:
            (fires if case["exp_alerts"] else quiet).add(case["alertname"])
    assert fires == quiet == {alert["alert"] for alert in boards.alerts()}
    file = tmp_path / "rules_test.yaml"
    file.write_text(cases)
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
