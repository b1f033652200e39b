"""Text from a trained run, by the command that a user types."""

import io

import pytest
import tokenizers

from tests.checkpoints import save
from tests.commands import refused
from tests.faults.tiny import config as TINY
from tests.runs import change, in_folder, mesh_of
from tests.states import some_state
from ultrascale_jax.cli.generate import main

CFG = change(TINY, mesh={"fsdp": 1}, model={"vocab_size": 256})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run directory with two checkpoints of a model that was never trained."""
    folder = tmp_path_factory.mktemp("run")
    save(in_folder(CFG, folder), some_state(CFG, mesh_of(CFG)), 1, 2)
    return folder


def text(capsys, run_dir, *options):
    main([str(run_dir), "--prompt", "def f", "--num-tokens", "12", *options])
    return capsys.readouterr().out


def test_the_prompt_is_continued_and_the_seed_decides_how(run_dir, capsys):
    first = text(capsys, run_dir)
    assert first.startswith("def f") and len(first) > len("def f\n")
    assert text(capsys, run_dir) == first
    assert text(capsys, run_dir, "--step", "1") == first
    assert text(capsys, run_dir, "--seed", "1") != first


def test_greedy_text_is_the_same_on_a_mesh(run_dir, capsys):
    greedy = text(capsys, run_dir, "--temperature", "0")
    assert text(capsys, run_dir, "--temperature", "0", "--mesh", "fsdp=4,tp=2") == greedy


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "7"], "step=7: "),
        (["--top-k", "-1"], "top_k=-1: "),
        (["--mesh", "fsdp=3"], "mesh="),
        (["--prompt", ""], "prompt=''"),
        (["--prompt", "a\udcff"], r"prompt='a\udcff': has bytes that are not UTF-8"),
        (["--chat"], "or --chat and no prompt"),
        (["--system", "b"], "add --chat"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(run_dir, capsys, words, said):
    assert said in refused(capsys, "generate", run_dir, "--prompt", "def f", *words)


CHATML = """{% for m in messages %}{{ "<|im_start|>" + m.role + " " + m.content + "<|im_end|>" }}{% endfor %}
{% if add_generation_prompt %}{{ "<|im_start|>assistant " }}{% endif %}"""


def write_words(folder, names):
    """Write a tokenizer of whole words with a chat template; return its path."""
    words = {name: number for number, name in enumerate(["<unk>", "</s>", *names])}
    words |= {f"w{number}": number for number in range(len(words) + 2, CFG.model.vocab_size)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>", "<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder / "tokenizer.json"


def test_a_chat_answers_each_line_after_all_turns_before(run_dir, tmp_path, capsys, monkeypatch):
    name = str(write_words(tmp_path, ["user", "assistant"]))
    options = ["--tokenizer", name, "--num-tokens", "6", "--temperature", "0"]
    monkeypatch.setattr("sys.stdin", io.StringIO("w7 w8\n\n w9 \n"))
    main([str(run_dir), "--chat", "--system", "w6", *options])
    first, second = capsys.readouterr().out.splitlines()
    assert len(first.split()) == 6
    history = [("system", "w6"), ("user", "w7 w8"), ("assistant", first), ("user", "w9")]
    prompt = "".join(f"<|im_start|>{role} {text}<|im_end|>" for role, text in history)
    options += ["--special-tokens", "all"]
    main([str(run_dir), "--prompt", f"{prompt}\n<|im_start|>assistant ", *options])
    assert capsys.readouterr().out.endswith(f"assistant {second}\n") and second != first
