"""Small byte-level tokenizers in the files of Hugging Face."""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors


def write_tokenizer(
    folder: Path, added: Mapping[str, bool], config: Mapping = {}, post: str = "$A"
) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json`, and return the path of the former.

    Ids 0 to 255 are the bytes. `added` are the names of the tokens from 256 on, with whether each is special. `post` is
    the template of the post-processor, as `<s> $A`.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    for name, special in added.items():
        made.add_special_tokens([name]) if special else made.add_tokens([name])
    named = [(name, made.token_to_id(name)) for name in added if name in post.split()]
    made.post_processor = processors.TemplateProcessing(single=post, special_tokens=named)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"
