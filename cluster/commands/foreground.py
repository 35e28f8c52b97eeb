"""A deployment that a command runs in front of a person: progress while it starts, plain words when it cannot."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console

from ...adapters.errors import AdapterError
from ..config import MotetConfig
from ..launch.launch import Deployment, LaunchError
from ..registry_server.redis_server import RedisServerError
from .progress import ProgressDisplay

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
        deployment.stop()


def _start(deployment: Deployment, config: MotetConfig, console: Console, **options: bool) -> None:
    logging.disable(logging.INFO)  # of this process: how far it is, the progress tells
    try:
        with ProgressDisplay(console) as progress:
            deployment.start(config, progress, **options)
    except (LaunchError, RedisServerError, AdapterError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except (KeyboardInterrupt, SystemExit):
        # Everything is stopped by now, and a Ray that was interrupted while it started can crash a normal exit.
        console.print("stopped", highlight=False)
        os._exit(INTERRUPTED_EXIT_CODE)
