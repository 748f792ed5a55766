"""What a rank does with a task: read, write, swap."""
