#!/bin/sh
# Prints the path of a Python >= 3.12 that can make a virtual environment and build an extension.
# Looks at $PYTHON (which insists), then PATH, pyenv's versions, and uv (which may fetch one).
# A candidate counts only once it has run: pyenv leaves shims on PATH for versions that are not active.
set -u

tried=""

# accept CANDIDATE: prints the interpreter's real path and succeeds if it will do.
accept() {
  found=$("$1" - 2>/dev/null <<'EOF'
import os, sys, sysconfig
if sys.version_info < (3, 12):
    sys.exit("is Python %d.%d" % sys.version_info[:2])
import ensurepip, venv
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("lacks Python.h")
base = getattr(sys, "_base_executable", sys.executable)  # not the active environment's
print(base if os.path.exists(base) else sys.executable)
EOF
  ) && [ -n "$found" ] && printf '%s\n' "$found" && return 0
  tried="$tried $1"
  return 1
}

if [ -n "${PYTHON:-}" ]; then
  accept "$PYTHON" && exit 0
  echo "PYTHON=$PYTHON is no Python >= 3.12 with venv, ensurepip and Python.h; unset it to search." >&2
  exit 1
fi

for name in python3.12 python3.13 python3.14 python3 python; do
  if command -v "$name" >/dev/null 2>&1; then accept "$name" && exit 0; fi
done

for version in 3.12 3.13 3.14; do
  for candidate in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
    if [ -x "$candidate" ]; then accept "$candidate" && exit 0; fi
  done
done

if command -v uv >/dev/null 2>&1; then
  candidate=$(uv python find --system '>=3.12' 2>/dev/null) && accept "$candidate" && exit 0
  echo "No Python >= 3.12 yet: asking uv for Python 3.12." >&2
  uv python install 3.12 >&2 && candidate=$(uv python find --system 3.12) \
    && accept "$candidate" && exit 0
fi

cat >&2 <<EOF
No Python >= 3.12 with venv, ensurepip and Python.h was found (looked at:${tried:- nothing}).
Install one of these, then run the same command again:
  Debian, Ubuntu   apt-get install python3.12 python3.12-venv python3.12-dev
  Fedora           dnf install python3.12 python3.12-devel
  pyenv            pyenv install 3.12
  uv               uv python install 3.12
or name an interpreter: make test PYTHON=/path/to/python3.12
EOF
exit 1
