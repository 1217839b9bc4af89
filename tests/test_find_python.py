"""tools/find_python.sh: a candidate counts only once it has run, and the order of the places."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "find_python.sh"


@pytest.fixture
def place(tmp_path):
    """A world of its own: a PATH with nothing but what the script needs, and a home."""
    path = tmp_path / "bin"
    path.mkdir()
    for tool in ("sh", "cat"):
        (path / tool).symlink_to(shutil.which(tool) or pytest.fail(f"no {tool}"))
    return tmp_path


def put(place, name, body):
    """Puts a shell script at `place`/`name`; it notes its name in used.txt when it is run."""
    file = place / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\necho {name} >>{place}/used.txt\n{body}\n")
    file.chmod(0o755)
    return file


GOOD = f'exec "{sys.executable}" "$@"'
BROKEN_SHIM = 'echo "pyenv: command not found" >&2; exit 127'
TOO_OLD = "exit 1"  # what the script's own check answers under an old Python


def find(place, **environment):
    variables = {"PATH": str(place / "bin"), "HOME": str(place)} | environment
    result = subprocess.run(
        [str(SCRIPT)], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    used = place / "used.txt"
    return result, used.read_text().split() if used.exists() else []


def check_found(result):
    assert result.returncode == 0, result.stderr
    found = result.stdout.strip()
    assert os.access(found, os.X_OK)
    version = subprocess.run([found, "-c", "import sys; assert sys.version_info >= (3, 12)"])
    assert version.returncode == 0


def test_broken_shims_and_old_pythons_are_passed_over(place):
    put(place, "bin/python3.12", BROKEN_SHIM)
    put(place, "bin/python3", TOO_OLD)
    put(place, "bin/python3.13", GOOD)
    result, used = find(place)
    check_found(result)
    assert used == ["bin/python3.12", "bin/python3.13"]


def test_pyenv_versions_are_found_without_being_active(place):
    put(place, "bin/python3", TOO_OLD)
    put(place, ".pyenv/versions/3.11.9/bin/python", GOOD)  # by its folder's name too old
    put(place, ".pyenv/versions/3.13.0/bin/python", GOOD)
    result, used = find(place)
    check_found(result)
    assert used[-1] == ".pyenv/versions/3.13.0/bin/python"


def test_uv_is_asked_to_install_where_it_has_none(place):
    python = put(place, "fetched/python", GOOD)
    put(
        place,
        "bin/uv",
        f'case "$2" in install) : >{place}/installed ;;\n'
        f"find) [ -e {place}/installed ] && echo {python} ;; esac",
    )
    result, used = find(place)
    check_found(result)
    assert used == ["bin/uv", "bin/uv", "bin/uv", "fetched/python"]


def test_where_there_is_none_it_says_what_to_install(place):
    put(place, "bin/python3", TOO_OLD)
    result, _ = find(place)
    assert result.returncode == 1 and not result.stdout
    for words in ("looked at: python3", "apt-get install", "pyenv install 3.12", "PYTHON="):
        assert words in result.stderr


def test_a_named_python_insists(place):
    put(place, "bin/python3.12", GOOD)
    result, used = find(place, PYTHON=str(put(place, "mine/python", TOO_OLD)))
    assert result.returncode == 1 and "mine/python is no Python >= 3.12" in result.stderr
    assert used == ["mine/python"]
    result, used = find(place, PYTHON=str(put(place, "mine/python", GOOD)))
    check_found(result)
    assert used[-1] == "mine/python"
