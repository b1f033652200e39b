"""Reach object storage by URL, `s3://BUCKET/PATH` or `gs://BUCKET/PATH`, and read datasets of Hugging Face.

fsspec does the work, with s3fs for S3 and servers of its protocol, and gcsfs for Google's storage. Both promise that an
object appears complete or not at all and that a reader sees the newest one; neither can rename a folder.
huggingface_hub brings `hf://datasets/OWNER/NAME[@REVISION]/PATH`, which is read alone.
"""

import contextlib
import fnmatch
import glob
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import IO, Any

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import printable
from ultrascale_jax.launch.failures import NotNow

WORKERS = 16
"""Threads that move objects: a connection to object storage has a fraction of a host's bandwidth."""

EXTRAS = {"s3": "s3", "gs": "gcs"}
"""Extra of this package for each scheme."""

CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or give the machine a service account",
    "hf": "set HF_TOKEN, or `hf auth login`",
}

DENIED = (401, 403)
"""HTTP's codes for a caller who is unknown, or may not do this."""


class RemoteError(NotNow, OSError):
    """A request to object storage failed; a restart may help."""


class RemoteRefused(RemoteError):
    """The bucket, the credentials or a right is missing, which lasts until somebody fixes it."""

    exit_code = UserError.exit_code


def is_url(text: str) -> bool:
    """Return whether `text` begins like a URL: `s3://`."""
    return scheme_of(text) is not None


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URL, as `s3`; None for a path."""
    match = re.match(r"([a-z][a-z0-9+.-]+)://", text)
    return match[1] if match else None


@contextlib.contextmanager
def asking(url: str) -> Iterator[None]:
    """Turn the errors of the libraries into `RemoteError`; that of a missing object stays `FileNotFoundError`."""
    try:
        yield
    except (FileNotFoundError, UserError):
        raise
    except Exception as error:  # The libraries pass on any error of their own libraries.
        raise _explained(url, error) from error


def _explained(url: str, error: Exception) -> RemoteError:
    words = printable(error) or type(error).__name__
    if "Credentials" in type(error).__name__:
        fix = CREDENTIALS.get(scheme_of(url) or "", "give some")
        return RemoteRefused(f"{url}: no credentials ({words}); {fix}")
    if isinstance(error, PermissionError) or getattr(error, "code", None) in DENIED:
        fix = "the credentials need the rights to list, read, write and delete there"
        return RemoteRefused(f"{url}: access denied ({words}); {fix}")
    return RemoteError(f"{url}: {words}")


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for `url`, and the path of `url` in it.

    Raises `UserError` that names the extra to install.
    """
    import fsspec

    scheme = scheme_of(url) or "file"
    try:
        # No listing is remembered, so that this host sees the objects that others write.
        filesystem = fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        install = f"pip install 'ultrascale_jax[{extra}]'" if extra else printable(error)
        raise UserError(f"{url}: {scheme}:// needs more packages; {install}") from error
    except ValueError as error:
        raise UserError(
            f"{url}: {printable(error)}; write s3://BUCKET/PATH, gs://... or hf://datasets/..."
        ) from error
    return filesystem, filesystem._strip_protocol(url)


