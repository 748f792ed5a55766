"""Replaying request traffic against a daemon, as an engine with a prefix cache would cause it."""
