"""Fine-tuning by commands: adapters begin on a checkpoint, resume exactly, and leave merged or in PEFT's format."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from tests.pairs import write_pairs
from tests.runs import eval_rows, step_rows
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.cli import command_line, convert_hf, main, train
from ultrascale_jax.config import MeshConfig, UserError
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.preference import SUMS
from ultrascale_jax.training.setup import make_loader, open_run

HF = Path(__file__).parents[1] / "data" / "hf" / "llama3"
LORA = "4 --train.lora.alpha 8 --train.lora.rslora --train.lora.targets q_proj o_proj down_proj"
TINY = "debug --data.source synthetic --data.seq-len 64 --train.global-batch 8 --mesh fsdp=2,dp=4"


def opened(words):
    cfg, _ = command_line.parse(words.split(), prog="test", options=train.Options)
    cfg = cfg.check(8)
    return open_run(cfg, make_mesh(cfg.mesh), hooks=(), profile=None)


def random(tree):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding), tree
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of adapters that stands at step 3, and the words that began it."""
    folder = tmp_path_factory.mktemp("lora")
    shutil.copytree(HF, folder / "hf")
    words = f"{TINY} --train.init-from hf:{folder}/hf --train.lora.rank {LORA} --log.run-dir {folder}/run"
    with opened(words) as run:
        assert run.step == 0 and not np.any(np.asarray(run.state.params.stacks[0].attn.lora.w_q.b))
        state = dataclasses.replace(run.state, params=random(run.state.params))
        meta = describe(run.cfg, 3, make_loader(run.cfg).fingerprint)
        with Checkpoints(run.cfg) as checkpoints:
            checkpoints.save(state, meta, wait=True)
    return folder / "run", words, [np.asarray(x) for x in jax.tree.leaves(state.params)]


@pytest.mark.slow
def test_adapters_resume_exactly_on_the_base_where_they_began(run_dir):
    _, words, expected = run_dir
    with opened(words) as run:
        assert run.step == 3
        found = [np.asarray(x) for x in jax.tree.leaves(run.state.params)]
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        embed = np.asarray(run.state.frozen.embed[...].astype("float32"))
    np.testing.assert_array_equal(
        embed, load_file(HF / "model.safetensors")["model.embed_tokens.weight"].astype("float32")
    )
    with pytest.raises(UserError, match=r"train.lora.rank: saved 4, now 8"):
        with opened(words.replace(LORA, "8")):
            pass


@pytest.mark.slow
def test_an_export_merges_them_or_has_them_as_peft_names_them(run_dir, tmp_path, capsys):
    run, *_ = run_dir
    full, peft = tmp_path / "full", tmp_path / "peft"
    convert_hf.main([str(run), str(full), "--dtype", "float32"])
    convert_hf.main([str(run), str(peft), "--dtype", "float32", "--adapters"])
    config = json.loads((peft / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "use_rslora": True}
    assert expected.items() <= config.items()
    assert config["target_modules"] == ["q_proj", "o_proj", "down_proj"]
    assert config["base_model_name_or_path"] == str(run.parent / "hf")
    base, merged = (load_file(place / "model.safetensors") for place in (HF, full))
    adapters = load_file(peft / "adapter_model.safetensors")
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        value = weight.astype(np.float32)
        if (a := adapters.pop(f"{stem}.lora_A.weight", None)) is not None:
            value += 8 / 4**0.5 * adapters.pop(f"{stem}.lora_B.weight") @ a
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert not adapters
    with pytest.raises(SystemExit, match="2"):
        convert_hf.main([str(run), str(peft), "--adapters"])
    assert "already holds something" in capsys.readouterr().err


@pytest.mark.slow
def test_the_reference_is_loaded_anew_where_the_run_began(tmp_path):
    shutil.copytree(HF, tmp_path / "hf")
    source = write_pairs(tmp_path / "pairs", vocab_size=256)
    words = f"{TINY} --train.init-from hf:{tmp_path}/hf --train.dpo.beta 0.1 --log.run-dir {tmp_path}/run"
    words = words.replace("synthetic", source)
    with opened(words) as run:
        for mine, theirs in zip(
            *map(jax.tree.leaves, (run.state.params, run.state.frozen)), strict=True
        ):
            assert mine is not theirs  # a step reuses the memory of both
            np.testing.assert_array_equal(mine.astype(theirs.dtype), theirs)
        state = dataclasses.replace(run.state, params=random(run.state.params))
        meta = describe(run.cfg, 3, make_loader(run.cfg).fingerprint)
        with Checkpoints(run.cfg) as checkpoints:
            checkpoints.save(state, meta, wait=True)
        expected, frozen = (np.asarray(x.embed[...]) for x in (state.params, state.frozen))
    with opened(words.replace("fsdp=2,dp=4", "fsdp=4,tp=2")) as run:
        assert run.step == 3
        np.testing.assert_array_equal(run.state.model.embed[...], expected)
        np.testing.assert_array_equal(run.state.frozen.embed[...], frozen)
    cfg, params = load_params(tmp_path / "run", make_mesh(MeshConfig.of(pp=2), jax.devices()[:2]))
    assert not cfg.train.dpo.enabled  # any mesh reads it
    np.testing.assert_array_equal(params.embed[...], expected)
    with pytest.raises(UserError, match=r"train.dpo.beta: saved 0.1, now 0.2"):
        with opened(words.replace("beta 0.1", "beta 0.2")):
            pass


def test_adapters_without_a_model_that_has_learned_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"train\.lora\.rank=2: .*give --train.init-from hf:DIR"):
        with opened(f"{TINY} --train.lora.rank 2 --log.run-dir {tmp_path}/run"):
            pass


