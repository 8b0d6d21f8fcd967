"""Render the executed course as a static site, with the page "Will it fit?": `make site`.

Takes the notebooks that `labkit run` executed; nothing is executed here. The site reads the same
from a disk as from a server.

Exits with 0; 1 where Sphinx warns of anything; 2 for bad input.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from course_pages import write_pages
from fit_page import write_fit_page
from sphinx.cmd.build import build_main

from gpumem.files import RUN_FOLDER
from gpumem.inputs import InputError

HERE = Path(__file__).resolve().parent
OUT = Path("build", "site")
#: Sphinx writes it; a folder without it is not a site of ours to replace.
_MARK = "objects.inv"


def make(course: Path, out: Path) -> int:
    """Render the run in ``course`` into ``out``; Sphinx's exit code, and if it is 0 a new site.

    Raises:
        InputError: ``course`` holds no lesson that passed, ``out`` is not empty and no site, or the
            table of fits is missing or damaged.
        OSError: something cannot be written.
    """
    if out.exists() and any(out.iterdir()) and not (out / _MARK).exists():
        raise InputError(f"{out} holds something else than a site; name another folder")
    with tempfile.TemporaryDirectory() as folder:
        pages, made = Path(folder, "pages"), Path(folder, "made")
        lessons = write_pages(course, pages)
        code = build_main(
            [
                "-q",
                "-W",
                "--keep-going",
                "-n",
                "-d",
                str(Path(folder, "trees")),
                "-c",
                str(HERE),
                str(pages),
                str(made),
            ]
        )
        if code == 0:
            write_fit_page(made)
            shutil.rmtree(out, ignore_errors=True)
            shutil.move(made, out)
    if code == 0:
        print(f"Site: {(out / 'index.html').resolve()} ({len(lessons)} lessons)")
    return code


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Render the executed course as a static site.")
    parser.add_argument("--course", type=Path, default=RUN_FOLDER, help="of a `labkit run`")
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        if not options.course.is_dir():
            raise InputError(f"there is no folder {options.course}; `labkit run` makes it")
        return make(options.course, options.out)
    except (InputError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
