"""Runs the papers' benchmarks in one process, with their CPU seconds. Without names: all that are virtual."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from importlib import import_module
from unittest.mock import patch

VIRTUAL = ("orca", "paged", "slora", "nanoflow", "long_prompts", "conversations", "knees", "mig")
MEASURED = ("flash", "forks", "pipeline", "plan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join((*VIRTUAL, *MEASURED))} (default: the first eight)")
    names = parser.parse_args().names or VIRTUAL
    if unknown := set(names) - {*VIRTUAL, *MEASURED}:
        parser.error(f"{', '.join(sorted(unknown))}: {', '.join((*VIRTUAL, *MEASURED))} are there")
    gc.set_threshold(100_000)  # steps make many objects that live on
    took_s = {}
    for name in names:
        print(f"== {name}", flush=True)
        began_s = time.process_time()
        with patch.object(sys, "argv", [name]):
            import_module(f"motet.benchmarks.papers.{name}").main()
        took_s[name] = round(time.process_time() - began_s, 1)
    print(json.dumps({"seconds": took_s, "in_all_s": round(sum(took_s.values()), 1)}))


if __name__ == "__main__":
    main()
