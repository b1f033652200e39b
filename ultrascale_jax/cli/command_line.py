"""The command line of every script that runs a recipe: `RECIPE --section.field VALUE ...`.

A recipe is a module that exposes `config`, a `Config`, or a run's config.json; its values are the defaults, and the
command line replaces single fields of it. Nothing here imports JAX before it is asked for devices, so
`--help` and `--print-config` answer at once, on any machine. What stays open (`auto`) is chosen by `checked`,
for the GPUs of a plan, or `on_devices`, for those that JAX finds.
"""

import contextlib
import copy
import dataclasses
import difflib
import importlib
import importlib.machinery
import importlib.util
import io
import itertools
import math
import os
import pkgutil
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ultrascale_jax import configs
from ultrascale_jax.checkpoint.init_from import with_source
from ultrascale_jax.checkpoint.run_metadata import config_from_dict, config_text
from ultrascale_jax.cli.suggestions import expanded, options_of, plain, suggestion, with_switches
from ultrascale_jax.config import (
    AUTO,
    Config,
    DistConfig,
    Experts,
    LatentAttention,
    MeshConfig,
    RopeScaling,
    UserError,
    at_home,
    check_numbers,
    put_home,
    require,
)
from ultrascale_jax.config.foreign import read_json
from ultrascale_jax.launch.cluster import Launch, detect
from ultrascale_jax.launch.events import say
from ultrascale_jax.launch.failures import denied
from ultrascale_jax.units import whole_number

if TYPE_CHECKING:
    from ultrascale_jax.plan.auto import Host
    from ultrascale_jax.plan.hardware import Cluster

DEFAULT_RECIPE = "demo"

MOST_FAKE_DEVICES = 4096
"""XLA makes each of them when it starts."""

OTHER_LANGUAGES = (".yaml", ".yml", ".toml", ".ini", ".cfg", ".ipynb")
"""Suffixes of files that hold settings for other programs."""

TEXTS = ("prompt", "system")
"""Options whose values are texts for a model, in which a `~` stays."""

PATIENCE_S = 10.0
"""Seconds for which a process keeps an error to itself that process 0 must have had too."""


Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""An option without a value."""


def option(metavar: str, absent: str = "none"):
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {absent})")


REGISTRY = tyro.constructors.ConstructorRegistry()
"""Constructors of tyro: those of the library, and that of integers."""


@REGISTRY.primitive_rule
def _integer(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """Let tyro read `1e3`, `4M` and `4Mi` where an option takes an integer."""
    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


def require_at_least(least: int, options: object, *names: str) -> None:
    """Raise a `UserError` for an option among `names` that is below `least`, or empty; one that is not given passes."""
    fix = f"must be at least {least}" if least else "must not be negative"
    for name in names:
        value = getattr(options, name)
        for one in (value or (0,)) if isinstance(value, tuple) else (value,):
            require(one is None or one >= least, name, one, fix)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a command that runs a recipe, beside the configuration."""

    mesh: Annotated[str | None, option("AXIS=SIZE,...", "the recipe's")] = None
    """All axes at once, as fsdp=4,tp=2; an axis not named is 1, and -1 takes what is left. auto: the fastest by formula
    of all meshes that fit."""
    fake_devices: Annotated[int | None, option("N", "the real ones")] = None
    """Run on so many fake CPU devices, to try a mesh on a laptop."""
    print_config: Flag = False
    """Print the configuration that the command line makes, a file that this command takes for a recipe, and stop."""

    def __post_init__(self):
        inside = self.fake_devices is None or 1 <= self.fake_devices <= MOST_FAKE_DEVICES
        fix = f"must be from 1 to {MOST_FAKE_DEVICES}"
        require(inside, "fake_devices", self.fake_devices, fix)


