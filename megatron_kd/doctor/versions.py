"""Versions, and the pairs of them that must fit."""

from __future__ import annotations

import importlib.util
import platform
import re
from dataclasses import dataclass
from importlib import metadata

from megatron_kd.device.probe import CudaState
from megatron_kd.doctor.check import Check, fail, not_needed, ok, warn
from megatron_kd.doctor.target import Target

SINKS_CUDNN = 91301
"""cuDNN 9.13.1, the first whose attention has learnable sinks."""
_INSTALL = "install with: pip install -c constraints.txt ."


@dataclass(frozen=True)
class Bounds:
    """The versions of a library that this one works with: ``lowest`` ≤ version < ``below``."""

    lowest: str
    below: str | None = None

    def hold(self, version: str) -> bool:
        """Whether a version lies within."""
        number = _number(version)
        return number >= _number(self.lowest) and (self.below is None or number < _number(self.below))

    def __str__(self) -> str:
        return f"≥ {self.lowest}" + (f", < {self.below}" if self.below else "")


REQUIRED = {
    "python": Bounds("3.12"),
    "torch": Bounds("2.11"),
    "megatron-core": Bounds("0.19.2", "0.20"),
    "transformers": Bounds("5.0"),
}
FOR_GPUS = ("transformer-engine", "apex", "triton", "cuda-driver", "cudnn")
TRANSFORMER_ENGINE = Bounds("2.14")


def installed() -> dict[str, str | None]:
    """The version of each library that is judged; None where it is not installed."""
    names = ("torch", "megatron-core", "transformers", "transformer-engine", "triton", "apex")
    versions: dict[str, str | None] = {name: _version(name) for name in names}
    # The images build these two from source, under names of their own.
    for name, module in (("transformer-engine", "transformer_engine"), ("apex", "apex")):
        if versions[name] is None and importlib.util.find_spec(module) is not None:
            versions[name] = "unknown"
    if versions["apex"] is not None and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        versions["apex"] = "without its CUDA extensions"
    return {"python": platform.python_version(), **versions}


def check_versions(versions: dict[str, str | None], cuda: CudaState, target: Target) -> list[Check]:
    """Judges what is installed against what this version and the target need."""
    checks = [_required(name, versions.get(name), bounds) for name, bounds in REQUIRED.items()]
    if not target.wants_gpu:
        return [*checks, *(not_needed(name, target.why_cpu) for name in FOR_GPUS)]
    return [
        *checks,
        _transformer_engine(versions.get("transformer-engine")),
        _apex(versions.get("apex")),
        _triton(versions.get("triton")),
        _cuda(cuda),
        _cudnn(cuda.cudnn, target.has_sinks),
    ]


def _required(name: str, version: str | None, bounds: Bounds) -> Check:
    if version is None:
        return fail(name, f"not installed, needed {bounds}", _INSTALL)
    if not bounds.hold(version):
        return fail(name, f"{version}, needed {bounds}", _INSTALL)
    return ok(name, version)


def _transformer_engine(version: str | None) -> Check:
    name = "transformer-engine"
    if version is None:
        return fail(
            name,
            f"not installed, needed {TRANSFORMER_ENGINE} on GPUs",
            "use the image of docs/containers.md, or pip install 'megatron-kd[gpu]'",
        )
    if version != "unknown" and not TRANSFORMER_ENGINE.hold(version):
        return fail(name, f"{version}, needed {TRANSFORMER_ENGINE}", "use the image of docs/containers.md")
    return ok(name, version)


def _apex(version: str | None) -> Check:
    if version == "without its CUDA extensions":
        return warn(
            "apex",
            version,
            "it may be the unrelated package of that name on PyPI: pip uninstall apex; the real one is in NGC images",
        )
    return ok("apex", version or "not installed, optional: weight gradients are added up without it")


def _triton(version: str | None) -> Check:
    if version is None:
        return warn("triton", "not installed: the losses run their eager passes, slower", "pip install triton")
    return ok("triton", version)


def _cuda(cuda: CudaState) -> Check:
    if cuda.built_for is None:
        return fail(
            "cuda-driver", "this torch is built for CPUs alone", "install a CUDA build of torch, or use the image"
        )
    if cuda.driver is None:
        return fail(
            "cuda-driver",
            f"torch is built for CUDA {cuda.built_for}, no driver is seen",
            "run on a GPU node; in a container start it with --gpus all",
        )
    driver = ".".join(map(str, cuda.driver))
    pair = f"torch for CUDA {cuda.built_for}, driver for up to {driver}"
    # Within one major version of CUDA an older driver runs what a newer toolkit built.
    if _number(cuda.built_for)[0] > cuda.driver[0]:
        return fail("cuda-driver", pair, "update the driver, or use a torch built for an older CUDA")
    if not cuda.available:
        return fail(
            "cuda-driver", f"{pair}, but torch finds no device", "compare CUDA_VISIBLE_DEVICES with nvidia-smi -L"
        )
    return ok("cuda-driver", pair)


def _cudnn(version: int | None, sinks: bool) -> Check:
    found = "none" if version is None else f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    if not sinks:
        return ok("cudnn", found)
    if version is None or version < SINKS_CUDNN:
        return fail("cudnn", f"{found}, attention sinks need ≥ 9.13.1", "use the image of docs/containers.md")
    return ok("cudnn", found)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _number(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; a pre-release or local build counts as its release."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version, maxsplit=1)[0]))
