"""Hollow nodes: one process that plays the kubelet for many nodes, with real processes as containers.

What it does not play, and nothing here may count on: images (a container is its ``command``), file systems, namespaces
and limits of resources; Services (the apiserver refuses loopback addresses as endpoints: pods are found by selector);
preStop and postStart hooks, gRPC probes, ephemeral containers, Events, changes of a mounted ConfigMap or Secret.
"""
