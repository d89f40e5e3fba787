// A dashboard's JSON as a scene. What is not known here is refused: it would be drawn as something else than Grafana does.
import * as scenes from '@grafana/scenes';
import { plugins } from './panels.jsx';
import { UID } from './prometheus.js';

const { SceneDataTransformer, SceneGridItem, SceneGridLayout, SceneGridRow, SceneQueryRunner, VizPanel } = scenes;

function refuse(what) {
  throw new Error(`This cannot be drawn: ${what}`);
}

function variable(definition, chosen) {
  const { name, label, type, regex = '', sort = 0, multi: isMulti, includeAll, allValue, datasource, query } = definition;
  if (type === 'datasource') {
    return new scenes.DataSourceVariable({ name, label, pluginId: query, regex, value: UID, text: 'Prometheus' });
  }
  if (type !== 'query') {
    return refuse(`variable ${name} of type ${type}`);
  }
  const start = chosen ?? definition.current?.value ?? (includeAll ? '$__all' : '');
  const refresh = definition.refresh ?? 1;
  return new scenes.QueryVariable({ name, label, value: start, text: start, query, datasource, refresh, isMulti, includeAll, allValue, regex, sort });
}

function panelData({ title, datasource, targets, transformations = [] }) {
  for (const target of targets) {
    if (target.datasource?.uid && target.datasource.uid !== datasource?.uid) {
      refuse(`${title}: query ${target.refId} asks another data source than its panel`);
    }
  }
  const $data = new SceneQueryRunner({ datasource, queries: targets });
  return transformations.length ? new SceneDataTransformer({ $data, transformations }) : $data;
}

function panel(definition) {
  const { id, title, description, type, options = {}, fieldConfig } = definition;
  if (!plugins[type]) {
    refuse(`${title}: panel type ${type}`);
  }
  for (const key of ['repeat', 'timeFrom', 'timeShift', 'libraryPanel', 'hideTimeOverride', 'maxDataPoints', 'interval', 'transparent']) {
    if (definition[key]) {
      refuse(`${title}: ${key}`);
    }
  }
  return new VizPanel({
    key: `panel-${id}`,
    title,
    description,
    pluginId: type,
    options,
    fieldConfig: { defaults: {}, overrides: [], ...fieldConfig },
    $data: panelData(definition),
  });
}

function item(definition) {
  const { x, y, w, h } = definition.gridPos;
  return new SceneGridItem({ x, y, width: w, height: h, isResizable: false, isDraggable: false, body: panel(definition) });
}

function grid(definitions) {
  const children = [];
  let row = null;
  for (const definition of definitions) {
    if (definition.type === 'row') {
      // Folded rows hold their panels themselves; here all is unfolded, so that all is looked at.
      const own = (definition.panels ?? []).map(item);
      row = new SceneGridRow({ key: `row-${definition.id}`, title: definition.title, y: definition.gridPos.y, isCollapsed: false, children: own });
      children.push(row);
    } else if (row) {
      row.setState({ children: [...row.state.children, item(definition)] });
    } else {
      children.push(item(definition));
    }
  }
  return children;
}

function annotations(definitions) {
  return definitions
    .filter((one) => !one.builtIn)
    .map((query) => new scenes.dataLayers.AnnotationsDataLayer({ name: query.name, query, isEnabled: query.enable, isHidden: true }));
}

const iso = (seconds) => new Date(seconds * 1000).toISOString();

export function scene(dashboard, { from, to, variables = {} }) {
  const list = dashboard.templating?.list ?? [];
  for (const name of Object.keys(variables)) {
    if (!list.some((definition) => definition.name === name)) {
      refuse(`a value for $${name}, which ${dashboard.title} does not have`);
    }
  }
  return new scenes.EmbeddedScene({
    $timeRange: new scenes.SceneTimeRange({ from: iso(from), to: iso(to), timeZone: 'utc' }),
    $variables: new scenes.SceneVariableSet({ variables: list.map((definition) => variable(definition, variables[definition.name])) }),
    $data: new scenes.SceneDataLayerSet({ layers: annotations(dashboard.annotations?.list ?? []) }),
    controls: [new scenes.VariableValueSelectors({}), new scenes.SceneControlsSpacer(), new scenes.SceneTimePicker({})],
    body: new SceneGridLayout({ isLazy: false, children: grid(dashboard.panels) }),
  });
}
