"""The package as a user gets it: its wheel and sdist, its command, its import."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import flashkernels as fk

ROOT = Path(__file__).parent.parent
IMPORT_LIMIT = 0.3  # seconds, beyond torch's own import


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Standard output of a command that must succeed, in an environment without Python's own variables."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON_INTERPRET"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python(code: str) -> str:
    """Standard output of a program run by this Python, with this checkout's package."""
    return run(sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{code}")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment that has the wheel and finds the wheel's dependencies in this one.

    A .pth line adds a folder but does not read the .pth files in it, so an editable install of ours stays invisible."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True)
    run(sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    site = run(home / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    here = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    Path(site, "dependencies.pth").write_text("\n".join(sorted(here)))
    return home / "bin"


def source_files() -> set[str]:
    files = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT / "src").as_posix() for path in files}


def test_the_wheel_has_every_source_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(f"flashkernels-{fk.__version__}.dist-info/METADATA").decode()
    assert names == source_files() and "flashkernels/py.typed" in names
    assert f"\nVersion: {fk.__version__}\n" in metadata and "\nLicense-File: LICENSE\n" in metadata


def test_the_sdist_has_what_the_wheel_is_built_from(dist: Path) -> None:
    with tarfile.open(dist / f"flashkernels-{fk.__version__}.tar.gz") as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", *(f"src/{name}" for name in source_files())}
    assert names >= needed
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", ".venv/"))]


def test_the_installed_wheel_is_what_runs(installed: Path) -> None:
    where = run(installed / "python", "-c", "import flashkernels; print(flashkernels.__file__)").strip()
    assert Path(where).is_relative_to(installed.parent)


def test_the_installed_command_prints_its_version(installed: Path) -> None:
    assert run(installed / "flashkernels", "--version").strip() == fk.__version__


def test_the_installed_command_explains_without_a_gpu(installed: Path) -> None:
    ask = ("explain", "attention", "--head-dim", "72", "--seq", "4096", "--gpu", "h200", "--causal")
    answer = run(installed / "flashkernels", *ask)
    assert all(word in answer for word in ("hopper", "triton", "torch", "tile:", "roofline:"))


def test_importing_is_fast_and_loads_neither_torch_nor_triton() -> None:
    program = """
import time
start = time.perf_counter()
import flashkernels
print(time.perf_counter() - start, "torch" in sys.modules, "triton" in sys.modules)
"""
    seconds, *loaded = python(program).split()
    assert loaded == ["False", "False"]
    assert float(seconds) < IMPORT_LIMIT


def test_first_use_of_the_public_names_is_fast_after_torch() -> None:
    program = """
import gc, time, torch
gc.freeze()  # a collection would look through all of torch's objects
start = time.process_time()  # not the clock on the wall: other tests run beside this one
import flashkernels as fk
names = [getattr(fk, name) for name in fk.__all__]
print(time.process_time() - start)
"""
    assert min(float(python(program)) for _ in range(5)) < IMPORT_LIMIT


def test_attention_on_the_cpu_needs_neither_triton_nor_cuda() -> None:
    program = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.modules["triton"] = None
import torch
import flashkernels as fk
q, k, v = torch.randn(3, 2, 5, 4, 72)
out = fk.attention(q, k, v, causal=True)
print(tuple(out.shape), torch.cuda.is_available(), fk.detect())
"""
    assert python(program).strip() == "(2, 5, 4, 72) False None"


def test_every_public_name_resolves_and_is_listed() -> None:
    assert {*fk.__all__} <= {*dir(fk)}
    assert all(getattr(fk, name).__name__ == name for name in fk.__all__)
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        fk.atention  # noqa: B018


def test_type_checkers_see_every_public_name() -> None:
    for_checkers = re.search(r"if TYPE_CHECKING:\n(.*?)\n\n", inspect.getsource(fk), re.DOTALL)
    assert for_checkers and {*re.findall(r"(\w+) as \1\b", for_checkers[1])} == {*fk.__all__}


@pytest.mark.parametrize("module", ["attention", "attention.problem", "attention.api"])
def test_attention_is_a_function_whatever_was_imported_first(module: str) -> None:
    program = f"import flashkernels.{module}, types; print(type(flashkernels.attention) is types.FunctionType)"
    assert python(program).strip() == "True"


@pytest.mark.parametrize("module", ["api", "problem", "triton.forward"])
def test_every_form_of_import_reaches_the_modules_behind_the_function(module: str) -> None:
    program = f"""
import flashkernels as fk, pkgutil, torch
fk.attention(*torch.ones(3, 1, 1, 1, 1))
import flashkernels.attention.{module} as by_as
by_import = sys.modules["flashkernels.attention.{module}"]
print(by_as is by_import is pkgutil.resolve_name("flashkernels.attention.{module}"))
"""
    assert python(program).strip() == "True"


def test_attention_has_its_own_signature_help_and_pickle() -> None:
    assert list(inspect.signature(fk.attention).parameters)[:4] == ["q", "k", "v", "causal"]
    assert fk.attention.__name__ == "attention" and fk.attention.__doc__
    assert pickle.loads(pickle.dumps(fk.attention)) is fk.attention


def test_attention_compiles_by_its_public_name() -> None:
    q, k, v = torch.randn(3, 1, 4, 2, 8)
    compiled = torch.compile(lambda *qkv: fk.attention(*qkv) + 1, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), fk.attention(q, k, v) + 1)


def test_the_example_of_the_readme_runs() -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert example and "torch.Size([2, 1024, 16, 72])" in python(example[1])


def test_the_examples_of_the_readme_run_one_after_another() -> None:
    """All but the list of signatures and the program that wants a model."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    examples = [block for block in blocks if "*, causal" not in block and "decode_step" not in block]
    assert len(blocks) - len(examples) == 2
    python("\n".join(examples))
