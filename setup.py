"""Maps the top-level folders of the workflow into the package, so that a wheel has them; all else is in pyproject.toml."""

import sys

from setuptools import find_packages, setup

# As in rlhpc/share/__init__.py. An editable install finds them where they are, and without them is one folder on the path: a
# clone called rlhpc in the working directory then does not hide the package, as it would where an import hook finds it.
SHARED = () if "editable_wheel" in sys.argv else ("workflow", "profiles", "configs", "config", "examples")

setup(
    packages=[*find_packages(include=["rlhpc", "rlhpc.*"]), *(f"rlhpc.share.{name}" for name in SHARED)],
    package_dir={"": ".", **{f"rlhpc.share.{name}": name for name in SHARED}},
    package_data={
        "": ["py.typed", "*.json", "*.html", "*.css", "*.js"],
        **{f"rlhpc.share.{name}": ["*", "**/*"] for name in SHARED},
    },
)
