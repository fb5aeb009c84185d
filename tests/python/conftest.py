# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Seeds: fresh in every run, printed, and set by XENT_TEST_SEED to repeat one."""

import os
import random
import zlib

import numpy as np
import pytest

SEED = int(os.environ.get("XENT_TEST_SEED") or random.SystemRandom().randrange(2**32))


def pytest_report_header():
    return f"XENT_TEST_SEED={SEED}"


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"repeat with XENT_TEST_SEED={SEED}")


@pytest.fixture
def rng(request):
    return np.random.default_rng([SEED, zlib.crc32(request.node.nodeid.encode())])
