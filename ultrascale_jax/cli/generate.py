"""Continue a text with a trained model: `ultrascale generate MODEL --prompt TEXT`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.models import huggingface_config, load_huggingface
from ultrascale_jax.config import Config, MeshConfig, require
from ultrascale_jax.huggingface.files import is_huggingface

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ultrascale_jax.data.tokenizer import Tokenizer
    from ultrascale_jax.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `ultrascale generate`."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Run directory of `ultrascale train`, or Hugging Face folder."""
    prompt: str
    """Text to continue."""
    num_tokens: int = 200
    """How many tokens to sample; a document that ends earlier ends the text."""
    temperature: float = 0.8
    """Divides the logits: below 1 is more predictable, 0 always takes the most likely token."""
    top_k: int = 50
    """Sample among the k most likely tokens; 0 among all."""
    seed: int = 0
    """Another seed is another text."""
    tokenizer: Annotated[str | None, command_line.option("FILE", "the model's")] = None
    """`bytes`, or a Hugging Face tokenizer.json."""
    step: int | None = None
    """Step of the run's checkpoint; none is the newest."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=SIZE,...")] = None
    """Mesh over all devices, as pp=2,tp=4, for a model that one device does not hold; none is one device."""
    devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Run on so many fake CPU devices."""

    def __post_init__(self):
        command_line.require_at_least(0, self, "temperature", "top_k", "seed")
        command_line.require_at_least(1, self, "num_tokens")


def loaded(options: Options, mesh: "Mesh") -> tuple[Config, "Transformer"]:
    """Return config and parameters of the run's checkpoint or the Hugging Face folder."""
    from ultrascale_jax.checkpoint.load_params import load_params

    folder = Path(options.model)
    if not is_huggingface(folder):
        return load_params(folder, mesh, options.step)
    cfg, _ = huggingface_config(folder, tokenizer=options.tokenizer, step=options.step)
    cfg = replace(cfg, mesh=MeshConfig(**dict(mesh.shape)))
    return cfg, load_huggingface(folder, cfg, mesh)


def sample_text(
    cfg: Config,
    params: "Transformer",
    tokenizer: "Tokenizer",
    prompt: str,
    num_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """`prompt` and up to `num_tokens` tokens more, cut where the document ends.

    Call it inside the mesh of `params`, on every process. The mesh's batch axes each sample a text of their own, and a
    process returns one of its own.
    """
    import jax
    import numpy as np

    from ultrascale_jax.models.generate import generate
    from ultrascale_jax.train_step.precision import COMPUTE

    ids = tokenizer.encode(prompt)
    require(len(ids) > 0, "prompt", prompt, "must hold at least one token")
    fix = f"has token {max(ids)}, but the model's vocabulary ends at {cfg.model.vocab_size - 1}"
    require(max(ids) < cfg.model.vocab_size, "prompt", prompt, fix)
    rows = jax.sharding.get_mesh().shape
    copies = np.tile(np.array(ids, np.int32), (rows["dp"] * rows["fsdp"] * rows["ep"], 1))
    key = jax.random.key(seed)
    dtype = COMPUTE[cfg.train.precision]
    sampled = generate(
        params, copies, num_tokens, temperature=temperature, top_k=top_k, key=key, dtype=dtype
    )
    new = np.asarray(sampled.addressable_shards[0].data)[0].tolist()
    return prompt + tokenizer.decode(
        new[: new.index(tokenizer.eos)] if tokenizer.eos in new else new
    )


def printable(text: str) -> str:
    """`text` without the control characters that a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "ultrascale generate"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        import jax

        from ultrascale_jax.data.tokenizer import load_tokenizer
        from ultrascale_jax.sharding.mesh import make_mesh

        if options.devices is not None:
            command_line.use_fake_devices(options.devices)
        if options.mesh is None:
            mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
        else:
            wanted = MeshConfig.parse(options.mesh)
            if options.devices is None:
                command_line.require_devices(wanted, jax.device_count())
            mesh = make_mesh(wanted)
        cfg, params = loaded(options, mesh)
        with jax.set_mesh(mesh):
            text = sample_text(
                cfg,
                params,
                load_tokenizer(options.tokenizer or cfg.data.tokenizer),
                options.prompt,
                options.num_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                seed=options.seed,
            )
    print(printable(text))
