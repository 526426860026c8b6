"""Equipment that tests and benchmarks share; not installed."""
