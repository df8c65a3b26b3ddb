"""`flashkernels doctor`: is everything there that the kernels need, and if not, what to do about it.

Each check is a small function that returns a `Check`. A machine without a GPU is healthy: the CPU path serves there.
A check fails only where something is broken, and then the command's exit code is 1.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Status = Literal["ok", "warn", "fail"]

OLDEST_TORCH = (2, 10)
TRITON_RANGE = ((3, 6), (3, 9))
PATIENCE = 120.0  # seconds for one check: the first import of torch from a cold disk takes tens of them
LOW_SPACE = 2**30
CAP_SYS_ADMIN, CAP_PERFMON = 21, 38  # bits of CapEff, linux/capability.h
LIBCUDA = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
SHARED_FILES = Path("/dev/shm")
DRIVER_PARAMS = Path("/proc/driver/nvidia/params")
MEND = "mend the failures above; if there are none, report `flashkernels doctor --json` as an issue"
GET_TORCH = "choose a CUDA build of torch for this GPU at pytorch.org/get-started and reinstall torch"


@dataclass(frozen=True)
class Check:
    """What one check found; `fix` says in words what to do about a warning or a failure."""

    name: str  # the checking function's; `guarded` fills it in
    status: Status
    detail: str
    fix: str = ""


def ok(detail: str) -> Check:
    return Check("", "ok", detail)


def warn(detail: str, fix: str) -> Check:
    return Check("", "warn", detail, fix)


def fail(detail: str, fix: str) -> Check:
    return Check("", "fail", detail, fix)


# What the checks ask of the machine.


def gpus() -> list[Any]:
    """torch's properties of every NVIDIA GPU that it can use."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return []
    return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]


def capability(gpu: Any) -> tuple[int, int]:
    return gpu.major, gpu.minor


def sm(major: int, minor: int) -> str:
    return f"sm_{major}{minor}"


def fail_with_gpu(detail: str, fix: str) -> Check:
    """What only a GPU needs is broken where there is a GPU, and merely worth knowing where there is none."""
    return fail(detail, fix) if gpus() else warn(detail, fix)


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def serving_image(device: tuple[int, int], images: Iterable[str]) -> str | None:
    """The entry of torch's arch list that a GPU of this capability can run: machine code if any, else PTX, else None.

    Machine code (sm_XY) runs on the same major version from that minor upwards, and sm_XYf on its family likewise;
    sm_XYa runs on exactly that chip. PTX (compute_XY) is compiled by the driver for anything as new or newer.

    >>> serving_image((8, 9), ["sm_80", "sm_86", "sm_90"])
    'sm_86'
    >>> serving_image((12, 0), ["sm_90", "compute_90"])
    'compute_90'
    >>> serving_image((12, 0), ["sm_80", "sm_90"]) is None
    True
    """
    best: tuple[bool, tuple[int, int], str] | None = None
    for image in images:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", image)
        if not found:
            continue
        built, suffix, is_code = (int(found[2]), int(found[3])), found[4], found[1] == "sm"
        if suffix == "a":
            runs = built == device
        elif is_code or suffix == "f":
            runs = built[0] == device[0] and built[1] <= device[1]
        else:
            runs = built <= device
        if runs and (best is None or (is_code, built, image) > best):
            best = (is_code, built, image)
    return best[2] if best else None


# The checks, in the order in which they are shown.


def versions() -> Check:
    import torch

    from flashkernels import __version__

    detail = f"flashkernels {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    if release(torch.__version__) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return warn(f"{detail}; torch is older than {oldest}", f"install torch >= {oldest}")
    return ok(detail)


