"""A real S3 server on loopback (moto's), and the fixtures of tests with object storage."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[dict[str, str]]:
    """A server on loopback with an empty `BUCKET`; the environment of its clients, which this process has too."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        client().mkdir(BUCKET)
        yield environment
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def client():
    """The file system of the server in this process's environment."""
    return fsspec.filesystem("s3", use_listings_cache=False)


@pytest.fixture(params=["memory", "s3"])
def url(request, tmp_path) -> str:
    """An empty place in object storage, in this process or on a server."""
    if request.param == "s3":
        request.getfixturevalue("s3_server")
    return f"{request.param}://{BUCKET}/{tmp_path.name}"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """A cache that is empty."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
