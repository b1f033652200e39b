#!/usr/bin/env bash
# From text to a chat on a laptop's CPU, every command printed before it runs: own corpus, tokenizer, plan, training on
# eight fake devices, a kill, resumption on another mesh, adapters on conversations, evaluation, export, `transformers`.
#
#     bash journey.sh [FOLDER]        # in an empty folder, or FOLDER; two minutes on two cores
#
# It needs the installed package with its extra `chat`. PYTHON=/path/to/python chooses the environment. The last check
# compares logits where PyTorch is (TORCH_PYTHON=/path/to/another), and config, tokenizer and tensors where it is not.
set -euo pipefail
PYTHON=$(command -v "${PYTHON:-python}")
case $PYTHON in [!/]*) PYTHON=$PWD/$PYTHON ;; esac
TORCH_PYTHON=${TORCH_PYTHON:-$PYTHON} STEPS=${STEPS:-120} TUNE_STEPS=${TUNE_STEPS:-120}
export JAX_PLATFORMS=cpu
mkdir -p "${1:-.}"
cd "${1:-.}"

title() { printf '\n==== %s\n' "$*"; }
show() { printf '\n$ %s\n' "$*"; }
ultrascale() { # the installed command
    show ultrascale "$@"
    "$PYTHON" -m ultrascale_jax "$@"
}

title "1. A corpus, and conversations about it"
"$PYTHON" - <<'EOF'
import json, pathlib

capitals = """france paris italy rome spain madrid germany berlin poland warsaw austria vienna greece athens
egypt cairo japan tokyo china beijing india delhi kenya nairobi peru lima chile santiago cuba havana norway oslo
sweden stockholm finland helsinki denmark copenhagen ireland dublin hungary budapest portugal lisbon""".split()
facts = list(zip(capitals[::2], capitals[1::2], strict=True))
plain = [f"the capital of {country} is {city}." for country, city in facts]
turned = [f"{city} is the capital of {country}." for country, city in facts]
pathlib.Path("text").mkdir(exist_ok=True)
for name, lines in (("train", (plain + turned[:-5]) * 40), ("held_out", turned[-5:])):
    rows = [json.dumps({"text": line}) for line in lines]
    pathlib.Path(f"text/{name}.jsonl").write_text("\n".join(rows) + "\n")
