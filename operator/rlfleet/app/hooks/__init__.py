"""The chart's own short jobs (``python -m rlfleet.app.hooks``): CRD upgrade, uninstall, `helm test`."""
