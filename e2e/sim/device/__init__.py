"""Simulated devices: memory that really is allocated and really runs out, told through the driver's own interface.

A device is a directory; what processes hold on it is written there (``ledger``), so engines and a trainer on one device
compete for its memory. ``nvml.c`` is a driver library that answers from the same directory: what reads devices through
NVML reads simulated ones without knowing it.
"""
