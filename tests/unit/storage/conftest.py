import pytest

from tests.s3 import cache  # noqa: F401  (a fixture)


@pytest.fixture
def url(tmp_path):
    """An empty place in the object storage of this process."""
    return f"memory://bucket/{tmp_path.name}"