CHATML = """{% for m in messages %}{{ "<|im_start|>" + m.role + "\\n" + m.content + "<|im_end|>\\n" }}{% endfor %}
{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
SMALL = (
    *("--train.global-batch", "8", "--train.microbatches", "1", "--train.remat", "none"),
    *("--data.seq-len", "64", "--train.eval-batches", "1", "--data.eval-fraction", "0.1"),
)


def ultrascale(*words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["ultrascale", *map(str, words)])
        main.main()


def learn_preferences(facts):
    """Prefer an answer by commands, with the run `tuned` as reference, on two meshes one after the other."""
    with Path("pairs.jsonl").open("w") as file:
        for question, answer in facts:
            says = [{"role": "assistant", "content": text} for text in (answer, f"not {answer}")]
            row = {"prompt": [{"role": "user", "content": question}]}
            print(json.dumps(row | {"chosen": says[:1], "rejected": says[1:]}), file=file)
    words = ("--out", "pairs", "--tokenizer", "hf/tokenizer.json", "--preferences")
    ultrascale("prepare-data", "--input", "pairs.jsonl", *words)
    data = ("--data.source", "tokens:pairs", "--data.seq-len", "128", "--optim.lr", "1e-3")
    tune = (
        "train",
        "dpo",
        "--train.init-from",
        "tuned",
        *SMALL,
        *data,
        "--log.run-dir",
        "preferred",
    )
    ultrascale(*tune, "--mesh", "fsdp=4,tp=2", "--train.steps", "8")
    ultrascale(*tune, "--mesh", "fsdp=2,sp=2,dp=2", "--train.steps", "12")
    rows, evaluations = step_rows(Path("preferred")), eval_rows(Path("preferred"))
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-3)
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-3)
    assert rows[-1]["reward_accuracy"] > 0.9 and rows[-1]["reward_margin"] > 0.1
    metrics = {f"eval_{name}" for name in ("loss", "pairs", "reward_margin", *SUMS)}
    assert [set(row) for row in evaluations] == [metrics | {"step"}] * 2
    assert evaluations[-1]["eval_reward_accuracy"] > 0.9 and evaluations[-1]["eval_pairs"] >= 8
    ultrascale("convert-hf", "preferred", "preferred_hf")


@pytest.mark.wide
def test_the_journey_from_text_to_a_chat_by_commands(tmp_path, monkeypatch, capsys):
    """Own tokenizer and model, exported; conversations; adapters; evaluation; chat; exports that say the same."""
    monkeypatch.chdir(tmp_path)
    facts = [(f"what is {n} plus {n}", f"{n} plus {n} is {2 * n}") for n in range(200)]
    Path("text.txt").write_text("\n".join(" ".join(fact) for fact in facts))
    ultrascale("prepare-data", "--input", "text.txt", "--out", "bpe", "--train-bpe", 300)
    made = tokenizers.Tokenizer.from_file("bpe/tokenizer.json")
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save("tokenizer.json")
    model = ("--model.vocab-size", "304", "--model.num-layers", "2", "--data.tokenizer")
    text = ("--data.source", "text:text.txt", "--train.steps", "2")
    train_words = ("train", "debug", *SMALL, *model, "tokenizer.json", *text)
    ultrascale(*train_words, "--log.run-dir", "base", "--mesh", "fsdp=4,tp=2")
    ultrascale("convert-hf", "base", "hf", "--dtype", "float32")
    Path("hf/chat_template.jinja").write_text(CHATML)
    talks = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in facts
    ]
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    words = ("--out", "shards", "--tokenizer", "hf/tokenizer.json", "--chat")
    ultrascale("prepare-data", "--input", "talks.jsonl", *words)
    lora = ("--train.lora.rank", "8", "--optim.lr", "1e-2", "--data.source", "tokens:shards")
    tune = (
        "train",
        "finetune",
        "--train.init-from",
        "hf:hf",
        *SMALL,
        *lora,
        "--log.run-dir",
        "tuned",
    )
    ultrascale(*tune, "--mesh", "fsdp=4,tp=2", "--train.steps", "20")
    ultrascale(*tune, "--mesh", "fsdp=2,sp=2,dp=2", "--train.steps", "30")
    rows = step_rows(Path("tuned"))
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    learn_preferences(facts)
    ultrascale("convert-hf", "tuned", "full", "--dtype", "float32")
    ultrascale("convert-hf", "tuned", "peft", "--adapters", "--dtype", "float32")
    assert Path("full/chat_template.jinja").read_text() == CHATML
    told = []
    for place in ("tuned", "full"):
        capsys.readouterr()
        ultrascale("evaluate", place, "--source", "text:text.txt", "--json", "--precision", "fp32")
        loss = json.loads(capsys.readouterr().out)["sources"]["text:text.txt"]["loss"]
        monkeypatch.setattr("sys.stdin", io.StringIO("what is 7 plus 7\n"))
        ultrascale("generate", place, "--chat", "--temperature", "0", "--num-tokens", "12")
        told.append((loss, capsys.readouterr().out))
    assert told[0][0] == pytest.approx(told[1][0], rel=1e-5) and told[0][1] == told[1][1]
