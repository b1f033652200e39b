"""Read from XLA's dump of a program's thunks on which stream each collective runs.

XLA:GPU chooses the streams after the schedule, and prints them only into a dump (`xla_dump_to`):

    thunk_sequence.txt   014: kAsyncStart [prev=013 ...] stream=communication_stream[0], async_id=14
    thunk_metadata.txt   thunk_info { profile_annotation: "all-gather-start.1"  thunk_id: 14 }

Collectives of one stream run one after another, whatever the schedule has in flight. A synchronous collective is no
`kAsyncStart`: the compute stream runs it.
"""

import re
from pathlib import Path

START = re.compile(r"(\d+): kAsyncStart .*\bstream=communication_stream\[(\d+)\]")
NAMED = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')


def communication_streams(sequence: str, metadata: str) -> dict[str, int]:
    """Return the stream of each asynchronous collective, by its instruction, from both files' texts."""
    names = {int(number): name for name, number in NAMED.findall(metadata)}
    return {names[int(thunk)]: int(stream) for thunk, stream in START.findall(sequence)}


def dumped_streams(folder: Path) -> dict[str, int]:
    """Return `communication_streams` of the program that was dumped last; none where XLA wrote no thunks."""
    dumps = sorted(folder.glob("*.thunk_metadata.txt"), key=lambda path: path.stat().st_mtime_ns)
    if not dumps:
        return {}
    sequence = Path(str(dumps[-1]).replace("thunk_metadata", "thunk_sequence"))
    return communication_streams(sequence.read_text(), dumps[-1].read_text())
