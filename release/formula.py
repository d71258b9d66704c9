"""Print a Homebrew formula for the source archive of a release, with the versions of uv.lock.

    python -m release.formula dist/mlx_redrafter-0.1.0.tar.gz

The formula includes the server, since its users cannot add an extra. Packages that Homebrew has as
formulas for Python are dependencies. All others are resources, built from the archives of the lock.
"""

import hashlib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.markers import Marker

from release.notes import ROOT

NAME = "mlx-redrafter"
EXTRA = "server"
# Python of the formula. MLX's formula must be built for the same one.
PYTHON = "python@3.14"
# Formulas of Homebrew by the package that they provide.
FORMULAS = {"mlx": "mlx", "numpy": "numpy", "pydantic": "pydantic"}
# Formulas to build the resources with: tokenizers, safetensors, hf-xet and llguidance are Rust,
# sentencepiece is C++.
BUILDERS = ("cmake", "pkgconf", "rust")
# Values on a Mac of the variables in the lock's markers.
MAC = {
    "sys_platform": "darwin",
    "platform_machine": "arm64",
    "python_full_version": f"{PYTHON.partition('@')[2]}.0",
}
TEMPLATE = """\
class MlxRedrafter < Formula
  include Language::Python::Virtualenv

  desc "Lossless speculative decoding for MLX language models"
  homepage "https://pypi.org/project/{name}/"
  url "{url}"
  sha256 "{sha256}"
  license all_of: ["Apache-2.0", "MIT", "BSD-3-Clause"]

{depends}

{resources}

  def install
    virtualenv_install_with_resources
  end

  test do
    assert_match "texts:        equal", shell_output("#{{bin}}/redrafter-mlx try -m 8 2>&1")
  end
end
"""


def write_formula(lock: Mapping[str, Any], archive: str, content: bytes) -> str:
    """Write the formula, given uv.lock, and the name on PyPI and the bytes of the source archive.

    Raise ValueError if a package of the lock has no source archive.
    """
    # Of several versions the last one counts, which is for the newest Python.
    packages = {package["name"]: package for package in lock["package"]}
    needed = sorted(_closure(packages))
    builds = [f'  depends_on "{name}" => :build' for name in BUILDERS]
    formulas = [*(FORMULAS[name] for name in needed if name in FORMULAS), "libyaml", PYTHON]
    others = [":macos", *(f'"{name}"' for name in formulas)]
    # A requirement is sorted among the formulas.
    uses = [f"  depends_on {one}" for one in sorted(others, key=lambda one: one[1:])]
    resources = [_resource(packages[name]) for name in needed if name not in FORMULAS]
    return TEMPLATE.format(
        name=NAME,
        url=_address(archive, content),
        sha256=hashlib.sha256(content).hexdigest(),
        depends="\n".join([*builds, "  depends_on arch: :arm64", *uses]),
        resources="\n\n".join(resources),
    )


def _address(archive: str, content: bytes) -> str:
    """Return the address of a file on PyPI, which names its folder by the file's BLAKE2 hash."""
    digest = hashlib.blake2b(content, digest_size=32).hexdigest()
    folder = f"{digest[:2]}/{digest[2:4]}/{digest[4:]}"
    return f"https://files.pythonhosted.org/packages/{folder}/{archive}"


def _closure(packages: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return all packages that the program needs on a Mac, without those that formulas bring."""
    own, found = packages[NAME], set()
    left = [*_needed(own["dependencies"]), *_needed(own["optional-dependencies"][EXTRA])]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [] if name in FORMULAS else _needed(packages[name].get("dependencies", ()))
    return found


def _needed(dependencies: Sequence[Mapping[str, Any]]) -> list[str]:
    markers = ((one["name"], one.get("marker")) for one in dependencies)
    return [name for name, marker in markers if marker is None or Marker(marker).evaluate(MAC)]


def _resource(package: Mapping[str, Any]) -> str:
    name, archive = package["name"], package.get("sdist")
    if archive is None:
        raise ValueError(
            f"expected a source archive of {name} in uv.lock, found none; name its formula in "
            "FORMULAS"
        )
    digest = archive["hash"].removeprefix("sha256:")
    return f'  resource "{name}" do\n    url "{archive["url"]}"\n    sha256 "{digest}"\n  end'


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1:
        sys.exit("error: expected one argument, the source archive")
    path = Path(arguments[0])
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    print(write_formula(lock, path.name, path.read_bytes()), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
