"""How the daemon reports what it does: flight recorder, task stories, dumps, metrics and logs.

Every folder above may report through this one; it knows none of them.
"""
