"""What transferd costs as what it serves grows: queue, blocks, ranks, engines, clients, keys, objects, tasks.

axis.py      how one axis is measured: all sizes in turn, each against the smallest
dispatch.py  tasks queued, in the dispatcher alone
served.py    everything else that grows, against daemons in processes of their own
memory.py    a daemon's memory after floods, and after many large tasks
picture.py   docs/growth.svg
"""
