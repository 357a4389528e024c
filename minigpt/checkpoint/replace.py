"""Replace the files of a checkpoint at one moment: a process that is killed leaves the old model or the new one."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from minigpt.checkpoint.contents import CONFIG, CURRENT, MODEL, SAFETENSORS, WEIGHTS_FIELD, matches
from minigpt.files import flush, locked, parse_object, remove, remove_left, temporary, write_json

SAVING = "saving"  # names the folder inside that a new checkpoint is written to
INDEX = f"{SAFETENSORS}.index.json"
HERE = "here"  # begins the names of files that are only read while the new files are in the folder inside


@contextlib.contextmanager
def replacing(folder: Path, replaced: tuple[str, ...] = MODEL) -> Iterator[Path]:
    """Yield a new folder to write into. Its files appear in ``folder`` when the block has ended without an error.

    They appear at one moment: a process that is killed, or an error, leaves the old model or the new one, whole.

    1. The new files are written to a folder inside, and flushed to the disk.
    2. One rename puts a config.json in place that names them: ``transformers_weights``, which transformers and minigpt
       follow. From here on the folder holds the new model.
    3. The new files take their usual names next to it, and the old ones go.
    4. A second rename puts a config.json in place that names nothing, and the folder inside goes.

    Savers take turns for steps 2 to 4, by a lock on the folder. What a killed one has left is removed by the next.

    Files in ``folder`` that match the patterns ``replaced`` go. All others stay.

    Raises:
        OSError: if it cannot be written. Before step 2 the old files stay.
    """
    folder = Path(os.path.realpath(folder.expanduser()))  # a link stays a link
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with temporary(folder, SAVING, Path.mkdir) as new, contextlib.ExitStack() as turn:
            yield new
            for path in (*new.iterdir(), new):
                flush(path)
            with contextlib.suppress(OSError):  # a file system without locks
                turn.enter_context(locked(folder, wait=True))
            # Under its new name the folder stays if what follows fails.
            current = new.rename(folder / new.name.replace(SAVING, CURRENT, 1))
            _make_current(folder, current)
            _move_up(folder, current, replaced)
            remove(current)
            remove_left(folder, CURRENT)
            remove_left(folder, SAVING)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # there is something in it
                folder.rmdir()
        raise


def _make_current(folder: Path, current: Path) -> None:
    """Put a config.json in place that names the files in the folder inside."""
    weights = f"{current.name}/{SAFETENSORS}"
    if (current / INDEX).is_file():  # transformers looks for the shards that an index names in the folder itself
        index = parse_object((current / INDEX).read_bytes())
        index["weight_map"] = {name: f"{current.name}/{shard}" for name, shard in index["weight_map"].items()}
        weights = f"{current.name}/{HERE}.{INDEX}"
        write_json(folder / weights, index)
        flush(folder / weights)
    config = parse_object((current / CONFIG).read_bytes()) | {WEIGHTS_FIELD: weights}
    write_json(current / f"{HERE}.json", config)
    flush(current / f"{HERE}.json")
    flush(folder)
    (current / f"{HERE}.json").replace(folder / CONFIG)
    flush(folder)


def _move_up(folder: Path, current: Path, replaced: tuple[str, ...]) -> None:
    """Give the files of the folder inside their usual place, and the config.json that belongs to it."""
    names = {path.name for path in current.iterdir() if not path.name.startswith(f"{HERE}.")}
    link = current / f"{HERE}.link"
    for name in names - {CONFIG}:
        try:
            os.link(current / name, link)
        except OSError:  # a file system without links
            shutil.copy2(current / name, link)
            flush(link)
        link.replace(folder / name)
    for path in folder.iterdir():
        if path.name not in names and matches(path.name, replaced):
            remove(path)
    flush(folder)
    (current / CONFIG).replace(folder / CONFIG)
    flush(folder)