@dataclass(frozen=True, kw_only=True)
class JobOptions(Options):
    """Options of a script that may be one process of many."""

    dist: DistConfig = dataclasses.field(default_factory=DistConfig)
    """Place of this process among the others."""

    def join(self) -> Launch | None:
        """Take the fake devices asked for, or join the other processes; call it before JAX's first array.

        Returns how this process was started, none for one on its own.
        """
        if self.fake_devices is not None:
            use_fake_devices(self.fake_devices)
            return None
        from ultrascale_jax.launch import distributed

        distributed.set_environment(os.environ)
        with user_errors():
            launch = distributed.initialize(self.dist)
        if not distributed.wants_cpu(os.environ):
            from ultrascale_jax.launch import host_memory

            host_memory.set_limit(os.environ, launch)
        return launch


@dataclass(frozen=True, kw_only=True)
class _Command[O: Options]:
    options: Annotated[O, tyro.conf.arg(name="")]
    config: Annotated[Config, tyro.conf.arg(name="")]


def parse[O: Options](
    argv: Sequence[str], *, prog: str, options: type[O] = Options, description: str = ""
) -> tuple[Config, O]:
    """Return the configuration and the options that `argv` (without the program's name) asks for.

    A script with options of its own passes a subclass of `Options`. What cannot be understood ends
    the process with exit code 2 and a message on stderr, `--help` and `--print-config` with 0.
    """
    with user_errors(patience_s=PATIENCE_S):
        recipe, arguments = _split_recipe(argv)
        arguments = _with_numbers(arguments)
        default = load_recipe(recipe)
        if (mesh := _mesh_argument(arguments)) is not None and mesh != "auto":
            default = dataclasses.replace(default, mesh=MeshConfig.parse(mesh))

        def made(default: Config) -> tuple[Config, O]:
            form: Any = _Command
            command = read(
                form[options],
                arguments,
                prog=f"{prog} [RECIPE]",
                description=description,
                default=_Command(options=options(), config=_with_named_parts(default, arguments)),
            )
            return command.config, command.options

        cfg, chosen = made(default)
        if cfg.train.init_from:
            source = with_source(cfg)
            data = dataclasses.replace(default.data, tokenizer=source.data.tokenizer)
            cfg, chosen = made(dataclasses.replace(default, model=source.model, data=data))
            train = dataclasses.replace(cfg.train, init_from=source.train.init_from)
            cfg = dataclasses.replace(cfg, train=train)
        free = chosen.mesh != "auto" or cfg.mesh == default.mesh
        require(free, "mesh", "auto", "chooses every axis; leave out --mesh.AXIS")
        if chosen.print_config:
            print(
                config_text(_on_fake_devices(cfg, chosen) if chosen.fake_devices else cfg), end=""
            )
            raise SystemExit(0)
    return cfg, chosen


def on_devices(
    cfg: Config, options: Options, tell: Callable[[str], None], *, must_fit: bool = True
) -> Config:
    """Return `cfg` for the devices that JAX finds: open fields chosen (process 0 tells), mesh resolved, all checked.

    Every process of a job calls it, and all choose the same. Raises `UserError` as `Config.check` and `choose_auto` do;
    on a CPU, whose memory nobody knows, and without `must_fit` also where nothing fits something is chosen.
    """
    import jax

    from ultrascale_jax.cli import output
    from ultrascale_jax.launch import host_memory
    from ultrascale_jax.launch.distributed import find_devices
    from ultrascale_jax.launch.multihost import gather
    from ultrascale_jax.plan.auto import check_host, cluster_of

    count = len(find_devices())
    if options.fake_devices is None:
        require_devices(cfg.mesh, count)
    is_open = bool(cfg.train.auto) or options.mesh == "auto"
    if not (is_open or "offload" in cfg.train.remat):
        return cfg.check(count)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    known = [limit for process in gather(limits) for limit in process if limit]
    kind = gather(jax.local_devices()[0].device_kind)[0]
    first = jax.process_index() == 0
    on_gpus = jax.local_devices()[0].platform == "gpu"
    say = tell if first else lambda text: None
    host = None
    if on_gpus:
        host = host_of_all(say, host_memory.prepare_copies if is_open else None)
    cluster = cluster_of(kind, count, min(known, default=None), host)
    shown = output.working("choosing what is open") if first else contextlib.nullcontext()
    with shown:
        cfg = checked(cfg, options, cluster, say, must_fit=must_fit and on_gpus)
    if must_fit and on_gpus:
        check_host(cfg, cluster)
    return cfg


