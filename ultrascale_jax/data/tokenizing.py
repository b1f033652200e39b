"""Tokenize documents, conversations or preference pairs by several processes, in their order."""

import functools
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ultrascale_jax.config import SpecialTokens
from ultrascale_jax.data import chat, preferences, shards, tokenizer

GROUP_BYTES = 1 << 20
"""Text that a process tokenizes at once."""

load_tokenizer = functools.cache(tokenizer.load_tokenizer)


class Tokenized(NamedTuple):
    """Documents end to end."""

    tokens: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    answers: np.ndarray | None
    """Whether the loss counts each token, for conversations and pairs."""

    def part(self, first: int, last: int) -> "Tokenized":
        """Return the documents `first` to `last` (exclusive)."""
        begin, end = int(self.lengths[:first].sum()), int(self.lengths[:last].sum())
        answers = None if self.answers is None else self.answers[begin:end]
        return Tokenized(
            self.tokens[begin:end], self.lengths[first:last], self.hashes[first:last], answers
        )


@dataclass(frozen=True)
class Work:
    """How to tokenize texts."""

    tokenizer: str
    special_tokens: SpecialTokens
    kind: Literal["text", "chat", "preferences"]

    def tokenized(self, texts: list[str]) -> Tokenized:
        """Return the tokens of documents, or of rendered conversations or pairs."""
        loaded = load_tokenizer(self.tokenizer, self.special_tokens)
        hashes = np.array([shards.text_hash(text.encode()) for text in texts], np.uint64)
        if self.kind == "preferences":
            hashes = np.repeat(hashes, 2)
            texts = [part for text in texts for part in text.split(preferences.NEXT)]
        if self.kind == "text":
            return Tokenized(*tokenizer.encode_documents(loaded, texts), hashes, None)
        tokens, lengths, answers = chat.encode_conversations(loaded, texts)
        return Tokenized(tokens, lengths, hashes, answers)


def tokenize(work: Work, documents: Iterator[str], processes: int) -> Iterator[Tokenized]:
    """Yield groups of tokenized documents, in the order of the documents."""
    waiting: deque[Future[Tokenized]] = deque()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_use_one_thread) as pool:
        for texts in groups(documents):
            waiting.append(pool.submit(work.tokenized, texts))
            if len(waiting) > 2 * processes:  # bounds the text that is held
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _use_one_thread() -> None:
    """The processes are the parallelism: the tokenizer of each must not start threads as well."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def groups(documents: Iterator[str]) -> Iterator[list[str]]:
    """Yield documents in lists of about `GROUP_BYTES` characters."""
    group, size = [], 0
    for text in documents:
        group.append(text)
        size += len(text)
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
