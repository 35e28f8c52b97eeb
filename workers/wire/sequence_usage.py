"""What a sequence has cost: tokens that gangs computed for it, and pages that it held."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class SequenceUsage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Cumulative, over all runs of a sequence and all gangs that computed it.

    Each position of the prompt is counted once, as computed or as cached, and each generated token once.
    """

    kv_page_s: float = 0.0  # pages of KV times seconds; a page that several sequences hold counts for each
    adapter_page_s: float = 0.0  # its share: an adapter's pages are divided among the sequences that run with it
    num_kv_pages: int = 0  # that it holds now; 0: it does not run
    num_adapter_pages: float = 0.0  # its share of its adapter's pages now
    num_computed_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0  # found in the prefix cache instead
    num_generated_tokens: int = 0
    num_recomputed_tokens: int = 0  # computed again after a preemption, a move or a lost gang, or in vain
    attempt: int = 0  # `SequenceRequest.attempt` of the request that began the sequence

    @property
    def num_computed_tokens(self) -> int:
        """All that gangs have computed: charged tokens, and those that were computed again."""
        return self.num_computed_prompt_tokens + self.num_generated_tokens + self.num_recomputed_tokens

    def after(self, seconds: float) -> SequenceUsage:
        """The usage `seconds` later, if the sequence has held the same pages all the time."""
        if not seconds:
            return self
        return msgspec.structs.replace(
            self,
            kv_page_s=self.kv_page_s + self.num_kv_pages * seconds,
            adapter_page_s=self.adapter_page_s + self.num_adapter_pages * seconds,
        )

    def with_generated(self, num_tokens: int) -> SequenceUsage:
        """With at least `num_tokens` generated ones: more may have arrived since the last report."""
        if num_tokens <= self.num_generated_tokens:
            return self
        return msgspec.structs.replace(self, num_generated_tokens=num_tokens)


def total_usage(usages: Iterable[SequenceUsage]) -> SequenceUsage:
    """The sum of several sequences' usage, of no attempt."""
    columns = zip(*map(msgspec.structs.astuple, usages), strict=True)
    return msgspec.structs.replace(SequenceUsage(*map(sum, columns)), attempt=0)