talks = [
    [{"role": "user", "content": f"what is the capital of {country}"}, {"role": "assistant", "content": answer}]
    for (country, _), answer in zip(facts, plain, strict=True)
]
rows = [json.dumps({"messages": talk}) for talk in talks * 20]
pathlib.Path("talks.jsonl").write_text("\n".join(rows) + "\n")
EOF
wc -l text/*.jsonl talks.jsonl

title "2. A tokenizer of its own, and token shards"
ultrascale prepare-data --input text/train.jsonl --out shards/raw --train-bpe 300 --workers 1
mkdir -p tokenizer
"$PYTHON" - <<'EOF'
import tokenizers  # the marks of turns are tokens, each with an id

made = tokenizers.Tokenizer.from_file("shards/raw/tokenizer.json")
made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
made.save("tokenizer/tokenizer.json")
EOF
cat > tokenizer/chat_template.jinja <<'EOF'
{% for m in messages %}{{ "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
EOF
for part in train held_out; do
    ultrascale prepare-data --input "text/$part.jsonl" --out "shards/$part" --tokenizer tokenizer --workers 1
done
ultrascale prepare-data --input talks.jsonl --out shards/talks --tokenizer tokenizer --chat --workers 1

title "3. A recipe, and a plan"
cat > my.py <<'EOF'
"""A small Llama for the corpus of this folder."""

import ultrascale_jax as us

config = us.Config(
    model=us.ModelConfig(
        vocab_size=304, d_model=64, d_ff=256, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=16
    ),
    data=us.DataConfig(
        source="tokens:shards/train", tokenizer="tokenizer/tokenizer.json", seq_len=64
    ),
    optim=us.OptimConfig(lr=1e-2, warmup_steps=10),
    train=us.TrainConfig(global_batch=16, microbatches=4, precision="fp32", eval_batches=1),
    checkpoint=us.CheckpointConfig(every=20),
    log=us.LogConfig(run_dir="out/base"),
)
EOF
ultrascale plan memory ./my.py --gpus 8 --mesh pp=2,fsdp=2,sp=2
ultrascale plan memory llama3_8b --gpus 64 --mesh pp=2,fsdp=16,sp=2

title "4. Train with a pipeline, ZeRO-3 and a split sequence, and kill it"
TRAIN=(train ./my.py --fake-devices 8 --train.steps "$STEPS")
FIRST=("${TRAIN[@]}" --mesh pp=2,fsdp=2,sp=2 --pp.schedule interleaved)
show ultrascale "${FIRST[@]}"
"$PYTHON" -m ultrascale_jax "${FIRST[@]}" &
victim=$!
until [ -e out/base/checkpoints/20 ]; do # the first checkpoint is whole
    kill -0 "$victim" 2>/dev/null || { echo "the run ended by itself" >&2; exit 1; }
    sleep 0.2
done
show kill -9 "$victim"
kill -9 "$victim"
wait "$victim" 2>/dev/null || true

title "5. Resume on another mesh"
ultrascale "${TRAIN[@]}" --mesh fsdp=4,tp=2

title "6. Adapters on conversations, on a third mesh"
ultrascale convert-hf out/base hf/base --dtype float32
cp tokenizer/chat_template.jinja hf/base/
ultrascale train finetune --train.init-from hf:hf/base --fake-devices 8 --mesh fsdp=2,sp=2,cp=2 --log.run-dir out/tuned \
    --train.lora.rank 16 --optim.lr 1e-2 --data.source tokens:shards/talks --data.seq-len 64 --train.steps "$TUNE_STEPS" \
    --train.global-batch 16 --train.precision fp32 --train.microbatches 1 --train.remat none --train.eval-batches 1

title "7. Evaluate before and after"
for model in hf/base out/tuned; do
    ultrascale evaluate "$model" --source text=tokens:shards/held_out --source talks=tokens:shards/talks --precision fp32
done

title "8. Export: merged, and as adapters for PEFT"
ultrascale convert-hf out/tuned hf/tuned --dtype float32
ultrascale convert-hf out/tuned hf/peft --dtype float32 --adapters

title "9. Load it in transformers"
"$PYTHON" - <<'EOF'
import jax, numpy as np, ultrascale_jax as us

cfg = us.Config(model=us.read_hf_config("hf/tuned"), mesh=us.MeshConfig(fsdp=1))
mesh = us.make_mesh(cfg.mesh)
ids = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (2, 48)).astype(np.int32)
with jax.set_mesh(mesh):
    model = us.load_hf("hf/tuned", us.abstract_state(cfg, mesh).params)
    logits = model.logits(ids, np.broadcast_to(np.arange(48, dtype=np.int32), ids.shape))
np.savez("logits.npz", ids=ids, logits=np.asarray(logits))
EOF
cat > compare.py <<'EOF'
"""Compare the export with what `transformers` makes of it: logits, or without PyTorch config, tokenizer and tensors."""

import importlib.util, json, numpy as np
from safetensors import safe_open

found = np.load("logits.npz")
if importlib.util.find_spec("transformers") is None:
    with safe_open("hf/tuned/model.safetensors", framework="np") as file:
        print(f"transformers is not installed; safetensors reads {len(list(file.keys()))} tensors")
    raise SystemExit
from transformers import AutoConfig, AutoTokenizer

config, tokenizer = AutoConfig.from_pretrained("hf/tuned"), AutoTokenizer.from_pretrained("hf/tuned")
text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
assert config.vocab_size == found["logits"].shape[2] and text.endswith("<|im_start|>assistant\n"), text
if importlib.util.find_spec("torch") is None:
    names = json.load(open("hf/tuned/config.json"))
    with safe_open("hf/tuned/model.safetensors", framework="np") as file:
        shape = file.get_slice("model.embed_tokens.weight").get_shape()
    assert shape == [config.vocab_size, config.hidden_size] and names["model_type"] == config.model_type
    print("PyTorch is not installed: transformers reads config, tokenizer and chat template; logits are not compared")
else:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("hf/tuned", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor(found["ids"], dtype=torch.long)).logits.numpy()
    difference = np.abs(theirs - found["logits"]).max() / np.abs(theirs).max()
    print(f"{type(model).__name__}: logits differ by {difference:.1e} of the largest")
    assert difference < 1e-5
EOF
show python compare.py
"$TORCH_PYTHON" compare.py

title "10. Talk to it"
echo 'what is the capital of italy' |
    ultrascale generate out/tuned --chat --temperature 0 --num-tokens 24
title "done in $SECONDS s"
