"""The app of the commands, and what it says of an error."""

import importlib
import io
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Annotated, Any

import typer

from minigpt.cli.options import add, option_name, with_values
from minigpt.cli.output import PULSE, for_terminal
from minigpt.errors import MiniGPTError, is_about_memory
from minigpt.version import __version__

COMMANDS = (
    "generate", "parity", "norms", "bench", "convert", "info", "perplexity", "sites", "serve", "finetune", "study",
)  # fmt: skip
# Idle threads of torch spin by default. They keep a server's event loop waiting, and take processor time from a
# judgement or a check.
SLEEPING_THREADS = ("serve", "parity", "norms")
CLOSED_PIPE = 128 + 13


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"minigpt {__version__}")
        raise typer.Exit


def _main(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A GPT-2 small enough to read and exact enough to trust, on a LayerNorm that you can swap."""


def app_of(words: list[str]) -> typer.Typer:
    """Return the app of the command that these words begin with; of all commands if they begin with none."""
    app = typer.Typer(
        callback=_main,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    names = [*COMMANDS]
    if words[0] in COMMANDS:
        names = words[:1]
    for name in names:
        command = getattr(importlib.import_module(f"minigpt.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            add(app, command)
    return app


def run(words: list[str]) -> int:
    """Run the command of these words, and return its status: see ``main``. It raises what is a fault of ours."""
    words = words or ["--help"]
    pulse: AbstractContextManager[None] = nullcontext()  # of a server, which runs until it is stopped
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal that cannot show a character
    if words[0] in SLEEPING_THREADS:  # before torch is loaded
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if words[0] != "serve":
        pulse = PULSE.beating()
    try:
        with pulse:
            status = app_of(words)(with_values(words), prog_name="minigpt", standalone_mode=False)
        sys.stdout.flush()
        return status or 0
    except MiniGPTError as error:
        return _fail(error.spelled(option_name))
    except _UsageError as error:
        command = "minigpt"
        if words[0] in COMMANDS:
            command = f"minigpt {words[0]}"
        if error.ctx:
            command = error.ctx.command_path
        return _fail(f"{error.format_message()} ({command} --help shows what there is)")
    except (MemoryError, RuntimeError) as error:
        if not is_about_memory(error):
            raise
        reason = re.sub(r"^\[enforce fail [^]]*\].*?(?=DefaultCPUAllocator)", "", str(error).strip())
        first_line = reason.partition("\n")[0]
        return _fail(f"there is not enough memory for this: {first_line or 'none is left'}")
    except BrokenPipeError:
        return CLOSED_PIPE
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # of which Rich and Typer make this, with status 1
            return CLOSED_PIPE
        if ended.code:
            raise
        return 0  # a shell has completed a word
    except OSError as error:
        if error.strerror is None:
            raise
        return _fail(f"{error.filename or 'cannot write the output'}: {error.strerror}")


_UsageError: Any = typer.BadParameter.__base__  # click's, which typer bundles or imports


def _fail(message: str) -> int:
    with suppress(OSError):  # nobody reads it
        print(f"error: {for_terminal(' '.join(message.split()))}", file=sys.stderr)
    return 2
