"""Show the records of several `longdraft bench --out` on one page: `longdraft report RUN... --out report.html`."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from longdraft.launch import cli
from longdraft.launch.console import show

main = partial(cli.run, "report")


def run(args: argparse.Namespace) -> None:
    write_report(args.runs, args.out, "--out")
    show(f"Written to {args.out}\n")


def write_report(runs: Sequence[Path], path: Path, option: str) -> None:
    """Write the page of these records. Raises ValueError, which names `option` if `path` cannot be written."""
    from longdraft.benchmarks.drafters.html_report import page
    from longdraft.benchmarks.drafters.record import read_record
    from longdraft.models.files import write_atomically

    names = [run.resolve().name for run in runs]
    titles = [name if names.count(name) == 1 else str(run) for name, run in zip(names, runs, strict=True)]
    text = page({title: read_record(run) for title, run in zip(titles, runs, strict=True)})
    try:
        write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}; give another path") from error


if __name__ == "__main__":
    sys.exit(main())
