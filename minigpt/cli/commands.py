"""The app of all commands, and what it says of an error."""

import importlib
import io
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, NoReturn

import typer

from minigpt.cli.interrupt import Interrupts
from minigpt.cli.options import add, option_name, with_values
from minigpt.cli.output import PULSE
from minigpt.errors import MiniGPTError, is_about_memory
from minigpt.version import __version__

COMMANDS = (
    "generate", "parity", "norms", "bench", "convert", "info", "perplexity", "sites", "serve", "finetune", "study",
)  # fmt: skip
# Idle threads of torch spin by default. They keep a server's event loop waiting, and take processor time from a
# judgement or a check.
SLEEPING_THREADS = ("serve", "parity", "norms")

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"minigpt {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A GPT-2 small enough to read and exact enough to trust, on a LayerNorm that you can swap."""


for _name in COMMANDS:
    _command = getattr(importlib.import_module(f"minigpt.cli.{_name}"), _name)
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        add(app, _command)


def run(words: list[str], interrupts: Interrupts) -> None:
    """Run the command of these words and exit.

    Raises:
        SystemExit: with the status.
        KeyboardInterrupt: after an interrupt.
    """
    words = words or ["--help"]
    pulse: AbstractContextManager[None] = nullcontext()  # of a server, which runs until it is stopped
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal that cannot show a character
    if words[0] in SLEEPING_THREADS:  # before torch is loaded
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if words[0] != "serve":
        _guard_exit()
        pulse = PULSE.beating()
    try:
        with pulse:
            status = _status_of(with_values(words), interrupts)
        if status == 130:  # Typer's, after an interrupt
            raise KeyboardInterrupt
        sys.stdout.flush()
        sys.exit(status)
    except MiniGPTError as error:
        _fail(error.spelled(option_name))
    except _UsageError as error:
        command = "minigpt"
        if error.ctx:
            command = error.ctx.command_path
        _fail(f"{error.format_message()} ({command} --help shows what there is)")
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except (MemoryError, RuntimeError) as error:
        if not is_about_memory(error):
            raise
        reason = re.sub(r"^\[enforce fail [^]]*\].*?(?=DefaultCPUAllocator)", "", str(error).strip())
        first_line = reason.partition("\n")[0]
        _fail(f"there is not enough memory for this: {first_line or 'none is left'}")
    except BrokenPipeError:
        _drop_output()
        sys.exit(128 + 13)
    except OSError as error:
        _drop_output()
        _fail(f"{error.filename or 'cannot write the output'}: {error.strerror}")


def _status_of(words: list[str], interrupts: Interrupts) -> Any:
    try:
        return app(words, prog_name="minigpt", standalone_mode=False)
    except Exception as error:
        if interrupts.came:  # somebody has made this of it
            raise KeyboardInterrupt from error
        raise


def _guard_exit() -> None:
    """A norm's code that ends this process at once gives status 2, and not that of a verdict."""
    owner, end = os.getpid(), os._exit

    def ended(status: int) -> NoReturn:
        if os.getpid() == owner:
            print("error: the norm's code ended the process, so there is no result", file=sys.stderr, flush=True)
            status = 2
        end(status)

    os._exit = ended


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python fails to write the rest at exit


_UsageError: Any = typer.BadParameter.__base__  # click's, which typer bundles or imports


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
