"""Define what a step minimises: `NextToken`, with the losses of multi-token prediction, `Distillation` or `Preference`.

Each gives, for a micro-batch, the term to differentiate and `Sums`, which add up over the micro-batches of a step.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ultrascale_jax.config import Config, require, require_type
from ultrascale_jax.config.dpo import most_pairs
from ultrascale_jax.models.block import Terms
from ultrascale_jax.models.distillation import Form, Stored, distillation_loss
from ultrascale_jax.models.fp8 import Fp8
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import gather_sequence
from ultrascale_jax.models.lora import without_adapters
from ultrascale_jax.models.partition import split_adapters
from ultrascale_jax.models.transformer import ModelOutputs, Transformer
from ultrascale_jax.train_step import balance, preference
from ultrascale_jax.train_step.multi_token import predict_ahead
from ultrascale_jax.train_step.precision import COMPUTE, fp8_of, layer_inputs
from ultrascale_jax.train_step.remat import by_number
from ultrascale_jax.train_step.zero import prepare_params

Batch = dict[str, jax.Array]
"""`tokens`, `targets`, `positions` and, with documents, `segment_ids`: `[B, T]` int32; of a stored teacher
`teacher_ids` and `teacher_logps`, as of `Stored`."""

Metrics = dict[str, jax.Array]

REFERENCE = "reference"
"""Name in a batch of the answers' log-likelihoods `[B, P, 2]` by the reference of `train.dpo`."""


class Sums(NamedTuple):
    """Sums over the micro-batches of a step, except the gradients."""

    loss: jax.Array
    """Bare cross-entropy, or the loss of distillation or pairs, times the weight of a position."""
    routed: jax.Array | None = None
    """The routers' statistics `[L, num + 1]` (`models/moe.py`), partial sums; none without experts."""
    mtp: tuple[jax.Array, jax.Array] | None = None
    """Bare cross-entropies times the weight, and targets, of each of `model.mtp_layers`: `[mtp_layers]`."""
    pairs: jax.Array | None = None
    """With `train.dpo` the sums over pairs of `preference.SUMS`."""
    terms: dict[str, jax.Array] | None = None
    """Sums of `Transformer.loss_terms` and `layer_terms`, or the parts of the loss of distillation, times the weight of
    a position; none without any."""


@dataclass(frozen=True, kw_only=True)
class NextToken:
    """Cross-entropy of the next token, z-loss, the routers' losses, and the losses of multi-token prediction."""

    cfg: Config
    fp8: Fp8 | None = None
    weight: jax.Array
    """Factor of a position's loss."""
    router_weight: jax.Array | float = 0.0
    """Factor of a position's routers' losses."""
    terms: tuple[str, ...] = ()
    """Names of `Sums.terms`."""

    def loss(self, model: Transformer, batch: Batch) -> tuple[jax.Array, Sums]:
        """Return the term to differentiate, and the sums, of a micro-batch; `model` is `zero.prepare_params`'s."""
        inputs = layer_inputs(self.cfg, batch, self.fp8)
        out = run_layers(self.cfg, model, batch, inputs)
        total, sums = self.head(model, out.x_BRD, batch, inputs)
        total += self.router_weight * out.balance
        of_layers = sum_terms(out.terms, self.router_weight * batch["targets"].size)
        total = sum((w * of_layers[name] for name, w in model.layer_terms.items()), total)
        routed = join_statistics(out.statistics_LZ, sums.routed)
        return total, sums._replace(routed=routed, terms=join_terms(sums.terms, of_layers))

    def head(
        self, model: Transformer, x_BRD: jax.Array, batch: Batch, inputs: LayerInputs
    ) -> tuple[jax.Array, Sums]:
        """Return the part of `loss` that comes from the hidden states after the final norm.

        Its statistics are of `model.mtp_layers` alone.
        """
        cfg, dtype = self.cfg, COMPUTE[self.cfg.train.precision]
        model = model.with_whole_head(dtype) if model.cfg.mtp_layers else model
        options = {"z_loss": cfg.train.z_loss, "dtype": dtype}
        total, nats, terms = model_loss(model, x_BRD, batch["targets"], self.weight, **options)
        if not model.cfg.mtp_layers:
            return total, Sums(nats, terms=terms)
        later_tokens = predict_ahead(
            cfg, model, x_BRD, batch, inputs, self.weight, self.router_weight
        )
        statistics = later_tokens.statistics
        routed = jnp.stack(statistics) if statistics else None
        mtp = later_tokens.nats, later_tokens.counts
        return total + later_tokens.objective, Sums(nats, routed, mtp, terms=terms)

    def zeros(self) -> Sums:
        """Return the sums of no micro-batch."""
        modules = self.cfg.model.mtp_layers
        mtp = (jnp.zeros(modules, jnp.float32), jnp.zeros(modules, jnp.int32)) if modules else None
        terms = dict.fromkeys(self.terms, jnp.float32(0.0)) or None
        return Sums(jnp.float32(0.0), balance.statistics_start(self.cfg), mtp, terms=terms)


