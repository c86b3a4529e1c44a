"""Maps the top-level folders of the workflow into the package, so that a wheel has them; all else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ("workflow", "profiles", "configs", "config", "examples")  # as in rlhpc/share/__init__.py

setup(
    packages=[*find_packages(include=["rlhpc", "rlhpc.*"]), *(f"rlhpc.share.{name}" for name in FOLDERS)],
    package_dir={f"rlhpc.share.{name}": name for name in FOLDERS},
    package_data={
        "": ["py.typed", "*.json", "*.html", "*.css"],
        **{f"rlhpc.share.{name}": ["*", "**/*"] for name in FOLDERS},
    },
)
