"""The command line: one file for each command, which parses, calls and prints.

To add a command, write ``cli/NAME.py`` with a function NAME, and add NAME to COMMANDS. Its parameters and its docstring
become arguments, options and help: see ``options.add``. Import heavy packages inside the function, since
``minigpt --help`` must not wait for them.
"""

import importlib
import io
import os
import signal
import sys
from typing import Annotated, Any

import typer

from minigpt import __version__
from minigpt.cli.options import add, option, with_optional_values
from minigpt.cli.output import never_exit_silently
from minigpt.errors import MiniGPTError

COMMANDS = (
    "generate",
    "parity",
    "norms",
    "bench",
    "convert",
    "info",
    "perplexity",
    "sites",
    "serve",
    "finetune",
    "study",
)

RESUMABLE = ("study", "finetune", "--remove-file")  # and generate --prompts, which says more

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"minigpt {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A GPT-2 small enough to read and exact enough to trust, on a LayerNorm that you can swap."""


for _name in COMMANDS:
    _command = getattr(importlib.import_module(f"minigpt.cli.{_name}"), _name)
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        add(app, _command)


def main() -> None:
    """Run the command line and exit.

    The status is 0 on success, and 1 if parity does not hold or a norm is not a LayerNorm. After an error, which is one
    line on standard error, it is 2. After an interrupt it is 130.
    """
    if sys.argv[1:2] == ["serve"]:  # before torch is loaded; else its idle threads keep the event loop waiting
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    else:
        never_exit_silently()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # head closes the pipe: end quietly
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal that cannot show a character
    try:
        status = app(with_optional_values(sys.argv[1:]) or ["--help"], prog_name="minigpt", standalone_mode=False)
        if status == 130:  # Typer's, after an interrupt
            raise KeyboardInterrupt
        sys.stdout.flush()
        sys.exit(status)
    except MiniGPTError as error:
        _fail(error.spelled(option))
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "minigpt"
        _fail(f"{error.format_message()} ({command} --help shows what there is)")
    except (KeyboardInterrupt, typer.Abort):
        if any(word.startswith(RESUMABLE) for word in sys.argv[1:]):
            print("stopped; the same command continues", file=sys.stderr)
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        _fail(f"there is not enough memory for this: {str(error).strip().partition(chr(10))[0] or 'none is left'}")
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python fails to write the rest at exit
        _fail(f"{error.filename or 'cannot write the output'}: {error.strerror}")


def _is_of_memory(error: Exception) -> bool:
    """PyTorch has an error class for a GPU's memory, but not for the main memory."""
    of_memory = ("out of memory", "can't allocate memory", "Cannot allocate memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in of_memory)


_UsageError: Any = typer.BadParameter.__base__  # click's, which typer bundles or imports


def _fail(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
