// Grafana's panels, as thin as they can be: options in, components of @grafana/ui out.
import React from 'react';
import {
  FieldColorModeId,
  FieldType,
  PanelPlugin,
  VizOrientation,
  cacheFieldDisplayNames,
  getDisplayValueAlignmentFactors,
  getFieldDisplayValues,
} from '@grafana/data';
import { BarGauge, BigValue, TimeSeries, VizRepeater, useTheme2 } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { Annotations, eventsOf } from './annotations.jsx';
import { ownOptions } from './registries.js';

const GRAPH = {
  drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, lineStyle: { fill: 'solid' }, fillOpacity: 0, fillBelowTo: undefined,
  gradientMode: 'none', showPoints: 'auto', pointSize: 5, spanNulls: false, insertNulls: false, stacking: { mode: 'none', group: 'A' },
  axisPlacement: 'auto', axisLabel: '', axisColorMode: 'text', axisBorderShow: false, axisCenteredZero: false, axisGridShow: undefined,
  axisSoftMin: undefined, axisSoftMax: undefined, axisWidth: undefined, scaleDistribution: { type: 'linear' },
  hideFrom: { legend: false, tooltip: false, viz: false }, thresholdsStyle: { mode: 'off' }, barAlignment: 0, barWidthFactor: 0.6, transform: undefined,
};
const CELL = {
  align: 'auto', cellOptions: { type: 'auto' }, width: undefined, minWidth: 150, filterable: false, hidden: false, hideFrom: undefined, inspect: false,
  wrapText: false, wrapHeaderText: false, footer: undefined, tooltip: undefined,
};

// Grafana says so in place of every panel that has nothing to draw.
function Empty({ fieldConfig }) {
  return <div data-empty="" style={{ display: 'grid', placeItems: 'center', height: '100%', textAlign: 'center' }}>{fieldConfig.defaults.noValue ?? 'No data'}</div>;
}

const filled = (frames) => frames.filter((frame) => frame.length > 0);

function Graph({ data, width, height, timeRange, timeZone, options, fieldConfig }) {
  const events = eventsOf(data.annotations ?? [], useTheme2());
  const frames = filled(data.series).filter((frame) => frame.fields.some((field) => field.type === FieldType.time));
  if (!frames.length) {
    return <Empty fieldConfig={fieldConfig} />;
  }
  const legend = { displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [], ...options.legend };
  // Events may come after the data: then all is drawn anew.
  return (
    <TimeSeries
      key={JSON.stringify(events)}
      frames={frames}
      structureRev={data.structureRev}
      width={width}
      height={height}
      timeRange={timeRange}
      timeZone={timeZone}
      legend={legend}
      options={options}
    >
      {(config) => <Annotations config={config} events={events} />}
    </TimeSeries>
  );
}

function useValues({ fieldConfig, options, replaceVariables, data, timeZone }, sparkline) {
  const theme = useTheme2();
  const reduceOptions = { calcs: ['lastNotNull'], values: false, ...options.reduceOptions };
  return () => getFieldDisplayValues({ fieldConfig, reduceOptions, replaceVariables, theme, data: data.series, sparkline, timeZone });
}

function Stat(props) {
  const { data, options, width, height, renderCounter } = props;
  const theme = useTheme2();
  const getValues = useValues(props, (options.graphMode ?? 'area') !== 'none');
  return (
    <VizRepeater
      getValues={getValues}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      source={data}
      itemSpacing={3}
      autoGrid
      orientation={options.orientation ?? VizOrientation.Auto}
      width={width}
      height={height}
      renderCounter={renderCounter}
      renderValue={({ value, alignmentFactors, width, height, count }) => (
        <BigValue
          value={value.display}
          count={count}
          sparkline={value.sparkline}
          colorMode={options.colorMode ?? 'value'}
          graphMode={options.graphMode ?? 'area'}
          justifyMode={options.justifyMode ?? 'auto'}
          textMode={options.textMode ?? 'auto'}
          wideLayout={options.wideLayout ?? true}
          alignmentFactors={alignmentFactors}
          text={options.text}
          width={width}
          height={height}
          theme={theme}
        />
      )}
    />
  );
}

function Bars(props) {
  const { data, options, width, height, renderCounter } = props;
  const theme = useTheme2();
  const getValues = useValues(props, false);
  return (
    <VizRepeater
      getValues={getValues}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      source={data}
      itemSpacing={10}
      orientation={options.orientation ?? VizOrientation.Auto}
      width={width}
      height={height}
      minVizHeight={options.minVizHeight ?? 16}
      minVizWidth={options.minVizWidth ?? 8}
      renderCounter={renderCounter}
      renderValue={({ value, alignmentFactors, width, height, orientation }) => (
        <BarGauge
          value={value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex)}
          displayMode={options.displayMode ?? 'gradient'}
          valueDisplayMode={options.valueMode}
          namePlacement={options.namePlacement}
          text={options.text}
          orientation={orientation}
          width={width}
          height={height}
          theme={theme}
          itemSpacing={10}
          lcdCellWidth={12}
          alignmentFactors={alignmentFactors}
          showUnfilled={options.showUnfilled ?? true}
        />
      )}
    />
  );
}

function Table({ data, width, height, timeRange, fieldConfig, options, replaceVariables }) {
  const [frame] = filled(data.series);
  if (!frame) {
    return <Empty fieldConfig={fieldConfig} />;
  }
  cacheFieldDisplayNames(data.series);
  return (
    <TableNG
      data={frame}
      width={width}
      height={height}
      timeRange={timeRange}
      structureRev={data.structureRev}
      fieldConfig={fieldConfig}
      initialSortBy={options.sortBy}
      noHeader={options.showHeader === false}
      cellHeight={options.cellHeight ?? 'sm'}
      replaceVariables={replaceVariables}
      getActions={() => []}
    />
  );
}

const coloured = (mode, defaults) => ({
  standardOptions: { color: { defaultValue: { mode } } },
  ...(defaults && { useCustomConfig: ownOptions(defaults) }),
});

export const plugins = {
  timeseries: new PanelPlugin(Graph).useFieldConfig(coloured(FieldColorModeId.PaletteClassic, GRAPH)).setDataSupport({ annotations: true, alertStates: true }),
  stat: new PanelPlugin(Stat).useFieldConfig(coloured(FieldColorModeId.Thresholds)),
  bargauge: new PanelPlugin(Bars).useFieldConfig(coloured(FieldColorModeId.Thresholds)),
  table: new PanelPlugin(Table).useFieldConfig(coloured(FieldColorModeId.Thresholds, CELL)),
};

for (const [id, plugin] of Object.entries(plugins)) {
  plugin.meta = {
    id,
    name: id,
    type: 'panel',
    sort: 1,
    module: '',
    baseUrl: '',
    info: { author: { name: '' }, description: '', links: [], logos: { small: '', large: '' }, screenshots: [], updated: '', version: '' },
  };
}
