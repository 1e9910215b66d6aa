#!/bin/sh
# Downloads the wheels in wheels.txt for a GPU machine without network:
#
#   benchmarks/gpu/wheels.sh 3.12 [directory]
#
# pydantic and pydantic-core are taken in versions that fit each other: pip resolves them together first.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${1:?usage: wheels.sh VERSION-OF-PYTHON [directory], for example 3.12}
target=${2:-gpu-wheels}
case $python in
  3.[0-9]*) ;;
  *) echo "PYTHON: must be the version on the GPU machine, got $python (accepted: for example 3.12)" >&2; exit 2 ;;
esac
mkdir -p "$target"
rm -f "$target"/*.whl
names=$(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$here/wheels.txt")
platforms=
for glibc in 28 27 17 12 5; do platforms="$platforms --platform manylinux_2_${glibc}_x86_64"; done
for old in manylinux2014 manylinux1; do platforms="$platforms --platform ${old}_x86_64"; done
# shellcheck disable=SC2086  # lists of words
download() { ${PIP:-python3 -m pip} download --quiet --disable-pip-version-check --only-binary=:all: \
  --python-version "$python" --implementation cp $platforms --dest "$target" "$@"; }
# With their needs, so that versions fit; then what is not listed goes again: the machine has it.
download $names
for file in "$target"/*.whl; do
  base=$(basename "$file" | sed -e 's/-.*//' | tr 'A-Z_' 'a-z-')
  echo "$names" | tr 'A-Z_' 'a-z-' | sed -e 's/[^a-z0-9-].*//' | grep -qx -- "$base" || rm -f "$file"
done
for name in $names; do
  base=$(echo "$name" | tr 'A-Z_' 'a-z-' | sed -e 's/[^a-z0-9-].*//')
  ls "$target" | tr 'A-Z_' 'a-z-' | grep -q "^$base-[0-9]" || download --no-deps "$name"
done
ls -l "$target"
