"""Inference engines on the same weights, one against another: `python -m bench.engines` (docs/benchmark.md)."""
