"""What a rank does with a task: read, write, swap, or exchange with a peer."""
