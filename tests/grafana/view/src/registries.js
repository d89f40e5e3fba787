// What Grafana's front end registers at its start, of which @grafana/data applies the options of fields.
import * as data from '@grafana/data';

const option = (id, process, rest = {}) => ({
  id,
  path: id,
  name: id,
  process,
  shouldApply: () => true,
  editor: () => null,
  override: () => null,
  settings: {},
  getItemsCount: () => 0,
  ...rest,
});

const THRESHOLDS = { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }, { value: 80, color: 'red' }] };

const standardOptions = () => [
  option('unit', data.unitOverrideProcessor),
  option('min', data.numberOverrideProcessor),
  option('max', data.numberOverrideProcessor),
  option('decimals', data.numberOverrideProcessor),
  option('displayName', data.displayNameOverrideProcessor),
  option('noValue', data.stringOverrideProcessor),
  option('color', data.identityOverrideProcessor),
  option('thresholds', data.thresholdsOverrideProcessor, { defaultValue: THRESHOLDS }),
  option('mappings', data.valueMappingsOverrideProcessor),
  option('links', data.dataLinksOverrideProcessor),
  option('filterable', data.identityOverrideProcessor),
  option('interval', data.numberOverrideProcessor),
];

const EDITORS = [
  'actions', 'boolean', 'cellType', 'color', 'data-links', 'field-name', 'field-names', 'fieldColor', 'fields', 'links', 'mappings', 'multi-select',
  'number', 'radio', 'select', 'slider', 'stats-picker', 'string', 'strings', 'text', 'thresholds', 'timezone', 'unit',
];

export function fillRegistries() {
  data.standardFieldConfigEditorRegistry.setInit(standardOptions);
  data.standardEditorsRegistry.setInit(() => EDITORS.map((id) => ({ id, name: id, editor: () => null })));
  const transformers = new Map(Object.values(data.standardTransformers).map((one) => [one.id, one]));
  data.standardTransformersRegistry.setInit(() =>
    [...transformers.values()].map((one) => ({ id: one.id, name: one.name, transformation: async () => one, editor: () => null, imageDark: '', imageLight: '' }))
  );
}

// A panel's own options of a field, with their defaults; without an entry here an override of it has no effect.
export const ownOptions = (defaults) => (builder) => {
  for (const [path, defaultValue] of Object.entries(defaults)) {
    builder.addCustomEditor(option(path, data.identityOverrideProcessor, { defaultValue }));
  }
};
