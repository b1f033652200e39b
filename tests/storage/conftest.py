import pytest

from tests import s3


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server on loopback; the environment of its clients."""
    with s3.serving() as environment:
        yield environment


@pytest.fixture(params=["memory", "s3"])
def url(request, tmp_path):
    """An empty place in object storage, in this process or on a server."""
    name = f"{s3.BUCKET}/{tmp_path.name}"
    if request.param == "s3":
        request.getfixturevalue("s3_server")
    return f"{request.param}://{name}"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache that is empty."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
