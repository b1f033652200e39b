"""Multi-token prediction equals its definition: shifts in any order of tokens, losses, and their gradient."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.parity.comparison import compare
from tests.runs import change
from tests.states import some_state
from ultrascale_jax.config import (
    Config,
    ContextConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.sharding.sequence_order import sequence_order
from ultrascale_jax.train_step.multi_token import shifted
from ultrascale_jax.train_step.step import apply_gradients, gradients, position_weight

T, H = 20, 4
CFG = Config(
    model=ModelConfig(
        vocab_size=32,
        d_model=16,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=H,
        mtp_layers=2,
    ),
    mesh=MeshConfig(fsdp=1),
    data=DataConfig(source="synthetic", seq_len=T),
    train=TrainConfig(global_batch=4, precision="fp32", zero=0, mtp_weight=0.5),
)


def batch_of(cfg: Config) -> dict[str, np.ndarray]:
    """A batch in natural order, with several documents a row."""
    return Loader(
        cfg.data, vocab_size=cfg.model.vocab_size, global_batch=cfg.train.global_batch, seed=0
    ).batch(0)


def defined(batch: dict[str, np.ndarray], depth: int) -> tuple[np.ndarray, np.ndarray]:
    """The token that is read and the one that is predicted at each position; 0 and -1 where the document has none."""
    tokens, targets = np.zeros_like(batch["tokens"]), np.full_like(batch["targets"], -1)
    for row, t in np.ndindex(*tokens.shape):
        ahead, segments = t + depth, batch["segment_ids"][row]
        if ahead < T and segments[t] == segments[ahead]:
            tokens[row, t] = batch["tokens"][row, ahead]
            targets[row, t] = batch["targets"][row, ahead]
    return tokens, targets


@pytest.mark.parametrize(
    ("mesh", "cp"),
    [
        ({"cp": 2, "fsdp": 2}, ContextConfig()),
        ({"cp": 4}, ContextConfig(ulysses=2)),
        ({"cp": 4}, ContextConfig(strategy="ring")),
    ],
    ids=["zigzag", "zigzag_x_ulysses", "ring"],
)
def test_tokens_and_targets_are_those_further_on_in_any_order_of_a_sequence(mesh, cp, depth=3):
    cfg = dataclasses.replace(CFG, mesh=MeshConfig.of(**mesh), cp=cp)
    cfg = cfg.check(4)
    batch = batch_of(cfg)
    order = sequence_order(T, cfg.mesh.cp, cfg.cp)
    device_mesh = make_mesh(cfg.mesh, jax.devices()[:4])
    with jax.set_mesh(device_mesh):
        place = NamedSharding(device_mesh, act("BT"))
        given = {name: jax.device_put(x[:, order], place) for name, x in batch.items()}
        found = jax.jit(lambda batch: shifted(cfg, batch, depth))(given)
    for one, expected in zip(found, defined(batch, depth), strict=True):
        assert one.sharding.spec == act("BT")
        np.testing.assert_array_equal(one, expected[:, order])
    assert (expected >= 0).sum() < (batch["targets"] >= 0).sum()


class Reference:
    """The objective in NumPy and float64, a token at a time; parameters by dotted name."""

    def __init__(self, cfg: Config, params: dict[str, np.ndarray]):
        self.model, self.params = cfg.model, params

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x**2) + self.model.norm_eps) * self.params[name]

    def rotate(self, x, position):
        angles = position * 10000.0 ** (-np.arange(0, H, 2) / H)
        a, b = np.split(x, 2, axis=-1)
        c, s = np.cos(angles), np.sin(angles)
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    def layer(self, xs, get):
        """One layer on one document `[T, D]`; `get` returns its parameter of a name."""
        normed = [self.norm(x, get("attn_norm")) for x in xs]
        q, k, v = (np.einsum("td,dnh->tnh", normed, self.params[get(f"attn.w_{n}")]) for n in "qkv")
        q, k = ([self.rotate(x, t) for t, x in enumerate(h)] for h in (q, k))
        out = []
        for t, x in enumerate(xs):
            heads = []
            for n, query in enumerate(q[t]):
                group = n // (self.model.num_heads // self.model.num_kv_heads)
                scores = np.exp([query @ k[s][group] / H**0.5 for s in range(t + 1)])
                heads.append(scores / scores.sum() @ [v[s][group] for s in range(t + 1)])
            x = x + np.einsum("nh,nhd->d", heads, self.params[get("attn.w_o")])
            h = self.norm(x, get("mlp_norm"))
            gate, up = h @ self.params[get("mlp.w_gate")], h @ self.params[get("mlp.w_up")]
            out.append(x + (gate / (1 + np.exp(-gate)) * up) @ self.params[get("mlp.w_down")])
        return out

    def nats(self, xs, targets):
        if not targets:
            return np.zeros(0)
        logits = np.array(xs) @ self.params["head"]
        logits -= logits.max(1, keepdims=True)
        return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(targets)), targets]

    def document(self, tokens, last):
        """Sums of nats, the model's and each module's, of a document whose last token has the target `last`, if any."""
        stream = [*tokens, *([] if last is None else [last])]
        embedded = self.params["embed"][stream]
        xs = embedded[: len(tokens)]
        for i in range(self.model.num_layers):
            xs = self.layer(xs, lambda name, i=i: f"stacks.0.{name}/{i}")
        xs = [self.norm(x, "final_norm") for x in xs]
        found = [self.nats(xs[: len(stream) - 1], stream[1:])]
        for k in range(1, self.model.mtp_layers + 1):
            at = f"mtp.{k - 1}."
            # Position i has the token k places later; without one it can predict nothing.
            xs = [
                np.concatenate([self.norm(e, f"{at}token_norm"), self.norm(x, f"{at}hidden_norm")])
                @ self.params[f"{at}w_join"]
                for x, e in zip(xs, embedded[k:], strict=False)
            ]
            if not xs:
                found.append(np.zeros(0))
                continue
            xs = self.layer(xs, lambda name, at=at: f"{at}block.{name}")
            xs = [self.norm(x, f"{at}norm") for x in xs]
            rest = stream[k + 1 :]
            found.append(self.nats(xs[: len(rest)], rest))
        return found

    def losses(self, batch):
        """Sums and numbers of targets, the model's and each module's."""
        found = []
        for row in range(len(batch["tokens"])):
            for segment in np.unique(batch["segment_ids"][row]):
                here = batch["segment_ids"][row] == segment
                tokens, last = batch["tokens"][row][here], batch["targets"][row][here][-1]
                found.append(self.document(tokens, None if last < 0 else last))
        depths = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        return np.array([d.sum() for d in depths]), np.array([d.size for d in depths])

    def objective(self, batch, mtp_weight):
        """Mean over the model's targets, and the modules' sums over as many."""
        sums, counts = self.losses(batch)
        return (sums[0] + mtp_weight * sums[1:].mean()) / counts[0]


def by_name(tree) -> dict[str, np.ndarray]:
    """Arrays in float64 by dotted name; a layer's has its number behind a slash."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        value = np.asarray(leaf, np.float64)
        rows = enumerate(value) if name.startswith("stacks.") else [("", value)]
        found |= {f"{name}/{i}" if i != "" else name: row for i, row in rows}
    return found


