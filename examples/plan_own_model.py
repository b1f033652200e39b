"""Plan a model that is in no recipe, for 16 H100s: formulas, then XLA's own program: `python plan_own_model.py`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # neither formulas nor compiler need a GPU

import dataclasses

import ultrascale_jax as us

GPUS = 16
MODEL = us.ModelConfig(  # 13.0 B parameters
    vocab_size=32000,
    d_model=5120,
    d_ff=13824,
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
)
MESHES = ("fsdp=16", "fsdp=8,sp=2", "fsdp=4,tp=4", "dp=2,fsdp=8")


def formulas(cfg: us.Config, cluster):
    """Return a run by formula: what one GPU holds, and its step; milliseconds, and no JAX."""
    run = us.Run.of(cfg, GPUS)
    return us.memory_breakdown(run), us.estimate_step(run, cluster)


def main():
    cluster = us.find_cluster(None, "h100", GPUS)
    open_cfg = us.Config(
        model=MODEL,
        data=us.DataConfig(source="synthetic", seq_len=4096),
        train=us.TrainConfig(global_batch=32, remat="auto", microbatches=0),
    )
    chosen = {}
    for text in MESHES:
        cfg = dataclasses.replace(open_cfg, mesh=us.MeshConfig.parse(text))
        cfg, _ = us.choose_auto(cfg, cluster)  # recomputation and micro-batches that fit this mesh
        memory, step = formulas(cfg, cluster)
        chosen[text] = cfg, step.tokens_per_s_gpu
        print(
            f"{text:12} remat {cfg.train.remat!s:10} x {cfg.train.microbatches}  {memory.peak_bytes / 2**30:5.1f} GiB, "
            f"{step.tokens_per_s_gpu:6,.0f} tokens/s/GPU"
        )
    best = max(chosen, key=lambda text: chosen[text][1])
    cfg, _ = chosen[best]
    program = us.compile_step(cfg, GPUS, "h100")  # the step that a run on those GPUs compiles
    timeline = us.simulate_step(program, cluster)
    memory, step = formulas(cfg, cluster)
    print(f"{best}, XLA's program: {program.peak_bytes / 2**30:.1f} GiB, {timeline.step_s:.2f} s")
    print(f"{best}, by formula:    {memory.peak_bytes / 2**30:.1f} GiB, {step.step_s:.2f} s")
    return (program.peak_bytes, timeline.step_s), (memory.peak_bytes, step.step_s)


if __name__ == "__main__":
    main()
