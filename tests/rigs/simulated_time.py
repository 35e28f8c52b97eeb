"""An event loop whose time passes at once: minutes of waiting take as long as what is computed meanwhile."""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class _Selector(selectors.SelectSelector):
    """Never waits, and looks at no file, since nothing comes from outside: it says how long it would have waited."""

    def __init__(self, on_wait: Callable[[float], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("all tasks wait, and nothing will ever wake them")
        self._on_wait(timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. What is given to an executor is done at once, on this loop's own thread."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Selector(self._pass))

    def time(self) -> float:
        return self._now_s

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, **options: Any) -> asyncio.Handle:  # type: ignore[override]
        """There is one thread."""
        return self.call_soon(callback, *args, **options)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _pass(self, seconds: float) -> None:
        self._now_s += max(0.0, seconds)


def run_simulated(main: Coroutine[Any, Any, _Result]) -> _Result:
    """The coroutine's result, of a loop of its own. Raises what a callback or a forgotten task has raised, too."""
    problems: list[BaseException] = []

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        problems.append(context.get("exception") or RuntimeError(context["message"]))

    gc.freeze()  # what was there before is not searched for garbage again and again
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.get_loop().set_exception_handler(note)
            result = runner.run(main)
            gc.collect()  # forgotten tasks log what they have raised
    finally:
        gc.enable()
        gc.unfreeze()
    if problems:
        raise problems[0]
    return result