def test_losses_and_gradient_are_those_of_the_definition_in_float64():
    cfg = CFG.check(1)
    mesh, batch = make_mesh(cfg.mesh, jax.devices()[:1]), batch_of(cfg)

    @jax.jit
    def step(state, batch):
        weight = position_weight(state, batch)
        grads, sums = gradients(cfg, state.params, batch, weight)
        return grads, apply_gradients(cfg, state, batch, grads, sums)[1]

    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh, scale=0.3)
        grads, metrics = step(state, jax.device_put(batch, NamedSharding(mesh, act("BT"))))
    params = by_name(state.params)
    sums, counts = Reference(cfg, params).losses(batch)
    found = [metrics["loss"], *metrics["mtp_loss"]]
    np.testing.assert_allclose(found, sums / counts, rtol=2e-6)
    # Along a direction, in which every parameter moves.
    rng, h = np.random.default_rng(3), 1e-5
    way = {name: rng.normal(size=value.shape) for name, value in params.items()}
    ahead, behind = (
        Reference(
            cfg, {name: value + sign * h * way[name] for name, value in params.items()}
        ).objective(batch, cfg.train.mtp_weight)
        for sign in (1, -1)
    )
    share = batch["targets"].size / counts[0]
    slope = share * sum(np.sum(g * way[name]) for name, g in by_name(grads).items())
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * h), rtol=1e-5)


def test_a_pipeline_runs_the_modules_as_one_device_does():
    """By night `test_meshes.py` has pipelines of experts, and of two modules."""
    cfg = change(
        CFG,
        mesh={"pp": 2, "tp": 2, "fsdp": 1},
        pp={"schedule": "afab"},
        model={"mtp_layers": 1},
        train={"zero": 2, "microbatches": 2, "steps": 1},
    )
    compare(cfg.check(4), seeds=(0,))
