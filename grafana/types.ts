// What the committed boards must be, by the types of @grafana/schema: `make grafana-types` puts the JSON of each
// board behind this and lets tsc compare. JSON has no enums: an enum of strings stands for its values.
import type { AnnotationQuery, Dashboard, DataQuery, FieldConfigSource, Panel, RowPanel } from '@grafana/schema';
import type * as heatmap from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

type Json<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;

// Of Prometheus' data source, which is a plug-in with types of its own.
interface Query extends DataQuery {
  expr: string;
  format?: 'time_series' | 'table' | 'heatmap';
  instant?: boolean;
  interval?: string;
  legendFormat?: string;
  range?: boolean;
}
interface Annotation extends AnnotationQuery<Query> {
  target: Query;
  textFormat: string;
  titleFormat: string;
  useValueForTime: boolean;
}

type Shown<Type extends string, Options, Custom> = Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> & {
  type: Type;
  options: Options;
  fieldConfig: FieldConfigSource<Custom>;
  targets: Query[];
};
type Any =
  | Shown<'stat', Partial<stat.Options>, Record<string, never>>
  | Shown<'timeseries', Partial<timeseries.Options>, Partial<timeseries.FieldConfig>>
  | Shown<'heatmap', Partial<heatmap.Options>, Partial<heatmap.FieldConfig>>
  | Shown<'table', Partial<table.Options>, Partial<table.FieldConfig>>;
export type Board = Json<
  Omit<Dashboard, 'panels' | 'annotations'> & { panels: Array<Any | RowPanel>; annotations: { list: Annotation[] } }
>;
