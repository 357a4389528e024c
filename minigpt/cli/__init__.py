"""The command line: one file for each command, which parses, calls and prints.

To add a command, write ``cli/NAME.py`` with a function NAME, and add NAME to COMMANDS in ``cli/commands.py``. Its
parameters and its docstring become arguments, options and help: see ``options.add``. Import heavy packages inside the
function, since ``minigpt --help`` must not wait for them.
"""

import atexit
import sys

from minigpt.cli.interrupt import CONTINUES, STATUS, Interrupts, continues, leave

TYPE_CHECKING = False  # as in minigpt/__init__.py

if TYPE_CHECKING:
    from minigpt.cli.commands import COMMANDS as COMMANDS
    from minigpt.cli.commands import app as app

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name in ("app", "COMMANDS"):  # imported when used, so that ``main`` handles a signal before
            from minigpt.cli import commands

            return getattr(commands, name)
        raise AttributeError(f"module 'minigpt.cli' has no attribute {name!r}")


def program() -> None:
    """Run ``main`` as the installed command, and end the process after the last function of ``atexit``.

    The interpreter would then free all that is imported. With PyTorch's compiler that takes up to a second. It does so
    where somebody has registered a function before, as coverage does when Python starts: it would not be called.
    """
    codes: list[object] = []

    def end() -> None:
        for code in codes:
            leave(code)

    if not atexit._ncallbacks():
        atexit.register(end)  # the first, so it is called last
    try:
        main()
    except SystemExit as ended:
        codes.append(ended.code)
        raise


def main() -> None:
    """Run the command line and exit.

    The status is 0 on success, and 1 if parity does not hold or a norm is not a LayerNorm. After an error, which is one
    line on standard error, it is 2. After an interrupt it is 130, within a second, and after a closed pipe 141.
    """
    words = sys.argv[1:]
    interrupts = Interrupts(words)
    interrupts.start()
    try:
        from minigpt.cli.commands import run

        run(words, interrupts)
    except BaseException as error:
        if interrupts.came:  # whatever has become of its KeyboardInterrupt
            interrupts.end_after_cleaning()
        if not isinstance(error, KeyboardInterrupt):
            raise
        if continues(words):
            print(CONTINUES, file=sys.stderr)
        sys.exit(STATUS)
    finally:
        interrupts.stop()
