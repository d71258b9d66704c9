"""The packages, and the page of the package index, which `pyproject.toml` cannot describe.

Some folders sit beside the library here and inside it once installed. On the package index the
README's links lead to the repository whose address is in REPOSITORY_URL, as the release workflow
sets it. Without it the page has no links that lead nowhere, and no address of a project.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

BESIDE = ("bench", "cli", "convert", "server")
HERE = Path(__file__).resolve().parent


def page(text: str, repository: str, version: str) -> str:
    """Make links and pictures absolute; without a repository keep their texts alone."""

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        if re.match(r"[a-z]+:", target):
            return found[0]
        if not repository:
            return "" if mark else label
        kind = "raw" if mark else "blob"
        return f"{mark}[{label}]({repository.rstrip('/')}/{kind}/v{version}/{target})"

    return re.sub(r"(!?)\[([^]]*)\]\(([^)]+)\)", link, text)


beside = find_packages(
    include=[f"{name}{end}" for name in BESIDE for end in ("", ".*")],
    exclude=["bench.lab", "bench.lab.*"],  # the laboratory runs from a checkout
)
repository = os.environ.get("REPOSITORY_URL", "")
source = (HERE / "mlx_redrafter" / "version.py").read_text(encoding="utf-8")
(version,) = re.findall(r'__version__ = "(.+)"', source)
readme = (HERE / "README.md").read_text(encoding="utf-8")
setup(
    packages=[
        *find_packages(include=["mlx_redrafter", "mlx_redrafter.*"]),
        *(f"mlx_redrafter.{name}" for name in beside),
    ],
    package_dir={f"mlx_redrafter.{name}": name.replace(".", "/") for name in beside},
    long_description=page(readme, repository, version),
    long_description_content_type="text/markdown",
    project_urls={
        name: f"{repository.rstrip('/')}/{path}"
        for name, path in (
            ("Repository", ""),
            ("Documentation", "tree/HEAD/docs"),
            ("Changelog", "blob/HEAD/CHANGELOG.md"),
            ("Issues", "issues"),
        )
        if repository
    },
)
