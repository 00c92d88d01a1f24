"""The demo: a small but real RL training run on a local Kubernetes, from nothing to proof, then cleaned up."""
