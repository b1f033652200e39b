"""Batches as a pure function of (seed, step), whatever the mesh and the number of processes.

The documents of a split are put in an order set by the seed and read as one stream; sample i is its
tokens i*T to i*T+T, one more than a row so that every token but the first is a target. Grain
shuffles the samples anew for every epoch, and `mixture.py` mixes the sources by weight, stage after
stage. Both go by index alone, so row r of step s is simply sequence s*B+r, or what a ramp of the
batch makes of s*B: no state to save, and each process reads only the rows of its own devices.
`samples.py` cuts the rows; `balance.py` deals them to the devices.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ultrascale_jax.config import LARGEST, Batches, ContextConfig, DataConfig, UserError, require
from ultrascale_jax.config.stages import begins, parse_stages
from ultrascale_jax.data.balance import attention_work, deal_rows
from ultrascale_jax.data.mixture import StagedSamples, parse_named
from ultrascale_jax.data.samples import (
    ENDLESS,
    Batch,
    PackedSamples,
    PairSamples,
    Place,
    Places,
    Samples,
    SyntheticSamples,
    nth_token,
    random_bits,
)
from ultrascale_jax.data.shards import Corpus
from ultrascale_jax.data.sources import Sources, Synthetic, open_sources
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.sharding.sequence_order import sequence_order


class UnreadableError(OSError):
    """A batch could not be read; the next try may succeed, so a supervisor should restart the run."""


class Loader:
    """The batches of one split of `data.source`; the constructor checks every token of the sources.

    `batch(step)` holds int32 arrays [B, T]: `tokens`; `targets`, the next tokens, -1 where the loss
    does not count them; `positions`; and `segment_ids` if `data.document_mask`. With the mask,
    segments count documents from 1, positions start at 0 in each, and the last token of a document
    has no target; without it the row is one stream. Where `cp` splits a row every array is handed
    out in the order that the strategy of `context` wants (`sequence_order`); hashes and fingerprint
    are of the natural order. `make_loader(cfg)` takes all of it from a `Config`.

    Args:
        data: source, tokenizer and packing.
        vocab_size: ids must be below it.
        global_batch: rows of one step (B), over all processes; or those of each step.
        seed: sets the order of the training split; the held-out split always has the same.
        split: `train`, or `eval` for the held-out documents.
        sources: what `open_sources` returned for `data` and `vocab_size`, to open it only once.
        cp: ranks of the mesh axis that splits a row.
        context: strategy of attention over these ranks.
        microbatches: micro-batches of a step of the largest size, whose devices get rows with similar work.
        steps: steps of the run, of which a stage of `data.source` may begin at a share.
        together: every process of the job makes this loader now, so they share the checking: see `open_shards`.

    Raises:
        ValueError: a source is missing, damaged or outside the vocabulary, or has no whole row to
            train on; or `cp` ranks cannot share a row.
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
        together: bool = False,
    ):
        require(split in ("train", "eval"), "split", split, "must be train or eval")
        if isinstance(global_batch, int):
            require(global_batch >= 1, "global_batch", global_batch, "must be at least 1")
        self.data, self.vocab_size, self.seed, self.split = data, vocab_size, seed, split
        self.batches = Batches((global_batch,)) if isinstance(global_batch, int) else global_batch
        """Rows of each step."""
        require(
            cp >= 1, "cp", cp, "is not chosen yet; cfg.check(num_devices) gives mesh.cp its size"
        )
        fix = (
            f"the strategy orders the tokens of cp={cp} ranks; give cfg.cp, or use make_loader(cfg)"
        )
        require(cp == 1 or context is not None, "context", context, fix)
        self._cp, self._context = cp, context
        self._order = sequence_order(data.seq_len, cp, context) if context and cp > 1 else None
        self._microbatches, self._together = microbatches, together
        self.sources = sources or open_sources(data, vocab_size, together=together)
        self.tokenizer = self.sources.tokenizer
        stages = parse_stages("data.source", data.source) if split == "train" else ()
        self.begins: tuple[int, ...] = begins("data.source", data.source, stages, steps)
        """Steps that are done before each stage of the mixture."""
        self.notes: list[str] = list(filter(None, [self.tokenizer.rule]))
        """Lines to print about the sources."""
        samples = self._split_samples()
        self.num_sequences: int = sum(map(len, samples.values()))
        """Rows of one epoch over all sources; 0 if the held-out documents do not fill one."""
        self.max_documents: int = max((x.max_documents for x in samples.values()), default=0)
        """The most documents that a row has a piece of."""
        places = {i: Places(self.sources.mixture.names[i], part) for i, part in samples.items()}
        self._lengths = {i: len(part) for i, part in samples.items()}
        self._samples, self._places = (
            self._mixed(parts) if samples else None for parts in (samples, places)
        )

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
            together=self._together,
        )

    @property
    def fingerprint(self) -> str:
        """Return a digest of documents, tokenizer and packing; paths, seed and batch size do not change it."""
        return self.fingerprint_at(LARGEST)

    def fingerprint_at(self, step: int) -> str:
        """Return the `fingerprint` of what the first `step` steps have read: later stages do not change it."""
        weights = self.sources.mixture.weights
        last = max(sum(begin < step for begin in self.begins), 1)
        known = self.sources.mixture.known_by(last - 1)
        content: dict[str, Any] = {
            "sources": [corpus.fingerprint for corpus in self.sources.corpora[:known]],
            "weights": weights[0][:known],
            "tokenizer": self.tokenizer.fingerprint,
            "packing": [self.data.seq_len, self.data.document_mask, self.data.held_out_fraction],
        }
        if last > 1:
            later = zip(self.begins[1:last], weights[1:last], strict=True)
            content["stages"] = [(begin, stage[:known]) for begin, stage in later]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def describe(self, steps: int) -> list[str]:
        """Return a line for each stage of a run of `steps` steps: each source's sequences, and how often it repeats."""
        if self._samples is None:
            return []
        lines = []
        ends = [*self.begins[1:], steps]
        for number, (begin, end) in enumerate(zip(self.begins, ends, strict=True), start=1):
            stage = f"stage {number}, " if len(ends) > 1 else ""
            if begin >= steps:
                lines.append(f"data: {stage}after step {begin}: not reached in {steps} steps")
                continue
            first, last = (self.batches.before(step) for step in (begin, min(end, steps)))
            before, after = self._samples.counts(first), self._samples.counts(last)
            parts = [
                f"{self.sources.mixture.names[i]} {after[i] - before[i]:,} sequences ({self._epochs(i, after[i])})"
                for i, weight in enumerate(self.sources.mixture.weights[number - 1])
                if weight
            ]
            lines.append(f"data: {stage}steps {begin + 1} to {min(end, steps)}: {', '.join(parts)}")
        return lines

    def _epochs(self, source: int, count: int) -> str:
        """Say how often `count` sequences pass over a source."""
        length = self._lengths[source]
        if length == ENDLESS:
            return "no end"
        return f"{count / length:.2f} epochs of {length:,}"

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return the rows of the global batch of a step, int32 [rows, T] by name."""
        return self._ordered(self._load(step, range(self.batches.at(step))[rows]))

    def batch_hash(self, step: int) -> str:
        """Hash the tokens and targets of the whole global batch; every mesh gives the same hash."""
        return batch_hash(self._load(step, range(self.batches.at(step))))

    def places(self, step: int, rows: Sequence[int] | None = None) -> list[list[Place]]:
        """Return the places in files from which a step's global batch is read, for all rows or the given ones."""
        if self._places is None:
            return []
        rows = range(self.batches.at(step)) if rows is None else rows
        first = self.batches.before(step)
        found = [self._places[first + int(row)] for row in rows]
        return cast(list[list[Place]], found)

    def device_batches(
        self, mesh: Mesh, start_step: int, before: Callable[[int], None] | None = None
    ) -> Generator[tuple[int, dict[str, jax.Array], str], None, None]:
        """Return an iterator over step, batch on the devices and the batch's hash, from `start_step` on, without end.

        With the document mask rows are dealt so that all devices have as much attention. Grain's
        threads read ahead. A process reads only the rows of its own devices, but process 0 all of
        them, for the hash; elsewhere the hash is "". Close the iterator to stop the threads.
        A thread's exception is raised where its batch is due; `before(n)` is called in the
        thread that reads the batch of the n-th optimizer step.

        Raises:
            UserError: the mesh splits a row over another number of ranks than `cp`, so attention would want another
                order of its tokens; or a shard was altered or cut short under the run.
            UnreadableError: the file system failed.
        """
        ranks = dict(mesh.shape).get("cp", 1)
        fix = (
            f"attention on a mesh of cp={ranks} wants another order of tokens; "
            f"use make_loader(cfg), or Loader(..., cp={ranks}, context=cfg.cp)"
        )
        require(self._cp == ranks, "cp", self._cp, fix)
        return self._device_batches(mesh, start_step, before)

    def _device_batches(
        self, mesh: Mesh, start_step: int, before: Callable[[int], None] | None
    ) -> Generator[tuple[int, dict[str, jax.Array], str], None, None]:
        sharding = NamedSharding(mesh, act("BT"))
        hashing = jax.process_index() == 0

        @functools.cache
        def own_rows(size: int) -> tuple[np.ndarray, int]:
            """Return which of `size` rows are on this process's devices, and the parts into which they are split."""
            shape = (size, self.data.seq_len)
            indices = sharding.addressable_devices_indices_map(shape).values()
            rows = [np.arange(size)[index[0]] for index in indices if index is not None]
            return np.unique(np.concatenate(rows)), size // sharding.shard_shape(shape)[0]

        def load(step: int) -> tuple[int, Batch, str]:
            try:
                if before is not None:
                    before(step + 1)
                return read(step)
            except OSError as error:
                text = f"data.source={self.data.source!r}: step {step + 1} cannot be read: {error}"
                raise UnreadableError(text) from error

        def read(step: int) -> tuple[int, Batch, str]:
            mine, shards = own_rows(self.batches.at(step))
            own = self._dealt(step, shards)[mine]
            if not hashing:
                return step, self._ordered(self._load(step, own)), ""
            batch = self._load(step, range(self.batches.at(step)))
            local = {name: value[own] for name, value in batch.items()}
            return step, self._ordered(local), batch_hash(batch)

        def place(local: np.ndarray, size: int) -> jax.Array:
            mine, _ = own_rows(size)

            def piece(index):
                first = np.searchsorted(mine, index[0].start or 0)
                count = len(range(size)[index[0]])
                return local[first : first + count, index[1]]

            return jax.make_array_from_callback((size, self.data.seq_len), sharding, piece)

        steps = grain.MapDataset.range(start_step, ENDLESS).map(load)
        options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)
        reader = iter(steps.to_iter_dataset(options))
        try:
            for step, batch, digest in reader:
                size = self.batches.at(step)
                yield step, {name: place(value, size) for name, value in batch.items()}, digest
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
        """Return, by the number of the source, the samples of every source that has a whole row in this split.

        The sources of the first stage decide which documents are held out, and their held-out documents are the split
        `eval`: a stage that is added or changed later neither moves a document nor makes evaluations differ.
        """
        corpora, first = self.sources.corpora, self.sources.mixture.known_by(0)
        evaluated = [corpus for corpus in corpora[:first] if isinstance(corpus, Corpus)]
        hashes = [corpus.hashes for corpus in evaluated]
        held_out = held_out_hashes(hashes, self.data.held_out_fraction)
        samples = {}
        for i, corpus in enumerate(corpora[:first] if self.split == "eval" else corpora):
            name, key = self.sources.mixture.names[i], (*self._key(), i)
            if isinstance(corpus, Synthetic):
                if self.split == "eval" and not self.data.held_out_fraction:
                    continue
                part = SyntheticSamples(corpus, self.data, key)
            else:
                held = np.isin(corpus.hashes, held_out)
                chosen = np.flatnonzero(held if self.split == "eval" else ~held)
                kind = PairSamples if corpus.pairs else PackedSamples
                part = kind(corpus, chosen, self.data, key)
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

    def _mixed(self, parts: dict[int, Any]) -> StagedSamples:
        """Reshuffle every source each epoch, without end, and mix them, all by index."""
        endless = []
        for i, part in enumerate(parts.values()):
            dataset = grain.MapDataset.source(part)
            if part.shuffled:
                seed = int(random_bits((*self._key(), i, "shuffle"), 1)[0] % 2**32)
                dataset = dataset.seed(seed).shuffle()
            endless.append(dataset.repeat())
        stages = self.sources.mixture.weights[: len(self.begins)]
        weights = [[stage[i] for i in parts] for stage in stages]
        return StagedSamples(endless, weights, [self.batches.before(step) for step in self.begins])

    def _load(self, step: int, rows: Sequence[int] | np.ndarray) -> Batch:
        if self._samples is None:
            fix = "the held-out documents do not fill one row; raise it or lower data.seq_len"
            raise UserError(f"data.eval_fraction={self.data.eval_fraction}: {fix}")
        first = self.batches.before(step)
        samples = [cast(Batch, self._samples[first + int(row)]) for row in rows]
        batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        self._check(step, rows, batch)
        return batch

    def _check(self, step: int, rows: Sequence[int] | np.ndarray, batch: Batch) -> None:
        """Check a batch again: the sources were sound when they were opened, but a shard may change under the run."""
        tokens, targets, size = batch["tokens"], batch["targets"], self.vocab_size
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

    def _ordered(self, batch: Batch) -> Batch:
        if self._order is None:
            return batch
        return {name: value[:, self._order] for name, value in batch.items()}


def batch_hash(batch: Batch) -> str:
    """Return 32 hexadecimal digits that hash the tokens and targets of a batch."""
    digest = hashlib.blake2b(digest_size=16)
    for name in ("tokens", "targets"):
        digest.update(np.ascontiguousarray(batch[name], "<i4"))
    return digest.hexdigest()


def held_out_hashes(corpora: Sequence[np.ndarray], fraction: float) -> np.ndarray:
    """Return the hashes of the documents that no training split may see.

    Of every corpus the `fraction` with the smallest hashes, at least one if it has two different
    documents. They are held out of all corpora, so a text that occurs twice, in one source or in
    two, is never on both sides.

    Args:
        corpora: uint64 [documents] of each corpus.
        fraction: share of the different documents to hold out.
    """
    held_out = [np.zeros(0, np.uint64)]
    for hashes in corpora if fraction > 0 else []:
        different = np.unique(hashes)
        count = min(max(1, round(fraction * different.size)), different.size - 1)
        held_out.append(different[:count])
    return np.unique(np.concatenate(held_out))
