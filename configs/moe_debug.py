"""Tiny, with 8 experts and all that a layer of them can have: for trying meshes, `ep` too, with `--devices 8`."""

from dataclasses import replace

from ultrascale_jax.config import Experts, LogConfig, MoEConfig
from ultrascale_jax.configs import debug

EXPERTS = Experts(
    num=8,
    top_k=2,
    d_ff=32,
    shared=1,
    dense_layers=1,
    scores="sigmoid",
    groups=4,
    groups_per_token=2,
    bias=True,
)

config = replace(
    debug.config,
    model=replace(debug.config.model, experts=EXPERTS),
    moe=MoEConfig(aux_loss=(0.001, "batch"), z_loss=0.0001),
    log=LogConfig(run_dir="out/moe_debug"),
)
