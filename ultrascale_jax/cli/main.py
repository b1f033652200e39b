"""The command `ultrascale`: run the command that its first word names."""

import contextlib
import errno
import importlib
import io
import os
import select
import signal
import sys
import types
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from pathlib import Path

import ultrascale_jax
from ultrascale_jax.cli.errors import user_errors
from ultrascale_jax.config import UserError, did_you_mean, require
from ultrascale_jax.launch.events import say
from ultrascale_jax.launch.exit_codes import CRASHED

COMMANDS = {
    "train": "train a model                                        [RECIPE] --mesh fsdp=4,tp=2",
    "launch": "train under a supervisor, which restarts             --processes 8 -- [RECIPE]",
    "plan": "memory, time and meshes of a run, without its GPUs   memory|compile|search|... [RECIPE]",
    "doctor": "check hosts, devices and links before a run          [RECIPE] --mesh fsdp=8",
    "watch": "loss, speed, memory and events of runs on a page     RUN_DIR...",
    "inspect": "checkpoints of a run, its time, its traced steps     RUN_DIR",
    "generate": "continue a text with a trained model, or talk to it  MODEL --prompt TEXT|--chat",
    "evaluate": "held-out loss and perplexity, and lm-eval's tasks    MODEL --source text:GLOB",
    "prepare-data": "text, JSON lines or Parquet to token shards          --input GLOB --out DIR",
    "convert-hf": "a run as a Hugging Face checkpoint                   RUN_DIR HF_DIR",
}
"""Commands by name, with a description and an example of their arguments."""

GPU_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Files of which a host with NVIDIA GPUs has one, as JAX looks for them; the last is WSL's."""

PAGES = ("watch",)
"""Commands of `ultrascale_jax.web`; the others are of `ultrascale_jax.cli`."""

LOGGING = ("train", "launch")
"""Commands whose work does not depend on a reader of their output."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write to a full disk, or beyond a quota or a limit."""

HELP = """Train and plan language models on NVIDIA GPU clusters: `ultrascale COMMAND ...`; `COMMAND --help` says more.
Completion for bash or zsh: `source <(ultrascale --completion bash)`.

""" + "\n".join(f"{name:<12} {words}" for name, words in COMMANDS.items())


def main() -> None:
    """Run the command that the first word of the command line names."""
    arguments = sys.argv[1:]
    if arguments[:1] and arguments[0] in COMMANDS:
        run(arguments[0], arguments[1:])
        return
    with _exit_code():
        match arguments:
            case [] | ["-h" | "--help", *_]:
                print(HELP)
            case ["--version"]:
                print(ultrascale_jax.__version__)
            case ["--completion", shell]:
                complete(shell)
            case [word, *_]:
                fix = f"{did_you_mean(word, COMMANDS)}choose one of {', '.join(COMMANDS)}"
                require(False, "command", word, fix)


def run(command: str, arguments: Sequence[str] | None = None) -> None:
    """Run the command, and turn its exception into the exit code of the process."""
    with _exit_code(logs=command in LOGGING):
        _check_working_directory()
        choose_platform(os.environ)
        module_of(command).main(sys.argv[1:] if arguments is None else arguments)


def module_of(command: str) -> types.ModuleType:
    """Import the module of a command."""
    layer = "web" if command in PAGES else "cli"
    return importlib.import_module(f"ultrascale_jax.{layer}.{command.replace('-', '_')}")


def complete(shell: str) -> None:
    """Print the script that completes the command line in `shell`."""
    from ultrascale_jax.cli.completion import print_script

    print_script(shell, {command: module_of(command) for command in COMMANDS})


@contextlib.contextmanager
def _exit_code(*, logs: bool = False) -> Iterator[None]:
    """Turn an exception of the block, the whole process, into its exit code; with `logs` output may be lost."""
    _mend_streams()
    try:
        with user_errors():
            yield
        _flush() if logs else sys.stdout.flush()
    except SystemExit:
        _flush()
        raise
    except KeyboardInterrupt:
        say("interrupted", sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        if isinstance(error, OSError) and (code := _lost_output(error)) is not None:
            raise SystemExit(code) from None
        # Python itself would end with 1. In a job of many processes the hook does not return.
        sys.excepthook(type(error), error, error.__traceback__)
        _flush()
        raise SystemExit(CRASHED) from None


def choose_platform(
    environ: MutableMapping[str, str], devices: Iterable[str | Path] = GPU_DEVICES
) -> None:
    """Let JAX, which is not imported yet, start on the CPU where none of the files `devices` of an NVIDIA GPU exists.

    JAX would try its plugin for GPUs first, whose failure is a traceback. The user's own choice stays, and where SLURM
    says that it gave GPUs, the run looks for them.
    """
    promised = "JAX_PLATFORMS" in environ or "SLURM_GPUS_ON_NODE" in environ
    if not promised and not any(os.path.exists(device) for device in devices):
        environ["JAX_PLATFORMS"] = "cpu"


def _mend_streams() -> None:
    """Open the standard streams that the caller closed, and let no sign raise that their encoding lacks.

    Without that the next file that is opened would be stdout.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest free number: this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape" if name == "stdin" else "backslashreplace")


def _check_working_directory() -> None:
    """Raise `UserError` if the working directory was deleted: a path, and a module of a recipe, may be relative."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory was deleted; cd to a folder that exists") from None


def _flush() -> None:
    """Flush stdout; one that cannot be written must not replace the exit code that is under way."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        return
    _silence_stdout()


def _lost_output(error: OSError) -> int | None:
    """Return the exit code of a command that ends because stdout has no reader, as after `| head`, or no room is left.

    None: it ends because of another error.
    """
    if isinstance(error, BrokenPipeError) and _stdout_is_closed():
        _silence_stdout()
        return 128 + signal.SIGPIPE
    if error.errno not in NO_ROOM:
        return None
    _flush()
    where = error.filename or "stdout, or a file that was being written"
    say(f"error: {error.strerror}: {where}", sys.stderr)
    return CRASHED


def _stdout_is_closed() -> bool:
    """Return whether the pipe of stdout has lost its reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _silence_stdout() -> None:
    """Let stdout lead nowhere: Python flushes it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
