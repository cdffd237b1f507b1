"""What all boards share: panels of each form, variables, annotations and the pieces of their queries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from mlpipe._core.mfu import utilization_query

SOURCE = common.DataSourceRef(type_val="prometheus", uid="$datasource")
WINDOW = "$__rate_interval"
RUNS = 'namespace=~"$namespace", run=~"$run"'
Steps = Sequence[tuple[float | None, str]]
GREEN: Steps = ((None, "green"),)
Queries = dict[str, str]  # legend -> PromQL


def low_is_good(warn: float, bad: float) -> Steps:
    return ((None, "green"), (warn, "yellow"), (bad, "red"))


def high_is_good(bad: float, warn: float) -> Steps:
    return ((None, "red"), (bad, "yellow"), (warn, "green"))


PROGRESS = "max by ({0}) (mlpipe_train_step{{{1}}}) / max by ({0}) (mlpipe_train_target_steps{{{1}}})"
LAST_STEP = "time() - max by ({0}) (mlpipe_train_last_step_timestamp_seconds{{{1}}})"
LAST_SAVE = "time() - max by ({0}) (mlpipe_checkpoint_last_success_timestamp_seconds{{{1}}})"
MFU_STEPS = high_is_good(0.2, 0.35)
WAIT_STEPS = low_is_good(0.05, 0.2)


def rate(metric: str, by: str = "", where: str = RUNS) -> str:
    """Sum of the rates of a counter, `by` the labels named."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric}{{{where}}}[{WINDOW}]))"


def share(metric: str, by: str = "", where: str = RUNS) -> str:
    """Part of the ranks' step time that a counter of seconds takes: a quotient of sums."""
    return f"{rate(metric, by, where)} / {rate('mlpipe_train_step_duration_seconds_sum', by, where)}"


def mfu(by: str = "", where: str = RUNS) -> str:
    """A quotient of sums over the ranks."""
    return utilization_query(by=by, where=where, window=WINDOW)


def local(by: str, where: str = RUNS) -> str:
    """Seconds per second of the ranks' own time: data and compute, without waiting for each other."""
    parts = ("mlpipe_train_compute_seconds_total", "mlpipe_train_data_wait_seconds_total")
    return f"sum by ({by}) ({' + '.join(f'rate({part}{{{where}}}[$__rate_interval])' for part in parts)})"


def straggler(where: str = RUNS) -> str:
    """Of each rank: its own time over the median of its training's ranks, of a pipeline its stage's."""
    by = "namespace, run, stage, pipeline_stage"
    keys = "namespace, run, stage, rank"
    stages = f"max by ({keys}, pipeline_stage) (mlpipe_run_info{{{where}}})"
    ranks = f"({local(keys, where)} * on ({keys}) group_left (pipeline_stage) {stages})"
    return f"{ranks} / on ({by}) group_left () quantile by ({by}) (0.5, {ranks})"


def dcgm(field: str, where: str = RUNS) -> str:
    """A series of DCGM's exporter for the pods of the runs, with their `run` and `node`. Where Prometheus
    scrapes that exporter with honorLabels false, the pod of the GPU arrives as `exported_pod`."""
    renamed = f'label_replace({field}{{exported_pod!=""}}, "pod", "$1", "exported_pod", "(.+)")'
    renamed = f'label_replace({renamed}, "namespace", "$1", "exported_namespace", "(.+)")'
    pods = f"group by (namespace, pod, run, node) (mlpipe_run_info{{{where}}})"
    return f'({field}{{exported_pod=""}} or {renamed}) * on (namespace, pod) group_left (run, node) {pods}'


def about(what: str, good: str, todo: str, alert: str = "") -> str:
    """A panel's description: what it shows, what good looks like, what to do, which alert watches it."""
    return " ".join([what, f"Good: {good}", todo, *([f"Runbook: docs/runbooks/{alert}.md"] if alert else [])])


def quantile(q: float, metric: str, window: str = "$__rate_interval", function: str = "rate") -> str:
    """Of rank 0, which speaks for all: steps are equally long on every rank, saves are its own."""
    return f'histogram_quantile({q}, sum by (le) ({function}({metric}_bucket{{{RUNS}, rank="0"}}[{window}])))'


