"""Strings that end a completion, found while its text comes.

The automaton of Aho and Corasick (Efficient string matching, CACM 18, 1975): each character is examined once, however
many strings there are and however long they are. It is built as text leads to its states, so what no text comes near
costs nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StopStrings:
    strings: tuple[str, ...] = ()

    @cached_property
    def automaton(self) -> StopAutomaton:
        """Shared by all completions of a request."""
        return StopAutomaton(self.strings)


class StopAutomaton:
    """States are numbers, 0 the first. A state stands for the longest beginning of a string that the text ends with."""

    def __init__(self, strings: Sequence[str]) -> None:
        """Takes time linear in the strings' lengths together."""
        self._next: list[dict[str, int]] = [{}]  # of each state, by character; the tree of the strings
        self._depth = [0]  # characters of the beginning that the state stands for
        self._longest = [0]  # of the strings that the text ends with here, the longest one's length; 0: none
        for string in strings:
            self._longest[self._grown(string)] = len(string)
        self._fallback = [0] * len(self._next)  # the state for the next shorter beginning that the text ends with too
        self._link()

    @property
    def starts(self) -> Container[str]:
        """The characters that strings begin with."""
        return self._next[0]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (successor := self._next[state].get(char)) is None and state:
            state = self._fallback[state]
        return 0 if successor is None else successor

    def num_held(self, state: int) -> int:
        """Characters at the end of the text that may be the start of a string, and must wait for what follows."""
        return self._depth[state]

    def longest_end(self, state: int) -> int:
        """The length of the longest string that ends here; 0: none does."""
        return self._longest[state]

    def _grown(self, string: str) -> int:
        state = 0
        for char in string:
            successor = self._next[state].get(char)
            if successor is None:
                successor = len(self._next)
                self._next[state][char] = successor
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._longest.append(0)
            state = successor
        return state

    def _link(self) -> None:
        """Sets the fallbacks, those of short beginnings first, on which those of long ones rest."""
        level = [*self._next[0].values()]
        while level:
            following = []
            for state in level:
                for char, child in self._next[state].items():
                    self._fallback[child] = self.step(self._fallback[state], char)
                    self._longest[child] = self._longest[child] or self._longest[self._fallback[child]]
                    following.append(child)
            level = following


class StopMatcher:
    """Looks for stop strings in the text of one completion."""

    def __init__(self, automaton: StopAutomaton, state: int = 0) -> None:
        self._automaton = automaton
        self._state = state

    def copy(self) -> StopMatcher:
        """Another one for a text that begins alike."""
        return StopMatcher(self._automaton, self._state)

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that may be the start of a string."""
        return self._automaton.num_held(self._state)

    def find(self, piece: str) -> tuple[int, int] | None:
        """Where the earliest of the strings that are complete in this piece starts, and its end; None: none is.

        Counted from the piece's start: below 0 it starts in an earlier piece.
        """
        automaton, state = self._automaton, self._state
        starts = automaton.starts
        earliest: tuple[int, int] | None = None
        for end, char in enumerate(piece, 1):
            if not state and char not in starts:
                continue  # most of most texts
            state = automaton.step(state, char)
            longest = automaton.longest_end(state)
            if longest and (earliest is None or end - longest < earliest[0]):
                earliest = end - longest, end
        self._state = state
        return earliest
