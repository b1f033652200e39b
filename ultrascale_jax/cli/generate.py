"""Continue a text with a trained model, `ultrascale generate MODEL --prompt TEXT`, or talk to it, `--chat`."""

import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ultrascale_jax.checkpoint.copies import run_on_disk
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.models import ModelOptions, described, loaded
from ultrascale_jax.config import Config, MeshConfig, require
from ultrascale_jax.config.section import Count, Natural, NonNegative
from ultrascale_jax.huggingface.files import GENERATION
from ultrascale_jax.storage.foreign import read_json

if TYPE_CHECKING:
    from ultrascale_jax.data.chat import ChatTemplate
    from ultrascale_jax.data.tokenizer import JsonTokenizer, Tokenizer
    from ultrascale_jax.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of `ultrascale generate`, which takes one device if `mesh` is none."""

    prompt: str | None = None
    """Text to continue."""
    chat: command_line.Flag = False
    """Answer the lines of stdin as turns of one conversation, by the tokenizer's chat template."""
    system: Annotated[str | None, command_line.option("TEXT")] = None
    """With --chat, the system message before the first turn."""
    num_tokens: Count = 200
    """Number of tokens to sample; a document that ends earlier ends the text."""
    temperature: NonNegative = 0.8
    """Divides the logits: below 1 is more predictable, 0 always takes the most likely token."""
    top_k: Natural = 50
    """Sample among the k most likely tokens; 0 among all."""
    seed: Natural = 0
    """Another seed is another text."""

    def __post_init__(self):
        super().__post_init__()
        one = (self.prompt is None) == self.chat
        require(one, "prompt", self.prompt, "give --prompt TEXT, or --chat and no prompt")
        fix = "is for a conversation; add --chat"
        require(self.chat or self.system is None, "system", self.system, fix)
        _require_utf8("prompt", self.prompt or "")
        _require_utf8("system", self.system or "")


def _require_utf8(name: str, text: str) -> None:
    """Refuse a text in which Python keeps bytes of the command line or of stdin that it could not decode."""
    fix = "has bytes that are not UTF-8, or the locale is not; convert it, as by iconv, or set LC_ALL=C.UTF-8"
    require(text == text.encode(errors="replace").decode(), name, text, fix)


def sample(
    cfg: Config, params: "Transformer", ids: Sequence[int], options: Options, *, seed: int
) -> list[int]:
    """Return `options.num_tokens` token ids that follow `ids`.

    Call it inside the mesh of `params`, on every process. The mesh's batch axes each sample a text of their own, and a
    process returns one of its own.
    """
    import jax
    import numpy as np

    from ultrascale_jax.models.generate import generate
    from ultrascale_jax.train_step.precision import COMPUTE

    fix = f"has token {max(ids)}, but the model's vocabulary ends at {cfg.model.vocab_size - 1}"
    require(max(ids) < cfg.model.vocab_size, "prompt", options.prompt, fix)
    rows = jax.sharding.get_mesh().shape
    copies = np.tile(np.array(ids, np.int32), (rows["dp"] * rows["fsdp"] * rows["ep"], 1))
    sampled = generate(
        params,
        copies,
        options.num_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        key=jax.random.key(seed),
        dtype=COMPUTE[cfg.train.precision],
    )
    return np.asarray(sampled.addressable_shards[0].data)[0].tolist()


def cut(ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """Return the ids before the first one that is among `ends`."""
    return list(itertools.takewhile(lambda id_: id_ not in ends, ids))


def ends(folder: Path, tokenizer: "Tokenizer", template: "ChatTemplate | None" = None) -> set[int]:
    """Return the tokens that end a text of the model in `folder`.

    They are the end of text, the `eos_token_id` of `generation_config.json`, and with a `template` the end of a turn.
    """
    path = folder / GENERATION
    listed = read_json(path).get("eos_token_id") if path.is_file() else None
    listed = listed if isinstance(listed, list) else [listed]
    turn = None if template is None else template.end_of_turn()
    turn_ids = [] if turn is None else tokenizer.encode(turn, begins=False, rendered=True)
    return {tokenizer.eos, *turn_ids, *(id_ for id_ in listed if isinstance(id_, int))}


def continued(
    cfg: Config, params: "Transformer", tokenizer: "Tokenizer", prompt: str, options: Options
) -> str:
    """Return `prompt` and its continuation, up to the end of the document."""
    ids = tokenizer.encode(prompt)
    require(len(ids) > 0, "prompt", prompt, "must hold at least one token")
    with output.working("writing"):
        new = sample(cfg, params, ids, options, seed=options.seed)
    return prompt + tokenizer.decode(cut(new, ends(Path(options.model), tokenizer)))


def chat(
    cfg: Config,
    params: "Transformer",
    tokenizer: "JsonTokenizer",
    path: Path,
    options: Options,
    lines: Iterable[str],
) -> Iterator[str]:
    """Yield the answer to each of `lines`, a user's turns, by the chat template of the `tokenizer.json` at `path`.

    Empty lines are passed over. Each turn has a seed of its own, from `options.seed` on.
    """
    from ultrascale_jax.data.chat import ChatTemplate

    template = ChatTemplate(path, tokenizer, datetime.now())
    ending = ends(Path(options.model), tokenizer, template)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    for turn, line in enumerate(filter(None, map(str.strip, lines))):
        _require_utf8("stdin", line)
        messages.append({"role": "user", "content": line})
        ids = tokenizer.encode(template.prompt(messages), rendered=True)
        with output.working("answering"):
            new = sample(cfg, params, ids, options, seed=options.seed + turn)
        answer = tokenizer.decode(cut(new, ending)).strip()
        messages.append({"role": "assistant", "content": answer})
        yield answer


def typed_lines() -> Iterator[str]:
    """Yield the lines of stdin, with a prompt where a person types them."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        yield line


def texts(options: Options) -> Iterator[str]:
    """Yield the prompt with its continuation, or with `options.chat` an answer to each line of stdin; all printable."""
    import jax

    from ultrascale_jax.checkpoint.mesh_independent import gather_stages
    from ultrascale_jax.data.tokenizer import JsonTokenizer, load_tokenizer
    from ultrascale_jax.sharding.mesh import make_mesh

    present = options.find_devices()
    if options.mesh is None:
        mesh = make_mesh(MeshConfig(fsdp=1), present[:1])
    else:
        mesh = make_mesh(MeshConfig.parse(options.mesh))
    with output.working(f"loading {options.model}"):
        cfg, _ = described(options)
        cfg, params = loaded(options, replace(cfg, mesh=MeshConfig(**dict(mesh.shape))), mesh)
        params = gather_stages(params)
    name = cfg.data.tokenizer
    tokenizer = load_tokenizer(name, options.special_tokens or cfg.data.special_tokens)
    with jax.set_mesh(mesh):
        if options.prompt is None:
            fix = "has no chat template; give a tokenizer.json whose folder has one by --tokenizer FILE"
            require(isinstance(tokenizer, JsonTokenizer), "tokenizer", name, fix)
            assert isinstance(tokenizer, JsonTokenizer)
            answers = chat(cfg, params, tokenizer, Path(name), options, typed_lines())
            yield from map(output.without_controls, answers)
        else:
            yield output.without_controls(
                continued(cfg, params, tokenizer, options.prompt, options)
            )


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "ultrascale generate"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        options = replace(options, model=run_on_disk(options.model, options.step))
        for text in texts(options):
            print(text, flush=True)
