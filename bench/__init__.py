"""Measurements: kernels and whole engines. Cases are data rows; results are JSON lines."""
