"""Replace a folder's model at one moment: a process that is killed leaves the old model or the new one, whole.

1. The new files are written to a folder inside, ``.saving.*.partial``, and flushed to the disk.
2. One rename puts a config.json in place that names them: ``transformers_weights``, which transformers and minigpt
   follow. From here on the folder holds the new model.
3. The new files take their usual names beside it, and the old ones go.
4. A second rename puts a config.json in place that names nothing, and the folder inside goes.

Savers take turns for steps 2 to 4, by a lock on the folder. What a killed one has left is removed by the next.
"""

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from minigpt.checkpoint.files import CONFIG, MODEL, SAFETENSORS, SAVING, WEIGHTS_FIELD, write_json
from minigpt.files import flush, locked, parse_object, remove, remove_left, temporary

INDEX = f"{SAFETENSORS}.index.json"


@contextlib.contextmanager
def replacing(folder: Path, replaced: tuple[str, ...] = MODEL) -> Iterator[Path]:
    """Yield a new folder to write into. Its files appear in ``folder`` when the block has ended without an error.

    Files in ``folder`` that match the patterns ``replaced`` go. All others stay.

    Raises:
        OSError: if it cannot be written. The old files stay.
    """
    folder = Path(os.path.realpath(folder.expanduser()))  # a link stays a link
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with temporary(folder, SAVING, Path.mkdir) as new:
            yield new
            for path in (*new.iterdir(), new):
                flush(path)
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):  # a file system without locks
                    stack.enter_context(locked(folder, wait=True))
                _make_current(folder, new)
                _move_up(folder, new, replaced)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # somebody else has put something there
                folder.rmdir()
        raise


def _make_current(folder: Path, new: Path) -> None:
    """Put a config.json in place that names the files in ``new``."""
    weights, index = f"{new.name}/{SAFETENSORS}", new / INDEX
    if index.is_file():  # transformers looks for the shards that an index names in the folder itself
        fields = parse_object(index.read_bytes())
        fields["weight_map"] = {name: f"{new.name}/{shard}" for name, shard in fields["weight_map"].items()}
        weights = f"{new.name}/current.{INDEX}"
        write_json(folder / weights, fields)
    config = parse_object((new / CONFIG).read_bytes())
    write_json(new / "current.json", config | {WEIGHTS_FIELD: weights})
    flush(new)
    (new / "current.json").replace(folder / CONFIG)
    flush(folder)


def _move_up(folder: Path, new: Path, replaced: tuple[str, ...]) -> None:
    """Give the files in ``new`` their usual place, and the config.json that belongs to it."""
    names = {path.name for path in new.iterdir() if not path.name.startswith("current.")}
    for name in names - {CONFIG}:
        try:
            os.link(new / name, new / "current.link")
        except OSError:  # a file system without links
            shutil.copy2(new / name, new / "current.link")
            flush(new / "current.link")
        (new / "current.link").replace(folder / name)
    for path in folder.iterdir():
        if path.name not in names and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in replaced):
            remove(path)
    flush(folder)
    (new / CONFIG).replace(folder / CONFIG)
    flush(folder)
    remove_left(folder, SAVING)
