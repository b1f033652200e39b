"""Preference pairs, in the forms of TRL, as marked text: a prompt with a chosen and with a rejected answer.

{"prompt": "...", "chosen": "...", "rejected": "..."}          text; the separator that follows ends the answer
{"prompt": [MESSAGES], "chosen": [...], "rejected": [...]}     messages, by the chat template
{"chosen": [MESSAGES], "rejected": [MESSAGES]}                 the prompt is their common beginning; of text too
"""

import json
from typing import Any

from ultrascale_jax.config import UserError
from ultrascale_jax.data.chat import BEGIN, END, ChatTemplate
from ultrascale_jax.data.conversations import is_messages, kind_of_row
from ultrascale_jax.data.tokenizer import QUOTE, Tokenizer

NEXT = "\ufdd2"
"""Parts the chosen text of a pair from the rejected one; a noncharacter as `BEGIN` and `END`."""

FORMS = "text, or lists of messages; give `prompt` the same form, or leave it out where both begin with it"


def render_pair(row: Any, tokenizer: Tokenizer, template: ChatTemplate | None) -> str:
    """Return both texts of a pair with marks around their answers, joined by `NEXT`.

    The `prompt` itself has no answer to learn, though it may be a conversation. Messages need the `template` of the
    `tokenizer`. Raises `UserError`, whose text follows the row's place.
    """
    if kind_of_row(row) != "preferences":
        fix = "; conversations need --chat" if kind_of_row(row) == "chat" else ""
        raise UserError(f"has no `chosen` and `rejected`{fix}")
    if {BEGIN, END, NEXT, QUOTE} & set(json.dumps(row, ensure_ascii=False, default=str)):
        raise UserError("has one of U+FDD0 to U+FDD4, which are no characters; remove it")
    answers, row_prompt = (row["chosen"], row["rejected"]), row.get("prompt")
    if all(isinstance(answer, str) for answer in answers):
        if not isinstance(row_prompt, str | None):
            raise UserError(f"has a `prompt` unlike `chosen` and `rejected`, which are {FORMS}")
        answers = tuple(map(tokenizer.quote, answers))
        count = 0 if row_prompt is not None else _shared(*answers)
        prompt = tokenizer.quote(row_prompt) if row_prompt is not None else answers[0][:count]
        return NEXT.join(prompt + BEGIN + answer[count:] for answer in answers)
    if not all(map(is_messages, answers)):
        raise UserError(f"has `chosen` and `rejected` that are not both {FORMS}")
    if template is None:
        fix = "give --tokenizer the folder of a chat model's"
        raise UserError(f"has messages, which need a chat template; {fix}")
    # A text as the prompt of messages repeats their first one, as in ultrafeedback_binarized.
    prompt = row_prompt if isinstance(row_prompt, list) else []
    if not (isinstance(row_prompt, str | None) or is_messages(row_prompt)):
        raise UserError(f"has a `prompt` unlike `chosen` and `rejected`, which are {FORMS}")
    first = len(prompt) or _shared(*answers)
    about = {name: row.get(name) for name in ("tools", "system")}
    talks = [{"messages": prompt + answer, **about} for answer in answers]
    return NEXT.join(template.render(talk, first) for talk in talks)


def _shared(chosen: Any, rejected: Any) -> int:
    """Return how many messages, or characters, of both are their prompt; at least one of either is left."""
    most = max(min(len(chosen), len(rejected)) - 1, 0)
    count = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    if count and chosen[count - 1] == " ":
        count -= 1  # a tokenizer joins the space to the next word
    if count < 1:
        raise UserError(
            "has no `prompt`, and `chosen` and `rejected` have no common beginning; give one"
        )
    return count
