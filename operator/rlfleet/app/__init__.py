"""The programs: operator process, settings, probes, metrics, command line. The only place that knows kopf."""
