"""The dispatcher and its parts: which task runs when, and what every event leads to.

Pure: no await, no socket, no clock. Typed events go in, typed instructions come out (events.py).
"""