def gpu() -> Check:
    import torch

    found = gpus()
    if found:
        detail = "; ".join(
            f"{g.name}, {sm(*capability(g))}, {g.multi_processor_count} SMs, {g.total_memory / 2**30:.0f} GiB"
            for g in found
        )
        if min(map(capability, found)) < (8, 0):
            return warn(f"{detail}; the kernels need sm_80 or newer", "the torch implementation serves")
        return ok(detail)
    if not has_nvidia_gpu():
        return ok("no NVIDIA GPU: the CPU path serves")
    if torch.version.cuda is None:
        return warn("there is an NVIDIA GPU, but this torch is a build without CUDA", GET_TORCH)
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return warn("CUDA_VISIBLE_DEVICES hides the GPU: the CPU path serves", "unset the variable")
    try:
        torch.cuda.current_device()
        reason = "it lists no device"
    except Exception as error:
        reason = first_line(error)
    return fail(
        f"there is an NVIDIA GPU, but torch cannot use it: {reason}",
        "see that `nvidia-smi` works here (in Docker: start with --gpus all) and that torch's CUDA suits the driver",
    )


def has_nvidia_gpu() -> bool:
    """Whether the driver shows a GPU, whatever torch thinks. The second path is WSL2's."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/usr/lib/wsl/lib/libcuda.so.1").exists()


def torch_kernels() -> Check:
    """The "no kernel image is available" trap of GPUs that are newer than the torch build."""
    import torch

    found, images = gpus(), torch.cuda.get_arch_list()
    if not found:
        return ok(f"no GPU to compare with; torch was built for {' '.join(images) or 'the CPU'}")
    served = {sm(*capability(g)): serving_image(capability(g), images) for g in found}
    built = f"this torch was built for {' '.join(images) or 'no GPU'}"
    lost = [name for name, image in served.items() if image is None]
    if lost:
        return fail(
            f"{built}; none of that runs on {', '.join(lost)}, so torch's own operations stop with 'no kernel image "
            "is available for execution on the device'. Machine code (sm_XY) runs on the same major version from that "
            "minor upwards (a family build sm_XYf likewise, sm_XYa on that chip alone); only PTX (compute_XY) reaches "
            "newer majors",
            GET_TORCH,
        )
    by_ptx = [f"{name} through {image}" for name, image in served.items() if image and image.startswith("compute")]
    # Unlike machine code, PTX of a newer minor release is refused: the driver's compiler has to know its version.
    supports, wants = driver_cuda(), release(torch.version.cuda or "")
    if by_ptx and supports and supports < wants:
        return fail(
            f"{built}; {', '.join(by_ptx)} only: PTX of CUDA {wants[0]}.{wants[1]}, which a driver for "
            f"CUDA {supports[0]}.{supports[1]} cannot compile ('the provided PTX was compiled with an unsupported "
            "toolchain')",
            f"update the driver, or {GET_TORCH}",
        )
    if by_ptx:
        return warn(
            f"{built}; {', '.join(by_ptx)} only: PTX, which the driver compiles at first use (minutes, then cached)",
            GET_TORCH,
        )
    return ok(", ".join(f"{name} runs torch's {image}" for name, image in served.items()))


def driver() -> Check:
    import torch

    built = torch.version.cuda
    broken = fail if built and has_nvidia_gpu() else warn
    try:
        supports = driver_cuda()
    except OSError as error:
        return broken(first_line(error), "reinstall the NVIDIA driver")
    if supports is None:
        if has_nvidia_gpu():
            return broken(f"{LIBCUDA} cannot be loaded", "install the NVIDIA driver")
        return ok(f"no NVIDIA driver, none needed without a GPU; torch's CUDA: {built or 'none'}")
    detail = f"driver {module_version()} for CUDA {supports[0]}.{supports[1]}; torch's CUDA: {built or 'none'}"
    # Within a major version CUDA's minor releases run on any driver of that major version.
    if built and release(built)[0] > supports[0]:
        return broken(detail, f"update the driver to one for CUDA {built}, or {GET_TORCH}")
    return ok(detail)


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver serves, or None where there is no driver."""
    try:
        library = ctypes.CDLL(LIBCUDA)
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        raise OSError("cuDriverGetVersion fails")
    return number.value // 1000, number.value % 1000 // 10


def module_version() -> str:
    """The kernel module's version, "(unknown)" where there is none to read, as in WSL2."""
    try:
        found = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found[1] if found else "(unknown)"


