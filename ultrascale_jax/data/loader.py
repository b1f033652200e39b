"""Batches as a pure function of (seed, step), whatever the mesh and the number of processes.

The documents of a split are put in an order set by the seed and read as one stream; sample i is its
tokens i*T to i*T+T, one more than a row so that every token but the first is a target. `Shuffled`
orders the samples anew for every epoch, and `mixture.py` mixes the sources by weight, stage after
stage. Both go by index alone, so row r of step s is simply sequence s*B+r, or what a ramp of the
batch makes of s*B: no state to save, and each process reads only the rows of its own devices.
`samples.py` cuts the rows; `balance.py` deals them to the devices.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ultrascale_jax import quiet_imports
from ultrascale_jax.config import (
    AXES,
    LARGEST,
    Batches,
    ContextConfig,
    DataConfig,
    UserError,
    require,
    require_type,
    whole,
)
from ultrascale_jax.data.balance import Chunks, attention_work, balanced_tokens, deal_rows
from ultrascale_jax.data.held_out import HeldOut
from ultrascale_jax.data.mixture import StagedSamples, parse_named
from ultrascale_jax.data.samples import (
    ENDLESS,
    Batch,
    CorpusSamples,
    PackedSamples,
    PairSamples,
    Place,
    Samples,
    Shuffled,
    Span,
    SyntheticSamples,
    nth_token,
)
from ultrascale_jax.data.sources import Sources, Synthetic, open_sources
from ultrascale_jax.data.stages import begins, parse_stages
from ultrascale_jax.launch.failures import NotNow
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.sharding.sequence_order import sequence_order

if TYPE_CHECKING:
    from ultrascale_jax.data.top_k import TopK

StartHash = Callable[[], Callable[[], str]]
"""Begins to add up a batch's row digests, a collective which every process calls at once; what it returns waits for the
hash, on any process."""


class Loader:
    """The batches of one split of `data.source`; every token is checked before it is used, `open_shards` says when.

    `batch(step)` holds int32 arrays [B, T]: `tokens`; `targets`, the next tokens, -1 where the loss
    does not count them; `positions`; and `segment_ids` if `data.document_mask`. With the mask,
    segments count documents from 1, positions start at 0 in each, and the last token of a document
    has no target; without it the row is one stream. Where `cp` splits a row every array is handed
    out in the order of the strategy of `context` (`sequence_order`), and before that the documents
    of a row in an order that balances the places of a ring (`balance.py`); hashes and fingerprint
    are of the natural order. `make_loader(cfg)` takes all of it from a `Config`.

    Args:
        data: source, tokenizer and packing.
        vocab_size: ids must be below it.
        global_batch: rows of one step (B), over all processes; or `Batches`, the rows of each step.
        seed: sets the order of the training split; the held-out split always has the same.
        split: `train`, or `eval` for the held-out documents.
        sources: the result of `open_sources` for `data` and `vocab_size`, to open them only once.
        cp: ranks of the mesh axis that splits a row.
        context: strategy of attention over these ranks.
        microbatches: micro-batches of a step of the largest size, whose devices get rows with similar work.
        steps: steps of the run, of which a stage of `data.source` may begin at a share.
        share_checks: share the checks with the other processes, which all create this loader now: see `open_shards`.

    Raises:
        ValueError: a source is missing, damaged or outside the vocabulary, or has no full row to
            train on; `sources` are of a larger vocabulary; or `cp` ranks cannot share a row.
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        vocab_size: int,
        global_batch: int | Batches,
        seed: int,
        split: str = "train",
        sources: Sources | None = None,
        cp: int = 1,
        context: ContextConfig | None = None,
        microbatches: int = 1,
        steps: int | None = None,
        share_checks: bool = False,
    ):
        require(split in ("train", "eval"), "split", split, "must be train or eval")
        if not isinstance(global_batch, Batches):
            global_batch = Batches((whole("global_batch", global_batch, 1),))
        seed, vocab_size = whole("seed", seed), whole("vocab_size", vocab_size, 1)
        if sources is not None:
            fix = f"sources have ids below {sources.vocab_size}; give that"
            require(sources.vocab_size <= vocab_size, "vocab_size", vocab_size, fix)
        self.data, self.vocab_size, self.seed, self.split = data, vocab_size, seed, split
        self.batches = global_batch
        """Rows of each step."""
        require(
            cp >= 1, "cp", cp, "is not chosen yet; cfg.check(num_devices) gives mesh.cp its size"
        )
        fix = (
            f"the order of tokens over cp={cp} ranks is that of your attention's strategy; "
            'give ContextConfig(strategy="ring"), or another'
        )
        require(cp == 1 or context is not None, "context", context, fix)
        if context is not None:
            require_type("context", context, ContextConfig)
        self._cp, self._context = cp, context
        self._order = sequence_order(data.seq_len, cp, context) if context and cp > 1 else None
        self._microbatches, self._share_checks = microbatches, share_checks
        self.sources = sources or open_sources(data, vocab_size, share_checks=share_checks)
        self.tokenizer = self.sources.tokenizer
        stages = parse_stages("data.source", data.source) if split == "train" else ()
        self.begins: tuple[int, ...] = begins("data.source", data.source, stages, steps)
        """Steps that are done before each stage of the mixture."""
        self.notes: list[str] = list(filter(None, [self.tokenizer.rule]))
        """Lines to print about the sources."""
        samples = self._split_samples()
        self.num_sequences: int = sum(map(len, samples.values()))
        """Rows of one epoch over all sources; 0 if the held-out documents do not fill one."""
        self.teacher: TopK | None = None
        """Stored probabilities of a teacher, which batches then have: `teacher_ids` and `teacher_logps`."""
        self.room: int | None = None
        """Documents for which attention has room in a row; none: any number. A row of more stops the run."""
        self._samples = samples
        self._parts = list(samples)
        self._shuffled = [
            Shuffled(part, (*self._key(), i, "shuffle")) for i, part in enumerate(samples.values())
        ]
        self._mixed = self._mix() if samples else None

    @functools.cached_property
    def max_documents(self) -> int:
        """The most documents in a row; for a large corpus (`Corpus.is_small`), in its first rows."""
        return max((part.max_documents for part in self._samples.values()), default=0)

    def held_out(self) -> "Loader":
        """The held-out split of the same, already open sources, in batches of the largest size of the run."""
        return Loader(
            self.data,
            vocab_size=self.vocab_size,
            global_batch=self.batches.sizes[-1],
            seed=self.seed,
            split="eval",
            sources=self.sources,
            cp=self._cp,
            context=self._context,
        )

    def evaluation(self) -> "dict[str, Loader]":
        """Return the loader of each source of `data.eval_source` by name, or without one that of the held-out split.

        A source without a name, and the held-out split, have the empty name. No seed changes their batches.

        Raises:
            UserError: as the constructor does, for a field `data.eval_source`.
        """
        if not self.data.eval_source:
            return {"": self.held_out()}
        named = parse_named(self.data.eval_source)
        try:
            return {name: self._of_all_documents(mixture) for name, mixture in named.items()}
        except UserError as error:
            raise type(error)(str(error).replace("data.source", "data.eval_source")) from None

    def _of_all_documents(self, source: str) -> "Loader":
        data = dataclasses.replace(self.data, source=source, eval_source="", eval_fraction=0.0)
        return Loader(
            data,
            vocab_size=self.vocab_size,
            global_batch=self.batches.sizes[-1],
            seed=0,
            cp=self._cp,
            context=self._context,
            share_checks=self._share_checks,
        )

    @property
    def fingerprint(self) -> str:
        """Return a digest of documents, tokenizer and packing; paths, seed and batch size do not change it."""
        return self.fingerprint_at(LARGEST)

    def fingerprint_at(self, step: int) -> str:
        """Return the `fingerprint` of the data that the first `step` steps read: later stages do not change it."""
        weights = self.sources.mixture.weights
        last = max(sum(begin < step for begin in self.begins), 1)
        num_sources = self.sources.mixture.known_by(last - 1)
        content: dict[str, Any] = {
            "sources": [corpus.fingerprint for corpus in self.sources.corpora[:num_sources]],
            "weights": weights[0][:num_sources],
            "tokenizer": self.tokenizer.fingerprint,
            "packing": [self.data.seq_len, self.data.document_mask, self.data.held_out_fraction],
        }
        if last > 1:
            later = zip(self.begins[1:last], weights[1:last], strict=True)
            content["stages"] = [(begin, stage[:num_sources]) for begin, stage in later]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def describe(self, steps: int) -> list[str]:
        """Return a line for each stage of a run of `steps` steps: each source's sequences, and how often it repeats."""
        if self._mixed is None:
            return []
        lines, mixture = [], self.sources.mixture
        ends = [*self.begins[1:], steps]
        for number, (begin, end) in enumerate(zip(self.begins, ends, strict=True), start=1):
            stage = f"stage {number}, " if len(ends) > 1 else ""
            if begin >= steps:
                lines.append(f"data: {stage}after step {begin}: not reached in {steps} steps")
                continue
            borders = (self.batches.before(step) for step in (begin, min(end, steps)))
            counts = map(self._mixed.counts, borders)  # by source, before and after the stage
            parts = [
                f"{name} {done - begun:,} sequences ({self._epochs(i, done)})"
                for i, (name, weight, begun, done) in enumerate(
                    zip(mixture.names, mixture.weights[number - 1], *counts, strict=True)
                )
                if weight
            ]
            lines.append(f"data: {stage}steps {begin + 1} to {min(end, steps)}: {', '.join(parts)}")
        return lines

    def _epochs(self, source: int, count: int) -> str:
        """Say how often `count` sequences pass over a source."""
        length = len(self._samples[self._parts[source]])
        if length == ENDLESS:
            return "no end"
        return f"{count / length:.2f} epochs of {length:,}"

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return the rows of the global batch of a step, counted from 0, int32 [rows, T] by name."""
        step = whole("step", step)
        return self._ordered(self._load(step, range(self.batches.at(step))[rows]))

    def batch_hash(self, step: int) -> str:
        """Hash rows, tokens and targets of the global batch; every mesh gives the same hash."""
        step = whole("step", step)
        return batch_hash(self._load(step, range(self.batches.at(step))))

    def places(self, step: int, rows: Sequence[int] | None = None) -> list[list[Place]]:
        """Return the places in files from which a step's global batch is read, for all rows or the given ones."""
        if self._mixed is None:
            return []
        rows = range(self.batches.at(step)) if rows is None else rows
        first = self.batches.before(step)
        return [self._places(first + int(row)) for row in rows]

    def _places(self, number: int) -> list[Place]:
        """Return the places from which a sequence of the run is read, after the name of its source."""
        source, row = self._row(number)
        name = self.sources.mixture.names[source]
        places = self._samples[source].places(row)
        return [(name if file == name else f"{name}/{file}", at, size) for file, at, size in places]

    def _row(self, number: int) -> tuple[int, int]:
        """Return the source of a sequence of the run, and the row of its samples."""
        assert self._mixed is not None
        part, sample = self._mixed.place(number)
        return self._parts[part], self._shuffled[part].row(sample)

    def device_batches(
        self, mesh: Mesh, start_step: int, *, spec: PartitionSpec | None = None
    ) -> Generator[tuple[int, dict[str, jax.Array], StartHash], None, None]:
        """Return an iterator over step, batch on the devices and the batch's hash, from `start_step` on, without end.

        With the document mask rows are dealt so that all devices have as much attention. Grain's
        threads read ahead. A process reads only the rows of its own devices, and the devices add up
        the digests of all rows: see `StartHash`. Close the iterator to stop the threads.
        A thread's exception is raised where its batch is due.

        Args:
            mesh: the devices.
            start_step: the first step.
            spec: how a mesh of your own shards rows and their tokens, as `P("data")` or `P("data", "seq")`.

        Raises:
            UserError: the mesh splits a row over another number of ranks than `cp`, so attention would need another
                order of its tokens; it has other axes than this library's, and there is no `spec`; or a shard was
                altered or cut short under the run.
            NotNow: the file system failed.
        """
        start_step = whole("start_step", start_step)
        if spec is None:
            unknown = [name for name in AXES if name not in mesh.axis_names]
            fix = "has other axes than this library's; say how it shards [B, T], as spec=P('data')"
            require(not unknown, "mesh", mesh.axis_names, fix)
            spec = act("BT")
        parts, ranks = (_size_of(mesh, axes) for axes in (*spec, None, None)[:2])
        fix = (
            f"attention over {ranks} ranks needs another order of tokens; "
            f'use make_loader(cfg), or Loader(..., cp={ranks}, context=ContextConfig(strategy="ring"))'
        )
        require(self._cp == ranks, "cp", self._cp, fix)
        fix = f"rows are split over {parts} devices; use a multiple of that"
        for size in self.batches.sizes:
            require(size % parts == 0, "global_batch", size, fix)
        return self._device_batches(NamedSharding(mesh, spec), start_step)

    def _device_batches(
        self, sharding: NamedSharding, start_step: int
    ) -> Generator[tuple[int, dict[str, jax.Array], StartHash], None, None]:
        mesh = sharding.mesh
        by_row = NamedSharding(mesh, PartitionSpec(sharding.spec[0]))
        add_rows = jax.jit(_add_rows, out_shardings=NamedSharding(mesh, PartitionSpec()))

        @functools.cache
        def own_rows(size: int) -> tuple[np.ndarray, int]:
            """Return which of `size` rows are on this process's devices, and the parts into which they are split."""
            shape = (size, self.data.seq_len)
            indices = sharding.addressable_devices_indices_map(shape).values()
            rows = [np.arange(size)[index[0]] for index in indices if index is not None]
            return np.unique(np.concatenate(rows)), size // sharding.shard_shape(shape)[0]

        def load(step: int) -> tuple[int, Batch, np.ndarray]:
            try:
                return read(step)
            except OSError as error:
                text = f"data.source={self.data.source!r}: step {step + 1} cannot be read: {error}"
                raise NotNow(text) from error

        def read(step: int) -> tuple[int, Batch, np.ndarray]:
            mine, shards = own_rows(self.batches.at(step))
            rows = self._dealt(step, shards)[mine]
            batch = self._load(step, rows)
            return step, self._ordered(batch), row_digests(rows, batch)

        def place(local: np.ndarray, size: int, where: NamedSharding = sharding) -> jax.Array:
            mine, _ = own_rows(size)

            def piece(index):
                first = np.searchsorted(mine, index[0].start or 0)
                count = len(range(size)[index[0]])
                return local[first : first + count, index[1]]

            return jax.make_array_from_callback((size, *local.shape[1:]), where, piece)

        def start_hash(digests: jax.Array) -> Callable[[], str]:
            return functools.partial(_hash_text, add_rows(digests))

        steps = quiet_imports.grain.MapDataset.range(start_step, ENDLESS).map(load)
        options = quiet_imports.grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)
        reader = iter(steps.to_iter_dataset(options))
        try:
            for step, batch, digests in reader:
                size = self.batches.at(step)
                placed = {name: place(value, size) for name, value in batch.items()}
                yield step, placed, functools.partial(start_hash, place(digests, size, by_row))
        finally:
            reader.close()

    def _dealt(self, step: int, shards: int) -> np.ndarray:
        """Return the row of the global batch for each place on the devices."""
        rows = self.places(step) if shards > 1 and self.data.document_mask else []
        size = self.batches.at(step)
        if not rows:
            return np.arange(size)
        work = np.array([attention_work([count for *_, count in places]) for places in rows])
        return deal_rows(work, shards, self.batches.microbatches(size, self._microbatches))

    def _key(self) -> tuple:
        return ("train", self.seed) if self.split == "train" else ("eval",)

    def _split_samples(self) -> dict[int, Samples]:
        """Return, by the number of the source, the samples of every source that fills a row in this split.

        The sources of the first stage decide which documents are held out, and their held-out documents are the split
        `eval`: a stage that is added or changed later neither moves a document nor makes evaluations differ.
        """
        corpora, first = self.sources.corpora, self.sources.mixture.known_by(0)
        evaluated = [corpus for corpus in corpora[:first] if not isinstance(corpus, Synthetic)]
        held_out, is_held_out = (
            HeldOut(evaluated, self.data.held_out_fraction),
            self.split == "eval",
        )
        samples = {}
        for i, corpus in enumerate(corpora[:first] if is_held_out else corpora):
            name, key = self.sources.mixture.names[i], (*self._key(), i)
            if isinstance(corpus, Synthetic):
                if is_held_out and not self.data.held_out_fraction:
                    continue
                part = SyntheticSamples(corpus, self.data, key)
            else:
                split = held_out.split(corpus, name, is_held_out=is_held_out)
                kind = PairSamples if corpus.pairs else PackedSamples
                part = kind(corpus, split, self.data, key)
            if isinstance(part, PairSamples) and part.too_long:
                left_out = f"{part.too_long:,} of {part.pairs:,} pairs are left out"
                fault = (
                    f"{left_out}: longer than data.seq_len={self.data.seq_len} with both answers"
                )
                self.notes.append(f"{name}: {fault}")
            if len(part):
                samples[i] = part
            elif self.split == "train":
                fault = f"has less than data.seq_len + 1 = {self.data.seq_len + 1} tokens"
                raise UserError(f"data.source={name!r}: {fault}; give more text or shorter rows")
        return samples

    def _mix(self) -> StagedSamples:
        """Return the mixture of the sources that have samples."""
        stages = self.sources.mixture.weights[: len(self.begins)]
        weights = [[stage[i] for i in self._parts] for stage in stages]
        return StagedSamples(weights, [self.batches.before(step) for step in self.begins])

    def _load(self, step: int, rows: Sequence[int] | np.ndarray) -> Batch:
        if self._mixed is None:
            fix = "the held-out documents do not fill one row; raise it or lower data.seq_len"
            raise UserError(f"data.eval_fraction={self.data.eval_fraction}: {fix}")
        first = self.batches.before(step)
        samples = [self._sample(first + int(row)) for row in rows]
        batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        self._check(step, rows, batch)
        return batch

    def _sample(self, number: int) -> Batch:
        """Return a sequence of the run."""
        source, row = self._row(number)
        sample = self.row(source, row)
        return (
            sample
            if self.teacher is None
            else sample | self.teacher.read(source, self.spans(source, row))
        )

    def rows(self, steps: int) -> list[tuple[int, int]]:
        """Return the source of each row that the first `steps` steps read, and its number there, each once."""
        return sorted({self._row(number) for number in range(self.batches.before(steps))})

    def row(self, source: int, number: int) -> Batch:
        """Return a row of a source."""
        return self._samples[source][number]

    def spans(self, source: int, number: int) -> list[Span]:
        """Return the parts of a source's documents of which a row is made, and the last target."""
        samples = self._samples[source]
        assert isinstance(samples, CorpusSamples), "random rows are of no documents"
        return samples.spans(number)

    def _check(self, step: int, rows: Sequence[int] | np.ndarray, batch: Batch) -> None:
        """Check a batch: a shard may change under the run, and not all of a large one was read when it was opened."""
        tokens, targets, size = batch["tokens"], batch["targets"], self.vocab_size
        if self.room is not None:
            most = int(batch["segment_ids"].max())
            fault = f"a row of step {step + 1} has {most} documents"
            fix = f"{fault}, and attention has room for {self.room}; go on with kernels.attention=cudnn"
            require(most <= self.room, "data.source", self.data.source, fix)
        least = min(int(tokens.min()), int(targets.min()) + 1)
        if least >= 0 and max(int(tokens.max()), int(targets.max())) < size:
            return
        wrong = np.pad((tokens < 0) | (tokens >= size), ((0, 0), (0, 1)))
        wrong[:, 1:] |= (targets < -1) | (targets >= size)
        row, at = (int(index) for index in np.argwhere(wrong)[0])
        value = tokens[row, at] if at < tokens.shape[1] else targets[row, -1]
        file, place = nth_token(self.places(step, [int(rows[row])])[0], at)
        fix = (
            f"step {step + 1} has {wrong.sum()} tokens outside model.vocab_size={size}, the first {value} "
            f"in {file} at {place}; it was altered under the run, so write it anew"
        )
        require(False, "data.source", self.data.source, fix)

    @functools.cached_property
    def _chunks(self) -> Chunks | None:
        """The chunks of the ring's places, among which documents are balanced; None without a ring or documents."""
        if self._order is None or self._context is None or not self.data.document_mask:
            return None
        places, _ = self._context.ranks(self._cp)
        return Chunks.of(self._order, places) if places > 1 else None

    def _ordered(self, batch: Batch) -> Batch:
        if self._order is None:
            return batch
        if self._chunks is None:
            return {name: value[:, self._order] for name, value in batch.items()}
        rows = [balanced_tokens(ids, self._chunks)[self._order] for ids in batch["segment_ids"]]
        at = np.arange(len(rows))[:, None], np.stack(rows)
        return {name: value[at] for name, value in batch.items()}


