"""A thread that copies: in order, whatever fails, and without holding on to what it has copied."""

from __future__ import annotations

import threading
import weakref
from functools import partial

import pytest

from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.workers.memory import page_mover
from motet.workers.memory.page_mover import CopyThread


class Copied:
    pass


def fail() -> None:
    raise RuntimeError("as the test wants")


def test_calls_are_made_in_order_whatever_fails_and_nothing_is_kept() -> None:
    thread, done = CopyThread("test-copies"), list[int]()
    content = Copied()
    gone = weakref.ref(content)
    for call in (partial(done.append, 1), fail, partial(lambda content: done.append(2), content)):
        thread.submit(call)
    del call, content
    eventually(lambda: done == [1, 2])
    eventually(lambda: gone() is None)
    thread.close()


def test_it_is_closed_although_a_call_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_mover, "_CLOSING_S", 0.01)
    thread, begun, goes_on, done = CopyThread("test-copies"), threading.Event(), threading.Event(), list[int]()

    def hang() -> None:
        begun.set()
        assert goes_on.wait(PATIENCE_S)

    thread.submit(hang)
    thread.submit(partial(done.append, 1))
    assert begun.wait(PATIENCE_S)
    thread.close()
    goes_on.set()
    thread._thread.join(PATIENCE_S)
    assert not done
