"""Puts the parts together into one process: builds, opens, serves, reports and shuts down."""
