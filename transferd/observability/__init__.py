"""How the daemon tells what it does: flight recorder, task stories, dumps, metrics and logs.

Every other folder may report through this one; it asks nothing of them.
"""