def _query(
    expr: str, legend: str, letter: str, *, instant: bool, as_table: bool = False
) -> prometheus.Dataquery:
    query = prometheus.Dataquery().datasource(SOURCE).expr(expr).legend_format(legend).ref_id(letter)
    form = prometheus_models.PromQueryFormat
    query.format(form.TABLE if as_table else form.TIME_SERIES)
    return query.instant() if instant else query.range()


def _thresholds(steps: Steps) -> builders.ThresholdsConfig:
    thresholds = [models.Threshold(value=value, color=color) for value, color in steps]
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds)


def _common(panel: Any, title: str, about: str, unit: str, steps: Steps, width: int, height: int) -> Any:
    panel.title(title).description(about).datasource(SOURCE).unit(unit).thresholds(_thresholds(steps))
    return panel.span(width).height(height)


def number(
    title: str,
    about: str,
    unit: str,
    queries: Queries,
    steps: Steps = GREEN,
    *,
    width: int = 4,
    decimals: int = 1,
) -> stat.Panel:
    """The last value, coloured by its thresholds."""
    panel = _common(stat.Panel(), title, about, unit, steps, width, 4).decimals(decimals)
    panel.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.graph_mode(common.BigValueGraphMode.NONE).color_mode(common.BigValueColorMode.VALUE)
    for letter, (legend, expr) in zip("ABCDEFGH", queries.items(), strict=False):
        panel.with_target(_query(expr, legend, letter, instant=True))
    return panel


def names(title: str, about: str, queries: Queries, *, width: int, links: dict[str, str]) -> stat.Panel:
    """The legends themselves, of series that say something by their labels; a click follows a link."""
    panel = number(title, about, "short", queries, ((None, "text"),), width=width, decimals=0)
    targets = [
        builders.DashboardLink(name).type(models.DashboardLinkType.LINK).url(url).target_blank(True)
        for name, url in links.items()
    ]
    return panel.text_mode(common.BigValueTextMode.NAME).data_links(targets)


def curve(
    title: str,
    about: str,
    unit: str,
    queries: Queries,
    steps: Steps = GREEN,
    *,
    width: int = 8,
    stacked: bool = False,
) -> timeseries.Panel:
    panel = _common(timeseries.Panel(), title, about, unit, steps, width, 8)
    legend = common_builders.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
    panel.legend(legend.placement(common.LegendPlacement.BOTTOM).calcs([]))
    tooltip = common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI)
    panel.tooltip(tooltip.sort(common.SortOrder.DESCENDING)).fill_opacity(60 if stacked else 5)
    if stacked:
        panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL)).min(0).max(1)
    if len(steps) > 1:
        style = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        panel.thresholds_style(style)
    for letter, (legend_format, expr) in zip("ABCDEFGH", queries.items(), strict=False):
        panel.with_target(_query(expr, legend_format, letter, instant=False))
    return panel


def heat(title: str, about: str, unit: str, legend: str, expr: str, *, width: int = 12) -> heatmap.Panel:
    """One row a series, one column a moment."""
    panel = _common(heatmap.Panel(), title, about, unit, GREEN, width, 8).calculate(False)
    colour = (
        heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    )
    panel.color(colour).cell_values(heatmap.CellValues().unit(unit)).y_axis(
        heatmap.YAxisConfig().unit("short")
    )
    return panel.with_target(_query(expr, legend, "A", instant=False))


def rows(title: str, about: str, key: str, columns: dict[str, tuple[str, str, Steps]]) -> table.Panel:
    """A line for each value of the label `key`; columns: heading -> (query by it, unit, thresholds)."""
    panel = _common(table.Panel(), title, about, "short", GREEN, 24, 8)
    if key == "run":
        board = "/d/mlpipe-run?var-datasource=${datasource}&var-run=${__value.raw}&${__url_time_range}"
        link = models.DynamicConfigValue(id_val="links", value=[{"title": "Its board", "url": board}])
        panel.override_by_name("Run", [link])
    names: dict[str, str] = {}
    for letter, (heading, (expr, unit, steps)) in zip("ABCDEFGH", columns.items(), strict=False):
        panel.with_target(_query(expr, heading, letter, instant=True, as_table=True))
        names[f"Value #{letter}"] = heading
        value = models.DynamicConfigValue
        properties = [value(id_val="unit", value=unit)]
        if len(steps) > 1:
            properties.append(value(id_val="thresholds", value=_thresholds(steps).build()))
            properties.append(value(id_val="custom.cellOptions", value={"type": "color-text"}))
        panel.override_by_name(heading, properties)
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    shape = {"excludeByName": {"Time": True}, "renameByName": {key: key.capitalize(), **names}}
    return panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=shape))


