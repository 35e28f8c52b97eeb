"""The process that translates and tries grammars for a router: `python -m motet.router.grammars.check_process`.

A grammar is a program of a tenant's: it may take any time and memory to compile, and one with a long chain of
references overflows the stack, which ends the process. So each is tested in its own process, forked from this one,
which has imported what it needs. A gang compiles only what was compiled here. The stack here is smaller than that of a
gang's threads, so what fits here fits there.
"""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Sequence
from typing import IO, Final

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ...adapters.processes.child_processes import (
    NOT_LAST,
    bound_cpu,
    bound_memory,
    bound_stack,
    read_frames,
    write_frames,
    yield_to_others,
    yield_wholly,
)
from ...workers.wire.messages import GRAMMAR_LIMITS
from .lark_text import lark_text
from .response_format import WantedGrammar

NICENESS: Final = 5  # they yield to all other work
QUICK_S: Final = 0.05  # what takes longer has only what would idle, if its tenant has had its share
MAX_GRAMMAR_BYTES: Final = 128 << 10
CPU_S: Final = 1.0  # for one grammar: some milliseconds are usual, and of 128 KiB some take 0.2 s
MOST_BYTES: Final = 256 << 20  # of memory
STACK_BYTES: Final = 1 << 20
NUM_TRIED_BYTES: Final = 16  # that are generated, as some grammars show only then what they take
_NUM_ANY: Final = 128  # of the bytes may come next where a text goes on

_MAX_PROBLEM_CHARS: Final = 300
_UNKNOWN_KEYWORDS: Final = re.compile(r"Unimplemented keys: \[(.*?)\]")
_LIES_AT: Final = re.compile(
    r"^(?:at )?(?:at EOF|\d+\(\d+\)): |^failed to compile JSON schema: |^invalid regex .* \(in regex\): "
)
_WIDE_ROW: Final = re.compile(r"Current row has (\d+) items; max is (\d+)")
_REGEX_ERROR: Final = re.compile(r"^error: (.*)$", re.MULTILINE)


class GrammarQuestion(msgspec.Struct, frozen=True):
    """In a frame before that of the wanted grammar."""

    vocab_size: int
    special_ids: dict[str, int]
    may_wait: bool  # its tenant has had its share of the processors


class Verdict(msgspec.Struct, frozen=True):
    """One of the two."""

    lark: str = ""
    problem: str = ""


_TOO_MUCH: Final = msgspec.msgpack.encode(
    Verdict(problem="it takes too much time or memory to compile, or its rules are nested too deeply.")
)


_ALL_BYTES: Final = (1 << 256) - 1
_TOKEN_MARKER: Final = b"\xff"  # before the number of a special token, where llguidance writes one as bytes
_TRIED_ASCII: Final = range(ord("!"), ord("~") + 1)
_QUOTE: Final = 1 << ord('"')
_CLOSING: Final = 1 << ord("}") | 1 << ord("]")


