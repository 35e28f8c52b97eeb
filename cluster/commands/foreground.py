"""A deployment that a command runs in front of a person: progress while it starts, plain words when it cannot."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click
from rich.console import Console

from ...adapters.errors import AdapterError
from ..config import MotetConfig
from ..launch.launch import Deployment, LaunchError
from ..launch.redis_server import RedisServerError
from ..progress import ProgressDisplay

INTERRUPTED_EXIT_CODE = 130


@contextmanager
def deployed(
    config: MotetConfig, console: Console, *, replace: bool = False, wait_for_nodes: bool = False
) -> Iterator[Deployment]:
    """A deployment that can serve a token; it is stopped when the block ends, however it ends.

    `replace`, `wait_for_nodes`: see `Deployment.start`.

    What keeps it from starting or running is a ClickException; Ctrl-C and SIGTERM are SystemExit with code 130.
    """
    deployment = Deployment()
    _start(deployment, config, console, replace=replace, wait_for_nodes=wait_for_nodes)
    try:
        yield deployment
    except LaunchError as error:
        raise click.ClickException(str(error)) from error
    except (KeyboardInterrupt, SystemExit):
        raise SystemExit(INTERRUPTED_EXIT_CODE) from None
    finally:
        console.print("stopping", highlight=False)
        with _patience(console):
            deployment.stop()


@contextmanager
def _patience(console: Console) -> Iterator[None]:
    """Ctrl-C and SIGTERM end nothing meanwhile: what is half stopped would be left behind.

    Ctrl-C is ignored from then on: what is left is to exit, with the code of what has ended the deployment.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def show_wait(_number: int, _frame: FrameType | None) -> None:
        console.print("still stopping", highlight=False)

    signal.signal(signal.SIGINT, show_wait)
    before = signal.signal(signal.SIGTERM, show_wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if signal.getsignal(signal.SIGTERM) is show_wait:  # the deployment restores the handler that it has changed
            signal.signal(signal.SIGTERM, before)


def _start(deployment: Deployment, config: MotetConfig, console: Console, **options: bool) -> None:
    logging.disable(logging.INFO)  # of this process: the progress display replaces these lines
    try:
        with ProgressDisplay(console) as progress:
            deployment.start(config, progress, **options)
    except (LaunchError, RedisServerError, AdapterError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except (KeyboardInterrupt, SystemExit):
        # Everything is stopped by now, and a Ray that was interrupted while it started can crash a normal exit.
        console.print("stopped", highlight=False)
        os._exit(INTERRUPTED_EXIT_CODE)
