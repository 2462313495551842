"""Benchmarks of the package's own code; each module runs with ``python -m``."""
