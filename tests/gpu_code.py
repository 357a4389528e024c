"""What Triton makes of a kernel for a GPU that need not be there, in a process where kernels are not interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def told(program: str) -> list[dict[str, Any]]:
    """The lines of JSON that a program prints, which may use this file."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> dict[str, Any]:
    """Its code in all its forms. Pointers and strides are multiples of sixteen, as for most tensors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types[name].startswith("*") or (name.endswith("stride") and types[name] != "constexpr")
    }
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm
