"""How long the dashboards take to load on a large fleet: ``python -m benchmarks.dashboards``."""
