"""Judge GPT-2 as other programs compute it, each in an environment of its own with pinned versions.

    python scripts/elsewhere/gpt2.py docs/results/elsewhere-gpt2.json onnx openvino

Each file in ``scripts/elsewhere/programs`` is a program: its packages, and a function that yields rows. The rows of the
programs that are named are measured again, or of all; the others stay. PyTorch and transformers are those of the active
environment. Packages without a wheel are compiled, which takes minutes.
"""

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import minigpt
from minigpt.files import write_atomically
from minigpt.machine import processor_name
from minigpt.report.sentences import diagnosis_lines, explained_by, precision_line

ROOT = Path(__file__).parents[2]
PROGRAMS = ("onnx", "openvino", "ctranslate2", "ctranslate2_avx2", "llama_cpp", "compiled")
LEVELS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "avx_vnni")


class Row(NamedTuple):
    """A way of computing the demo.

    Attributes:
        program: its name, without the version.
        how: its settings, in words.
        open: makes the candidate.
        package: whose version is written.
        cause: of a deviation, found by experiment; empty if there is none.
        dtype: of the original that it is judged against.
    """

    program: str
    how: str
    open: Callable[[], Any]
    package: str
    cause: str = ""
    dtype: str = "float32"


def module_of(program: str) -> Any:
    """Return the file of a program: PACKAGES, rows(folder), and VARIABLES of its environment if it needs some."""
    if str(ROOT / "scripts") not in sys.path:  # where this file is run by its path
        sys.path.insert(0, str(ROOT / "scripts"))
    return importlib.import_module(f"elsewhere.programs.{program}")


def rows_of(program: str, folder: Path) -> Iterator[Row]:
    """Yield the rows of a program, whose files are written into a folder."""
    yield from module_of(program).rows(folder)


def measure(program: str, folder: Path, file: Path) -> None:
    """Judge the rows of a program in this process; write them to a file."""
    from importlib.metadata import version

    shutil.copytree(minigpt.Recipe("demo").place(), folder / "demo")
    originals: dict[str, minigpt.Original] = {}
    measured = []
    for row in rows_of(program, folder):
        if row.dtype not in originals:
            originals[row.dtype] = minigpt.Original(folder / "demo", dtype=row.dtype, device="cpu")
        begun = time.perf_counter()
        report = originals[row.dtype].judge(row.open())
        fields = report.to_dict()
        decoding = fields["decoding"]
        result = {
            "program": row.program,
            "how": row.how,
            "version": f"{row.package} {version(row.package)}",
            "dtype": row.dtype,
            "verdict": fields["verdict"],
            "ratio": fields["logits"]["ratio"],
            "decoding_ratio": None if decoding is None else decoding["ratio"],
            "reasons": fields["reasons"],
            "notes": fields["notes"],
            "precision": fields["precision"],
            "diagnosis": fields["diagnosis"],
            "sentences": sentences_of(fields),
            "account": fields["account"],
            "cause": row.cause,
            "date": date.today().isoformat(),
            "seconds": round(time.perf_counter() - begun, 1),
        }
        print(f"{row.program}, {row.how}: {fields['verdict']} {fields['logits']['ratio']:.4g}", file=sys.stderr)
        measured.append(result)
    file.write_text(json.dumps(measured))


def sentences_of(fields: dict[str, Any]) -> list[str]:
    """Return what a report says of the cause of an error: precision, mistake, or the arithmetic that explains it."""
    report = minigpt.ParityReport.from_dict(fields)
    account = report.account
    of_file = [explained_by(account)] if account is not None and account.explains else []
    return precision_line(report) + diagnosis_lines(report) + of_file


def environment_of(program: str, place: Path) -> Path:
    """Make an environment that has a program's packages beside the active environment's; return its Python."""
    packages = module_of(program).PACKAGES
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python = place / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages_folder = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    (Path(packages_folder) / "active.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def measured_apart(program: str) -> list[dict[str, Any]]:
    """Return the rows of a program, measured in an environment of its own."""
    with tempfile.TemporaryDirectory() as place:
        folder, file = Path(place), Path(place) / "rows.json"
        python = environment_of(program, folder / "environment")
        paths = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
        words = [python, "-m", "elsewhere.gpt2", "--measure", program, folder, file]
        variables = getattr(module_of(program), "VARIABLES", {})
        subprocess.run(words, check=True, env=os.environ | variables | {"PYTHONPATH": paths})
        return json.loads(file.read_text())


def machine() -> dict[str, Any]:
    """Return what this machine is, as far as it changes numbers."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    levels = [level for level in LEVELS if level in flags]
    return {"processor": processor_name(), "levels": levels, "cores": os.cpu_count(), "system": platform.system()}


def put(file: Path, program: str, measured: list[dict[str, Any]]) -> None:
    """Put the rows of a program into a file of results."""
    from transformers import __version__ as transformers_version

    kept = json.loads(file.read_text())["rows"] if file.exists() else {}
    for row in measured:
        row["machine"] = machine()
    kept[program] = measured
    ordered = {name: kept[name] for name in PROGRAMS if name in kept}
    results = {"model": "demo", "transformers": transformers_version, "rows": ordered}
    write_atomically(file, json.dumps(results, indent=1) + "\n")


def main(file: Path, programs: list[str]) -> None:
    """Measure programs, and put their rows into a file of results."""
    for program in programs or PROGRAMS:
        put(file, program, measured_apart(program))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