def triton_version() -> Check:
    low, high = (".".join(map(str, v)) for v in TRITON_RANGE)
    try:
        import triton
    except Exception as error:
        return fail_with_gpu(
            f"import triton: {first_line(error)}",
            f"pip install 'triton>={low}' (Linux; without a GPU it is not needed)",
        )
    detail = f"triton {triton.__version__}"
    if not TRITON_RANGE[0] <= release(triton.__version__) <= TRITON_RANGE[1]:
        return warn(f"{detail} is outside the tested {low} to {high}", f"install triton {low} to {high}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return warn(f"{detail}, TRITON_INTERPRET=1: kernels are interpreted, slowly", "unset it")
    return ok(detail)


def ptxas() -> Check:
    """Whether Triton's assembler makes code for the GPUs here, or without one for every GPU of the table."""
    from flashkernels.hardware import GPUS

    try:
        from triton.backends.nvidia.compiler import get_ptxas
    except Exception as error:
        return fail_with_gpu(f"Triton's NVIDIA backend: {first_line(error)}", "reinstall triton")
    capabilities = sorted({capability(g) for g in gpus()} or {g.capability for g in GPUS.values()})
    good: list[str] = []
    bad: list[str] = []
    for major, minor in capabilities:
        tool = get_ptxas(major * 10 + minor)
        words = f"{sm(major, minor)} (ptxas {tool.version})"
        complaint = assembling(tool.path, sm(major, minor) + ("a" if major >= 9 else ""))
        if complaint:
            bad.append(f"{words}: {complaint}")
        else:
            good.append(words)
    if bad:
        return fail_with_gpu(f"no code for {', '.join(bad)}", "upgrade triton, or unset TRITON_PTXAS_PATH")
    return ok(f"makes code for {', '.join(good)}")


def assembling(tool: str, target: str) -> str:
    """Assembles an empty program with `tool`; returns its complaint, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.ptx")
        source.write_text(".version 7.0\n.target sm_80\n.address_size 64\n")
        return complaint_of([tool, f"--gpu-name={target}", str(source), "-o", str(Path(folder, "empty.cubin"))])


def c_compiler() -> Check:
    """Triton compiles a small C launcher at the first launch; that needs a compiler and Python's headers."""
    if sys.platform != "linux":
        return ok(f"not needed on {sys.platform}: the CPU path serves")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return fail_with_gpu(
            "neither CC nor gcc nor clang: Triton cannot build its launcher",
            "install gcc (Debian/Ubuntu: apt install gcc python3-dev)",
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\nint probe(void) { return 0; }\n")
        include = sysconfig.get_paths()["include"]
        complaint = complaint_of(
            [compiler, "-shared", "-fPIC", f"-I{include}", str(source), "-o", f"{folder}/probe.so"]
        )
    if complaint:
        return fail_with_gpu(
            f"{compiler} cannot build a Python extension: {complaint}",
            "install Python's headers (Debian/Ubuntu: apt install python3-dev) or set CC to a working compiler",
        )
    return ok(f"{compiler} builds a Python extension")


def nvrtc() -> Check:
    """The run-time compiler of the CUDA C++ kernels: found, and able to compile."""
    from flashkernels.jit.nvrtc import CompilerMissing, find

    try:
        compiler = find()
        targets = compiler.targets()
        compiler.run("empty.cu", "", {}, [f"--gpu-architecture=sm_{min(targets)}"])
    except CompilerMissing:
        return warn(
            "libnvrtc cannot be loaded: kernels written in CUDA C++ cannot be compiled here",
            "pip install nvidia-cuda-nvrtc (a CUDA build of torch brings it)",
        )
    except RuntimeError as error:
        complaint = last_line(str(error))
        return fail_with_gpu(f"NVRTC cannot compile an empty program: {complaint}", "reinstall nvidia-cuda-nvrtc")
    version = ".".join(map(str, compiler.version))
    detail = f"NVRTC {version} ({compiler.path}) compiles for sm_{min(targets)} to sm_{max(targets)}"
    strangers = sorted({sm(*capability(g)) for g in gpus()} - {f"sm_{target}" for target in targets})
    if strangers:
        return warn(f"{detail}, not for {', '.join(strangers)}", "install a newer nvidia-cuda-nvrtc")
    return ok(detail)


def shared_memory() -> Check:
    """The limit the tiles are cut to: what the device reports against the table."""
    from flashkernels.hardware import GPUS, from_properties

    found = gpus()
    if not found:
        return ok("no GPU to measure; tiles for a named GPU use the table")
    agrees = True
    parts = []
    for properties in found:
        real = from_properties(properties)
        row = GPUS.get(real.key)
        part = f"{real.name}: {real.shared_per_block} bytes a block"
        if not getattr(properties, "shared_memory_per_block_optin", 0):
            part += ", from the table: this torch does not report it"
        elif row is None:
            part += ", as the device reports it (not in the table)"
        elif row.shared_per_block != real.shared_per_block:
            agrees = False
            part += f", but the table says {row.shared_per_block}; the device's figure is used"
        else:
            part += ", as the table says"
        parts.append(part)
    detail = "; ".join(parts)
    return ok(detail) if agrees else warn(detail, "report this GPU as an issue")


def kernel_cache() -> Check:
    from flashkernels.aot import manifest
    from flashkernels.jit import cache

    if cache.sealed():
        try:
            found = manifest.read(cache.folder())
        except ValueError as error:
            return fail(str(error), "build it again with `flashkernels compile`")
        built = f"{len(found.files)} files for {', '.join(found.gpus)}"
        return ok(f"{cache.folder()}, built ahead: {built}; nothing is added to it")
    return takes_files(str(cache.folder()), "FLASHKERNELS_CACHE")


def environment() -> Check:
    """The variables of ours that are set, and those that could be."""
    from flashkernels.jit.environment import VARIABLES, cache_bytes, strict

    try:
        cache_bytes(), strict()
    except ValueError as error:
        return fail(str(error), "unset it, or correct it")
    given = [f"{variable.name}={variable.text()}" for variable in VARIABLES if variable.text()]
    others = [variable.name for variable in VARIABLES if not variable.text()]
    return ok("; ".join([", ".join(given) or "nothing is set", *([f"not set: {', '.join(others)}"] if others else [])]))


def precision() -> Check:
    """What fp32 products are computed in, unless a program says otherwise, and which formats the GPUs compute in."""
    import torch

    from flashkernels.hardware import from_properties

    words = {"highest": "fp32", "high": "TF32", "medium": "bf16"}
    default = words[torch.get_float32_matmul_precision()]
    found = [from_properties(properties) for properties in gpus()]
    formats = [f"{gpu.name} has {', '.join(gpu.peak)}" for gpu in found]
    detail = "; ".join([f"products of fp32 tensors are computed in {default}", *formats])
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return warn(f"{detail}; NVIDIA_TF32_OVERRIDE=0 forbids TF32, whatever a program sets", "unset it")
    if os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1":
        return warn(f"{detail}; TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 makes TF32 the default of every program", "unset it")
    return ok(detail)


def triton_cache() -> Check:
    default = os.path.join(os.environ.get("TRITON_HOME") or "~", ".triton", "cache")
    return takes_files(os.environ.get("TRITON_CACHE_DIR") or default, "TRITON_CACHE_DIR")


def takes_files(path: str, variable: str) -> Check:
    """Whether this folder, or the nearest of its parents that exists, takes a file; and the space left there."""
    folder = Path(path).expanduser().absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as error:
        return fail(f"{folder} is not writable: {error.strerror}", f"make it so, or set {variable} to one that is")
    free = shutil.disk_usage(existing).free
    detail = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < LOW_SPACE:
        return warn(detail, f"free some space, or set {variable} to a folder with more")
    return ok(detail)


def profiler() -> Check:
    """Whether ncu may read the GPU's counters (else it stops with ERR_NVGPUCTRPERM)."""
    try:
        restricted = re.search(r"^RmProfilingAdminOnly:\s*1", DRIVER_PARAMS.read_text(), re.MULTILINE) is not None
    except OSError:
        if "microsoft" in platform.release().lower() and gpus():
            return warn(
                "in WSL2 it is Windows that decides who may read the GPU's counters",
                "on ERR_NVGPUCTRPERM: NVIDIA Control Panel, Desktop: Enable Developer Settings, then Developer: "
                "Manage GPU Performance Counters: Allow access to all users",
            )
        return ok("no NVIDIA kernel driver to ask")
    if not restricted:
        return ok("every user may read the GPU's counters")
    if effective_capabilities() & (1 << CAP_SYS_ADMIN | 1 << CAP_PERFMON):
        return ok("the counters are for administrators, and this process is one")
    return warn(
        "the GPU's counters are for administrators: ncu stops with ERR_NVGPUCTRPERM; nothing else is affected",
        "Linux: write 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' to /etc/modprobe.d/nvidia-profiler.conf, "
        "run update-initramfs -u (or dracut -f) and reboot, or run ncu with sudo. Docker: start with "
        "--cap-add=SYS_ADMIN (driver 565 and newer: PERFMON is enough), or do the Linux step on the host",
    )


def limits() -> Check:
    """What a container keeps small unless told otherwise: memory that processes share, memory that may be locked."""
    if sys.platform != "linux":
        return ok(f"nothing to check on {sys.platform}")
    import resource

    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    words = "no limit" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:.1f} MiB"
    room = shutil.disk_usage(SHARED_FILES).total
    detail = f"{room / 2**30:.1f} GiB of {SHARED_FILES} for workers of a DataLoader; memory that may be locked: {words}"
    if room < LOW_SPACE:
        return warn(
            f"{detail}; workers that pass batches stop with a bus error when it is full",
            "Docker: start with --ipc=host, or --shm-size=8g",
        )
    return ok(detail)


def effective_capabilities() -> int:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 16) if found else 0


