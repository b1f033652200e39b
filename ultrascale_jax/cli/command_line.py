"""The command line of every command that runs a recipe: `RECIPE --section.field VALUE ...`.

A recipe's values (`cli/recipes.py`) are the defaults, and the command line replaces single fields of it. tyro reads the
words; each of its errors becomes one line with a fix. Nothing here imports JAX, so `--help` and `--print-config` answer
at once, on any machine. `cli/devices.py` chooses the values that stay open (`auto`).
"""

import contextlib
import copy
import dataclasses
import io
import itertools
import os
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

import tyro
from tyro import _resolver, _strings
from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

from ultrascale_jax.checkpoint.run_metadata import config_text
from ultrascale_jax.cli.devices import on_fake_devices, use_fake_devices
from ultrascale_jax.cli.errors import PATIENCE_S, user_errors
from ultrascale_jax.cli.recipes import DEFAULT_RECIPE, load_recipe, recipes
from ultrascale_jax.cli.suggestions import expanded, meant, options_of
from ultrascale_jax.config import (
    AUTO,
    REMAT_NAMES,
    REMAT_POLICIES,
    Config,
    DistConfig,
    Experts,
    FullAttention,
    Keep,
    LatentAttention,
    LayerRemat,
    LinearAttention,
    MeshConfig,
    Multipliers,
    Remat,
    RopeScaling,
    Split,
    UserError,
    put_home,
    require,
)
from ultrascale_jax.config.remat import Policy
from ultrascale_jax.config.section import Section, between, check_fields, switch
from ultrascale_jax.launch.cluster import Launch
from ultrascale_jax.units import whole_number

MOST_FAKE_DEVICES = 4096
"""XLA creates each of them when it starts."""

TEXTS = ("prompt", "system")
"""Options whose values are texts for a model, in which a `~` stays."""

PARTS = {
    "rope_scaling": RopeScaling,
    "experts": Experts,
    "latent": LatentAttention,
    "linear": LinearAttention,
    "full_attention": FullAttention,
    "multipliers": Multipliers,
}
"""Optional parts of a model; naming a field of one on the command line turns it on."""

PHRASES = {
    r"no type matching .*: (must be .*)": r"\1",
    r"Could not parse arguments (.*) into tuple type typing.Tuple\[(.*)\]": r"must be (\2), not \1",
    r"(--train.batch-ramp: )Could not find valid parse for arguments: (.*)": (
        r"\1must be pairs of a step and sequences, as 2000 64 5000 128, not \2"
    ),
}
"""Phrases of tyro, as regular expressions, to plain ones."""

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""An option without a value."""

SWITCH_VALUES = dict.fromkeys(("true", "yes", "on", "1"), True)
SWITCH_VALUES |= dict.fromkeys(("false", "no", "off", "0"), False)
"""Values that people give to a switch, which takes none."""

REGISTRY = tyro.constructors.ConstructorRegistry()
"""Constructors of tyro: the library's, and ours of numbers and recomputation."""

# tyro 1.0 looks for lines to join before it takes their indentation away, and so joins none of a docstring's.
_strings.remove_single_line_breaks = lambda helptext: " ".join(helptext.split())


def _is_default(typ: Any, value: Any, of_tyro: Callable[[Any, Any], bool] = _resolver.is_instance):
    """Return whether a default is of its field's type; sections check the members of a tuple themselves.

    For `int | None` and for tuples tyro 1.0 would import typeguard, and with it asyncio: a fifth of a start.
    """
    if isinstance(typ, types.UnionType):
        return any(_is_default(part, value) for part in get_args(typ))
    return isinstance(value, tuple) if get_origin(typ) is tuple else of_tyro(typ, value)


_resolver.is_instance = _is_default


def option(metavar: str, absent: str = "none"):
    """Return the description of an option's value, and of its default, in tyro's help."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {absent})")


@REGISTRY.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Let tyro read `1e3`, `4M` and `4Mi` where an option takes an integer; the error for other text says so."""
    if info.type not in (int, float):
        return None
    read: Callable[[str], Any] = whole_number if info.type is int else float
    noun = "an integer" if info.type is int else "a number"

    def number(words: list[str]) -> Any:
        try:
            return read(words[0])
        except ValueError:
            raise ValueError(f"must be {noun}, not {words[0][:40]!r}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=info.type.__name__.upper(),
        instance_from_str=number,
        is_instance=lambda value: isinstance(value, int | info.type),
        str_from_instance=lambda value: [str(value)],
    )


