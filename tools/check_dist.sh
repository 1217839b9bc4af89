#!/bin/sh
# check_dist.sh PYTHON: builds sdist and wheel into dist/ and tries each in a fresh environment.
# PYTHON has the `build` package. The wheel is built from the sdist, isolated, as pip would.
set -eu

python=$1
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
rm -f dist/jax_moe-*
"$python" -m build --outdir dist . >build-dist.log 2>&1 || { cat build-dist.log >&2; exit 1; }
rm -f build-dist.log

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tools/make_venv.sh "$scratch/venv"
pip="$scratch/venv/bin/python -m pip --disable-pip-version-check --quiet"

for file in dist/jax_moe-*.whl dist/jax_moe-*.tar.gz; do
  $pip uninstall --yes jax_moe
  $pip install -c tests/constraints-0.11.2.txt "$file"
  (cd "$scratch" && venv/bin/python -P "$root/tools/smoke.py")
  echo "$file installs and works"
done
