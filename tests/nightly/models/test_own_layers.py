"""The planner compiles own layers, and the trainer resumes them on another mesh and generates."""

import jax
import numpy as np

import ultrascale_jax as us
from tests.own_layers import CFG, OwnModel, on
from tests.runs import change, mesh_of, step_rows
from ultrascale_jax.config import MeshConfig


def test_the_planner_compiles_own_layers():
    cfg = change(CFG, mesh=MeshConfig.parse("fsdp=4,sp=2").sizes, train={"zero": 3})
    plain, own = (us.compile_step(cfg, 8, model=model) for model in (us.Transformer, OwnModel))
    assert own.argument_bytes > plain.argument_bytes  # wider by a head and a gate
    assert us.simulate_step(own, us.find_cluster(None, "h100", 8)).step_s > 0


def test_the_trainer_resumes_own_layers_on_another_mesh_and_generates(tmp_path):
    cfg = change(CFG, log={"run_dir": str(tmp_path)}, train={"precision": "fp32"})
    for mesh, steps in (("pp=2,fsdp=2", 1), ("fsdp=2,tp=2", 2)):
        now = on(change(cfg, train={"steps": steps}), mesh)
        us.train(now, mesh_of(now), model=OwnModel)
    assert [row["step"] for row in step_rows(tmp_path)] == [1, 2]
    expected = None
    for mesh in ("fsdp=2,tp=2", "pp=2,tp=2"):
        devices = mesh_of(on(CFG, mesh))
        _, model = us.load_run(tmp_path, devices, model=OwnModel)
        with jax.set_mesh(devices):
            prompt = np.arange(16, dtype=np.int32).reshape(2, 8)
            settings = {"temperature": 0, "key": jax.random.key(0)}
            found = us.generate(us.gather_stages(model), prompt, 4, **settings)
            if expected is not None:
                np.testing.assert_array_equal(found, expected)
                continue
            tokens, expected = prompt, np.asarray(found)
            for _ in range(4):
                places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
                logits = model.logits(tokens, places)
                best = np.argmax(np.asarray(logits)[:, -1:], axis=-1).astype(np.int32)
                tokens = np.concatenate([tokens, best], axis=1)
            np.testing.assert_array_equal(expected, tokens[:, 8:])