class Remote:
    """A folder of object storage. Methods raise `RemoteError`."""

    def __init__(self, url: str):
        """Open `url`, without asking for anything. Raises `UserError` where a package is missing."""
        self.url = url.rstrip("/")
        with asking(self.url):
            self._fs, self._root = open_filesystem(self.url)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def files(self, below: str = "") -> dict[str, int]:
        """Return the names below the folder, as `a/b`, or below its folder `below`, and their sizes in bytes.

        Raises `RemoteRefused` for a name that leads out of a folder on a disk.
        """
        try:
            with asking(self.url):
                entries = self._fs.find(self._path(below).rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        sizes = {
            path.removeprefix(self._root).lstrip("/"): info["size"]
            for path, info in entries.items()
        }
        for name in sizes:
            if not set(name.split("/")).isdisjoint({"", ".", ".."}) or "\0" in name:
                raise RemoteRefused(f"{self.url}: holds an object named {name!r}; remove it")
        return sizes

    def read(self, name: str, most: int = 1 << 24) -> bytes | None:
        """Return the content of an object of at most `most` bytes; None if there is none."""
        url, path = f"{self.url}/{name}", self._path(name)
        try:
            with asking(url):
                size = self._fs.info(path)["size"]
                if size > most:
                    raise RemoteRefused(f"{url}: has {size:,} bytes, more than it should")
                return self._fs.cat_file(path)
        except FileNotFoundError:
            return None

    def modified(self, name: str) -> float:
        """Return when an object was written, in unix seconds."""
        with asking(f"{self.url}/{name}"):
            return self._fs.modified(self._path(name)).timestamp()

    def write(self, name: str, content: bytes) -> None:
        """Write an object, or replace it."""
        with self._writing(name):
            self._fs.pipe_file(self._path(name), content)

    def upload(self, path: Path, name: str) -> None:
        """Write a file's content as an object."""
        size = path.stat().st_size
        with self._writing(name):
            if size:
                self._fs.put_file(str(path), self._path(name))
            else:
                self._fs.pipe_file(self._path(name), b"")

    def download(self, name: str, path: Path) -> None:
        """Write an object's content as a file, whose folder must exist. Raises `RemoteError` if it is missing."""
        try:
            with asking(f"{self.url}/{name}"):
                self._fs.get_file(self._path(name), str(path))
        except FileNotFoundError:
            raise RemoteError(f"{self.url}/{name}: there is no such object") from None

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; one that is gone already is no error."""
        for name in names:
            with contextlib.suppress(FileNotFoundError), asking(f"{self.url}/{name}"):
                self._fs.rm_file(self._path(name))

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        if scheme_of(self.url) == "hf":
            raise RemoteRefused(
                f"{self.url}: hf:// is read alone; write to a folder, s3:// or gs://"
            )
        try:
            with asking(f"{self.url}/{name}"):
                yield
        except FileNotFoundError:
            raise RemoteRefused(f"{self.url}: there is no such bucket; make it first") from None


@dataclass(frozen=True, order=True)
class RemoteFile:
    """An object with the part of `Path` that a reader of files needs."""

    url: str
    size: int

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.url).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    def stat(self) -> SimpleNamespace:
        """Return the size as `os.stat` does."""
        return SimpleNamespace(st_size=self.size)

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open the object for reading, block by block; `asking` converts the error of a read."""
        with asking(self.url):
            filesystem, path = open_filesystem(self.url)
            return filesystem.open(path, mode)


def matching(pattern: str) -> list[RemoteFile]:
    """Return the objects that match a URL with `*`, `**` and `?`, in order, as `data.files` matches files.

    The longest beginning that exists is taken as it is, and hidden objects are left out. Raises `RemoteError`.
    """
    scheme = scheme_of(pattern)
    try:
        with asking(pattern):
            filesystem, path = open_filesystem(pattern)
            whole = PurePosixPath(path)
            # The Hub lists nothing above a repository, as datasets/org/name.
            folders = whole.parents[: -3 if scheme == "hf" else -1]
            begins = filter(path.startswith, map(str, (whole, *folders)))
            existing = next(filter(filesystem.exists, begins), "")
            literal = glob.escape(existing) + path.removeprefix(existing)
            entries = filesystem.glob(literal, detail=True)
    except FileNotFoundError:
        return []
    named = [part for part in whole.parts if part.startswith(".")]
    files = (
        (name, info)
        for name, info in entries.items()
        if info["type"] == "file" and not _is_hidden(name, named)
    )
    return sorted(
        RemoteFile(f"{scheme}://{name.lstrip('/')}", info["size"]) for name, info in files
    )


def _is_hidden(name: str, named: list[str]) -> bool:
    """Return whether a part of a name begins with a dot, and none of the patterns `named` asks for it."""
    hidden = (part for part in name.split("/") if part.startswith("."))
    return any(
        not any(fnmatch.fnmatchcase(part, one) or part == one for one in named) for part in hidden
    )
