#!/bin/sh
# make_venv.sh DIR: makes DIR a virtual environment of a Python >= 3.12, or leaves a good one alone.
set -eu

dir=$1
good='import sys; sys.exit(sys.version_info < (3, 12) or sys.prefix == sys.base_prefix)'

if [ -e "$dir/bin/python" ] && "$dir/bin/python" -c "$good" 2>/dev/null; then
  echo "using the virtual environment $dir ($("$dir/bin/python" --version))"
else
  if [ -e "$dir/bin/python" ] && "$dir/bin/python" -c '' 2>/dev/null; then
    echo "$dir is not a virtual environment of Python >= 3.12: move it away, then try again." >&2
    exit 1
  fi
  python=$("$(dirname "$0")/find_python.sh")
  echo "making the virtual environment $dir with $python"
  "$python" -m venv --clear "$dir"  # --clear: what is there does not run
fi
"$dir/bin/python" -m pip --version >/dev/null 2>&1 || "$dir/bin/python" -m ensurepip --upgrade
