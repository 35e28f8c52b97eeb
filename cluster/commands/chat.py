"""A terminal chat with the base or one of its adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..client.client import ClientError, MotetClient

HELP = "/adapter NAME changes the voice, /adapter lists them, /new forgets the talk, /quit ends it."


class Chat:
    """One conversation. What was said goes along when the adapter changes.

    `show` is called with pieces of text as they arrive, and must not add line breaks.
    """

    def __init__(self, client: MotetClient, model: str | None, show: Callable[[str], None]) -> None:
        self._client = client
        self._show = show
        self._names = client.models()
        self.model = self._resolve(model) if model is not None else self._names[0]
        self.history: list[dict[str, str]] = []

    def run(self, lines: Iterator[str]) -> bool:
        """Answers line by line until /quit or the end of the lines. Whether nothing failed."""
        all_right = True
        self._show(f"{self._client.url}, model {self.model}. {HELP}\n")
        for line in lines:
            text = line.strip()
            try:
                if text == "/quit":
                    break
                elif text.startswith("/"):
                    self._command(*text.split(maxsplit=1))
                elif text:
                    self._answer(text)
            except ClientError as error:
                self._show(f"error: {error}\n")
                all_right = False
        return all_right

    def _command(self, command: str, argument: str = "") -> None:
        if command == "/adapter" and argument:
            self.model = self._resolve(argument)
            self._show(f"now {self.model}\n")
        elif command == "/adapter":
            self._names = self._client.models()
            self._show("  ".join(f"[{name}]" if name == self.model else name for name in self._names) + "\n")
        elif command == "/new":
            self.history.clear()
            self._show("forgotten\n")
        else:
            self._show(f"{command} is not a command. {HELP}\n")

    def _answer(self, question: str) -> None:
        """Streams the answer. A question that failed or was stopped by Ctrl-C is not kept."""
        messages = [*self.history, {"role": "user", "content": question}]
        answer = ""
        pieces = self._client.chat(self.model, messages)
        try:
            for piece in pieces:
                answer += piece.text
                self._show(piece.text)
        except KeyboardInterrupt:
            pieces.close()  # cancels at the server
            self._show(" (stopped)\n")
            return
        self._show("\n")
        self.history = [*messages, {"role": "assistant", "content": answer}]

    def _resolve(self, name: str) -> str:
        if name not in self._names:
            self._names = self._client.models()  # it may have been uploaded since
        if name not in self._names:
            raise ClientError(f"there is no model {name!r}: {', '.join(self._names)} can be chosen")
        return name
