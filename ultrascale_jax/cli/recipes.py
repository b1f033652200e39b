"""Find a recipe: a name, a file or a module that exposes `config`, or a configuration that `--print-config` printed."""

import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
import traceback
import types
from pathlib import Path

from ultrascale_jax import configs
from ultrascale_jax.checkpoint.run_metadata import config_from_dict
from ultrascale_jax.config import Config, UserError, at_home, did_you_mean, require
from ultrascale_jax.storage.foreign import read_json

DEFAULT_RECIPE = "demo"

PARTS = ("pretraining", "shapes")
"""Files of `configs/` that are no recipes: recipes are made of them."""

OTHER_LANGUAGES = (".yaml", ".yml", ".toml", ".ini", ".cfg", ".ipynb")
"""Suffixes of files that hold settings for other programs."""


def recipes() -> list[str]:
    """Return the names of the recipes in `configs/`."""
    return [m.name for m in pkgutil.iter_modules(configs.__path__) if m.name not in PARTS]


def load_recipe(name: str) -> Config:
    """Return the `config` of `configs/NAME.py`, of a file NAME.py or NAME.json, or of the module `pkg.mod`."""
    name = at_home(name)
    path = Path(name)
    if path.suffix.lower() == ".json":
        return _saved(path)
    if os.getcwd() not in sys.path:
        # As `python -m` does; the console command has its own folder there.
        sys.path.append(os.getcwd())
    is_file = path.suffix.lower() == ".py"
    require(not is_file or os.path.isfile(path), "recipe", name, "there is no such file")
    module_name = name if is_file else _module_name(name)
    try:
        module = _run_file(path) if is_file else importlib.import_module(module_name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"recipe={name!r}: {_why_not(module_name, error)}") from None
    config = getattr(module, "config", None)
    fix = f"must expose `config`, a Config, but that is {type(config).__name__}"
    if not isinstance(config, Config):
        raise UserError(f"recipe={name!r}: {fix}")
    return config


def _module_name(name: str) -> str:
    """Return the module of a recipe that is no file. Raises `UserError` if there is none."""
    names, path = recipes(), Path(name)
    if (stem := name.replace("-", "_")) in names:
        return f"{configs.__name__}.{stem}"
    fix = "give a file that ends in .py and sets `config`, or a .json that --print-config printed"
    require(
        path.suffix.lower() not in OTHER_LANGUAGES and not os.path.isfile(path), "recipe", name, fix
    )
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return name
    fix = "is a model, no recipe; write ultrascale train finetune --train.init-from " + name
    require(not name.startswith("hf:"), "recipe", name, fix)
    files = [file for file in (f"{name}.py", f"{name}/config.json") if os.path.isfile(file)]
    hint = f"did you mean {files[0]}? " if files else did_you_mean(name, names)
    fix = f"{hint}the recipes are {', '.join(names)}; or give a file, ./my.py, or a module, pkg.mod"
    raise UserError(f"recipe={name!r}: {fix}")


def _saved(path: Path) -> Config:
    """Return the configuration in a run's config.json, or in a file that `--print-config` printed."""
    require(os.path.isfile(path), "recipe", str(path), "there is no such file")
    values = read_json(path)
    fix = f"is a Hugging Face model's; write --train.init-from hf:{path.parent}"
    require("model_type" not in values, "recipe", str(path), fix)
    try:
        return config_from_dict(values)
    except UserError as error:
        raise UserError(f"recipe={str(path)!r}: {error}") from None


def _run_file(path: Path) -> types.ModuleType:
    """Run the user's own recipe as a module of a name that hides no other; it may import files of its folder."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python FILE` does
    name = f"recipe {path.stem.replace('.', ' ')}"  # a dot would part a package from its module
    loader = importlib.machinery.SourceFileLoader(name, str(path.absolute()))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up, also later
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[loader.name]
        raise
    return module


def _why_not(module_name: str, error: BaseException) -> str:
    """Return why a recipe cannot be imported: there is no such module, or its code raised `error`."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_name}.".startswith(f"{missing}."):
        return f"there is no module {missing}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}, at {last.filename}:{last.lineno}"
