"""Read the copies of a run's checkpoints in object storage: `checkpoint.store`.

The copy of step n is the folder n with the checkpoint's files. Its manifest is written last: without it a folder is no
copy. Beside the steps lie the small files of the run directory, so that a copy is enough to go on with. A run whose
disk does not have the newest step fetches it, and then loads and checks it like any other. `uploads.py` makes copies.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ultrascale_jax.checkpoint import manifest
from ultrascale_jax.checkpoint.manifest import Damaged
from ultrascale_jax.checkpoint.run_metadata import config_from_dict
from ultrascale_jax.checkpoint.step_dirs import CORRUPT, METADATA, steps
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.config.foreign import parse_json
from ultrascale_jax.huggingface.files import ORIGINAL, TRAVELLING
from ultrascale_jax.launch.events import say
from ultrascale_jax.launch.run_files import (
    CHECKPOINTS,
    METRICS,
    folder_of,
    read_regular,
    write_atomic,
)
from ultrascale_jax.storage.cache import cache_folder, exclusive, name_of, require_room
from ultrascale_jax.storage.remote import WORKERS, Remote, is_url
from ultrascale_jax.units import size

CONFIG = "config.json"

BESIDE = (CONFIG, METRICS, ORIGINAL, *TRAVELLING)
"""Files of the run directory that are copied with every checkpoint."""

MOST_BESIDE_BYTES = 1 << 32
"""Largest of these that is fetched; a row of metrics has about 500 bytes."""

UPLOADING = "uploading.json"
"""Object in the folder of a step that is not whole: the manifest of what is uploaded, or nothing while it is removed.

Without it, or a manifest, a folder is somebody else's, and stays as it is.
"""

FETCHING = "fetching"
"""Folder beside the checkpoints for one that is being fetched."""


class Copies:
    """The copies of one run's checkpoints; the methods raise `RemoteError`."""

    def __init__(self, url: str):
        """Open the folder `url`, without asking for anything. Raises `UserError` where a package is missing."""
        self.remote = Remote(url)
        self.url = self.remote.url

    def steps(self) -> tuple[list[int], list[str]]:
        """Return the steps that have a whole copy, oldest first, and the names of those that were put aside."""
        files = self.remote.files()
        folders = {name.split("/")[0] for name in files if "/" in name}
        aside = sorted(name for name in folders if CORRUPT in name)
        return steps_in(files), aside

    def manifest(self, step: int) -> tuple[bytes, dict[str, int]]:
        """Return the manifest of a copy, and the sizes of its files by name.

        Raises `Damaged` where other files are there, or of another size.
        """
        content = self.remote.read(f"{step}/{manifest.NAME}", manifest.MOST_BYTES)
        if content is None:
            raise Damaged(f"{manifest.NAME} is missing")
        found = self.files(step)
        found = {name: found[name] for name in found if name not in (manifest.NAME, UPLOADING)}
        manifest.compare(found, manifest.parse(content))
        return content, found

    def files(self, step: int | str) -> dict[str, int]:
        """Return the names of the objects in the folder of `step`, and their sizes."""
        prefix = f"{step}/"
        found = self.remote.files(str(step))
        return {name.removeprefix(prefix): size for name, size in found.items()}

    def fetch_metadata(self, step: int, folder: Path) -> Path:
        """Begin to fetch a copy beside the checkpoints in `folder`: its metadata; return its place meanwhile.

        Raises `Damaged` if it has none.
        """
        name, place = f"{step}/{METADATA}", folder / FETCHING / str(step)
        content = self.remote.read(name, manifest.MOST_BYTES)
        if content is None:
            raise Damaged(f"{METADATA} is missing")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / METADATA).write_bytes(content)
        made = self.remote.modified(name)
        os.utime(place / METADATA, (made, made))
        return place

    def require_room(self, folder: Path, sizes: dict[str, int]) -> None:
        """Raise `UserError` where the disk of `folder` has no room for a copy."""
        require_room(
            folder, sum(sizes.values()), f"fetching a checkpoint of {self.url}", "make room"
        )

    def fetch(self, step: int, place: Path, names: Iterable[str]) -> None:
        """Fetch these files of a copy into `place`."""

        def download(name: str) -> None:
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self.remote.download(f"{step}/{name}", path)

        on_threads(download, names)

    def complete(self, place: Path, content: bytes) -> None:
        """Give a fetched copy its manifest and its place among the checkpoints, instead of one of that step."""
        write_atomic(place / manifest.NAME, content)
        target = place.parents[1] / place.name
        if target.exists():
            shutil.rmtree(target)
        place.rename(target)
        with contextlib.suppress(OSError):
            place.parent.rmdir()

    def put_aside(self, step: int) -> str:
        """Move a damaged copy to a folder of another name, which it returns."""
        taken = {name.split("/")[0] for name in self.remote.files()}
        number, aside = 1, f"{step}{CORRUPT}"
        while aside in taken:
            number += 1
            aside = f"{step}{CORRUPT}.{number}"
        names = self.files(step)
        on_threads(lambda name: self.remote.copy(f"{step}/{name}", f"{aside}/{name}"), names)
        self.remove(step)
        return aside

    def remove(self, step: int) -> None:
        """Remove a copy, whole or not, so that it is none from the first moment on."""
        self.remote.write(f"{step}/{UPLOADING}", b"")
        self.remote.remove([f"{step}/{manifest.NAME}"])
        others = (name for name in self.files(step) if name != UPLOADING)
        on_threads(lambda name: self.remote.remove([f"{step}/{name}"]), others)
        self.remote.remove([f"{step}/{UPLOADING}"])

    def saved_config(self) -> Config:
        """Return the configuration of the run whose copies these are. Raises `UserError` if it is missing."""
        content = self.remote.read(CONFIG)
        fix = f"holds no {CONFIG}; give the checkpoint.store of a training run"
        require(content is not None, "checkpoint.store", self.url, fix)
        return config_from_dict(parse_json(content or b"", f"{self.url}/{CONFIG}:"))

    def fetch_beside(self, run_dir: Path, *, anew: bool = False) -> None:
        """Write the small files of the run into `run_dir`, except those that are there unless `anew`."""
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in BESIDE:
            if anew or not (run_dir / name).exists():
                content = self.remote.read(name, MOST_BESIDE_BYTES)
                if content is not None:
                    write_atomic(run_dir / name, content)


