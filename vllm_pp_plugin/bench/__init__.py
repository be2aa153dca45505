"""Benchmarks and what they run on; both sides are always measured in the same run."""
