"""Worker discovery in the form of NVIDIA Dynamo (``GET /v1/rl/workers``)."""
