"""Packages of the wheel: these folders sit beside the library here and inside it once installed."""

from setuptools import find_packages, setup

BESIDE = ("bench", "cli", "convert", "server")
beside = find_packages(
    include=[f"{name}{end}" for name in BESIDE for end in ("", ".*")],
    exclude=["bench.lab", "bench.lab.*"],  # the laboratory runs from a checkout
)
setup(
    packages=[
        *find_packages(include=["mlx_redrafter", "mlx_redrafter.*"]),
        *(f"mlx_redrafter.{name}" for name in beside),
    ],
    package_dir={f"mlx_redrafter.{name}": name.replace(".", "/") for name in beside},
)