@dataclass(frozen=True, kw_only=True)
class Distillation(NextToken):
    """Divergence from a teacher and cross-entropy of the next token (`train.distill`), and the routers' losses."""

    teacher: Transformer | None
    """The teacher, as `prepare_params` returned it; none where a batch has what is stored of its probabilities."""

    def head(
        self, model: Transformer, x_BRD: jax.Array, batch: Batch, inputs: LayerInputs
    ) -> tuple[jax.Array, Sums]:
        """Return what `NextToken.head` does; the loss to report is the objective, and its two parts are terms."""
        if self.teacher is None:
            taught = Stored(batch["teacher_ids"], batch["teacher_logps"])
        else:
            taught = last_states(self.cfg.teacher, self.teacher, batch)
        form, dtype = Form.of(self.cfg.train.distill), inputs.dtype
        with jax.named_scope("loss"):
            student = gather_sequence(x_BRD, "V"), model.head_weight(dtype)
            arguments = batch["targets"], self.weight, taught, self.cfg.model.vocab_size
            total, *parts = distillation_loss(form, *student, *arguments)
        return total, Sums(total, terms=dict(zip(DISTILLATION_TERMS, parts, strict=True)))


def last_states(cfg: Config, teacher: Transformer, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Run a teacher, as `prepare_params` returned it: return its hidden states after the final norm, and its head."""
    with jax.named_scope("teacher"):
        inputs = layer_inputs(cfg, batch, None)
        out = run_layers(cfg, teacher, batch, inputs)
        return gather_sequence(out.x_BRD, "V"), teacher.head_weight(inputs.dtype)


DISTILLATION_TERMS = ("hard_loss", "divergence")
"""Names of the parts of the loss of distillation."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Loss of pairs of answers, the margin of the chosen one over the rejected one (`preference.py`)."""

    cfg: Config
    fp8: Fp8 | None = None
    weight: jax.Array
    """Factor of a pair's loss."""
    router_weight: jax.Array | float = 0.0
    """Factor of a position's routers' losses, of the policy alone."""
    reference: tuple[Transformer, Fp8 | None] | None = None
    """Model over which the log-ratios are, as `prepare_params` returned it, and `fp8_of` it."""

    def loss(self, model: Transformer, batch: Batch) -> tuple[jax.Array, Sums]:
        """Return what `NextToken.loss` does."""
        if self.reference is not None:
            reference, fp8 = self.reference
            out = run_layers(self.cfg, reference, batch, layer_inputs(self.cfg, batch, fp8))
            batch = batch | {REFERENCE: answer_logps(self.cfg, reference, out.x_BRD, batch)}
        inputs = layer_inputs(self.cfg, batch, self.fp8)
        out = run_layers(self.cfg, model, batch, inputs)
        loss, sums = self.head(model, out.x_BRD, batch, inputs)
        return loss + self.router_weight * out.balance, sums._replace(routed=out.statistics_LZ)

    def head(
        self, model: Transformer, x_BRD: jax.Array, batch: Batch, inputs: LayerInputs
    ) -> tuple[jax.Array, Sums]:
        """Return what `NextToken.head` does; a batch has the log-likelihoods of the reference as `REFERENCE`."""
        policy_BP2 = answer_logps(self.cfg, model, x_BRD, batch)
        dpo, reference_BP2 = self.cfg.train.dpo, batch.get(REFERENCE)
        total, sums = preference.pair_losses(dpo, policy_BP2, reference_BP2, batch)
        loss = self.weight * total
        return loss, Sums(loss, pairs=sums)

    def zeros(self) -> Sums:
        """Return the sums of no micro-batch."""
        routed = balance.statistics_start(self.cfg)
        return Sums(jnp.float32(0.0), routed, pairs=jnp.zeros(len(preference.SUMS)))


def answer_logps(cfg: Config, model: Transformer, x_BRD: jax.Array, batch: Batch) -> jax.Array:
    """Return `preference.answer_logps` in the type of compute, for rows of `data.seq_len` tokens."""
    pairs, dtype = most_pairs(cfg.data.seq_len), COMPUTE[cfg.train.precision]
    return preference.answer_logps(model, x_BRD, batch, pairs, dtype)


def of_head(
    cfg: Config, weight: jax.Array, router_weight: jax.Array | float = 0.0
) -> NextToken | Preference:
    """Return the objective whose `head` a pipeline runs."""
    kind = Preference if cfg.train.dpo.enabled else NextToken
    return kind(cfg=cfg, weight=weight, router_weight=router_weight)


def of_run(
    cfg: Config,
    used: Transformer,
    fp8: Fp8 | None,
    reference: Transformer | None,
    weight: jax.Array,
    router_weight: jax.Array,
) -> NextToken | Preference:
    """Return what `cfg` minimises; `used`, `fp8` and `reference` as given to `preference_objective`."""
    if cfg.train.dpo.enabled:
        return preference_objective(cfg, used, fp8, reference, weight, router_weight)
    same = {"cfg": cfg, "fp8": fp8, "weight": weight, "router_weight": router_weight}
    if not cfg.train.distill.enabled:
        return NextToken(terms=(*used.loss_terms, *used.layer_terms), **same)
    teacher = None if reference is None else prepare_params(cfg.teacher, reference)
    return Distillation(teacher=teacher, terms=(*DISTILLATION_TERMS, *used.layer_terms), **same)


def preference_objective(
    cfg: Config,
    used: Transformer,
    fp8: Fp8 | None,
    reference: Transformer | None,
    weight: jax.Array,
    router_weight: jax.Array | float = 0.0,
) -> Preference:
    """Return the objective of `train.dpo`, over the base of adapters, or else over `TrainState.reference`.

    `used` is the model that is trained, with its adapters, as `prepare_params` returned it, and `fp8` is `fp8_of` it,
    and of its base.
    """
    over = None
    if reference is not None:
        over = prepare_params(cfg, reference), fp8_of(cfg, reference)
    elif cfg.train.dpo.has_reference:
        over = without_adapters(split_adapters(used)[1]), fp8
    weights = {"weight": weight, "router_weight": router_weight}
    return Preference(cfg=cfg, fp8=fp8, reference=over, **weights)


def run_layers(cfg: Config, model: Transformer, batch: Batch, inputs: LayerInputs) -> ModelOutputs:
    """Run embedding, layers and final norm as `cfg` recomputes and offloads them."""
    return model(batch["tokens"], inputs, remat=by_number(cfg))


def model_loss(
    model: Transformer, x_BRD: jax.Array, targets_BT: jax.Array, weight: jax.Array, **options
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array] | None]:
    """Return objective, bare loss and terms of `Transformer.loss`; None for the terms of a model without any.

    Raises:
      UserError: the terms have other names than `loss_terms`.
    """
    objective, nats, *terms = model.loss(x_BRD, targets_BT, weight, **options)
    terms = dict(terms[0]) if terms else {}
    fix = f"loss returned the terms {sorted(terms)}; the attribute names each, and no other"
    names = model.loss_terms
    require(sorted(terms) == sorted(names), f"{type(model).__name__}.loss_terms", names, fix)
    return objective, nats, {name: jnp.float32(terms[name]) for name in names} or None


