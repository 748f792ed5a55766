"""As transferd's directory for PYTHONPATH, with a witness in `mooncake.store`."""