def implementations() -> Check:
    """Which implementation of attention a plain call gets here, and what the others say."""
    from flashkernels.attention.api import IMPLS
    from flashkernels.attention.problem import AttentionProblem
    from flashkernels.dispatch import verdicts
    from flashkernels.hardware import detect

    here = detect()
    problem = AttentionProblem(
        batch=1, seq_q=1024, seq_k=1024, heads=8, kv_heads=8, head_dim=72, causal=True, device="cuda" if here else "cpu"
    )
    answers = verdicts(IMPLS, problem, here)
    serving = [answer.name for answer in answers if answer.reason is None]
    words = f"attention, bf16, head_dim 72, causal, on {here.name if here else 'the CPU'}"
    refusals = [f"{answer.name}: {answer.reason}" for answer in answers if answer.reason is not None]
    if not serving:
        return fail("; ".join([f"{words}: nothing serves", *refusals]), MEND)
    others = f" ({', '.join(serving[1:])} on request)" if serving[1:] else ""
    detail = "; ".join([f"{words}: {serving[0]} serves{others}", *refusals])
    if here and here.capability >= (8, 0) and serving[0] == "torch":
        return warn(f"{detail}; the results are right but slow", "mend what the refusals name")
    return ok(detail)


def one_graph() -> Check:
    """Whether torch.compile takes a call of ours whole, with sizes that change."""
    import torch

    import flashkernels as fk

    def step(q: torch.Tensor) -> torch.Tensor:
        out: Any = fk.attention(q, q, q, causal=True)
        return out * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (16, 24):
        q = torch.randn(1, seq, 2, 8)
        off = (compiled(q) - step(q)).abs().max().item()
        if not off <= 1e-5:
            return fail(f"attention compiled by torch is off by {off:.1e}", MEND)
    return ok("torch.compile(fullgraph=True, dynamic=True) takes attention whole")