def sum_terms(means: Terms, positions: jax.Array | float) -> Terms:
    """Return the sums over weighted positions of the layers' terms, which are means."""
    return {name: positions * mean for name, mean in means.items()}


def join_statistics(of_layers: jax.Array | None, of_modules: jax.Array | None) -> jax.Array | None:
    """Return the routers' statistics of the layers, and then of `model.mtp_layers`."""
    parts = [rows for rows in (of_layers, of_modules) if rows is not None]
    return jnp.concatenate(parts) if parts else None


def join_terms(of_loss: Terms | None, of_layers: Terms) -> Terms | None:
    """Return the terms of the loss and of the layers; None without any."""
    return (of_loss or {}) | of_layers or None


def check_term_names(model: type[Transformer], taken: Collection[str]) -> None:
    """Refuse a term of a model whose name is taken, by a metric or by another term."""
    for attribute in ("loss_terms", "layer_terms"):
        names = [*getattr(model, attribute)]
        name = next((name for name in names if name in taken), None)
        fix = "is the name of another metric of a step; rename the term"
        require(name is None, f"{model.__name__}.{attribute}", name, fix)
        taken = {*taken, *names}


def check_batch(batch: Batch) -> None:
    """Refuse what is no batch of `hooks.Batch`."""
    require_type("batch", batch, dict, "of tokens, targets and positions, [B, T] int32")
    for name in ("tokens", "targets", "positions", *(["segment_ids"] * ("segment_ids" in batch))):
        require(name in batch, "batch", list(batch), f"{name!r} is missing")
        array, fix = (
            jax.typeof(batch[name]),
            f"must be int32 {batch['tokens'].shape}, as tokens are",
        )
        same = array.dtype == jnp.int32 and array.shape == batch["tokens"].shape and array.ndim == 2
        require(same, f"batch[{name!r}]", str(array), fix)


