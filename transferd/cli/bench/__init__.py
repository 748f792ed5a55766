"""Benchmarks for users. Each figure comes with the limit to compare it with, measured in the same run."""
