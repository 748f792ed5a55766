"""Where blocks go beyond this node's engine: storage that outlives it, and other daemons.

Storage has one contract (base.py; tokens.py for storage that is indexed by tokens) and one file or folder for each
backend, chosen by `storage.backend`. peer/ is no backend: it moves blocks straight to another daemon.
"""