def live_test() -> Check:
    """One small attention against the reference in fp64. On a GPU it has a process of its own, which can be ended."""
    if not gpus():
        return verdict_of("attention on cpu", *smoke("cpu"))
    return on_gpu("attention on cuda", "smoke('cuda')")


def cuda_graph() -> Check:
    """One small attention captured in a CUDA graph and replayed on other numbers, against a plain call."""
    if not gpus():
        return ok("no GPU to capture on: fk.Graph calls its function as it is")
    return on_gpu("attention in a CUDA graph", "replayed()")


def on_gpu(what: str, call: str) -> Check:
    """The verdict on a function of this file that gives an error and the error allowed, run in a process of its own."""
    code = f"from flashkernels.cli.doctor import replayed, smoke; print('\\n', *{call})"
    limit = PATIENCE * 0.8  # less than the check's own time, so that a kernel that hangs is ended here
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return fail(f"{what} gives no answer in {limit:.0f} s", MEND)
    if done.returncode:
        return fail(f"{what} stops: {last_line(done.stderr)}", MEND)
    error, allowed = map(float, done.stdout.split()[-2:])
    return verdict_of(what, error, allowed)


def verdict_of(what: str, error: float, allowed: float) -> Check:
    detail = f"{what}: error {error:.1e}, allowed {allowed:.1e}"
    if error <= allowed:  # NaN is not
        return ok(detail)
    return fail(f"{detail}: the results are wrong", MEND)


