"""Where the parts become one process: built, opened, served, reported on and taken apart again."""
