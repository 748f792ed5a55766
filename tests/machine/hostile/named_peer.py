"""A ZeroMQ client under a name of its choice, as another user.

`python named_peer.py UID ENDPOINT NAME ENGINE TOKEN ACTION…`; TOKEN is that of the engine's registration, or "".
Prints one JSON object: each action and the code of its refusal, or "ok". Then it ends without a word to the daemon.
"""

from __future__ import annotations

import json
import os
import sys

import zmq

from transferd.tasks import ReadStorageTask, WriteStorageTask
from transferd.wire import protocol as wire

ACTIONS: dict[str, wire.Body] = {
    "exists": wire.Exists(["k"]),
    "write": WriteStorageTask(task_id="w", keys=["stolen"], gpu_block_ids=[0]),
    "read": ReadStorageTask(task_id="r", keys=["k"], gpu_block_ids=[0]),
    "pause": wire.Pause(),
    "generation": wire.SetGeneration("another's"),
    "unregister": wire.Unregister(),
}


def main() -> None:
    uid, endpoint, name, engine, token, *actions = sys.argv[1:]
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    told: dict[str, str] = {}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.setsockopt(zmq.ROUTING_ID, name.encode())
        socket.connect(endpoint)
        for seq, (action, body) in enumerate(
            [
                ("hello", wire.Hello(engine=engine, registration=token)),
                *((action, ACTIONS[action]) for action in actions),
            ],
            start=1,
        ):
            socket.send(wire.encode_request(seq, body))
            while (reply := wire.decode_reply(socket.recv())).seq != seq:
                pass
            error = getattr(reply.body, "error", None) or getattr(getattr(reply.body, "result", None), "error", None)
            told[action] = "ok" if error is None else error.code
    print(json.dumps(told))


if __name__ == "__main__":
    main()
