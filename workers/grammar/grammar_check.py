"""A process that compiles grammars only to see whether they can be compiled: some would end or hang their process.

`python -m motet.workers.grammar.grammar_check`. It is given a tokenizer, then grammars, each with the niceness
that it is worth. Each is compiled in a fork, which is ended with its bounds: what is left is as before.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from ...adapters.processes.process_bounds import bound_memory, yield_to_others
from ...adapters.processes.process_frames import read_frames, write_frames
from .compiled_grammars import COMPILE_BYTES, COMPILE_S, compiled
from .vocabulary import Vocabulary

_STACK_BYTES = 4 << 20  # less than those that compile afterwards have


def _answer(grammar: str, niceness: int, vocabulary: Vocabulary) -> int:
    """How the fork ended, as `os.waitstatus_to_exitcode` says it."""
    child = os.fork()
    if child == 0:
        yield_to_others(niceness)
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)  # SIGPROF ends the process
        bound_memory(COMPILE_BYTES)
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=_compile, args=(grammar, vocabulary))
        thread.start()
        thread.join()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _compile(grammar: str, vocabulary: Vocabulary) -> None:
    matcher = compiled(grammar, vocabulary)
    if not matcher.is_error():
        matcher.compute_bitmask()


def main() -> None:
    folder, vocab_size, eos_token_ids = read_frames(sys.stdin.buffer)
    vocabulary = Vocabulary(Path(folder.decode()), int(vocab_size), [int(each) for each in eos_token_ids.split()])
    while question := read_frames(sys.stdin.buffer):
        grammar, niceness = question
        write_frames(sys.stdout.buffer, [b"%d" % _answer(grammar.decode(), int(niceness), vocabulary)])


if __name__ == "__main__":
    main()
