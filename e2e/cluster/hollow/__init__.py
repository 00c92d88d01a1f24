"""Hollow nodes: one process that plays the kubelet for many nodes, with real processes as containers."""
