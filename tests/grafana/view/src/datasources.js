// What @grafana/plugin-compat/datasources offers to scenes, on the one service that is set up here.
import { getDataSourceSrv } from '@grafana/runtime';

export const getDataSourceInstance = async (ref, scopedVars) => getDataSourceSrv().get(ref, scopedVars);
export const getDataSourceInstanceSettings = async (ref, scopedVars) => getDataSourceSrv().getInstanceSettings(ref, scopedVars);
export const getDataSourceInstanceList = async (filters) => getDataSourceSrv().getList(filters);
export const getDefaultDataSourceInstanceListItem = async () => ({ ...getDataSourceSrv().getInstanceSettings(null) });
