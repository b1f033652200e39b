"""Score text with a trained model: the loss of sources, and the log-likelihood of continuations."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.data.corpus import Corpus
from ultrascale_jax.data.held_out import ALL
from ultrascale_jax.data.samples import Batch, PackedSamples
from ultrascale_jax.data.sources import open_sources
from ultrascale_jax.data.tokenizer import Tokenizer
from ultrascale_jax.models.inputs import check_ids
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.sharding.sequence_order import sequence_order
from ultrascale_jax.train_step.forward_steps import make_eval_step, make_row_step


class Loss(NamedTuple):
    """Sums over the predicted tokens of a source."""

    nats: float
    """Negative log-likelihood."""
    tokens: int
    """Predicted tokens: all but the first of a document, or with `data.document_mask` off of the source."""
    text_bytes: int | None
    """Bytes of the text of these tokens, without separators; None where the tokenizer does not say."""


class Scorer:
    """Scores with one model; create and call it inside the mesh of `params`.

    `cfg` is checked for that mesh. `train.global_batch` rows are scored at once, in `train.microbatches` parts.
    """

    def __init__(self, cfg: Config, params: Transformer, tokenizer: Tokenizer):
        self._cfg, self._params, self._tokenizer = cfg, params, tokenizer
        self._eval_step, self._row_step = make_eval_step(cfg), make_row_step(cfg)

    def loss(self, rows: Iterable[Batch]) -> Loss:
        """Sum the loss over `rows`, as of `source_rows`."""
        nats, tokens, text_bytes, sizes = 0.0, 0, 0, self._tokenizer.token_bytes()
        for some in itertools.batched(rows, self._cfg.train.global_batch):
            batch = on_devices(self._cfg, some, self._cfg.data.seq_len)
            batch_nats, count = jax.device_get(self._eval_step(self._params, batch))
            nats, tokens = nats + float(batch_nats), tokens + int(count)
            if sizes is not None:
                targets = np.concatenate([row["targets"] for row in some])
                text_bytes += int(sizes[targets[targets >= 0]].sum())
        return Loss(nats, tokens, None if sizes is None else text_bytes)

    def continuations(
        self,
        pairs: Sequence[tuple[list[int], list[int]]],
        done: Callable[[int], object] = lambda count: None,
    ) -> list[tuple[float, bool]]:
        """Score `pairs` of context and continuation, in token ids of the vocabulary; a context has at least one.

        Batches are of similar lengths. `done` is called after each with the number of its pairs.

        Returns:
          For each pair the log-likelihood of the continuation given the context, and whether no other token is likelier
          at any place of it.
        """
        mesh = self._cfg.mesh
        for pair in pairs:
            check_ids("pairs", np.concatenate(pair), self._cfg.model.vocab_size)
        rows = [_continuation_row(context, continuation) for context, continuation in pairs]
        # The longest first: if memory does not suffice, it says so at once.
        order = sorted(range(len(rows)), key=lambda i: -rows[i]["tokens"].size)
        scores = [(0.0, True)] * len(rows)
        for some in itertools.batched(order, self._cfg.train.global_batch):
            length = _padded_length(rows[some[0]]["tokens"].size, mesh.cp * mesh.sp)
            batch = on_devices(self._cfg, [rows[i] for i in some], length)
            nats, best = jax.device_get(self._row_step(self._params, batch))
            for i, row_nats, row_best in zip(some, nats, best, strict=False):
                scores[i] = -float(row_nats), bool(row_best)
            done(len(some))
        return scores


def on_devices(cfg: Config, rows: Sequence[Batch], length: int) -> dict[str, jax.Array]:
    """Pad the rows to `length` and the batch to `train.global_batch` rows with tokens outside the loss."""
    order, batch = sequence_order(length, cfg.mesh.cp, cfg.cp), {}
    for name in rows[0]:
        whole = np.full((cfg.train.global_batch, length), -1 if name == "targets" else 0, np.int32)
        for place, row in zip(whole, rows, strict=False):
            place[: row[name].size] = row[name]
        batch[name] = whole[:, order]
    return jax.device_put(batch, jax.NamedSharding(jax.sharding.get_mesh(), act("BT")))


def source_rows(cfg: Config, source: str) -> Iterator[Batch]:
    """Open a source, as `data.source` names them, and return its rows of `data.seq_len` tokens; the last may be short.

    Every token is a target once, but for the first of a document (`Loss.tokens`). Raises `UserError` at once where the
    source is missing, damaged, endless or outside the vocabulary.
    """
    data = cfg.data
    try:
        opened = open_sources(dataclasses.replace(data, source=source), cfg.model.vocab_size)
    except UserError as error:
        # The command has options of its own for them.
        words = str(error).replace("data.source", "source")
        words = words.replace("data.special_tokens=", "--special-tokens ")
        raise UserError(words.replace("set data.tokenizer=", "set --tokenizer ")) from None
    fix = "has several stages; name one mixture"
    require(len(opened.mixture.weights) == 1, "source", source, fix)
    parts = []
    for corpus in opened.corpora:
        require(isinstance(corpus, Corpus), "source", source, "has no end; name text")
        assert isinstance(corpus, Corpus)
        fix = "holds preference pairs, which a run of train.dpo evaluates itself; name text"
        require(not corpus.pairs, "source", source, fix)
        parts.append(PackedSamples(corpus, ALL, data, ("evaluate",), remainder=True))
    return (part[i] for part in parts for i in range(len(part)))


def _padded_length(size: int, parts: int) -> int:
    """Return a length that rows of `size` tokens are filled to: few lengths, as each is a program of its own.

    It is at most an eighth of the next power of two longer, or 64 tokens, and `parts` divide it.
    """
    step = max(64, (1 << max(size - 1, 0).bit_length()) // 8)
    length = -(-size // step) * step
    return -(-length // parts) * parts


def _continuation_row(context: list[int], continuation: list[int]) -> Batch:
    """Return the row of a context and a continuation, whose tokens alone are targets."""
    ids = np.array(context + continuation, np.int32)
    targets = np.where(np.arange(1, ids.size) < len(context), np.int32(-1), ids[1:])
    return {
        "tokens": ids[:-1],
        "targets": targets,
        "positions": np.arange(ids.size - 1, dtype=np.int32),
    }
