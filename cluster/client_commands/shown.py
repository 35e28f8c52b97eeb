"""Tenants, keys and entries of the audit log as tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

_UNLIMITED_WIDTH: Final = 10_000  # columns, where no terminal limits them


def show_json(what: Any) -> None:
    """As the server tells it."""
    click.echo(json.dumps(what, indent=2))


def show_tenants(tenants: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            tenant["name"],
            tenant["state"],
            f"{tenant['weight']:g}",
            "background" if tenant["background"] else "",
            str(tenant["num_keys"]),
            quota_text(tenant["quota"]),
            _time(tenant["created_at"]),
            tenant["label"],
        )
        for tenant in tenants
    ]
    _print(("name", "state", "weight", "class", "keys", "quota", "created", "label"), rows)


def show_keys(keys: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            key["id"],
            key["tenant"],
            " ".join(key["scopes"]),
            _time(key["expires_at"]) or "never",
            quota_text(key["quota"]),
            _time(key["created_at"]),
            key["label"],
        )
        for key in keys
    ]
    _print(("id", "tenant", "scopes", "expires", "quota", "created", "label"), rows)


def show_entries(entries: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            _time(entry["at"]),
            " ".join(filter(None, (entry["actor"]["kind"], entry["actor"]["id"]))),
            entry["action"],
            entry["tenant"] or "",
            entry["target"] or "",
            json.dumps(entry["changed"]) if entry["changed"] else entry["result"] or "",
            entry["request_id"],
        )
        for entry in entries
    ]
    _print(("when", "who", "did", "tenant", "to", "what", "request"), rows)


def quota_text(quota: Mapping[str, int | None]) -> str:
    return " ".join(f"{name.replace('_', '-')}={bound}" for name, bound in quota.items() if bound is not None)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _print(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    Console(highlight=False, markup=False, width=width).print(table)
