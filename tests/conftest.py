"""shared_fixtures.py is for the processes that run tests. The one that hands tests out to others imports no PyTorch."""

import os

import pytest

# Before PyTorch loads OpenMP: a thread that waits sleeps. Spinning, two of them on a core that is shared with anything
# else make these small models ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_configure(config: pytest.Config) -> None:
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("shared_fixtures")
