"""What a rank does with a task: read, write, swap, or transfer to and from a peer."""