def batch_hash(batch: Batch) -> str:
    """Return 32 hexadecimal digits that hash the rows, tokens and targets of a global batch in natural order."""
    return _hash_text(_add_rows(row_digests(np.arange(batch["tokens"].shape[0]), batch)))


def row_digests(rows: np.ndarray, batch: Batch) -> np.ndarray:
    """Return uint32 [rows, 4], digests of the number, tokens and targets of each row of a batch."""
    digests = []
    for i, row in enumerate(rows):
        digest = hashlib.blake2b(int(row).to_bytes(8, "little"), digest_size=16)
        for name in ("tokens", "targets"):
            digest.update(np.ascontiguousarray(batch[name][i], "<i4"))
        digests.append(np.frombuffer(digest.digest(), "<u4"))
    return np.stack(digests)


def _size_of(mesh: Mesh, axes: str | tuple[str, ...] | None) -> int:
    """Return the number of devices over which an entry of a spec splits its dim."""
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(mesh.shape[name] for name in names if name)


def _add_rows(digests: Any) -> Any:
    """Add up row digests, modulo 2^32: the sum does not depend on which device has which rows."""
    return digests.sum(axis=0, dtype=np.uint32)


def _hash_text(total: jax.Array | np.ndarray) -> str:
    return "".join(f"{int(word):08x}" for word in np.asarray(total))
