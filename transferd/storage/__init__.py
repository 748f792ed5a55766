"""Storage backends: one file each, chosen by `storage.backend`."""
