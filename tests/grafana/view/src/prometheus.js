// A data source for Prometheus, with what Grafana's own does to expressions, legends, tables, variables and annotations.
import { DataSourceApi, FieldType, rangeUtil } from '@grafana/data';
import { getTemplateSrv } from '@grafana/runtime';
import { of } from 'rxjs';

export const UID = 'prometheus';

export const settings = {
  id: 1,
  uid: UID,
  type: 'prometheus',
  name: 'Prometheus',
  access: 'proxy',
  isDefault: true,
  readOnly: true,
  jsonData: {},
  meta: { id: 'prometheus', name: 'Prometheus', type: 'datasource', metrics: true, annotations: true, module: '', baseUrl: '', info: { logos: { small: '', large: '' } } },
};

export class Prometheus extends DataSourceApi {
  constructor(url, scrapeInterval) {
    super(settings);
    this.scrapeInterval = scrapeInterval;
    this.meta = settings.meta;
    this.interval = `${scrapeInterval}s`;
    this.url = url;
    this.annotations = {
      prepareAnnotation: (annotation) => annotation,
      processEvents: (annotation, frames) => of(events(annotation, frames)),
      prepareQuery: (annotation) => ({ expr: annotation.expr, range: true, instant: false, interval: annotation.step }),
    };
  }

  async query(request) {
    const asked = request.targets.filter((target) => !target.hide && target.expr);
    const answers = await Promise.all(asked.flatMap((target) => this.ask(request, target)));
    const tables = answers.filter((answer) => answer.target.format === 'table');
    const several = new Set(tables.map((answer) => answer.target.refId)).size > 1;
    return {
      data: [
        ...answers.filter((answer) => answer.target.format !== 'table').flatMap((answer) => answer.result.map((one) => series(answer, one))),
        ...[...Map.groupBy(tables, (answer) => answer.target.refId).values()].map((found) => table(found, several)),
      ],
    };
  }

  ask(request, target) {
    const { from, to } = request.range;
    const begin = from.valueOf() / 1000;
    const end = to.valueOf() / 1000;
    const least = target.interval ? rangeUtil.intervalToSeconds(getTemplateSrv().replace(target.interval, request.scopedVars)) : this.scrapeInterval;
    const step = Math.max(Math.ceil((request.intervalMs ?? 1000) / 1000), least, Math.ceil((end - begin) / 11000));
    const query = this.interpolated(target.expr, request.scopedVars, step, end - begin);
    const both = [];
    if (target.range || !target.instant) {
      const aligned = Math.floor(begin / step) * step;
      both.push(this.get('query_range', { query, start: aligned, end: Math.floor(end / step) * step, step }));
    }
    if (target.instant) {
      both.push(this.get('query', { query, time: end }));
    }
    return both.map(async (answer) => ({ target, step, result: (await answer).result, scopedVars: request.scopedVars }));
  }

  async metricFindQuery(asked, options) {
    const query = getTemplateSrv().replace(typeof asked === 'string' ? asked : asked.query, options?.scopedVars, quoted).trim();
    const { from, to } = options.range;
    const window = { start: Math.floor(from.valueOf() / 1000), end: Math.ceil(to.valueOf() / 1000) };
    let found;
    if ((found = query.match(/^label_values\(\s*(?:(.+),\s*)?([a-zA-Z_]\w*)\s*\)$/s))) {
      const [, selector, label] = found;
      return (await this.get(`label/${label}/values`, { ...window, ...(selector && { 'match[]': selector }) })).map(text);
    }
    if ((found = query.match(/^query_result\((.+)\)$/s))) {
      const expr = this.interpolated(found[1], options?.scopedVars, this.scrapeInterval, window.end - window.start);
      const { result } = await this.get('query', { query: expr, time: window.end });
      return result.map(({ metric, value }) => text(`${seriesName(metric)} ${value[1]} ${value[0] * 1000}`));
    }
    throw new Error(`variable query not understood: ${query}`);
  }

