"""Benchmarks that a user can run: figures with the limit they are compared with, measured in the same run."""