def smoke(device: str) -> tuple[float, float]:
    """Error of one small fp16 attention against fp64, and the error allowed: twice what plain torch makes in fp16.

    Not bf16: Triton's interpreter, which may be the one to serve, computes that wrongly.
    """
    import torch

    import flashkernels as fk

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 128, 2, 72, generator=generator).to(device, torch.float16) for _ in range(3))
    truth: Any = fk.attention(q.double(), k.double(), v.double(), causal=True, impl="torch")
    ours: Any = fk.attention(q, k, v, causal=True)
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * q.shape[-1] ** -0.5
    hidden = torch.ones(128, 128, dtype=torch.bool, device=device).triu(1)
    plain = (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)
    return (ours - truth).abs().max().item(), 2 * (plain - truth).abs().max().item() + 1e-5


def replayed() -> tuple[float, float]:
    """Difference of a replayed attention to a plain call of the same numbers, and the difference allowed: none."""
    import torch

    import flashkernels as fk

    step = fk.Graph(lambda q: fk.attention(q, q, q, causal=True))
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(3):  # the first call captures, the others replay
        q = torch.randn(1, 128, 2, 72, generator=generator).to("cuda", torch.float16)
        plain: Any = fk.attention(q, q, q, causal=True)
        worst = max(worst, (step(q) - plain).abs().max().item())
    return worst, 0.0


CHECKS: Sequence[Callable[[], Check]] = (
    versions, gpu, torch_kernels, driver, triton_version, ptxas, c_compiler, nvrtc, shared_memory, environment,
    precision, kernel_cache, triton_cache, limits, profiler, implementations, one_graph, live_test, cuda_graph,
)  # fmt: skip


def guarded(check: Callable[[], Check], patience: float = PATIENCE) -> Check:
    """Runs a check that may raise or hang; either is a failed check, never the end of the command."""
    name = check.__name__.replace("_", " ")
    answers: list[Check] = []

    def ask() -> None:
        try:
            answers.append(check())
        except Exception as error:
            answers.append(fail(f"{type(error).__name__}: {first_line(error)}", MEND))

    # A daemon: a thread that hangs in a driver call does not keep the process alive.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    if not answers:
        return Check(name, "fail", f"no answer in {patience:.0f} s", "see whether `nvidia-smi` answers")
    return replace(answers[0], name=name)


def complaint_of(command: list[str]) -> str:
    """Runs a tool; returns the first line of its complaint, or nothing where it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return first_line(error)
    return (first_line(done.stderr) or f"exit code {done.returncode}") if done.returncode else ""


def first_line(text: object) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")


def last_line(text: str) -> str:
    return first_line("\n".join(reversed(text.splitlines())))


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False) -> None:
    """Check the machine: GPU, driver, torch, Triton, compilers, caches, profiler, and one live run."""
    checks = [guarded(check) for check in CHECKS]
    healthy = all(check.status != "fail" for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": healthy, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        show(checks)
    if not healthy:
        raise typer.Exit(1)


def show(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colour = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table("", "check", "what was found")
    for check in checks:
        found = Text(check.detail, overflow="fold")
        if check.fix:
            found.append(f"\n-> {check.fix}", style="bold")
        table.add_row(Text(check.status, style=colour[check.status]), check.name, found)
    console = Console()
    console.print(table)
    broken = [check.name for check in checks if check.status == "fail"]
    console.print(
        Text(f"broken: {', '.join(broken)}" if broken else "nothing is broken", style="red" if broken else "green")
    )
