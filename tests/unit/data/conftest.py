"""A tokenizer with the tokens of chat templates, and the templates that tests make of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chats import write_bpe, write_template
from ultrascale_jax.data.chat import ChatTemplate
from ultrascale_jax.data.tokenizer import JsonTokenizer


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> Path:
    """The path of a `tokenizer.json`."""
    return write_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture
def chat(bpe, tmp_path_factory) -> Callable[..., ChatTemplate]:
    """Return the function that makes the chat template of a source."""

    def made(source, where="config", **options):
        path = write_template(bpe, tmp_path_factory.mktemp("chat") / "hf", source, where)
        return ChatTemplate(path, JsonTokenizer(path), **options)

    return made
