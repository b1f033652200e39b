"""Move token shards between object storage and a disk.

A host fetches the index first, and a shard when a row needs it: into a folder of the cache that is named after the
index. Another index has another folder, and the same one in another bucket the same.
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ultrascale_jax.config import UserError
from ultrascale_jax.data.corpus import Fetch
from ultrascale_jax.data.shards import INDEX, SHARD, TABLE, load_index, shard_name
from ultrascale_jax.launch.events import say
from ultrascale_jax.storage.cache import cache_folder, fetch, name_of, require_room, write_shared
from ultrascale_jax.storage.foreign import MOST_BYTES
from ultrascale_jax.storage.remote import WORKERS, Remote

SPARE_BYTES = 1 << 30
"""Bytes that stay free on the disk of the cache."""

EXTRA_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files that `prepare-data` may write into the folder of the shards."""


def open_remote(url: str, *, quiet: bool = False) -> tuple[Path, Fetch]:
    """Fetch the index of the token shards at `url`; return its folder on this host, and how to fetch a shard's file.

    Processes of one host share the work. Raises `UserError` for a missing index or one of another format, and
    `RemoteError`.
    """
    remote = Remote(url)
    content = remote.read(INDEX, MOST_BYTES)
    if content is None:
        raise UserError(f"{INDEX} is missing, or the bucket is")
    folder = cache_folder("tokens", name_of(content))
    for name, text in ((INDEX, content), *((name, remote.read(name)) for name in EXTRA_FILES)):
        if text is not None and not (folder / name).is_file():
            write_shared(folder / name, text)
    _fetch_table(remote, folder, content)
    index = load_index(folder)
    if not quiet:
        say(f"fetching shards of {url} to {folder} as rows need them")

    def get(number: int, kind: str) -> None:
        size, sha256 = index.files(number)[kind]
        path = folder / f"{shard_name(number)}.{kind}"
        if not (path.is_file() and path.stat().st_size == size):
            _make_room(folder, size, url)
            fetch(remote, path.name, path, size=size, sha256=sha256)

    return folder, get


def _fetch_table(remote: Remote, folder: Path, content: bytes) -> None:
    """Fetch the table of the index; `load_index` reports faults of the index."""
    try:
        entries = json.loads(content)
        size, sha256 = int(entries["shards"]) * SHARD.itemsize, str(entries["table_sha256"])
    except (ValueError, TypeError, KeyError):
        return
    fetch(remote, TABLE, folder / TABLE, size=size, sha256=sha256)


def _make_room(folder: Path, needed: int, url: str) -> None:
    """Remove the token files that were fetched first where the disk is short; who needs one fetches it again."""
    if shutil.disk_usage(folder).free >= needed + SPARE_BYTES:
        return
    files = sorted(folder.glob("*.tokens"), key=lambda path: path.stat().st_mtime)
    for path in files[: len(files) // 2]:
        path.unlink(missing_ok=True)
    fix = "make room, or name a larger disk by XDG_CACHE_HOME"
    require_room(folder, needed, f"fetching {url}", fix)


def fetch_tokenizer(url: str) -> Path:
    """Fetch the tokenizer.json at `url` and its chat template; return the path on this host.

    Raises `UserError` if there is none, and `RemoteError`.
    """
    place, _, name = url.rpartition("/")
    remote, folder = Remote(place), cache_folder("tokenizers", name_of(url))
    for one in (name, *EXTRA_FILES[1:]):
        content = remote.read(one)
        if content is None and one == name:
            raise UserError(f"data.tokenizer={url!r}: there is no such object")
        if content is not None:
            write_shared(folder / one, content)
    return folder / name


def upload_shards(folder: Path, url: str) -> None:
    """Upload the files that `prepare-data` wrote into `folder`, the index last; objects of the same size stay.

    Raises `UserError` if there are shards of another index at `url`, and `RemoteError`.
    """
    remote, index = Remote(url), load_index(folder)
    uploaded, content = remote.files(), (folder / INDEX).read_bytes()
    if INDEX in uploaded and remote.read(INDEX, MOST_BYTES) != content:
        raise UserError(f"out={url!r}: has other shards; remove them or choose another --out")
    sizes = {
        f"{shard_name(number)}.{kind}": size
        for number in range(index.shards.size)
        for kind, (size, _) in index.files(number).items()
    }
    sizes[TABLE] = index.shards.nbytes if INDEX in uploaded else -1
    sizes |= {name: -1 for name in EXTRA_FILES if (folder / name).is_file()}
    with ThreadPoolExecutor(WORKERS) as pool:
        names = [name for name, size in sizes.items() if uploaded.get(name) != size]
        list(pool.map(lambda name: remote.upload(folder / name, name), names))
    remote.write(INDEX, content)
