"""What the attempts in trace files came to.

python -m recbole_dgr2.acceptance saved/cache/traces-*.jsonl

How many lists got a trace within 1, 2, 4, ... attempts, why attempts were turned down, and the tokens that they took.
"""

from __future__ import annotations

import sys
from pathlib import Path

from recbole_dgr2.data.trace_store import TraceStore, acceptance
from recbole_dgr2.system.command import Arguments, command, command_parser


@command
def main(arguments: Arguments = None) -> None:
    """Run the command line."""
    parser = command_parser("acceptance", __doc__)
    parser.add_argument("files", nargs="+", type=Path, help="trace files (.jsonl)")
    for path in parser.parse_args(arguments).files:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; traces lie beside the cache's other entries")
        sys.stdout.write(f"{path}: {acceptance(TraceStore(path).attempts)}\n")


if __name__ == "__main__":
    sys.exit(main())
