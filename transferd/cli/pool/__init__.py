"""`transferd pool`: a small Mooncake pool for tests, demos and single racks, and a look into any pool."""
