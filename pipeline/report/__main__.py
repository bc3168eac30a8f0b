"""Command line of `miles report`."""

import argparse
import asyncio
import pathlib
import sys

from pipeline import terminal

REFUSED = 2  # exit code for what the user must mend


def main() -> int:
    parser = argparse.ArgumentParser(prog="miles report", description="One self-contained HTML page about a run.")
    parser.add_argument("run", help="a run's folder (runs/NAME) or its prefix in the store (s3://…, file:///…)")
    parser.add_argument("-o", "--output", help="file to write (default: report.html in the run's folder)")
    options = parser.parse_args()
    folder = pathlib.Path() if "://" in options.run else pathlib.Path(options.run)
    file = pathlib.Path(options.output) if options.output else folder / "report.html"
    try:
        from pipeline.report import document
        from pipeline.storage import StorageError
    except ModuleNotFoundError as error:
        return refuse(f"needs {error.name}, which is not installed: pip install 'miles[rollout]'")
    try:
        page = asyncio.run(document.build(options.run))
        file.write_text(page, encoding="utf-8")
    except (ValueError, StorageError, OSError) as error:
        return refuse(str(error))
    print(f"{file} ({len(page) / 1e6:.1f} MB): open it in a browser")
    return 0


def refuse(reason: str) -> int:
    print(f"miles report: {reason}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    terminal.run(main)
