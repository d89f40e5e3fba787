"""Makes the dashboards: ``python -m grafana.build`` writes grafana/dashboards/*.json, ``--check`` compares."""
