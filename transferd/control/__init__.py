"""The dispatcher and its parts, which decide what each event leads to: which task runs when, who gets which answer.

Pure: no await, no socket, no clock. Typed events go in, typed instructions come out (events.py).
"""
