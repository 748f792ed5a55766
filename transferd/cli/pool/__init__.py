"""`transferd pool`: runs a small Mooncake pool for tests, demos and single racks, and inspects any pool."""
