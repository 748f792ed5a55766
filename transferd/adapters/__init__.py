"""An engine's or framework's own interface, over the client: one file or folder for each."""
