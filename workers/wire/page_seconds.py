"""What a sequence has taken of device memory for how long."""

from __future__ import annotations

import msgspec


class PageSeconds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pages of the pool times seconds, from a sequence's first page on, over all of its runs."""

    kv: float = 0.0  # a page that several sequences hold counts for each
    adapter: float = 0.0  # its part: an adapter's pages count once, for those together that run with it
    kv_pages: int = 0  # that it holds now; 0: it does not run
    adapter_pages: float = 0.0  # its part of them now

    def after(self, seconds: float) -> PageSeconds:
        """What it has taken so much later, if it has held as much all the time."""
        return PageSeconds(self.kv + self.kv_pages * seconds, self.adapter + self.adapter_pages * seconds)