def fetch_run(url: str, run_dir: Path, step: int | None = None) -> None:
    """Make `run_dir` a run with one checkpoint: the copy of `step`, or the newest that is whole, fetched and verified.

    Raises `UserError` for a step without copy, `Damaged`, or `RemoteError`.
    """
    copies = Copies(url)
    found = copies.steps()[0]
    if not found:
        raise UserError(
            f"{copies.url}: holds no copy of a checkpoint; name a run's checkpoint.store"
        )
    require(step in (None, *found), "step", step, f"{copies.url} holds the steps {found}")
    copies.fetch_beside(run_dir, anew=True)
    for one in reversed(found) if step is None else [step]:
        try:
            _fetch_step(copies, one, folder_of(run_dir, CHECKPOINTS))
            return
        except Damaged as error:
            if step is not None or one == found[0]:
                raise Damaged(f"{copies.url}/{one}: {error}") from None
            say(f"warning: {copies.url}/{one} is damaged: {error}; using an older one")


def _fetch_step(copies: Copies, step: int, folder: Path) -> None:
    """Fetch a copy as the only checkpoint in `folder`, unless it is there."""
    content, sizes = copies.manifest(step)
    own = folder / str(step) / manifest.NAME
    if not (own.is_file() and read_regular(own) == content):
        for other in steps(folder):
            shutil.rmtree(folder / str(other))
        copies.require_room(folder, sizes)
        say(f"fetching {copies.url}/{step} ({size(sum(sizes.values()))}) to {folder}")
        place = copies.fetch_metadata(step, folder)
        copies.fetch(step, place, sizes)
        write_atomic(place / manifest.NAME, content)
        manifest.check(place)
        copies.complete(place, content)


def run_on_disk(run: str, step: int | None = None) -> str:
    """Return the run directory `run`; of a URL that in the cache of this host, with the checkpoint of `step`.

    Raises as `fetch_run`.
    """
    if not is_url(run):
        return run
    folder = cache_folder("runs", name_of(run))
    with exclusive(folder):
        fetch_run(run, folder, step)
    return str(folder)


def is_step(name: str) -> bool:
    """Return whether a folder's name is the number of a step."""
    return name.isascii() and name.isdecimal() and name == str(int(name))


def steps_in(files: Iterable[str]) -> list[int]:
    """Return the steps, oldest first, that have a manifest among the names of objects."""
    folders = (name.removesuffix(f"/{manifest.NAME}") for name in files)
    return sorted(int(name) for name in folders if is_step(name))


def on_threads(do: Callable[[str], None], names: Iterable[str]) -> None:
    """Call `do` with each name, in threads; the first error ends those that have not begun, and is raised."""
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = [pool.submit(do, name) for name in names]
        try:
            for future in waiting:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