@REGISTRY.primitive_rule
def _remat(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Let tyro read a policy of recomputation, or the tensors to keep."""
    if info.type != Policy | Keep | Split:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="POLICY",
        instance_from_str=lambda words: parse_remat(words[0]),
        is_instance=lambda value: isinstance(value, str | Keep | Split),
        str_from_instance=lambda value: [str(value)],
    )


def parse_remat(text: str) -> Remat:
    """Read the policy of all layers, or that of the first ones and of the others: `full:12+selective`.

    Raises `UserError` for another text.
    """
    if (split := SPLIT.fullmatch(text)) is None:
        return _layer_remat(text, text)
    first, later = (_layer_remat(split[part], text) for part in ("first", "others"))
    return Split(first=first, layers=int(split["layers"]), last=later)


SPLIT = re.compile(r"(?P<first>.+):(?P<layers>\d{1,9})\+(?P<others>.+)", re.ASCII)


def _layer_remat(words: str, text: str) -> LayerRemat:
    """Read `full`, `auto` or another policy, or the tensors that a layer keeps: `save:q,k+offload:gate,up`; a part of
    `text`."""
    if words in get_args(Policy):
        return words  # pyrefly: ignore[bad-return]
    names: dict[str, tuple[str, ...]] = {}
    for group in words.split("+"):
        kind, _, listed = group.partition(":")
        if kind not in ("save", "offload") or kind in names or not listed:
            policies = ", ".join((*REMAT_POLICIES, "auto"))
            fix = f"must be {policies}, or save:NAMES and offload:NAMES joined by +; of several FIRST:LAYERS+OTHERS"
            require(False, "train.remat", text, fix)
        names[kind] = tuple(listed.split(","))
        for name in names[kind]:
            fix = f"{name!r} is none of {', '.join(REMAT_NAMES)}"
            require(name in REMAT_NAMES, "train.remat", text, fix)
    kept: Any = {"saved": names.get("save", ()), "offloaded": names.get("offload", ())}
    return Keep(**kept)


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of a command that runs a recipe, without the configuration's."""

    mesh: Annotated[str | None, option("AXIS=SIZE,...", "the recipe's")] = None
    """All axes at once, as fsdp=4,tp=2; an axis not named is 1, and -1 takes what is left. auto: what
    `plan search` recommends by formula, with ZeRO stage, schedule, micro-batches and recomputation unless named."""
    fake_devices: Annotated[
        int | None, between(1, MOST_FAKE_DEVICES), option("N", "the real ones")
    ] = None
    """Run on so many fake CPU devices, to try a mesh on a laptop."""
    print_config: Flag = False
    """Print the command line's configuration, a file that this command takes as a recipe, and stop."""
    recipe: tyro.conf.Suppress[tyro.conf.Fixed[str]] = DEFAULT_RECIPE
    """The first word of the command line, if it is no option."""
    named: tyro.conf.Suppress[tyro.conf.Fixed[tuple[str, ...]]] = ()
    """The options that the command line has; `auto` does not choose their fields."""


@dataclass(frozen=True, kw_only=True)
class JobOptions(Options):
    """Options of a command that may be one process of many."""

    dist: DistConfig = dataclasses.field(default_factory=DistConfig)
    """Place of this process among the others."""

    def join(self) -> Launch | None:
        """Take the requested fake devices, or join the other processes; call it before JAX's first array.

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
class Command[O: Options]:
    """All that the command line of a recipe says."""

    options: Annotated[O, tyro.conf.arg(name="")]
    config: Annotated[Config, tyro.conf.arg(name="")]


def parse[O: Options](
    argv: Sequence[str], *, prog: str, options: type[O] = Options, description: str = ""
) -> tuple[Config, O]:
    """Return the configuration and the options that `argv` (without the program's name) asks for.

    A command with options of its own passes a subclass of `Options`. An argument that cannot be understood ends the
    process with exit code 2 and a message on stderr, `--help` and `--print-config` with 0.
    """

    def read_over(default: Config, words: Sequence[str]) -> Command[O]:
        """Read the command line `words`; fields that they do not set keep the values of `default`."""
        values = Command(options=options(), config=_with_named_parts(default, words))
        prog_of = f"{prog} [RECIPE]"
        form: Any = Command[options]
        return read(form, words, prog=prog_of, description=description, default=values)

    with user_errors(patience_s=PATIENCE_S):
        has_recipe = bool(argv) and not argv[0].startswith("-")
        arguments = _with_auto(argv[1:] if has_recipe else argv)
        name = argv[0] if has_recipe else DEFAULT_RECIPE
        recipe = load_recipe(name)
        ep, names = recipe.mesh.ep, named(arguments)
        if (mesh := _mesh_argument(arguments)) not in (None, "auto"):
            recipe = dataclasses.replace(recipe, mesh=MeshConfig.parse(mesh))
        # The fields of a model that comes from a folder are checked with the folder's, not with the recipe's.
        default, init_from = recipe, ""
        if "train.init_from" in names or recipe.train.init_from:
            kept = without_options(arguments, re.compile(r"--(no-)?model\.").match)
            cfg = read_over(recipe, kept).config
            if cfg.train.init_from:
                default, init_from = _with_model_of(cfg, recipe)
        command = read_over(default, arguments)
        cfg, chosen = command.config, command.options
        if init_from:
            train = dataclasses.replace(cfg.train, init_from=init_from)
            cfg = dataclasses.replace(cfg, train=train)
        if "train.distill.teacher" in names:
            cfg = _with_teacher(cfg)
        if "moe.a2a_groups" not in names:
            cfg = _with_exchange_of(cfg, ep)
        chosen = dataclasses.replace(chosen, recipe=name, named=names)
        free = chosen.mesh != "auto" or cfg.mesh == recipe.mesh
        require(free, "mesh", "auto", "chooses every axis; leave out --mesh.AXIS")
        if chosen.print_config:
            print(config_text(on_fake_devices(cfg, chosen) if chosen.fake_devices else cfg), end="")
            raise SystemExit(0)
    return cfg, chosen


def _with_model_of(cfg: Config, recipe: Config) -> tuple[Config, str]:
    """Return `recipe` with model and tokenizer of the folder `cfg.train.init_from`, and that folder's resolved name."""
    from ultrascale_jax.checkpoint.init_from import with_source

    source = with_source(cfg)
    data = dataclasses.replace(recipe.data, tokenizer=source.data.tokenizer)
    return dataclasses.replace(recipe, model=source.model, data=data), source.train.init_from


def _with_teacher(cfg: Config) -> Config:
    """Return `cfg` with the shape of the teacher that it names, or the number of its probabilities that are stored."""
    if cfg.train.distill.stored:
        from ultrascale_jax.data.top_k import with_top_k

        return with_top_k(cfg)
    from ultrascale_jax.checkpoint.init_from import with_teacher

    return with_teacher(cfg) if cfg.train.distill.enabled else cfg


def _with_auto(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with the number that means `auto` as the number of micro-batches."""
    option = "--train.microbatches"
    return [
        word.replace("auto", str(AUTO))
        if word == f"{option}=auto" or (last, word) == (option, "auto")
        else word
        for last, word in zip(["", *arguments], arguments, strict=False)
    ]


def _with_named_parts(cfg: Config, arguments: Sequence[str]) -> Config:
    """Add to `cfg` the parts of the model of which `arguments` name a field and which it has not."""
    model = copy.copy(cfg.model)
    for name, part in PARTS.items():
        words = re.compile(rf"--model\.{name.replace('_', '.')}\.")
        if getattr(model, name) is None and any(map(words.match, arguments)):
            # Unchecked, as it may need other fields that `arguments` set; the configuration that tyro makes is checked.
            object.__setattr__(model, name, part())
    return dataclasses.replace(cfg, model=model)


def without_options(arguments: Sequence[str], is_dropped: Callable[[str], object]) -> list[str]:
    """Return `arguments` without the options for which `is_dropped` is true, and their values."""
    kept, dropping = [], False
    for word in arguments:
        if word.startswith("--"):
            dropping = bool(is_dropped(word))
        if not dropping:
            kept.append(word)
    return kept


def _with_exchange_of(cfg: Config, ep: int) -> Config:
    """Return `cfg` with exchange groups as large as its recipe's, which has `ep` ranks of experts."""
    groups = cfg.moe.a2a_groups
    if groups == 1 or cfg.mesh.ep in (ep, -1) or ep < groups:
        return cfg
    size = ep // groups
    count = cfg.mesh.ep // size if cfg.mesh.ep % size == 0 else 1
    return dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, a2a_groups=max(1, count)))


def named(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the options in `arguments`, as errors spell them; a mesh that is to be chosen is none."""
    options = [a.partition("=")[0].removeprefix("--") for a in arguments if a.startswith("--")]
    names = dict.fromkeys(option.replace("-", "_") for option in options)
    return tuple(name for name in names if name != "mesh" or _mesh_argument(arguments) != "auto")


def _mesh_argument(arguments: Sequence[str]) -> str | None:
    """Return the value of `--mesh`, which unless `auto` replaces the recipe's mesh before `--mesh.AXIS` changes it."""
    values = [b for a, b in itertools.pairwise(arguments) if a == "--mesh"]
    values += [a.removeprefix("--mesh=") for a in arguments if a.startswith("--mesh=")]
    return values[-1] if values else None


def changes(name: str, base: Any, target: Any, always: Sequence[str] = ()) -> list[str]:
    """Return the arguments that turn the section `base`, called `name`, into `target`.

    Fields in `always` are written even if they are the same. A part that only `base` has cannot be removed.
    """
    words: list[str] = []
    for field in dataclasses.fields(target):
        old, new = getattr(base, field.name), getattr(target, field.name)
        option = f"--{name}.{field.name}".replace("_", "-")
        if isinstance(old, Section) or isinstance(new, Section):
            if new is not None:
                first = () if old is not None else (dataclasses.fields(new)[0].name,)
                words += changes(f"{name}.{field.name}", old or type(new)(), new, first)
        elif new == old and field.name not in always:
            continue
        elif isinstance(new, bool):
            words.append(switch(option, new))
        else:
            words += [option, *_words_of(new)]
    return words


def _words_of(value: Any) -> list[str]:
    """Return the arguments of a value that is no switch; nested tuples are flattened."""
    if isinstance(value, tuple):
        return [word for member in value for word in _words_of(member)]
    return [str(value)]


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
      UserError: in one line, the error of a section as it was raised, or tyro's with a fix.
    """
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            made = tyro.cli(
                form,
                args=arguments,
                **defaults,
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
        complaint = _unboxed(report.getvalue())
        options = [*options_of(default or form)]
        fix = expanded(complaint, arguments) or _of_switch(complaint, arguments, options)
        fix = fix or complaint + _hint(complaint, options, prog)
        raise UserError(fix) from None
    # A `Config` has done so itself.
    chosen: Any = made.options if isinstance(made, Command) else made
    check_fields("", chosen)
    put_home(chosen, *(f.name for f in dataclasses.fields(chosen) if f.name not in TEXTS))
    return made


def _unboxed(box: str) -> str:
    """Return tyro's complaint as one line that names options as they are typed.

    tyro draws ╭─ title ─╮ and │ at the sides, or, where the terminal is not UTF-8, a title over a rule of dashes.
    """
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    if not box.startswith("╭") and lines[1:] and set(lines[1]) <= {"─", "-"}:
        lines = lines[2:]
    words = itertools.takewhile(lambda line: not line or not set(line) <= {"─", "-"}, lines)
    complaint = " ".join(filter(None, words)).removesuffix(".")
    for phrase, plain in PHRASES.items():
        complaint = re.sub(phrase, plain, complaint)
    return complaint


def _of_switch(complaint: str, arguments: Sequence[str], options: Sequence[str]) -> str:
    """Return an error that a switch got a value, with the switch that means it; empty for another `complaint`."""
    value = complaint.partition("Unrecognized options: ")[2].partition(", ")[0]
    pairs = [
        *itertools.pairwise(arguments),
        *(word.split("=", 1) for word in arguments if "=" in word),
    ]
    option = next((o for o, v in pairs if v == value and o.startswith("--")), "")
    if not option or value.lower() not in SWITCH_VALUES:
        return ""
    on = re.sub(r"^(--(?:.*\.)?)no-", r"\1", option)
    off = re.sub(r"([^-.][^.]*)$", r"no-\1", on)
    means_on = SWITCH_VALUES[value.lower()] == (option == on)
    fix = f"write {on if means_on else off}" if means_on or off in options else f"leave {on} out"
    return f"{option} is a switch and takes no value: {fix}"


def _hint(complaint: str, options: Sequence[str], prog: str) -> str:
    """Return the fix to follow tyro's one-line `complaint` of options that it does not know, or nothing."""
    if not complaint.startswith("Unrecognized"):
        return ""
    words = complaint.partition(": ")[2].split(", ")
    files = (".py", ".json")
    misplaced = [w for w in words if w.replace("-", "_") in recipes() or w.lower().endswith(files)]
    first = prog.replace("[RECIPE]", misplaced[0] if misplaced else "").strip()
    hint = f"; the recipe comes first: {first} ..." if misplaced and "[RECIPE]" in prog else ""
    unknown = [word for word in words if word.startswith("-") or "=" in word]
    if unknown and (names := meant(f"--{unknown[0].lstrip('-')}", options)):
        return f"{hint}; did you mean {' or '.join(names)}?"
    return hint or (f"; see {first} --help" if unknown else "")
