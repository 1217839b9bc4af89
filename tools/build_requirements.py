"""Prints pyproject.toml's build requirements, one a line, for a build without isolation."""

import pathlib
import tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())
print(*project["build-system"]["requires"], sep="\n")