def host_of_all(
    tell: Callable[[str], None], prepare: Callable[[], Callable[[], float]] | None
) -> "Host":
    """Return what every GPU of the job may use of its host: the least of all processes, which all call this.

    The link counts as the usual one of the GPU times the power of two that is nearest to the measured rate, so that
    starts on the same machines choose alike.

    Args:
      tell: gets to know why nothing can be copied to the host, where that is so.
      prepare: returns what times copies, as `host_memory.prepare_copies`; None: they take what the usual link takes.
    """
    import jax

    from ultrascale_jax.launch import host_memory
    from ultrascale_jax.launch.multihost import agree, gather
    from ultrascale_jax.plan.auto import Host, cluster_of
    from ultrascale_jax.plan.formulas.costs import HOST_SHARE

    size = min(gather(host_memory.gpu_bytes(os.environ, jax.local_device_count())))
    if prepare is None:
        return Host(usable_bytes=size)
    problem, gbs = None, None
    try:
        gbs = prepare()
    except Exception as error:  # Whatever it is, nothing needs the host's memory.
        problem = f"{type(error).__name__}: {error}"
    # All processes go on together, so that those of a host copy at the same time.
    problem = agree(problem)
    if gbs is None or problem:
        tell(f"nothing is offloaded: copying to the host failed ({' '.join(str(problem).split())})")
        return Host(usable_bytes=0)
    kind = gather(jax.local_devices()[0].device_kind)[0]
    usual = HOST_SHARE * cluster_of(kind, 1).gpu.host_gbs
    steps = round(math.log2(min(gather(gbs())) / usual))
    return Host(usable_bytes=size, gbs=usual * 2.0**steps)


def require_devices(mesh: MeshConfig, count: int) -> None:
    """Raise a `UserError` that names `--fake-devices` for a mesh that one device alone cannot hold."""
    wanted = math.prod(size for size in mesh.sizes.values() if size != -1)
    fix = f"wants {wanted} devices, but here is 1; --fake-devices {wanted} tries it on as many fake CPU devices"
    require(count > 1 or wanted == 1, "mesh", mesh.text, fix)


def checked(
    cfg: Config,
    options: Options,
    cluster: "Cluster",
    tell: Callable[[str], None],
    *,
    must_fit: bool = True,
) -> Config:
    """Return `cfg` for the GPUs of `cluster`: open fields chosen and told, mesh resolved, all checked.

    Raises `UserError` as `Config.check` and `choose_auto` do.
    """
    from ultrascale_jax.plan.auto import choose_auto

    choose_mesh = options.mesh == "auto"
    cfg, why = choose_auto(cfg, cluster, choose_mesh=choose_mesh, must_fit=must_fit)
    if why:
        tell(why)
    return cfg.check(cluster.num_gpus)


def _on_fake_devices(cfg: Config, options: Options) -> Config:
    """Return `cfg` as `on_devices` makes it with `--fake-devices`, without JAX."""
    from ultrascale_jax.plan.auto import cluster_of

    cluster = cluster_of("cpu", options.fake_devices or 1)
    return checked(cfg, options, cluster, lambda text: print(text, file=sys.stderr), must_fit=False)


