#!/usr/bin/env python3
# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Checks what the repository promises of its own sources: layers, output, size, licence lines, ASCII.

Prints one line a violation and exits 1 if there are any. `--self-test` checks the checks.
"""

import posixpath
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".py", ".sh", ".build", ".txt", ".map", ".toml"}
CODE = {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh"}
WARN_LINES, MAX_LINES = 400, 450
TOP_LEVEL = {
    "meson.build", "meson_options.txt", "src", "include", "abi", "bindings", "tests", "tools",
    "CHANGELOG.md", "README.md", "pyproject.toml",
}  # fmt: skip

# Folder -> the folders of this repository that it may include from, besides its own.
LAYERS = {
    "include/xent": {"include/xent"},
    "src/common": {"include/xent"},
    "src/core": {"include/xent", "src/common"},
    "src/cpu": {"include/xent", "src/common"},
    "src/cuda": {"include/xent", "src/common"},
}
CUDA_HEADER = re.compile(r"^(cuda|cub/|cooperative_groups|nccl|mma\.h|cu(blas|rand|pti))")
# A library neither prints nor ends its caller's process.
FORBIDDEN_CALL = re.compile(
    r"(?<![\w.>])(?:std::)?(printf|fprintf|puts|fputs|putchar|perror|abort|exit|_Exit|quick_exit|terminate)\s*\("
    r"|\bstd::(cout|cerr|clog)\b|\bassert\s*\("
)
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def owner(including, included, exists):
    """The folder that an include names, or None where it is not of this repository."""
    for base in (posixpath.dirname(including), "src", "include"):
        path = posixpath.normpath(posixpath.join(base, included))
        if exists(path):
            return posixpath.dirname(path)
    return None


def layer_of(path):
    return next((layer for layer in LAYERS if path.startswith(layer + "/")), None)


def check_file(path, text, exists):
    """Yields (is_error, message) for one file."""
    suffix = Path(path).suffix
    is_script = text.startswith("#!")
    if suffix in SOURCE or is_script or path.endswith("meson.build"):
        bad = next((c for c in text if ord(c) > 126 or (ord(c) < 32 and c not in "\n\t")), None)
        if bad is not None:
            yield True, f"not ASCII: U+{ord(bad):04X}"
    licensed = suffix in CODE or suffix in {".py", ".sh", ".build", ".map"} or is_script
    if licensed and not all(
        f"SPDX-{key}" in "\n".join(text.splitlines()[:4]) for key in ("FileCopyrightText", "License-Identifier")
    ):
        yield True, "lacks the two SPDX lines at its top"
    lines = text.count("\n")
    if (suffix in CODE or suffix == ".py" or is_script) and lines > WARN_LINES:
        yield lines > MAX_LINES, f"{lines} lines; a file of one job has about {WARN_LINES}"
    layer = layer_of(path)
    if layer is None or suffix not in CODE:
        return
    for included in INCLUDE.findall(text):
        if CUDA_HEADER.match(included) and not (layer == "src/cuda" and suffix in {".cu", ".cuh"}):
            yield True, f"includes the CUDA header {included} (only .cu and .cuh of src/cuda may)"
        folder = owner(path, included, exists)
        if folder is not None and not any(
            folder == allowed or folder.startswith(allowed + "/") for allowed in LAYERS[layer] | {layer}
        ):
            yield True, f"{layer} includes {included} of {folder}"
    code = COMMENT_OR_STRING.sub(lambda m: "\n" * m.group().count("\n"), text)
    for number, line in enumerate(code.splitlines(), 1):
        call = FORBIDDEN_CALL.search(line)
        if call:
            yield True, f"line {number}: {call.group().strip()} in the library"


def self_test():
    spdx = "// SPDX-FileCopyrightText: a\n// SPDX-License-Identifier: b\n"
    files = {"src/cuda/a.cuh", "src/core/b.hpp", "src/common/view.hpp", "include/xent/xent.h"}
    cases = [
        ("src/cpu/x.cpp", spdx + '#include "core/b.hpp"\n', "src/cpu includes core/b.hpp of src/core"),
        ("src/core/x.cpp", spdx + '#include "../cuda/a.cuh"\n', "src/core includes ../cuda/a.cuh"),
        ("src/common/x.hpp", spdx + '#include "core/b.hpp"\n', "src/common includes"),
        ("src/cuda/x.hpp", spdx + "#include <cuda_runtime.h>\n", "CUDA header"),
        ("src/core/x.cpp", spdx + '  std::printf("x");\n', "printf( in the library"),
        ("src/core/x.cpp", spdx + "  std::cerr << 1;\n", "std::cerr in the library"),
        ("src/core/x.cpp", spdx + "  abort();\n", "abort( in the library"),
        ("src/core/x.cpp", "int x;\n", "SPDX"),
        ("src/core/x.cpp", spdx + "// \u00b5\n", "U+00B5"),
        ("src/core/x.cpp", spdx + "\n" * MAX_LINES, "lines; a file"),
    ]
    for path, text, wanted in cases:
        found = [message for error, message in check_file(path, text, files.__contains__) if error]
        assert any(wanted in message for message in found), (path, wanted, found)
    good = (
        spdx + '#include "common/view.hpp"\n#include <xent/xent.h>\n// printf(\nvsnprintf(b, 1, "abort()"); x.exit();'
    )
    found = list(check_file("src/core/x.cpp", good, files.__contains__))
    assert not found, found


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout.decode()  # fmt: skip
    errors = 0
    seen_top = set()
    for path in filter(None, listed.split("\0")):
        seen_top.add(path.split("/")[0])
        file = ROOT / path
        if not file.is_file() or file.is_symlink():
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for is_error, message in check_file(path, text, lambda p: (ROOT / p).is_file()):
            errors += is_error
            print(f"{path}: {'' if is_error else 'warning: '}{message}")
    for name in sorted(n for n in seen_top - TOP_LEVEL if not n.startswith(".")):
        errors += 1
        print(f"{name}: not one of the top-level entries")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
