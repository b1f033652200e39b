"""A run or a Hugging Face folder as a model of lm-evaluation-harness (`lm_eval`).

    import lm_eval
    from ultrascale_jax import LMEvalModel

    results = lm_eval.simple_evaluate(model=LMEvalModel("out/x", mesh="fsdp=4"), tasks=["hellaswag"])

Texts are tokenized as the harness's own model `hf` does it: with BOS where the tokenizer puts one before a text, and
names of special tokens in a text are these tokens. In messages of a chat they are text.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ultrascale_jax.cli.generate import cut, ends
from ultrascale_jax.cli.models import Opened, ScoreOptions, opened
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.config.training import Precision
from ultrascale_jax.data.chat import ChatTemplate
from ultrascale_jax.data.tokenizer import JsonTokenizer, on_disk
from ultrascale_jax.data.tokenizer_files import named_tokens
from ultrascale_jax.models.generate import generate
from ultrascale_jax.train_step.precision import COMPUTE
from ultrascale_jax.training.scoring import Scorer

try:
    from lm_eval import simple_evaluate as simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.tasks import TaskManager as TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    fix = "pip install 'ultrascale_jax[lm-eval]'"
    raise UserError(f"tasks need lm-evaluation-harness; {fix}") from error

# Its bootstrap forks, and a fork of a process with JAX's threads may hang.
os.environ["DISABLE_MULTIPROC"] = "1"

NEW_TOKENS = 256
"""Tokens to generate where a task does not say how many, as for `hf`."""

TOP_K = 50
"""Tokens to sample among where a task does not say how many, as for `hf`."""

NEUTRAL = {"top_p": 1.0, "num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1}
"""Settings of generation with the only value that they may have, unless nothing is sampled."""

OF_SAMPLING = ("top_p", "top_k", "min_p", "typical_p")
"""Settings without effect where the likeliest token is taken."""


class Sampling(NamedTuple):
    """Settings of a task's generation."""

    num_tokens: int
    temperature: float
    top_k: int
    until: tuple[str, ...]
    """Texts before which the answer ends."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Sampling":
        """Read `generation_kwargs` of a task. Raises `UserError` for a setting that cannot be obeyed."""
        unread: dict[str, Any] = {**normalize_gen_kwargs(dict(settings), NEW_TOKENS)}
        until = handle_stop_sequences(unread.pop("until"), None)
        num_tokens = int(unread.pop("max_gen_toks"))
        sampled, temperature = unread.pop("do_sample"), float(unread.pop("temperature", 1.0))
        top_k = int(unread.pop("top_k", TOP_K))
        for name, value in unread.items():
            idle = not sampled and name in OF_SAMPLING
            fix = (
                f"{name} is not known; take the likeliest token, or sample by temperature and top_k"
            )
            is_supported = idle or (name in NEUTRAL and value == NEUTRAL[name])
            require(is_supported, "generation_kwargs", dict(settings), fix)
        return cls(num_tokens, temperature if sampled else 0.0, top_k, tuple(until))


def check_mesh(cfg: Config) -> None:
    """Refuse a pipeline."""
    fix = "tasks are scored without a pipeline; use fsdp or tp"
    require(cfg.mesh.pp == 1, "mesh.pp", cfg.mesh.pp, fix)


@register_model("ultrascale")
class LMEvalModel(TemplateLM):
    """A model of lm-evaluation-harness, in one process over all of its devices.

    Args:
      model: a run directory or a Hugging Face folder (or one that `cli.models.opened` opened).
      mesh: axes as `fsdp=4,tp=2`, without pp; tasks that generate take no cp and sp. None: all devices split the model.
      tokenizer: `bytes` or a `tokenizer.json`; none: the model's own.
      batch_size: rows at once over all devices; none: 8, or the next number that the mesh divides.
      precision: as `train.precision`; none: the run's, or bf16.
      step: step of the run's checkpoint; none: the newest.
      max_length: longest context; none: the positions that the model knows. Longer ones lose their beginning.

    Raises:
      UserError: the folder, mesh, tokenizer or another argument cannot be used.
    """

    def __init__(
        self,
        model: str | Opened,
        *,
        mesh: str | None = None,
        tokenizer: str | None = None,
        batch_size: int | None = None,
        precision: Precision | None = None,
        step: int | None = None,
        max_length: int | None = None,
    ):
        super().__init__()
        if isinstance(model, str):
            named = {"tokenizer": tokenizer, "precision": precision, "step": step, "mesh": mesh}
            model = opened(ScoreOptions(model=model, batch=batch_size, **named))
        self._model, cfg = model, model.cfg
        check_mesh(cfg)
        positions = model.positions
        fix = f"must be from 2 to {positions}, the positions that the model knows"
        require(max_length is None or 2 <= max_length <= positions, "max_length", max_length, fix)
        self.max_length = max_length or positions
        with jax.set_mesh(model.mesh):
            self._scorer = Scorer(cfg, model.params, model.tokenizer)
        self._template: ChatTemplate | None = None
        bos = None
        if isinstance(model.tokenizer, JsonTokenizer):
            names = named_tokens(Path(on_disk(cfg.data.tokenizer)))
            bos = model.tokenizer.id_of(names.get("bos_token", ""))
        self._prefix = model.tokenizer.eos if bos is None else bos

    @property
    def eot_token_id(self) -> int:
        return self._model.tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text that nothing precedes: BOS, or EOS where there is none."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        return self._model.cfg.data.tokenizer.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text with its special tokens; with `add_special_tokens` False it follows another text."""
        begins = add_special_tokens is not False
        ids = self._model.tokenizer.encode(string, begins=begins, rendered=True)
        most, size = max(ids, default=0), self._model.cfg.model.vocab_size
        fix = f"has token {most}, but the model's vocabulary ends at {size - 1}; give the model's tokenizer"
        require(most < size, "tokenizer", self._model.cfg.data.tokenizer, fix)
        return ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        with (
            jax.set_mesh(self._model.mesh),
            tqdm(total=len(pairs), desc="log-likelihoods", disable=disable_tqdm) as bar,
        ):
            answers = self._scorer.continuations(pairs, bar.update)
        for (texts, *_), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Drop the beginning of a context that is too long, but for one token."""
        fix = f"a continuation has {len(continuation)} tokens; shorten the task's texts"
        require(len(continuation) <= self.max_length, "max_length", self.max_length, fix)
        return context[-(self.max_length + 1 - len(continuation)) :], continuation

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of `max_length` that overlap by one token."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            text_windows = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += text_windows
            owners += [number] * len(text_windows)
        sums = [0.0] * len(requests)
        likelihoods = self._loglikelihood_tokens(windows, disable_tqdm)
        for number, (likelihood, _) in zip(owners, likelihoods, strict=True):
            sums[number] += likelihood
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each request, up to its stop texts and the tokens that end a text."""
        groups: dict[Sampling, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(Sampling.of(request.args[1]), []).append(number)
        answers = [""] * len(requests)
        with (
            jax.set_mesh(self._model.mesh),
            tqdm(total=len(requests), desc="answers", disable=disable_tqdm) as bar,
        ):
            for sampling, numbers in groups.items():
                texts = [requests[number].args[0] for number in numbers]
                group_answers = self._answers(texts, sampling, bar.update)
                for number, answer in zip(numbers, group_answers, strict=True):
                    answers[number] = answer
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _answers(
        self, texts: Sequence[str], sampling: Sampling, done: Callable[[int], object]
    ) -> list[str]:
        """Return the answers to `texts`, in batches of similar lengths, the longest first."""
        left, cfg = self.max_length - sampling.num_tokens, self._model.cfg
        fix = f"must be less than the {self.max_length} positions that the model knows"
        require(left > 0, "max_gen_toks", sampling.num_tokens, fix)
        prompts = [(self.tok_encode(text) or [self.prefix_token_id])[-left:] for text in texts]
        order = sorted(range(len(texts)), key=lambda i: -len(prompts[i]))
        answers, rows = [""] * len(texts), cfg.train.global_batch
        ending = ends(self._model.folder, self._model.tokenizer, self._template)
        for start in range(0, len(order), rows):
            numbers = order[start : start + rows]
            batch = [prompts[i] for i in numbers] + [prompts[numbers[-1]]] * (rows - len(numbers))
            padded = np.zeros((rows, len(batch[0])), np.int32)
            for row, ids in zip(padded, batch, strict=True):
                row[: len(ids)] = ids
            sampled = generate(
                self._model.params,
                padded,
                sampling.num_tokens,
                lengths_B=[len(ids) for ids in batch],
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                key=jax.random.key(start),
                dtype=COMPUTE[cfg.train.precision],
            )
            for i, ids in zip(numbers, np.asarray(sampled).tolist(), strict=False):
                answers[i] = self._model.tokenizer.decode(cut(ids, ending), special=False)
                for stop in filter(None, sampling.until):
                    answers[i] = answers[i].split(stop)[0]
            done(len(numbers))
        return answers

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation up to the model's answer, or up to its last message, to be continued."""
        template = self._chat()
        if add_generation_prompt:
            return template.prompt(chat_history)
        *history, last = chat_history
        return template.prompt(history) + self._model.tokenizer.quote(last["content"])

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template itself, which the harness records."""
        fix = "one template belongs to the tokenizer; use true"
        require(not isinstance(chat_template, str), "apply_chat_template", chat_template, fix)
        return self._chat().source if chat_template else ""

    def _chat(self) -> ChatTemplate:
        if self._template is None:
            tokenizer = self._model.tokenizer
            fix = "has no chat template; give a tokenizer.json whose folder has one"
            name = self._model.cfg.data.tokenizer
            require(isinstance(tokenizer, JsonTokenizer), "tokenizer", name, fix)
            assert isinstance(tokenizer, JsonTokenizer)
            self._template = ChatTemplate(Path(on_disk(name)), tokenizer, datetime.now())
        return self._template
