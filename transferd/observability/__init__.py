"""How the daemon reports what it does: flight recorder, task log, stories, dumps, report, metrics, page and logs.

Every folder after this one may report through it; it knows none of them.
"""
