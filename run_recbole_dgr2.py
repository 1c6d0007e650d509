"""Command line of recbole_dgr2, in RecBole's style.

python run_recbole_dgr2.py --dataset=ml-100k --retriever=ItemKNN
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from recbole_dgr2.schema import Option, option_files, read_options
from recbole_dgr2.system.command import INTERRUPTED, ended_as_interrupted

EPILOG = """\
Any option of the plugin, of RecBole, or of the chosen retriever is given as --key=value, or in a YAML file.
Precedence: command line > config files > properties. A misspelt key is an error that names the nearest one.

examples:
  python run_recbole_dgr2.py --dataset=ml-100k
  python run_recbole_dgr2.py --dataset=ml-100k --retriever=BPR --epochs=20 --embedding_size=64
  python run_recbole_dgr2.py --dataset=toy --config_files=my.yaml --tau=0.8

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 on success, 2 when the user has to change something, 130 after Ctrl-C or SIGTERM."""
    try:
        with ended_as_interrupted():
            return _run(arguments)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is kept", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    if "-h" in words or "--help" in words:
        parser.epilog = EPILOG + _describe_options()
    known, rest = parser.parse_known_args(words)
    from recbole_dgr2.quick_start import run_recbole_dgr2
    from recbole_dgr2.system import processes

    files = known.config_files.replace(",", " ").split() if known.config_files else None
    try:
        run_recbole_dgr2(
            model=known.model, dataset=known.dataset, config_file_list=files, config_dict=None, arguments=rest
        )
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error{processes.label()}: {error}", file=sys.stderr)
        return 2
    except processes.Stopped:
        return 2
    except RuntimeError as error:
        if not processes.lost_peer(error):
            raise
        print(f"error{processes.label()}: another process has stopped", file=sys.stderr)
        return 2
    processes.finish()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run_recbole_dgr2.py",
        description="Re-rank a RecBole retriever's candidates with a reasoning language model; report the gain.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", "-m", default="DGR2", help="the re-ranker (default: DGR2)")
    parser.add_argument(
        "--dataset", "-d", help="data set: ml-100k ships with RecBole, others lie in <data_path>/"
    )
    parser.add_argument("--config_files", help="YAML files, separated by spaces or commas")
    return parser


def _describe_options() -> str:
    """The options of properties/, with meaning, type, range and default."""
    lines = []
    for path in option_files("DGR2", None):
        lines.append(
            f"options of properties/{path.parent.name + '/' if path.stem != 'overall' else ''}{path.name}:"
        )
        lines += [_describe(option) for option in read_options(path)]
        lines.append("")
    return "\n".join(lines)


def _describe(option: Option) -> str:
    default = "null" if option.default is None else option.default
    return f"  --{option.key}={default}\n        ({option.expected()}) {option.meaning}".replace("%", "%%")


if __name__ == "__main__":
    sys.exit(main())
