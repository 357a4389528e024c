"""The command line, one file a command: parse, call, print. Nothing is computed here.

Nothing heavy is imported before it is needed.
"""

import io
import os
import signal
import sys
from typing import Annotated, Any

import typer

import minigpt
from minigpt.cli import bench, convert, finetune, generate, info, norms, parity, study
from minigpt.errors import MiniGPTError

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"minigpt {minigpt.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A GPT-2 small enough to read and exact enough to trust, on a LayerNorm that you can swap."""


app.command(epilog=generate.EXAMPLES)(generate.generate)
app.command(epilog=parity.EXAMPLES)(parity.parity)
app.command(epilog=norms.EXAMPLES)(norms.norms)
app.add_typer(bench.bench, name="bench")
app.command(epilog=convert.EXAMPLES)(convert.convert)
app.command(epilog=info.EXAMPLES)(info.info)
app.command(epilog=finetune.EXAMPLES)(finetune.finetune)
app.command(epilog=study.EXAMPLES)(study.study)


def main() -> None:
    """Run the command line, and exit.

    The status is 0 when it is done; 1 when parity does not hold, or a norm is no LayerNorm; 2 after an error, which is
    one line on standard error; 130 when it was interrupted.
    """
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads our output may have seen enough: end quietly
    _require_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character still shows the others
    try:
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status)
    except MiniGPTError as error:
        _fail(str(error))
    except _UsageError as error:
        _fail(f"{error.format_message()} (minigpt --help shows what there is)")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        _fail(f"there is not enough memory for this: {str(error).strip().partition(chr(10))[0] or 'none is left'}")
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try, and fail, to write the rest at its exit
        _fail(f"{error.filename or 'cannot write the output'}: {error.strerror}")


def _require_streams() -> None:
    """Refuse to work for a reader that is not there.

    A closed stream is None, and its number would be that of the next file opened, which would be written into.
    """
    closed = {name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None}
    while (place := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(place)
    if "stderr" in closed:
        sys.stderr = open(2, "w", errors="replace", closefd=False)  # noqa: SIM115  (as long as the process lives)
    if "stdout" in closed:
        _fail("standard output is closed; send it to /dev/null if nobody is to read it")


def _is_of_memory(error: Exception) -> bool:
    """PyTorch has an error of its own for a GPU's memory, and none for the processor's."""
    of_memory = ("out of memory", "can't allocate memory", "Cannot allocate memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in of_memory)


_UsageError: Any = typer.BadParameter.__base__  # of click, which typer carries within itself or beside it


def _fail(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
