"""The order of eviction against a plain model of GreedyDual-Size-Frequency."""

from __future__ import annotations

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from motet.workers.memory.page_allocator import IdleOrder, Item
from motet.workers.memory.paged_memory import PagedMemory
from motet.workers.wire.messages import AdapterRef


@given(st.integers(0, 2**32))
def test_the_least_worth_goes_first(seed: int) -> None:
    rng = random.Random(seed)
    order = IdleOrder()
    model: dict[Item, tuple[float, int, int, int]] = {}  # worth, -depth, number, pages
    soon: list[Item] = []  # adapters, then pages, each the most urgent first
    digests: list[str] = []
    pages: list[int] = []
    floor, number = 0.0, 0
    for _ in range(200):
        if rng.random() < 0.1:
            if rng.random() < 0.5:
                digests = [f"digest {i}" for i in rng.sample(range(6), rng.randrange(7))]
                order.want_soon(digests)
            else:
                pages = rng.sample(range(12), rng.randrange(8))
                order.want_pages_soon(pages)
            soon = [*digests, *pages]
        choices: list[Item] = [rng.randrange(12), f"digest {rng.randrange(6)}"]
        item = rng.choice(choices)
        if item in model:
            del model[item]
            order.remove(item)
        elif rng.random() < 0.7:
            num_pages, num_uses = rng.randint(1, 5), rng.randint(1, 4)
            cost_s, depth = rng.choice([0.001, 0.01]), rng.randrange(3)
            number += 1
            model[item] = (floor + num_uses * cost_s, -depth, number, num_pages)
            order.add(item, num_pages, num_uses, cost_s, depth)
        else:
            keep = {f"digest {i}" for i in range(6) if rng.random() < 0.3}
            wanted = rng.randint(1, 8)
            spared = [*soon]
            while spared and sum(entry[3] for i, entry in model.items() if i not in {*keep, *spared}) < wanted:
                spared.pop()
            going: list[Item] = []
            for candidate in sorted((i for i in model if i not in {*keep, *spared}), key=model.__getitem__):
                if sum(model[i][3] for i in going) >= wanted:
                    break
                going.append(candidate)
            if sum(model[i][3] for i in going) < wanted:
                assert order.take(wanted, keep) is None
            else:
                assert order.take(wanted, keep) == going
                floor = max(floor, model[going[-1]][0])
                for gone in going:
                    del model[gone]
        order.check_integrity()
        assert order.num_pages == sum(entry[3] for entry in model.values())
        assert all((item in order) == (item in model) for item in [*range(12), *(f"digest {i}" for i in range(6))])


def test_what_is_dear_to_bring_back_stays_longer_but_not_for_ever() -> None:
    order = IdleOrder()
    order.add("dear", 1, 1, cost_s=1.0)
    for page in range(3):
        order.add(page, 1, 1, cost_s=0.4)
    assert order.take(3, frozenset()) == [0, 1, 2]
    for page in range(3, 6):
        order.add(page, 1, 1, cost_s=0.4)  # on top of what the last ones were worth
    assert order.take(2, frozenset()) == [3, 4]
    order.add(6, 1, 1, cost_s=0.4)  # now worth more than the dear one, which was not requested
    assert order.take(2, frozenset()) == [5, "dear"]


def test_a_prefix_goes_from_its_end() -> None:
    order = IdleOrder()
    for depth in (0, 2, 1):
        order.add(depth, 1, 1, 1.0, depth)
    assert order.take(3, frozenset()) == [2, 1, 0]


def test_neither_prompts_nor_adapters_that_are_used_once_push_out_what_is_used_again_and_again() -> None:
    compute_s, copy_s, capacity = 0.012, 0.0005, 100
    order = IdleOrder()

    def add(item: Item, num_pages: int, num_uses: int, cost_s: float) -> set[Item]:
        order.add(item, num_pages, num_uses, cost_s)
        gone = order.take(order.num_pages - capacity, frozenset()) if order.num_pages > capacity else []
        return {*(gone or ())}

    add("popular", 20, 60, copy_s)
    for number in range(2000):  # prompts that are not continued, a page each: 25 times what the pool holds
        gone = add(number, 1, 1, compute_s)
        assert "popular" not in gone
        if number % 100 == 0:  # more of them between two uses than fit beside it: the least recent is the adapter
            order.remove("popular")
            assert "popular" not in add("popular", 20, 61 + number // 100, copy_s)
    for page in range(2000, 2010):
        add(page, 1, 2, compute_s)
    for number in range(30):  # adapters one after the other, each once: three times what the pool holds
        gone = add(f"swept {number}", 10, 1, copy_s)
        assert not gone & {*range(2000, 2010)}


def test_what_making_room_costs_grows_with_what_goes_and_no_faster() -> None:
    def cpu_s(num_wanted: int) -> float:
        """For the room of all adapters at once, and for as many rooms of one page, with all of them wanted soon."""
        times = []
        for _ in range(5):
            at_once, one_by_one = _full_of_adapters(num_wanted), _full_of_adapters(num_wanted)
            began_at = time.process_time()
            assert at_once.make_room(num_wanted, frozenset())
            for num_pages in range(1, num_wanted + 1):
                assert one_by_one.make_room(num_pages, frozenset())
            times.append(time.process_time() - began_at)
        return min(times)

    assert cpu_s(2048) < 64 * cpu_s(128)  # linear: 16; quadratic: 256


def _full_of_adapters(num_wanted: int) -> PagedMemory:
    """As many idle adapters of one page as there are pages, all wanted soon."""
    memory = PagedMemory(num_wanted, lambda: 0.001, lambda *_: 0.001)
    digests = [f"{number:064x}" for number in range(num_wanted)]
    for digest in digests:
        assert memory.begin_load(AdapterRef(digest, {}), 1, frozenset()) is not None
        memory.adapters.finish_load(digest)
    memory.want_soon(digests)
    return memory