  interpolated(expr, scopedVars, step, range) {
    const rate = Math.max(step + this.scrapeInterval, 4 * this.scrapeInterval);
    const values = {
      __rate_interval: `${rate}s`,
      __range: `${Math.round(range)}s`,
    };
    const own = Object.fromEntries(Object.entries(values).map(([name, value]) => [name, { text: value, value }]));
    return getTemplateSrv().replace(expr, { ...scopedVars, ...own }, quoted);
  }

  async get(path, parameters) {
    const answer = await fetch(`${this.url}/api/v1/${path}?${new URLSearchParams(parameters)}`);
    const body = await answer.json();
    if (body.status !== 'success') {
      throw new Error(`${body.error} (${parameters.query ?? path})`);
    }
    return body.data;
  }

  getRef() {
    return { type: settings.type, uid: UID };
  }
}

const text = (value) => ({ text: value });

// A single value is a string in quotes; several are alternatives of a regular expression.
function quoted(value, variable) {
  if (!variable.multi && !variable.includeAll) {
    return String(value).replace(/\\/g, '\\\\').replace(/"/g, '\\"');
  }
  const escaped = [value].flat().map((one) => String(one).replace(/\\/g, '\\\\\\\\').replace(/[$^*{}[\]'+?.()|]/g, '\\\\$&'));
  return escaped.length === 1 ? escaped[0] : `(${escaped.join('|')})`;
}

function seriesName(labels) {
  const { __name__: name = '', ...rest } = labels;
  const shown = Object.entries(rest).map(([label, value]) => `${label}="${value}"`).join(', ');
  return name + (shown || !name ? `{${shown}}` : '');
}

function legend({ target, scopedVars }, labels) {
  return !target.legendFormat || target.legendFormat === '__auto'
    ? seriesName(labels)
    : getTemplateSrv().replace(target.legendFormat, scopedVars).replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => labels[label] ?? '');
}

const points = (one) => one.values ?? [one.value];
const times = (one) => points(one).map(([t]) => t * 1000);
const numbers = (one) => points(one).map(([, value]) => Number(value.replace('Inf', 'Infinity')));

function series(answer, one) {
  const name = legend(answer, one.metric);
  const time = times(one);
  return {
    refId: answer.target.refId,
    name,
    meta: { type: one.values ? 'timeseries-multi' : 'numeric-multi' },
    length: time.length,
    fields: [
      { name: 'Time', type: FieldType.time, config: { interval: answer.step * 1000 }, values: time },
      { name: 'Value', type: FieldType.number, config: { displayNameFromDS: name }, labels: one.metric, values: numbers(one) },
    ],
  };
}

function table(answers, several) {
  const refId = answers[0].target.refId;
  const rows = answers.flatMap(({ result }) =>
    result.flatMap((one) => times(one).map((t, i) => ({ labels: one.metric, t, value: numbers(one)[i] })))
  );
  const labels = new Set(rows.flatMap((row) => Object.keys(row.labels).sort()));
  return {
    refId,
    meta: { preferredVisualisationType: 'rawPrometheus' },
    length: rows.length,
    fields: rows.length === 0 ? [] : [
      { name: 'Time', type: FieldType.time, config: {}, values: rows.map((row) => row.t) },
      ...[...labels].map((label) => ({ name: label, type: FieldType.string, config: {}, values: rows.map((row) => row.labels[label] ?? '') })),
      { name: several ? `Value #${refId}` : 'Value', type: FieldType.number, config: {}, values: rows.map((row) => row.value) },
    ],
  };
}

// Points above 0 that are no further apart than the step are one event.
function events(annotation, frames) {
  const found = [];
  const step = rangeUtil.intervalToMs(annotation.step);
  for (const frame of frames) {
    const [time, value] = frame.fields;
    let open = null;
    for (let i = 0; i < frame.length; i++) {
      if (!(value.values[i] > 0)) {
        continue;
      }
      const t = annotation.useValueForTime ? Math.floor(value.values[i]) : time.values[i];
      if (open && open.timeEnd + step >= t) {
        open.timeEnd = t;
      } else {
        open = { time: t, timeEnd: t };
        found.push(open);
      }
    }
  }
  return found.map((event) => ({ ...event, isRegion: event.timeEnd > event.time }));
}
