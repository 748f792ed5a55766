"""Storage in several levels, the fastest first: `storage.levels` (docs/levels.md). `stack` is the backend."""
