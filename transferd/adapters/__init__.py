"""Adapters: one file an engine or a framework."""
