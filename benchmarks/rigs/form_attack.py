"""Clients of one tenant that ask for one form of answer after the other, in a process of their own.

It ends with its input, and prints the answers by status. It yields to all else: the server, not this, is to be what a
neighbour waits for.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter

from motet.adapters.processes.child_processes import yield_wholly
from motet.tests.rigs.hostile_grammars import hostile_grammars
from motet.tests.rigs.neighbour import KEY_VARIABLE, TIMEOUT_S
from motet.tests.rigs.running_motet import BASE

_NUM_CLIENTS = 4
_SALT = 9_999_999  # each request has another number in its place, so that no form is known from before


def bodies(kind: str) -> list[bytes]:
    requested: dict[str, object] = {"model": BASE, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    if kind == "refused":
        return [json.dumps({**requested, "best_of": -1, "user": f"s{_SALT}"}).encode()]
    forms = hostile_grammars(_SALT)
    return [json.dumps({**requested, "structured_outputs": {form.form: form.value}}).encode() for form in forms]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("kind", choices=["forms", "refused"])
    arguments = parser.parse_args()
    yield_wholly(os.getpid())
    templates, salts = bodies(arguments.kind), itertools.count(int(time.time()) % 100 * 100_000)
    headers = {"Authorization": f"Bearer {os.environ[KEY_VARIABLE]}", "Content-Type": "application/json"}
    statuses, is_over = Counter[str](), threading.Event()

    def ask(first: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", arguments.port, timeout=TIMEOUT_S)
        for number in itertools.count(first):
            if is_over.is_set():
                return
            body = templates[number % len(templates)].replace(b"%d" % _SALT, b"%07d" % next(salts))
            try:
                connection.request("POST", "/v1/chat/completions", body, headers)
                answer = connection.getresponse()
                answer.read()
                statuses[str(answer.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                statuses[type(error).__name__] += 1
                connection.close()

    for client in range(_NUM_CLIENTS):  # each begins with another form
        threading.Thread(target=ask, args=(client * len(templates) // _NUM_CLIENTS,), daemon=True).start()
    print("attacking", flush=True)
    sys.stdin.read()
    is_over.set()
    print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
