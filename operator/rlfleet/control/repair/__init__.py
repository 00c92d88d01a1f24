"""The repair pass: what every reconcile of a pipeline does before anything else, rule by rule."""
