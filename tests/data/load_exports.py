"""Load folders that `ultrascale convert-hf` wrote in vLLM's loader on a CPU, or adapters in `peft`.

    python tests/data/load_exports.py vllm FOLDER ...
    python tests/data/load_exports.py adapters BASE ADAPTERS MERGED

The first runs vLLM's checks of the configuration, makes its model and loads the weights into it, without a forward
pass: the published wheel has no CPU kernels. It needs only the Python files of the wheel, unpacked on the path, and
their imports. The second compares the logits of a base under its adapters, loaded by `peft`, with those of the merged
export. Neither is a test: they need torch.
"""

import os
import sys


def by_vllm(folder: str) -> str:
    from vllm.config import (
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    config = ModelConfig(model=folder, dtype="float32")
    whole = VllmConfig(model_config=config, device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(whole):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, "tcp://127.0.0.1:29871", 0, "gloo")
            initialize_model_parallel(1, 1)
        model = initialize_model(vllm_config=whole)
        get_model_loader(LoadConfig()).load_weights(model, config)
    return f"{type(model).__name__}, {config.max_model_len} positions, {config.try_get_generation_config()}"


def by_peft(base: str, adapters: str, merged: str) -> str:
    import peft
    import torch
    import transformers

    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        models = [
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in (base, merged)
        ]
        before, whole = (model(ids).logits for model in models)
        adapted = peft.PeftModel.from_pretrained(models[0], adapters).eval()(ids).logits
    changes = [(one - whole).abs().max().item() for one in (before, adapted)]
    return f"logits to {whole.abs().max():.3g}; base off by {changes[0]:.3g}, with adapters {changes[1]:.3g}"


def main(kind: str, folders: list[str]) -> None:
    if kind == "adapters":
        return print(by_peft(*folders))
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    for folder in folders:
        try:
            said = by_vllm(folder)
        except Exception as error:
            said = f"refused: {type(error).__name__}: {error}"
        print(f"{folder}: {said}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
