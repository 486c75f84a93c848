"""What the tests of whole runs train."""

import pytest

from checkpoint.trained import small_job


@pytest.fixture
def job(tmp_path):
    return small_job(tmp_path)
