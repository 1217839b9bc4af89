#!/bin/sh
# check_dist.sh PYTHON WHEEL: puts the wheel and an sdist into dist/ and tries each in a fresh
# environment. PYTHON has pyproject.toml's build requirements. Installing the sdist is an isolated
# build, as for a user; a file missing there shows, as both must install the same files.
set -eu

python=$1 wheel=$2
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
export PIP_COMPILE=0 PIP_DISABLE_PIP_VERSION_CHECK=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

rm -f dist/jax_moe-*
"$python" -c 'from scikit_build_core.build import build_sdist as b; b("dist")' >"$scratch/log" 2>&1 \
  || { cat "$scratch/log" >&2; exit 1; }
cp "$wheel" dist

tools/make_venv.sh "$scratch/venv"
venv="$scratch/venv/bin/python"
for file in dist/jax_moe-*.whl dist/jax_moe-*.tar.gz; do
  "$venv" -m pip install --quiet -c tests/constraints-0.11.2.txt "$file"
  (cd "$scratch" && "$venv" -P "$root/tools/smoke.py")
  "$venv" -m pip show --files jax_moe >"$scratch/files.${file##*.}"
  echo "$file installs and works"
  "$venv" -m pip uninstall --quiet --yes jax_moe
done
diff "$scratch/files.whl" "$scratch/files.gz"
