# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash

# Sourced by the tools: where things are, and the environment in which the built library is used.
#   XENT_PY      the Python interpreter that sees the package: .venv's, or the caller's XENT_PYTHON
#   XENT_PREFIX  where `meson install` puts library, headers, xent.pc and package
#   XENT_BUILD   the build folder of that library

XENT_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck disable=SC2034
XENT_BUILD=$XENT_ROOT/build/main
if [ -n "${XENT_PYTHON:-}" ]; then
  # An interpreter with packages of its own: nothing is installed into it.
  XENT_PY=$XENT_PYTHON
  XENT_PREFIX=$XENT_ROOT/build/prefix
  export PYTHONPATH=$XENT_PREFIX/python:$XENT_ROOT/build/site${PYTHONPATH:+:$PYTHONPATH}
else
  XENT_PY=$XENT_ROOT/.venv/bin/python
  XENT_PREFIX=$XENT_ROOT/.venv
fi
PATH=$(dirname "$XENT_PY"):$PATH
export PATH PKG_CONFIG_PATH=$XENT_PREFIX/lib/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$@"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

meson() { "$XENT_PY" -m mesonbuild.mesonmain "$@"; }

# quietly LOG COMMAND...: output to LOG, shown only when the command fails.
quietly() {
  local log=$1
  shift
  mkdir -p "$(dirname "$log")"
  "$@" >"$log" 2>&1 || { tail -n 60 "$log" >&2; return 1; }
}
