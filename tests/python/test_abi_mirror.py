# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The ctypes mirror is what the header says: regenerated, and measured by a C compiler."""

import ctypes
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from libxent import _abi
from libxent._library import lib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def c_flags():
    """Include flags for xent.h and dlpack.h, from the source tree, pkg-config or the DLPack wheel."""
    flags = [f"-I{ROOT / 'include'}"]
    if shutil.which("pkg-config"):
        found = subprocess.run(["pkg-config", "--cflags", "xent"], capture_output=True, text=True)
        flags += found.stdout.split()
    wheel = subprocess.run(
        [sys.executable, "-m", "tvm_ffi.config", "--dlpack-includedir"], capture_output=True, text=True
    )
    if wheel.returncode == 0:
        flags.append(f"-I{wheel.stdout.strip()}")
    return flags


def test_mirror_is_what_the_generator_writes():
    spec = importlib.util.spec_from_file_location("gen_ctypes", ROOT / "tools" / "gen_ctypes.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert pathlib.Path(_abi.__file__).read_text(encoding="ascii") == generator.generate()


def test_mirror_has_the_layout_of_c(tmp_path):
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.skip("no C compiler")
    lines, want = [], []
    for name, struct in _abi.STRUCTS.items():
        tag = f"struct {name}" if name == "DLManagedTensorVersioned" else name
        lines.append(f'printf("{name} %zu\\n", sizeof({tag}));')
        want.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            size = f"sizeof((({tag} *)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({tag}, {field}), {size});')
            want.append(f"{name}.{field} {getattr(struct, field).offset} {getattr(struct, field).size}")
    for name, value in vars(_abi).items():
        if name.startswith("XENT_"):
            lines.append(f'printf("{name} %lld\\n", (long long)({name}));')
            want.append(f"{name} {value}")
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stdio.h>\n#include <xent/xent.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    program = tmp_path / "layout"
    subprocess.run([compiler, "-std=c99", *c_flags(), str(source), "-o", str(program)], check=True)
    got = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert got == want


def test_library_has_every_function():
    for name in _abi.FUNCTIONS:
        assert getattr(lib, name)


def test_status_names_are_the_constants():
    for name in ("XENT_OK", "XENT_INVALID_ARGUMENT", "XENT_WORKSPACE_TOO_SMALL", "XENT_INTERNAL"):
        assert lib.xent_status_name(getattr(_abi, name)).decode() == name
    assert lib.xent_status_name(12345) == b"XENT_UNKNOWN"


@pytest.mark.parametrize("minor", ["9", "10", "11", "12", "13", "14"])
def test_package_imports_without_numpy_on_any_python(minor):
    """Nothing but the standard library, on the oldest Python promised and on all newer ones that are here."""
    python = shutil.which(f"python3.{minor}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no Python 3.{minor} here")
    package = pathlib.Path(_abi.__file__).parents[1]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import libxent; "
        "assert 'numpy' not in sys.modules; libxent.Plan(max_rows=1, vocab=3); print(libxent.version())"
    )
    environment = dict(os.environ, LIBXENT_LIBRARY=lib._name)
    got = subprocess.run(
        [python, "-S", "-c", code, str(package)], capture_output=True, text=True, env=environment, cwd="/"
    )
    assert got.returncode == 0, got.stderr
    assert got.stdout.strip().count(".") == 2