def _with_numbers(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with the number for the word `auto` where the field is one."""
    option = "--train.microbatches"
    return [
        f"{option}={AUTO}"
        if word == f"{option}=auto"
        else str(AUTO)
        if (last, word) == (option, "auto")
        else word
        for last, word in zip(["", *arguments], arguments, strict=False)
    ]


PARTS = {"rope_scaling": RopeScaling, "experts": Experts, "latent": LatentAttention}
"""Optional parts of a model; naming a field of one on the command line turns it on."""


def _with_named_parts(cfg: Config, arguments: Sequence[str]) -> Config:
    """Add to `cfg` the parts of the model of which `arguments` name a field and which it has not."""
    model = copy.copy(cfg.model)
    for name, part in PARTS.items():
        words = re.compile(rf"--model\.{name.replace('_', '.')}\.")
        if getattr(model, name) is None and any(map(words.match, arguments)):
            # Unchecked, as a part may need other fields that `arguments` set: what tyro makes of all is checked.
            object.__setattr__(model, name, part())
    return dataclasses.replace(cfg, model=model)


def use_fake_devices(num_devices: int) -> None:
    """Give JAX `num_devices` CPU devices and nothing else; call it before the first array."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


@contextlib.contextmanager
def user_errors(patience_s: float = 0.0) -> Iterator[None]:
    """Turn a `UserError` of the block, or a file that it may not use, into one line on stderr and its exit code.

    Processes of a job that have not joined yet do not know of each other. A command line that is wrong for all should
    be told once, so the others than process 0 wait for `patience_s`, in which its end makes the launcher end them.
    """
    try:
        yield
    except (UserError, OSError) as error:
        refusal = error if isinstance(error, UserError) else denied(error)
        if refusal is None:
            raise
        if patience_s and _is_follower():
            time.sleep(patience_s)
        say(f"error: {refusal}", sys.stderr)
        raise SystemExit(refusal.exit_code) from None


def _is_follower() -> bool:
    """Return whether the environment says that this process is one of a job, and not its first."""
    try:
        launch = detect(os.environ)
    except UserError:
        return False
    return launch is not None and bool(launch.process_id)


def recipes() -> list[str]:
    """Return the names of the recipes in `configs/`."""
    return [
        module.name for module in pkgutil.iter_modules(configs.__path__) if module.name != "shapes"
    ]


def load_recipe(name: str) -> Config:
    """Return the `config` of `configs/NAME.py`, of a file NAME.py or NAME.json, or of the module `pkg.mod`."""
    known, name = recipes(), at_home(name)
    suffix = Path(name).suffix.lower()
    is_file = suffix == ".py"
    if suffix == ".json":
        return _saved(Path(name))
    fix = "give a file that ends in .py and sets `config`, or a .json that --print-config printed"
    other = suffix in OTHER_LANGUAGES or (os.path.isfile(name) and not is_file)
    require(not other, "recipe", name, fix)
    require(not is_file or os.path.isfile(name), "recipe", name, "there is no such file")
    is_module = "." in name and all(part.isidentifier() for part in name.split("."))
    stem = name.replace("-", "_")
    module_name = name if is_module or is_file else f"{configs.__name__}.{stem}"
    if not (is_module or is_file or stem in known):
        file = [f"{name}.py"] if os.path.isfile(f"{name}.py") else []
        near = file or difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        fix = f"{hint}the recipes are {', '.join(known)}; or give a file, ./my.py, or a module, pkg.mod"
        require(False, "recipe", name, fix)
    if os.getcwd() not in sys.path:
        sys.path.append(
            os.getcwd()
        )  # As `python -m` does; the console command has its own folder there.
    try:
        module = _run_file(Path(name)) if is_file else importlib.import_module(module_name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"recipe={name!r}: {_why_not(module_name, error)}") from None
    config = getattr(module, "config", None)
    fix = f"must expose `config`, a Config, but that is {type(config).__name__}"
    if not isinstance(config, Config):
        raise UserError(f"recipe={name!r}: {fix}")
    return config


def _saved(path: Path) -> Config:
    """Return the configuration in a run's config.json, or in a file that `--print-config` printed."""
    require(path.is_file(), "recipe", str(path), "there is no such file")
    values = read_json(path)
    fix = f"is a Hugging Face model's; write --train.init-from hf:{path.parent}"
    require("model_type" not in values, "recipe", str(path), fix)
    try:
        return config_from_dict(values)
    except UserError as error:
        raise UserError(f"recipe={str(path)!r}: {error}") from None


def _run_file(path: Path) -> types.ModuleType:
    """Run the user's own recipe as a module of a name that hides no other; it may import files beside it."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
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
    """Why a recipe cannot be imported: it is not there, or its own code raised `error`."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_name}.".startswith(f"{missing}."):
        return f"there is no module {missing}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}, at {last.filename}:{last.lineno}"


def changes(name: str, before: Any, after: Any, always: Sequence[str] = ()) -> list[str]:
    """Words of the command line that turn the section `before`, called `name`, into `after`.

    Fields in `always` are written even if they are the same. A part that only `before` has cannot be taken away.
    """
    found: list[str] = []
    for field in dataclasses.fields(after):
        old, new = getattr(before, field.name), getattr(after, field.name)
        option = f"--{name}.{field.name}".replace("_", "-")
        if dataclasses.is_dataclass(old) or dataclasses.is_dataclass(new):
            if new is not None:
                first = () if old is not None else (dataclasses.fields(new)[0].name,)
                found += changes(f"{name}.{field.name}", old or type(new)(), new, first)
        elif new == old and field.name not in always:
            continue
        elif isinstance(new, bool):
            section, _, last = option.rpartition(".")
            found.append(option if new else f"{section}.no-{last}")
        else:
            found += [option, *map(str, new if isinstance(new, tuple) else (new,))]
    return found


def _split_recipe(argv: Sequence[str]) -> tuple[str, list[str]]:
    if argv and not argv[0].startswith("-"):
        return argv[0], list(argv[1:])
    return DEFAULT_RECIPE, list(argv)


def _mesh_argument(arguments: Sequence[str]) -> str | None:
    """Return the value of `--mesh`, which unless `auto` replaces the recipe's mesh before `--mesh.AXIS` changes it."""
    values = [b for a, b in itertools.pairwise(arguments) if a == "--mesh"]
    values += [a.removeprefix("--mesh=") for a in arguments if a.startswith("--mesh=")]
    return values[-1] if values else None


def read[T](
    form: type[T],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str = "",
    default: T | None = None,
) -> T:
    """Return the options of the dataclass `form` that `arguments` give, by tyro; `--help` ends the process.

    Raises:
      UserError: what is wrong, in one line: the error of a section as it was, or tyro's box unpacked.
    """
    given: dict[str, Any] = {} if default is None else {"default": default}
    arguments = with_switches(arguments, dict(options_of(default or form)))
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            made = tyro.cli(
                form,
                args=arguments,
                **given,
                prog=prog,
                description=description,
                config=(tyro.conf.AvoidSubcommands,),
                registry=REGISTRY,
            )
    except SystemExit as stop:
        cause: BaseException | None = stop
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            cause = cause.__context__
        if stop.code == 0:
            raise
        complaint, near = _unboxed(report.getvalue())
        if (pattern := expanded(complaint, arguments)) is not None:
            raise UserError(pattern) from None
        hint = suggestion(complaint, default or form, recipes(), prog, near)
        raise UserError(plain(complaint) + hint) from None
    # A `Config` has done so itself.
    options: Any = made.options if isinstance(made, _Command) else made
    check_numbers("", options)
    put_home(options, *(f.name for f in dataclasses.fields(options) if f.name not in TEXTS))
    return made


def _unboxed(box: str) -> tuple[str, list[str]]:
    """Return the first part of tyro's error as one line, and the options that it suggests, of a flag both forms.

    tyro draws ╭─ title ─╮ and │ at the sides, or, where the terminal is not UTF-8, a title over a rule of dashes.
    """
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    rules = [n for n, line in enumerate(lines) if line and set(line) <= {"─", "-"}]
    if rules[:1] == [1] and lines[0] and not box.startswith("╭"):
        lines, rules = lines[2:], [n - 2 for n in rules[1:]]
    end = rules[0] if rules else len(lines)
    near = [word for line in lines[end:] for word in re.findall(r"(?:^|, )(--\w[\w.-]+)", line)]
    return " ".join(line for line in lines[:end] if line).removesuffix("."), near
