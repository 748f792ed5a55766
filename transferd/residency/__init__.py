"""Where blocks are, as far as this node knows: wire.py is how that is told, claims.py what there is to tell."""
