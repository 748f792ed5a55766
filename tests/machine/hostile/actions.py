"""All actions of the adversary, by name. Each is tried by a process of a throw-away user."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any

from tests.machine.hostile import (
    cost_actions,
    memory_actions,
    neighbour_actions,
    network_actions,
    peer_actions,
    transfer_peers,
)
from tests.machine.hostile.place import Place, Report

__all__ = ["ACTIONS", "GROUPS", "Place", "Report"]

Action = Callable[[Place, random.Random, Report], Coroutine[Any, Any, None]]

GROUPS: dict[str, list[Action]] = {
    "peers": [
        peer_actions.take_names_that_will_be_given,
        peer_actions.take_the_name_of_one_who_left,
        peer_actions.flood_with_subscriptions,
    ],
    "floods": [
        peer_actions.never_read,
        peer_actions.say_half,
        peer_actions.send_garbage,
        peer_actions.come_in_crowds,
        peer_actions.wait_for_ever,
    ],
    "lies": [
        peer_actions.speak_for_others,
        memory_actions.offer_descriptors_of_others,
        memory_actions.map_nothing_at_all,
    ],
    "network": [
        *map(
            network_actions.over_tcp,
            [
                peer_actions.take_names_that_will_be_given,
                peer_actions.take_the_name_of_one_who_left,
                peer_actions.never_read,
                peer_actions.say_half,
                peer_actions.send_garbage,
                peer_actions.come_in_crowds,
                peer_actions.speak_for_others,
            ],
        ),
        network_actions.come_without_the_keys,
        network_actions.break_off_the_handshake,
        network_actions.offer_over_the_network,
    ],
    "transfers": [
        neighbour_actions.lie_about_transfers,
        *map(
            neighbour_actions.at_transfers,
            [transfer_peers.wait, transfer_peers.never_arrive, transfer_peers.never_read],
        ),
    ],
    "tokens": [neighbour_actions.truncate_below_the_sdk],
    "members": [neighbour_actions.offer_more_than_the_group_has, neighbour_actions.trace_long_tasks],
    "pages": [peer_actions.forge_hosts],
    "costs": [
        cost_actions.scrape_without_end,
        cost_actions.ask_for_much,
        cost_actions.come_and_go,
        cost_actions.offer_many_memories,
    ],
    "others' memory": [
        memory_actions.offer_memory_of_others,
        memory_actions.come_from_a_namespace,
        memory_actions.offer_twice,
        memory_actions.renew_memory_under_its_name,
    ],
    "memory that goes": [
        memory_actions.take_memory_away,
        memory_actions.offer_what_cannot_be_filled,
        memory_actions.die_with_work_under_way,
    ],
}
ACTIONS: dict[str, Action] = {action.__name__: action for group in GROUPS.values() for action in group}
