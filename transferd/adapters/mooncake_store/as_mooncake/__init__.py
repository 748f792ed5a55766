"""A directory for PYTHONPATH: `import mooncake.store` finds transferd's there. Nothing imports this package itself."""
