#!/bin/sh
# Runs one part of the GPU benchmarks on a machine without network, from a checkout with wheels beside it:
#
#   benchmarks/gpu/on_machine.sh PART [RESULTS] [options of run.py]
#
# PYTHON names an interpreter with torch and Triton (default: python3), WHEELS the directory that `make gpu-wheels` filled.
# Nothing is installed outside of build/gpu-site.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
part=${1:?usage: on_machine.sh PART [RESULTS] [options of run.py]}
results=${2:-build/gpu/results}
shift
[ $# -eq 0 ] || shift
python=${PYTHON:-python3}
site=$root/build/gpu-site
wheels=${WHEELS:-gpu-wheels}
if [ ! -d "$site" ]; then
  mkdir -p "$site"
  if ls "$wheels"/*.whl >/dev/null 2>&1; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
  fi
  # fibc runs from the checkout; this is what importlib.metadata asks for.
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
  mkdir -p "$site/fibc-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: fibc\nVersion: %s\n' "$version" >"$site/fibc-$version.dist-info/METADATA"
fi
PYTHONPATH=$root:$site${PYTHONPATH:+:$PYTHONPATH}
FIBC_CACHE_DIR=${FIBC_CACHE_DIR:-$root/build/gpu/cache}
PYTHONUNBUFFERED=1
export PYTHONPATH FIBC_CACHE_DIR PYTHONUNBUFFERED
exec "$python" benchmarks/gpu/run.py "$part" --results "$results" "$@"
