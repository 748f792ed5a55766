"""Where blocks outlive the engine: one contract, one file or folder for each backend, chosen by `storage.backend`."""
