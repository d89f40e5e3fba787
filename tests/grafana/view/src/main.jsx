// window.show(dashboard, options) draws a dashboard; window.panels() tells what became of each panel.
import React from 'react';
import { flushSync } from 'react-dom';
import { createRoot } from 'react-dom/client';
import { MemoryRouter } from 'react-router-dom';
import { catchError, from, map, of } from 'rxjs';
import { EventBusSrv, LoadingState, ThemeContext, createTheme } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import * as runtime from '@grafana/runtime';
import { VizPanel, sceneGraph } from '@grafana/scenes';
import { GlobalStyles, PortalContainer } from '@grafana/ui';
import { plugins } from './panels.jsx';
import { Prometheus, UID, settings } from './prometheus.js';
import { fillRegistries } from './registries.js';
import { scene as sceneOf } from './scene.js';

let current = null;

function setUpRuntime() {
  fillRegistries();
  runtime.setAppEvents(new EventBusSrv());
  runtime.setEchoSrv({ addEvent() {}, flush() {}, addBackend() {} });
  runtime.setTemplateSrv({
    replace: (target, scopedVars, format) => sceneGraph.interpolate(current, target, scopedVars, format),
    getVariables: () => [],
    containsTemplate: (target) => /\$|\[\[/.test(target ?? ''),
    updateTimeRange() {},
    getAdhocFilters: () => [],
  });
  runtime.setPluginImportUtils({ getPanelPluginFromCache: (id) => plugins[id], importPanelPlugin: async (id) => plugins[id] });
  runtime.setRunRequest((source, request, query) => {
    const answer = (error) => ({ state: LoadingState.Error, series: [], request, timeRange: request.range, error, errors: [error] });
    return from((query ?? source.query.bind(source))(request)).pipe(
      map(({ data }) => ({ state: LoadingState.Done, series: data, request, timeRange: request.range })),
      catchError((error) => of(answer({ message: error.message })))
    );
  });
}

function setUpDataSource({ prometheus, scrapeInterval }) {
  const source = new Prometheus(prometheus, scrapeInterval);
  const known = (ref, scopedVars) => {
    const uid = sceneGraph.interpolate(current, (typeof ref === 'string' ? ref : ref?.uid) ?? '', scopedVars);
    if (uid !== UID) {
      throw new Error(`Datasource ${uid || '(none)'} was not found`);
    }
    return source;
  };
  runtime.setDataSourceSrv({
    get: async (ref, scopedVars) => known(ref, scopedVars),
    getInstanceSettings: (ref, scopedVars) => (ref == null ? settings : known(ref, scopedVars) && settings),
    getList: () => [settings],
    reload() {},
    registerRuntimeDataSource() {},
  });
}

function Page({ drawing, theme }) {
  return (
    <MemoryRouter>
      <ThemeContext.Provider value={theme}>
        <GlobalStyles />
        {drawing && <Drawing key={drawing.number} {...drawing} theme={theme} />}
        <PortalContainer />
      </ThemeContext.Provider>
    </MemoryRouter>
  );
}

function Drawing({ dashboard, scene, theme }) {
  return (
    <div style={{ background: theme.colors.background.canvas, color: theme.colors.text.primary, minHeight: '100vh', padding: 8 }}>
      <header style={{ display: 'flex', gap: 16, padding: 8, alignItems: 'baseline' }}>
        <h1 style={{ margin: 0, fontSize: 20 }}>{dashboard.title}</h1>
        {(dashboard.links ?? []).map((link) => <span key={link.title} style={{ color: theme.colors.text.link }}>{link.title}</span>)}
      </header>
      <scene.Component model={scene} />
    </div>
  );
}

const FONTS = ['400 12px Inter', '500 12px Inter', '400 12px "Roboto Mono"'];
const root = createRoot(document.getElementById('root'));
let number = 0;

window.show = async (dashboard, options) => {
  const theme = createTheme({ colors: { mode: options.theme ?? 'dark' } });
  Object.assign(runtime.config, { theme, theme2: theme });
  setUpDataSource(options);
  current = sceneOf(dashboard, options);
  // What is drawn on a canvas before a font is there stays in another one.
  flushSync(() => root.render(<Page theme={theme} />));
  await Promise.all(FONTS.map((font) => document.fonts.load(font)));
  number += 1;
  root.render(<Page theme={theme} drawing={{ dashboard, scene: current, number }} />);
};

window.panels = () =>
  sceneGraph.findAllObjects(current, (object) => object instanceof VizPanel).map((panel) => {
    const { key, title } = panel.state;
    const data = sceneGraph.getData(panel).state.data;
    const element = document.querySelector(`[data-viz-panel-key="${key}"]`);
    const content = element?.querySelector('[data-testid="data-testid panel content"]');
    const error = data?.error ?? data?.errors?.[0];
    return {
      title,
      state: data?.state ?? LoadingState.NotStarted,
      error: error ? error.message || JSON.stringify(error) : '',
      points: (data?.series ?? []).reduce((sum, frame) => sum + frame.length, 0),
      badge: Boolean(element?.querySelector('[data-testid="data-testid Panel status error"]')),
      text: content?.innerText.trim() ?? '',
      drawn: Boolean(content?.querySelector('canvas, [role="grid"], [data-empty]') || content?.innerText.trim()),
    };
  });

// Plugins load, and React and uPlot draw, some time after the data has come.
const QUIET_MS = 250;
let changed = 0;
new MutationObserver(() => { changed = performance.now(); }).observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
window.addEventListener('resize', () => { changed = performance.now(); });

const finished = ({ state, drawn }) => state === LoadingState.Error || (state === LoadingState.Done && drawn);
window.settled = () => performance.now() - changed > QUIET_MS && window.panels().every(finished);

window.rectangle = (titles) => {
  const named = titles.map((title) => document.querySelector(`[data-testid="data-testid Panel header ${title}"]`).getBoundingClientRect());
  const whole = { left: 0, top: 0, right: innerWidth, bottom: document.querySelector('.react-grid-layout').getBoundingClientRect().bottom + 8 };
  const edge = (side, choose) => choose(...(named.length ? named.map((box) => box[side]) : [whole[side]]));
  const [x, y] = [edge('left', Math.min), edge('top', Math.min)];
  return { x, y, width: edge('right', Math.max) - x, height: edge('bottom', Math.max) - y };
};

window.variableErrors = () => Object.fromEntries(sceneGraph.getVariables(current).state.variables.filter((one) => one.state.error).map((one) => [one.state.name, String(one.state.error)]));

await initPluginTranslations('oomwatch-dashboard-view');
setUpRuntime();
window.ready = true;
