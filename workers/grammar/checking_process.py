"""The leader's side of `grammar_check.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Final

from ...adapters.processes.process_frames import read_frames, write_frames
from .vocabulary import Vocabulary

_WHY: Final = {
    -signal.SIGPROF: "it takes too long to compile",
    -signal.SIGSEGV: "it refers too deeply to be compiled",
    -signal.SIGABRT: "it takes too much memory to compile",
}


class CheckingProcess:
    """Starts with its first question, and again if it ends. Used from one thread at a time, whose priority it has."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._first = [
            str(vocabulary.folder).encode(),
            b"%d" % vocabulary.vocab_size,
            " ".join(map(str, vocabulary.eos_token_ids)).encode(),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def why_not(self, grammar: str) -> str:
        """Why this process must not compile the grammar; empty: it may."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frames(process.stdin, [grammar.encode(), b"%d" % _niceness()])
            (answer,) = read_frames(process.stdout)
        except (OSError, EOFError, ValueError):
            self.close()
            return "the process that checks grammars has ended"
        status = int(answer)
        return _WHY.get(status, f"its compiler ended with status {status}") if status else ""

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-m", __package__ + ".grammar_check")
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        write_frames(process.stdin, self._first)
        return process


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id() if sys.platform == "linux" else 0)