def count(batch: Batch) -> jax.Array:
    """Return the number of targets that the loss counts; int32 scalar."""
    return jnp.sum((batch["targets"] >= 0).astype(jnp.int32))


def count_terms(cfg: Config, batch: Batch) -> jax.Array:
    """Return the number of terms whose mean is the loss: targets, or with `train.dpo` pairs; int32 scalar."""
    return preference.count_pairs(batch) if cfg.train.dpo.enabled else count(batch)


def of_known_ids(cfg: Config, batch: Batch, loss: jax.Array) -> jax.Array:
    """Return the loss, but NaN, so that the step is skipped, if `batch` has ids outside the vocabulary.

    A target may be -1. The host cannot see the values of a batch; the loader checks its own.
    """
    tokens, targets, size = batch["tokens"], batch["targets"], cfg.model.vocab_size
    outside = (tokens < 0) | (tokens >= size) | (targets < -1) | (targets >= size)
    return jnp.where(jnp.sum(outside.astype(jnp.int32)) == 0, loss, jnp.nan)


def metrics(
    cfg: Config,
    model: type[Transformer],
    batch: Batch,
    sums: Sums,
    mean: jax.Array,
    of_update: Metrics,
) -> Metrics:
    """Return the metrics of a step: of its update, and of its sums but the loss.

    `mean` times a sum of weighted losses is their mean.
    """
    values = of_update | balance.metrics(cfg, sums.routed)
    if sums.mtp is not None:
        nats, counts = sums.mtp
        values["mtp_loss"] = mean * count(batch) * nats / jnp.maximum(counts, 1)
    if sums.pairs is not None:
        values |= preference.metrics(sums.pairs, preference.count_pairs(batch))
    check_term_names(model, values)
    return values | {name: mean * term for name, term in (sums.terms or {}).items()}
