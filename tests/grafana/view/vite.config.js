import { cpSync } from 'node:fs';

const here = import.meta.dirname;
const packages = `${here}/node_modules`;
// Where the components expect what a Grafana server has at hand.
const SERVED = {
  '@grafana/ui/dist/public/img': 'public/build/img',
  '@fontsource/inter/files/inter-latin-400-normal.woff2': 'public/fonts/inter/Inter-Regular.woff2',
  '@fontsource/inter/files/inter-latin-500-normal.woff2': 'public/fonts/inter/Inter-Medium.woff2',
  '@fontsource/roboto-mono/files/roboto-mono-latin-400-normal.woff2':
    'public/fonts/roboto/L0xTDF4xlVMF-BfR8bXMIhJHg45mwgGEFl0_3vrtSM1J-gEPT5Ese6hmHSh0mQ.woff2',
};

export default {
  root: here,
  define: { 'process.env.NODE_ENV': '"production"', 'process.env': '{}', global: 'globalThis' },
  resolve: {
    alias: {
      // Scenes imports both under names that stand for what is used here.
      'react-router-dom-v5-compat': 'react-router-dom',
      '@grafana/plugin-compat/datasources': `${here}/src/datasources.js`,
    },
    dedupe: ['react', 'react-dom', '@grafana/data', '@grafana/runtime', '@grafana/ui', '@grafana/schema', 'rxjs'],
  },
  build: {
    outDir: 'dist',
    minify: false,
    chunkSizeWarningLimit: 1e6,
    // Scenes imports names that this release of @grafana/runtime does not have, and uses none of them here.
    rolldownOptions: { shimMissingExports: true },
  },
  plugins: [
    {
      name: 'served',
      closeBundle() {
        for (const [from, to] of Object.entries(SERVED)) {
          cpSync(`${packages}/${from}`, `${here}/dist/${to}`, { recursive: true });
        }
      },
    },
  ],
};
