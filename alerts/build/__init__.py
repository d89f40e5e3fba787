"""Makes the rule files and the PrometheusRule manifest: ``python -m alerts.build``, ``--check`` compares."""
