"""Move token shards between object storage and a disk.

Training maps shards into memory and checks every byte before the first step, so it fetches all of them: into a folder
of the cache that is named after the index. Another index has another folder, and the same one in another bucket the
same.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ultrascale_jax.config import UserError
from ultrascale_jax.data.shards import MOST_INDEX_BYTES, load_index
from ultrascale_jax.launch.events import say
from ultrascale_jax.storage.cache import cache_folder, fetch, name_of, require_room, write_shared
from ultrascale_jax.storage.remote import WORKERS, Remote
from ultrascale_jax.units import size

INDEX = "index.json"

BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files that `prepare-data` may write beside the shards."""


def fetch_shards(url: str, *, quiet: bool = False) -> Path:
    """Fetch the token shards at `url` unless this host has them, and return their folder.

    Processes of one host share the work. Raises `UserError` for a missing index, an object that is not what the index
    says, or a disk that is too small, and `RemoteError`.
    """
    remote = Remote(url)
    content = remote.read(INDEX, MOST_INDEX_BYTES)
    if content is None:
        raise UserError(f"{INDEX} is missing, or the bucket is")
    folder = cache_folder("tokens", name_of(content))
    for name, text in ((INDEX, content), *((name, remote.read(name)) for name in BESIDE)):
        if text is not None and not (folder / name).is_file():
            write_shared(folder / name, text)
    index = load_index(folder)
    missing = [
        (f"{shard.name}.{kind}", size, getattr(shard, f"{kind}_sha256"))
        for shard in index.shards
        for kind, size in shard.sizes(index.token_dtype).items()
        if not (folder / f"{shard.name}.{kind}").is_file()
    ]
    if not missing:
        return folder
    total = sum(size for _, size, _ in missing)
    fix = "make room, or name a larger disk by XDG_CACHE_HOME"
    require_room(folder, total, f"fetching {url}", fix)
    if not quiet:
        say(f"fetching {len(missing)} files ({size(total)}) of {url} to {folder}")
    # Each process of the host begins elsewhere, and finds what the others have fetched.
    first = os.getpid() % len(missing)
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = [
            pool.submit(fetch, remote, name, folder / name, size=size, sha256=sha256)
            for name, size, sha256 in missing[first:] + missing[:first]
        ]
        try:
            for future in waiting:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return folder


def fetch_tokenizer(url: str) -> Path:
    """Fetch the tokenizer.json at `url`, with the chat template beside it, and return its path on this host.

    Raises `UserError` if there is none, and `RemoteError`.
    """
    place, _, name = url.rpartition("/")
    remote, folder = Remote(place), cache_folder("tokenizers", name_of(url))
    for one in (name, *BESIDE[1:]):
        content = remote.read(one)
        if content is None and one == name:
            raise UserError(f"data.tokenizer={url!r}: there is no such object")
        if content is not None:
            write_shared(folder / one, content)
    return folder / name


def upload_shards(folder: Path, url: str) -> None:
    """Upload what `prepare-data` wrote into `folder`, the index last; objects of the same size stay.

    Raises `UserError` if there are shards of another index at `url`, and `RemoteError`.
    """
    remote, index = Remote(url), load_index(folder)
    there, own = remote.files(), (folder / INDEX).read_bytes()
    if INDEX in there and remote.read(INDEX, MOST_INDEX_BYTES) != own:
        raise UserError(f"out={url!r}: has other shards; remove them or choose another --out")
    sizes = {
        f"{shard.name}.{kind}": size
        for shard in index.shards
        for kind, size in shard.sizes(index.token_dtype).items()
    }
    sizes |= {name: -1 for name in BESIDE if (folder / name).is_file()}
    with ThreadPoolExecutor(WORKERS) as pool:
        names = [name for name, size in sizes.items() if there.get(name) != size]
        list(pool.map(lambda name: remote.upload(folder / name, name), names))
    remote.write(INDEX, own)
