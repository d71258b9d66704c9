"""Print the notes of this version: its section of CHANGELOG.md.

    python -m release.notes

The version is `__version__` of mlx_redrafter/version.py and stands nowhere else.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def read_version() -> str:
    """Read the version without importing the package, whose dependencies may be missing."""
    source = (ROOT / "mlx_redrafter" / "version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return str(version)


def find_notes(changelog: str, version: str) -> str:
    """Return a version's section without its heading; ValueError unless it has a date and notes."""
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    parts = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)
    for part in parts:
        title, _, notes = part.partition("\n")
        if re.match(heading, title) and notes.strip():
            return notes.strip()
    raise ValueError(
        f"expected a section '## [{version}] - YEAR-MONTH-DAY' with notes in CHANGELOG.md, found "
        "none; rename [Unreleased], or change mlx_redrafter/version.py"
    )


def main() -> None:
    """Print the notes, or one line on stderr that says what is missing."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        print(find_notes(changelog, read_version()))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
