"""Adapters from the client to the interface of an engine or framework: one file or folder each."""
