"""Replays request traffic against a daemon, as an engine with a prefix cache would produce it."""