class _Bytes:
    """A vocabulary of bytes, and of ids that stand for no text."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)

    def __init__(self, size: int) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b""] * max(1, size - 256)

    def __call__(self, text: str | bytes) -> Sequence[int]:
        return text.encode() if isinstance(text, str) else text


class GrammarTrial:
    def __init__(self) -> None:
        self._tokenizers: dict[int, LLTokenizer] = {}

    def problem(self, grammar: str, vocab_size: int) -> str:
        """What is wrong with the grammar; empty: nothing."""
        self.prepare(vocab_size)
        first = LLMatcher(self._tokenizers[vocab_size], grammar, log_level=0, limits=GRAMMAR_LIMITS)
        error = str(first.get_error())
        for goes_on in (False, True):
            error = error or _error_on_the_way(first.deep_copy(), goes_on)
        return _in_words(error) if error else ""

    def prepare(self, vocab_size: int) -> None:
        if vocab_size not in self._tokenizers:
            self._tokenizers[vocab_size] = LLTokenizer(TokenizerWrapper(_Bytes(vocab_size)), slices=[])


def _error_on_the_way(matcher: LLMatcher, goes_on: bool) -> str:
    """What stops the beginning of one answer, or one that has another byte in one of its places; empty: nothing.

    A gang's answers go any way, and a row of alternatives has the same bound there. `goes_on`: texts between quotation
    marks are empty and objects are not, so that the answer comes to what is behind and in them; else a text never ends.
    """
    for _ in range(NUM_TRIED_BYTES):
        forced, _, _ = matcher.compute_ff_bytes().partition(_TOKEN_MARKER)
        matcher.consume_tokens([*forced])  # forced tokens leave no choice
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = mask & _ALL_BYTES
        if matcher.is_error() or not mask & ~(1 << _Bytes.eos_token_id):
            break
        for byte in filter(lambda byte: allowed >> byte & 1, _TRIED_ASCII):
            other = matcher.deep_copy()
            other.consume_token(byte)
            if other.is_error():
                return str(other.get_error())
        if goes_on and allowed.bit_count() >= _NUM_ANY and allowed & _QUOTE:
            allowed = _QUOTE
        elif goes_on:
            allowed = allowed & ~_CLOSING or allowed
        matcher.consume_token((allowed or mask).bit_length() - 1)  # the highest: no white space
        if matcher.is_error() or matcher.is_stopped():
            break
    return str(matcher.get_error())


def _in_words(error: str) -> str:
    """llguidance's message in one sentence, without its picture of the place in the text, which is not the client's."""
    if error.startswith("panic"):
        return "llguidance cannot compile it."
    if error.startswith("NoExtension"):
        return "no text fits it."
    if keywords := _UNKNOWN_KEYWORDS.search(error):
        return f"of JSON Schema these keywords are not supported: {keywords[1]}."
    if row := _WIDE_ROW.search(error):
        return f"{row[1]} alternatives are open at one place of an answer: at most {row[2]} are followed."
    first = error.partition("\n")[0]
    if cause := _REGEX_ERROR.search(error):
        first = f"a regular expression is not accepted: {cause[1]}"
    while match := _LIES_AT.match(first):
        first = first[match.end() :]
    return f"{first[:_MAX_PROBLEM_CHARS].rstrip('.')}."


def _verdict(trial: GrammarTrial, question: GrammarQuestion, grammar: bytes) -> Verdict:
    try:
        lark = lark_text(msgspec.msgpack.decode(grammar, type=WantedGrammar), question.special_ids)
    except RecursionError:
        return Verdict(problem="it is nested too deeply.")
    except ValueError as error:
        return Verdict(problem=str(error))
    num_bytes = len(lark.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        problem = f"it has {num_bytes} bytes as llguidance reads it: at most {MAX_GRAMMAR_BYTES} are accepted."
        return Verdict(problem=problem)
    problem = trial.problem(lark, question.vocab_size)
    return Verdict(problem=problem) if problem else Verdict(lark)


def _answer(trial: GrammarTrial, question: GrammarQuestion, grammar: bytes) -> list[bytes]:
    """The verdict, by a process that the grammar may end, and the seconds of CPU that it took."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            # If the parent ends, the router must see it by its pipes, and this process by the one that has no reader.
            for pipe in (sys.stdin.fileno(), sys.stdout.fileno(), source):
                os.close(pipe)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # a panic may quote the grammar
            bound_stack(STACK_BYTES)
            bound_cpu(CPU_S)
            with os.fdopen(sink, "wb") as answer:
                answer.write(msgspec.msgpack.encode(_verdict(trial, question, grammar)))
            status = 0
        finally:
            os._exit(status)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        is_quick, _, _ = select.select([pipe], [], [], QUICK_S)
        if question.may_wait and not is_quick:
            yield_wholly(child)
        verdict = pipe.read()
    _, status, used = os.wait4(child, 0)
    return [_TOO_MUCH if status else verdict, b"%f" % (used.ru_utime + used.ru_stime)]


def main(source: IO[bytes], sink: IO[bytes]) -> None:
    yield_to_others(NICENESS)
    bound_memory(MOST_BYTES)
    trial, decoder = GrammarTrial(), msgspec.msgpack.Decoder(GrammarQuestion)
    while frames := read_frames(source):
        question, grammar = decoder.decode(frames[0]), frames[1]
        trial.prepare(question.vocab_size)
        write_frames(sink, [NOT_LAST, *_answer(trial, question, grammar)])


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
