"""Memory tiers: device memory, pinned host memory, staging."""