def _variable(name: str, label: str, query: str, *, everything: bool) -> builders.QueryVariable:
    variable = builders.QueryVariable(name).label(label).datasource(SOURCE).query(query)
    variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    # newest run id first: ids end in the time of their start; .* also matches series without the label
    variable.sort(
        models.VariableSort.ALPHABETICAL_DESC if name == "run" else models.VariableSort.ALPHABETICAL_ASC
    )
    return variable.include_all(True).all_value(".*").multi(True) if everything else variable


def _annotation(
    name: str, colour: str, expr: str, text: str, *, at_value: bool = True
) -> builders.AnnotationQuery:
    """Where the series has a value; `at_value`: at the time that is its value, in milliseconds."""
    target = prometheus.Dataquery().datasource(SOURCE).expr(expr).ref_id("Anno").interval("60s")
    query = builders.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour)
    return query.target(target).title_format(name).text_format(text).use_value_for_time(at_value)


def board(
    uid: str, title: str, about: str, *, one_run: bool = False, nodes: bool = False
) -> builders.Dashboard:
    """An empty board with what all of them have."""
    made = builders.Dashboard(title).uid(uid).description(about).tags(["mlpipe"]).readonly().version(1)
    made.time("now-3h", "now").refresh("30s").timezone("browser").tooltip(
        models.DashboardCursorSync.CROSSHAIR
    )
    made.with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    spaces = "label_values(mlpipe_run_info, namespace)"
    made.with_variable(_variable("namespace", "Namespace", spaces, everything=True))
    runs = 'label_values(mlpipe_run_info{namespace=~"$namespace"}, run)'
    made.with_variable(_variable("run", "Run", runs, everything=not one_run))
    if nodes:
        places = f"label_values(mlpipe_run_info{{{RUNS}}}, node)"
        made.with_variable(_variable("node", "Node", places, everything=True))
    saved = f"mlpipe_checkpoint_last_success_timestamp_seconds{{{RUNS}}} * 1000"
    ever = f"mlpipe_checkpoint_duration_seconds_count{{{RUNS}}} > 0"
    made.annotation(
        _annotation("Checkpoint", "blue", f"{saved} and on (run, stage, rank) {ever}", "{{run}} {{stage}}")
    )
    start = f'mlpipe_train_start_timestamp_seconds{{{RUNS}, rank="0"}} * 1000'
    made.annotation(_annotation("Start or restart", "orange", start, "{{run}} {{stage}}"))
    back = f"mlpipe_run_fallback_timestamp_seconds{{{RUNS}}} * 1000"
    made.annotation(
        _annotation("Fallback", "purple", back, "{{run}} {{stage}}: went back behind a damaged checkpoint")
    )
    firing = f'ALERTS{{alertname=~"Mlpipe.+", alertstate="firing", {RUNS}}}'
    made.annotation(_annotation("Alert", "red", firing, "{{alertname}} {{run}} {{stage}}", at_value=False))
    link = builders.DashboardLink("mlpipe boards").type(models.DashboardLinkType.DASHBOARDS).tags(["mlpipe"])
    return made.link(link.as_dropdown(True).include_vars(True).keep_time(True))


def fill(made: builders.Dashboard, sections: dict[str, Sequence[Any]]) -> builders.Dashboard:
    """Rows of panels under their headings."""
    ids = count(1)
    for heading, panels in sections.items():
        made.with_row(builders.Row(heading).id(next(ids)))
        for panel in panels:
            made.with_panel(panel.id(next(ids)))
    return made
