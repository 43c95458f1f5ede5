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


def check_name(path: Path, option: str) -> None:
    """Raise ValueError for a file name that is neither a page's nor a picture's."""
    if path.suffix not in (".html", ".svg"):
        raise ValueError(f"{option}: {path} is neither a page nor a picture; give a name that ends in .html or .svg")


def write_report(runs: Sequence[Path], path: Path, option: str) -> None:
    """Write the page or the picture of these records. Raises ValueError, which names `option` if `path` is wrong."""
    check_name(path, option)
    from longdraft.benchmarks.drafters.html_report import page, picture
    from longdraft.benchmarks.drafters.record import read_record
    from longdraft.models.files import write_atomically

    names = [run.resolve().name for run in runs]
    titles = [name if names.count(name) == 1 else str(run) for name, run in zip(names, runs, strict=True)]
    records = {title: read_record(run) for title, run in zip(titles, runs, strict=True)}
    text = (page if path.suffix == ".html" else picture)(records)
    try:
        write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}; give another path") from error


if __name__ == "__main__":
    sys.exit(main())
