"""The folders at the top are imported as ``lexshard.kernels`` and so on: names such as ``kernels``
alone belong to others, too. All else is in pyproject.toml.
"""

from setuptools import find_packages, setup

FOLDERS = ("actors", "cluster", "kernels", "loadtest", "serve_app")

setup(
    package_dir={f"lexshard.{folder}": folder for folder in FOLDERS},
    packages=[
        f"lexshard.{package}"
        for folder in FOLDERS
        for package in (folder, *(f"{folder}.{each}" for each in find_packages(folder)))
    ],
)
